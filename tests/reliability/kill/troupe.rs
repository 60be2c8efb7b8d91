//! All processes that use one root, and what must hold of it.

use std::fs;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_format::StateDict;
use tssd_store::blocking::Store;
use tssd_store::{Durability, ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::command::{Serve, quick_folder};
use tssd_tests::dice::Dice;
use tssd_tests::growth::Growth;

use crate::acknowledged::Acknowledged;
use crate::actor::{Actor, KEYS, Pace, WRITERS, check, complaints, contents};
use crate::folder;

/// How many versions of a key are kept.
const KEEP: u64 = 3;

const READERS: usize = 3;

/// How long everybody has to go on.
const PATIENCE: Duration = Duration::from_mins(1);

/// What has happened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Processes that were killed.
    pub(super) killed: u64,
    /// Of them, daemons.
    pub(super) restarts: u64,
    pub(super) acknowledged: u64,
    pub(super) durable: u64,
    pub(super) tensors: u64,
    /// The most memory that a daemon had when nobody was connected, in bytes.
    pub(super) resident: u64,
    /// The longest that a daemon took to serve again.
    pub(super) slowest: Duration,
}

impl Counts {
    pub(super) fn and(self, other: &Self) -> Self {
        Self {
            killed: self.killed + other.killed,
            restarts: self.restarts + other.restarts,
            acknowledged: self.acknowledged + other.acknowledged,
            durable: self.durable + other.durable,
            tensors: self.tensors + other.tensors,
            resident: self.resident.max(other.resident),
            slowest: self.slowest.max(other.slowest),
        }
    }
}

/// Where what is durable is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// In the directory of a daemon.
    Root,
    /// In a directory that a daemon has as its bucket.
    Bucket,
    /// In a directory that all share, without a daemon.
    Directory,
}

impl Home {
    fn durability(self) -> Durability {
        if self == Self::Bucket { Durability::Object } else { Durability::Disk }
    }
}

pub(super) struct Troupe {
    home: Home,
    writers: Vec<Actor>,
    readers: Vec<Actor>,
    serve: Option<Serve>,
    store: Option<Store>,
    /// Of the first daemon at rest.
    descriptors: u64,
    counts: Counts,
    folder: TempDir,
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

impl Troupe {
    pub(super) fn new(home: Home) -> Self {
        let folder = quick_folder();
        for name in ["run", "root"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        Acknowledged::begin(folder.path());
        let (writers, readers) = (Vec::new(), Vec::new());
        let (serve, store, counts) = (None, None, Counts::default());
        let mut troupe =
            Self { home, writers, readers, serve, store, descriptors: 0, counts, folder };
        if home == Home::Directory {
            let store = Store::directory(troupe.root()).unwrap();
            for name in KEYS {
                let keep = NonZeroU32::new(u32::try_from(KEEP).unwrap()).unwrap();
                store.retain(&key(name), keep).unwrap();
            }
            troupe.store = Some(store);
        } else {
            troupe.serve();
            if home == Home::Bucket {
                // In a bucket it has a session from the first version on.
                let (key, options) = (key("first"), troupe.lasting());
                troupe.store().put_state_dict(&key, &StateDict::new(), &options).unwrap();
                troupe.store().delete(&key, None).unwrap();
            }
            troupe.descriptors = troupe.daemon().settled(troupe.store());
        }
        troupe.enter();
        troupe
    }

    fn root(&self) -> std::path::PathBuf {
        self.folder.path().join("root")
    }

    fn run(&self) -> std::path::PathBuf {
        self.folder.path().join("run")
    }

    fn daemon(&self) -> &Serve {
        self.serve.as_ref().unwrap()
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn url(&self) -> String {
        match &self.serve {
            Some(serve) => serve.url.clone(),
            None => self.root().display().to_string(),
        }
    }

    /// A daemon starts, whatever the one before has left behind.
    fn serve(&mut self) {
        let (root, started) = (self.root(), Instant::now());
        let root = root.to_str().unwrap();
        let (option, place) = match self.home {
            Home::Bucket => ("--bucket", format!("file:{root}")),
            _ => ("--root", root.to_owned()),
        };
        let arguments = [option, &place, "--keep", &KEEP.to_string()];
        let serve = Serve::start(&self.run(), &arguments);
        self.store = Some(serve.connect());
        self.serve = Some(serve);
        self.counts.slowest = self.counts.slowest.max(started.elapsed());
    }

    fn lasting(&self) -> PutOptions {
        PutOptions { durability: self.home.durability(), ..PutOptions::default() }
    }

    fn writer(&self, index: usize) -> Actor {
        self.actor(format_args!("writer {index}"))
    }

    fn reader(&self, index: usize) -> Actor {
        self.actor(format_args!("reader {index}"))
    }

    fn actor(&self, role: std::fmt::Arguments<'_>) -> Actor {
        let pace = Pace { rest: Duration::from_millis(1), timeout: Duration::from_secs(5) };
        Actor::start(role, &self.url(), self.folder.path(), self.home.durability(), pace)
    }

    fn enter(&mut self) {
        self.writers = (0..WRITERS.len()).map(|index| self.writer(index)).collect();
        self.readers = (0..READERS).map(|index| self.reader(index)).collect();
    }

    /// Somebody is killed, and starts again; all is there, and everybody goes on.
    pub(super) fn round(&mut self, dice: &mut Dice) {
        std::thread::sleep(Duration::from_millis(dice.below(120)));
        let before = self.acknowledged();
        match dice.below(10) {
            0..4 if self.serve.is_some() => self.kill_daemon(),
            0..7 => {
                let index = usize::try_from(dice.below(WRITERS.len() as u64)).unwrap();
                self.writers[index].kill();
                self.writers[index] = self.writer(index);
                self.counts.killed += 1;
            }
            7..9 => {
                let index = usize::try_from(dice.below(READERS as u64)).unwrap();
                self.readers[index].kill();
                self.readers[index] = self.reader(index);
                self.counts.killed += 1;
            }
            _ => {
                self.kill_all();
                if self.serve.is_some() {
                    self.kill_daemon();
                }
                self.enter();
            }
        }
        self.check(&self.acknowledged(), false);
        self.goes_on(&before);
    }

    /// Whatever the daemon has, its successors over the same root have no more.
    pub(super) fn sample(&self, growth: &mut Growth) {
        if let Some(serve) = &self.serve {
            growth.sample(serve.process.id());
        }
    }

    fn kill_all(&mut self) {
        let all = self.writers.iter().chain(&self.readers);
        all.for_each(Actor::kill);
        self.counts.killed += (WRITERS.len() + READERS) as u64;
        self.writers.clear();
        self.readers.clear();
    }

    fn kill_daemon(&mut self) {
        // What was acknowledged so far, the next one has.
        self.serve = None;
        let acknowledged = self.acknowledged();
        self.serve();
        self.counts.killed += 1;
        self.counts.restarts += 1;
        self.check(&acknowledged, true);
    }

    /// What writers have written down.
    fn acknowledged(&self) -> Acknowledged {
        Acknowledged::read(self.folder.path())
    }

    /// What is durable is there, or as many as are kept of newer ones; all that is visible is whole. After a
    /// restart nothing else is visible.
    fn check(&self, acknowledged: &Acknowledged, is_restarted: bool) {
        for name in KEYS {
            let numbers: Vec<u64> =
                self.store().versions(&key(name)).unwrap().iter().map(|info| info.number).collect();
            let lost = acknowledged.lost(name, &numbers, KEEP);
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
            let options = GetOptions { version: Some(info.number), ..GetOptions::default() };
            match self.store().get_state_dict(&key, &options) {
                Ok((dict, _)) => drop(check(&key, &info, &dict)),
                // A newer one has replaced it meanwhile.
                Err(error) => {
                    let replaced = [ErrorKind::NotFound, ErrorKind::Overtaken];
                    assert!(replaced.contains(&error.kind()), "{error}");
                }
            }
        }
    }

    /// Versions of every key come, and nobody has failed.
    fn goes_on(&mut self, before: &Acknowledged) {
        let until = Instant::now() + PATIENCE;
        loop {
            let now = self.acknowledged();
            let mut waiting = KEYS.to_vec();
            waiting.retain(|name| now.count(name) <= before.count(name));
            if waiting.is_empty() {
                break;
            }
            assert!(
                Instant::now() < until,
                "{:?}: {waiting:?} does not go on:\n{}",
                self.home,
                complaints(self.folder.path())
            );
            assert!(self.writers.iter_mut().all(Actor::is_running), "a writer has failed");
            assert!(self.readers.iter_mut().all(Actor::is_running), "a reader has failed");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// All are killed: nothing is left that is no part of a version.
    pub(super) fn end(mut self) -> Counts {
        self.kill_all();
        if self.serve.is_some() {
            self.daemon().settles_at(self.descriptors, self.store());
            self.counts.resident = self.daemon().resident();
            let segments = self.store().status().unwrap().memory.segments;
            assert!(segments <= 64, "{segments} segments of {} keys", KEYS.len());
            self.kill_daemon();
        }
        // The next put of each key removes what is in its way.
        for name in KEYS {
            // Not one that a killed writer has open in his way.
            let number = 10 + self.store().head(&key(name)).unwrap().map_or(0, |head| head.number);
            let options = PutOptions { version: Some(number), ..self.lasting() };
            let dict = contents(name, number, 1).part(0);
            self.store().put_state_dict(&key(name), &dict, &options).unwrap();
            self.check_contents(name);
        }
        let bucket = Store::connect(&format!("file:{}", self.root().display()));
        let lasting = if self.home == Home::Bucket { &bucket.unwrap() } else { self.store() };
        let versions = |name| {
            let versions = lasting.versions(&key(name)).unwrap();
            versions.iter().map(|info| (info.number, info.bytes)).collect()
        };
        let keys: Vec<_> = KEYS.iter().map(|name| (*name, versions(name))).collect();
        let mut strange = folder::strangers(&self.root(), &keys);
        strange.retain(|name| !name.starts_with("first/"));
        assert!(strange.is_empty(), "left behind: {strange:?}");
        if let Some(mut serve) = self.serve.take() {
            assert_eq!(names(&self.run()), ["socket", "socket.lock"]);
            self.store = None;
            serve.signal(Signal::TERM);
            assert!(serve.process.wait().unwrap().success());
            assert_eq!(names(&self.run()), ["socket.lock"]);
        }
        let acknowledged = self.acknowledged();
        self.counts.acknowledged = acknowledged.len();
        self.counts.durable = acknowledged.durable();
        self.counts.tensors = acknowledged.checked;
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
