//! Transfers between processes on one GPU: through a ring of buckets, or in place.

use std::num::NonZeroU32;
use std::process::Child;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tssd_format::{AttrValue, Dtype, StateDict, Tensor, TensorMeta, Value};
use tssd_gpu::{Device, DeviceMemory};
use tssd_store::blocking::{Receiver, Store};
use tssd_store::{
    ErrorKind, GetOptions, Key, PutOptions, PutReport, ReceiveReport, Residency, Rewind, Ring,
    Target, TargetMemory, Transport,
};
use tssd_tests::device_context::{Allocation, DeviceContext, devices};
use tssd_tests::test_daemon::TestDaemon;

use crate::{key, pattern, spawn_test};

/// Tensors of several dtypes, with their lengths in bytes. One is larger than a bucket.
const TENSORS: [(&str, Dtype, usize); 5] = [
    ("bias", Dtype::Float8E4m3fn, 1001),
    ("weight", Dtype::Bfloat16, 5_000_002),
    ("scale", Dtype::Float32, 4000),
    ("packed", Dtype::Uint8, 777_777),
    ("zero", Dtype::Float64, 800_000),
];

const SOON: Duration = Duration::from_mins(1);

fn ring(readers: u64) -> Ring {
    Ring { bucket_bytes: 1 << 20, buckets: NonZeroU32::new(2).unwrap(), readers }
}

fn meta(dtype: Dtype, len: usize) -> TensorMeta {
    TensorMeta::new(dtype, &[len as u64 / dtype.itemsize()]).unwrap()
}

/// Returns the length of a tensor in a version, in bytes: versions have several sizes.
fn len_of(version: u64, len: usize) -> usize {
    match version % 3 {
        1 => len,
        smaller => len / (2 + smaller as usize) / 8 * 8,
    }
}

/// The tensors of a writer, with memory for the largest version.
struct Model<'a> {
    caller: &'a DeviceContext,
    tensors: Vec<(&'static str, Dtype, Arc<Allocation>)>,
}

impl<'a> Model<'a> {
    fn new(caller: &'a DeviceContext) -> Self {
        let tensors = TENSORS.map(|(name, dtype, len)| (name, dtype, caller.allocate(len)));
        Self { caller, tensors: tensors.into() }
    }

    /// Enqueues the writes of a version, with delays, and returns its state dict.
    fn write(&self, version: u64) -> StateDict {
        let mut dict = StateDict::new();
        for (at, (name, dtype, allocation)) in (0..).zip(&self.tensors) {
            self.caller.enqueue_delay(allocation);
            self.caller.enqueue_fill(allocation, pattern(version * 10 + at, allocation.len));
            let storage = self.caller.to_storage(allocation);
            let meta = meta(*dtype, len_of(version, allocation.len));
            dict.insert(*name, Tensor::new(meta, storage, 0).unwrap());
        }
        dict
    }

    /// Overwrites the tensors.
    fn overwrite(&self) {
        for (_, _, allocation) in &self.tensors {
            self.caller.enqueue_fill(allocation, vec![0xFF; allocation.len]);
        }
    }

    /// Puts a version, and overwrites the tensors as soon as the put returns.
    fn put(
        &self,
        store: &Store,
        version: u64,
        options: &PutOptions,
    ) -> tssd_store::Result<PutReport> {
        let dict = self.write(version);
        let report = store.put_state_dict(&key(), &dict, options);
        drop(dict);
        self.overwrite();
        report
    }
}

fn options(residency: Residency) -> PutOptions {
    let require = Some(Transport::CudaIpc);
    PutOptions { residency, require_transport: require, timeout: SOON, ..PutOptions::default() }
}

/// Receives a version into new tensors, and compares them.
fn receive(
    receiver: &mut Receiver,
    caller: &DeviceContext,
    version: u64,
    timeout: Duration,
) -> tssd_store::Result<ReceiveReport> {
    let tensors =
        TENSORS.map(|(name, dtype, len)| (name, dtype, caller.allocate(len_of(version, len))));
    let memories: Vec<DeviceMemory> =
        tensors.iter().map(|(_, _, allocation)| caller.device_memory(allocation)).collect();
    let targets = tensors.iter().zip(&memories).map(|((name, dtype, allocation), memory)| {
        let (fqn, meta) = ((*name).to_owned(), meta(*dtype, allocation.len));
        Target { fqn, shard_spec: None, meta, memory: TargetMemory::Device(memory) }
    });
    let mut targets: Vec<Target<'_>> = targets.collect();
    let report = receiver.receive(&mut targets, &GetOptions::default(), timeout)?;
    assert_eq!((report.version, report.transport), (version, Transport::CudaIpc));
    for (at, ((name, _, allocation), memory)) in (0..).zip(tensors.iter().zip(&memories)) {
        let expected = &pattern(version * 10 + at, TENSORS[at as usize].2)[..allocation.len];
        assert!(caller.read(allocation) == expected, "{name} of version {version}");
        assert!(memory.stats().device >= allocation.len as u64);
    }
    Ok(report)
}

/// Receives these versions on a device.
fn read(
    reader: &Store,
    (ordinal, device): (usize, &Device),
    versions: std::ops::RangeInclusive<u64>,
) {
    let caller = DeviceContext::new(ordinal);
    let mut receiver = reader.receiver(&key(), Some(&device.uuid())).unwrap();
    for version in versions {
        receive(&mut receiver, &caller, version, SOON).unwrap();
    }
}

/// Returns whether the device supports virtual memory management, which rings need.
fn supports_rings() -> bool {
    std::env::var_os("TSSD_FAKE_CUDA_NO_VMM").is_none()
}

/// Versions of any size are transferred completely within the memory of two buckets.
///
/// The caller may change its tensors as soon as the put returns.
#[test]
#[ignore = "needs a GPU"]
fn ring_transfers_versions_within_two_buckets() {
    const VERSIONS: std::ops::RangeInclusive<u64> = 1..=12;
    for (ordinal, device) in devices().into_iter().enumerate().filter(|_| supports_rings()) {
        let served = TestDaemon::new(64 << 20);
        let (writer, status) = (served.connect(), served.connect());
        let options = options(Residency::Ring(ring(2)));
        thread::scope(|scope| {
            for _ in 0..2 {
                let (reader, device) = (served.connect(), &device);
                scope.spawn(move || read(&reader, (ordinal, device), VERSIONS));
            }
            let caller = DeviceContext::new(ordinal);
            let model = Model::new(&caller);
            let mut used = None;
            for version in VERSIONS {
                let report = model.put(&writer, version, &options).unwrap();
                assert_eq!((report.version, report.transport), (version, Transport::CudaIpc));
                let memory = status.status().unwrap().memory;
                assert_eq!(
                    *used.get_or_insert(memory.device_bytes),
                    memory.device_bytes,
                    "{version}"
                );
                assert!(memory.device_bytes <= 2 * (2 << 20), "{memory:?}");
            }
        });
    }
}

/// A flush copies the tensors into the buckets, so that the caller may overwrite them afterwards.
#[test]
#[ignore = "needs a GPU"]
fn publisher_sends_through_ring_at_each_flush() {
    for (ordinal, device) in devices().into_iter().enumerate().filter(|_| supports_rings()) {
        let served = TestDaemon::new(64 << 20);
        let writer = served.connect();
        for residency in [Residency::Ring(ring(1)), Residency::InPlace(ring(1))] {
            thread::scope(|scope| {
                let (reader, device) = (served.connect(), &device);
                let reading = scope.spawn(move || {
                    let caller = DeviceContext::new(ordinal);
                    let mut receiver = reader.receiver(&key(), Some(&device.uuid())).unwrap();
                    receive(&mut receiver, &caller, 7, SOON).unwrap().buckets
                });
                let caller = DeviceContext::new(ordinal);
                let model = Model::new(&caller);
                let options =
                    PutOptions { version: Some(7), rewind: Rewind::Always, ..options(residency) };
                let mut publisher = writer.publish(&key(), &options, 1 << 20).unwrap();
                let dict = model.write(7);
                for (at, (name, _, allocation)) in model.tensors.iter().enumerate() {
                    publisher.add(*name, dict.leaf(name).unwrap().clone()).unwrap();
                    if at % 2 == 1 {
                        publisher.flush().unwrap();
                        caller.enqueue_fill(allocation, vec![0xFF; allocation.len]);
                    }
                }
                let report = publisher.finish().unwrap();
                assert_eq!((report.version, report.transport), (7, Transport::CudaIpc));
                assert!(reading.join().unwrap() >= 3);
            });
        }
    }
}

/// Returns the environment variables of a child process.
fn child_env<'a>(
    url: &'a str,
    ordinal: &'a str,
    versions: &'a str,
) -> [(&'static str, &'a str); 3] {
    [("TSSD_TESTS_URL", url), ("TSSD_TESTS_DEVICE", ordinal), ("TSSD_TESTS_VERSIONS", versions)]
}

/// Returns the store, the device and the versions of a child process.
///
/// `None` if this process is not a child.
fn child_args() -> Option<(Store, usize, u64)> {
    let variable = |name| std::env::var(name).ok();
    let store = Store::connect(&variable("TSSD_TESTS_URL")?).unwrap();
    let ordinal = variable("TSSD_TESTS_DEVICE")?.parse().unwrap();
    Some((store, ordinal, variable("TSSD_TESTS_VERSIONS")?.parse().unwrap()))
}

#[test]
#[ignore = "is run by another test"]
fn as_a_reader() {
    let Some((store, ordinal, versions)) = child_args() else { return };
    let device = &Device::all().unwrap()[ordinal];
    read(&store, (ordinal, device), 1..=versions);
}

/// Two readers in one process open the same handles, and close them one after the other.
#[test]
#[ignore = "is run by another test"]
fn as_two_readers() {
    let Some((store, ordinal, versions)) = child_args() else { return };
    let (device, caller) = (&Device::all().unwrap()[ordinal], DeviceContext::new(ordinal));
    let [mut one, mut other] =
        [(); 2].map(|()| Some(store.receiver(&key(), Some(&device.uuid())).unwrap()));
    for version in 1..=versions {
        for receiver in [&mut one, &mut other] {
            let Some(open) = receiver else { continue };
            receive(open, &caller, version, SOON).unwrap();
        }
        if version == 2 {
            one = None;
        }
    }
}

#[test]
#[ignore = "is run by another test"]
fn as_an_in_place_writer() {
    let Some((store, ordinal, version)) = child_args() else { return };
    let caller = DeviceContext::new(ordinal);
    let model = Model::new(&caller);
    let options = PutOptions { version: Some(version), ..options(Residency::InPlace(ring(1))) };
    drop(model.put(&store, version, &options));
}

/// Readers in other processes copy directly from the memory of the caller, until the put returns.
#[test]
#[ignore = "needs a GPU"]
fn in_place_put_is_copied_from_the_callers_memory() {
    for ordinal in 0..devices().len() {
        let served = TestDaemon::new(64 << 20);
        let (writer, url, ordinal_text) = (served.connect(), served.url(), ordinal.to_string());
        let env = child_env(&url, &ordinal_text, "6");
        let mut readers =
            [spawn_test("ring::as_a_reader", &env), spawn_test("ring::as_two_readers", &env)];
        let caller = DeviceContext::new(ordinal);
        let model = Model::new(&caller);
        for version in 1..=6 {
            let readers = if version > 2 { 2 } else { 3 };
            let report =
                model.put(&writer, version, &options(Residency::InPlace(ring(readers)))).unwrap();
            assert_eq!((report.version, report.transport), (version, Transport::CudaIpc));
            assert!(report.transport_reason.contains("in place, in 5 allocations"), "{report:?}");
            assert_eq!(writer.status().unwrap().memory.device_bytes, 0);
        }
        for reader in &mut readers {
            assert!(reader.wait().unwrap().success());
        }
    }
}

/// A killed reader does not block the ring, and its bucket is not reused while it may be read.
#[test]
#[ignore = "needs a GPU"]
fn dead_readers_do_not_block_the_writer() {
    for (ordinal, device) in devices().into_iter().enumerate() {
        for residency in [Residency::Ring(ring(2)), Residency::InPlace(ring(2))] {
            if matches!(residency, Residency::Ring(_)) && !supports_rings() {
                continue;
            }
            let served = TestDaemon::new(64 << 20);
            let (writer, reader, url) = (served.connect(), served.connect(), served.url());
            let ordinal_text = ordinal.to_string();
            let mut dying =
                spawn_test("ring::as_a_reader", &child_env(&url, &ordinal_text, "1000"));
            thread::scope(|scope| {
                let device = &device;
                scope.spawn(move || read(&reader, (ordinal, device), 1..=6));
                let caller = DeviceContext::new(ordinal);
                let model = Model::new(&caller);
                for version in 1..=6 {
                    if version == 3 {
                        dying.kill().unwrap();
                    }
                    let ring = if version < 3 { residency } else { with_one_reader(residency) };
                    model.put(&writer, version, &options(ring)).unwrap();
                }
            });
            dying.wait().unwrap();
        }
    }
}

fn with_one_reader(residency: Residency) -> Residency {
    match residency {
        Residency::Ring(_) => Residency::Ring(ring(1)),
        _ => Residency::InPlace(ring(1)),
    }
}

/// Reads after the end of an in-place put fail, since the memory may have other contents by then.
#[test]
#[ignore = "needs a GPU"]
fn receive_after_in_place_put_has_ended_fails() {
    for (ordinal, device) in devices().into_iter().enumerate() {
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        let mut receiver = reader.receiver(&key(), Some(&device.uuid())).unwrap();
        let caller = DeviceContext::new(ordinal);
        let model = Model::new(&caller);
        let short_timeout = PutOptions {
            timeout: Duration::from_millis(300),
            ..options(Residency::InPlace(ring(1)))
        };
        let error = model.put(&writer, 1, &short_timeout).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        let error = receive(&mut receiver, &caller, 1, Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.is_target_modified(), "{error}");
        expect_next_version(&mut receiver, &writer, ordinal);
    }
}

/// A cancelled in-place put revokes the access of its readers.
#[test]
#[ignore = "needs a GPU"]
fn cancelled_in_place_put_revokes_its_memory() {
    for (ordinal, device) in devices().into_iter().enumerate() {
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        let mut receiver = reader.receiver(&key(), Some(&device.uuid())).unwrap();
        let caller = DeviceContext::new(ordinal);
        let model = Model::new(&caller);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = tssd_store::Store::connect(&served.url()).await.unwrap();
            let (dict, options) = (model.write(1), options(Residency::InPlace(ring(1))));
            let (key, channel) = (key(), channel(&device));
            tokio::select! {
                put = store.put_state_dict(&key, &dict, &options) => panic!("{put:?}"),
                lent = store.wait_for_version(&channel, 1, SOON) => drop(lent.unwrap()),
            }
        });
        reader.wait_for_version(&channel(&device), 2, SOON).unwrap();
        model.overwrite();
        let error = receive(&mut receiver, &caller, 1, Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        expect_next_version(&mut receiver, &writer, ordinal);
    }
}

/// Checks that the receiver gets the next version, of another writer.
fn expect_next_version(receiver: &mut Receiver, writer: &Store, ordinal: usize) {
    let caller = DeviceContext::new(ordinal);
    let model = Model::new(&caller);
    thread::scope(|scope| {
        scope.spawn(|| receive(receiver, &DeviceContext::new(ordinal), 2, SOON).unwrap());
        let second = PutOptions { version: Some(2), ..options(Residency::InPlace(ring(1))) };
        model.put(writer, 2, &second).unwrap();
    });
}

fn channel(device: &Device) -> Key {
    Key::new(format!("policy/.ring/{}", device.uuid())).unwrap()
}

/// Starts a process that puts version 1 in place, and waits for a reader.
fn start_in_place_writer(served: &TestDaemon, ordinal: usize, device: &Device) -> Child {
    let (url, ordinal) = (served.url(), ordinal.to_string());
    let child = spawn_test("ring::as_an_in_place_writer", &child_env(&url, &ordinal, "1"));
    served.connect().wait_for_version(&channel(device), 1, SOON).unwrap();
    child
}

/// If the writer of an in-place put is killed, its version cannot be received.
#[test]
#[ignore = "needs a GPU"]
fn in_place_put_ends_with_its_writer() {
    for (ordinal, device) in devices().into_iter().enumerate() {
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        let mut receiver = reader.receiver(&key(), Some(&device.uuid())).unwrap();
        let peers = || writer.status().unwrap().peers.len();
        let before = peers();
        let mut dying = start_in_place_writer(&served, ordinal, &device);
        dying.kill().unwrap();
        dying.wait().unwrap();
        while peers() > before {
            thread::sleep(Duration::from_millis(5));
        }
        let caller = DeviceContext::new(ordinal);
        let error = receive(&mut receiver, &caller, 1, Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        expect_next_version(&mut receiver, &writer, ordinal);
    }
}

/// The handles of a live writer cannot be opened, for example because it is in another PID namespace.
///
/// The reader gets an error, and can receive the next version.
#[test]
#[ignore = "needs a GPU"]
fn receive_fails_if_handles_cannot_be_opened() {
    for (ordinal, device) in devices().into_iter().enumerate() {
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        let mut receiver = reader.receiver(&key(), Some(&device.uuid())).unwrap();
        let mut child = start_in_place_writer(&served, ordinal, &device);
        let options = GetOptions::default();
        let (mut table, _) = writer.get_state_dict(&channel(&device), &options).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let Value::Tensor(handles) = table.leaf("handles").unwrap() else { panic!("a tensor") };
        let invalid = Tensor::from_slice(
            &vec![0xA5_u8; handles.meta().numel() as usize],
            handles.meta().shape(),
        );
        table.insert("handles", invalid.unwrap());
        let _follower =
            writer.follow(&Key::new(format!("{}/exporter/7", channel(&device))).unwrap()).unwrap();
        let mark = r#"{"version": 1, "put": 7, "part": 0, "is_last": true, "is_exported": true}"#;
        let attrs =
            [("tssd.store.ring".to_owned(), AttrValue::Text(mark.into()))].into_iter().collect();
        let put = PutOptions { attrs, ..PutOptions::default() };
        writer.put_state_dict(&channel(&device), &table, &put).unwrap();
        let caller = DeviceContext::new(ordinal);
        let error = receive(&mut receiver, &caller, 1, SOON).unwrap_err();
        assert!(error.to_string().contains("that another process lends"), "{error}");
        assert!(!error.is_target_modified(), "{error}");
        expect_next_version(&mut receiver, &writer, ordinal);
    }
}
