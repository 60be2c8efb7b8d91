//! Clients, and daemons, that share ledgers: nobody decides for the others, and nobody's end is the end of a version.

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

/// How many daemons and members of etcd there are.
const HOSTS: usize = 3;

/// What they share, and all of them.
pub(crate) struct Commons {
    url: String,
    daemons: Vec<(Serve, Proxy)>,
    servers: Servers,
    clients: Clients,
    _folder: TempDir,
}

/// Whoever keeps the records.
enum Servers {
    Etcd(Etcd),
    Bucket(S3),
    /// The file system does.
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
        let at = |place| at(&daemons, &url, place);
        let environment = match &servers {
            Servers::Bucket(server) => server.environment(),
            _ => Vec::new(),
        };
        let clients = Clients::start(home, environment, folder.path(), at);
        Self { url, daemons, servers, clients, _folder: folder }
    }

    /// Does something to them for so long, every now and then.
    pub(crate) fn torment(&mut self, dice: &mut Dice, span: Duration) -> Faults {
        let mut faults = Faults::default();
        let until = Instant::now() + span;
        while Instant::now() < until {
            dice.pause(150);
            let place = usize::try_from(dice.below(CLIENTS as u64)).unwrap();
            let host = place % HOSTS;
            match dice.below(16) {
                0..4 => {
                    let url = at(&self.daemons, &self.url, place);
                    self.clients.kill(place, url);
                    faults.clients_killed += 1;
                }
                4..7 => {
                    self.clients.stop(place, dice);
                    faults.clients_stopped += 1;
                }
                7 => faults.servers_killed += self.kill_server(host, dice),
                what => {
                    let Some((serve, proxy)) = self.daemons.get(host) else { continue };
                    match what {
                        8..11 => {
                            serve.process.signal(Signal::STOP);
                            dice.pause(150);
                            serve.process.signal(Signal::CONT);
                            faults.daemons_stopped += 1;
                        }
                        11..13 => {
                            proxy.delay(Duration::from_millis(1 + dice.below(20)));
                            dice.pause(150);
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

    /// Kills a server, and starts it again; says how many that were.
    fn kill_server(&mut self, host: usize, dice: &mut Dice) -> u64 {
        match &mut self.servers {
            Servers::Etcd(etcd) => {
                etcd.kill(host);
                dice.pause(500);
                etcd.launch(host);
                etcd.wait();
            }
            Servers::Bucket(server) => {
                server.kill();
                dice.pause(500);
                server.launch();
            }
            Servers::None => return 0,
        }
        1
    }

    /// Ends everything; gives what was asked, and the moment at which it ended.
    pub(crate) fn end(mut self) -> (Vec<Operation>, Vec<u64>) {
        self.clients.end();
        self.daemons.clear();
        (self.clients.operations(), vec![now()])
    }
}

/// Where a client in a place finds the store: at a daemon, if there are any, near or far.
fn at(daemons: &[(Serve, Proxy)], shared: &str, place: usize) -> String {
    match daemons.get(place % HOSTS) {
        Some((serve, proxy)) => url(serve, proxy, place),
        None => shared.to_owned(),
    }
}
