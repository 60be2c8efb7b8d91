//! A client process with several threads that share one connection. It runs until it is killed.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tssd_store::blocking::Store;
use tssd_store::{
    Error, ErrorKind, GetOptions, JobId, PutOptions, Refusal, VersionInfo, WriterSet,
};
use tssd_tests::dice::Dice;

use super::contents::{dict, part, put_of};
use super::history::{Answer, Call, Recorder, name_of, number_at, place};
use super::home::Home;
use super::object::{Custom, KEYS, TOGETHER, custom, keep, name, retain, writers};
use super::workload;

/// Environment variable: the configuration of a client, as JSON.
pub(crate) const TOLD: &str = "TSSD_LINEAR_CLIENT";

/// Timeout of a wait for a version.
const WAIT_TIMEOUT: Duration = Duration::from_millis(20);

/// Configuration of a client process.
#[derive(Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) url: String,
    pub(crate) home: Home,
    /// Environment variables that the client needs to reach the store.
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) folder: PathBuf,
    pub(crate) number: u32,
    pub(crate) threads: u32,
    /// Rank of the client in versions of several writers.
    pub(crate) writer: u32,
}

#[test]
#[ignore = "a process of the proof, which says what it is to do"]
fn child() {
    let Ok(config) = std::env::var(TOLD) else { return };
    let config: Told = serde_json::from_str(&config).unwrap();
    // A panic in a thread ends the process. The process also ends when its parent closes stdin.
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        default_hook(panic);
        std::process::exit(1);
    }));
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let connection =
        Connection { url: config.url.clone(), home: config.home, state: Mutex::new((0, None)) };
    if config.home != Home::Daemon {
        // The first client sets it. The others repeat it.
        while let Err(error) = retain(&connection.store().1) {
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        }
    }
    let puts = AtomicU32::new(0);
    thread::scope(|scope| {
        for thread in 0..config.threads {
            let path = config.folder.join(format!("{}-{thread}", config.number));
            let client = Client {
                connection: &connection,
                puts: &puts,
                number: config.number,
                recorder: Recorder(File::create_new(path).unwrap()),
                rng: Dice::new(u64::from(config.number) << 8 | u64::from(thread)),
                generation: 0,
                seen: [0; KEYS as usize],
                pinned: [None; KEYS as usize],
                // Only one thread is a writer of versions of several writers.
                writer: if thread == 0 { config.writer } else { u32::MAX },
            };
            scope.spawn(|| client.run());
        }
    });
}

/// The connection of a process. Restored after it is lost.
struct Connection {
    url: String,
    home: Home,
    /// Number of the connection, and its store while it is open.
    state: Mutex<(u64, Option<Store>)>,
}

impl Connection {
    fn store(&self) -> (u64, Store) {
        let mut state = self.state.lock().unwrap();
        loop {
            if let (generation, Some(store)) = &*state {
                return (*generation, store.clone());
            }
            match Store::connect(&self.url) {
                Ok(store) => *state = (state.0 + 1, Some(store)),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn mark_lost(&self, generation: u64) {
        let mut state = self.state.lock().unwrap();
        if state.0 == generation {
            state.1 = None;
        }
    }
}

/// One thread of a client process.
struct Client<'a> {
    connection: &'a Connection,
    puts: &'a AtomicU32,
    number: u32,
    recorder: Recorder<File>,
    rng: Dice,
    generation: u64,
    /// Highest number of each key that was observed on this connection.
    seen: [u64; KEYS as usize],
    pinned: [Option<(u64, u32)>; KEYS as usize],
    writer: u32,
}

impl Client<'_> {
    /// Chooses the next key. A writer of versions of several writers often chooses one of these.
    fn key(&mut self) -> u8 {
        let together = TOGETHER[usize::try_from(self.rng.below(2)).unwrap()];
        if self.writer < writers(together) && self.rng.hits(2) {
            return together;
        }
        u8::try_from(self.rng.below(KEYS.into())).unwrap()
    }

    fn run(mut self) {
        loop {
            let (generation, store) = self.connection.store();
            if generation != self.generation {
                // It may be another daemon, which reuses the numbers of versions in memory.
                self.seen = [0; KEYS as usize];
                self.generation = generation;
            }
            let key = self.key();
            let seen = self.seen[usize::from(key)];
            let client = workload::Client {
                custom: custom(key),
                keep: keep(key),
                seen,
                put: self.number << 20 | self.puts.fetch_add(1, Ordering::Relaxed),
                patience: u64::try_from(WAIT_TIMEOUT.as_nanos()).unwrap(),
                writer: self.writer,
                pinned: self.pinned[usize::from(key)],
            };
            let call = client.call(&mut self.rng);
            let number = number_at(seen);
            let rewinds = custom(key) == Custom::Rewound && number > 0 && self.rng.hits(4);
            let version = if rewinds {
                Some(1 + self.rng.below(number))
            } else {
                self.rng.hits(4).then(|| number + 1 + self.rng.below(2))
            };
            let (is_head, home) = (self.rng.hits(3), self.connection.home);
            let mut is_lost = false;
            let answer = self.recorder.record(key, call, || {
                let answer = match call {
                    Call::Put(put) => put_once(&store, home, key, put, (version, rewinds)),
                    Call::Newest if is_head => head(&store, key),
                    Call::Newest => get(&store, key, None),
                    Call::Numbered(number) => get(&store, key, Some(number)),
                    Call::Wait(number, _) => {
                        let found = store.wait_for_version(&name(key), number, WAIT_TIMEOUT);
                        to_response(found.map(|version| found_version(key, &version)))
                    }
                    Call::Delete(number) => delete(&store, key, number),
                    Call::Part { number, writer, of } => {
                        try_put_part(&store, home, key, number, (writer, of))
                    }
                    Call::Pin(number, label) => to_response(
                        store
                            .pin(&name(key), Some(number), &label.to_string())
                            .map(|_| Answer::Done),
                    ),
                    Call::Unpin(label) => to_response(
                        store.unpin(&name(key), &label.to_string()).map(|()| Answer::Done),
                    ),
                };
                is_lost = answer.is_none();
                answer
            });
            if is_lost {
                self.connection.mark_lost(generation);
            }
            self.pinned[usize::from(key)] = client.pinned_after(call, answer);
            if let Some(Answer::Put(number) | Answer::Found(number, _)) = answer {
                let seen = &mut self.seen[usize::from(key)];
                *seen = number.max(*seen);
            }
        }
    }
}

/// Puts a state dict. Returns `None` if the outcome is unknown.
pub(crate) fn put_once(
    store: &Store,
    home: Home,
    key: u8,
    put: u32,
    (version, rewind): (Option<u64>, bool),
) -> Option<Answer> {
    let options = PutOptions {
        version,
        rewind,
        writer: Some(put),
        writers: Some(WriterSet::from_iter([put])),
        durability: home.durability(key),
        ..PutOptions::default()
    };
    match store.put_state_dict(&name(key), &dict(key, put), &options) {
        Ok(report) => Some(Answer::Put(place(report.epoch, report.version))),
        Err(error) => match error.kind() {
            ErrorKind::Unreachable => None,
            ErrorKind::Overtaken | ErrorKind::Refused => Some(Answer::Failed),
            _ => panic!("put {put} of {key}: {error}"),
        },
    }
}

/// Puts a part of a version. Returns `None` if the outcome is unknown.
///
/// Every attempt puts the same contents.
fn try_put_part(
    store: &Store,
    home: Home,
    key: u8,
    number: u64,
    (writer, of): (u32, u32),
) -> Option<Answer> {
    let options = PutOptions {
        version: Some(number),
        writer: Some(writer),
        writers: Some((0..of).collect()),
        job: Some(JobId("together".into())),
        durability: home.durability(key),
        timeout: Duration::from_millis(200),
        ..PutOptions::default()
    };
    match store.put_state_dict(&name(key), &part(key, name_of(number), writer), &options) {
        Ok(report) if report.visible => Some(Answer::Put(report.version)),
        Ok(_) => Some(Answer::Waits),
        Err(error) => match error.kind() {
            ErrorKind::Unreachable => None,
            ErrorKind::Overtaken | ErrorKind::Refused | ErrorKind::Busy => Some(Answer::Failed),
            // An earlier attempt completed the version, which was deleted since.
            ErrorKind::NotFound if matches!(error.refusal(), Some(Refusal::Gone { .. })) => {
                Some(Answer::Failed)
            }
            _ => panic!("part {writer} of {number} of {key}: {error}"),
        },
    }
}

/// Gets a version, or the newest one.
pub(crate) fn get(store: &Store, key: u8, version: Option<u64>) -> Option<Answer> {
    let options = GetOptions { version, ..GetOptions::default() };
    to_response(store.get_state_dict(&name(key), &options).map(|(dict, report)| {
        let place = place(report.epoch, report.version);
        let put = put_of(key, writers(key), &dict);
        put.map_or(Answer::Torn(place), |put| Answer::Found(place, put))
    }))
}

fn head(store: &Store, key: u8) -> Option<Answer> {
    let found_version = |version: &VersionInfo| found_version(key, version);
    to_response(
        store.head(&name(key)).map(|head| head.as_ref().map_or(Answer::Nothing, found_version)),
    )
}

/// Returns the response for a version.
///
/// The writer of the version identifies the put. If it has several writers, the number does.
fn found_version(key: u8, version: &VersionInfo) -> Answer {
    let of = writers(key);
    if of > 1 && version.writers == (0..of).collect() {
        return Answer::Found(version.number, name_of(version.number));
    }
    let (put, place) = (version.writers.to_string().parse(), place(version.epoch, version.number));
    put.map_or(Answer::Torn(place), |put| Answer::Found(place, put))
}

fn to_response(result: Result<Answer, Error>) -> Option<Answer> {
    match result {
        Ok(answer) => Some(answer),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => Some(Answer::Nothing),
            ErrorKind::Unreachable => None,
            _ => panic!("a read: {error}"),
        },
    }
}

fn delete(store: &Store, key: u8, number: u64) -> Option<Answer> {
    match store.delete(&name(key), Some(number)) {
        Ok(0) => Some(Answer::Nothing),
        Ok(1) => Some(Answer::Deleted),
        Err(error) if error.kind() == ErrorKind::Unreachable => None,
        other => panic!("delete {number} of {key}: {other:?}"),
    }
}
