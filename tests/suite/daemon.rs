//! The daemon: memory that is shared and recycled, peers that are lost, peers that are hostile.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tssd_format::{StateDict, Storage, Tensor, TensorMeta, Value};
use tssd_store::blocking::{Daemon, Store};
use tssd_store::{
    DaemonOptions, Durability, ErrorKind, GetOptions, JobId, Key, PutOptions, Refusal, Target,
};
use tssd_tests::served::Served;

const MIB: u64 = 1 << 20;

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// One tensor of so many MiB, all of whose bytes are the step.
fn model(step: u8, mib: u64) -> StateDict {
    let meta = TensorMeta::new(tssd_format::Dtype::Uint8, &[mib, MIB]).unwrap();
    let bytes = vec![step; usize::try_from(mib * MIB).unwrap()];
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, Storage::from(bytes), 0).unwrap());
    dict.insert("step", i64::from(step));
    dict
}

fn put(store: &Store, step: u8, mib: u64) {
    store.put_state_dict(&key(), &model(step, mib), &PutOptions::default()).unwrap();
}

fn get(store: &Store) -> StateDict {
    store.get_state_dict(&key(), &GetOptions::default()).unwrap().0
}

/// The step that all bytes have.
fn step_of(dict: &StateDict) -> u8 {
    let Value::Tensor(tensor) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    let bytes = tensor.storage().bytes();
    let step = bytes[0];
    assert!(bytes.iter().all(|byte| *byte == step), "bytes of one version");
    assert_eq!(dict.leaf("step").unwrap(), &Value::from(i64::from(step)));
    step
}

#[test]
fn a_view_never_changes_and_its_memory_comes_back() {
    let served = Served::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    put(&writer, 1, 4);
    let held = get(&reader);
    for step in 2..=6 {
        put(&writer, step, 4);
        assert_eq!(step_of(&get(&reader)), step);
    }
    assert_eq!(step_of(&held), 1, "what is held is what was got");
    drop(held);
    // One version is kept and one is written, whatever the readers see: nothing else is made.
    let settled = reader.status().unwrap().memory;
    for step in 7..=12 {
        put(&writer, step, 4);
        assert_eq!(step_of(&get(&reader)), step);
    }
    let memory = reader.status().unwrap().memory;
    assert_eq!(memory.created_bytes, settled.created_bytes, "no fresh pages: {memory:?}");
    assert_eq!(memory.retired_bytes, 0, "everything was handed back");
    assert!(memory.recycled >= 9, "{memory:?}");
}

#[test]
fn a_put_waits_for_memory_and_says_who_has_it() {
    // Two versions of 8 MiB fit, and what the daemon writes itself.
    let served = Served::new(26 * MIB);
    let (writer, reader) = (served.connect(), served.connect());
    put(&writer, 1, 8);
    let held = get(&reader);
    put(&writer, 2, 8);
    let options = PutOptions { timeout: Duration::from_millis(50), ..PutOptions::default() };
    let error = writer.put_state_dict(&key(), &model(3, 8), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let text = error.to_string();
    let reader_is_named = format!("process {} (`policy` version 1", std::process::id());
    assert!(text.contains(&reader_is_named), "{text}");
    // Nobody sees what did not fit, and it goes on as soon as there is room.
    assert_eq!(step_of(&get(&writer)), 2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
        });
        put(&writer, 3, 8);
    });
    assert_eq!(step_of(&get(&reader)), 3);
    let error = writer.put_state_dict(&key(), &model(4, 32), &options).unwrap_err();
    assert!(error.to_string().contains("memory"), "it never fits: {error}");
}

#[test]
fn memory_of_who_is_lost_is_not_written_again() {
    let served = Served::new(1 << 30);
    let writer = served.connect();
    let reader = served.connect();
    put(&writer, 1, 4);
    let held = get(&reader);
    // The connection goes with the store, without a word about the view.
    drop(reader);
    let reader = served.connect();
    for step in 2..=5 {
        put(&writer, step, 4);
        assert_eq!(step_of(&get(&reader)), step);
    }
    assert_eq!(step_of(&held), 1);
    let memory = writer.status().unwrap().memory;
    assert!(memory.retired >= 4 * MIB, "it counts until the process is gone: {memory:?}");
}

#[test]
fn versions_outlive_their_writer() {
    let served = Served::new(1 << 30);
    put(&served.connect(), 1, 4);
    let reader = served.connect();
    assert_eq!(step_of(&get(&reader)), 1);
    put(&served.connect(), 2, 4);
    assert_eq!(step_of(&get(&reader)), 2);
}

#[test]
fn writers_of_one_version_may_be_many() {
    let served = Served::new(1 << 30);
    let reader = served.connect();
    for step in 1..=3_u8 {
        std::thread::scope(|scope| {
            for rank in 0..4_u32 {
                let served = &served;
                scope.spawn(move || {
                    let options = PutOptions {
                        version: Some(step.into()),
                        writer: Some(rank),
                        writers: Some((0..4).collect()),
                        job: Some(JobId("job".into())),
                        ..PutOptions::default()
                    };
                    let mut dict = StateDict::new();
                    dict.insert(
                        format!("rank{rank}"),
                        Tensor::from_slice(&[step; 7], &[7]).unwrap(),
                    );
                    served.connect().put_state_dict(&key(), &dict, &options).unwrap();
                });
            }
        });
        let (dict, report) = reader.get_state_dict(&key(), &GetOptions::default()).unwrap();
        assert_eq!((dict.entries().len(), report.version), (4, u64::from(step)));
    }
}

#[test]
fn in_place_reads_take_what_is_asked_for() {
    let served = Served::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    for step in 1..=3 {
        put(&writer, step, 4);
        let mut memory = vec![0; usize::try_from(4 * MIB).unwrap()];
        let meta = TensorMeta::new(tssd_format::Dtype::Uint8, &[4, MIB]).unwrap();
        let target = Target { fqn: "weight".into(), place: None, meta, bytes: &mut memory };
        let options = GetOptions { unverified: step == 2, ..GetOptions::default() };
        let report = reader.get_state_dict_into(&key(), &mut [target], &options).unwrap();
        assert_eq!(report.bytes_transferred, 4 * MIB);
        assert_eq!(report.bytes_verified, if step == 2 { 0 } else { 4 * MIB });
        assert!(memory.iter().all(|byte| *byte == step));
    }
}

#[test]
fn a_daemon_that_is_gone_is_an_error_and_views_stay() {
    let served = Served::new(1 << 30);
    let store = served.connect();
    put(&store, 1, 4);
    let held = get(&store);
    drop(served);
    let error = store.head(&key()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let error = store.put_state_dict(&key(), &model(2, 4), &PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert_eq!(step_of(&held), 1);
}

#[test]
fn one_daemon_serves_a_socket() {
    let served = Served::new(1 << 30);
    let error = Daemon::bind(DaemonOptions::at(served.socket(), MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
}

#[test]
fn what_a_killed_daemon_leaves_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    // A socket that nobody listens to any more.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let daemon = Daemon::bind(DaemonOptions::at(&socket, MIB));
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let thread = std::thread::spawn(move || daemon.unwrap().serve(stopped).unwrap());
    let store = Store::connect(&format!("unix:{}", socket.display())).unwrap();
    assert!(store.keys(None).unwrap().is_empty());
    drop(stop);
    thread.join().unwrap();
    assert!(!socket.exists(), "a daemon that ends takes its socket along");
}

/// A frame, byte for byte as `spec/protocol.md` has it.
fn frame(kind: u8, number: u64, head: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"TSSD".to_vec();
    bytes.extend([kind, 0, 0, 0]);
    bytes.extend(u32::try_from(head.len()).unwrap().to_le_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(head.as_bytes());
    bytes.extend(data);
    bytes
}

const HELLO: &str = r#"{"op":"hello","protocol":{"major":1,"minor":0},"client":"test"}"#;

/// A connection that says what it likes.
struct Raw(UnixStream);

impl Raw {
    fn connect(served: &Served) -> Self {
        let stream = UnixStream::connect(served.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self(stream)
    }

    fn greet(served: &Served) -> Self {
        let mut raw = Self::connect(served);
        raw.send(&frame(1, 1, HELLO, b""));
        let (number, head) = raw.receive().unwrap();
        assert_eq!(number, 1);
        assert_eq!(head["welcome"]["protocol"]["major"], 1);
        raw
    }

    fn send(&mut self, bytes: &[u8]) {
        // Whoever is turned away cannot say everything.
        let _ = self.0.write_all(bytes);
    }

    /// The number and head of the next frame; none if the daemon has ended the connection.
    fn receive(&mut self) -> Option<(u64, serde_json::Value)> {
        let mut header = [0; 24];
        self.0.read_exact(&mut header).ok()?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let mut head = vec![0; word(8) as usize];
        self.0.read_exact(&mut head).ok()?;
        assert_eq!(word(12), 0, "no reply has data");
        Some((word(16).into(), serde_json::from_slice(&head).unwrap()))
    }

    fn is_ended(&mut self) -> bool {
        self.receive().is_none()
    }
}

#[test]
fn who_breaks_the_protocol_is_turned_away_and_nobody_else() {
    let served = Served::new(1 << 30);
    let store = served.connect();
    put(&store, 1, 1);
    let header = |kind: u8, head: u32, data: u32, fds: u8| {
        let mut bytes = frame(kind, 1, "", b"");
        bytes[5] = fds;
        bytes[8..12].copy_from_slice(&head.to_le_bytes());
        bytes[12..16].copy_from_slice(&data.to_le_bytes());
        bytes
    };
    let newer = HELLO.replace(r#""major":1"#, r#""major":2"#);
    let garbage: Vec<(&str, Vec<u8>)> = vec![
        ("HTTP", b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n".to_vec()),
        ("zeros", vec![0; 4096]),
        ("a head over the limit", header(1, (1 << 20) + 1, 0, 0)),
        ("data over the limit", header(1, 2, (16 << 20) + 1, 0)),
        ("lengths that overflow", header(1, u32::MAX, u32::MAX, 0)),
        ("more descriptors than allowed", header(1, 2, 0, 65)),
        ("an unknown kind of frame", header(9, 2, 0, 0)),
        ("a newer protocol", frame(1, 1, &newer, b"")),
        ("no hello", frame(1, 1, r#"{"op":"status"}"#, b"")),
        ("no JSON", frame(1, 1, "hello", b"")),
    ];
    for (what, bytes) in &garbage {
        let mut raw = Raw::connect(&served);
        raw.send(bytes);
        assert!(raw.is_ended(), "{what}");
        if *what != "a newer protocol" && *what != "no hello" && *what != "no JSON" {
            let mut raw = Raw::greet(&served);
            raw.send(bytes);
            assert!(raw.is_ended(), "{what}, after hello");
        }
    }
    // Descriptors that are announced and do not come.
    let mut raw = Raw::greet(&served);
    let mut lying = frame(1, 2, r#"{"op":"status"}"#, b"");
    lying[5] = 1;
    raw.send(&lying);
    assert!(raw.is_ended());
    assert_eq!(step_of(&get(&store)), 1);
}

#[test]
fn requests_that_cannot_be_met_are_answered() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served);
    let long = "k".repeat(1025);
    let requests = [
        (r#"{"op":"dance"}"#.to_owned(), "Invalid", "not understood"),
        (HELLO.to_owned(), "Invalid", "once"),
        (
            r#"{"op":"commit","contribution":7,"digest":"00000000000000000000000000000000"}"#
                .into(),
            "Invalid",
            "none of this connection's",
        ),
        (r#"{"op":"withdraw","contribution":7}"#.into(), "Invalid", "none of this connection's"),
        (r#"{"op":"versions"}"#.into(), "Invalid", "missing field `key`"),
        (r#"{"op":"versions","key":"a\u0000b"}"#.into(), "Invalid", "control character"),
        (format!(r#"{{"op":"versions","key":"{long}"}}"#), "Invalid", "1025"),
        (r#"{"op":"locate","key":"k","selector":"Newest"}"#.into(), "NotFound", "key `k`"),
        (r#"{"op":"retain","key":"k","keep":0}"#.into(), "Invalid", "nonzero"),
    ];
    for (number, (request, kind, text)) in (2..).zip(requests) {
        raw.send(&frame(1, number, &request, b""));
        let (answered, head) = raw.receive().unwrap();
        assert_eq!(answered, number);
        assert_eq!(head["failed"]["kind"], kind, "{request}: {head}");
        assert!(head["failed"]["text"].as_str().unwrap().contains(text), "{request}: {head}");
    }
    // A field that is not known is passed over.
    raw.send(&frame(1, 99, r#"{"op":"keys","prefix":"","fashion":null}"#, b""));
    assert_eq!(raw.receive().unwrap().1["keys"], serde_json::json!([]));
    // An archive that is not as long as it was said to be.
    let begin = r#"{"op":"begin","key":"k","proposal":{"writer":0,"writers":"0","file_len":100,
        "timeout":{"secs":1,"nanos":0}}}"#;
    raw.send(&frame(1, 100, begin, b""));
    let (_, begun) = raw.receive().unwrap();
    let contribution = &begun["begun"]["contribution"];
    let commit = format!(
        r#"{{"op":"commit","contribution":{contribution},"digest":"00000000000000000000000000000000"}}"#
    );
    raw.send(&frame(1, 101, &commit, b"too short"));
    let (_, failed) = raw.receive().unwrap();
    assert_eq!(failed["failed"]["kind"], "Invalid", "{failed}");
    // And one that is no archive.
    raw.send(&frame(1, 102, begin, b""));
    let (_, begun) = raw.receive().unwrap();
    let contribution = &begun["begun"]["contribution"];
    let commit = format!(
        r#"{{"op":"commit","contribution":{contribution},"digest":"00000000000000000000000000000000"}}"#
    );
    raw.send(&frame(1, 103, &commit, &[7; 100]));
    let (_, failed) = raw.receive().unwrap();
    assert_eq!(failed["failed"]["kind"], "Rejected", "{failed}");
    assert!(served.connect().versions(&Key::new("k").unwrap()).unwrap().is_empty());
}

#[test]
fn a_writer_that_goes_in_the_middle_leaves_no_half() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served);
    let begin = r#"{"op":"begin","key":"policy","proposal":{"writer":0,"writers":"0",
        "file_len":1000,"timeout":{"secs":1,"nanos":0}}}"#;
    raw.send(&frame(1, 2, begin, b""));
    assert!(raw.receive().unwrap().1["begun"].is_object());
    drop(raw);
    let store = served.connect();
    for step in 1..=3 {
        put(&store, step, 1);
    }
    assert_eq!(step_of(&get(&store)), 3);
    assert_eq!(store.versions(&key()).unwrap().len(), 1);
}

fn durable() -> PutOptions {
    PutOptions { durability: Durability::Disk, ..PutOptions::default() }
}

#[test]
fn what_is_durable_outlives_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let (lasting, passing) = (Key::new("lasting").unwrap(), Key::new("passing").unwrap());
    let served = Served::over(folder.path());
    let store = served.connect();
    for step in 1..=2 {
        store.put_state_dict(&lasting, &model(step, 1), &durable()).unwrap();
    }
    store.pin(&lasting, None, "best").unwrap();
    // The newest of this key is in memory alone, and goes with it.
    store.put_state_dict(&lasting, &model(3, 1), &PutOptions::default()).unwrap();
    store.put_state_dict(&passing, &model(1, 1), &PutOptions::default()).unwrap();
    drop(store);
    drop(served);

    let served = Served::over(folder.path());
    let store = served.connect();
    assert_eq!(store.keys(None).unwrap(), std::slice::from_ref(&lasting));
    let (dict, report) = store.get_state_dict(&lasting, &GetOptions::default()).unwrap();
    assert_eq!((step_of(&dict), report.version), (2, 2));
    assert_eq!(store.pins(&lasting).unwrap()["best"], 2);
    let error = store
        .put_state_dict(&lasting, &model(2, 1), &PutOptions { version: Some(1), ..durable() })
        .unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::VersionNotNewer { .. })), "{error}");
    store.unpin(&lasting, "best").unwrap();
    store.put_state_dict(&lasting, &model(4, 1), &durable()).unwrap();
    assert_eq!(step_of(&dict), 2, "a view of a file that is deleted stays");
    drop(dict);
    // The daemon hears of it before it answers what comes next.
    store.head(&lasting).unwrap();
    let mut folders: Vec<_> = std::fs::read_dir(folder.path().join("lasting"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    folders.sort();
    assert_eq!(folders, [".ledger", "0-3"], "the third is what readers had seen last: {folders:?}");
    // What it wrote is a store in a directory like any other.
    drop(store);
    drop(served);
    let store = Store::connect(folder.path().to_str().unwrap()).unwrap();
    let (dict, _) = store.get_state_dict(&lasting, &GetOptions::default()).unwrap();
    assert_eq!(step_of(&dict), 4);
}

#[test]
fn writers_agree_on_durability_and_a_daemon_without_a_directory_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let served = Served::over(folder.path());
    let options = |writer, durability| PutOptions {
        version: Some(1),
        writer: Some(writer),
        writers: Some((0..2).collect()),
        job: Some(JobId("job".into())),
        durability,
        ..PutOptions::default()
    };
    let store = served.connect();
    let mut dict = StateDict::new();
    dict.insert("step", 1_i64);
    store.put_state_dict(&key(), &dict, &options(0, Durability::Disk)).unwrap();
    let error = store.put_state_dict(&key(), &dict, &options(1, Durability::Memory)).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::DurabilityDisagrees { .. })), "{error}");
    let store = Served::new(1 << 30);
    let error = store.connect().put_state_dict(&key(), &dict, &durable()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("--root"), "{error}");
    let error = Store::memory().unwrap().put_state_dict(&key(), &dict, &durable()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn a_directory_has_one_daemon_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let direct = Store::directory(folder.path()).unwrap();
    put(&direct, 1, 1);
    let options = |socket: &str| DaemonOptions {
        root: Some(folder.path().to_owned()),
        ..DaemonOptions::at(folder.path().join(socket), 1 << 30)
    };
    let error = Daemon::bind(options("one")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "somebody writes it directly: {error}");
    drop(direct);
    let served = Served::over(folder.path());
    let error = Daemon::bind(options("two")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    // Whoever opens it directly may read; who writes is told where the daemon is.
    let direct = Store::directory(folder.path()).unwrap();
    assert_eq!(step_of(&get(&direct)), 1);
    let error = direct.put_state_dict(&key(), &model(2, 1), &PutOptions::default()).unwrap_err();
    assert!(error.to_string().contains(&served.url()), "{error}");
    // By its address it is the daemon's.
    let store = Store::connect(folder.path().to_str().unwrap()).unwrap();
    store.put_state_dict(&key(), &model(2, 1), &durable()).unwrap();
    assert_eq!(step_of(&get(&served.connect())), 2);
}

/// What is answered over HTTP: the number, and the body.
fn http(served: &Served, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(served.metrics()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    answer(stream)
}

fn answer(mut stream: TcpStream) -> (u16, String) {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut text = String::new();
    // Whoever is turned away may be so before all that was said has been read.
    let _ = stream.read_to_string(&mut text);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return (0, text) };
    (head[9..12].parse().unwrap(), body.to_owned())
}

fn ask(served: &Served, path: &str) -> (u16, String) {
    http(served, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"))
}

/// The samples of a page, each by its name and labels.
fn samples(page: &str) -> BTreeMap<&str, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let samples = lines.map(|line| line.rsplit_once(' ').unwrap());
    samples.map(|(name, value)| (name, value.parse().unwrap())).collect()
}

#[test]
fn metrics_say_what_a_daemon_has_done() {
    let served = Served::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    put(&writer, 1, 4);
    let held = get(&reader);
    put(&writer, 2, 4);
    put(&writer, 3, 4);
    let odd = Key::new(r#"a "b"\c"#).unwrap();
    writer.put_state_dict(&odd, &model(1, 1), &PutOptions::default()).unwrap();
    assert!(reader.get(&Key::new("none").unwrap(), "w", &GetOptions::default()).is_err());

    let (status, page) = ask(&served, "/metrics");
    assert_eq!(status, 200);
    let samples = samples(&page);
    for (name, value) in [
        ("tssd_connections", 2.0),
        ("tssd_connections_total", 2.0),
        ("tssd_puts_total", 4.0),
        ("tssd_versions_published_total", 4.0),
        ("tssd_gets_total", 1.0),
        ("tssd_leases", 1.0),
        ("tssd_keys", 2.0),
        ("tssd_versions", 2.0),
        ("tssd_memory_limit_bytes", f64::from(1 << 30)),
        (r#"tssd_head_version{key="policy"}"#, 3.0),
        (r#"tssd_head_version{key="a \"b\"\\c"}"#, 1.0),
        (r#"tssd_requests_total{op="commit",outcome="Ok"}"#, 4.0),
        (r#"tssd_requests_total{op="locate",outcome="Ok"}"#, 1.0),
        (r#"tssd_requests_total{op="locate",outcome="NotFound"}"#, 1.0),
    ] {
        assert_eq!(samples.get(name), Some(&value), "{name}\n{page}");
    }
    let four = f64::from(4 << 20);
    assert!(samples["tssd_put_bytes_total"] > 3.0 * four, "{page}");
    assert!((four..1.1 * four).contains(&samples["tssd_leased_bytes_total"]), "{page}");
    assert!(samples["tssd_memory_used_bytes"] >= samples["tssd_memory_warm_bytes"], "{page}");
    let lag = samples.iter().find(|(name, _)| name.starts_with("tssd_reader_lag_versions{"));
    let pid = format!(r#"pid="{}""#, std::process::id());
    assert!(lag.is_some_and(|(name, lag)| name.contains(&pid) && *lag == 2.0), "{page}");
    // Each sample stands below the help and the type of its family.
    let mut family = "";
    for line in page.lines() {
        match line.strip_prefix("# TYPE ") {
            Some(line) => family = line.split(' ').next().unwrap(),
            None if line.starts_with("# HELP ") => {}
            None => assert_eq!(line.split(['{', ' ']).next().unwrap(), family),
        }
    }
    drop(held);
}

#[test]
fn who_watches_over_http_does_no_harm() {
    let served = Served::new(1 << 30);
    assert_eq!(ask(&served, "/healthz").0, 200);
    assert_eq!(ask(&served, "/readyz").0, 200);
    assert_eq!(ask(&served, "/etc/passwd").0, 404);
    assert_eq!(http(&served, "POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n").0, 405);
    assert_eq!(http(&served, "\0\0\0\0garbage\r\n\r\n").0, 400);
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20));
    assert!(matches!(http(&served, &long).0, 0 | 414 | 431), "a request over the limit");
    // More than are served at once, who say nothing, or half of it.
    let idle: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(served.metrics()).unwrap();
            stream.write_all(b"GET /metr").unwrap();
            stream
        })
        .collect();
    let store = served.connect();
    put(&store, 1, 1);
    assert_eq!(step_of(&get(&store)), 1);
    for stream in idle {
        answer(stream);
    }
    assert_eq!(ask(&served, "/healthz").0, 200, "they were cut off");
}

#[test]
fn metrics_are_for_this_host_alone() {
    let folder = tempfile::tempdir().unwrap();
    let options = DaemonOptions {
        metrics: Some("0.0.0.0:0".parse().unwrap()),
        ..DaemonOptions::at(folder.path().join("socket"), MIB)
    };
    let error = Daemon::bind(options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("only this host may ask"), "{error}");
}

#[test]
fn a_daemon_that_ends_is_not_ready_and_alive() {
    let mut served = Served::new(1 << 30);
    // A peer that does not read what it asks for: the daemon waits for it when it ends.
    let mut slow = Raw::greet(&served);
    let put_off = r#"{"op":"begin","key":"k","proposal":{"writer":0,"writers":"0-1","job":"j",
        "number":1,"file_len":100,"timeout":{"secs":5,"nanos":0}}}"#;
    slow.send(&frame(1, 2, put_off, b""));
    assert!(slow.receive().unwrap().1["begun"].is_object());
    // The second of the same writer waits until the first is decided.
    slow.send(&frame(1, 3, &put_off.replace(r#""number":1"#, r#""number":2"#), b""));
    slow.send(&frame(1, 4, &put_off.replace(r#""number":1"#, r#""number":3"#), b""));
    slow.send(&frame(1, 5, r#"{"op":"status"}"#, b""));
    while slow.receive().unwrap().0 != 5 {}
    served.stop();
    while ask(&served, "/readyz").0 != 503 {
        std::thread::yield_now();
    }
    assert_eq!(ask(&served, "/healthz").0, 200);
}
