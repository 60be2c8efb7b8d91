//! Daemons of other hosts: ranged reads over TCP, TLS authentication, and proxy daemons.
//!
//! A *proxy daemon* stores the bytes of its clients on its own host, and forwards control requests to another daemon,
//! its *controller*. In protocol messages it is the `keeper` of these bytes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use tssd_format::{
    Compression, Dtype, Region, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice,
    Value,
};
use tssd_store::blocking::Store;
use tssd_store::{
    ConnectOptions, Credentials, DaemonOptions, ErrorKind, GetOptions, GetReport, JobId, Key,
    LeafPart, PutOptions, Rewind, Selector, Target,
};
use tssd_tests::certificates::CertificateAuthority;
use tssd_tests::raw_connection::{HELLO, frame};
use tssd_tests::test_daemon::TestDaemon;

const MIB: u64 = 1 << 20;

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Returns `len` pseudo-random bytes that depend on the step.
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

/// A state dict with a byte matrix of about `mib` MiB in rows of 3079 bytes, and small values.
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

/// Returns the elements of a byte tensor in row-major order.
fn contiguous_bytes(tensor: &Tensor) -> Vec<u8> {
    tensor.view().to_contiguous(u64::MAX).unwrap()
}

fn put(store: &Store, dict: &StateDict, options: &PutOptions) -> u64 {
    store.put_state_dict(&key(), dict, options).unwrap().version
}

fn get(store: &Store) -> StateDict {
    store.get_state_dict(&key(), &GetOptions::default()).unwrap().0
}

/// Returns the elements of a region of the matrix `weight`, in row-major order.
fn weight_region(dict: &StateDict, region: &Region) -> Vec<u8> {
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
fn remote_reads_return_whole_tensors_and_slices() {
    let daemon = TestDaemon::new(1 << 30);
    let (local, remote) = (daemon.connect(), daemon.connect_tcp());
    for (step, compression) in [(1, Compression::None), (2, Compression::Zstd)] {
        let dict = model(step, 9);
        put(&remote, &dict, &PutOptions { compression, ..PutOptions::default() });
        assert_eq!(get(&local), dict, "the framed archive arrives unchanged");
        assert_eq!(get(&remote), dict);
        let rows = 9 * MIB / 3079;
        for (offsets, shape) in [
            // Rows, columns, a part of a row, everything, nothing.
            ([7, 0], [rows - 9, 3079]),
            ([0, 1000], [rows, 1001]),
            ([rows / 2, 3], [1, 9]),
            ([0, 0], [rows, 3079]),
            ([3, 3], [0, 5]),
        ] {
            let region = Region::new(&offsets, &shape).unwrap();
            let part = remote.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap();
            assert_eq!(contiguous_bytes(&part), weight_region(&dict, &region));
            for unverified in [false, true] {
                let slice = TensorSlice::new(&offsets, &shape, &[rows, 3079]).unwrap();
                let meta = TensorMeta::new(Dtype::Uint8, &shape).unwrap();
                let mut memory = vec![0; meta.nbytes() as usize];
                let target = Target {
                    fqn: "weight".into(),
                    shard_spec: Some(ShardSpec::new(slice)),
                    meta,
                    memory: (&mut memory).into(),
                };
                let options = GetOptions { unverified, ..GetOptions::default() };
                let report = remote.get_state_dict_into(&key(), &mut [target], &options).unwrap();
                assert_eq!(memory, weight_region(&dict, &region));
                if compression == Compression::None {
                    assert_eq!(report.bytes_transferred, report.bytes_needed);
                    let verified = if unverified { 0 } else { report.bytes_needed };
                    assert_eq!(report.bytes_verified, verified);
                }
            }
        }
    }
}

#[test]
fn remotely_read_values_stay_unchanged() {
    let daemon = TestDaemon::new(1 << 30);
    let (local, remote) = (daemon.connect(), daemon.connect_tcp());
    let first = model(1, 3);
    put(&local, &first, &PutOptions::default());
    let view = get(&remote);
    for step in 2..5 {
        put(&local, &model(step, 3), &PutOptions::default());
        assert_eq!(get(&remote), model(step, 3));
    }
    assert_eq!(view, first);
    drop(remote);
    // A reader on another host maps no memory of this one, so its disconnect retires nothing.
    let memory = local.status().unwrap().memory;
    assert_eq!((memory.retired_bytes, memory.retired_bytes_total), (0, 0), "{memory:?}");
}

#[test]
fn thousands_of_small_tensors_are_read_over_tcp() {
    let daemon = TestDaemon::new(1 << 30);
    let remote = daemon.connect_tcp();
    let mut dict = StateDict::new();
    for number in 0..5000_u32 {
        dict.insert(format!("layer.{number}"), Tensor::from_slice(&[number], &[1]).unwrap());
    }
    put(&remote, &dict, &PutOptions::default());
    assert_eq!(get(&remote), dict);
    let status = remote.status().unwrap();
    assert!(!status.peers.is_empty());
    assert!(status.peers.iter().all(|peer| peer.pid == 0 && peer.address.is_some()));
}

fn connect(url: &str, credentials: Option<Credentials>) -> Result<Store, tssd_store::Error> {
    let options = ConnectOptions {
        credentials,
        timeout: Duration::from_secs(5),
        ..ConnectOptions::default()
    };
    Store::connect_with(url, &options)
}

#[test]
fn tls_authenticates_client_and_daemon() {
    let (authority, foreign_authority) = (CertificateAuthority::new(), CertificateAuthority::new());
    let daemon_credentials = authority.issue("daemon", "127.0.0.1", |_| {});
    let daemon = TestDaemon::with_credentials(daemon_credentials.clone());
    let url = daemon.address();
    assert!(url.starts_with("tls://127.0.0.1:"), "{url}");
    let client = authority.issue("client", "trainer-7", |_| {});
    let store = connect(url, Some(client.clone())).unwrap();
    let dict = model(1, 3);
    put(&store, &dict, &PutOptions::default());
    assert_eq!(get(&store), dict);
    let part = Region::new(&[1, 1], &[500, 70]).unwrap();
    let slice = store.get_slice(&key(), "weight", &part, &GetOptions::default()).unwrap();
    assert_eq!(contiguous_bytes(&slice), weight_region(&dict, &part));

    let expired = authority.issue("expired", "trainer-8", |params| {
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    });
    let foreign = foreign_authority.issue("foreign", "trainer-9", |_| {});
    // A client with a certificate of another authority, which trusts the authority of the daemon.
    let untrusted = Credentials { ca: client.ca.clone(), ..foreign.clone() };
    let port = url.rsplit_once(':').unwrap().1;
    let renamed = format!("tls://localhost:{port}");
    let plaintext = format!("tcp://127.0.0.1:{port}");
    for (url, credentials, kind, message) in [
        (url, Some(expired), ErrorKind::Unreachable, ""),
        (url, Some(untrusted), ErrorKind::Unreachable, ""),
        (url, Some(foreign), ErrorKind::Unreachable, "invalid peer certificate"),
        (url, None, ErrorKind::Invalid, "TSSD_CA"),
        (&renamed, Some(client.clone()), ErrorKind::Unreachable, "not valid for"),
        (&plaintext, None, ErrorKind::Unreachable, ""),
    ] {
        let error = connect(url, credentials).unwrap_err();
        assert_eq!(error.kind(), kind, "{url}: {error}");
        assert!(error.to_string().contains(message), "{url}: {error}");
    }
    // A daemon without TLS is refused by a client that requires it, and so are invalid credential files.
    let plaintext_daemon = TestDaemon::new(1 << 20);
    let url = plaintext_daemon.address().replace("tcp:", "tls:");
    let error = connect(&url, Some(client.clone())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let missing = Credentials { key: PathBuf::from("/nowhere/a.key"), ..client.clone() };
    let swapped = Credentials { cert: client.key.clone(), ..client.clone() };
    let mixed = Credentials { key: daemon_credentials.key.clone(), ..client };
    for (credentials, message) in
        [(missing, "/nowhere/a.key"), (swapped, "client.key"), (mixed, "client.pem")]
    {
        let error = connect(daemon.address(), Some(credentials)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(message), "{error}");
    }
    // The established connection still works.
    assert_eq!(get(&store), dict);
}

#[test]
fn plaintext_is_served_only_on_loopback() {
    let folder = tempfile::tempdir().unwrap();
    let bind_error = |configure: &dyn Fn(&mut DaemonOptions)| {
        let mut options = DaemonOptions::for_socket(folder.path().join("socket"), 1 << 20);
        configure(&mut options);
        let error = tssd_store::blocking::Daemon::bind(options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        error.to_string()
    };
    let any_address: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let text = bind_error(&|options| options.listen = Some(any_address));
    assert!(text.contains("--cert"), "{text}");
    let controller = Some("tcp://127.0.0.1:7".to_owned());
    let text = bind_error(&|options| options.controller.clone_from(&controller));
    assert!(text.contains("--listen"), "{text}");
    let text = bind_error(&|options| {
        options.controller.clone_from(&controller);
        options.listen = Some("127.0.0.1:0".parse().unwrap());
        options.root = Some(folder.path().to_owned());
    });
    assert!(text.contains("--root"), "{text}");
    for url in ["tcp://192.0.2.1:7000", "tls://no-port", "tls://127.0.0.1:notaport"] {
        let error = connect(url, None).unwrap_err();
        let is_expected = matches!(error.kind(), ErrorKind::Refused | ErrorKind::Invalid);
        assert!(is_expected, "{url}: {error}");
    }
    // A server that does not speak the protocol.
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("tcp://{}", server.local_addr().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = server.accept().unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        });
        let error = connect(&url, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    });
}

#[test]
fn remote_reads_reject_damaged_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let dict = model(1, 3);
    {
        let daemon = TestDaemon::with_root(folder.path());
        let durability = tssd_store::Durability::Disk;
        put(&daemon.connect(), &dict, &PutOptions { durability, ..PutOptions::default() });
    }
    let version = tssd_tests::layout::version_folder(&folder.path().join("policy"), "0-1");
    let files = std::fs::read_dir(&version).unwrap().map(|entry| entry.unwrap().path());
    let mut archives = files.filter(|path| !path.ends_with("manifest.tssd"));
    let archive = archives.next().unwrap();
    let mut bytes = std::fs::read(&archive).unwrap();
    // Flips a bit in the second chunk of the matrix.
    let Value::Tensor(matrix) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    let start = &matrix.view().span()[MIB as usize + 5000..][..100];
    let offset = bytes.windows(100).position(|window| window == start).unwrap();
    bytes[offset] ^= 1;
    std::fs::remove_file(&archive).unwrap();
    std::fs::write(&archive, bytes).unwrap();
    let daemon = TestDaemon::with_root(folder.path());
    let remote = daemon.connect_tcp();
    let error = remote.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let row = (MIB + 5000) / 3079;
    for (offsets, shape) in [([row, 0], [1, 3079]), ([0, 7], [900, 9])] {
        let region = Region::new(&offsets, &shape).unwrap();
        let error =
            remote.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    // Intact chunks are still readable, on the remaining connections.
    let region = Region::new(&[0, 0], &[300, 3079]).unwrap();
    let slice = remote.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap();
    assert_eq!(contiguous_bytes(&slice), weight_region(&dict, &region));
}

#[test]
fn only_proxy_daemons_register_replicas_and_discard_blobs() {
    let daemon = TestDaemon::new(1 << 30);
    let local = daemon.connect();
    put(&local, &model(1, 1), &PutOptions::default());
    let mut stream = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut request = |head: &str| {
        stream.write_all(&frame(1, 9, head, b"")).unwrap();
        receive_frame(&mut stream).unwrap().0
    };
    request(HELLO);
    let discard = r#"{"op":"discard","blobs":["policy/0-1/manifest.tssd"]}"#;
    assert_eq!(request(discard)["failed"]["kind"], "refused");
    let begin = |durability: &str| {
        json!({"op": "begin", "key": "policy", "replica_address": "tcp://127.0.0.1:7", "proposal": {
            "writer": 0, "writers": "0", "file_len": 9, "timeout": {"secs": 1, "nanos": 0},
            "durability": durability}})
    };
    assert_eq!(request(&begin("memory").to_string())["failed"]["kind"], "refused");
    let folder = tempfile::tempdir().unwrap();
    let durable = TestDaemon::with_root(folder.path());
    assert_eq!(RawTcpClient::greet(&durable).request_failure(&begin("disk"), b"").0, "invalid");
    let mut raw = RawTcpClient::greet(&daemon);
    let (begun, _) = raw.request(&begin("memory").to_string(), b"");
    assert_eq!(begun["begun"]["write_target"], "client_replica");
    // No daemon at that address has the archive, so the commit fails.
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [9]});
    let (kind, text) = raw.request_failure(&commit, b"");
    assert!(["unreachable", "rejected", "io"].contains(&kind.as_str()), "{kind}: {text}");
    assert_eq!(get(&local), model(1, 1));
}

/// A TCP client that sends arbitrary frames.
struct RawTcpClient(TcpStream);

impl RawTcpClient {
    fn greet(daemon: &TestDaemon) -> Self {
        let address = daemon.address().strip_prefix("tcp://").unwrap();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut raw = Self(stream);
        assert_eq!(raw.request(HELLO, b"").0["welcome"]["protocol"]["major"], 2);
        raw
    }

    /// Sends a request. Returns the head and the data of its response.
    fn request(&mut self, head: &str, data: &[u8]) -> (serde_json::Value, Vec<u8>) {
        self.0.write_all(&frame(1, 9, head, data)).unwrap();
        self.receive().unwrap()
    }

    fn receive(&mut self) -> Option<(serde_json::Value, Vec<u8>)> {
        receive_frame(&mut self.0)
    }

    /// Sends a request. Returns the kind and the text of its failure, or empty strings.
    fn request_failure(&mut self, head: &serde_json::Value, data: &[u8]) -> (String, String) {
        let (head, _) = self.request(&head.to_string(), data);
        let field = |name: &str| head["failed"][name].as_str().unwrap_or_default().to_owned();
        (field("kind"), field("text"))
    }
}

/// Returns the head and the data of the next frame, or `None` if the daemon closed the connection.
fn receive_frame(stream: &mut impl Read) -> Option<(serde_json::Value, Vec<u8>)> {
    receive_numbered_frame(stream).map(|(_, head, data)| (head, data))
}

/// Returns the number, the head and the data of the next frame, or `None` if the connection is closed.
fn receive_numbered_frame(stream: &mut impl Read) -> Option<(u64, serde_json::Value, Vec<u8>)> {
    let mut header = [0; 24];
    stream.read_exact(&mut header).ok()?;
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let (mut head, mut data) = (vec![0; word(8) as usize], vec![0; word(12) as usize]);
    stream.read_exact(&mut head).ok()?;
    stream.read_exact(&mut data).ok()?;
    Some((word(16).into(), serde_json::from_slice(&head).unwrap(), data))
}

#[test]
fn invalid_ranges_are_refused() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
    let dict = model(1, 9);
    put(&store, &dict, &PutOptions::default());
    let mut raw = RawTcpClient::greet(&daemon);
    let (located, _) = raw.request(r#"{"op":"locate","key":"policy","selector":"newest"}"#, b"");
    let archives = located["leased"]["archives"].as_object().unwrap();
    let archive = archives.values().next().unwrap();
    let (blob, len) = (archive["blob"].as_str().unwrap(), archive["len"].as_u64().unwrap());
    assert!(archive["address"].is_null(), "the blob is on this daemon");
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
        assert_eq!(raw.request_failure(&read(ranges.clone()), b"").0, "invalid", "{ranges}");
    }
    for (request, kind) in [
        (json!({"op": "read", "blob": "nothing", "ranges": [[0, 1]]}), "not_found"),
        (json!({"op": "read", "blob": "../../etc/passwd", "ranges": [[0, 1]]}), "not_found"),
        (json!({"op": "read", "blob": blob, "ranges": [[-1, 1]]}), "invalid"),
        (json!({"op": "read", "blob": blob}), "invalid"),
        // The index has no chunk checksums that the daemon could verify.
        (
            json!({"op": "read", "blob": blob, "ranges": [[len - 64, 64]], "verify": true}),
            "invalid",
        ),
        (json!({"op": "write", "contribution": 77, "offset": 0}), "invalid"),
    ] {
        assert_eq!(raw.request_failure(&request, b"").0, kind, "{request}");
    }
    let (reply, data) = raw.request(&read(json!([[0, 4], [4096, 3, [[2, 5]]]])).to_string(), b"");
    assert_eq!(reply, json!({"read": {"crc32": null}}));
    assert_eq!(data.len(), 4 + 6);
    let verified =
        json!({"op": "read", "blob": blob, "ranges": [[5000, 100, [[3, 200]]]], "verify": true});
    let (reply, data) = raw.request(&verified.to_string(), b"");
    assert_eq!(reply["read"]["crc32"], crc32fast::hash(&data));
    assert_eq!(data.len(), 300);
    let checksum = json!({"op": "read", "blob": blob, "ranges": [[5000, 100, [[3, 200]]]],
        "verify": true, "without_data": true});
    assert_eq!(raw.request(&checksum.to_string(), b""), (reply, Vec::new()));
    assert_eq!(get(&store), dict);
}

/// Daemons that take each other for holders would wait for each other.
#[test]
fn read_of_local_bytes_asks_no_other_daemon() {
    let controller = TestDaemon::new(1 << 30);
    let generator = TestDaemon::with_controller(&controller);
    let dict = model(1, 3);
    controller.connect().put_state_dict(&key(), &dict, &PutOptions::default()).unwrap();
    let mut raw = RawTcpClient::greet(&generator);
    let locate = json!({"op": "locate", "key": key().as_str(), "selector": "newest"});
    let (leased, _) = raw.request(&locate.to_string(), b"");
    let (_, archive) = leased["leased"]["archives"].as_object().unwrap().iter().next().unwrap();
    let read = |local_only: bool| json!({"op": "read", "blob": archive["blob"], "ranges": [[0, 64]], "local_only": local_only});
    assert_eq!(raw.request_failure(&read(true), b"").0, "not_found");
    assert_eq!(raw.request(&read(false).to_string(), b"").1.len(), 64);
    // Now it has these bytes.
    assert_eq!(raw.request(&read(true).to_string(), b"").1.len(), 64);
}

#[test]
fn framed_archive_must_have_announced_length() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawTcpClient::greet(&daemon);
    let len = 3 * MIB;
    let begin = json!({"op": "begin", "key": "policy", "proposal": {
        "writer": 0, "writers": "0", "file_len": len, "timeout": {"secs": 1, "nanos": 0}}});
    let begin_contribution = |raw: &mut RawTcpClient| {
        let (reply, _) = raw.request(&begin.to_string(), b"");
        assert_eq!(reply["begun"]["write_target"], "frames");
        reply["begun"]["contribution"].as_u64().unwrap()
    };
    let write = |contribution: u64, offset: u64| json!({"op": "write", "contribution": contribution, "offset": offset});
    let commit = |contribution: u64| json!({"op": "commit", "contribution": contribution, "digest": "0".repeat(32)});
    let contribution = begin_contribution(&mut raw);
    let block = vec![7; MIB as usize];
    for offset in [len - MIB + 1, len, u64::MAX] {
        assert_eq!(
            raw.request_failure(&write(contribution, offset), &block).0,
            "invalid",
            "{offset}"
        );
    }
    assert_eq!(raw.request(&write(contribution, 0).to_string(), &block).0, "done");
    let (kind, text) = raw.request_failure(&commit(contribution), b"");
    assert_eq!(kind, "invalid");
    assert!(text.contains("1048576") && text.contains("3145728"), "{text}");
    // Bytes of the announced length that are not an archive.
    let contribution = begin_contribution(&mut raw);
    for offset in [0, MIB, 2 * MIB] {
        assert_eq!(raw.request(&write(contribution, offset).to_string(), &block).0, "done");
    }
    assert_eq!(raw.request_failure(&commit(contribution), b"").0, "rejected");
    assert_eq!(
        raw.request_failure(&write(contribution, 0), &block).0,
        "invalid",
        "the contribution is already closed"
    );
    // Data above the frame limit ends the connection.
    raw.0
        .write_all(&frame(1, 9, &write(1, 0).to_string(), &vec![0; MIB as usize + 1]))
        .unwrap_or_default();
    assert!(raw.receive().is_none());
    let store = daemon.connect();
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

/// The state dict of one of two writers: half of the rows of a matrix.
fn writer_half(step: u64, writer: u64) -> StateDict {
    let slice = TensorSlice::new(&[writer * 700, 0], &[700, 3079], &[1400, 3079]).unwrap();
    let meta = TensorMeta::new(Dtype::Uint8, &[700, 3079]).unwrap();
    let local = Tensor::new(meta, Storage::from(noise(2 * step + writer, 700 * 3079)), 0).unwrap();
    let shard = tssd_format::Shard::new(local, ShardSpec::new(slice)).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", shard);
    dict.insert("step", step.cast_signed());
    dict
}

fn expected_weight(step: u64) -> Vec<u8> {
    (0..2).flat_map(|writer| noise(2 * step + writer, 700 * 3079)).collect()
}

fn get_weight(store: &Store, options: &GetOptions) -> Vec<u8> {
    let tensor = store.get(&key(), "weight", options).unwrap();
    contiguous_bytes(&tensor)
}

#[test]
fn two_daemons_serve_one_version() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let stores = [controller.connect(), proxy_daemon.connect()];
    assert_eq!(stores[0].status().unwrap().hosts, []);
    let hosts = stores[1].status().unwrap().hosts;
    let hosts: Vec<_> = hosts.iter().map(|host| (&*host.address, host.is_self)).collect();
    assert_eq!(hosts, [(proxy_daemon.address(), true), (controller.address(), false)]);
    let remote = controller.connect_tcp();
    let first = GetOptions { version: 1.into(), ..GetOptions::default() };
    let mut views = Vec::new();
    for step in 1..=4_u64 {
        std::thread::scope(|scope| {
            for (writer, store) in stores.iter().enumerate() {
                let options = as_writer(writer as u32, "run", step);
                let dict = writer_half(step, writer as u64);
                scope.spawn(move || store.put_state_dict(&key(), &dict, &options).unwrap());
            }
        });
        for store in stores.iter().chain([&remote]) {
            assert_eq!(store.head(&key()).unwrap().unwrap().number, step);
            assert_eq!(get_weight(store, &GetOptions::default()), expected_weight(step));
            let report = get_region_into(store, step);
            assert_eq!(report.bytes_transferred, report.bytes_needed);
            views.push((step, get(store)));
        }
        for (step, view) in &views {
            assert_eq!(weight_bytes(view), expected_weight(*step), "the view stays unchanged");
        }
        if step == 2 {
            views.clear();
        }
    }
    views.clear();
    // Each host stores its own bytes and recycles its memory.
    for store in &stores {
        let memory = store.status().unwrap().memory;
        assert!(memory.used_bytes < 40 * MIB, "{memory:?}");
        assert!(memory.recycled_total > 0, "{memory:?}");
    }
    let error = stores[1].get_state_dict(&key(), &first).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    stores[1].pin(&key(), None, "best").unwrap();
    assert_eq!(stores[0].pins(&key()).unwrap(), BTreeMap::from([("best".to_owned(), 4)]));
    stores[1].unpin(&key(), "best").unwrap();
    assert_eq!(stores[1].delete(&key(), None).unwrap(), 1);
    eventually(|| {
        stores.iter().all(|store| {
            let memory = store.status().unwrap().memory;
            memory.free_bytes + 8 * MIB >= memory.used_bytes
        })
    });
}

/// Polls a condition every 10 ms, for at most 30 seconds.
fn eventually(condition: impl Fn() -> bool) {
    assert!((0..3000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        condition()
    }));
}

fn weight_bytes(dict: &StateDict) -> Vec<u8> {
    let Value::Tensor(tensor) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    contiguous_bytes(tensor)
}

/// Reads a region that spans the rows of both writers into memory, and compares it.
fn get_region_into(store: &Store, step: u64) -> GetReport {
    let slice = TensorSlice::new(&[600, 5], &[200, 3000], &[1400, 3079]).unwrap();
    let meta = TensorMeta::new(Dtype::Uint8, &[200, 3000]).unwrap();
    let mut memory = vec![0; 200 * 3000];
    let place = Some(ShardSpec::new(slice));
    let target =
        Target { fqn: "weight".into(), shard_spec: place, meta, memory: (&mut memory).into() };
    let report = store.get_state_dict_into(&key(), &mut [target], &GetOptions::default()).unwrap();
    let all = expected_weight(step);
    let expected = (600..800).flat_map(|row| &all[row * 3079 + 5..row * 3079 + 3005]);
    assert!(memory.iter().eq(expected));
    report
}

#[test]
fn prefetched_version_is_read_locally() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let (trainer, generator) = (controller.connect(), proxy_daemon.connect());
    let none = GetOptions::default();
    let error = generator.prefetch(&key(), &[], &none).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    put(&trainer, &model(1, 4), &PutOptions::default());
    let fetched = generator.prefetch(&key(), &[], &none).unwrap();
    assert!(fetched.version == 1 && fetched.bytes > 4 * MIB - 4096, "{fetched:?}");
    assert_eq!(
        generator.prefetch(&key(), &[], &none).unwrap().bytes,
        0,
        "the version is already prefetched"
    );
    // The prefetched version stays readable after further puts.
    put(&trainer, &model(2, 4), &PutOptions::default());
    let first = GetOptions { version: 1.into(), ..GetOptions::default() };
    let sent_bytes = || controller.metric("tssd_sent_bytes_total");
    let before = sent_bytes();
    let (view, _) = generator.get_state_dict(&key(), &first).unwrap();
    assert_eq!(view, model(1, 4));
    assert!(
        (sent_bytes() - before).abs() < 1.0,
        "the controller sends nothing for a prefetched version"
    );
    assert_eq!(get(&generator), model(2, 4), "the newest version is not the prefetched one");
    assert!(sent_bytes() - before > 3e6);
    for step in 3..6 {
        put(&trainer, &model(step, 4), &PutOptions::default());
        assert_eq!(generator.prefetch(&key(), &[], &none).unwrap().version, step);
        assert_eq!(get(&generator), model(step, 4));
    }
    assert_eq!(view, model(1, 4), "the view stays unchanged");
    let error = generator.get_state_dict(&key(), &first).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    drop(view);
    eventually(|| generator.status().unwrap().memory.used_bytes < 30 * MIB);
    // `prefetch` of a slice copies only the archives that contain it.
    for (store, writer) in [(&trainer, 0), (&generator, 1)] {
        store
            .put_state_dict(&key(), &writer_half(9, writer), &as_writer(writer as u32, "run", 9))
            .unwrap();
    }
    let rows = |from: u64| {
        let slice = TensorSlice::new(&[from, 0], &[100, 3079], &[1400, 3079]).unwrap();
        [LeafPart { fqn: "weight".to_owned(), shard_spec: Some(ShardSpec::new(slice)) }]
    };
    assert_eq!(generator.prefetch(&key(), &rows(900), &none).unwrap().bytes, 0);
    let fetched = generator.prefetch(&key(), &rows(100), &none).unwrap();
    assert!(fetched.bytes > 2 * MIB && fetched.bytes < 3 * MIB, "{fetched:?}");
    assert_eq!(get_weight(&generator, &none), expected_weight(9));
    for store in [Store::memory().unwrap(), controller.connect_tcp()] {
        let error = store.prefetch(&key(), &[], &none).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[test]
fn lost_daemon_is_reported_and_others_continue() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let (local, remote) = (controller.connect(), proxy_daemon.connect());
    put(&remote, &model(1, 4), &PutOptions::default());
    let (read, none) = (Key::new("read").unwrap(), GetOptions::default());
    remote.put_state_dict(&read, &model(7, 1), &PutOptions::default()).unwrap();
    assert_eq!(local.get_state_dict(&read, &none).unwrap().0, model(7, 1));
    let view = get(&remote);
    drop(proxy_daemon);
    assert_eq!(view, model(1, 4), "the view stays unchanged");
    assert_eq!(
        local.get_state_dict(&read, &none).unwrap().0,
        model(7, 1),
        "versions that were read here stay readable"
    );
    let error = local.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error = remote.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    // A new put replaces the lost version like any other.
    put(&local, &model(2, 4), &PutOptions::default());
    assert_eq!(get(&local), model(2, 4));
    // A new proxy daemon connects, and then the controller stops.
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let remote = proxy_daemon.connect();
    assert_eq!(get(&remote), model(2, 4));
    put(&remote, &model(3, 4), &PutOptions::default());
    drop((local, controller));
    let error = remote.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error = remote.put_state_dict(&key(), &model(4, 4), &PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

/// A TCP relay between a daemon and its clients that can drop a response, and close all connections.
struct LossyRelay {
    address: String,
    state: std::sync::Arc<RelayState>,
}

#[derive(Default)]
struct RelayState {
    drops_next_commit: std::sync::atomic::AtomicBool,
    has_dropped: std::sync::atomic::AtomicBool,
    streams: std::sync::Mutex<Vec<TcpStream>>,
}

impl LossyRelay {
    fn start(daemon: &TestDaemon) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let upstream = daemon.address().strip_prefix("tcp://").unwrap().to_owned();
        let state = std::sync::Arc::<RelayState>::default();
        let relay_state = state.clone();
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = TcpStream::connect(&upstream) else { continue };
                let ends = [&client, &server].map(|end| end.try_clone().unwrap());
                relay_state.streams.lock().unwrap().extend(ends);
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
                let relay_state = relay_state.clone();
                std::thread::spawn(move || {
                    let _ = relay_state.forward_responses(server, &client);
                    let _ = client.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        Self { address, state }
    }

    /// Makes the relay drop the next response to a commit.
    fn drop_next_commit_response(&self) {
        self.state.drops_next_commit.store(true, std::sync::atomic::Ordering::SeqCst);
    }

    fn has_dropped_response(&self) -> bool {
        self.state.has_dropped.load(std::sync::atomic::Ordering::SeqCst)
    }

    /// Closes all connections.
    fn disconnect_all(&self) {
        for stream in self.state.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl RelayState {
    fn forward_responses(
        &self,
        mut server: TcpStream,
        mut client: &TcpStream,
    ) -> std::io::Result<()> {
        loop {
            let mut header = [0; 24];
            server.read_exact(&mut header)?;
            let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
            let head_len = word(8) as usize;
            let mut rest = vec![0; head_len + word(12) as usize];
            server.read_exact(&mut rest)?;
            let is_progress = rest[..head_len].starts_with(b"{\"progress\"");
            if is_progress
                && self.drops_next_commit.swap(false, std::sync::atomic::Ordering::SeqCst)
            {
                self.has_dropped.store(true, std::sync::atomic::Ordering::SeqCst);
                continue;
            }
            client.write_all(&[&header[..], &rest].concat())?;
        }
    }
}

fn version_options(version: u64) -> GetOptions {
    GetOptions { version: version.into(), ..GetOptions::default() }
}

#[test]
fn deletion_releases_prefetched_version() {
    let daemon = TestDaemon::new(1 << 30);
    let store = daemon.connect();
    for is_label in [false, true] {
        put(&store, &model(1, 4), &PutOptions::default());
        put(&store, &model(2, 4), &PutOptions::default());
        store.prefetch(&key(), &[], &GetOptions::default()).unwrap();
        if is_label {
            store.pin(&key(), Selector::Newest, "good").unwrap();
        }
        store.delete(&key(), None).unwrap();
        if is_label {
            store.unpin(&key(), "good").unwrap();
        }
        let memory = store.status().unwrap().memory;
        assert_eq!(memory.used_bytes, memory.free_bytes, "{memory:?}");
    }
}

#[test]
fn view_of_prefetched_version_stays_unchanged() {
    let daemon = TestDaemon::new(1 << 30);
    let (writer, reader) = (daemon.connect(), daemon.connect());
    put(&writer, &model(1, 4), &PutOptions::default());
    reader.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    let (view, _) = reader.get_state_dict(&key(), &version_options(1)).unwrap();
    assert_eq!(view, model(1, 4));
    for step in 2..6 {
        put(&writer, &model(step, 4), &PutOptions::default());
        reader.prefetch(&key(), &[], &GetOptions::default()).unwrap();
        assert!(view == model(1, 4), "the view changed after the put of step {step}");
    }
}

#[test]
fn partially_prefetched_version_stays_readable_while_open() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let (trainer, generator) = (controller.connect(), proxy_daemon.connect());
    let put_step = |step: u64| {
        for writer in 0..2 {
            let options = as_writer(writer as u32, "run", step);
            trainer.put_state_dict(&key(), &writer_half(step, writer), &options).unwrap();
        }
    };
    put_step(9);
    let slice = TensorSlice::new(&[100, 0], &[100, 3079], &[1400, 3079]).unwrap();
    let rows = [LeafPart { fqn: "weight".to_owned(), shard_spec: Some(ShardSpec::new(slice)) }];
    generator.prefetch(&key(), &rows, &GetOptions::default()).unwrap();
    let opened = generator.open(&key(), &version_options(9)).unwrap();
    put_step(10);
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    let region = Region::new(&[900, 0], &[100, 3079]).unwrap();
    let got = opened.tensor("weight", Some(&region)).unwrap();
    assert_eq!(contiguous_bytes(&got), expected_weight(9)[900 * 3079..1000 * 3079]);
}

#[test]
fn prefetched_version_is_not_served_after_rewind() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let (trainer, generator) = (controller.connect(), proxy_daemon.connect());
    put(&trainer, &model(1, 1), &PutOptions { version: Some(1), ..PutOptions::default() });
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    put(&trainer, &model(2, 1), &PutOptions { version: Some(2), ..PutOptions::default() });
    let rewind = PutOptions { version: Some(1), rewind: Rewind::Always, ..PutOptions::default() };
    put(&trainer, &model(7, 1), &rewind);
    assert!(trainer.get_state_dict(&key(), &version_options(1)).unwrap().0 == model(7, 1));
    let (got, report) = generator.get_state_dict(&key(), &version_options(1)).unwrap();
    assert!(got == model(7, 1), "epoch {} of version 1", report.epoch);
}

/// Returns the `begin` request that a proxy daemon at `address` sends to its controller.
fn begin_at_proxy_daemon(writers: &str, address: &str) -> serde_json::Value {
    json!({"op": "begin", "key": "policy", "replica_address": address, "proposal": {
        "writer": 0, "writers": writers, "job": "run", "number": 7, "file_len": 9,
        "timeout": {"secs": 1, "nanos": 0}}})
}

#[test]
fn proxy_daemon_commit_without_lengths_is_answered() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawTcpClient::greet(&daemon);
    raw.0.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    let (begun, _) = raw.request(&begin_at_proxy_daemon("0", "tcp://127.0.0.1:7").to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32)});
    raw.0.write_all(&frame(1, 9, &commit.to_string(), b"")).unwrap();
    assert!(raw.receive().is_some(), "the daemon answers every request");
}

#[test]
fn huge_replica_lengths_do_not_block_other_clients() {
    let daemon = TestDaemon::new(1 << 30);
    let local = daemon.connect();
    let mut raw = RawTcpClient::greet(&daemon);
    raw.0.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    let (begun, _) =
        raw.request(&begin_at_proxy_daemon("0-1", "tcp://127.0.0.1:7").to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [u64::MAX, 1]});
    raw.0.write_all(&frame(1, 9, &commit.to_string(), b"")).unwrap();
    let is_answered = raw.receive().is_some();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(local.status().is_ok()));
    assert_eq!(
        receiver.recv_timeout(Duration::from_secs(5)),
        Ok(true),
        "the daemon serves other clients"
    );
    assert!(is_answered, "the daemon answers every request");
}

#[test]
fn clients_cannot_discard_blobs_of_the_controller() {
    let daemon = TestDaemon::new(1 << 30);
    let local = daemon.connect();
    put(&local, &model(1, 1), &PutOptions::default());
    let mut raw = RawTcpClient::greet(&daemon);
    let (located, _) = raw.request(r#"{"op":"locate","key":"policy","selector":"newest"}"#, b"");
    let leased = &located["leased"];
    let (lease, manifest) = (leased["lease"].clone(), leased["manifest"]["blob"].clone());
    let release = json!({"op": "release", "lease": lease});
    raw.0.write_all(&frame(4, 0, &release.to_string(), b"")).unwrap();
    raw.request(&json!({"op": "discard", "blobs": [manifest]}).to_string(), b"");
    assert!(
        daemon.connect().get_state_dict(&key(), &GetOptions::default()).unwrap().0 == model(1, 1)
    );
}

#[test]
fn version_with_lost_commit_response_is_readable_if_visible() {
    let controller = TestDaemon::new(1 << 30);
    let relay = LossyRelay::start(&controller);
    let proxy_daemon = TestDaemon::with_options(1 << 30, |options| {
        options.controller = Some(relay.address.clone());
    });
    let (local, remote) = (controller.connect(), proxy_daemon.connect());
    put(&remote, &model(1, 4), &PutOptions::default());
    relay.drop_next_commit_response();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| {
            remote.put_state_dict(&key(), &model(2, 4), &PutOptions::default()).unwrap_err()
        });
        eventually(|| relay.has_dropped_response());
        relay.disconnect_all();
        let error = put.join().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    });
    let newest = local.head(&key()).unwrap().unwrap().number;
    let got = local.get_state_dict(&key(), &GetOptions::default());
    let got = got.unwrap_or_else(|error| panic!("version {newest} is visible: {error}"));
    assert!(got.0 == model(newest, 4));
}

#[test]
fn read_after_disconnect_fails_as_unreachable() {
    let daemon = TestDaemon::new(1 << 30);
    let relay = LossyRelay::start(&daemon);
    let (local, remote) = (daemon.connect(), Store::connect(&relay.address).unwrap());
    put(&local, &model(1, 4), &PutOptions::default());
    let opened = remote.open(&key(), &GetOptions::default()).unwrap();
    relay.disconnect_all();
    eventually(|| local.status().unwrap().leases.is_empty());
    put(&local, &model(2, 4), &PutOptions::default());
    let error = opened.tensor("weight", None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[test]
fn view_of_version_with_lost_commit_response_stays_unchanged() {
    let controller = TestDaemon::new(1 << 30);
    let relay = LossyRelay::start(&controller);
    let proxy_daemon = TestDaemon::with_options(1 << 30, |options| {
        options.controller = Some(relay.address.clone());
    });
    let (remote, reader) = (proxy_daemon.connect(), proxy_daemon.connect());
    put(&remote, &model(1, 4), &PutOptions::default());
    relay.drop_next_commit_response();
    let view = std::thread::scope(|scope| {
        let put = scope.spawn(|| {
            remote.put_state_dict(&key(), &model(2, 4), &PutOptions::default()).unwrap_err()
        });
        eventually(|| relay.has_dropped_response());
        let view = get(&reader);
        relay.disconnect_all();
        put.join().unwrap();
        view
    });
    assert!(view == model(2, 4));
    for step in 3..6 {
        put(&remote, &model(step, 4), &PutOptions::default());
        assert!(view == model(2, 4), "the view changed after the put of step {step}");
    }
}

/// Replaces a controller by an empty one at the same address.
fn restart_at_same_address(controller: TestDaemon) -> TestDaemon {
    let address = controller.address().strip_prefix("tcp://").unwrap().parse().unwrap();
    drop(controller);
    TestDaemon::with_options(1 << 30, |options| options.listen = Some(address))
}

#[test]
fn contribution_from_before_restart_cannot_commit_later_put() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let mut raw = RawTcpClient::greet(&proxy_daemon);
    let begin = |key: &str| {
        json!({"op": "begin", "key": key, "proposal": {"writer": 0, "writers": "0-1", "job": "run",
            "number": 7, "file_len": 9, "timeout": {"secs": 1, "nanos": 0}}})
    };
    let commit = |begun: &serde_json::Value| {
        json!({"op": "commit", "contribution": begun["begun"]["contribution"],
            "digest": "0".repeat(32)})
    };
    let (first, _) = raw.request(&begin("first").to_string(), b"");
    let _controller = restart_at_same_address(controller);
    std::thread::sleep(Duration::from_millis(200));
    let (second, _) = raw.request(&begin("second").to_string(), b"");
    assert!(second["begun"].is_object(), "{second}");
    let (lost, _) = raw.request(&commit(&first).to_string(), b"nine byte");
    let (done, _) = raw.request(&commit(&second).to_string(), b"nine byte");
    assert!(lost["failed"].is_object(), "its version ended with the old controller: {lost}");
    assert!(done["progress"].is_object(), "{done}");
}

#[test]
fn version_prefetched_before_restart_is_not_served_after() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let generator = proxy_daemon.connect();
    put(&controller.connect(), &model(1, 4), &PutOptions::default());
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    let controller = restart_at_same_address(controller);
    std::thread::sleep(Duration::from_millis(200));
    put(
        &controller.connect(),
        &model(2, 4),
        &PutOptions { version: Some(1), ..PutOptions::default() },
    );
    assert!(get(&generator) == model(2, 4));
    assert!(generator.get_state_dict(&key(), &version_options(1)).unwrap().0 == model(2, 4));
}

#[test]
fn unresponsive_proxy_daemon_does_not_block_readers() {
    let daemon = TestDaemon::new(1 << 30);
    let local = daemon.connect();
    put(&local, &model(1, 1), &PutOptions::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut raw = RawTcpClient::greet(&daemon);
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let (begun, _) = raw.request(&begin_at_proxy_daemon("0", &address).to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [900]});
    raw.0.write_all(&frame(1, 9, &commit.to_string(), b"")).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(get(&local) == model(1, 1)));
    assert_eq!(receiver.recv_timeout(Duration::from_secs(25)), Ok(true), "version 1 is readable");
}

#[test]
fn repeated_put_leaves_no_memory_at_proxy_daemon() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let mut raw = RawTcpClient::greet(&proxy_daemon);
    let begin = json!({"op": "begin", "key": "policy", "proposal": {"writer": 0, "writers": "0-1",
        "job": "run", "number": 7, "file_len": MIB, "timeout": {"secs": 1, "nanos": 0}}});
    let contributions = [(); 2].map(|()| {
        let (begun, _) = raw.request(&begin.to_string(), b"");
        assert_eq!(begun["begun"]["write_target"], "frames", "{begun}");
        begun["begun"]["contribution"].clone()
    });
    for contribution in contributions {
        let write = json!({"op": "write", "contribution": contribution, "offset": 0});
        raw.request(&write.to_string(), &vec![7; MIB as usize]);
        let commit =
            json!({"op": "commit", "contribution": contribution, "digest": "0".repeat(32)});
        let (done, _) = raw.request(&commit.to_string(), b"");
        assert!(done["progress"].is_object(), "{done}");
    }
    let local = controller.connect();
    for writer in 0..2 {
        put(&local, &writer_half(8, writer), &as_writer(writer as u32, "run", 8));
    }
    drop(raw);
    let store = proxy_daemon.connect();
    std::thread::sleep(Duration::from_secs(2));
    let memory = store.status().unwrap().memory;
    assert!(memory.free_bytes >= 4 * MIB, "the memory of both archives is free: {memory:?}");
}

#[test]
fn first_read_from_lost_daemon_fails_as_unreachable() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    put(&proxy_daemon.connect(), &model(1, 4), &PutOptions::default());
    drop(proxy_daemon);
    let local = controller.connect();
    let error = local.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error = local.prefetch(&key(), &[], &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[test]
fn unreachable_proxy_daemon_fails_commit_as_unreachable() {
    let daemon = TestDaemon::new(1 << 30);
    let mut raw = RawTcpClient::greet(&daemon);
    let (begun, _) = raw.request(&begin_at_proxy_daemon("0", "tcp://127.0.0.1:7").to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": [900]});
    let (kind, text) = raw.request_failure(&commit, b"");
    assert_eq!(kind, "unreachable", "{text}");
}

#[test]
fn unresponsive_proxy_daemon_does_not_block_other_keys() {
    let daemon = TestDaemon::new(1 << 30);
    let local = daemon.connect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let mut raw = RawTcpClient::greet(&daemon);
    let (begun, _) = raw.request(&begin_at_proxy_daemon("0-1", &address).to_string(), b"");
    let commit = json!({"op": "commit", "contribution": begun["begun"]["contribution"],
        "digest": "0".repeat(32), "lens": vec![9; 2000]});
    assert!(raw.request(&commit.to_string(), b"").0["progress"].is_object());
    local.delete(&key(), None).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let other = Key::new("other").unwrap();
        sender.send(local.put_state_dict(&other, &model(1, 1), &PutOptions::default()).is_ok())
    });
    assert_eq!(
        receiver.recv_timeout(Duration::from_secs(25)),
        Ok(true),
        "the put of another key completes"
    );
}

#[test]
fn read_request_cannot_leave_store_directory() {
    let (folder, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let secret = folder.path().join("daemon.key");
    std::fs::write(&secret, "PRIVATE").unwrap();
    let daemon = TestDaemon::with_root(root.path());
    let mut raw = RawTcpClient::greet(&daemon);
    let absolute = secret.display().to_string();
    let parents = root.path().canonicalize().unwrap().components().skip(1).map(|_| "../").collect();
    let parents: String = parents;
    for blob in [absolute.clone(), format!("{parents}{}", &absolute[1..])] {
        let read = json!({"op": "read", "blob": blob, "ranges": [[0, 7]]});
        let (reply, data) = raw.request(&read.to_string(), b"");
        assert_eq!(String::from_utf8_lossy(&data), "", "{blob}");
        assert_eq!(reply["failed"]["kind"], "not_found", "{reply}");
    }
}

#[test]
fn waiting_requests_at_proxy_daemon_do_not_block_puts() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let newer = json!({"op": "await_newer", "key": "policy", "timeout": {"secs": 600, "nanos": 0}});
    let mut waiting = [RawTcpClient::greet(&proxy_daemon), RawTcpClient::greet(&proxy_daemon)];
    for raw in &mut waiting {
        for number in 0..40 {
            raw.0.write_all(&frame(1, 10 + number, &newer.to_string(), b"")).unwrap();
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    let store = proxy_daemon.connect();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        sender.send(store.put_state_dict(&key(), &model(1, 1), &PutOptions::default()).is_ok())
    });
    assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok(true), "the put completes");
}

#[test]
fn cancel_at_proxy_daemon_reaches_controller() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let begin = |number: u64, seconds: u64| {
        let proposal = json!({"writer": 0, "writers": "0-1", "job": "j", "number": number,
            "file_len": 9, "timeout": {"secs": seconds, "nanos": 0}});
        json!({"op": "begin", "key": "policy", "proposal": proposal}).to_string()
    };
    let mut raw = RawTcpClient::greet(&proxy_daemon);
    let (first, _) = raw.request(&begin(1, 1), b"");
    assert!(raw.request(&begin(2, 1), b"").0["begun"].is_object());
    // Two versions are open, so the third `begin` waits. Then its client cancels it.
    let mut other = RawTcpClient::greet(&proxy_daemon);
    other.0.write_all(&frame(1, 77, &begin(3, 600), b"")).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    other.0.write_all(&frame(4, 0, r#"{"op":"cancel","request":77}"#, b"")).unwrap();
    let (failed, _) = receive_frame(&mut other.0).unwrap();
    assert_eq!(failed["failed"]["kind"], "busy", "{failed}");
    std::thread::sleep(Duration::from_millis(500));
    let busy = controller.metric(r#"tssd_requests_total{op="begin",outcome="busy"}"#);
    assert!((busy - 1.0).abs() < 0.1, "the controller ended the cancelled request");
    let contribution = &first["begun"]["contribution"];
    let withdraw = json!({"op": "withdraw", "contribution": contribution}).to_string();
    assert_eq!(raw.request(&withdraw, b"").0, "done");
    assert!(
        raw.request(&begin(4, 5), b"").0["begun"].is_object(),
        "the cancelled request does not block the next one"
    );
}

#[test]
fn hosts_that_prefetch_at_once_pass_pieces_on() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemons: Vec<TestDaemon> =
        (0..4).map(|_| TestDaemon::with_controller(&controller)).collect();
    let generators: Vec<Store> = proxy_daemons.iter().map(TestDaemon::connect).collect();
    let (trainer, dict) = (controller.connect(), model(1, 96));
    put(&trainer, &dict, &PutOptions::default());
    let start = std::sync::Barrier::new(generators.len());
    std::thread::scope(|scope| {
        for generator in &generators {
            scope.spawn(|| {
                start.wait();
                let fetched = generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
                assert!(fetched.bytes > 90 * MIB);
            });
        }
    });
    let sent = |daemon: &TestDaemon| daemon.metric("tssd_sent_bytes_total");
    let passed_on: f64 = proxy_daemons.iter().map(sent).sum();
    // On one machine, a piece comes faster than the names of the others.
    assert!(passed_on > 40e6, "{passed_on} {}", sent(&controller));
    assert!(sent(&controller) < 350e6, "{passed_on} {}", sent(&controller));
    for generator in &generators {
        assert_eq!(get(generator), dict);
    }
    // A host that comes later fetches from those that have everything.
    let (late, before) = (TestDaemon::with_controller(&controller), sent(&controller));
    late.connect().prefetch(&key(), &[], &GetOptions::default()).unwrap();
    assert!(sent(&controller) - before < 10e6, "{}", sent(&controller) - before);
    assert_eq!(get(&late.connect()), dict);
}

/// Each host knows how much it has and from where it came, and the host of the trainer knows who has it.
#[test]
fn status_shows_replicas_and_fetchers() {
    let controller = TestDaemon::new(1 << 30);
    let slow = |options: &mut DaemonOptions| {
        options.min_fetch_rate = Some(1 << 40);
        options.controller = Some(controller.address().to_owned());
    };
    let proxy_daemons = [(); 2].map(|()| TestDaemon::with_options(1 << 30, slow));
    let generators = proxy_daemons.each_ref().map(TestDaemon::connect);
    let (trainer, dict) = (controller.connect(), model(1, 48));
    let version = put(&trainer, &dict, &PutOptions::default());
    for generator in &generators {
        generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    }
    for (generator, daemon) in generators.iter().zip(&proxy_daemons) {
        let status = generator.status().unwrap();
        let [replica] = &status.replicas[..] else { panic!("{:?}", status.replicas) };
        assert_eq!((&*replica.key, replica.version), (key().as_str(), version));
        assert_eq!(replica.present_bytes, replica.bytes);
        assert!(replica.bytes >= 48 * MIB && replica.bytes_per_second > 0);
        // A piece from two senders counts for both.
        assert!(replica.senders.values().sum::<u64>() >= replica.bytes, "{replica:?}");
        let others = [&controller, &proxy_daemons[0], &proxy_daemons[1]];
        let others = others.iter().filter(|it| it.address() != daemon.address());
        let others: Vec<&str> = others.map(|it| it.address()).collect();
        assert!(replica.senders.keys().all(|it| others.contains(&&**it)), "{replica:?}");
        assert!(status.fetchers.iter().all(|fetcher| fetcher.version == version));
        assert!(!status.cpu_time.is_zero() && status.moved_bytes_total >= replica.bytes);
        let present =
            format!(r#"tssd_replica_present_bytes{{key="{}",version="{version}"}}"#, key());
        assert!(daemon.metric(&present) >= 48e6);
    }
    eventually(|| {
        let fetchers = trainer.status().unwrap().fetchers;
        fetchers.len() == 2
            && fetchers.iter().all(|it| it.is_complete && it.present_bytes >= 48 * MIB)
    });
    // A version that is no longer visible is not listed.
    trainer.delete(&key(), None).unwrap();
    eventually(|| generators.iter().all(|it| it.status().unwrap().replicas.is_empty()));
}

/// A daemon sends to other hosts no faster than it may, and reads that wait are not lost.
#[test]
fn send_rate_limits_the_uplink() {
    let controller = TestDaemon::with_options(1 << 30, |options| {
        options.send_rate = Some(8 << 20);
        options.send_hosts = NonZeroU32::new(1);
    });
    let proxy_daemons = [(); 2].map(|()| TestDaemon::with_controller(&controller));
    let dict = model(1, 16);
    put(&controller.connect(), &dict, &PutOptions::default());
    let started = std::time::Instant::now();
    std::thread::scope(|scope| {
        for daemon in &proxy_daemons {
            scope.spawn(|| assert_eq!(get(&daemon.connect()), dict));
        }
    });
    assert!(started.elapsed() >= Duration::from_millis(1500), "{:?}", started.elapsed());
}

/// Half of the columns of the weight of a [`model`].
struct HalfColumns {
    place: ShardSpec,
    bytes: Vec<u8>,
}

impl HalfColumns {
    /// Returns both halves.
    fn of(dict: &StateDict) -> [Self; 2] {
        let (all, columns) = (weight_bytes(dict), 3079_usize);
        let rows = all.len() / columns;
        let half = |start: usize, end: usize| {
            let [rows, start_column, len, columns_64] =
                [rows, start, end - start, columns].map(|number| number as u64);
            let (offsets, local) = ([0, start_column], [rows, len]);
            let slice = TensorSlice::new(&offsets, &local, &[rows, columns_64]).unwrap();
            let mut bytes = Vec::with_capacity(all.len());
            all.chunks_exact(columns).for_each(|row| bytes.extend_from_slice(&row[start..end]));
            Self { place: ShardSpec::new(slice), bytes }
        };
        [half(0, columns / 2), half(columns / 2, columns)]
    }

    /// Reads this half, and compares it.
    fn get(&self, store: &Store) -> GetReport {
        let mut memory = vec![0; self.bytes.len()];
        let meta = TensorMeta::new(Dtype::Uint8, self.place.slice().local_shape()).unwrap();
        let shard_spec = Some(self.place.clone());
        let target =
            Target { fqn: "weight".into(), shard_spec, meta, memory: (&mut memory).into() };
        let options = GetOptions::default();
        let report = store.get_state_dict_into(&key(), &mut [target], &options).unwrap();
        assert!(memory == self.bytes);
        report
    }
}

/// Gets share what they fetch as prefetches do: whole archives, and the same parts of them.
#[test]
fn hosts_that_get_at_once_pass_parts_on() {
    let sent = |daemon: &TestDaemon| daemon.metric("tssd_sent_bytes_total");
    let dict = model(1, 96);
    let [left, right] = HalfColumns::of(&dict);
    for has_right in [false, true] {
        let second = if has_right { &right } else { &left };
        let controller = TestDaemon::new(1 << 30);
        let proxy_daemons: Vec<TestDaemon> =
            (0..4).map(|_| TestDaemon::with_controller(&controller)).collect();
        let generators: Vec<Store> = proxy_daemons.iter().map(TestDaemon::connect).collect();
        put(&controller.connect(), &dict, &PutOptions::default());
        let start = std::sync::Barrier::new(generators.len());
        std::thread::scope(|scope| {
            for (generator, half) in generators.iter().zip([&left, second, &left, second]) {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let report = half.get(generator);
                    assert_eq!(report.bytes_received, report.bytes_needed);
                });
            }
        });
        // Without the others, the daemon of the trainer would send 200 MB.
        assert!(sent(&controller) < 160e6, "{has_right} {}", sent(&controller));
        // A host that comes later fetches from those that have this half. Their leases have ended.
        let (late, before) = (TestDaemon::with_controller(&controller), sent(&controller));
        left.get(&late.connect());
        assert!(sent(&controller) - before < 10e6, "{}", sent(&controller) - before);
        // The other half comes from those that have it, if any has.
        right.get(&late.connect());
        let from_trainer = sent(&controller) - before;
        assert_eq!(from_trainer < 20e6, has_right, "{from_trainer}");
        assert_eq!(get(&late.connect()), dict);
    }
}

/// Two processes of a host want half of each chunk. Their daemon fetches all of it once.
#[test]
fn processes_of_one_host_share_chunks() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let dict = model(1, 96);
    let halves = HalfColumns::of(&dict);
    put(&controller.connect(), &dict, &PutOptions::default());
    std::thread::scope(|scope| {
        for half in &halves {
            let generator = proxy_daemon.connect();
            scope.spawn(move || half.get(&generator));
        }
    });
    let sent = controller.metric("tssd_sent_bytes_total");
    assert!((96e6..105e6).contains(&sent), "{sent}");
    // The halves alone come in parts of 4 MiB. Whole pieces have 1 MiB.
    let reads = controller.metric(r#"tssd_requests_total{op="read",outcome="ok"}"#);
    assert!(reads > 60.0, "{reads}");
    assert_eq!(get(&proxy_daemon.connect()), dict);
    assert!(controller.metric("tssd_sent_bytes_total") < 110e6);
}

/// Gets of parts and prefetches of the whole archive run at once, on several hosts, of archives that are compressed or not.
#[test]
fn gets_and_prefetches_share_archives() {
    let dict = model(1, 48);
    let halves = HalfColumns::of(&dict);
    for compression in [Compression::None, Compression::Zstd] {
        let controller = TestDaemon::new(1 << 30);
        let proxy_daemons: Vec<TestDaemon> =
            (0..3).map(|_| TestDaemon::with_controller(&controller)).collect();
        let options = PutOptions { compression, ..PutOptions::default() };
        put(&controller.connect(), &dict, &options);
        std::thread::scope(|scope| {
            for (number, proxy_daemon) in proxy_daemons.iter().enumerate() {
                let (first, second) = (&halves[number % 2], &halves[(number + 1) % 2]);
                let [get_first, get_second, prefetch] = [(); 3].map(|()| proxy_daemon.connect());
                scope.spawn(move || first.get(&get_first));
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(20));
                    prefetch.prefetch(&key(), &[], &GetOptions::default()).unwrap();
                });
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(50));
                    second.get(&get_second)
                });
            }
        });
        for proxy_daemon in &proxy_daemons {
            assert_eq!(get(&proxy_daemon.connect()), dict);
            assert!(proxy_daemon.metric("tssd_avoided_fetchers_total") < 1.0);
        }
    }
}

/// A daemon ignores bad tables, names and ranges. Its readers get the version.
#[test]
fn bad_requests_of_fetchers_change_nothing() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let dict = model(1, 24);
    put(&controller.connect(), &dict, &PutOptions::default());
    let generator = proxy_daemon.connect();
    let mut raw = RawTcpClient::greet(&controller);
    let (located, _) = raw.request(r#"{"op":"locate","key":"policy","selector":"newest"}"#, b"");
    let archives = located["leased"]["archives"].as_object().unwrap();
    let blob = archives.values().next().unwrap()["blob"].as_str().unwrap().to_owned();
    // Tables of wrong lengths. Nobody listens at these addresses.
    for (port, parts) in [(1, vec![1; 3]), (2, vec![0xff; 4000]), (3, Vec::new())] {
        let address = format!("tcp://127.0.0.1:{port}");
        let announce = json!({"op": "announce", "blob": blob, "address": address});
        let (reply, tables) = raw.request(&announce.to_string(), &parts);
        let reply = &reply["blob_fetchers"];
        assert_eq!(reply["fetchers"].as_array().unwrap().len(), port - 1);
        assert_eq!(tables.len(), [0, 3, 4003][port - 1]);
        let known = json!({"op": "announce", "blob": blob, "address": address,
            "known": reply["crc32"]});
        assert_eq!(raw.request(&known.to_string(), &parts).1, b"");
    }
    let max = u64::MAX;
    let mut proxied = RawTcpClient::greet(&proxy_daemon);
    proxied.request(r#"{"op":"locate","key":"policy","selector":"newest"}"#, b"");
    for ranges in [
        json!([]),
        json!([[0, 0], [max, max], [0, max], [max, 1]]),
        json!([[0, 1, [[max, max]]], [0, 1, [[max, 0]]], [0, 1, [[1, 0], [1, 0], [1, 0], [1, 0]]]]),
        // More runs than a daemon records.
        json!([[0, 300, [[20_000_000, 1]]], [0, 300, [[4000, 0], [4000, 0]]]]),
    ] {
        for blob in [&blob, "policy/x/y.tssd", "../../etc/passwd", ""] {
            let fetch = json!({"op": "fetch", "blob": blob, "ranges": ranges});
            assert_eq!(proxied.request(&fetch.to_string(), b"").0, json!("done"), "{fetch}");
        }
    }
    let unknown = json!({"op": "present_pieces", "blob": "policy/x/y.tssd"});
    let (reply, bits) = proxied.request(&unknown.to_string(), b"");
    assert_eq!((reply, bits), (json!({"present_pieces": {"is_complete": false}}), Vec::new()));
    assert_eq!(get(&generator), dict);
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    assert_eq!(get(&generator), dict);
}

/// How a daemon answers reads.
#[derive(Clone, Copy, PartialEq)]
enum Answer {
    /// With zeros.
    Zeros,
    /// With zeros, after a part without content.
    ZerosAfterPart,
    /// It closes the connection.
    Close,
}

/// A daemon that answers each read in the same way.
fn serve_reads(listener: &TcpListener, answer: Answer) {
    while let Ok((mut stream, _)) = listener.accept() {
        std::thread::spawn(move || {
            while let Some((number, head, _)) = receive_numbered_frame(&mut stream) {
                let (reply, data) = if head["op"] == "hello" {
                    let protocol = json!({"major": 2, "minor": 0});
                    let welcome =
                        json!({"protocol": protocol, "pid": 1, "inline_max_bytes": 1 << 18});
                    (json!({"welcome": welcome}), Vec::new())
                } else if head["op"] == "present_pieces" {
                    (json!({"present_pieces": {"is_complete": true}}), Vec::new())
                } else if answer == Answer::Close {
                    return;
                } else {
                    if answer == Answer::ZerosAfterPart {
                        let part = json!({"archives": {}}).to_string();
                        stream.write_all(&frame(2, number, &part, &[])).unwrap();
                    }
                    let len = head["ranges"][0][1].as_u64().unwrap();
                    (json!({"read": {"crc32": null}}), vec![0; len as usize])
                };
                stream.write_all(&frame(3, number, &reply.to_string(), &data)).unwrap();
            }
        });
    }
}

/// Starts a daemon that answers each read in the same way. Returns its address.
fn start_fetcher(answer: Answer) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || serve_reads(&listener, answer));
    address
}

/// Announces a fetcher that has all of the newest version. Returns the archive of the version.
fn announce_fetcher(raw: &mut RawTcpClient, address: &str) -> String {
    let (located, _) = raw.request(r#"{"op":"locate","key":"policy","selector":"newest"}"#, b"");
    let archives = located["leased"]["archives"].as_object().unwrap();
    let blob = archives.values().next().unwrap()["blob"].as_str().unwrap().to_owned();
    let announce = json!({"op": "announce", "blob": blob, "address": address, "is_complete": true});
    let nothing = json!({"fetchers": [], "tables": 0, "crc32": 0});
    assert_eq!(raw.request(&announce.to_string(), b"").0, json!({"blob_fetchers": nothing}));
    blob
}

/// A daemon that fetches what it is asked for sends parts meanwhile.
#[test]
fn parts_before_the_reply_to_a_read_are_accepted() {
    let controller = TestDaemon::new(1 << 30);
    let proxy_daemon = TestDaemon::with_controller(&controller);
    let meta = TensorMeta::new(Dtype::Uint8, &[48 * MIB]).unwrap();
    let zeros = Storage::from(vec![0_u8; meta.nbytes() as usize]);
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, zeros, 0).unwrap());
    put(&controller.connect(), &dict, &PutOptions::default());
    let address = start_fetcher(Answer::ZerosAfterPart);
    announce_fetcher(&mut RawTcpClient::greet(&controller), &address);
    let generator = proxy_daemon.connect();
    generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
    assert_eq!(get(&generator), dict);
    let fetched = proxy_daemon.metric(r#"tssd_fetched_bytes_total{source="fetcher"}"#);
    assert!(fetched > 10e6, "{fetched}");
    assert!(proxy_daemon.metric("tssd_avoided_fetchers_total") < 1.0);
}

#[test]
fn damaged_and_broken_fetchers_are_avoided() {
    for answer in [Answer::Zeros, Answer::Close] {
        let controller = TestDaemon::new(1 << 30);
        let proxy_daemon = TestDaemon::with_controller(&controller);
        let (trainer, generator) = (controller.connect(), proxy_daemon.connect());
        let dict = model(2, 48);
        put(&trainer, &dict, &PutOptions::default());
        let address = start_fetcher(answer);
        let mut raw = RawTcpClient::greet(&controller);
        let blob = announce_fetcher(&mut raw, &address);
        generator.prefetch(&key(), &[], &GetOptions::default()).unwrap();
        assert_eq!(get(&generator), dict);
        let avoided = proxy_daemon.metric("tssd_avoided_fetchers_total");
        assert!((1.0..=3.0).contains(&avoided), "{avoided}");

        let unknown = json!({"op": "announce", "blob": "policy/x/y.tssd", "address": address});
        assert_eq!(raw.request_failure(&unknown, b"").0, "not_found");
        let invalid = json!({"op": "announce", "blob": blob, "address": "nowhere"});
        assert_eq!(raw.request_failure(&invalid, b"").0, "invalid");
    }
}
