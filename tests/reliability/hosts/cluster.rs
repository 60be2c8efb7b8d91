//! Hosts that share etcd and a bucket, their client processes, and the faults that are injected.

use std::fmt::Display;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tssd_store::blocking::Store;
use tssd_store::{Credentials, Durability, ErrorKind, GetOptions, Key};
use tssd_tests::certificates::CertificateAuthority;
use tssd_tests::command::DaemonProcess;
use tssd_tests::etcd::Etcd;
use tssd_tests::host::Host;
use tssd_tests::network::{Network, NetworkFault};
use tssd_tests::rng::SeededRng;
use tssd_tests::s3::S3Server;

use crate::ack_log::AckLog;
use crate::client_process::{ClientProcess, KEYS, Timing, WRITERS, check_version, last_errors};

/// Number of hosts with a daemon and an etcd member. The bucket is on the next one.
pub(super) const HOSTS: usize = 3;

/// Number of versions that are kept of a key.
const KEEP: u64 = 3;

/// Longest duration of most faults, and of the others, in milliseconds. The latter outlive sessions.
const SHORT_FAULT_MILLIS: u64 = 2000;
const LONG_FAULT_MILLIS: u64 = 14_000;

/// Timing of the client processes. The server of the bucket is slow.
const TIMING: Timing =
    Timing { pause: Duration::from_millis(100), timeout: Duration::from_secs(30) };

/// Time within which each key must get a new version.
const PROGRESS_TIMEOUT: Duration = Duration::from_mins(2);

/// Fields are dropped in this order: processes before their hosts.
pub(super) struct Cluster {
    daemons: Vec<Option<DaemonProcess>>,
    etcd: Etcd,
    bucket: S3Server,
    credentials: Vec<Credentials>,
    hosts: Vec<Host>,
    folders: Vec<TempDir>,
    network: Network,
    _authority: CertificateAuthority,
}

impl Cluster {
    pub(super) fn new(network: Network) -> Self {
        let (authority, mut hosts) = (CertificateAuthority::new(), network.hosts());
        let bucket = S3Server::start(hosts.pop().unwrap());
        let issue = |host: usize| {
            let address = hosts[host].address.to_string();
            authority.issue(&format!("host{host}"), &address, |_| {})
        };
        let mut cluster = Self {
            daemons: (0..HOSTS).map(|_| None).collect(),
            etcd: Etcd::on_hosts(&hosts),
            bucket,
            credentials: (0..hosts.len()).map(issue).collect(),
            hosts,
            folders: (0..HOSTS).map(|_| tempfile::tempdir().unwrap()).collect(),
            network,
            _authority: authority,
        };
        (0..HOSTS).for_each(|host| cluster.start_daemon(host));
        cluster
    }

    pub(super) fn start_daemon(&mut self, host: usize) {
        let mut prefix = self.hosts[host].command_prefix();
        prefix.push("env".to_owned());
        let environment = self.bucket.environment().into_iter();
        prefix.extend(environment.map(|(name, value)| format!("{name}={value}")));
        let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
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
        let daemon =
            DaemonProcess::start_by(&prefix, self.folders[host].path(), arguments.as_flattened());
        self.daemons[host] = Some(daemon);
    }

    pub(super) fn kill_daemon(&mut self, host: usize) {
        self.daemons[host] = None;
    }

    fn url(&self, host: usize) -> &str {
        &self.daemons[host].as_ref().unwrap().url
    }

    /// Connects to the daemon of a host, over its socket.
    pub(super) fn connect(&self, host: usize) -> Store {
        Store::connect(self.url(host)).unwrap()
    }

    /// Injects a fault for a while. Then waits for new versions and checks all. Returns the kind of fault.
    pub(super) fn run_round(
        &mut self,
        load: &mut Workload,
        kind: FaultKind,
        rng: &mut SeededRng,
    ) -> &'static str {
        sleep(Duration::from_millis(rng.below(500)));
        let fault = Fault::random(kind, rng);
        let longest_millis = if rng.one_in(3) { LONG_FAULT_MILLIS } else { SHORT_FAULT_MILLIS };
        let duration = Duration::from_millis(rng.below(longest_millis));
        self.inject(fault, load);
        sleep(duration);
        self.recover(fault, load);
        let acknowledged = load.acknowledged();
        load.wait_for_progress(&acknowledged, &format!("{fault:?} for {duration:?}"));
        for host in 0..HOSTS {
            self.check_versions(host, &acknowledged);
        }
        fault.name()
    }

    fn inject(&mut self, fault: Fault, load: &mut Workload) {
        match fault {
            Fault::Daemon(host) => self.kill_daemon(host),
            Fault::Member(host) => self.etcd.kill_member(host),
            Fault::Bucket => self.bucket.kill(),
            Fault::Host(host) => {
                self.kill_daemon(host);
                self.etcd.kill_member(host);
                load.kill(host);
            }
            Fault::Network(host, trouble) => self.network.inject(host, trouble),
        }
    }

    fn recover(&mut self, fault: Fault, load: &mut Workload) {
        match fault {
            Fault::Daemon(host) => self.start_daemon(host),
            Fault::Member(host) => self.etcd.start_member(host),
            Fault::Bucket => self.bucket.restart(),
            Fault::Host(host) => {
                self.etcd.start_member(host);
                self.start_daemon(host);
                load.start_clients(host, self.url(host));
            }
            Fault::Network(host, _) => self.network.heal(host),
        }
    }

    /// Checks on one host that no durable version is missing, and that visible versions are complete.
    fn check_versions(&self, host: usize, acknowledged: &AckLog) {
        let store = self.connect(host);
        for name in KEYS {
            let key = Key::new(name).unwrap();
            let versions = retry_unreachable(|| store.versions(&key));
            let numbers: Vec<u64> = versions.iter().map(|info| info.number).collect();
            let lost = acknowledged.missing_durable(name, &numbers, KEEP);
            assert!(
                lost.is_empty(),
                "versions {lost:?} of {name} were acknowledged, and host {host} has {numbers:?}"
            );
            for info in versions {
                let options = GetOptions { version: info.number.into(), ..GetOptions::default() };
                let outcome = retry_unreachable(|| match store.get_state_dict(&key, &options) {
                    // A newer version has replaced it, or the only host that had it was lost.
                    Err(error) if is_replaced(error.kind()) => Ok(None),
                    outcome => outcome.map(Some),
                });
                if let Some((dict, _)) = outcome {
                    check_version(&key, &info, &dict);
                }
            }
        }
    }

    /// Kills all hosts and loses etcd. Then checks that the bucket has all durable versions.
    pub(super) fn check_after_total_loss(mut self, acknowledged: &AckLog) {
        (0..HOSTS).for_each(|host| self.kill_daemon(host));
        (0..HOSTS).for_each(|member| self.etcd.kill_member(member));
        self.etcd = Etcd::on_hosts(&self.hosts);
        self.start_daemon(0);
        self.check_versions(0, acknowledged);
    }
}

fn is_replaced(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::Overtaken)
}

/// Retries a request until a daemon answers it.
fn retry_unreachable<T>(request: impl Fn() -> tssd_store::Result<T>) -> T {
    let until = Instant::now() + PROGRESS_TIMEOUT;
    loop {
        match request() {
            Err(error) if error.kind() == ErrorKind::Unreachable && Instant::now() < until => {}
            answer => return answer.unwrap(),
        }
        sleep(Duration::from_millis(50));
    }
}

/// A fault of the cluster.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A daemon is killed.
    Daemon(usize),
    /// An etcd member is killed.
    Member(usize),
    /// The server of the bucket is killed.
    Bucket,
    /// All processes on a host are killed.
    Host(usize),
    Network(usize, NetworkFault),
}

/// What a fault affects. A campaign has each kind equally often.
#[derive(Clone, Copy, Debug)]
pub(super) enum FaultKind {
    Daemon,
    Member,
    Bucket,
    Host,
    BucketNetwork,
    HostNetwork,
    OneWayNetwork,
    LossyNetwork,
    SlowNetwork,
}

impl FaultKind {
    pub(super) const ALL: [Self; 9] = [
        Self::Daemon,
        Self::Member,
        Self::Bucket,
        Self::Host,
        Self::BucketNetwork,
        Self::HostNetwork,
        Self::OneWayNetwork,
        Self::LossyNetwork,
        Self::SlowNetwork,
    ];
}

impl Fault {
    /// Returns a fault of a kind, at a random host and of a random severity.
    fn random(kind: FaultKind, rng: &mut SeededRng) -> Self {
        let mut below = |count: usize| usize::try_from(rng.below(count as u64)).unwrap();
        let host = below(HOSTS);
        let lossy = NetworkFault::Lossy(u8::try_from(5 + below(40)).unwrap());
        let slow = NetworkFault::RateLimited(u32::try_from(2 + below(50)).unwrap());
        let one_way = [NetworkFault::DropIncoming, NetworkFault::DropOutgoing][below(2)];
        match kind {
            FaultKind::Daemon => Self::Daemon(host),
            FaultKind::Member => Self::Member(host),
            FaultKind::Bucket => Self::Bucket,
            FaultKind::Host => Self::Host(host),
            // The network of the host of the bucket can have any fault.
            FaultKind::BucketNetwork => {
                let all = [NetworkFault::DropAll, one_way, lossy, slow];
                Self::Network(HOSTS, all[below(all.len())])
            }
            FaultKind::HostNetwork => Self::Network(host, NetworkFault::DropAll),
            FaultKind::OneWayNetwork => Self::Network(host, one_way),
            FaultKind::LossyNetwork => Self::Network(host, lossy),
            FaultKind::SlowNetwork => Self::Network(host, slow),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Daemon(_) => "daemons killed",
            Self::Member(_) => "members of etcd killed",
            Self::Bucket => "buckets killed",
            Self::Host(_) => "hosts killed",
            Self::Network(HOSTS, _) => "buckets with network faults",
            Self::Network(_, NetworkFault::DropAll) => "hosts cut off",
            Self::Network(_, NetworkFault::DropIncoming | NetworkFault::DropOutgoing) => {
                "hosts cut off one way"
            }
            Self::Network(_, NetworkFault::Lossy(_)) => "hosts that lose packets",
            Self::Network(_, NetworkFault::RateLimited(_)) => "slow hosts",
        }
    }
}

/// Client processes on the hosts.
pub(super) struct Workload {
    /// Processes with the host that they run on.
    actors: Vec<(usize, ClientProcess)>,
    folder: TempDir,
}

impl Workload {
    pub(super) fn start(cluster: &Cluster) -> Self {
        let folder = tempfile::tempdir().unwrap();
        AckLog::create(folder.path());
        let mut load = Self { actors: Vec::new(), folder };
        (0..HOSTS).for_each(|host| load.start_clients(host, cluster.url(host)));
        load
    }

    /// Starts the clients of a host. Hosts 0 and 1 have every second writer each.
    fn start_clients(&mut self, host: usize, url: &str) {
        let folder = self.folder.path();
        let start = |role: &dyn Display| {
            ClientProcess::start(role, url, folder, Durability::Object, TIMING)
        };
        let writers = (0..WRITERS.len()).filter(|index| index % 2 == host);
        let writers = writers.map(|index| start(&format_args!("writer {index}")));
        let actors: Vec<_> = writers.chain([start(&format_args!("reader {host}"))]).collect();
        self.actors.extend(actors.into_iter().map(|actor| (host, actor)));
    }

    /// Kills the clients of a host.
    fn kill(&mut self, host: usize) {
        self.actors.retain(|(other, _)| *other != host);
    }

    fn acknowledged(&self) -> AckLog {
        AckLog::read(self.folder.path())
    }

    /// Waits until each key has a new version. Fails if a client process has ended.
    fn wait_for_progress(&mut self, before: &AckLog, cause: &str) {
        let until = Instant::now() + PROGRESS_TIMEOUT;
        loop {
            let now = self.acknowledged();
            let waiting: Vec<_> =
                KEYS.iter().filter(|name| now.count(name) <= before.count(name)).collect();
            if waiting.is_empty() {
                break;
            }
            assert!(
                Instant::now() < until,
                "after {cause}: no new version of {waiting:?}:\n{}",
                last_errors(self.folder.path())
            );
            for (host, actor) in &mut self.actors {
                assert!(actor.is_running(), "after {cause}: an actor of host {host} has failed");
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Kills all clients.
    pub(super) fn finish(self) -> AckLog {
        let acknowledged = self.folder;
        drop(self.actors);
        AckLog::read(acknowledged.path())
    }
}
