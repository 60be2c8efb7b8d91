//! A process with several threads that ask for keys over one connection, until it is killed.

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

/// Names what a client is told.
pub(crate) const TOLD: &str = "TSSD_LINEAR_CLIENT";

/// How long a client waits for a version.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a client is told: where the store is, where to write down what it asks, and which client it is.
#[derive(Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) url: String,
    pub(crate) home: Home,
    /// What it needs to know to get there.
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) folder: PathBuf,
    pub(crate) number: u32,
    pub(crate) threads: u32,
    /// Its rank, where several writers put a version together.
    pub(crate) writer: u32,
}

#[test]
#[ignore = "a process of the proof, which says what it is to do"]
fn child() {
    let Ok(told) = std::env::var(TOLD) else { return };
    let told: Told = serde_json::from_str(&told).unwrap();
    // A thread that fails is a client that fails; and nobody stays when the proof is over.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(1);
    }));
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let line = Line { url: told.url.clone(), home: told.home, connection: Mutex::new((0, None)) };
    if told.home != Home::Daemon {
        // Whoever comes first says it, and everybody else once more.
        while let Err(error) = retain(&line.store().1) {
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        }
    }
    let puts = AtomicU32::new(0);
    thread::scope(|scope| {
        for thread in 0..told.threads {
            let path = told.folder.join(format!("{}-{thread}", told.number));
            let client = Client {
                line: &line,
                puts: &puts,
                number: told.number,
                recorder: Recorder(File::create_new(path).unwrap()),
                dice: Dice::new(u64::from(told.number) << 8 | u64::from(thread)),
                generation: 0,
                seen: [0; KEYS as usize],
                pinned: [None; KEYS as usize],
                // No two threads are one writer.
                writer: if thread == 0 { told.writer } else { u32::MAX },
            };
            scope.spawn(|| client.run());
        }
    });
}

/// The connection of a process, made anew when it is lost.
struct Line {
    url: String,
    home: Home,
    /// The how-manieth it is.
    connection: Mutex<(u64, Option<Store>)>,
}

impl Line {
    fn store(&self) -> (u64, Store) {
        let mut connection = self.connection.lock().unwrap();
        loop {
            if let (generation, Some(store)) = &*connection {
                return (*generation, store.clone());
            }
            match Store::connect(&self.url) {
                Ok(store) => *connection = (connection.0 + 1, Some(store)),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn lost(&self, generation: u64) {
        let mut connection = self.connection.lock().unwrap();
        if connection.0 == generation {
            connection.1 = None;
        }
    }
}

/// One thread.
struct Client<'a> {
    line: &'a Line,
    puts: &'a AtomicU32,
    number: u32,
    recorder: Recorder<File>,
    dice: Dice,
    generation: u64,
    /// The highest number of each key that it has seen on this connection.
    seen: [u64; KEYS as usize],
    pinned: [Option<(u64, u32)>; KEYS as usize],
    writer: u32,
}

impl Client<'_> {
    /// The next key. Whoever is one of several writers is often awaited.
    fn key(&mut self) -> u8 {
        let together = TOGETHER[usize::try_from(self.dice.below(2)).unwrap()];
        if self.writer < writers(together) && self.dice.hits(2) {
            return together;
        }
        u8::try_from(self.dice.below(KEYS.into())).unwrap()
    }

    fn run(mut self) {
        loop {
            let (generation, store) = self.line.store();
            if generation != self.generation {
                // The daemon may be another one, which numbers what is in memory anew.
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
                patience: u64::try_from(PATIENCE.as_nanos()).unwrap(),
                writer: self.writer,
                pinned: self.pinned[usize::from(key)],
            };
            let call = client.call(&mut self.dice);
            let number = number_at(seen);
            let rewinds = custom(key) == Custom::Rewound && number > 0 && self.dice.hits(4);
            let version = if rewinds {
                Some(1 + self.dice.below(number))
            } else {
                self.dice.hits(4).then(|| number + 1 + self.dice.below(2))
            };
            let (is_head, home) = (self.dice.hits(3), self.line.home);
            let mut is_lost = false;
            let answer = self.recorder.record(key, call, || {
                let answer = match call {
                    Call::Put(put) => put_once(&store, home, key, put, (version, rewinds)),
                    Call::Newest if is_head => head(&store, key),
                    Call::Newest => get(&store, key, None),
                    Call::Numbered(number) => get(&store, key, Some(number)),
                    Call::Wait(number, _) => {
                        let come = store.wait_for_version(&name(key), number, PATIENCE);
                        read(come.map(|version| told_by(key, &version)))
                    }
                    Call::Delete(number) => delete(&store, key, number),
                    Call::Part { number, writer, of } => {
                        put_part(&store, home, key, number, (writer, of))
                    }
                    Call::Pin(number, label) => read(
                        store
                            .pin(&name(key), Some(number), &label.to_string())
                            .map(|_| Answer::Done),
                    ),
                    Call::Unpin(label) => {
                        read(store.unpin(&name(key), &label.to_string()).map(|()| Answer::Done))
                    }
                };
                is_lost = answer.is_none();
                answer
            });
            if is_lost {
                self.line.lost(generation);
            }
            self.pinned[usize::from(key)] = client.pinned_after(call, answer);
            if let Some(Answer::Put(number) | Answer::Found(number, _)) = answer {
                let seen = &mut self.seen[usize::from(key)];
                *seen = number.max(*seen);
            }
        }
    }
}

/// Puts; none if nobody knows whether it was done.
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

/// Puts a part; none if nobody knows whether it was done. What is put is the same at every try.
fn put_part(
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
            // An earlier try was the last that was missing, and what it made visible is deleted by now.
            ErrorKind::NotFound if matches!(error.refusal(), Some(Refusal::Gone { .. })) => {
                Some(Answer::Failed)
            }
            _ => panic!("part {writer} of {number} of {key}: {error}"),
        },
    }
}

/// The contents of a version.
pub(crate) fn get(store: &Store, key: u8, version: Option<u64>) -> Option<Answer> {
    let options = GetOptions { version, ..GetOptions::default() };
    read(store.get_state_dict(&name(key), &options).map(|(dict, report)| {
        let place = place(report.epoch, report.version);
        let put = put_of(key, writers(key), &dict);
        put.map_or(Answer::Torn(place), |put| Answer::Found(place, put))
    }))
}

fn head(store: &Store, key: u8) -> Option<Answer> {
    let told_by = |version: &VersionInfo| told_by(key, version);
    read(store.head(&name(key)).map(|head| head.as_ref().map_or(Answer::Nothing, told_by)))
}

/// Its writer says which put it is; its number does, if it has several writers.
fn told_by(key: u8, version: &VersionInfo) -> Answer {
    let of = writers(key);
    if of > 1 && version.writers == (0..of).collect() {
        return Answer::Found(version.number, name_of(version.number));
    }
    let (put, place) = (version.writers.to_string().parse(), place(version.epoch, version.number));
    put.map_or(Answer::Torn(place), |put| Answer::Found(place, put))
}

fn read(answer: Result<Answer, Error>) -> Option<Answer> {
    match answer {
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
