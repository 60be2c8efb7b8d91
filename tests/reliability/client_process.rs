//! Writer and reader processes: this program in another role. They run until they are killed.

use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use tssd_format::StateDict;
use tssd_store::blocking::Store;
use tssd_store::ledger::Reason;
use tssd_store::{
    Durability, Error, ErrorKind, GetOptions, JobId, Key, PutOptions, Refusal, Result, VersionInfo,
};
use tssd_tests::command::{kill_and_wait, send_signal};

use crate::ack_log::{ACKNOWLEDGED, COMPARED_TENSORS};
use crate::contents::Contents;

const ROLE: &str = "TSSD_RELIABILITY_ROLE";
const URL: &str = "TSSD_RELIABILITY_URL";
const FOLDER: &str = "TSSD_RELIABILITY_FOLDER";
/// Environment variable: whether durable versions go to a bucket.
const USE_BUCKET: &str = "TSSD_RELIABILITY_BUCKETED";

/// Environment variable: milliseconds that a process pauses after each call.
const PAUSE_MILLIS: &str = "TSSD_RELIABILITY_REST";
/// Environment variable: timeout of a put in milliseconds.
const TIMEOUT_MILLIS: &str = "TSSD_RELIABILITY_TIMEOUT";

/// Keys. Each has a writer of its own, except the last one, which two writers share.
pub(crate) const KEYS: [&str; 5] = ["durable", "mixed", "streamed", "passing", "shared"];

/// Writers: the index of the key, and the rank.
pub(crate) const WRITERS: [(usize, u32); 6] = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1)];

/// Elements of a tensor (32 KiB).
const ELEMENTS: u64 = 4096;

/// Size of a bucket of published tensors: one or two tensors fit.
const BUCKET: u64 = 50_000;

/// Pause between calls and timeout of puts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) pause: Duration,
    pub(crate) timeout: Duration,
}

/// A writer or reader process. Killed on drop.
pub(crate) struct ClientProcess(Child);

impl ClientProcess {
    pub(crate) fn start(
        role: impl Display,
        url: &str,
        folder: &Path,
        durability: Durability,
        pace: Timing,
    ) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["client_process::process", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, role.to_string())
            .env(URL, url)
            .env(FOLDER, folder)
            .env(USE_BUCKET, (durability == Durability::Object).to_string())
            .env(PAUSE_MILLIS, pace.pause.as_millis().to_string())
            .env(TIMEOUT_MILLIS, pace.timeout.as_millis().to_string())
            .stdout(std::process::Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Sends SIGKILL. The process begins no call after this returns.
    pub(crate) fn kill(&self) {
        send_signal(&self.0, Signal::KILL);
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        kill_and_wait(&mut self.0);
    }
}

pub(crate) fn contents(key: &str, version: u64, writers: u32) -> Contents<'_> {
    Contents { key, version, writers, elements: ELEMENTS }
}

/// Checks that a visible version is complete. Returns the number of tensors compared.
pub(crate) fn check_version(key: &Key, info: &VersionInfo, dict: &StateDict) -> u64 {
    let writers = u32::try_from(info.writers.len()).unwrap();
    contents(key.as_str(), info.number, writers).assert_matches(dict)
}

#[test]
#[ignore = "a process of `kill` and `hosts`"]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let url = std::env::var(URL).unwrap();
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    match role.split_once(' ') {
        Some(("writer", index)) => write(&url, &folder, WRITERS[index.parse::<usize>().unwrap()]),
        _ => read(&url, &folder, &role),
    }
}

/// Returns the duration in an environment variable.
fn duration_var(name: &str) -> Duration {
    Duration::from_millis(std::env::var(name).unwrap().parse().unwrap())
}

fn pause() {
    std::thread::sleep(duration_var(PAUSE_MILLIS));
}

/// Delay before the retry of a failed call.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Connects to a store. Retries until the store is reachable.
fn connect(url: &str) -> Store {
    loop {
        match Store::connect(url) {
            Ok(store) => return store,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Puts one version after another, and logs those that were acknowledged.
fn write(url: &str, folder: &Path, (key, rank): (usize, u32)) {
    let mut acknowledged = File::options().append(true).open(folder.join(ACKNOWLEDGED)).unwrap();
    let (mut store, name) = (connect(url), KEYS[key]);
    let key = Key::new(name).unwrap();
    // The highest number that was ever visible, even if that version was lost.
    let mut highest = 0;
    loop {
        pause();
        let error = match put(&store, &key, rank, highest) {
            Ok(Some((version, durability))) => {
                let line = format!("{name} {version} {durability:?}\n");
                acknowledged.write_all(line.as_bytes()).unwrap();
                continue;
            }
            Ok(None) => continue,
            Err(error) => error,
        };
        write_error(folder, &format!("writer {rank} of {name}"), &error);
        match error.kind() {
            ErrorKind::Unreachable => store = connect(url),
            // The other writer is one version ahead, or was killed: read the head again.
            ErrorKind::Busy | ErrorKind::Overtaken => {}
            // A killed predecessor of this process put this version, and the version was lost with
            // its host.
            ErrorKind::NotFound => match error.refusal().unwrap() {
                Refusal::Dropped { reason: Reason::Lost { .. }, number } => {
                    highest = highest.max(*number);
                }
                refusal => panic!("{name} of {rank}: {refusal:?}: {error}"),
            },
            ErrorKind::Refused => match error.refusal().unwrap() {
                Refusal::VersionNotNewer { highest: seen, .. } => highest = *seen,
                Refusal::Dropped { .. } => {}
                refusal => panic!("{name} of {rank}: {refusal:?}: {error}"),
            },
            kind => panic!("{name} of {rank}: {kind:?}: {error}"),
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Keeps the last error of a writer for diagnosis.
fn write_error(folder: &Path, name: &str, error: &Error) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    std::fs::write(folder.join(format!("{name}.last")), format!("{since:.1}: {error}")).unwrap();
}

/// Returns the last error of each writer.
pub(crate) fn last_errors(folder: &Path) -> String {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<String> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "last"))
        .map(|path| format!("{}: {}", path.display(), std::fs::read_to_string(&path).unwrap()))
        .collect();
    all.sort();
    all.join("\n")
}

/// Puts the next version. Returns its number and durability if it is visible.
fn put(store: &Store, key: &Key, rank: u32, highest: u64) -> Result<Option<(u64, Durability)>> {
    let version = 1 + highest.max(store.head(key)?.map_or(0, |head| head.number));
    let writers = if key.as_str() == "shared" { 2 } else { 1 };
    let durable = match std::env::var(USE_BUCKET).as_deref() {
        Ok("true") => Durability::Object,
        _ => Durability::Disk,
    };
    let durability = match key.as_str() {
        "passing" => Durability::Memory,
        "mixed" if version % 2 == 0 => Durability::Memory,
        _ => durable,
    };
    let options = PutOptions {
        version: Some(version),
        writer: Some(rank),
        writers: Some((0..writers).collect()),
        job: (writers > 1).then(|| JobId("job".into())),
        durability,
        timeout: duration_var(TIMEOUT_MILLIS),
        ..PutOptions::default()
    };
    let contents = contents(key.as_str(), version, writers);
    let report = if matches!(key.as_str(), "streamed" | "passing") {
        let mut publisher = store.publish(key, &options, BUCKET)?;
        for (name, value) in contents.entries(rank) {
            publisher.add(name, value)?;
        }
        publisher.finish()?
    } else {
        store.put_state_dict(key, &contents.part(rank), &options)?
    };
    if writers > 1 && !report.visible {
        // Let the other writer put its part.
        let _ = store.wait_for_version(key, version, Duration::from_millis(50));
    }
    let is_done = report.visible && (report.stored || durability != Durability::Object);
    Ok(is_done.then_some((version, durability)))
}

/// Reads all keys in a loop and retains recent results. Logs the number of tensors compared.
fn read(url: &str, folder: &Path, role: &str) {
    let mut checked = File::options().append(true).open(folder.join(COMPARED_TENSORS)).unwrap();
    let mut store = connect(url);
    let mut retained: VecDeque<(Key, VersionInfo, StateDict)> = VecDeque::new();
    for turn in 0.. {
        let key = Key::new(KEYS[turn % KEYS.len()]).unwrap();
        match get(&store, &key) {
            Ok(None) => {}
            Ok(Some((info, dict))) => {
                let mut tensors = check_version(&key, &info, &dict);
                retained.push_back((key, info, dict));
                // A result must not change after later versions replace it.
                if retained.len() > 8 {
                    let (key, info, dict) = retained.pop_front().unwrap();
                    tensors += check_version(&key, &info, &dict);
                }
                checked.write_all(format!("{tensors}\n").as_bytes()).unwrap();
            }
            Err(error) => match error.kind() {
                ErrorKind::NotFound | ErrorKind::Overtaken => {}
                ErrorKind::Unreachable => store = connect(url),
                kind => panic!("{role}: {kind:?}: {error}"),
            },
        }
        pause();
    }
}

fn get(store: &Store, key: &Key) -> Result<Option<(VersionInfo, StateDict)>> {
    let Some(info) = store.head(key)? else { return Ok(None) };
    let options = GetOptions { version: info.number.into(), ..GetOptions::default() };
    let (dict, _) = store.get_state_dict(key, &options)?;
    Ok(Some((info, dict)))
}
