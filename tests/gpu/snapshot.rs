//! Versions that stay in the memory of the GPU that holds their tensors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tssd_format::{
    Dtype, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice, Value,
};
use tssd_gpu::Device;
use tssd_store::blocking::Store;
use tssd_store::{
    DivergencePolicy, Durability, ErrorKind, GetOptions, JobId, PutOptions, PutReport, Residency,
    Target, TargetMemory, Transport,
};
use tssd_tests::device_context::{Allocation, DeviceContext, devices};
use tssd_tests::raw_connection::{RawConnection, frame};
use tssd_tests::test_daemon::TestDaemon;

use crate::get::{DeviceTarget, matrix, region_bytes, shard_spec};
use crate::put::{Model, expected};
use crate::{bytes_of, key, pattern, spawn_test, test_command};

const LEN: usize = 5_000_003;

fn on_device() -> PutOptions {
    let (residency, require) = (Residency::Device, Some(Transport::CudaIpc));
    PutOptions { residency, require_transport: require, ..PutOptions::default() }
}

/// Returns the devices whose memory can be shared between processes.
fn shareable_devices() -> impl Iterator<Item = usize> {
    let has_vmm = std::env::var_os("TSSD_FAKE_CUDA_NO_VMM").is_none();
    0..if has_vmm { devices().len() } else { 0 }
}

/// Returns a state dict with one tensor of bytes.
fn dict(caller: &DeviceContext, allocation: &Arc<Allocation>) -> StateDict {
    let storage = caller.to_storage(allocation);
    let meta = TensorMeta::new(Dtype::Uint8, &[allocation.len as u64]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, storage, 0).unwrap());
    dict
}

/// Puts the version of a step.
fn put(
    store: &Store,
    caller: &DeviceContext,
    allocation: &Arc<Allocation>,
    step: u64,
) -> PutReport {
    caller.enqueue_fill(allocation, pattern(step, allocation.len));
    store.put_state_dict(&key(), &dict(caller, allocation), &on_device()).unwrap()
}

/// Gets the newest version into host memory, and returns its bytes.
fn get_bytes(store: &Store) -> Vec<u8> {
    let (found, report) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
    assert_eq!(report.transport, Transport::CudaIpc, "{}", report.transport_reason);
    bytes_of(&found, "weight")
}

#[test]
#[ignore = "needs a GPU"]
fn device_put_waits_for_the_stream() {
    for ordinal in shareable_devices() {
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        let model = Model::new(ordinal);
        let mut digests = Vec::new();
        for step in 1..5 {
            model.write_step(step);
            let dict = model.dict();
            let report = writer.put_state_dict(&key(), &dict, &on_device()).unwrap();
            assert_eq!((report.visible, report.transport), (true, Transport::CudaIpc));
            assert!(report.transport_reason.contains("GPU-"), "{}", report.transport_reason);
            drop(dict);
            // Later writes do not change the version.
            model.write_step(99);
            let (found, got) = reader.get_state_dict(&key(), &GetOptions::default()).unwrap();
            assert!(found == expected(step), "step {step}");
            assert_eq!((got.transport, got.bytes_verified), (Transport::CudaIpc, 0));
            // Digests are not computed from the bytes, so each version must have another one.
            assert!(!digests.contains(&got.digest));
            digests.push(got.digest);
            model.caller.synchronize();
        }
        assert!(reader.status().unwrap().memory.device_bytes > 0);
        assert!(served.metric("tssd_device_bytes") > 0.0);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn get_copies_within_the_device_in_any_sharding() {
    for ordinal in shareable_devices() {
        let caller = DeviceContext::new(ordinal);
        let served = TestDaemon::new(64 << 20);
        let writers = [served.connect(), served.connect(), served.connect()];
        let reader = served.connect();
        for step in 1..4 {
            crate::get::put_rows_from(&writers, step, &|bytes| {
                let allocation = caller.allocate(bytes.len());
                caller.enqueue_fill(&allocation, bytes);
                let storage = caller.to_storage(&allocation);
                (storage, on_device())
            });
            let whole = [0, 0, 1200, 1000];
            let parts = [whole, [0, 0, 1200, 500], [0, 500, 1200, 500], [399, 17, 402, 9]];
            for stride in [0, 3] {
                let wanted: Vec<DeviceTarget> = parts
                    .iter()
                    .map(|part| DeviceTarget::new(&caller, *part, part[3] + stride))
                    .collect();
                let mut targets: Vec<Target<'_>> =
                    wanted.iter().map(DeviceTarget::as_target).collect();
                let report = reader
                    .get_state_dict_into(&key(), &mut targets, &GetOptions::default())
                    .unwrap();
                drop(targets);
                assert_eq!((report.version, report.transport), (step, Transport::CudaIpc));
                assert_eq!(report.bytes_needed, report.bytes_transferred);
                for wanted in &wanted {
                    assert!(caller.read(&wanted.allocation) == wanted.expected(step));
                    let copied = wanted.target.stats();
                    let bytes = wanted.part[2] * wanted.part[3] * 2;
                    assert_eq!(
                        (copied.device, copied.pinned, copied.pageable),
                        (bytes, 0, 0),
                        "{copied:?}"
                    );
                }
            }
            // A get of a part into host memory.
            let part = [7, 900, 800, 100];
            let mut host = vec![0; 800 * 100 * 2];
            let meta = TensorMeta::new(Dtype::Bfloat16, &part[2..]).unwrap();
            let memory = TargetMemory::Host(&mut host);
            let target = Target {
                fqn: "weight".to_owned(),
                shard_spec: Some(shard_spec(part)),
                meta,
                memory,
            };
            reader.get_state_dict_into(&key(), &mut [target], &GetOptions::default()).unwrap();
            assert!(host == region_bytes(&matrix(step), part));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn published_buckets_stay_on_the_device() {
    for ordinal in shareable_devices() {
        let caller = DeviceContext::new(ordinal);
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        let (large, small) = (caller.allocate(LEN), caller.allocate(1000));
        let host = Tensor::from_slice(&[1.0_f32; 9], &[9]).unwrap();
        for step in 1..4 {
            caller.enqueue_fill(&large, pattern(step, LEN));
            caller.enqueue_fill(&small, pattern(step + 100, 1000));
            let mut publisher = writer.publish(&key(), &on_device(), 1 << 20).unwrap();
            for (name, allocation) in [("small", &small), ("weight", &large)] {
                let dict = dict(&caller, allocation);
                publisher.add(name, dict.leaf("weight").unwrap().clone()).unwrap();
            }
            publisher.flush().unwrap();
            // Flushed tensors may be overwritten. Host tensors may be added too.
            caller.enqueue_fill(&large, pattern(99, LEN));
            publisher.add("host", host.clone()).unwrap();
            let report = publisher.finish().unwrap();
            assert_eq!((report.visible, report.transport), (true, Transport::CudaIpc));
            assert!(get_bytes(&reader) == pattern(step, LEN));
            let target = caller.allocate(LEN);
            let memory = caller.device_memory(&target);
            let meta = TensorMeta::new(Dtype::Uint8, &[LEN as u64]).unwrap();
            let wanted = Target {
                fqn: "weight".to_owned(),
                shard_spec: None,
                meta,
                memory: TargetMemory::Device(&memory),
            };
            reader.get_state_dict_into(&key(), &mut [wanted], &GetOptions::default()).unwrap();
            assert!(caller.read(&target) == pattern(step, LEN));
            assert_eq!(memory.stats().device, LEN as u64);
            let (all, _) = reader.get_state_dict(&key(), &GetOptions::default()).unwrap();
            assert_eq!(all.leaf("host").unwrap(), &Value::from(host.clone()));
        }
        // A version of host tensors only cannot stay on a GPU.
        let mut publisher = writer.publish(&key(), &on_device(), 1 << 20).unwrap();
        publisher.add("host", host).unwrap();
        assert_eq!(publisher.finish().unwrap_err().kind(), ErrorKind::Refused);
        assert!(get_bytes(&reader) == pattern(3, LEN));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn device_memory_is_reused_only_when_no_reader_holds_it() {
    for ordinal in shareable_devices() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        put(&writer, &caller, &allocation, 1);
        put(&writer, &caller, &allocation, 2);
        let used = reader.status().unwrap().memory.device_bytes;
        for step in 3..20 {
            put(&writer, &caller, &allocation, step);
            assert!(get_bytes(&reader) == pattern(step, LEN));
        }
        // Two copies suffice for any number of versions.
        assert_eq!(reader.status().unwrap().memory.device_bytes, used);
        // A version that a reader holds does not change, and keeps its memory.
        let held = reader.open(&key(), &GetOptions::default()).unwrap();
        for step in 20..25 {
            put(&writer, &caller, &allocation, step);
        }
        let tensor = held.tensor("weight", None).unwrap();
        assert!(tensor.view().span() == pattern(19, LEN));
        assert!(reader.status().unwrap().memory.device_bytes > used);
        drop((tensor, held));
        for step in 25..40 {
            put(&writer, &caller, &allocation, step);
        }
        assert!(get_bytes(&reader) == pattern(39, LEN));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn report_explains_why_version_is_not_on_device() {
    for ordinal in 0..devices().len() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        caller.enqueue_fill(&allocation, pattern(1, LEN));
        let dict = dict(&caller, &allocation);
        let (served, folder) = (
            TestDaemon::with_root(tempfile::tempdir().unwrap().path()),
            tempfile::tempdir().unwrap(),
        );
        let local = served.connect();
        let optional = PutOptions { require_transport: None, ..on_device() };
        let refused = |store: &Store, dict: &StateDict, why: &str| {
            let report = store.put_state_dict(&key(), dict, &optional).unwrap();
            assert!(
                report.transport != Transport::CudaIpc && report.transport_reason.contains(why),
                "{report:?}"
            );
            let error = store.put_state_dict(&key(), dict, &on_device()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused);
            assert!(error.to_string().contains(why), "{error}");
        };
        let not_local = "a daemon of this host";
        for store in [Store::memory().unwrap(), Store::directory(folder.path()).unwrap()] {
            refused(&store, &dict, not_local);
        }
        refused(&served.connect_tcp(), &dict, not_local);
        // A remote controller cannot access the device.
        refused(&TestDaemon::with_controller(&served).connect(), &dict, not_local);
        let mut host = StateDict::new();
        host.insert("weight", Tensor::from_slice(&[1.0_f32; 9], &[9]).unwrap());
        if shareable_devices().next().is_none() {
            refused(&local, &dict, "no memory that other processes can map");
            continue;
        }
        refused(&local, &host, "none of its tensors is on a GPU");
        let invalid = |options: PutOptions, why: &str| {
            let error = local.put_state_dict(&key(), &dict, &options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(why), "{error}");
        };
        invalid(PutOptions { durability: Durability::Disk, ..on_device() }, "residency=host");
        invalid(PutOptions { digests: true, ..on_device() }, "residency=host");
        // A reader that requires host memory, and a reader on another host, get an error that says what to do.
        put(&local, &caller, &allocation, 2);
        let options = GetOptions {
            require_transport: Some(Transport::SharedMemory),
            ..GetOptions::default()
        };
        let error = local.get_state_dict(&key(), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        let error =
            served.connect_tcp().get_state_dict(&key(), &GetOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("residency=host"), "{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn device_writers_must_agree_on_replicated_values() {
    for ordinal in shareable_devices() {
        let caller = DeviceContext::new(ordinal);
        let served = TestDaemon::new(64 << 20);
        let stores = [served.connect(), served.connect()];
        let (plain, rows) = (caller.allocate(300), caller.allocate(LEN));
        let put = |step: u64, writer: u32, byte: u8| {
            caller.enqueue_fill(&plain, vec![byte; 300]);
            caller.enqueue_fill(&rows, pattern(step * 10 + u64::from(writer), LEN));
            let mut dict = dict(&caller, &plain);
            let shape = [1, LEN as u64];
            let slice = TensorSlice::new(&[writer.into(), 0], &shape, &[2, LEN as u64]).unwrap();
            let storage = Storage::from_blob(Arc::new(caller.device_memory(&rows))).unwrap();
            let meta = TensorMeta::new(Dtype::Uint8, &shape).unwrap();
            let local = Tensor::new(meta, storage, 0).unwrap();
            dict.insert("rows", Shard::new(local, ShardSpec::new(slice)).unwrap());
            let options = PutOptions {
                writer: Some(writer),
                writers: Some("0-1".parse().unwrap()),
                job: Some(JobId("run".to_owned())),
                version: Some(step),
                on_divergence: if step == 3 {
                    DivergencePolicy::Lowest
                } else {
                    DivergencePolicy::Error
                },
                ..on_device()
            };
            stores[writer as usize].put_state_dict(&key(), &dict, &options)
        };
        let rows_of = |store: &Store| {
            let rows = store.open(&key(), &GetOptions::default()).unwrap();
            let rows = rows.tensor("rows", None).unwrap();
            rows.view().span().to_vec()
        };
        let rows = |step: u64| {
            let row = |writer: u64| pattern(step * 10 + writer, LEN);
            [row(0), row(1)].concat()
        };
        put(1, 0, 7).unwrap();
        // A retry after a lost response is idempotent.
        let again = put(1, 0, 7).unwrap();
        assert!(!again.visible);
        assert!(put(1, 1, 7).unwrap().visible);
        assert_eq!(get_bytes(&stores[0]), [7; 300]);
        assert!(rows_of(&stores[1]) == rows(1));
        put(2, 0, 8).unwrap();
        let error = put(2, 1, 9).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
        assert!(error.to_string().contains("differ"), "{error}");
        assert_eq!(get_bytes(&stores[0]), [7; 300]);
        put(3, 0, 8).unwrap();
        assert!(put(3, 1, 9).unwrap().visible);
        assert_eq!(get_bytes(&stores[0]), [8; 300]);
        assert!(rows_of(&stores[1]) == rows(3));
        put(4, 0, 7).unwrap();
        assert!(put(4, 1, 7).unwrap().visible);
        assert_eq!(get_bytes(&stores[1]), [7; 300]);
        assert!(rows_of(&stores[0]) == rows(4));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn client_without_device_support_gets_unsupported_error() {
    for ordinal in shareable_devices() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let served = TestDaemon::new(64 << 20);
        put(&served.connect(), &caller, &allocation, 1);
        let mut old = RawConnection::connect_with_hello(&served.socket());
        let locate = r#"{"op":"locate","key":"policy","selector":"newest"}"#;
        old.send(&frame(1, 2, locate, b""));
        let (_, reply) = old.receive().unwrap();
        assert_eq!(reply["failed"]["kind"], "unsupported", "{reply}");
    }
}

/// Waits at most 20 seconds until a condition holds.
fn wait_for(mut condition: impl FnMut() -> bool, description: &str) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(20), "{description}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn device_versions_survive_killed_writers_and_readers() {
    for ordinal in shareable_devices() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let served = TestDaemon::new(64 << 20);
        let reader = served.connect();
        let env = [("TSSD_TESTS_URL", served.url()), ("TSSD_TESTS_DEVICE", ordinal.to_string())];
        let env = env.each_ref().map(|(name, value)| (*name, value.as_str()));
        // A writer that is killed: its version stays.
        let mut writer = spawn_test("snapshot::as_a_writer_that_is_killed", &env);
        wait_for(|| reader.exists(&key(), None).unwrap(), "the writer has put");
        writer.kill().unwrap();
        writer.wait().unwrap();
        for _ in 0..3 {
            assert!(get_bytes(&reader) == pattern(7, LEN));
        }
        let memory = || reader.status().unwrap().memory.device_bytes;
        let held = memory();
        assert!(held > 0);
        let writer = served.connect();
        for step in 1..4 {
            put(&writer, &caller, &allocation, step);
        }
        // The memory of the killed writer is freed with its version. It cannot be reused.
        drop(reader.get_state_dict(&key(), &GetOptions::default()).unwrap());
        wait_for(|| memory() <= 2 * held, "the memory of the writer is given up");
        // A reader is killed while it holds a version. The memory that it reads is not reused.
        let mut other = spawn_test("snapshot::as_a_reader_that_is_killed", &env);
        wait_for(|| reader.status().unwrap().leases.len() == 1, "the reader holds a version");
        other.kill().unwrap();
        other.wait().unwrap();
        for step in 4..9 {
            put(&writer, &caller, &allocation, step);
            assert!(get_bytes(&reader) == pattern(step, LEN));
        }
        wait_for(|| reader.status().unwrap().leases.is_empty(), "its lease has ended");
        put(&writer, &caller, &allocation, 9);
        wait_for(|| memory() <= 2 * held, "two copies are enough");
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[test]
#[ignore = "is run by another test"]
fn as_a_writer_that_is_killed() {
    let (Some(url), Some(device)) = (variable("TSSD_TESTS_URL"), variable("TSSD_TESTS_DEVICE"))
    else {
        return;
    };
    let caller = DeviceContext::new(device.parse().unwrap());
    let allocation = caller.allocate(LEN);
    let store = Store::connect(&url).unwrap();
    put(&store, &caller, &allocation, 7);
    std::thread::sleep(Duration::from_mins(1));
}

#[test]
#[ignore = "is run by another test"]
fn as_a_reader_that_is_killed() {
    tssd_gpu::register();
    let (Some(url), Some(_)) = (variable("TSSD_TESTS_URL"), variable("TSSD_TESTS_DEVICE")) else {
        return;
    };
    let store = Store::connect(&url).unwrap();
    let _held = store.open(&key(), &GetOptions::default()).unwrap();
    std::thread::sleep(Duration::from_mins(1));
}

/// The reader is a process without a driver or without a visible device.
#[test]
#[ignore = "needs a GPU"]
fn reader_without_device_gets_helpful_error() {
    for ordinal in shareable_devices().take(1) {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let served = TestDaemon::new(64 << 20);
        put(&served.connect(), &caller, &allocation, 1);
        let url = served.url();
        let mut reader = test_command(
            "snapshot::as_a_reader_without_a_device",
            &[("TSSD_TESTS_URL", url.as_str()), ("TSSD_FAKE_CUDA_DEVICES", "0")],
        );
        if Device::all().unwrap()[0].name() != "a fake GPU" {
            reader.env("CUDA_VISIBLE_DEVICES", "");
        }
        let output = reader.output().unwrap();
        crate::expect_success(&output);
    }
}

#[test]
#[ignore = "is run by another test"]
fn as_a_reader_without_a_device() {
    tssd_gpu::register();
    let Some(url) = variable("TSSD_TESTS_URL") else { return };
    let store = Store::connect(&url).unwrap();
    let error = store.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("CUDA"), "{error}");
    // The reader can get versions in host memory, and releases its leases.
    let mut host = StateDict::new();
    host.insert("weight", Tensor::from_slice(&[1.0_f32; 9], &[9]).unwrap());
    store.put_state_dict(&key(), &host, &PutOptions::default()).unwrap();
    assert!(store.get_state_dict(&key(), &GetOptions::default()).unwrap().0 == host);
    assert!(store.status().unwrap().leases.is_empty());
}

/// Runs on a device with little memory.
#[test]
#[ignore = "needs a driver without a GPU that has little memory"]
fn full_device_fails_puts_until_memory_is_freed() {
    if variable("TSSD_FAKE_CUDA_MEMORY").is_none() {
        return;
    }
    let caller = DeviceContext::new(0);
    let allocation = caller.allocate(LEN);
    let served = TestDaemon::new(64 << 20);
    let store = served.connect();
    put(&store, &caller, &allocation, 1);
    let held = store.open(&key(), &GetOptions::default()).unwrap();
    put(&store, &caller, &allocation, 2);
    caller.enqueue_fill(&allocation, pattern(3, LEN));
    let error =
        store.put_state_dict(&key(), &dict(&caller, &allocation), &on_device()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("residency=host"), "{error}");
    assert!(get_bytes(&store) == pattern(2, LEN));
    drop(held);
    for step in 4..8 {
        put(&store, &caller, &allocation, step);
        assert!(get_bytes(&store) == pattern(step, LEN));
    }
}
