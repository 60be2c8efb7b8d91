//! Daemons of other hosts: what is read in ranges, proofs of who is there, bytes on one host and control on
//! another.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use tssd_format::{
    Compression, Dtype, Region, ShardPlace, StateDict, Storage, Tensor, TensorMeta, TensorSlice,
    Value,
};
use tssd_store::blocking::Store;
use tssd_store::{
    ConnectOptions, Credentials, DaemonOptions, ErrorKind, GetOptions, JobId, Key, PutOptions,
    Target,
};
use tssd_tests::authority::Authority;
use tssd_tests::raw::{HELLO, frame};
use tssd_tests::served::Served;

const MIB: u64 = 1 << 20;

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Bytes that differ from place to place and from step to step.
fn noise(step: u64, len: u64) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes: Vec<u8> = std::iter::repeat_with(word)
        .take(len.div_ceil(8) as usize)
        .flat_map(u64::to_le_bytes)
        .collect();
    bytes.truncate(len as usize);
    bytes
}

/// A matrix of so many MiB, of rows of 3 KiB and some bytes, and small things.
fn model(step: u64, mib: u64) -> StateDict {
    let columns = 3 * 1024 + 7;
    let meta = TensorMeta::new(Dtype::Uint8, &[mib * MIB / columns, columns]).unwrap();
    let mut dict = StateDict::new();
    let matrix = noise(step, meta.nbytes());
    dict.insert("weight", Tensor::new(meta, Storage::from(matrix), 0).unwrap());
    dict.insert("bias", Tensor::from_slice(&[step as f32, 0.5], &[2]).unwrap());
    dict.insert("step", step.cast_signed());
    dict.insert("text", "x".repeat(5000).as_str());
    dict
}

/// The elements of a tensor of bytes, row by row.
fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    tensor.view().to_contiguous(u64::MAX).unwrap()
}

fn put(store: &Store, dict: &StateDict, options: &PutOptions) -> u64 {
    store.put_state_dict(&key(), dict, options).unwrap().version
}

fn get(store: &Store) -> StateDict {
    store.get_state_dict(&key(), &GetOptions::default()).unwrap().0
}

/// The elements of a box of a matrix of bytes.
fn cut(dict: &StateDict, region: &Region) -> Vec<u8> {
    let Value::Tensor(tensor) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    let columns = tensor.meta().shape()[1];
    let (offsets, shape) = (region.offsets(), region.shape());
    let bytes = tensor.view().span();
    let rows = offsets[0]..offsets[0] + shape[0];
    rows.flat_map(|row| {
        let start = (row * columns + offsets[1]) as usize;
        bytes[start..start + shape[1] as usize].iter().copied()
    })
    .collect()
}

#[test]
fn what_is_large_comes_in_ranges_whole_or_cut() {
    let served = Served::new(1 << 30);
    let (near, far) = (served.connect(), served.connect_far());
    for (step, compression) in [(1, Compression::None), (2, Compression::Zstd)] {
        let dict = model(step, 9);
        put(&far, &dict, &PutOptions { compression, ..PutOptions::default() });
        assert_eq!(get(&near), dict, "what came in frames is what was put");
        assert_eq!(get(&far), dict);
        let rows = 9 * MIB / 3079;
        for (offsets, shape) in [
            // Rows, columns, a part of a row, all, nothing.
            ([7, 0], [rows - 9, 3079]),
            ([0, 1000], [rows, 1001]),
            ([rows / 2, 3], [1, 9]),
            ([0, 0], [rows, 3079]),
            ([3, 3], [0, 5]),
        ] {
            let region = Region::new(&offsets, &shape).unwrap();
            let part = far.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap();
            assert_eq!(bytes_of(&part), cut(&dict, &region));
            for unverified in [false, true] {
                let slice = TensorSlice::new(&offsets, &shape, &[rows, 3079]).unwrap();
                let meta = TensorMeta::new(Dtype::Uint8, &shape).unwrap();
                let mut memory = vec![0; meta.nbytes() as usize];
                let target = Target {
                    fqn: "weight".into(),
                    place: Some(ShardPlace::new(slice)),
                    meta,
                    memory: (&mut memory).into(),
                };
                let options = GetOptions { unverified, ..GetOptions::default() };
                let report = far.get_state_dict_into(&key(), &mut [target], &options).unwrap();
                assert_eq!(memory, cut(&dict, &region));
                if compression == Compression::None {
                    assert_eq!(report.bytes_transferred, report.bytes_needed);
                    let proven = if unverified { 0 } else { report.bytes_needed };
                    assert_eq!(report.bytes_verified, proven);
                }
            }
        }
    }
}

#[test]
fn what_was_got_from_elsewhere_stays() {
    let served = Served::new(1 << 30);
    let (near, far) = (served.connect(), served.connect_far());
    let first = model(1, 3);
    put(&near, &first, &PutOptions::default());
    let held = get(&far);
    for step in 2..5 {
        put(&near, &model(step, 3), &PutOptions::default());
        assert_eq!(get(&far), model(step, 3));
    }
    assert_eq!(held, first);
    drop(far);
    // What a reader of another host leaves behind can be written again: it has no memory of this one.
    let memory = near.status().unwrap().memory;
    assert_eq!((memory.retired, memory.retired_bytes), (0, 0), "{memory:?}");
}

#[test]
fn small_things_come_many_at_once() {
    let served = Served::new(1 << 30);
    let far = served.connect_far();
    let mut dict = StateDict::new();
    for number in 0..5000_u32 {
        dict.insert(format!("layer.{number}"), Tensor::from_slice(&[number], &[1]).unwrap());
    }
    put(&far, &dict, &PutOptions::default());
    assert_eq!(get(&far), dict);
    let requests = far.status().unwrap();
    assert!(!requests.peers.is_empty());
    assert!(requests.peers.iter().all(|peer| peer.pid == 0 && peer.address.is_some()));
}

fn connect(url: &str, credentials: Option<Credentials>) -> Result<Store, tssd_store::Error> {
    let options = ConnectOptions { credentials, timeout: Duration::from_secs(5) };
    Store::connect_with(url, &options)
}

#[test]
fn both_sides_prove_who_they_are() {
    let (own, other) = (Authority::new(), Authority::new());
    let daemon = own.issue("daemon", "127.0.0.1", |_| {});
    let served = Served::proven(daemon.clone());
    let url = served.address();
    assert!(url.starts_with("tls://127.0.0.1:"), "{url}");
    let client = own.issue("client", "trainer-7", |_| {});
    let store = connect(url, Some(client.clone())).unwrap();
    let dict = model(1, 3);
    put(&store, &dict, &PutOptions::default());
    assert_eq!(get(&store), dict);
    let part = Region::new(&[1, 1], &[500, 70]).unwrap();
    let got = store.get_slice(&key(), "weight", &part, &GetOptions::default()).unwrap();
    assert_eq!(bytes_of(&got), cut(&dict, &part));

    let expired = own.issue("expired", "trainer-8", |params| {
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    });
    let foreign = other.issue("foreign", "trainer-9", |_| {});
    // Somebody of another authority who believes ours.
    let disguised = Credentials { ca: client.ca.clone(), ..foreign.clone() };
    let port = url.rsplit_once(':').unwrap().1;
    let renamed = format!("tls://localhost:{port}");
    let in_the_open = format!("tcp://127.0.0.1:{port}");
    for (url, credentials, kind, says) in [
        (url, Some(expired), ErrorKind::Unreachable, ""),
        (url, Some(disguised), ErrorKind::Unreachable, ""),
        (url, Some(foreign), ErrorKind::Unreachable, "invalid peer certificate"),
        (url, None, ErrorKind::Invalid, "TSSD_CA"),
        (&renamed, Some(client.clone()), ErrorKind::Unreachable, "not valid for"),
        (&in_the_open, None, ErrorKind::Unreachable, ""),
    ] {
        let error = connect(url, credentials).unwrap_err();
        assert_eq!(error.kind(), kind, "{url}: {error}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    // A daemon that talks in the open to one who wants a proof, and files that are none.
    let open = Served::new(1 << 20);
    let url = open.address().replace("tcp:", "tls:");
    let error = connect(&url, Some(client.clone())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let missing = Credentials { key: PathBuf::from("/nowhere/a.key"), ..client.clone() };
    let swapped = Credentials { cert: client.key.clone(), ..client.clone() };
    let mixed = Credentials { key: daemon.key.clone(), ..client };
    for (credentials, says) in
        [(missing, "/nowhere/a.key"), (swapped, "client.key"), (mixed, "client.pem")]
    {
        let error = connect(served.address(), Some(credentials)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
    // Nobody else has noticed.
    assert_eq!(get(&store), dict);
}

#[test]
fn nothing_is_served_in_the_open_but_to_this_host() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |say: &dyn Fn(&mut DaemonOptions)| {
        let mut options = DaemonOptions::at(folder.path().join("socket"), 1 << 20);
        say(&mut options);
        let error = tssd_store::blocking::Daemon::bind(options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        error.to_string()
    };
    let anybody: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let text = refused(&|options| options.listen = Some(anybody));
    assert!(text.contains("--cert"), "{text}");
    let controller = Some("tcp://127.0.0.1:7".to_owned());
    let text = refused(&|options| options.controller.clone_from(&controller));
    assert!(text.contains("--listen"), "{text}");
    let text = refused(&|options| {
        options.controller.clone_from(&controller);
        options.listen = Some("127.0.0.1:0".parse().unwrap());
        options.root = Some(folder.path().to_owned());
    });
    assert!(text.contains("--root"), "{text}");
    for url in ["tcp://192.0.2.1:7000", "tls://no-port", "tls://127.0.0.1:notaport"] {
        let error = connect(url, None).unwrap_err();
        let is_so = matches!(error.kind(), ErrorKind::Refused | ErrorKind::Invalid);
        assert!(is_so, "{url}: {error}");
    }
    // Somebody listens and says nothing, or something else.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("tcp://{}", silent.local_addr().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = silent.accept().unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        });
        let error = connect(&url, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    });
}

#[test]
fn what_is_damaged_is_not_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let dict = model(1, 3);
    {
        let served = Served::over(folder.path());
        let durability = tssd_store::Durability::Disk;
        put(&served.connect(), &dict, &PutOptions { durability, ..PutOptions::default() });
    }
    let version = tssd_tests::layout::version(&folder.path().join("policy"), "0-1");
    let files = std::fs::read_dir(&version).unwrap().map(|entry| entry.unwrap().path());
    let mut archives = files.filter(|path| !path.ends_with("manifest.tssd"));
    let archive = archives.next().unwrap();
    let mut bytes = std::fs::read(&archive).unwrap();
    // In the second chunk of the matrix, which is the first that is large enough for a place of its own.
    let Value::Tensor(matrix) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    let start = &matrix.view().span()[MIB as usize + 5000..][..100];
    let place = bytes.windows(100).position(|window| window == start).unwrap();
    bytes[place] ^= 1;
    std::fs::remove_file(&archive).unwrap();
    std::fs::write(&archive, bytes).unwrap();
    let served = Served::over(folder.path());
    let far = served.connect_far();
    let error = far.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let row = (MIB + 5000) / 3079;
    for (offsets, shape) in [([row, 0], [1, 3079]), ([0, 7], [900, 9])] {
        let region = Region::new(&offsets, &shape).unwrap();
        let error = far.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    // What is whole is had all the same, on the connections that are left.
    let region = Region::new(&[0, 0], &[300, 3079]).unwrap();
    let got = far.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap();
    assert_eq!(bytes_of(&got), cut(&dict, &region));
}

#[test]
fn only_daemons_keep_and_discard() {
    let served = Served::new(1 << 30);
    let near = served.connect();
    put(&near, &model(1, 1), &PutOptions::default());
    let mut stream = std::os::unix::net::UnixStream::connect(served.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut ask = |head: &str| {
        stream.write_all(&frame(1, 9, head, b"")).unwrap();
        receive(&mut stream).unwrap().0
    };
    ask(HELLO);
    let discard = r#"{"op":"discard","blobs":["policy/0-1/manifest.tssd"]}"#;
    assert_eq!(ask(discard)["failed"]["kind"], "refused");
    let kept = |durability: &str| {
        json!({"op": "begin", "key": "policy", "keeper": "tcp://127.0.0.1:7", "proposal": {
            "writer": 0, "writers": "0", "file_len": 9, "timeout": {"secs": 1, "nanos": 0},
            "durability": durability}})
    };
    assert_eq!(ask(&kept("memory").to_string())["failed"]["kind"], "refused");
    let folder = tempfile::tempdir().unwrap();
    let durable = Served::over(folder.path());
    assert_eq!(Raw::greet(&durable).fail(&kept("disk"), b"").0, "invalid");
    let mut raw = Raw::greet(&served);
    let (begun, _) = raw.ask(&kept("memory").to_string(), b"");
    assert_eq!(begun["begun"]["room"], "kept");
    // Nobody keeps it there: it is no version.
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [9]});
    let (kind, text) = raw.fail(&commit, b"");
    assert!(["unreachable", "rejected", "io"].contains(&kind.as_str()), "{kind}: {text}");
    assert_eq!(get(&near), model(1, 1));
}

/// Who says what it likes by TCP.
struct Raw(TcpStream);

impl Raw {
    fn greet(served: &Served) -> Self {
        let address = served.address().strip_prefix("tcp://").unwrap();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut raw = Self(stream);
        assert_eq!(raw.ask(HELLO, b"").0["welcome"]["protocol"]["major"], 1);
        raw
    }

    /// The head and the data of the reply to a request.
    fn ask(&mut self, head: &str, data: &[u8]) -> (serde_json::Value, Vec<u8>) {
        self.0.write_all(&frame(1, 9, head, data)).unwrap();
        self.receive().unwrap()
    }

    fn receive(&mut self) -> Option<(serde_json::Value, Vec<u8>)> {
        receive(&mut self.0)
    }

    /// The kind of the failure that a request leads to, and its text.
    fn fail(&mut self, head: &serde_json::Value, data: &[u8]) -> (String, String) {
        let (head, _) = self.ask(&head.to_string(), data);
        let word = |name: &str| head["failed"][name].as_str().unwrap_or_default().to_owned();
        (word("kind"), word("text"))
    }
}

/// The head and the data of the next frame; none if the daemon has ended the connection.
fn receive(stream: &mut impl Read) -> Option<(serde_json::Value, Vec<u8>)> {
    let mut header = [0; 24];
    stream.read_exact(&mut header).ok()?;
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let (mut head, mut data) = (vec![0; word(8) as usize], vec![0; word(12) as usize]);
    stream.read_exact(&mut head).ok()?;
    stream.read_exact(&mut data).ok()?;
    Some((serde_json::from_slice(&head).unwrap(), data))
}

#[test]
fn ranges_that_cannot_be_read_are_refused() {
    let served = Served::new(1 << 30);
    let store = served.connect();
    let dict = model(1, 9);
    put(&store, &dict, &PutOptions::default());
    let mut raw = Raw::greet(&served);
    let (located, _) = raw.ask(r#"{"op":"locate","key":"policy","selector":"newest"}"#, b"");
    let archives = located["leased"]["archives"].as_object().unwrap();
    let archive = archives.values().next().unwrap();
    let (blob, len) = (archive["blob"].as_str().unwrap(), archive["len"].as_u64().unwrap());
    assert!(archive["at"].is_null(), "it is here");
    let read = |ranges: serde_json::Value| json!({"op": "read", "blob": blob, "ranges": ranges});
    let max = u64::MAX;
    for ranges in [
        json!([[len, 1]]),
        json!([[len - 1, 2]]),
        json!([[max, max]]),
        json!([[0, 0]]),
        json!([[0, 4_194_305]]),
        json!([[0, 4_194_304], [0, 1]]),
        json!([[0, 1, [[0, 1]]]]),
        json!([[0, 1, [[max, 0]]]]),
        json!([[0, 1, [[max, max], [max, max], [2, 0]]]]),
        json!([[0, 1, [[1, 0], [1, 0], [1, 0], [1, 0]]]]),
        json!([[0, 0, [[max, 0], [max, 0]]]]),
    ] {
        assert_eq!(raw.fail(&read(ranges.clone()), b"").0, "invalid", "{ranges}");
    }
    for (request, kind) in [
        (json!({"op": "read", "blob": "nothing", "ranges": [[0, 1]]}), "not_found"),
        (json!({"op": "read", "blob": "../../etc/passwd", "ranges": [[0, 1]]}), "not_found"),
        (json!({"op": "read", "blob": blob, "ranges": [[-1, 1]]}), "invalid"),
        (json!({"op": "read", "blob": blob}), "invalid"),
        // The index has no chunks that could be proven.
        (json!({"op": "read", "blob": blob, "ranges": [[len - 64, 64]], "prove": true}), "invalid"),
        (json!({"op": "write", "contribution": 77, "offset": 0}), "invalid"),
    ] {
        assert_eq!(raw.fail(&request, b"").0, kind, "{request}");
    }
    let (reply, data) = raw.ask(&read(json!([[0, 4], [4096, 3, [[2, 5]]]])).to_string(), b"");
    assert_eq!(reply, json!({"read": {"crc32": null}}));
    assert_eq!(data.len(), 4 + 6);
    let proven =
        json!({"op": "read", "blob": blob, "ranges": [[5000, 100, [[3, 200]]]], "prove": true});
    let (reply, data) = raw.ask(&proven.to_string(), b"");
    assert_eq!(reply["read"]["crc32"], crc32fast::hash(&data));
    assert_eq!(data.len(), 300);
    assert_eq!(get(&store), dict);
}

#[test]
fn archives_in_frames_have_the_bytes_that_were_announced() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served);
    let len = 3 * MIB;
    let begin = json!({"op": "begin", "key": "policy", "proposal": {
        "writer": 0, "writers": "0", "file_len": len, "timeout": {"secs": 1, "nanos": 0}}});
    let begun = |raw: &mut Raw| {
        let (reply, _) = raw.ask(&begin.to_string(), b"");
        assert_eq!(reply["begun"]["room"], "frames");
        reply["begun"]["contribution"].as_u64().unwrap()
    };
    let write = |contribution: u64, offset: u64| json!({"op": "write", "contribution": contribution, "offset": offset});
    let commit = |contribution: u64| json!({"op": "commit", "contribution": contribution, "digest": "0".repeat(32)});
    let contribution = begun(&mut raw);
    let block = vec![7; MIB as usize];
    for offset in [len - MIB + 1, len, u64::MAX] {
        assert_eq!(raw.fail(&write(contribution, offset), &block).0, "invalid", "{offset}");
    }
    assert_eq!(raw.ask(&write(contribution, 0).to_string(), &block).0, "done");
    let (kind, text) = raw.fail(&commit(contribution), b"");
    assert_eq!(kind, "invalid");
    assert!(text.contains("1048576") && text.contains("3145728"), "{text}");
    // Complete, and no archive.
    let contribution = begun(&mut raw);
    for offset in [0, MIB, 2 * MIB] {
        assert_eq!(raw.ask(&write(contribution, offset).to_string(), &block).0, "done");
    }
    assert_eq!(raw.fail(&commit(contribution), b"").0, "rejected");
    assert_eq!(raw.fail(&write(contribution, 0), &block).0, "invalid", "it is decided");
    // More than a frame may have ends the connection.
    raw.0
        .write_all(&frame(1, 9, &write(1, 0).to_string(), &vec![0; MIB as usize + 1]))
        .unwrap_or_default();
    assert!(raw.receive().is_none());
    let store = served.connect();
    assert!(store.keys(None).unwrap().is_empty());
    put(&store, &model(1, 1), &PutOptions::default());
}

fn as_writer(writer: u32, job: &str, version: u64) -> PutOptions {
    PutOptions {
        version: Some(version),
        writer: Some(writer),
        writers: Some("0-1".parse().unwrap()),
        job: Some(JobId(job.to_owned())),
        timeout: Duration::from_secs(10),
        ..PutOptions::default()
    }
}

/// What each of two writers puts: rows of one matrix.
fn half(step: u64, writer: u64) -> StateDict {
    let slice = TensorSlice::new(&[writer * 700, 0], &[700, 3079], &[1400, 3079]).unwrap();
    let meta = TensorMeta::new(Dtype::Uint8, &[700, 3079]).unwrap();
    let local = Tensor::new(meta, Storage::from(noise(2 * step + writer, 700 * 3079)), 0).unwrap();
    let shard = tssd_format::Shard::new(local, ShardPlace::new(slice)).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", shard);
    dict.insert("step", step.cast_signed());
    dict
}

fn both(step: u64) -> Vec<u8> {
    (0..2).flat_map(|writer| noise(2 * step + writer, 700 * 3079)).collect()
}

fn weight(store: &Store, options: &GetOptions) -> Vec<u8> {
    let tensor = store.get(&key(), "weight", options).unwrap();
    bytes_of(&tensor)
}

#[test]
fn two_daemons_serve_one_version() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let stores = [controller.connect(), keeper.connect()];
    assert_eq!(stores[0].status().unwrap().hosts, []);
    let hosts = stores[1].status().unwrap().hosts;
    let hosts: Vec<_> = hosts.iter().map(|host| (&*host.address, host.is_own)).collect();
    assert_eq!(hosts, [(keeper.address(), true), (controller.address(), false)]);
    let far = controller.connect_far();
    let held = GetOptions { version: Some(1), ..GetOptions::default() };
    let mut views = Vec::new();
    for step in 1..=4_u64 {
        std::thread::scope(|scope| {
            for (writer, store) in stores.iter().enumerate() {
                let options = as_writer(writer as u32, "run", step);
                let dict = half(step, writer as u64);
                scope.spawn(move || store.put_state_dict(&key(), &dict, &options).unwrap());
            }
        });
        for store in stores.iter().chain([&far]) {
            assert_eq!(store.head(&key()).unwrap().unwrap().number, step);
            assert_eq!(weight(store, &GetOptions::default()), both(step));
            let report = get_into(store, step);
            assert_eq!(report.bytes_transferred, report.bytes_needed);
            views.push((step, get(store)));
        }
        for (step, view) in &views {
            assert_eq!(whole(view), both(*step), "a view never changes");
        }
        if step == 2 {
            views.clear();
        }
    }
    views.clear();
    // Each host has its own bytes, and writes the same memory again.
    for store in &stores {
        let memory = store.status().unwrap().memory;
        assert!(memory.used < 40 * MIB, "{memory:?}");
        assert!(memory.recycled > 0, "{memory:?}");
    }
    let error = stores[1].get_state_dict(&key(), &held).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    stores[1].pin(&key(), None, "best").unwrap();
    assert_eq!(stores[0].pins(&key()).unwrap(), BTreeMap::from([("best".to_owned(), 4)]));
    stores[1].unpin(&key(), "best").unwrap();
    assert_eq!(stores[1].delete(&key(), None).unwrap(), 1);
    eventually(|| {
        stores.iter().all(|store| {
            let memory = store.status().unwrap().memory;
            memory.warm + 8 * MIB >= memory.used
        })
    });
}

fn eventually(is_so: impl Fn() -> bool) {
    assert!((0..3000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        is_so()
    }));
}

fn whole(dict: &StateDict) -> Vec<u8> {
    let Value::Tensor(tensor) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    bytes_of(tensor)
}

/// Reads columns that both writers have rows of.
fn get_into(store: &Store, step: u64) -> tssd_store::GetReport {
    let slice = TensorSlice::new(&[600, 5], &[200, 3000], &[1400, 3079]).unwrap();
    let meta = TensorMeta::new(Dtype::Uint8, &[200, 3000]).unwrap();
    let mut memory = vec![0; 200 * 3000];
    let place = Some(ShardPlace::new(slice));
    let target = Target { fqn: "weight".into(), place, meta, memory: (&mut memory).into() };
    let report = store.get_state_dict_into(&key(), &mut [target], &GetOptions::default()).unwrap();
    let all = both(step);
    let expected = (600..800).flat_map(|row| &all[row * 3079 + 5..row * 3079 + 3005]);
    assert!(memory.iter().eq(expected));
    report
}

#[test]
fn a_version_can_be_fetched_ahead() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let (trainer, generator) = (controller.connect(), keeper.connect());
    let none = GetOptions::default();
    let error = generator.prefetch(&key(), &[], &none).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    put(&trainer, &model(1, 4), &PutOptions::default());
    let fetched = generator.prefetch(&key(), &[], &none).unwrap();
    assert!(fetched.version == 1 && fetched.bytes > 4 * MIB - 4096, "{fetched:?}");
    assert_eq!(generator.prefetch(&key(), &[], &none).unwrap().bytes, 0, "it is there already");
    // It goes on being there, whatever is put.
    put(&trainer, &model(2, 4), &PutOptions::default());
    let first = GetOptions { version: Some(1), ..GetOptions::default() };
    let sent = || controller.metric("tssd_read_bytes_total");
    let before = sent();
    let (held, _) = generator.get_state_dict(&key(), &first).unwrap();
    assert_eq!(held, model(1, 4));
    assert!((sent() - before).abs() < 1.0, "nothing came for it");
    assert_eq!(get(&generator), model(2, 4), "the newest is not the one that was fetched");
    assert!(sent() - before > 3e6);
    for step in 3..6 {
        put(&trainer, &model(step, 4), &PutOptions::default());
        assert_eq!(generator.prefetch(&key(), &[], &none).unwrap().version, step);
        assert_eq!(get(&generator), model(step, 4));
    }
    assert_eq!(held, model(1, 4), "what is looked at stays");
    let error = generator.get_state_dict(&key(), &first).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    drop(held);
    eventually(|| generator.status().unwrap().memory.used < 30 * MIB);
    // Only what is wanted.
    for (store, writer) in [(&trainer, 0), (&generator, 1)] {
        store
            .put_state_dict(&key(), &half(9, writer), &as_writer(writer as u32, "run", 9))
            .unwrap();
    }
    let rows = |from: u64| {
        let slice = TensorSlice::new(&[from, 0], &[100, 3079], &[1400, 3079]).unwrap();
        [("weight".to_owned(), Some(ShardPlace::new(slice)))]
    };
    assert_eq!(generator.prefetch(&key(), &rows(900), &none).unwrap().bytes, 0);
    let fetched = generator.prefetch(&key(), &rows(100), &none).unwrap();
    assert!(fetched.bytes > 2 * MIB && fetched.bytes < 3 * MIB, "{fetched:?}");
    assert_eq!(weight(&generator, &none), both(9));
    for store in [Store::memory().unwrap(), controller.connect_far()] {
        let error = store.prefetch(&key(), &[], &none).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[test]
fn a_daemon_that_is_lost_is_said_and_the_others_go_on() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let (near, far) = (controller.connect(), keeper.connect());
    put(&far, &model(1, 4), &PutOptions::default());
    let (read, none) = (Key::new("read").unwrap(), GetOptions::default());
    far.put_state_dict(&read, &model(7, 1), &PutOptions::default()).unwrap();
    assert_eq!(near.get_state_dict(&read, &none).unwrap().0, model(7, 1));
    let held = get(&far);
    drop(keeper);
    assert_eq!(held, model(1, 4), "views stay");
    assert_eq!(near.get_state_dict(&read, &none).unwrap().0, model(7, 1), "what was read stays");
    let error = near.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error = far.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    // What it kept is replaced like any other version.
    put(&near, &model(2, 4), &PutOptions::default());
    assert_eq!(get(&near), model(2, 4));
    // Another one comes, and the one that decides goes.
    let keeper = Served::under(&controller);
    let far = keeper.connect();
    assert_eq!(get(&far), model(2, 4));
    put(&far, &model(3, 4), &PutOptions::default());
    drop((near, controller));
    let error = far.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error = far.put_state_dict(&key(), &model(4, 4), &PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

/// What is between a daemon and the one that decides: it may lose an answer, and the connection.
struct Between {
    address: String,
    state: std::sync::Arc<Losing>,
}

#[derive(Default)]
struct Losing {
    is_armed: std::sync::atomic::AtomicBool,
    has_lost: std::sync::atomic::AtomicBool,
    streams: std::sync::Mutex<Vec<TcpStream>>,
}

impl Between {
    fn before(served: &Served) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let upstream = served.address().strip_prefix("tcp://").unwrap().to_owned();
        let state = std::sync::Arc::<Losing>::default();
        let own = state.clone();
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = TcpStream::connect(&upstream) else { continue };
                let ends = [&client, &server].map(|end| end.try_clone().unwrap());
                own.streams.lock().unwrap().extend(ends);
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
                let own = own.clone();
                std::thread::spawn(move || {
                    let _ = own.answers(server, &client);
                    let _ = client.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        Self { address, state }
    }

    /// The next answer to a commit is lost.
    fn arm(&self) {
        self.state.is_armed.store(true, std::sync::atomic::Ordering::SeqCst);
    }

    fn has_lost(&self) -> bool {
        self.state.has_lost.load(std::sync::atomic::Ordering::SeqCst)
    }

    /// All connections end.
    fn cut(&self) {
        for stream in self.state.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Losing {
    fn answers(&self, mut server: TcpStream, mut client: &TcpStream) -> std::io::Result<()> {
        loop {
            let mut header = [0; 24];
            server.read_exact(&mut header)?;
            let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
            let head_len = word(8) as usize;
            let mut rest = vec![0; head_len + word(12) as usize];
            server.read_exact(&mut rest)?;
            let is_progress = rest[..head_len].starts_with(b"{\"progress\"");
            if is_progress && self.is_armed.swap(false, std::sync::atomic::Ordering::SeqCst) {
                self.has_lost.store(true, std::sync::atomic::Ordering::SeqCst);
                continue;
            }
            client.write_all(&[&header[..], &rest].concat())?;
        }
    }
}

fn numbered(version: u64) -> GetOptions {
    GetOptions { version: Some(version), ..GetOptions::default() }
}

#[test]
fn what_was_fetched_does_not_change_while_it_is_looked_at() {
    let served = Served::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    put(&writer, &model(1, 4), &PutOptions::default());
    reader.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    let (held, _) = reader.get_state_dict(&key(), &numbered(1)).unwrap();
    assert_eq!(held, model(1, 4));
    for step in 2..6 {
        put(&writer, &model(step, 4), &PutOptions::default());
        reader.prefetch(&key(), &[], &GetOptions::default()).unwrap();
        assert!(held == model(1, 4), "a view has changed after the put of {step}");
    }
}

#[test]
fn a_reader_of_what_was_fetched_in_part_keeps_the_rest() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let (trainer, generator) = (controller.connect(), keeper.connect());
    let step = |step: u64| {
        for writer in 0..2 {
            let options = as_writer(writer as u32, "run", step);
            trainer.put_state_dict(&key(), &half(step, writer), &options).unwrap();
        }
    };
    step(9);
    let slice = TensorSlice::new(&[100, 0], &[100, 3079], &[1400, 3079]).unwrap();
    let rows = [("weight".to_owned(), Some(ShardPlace::new(slice)))];
    generator.prefetch(&key(), &rows, &GetOptions::default()).unwrap();
    let opened = generator.open(&key(), &numbered(9)).unwrap();
    step(10);
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    let region = Region::new(&[900, 0], &[100, 3079]).unwrap();
    let got = opened.tensor("weight", Some(&region)).unwrap();
    assert_eq!(bytes_of(&got), both(9)[900 * 3079..1000 * 3079]);
}

#[test]
fn a_number_that_was_fetched_is_not_that_of_a_rewind() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let (trainer, generator) = (controller.connect(), keeper.connect());
    put(&trainer, &model(1, 1), &PutOptions { version: Some(1), ..PutOptions::default() });
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    put(&trainer, &model(2, 1), &PutOptions { version: Some(2), ..PutOptions::default() });
    let rewind = PutOptions { version: Some(1), rewind: true, ..PutOptions::default() };
    put(&trainer, &model(7, 1), &rewind);
    assert!(trainer.get_state_dict(&key(), &numbered(1)).unwrap().0 == model(7, 1));
    let (got, report) = generator.get_state_dict(&key(), &numbered(1)).unwrap();
    assert!(got == model(7, 1), "epoch {} of version 1", report.epoch);
}

fn kept(writers: &str, keeper: &str) -> serde_json::Value {
    json!({"op": "begin", "key": "policy", "keeper": keeper, "proposal": {
        "writer": 0, "writers": writers, "job": "run", "number": 7, "file_len": 9,
        "timeout": {"secs": 1, "nanos": 0}}})
}

#[test]
fn a_commit_of_a_keeper_without_lengths_is_answered() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served);
    raw.0.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    let (begun, _) = raw.ask(&kept("0", "tcp://127.0.0.1:7").to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32)});
    raw.0.write_all(&frame(1, 9, &commit.to_string(), b"")).unwrap();
    assert!(raw.receive().is_some(), "every request is answered");
}

#[test]
fn lengths_that_no_memory_has_harm_nobody_else() {
    let served = Served::new(1 << 30);
    let near = served.connect();
    let mut raw = Raw::greet(&served);
    raw.0.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    let (begun, _) = raw.ask(&kept("0-1", "tcp://127.0.0.1:7").to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [u64::MAX, 1]});
    raw.0.write_all(&frame(1, 9, &commit.to_string(), b"")).unwrap();
    let answered = raw.receive().is_some();
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(near.status().is_ok()));
    assert_eq!(end.recv_timeout(Duration::from_secs(5)), Ok(true), "others are served");
    assert!(answered, "every request is answered");
}

#[test]
fn what_a_daemon_decides_itself_is_not_discarded_by_clients() {
    let served = Served::new(1 << 30);
    let near = served.connect();
    put(&near, &model(1, 1), &PutOptions::default());
    let mut raw = Raw::greet(&served);
    let (located, _) = raw.ask(r#"{"op":"locate","key":"policy","selector":"newest"}"#, b"");
    let leased = &located["leased"];
    let (lease, manifest) = (leased["lease"].clone(), leased["manifest"]["blob"].clone());
    let release = json!({"op": "release", "lease": lease});
    raw.0.write_all(&frame(4, 0, &release.to_string(), b"")).unwrap();
    raw.ask(&json!({"op": "discard", "blobs": [manifest]}).to_string(), b"");
    assert!(
        served.connect().get_state_dict(&key(), &GetOptions::default()).unwrap().0 == model(1, 1)
    );
}

#[test]
fn a_version_whose_commit_was_not_answered_is_there_or_not() {
    let controller = Served::new(1 << 30);
    let between = Between::before(&controller);
    let keeper = Served::bound(1 << 30, |options| {
        options.controller = Some(between.address.clone());
    });
    let (near, far) = (controller.connect(), keeper.connect());
    put(&far, &model(1, 4), &PutOptions::default());
    between.arm();
    std::thread::scope(|scope| {
        let lost = scope.spawn(|| {
            far.put_state_dict(&key(), &model(2, 4), &PutOptions::default()).unwrap_err()
        });
        eventually(|| between.has_lost());
        between.cut();
        let error = lost.join().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    });
    let newest = near.head(&key()).unwrap().unwrap().number;
    let got = near.get_state_dict(&key(), &GetOptions::default());
    let got = got.unwrap_or_else(|error| panic!("version {newest} is visible: {error}"));
    assert!(got.0 == model(newest, 4));
}

#[test]
fn who_is_cut_off_while_reading_is_not_told_that_there_is_nothing() {
    let served = Served::new(1 << 30);
    let between = Between::before(&served);
    let (near, far) = (served.connect(), Store::connect(&between.address).unwrap());
    put(&near, &model(1, 4), &PutOptions::default());
    let opened = far.open(&key(), &GetOptions::default()).unwrap();
    between.cut();
    eventually(|| near.status().unwrap().leases.is_empty());
    put(&near, &model(2, 4), &PutOptions::default());
    let error = opened.tensor("weight", None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[test]
fn a_view_of_a_version_whose_commit_was_not_answered_never_changes() {
    let controller = Served::new(1 << 30);
    let between = Between::before(&controller);
    let keeper = Served::bound(1 << 30, |options| {
        options.controller = Some(between.address.clone());
    });
    let (far, reader) = (keeper.connect(), keeper.connect());
    put(&far, &model(1, 4), &PutOptions::default());
    between.arm();
    let held = std::thread::scope(|scope| {
        let lost = scope.spawn(|| {
            far.put_state_dict(&key(), &model(2, 4), &PutOptions::default()).unwrap_err()
        });
        eventually(|| between.has_lost());
        let held = get(&reader);
        between.cut();
        lost.join().unwrap();
        held
    });
    assert!(held == model(2, 4));
    for step in 3..6 {
        put(&far, &model(step, 4), &PutOptions::default());
        assert!(held == model(2, 4), "a view has changed after the put of {step}");
    }
}

/// The same address, and nothing else of what was there.
fn anew(controller: Served) -> Served {
    let address = controller.address().strip_prefix("tcp://").unwrap().parse().unwrap();
    drop(controller);
    Served::bound(1 << 30, |options| options.listen = Some(address))
}

#[test]
fn what_began_before_a_restart_does_not_decide_what_began_after() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let mut raw = Raw::greet(&keeper);
    let begin = |key: &str| {
        json!({"op": "begin", "key": key, "proposal": {"writer": 0, "writers": "0-1", "job": "run",
            "number": 7, "file_len": 9, "timeout": {"secs": 1, "nanos": 0}}})
    };
    let commit = |begun: &serde_json::Value| {
        json!({"op": "commit", "contribution": begun["begun"]["contribution"],
            "digest": "0".repeat(32)})
    };
    let (first, _) = raw.ask(&begin("first").to_string(), b"");
    let _controller = anew(controller);
    std::thread::sleep(Duration::from_millis(200));
    let (second, _) = raw.ask(&begin("second").to_string(), b"");
    assert!(second["begun"].is_object(), "{second}");
    let (lost, _) = raw.ask(&commit(&first).to_string(), b"nine byte");
    let (done, _) = raw.ask(&commit(&second).to_string(), b"nine byte");
    assert!(lost["failed"].is_object(), "its version is gone: {lost}");
    assert!(done["progress"].is_object(), "{done}");
}

#[test]
fn what_was_fetched_before_a_restart_is_in_nobodys_way_after() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let generator = keeper.connect();
    put(&controller.connect(), &model(1, 4), &PutOptions::default());
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    let controller = anew(controller);
    std::thread::sleep(Duration::from_millis(200));
    put(
        &controller.connect(),
        &model(2, 4),
        &PutOptions { version: Some(1), ..PutOptions::default() },
    );
    assert!(get(&generator) == model(2, 4));
    assert!(generator.get_state_dict(&key(), &numbered(1)).unwrap().0 == model(2, 4));
}

#[test]
fn a_keeper_that_says_nothing_is_not_in_the_way_of_readers() {
    let served = Served::new(1 << 30);
    let near = served.connect();
    put(&near, &model(1, 1), &PutOptions::default());
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut raw = Raw::greet(&served);
    let keeper = format!("tcp://{}", silent.local_addr().unwrap());
    let (begun, _) = raw.ask(&kept("0", &keeper).to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [900]});
    raw.0.write_all(&frame(1, 9, &commit.to_string(), b"")).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(get(&near) == model(1, 1)));
    assert_eq!(end.recv_timeout(Duration::from_secs(25)), Ok(true), "version 1 is visible");
}

#[test]
fn a_put_that_is_tried_twice_leaves_nothing_at_its_keeper() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let mut raw = Raw::greet(&keeper);
    let begin = json!({"op": "begin", "key": "policy", "proposal": {"writer": 0, "writers": "0-1",
        "job": "run", "number": 7, "file_len": MIB, "timeout": {"secs": 1, "nanos": 0}}});
    let tries = [(); 2].map(|()| {
        let (begun, _) = raw.ask(&begin.to_string(), b"");
        assert_eq!(begun["begun"]["room"], "frames", "{begun}");
        begun["begun"]["contribution"].clone()
    });
    for contribution in tries {
        let write = json!({"op": "write", "contribution": contribution, "offset": 0});
        raw.ask(&write.to_string(), &vec![7; MIB as usize]);
        let commit =
            json!({"op": "commit", "contribution": contribution, "digest": "0".repeat(32)});
        let (done, _) = raw.ask(&commit.to_string(), b"");
        assert!(done["progress"].is_object(), "{done}");
    }
    let near = controller.connect();
    for writer in 0..2 {
        put(&near, &half(8, writer), &as_writer(writer as u32, "run", 8));
    }
    drop(raw);
    let store = keeper.connect();
    std::thread::sleep(Duration::from_secs(2));
    let memory = store.status().unwrap().memory;
    assert!(memory.warm >= 4 * MIB, "two archives are needed no more: {memory:?}");
}

#[test]
fn who_reads_first_what_a_lost_daemon_kept_hears_that_it_is_lost() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    put(&keeper.connect(), &model(1, 4), &PutOptions::default());
    drop(keeper);
    let near = controller.connect();
    let error = near.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error = near.prefetch(&key(), &[], &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[test]
fn a_keeper_that_cannot_be_reached_is_no_fault_of_the_writers() {
    let served = Served::new(1 << 30);
    let mut raw = Raw::greet(&served);
    let (begun, _) = raw.ask(&kept("0", "tcp://127.0.0.1:7").to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [900]});
    let (kind, text) = raw.fail(&commit, b"");
    assert_eq!(kind, "unreachable", "{text}");
}

#[test]
fn a_keeper_that_says_nothing_is_not_in_the_way_of_other_keys() {
    let served = Served::new(1 << 30);
    let near = served.connect();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let keeper = format!("tcp://{}", silent.local_addr().unwrap());
    let mut raw = Raw::greet(&served);
    let (begun, _) = raw.ask(&kept("0-1", &keeper).to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": vec![9; 2000]});
    assert!(raw.ask(&commit.to_string(), b"").0["progress"].is_object());
    near.delete(&key(), None).unwrap();
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let other = Key::new("other").unwrap();
        done.send(near.put_state_dict(&other, &model(1, 1), &PutOptions::default()).is_ok())
    });
    assert_eq!(end.recv_timeout(Duration::from_secs(25)), Ok(true), "another key is put");
}

#[test]
fn only_what_a_daemon_keeps_is_read_from_it() {
    let (folder, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let secret = folder.path().join("daemon.key");
    std::fs::write(&secret, "PRIVATE").unwrap();
    let served = Served::over(root.path());
    let mut raw = Raw::greet(&served);
    let absolute = secret.display().to_string();
    let up = root.path().canonicalize().unwrap().components().skip(1).map(|_| "../").collect();
    let up: String = up;
    for blob in [absolute.clone(), format!("{up}{}", &absolute[1..])] {
        let read = json!({"op": "read", "blob": blob, "ranges": [[0, 7]]});
        let (reply, data) = raw.ask(&read.to_string(), b"");
        assert_eq!(String::from_utf8_lossy(&data), "", "{blob}");
        assert_eq!(reply["failed"]["kind"], "not_found", "{reply}");
    }
}

#[test]
fn who_waits_at_a_keeper_is_not_in_the_way_of_what_is_waited_for() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let newer = json!({"op": "newer", "key": "policy", "patience": {"secs": 600, "nanos": 0}});
    let mut waiting = [Raw::greet(&keeper), Raw::greet(&keeper)];
    for raw in &mut waiting {
        for number in 0..40 {
            raw.0.write_all(&frame(1, 10 + number, &newer.to_string(), b"")).unwrap();
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    let store = keeper.connect();
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        done.send(store.put_state_dict(&key(), &model(1, 1), &PutOptions::default()).is_ok())
    });
    assert_eq!(end.recv_timeout(Duration::from_secs(10)), Ok(true), "it is put");
}

#[test]
fn who_takes_a_put_back_at_a_keeper_does_so_where_it_is_decided() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let begin = |number: u64, seconds: u64| {
        let proposal = json!({"writer": 0, "writers": "0-1", "job": "j", "number": number,
            "file_len": 9, "timeout": {"secs": seconds, "nanos": 0}});
        json!({"op": "begin", "key": "policy", "proposal": proposal}).to_string()
    };
    let mut raw = Raw::greet(&keeper);
    let (first, _) = raw.ask(&begin(1, 1), b"");
    assert!(raw.ask(&begin(2, 1), b"").0["begun"].is_object());
    // Two versions are open: the third one waits, and then nobody waits for it.
    let mut other = Raw::greet(&keeper);
    other.0.write_all(&frame(1, 77, &begin(3, 600), b"")).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    other.0.write_all(&frame(4, 0, r#"{"op":"cancel","request":77}"#, b"")).unwrap();
    let (failed, _) = receive(&mut other.0).unwrap();
    assert_eq!(failed["failed"]["kind"], "busy", "{failed}");
    std::thread::sleep(Duration::from_millis(500));
    let busy = controller.metric(r#"tssd_requests_total{op="begin",outcome="busy"}"#);
    assert!((busy - 1.0).abs() < 0.1, "it waits there no longer");
    let contribution = &first["begun"]["contribution"];
    let withdraw = json!({"op": "withdraw", "contribution": contribution}).to_string();
    assert_eq!(raw.ask(&withdraw, b"").0, "done");
    assert!(raw.ask(&begin(4, 5), b"").0["begun"].is_object(), "nobody is in its way");
}
