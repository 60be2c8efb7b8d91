//! The runs whose processes are connected to this daemon, or to a daemon that shares its ledgers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::control::RunDirectory;
use crate::daemon::peers;
use crate::daemon::remote_blobs::RemoteBlobIndex;
use crate::error::Result;
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, timeout};
use crate::ledger::{RunId, RunProcess, RunStatus};
use crate::metadata::SharedLedgers;
use crate::net::tls::Endpoint;
use crate::shm::PeerId;

/// Maximum number of runs that are remembered for a connection.
pub(crate) const MAX_RUNS_PER_PEER: usize = 1024;

/// The runs that have put through connections which are open.
#[derive(Default)]
pub(crate) struct ConnectedRuns(Lock<BTreeMap<PeerId, BTreeMap<RunId, RunProcess>>>);

impl ConnectedRuns {
    /// Records that a process puts through the connection of a peer.
    pub(crate) fn add(&self, peer: PeerId, process: RunProcess) {
        let mut peers = self.0.lock();
        let runs = peers.entry(peer).or_default();
        if runs.len() >= MAX_RUNS_PER_PEER && !runs.contains_key(&process.run) {
            runs.pop_first();
        }
        runs.insert(process.run.clone(), process);
    }

    /// Records that the processes of a run have disconnected from a peer, which is a daemon.
    pub(crate) fn remove(&self, peer: PeerId, run: &RunId) {
        if let Some(runs) = self.0.lock().get_mut(&peer) {
            runs.remove(run);
        }
    }

    /// Removes the connection of a peer. Returns the runs that have no other connection.
    pub(crate) fn remove_peer(&self, peer: PeerId) -> Vec<RunId> {
        let mut peers = self.0.lock();
        let runs = peers.remove(&peer).unwrap_or_default().into_keys();
        runs.filter(|run| peers.values().all(|runs| !runs.contains_key(run))).collect()
    }

    /// Returns the connected processes, one for each connection and run.
    pub(crate) fn processes(&self) -> Vec<RunProcess> {
        self.0.lock().values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Returns whether a process of a run is connected.
    pub(crate) fn find(&self, run: &RunId) -> RunStatus {
        let process = self.0.lock().values().find_map(|runs| runs.get(run).cloned());
        process.map_or(RunStatus::Disconnected, RunStatus::Connected)
    }
}

/// A daemon with ledgers of its own: every process that puts is connected to it.
#[async_trait]
impl RunDirectory for ConnectedRuns {
    async fn status(&self, run: &RunId) -> Result<RunStatus> {
        Ok(self.find(run))
    }
}

/// Timeout of the answer of another daemon.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The runs of all daemons that share their ledgers.
pub(crate) struct SharedRuns {
    pub(crate) own: Arc<ConnectedRuns>,
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
            let (connections, run) = (self.remote_blobs.connections(&endpoint), run.clone());
            let ask = run_blocking(move || connections.run_status(&run));
            let asked = tokio::spawn(timeout(ANSWER_TIMEOUT, ask));
            answers.push((session, endpoint, asked));
        }
        for (session, endpoint, asked) in answers {
            let no_answer = |_| {
                let text = format_args!("it has not answered for {ANSWER_TIMEOUT:?}");
                Err(endpoint.unreachable(&text))
            };
            match asked.await.expect("a request does not panic").unwrap_or_else(no_answer) {
                Ok(RunStatus::Connected(process)) => return Ok(RunStatus::Connected(process)),
                Ok(RunStatus::Disconnected | RunStatus::Unknown) => {}
                // A daemon that has ended has no connections.
                Err(error) if self.ledgers.session_record(session).await?.is_some() => {
                    return Err(error);
                }
                Err(_) => {}
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
        for number in 0..=MAX_RUNS_PER_PEER {
            runs.add(3, process(&format!("d{number}"), 12));
        }
        assert_eq!(runs.processes().len(), MAX_RUNS_PER_PEER);
    }
}
