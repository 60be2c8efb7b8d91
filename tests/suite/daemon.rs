//! The daemon: memory that is shared and recycled, peers that are lost, peers that are hostile.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use tssd_format::{Archive, StateDict, Storage, Tensor, TensorMeta, TorchStoreStateDict, Value};
use tssd_store::blocking::{Daemon, Store};
use tssd_store::{
    DaemonOptions, Durability, ErrorKind, GetOptions, JobId, Key, PutOptions, Refusal, Target,
};
use tssd_tests::command::{Serve, quick_folder};
use tssd_tests::raw::{HELLO, Raw, frame};
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

/// Waits until something is so that others are doing now.
fn eventually(is_so: impl Fn() -> bool) {
    assert!((0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        is_so()
    }));
}

/// The step that all bytes have.
fn step_of(dict: &StateDict) -> u8 {
    let Value::Tensor(tensor) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    let bytes = tensor.view().span();
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
        let target =
            Target { fqn: "weight".into(), place: None, meta, memory: (&mut memory).into() };
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
    assert!(store.is_connected());
    drop(served);
    let error = store.head(&key()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(!store.is_connected());
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

/// Files of a folder in memory have seals, as segments do, and not those of segments.
#[test]
fn what_is_durable_in_a_folder_in_memory_is_read_after_a_restart() {
    let folder = quick_folder();
    let served = Served::over(folder.path());
    served.connect().put_state_dict(&key(), &model(1, 1), &durable()).unwrap();
    drop(served);
    let served = Served::over(folder.path());
    assert_eq!(step_of(&get(&served.connect())), 1);
}

#[test]
fn what_a_killed_daemon_leaves_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    // A socket that nobody listens to any more.
    drop(UnixListener::bind(&socket).unwrap());
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

/// A request of one writer.
fn begin(key: &str, len: usize) -> String {
    format!(
        r#"{{"op":"begin","key":"{key}","proposal":{{"writer":0,"writers":"0","file_len":{len},
            "timeout":{{"secs":1,"nanos":0}}}}}}"#
    )
}

const DIGEST: &str = "00000000000000000000000000000000";

/// A request that commits what has begun.
fn commit(begun: &serde_json::Value) -> String {
    let contribution = &begun["begun"]["contribution"];
    format!(r#"{{"op":"commit","contribution":{contribution},"digest":"{DIGEST}"}}"#)
}

const LOCATE: &str = r#"{"op":"locate","key":"policy","selector":"newest"}"#;

/// A notice that hands a lease back.
fn release(leased: &serde_json::Value) -> Vec<u8> {
    let lease = &leased["leased"]["lease"];
    frame(4, 0, &format!(r#"{{"op":"release","lease":{lease}}}"#), b"")
}

/// Puts an archive that is not inline; returns its segment, and its memory if that came along.
fn put_raw(
    raw: &mut Raw,
    archive: &[u8],
    memory: Option<&File>,
) -> (serde_json::Value, Option<File>) {
    let (begun, fds) = raw.ask_for_descriptors(&begin("policy", archive.len()));
    let room = &begun["begun"]["room"]["segment"];
    let come = fds.into_iter().next().map(File::from);
    let file = come.as_ref().or(memory).expect("memory that is not there yet comes");
    assert_eq!(file.metadata().unwrap().len(), room["capacity"].as_u64().unwrap());
    if come.is_some() {
        file.write_all_at(archive, 0).unwrap();
    }
    let progress = raw.ask(6, &commit(&begun));
    assert_eq!(progress["progress"], serde_json::json!({"visible": true, "missing": ""}));
    (room["segment"].clone(), come)
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
    let garbage: Vec<(&str, Vec<u8>)> = vec![
        ("HTTP", b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n".to_vec()),
        ("zeros", vec![0; 4096]),
        ("a head over the limit", header(1, (64 << 10) + 1, 0, 0)),
        ("data over the limit", header(1, 2, (256 << 10) + 1, 0)),
        ("lengths that overflow", header(1, u32::MAX, u32::MAX, 0)),
        ("a descriptor, though it does not come", [header(1, 2, 0, 1), b"{}".to_vec()].concat()),
        ("two descriptors", header(1, 2, 0, 2)),
        ("an unknown kind of frame", header(9, 2, 0, 0)),
        ("a part", frame(2, 1, HELLO, b"")),
        ("a reply", frame(3, 1, HELLO, b"")),
    ];
    for (what, bytes) in &garbage {
        let mut raw = Raw::connect(&served.socket());
        raw.send(bytes);
        assert!(raw.is_ended(), "{what}");
        let mut raw = Raw::greet(&served.socket());
        raw.send(bytes);
        assert!(raw.is_ended(), "{what}, after hello");
    }
    // Who has not said hello has less.
    for bytes in [header(1, (4 << 10) + 1, 0, 0), header(1, 2, 1, 0), frame(4, 1, HELLO, b"")] {
        let mut raw = Raw::connect(&served.socket());
        raw.send(&bytes);
        assert!(raw.is_ended(), "{bytes:?}");
    }
    // Descriptors that nobody has announced.
    let mut raw = Raw::greet(&served.socket());
    raw.send_with(&frame(1, 2, r#"{"op":"status"}"#, b""), &[std::io::stdin()]);
    assert!(raw.is_ended());
    assert_eq!(step_of(&get(&store)), 1);
}

#[test]
fn requests_that_cannot_be_met_are_answered() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
    let long = "k".repeat(1025);
    let requests = [
        (r#"{"op":"dance"}"#.to_owned(), "invalid", "not understood"),
        (HELLO.to_owned(), "invalid", "once"),
        (
            r#"{"op":"commit","contribution":7,"digest":"00000000000000000000000000000000"}"#
                .into(),
            "invalid",
            "none of this connection's",
        ),
        (r#"{"op":"withdraw","contribution":7}"#.into(), "invalid", "none of this connection's"),
        (r#"{"op":"versions"}"#.into(), "invalid", "missing field `key`"),
        (r#"{"op":"versions","key":"a\u0000b"}"#.into(), "invalid", "control character"),
        (format!(r#"{{"op":"versions","key":"{long}"}}"#), "invalid", "1025"),
        (r#"{"op":"locate","key":"k","selector":"newest"}"#.into(), "not_found", "key `k`"),
        (r#"{"op":"retain","key":"k","keep":0}"#.into(), "invalid", "nonzero"),
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
    assert_eq!(raw.receive().unwrap().1["keys"]["keys"], serde_json::json!([]));
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
    assert_eq!(failed["failed"]["kind"], "invalid", "{failed}");
    // And one that is no archive.
    raw.send(&frame(1, 102, begin, b""));
    let (_, begun) = raw.receive().unwrap();
    let contribution = &begun["begun"]["contribution"];
    let commit = format!(
        r#"{{"op":"commit","contribution":{contribution},"digest":"00000000000000000000000000000000"}}"#
    );
    raw.send(&frame(1, 103, &commit, &[7; 100]));
    let (_, failed) = raw.receive().unwrap();
    assert_eq!(failed["failed"]["kind"], "rejected", "{failed}");
    assert!(served.connect().versions(&Key::new("k").unwrap()).unwrap().is_empty());
}

/// A request for room in the memory of a GPU.
fn begin_on_gpu(len: u64, device: u64, durability: &str) -> String {
    format!(
        r#"{{"op":"begin","key":"policy","proposal":{{"writer":0,"writers":"0","file_len":{len},
        "durability":"{durability}","device":{{"uuid":"GPU-1","len":{device}}},
        "timeout":{{"secs":1,"nanos":0}}}}}}"#
    )
}

/// No GPU and no driver is needed to keep its memory: what stands for that here is a file.
#[test]
fn memory_of_gpus_is_taken_only_as_it_must_be() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
    let dict = model(7, 1);
    let layout = tssd_format::Layout::plan(&dict, &tssd_format::Options::new()).unwrap();
    let archive = TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let archive = archive.as_bytes();
    let (index_off, len) = (layout.index_off(), layout.file_len());
    let shell = [&archive[..4096], &archive[index_off as usize..]].concat();
    let memory = || rustix::fs::memfd_create("GPU", MemfdFlags::CLOEXEC).unwrap();
    let with_descriptors = |number: u64, head: &str, count: u8| {
        let mut bytes = frame(1, number, head, b"");
        bytes[5] = count;
        bytes
    };
    let digest = "00000000000000000000000000000000";
    // What it is told to unmap comes in between.
    let answer = |raw: &mut Raw, number: u64| {
        std::iter::from_fn(|| raw.receive()).find(|(answered, _)| *answered == number).unwrap().1
    };
    let ask = |raw: &mut Raw, number: u64, request: &str, data: &[u8]| {
        raw.send(&frame(1, number, request, data));
        answer(raw, number)
    };
    for (number, (len, device, durability)) in (10..).zip([
        (len, 4095, "memory"),
        (len, len + 1, "memory"),
        (u64::MAX, u64::MAX, "memory"),
        (1 << 63, 1 << 63, "memory"),
        (len, index_off, "disk"),
    ]) {
        let reply = ask(&mut raw, number, &begin_on_gpu(len, device, durability), b"");
        assert_eq!(reply["failed"]["kind"], "invalid", "{device}: {reply}");
    }
    let long = begin_on_gpu(len, index_off, "memory").replace("GPU-1", &"G".repeat(65));
    assert_eq!(ask(&mut raw, 19, &long, b"")["failed"]["kind"], "invalid");
    let begin = begin_on_gpu(len, index_off, "memory");
    let bring = |segment: &serde_json::Value| format!(r#"{{"op":"bring","segment":{segment}}}"#);
    let commit = |begun: &serde_json::Value| {
        let contribution = &begun["contribution"];
        format!(r#"{{"op":"commit","contribution":{contribution},"digest":"{digest}"}}"#)
    };
    // Without its memory it is no archive.
    let begun = ask(&mut raw, 20, &begin, b"")["begun"].clone();
    assert_eq!((&begun["room"], &begun["device"]["device"]), (&"inline".into(), &"GPU-1".into()));
    assert!(begun["device"]["capacity"].as_u64().unwrap() >= index_off);
    let reply = ask(&mut raw, 21, &commit(&begun), &shell);
    assert!(reply["failed"]["text"].as_str().unwrap().contains("has not come"), "{reply}");
    // It comes as one descriptor, for what was lent; who was interrupted brings it again.
    let first = ask(&mut raw, 22, &begin, b"")["begun"].clone();
    let lent = &first["device"]["segment"];
    assert_eq!(ask(&mut raw, 23, &bring(lent), b"")["failed"]["kind"], "invalid");
    for (number, segment, is_taken) in
        [(24, &999.into(), false), (25, lent, true), (26, lent, true)]
    {
        assert!(raw.send_with(&with_descriptors(number, &bring(segment), 1), &[memory()]));
        assert_eq!(answer(&mut raw, number) == "done", is_taken, "{number}");
    }
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(raw.send_with(&with_descriptors(18, &bring(lent), 1), &[socket]));
    assert_eq!(answer(&mut raw, 18)["failed"]["kind"], "invalid");
    assert_eq!(ask(&mut raw, 29, &commit(&first), &shell[1..])["failed"]["kind"], "invalid");
    // What was given up is not lent again: who was interrupted may not know what has become of it.
    let begun = ask(&mut raw, 30, &begin, b"")["begun"].clone();
    let segment = &begun["device"]["segment"];
    assert_ne!(segment, lent);
    assert!(raw.send_with(&with_descriptors(31, &bring(segment), 1), &[memory()]));
    assert_eq!(answer(&mut raw, 31), "done");
    assert_eq!(ask(&mut raw, 32, &commit(&begun), &shell)["progress"]["visible"], true);
    // Who knows of such memory gets it, nobody else does, and nobody here can look at it.
    let locate = r#"{"op":"locate","key":"policy","selector":"newest""#;
    let mut reader = Raw::greet(&served.socket());
    assert_eq!(reader.ask(2, &format!("{locate}}}"))["failed"]["kind"], "unsupported");
    let (reply, fds) = reader.ask_for_descriptors(&format!(r#"{locate},"devices":true}}"#));
    let (_, archive) = reply["leased"]["archives"].as_object().unwrap().iter().next().unwrap();
    assert_eq!((&archive["device"], &archive["len"]), (segment, &len.into()));
    let segments = reply["leased"]["segments"].as_array().unwrap();
    let at = segments.iter().position(|each| each["device"] == "GPU-1").unwrap();
    assert_eq!((fds.len(), segments.len()), (2, 2));
    let brought = std::fs::read_link(format!("/proc/self/fd/{}", fds[at].as_raw_fd())).unwrap();
    assert!(brought.to_str().unwrap().starts_with("/memfd:GPU"));
    let error = served.connect().get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let error = served.connect_far().get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // More than one descriptor is none that a client sends.
    let fds = [memory(), memory()];
    reader.send_with(&with_descriptors(9, &bring(segment), 2), &fds);
    assert!(reader.is_ended());
    // Who was lost while it read may look at it still: it is not lent again.
    for number in [40, 50, 60] {
        let begun = ask(&mut raw, number, &begin, b"")["begun"].clone();
        let lent = &begun["device"]["segment"];
        assert_ne!(lent, segment);
        // The third one has the memory of the first.
        if number < 60 {
            let bytes = with_descriptors(number + 1, &bring(lent), 1);
            assert!(raw.send_with(&bytes, &[memory()]));
            assert_eq!(answer(&mut raw, number + 1), "done");
        }
        assert_eq!(ask(&mut raw, number + 2, &commit(&begun), &shell)["progress"]["visible"], true);
    }
}

#[test]
fn a_writer_that_goes_in_the_middle_leaves_no_half() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
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
    let third = tssd_tests::layout::version(&folder.path().join("lasting"), "0-3");
    let third = third.file_name().unwrap().to_str().unwrap();
    assert_eq!(folders, [".ledger", third], "the third is what readers had seen last: {folders:?}");
    // What it wrote is a store in a directory like any other.
    drop(store);
    drop(served);
    let store = Store::connect(folder.path().to_str().unwrap()).unwrap();
    let (dict, _) = store.get_state_dict(&lasting, &GetOptions::default()).unwrap();
    assert_eq!(step_of(&dict), 4);
}

/// The files of such a directory answer as memory does, and were taken for memory that is not sealed.
#[test]
fn a_directory_in_memory_is_read_after_a_restart() {
    let folder = quick_folder();
    Served::over(folder.path()).connect().put_state_dict(&key(), &model(1, 1), &durable()).unwrap();
    assert_eq!(step_of(&get(&Served::over(folder.path()).connect())), 1);
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

#[test]
fn who_does_not_say_hello_first_is_told_so() {
    let served = Served::new(1 << 30);
    let newer = HELLO.replace(r#""major":1"#, r#""major":2"#);
    let first = [
        (newer.as_str(), "refused", "protocol 2 is not spoken here, only 1"),
        (r#"{"op":"status"}"#, "invalid", "hello comes first"),
        (r#"{"op":"dance"}"#, "invalid", "not understood"),
        ("hello", "invalid", "not understood"),
    ];
    for (head, kind, text) in first {
        let mut raw = Raw::connect(&served.socket());
        let failed = &raw.ask(7, head)["failed"];
        assert_eq!(failed["kind"], kind, "{head}: {failed}");
        assert!(failed["text"].as_str().unwrap().contains(text), "{head}: {failed}");
        assert!(raw.is_ended(), "{head}");
    }
}

#[test]
fn minor_versions_understand_each_other() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::connect(&served.socket());
    // A later one says more, an earlier one less.
    let later = r#"{"op":"hello","protocol":{"major":1,"minor":7,"patch":2},"client":"",
        "wants":["everything"]}"#;
    let welcome = &raw.ask(1, later)["welcome"];
    assert_eq!(welcome["protocol"], serde_json::json!({"major": 1, "minor": 0}));
    assert_eq!(welcome["pid"], std::process::id());
    assert_eq!(welcome["inline"], 256 << 10);
    let mut raw = Raw::connect(&served.socket());
    let earlier = r#"{"op":"hello","protocol":{"major":1,"minor":0}}"#;
    assert!(raw.ask(1, earlier)["welcome"].is_object());
    // A notice that is not known is passed over; so are unknown fields.
    raw.send(&frame(4, 0, r#"{"op":"yawn","how":"widely"}"#, b""));
    raw.send(&frame(4, 0, r#"{"op":"unmap","segments":[9],"why":null}"#, b""));
    let lease = "00112233445566778899aabbccddeeff";
    raw.send(&frame(4, 0, &format!(r#"{{"op":"release","lease":"{lease}","x":1}}"#), b""));
    let keys = &raw.ask(2, r#"{"op":"keys","prefix":"","from":7}"#)["keys"]["keys"];
    assert_eq!(keys, &serde_json::json!([]));
    // What is absent, none or empty.
    let newer = |seen: &str| {
        format!(r#"{{"op":"newer","key":"",{seen}"patience":{{"secs":0,"nanos":1}}}}"#)
    };
    for seen in ["", r#""seen":null,"#] {
        let reply = raw.ask(3, &newer(seen));
        assert_eq!(reply, serde_json::json!({"newer": null}), "{seen}");
    }
    assert_eq!(raw.ask(4, &newer(r#""seen":"","#))["failed"]["kind"], "invalid");
    assert_eq!(raw.ask(5, r#"{"op":"keys","prefix":null}"#)["failed"]["kind"], "invalid");
    assert_eq!(raw.ask(6, r#"{"op":"pins","key":""}"#)["pins"], serde_json::json!({}));
}

#[test]
fn who_waits_and_goes_is_forgotten() {
    let served = Served::new(1 << 30);
    let store = served.connect();
    put(&store, 1, 1);
    let waiting = [
        r#"{"op":"newer","key":"none","patience":{"secs":3600,"nanos":0}}"#,
        // Two versions are open: this one waits for its turn.
        r#"{"op":"begin","key":"busy","proposal":{"writer":0,"writers":"0-1","job":"j","number":3,
            "file_len":9,"timeout":{"secs":3600,"nanos":0}}}"#,
        // It never gets so much while the others are there.
        r#"{"op":"begin","key":"large","proposal":{"writer":0,"writers":"0","file_len":1072693248,
            "timeout":{"secs":3600,"nanos":0}}}"#,
    ];
    let mut other = Raw::greet(&served.socket());
    for number in [1, 2] {
        let begin = format!(
            r#"{{"op":"begin","key":"busy","proposal":{{"writer":0,"writers":"0-1","job":"j",
                "number":{number},"file_len":9,"timeout":{{"secs":1,"nanos":0}}}}}}"#
        );
        assert!(other.ask(number, &begin)["begun"].is_object());
    }
    for request in waiting {
        let mut raw = Raw::greet(&served.socket());
        let lease = raw.ask(2, r#"{"op":"locate","key":"policy","selector":"newest"}"#);
        assert!(lease["leased"].is_object(), "{lease}");
        raw.send(&frame(1, 3, request, b""));
        // It has come: requests are taken in turn.
        assert!(raw.ask(4, r#"{"op":"status"}"#)["status"].is_object());
    }
    let is_alone = || {
        let status = store.status().unwrap();
        status.peers.len() == 2 && status.leases.is_empty()
    };
    eventually(is_alone);
}

#[test]
fn readers_of_one_connection_share_what_comes_once() {
    let served = Served::new(1 << 30);
    let writer = served.connect();
    for step in 1..=8 {
        put(&writer, step, 1);
        let reader = served.connect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(step_of(&get(&reader)), step));
            }
        });
    }
}

#[test]
fn lengths_that_no_memory_has_are_refused() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
    for len in [u64::MAX, u64::MAX - (2 << 20), 1 << 62, (1 << 30) + 1] {
        let begin = format!(
            r#"{{"op":"begin","key":"k","proposal":{{"writer":0,"writers":"0","file_len":{len},
                "timeout":{{"secs":3600,"nanos":0}}}}}}"#
        );
        let failed = &raw.ask(2, &begin)["failed"];
        assert_eq!(failed["kind"], "busy", "{len}: {failed}");
    }
    put(&served.connect(), 1, 1);
}

#[test]
fn an_answer_that_is_too_long_is_an_error() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
    put(&served.connect(), 1, 1);
    let label = "l".repeat(60 << 10);
    for number in 2..20 {
        let label = format!("{number}{label}");
        let pin = format!(r#"{{"op":"pin","key":"policy","selector":"newest","label":"{label}"}}"#);
        assert_eq!(raw.ask(number, &pin)["pinned"], 1);
    }
    let failed = &raw.ask(20, r#"{"op":"pins","key":"policy"}"#)["failed"];
    assert_eq!(failed["kind"], "invalid", "{failed}");
    assert!(raw.ask(21, r#"{"op":"status"}"#)["status"].is_object(), "the connection goes on");
}

#[test]
fn keys_come_in_pages() {
    let served = Served::new(1 << 30);
    let store = served.connect();
    // Backslashes are two characters in JSON, and the keys far more than one head together.
    let name = |number: u32| format!("{}{number:04}", r"\".repeat(300));
    let mut dict = StateDict::new();
    dict.insert("step", 1_i64);
    let keys: Vec<Key> = (0..3000).map(|number| Key::new(name(number)).unwrap()).collect();
    for key in &keys {
        store.put_state_dict(key, &dict, &PutOptions::default()).unwrap();
    }
    assert_eq!(store.keys(None).unwrap(), keys);
    assert_eq!(store.keys(Some("none")).unwrap(), []);
    let mut raw = Raw::greet(&served.socket());
    let after = serde_json::json!({"op": "keys", "prefix": "", "after": name(2990)}).to_string();
    let page = raw.ask(7, &after);
    assert_eq!(page["keys"]["keys"].as_array().unwrap().len(), 9);
    assert_eq!(page["keys"]["more"], false);
}

/// An archive of a few hundred KiB, in words.
fn archive(step: u8) -> Vec<u8> {
    TorchStoreStateDict::from_state_dict(&model(step, 1)).unwrap().as_bytes().to_vec()
}

#[test]
fn memory_comes_once_sealed_and_comes_back() {
    let served = Served::new(1 << 30);
    let (mut writer, mut reader) = (Raw::greet(&served.socket()), Raw::greet(&served.socket()));
    let archive = archive(1);
    let (segment, memory) = put_raw(&mut writer, &archive, None);
    let memory = memory.unwrap();
    // What is committed cannot be changed, not by its writer either.
    assert!(memory.write_all_at(b"x", 0).is_err());
    assert!(memory.set_len(0).is_err() && memory.set_len(1 << 30).is_err());

    let (leased, fds) = reader.ask_for_descriptors(LOCATE);
    let leased_segments = leased["leased"]["segments"].as_array().unwrap();
    assert_eq!((leased_segments.len(), fds.len()), (2, 2), "an archive and a manifest");
    let archives = leased["leased"]["archives"].as_object().unwrap();
    let spans: Vec<_> = archives.values().chain([&leased["leased"]["manifest"]]).collect();
    for ((shared, fd), span) in leased_segments.iter().zip(&fds).zip(spans) {
        assert_eq!(shared["segment"], span["segment"], "in the order of the descriptors");
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap();
        let all = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        assert!(seals.contains(all), "{seals:?}");
        let flags = rustix::fs::fcntl_getfl(fd).unwrap();
        assert!(!flags.intersects(OFlags::WRONLY | OFlags::RDWR), "{flags:?}");
        let file = File::from(fd.try_clone().unwrap());
        assert_eq!(file.metadata().unwrap().len(), shared["capacity"].as_u64().unwrap());
        let mut bytes = vec![0; usize::try_from(span["len"].as_u64().unwrap()).unwrap()];
        file.read_exact_at(&mut bytes, span["offset"].as_u64().unwrap()).unwrap();
        assert!(Archive::from_bytes(bytes.clone()).is_ok());
        assert!(bytes == archive || shared["segment"] != segment);
    }
    let (again, fds) = reader.ask_for_descriptors(LOCATE);
    assert_eq!((again["leased"]["segments"].as_array().unwrap().len(), fds.len()), (0, 0));
    assert_ne!(again["leased"]["lease"], leased["leased"]["lease"]);

    // A version takes another segment while the first is read, and that one when it is handed back.
    let (second, memory) = put_raw(&mut writer, &archive, None);
    assert!(second != segment && memory.is_some());
    let (third, memory) = put_raw(&mut writer, &archive, None);
    assert!(third != segment && third != second && memory.is_some(), "two leases hold the first");
    reader.send(&release(&leased));
    reader.send(&release(&again));
    assert!(reader.ask(9, r#"{"op":"status"}"#)["status"]["leases"].as_array().unwrap().is_empty());
    let (fourth, memory) = put_raw(&mut writer, &archive, memory.as_ref());
    assert!([&segment, &second].contains(&&fourth) && memory.is_none(), "{fourth}");
}

#[test]
fn more_memory_than_a_frame_has_comes_in_parts() {
    let served = Served::new(1 << 30);
    let store = served.connect();
    let count = 70_u32;
    for rank in 0..count {
        let options = PutOptions {
            version: Some(1),
            writer: Some(rank),
            writers: Some((0..count).collect()),
            job: Some(JobId("job".into())),
            ..PutOptions::default()
        };
        let mut dict = StateDict::new();
        let tensor = Tensor::from_slice(&vec![rank; 70_000], &[70_000]).unwrap();
        dict.insert(format!("rank{rank}"), tensor);
        store.put_state_dict(&key(), &dict, &options).unwrap();
    }
    let mut raw = Raw::greet(&served.socket());
    raw.send(&frame(1, 2, LOCATE, b""));
    let (kind, part, fds) = raw.receive_with_descriptors();
    assert_eq!((kind, fds.len()), (2, 64));
    assert_eq!(part["segments"].as_array().unwrap().len(), 64);
    let (kind, leased, fds) = raw.receive_with_descriptors();
    assert_eq!((kind, fds.len()), (3, 7), "those of the others, and of the manifest");
    assert_eq!(leased["leased"]["segments"].as_array().unwrap().len(), 7);
    let (dict, _) = served.connect().get_state_dict(&key(), &GetOptions::default()).unwrap();
    for rank in 0..count {
        let Value::Tensor(tensor) = dict.leaf(&format!("rank{rank}")).unwrap() else { panic!() };
        assert!(tensor.view().as_slice::<u32>().unwrap().iter().all(|each| *each == rank));
    }
}

#[test]
fn what_is_retired_counts_until_it_is_unmapped() {
    let served = Served::new(1 << 30);
    let (mut writer, mut reader) = (Raw::greet(&served.socket()), Raw::greet(&served.socket()));
    let (segment, _) = put_raw(&mut writer, &archive(1), None);
    let (leased, _) = reader.ask_for_descriptors(LOCATE);
    reader.send(&release(&leased));
    // Its writer has gone and has nothing mapped: the segment lasts as long as the version.
    writer.send(&frame(4, 0, r#"{"op":"goodbye"}"#, b""));
    assert!(writer.is_ended());
    let store = served.connect();
    put(&store, 2, 1);
    let notice = reader.receive().unwrap();
    assert_eq!(notice, (0, serde_json::json!({"op": "unmap", "segments": [segment]})));
    assert_eq!(store.status().unwrap().memory.retired, 2 * MIB);
    reader.send(&frame(4, 0, &notice.1.to_string(), b""));
    eventually(|| store.status().unwrap().memory.retired == 0);
}

#[test]
fn a_contribution_is_decided_once() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
    for len in [9, 1 << 20] {
        let begun = raw.ask(1, &begin("policy", len));
        let withdraw = commit(&begun).replace("commit", "withdraw");
        assert_eq!(raw.ask(2, &withdraw), "done");
        assert_eq!(raw.ask(3, &withdraw)["failed"]["kind"], "invalid");
        assert_eq!(raw.ask(4, &commit(&begun))["failed"]["kind"], "invalid");
    }
    // Nobody else's are.
    let begun = raw.ask(1, &begin("policy", 9));
    let failed = &Raw::greet(&served.socket()).ask(1, &commit(&begun))["failed"];
    assert_eq!(failed["kind"], "invalid", "{failed}");
}

/// The same request with the archive along.
fn with_archive(begin: &str, digest: &str) -> String {
    let (rest, end) = begin.split_at(begin.len() - 1);
    format!(r#"{rest},"digest":"{digest}"{end}"#)
}

#[test]
fn what_is_small_comes_with_its_begin() {
    let served = Served::new(1 << 30);
    let store = served.connect();
    let small = TorchStoreStateDict::from_state_dict(&model(1, 0)).unwrap().as_bytes().to_vec();
    let mut raw = Raw::greet(&served.socket());
    let mut ask = |number: u64, begin: &str, digest: &str, data: &[u8]| {
        raw.send(&frame(1, number, &with_archive(begin, digest), data));
        raw.receive().unwrap().1
    };
    let visible = serde_json::json!({"visible": true, "missing": ""});
    let whole = begin("policy", small.len());
    let begun = &ask(2, &whole, DIGEST, &small)["begun"];
    assert_eq!((&begun["progress"], &begun["room"]), (&visible, &"inline".into()));
    assert_eq!(get(&store), model(1, 0));
    // It is decided.
    let asked = ask(3, &commit(&serde_json::json!({"begun": begun})), DIGEST, b"");
    assert_eq!(asked["failed"]["kind"], "invalid", "{asked}");
    // What is not as long as was said, or no archive, leaves nothing behind.
    let versions = || store.versions(&key()).unwrap().len();
    for (data, kind) in
        [(&small[1..], "invalid"), (b"", "invalid"), (&vec![7; small.len()], "rejected")]
    {
        let failed = &ask(4, &whole, DIGEST, data)["failed"];
        assert_eq!(failed["kind"], kind, "{failed}");
        assert_eq!((get(&store), versions()), (model(1, 0), 1));
    }
    // A try that was not answered is made again, and is another put if it is another digest.
    let shared = whole.replace(r#""writers":"0""#, r#""writers":"0-1","job":"j","number":5"#);
    let missing = serde_json::json!({"visible": false, "missing": "1"});
    for _ in 0..2 {
        assert_eq!(ask(5, &shared, DIGEST, &small)["begun"]["progress"], missing);
    }
    let failed = &ask(6, &shared, "11111111111111111111111111111111", &small)["failed"];
    assert_eq!(failed["refusal"]["contribution_differs"]["committed"], DIGEST, "{failed}");
    // What waits for others is not committed by itself.
    let of = |number: u64| shared.replace(r#""number":5"#, &format!(r#""number":{number}"#));
    let patient = of(7).replace(r#""secs":1"#, r#""secs":60"#);
    assert!(ask(7, &of(6), DIGEST, &small)["begun"]["progress"].is_object());
    let mut other = Raw::greet(&served.socket());
    other.send(&frame(1, 8, &with_archive(&patient, DIGEST), &small));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(
        ask(8, r#"{"op":"delete","key":"policy","selection":{"number":5}}"#, DIGEST, b"")["deleted"],
        1
    );
    let (number, head) = other.receive().unwrap();
    assert_eq!((number, &head["begun"]["progress"]), (8, &serde_json::Value::Null), "{head}");
    other.send(&frame(1, 10, &commit(&head), &small));
    assert_eq!(other.receive().unwrap().1["progress"], missing);
    // What is not inline is not taken along.
    let begun = &ask(7, &begin("large", 1 << 20), DIGEST, &small)["begun"];
    assert_eq!(begun["progress"], serde_json::Value::Null);
    assert!(begun["room"]["segment"].is_object(), "{begun}");
}

#[test]
fn who_takes_a_put_back_is_not_seen_to_put() {
    let served = Served::new(1 << 30);
    let small = TorchStoreStateDict::from_state_dict(&model(1, 0)).unwrap().as_bytes().to_vec();
    let mut raw = Raw::greet(&served.socket());
    let of = |number: u64| {
        let begin = begin("policy", small.len()).replace(r#""secs":1"#, r#""secs":3600"#);
        let writers = format!(r#""writers":"0-1","job":"j","number":{number}"#);
        begin.replace(r#""writers":"0""#, &writers)
    };
    // Two versions are open: the next one waits for its turn.
    let first = raw.ask(1, &of(1));
    assert!(raw.ask(2, &of(2))["begun"].is_object());
    for (number, request) in [(3, of(3)), (4, with_archive(&of(3), DIGEST))] {
        raw.send(&frame(1, number, &request, &small));
        raw.send(&frame(4, 0, &format!(r#"{{"op":"cancel","request":{number}}}"#), b""));
        let (answered, head) = raw.receive().unwrap();
        assert_eq!((answered, &head["failed"]["kind"]), (number, &"busy".into()), "{head}");
    }
    // Now it would be its turn, if it were wanted.
    assert_eq!(raw.ask(5, &commit(&first).replace("commit", "withdraw")), "done");
    let again = raw.ask(6, &of(3));
    assert_eq!(again["begun"]["committed"], serde_json::Value::Null, "{again}");
    // Who has been answered, and who never asked, takes nothing back.
    for request in [6, 99] {
        raw.send(&frame(4, 0, &format!(r#"{{"op":"cancel","request":{request}}}"#), b""));
    }
    raw.send(&frame(1, 7, &commit(&again), &small));
    let missing = serde_json::json!({"visible": false, "missing": "1"});
    assert_eq!(raw.receive().unwrap().1["progress"], missing);
}

#[test]
fn who_waits_is_in_nobodys_way() {
    let served = Served::new(1 << 30);
    let small = TorchStoreStateDict::from_state_dict(&model(1, 0)).unwrap().as_bytes().to_vec();
    let mut raw = Raw::greet(&served.socket());
    let of = |key: &str, number: u64| {
        let begin = begin(key, small.len()).replace(r#""secs":1"#, r#""secs":3600"#);
        let writers = format!(r#""writers":"0-1","job":"j","number":{number}"#);
        begin.replace(r#""writers":"0""#, &writers)
    };
    // Whoever waits for a turn, or for a version, may wait for what is asked next on the connection.
    let mut begun = Vec::new();
    for key in 0..100 {
        let key = format!("key {key}");
        begun.push(raw.ask(1, &of(&key, 1)));
        assert!(raw.ask(2, &of(&key, 2))["begun"].is_object());
    }
    for key in 0..100 {
        let third = with_archive(&of(&format!("key {key}"), 3), DIGEST);
        raw.send(&frame(1, 100 + key, &third, &small));
        let newer = r#"{"op":"newer","key":"none","patience":{"secs":3600,"nanos":0}}"#;
        raw.send(&frame(1, 1000 + key, newer, b""));
    }
    for (number, begun) in (10_000..).zip(begun) {
        raw.send(&frame(1, number, &commit(&begun).replace("commit", "withdraw"), b""));
    }
    let mut answered = BTreeMap::new();
    while answered.len() < 200 {
        let (number, head) = raw.receive().unwrap();
        answered.insert(number, head);
    }
    let mut waited = 0;
    for number in 100..200 {
        let begun = &answered[&number]["begun"];
        assert!(begun["id"].is_string(), "{begun}");
        // Who waited has nothing any more that could be committed by itself.
        waited += usize::from(begun["progress"].is_null());
        assert_eq!(answered[&(number + 9900)], "done");
    }
    // Where the first turn was given up, no more than 63 of the 200 that were asked for before had not begun to wait.
    assert!(waited >= 37, "{waited}");
    // Those that wait for a version are left; one that is taken back ends.
    raw.send(&frame(4, 0, r#"{"op":"cancel","request":1042}"#, b""));
    assert_eq!(raw.receive().unwrap(), (1042, serde_json::json!({"newer": null})));
    // 99 wait, and as many more as there are places for; the next ones are worked on, as long as there are some left.
    for number in 2000..2000 + 925 + 63 {
        let newer = r#"{"op":"newer","key":"none","patience":{"secs":3600,"nanos":0}}"#;
        raw.send(&frame(1, number, newer, b""));
    }
    assert!(raw.ask(3, r#"{"op":"status"}"#)["status"].is_object());
    // What is taken back then gives its place to others.
    raw.send(&frame(4, 0, r#"{"op":"cancel","request":2900}"#, b""));
    assert_eq!(raw.receive().unwrap(), (2900, serde_json::json!({"newer": null})));
}

#[test]
fn a_daemon_that_takes_nothing_along_is_written_to() {
    let lent = SealFlags::SHRINK | SealFlags::GROW;
    for (room, fds) in [
        (r#""inline""#, vec![]),
        (r#"{"segment":{"segment":3,"capacity":1048576}}"#, memory(1 << 20, lent, false)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let is_inline = fds.is_empty();
        let kept = fds.first().map(|memory| memory.try_clone().unwrap());
        let daemon = std::thread::spawn(move || {
            let mut raw = Raw(listener.accept().unwrap().0);
            let welcome =
                r#"{"welcome":{"protocol":{"major":1,"minor":0},"pid":1,"inline":262144}}"#;
            let (number, _, _) = raw.receive_with_data().unwrap();
            raw.send(&frame(3, number, welcome, b""));
            let (number, begin, along) = raw.receive_with_data().unwrap();
            assert!(begin["digest"].is_string(), "{begin}");
            let begun = format!(
                r#"{{"begun":{{"contribution":7,"id":"{DIGEST}","epoch":0,"number":4,"room":{room}}}}}"#
            );
            let mut bytes = frame(3, number, &begun, b"");
            bytes[5] = u8::try_from(fds.len()).unwrap();
            if is_inline {
                raw.send(&bytes);
            } else {
                assert!(raw.send_with(&bytes, &fds));
            }
            let (number, commit, data) = raw.receive_with_data().unwrap();
            assert_eq!((&commit["op"], &commit["contribution"]), (&"commit".into(), &7.into()));
            assert_eq!(commit["digest"], begin["digest"]);
            let written = match kept {
                Some(memory) => {
                    assert_eq!(data, b"");
                    let mut written = vec![0; along.len()];
                    File::from(memory).read_exact_at(&mut written, 0).unwrap();
                    written
                }
                None => data,
            };
            assert!(written == along, "what is written is what came along");
            let progress = r#"{"progress":{"visible":true,"missing":""}}"#;
            raw.send(&frame(3, number, progress, b""));
            along
        });
        let url = format!("unix:{}", folder.path().join("socket").display());
        let store = Store::connect(&url).unwrap();
        let put = store.put_state_dict(&key(), &model(1, 0), &PutOptions::default()).unwrap();
        assert_eq!((put.version, put.visible), (4, true));
        let archive = daemon.join().unwrap();
        let read = Archive::from_bytes(archive).unwrap();
        assert_eq!(read.to_state_dict().unwrap(), model(1, 0));
    }
}

#[test]
fn a_contribution_may_have_several_archives() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
    let archives: Vec<Vec<u8>> = (0..3_u8)
        .map(|part| {
            let mut dict = StateDict::new();
            let tensor = Tensor::from_slice(&vec![part; 300_000], &[300_000]).unwrap();
            dict.insert(
                format!("part{part}"),
                if part == 1 { Value::from(1_i64) } else { tensor.into() },
            );
            TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec()
        })
        .collect();
    let write = |fds: Vec<OwnedFd>, bytes: &[u8]| {
        File::from(fds.into_iter().next().unwrap()).write_all_at(bytes, 0).unwrap();
    };
    let (begun, fds) = raw.ask_for_descriptors(&begin("policy", archives[0].len()));
    write(fds, &archives[0]);
    let contribution = &begun["begun"]["contribution"];
    let extend =
        |len: usize| format!(r#"{{"op":"extend","contribution":{contribution},"file_len":{len}}}"#);
    assert_eq!(raw.ask(2, &extend(archives[1].len())), serde_json::json!({"room": "inline"}));
    raw.send(&frame(1, 3, &extend(archives[2].len()), &archives[1]));
    let (kind, room, fds) = raw.receive_with_descriptors();
    assert_eq!((kind, room["room"]["segment"]["segment"].is_u64()), (3, true));
    write(fds, &archives[2]);
    assert_eq!(raw.ask(4, &commit(&begun))["progress"]["visible"], true);
    let leased = raw.ask(5, LOCATE);
    assert_eq!(leased["leased"]["archives"].as_object().unwrap().len(), 3);
    let dict = get(&served.connect());
    assert_eq!(dict.entries().len(), 3);
    assert_eq!(dict.leaf("part1").unwrap(), &Value::from(1_i64));
}

#[test]
fn a_contribution_that_waits_for_room_can_be_withdrawn() {
    // Room for the second archive and what the daemon writes, but not for the first one too.
    let served = Served::new(20 * MIB);
    let mut raw = Raw::greet(&served.socket());
    let long = begin("policy", 1 << 20).replace(r#""secs":1"#, r#""secs":3600"#);
    let begun = raw.ask(1, &long);
    let contribution = &begun["begun"]["contribution"];
    let extend =
        format!(r#"{{"op":"extend","contribution":{contribution},"file_len":{}}}"#, 15 * MIB);
    raw.send(&frame(1, 2, &extend, b""));
    assert_eq!(raw.ask(3, r#"{"op":"status"}"#)["status"]["memory"]["used"], 2 * MIB);
    raw.send(&frame(1, 4, &commit(&begun).replace("commit", "withdraw"), b""));
    let withdrawn = std::iter::from_fn(|| raw.receive()).find(|(number, _)| *number == 4);
    assert_eq!(withdrawn.unwrap().1, "done");
    raw.send(&frame(4, 0, r#"{"op":"goodbye"}"#, b""));
    while !raw.is_ended() {}
    put(&served.connect(), 1, 1);
}

#[test]
fn who_has_lost_an_answer_asks_again() {
    let served = Served::new(1 << 30);
    let begin = r#"{"op":"begin","key":"k","proposal":{"writer":0,"writers":"0-1","job":"j","number":5,
        "file_len":9,"timeout":{"secs":1,"nanos":0}}}"#;
    let mut raw = Raw::greet(&served.socket());
    let begun = raw.ask(1, begin);
    assert_eq!(begun["begun"]["committed"], serde_json::Value::Null);
    raw.send(&frame(1, 2, &commit(&begun), b"nine more"));
    let missing = serde_json::json!({"visible": false, "missing": "1"});
    assert_eq!(raw.receive().unwrap().1["progress"], missing);
    drop(raw);
    let mut raw = Raw::greet(&served.socket());
    let again = raw.ask(1, begin);
    assert_eq!(again["begun"]["id"], begun["begun"]["id"]);
    assert_eq!(again["begun"]["committed"], DIGEST);
    assert_eq!(raw.ask(2, &commit(&again))["progress"], missing);
    let again = raw.ask(3, begin);
    let other = commit(&again).replace(DIGEST, "11111111111111111111111111111111");
    let failed = &raw.ask(4, &other)["failed"];
    assert_eq!(failed["refusal"]["contribution_differs"]["committed"], DIGEST, "{failed}");
}

#[test]
fn a_socket_is_open_to_others_only_if_they_are_allowed() {
    let folder = tempfile::tempdir().unwrap();
    for (allow_uids, mode) in [(vec![], 0o600), (vec![12345], 0o666)] {
        let daemon = Daemon::bind(DaemonOptions {
            allow_uids,
            ..DaemonOptions::at(folder.path().join("socket"), MIB)
        });
        let daemon = daemon.unwrap();
        let metadata = std::fs::metadata(daemon.socket()).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, mode);
    }
}

/// A daemon that answers hello, then one request as it likes, with descriptors.
fn pretend(head: String, fds: Vec<OwnedFd>) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    std::thread::spawn(move || {
        let mut raw = Raw(listener.accept().unwrap().0);
        let welcome = r#"{"welcome":{"protocol":{"major":1,"minor":0},"pid":1,"inline":0}}"#;
        let (number, _) = raw.receive().unwrap();
        raw.send(&frame(3, number, welcome, b""));
        let (number, _) = raw.receive().unwrap();
        let mut bytes = frame(3, number, &head, b"");
        bytes[5] = u8::try_from(fds.len()).unwrap();
        if fds.is_empty() {
            raw.send(&bytes);
        } else {
            assert!(raw.send_with(&bytes, &fds));
        }
        while raw.receive().is_some() {}
    });
    let url = format!("unix:{}", folder.path().join("socket").display());
    (folder, Store::connect(&url).unwrap())
}

/// Anonymous memory of so many bytes with these seals, to read or to write.
fn memory(len: u64, seals: SealFlags, is_read_only: bool) -> Vec<OwnedFd> {
    let memory = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, len).unwrap();
    rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
    if is_read_only {
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        return vec![File::open(path).unwrap().into()];
    }
    vec![memory]
}

#[test]
fn who_is_lost_again_and_again_takes_one_descriptor() {
    let folder = quick_folder();
    let serve = Serve::start(folder.path(), &[]);
    let store = serve.connect();
    put(&store, 1, 1);
    let descriptors = || {
        let path = format!("/proc/{}/fd", serve.process.id());
        std::fs::read_dir(path).unwrap().count()
    };
    let before = descriptors();
    for _ in 0..50 {
        // It has memory, and goes without a word.
        let mut raw = Raw::greet(&folder.path().join("socket"));
        let (_, fds) = raw.ask_for_descriptors(LOCATE);
        assert!(!fds.is_empty());
    }
    eventually(|| store.status().unwrap().peers.len() == 1);
    eventually(|| descriptors() <= before + 5);
}

#[test]
fn who_cuts_the_memory_that_it_is_lent_harms_nobody() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served.socket());
    let (begun, fds) = raw.ask_for_descriptors(&begin("policy", 1 << 20));
    let [memory] = fds.as_slice() else { panic!("{begun}") };
    // If it could, the daemon would read behind its end.
    assert!(rustix::fs::ftruncate(memory, 0).is_err());
    assert!(rustix::fs::ftruncate(memory, 1 << 30).is_err());
    assert_eq!(raw.ask(6, &commit(&begun))["failed"]["kind"], "rejected");
    put(&served.connect(), 1, 1);
}

#[test]
fn a_daemon_that_lies_is_found_out() {
    let leased = |len: u64, segments: &str| {
        format!(
            r#"{{"leased":{{"lease":"{DIGEST}","id":"{DIGEST}","archives":{{}},"segments":{segments},
                "manifest":{{"segment":3,"offset":0,"len":{len}}}}}}}"#
        )
    };
    let shared = r#"[{"segment":3,"capacity":8192}]"#;
    let all = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let pipe: OwnedFd = std::io::pipe().unwrap().0.into();
    let cases = [
        ("not sealed", leased(8192, shared), memory(8192, SealFlags::SHRINK, true)),
        ("open for writing", leased(8192, shared), memory(8192, all, false)),
        ("4096 bytes in place of 8192", leased(8192, shared), memory(4096, all, true)),
        ("neither memory nor a file", leased(8192, shared), vec![pipe]),
        ("beyond its segment", leased(8193, shared), memory(8192, all, true)),
        ("never sent", leased(8192, "[]"), vec![]),
        ("never sent", leased(8192, shared), vec![]),
        ("is gone", leased(8192, r#"[{"segment":"three"}]"#), vec![]),
        ("is gone", r#"{"surprise":{}}"#.to_owned(), vec![]),
        ("something else", r#""done""#.to_owned(), vec![]),
        // What is there is sealed and is no manifest.
        ("manifest", leased(8192, shared), memory(8192, all, true)),
    ];
    for (text, head, fds) in cases {
        let (_folder, store) = pretend(head, fds);
        let error = store.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
        assert!(error.to_string().contains(text), "{text}: {error}");
    }
}

/// What is answered over HTTP: the number, and the body.
fn http(served: &Served, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(served.metrics()).unwrap();
    // Whoever is turned away may be so before all has been said, or all that was said has been read.
    let _ = stream.write_all(request.as_bytes());
    answer(stream)
}

fn answer(mut stream: TcpStream) -> (u16, String) {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut text = String::new();
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
fn a_put_is_one_request_or_two_and_a_get_is_one() {
    let served = Served::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let requests = || -> u64 {
        let (_, page) = ask(&served, "/metrics");
        let lines = page.lines().filter(|line| line.starts_with("tssd_requests_total{"));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    };
    // An archive of at most 256 KiB comes with its begin: 300 tensors of a byte are one, with their index, and 700 are not.
    for (count, len, puts) in [(1, 1, 1), (1, 300_000, 2), (300, 1, 1), (700, 1, 2)] {
        let mut dict = StateDict::new();
        for number in 0..count {
            let tensor = Tensor::from_slice(&vec![7_u8; len], &[len as u64]).unwrap();
            dict.insert(format!("layers.{number}"), tensor);
        }
        let before = requests();
        writer.put_state_dict(&key(), &dict, &PutOptions::default()).unwrap();
        assert_eq!(requests() - before, puts, "{count} tensors of {len} bytes");
        assert_eq!(get(&reader), dict);
        assert_eq!(requests() - before, puts + 1, "{count} tensors of {len} bytes");
    }
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
        (r#"tssd_requests_total{op="commit",outcome="ok"}"#, 4.0),
        (r#"tssd_requests_total{op="locate",outcome="ok"}"#, 1.0),
        (r#"tssd_requests_total{op="locate",outcome="not_found"}"#, 1.0),
    ] {
        assert_eq!(samples.get(name), Some(&value), "{name}\n{page}");
    }
    let four = f64::from(4 << 20);
    for name in ["needed", "transferred", "verified"] {
        let name = format!(r#"tssd_{name}_bytes_total{{transport="arena"}}"#);
        assert!((samples[name.as_str()] - four).abs() < 1.0, "{name}\n{page}");
    }
    assert!(samples["tssd_put_bytes_total"] > 3.0 * four, "{page}");
    assert!(
        (four..1.1 * four).contains(&samples[r#"tssd_leased_bytes_total{source="here"}"#]),
        "{page}"
    );
    assert!(samples["tssd_memory_used_bytes"] >= samples["tssd_memory_warm_bytes"], "{page}");
    let lag = page.lines().find(|line| line.starts_with("tssd_reader_lag_versions{"));
    let pid = format!(r#"pid="{}""#, std::process::id());
    assert!(lag.is_some_and(|lag| lag.contains(&pid) && lag.ends_with(" 2")), "{page}");
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
fn who_cannot_ask_whoever_decides_is_not_ready() {
    let controller = Served::new(1 << 30);
    let delegate = Served::under(&controller);
    assert_eq!(ask(&delegate, "/readyz").0, 200);
    drop(controller);
    assert_eq!((ask(&delegate, "/readyz").0, ask(&delegate, "/healthz").0), (503, 200));
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
fn a_daemon_that_ends_is_alive_and_not_ready() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let options = DaemonOptions {
        metrics: Some("127.0.0.1:0".parse().unwrap()),
        ..DaemonOptions::at(folder.path().join("socket"), MIB)
    };
    let daemon = runtime.block_on(tssd_store::Daemon::bind(options)).unwrap();
    let address = daemon.metrics().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let served = runtime.spawn(daemon.serve(async { drop(stopped.await) }));
    // Who has begun to ask is answered after the end.
    let begin = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\n").as_bytes()).unwrap();
        stream
    };
    let end = |mut stream: TcpStream| {
        stream.write_all(b"Host: localhost\r\n\r\n").unwrap();
        answer(stream).0
    };
    let (ready, alive) = (begin("/readyz"), begin("/healthz"));
    // Connections are accepted in turn: those two are.
    assert_eq!(end(begin("/readyz")), 200);
    drop(stop);
    runtime.block_on(served).unwrap().unwrap();
    assert_eq!((end(ready), end(alive)), (503, 200));
}
