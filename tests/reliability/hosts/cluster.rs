//! Hosts that share etcd and a bucket, those who write and read there, and what befalls them.

use std::fmt::Display;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tssd_store::blocking::Store;
use tssd_store::{Credentials, Durability, ErrorKind, GetOptions, Key};
use tssd_tests::authority::Authority;
use tssd_tests::command::Serve;
use tssd_tests::dice::Dice;
use tssd_tests::etcd::Etcd;
use tssd_tests::host::Host;
use tssd_tests::network::{Network, Trouble};
use tssd_tests::s3::S3;

use crate::acknowledged::Acknowledged;
use crate::actor::{Actor, KEYS, Pace, WRITERS, check, complaints};

/// Hosts with a daemon and a member of etcd. The next one has the bucket.
pub(super) const HOSTS: usize = 3;

/// How many versions of a key are kept.
const KEEP: u64 = 3;

/// For how many milliseconds most faults last at most, and others: longer than sessions live.
const SHORT: u64 = 2000;
const LONG: u64 = 14_000;

/// That of the actors: the bucket's server is a slow one.
const PACE: Pace = Pace { rest: Duration::from_millis(100), timeout: Duration::from_secs(30) };

/// How long everybody has to go on.
const PATIENCE: Duration = Duration::from_mins(2);

/// What has no host any more ends in this order.
pub(super) struct Cluster {
    daemons: Vec<Option<Serve>>,
    etcd: Etcd,
    bucket: S3,
    credentials: Vec<Credentials>,
    hosts: Vec<Host>,
    folders: Vec<TempDir>,
    network: Network,
    _authority: Authority,
}

impl Cluster {
    pub(super) fn new(network: Network) -> Self {
        let (authority, mut hosts) = (Authority::new(), network.hosts());
        let bucket = S3::start(hosts.pop().unwrap());
        let issue = |host: usize| {
            let address = hosts[host].address.to_string();
            authority.issue(&format!("host{host}"), &address, |_| {})
        };
        let mut cluster = Self {
            daemons: (0..HOSTS).map(|_| None).collect(),
            etcd: Etcd::on(&hosts),
            bucket,
            credentials: (0..hosts.len()).map(issue).collect(),
            hosts,
            folders: (0..HOSTS).map(|_| tempfile::tempdir().unwrap()).collect(),
            network,
            _authority: authority,
        };
        (0..HOSTS).for_each(|host| cluster.launch_daemon(host));
        cluster
    }

    pub(super) fn launch_daemon(&mut self, host: usize) {
        let mut by = self.hosts[host].enter();
        by.push("env".to_owned());
        let environment = self.bucket.environment().into_iter();
        by.extend(environment.map(|(name, value)| format!("{name}={value}")));
        let by: Vec<&str> = by.iter().map(String::as_str).collect();
        let Credentials { ca, cert, key } = &self.credentials[host];
        let [ca, cert, key] = [ca, cert, key].map(|path| path.to_str().unwrap());
        let (meta, bucket, keep) = (self.etcd.url(), self.bucket.url(), KEEP.to_string());
        let listen = format!("{}:7000", self.hosts[host].address);
        let arguments = [
            ["--meta", &meta],
            ["--bucket", &bucket],
            ["--listen", &listen],
            ["--client-ca", ca],
            ["--cert", cert],
            ["--key", key],
            ["--keep", &keep],
            ["--memory-limit", "512MB"],
        ];
        let daemon = Serve::under(&by, self.folders[host].path(), arguments.as_flattened());
        self.daemons[host] = Some(daemon);
    }

    pub(super) fn kill_daemon(&mut self, host: usize) {
        self.daemons[host] = None;
    }

    fn url(&self, host: usize) -> &str {
        &self.daemons[host].as_ref().unwrap().url
    }

    /// A store at the socket of a host.
    pub(super) fn connect(&self, host: usize) -> Store {
        Store::connect(self.url(host)).unwrap()
    }

    /// Something befalls somebody for a while; when it is over all is there, and everybody goes on. Says what it was.
    pub(super) fn round(&mut self, load: &mut Load, dice: &mut Dice) -> String {
        sleep(Duration::from_millis(dice.below(500)));
        let fault = Fault::any(dice);
        let most = if dice.hits(3) { LONG } else { SHORT };
        let lasts = Duration::from_millis(dice.below(most));
        self.begin(fault, load);
        sleep(lasts);
        self.end(fault, load);
        let over = load.acknowledged();
        load.goes_on(&over, &format!("{fault:?} for {lasts:?}"));
        for host in 0..HOSTS {
            self.check(host, &over);
        }
        fault.name().to_owned()
    }

    fn begin(&mut self, fault: Fault, load: &mut Load) {
        match fault {
            Fault::Daemon(host) => self.kill_daemon(host),
            Fault::Member(host) => self.etcd.kill(host),
            Fault::Bucket => self.bucket.kill(),
            Fault::Host(host) => {
                self.kill_daemon(host);
                self.etcd.kill(host);
                load.kill(host);
            }
            Fault::Network(host, trouble) => self.network.trouble(host, trouble),
        }
    }

    fn end(&mut self, fault: Fault, load: &mut Load) {
        match fault {
            Fault::Daemon(host) => self.launch_daemon(host),
            Fault::Member(host) => self.etcd.launch(host),
            Fault::Bucket => self.bucket.launch(),
            Fault::Host(host) => {
                self.etcd.launch(host);
                self.launch_daemon(host);
                load.enter(host, self.url(host));
            }
            Fault::Network(host, _) => self.network.heal(host),
        }
    }

    /// On a host is what is durable, or as many as are kept of newer ones; all that is visible is whole.
    fn check(&self, host: usize, acknowledged: &Acknowledged) {
        let store = self.connect(host);
        for name in KEYS {
            let key = Key::new(name).unwrap();
            let versions = reached(|| store.versions(&key));
            let numbers: Vec<u64> = versions.iter().map(|info| info.number).collect();
            let lost = acknowledged.lost(name, &numbers, KEEP);
            assert!(
                lost.is_empty(),
                "versions {lost:?} of {name} were acknowledged, and host {host} has {numbers:?}"
            );
            for info in versions {
                let options = GetOptions { version: Some(info.number), ..GetOptions::default() };
                let got = reached(|| match store.get_state_dict(&key, &options) {
                    // A newer one has replaced it meanwhile, or a host was lost that had it alone.
                    Err(error) if is_gone(error.kind()) => Ok(None),
                    got => got.map(Some),
                });
                if let Some((dict, _)) = got {
                    check(&key, &info, &dict);
                }
            }
        }
    }

    /// Nothing is left of the hosts, nor of what they had in etcd: in the bucket is what was durable.
    pub(super) fn outlive(mut self, acknowledged: &Acknowledged) {
        (0..HOSTS).for_each(|host| self.kill_daemon(host));
        (0..HOSTS).for_each(|member| self.etcd.kill(member));
        self.etcd = Etcd::on(&self.hosts);
        self.launch_daemon(0);
        self.check(0, acknowledged);
    }
}

fn is_gone(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::Overtaken)
}

/// Asks until somebody is there who answers.
fn reached<T>(ask: impl Fn() -> tssd_store::Result<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        match ask() {
            Err(error) if error.kind() == ErrorKind::Unreachable && Instant::now() < until => {}
            answer => return answer.unwrap(),
        }
        sleep(Duration::from_millis(50));
    }
}

/// What befalls somebody.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A daemon is killed.
    Daemon(usize),
    /// A member of etcd is killed.
    Member(usize),
    /// The server of the bucket is killed.
    Bucket,
    /// Everybody on a host is killed.
    Host(usize),
    Network(usize, Trouble),
}

impl Fault {
    fn any(dice: &mut Dice) -> Self {
        let mut below = |count: usize| usize::try_from(dice.below(count as u64)).unwrap();
        let host = below(HOSTS);
        match below(8) {
            0 | 1 => Self::Daemon(host),
            2 => Self::Member(host),
            3 => Self::Bucket,
            4 => Self::Host(host),
            _ => {
                let percent = u8::try_from(5 + below(40)).unwrap();
                let megabits = u32::try_from(2 + below(50)).unwrap();
                let troubles = [
                    Trouble::Cut,
                    Trouble::Deaf,
                    Trouble::Mute,
                    Trouble::Lossy(percent),
                    Trouble::Slow(megabits),
                ];
                // That of the bucket, too.
                Self::Network(below(HOSTS + 1), troubles[below(troubles.len())])
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Daemon(_) => "daemons killed",
            Self::Member(_) => "members of etcd killed",
            Self::Bucket => "buckets killed",
            Self::Host(_) => "hosts killed",
            Self::Network(HOSTS, _) => "buckets cut off",
            Self::Network(_, Trouble::Cut) => "hosts cut off",
            Self::Network(_, Trouble::Deaf | Trouble::Mute) => "hosts cut off one way",
            Self::Network(_, Trouble::Lossy(_)) => "hosts that lose packets",
            Self::Network(_, Trouble::Slow(_)) => "slow hosts",
        }
    }
}

/// Those who write and read on the hosts.
pub(super) struct Load {
    /// With the host that each is on.
    actors: Vec<(usize, Actor)>,
    folder: TempDir,
}

impl Load {
    pub(super) fn begin(cluster: &Cluster) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Acknowledged::begin(folder.path());
        let mut load = Self { actors: Vec::new(), folder };
        (0..HOSTS).for_each(|host| load.enter(host, cluster.url(host)));
        load
    }

    /// Those of a host start: of the writers, every second one is on each of the first two.
    fn enter(&mut self, host: usize, url: &str) {
        let folder = self.folder.path();
        let start = |role: &dyn Display| Actor::start(role, url, folder, Durability::Object, PACE);
        let writers = (0..WRITERS.len()).filter(|index| index % 2 == host);
        let writers = writers.map(|index| start(&format_args!("writer {index}")));
        let actors: Vec<_> = writers.chain([start(&format_args!("reader {host}"))]).collect();
        self.actors.extend(actors.into_iter().map(|actor| (host, actor)));
    }

    /// Those of a host are killed.
    fn kill(&mut self, host: usize) {
        self.actors.retain(|(there, _)| *there != host);
    }

    fn acknowledged(&self) -> Acknowledged {
        Acknowledged::read(self.folder.path())
    }

    /// Versions of every key come, and nobody has failed.
    fn goes_on(&mut self, before: &Acknowledged, after: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let now = self.acknowledged();
            let waiting: Vec<_> =
                KEYS.iter().filter(|name| now.count(name) <= before.count(name)).collect();
            if waiting.is_empty() {
                break;
            }
            assert!(
                Instant::now() < until,
                "after {after}: {waiting:?} does not go on:\n{}",
                complaints(self.folder.path())
            );
            for (host, actor) in &mut self.actors {
                assert!(actor.is_running(), "after {after}: an actor of host {host} has failed");
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// All are killed.
    pub(super) fn end(self) -> Acknowledged {
        let acknowledged = self.folder;
        drop(self.actors);
        Acknowledged::read(acknowledged.path())
    }
}
