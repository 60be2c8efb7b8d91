//! The runs whose processes are connected to this daemon, or to a daemon that shares its ledgers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use crate::control::RunDirectory;
use crate::daemon::peers;
use crate::daemon::remote_blobs::RemoteBlobIndex;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, timeout};
use crate::ledger::{RunId, RunProcess, RunStatus};
use crate::metadata::SharedLedgers;
use crate::net::tls::Endpoint;
use crate::shm::PeerId;

/// Maximum number of runs that are remembered for a connection.
pub(crate) const MAX_RUNS_PER_PEER: usize = 1024;

/// Time after the loss of the connection of a proxy daemon in which its runs count as connected perhaps.
///
/// A proxy daemon whose clients have runs connects again within [`RECONNECT_INTERVAL`].
const LOST_RUN_TTL: Duration = Duration::from_secs(15);

/// Interval at which a proxy daemon whose clients have runs ensures that its controller knows them.
pub(crate) const RECONNECT_INTERVAL: Duration = Duration::from_secs(3);

/// Timeout of the answer of another daemon.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The runs that have put through connections which are open.
#[derive(Default)]
pub(crate) struct ConnectedRuns(Lock<Inner>);

#[derive(Default)]
struct Inner {
    peers: BTreeMap<PeerId, BTreeMap<RunId, RunProcess>>,
    /// The peers that are proxy daemons.
    proxies: BTreeSet<PeerId>,
    /// The runs of proxy daemons whose connection was lost, and when.
    lost: BTreeMap<RunId, Instant>,
}

impl ConnectedRuns {
    /// Records that a peer is a proxy daemon: its connection is not that of the processes.
    pub(crate) fn mark_proxy(&self, peer: PeerId) {
        self.0.lock().proxies.insert(peer);
    }

    /// Records that a process puts through the connection of a peer.
    pub(crate) fn add(&self, peer: PeerId, process: RunProcess) {
        let inner = &mut *self.0.lock();
        inner.lost.remove(&process.run);
        let runs = inner.peers.entry(peer).or_default();
        if runs.len() >= MAX_RUNS_PER_PEER && !runs.contains_key(&process.run) {
            runs.pop_first();
        }
        runs.insert(process.run.clone(), process);
    }

    /// Records that the processes of a run have disconnected from a peer, which is a daemon.
    pub(crate) fn remove(&self, peer: PeerId, run: &RunId) {
        if let Some(runs) = self.0.lock().peers.get_mut(&peer) {
            runs.remove(run);
        }
    }

    /// Removes the connection of a peer. Returns the runs that have no other connection.
    pub(crate) fn remove_peer(&self, peer: PeerId) -> Vec<RunId> {
        let inner = &mut *self.0.lock();
        let runs = inner.peers.remove(&peer).unwrap_or_default().into_keys();
        let is_ended = |run: &RunId| inner.peers.values().all(|runs| !runs.contains_key(run));
        let ended: Vec<RunId> = runs.filter(is_ended).collect();
        if inner.proxies.remove(&peer) {
            let now = Instant::now();
            inner.lost.retain(|_, since| since.elapsed() < LOST_RUN_TTL);
            inner.lost.extend(ended.iter().map(|run| (run.clone(), now)));
        }
        ended
    }

    /// Returns whether no process that puts is connected.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().peers.values().all(BTreeMap::is_empty)
    }

    /// Returns the connected processes, one for each connection and run.
    pub(crate) fn processes(&self) -> Vec<RunProcess> {
        self.0.lock().peers.values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Returns whether a process of a run is connected.
    pub(crate) fn find(&self, run: &RunId) -> RunStatus {
        let inner = self.0.lock();
        let process = inner.peers.values().find_map(|runs| runs.get(run).cloned());
        process.map_or(RunStatus::Disconnected, RunStatus::Connected)
    }

    /// Returns whether the connection of a proxy daemon with this run was lost a short time ago.
    fn is_lost(&self, run: &RunId) -> bool {
        let inner = self.0.lock();
        inner.lost.get(run).is_some_and(|since| since.elapsed() < LOST_RUN_TTL)
    }
}

/// A daemon with ledgers of its own: every process that puts is connected to it.
#[async_trait]
impl RunDirectory for ConnectedRuns {
    async fn status(&self, run: &RunId) -> Result<RunStatus> {
        if self.is_lost(run) {
            let text = format_args!(
                "cannot find out whether run {run} still has a process: the connection to its daemon is lost"
            );
            return Err(Error::new(ErrorKind::Unreachable, text));
        }
        Ok(self.find(run))
    }
}

/// The runs of all daemons that share their ledgers.
pub(crate) struct SharedRuns {
    pub(crate) own: Arc<ConnectedRuns>,
    /// The address of this daemon, which it may be unable to reach itself.
    pub(crate) own_address: Endpoint,
    pub(crate) ledgers: SharedLedgers,
    pub(crate) remote_blobs: Arc<RemoteBlobIndex>,
}

#[async_trait]
impl RunDirectory for SharedRuns {
    /// Asks all daemons. A put asks only if it would take the numbers of another run again.
    async fn status(&self, run: &RunId) -> Result<RunStatus> {
        let local = self.own.find(run);
        if matches!(local, RunStatus::Connected(_)) {
            return Ok(local);
        }
        let mut answers = Vec::new();
        for (session, record) in self.ledgers.session_records().await? {
            let endpoint: Endpoint = peers::decode_session_record(session, &record)?.parse()?;
            if endpoint == self.own_address {
                continue;
            }
            let (connections, run) = (self.remote_blobs.connections(&endpoint), run.clone());
            let ask = run_blocking(move || connections.run_status(&run));
            let asked = tokio::spawn(timeout(ANSWER_TIMEOUT, ask));
            answers.push((session, endpoint, asked));
        }
        for (session, endpoint, asked) in answers {
            let no_answer = |_| {
                let text = format_args!("no answer within {ANSWER_TIMEOUT:?}");
                Err(Error::new(ErrorKind::Unreachable, text))
            };
            match asked.await.expect("a request does not panic").unwrap_or_else(no_answer) {
                Ok(RunStatus::Connected(process)) => return Ok(RunStatus::Connected(process)),
                Err(error) if self.ledgers.session_record(session).await?.is_some() => {
                    let text = format_args!(
                        "cannot find out whether run {run} still has a process at daemon {endpoint}: {error}"
                    );
                    return Err(Error::new(ErrorKind::Unreachable, text));
                }
                // A daemon that has ended has no connections.
                Ok(RunStatus::Disconnected | RunStatus::Unknown) | Err(_) => {}
            }
        }
        Ok(RunStatus::Disconnected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(run: &str, pid: u32) -> RunProcess {
        RunProcess { run: RunId(run.to_owned()), host: "host".to_owned(), pid }
    }

    #[test]
    fn run_is_connected_until_its_last_peer_is_removed() {
        let runs = ConnectedRuns::default();
        for (peer, pid) in [(1, 10), (2, 11)] {
            runs.add(peer, process("a", pid));
        }
        runs.add(2, process("b", 11));
        let a = RunId("a".to_owned());
        assert_eq!(runs.find(&a), RunStatus::Connected(process("a", 10)));
        assert_eq!(runs.remove_peer(1), []);
        assert_eq!(runs.find(&a), RunStatus::Connected(process("a", 11)));
        runs.remove(2, &a);
        assert_eq!(runs.find(&a), RunStatus::Disconnected);
        assert_eq!(runs.processes(), [process("b", 11)]);
        runs.add(3, process("c", 12));
        assert_eq!(runs.remove_peer(2), [RunId("b".to_owned())]);
        assert_eq!(runs.remove_peer(2), []);
        assert!(!runs.is_lost(&a), "its client has disconnected");
        runs.mark_proxy(4);
        runs.add(4, process("a", 10));
        assert_eq!(runs.remove_peer(4), [RunId("a".to_owned())]);
        assert!(runs.is_lost(&a), "its daemon has disconnected");
        runs.add(5, process("a", 10));
        assert!(!runs.is_lost(&a));
        for number in 0..=MAX_RUNS_PER_PEER {
            runs.add(3, process(&format!("d{number}"), 12));
        }
        assert_eq!(runs.processes().len(), MAX_RUNS_PER_PEER + 1);
    }
}
