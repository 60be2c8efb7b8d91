//! Clients and daemons that share ledgers in etcd, in a directory or in a bucket.
//!
//! They coordinate through the ledger, so the end of one process is not the end of a version.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_tests::dice::Dice;
use tssd_tests::etcd::Etcd;
use tssd_tests::host::Host;
use tssd_tests::s3::S3;

use super::clients::{CLIENTS, Clients};
use super::history::{Operation, now};
use super::home::Home;
use super::nemesis::{Faults, url};
use super::processes::Serve;
use super::proxy::Proxy;

/// Number of daemons and of etcd members.
const HOSTS: usize = 3;

/// Clients, daemons and servers that share ledgers.
pub(crate) struct Commons {
    url: String,
    daemons: Vec<(Serve, Proxy)>,
    servers: Servers,
    clients: Clients,
    _folder: TempDir,
}

/// Servers that store the ledgers.
enum Servers {
    Etcd(Etcd),
    Bucket(S3),
    /// The file system stores them.
    None,
}

impl Commons {
    pub(crate) fn new(home: Home) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let (servers, url) = match home {
            Home::Etcd => {
                let etcd = Etcd::start(HOSTS);
                let url = etcd.url();
                (Servers::Etcd(etcd), url)
            }
            Home::Bucket => {
                let server = S3::start(Host::default());
                let url = server.url();
                (Servers::Bucket(server), url)
            }
            Home::Daemon | Home::Directory => (Servers::None, root.display().to_string()),
        };
        let daemon = |host: usize| {
            let folder = folder.path().join(host.to_string());
            std::fs::create_dir(&folder).unwrap();
            let serve = Serve::start(&folder, "--meta", &url);
            let proxy = Proxy::before(serve.address);
            (serve, proxy)
        };
        let daemons: Vec<_> = match servers {
            Servers::Etcd(_) => (0..HOSTS).map(daemon).collect(),
            _ => Vec::new(),
        };
        let client_url = |slot| client_url(&daemons, &url, slot);
        let environment = match &servers {
            Servers::Bucket(server) => server.environment(),
            _ => Vec::new(),
        };
        let clients = Clients::start(home, environment, folder.path(), client_url);
        Self { url, daemons, servers, clients, _folder: folder }
    }

    /// Injects random faults during a time span.
    pub(crate) fn torment(&mut self, rng: &mut Dice, span: Duration) -> Faults {
        let mut faults = Faults::default();
        let until = Instant::now() + span;
        while Instant::now() < until {
            rng.pause(150);
            let slot = usize::try_from(rng.below(CLIENTS as u64)).unwrap();
            let host = slot % HOSTS;
            match rng.below(16) {
                0..4 => {
                    let url = client_url(&self.daemons, &self.url, slot);
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
                            rng.pause(150);
                            serve.process.signal(Signal::CONT);
                            faults.daemons_stopped += 1;
                        }
                        11..13 => {
                            proxy.delay(Duration::from_millis(1 + rng.below(20)));
                            rng.pause(150);
                            proxy.delay(Duration::ZERO);
                            faults.delays += 1;
                        }
                        _ => faults.connections_cut += proxy.cut(),
                    }
                }
            }
        }
        faults
    }

    /// Kills a server and starts it again. Returns the number of servers killed.
    fn kill_server(&mut self, host: usize, rng: &mut Dice) -> u64 {
        match &mut self.servers {
            Servers::Etcd(etcd) => {
                etcd.kill(host);
                rng.pause(500);
                etcd.launch(host);
                etcd.wait();
            }
            Servers::Bucket(server) => {
                server.kill();
                rng.pause(500);
                server.launch();
            }
            Servers::None => return 0,
        }
        1
    }

    /// Ends all processes. Returns all operations, and the time at which all processes had ended.
    pub(crate) fn end(mut self) -> (Vec<Operation>, Vec<u64>) {
        self.clients.end();
        self.daemons.clear();
        (self.clients.operations(), vec![now()])
    }
}

/// Returns the address of the store for the client in a slot: that of a daemon, if there are any.
fn client_url(daemons: &[(Serve, Proxy)], shared: &str, slot: usize) -> String {
    match daemons.get(slot % HOSTS) {
        Some((serve, proxy)) => url(serve, proxy, slot),
        None => shared.to_owned(),
    }
}
