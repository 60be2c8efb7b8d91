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
    Error, ErrorKind, GetOptions, JobId, PutOptions, Refusal, Rewind, VersionInfo, WriterSet,
};
use tssd_tests::rng::SeededRng;

use super::contents::{dict, identify_put, part};
use super::history::{Call, Recorder, Response, position, shared_put_id, version_number};
use super::workload;
use crate::linearizability::keys::{
    KEYS, KeyUsage, MULTI_WRITER_KEYS, kept_versions, key_usage, set_retention, store_key, writers,
};
use crate::linearizability::ledger_storage::LedgerStorage;

/// Environment variable: the configuration of a client, as JSON.
pub(crate) const CONFIG_VAR: &str = "TSSD_LINEAR_CLIENT";

/// Timeout of a wait for a version.
const WAIT_TIMEOUT: Duration = Duration::from_millis(20);

/// Configuration of a client process.
#[derive(Serialize, Deserialize)]
pub(crate) struct ClientConfig {
    pub(crate) url: String,
    pub(crate) home: LedgerStorage,
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
    let Ok(config) = std::env::var(CONFIG_VAR) else { return };
    let config: ClientConfig = serde_json::from_str(&config).unwrap();
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
    if config.home != LedgerStorage::Daemon {
        // The first client sets it. The others repeat it.
        while let Err(error) = set_retention(&connection.store().1) {
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
                rng: SeededRng::new(u64::from(config.number) << 8 | u64::from(thread)),
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
    home: LedgerStorage,
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
    rng: SeededRng,
    generation: u64,
    /// Highest number of each key that was observed on this connection.
    seen: [u64; KEYS as usize],
    pinned: [Option<(u64, u32)>; KEYS as usize],
    writer: u32,
}

impl Client<'_> {
    /// Chooses the next key. A writer of versions of several writers often chooses one of these.
    fn key(&mut self) -> u8 {
        let together = MULTI_WRITER_KEYS[usize::try_from(self.rng.below(2)).unwrap()];
        if self.writer < writers(together) && self.rng.one_in(2) {
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
            let client = workload::ClientState {
                usage: key_usage(key),
                keep: kept_versions(key),
                observed: seen,
                put: self.number << 20 | self.puts.fetch_add(1, Ordering::Relaxed),
                wait_timeout: u64::try_from(WAIT_TIMEOUT.as_nanos()).unwrap(),
                writer: self.writer,
                pinned: self.pinned[usize::from(key)],
            };
            let call = client.next_call(&mut self.rng);
            let number = version_number(seen);
            let rewinds = key_usage(key) == KeyUsage::Rewound && number > 0 && self.rng.one_in(4);
            let version = if rewinds {
                Some(1 + self.rng.below(number))
            } else {
                self.rng.one_in(4).then(|| number + 1 + self.rng.below(2))
            };
            let (is_head, home) = (self.rng.one_in(3), self.connection.home);
            let mut is_lost = false;
            let answer = self.recorder.record(key, call, || {
                let answer = match call {
                    Call::Put(put) => try_put(&store, home, key, put, (version, rewinds)),
                    Call::GetNewest if is_head => head(&store, key),
                    Call::GetNewest => get(&store, key, None),
                    Call::GetVersion(number) => get(&store, key, Some(number)),
                    Call::Wait(number, _) => {
                        let found = store.wait_for_version(&store_key(key), number, WAIT_TIMEOUT);
                        to_response(found.map(|version| found_version(key, &version)))
                    }
                    Call::Delete(number) => delete(&store, key, number),
                    Call::Part { number, writer, writers } => {
                        try_put_part(&store, home, key, number, (writer, writers))
                    }
                    Call::Pin(number, label) => to_response(
                        store
                            .pin(&store_key(key), Some(number), &format!("label-{label}"))
                            .map(|_| Response::Done),
                    ),
                    Call::Unpin(label) => to_response(
                        store
                            .unpin(&store_key(key), &format!("label-{label}"))
                            .map(|()| Response::Done),
                    ),
                };
                is_lost = answer.is_none();
                answer
            });
            if is_lost {
                self.connection.mark_lost(generation);
            }
            self.pinned[usize::from(key)] = client.pinned_after(call, answer);
            if let Some(Response::Put(number) | Response::Found(number, _)) = answer {
                let seen = &mut self.seen[usize::from(key)];
                *seen = number.max(*seen);
            }
        }
    }
}

/// Puts a state dict. Returns `None` if the outcome is unknown.
pub(crate) fn try_put(
    store: &Store,
    home: LedgerStorage,
    key: u8,
    put: u32,
    (version, rewind): (Option<u64>, bool),
) -> Option<Response> {
    let options = PutOptions {
        version,
        rewind: if rewind { Rewind::Always } else { Rewind::Never },
        writer: Some(put),
        writers: Some(WriterSet::from_iter([put])),
        durability: home.durability(key),
        ..PutOptions::default()
    };
    match store.put_state_dict(&store_key(key), &dict(key, put), &options) {
        Ok(report) => Some(Response::Put(position(report.epoch, report.version))),
        Err(error) => match error.kind() {
            ErrorKind::Unreachable => None,
            ErrorKind::Overtaken | ErrorKind::Refused => Some(Response::Failed),
            _ => panic!("put {put} of {key}: {error}"),
        },
    }
}

/// Puts a part of a version. Returns `None` if the outcome is unknown.
///
/// Every attempt puts the same contents.
fn try_put_part(
    store: &Store,
    home: LedgerStorage,
    key: u8,
    number: u64,
    (writer, writers): (u32, u32),
) -> Option<Response> {
    let options = PutOptions {
        version: Some(number),
        writer: Some(writer),
        writers: Some((0..writers).collect()),
        job: Some(JobId("together".into())),
        durability: home.durability(key),
        timeout: Duration::from_millis(200),
        ..PutOptions::default()
    };
    match store.put_state_dict(&store_key(key), &part(key, shared_put_id(number), writer), &options)
    {
        Ok(report) if report.visible => Some(Response::Put(report.version)),
        Ok(_) => Some(Response::PartsMissing),
        Err(error) => match error.kind() {
            ErrorKind::Unreachable => None,
            ErrorKind::Overtaken | ErrorKind::Refused | ErrorKind::Busy => Some(Response::Failed),
            // An earlier attempt completed the version, which was deleted since.
            ErrorKind::NotFound if matches!(error.refusal(), Some(Refusal::DataDeleted { .. })) => {
                Some(Response::Failed)
            }
            _ => panic!("part {writer} of {number} of {key}: {error}"),
        },
    }
}

/// Gets a version, or the newest one.
pub(crate) fn get(store: &Store, key: u8, version: Option<u64>) -> Option<Response> {
    let options = GetOptions { version: version.into(), ..GetOptions::default() };
    to_response(store.get_state_dict(&store_key(key), &options).map(|(dict, report)| {
        let place = position(report.epoch, report.version);
        let put = identify_put(key, writers(key), &dict);
        put.map_or(Response::Torn(place), |put| Response::Found(place, put))
    }))
}

fn head(store: &Store, key: u8) -> Option<Response> {
    let found_version = |version: &VersionInfo| found_version(key, version);
    to_response(
        store
            .head(&store_key(key))
            .map(|head| head.as_ref().map_or(Response::NotFound, found_version)),
    )
}

/// Returns the response for a version.
///
/// The writer of the version identifies the put. If it has several writers, the number does.
fn found_version(key: u8, version: &VersionInfo) -> Response {
    let writer_count = writers(key);
    if writer_count > 1 && version.writers == (0..writer_count).collect() {
        return Response::Found(version.number, shared_put_id(version.number));
    }
    let (put, place) =
        (version.writers.to_string().parse(), position(version.epoch, version.number));
    put.map_or(Response::Torn(place), |put| Response::Found(place, put))
}

fn to_response(result: Result<Response, Error>) -> Option<Response> {
    match result {
        Ok(answer) => Some(answer),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => Some(Response::NotFound),
            // A bucket does not protect what a reader reads, so a version may be deleted after its
            // ledger was read. Such a read does not tell which version was the newest.
            ErrorKind::Unreachable | ErrorKind::Overtaken => None,
            _ => panic!("a read: {error}"),
        },
    }
}

fn delete(store: &Store, key: u8, number: u64) -> Option<Response> {
    match store.delete(&store_key(key), Some(number)) {
        Ok(0) => Some(Response::NotFound),
        Ok(1) => Some(Response::Deleted),
        Err(error) if error.kind() == ErrorKind::Unreachable => None,
        other => panic!("delete {number} of {key}: {other:?}"),
    }
}
