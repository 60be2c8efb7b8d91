//! The daemon: shared and recycled memory, lost peers, hostile peers.

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
use tssd_tests::command::{DaemonProcess, memory_tempdir};
use tssd_tests::raw_connection::{HELLO, RawConnection, frame};
use tssd_tests::test_daemon::TestDaemon;

const MIB: u64 = 1 << 20;

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// A state dict with a tensor of `mib` MiB whose bytes all equal `step`.
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

/// Polls a condition every 10 ms, for at most 10 seconds.
fn eventually(condition: impl Fn() -> bool) {
    assert!((0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        condition()
    }));
}

/// Returns the step of a model, and asserts that all its bytes belong to that step.
fn step_of(dict: &StateDict) -> u8 {
    let Value::Tensor(tensor) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    let bytes = tensor.view().span();
    let step = bytes[0];
    assert!(bytes.iter().all(|byte| *byte == step), "the tensor mixes bytes of several versions");
    assert_eq!(dict.leaf("step").unwrap(), &Value::from(i64::from(step)));
    step
}

#[test]
fn view_stays_unchanged_and_its_memory_is_recycled() {
    let daemon = TestDaemon::new(1 << 30);
    let (writer, reader) = (daemon.connect(), daemon.connect());
    put(&writer, 1, 4);
    let view = get(&reader);
    for step in 2..=6 {
        put(&writer, step, 4);
        assert_eq!(step_of(&get(&reader)), step);
    }
    assert_eq!(step_of(&view), 1, "the view stays unchanged");
    drop(view);
    // One version is retained and one is written. From here on the pool creates no further segments.
    let baseline = reader.status().unwrap().memory;
    for step in 7..=12 {
        put(&writer, step, 4);
        assert_eq!(step_of(&get(&reader)), step);
    }
    let memory = reader.status().unwrap().memory;
    assert_eq!(
        memory.created_bytes_total, baseline.created_bytes_total,
        "no new pages: {memory:?}"
    );
    assert_eq!(memory.retired_bytes_total, 0, "the readers released all leases");
    assert!(memory.recycled_total >= 9, "{memory:?}");
}

#[test]
fn put_waits_for_memory_and_names_its_holder() {
    // Room for two versions of 8 MiB and for the daemon's own manifests.
    let daemon = TestDaemon::new(26 * MIB);
    let (writer, reader) = (daemon.connect(), daemon.connect());
    put(&writer, 1, 8);
    let view = get(&reader);
    put(&writer, 2, 8);
    let options = PutOptions { timeout: Duration::from_millis(50), ..PutOptions::default() };
    let error = writer.put_state_dict(&key(), &model(3, 8), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let text = error.to_string();
    let holder = format!("process {} (`policy` version 1", std::process::id());
    assert!(text.contains(&holder), "{text}");
    // Readers do not see the failed put. The next put proceeds as soon as memory is free.
    assert_eq!(step_of(&get(&writer)), 2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            drop(view);
        });
        put(&writer, 3, 8);
    });
    assert_eq!(step_of(&get(&reader)), 3);
    let error = writer.put_state_dict(&key(), &model(4, 32), &options).unwrap_err();
    assert!(error.to_string().contains("memory"), "the put exceeds the memory limit: {error}");
}

#[test]
fn memory_of_disconnected_reader_is_not_recycled() {
    let daemon = TestDaemon::new(1 << 30);
    let writer = daemon.connect();
    let reader = daemon.connect();
    put(&writer, 1, 4);
    let view = get(&reader);
    // Dropping the store closes the connection while the view is still mapped.
    drop(reader);
    let reader = daemon.connect();
    for step in 2..=5 {
        put(&writer, step, 4);
        assert_eq!(step_of(&get(&reader)), step);
    }
    assert_eq!(step_of(&view), 1);
    let memory = writer.status().unwrap().memory;
    assert!(
        memory.retired_bytes >= 4 * MIB,
        "retired memory counts until the reader process ends: {memory:?}"
    );
}

#[test]
fn version_outlives_its_writer() {
    let daemon = TestDaemon::new(1 << 30);
    put(&daemon.connect(), 1, 4);
    let reader = daemon.connect();
    assert_eq!(step_of(&get(&reader)), 1);
    put(&daemon.connect(), 2, 4);
    assert_eq!(step_of(&get(&reader)), 2);
}

#[test]
fn several_writers_contribute_to_one_version() {
    let daemon = TestDaemon::new(1 << 30);
    let reader = daemon.connect();
    for step in 1..=3_u8 {
        std::thread::scope(|scope| {
            for rank in 0..4_u32 {
                let daemon = &daemon;
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
                    daemon.connect().put_state_dict(&key(), &dict, &options).unwrap();
                });
            }
        });
        let (dict, report) = reader.get_state_dict(&key(), &GetOptions::default()).unwrap();
        assert_eq!((dict.entries().len(), report.version), (4, u64::from(step)));
    }
}

#[test]
fn in_place_reads_fill_targets_and_can_skip_verification() {
    let daemon = TestDaemon::new(1 << 30);
    let (writer, reader) = (daemon.connect(), daemon.connect());
    for step in 1..=3 {
        put(&writer, step, 4);
        let mut memory = vec![0; usize::try_from(4 * MIB).unwrap()];
        let meta = TensorMeta::new(tssd_format::Dtype::Uint8, &[4, MIB]).unwrap();
        let target =
            Target { fqn: "weight".into(), shard_spec: None, meta, memory: (&mut memory).into() };
        let options = GetOptions { unverified: step == 2, ..GetOptions::default() };
        let report = reader.get_state_dict_into(&key(), &mut [target], &options).unwrap();
        assert_eq!(report.bytes_transferred, 4 * MIB);
        assert_eq!(report.bytes_verified, if step == 2 { 0 } else { 4 * MIB });
        assert!(memory.iter().all(|byte| *byte == step));
    }
}

#[test]
fn daemon_exit_fails_requests_and_keeps_views() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
    put(&store, 1, 4);
    let view = get(&store);
    assert!(store.is_connected());
    drop(daemon);
    let error = store.head(&key()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(!store.is_connected());
    let error = store.put_state_dict(&key(), &model(2, 4), &PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert_eq!(step_of(&view), 1);
}

#[test]
fn second_daemon_on_socket_is_refused() {
    let daemon = TestDaemon::new(1 << 30);
    let error = Daemon::bind(DaemonOptions::for_socket(daemon.socket(), MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
}

/// Files on tmpfs support seals as segments do, but lack the seals that the daemon sets on segments.
#[test]
fn durable_version_on_tmpfs_is_read_after_restart() {
    let folder = memory_tempdir();
    let daemon = TestDaemon::with_root(folder.path());
    daemon.connect().put_state_dict(&key(), &model(1, 1), &durable()).unwrap();
    drop(daemon);
    let daemon = TestDaemon::with_root(folder.path());
    assert_eq!(step_of(&get(&daemon.connect())), 1);
}

#[test]
fn daemon_takes_over_socket_of_killed_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    // A stale socket: no process listens on it.
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let daemon = Daemon::bind(DaemonOptions::for_socket(&socket, MIB));
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let thread = std::thread::spawn(move || daemon.unwrap().serve(stopped).unwrap());
    let store = Store::connect(&format!("unix:{}", socket.display())).unwrap();
    assert!(store.keys(None).unwrap().is_empty());
    drop(stop);
    thread.join().unwrap();
    assert!(!socket.exists(), "the daemon removes its socket when it ends");
}

/// Returns a `begin` request of a single writer.
fn begin(key: &str, len: usize) -> String {
    format!(
        r#"{{"op":"begin","key":"{key}","proposal":{{"writer":0,"writers":"0","file_len":{len},
            "timeout":{{"secs":1,"nanos":0}}}}}}"#
    )
}

const DIGEST: &str = "00000000000000000000000000000000";

/// Returns a `commit` request for the contribution of a `begun` response.
fn commit(begun: &serde_json::Value) -> String {
    let contribution = &begun["begun"]["contribution"];
    format!(r#"{{"op":"commit","contribution":{contribution},"digest":"{DIGEST}"}}"#)
}

const LOCATE: &str = r#"{"op":"locate","key":"policy","selector":"newest"}"#;

/// Returns a `release` notice for the lease of a `leased` response.
fn release(leased: &serde_json::Value) -> Vec<u8> {
    let lease = &leased["leased"]["lease"];
    frame(4, 0, &format!(r#"{{"op":"release","lease":{lease}}}"#), b"")
}

/// Puts an archive through a segment. Returns the name of the segment, and its memory if the daemon sent a descriptor.
fn put_raw(
    raw: &mut RawConnection,
    archive: &[u8],
    memory: Option<&File>,
) -> (serde_json::Value, Option<File>) {
    let (begun, fds) = raw.request_with_descriptors(&begin("policy", archive.len()));
    let room = &begun["begun"]["write_target"]["segment"];
    let received = fds.into_iter().next().map(File::from);
    let file = received.as_ref().or(memory).expect("a new segment comes with a descriptor");
    assert_eq!(file.metadata().unwrap().len(), room["capacity"].as_u64().unwrap());
    if received.is_some() {
        file.write_all_at(archive, 0).unwrap();
    }
    let progress = raw.request(6, &commit(&begun));
    assert_eq!(progress["progress"], serde_json::json!({"visible": true, "missing": ""}));
    (room["segment"].clone(), received)
}

#[test]
fn protocol_violation_closes_only_that_connection() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
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
        (
            "a descriptor that is announced and not sent",
            [header(1, 2, 0, 1), b"{}".to_vec()].concat(),
        ),
        ("two descriptors", header(1, 2, 0, 2)),
        ("an unknown kind of frame", header(9, 2, 0, 0)),
        ("a part", frame(2, 1, HELLO, b"")),
        ("a reply", frame(3, 1, HELLO, b"")),
    ];
    for (label, bytes) in &garbage {
        let mut raw = RawConnection::connect(&daemon.socket());
        raw.send(bytes);
        assert!(raw.is_closed(), "{label}");
        let mut raw = RawConnection::connect_with_hello(&daemon.socket());
        raw.send(bytes);
        assert!(raw.is_closed(), "{label}, after hello");
    }
    // Before `hello`, the limits are lower.
    for bytes in [header(1, (4 << 10) + 1, 0, 0), header(1, 2, 1, 0), frame(4, 1, HELLO, b"")] {
        let mut raw = RawConnection::connect(&daemon.socket());
        raw.send(&bytes);
        assert!(raw.is_closed(), "{bytes:?}");
    }
    // A descriptor that no frame header announces.
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    raw.send_with_descriptors(&frame(1, 2, r#"{"op":"status"}"#, b""), &[std::io::stdin()]);
    assert!(raw.is_closed());
    assert_eq!(step_of(&get(&store)), 1);
}

#[test]
fn invalid_requests_are_answered_with_errors() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
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
    // An unknown field is ignored.
    raw.send(&frame(1, 99, r#"{"op":"keys","prefix":"","fashion":null}"#, b""));
    assert_eq!(raw.receive().unwrap().1["keys"]["keys"], serde_json::json!([]));
    // An archive whose length differs from the announced one.
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
    // Bytes of the announced length that are not an archive.
    raw.send(&frame(1, 102, begin, b""));
    let (_, begun) = raw.receive().unwrap();
    let contribution = &begun["begun"]["contribution"];
    let commit = format!(
        r#"{{"op":"commit","contribution":{contribution},"digest":"00000000000000000000000000000000"}}"#
    );
    raw.send(&frame(1, 103, &commit, &[7; 100]));
    let (_, failed) = raw.receive().unwrap();
    assert_eq!(failed["failed"]["kind"], "rejected", "{failed}");
    assert!(daemon.connect().versions(&Key::new("k").unwrap()).unwrap().is_empty());
}

/// Returns a `begin` request for an archive of `len` bytes whose first `device_len` bytes lie in GPU memory.
fn begin_on_gpu(len: u64, device_len: u64, durability: &str) -> String {
    format!(
        r#"{{"op":"begin","key":"policy","proposal":{{"writer":0,"writers":"0","file_len":{len},
        "durability":"{durability}","device":{{"uuid":"GPU-1","len":{device_len}}},
        "timeout":{{"secs":1,"nanos":0}}}}}}"#
    )
}

fn attach(segment: &serde_json::Value) -> String {
    format!(r#"{{"op":"attach_device_memory","segment":{segment}}}"#)
}

/// The daemon needs neither GPU nor driver to hold GPU memory, so a memfd stands in for it here.
#[test]
fn daemon_validates_attached_gpu_memory() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let dict = model(7, 1);
    let layout = tssd_format::Layout::plan(&dict, &tssd_format::Options::new()).unwrap();
    let archive = TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let archive = archive.as_bytes();
    let (index_off, len) = (layout.index_off(), layout.file_len());
    let host_part = [&archive[..4096], &archive[index_off as usize..]].concat();
    let memory = || rustix::fs::memfd_create("GPU", MemfdFlags::CLOEXEC).unwrap();
    let with_descriptors = |number: u64, head: &str, count: u8| {
        let mut bytes = frame(1, number, head, b"");
        bytes[5] = count;
        bytes
    };
    // `unmap` notices may arrive before the response.
    let response = |raw: &mut RawConnection, number: u64| {
        std::iter::from_fn(|| raw.receive()).find(|(answered, _)| *answered == number).unwrap().1
    };
    let call = |raw: &mut RawConnection, number: u64, head: &str, data: &[u8]| {
        raw.send(&frame(1, number, head, data));
        response(raw, number)
    };
    for (number, (len, device_len, durability)) in (10..).zip([
        (len, 4095, "memory"),
        (len, len + 1, "memory"),
        (u64::MAX, u64::MAX, "memory"),
        (1 << 63, 1 << 63, "memory"),
        (len, index_off, "disk"),
    ]) {
        let reply = call(&mut raw, number, &begin_on_gpu(len, device_len, durability), b"");
        assert_eq!(reply["failed"]["kind"], "invalid", "{device_len}: {reply}");
    }
    let long = begin_on_gpu(len, index_off, "memory").replace("GPU-1", &"G".repeat(65));
    assert_eq!(call(&mut raw, 19, &long, b"")["failed"]["kind"], "invalid");
    let begin = begin_on_gpu(len, index_off, "memory");
    let commit = |begun: &serde_json::Value| commit(&serde_json::json!({ "begun": begun }));
    // A commit without the device memory is refused.
    let begun = call(&mut raw, 20, &begin, b"")["begun"].clone();
    assert_eq!(
        (&begun["write_target"], &begun["device_segment"]["device_uuid"]),
        (&"inline".into(), &"GPU-1".into())
    );
    assert!(begun["device_segment"]["capacity"].as_u64().unwrap() >= index_off);
    let reply = call(&mut raw, 21, &commit(&begun), &host_part);
    assert!(reply["failed"]["text"].as_str().unwrap().contains("has not come"), "{reply}");
    // `attach_device_memory` comes with one descriptor for the assigned segment. A client that was interrupted may send it again.
    let first = call(&mut raw, 22, &begin, b"")["begun"].clone();
    let assigned = &first["device_segment"]["segment"];
    assert_eq!(call(&mut raw, 23, &attach(assigned), b"")["failed"]["kind"], "invalid");
    for (number, segment, is_accepted) in
        [(24, &999.into(), false), (25, assigned, true), (26, assigned, true)]
    {
        assert!(
            raw.send_with_descriptors(&with_descriptors(number, &attach(segment), 1), &[memory()])
        );
        assert_eq!(response(&mut raw, number) == "done", is_accepted, "{number}");
    }
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(raw.send_with_descriptors(&with_descriptors(18, &attach(assigned), 1), &[socket]));
    assert_eq!(response(&mut raw, 18)["failed"]["kind"], "invalid");
    assert_eq!(call(&mut raw, 29, &commit(&first), &host_part[1..])["failed"]["kind"], "invalid");
    // A segment of a failed contribution is not assigned again: an interrupted client may not know that it failed.
    let begun = call(&mut raw, 30, &begin, b"")["begun"].clone();
    let segment = &begun["device_segment"]["segment"];
    assert_ne!(segment, assigned);
    assert!(raw.send_with_descriptors(&with_descriptors(31, &attach(segment), 1), &[memory()]));
    assert_eq!(response(&mut raw, 31), "done");
    assert_eq!(call(&mut raw, 32, &commit(&begun), &host_part)["progress"]["visible"], true);
    // Only a client that has `supports_devices` gets the memory. Readers without a GPU get `unsupported`.
    let locate = r#"{"op":"locate","key":"policy","selector":"newest""#;
    let mut reader = RawConnection::connect_with_hello(&daemon.socket());
    assert_eq!(reader.request(2, &format!("{locate}}}"))["failed"]["kind"], "unsupported");
    let (reply, fds) =
        reader.request_with_descriptors(&format!(r#"{locate},"supports_devices":true}}"#));
    let (_, archive) = reply["leased"]["archives"].as_object().unwrap().iter().next().unwrap();
    assert_eq!((&archive["device_segment"], &archive["len"]), (segment, &len.into()));
    let segments = reply["leased"]["segments"].as_array().unwrap();
    let at = segments.iter().position(|each| each["device_uuid"] == "GPU-1").unwrap();
    assert_eq!((fds.len(), segments.len()), (2, 2));
    let target = std::fs::read_link(format!("/proc/self/fd/{}", fds[at].as_raw_fd())).unwrap();
    assert!(target.to_str().unwrap().starts_with("/memfd:GPU"));
    let error = daemon.connect().get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let error = daemon.connect_tcp().get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // A second descriptor in one frame ends the connection.
    let fds = [memory(), memory()];
    reader.send_with_descriptors(&with_descriptors(9, &attach(segment), 2), &fds);
    assert!(reader.is_closed());
    // The reader that was cut off may still have the segment mapped, so the daemon does not assign it again.
    for number in [40, 50, 60] {
        let begun = call(&mut raw, number, &begin, b"")["begun"].clone();
        let assigned = &begun["device_segment"]["segment"];
        assert_ne!(assigned, segment);
        // The third put reuses the memory of the first.
        if number < 60 {
            let bytes = with_descriptors(number + 1, &attach(assigned), 1);
            assert!(raw.send_with_descriptors(&bytes, &[memory()]));
            assert_eq!(response(&mut raw, number + 1), "done");
        }
        assert_eq!(
            call(&mut raw, number + 2, &commit(&begun), &host_part)["progress"]["visible"],
            true
        );
    }
}

#[test]
fn writer_disconnect_during_put_discards_its_version() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let begin = r#"{"op":"begin","key":"policy","proposal":{"writer":0,"writers":"0",
        "file_len":1000,"timeout":{"secs":1,"nanos":0}}}"#;
    raw.send(&frame(1, 2, begin, b""));
    assert!(raw.receive().unwrap().1["begun"].is_object());
    drop(raw);
    let store = daemon.connect();
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
fn durable_versions_survive_daemon_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (durable_key, memory_key) = (Key::new("lasting").unwrap(), Key::new("passing").unwrap());
    let daemon = TestDaemon::with_root(folder.path());
    let store = daemon.connect();
    for step in 1..=2 {
        store.put_state_dict(&durable_key, &model(step, 1), &durable()).unwrap();
    }
    store.pin(&durable_key, None, "best").unwrap();
    // The newest version of this key is only in memory, and ends with the daemon.
    store.put_state_dict(&durable_key, &model(3, 1), &PutOptions::default()).unwrap();
    store.put_state_dict(&memory_key, &model(1, 1), &PutOptions::default()).unwrap();
    drop(store);
    drop(daemon);

    let daemon = TestDaemon::with_root(folder.path());
    let store = daemon.connect();
    assert_eq!(store.keys(None).unwrap(), std::slice::from_ref(&durable_key));
    let (dict, report) = store.get_state_dict(&durable_key, &GetOptions::default()).unwrap();
    assert_eq!((step_of(&dict), report.version), (2, 2));
    assert_eq!(store.pins(&durable_key).unwrap()["best"], 2);
    let error = store
        .put_state_dict(&durable_key, &model(2, 1), &PutOptions { version: Some(1), ..durable() })
        .unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::VersionNotNewer { .. })), "{error}");
    store.unpin(&durable_key, "best").unwrap();
    store.put_state_dict(&durable_key, &model(4, 1), &durable()).unwrap();
    assert_eq!(step_of(&dict), 2, "a view of a deleted file stays valid");
    drop(dict);
    // The daemon receives the release before it answers the next request.
    store.head(&durable_key).unwrap();
    let mut folders: Vec<_> = std::fs::read_dir(folder.path().join("lasting"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    folders.sort();
    let third = tssd_tests::layout::version_folder(&folder.path().join("lasting"), "0-3");
    let third = third.file_name().unwrap().to_str().unwrap();
    assert_eq!(folders, [".ledger", third], "only the newest version remains: {folders:?}");
    // The daemon's directory is an ordinary directory store.
    drop(store);
    drop(daemon);
    let store = Store::connect(folder.path().to_str().unwrap()).unwrap();
    let (dict, _) = store.get_state_dict(&durable_key, &GetOptions::default()).unwrap();
    assert_eq!(step_of(&dict), 4);
}

/// Regression test: a daemon took files on tmpfs for segments without seals, and rejected them.
#[test]
fn directory_on_tmpfs_is_read_after_restart() {
    let folder = memory_tempdir();
    TestDaemon::with_root(folder.path())
        .connect()
        .put_state_dict(&key(), &model(1, 1), &durable())
        .unwrap();
    assert_eq!(step_of(&get(&TestDaemon::with_root(folder.path()).connect())), 1);
}

#[test]
fn put_rejects_mixed_or_unsupported_durability() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = TestDaemon::with_root(folder.path());
    let options = |writer, durability| PutOptions {
        version: Some(1),
        writer: Some(writer),
        writers: Some((0..2).collect()),
        job: Some(JobId("job".into())),
        durability,
        ..PutOptions::default()
    };
    let store = daemon.connect();
    let mut dict = StateDict::new();
    dict.insert("step", 1_i64);
    store.put_state_dict(&key(), &dict, &options(0, Durability::Disk)).unwrap();
    let error = store.put_state_dict(&key(), &dict, &options(1, Durability::Memory)).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::DurabilityDisagrees { .. })), "{error}");
    let store = TestDaemon::new(1 << 30);
    let error = store.connect().put_state_dict(&key(), &dict, &durable()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("--root"), "{error}");
    let error = Store::memory().unwrap().put_state_dict(&key(), &dict, &durable()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn directory_has_one_daemon_or_direct_writers() {
    let folder = tempfile::tempdir().unwrap();
    let direct = Store::directory(folder.path()).unwrap();
    put(&direct, 1, 1);
    let options = |socket: &str| DaemonOptions {
        root: Some(folder.path().to_owned()),
        ..DaemonOptions::for_socket(folder.path().join(socket), 1 << 30)
    };
    let error = Daemon::bind(options("one")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "a store writes the directory directly: {error}");
    drop(direct);
    let daemon = TestDaemon::with_root(folder.path());
    let error = Daemon::bind(options("two")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    // A store that opens the directory directly may read. Its puts fail and name the daemon's address.
    let direct = Store::directory(folder.path()).unwrap();
    assert_eq!(step_of(&get(&direct)), 1);
    let error = direct.put_state_dict(&key(), &model(2, 1), &PutOptions::default()).unwrap_err();
    assert!(error.to_string().contains(&daemon.url()), "{error}");
    // `connect` with the path of the directory reaches the daemon.
    let store = Store::connect(folder.path().to_str().unwrap()).unwrap();
    store.put_state_dict(&key(), &model(2, 1), &durable()).unwrap();
    assert_eq!(step_of(&get(&daemon.connect())), 2);
}

#[test]
fn connection_without_valid_hello_is_refused() {
    let daemon = TestDaemon::new(1 << 30);
    let [older, newer] = [1, 3].map(|major| HELLO.replace('2', &major.to_string()));
    let cases = [
        (newer.as_str(), "refused", "protocol version 3 is not supported: daemon tssd "),
        (older.as_str(), "refused", "supports version 2; use the same tssd release"),
        (r#"{"op":"status"}"#, "invalid", "hello comes first"),
        (r#"{"op":"dance"}"#, "invalid", "not understood"),
        ("hello", "invalid", "not understood"),
    ];
    for (head, kind, text) in cases {
        let mut raw = RawConnection::connect(&daemon.socket());
        let failed = &raw.request(7, head)["failed"];
        assert_eq!(failed["kind"], kind, "{head}: {failed}");
        assert!(failed["text"].as_str().unwrap().contains(text), "{head}: {failed}");
        assert!(raw.is_closed(), "{head}");
    }
}

#[test]
fn minor_protocol_versions_are_compatible() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect(&daemon.socket());
    // A later minor version sends more fields, an earlier one fewer.
    let later = r#"{"op":"hello","protocol":{"major":2,"minor":7,"patch":2},"client":"",
        "wants":["everything"]}"#;
    let welcome = &raw.request(1, later)["welcome"];
    assert_eq!(welcome["protocol"], serde_json::json!({"major": 2, "minor": 0}));
    assert_eq!(welcome["pid"], std::process::id());
    assert_eq!(welcome["inline_max_bytes"], 256 << 10);
    let mut raw = RawConnection::connect(&daemon.socket());
    let earlier = r#"{"op":"hello","protocol":{"major":2,"minor":0}}"#;
    assert!(raw.request(1, earlier)["welcome"].is_object());
    // Unknown notices and unknown fields are ignored.
    raw.send(&frame(4, 0, r#"{"op":"yawn","how":"widely"}"#, b""));
    raw.send(&frame(4, 0, r#"{"op":"unmap","segments":[9],"why":null}"#, b""));
    let lease = "00112233445566778899aabbccddeeff";
    raw.send(&frame(4, 0, &format!(r#"{{"op":"release","lease":"{lease}","x":1}}"#), b""));
    let keys = &raw.request(2, r#"{"op":"keys","prefix":"","from":7}"#)["keys"]["keys"];
    assert_eq!(keys, &serde_json::json!([]));
    // Absent, `null` and empty fields are distinct.
    let newer = |seen: &str| {
        format!(r#"{{"op":"await_newer","key":"",{seen}"timeout":{{"secs":0,"nanos":1}}}}"#)
    };
    for seen in ["", r#""seen":null,"#] {
        let reply = raw.request(3, &newer(seen));
        assert_eq!(reply, serde_json::json!({"newest": null}), "{seen}");
    }
    assert_eq!(raw.request(4, &newer(r#""seen":"","#))["failed"]["kind"], "invalid");
    assert_eq!(raw.request(5, r#"{"op":"keys","prefix":null}"#)["failed"]["kind"], "invalid");
    assert_eq!(raw.request(6, r#"{"op":"pins","key":""}"#)["pins"], serde_json::json!({}));
}

#[test]
fn disconnect_cancels_pending_requests_and_releases_leases() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
    put(&store, 1, 1);
    let waiting = [
        r#"{"op":"await_newer","key":"none","timeout":{"secs":3600,"nanos":0}}"#,
        // Two versions are open, so this one waits until one of them is closed.
        r#"{"op":"begin","key":"busy","proposal":{"writer":0,"writers":"0-1","job":"j","number":3,
            "file_len":9,"timeout":{"secs":3600,"nanos":0}}}"#,
        // The memory limit has no room for this length while the other versions exist.
        r#"{"op":"begin","key":"large","proposal":{"writer":0,"writers":"0","file_len":1072693248,
            "timeout":{"secs":3600,"nanos":0}}}"#,
    ];
    let mut other = RawConnection::connect_with_hello(&daemon.socket());
    for number in [1, 2] {
        let begin = format!(
            r#"{{"op":"begin","key":"busy","proposal":{{"writer":0,"writers":"0-1","job":"j",
                "number":{number},"file_len":9,"timeout":{{"secs":1,"nanos":0}}}}}}"#
        );
        assert!(other.request(number, &begin)["begun"].is_object());
    }
    for request in waiting {
        let mut raw = RawConnection::connect_with_hello(&daemon.socket());
        let lease = raw.request(2, r#"{"op":"locate","key":"policy","selector":"newest"}"#);
        assert!(lease["leased"].is_object(), "{lease}");
        raw.send(&frame(1, 3, request, b""));
        // The daemon reads requests in order, so it has received the one above.
        assert!(raw.request(4, r#"{"op":"status"}"#)["status"].is_object());
    }
    let is_cleaned_up = || {
        let status = store.status().unwrap();
        status.peers.len() == 2 && status.leases.is_empty()
    };
    eventually(is_cleaned_up);
}

#[test]
fn readers_on_one_connection_share_received_descriptors() {
    let daemon = TestDaemon::new(1 << 30);
    let writer = daemon.connect();
    for step in 1..=8 {
        put(&writer, step, 1);
        let reader = daemon.connect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(step_of(&get(&reader)), step));
            }
        });
    }
}

#[test]
fn begin_rejects_length_above_memory_limit() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    for len in [u64::MAX, u64::MAX - (2 << 20), 1 << 62, (1 << 30) + 1] {
        let begin = format!(
            r#"{{"op":"begin","key":"k","proposal":{{"writer":0,"writers":"0","file_len":{len},
                "timeout":{{"secs":3600,"nanos":0}}}}}}"#
        );
        let failed = &raw.request(2, &begin)["failed"];
        assert_eq!(failed["kind"], "busy", "{len}: {failed}");
    }
    put(&daemon.connect(), 1, 1);
}

#[test]
fn response_above_frame_limit_is_an_error() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    put(&daemon.connect(), 1, 1);
    // Each quote has two bytes in JSON.
    let label = r#"\""#.repeat(240);
    for number in 2..2400 {
        let label = format!("{number}{label}");
        let pin = format!(r#"{{"op":"pin","key":"policy","selector":"newest","label":"{label}"}}"#);
        assert_eq!(raw.request(number, &pin)["pinned"], 1);
    }
    let failed = &raw.request(2400, r#"{"op":"pins","key":"policy"}"#)["failed"];
    assert_eq!(failed["kind"], "invalid", "{failed}");
    assert!(
        raw.request(2401, r#"{"op":"status"}"#)["status"].is_object(),
        "the connection stays open"
    );
}

#[test]
fn keys_are_listed_in_pages() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
    // JSON escapes each backslash to two characters. All keys together exceed one frame head by far.
    let name = |number: u32| format!("{}{number:04}", r"\".repeat(300));
    let mut dict = StateDict::new();
    dict.insert("step", 1_i64);
    let keys: Vec<Key> = (0..3000).map(|number| Key::new(name(number)).unwrap()).collect();
    for key in &keys {
        store.put_state_dict(key, &dict, &PutOptions::default()).unwrap();
    }
    assert_eq!(store.keys(None).unwrap(), keys);
    assert_eq!(store.keys(Some("none")).unwrap(), []);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let after = serde_json::json!({"op": "keys", "prefix": "", "after": name(2990)}).to_string();
    let page = raw.request(7, &after);
    assert_eq!(page["keys"]["keys"].as_array().unwrap().len(), 9);
    assert_eq!(page["keys"]["more"], false);
}

/// The bytes of an archive of slightly more than 1 MiB.
fn archive(step: u8) -> Vec<u8> {
    TorchStoreStateDict::from_state_dict(&model(step, 1)).unwrap().as_bytes().to_vec()
}

#[test]
fn segments_are_sent_once_sealed_and_recycled_after_release() {
    let daemon = TestDaemon::new(1 << 30);
    let (mut writer, mut reader) = (
        RawConnection::connect_with_hello(&daemon.socket()),
        RawConnection::connect_with_hello(&daemon.socket()),
    );
    let archive = archive(1);
    let (segment, memory) = put_raw(&mut writer, &archive, None);
    let memory = memory.unwrap();
    // Committed memory cannot be changed, not even by its writer.
    assert!(memory.write_all_at(b"x", 0).is_err());
    assert!(memory.set_len(0).is_err() && memory.set_len(1 << 30).is_err());

    let (leased, fds) = reader.request_with_descriptors(LOCATE);
    let leased_segments = leased["leased"]["segments"].as_array().unwrap();
    assert_eq!((leased_segments.len(), fds.len()), (2, 2), "an archive and a manifest");
    let archives = leased["leased"]["archives"].as_object().unwrap();
    let spans: Vec<_> = archives.values().chain([&leased["leased"]["manifest"]]).collect();
    for ((shared, fd), span) in leased_segments.iter().zip(&fds).zip(spans) {
        assert_eq!(
            shared["segment"], span["segment"],
            "segments are listed in the order of the descriptors"
        );
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
    let (again, fds) = reader.request_with_descriptors(LOCATE);
    assert_eq!((again["leased"]["segments"].as_array().unwrap().len(), fds.len()), (0, 0));
    assert_ne!(again["leased"]["lease"], leased["leased"]["lease"]);

    // A new version uses another segment while the first is leased, and reuses it after its release.
    let (second, memory) = put_raw(&mut writer, &archive, None);
    assert!(second != segment && memory.is_some());
    let (third, memory) = put_raw(&mut writer, &archive, None);
    assert!(third != segment && third != second && memory.is_some(), "two leases hold the first");
    reader.send(&release(&leased));
    reader.send(&release(&again));
    assert!(
        reader.request(9, r#"{"op":"status"}"#)["status"]["leases"].as_array().unwrap().is_empty()
    );
    let (fourth, memory) = put_raw(&mut writer, &archive, memory.as_ref());
    assert!([&segment, &second].contains(&&fourth) && memory.is_none(), "{fourth}");
}

#[test]
fn descriptors_above_frame_limit_arrive_in_parts() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
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
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    raw.send(&frame(1, 2, LOCATE, b""));
    let (kind, part, fds) = raw.receive_with_descriptors();
    assert_eq!((kind, fds.len()), (2, 64));
    assert_eq!(part["segments"].as_array().unwrap().len(), 64);
    let (kind, leased, fds) = raw.receive_with_descriptors();
    assert_eq!((kind, fds.len()), (3, 7), "the other archives and the manifest");
    assert_eq!(leased["leased"]["segments"].as_array().unwrap().len(), 7);
    let (dict, _) = daemon.connect().get_state_dict(&key(), &GetOptions::default()).unwrap();
    for rank in 0..count {
        let Value::Tensor(tensor) = dict.leaf(&format!("rank{rank}")).unwrap() else { panic!() };
        assert!(tensor.view().as_slice::<u32>().unwrap().iter().all(|each| *each == rank));
    }
}

#[test]
fn retired_memory_counts_until_unmapped() {
    let daemon = TestDaemon::new(1 << 30);
    let (mut writer, mut reader) = (
        RawConnection::connect_with_hello(&daemon.socket()),
        RawConnection::connect_with_hello(&daemon.socket()),
    );
    let (segment, _) = put_raw(&mut writer, &archive(1), None);
    let (leased, _) = reader.request_with_descriptors(LOCATE);
    reader.send(&release(&leased));
    // The writer disconnects with nothing mapped: the segment is retired together with its version.
    writer.send(&frame(4, 0, r#"{"op":"goodbye"}"#, b""));
    assert!(writer.is_closed());
    let store = daemon.connect();
    put(&store, 2, 1);
    let notice = reader.receive().unwrap();
    assert_eq!(notice, (0, serde_json::json!({"op": "unmap", "segments": [segment]})));
    assert_eq!(store.status().unwrap().memory.retired_bytes, 2 * MIB);
    reader.send(&frame(4, 0, &notice.1.to_string(), b""));
    eventually(|| store.status().unwrap().memory.retired_bytes == 0);
}

#[test]
fn contribution_is_committed_or_withdrawn_once() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    for len in [9, 1 << 20] {
        let begun = raw.request(1, &begin("policy", len));
        let withdraw = commit(&begun).replace("commit", "withdraw");
        assert_eq!(raw.request(2, &withdraw), "done");
        assert_eq!(raw.request(3, &withdraw)["failed"]["kind"], "invalid");
        assert_eq!(raw.request(4, &commit(&begun))["failed"]["kind"], "invalid");
    }
    // A connection cannot commit a contribution of another connection.
    let begun = raw.request(1, &begin("policy", 9));
    let failed =
        &RawConnection::connect_with_hello(&daemon.socket()).request(1, &commit(&begun))["failed"];
    assert_eq!(failed["kind"], "invalid", "{failed}");
}

/// Adds a digest to a `begin` request, which declares the data of its frame to be the archive.
fn with_archive(begin: &str, digest: &str) -> String {
    let (fields, brace) = begin.split_at(begin.len() - 1);
    format!(r#"{fields},"digest":"{digest}"{brace}"#)
}

#[test]
fn small_archive_is_sent_with_begin() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
    let small = TorchStoreStateDict::from_state_dict(&model(1, 0)).unwrap().as_bytes().to_vec();
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let mut ask = |number: u64, begin: &str, digest: &str, data: &[u8]| {
        raw.send(&frame(1, number, &with_archive(begin, digest), data));
        raw.receive().unwrap().1
    };
    let visible = serde_json::json!({"visible": true, "missing": ""});
    let whole = begin("policy", small.len());
    let begun = &ask(2, &whole, DIGEST, &small)["begun"];
    assert_eq!((&begun["progress"], &begun["write_target"]), (&visible, &"inline".into()));
    assert_eq!(get(&store), model(1, 0));
    // The contribution is committed already.
    let again = ask(3, &commit(&serde_json::json!({"begun": begun})), DIGEST, b"");
    assert_eq!(again["failed"]["kind"], "invalid", "{again}");
    // Data of the wrong length, or that is not an archive, leaves nothing behind.
    let versions = || store.versions(&key()).unwrap().len();
    for (data, kind) in
        [(&small[1..], "invalid"), (b"", "invalid"), (&vec![7; small.len()], "rejected")]
    {
        let failed = &ask(4, &whole, DIGEST, data)["failed"];
        assert_eq!(failed["kind"], kind, "{failed}");
        assert_eq!((get(&store), versions()), (model(1, 0), 1));
    }
    // A retry with the same digest succeeds. A retry with another digest is refused.
    let shared = whole.replace(r#""writers":"0""#, r#""writers":"0-1","job":"j","number":5"#);
    let missing = serde_json::json!({"visible": false, "missing": "1"});
    for _ in 0..2 {
        assert_eq!(ask(5, &shared, DIGEST, &small)["begun"]["progress"], missing);
    }
    let failed = &ask(6, &shared, "11111111111111111111111111111111", &small)["failed"];
    assert_eq!(failed["refusal"]["contribution_differs"]["committed"], DIGEST, "{failed}");
    // A `begin` that had to wait does not commit the archive in its frame.
    let numbered = |number: u64| shared.replace(r#""number":5"#, &format!(r#""number":{number}"#));
    let patient = numbered(7).replace(r#""secs":1"#, r#""secs":60"#);
    assert!(ask(7, &numbered(6), DIGEST, &small)["begun"]["progress"].is_object());
    let mut other = RawConnection::connect_with_hello(&daemon.socket());
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
    // The daemon ignores the data of an archive that is above the inline limit.
    let begun = &ask(7, &begin("large", 1 << 20), DIGEST, &small)["begun"];
    assert_eq!(begun["progress"], serde_json::Value::Null);
    assert!(begun["write_target"]["segment"].is_object(), "{begun}");
}

#[test]
fn cancelled_begin_commits_nothing() {
    let daemon = TestDaemon::new(1 << 30);
    let small = TorchStoreStateDict::from_state_dict(&model(1, 0)).unwrap().as_bytes().to_vec();
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let numbered = |number: u64| {
        let begin = begin("policy", small.len()).replace(r#""secs":1"#, r#""secs":3600"#);
        let writers = format!(r#""writers":"0-1","job":"j","number":{number}"#);
        begin.replace(r#""writers":"0""#, &writers)
    };
    // Two versions are open, so the next `begin` waits.
    let first = raw.request(1, &numbered(1));
    assert!(raw.request(2, &numbered(2))["begun"].is_object());
    for (number, request) in [(3, numbered(3)), (4, with_archive(&numbered(3), DIGEST))] {
        raw.send(&frame(1, number, &request, &small));
        raw.send(&frame(4, 0, &format!(r#"{{"op":"cancel","request":{number}}}"#), b""));
        let (answered, head) = raw.receive().unwrap();
        assert_eq!((answered, &head["failed"]["kind"]), (number, &"busy".into()), "{head}");
    }
    // The cancelled `begin` could proceed from here on.
    assert_eq!(raw.request(5, &commit(&first).replace("commit", "withdraw")), "done");
    let again = raw.request(6, &numbered(3));
    assert_eq!(again["begun"]["committed_digest"], serde_json::Value::Null, "{again}");
    // Cancelling an answered or an unknown request has no effect.
    for request in [6, 99] {
        raw.send(&frame(4, 0, &format!(r#"{{"op":"cancel","request":{request}}}"#), b""));
    }
    raw.send(&frame(1, 7, &commit(&again), &small));
    let missing = serde_json::json!({"visible": false, "missing": "1"});
    assert_eq!(raw.receive().unwrap().1["progress"], missing);
}

#[test]
fn pending_requests_do_not_block_connection() {
    let daemon = TestDaemon::new(1 << 30);
    let small = TorchStoreStateDict::from_state_dict(&model(1, 0)).unwrap().as_bytes().to_vec();
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let numbered = |key: &str, number: u64| {
        let begin = begin(key, small.len()).replace(r#""secs":1"#, r#""secs":3600"#);
        let writers = format!(r#""writers":"0-1","job":"j","number":{number}"#);
        begin.replace(r#""writers":"0""#, &writers)
    };
    // A request that waits may depend on a later request of the same connection.
    let mut begun = Vec::new();
    for key in 0..100 {
        let key = format!("key {key}");
        begun.push(raw.request(1, &numbered(&key, 1)));
        assert!(raw.request(2, &numbered(&key, 2))["begun"].is_object());
    }
    for key in 0..100 {
        let third = with_archive(&numbered(&format!("key {key}"), 3), DIGEST);
        raw.send(&frame(1, 100 + key, &third, &small));
        let newer = r#"{"op":"await_newer","key":"none","timeout":{"secs":3600,"nanos":0}}"#;
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
        // A request that waited did not commit the archive in its frame.
        waited += usize::from(begun["progress"].is_null());
        assert_eq!(answered[&(number + 9900)], "done");
    }
    // At the first `withdraw`, at most 63 of the 200 earlier requests had not yet begun to wait.
    assert!(waited >= 37, "{waited}");
    // The requests that wait for a version are still pending. Cancelling one of them ends it.
    raw.send(&frame(4, 0, r#"{"op":"cancel","request":1042}"#, b""));
    assert_eq!(raw.receive().unwrap(), (1042, serde_json::json!({"newest": null})));
    // 99 requests wait. 925 more reach the limit of 1024 waiting requests, and 63 more use all but one active slot.
    for number in 2000..2000 + 925 + 63 {
        let newer = r#"{"op":"await_newer","key":"none","timeout":{"secs":3600,"nanos":0}}"#;
        raw.send(&frame(1, number, newer, b""));
    }
    assert!(raw.request(3, r#"{"op":"status"}"#)["status"].is_object());
    // Cancelling one of them frees its slot.
    raw.send(&frame(4, 0, r#"{"op":"cancel","request":2900}"#, b""));
    assert_eq!(raw.receive().unwrap(), (2900, serde_json::json!({"newest": null})));
}

#[test]
fn client_writes_archive_if_daemon_ignores_inline_data() {
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    for (room, fds) in [
        (r#""inline""#, vec![]),
        (r#"{"segment":{"segment":3,"capacity":1048576}}"#, sealed_memfd(1 << 20, seals, false)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let is_inline = fds.is_empty();
        let segment = fds.first().map(|memory| memory.try_clone().unwrap());
        let daemon = std::thread::spawn(move || {
            let mut raw = RawConnection(listener.accept().unwrap().0);
            let welcome = r#"{"welcome":{"protocol":{"major":2,"minor":0},"pid":1,"inline_max_bytes":262144}}"#;
            let (number, _, _) = raw.receive_with_data().unwrap();
            raw.send(&frame(3, number, welcome, b""));
            let (number, begin, inline_data) = raw.receive_with_data().unwrap();
            assert!(begin["digest"].is_string(), "{begin}");
            let begun = format!(
                r#"{{"begun":{{"contribution":7,"id":"{DIGEST}","epoch":0,"number":4,"write_target":{room}}}}}"#
            );
            let mut bytes = frame(3, number, &begun, b"");
            bytes[5] = u8::try_from(fds.len()).unwrap();
            if is_inline {
                raw.send(&bytes);
            } else {
                assert!(raw.send_with_descriptors(&bytes, &fds));
            }
            let (number, commit, data) = raw.receive_with_data().unwrap();
            assert_eq!((&commit["op"], &commit["contribution"]), (&"commit".into(), &7.into()));
            assert_eq!(commit["digest"], begin["digest"]);
            let written = match segment {
                Some(memory) => {
                    assert_eq!(data, b"");
                    let mut written = vec![0; inline_data.len()];
                    File::from(memory).read_exact_at(&mut written, 0).unwrap();
                    written
                }
                None => data,
            };
            assert!(written == inline_data, "the archive that is written equals the inline data");
            let progress = r#"{"progress":{"visible":true,"missing":""}}"#;
            raw.send(&frame(3, number, progress, b""));
            inline_data
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
fn contribution_accepts_several_archives() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
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
    let (begun, fds) = raw.request_with_descriptors(&begin("policy", archives[0].len()));
    write(fds, &archives[0]);
    let contribution = &begun["begun"]["contribution"];
    let extend =
        |len: usize| format!(r#"{{"op":"extend","contribution":{contribution},"file_len":{len}}}"#);
    assert_eq!(
        raw.request(2, &extend(archives[1].len())),
        serde_json::json!({"write_target": "inline"})
    );
    raw.send(&frame(1, 3, &extend(archives[2].len()), &archives[1]));
    let (kind, room, fds) = raw.receive_with_descriptors();
    assert_eq!((kind, room["write_target"]["segment"]["segment"].is_u64()), (3, true));
    write(fds, &archives[2]);
    assert_eq!(raw.request(4, &commit(&begun))["progress"]["visible"], true);
    let leased = raw.request(5, LOCATE);
    assert_eq!(leased["leased"]["archives"].as_object().unwrap().len(), 3);
    let dict = get(&daemon.connect());
    assert_eq!(dict.entries().len(), 3);
    assert_eq!(dict.leaf("part1").unwrap(), &Value::from(1_i64));
}

#[test]
fn contribution_waiting_for_memory_can_be_withdrawn() {
    // Room for the second archive and the daemon's manifest, but not for the first archive too.
    let daemon = TestDaemon::new(20 * MIB);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let long = begin("policy", 1 << 20).replace(r#""secs":1"#, r#""secs":3600"#);
    let begun = raw.request(1, &long);
    let contribution = &begun["begun"]["contribution"];
    let extend =
        format!(r#"{{"op":"extend","contribution":{contribution},"file_len":{}}}"#, 15 * MIB);
    raw.send(&frame(1, 2, &extend, b""));
    assert_eq!(raw.request(3, r#"{"op":"status"}"#)["status"]["memory"]["used_bytes"], 2 * MIB);
    raw.send(&frame(1, 4, &commit(&begun).replace("commit", "withdraw"), b""));
    let withdrawn = std::iter::from_fn(|| raw.receive()).find(|(number, _)| *number == 4);
    assert_eq!(withdrawn.unwrap().1, "done");
    raw.send(&frame(4, 0, r#"{"op":"goodbye"}"#, b""));
    while !raw.is_closed() {}
    put(&daemon.connect(), 1, 1);
}

#[test]
fn writer_resumes_put_after_lost_response() {
    let daemon = TestDaemon::new(1 << 30);
    let begin = r#"{"op":"begin","key":"k","proposal":{"writer":0,"writers":"0-1","job":"j","number":5,
        "file_len":9,"timeout":{"secs":1,"nanos":0}}}"#;
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let begun = raw.request(1, begin);
    assert_eq!(begun["begun"]["committed_digest"], serde_json::Value::Null);
    raw.send(&frame(1, 2, &commit(&begun), b"nine more"));
    let missing = serde_json::json!({"visible": false, "missing": "1"});
    assert_eq!(raw.receive().unwrap().1["progress"], missing);
    drop(raw);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let again = raw.request(1, begin);
    assert_eq!(again["begun"]["id"], begun["begun"]["id"]);
    assert_eq!(again["begun"]["committed_digest"], DIGEST);
    assert_eq!(raw.request(2, &commit(&again))["progress"], missing);
    let again = raw.request(3, begin);
    let other = commit(&again).replace(DIGEST, "11111111111111111111111111111111");
    let failed = &raw.request(4, &other)["failed"];
    assert_eq!(failed["refusal"]["contribution_differs"]["committed"], DIGEST, "{failed}");
}

#[test]
fn socket_is_private_unless_other_users_are_allowed() {
    let folder = tempfile::tempdir().unwrap();
    for (allow_uids, mode) in [(vec![], 0o600), (vec![12345], 0o666)] {
        let daemon = Daemon::bind(DaemonOptions {
            allow_uids,
            ..DaemonOptions::for_socket(folder.path().join("socket"), MIB)
        });
        let daemon = daemon.unwrap();
        let metadata = std::fs::metadata(daemon.socket()).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, mode);
    }
}

/// A fake daemon that answers `hello`, and then one request with the given head and descriptors.
fn fake_daemon(head: String, fds: Vec<OwnedFd>) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    std::thread::spawn(move || {
        let mut raw = RawConnection(listener.accept().unwrap().0);
        let welcome =
            r#"{"welcome":{"protocol":{"major":2,"minor":0},"pid":1,"inline_max_bytes":0}}"#;
        let (number, _) = raw.receive().unwrap();
        raw.send(&frame(3, number, welcome, b""));
        let (number, _) = raw.receive().unwrap();
        let mut bytes = frame(3, number, &head, b"");
        bytes[5] = u8::try_from(fds.len()).unwrap();
        if fds.is_empty() {
            raw.send(&bytes);
        } else {
            assert!(raw.send_with_descriptors(&bytes, &fds));
        }
        while raw.receive().is_some() {}
    });
    let url = format!("unix:{}", folder.path().join("socket").display());
    (folder, Store::connect(&url).unwrap())
}

/// Creates a memfd of `len` bytes with the given seals, and opens it read-only or for writing.
fn sealed_memfd(len: u64, seals: SealFlags, is_read_only: bool) -> Vec<OwnedFd> {
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
fn repeated_disconnects_leak_no_descriptors() {
    let folder = memory_tempdir();
    let serve = DaemonProcess::start(folder.path(), &[]);
    let store = serve.connect();
    put(&store, 1, 1);
    let descriptors = || {
        let path = format!("/proc/{}/fd", serve.process.id());
        std::fs::read_dir(path).unwrap().count()
    };
    let before = descriptors();
    for _ in 0..50 {
        // The client receives memory, and disconnects without `goodbye`.
        let mut raw = RawConnection::connect_with_hello(&folder.path().join("socket"));
        let (_, fds) = raw.request_with_descriptors(LOCATE);
        assert!(!fds.is_empty());
    }
    eventually(|| store.status().unwrap().peers.len() == 1);
    eventually(|| descriptors() <= before + 5);
}

#[test]
fn writer_cannot_resize_its_segment() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawConnection::connect_with_hello(&daemon.socket());
    let (begun, fds) = raw.request_with_descriptors(&begin("policy", 1 << 20));
    let [memory] = fds.as_slice() else { panic!("{begun}") };
    // Otherwise the daemon would read past the end of the memory.
    assert!(rustix::fs::ftruncate(memory, 0).is_err());
    assert!(rustix::fs::ftruncate(memory, 1 << 30).is_err());
    assert_eq!(raw.request(6, &commit(&begun))["failed"]["kind"], "rejected");
    put(&daemon.connect(), 1, 1);
}

#[test]
fn client_rejects_invalid_daemon_responses() {
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
        ("not sealed", leased(8192, shared), sealed_memfd(8192, SealFlags::SHRINK, true)),
        ("open for writing", leased(8192, shared), sealed_memfd(8192, all, false)),
        ("4096 bytes in place of 8192", leased(8192, shared), sealed_memfd(4096, all, true)),
        ("neither memory nor a file", leased(8192, shared), vec![pipe]),
        ("beyond its segment", leased(8193, shared), sealed_memfd(8192, all, true)),
        ("never sent", leased(8192, "[]"), vec![]),
        ("never sent", leased(8192, shared), vec![]),
        ("is gone", leased(8192, r#"[{"segment":"three"}]"#), vec![]),
        ("is gone", r#"{"surprise":{}}"#.to_owned(), vec![]),
        ("something else", r#""done""#.to_owned(), vec![]),
        // The memory is sealed, but holds no manifest.
        ("manifest", leased(8192, shared), sealed_memfd(8192, all, true)),
    ];
    for (text, head, fds) in cases {
        let (_folder, store) = fake_daemon(head, fds);
        let error = store.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
        assert!(error.to_string().contains(text), "{text}: {error}");
    }
}

/// Sends an HTTP request. Returns the status code and the body.
fn http_request(daemon: &TestDaemon, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(daemon.metrics_address()).unwrap();
    // The daemon may reject a request before it is sent or read completely.
    let _ = stream.write_all(request.as_bytes());
    read_response(stream)
}

fn read_response(mut stream: TcpStream) -> (u16, String) {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return (0, text) };
    (head[9..12].parse().unwrap(), body.to_owned())
}

fn http_get(daemon: &TestDaemon, path: &str) -> (u16, String) {
    http_request(daemon, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"))
}

/// Parses a metrics page into samples, keyed by name and labels.
fn parse_samples(page: &str) -> BTreeMap<&str, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let samples = lines.map(|line| line.rsplit_once(' ').unwrap());
    samples.map(|(name, value)| (name, value.parse().unwrap())).collect()
}

#[test]
fn put_takes_at_most_two_requests_and_get_takes_one() {
    let daemon = TestDaemon::new(1 << 30);
    let (writer, reader) = (daemon.connect(), daemon.connect());
    let requests = || -> u64 {
        let (_, page) = http_get(&daemon, "/metrics");
        let lines = page.lines().filter(|line| line.starts_with("tssd_requests_total{"));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    };
    // An archive of at most 256 KiB is sent with `begin`. With its index, 300 tensors of one byte fit, and 700 do not.
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
fn metrics_count_daemon_activity() {
    let daemon = TestDaemon::new(1 << 30);
    let (writer, reader) = (daemon.connect(), daemon.connect());
    put(&writer, 1, 4);
    let view = get(&reader);
    put(&writer, 2, 4);
    put(&writer, 3, 4);
    let odd = Key::new(r#"a "b"\c"#).unwrap();
    writer.put_state_dict(&odd, &model(1, 1), &PutOptions::default()).unwrap();
    assert!(reader.get(&Key::new("none").unwrap(), "w", &GetOptions::default()).is_err());

    let (status, page) = http_get(&daemon, "/metrics");
    assert_eq!(status, 200);
    let samples = parse_samples(&page);
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
        let name = format!(r#"tssd_{name}_bytes_total{{transport="shared_memory"}}"#);
        assert!((samples[name.as_str()] - four).abs() < 1.0, "{name}\n{page}");
    }
    assert!(samples["tssd_put_bytes_total"] > 3.0 * four, "{page}");
    assert!(
        (four..1.1 * four).contains(&samples[r#"tssd_leased_bytes_total{source="here"}"#]),
        "{page}"
    );
    assert!(samples["tssd_memory_used_bytes"] >= samples["tssd_memory_free_bytes"], "{page}");
    let lag = page.lines().find(|line| line.starts_with("tssd_reader_lag_versions{"));
    let pid = format!(r#"pid="{}""#, std::process::id());
    assert!(lag.is_some_and(|lag| lag.contains(&pid) && lag.ends_with(" 2")), "{page}");
    // Each sample follows the HELP and TYPE lines of its family.
    let mut family = "";
    for line in page.lines() {
        match line.strip_prefix("# TYPE ") {
            Some(line) => family = line.split(' ').next().unwrap(),
            None if line.starts_with("# HELP ") => {}
            None => assert_eq!(line.split(['{', ' ']).next().unwrap(), family),
        }
    }
    drop(view);
}

#[test]
fn http_clients_cannot_disturb_daemon() {
    let daemon = TestDaemon::new(1 << 30);
    assert_eq!(http_get(&daemon, "/healthz").0, 200);
    assert_eq!(http_get(&daemon, "/readyz").0, 200);
    assert_eq!(http_get(&daemon, "/etc/passwd").0, 404);
    assert_eq!(http_request(&daemon, "POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n").0, 405);
    assert_eq!(http_request(&daemon, "\0\0\0\0garbage\r\n\r\n").0, 400);
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20));
    assert!(matches!(http_request(&daemon, &long).0, 0 | 414 | 431), "a request over the limit");
    // More connections than are served at once, each with half a request.
    let idle: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(daemon.metrics_address()).unwrap();
            stream.write_all(b"GET /metr").unwrap();
            stream
        })
        .collect();
    let store = daemon.connect();
    put(&store, 1, 1);
    assert_eq!(step_of(&get(&store)), 1);
    for stream in idle {
        read_response(stream);
    }
    assert_eq!(http_get(&daemon, "/healthz").0, 200, "the daemon closed the idle connections");
}

#[test]
fn daemon_is_not_ready_while_controller_is_unreachable() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    assert_eq!(http_get(&proxy_daemon, "/readyz").0, 200);
    drop(controller);
    // The daemon notices the end of the connection after the controller has ended.
    eventually(|| http_get(&proxy_daemon, "/readyz").0 == 503);
    assert_eq!(http_get(&proxy_daemon, "/healthz").0, 200);
}

#[test]
fn metrics_on_public_address_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = DaemonOptions {
        metrics: Some("0.0.0.0:0".parse().unwrap()),
        ..DaemonOptions::for_socket(folder.path().join("socket"), MIB)
    };
    let error = Daemon::bind(options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("only this host may ask"), "{error}");
}

#[test]
fn stopped_daemon_is_alive_but_not_ready() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let options = DaemonOptions {
        metrics: Some("127.0.0.1:0".parse().unwrap()),
        ..DaemonOptions::for_socket(folder.path().join("socket"), MIB)
    };
    let daemon = runtime.block_on(tssd_store::Daemon::bind(options)).unwrap();
    let address = daemon.metrics().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server_task = runtime.spawn(daemon.serve(async { drop(stopped.await) }));
    // Requests that began before the shutdown are answered after it.
    let begin = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\n").as_bytes()).unwrap();
        stream
    };
    let finish = |mut stream: TcpStream| {
        stream.write_all(b"Host: localhost\r\n\r\n").unwrap();
        read_response(stream).0
    };
    let (ready, alive) = (begin("/readyz"), begin("/healthz"));
    // Connections are accepted in order, so the two above are accepted.
    assert_eq!(finish(begin("/readyz")), 200);
    drop(stop);
    runtime.block_on(server_task).unwrap().unwrap();
    assert_eq!((finish(ready), finish(alive)), (503, 200));
}
