//! All processes that use one root, and the checks of its versions.

use std::fs;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_format::StateDict;
use tssd_store::blocking::Store;
use tssd_store::{Durability, ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::command::{DaemonProcess, memory_tempdir};
use tssd_tests::resource_growth::ResourceGrowth;
use tssd_tests::rng::SeededRng;

use crate::ack_log::AckLog;
use crate::client_process::{
    ClientProcess, KEYS, Timing, WRITERS, check_version, contents, last_errors,
};
use crate::store_dir;

/// Number of versions that are kept of a key.
const KEEP: u64 = 3;

const READERS: usize = 3;

/// Time within which each key must get a new version.
const PROGRESS_TIMEOUT: Duration = Duration::from_mins(1);

/// Counts of a campaign.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Processes killed.
    pub(super) killed: u64,
    /// Daemons killed.
    pub(super) restarts: u64,
    pub(super) acknowledged: u64,
    pub(super) durable: u64,
    pub(super) tensors: u64,
    /// Highest resident memory of an idle daemon, in bytes.
    pub(super) resident: u64,
    /// Longest time from the start of a daemon until it serves.
    pub(super) slowest_restart: Duration,
}

impl Counts {
    pub(super) fn merge(self, other: &Self) -> Self {
        Self {
            killed: self.killed + other.killed,
            restarts: self.restarts + other.restarts,
            acknowledged: self.acknowledged + other.acknowledged,
            durable: self.durable + other.durable,
            tensors: self.tensors + other.tensors,
            resident: self.resident.max(other.resident),
            slowest_restart: self.slowest_restart.max(other.slowest_restart),
        }
    }
}

/// Where durable versions are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DurableStorage {
    /// In the directory of a daemon.
    Root,
    /// In a directory that a daemon uses as its bucket.
    Bucket,
    /// In a directory that all clients share, without a daemon.
    Directory,
}

impl DurableStorage {
    fn durability(self) -> Durability {
        if self == Self::Bucket { Durability::Object } else { Durability::Disk }
    }
}

pub(super) struct ProcessCluster {
    storage: DurableStorage,
    writers: Vec<ClientProcess>,
    readers: Vec<ClientProcess>,
    daemon: Option<DaemonProcess>,
    store: Option<Store>,
    /// Open descriptors of the first daemon when it was idle.
    descriptors: u64,
    counts: Counts,
    folder: TempDir,
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

impl ProcessCluster {
    pub(super) fn new(storage: DurableStorage) -> Self {
        let folder = memory_tempdir();
        for name in ["run", "root"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        AckLog::create(folder.path());
        let (writers, readers) = (Vec::new(), Vec::new());
        let (daemon, store, counts) = (None, None, Counts::default());
        let mut cluster =
            Self { storage, writers, readers, daemon, store, descriptors: 0, counts, folder };
        if storage == DurableStorage::Directory {
            let store = Store::directory(cluster.root()).unwrap();
            for name in KEYS {
                let keep = NonZeroU32::new(u32::try_from(KEEP).unwrap()).unwrap();
                store.retain(&key(name), keep).unwrap();
            }
            cluster.store = Some(store);
        } else {
            cluster.start_daemon();
            if storage == DurableStorage::Bucket {
                // In a bucket the daemon has a session from its first version on.
                let (key, options) = (key("first"), cluster.durable_options());
                cluster.store().put_state_dict(&key, &StateDict::new(), &options).unwrap();
                cluster.store().delete(&key, None).unwrap();
            }
            cluster.descriptors = cluster.daemon().idle_descriptors(cluster.store());
        }
        cluster.start_clients();
        cluster
    }

    fn root(&self) -> std::path::PathBuf {
        self.folder.path().join("root")
    }

    fn run_folder(&self) -> std::path::PathBuf {
        self.folder.path().join("run")
    }

    fn daemon(&self) -> &DaemonProcess {
        self.daemon.as_ref().unwrap()
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn url(&self) -> String {
        match &self.daemon {
            Some(daemon) => daemon.url.clone(),
            None => self.root().display().to_string(),
        }
    }

    /// Starts a daemon over the files of its predecessor.
    fn start_daemon(&mut self) {
        let (root, started) = (self.root(), Instant::now());
        let root = root.to_str().unwrap();
        let (option, place) = match self.storage {
            DurableStorage::Bucket => ("--bucket", format!("file:{root}")),
            _ => ("--root", root.to_owned()),
        };
        let arguments = [option, &place, "--keep", &KEEP.to_string()];
        let daemon = DaemonProcess::start(&self.run_folder(), &arguments);
        self.store = Some(daemon.connect());
        self.daemon = Some(daemon);
        self.counts.slowest_restart = self.counts.slowest_restart.max(started.elapsed());
    }

    fn durable_options(&self) -> PutOptions {
        PutOptions { durability: self.storage.durability(), ..PutOptions::default() }
    }

    fn writer(&self, index: usize) -> ClientProcess {
        self.actor(format_args!("writer {index}"))
    }

    fn reader(&self, index: usize) -> ClientProcess {
        self.actor(format_args!("reader {index}"))
    }

    fn actor(&self, role: std::fmt::Arguments<'_>) -> ClientProcess {
        let pace = Timing { pause: Duration::from_millis(1), timeout: Duration::from_secs(5) };
        ClientProcess::start(role, &self.url(), self.folder.path(), self.storage.durability(), pace)
    }

    fn start_clients(&mut self) {
        self.writers = (0..WRITERS.len()).map(|index| self.writer(index)).collect();
        self.readers = (0..READERS).map(|index| self.reader(index)).collect();
    }

    /// Kills a process and starts it again. Then checks all versions, and waits for new ones.
    pub(super) fn run_round(&mut self, rng: &mut SeededRng) {
        std::thread::sleep(Duration::from_millis(rng.below(120)));
        let before = self.acknowledged();
        match rng.below(10) {
            0..4 if self.daemon.is_some() => self.kill_daemon(),
            0..7 => {
                let index = usize::try_from(rng.below(WRITERS.len() as u64)).unwrap();
                self.writers[index].kill();
                self.writers[index] = self.writer(index);
                self.counts.killed += 1;
            }
            7..9 => {
                let index = usize::try_from(rng.below(READERS as u64)).unwrap();
                self.readers[index].kill();
                self.readers[index] = self.reader(index);
                self.counts.killed += 1;
            }
            _ => {
                self.kill_all();
                if self.daemon.is_some() {
                    self.kill_daemon();
                }
                self.start_clients();
            }
        }
        self.check_versions(&self.acknowledged(), false);
        self.wait_for_progress(&before);
    }

    /// Samples the daemon. Its successors over the same root must not need more resources.
    pub(super) fn sample_daemon(&self, growth: &mut ResourceGrowth) {
        if let Some(daemon) = &self.daemon {
            growth.sample(daemon.process.id());
        }
    }

    fn kill_all(&mut self) {
        let all = self.writers.iter().chain(&self.readers);
        all.for_each(ClientProcess::kill);
        self.counts.killed += (WRITERS.len() + READERS) as u64;
        self.writers.clear();
        self.readers.clear();
    }

    fn kill_daemon(&mut self) {
        // The next daemon must have all versions acknowledged up to now.
        self.daemon = None;
        let acknowledged = self.acknowledged();
        self.start_daemon();
        self.counts.killed += 1;
        self.counts.restarts += 1;
        self.check_versions(&acknowledged, true);
    }

    /// Reads what the writers have logged.
    fn acknowledged(&self) -> AckLog {
        AckLog::read(self.folder.path())
    }

    /// Checks that no durable version is missing, and that every visible version is complete.
    fn check_versions(&self, acknowledged: &AckLog, is_restarted: bool) {
        for name in KEYS {
            let numbers: Vec<u64> =
                self.store().versions(&key(name)).unwrap().iter().map(|info| info.number).collect();
            let lost = acknowledged.missing_durable(name, &numbers, KEEP);
            assert!(
                lost.is_empty(),
                "versions {lost:?} of {name} were acknowledged, and there are {numbers:?} \
                 (restarted: {is_restarted})"
            );
            self.check_contents(name);
        }
    }

    fn check_contents(&self, name: &str) {
        let key = key(name);
        for info in self.store().versions(&key).unwrap() {
            let options = GetOptions { version: info.number.into(), ..GetOptions::default() };
            match self.store().get_state_dict(&key, &options) {
                Ok((dict, _)) => drop(check_version(&key, &info, &dict)),
                // A newer version has replaced it.
                Err(error) => {
                    let replaced = [ErrorKind::NotFound, ErrorKind::Overtaken];
                    assert!(replaced.contains(&error.kind()), "{error}");
                }
            }
        }
    }

    /// Waits until each key has a new version. Fails if a client process has ended.
    fn wait_for_progress(&mut self, before: &AckLog) {
        let until = Instant::now() + PROGRESS_TIMEOUT;
        loop {
            let now = self.acknowledged();
            let mut waiting = KEYS.to_vec();
            waiting.retain(|name| now.count(name) <= before.count(name));
            if waiting.is_empty() {
                break;
            }
            assert!(
                Instant::now() < until,
                "{:?}: no new version of {waiting:?}:\n{}",
                self.storage,
                last_errors(self.folder.path())
            );
            assert!(self.writers.iter_mut().all(ClientProcess::is_running), "a writer has failed");
            assert!(self.readers.iter_mut().all(ClientProcess::is_running), "a reader has failed");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills all processes, and checks that no foreign file is left.
    pub(super) fn finish(mut self) -> Counts {
        self.kill_all();
        if self.daemon.is_some() {
            self.daemon().assert_idle_descriptors(self.descriptors, self.store());
            self.counts.resident = self.daemon().resident_bytes();
            let segments = self.store().status().unwrap().memory.segments;
            assert!(segments <= 64, "{segments} segments of {} keys", KEYS.len());
            self.kill_daemon();
        }
        // The next put of each key deletes what blocks its version.
        for name in KEYS {
            // Skip the numbers that a killed writer may have open.
            let number = 10 + self.store().head(&key(name)).unwrap().map_or(0, |head| head.number);
            let options = PutOptions { version: Some(number), ..self.durable_options() };
            let dict = contents(name, number, 1).part(0);
            self.store().put_state_dict(&key(name), &dict, &options).unwrap();
            self.check_contents(name);
        }
        let bucket = Store::connect(&format!("file:{}", self.root().display()));
        let durable_store =
            if self.storage == DurableStorage::Bucket { &bucket.unwrap() } else { self.store() };
        let versions = |name| {
            let versions = durable_store.versions(&key(name)).unwrap();
            versions.iter().map(|info| (info.number, info.bytes)).collect()
        };
        let keys: Vec<_> = KEYS.iter().map(|name| (*name, versions(name))).collect();
        let mut problems = store_dir::foreign_files(&self.root(), &keys);
        problems.retain(|name| !name.starts_with("first/"));
        assert!(problems.is_empty(), "in the directory: {problems:?}");
        if let Some(mut daemon) = self.daemon.take() {
            assert_eq!(names(&self.run_folder()), ["socket", "socket.lock"]);
            self.store = None;
            daemon.signal(Signal::TERM);
            assert!(daemon.process.wait().unwrap().success());
            assert_eq!(names(&self.run_folder()), ["socket.lock"]);
        }
        let acknowledged = self.acknowledged();
        self.counts.acknowledged = acknowledged.len();
        self.counts.durable = acknowledged.durable_count();
        self.counts.tensors = acknowledged.compared_tensors;
        self.counts
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
