//! Clients and daemons that share ledgers in etcd, in a directory or in a bucket.
//!
//! They coordinate through the ledger, so the end of one process is not the end of a version.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_tests::etcd::Etcd;
use tssd_tests::host::Host;
use tssd_tests::rng::SeededRng;
use tssd_tests::s3::S3Server;

use super::clients::{CLIENTS, Clients};
use super::history::{Operation, monotonic_nanos};
use super::nemesis::{FaultCounts, client_url};
use super::processes::LinearDaemon;
use super::proxy::Proxy;
use crate::linearizability::ledger_storage::LedgerStorage;

/// Number of daemons and of etcd members.
const HOSTS: usize = 3;

/// Minimum time between two kills of the bucket's server. Its restart takes seconds, in which no put
/// succeeds.
const BUCKET_UPTIME: Duration = Duration::from_secs(4);

/// Clients, daemons and servers that share ledgers.
pub(crate) struct SharedSetup {
    home: LedgerStorage,
    url: String,
    daemons: Vec<(LinearDaemon, Proxy)>,
    servers: Servers,
    clients: Clients,
    _folder: TempDir,
}

/// Servers that store the ledgers.
enum Servers {
    Etcd(Etcd),
    /// The server may be killed again at `next_kill`.
    Bucket {
        server: S3Server,
        next_kill: Instant,
    },
    /// The file system stores them.
    None,
}

impl SharedSetup {
    pub(crate) fn new(home: LedgerStorage) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let (servers, url) = match home {
            LedgerStorage::Etcd => {
                let etcd = Etcd::start(HOSTS);
                let url = etcd.url();
                (Servers::Etcd(etcd), url)
            }
            LedgerStorage::Bucket => {
                let server = S3Server::start(Host::default());
                let url = server.url();
                (Servers::Bucket { server, next_kill: Instant::now() + BUCKET_UPTIME }, url)
            }
            LedgerStorage::Daemon | LedgerStorage::Directory => {
                (Servers::None, root.display().to_string())
            }
        };
        let daemon = |host: usize| {
            let folder = folder.path().join(host.to_string());
            std::fs::create_dir(&folder).unwrap();
            let serve = LinearDaemon::start(&folder, "--meta", &url);
            let proxy = Proxy::listen_tcp(serve.address);
            (serve, proxy)
        };
        let daemons: Vec<_> = match servers {
            Servers::Etcd(_) => (0..HOSTS).map(daemon).collect(),
            _ => Vec::new(),
        };
        let client_url = |slot| url_of_client(&daemons, &url, slot);
        let environment = match &servers {
            Servers::Bucket { server, .. } => server.environment(),
            _ => Vec::new(),
        };
        let clients = Clients::start(home, environment, folder.path(), client_url);
        Self { home, url, daemons, servers, clients, _folder: folder }
    }

    /// Injects random faults for one round.
    pub(crate) fn inject_faults(&mut self, rng: &mut SeededRng) -> FaultCounts {
        let mut faults = FaultCounts::default();
        let until = Instant::now() + self.home.round_duration();
        while Instant::now() < until {
            rng.sleep_below(self.home.max_fault_interval());
            let slot = usize::try_from(rng.below(CLIENTS as u64)).unwrap();
            let host = slot % HOSTS;
            match rng.below(16) {
                0..4 => {
                    let url = url_of_client(&self.daemons, &self.url, slot);
                    self.clients.kill(slot, url);
                    faults.clients_killed += 1;
                }
                4..7 => {
                    self.clients.stop(slot, rng);
                    faults.clients_stopped += 1;
                }
                7 => faults.servers_killed += self.kill_server(host, rng),
                fault => {
                    let Some((serve, proxy)) = self.daemons.get(host) else { continue };
                    match fault {
                        8..11 => {
                            serve.process.signal(Signal::STOP);
                            rng.sleep_below(150);
                            serve.process.signal(Signal::CONT);
                            faults.daemons_stopped += 1;
                        }
                        11..13 => {
                            proxy.set_delay(Duration::from_millis(1 + rng.below(20)));
                            rng.sleep_below(150);
                            proxy.set_delay(Duration::ZERO);
                            faults.delays += 1;
                        }
                        _ => faults.connections_cut += proxy.cut_all(),
                    }
                }
            }
        }
        faults
    }

    /// Kills a server and starts it again, unless it was killed recently. Returns the number of servers killed.
    fn kill_server(&mut self, host: usize, rng: &mut SeededRng) -> u64 {
        match &mut self.servers {
            Servers::Etcd(etcd) => {
                etcd.kill_member(host);
                rng.sleep_below(500);
                etcd.start_member(host);
                etcd.wait();
            }
            Servers::Bucket { next_kill, .. } if Instant::now() < *next_kill => return 0,
            Servers::Bucket { server, next_kill } => {
                server.kill();
                rng.sleep_below(500);
                server.restart();
                *next_kill = Instant::now() + BUCKET_UPTIME;
            }
            Servers::None => return 0,
        }
        1
    }

    /// Ends all processes. Returns all operations, and the time at which all processes had ended.
    pub(crate) fn finish(mut self) -> (Vec<Operation>, Vec<u64>) {
        self.clients.kill_all();
        self.daemons.clear();
        (self.clients.operations(), vec![monotonic_nanos()])
    }
}

/// Returns the address of the store for the client in a slot: that of a daemon, if there are any.
fn url_of_client(daemons: &[(LinearDaemon, Proxy)], shared: &str, slot: usize) -> String {
    match daemons.get(slot % HOSTS) {
        Some((serve, proxy)) => client_url(serve, proxy, slot),
        None => shared.to_owned(),
    }
}
