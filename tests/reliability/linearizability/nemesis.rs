//! Faults of a daemon and its clients: kills, stops, delays and cut connections.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_tests::resource_growth::ResourceGrowth;
use tssd_tests::rng::SeededRng;

use super::clients::{CLIENTS, Clients};
use super::history::{Operation, monotonic_nanos};
use super::processes::LinearDaemon;
use super::proxy::Proxy;
use crate::linearizability::keys::set_retention;
use crate::linearizability::ledger_storage::LedgerStorage;

/// Counts of injected faults.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FaultCounts {
    pub(crate) clients_killed: u64,
    pub(crate) daemons_killed: u64,
    pub(crate) servers_killed: u64,
    pub(crate) clients_stopped: u64,
    pub(crate) daemons_stopped: u64,
    pub(crate) connections_cut: u64,
    pub(crate) delays: u64,
}

/// A daemon with a directory, and its clients. They use the socket and the proxy alternately.
pub(crate) struct DaemonSetup {
    folder: TempDir,
    daemon: Option<LinearDaemon>,
    proxy: Proxy,
    clients: Clients,
    /// Times at which daemons had ended.
    daemon_ends: Vec<u64>,
}

impl DaemonSetup {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("root")).unwrap();
        let daemon = LinearDaemon::with_root(&folder.path().join("root"));
        set_retention(&daemon.connect()).unwrap();
        let proxy = Proxy::listen_tcp(daemon.address);
        let url = |slot| client_url(&daemon, &proxy, slot);
        let clients = Clients::start(LedgerStorage::Daemon, Vec::new(), folder.path(), url);
        Self { folder, daemon: Some(daemon), proxy, clients, daemon_ends: Vec::new() }
    }

    fn daemon(&self) -> &LinearDaemon {
        self.daemon.as_ref().unwrap()
    }

    /// Injects random faults for one round.
    ///
    /// Without `kills` no process is killed. A killed client leaves labels on its versions, and the
    /// daemon grows with them.
    pub(crate) fn inject_faults(
        &mut self,
        rng: &mut SeededRng,
        kills: bool,
        growth: &mut ResourceGrowth,
    ) -> FaultCounts {
        let mut faults = FaultCounts::default();
        let until = Instant::now() + LedgerStorage::Daemon.round_duration();
        growth.start_process();
        while Instant::now() < until {
            rng.sleep_below(LedgerStorage::Daemon.max_fault_interval());
            growth.sample(self.daemon().process.id());
            let slot = usize::try_from(rng.below(CLIENTS as u64)).unwrap();
            match rng.below(16) {
                0..4 if kills => {
                    let url = client_url(self.daemon(), &self.proxy, slot);
                    self.clients.kill(slot, url);
                    faults.clients_killed += 1;
                }
                4..7 => {
                    self.clients.stop(slot, rng);
                    faults.clients_stopped += 1;
                }
                7..9 => {
                    self.daemon().process.signal(Signal::STOP);
                    rng.sleep_below(150);
                    self.daemon().process.signal(Signal::CONT);
                    faults.daemons_stopped += 1;
                }
                9 if kills => {
                    self.restart_daemon();
                    growth.start_process();
                    faults.daemons_killed += 1;
                }
                10..13 => {
                    self.proxy.set_delay(Duration::from_millis(1 + rng.below(20)));
                    rng.sleep_below(150);
                    self.proxy.set_delay(Duration::ZERO);
                    faults.delays += 1;
                }
                _ => faults.connections_cut += self.proxy.cut_all(),
            }
        }
        faults
    }

    fn restart_daemon(&mut self) {
        self.kill_daemon();
        let daemon = LinearDaemon::with_root(&self.folder.path().join("root"));
        self.proxy.set_upstream(daemon.address);
        // Connections that were made meanwhile have reached no daemon.
        self.proxy.cut_all();
        self.daemon = Some(daemon);
    }

    fn kill_daemon(&mut self) {
        drop(self.daemon.take());
        self.daemon_ends.push(monotonic_nanos());
    }

    /// Ends all processes. Returns all operations, and the times at which daemons had ended.
    pub(crate) fn finish(mut self) -> (Vec<Operation>, Vec<u64>) {
        self.clients.kill_all();
        self.kill_daemon();
        (self.clients.operations(), self.daemon_ends)
    }
}

/// Returns the address of the daemon for the client in a slot.
pub(crate) fn client_url(daemon: &LinearDaemon, proxy: &Proxy, slot: usize) -> String {
    if slot % 2 == 1 { proxy.url() } else { daemon.url() }
}
