//! Versions that stay in the memory of the GPU that their tensors are on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tssd_format::{
    Dtype, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice, Value,
};
use tssd_gpu::Device;
use tssd_store::blocking::Store;
use tssd_store::{
    Divergent, Durability, ErrorKind, GetOptions, JobId, PutOptions, PutReport, Residency, Target,
    TargetMemory, Transport,
};
use tssd_tests::caller::{Allocation, DeviceContext, devices};
use tssd_tests::raw::{RawConnection, frame};
use tssd_tests::served::TestDaemon;

use crate::get::{Wanted, cut, matrix, place};
use crate::put::{Model, expected};
use crate::{bytes_of, child, key, pattern, set};

const LEN: usize = 5_000_003;

fn on_device() -> PutOptions {
    let (residency, require) = (Residency::Device, Some(Transport::CudaIpc));
    PutOptions { residency, require, ..PutOptions::default() }
}

/// The devices whose memory can be shared; none, and said so, where there are none.
fn shared() -> impl Iterator<Item = usize> {
    let has_vmm = std::env::var_os("TSSD_FAKE_CUDA_NO_VMM").is_none();
    0..if has_vmm { devices().len() } else { 0 }
}

/// One tensor of bytes.
fn dict(caller: &DeviceContext, allocation: &Arc<Allocation>) -> StateDict {
    let storage = caller.to_storage(allocation);
    let meta = TensorMeta::new(Dtype::Uint8, &[allocation.len as u64]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, storage, 0).unwrap());
    dict
}

/// Puts what a step has.
fn put(
    store: &Store,
    caller: &DeviceContext,
    allocation: &Arc<Allocation>,
    step: u64,
) -> PutReport {
    caller.enqueue_fill(allocation, pattern(step, allocation.len));
    store.put_state_dict(&key(), &dict(caller, allocation), &on_device()).unwrap()
}

/// What a reader finds, whole, in its own memory.
fn found(store: &Store) -> Vec<u8> {
    let (found, report) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
    assert_eq!(report.transport, Transport::CudaIpc, "{}", report.why);
    bytes_of(&found, "weight")
}

#[test]
#[ignore = "needs a GPU"]
fn what_stays_on_a_device_is_what_was_there_when_the_stream_was_done() {
    for ordinal in shared() {
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        let model = Model::new(ordinal);
        let mut digests = Vec::new();
        for step in 1..5 {
            model.step(step);
            let dict = model.dict();
            let report = writer.put_state_dict(&key(), &dict, &on_device()).unwrap();
            assert_eq!((report.visible, report.transport), (true, Transport::CudaIpc));
            assert!(report.why.contains("GPU-"), "{}", report.why);
            drop(dict);
            // What happens there afterwards changes nothing.
            model.step(99);
            let (found, got) = reader.get_state_dict(&key(), &GetOptions::default()).unwrap();
            assert!(found == expected(step), "step {step}");
            assert_eq!((got.transport, got.bytes_verified), (Transport::CudaIpc, 0));
            // Nobody has seen the bytes, and no two versions are taken for the same.
            assert!(!digests.contains(&got.digest));
            digests.push(got.digest);
            model.caller.synchronize();
        }
        assert!(reader.status().unwrap().memory.devices > 0);
        assert!(served.metric("tssd_device_bytes") > 0.0);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn tensors_are_filled_within_the_memory_of_the_device_in_any_sharding() {
    for ordinal in shared() {
        let caller = DeviceContext::new(ordinal);
        let served = TestDaemon::new(64 << 20);
        let writers = [served.connect(), served.connect(), served.connect()];
        let reader = served.connect();
        for step in 1..4 {
            crate::get::publish_from(&writers, step, &|bytes| {
                let allocation = caller.allocate(bytes.len());
                caller.enqueue_fill(&allocation, bytes);
                let storage = caller.to_storage(&allocation);
                (storage, on_device())
            });
            let whole = [0, 0, 1200, 1000];
            let parts = [whole, [0, 0, 1200, 500], [0, 500, 1200, 500], [399, 17, 402, 9]];
            for stride in [0, 3] {
                let wanted: Vec<Wanted> = parts
                    .iter()
                    .map(|part| Wanted::new(&caller, *part, part[3] + stride))
                    .collect();
                let mut targets: Vec<Target<'_>> = wanted.iter().map(Wanted::as_target).collect();
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
            // Into this process's memory too, and by a reader that asks for a part.
            let part = [7, 900, 800, 100];
            let mut host = vec![0; 800 * 100 * 2];
            let meta = TensorMeta::new(Dtype::Bfloat16, &part[2..]).unwrap();
            let memory = TargetMemory::Here(&mut host);
            let target =
                Target { fqn: "weight".to_owned(), place: Some(place(part)), meta, memory };
            reader.get_state_dict_into(&key(), &mut [target], &GetOptions::default()).unwrap();
            assert!(host == cut(&matrix(step), part));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn what_is_published_in_buckets_stays_on_its_device() {
    for ordinal in shared() {
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
            // What was added is there, whatever becomes of it now; what is in no GPU's memory goes along.
            caller.enqueue_fill(&large, pattern(99, LEN));
            publisher.add("host", host.clone()).unwrap();
            let report = publisher.finish().unwrap();
            assert_eq!((report.visible, report.transport), (true, Transport::CudaIpc));
            assert!(found(&reader) == pattern(step, LEN));
            let target = caller.allocate(LEN);
            let memory = caller.device_memory(&target);
            let meta = TensorMeta::new(Dtype::Uint8, &[LEN as u64]).unwrap();
            let wanted = Target {
                fqn: "weight".to_owned(),
                place: None,
                meta,
                memory: TargetMemory::Elsewhere(&memory),
            };
            reader.get_state_dict_into(&key(), &mut [wanted], &GetOptions::default()).unwrap();
            assert!(caller.read(&target) == pattern(step, LEN));
            assert_eq!(memory.stats().device, LEN as u64);
            let (all, _) = reader.get_state_dict(&key(), &GetOptions::default()).unwrap();
            assert_eq!(all.leaf("host").unwrap(), &Value::from(host.clone()));
        }
        // What is of this process's memory alone is on no GPU.
        let mut publisher = writer.publish(&key(), &on_device(), 1 << 20).unwrap();
        publisher.add("host", host).unwrap();
        assert_eq!(publisher.finish().unwrap_err().kind(), ErrorKind::Refused);
        assert!(found(&reader) == pattern(3, LEN));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn memory_of_a_device_is_written_again_when_nobody_reads_it_and_not_before() {
    for ordinal in shared() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let served = TestDaemon::new(64 << 20);
        let (writer, reader) = (served.connect(), served.connect());
        put(&writer, &caller, &allocation, 1);
        put(&writer, &caller, &allocation, 2);
        let used = reader.status().unwrap().memory.devices;
        for step in 3..20 {
            put(&writer, &caller, &allocation, step);
            assert!(found(&reader) == pattern(step, LEN));
        }
        // Two copies, whatever the number of versions.
        assert_eq!(reader.status().unwrap().memory.devices, used);
        // What is held does not change, and takes memory of its own.
        let held = reader.open(&key(), &GetOptions::default()).unwrap();
        for step in 20..25 {
            put(&writer, &caller, &allocation, step);
        }
        let tensor = held.tensor("weight", None).unwrap();
        assert!(tensor.view().span() == pattern(19, LEN));
        assert!(reader.status().unwrap().memory.devices > used);
        drop((tensor, held));
        for step in 25..40 {
            put(&writer, &caller, &allocation, step);
        }
        assert!(found(&reader) == pattern(39, LEN));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn where_a_version_does_not_stay_on_a_device_the_report_says_why() {
    for ordinal in 0..devices().len() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        caller.enqueue_fill(&allocation, pattern(1, LEN));
        let dict = dict(&caller, &allocation);
        let (served, folder) = (
            TestDaemon::with_root(tempfile::tempdir().unwrap().path()),
            tempfile::tempdir().unwrap(),
        );
        let near = served.connect();
        let lax = PutOptions { require: None, ..on_device() };
        let refused = |store: &Store, dict: &StateDict, why: &str| {
            let report = store.put_state_dict(&key(), dict, &lax).unwrap();
            assert!(
                report.transport != Transport::CudaIpc && report.why.contains(why),
                "{report:?}"
            );
            let error = store.put_state_dict(&key(), dict, &on_device()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused);
            assert!(error.to_string().contains(why), "{error}");
        };
        let far = "a daemon of this host";
        for store in [Store::memory().unwrap(), Store::directory(folder.path()).unwrap()] {
            refused(&store, &dict, far);
        }
        refused(&served.connect_tcp(), &dict, far);
        // Whoever decides elsewhere cannot look at it.
        refused(&TestDaemon::with_controller(&served).connect(), &dict, far);
        let mut host = StateDict::new();
        host.insert("weight", Tensor::from_slice(&[1.0_f32; 9], &[9]).unwrap());
        if shared().next().is_none() {
            refused(&near, &dict, "no memory that other processes can map");
            continue;
        }
        refused(&near, &host, "none of its tensors is on a GPU");
        let invalid = |options: PutOptions, why: &str| {
            let error = near.put_state_dict(&key(), &dict, &options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(why), "{error}");
        };
        invalid(PutOptions { durability: Durability::Disk, ..on_device() }, "residency=host");
        invalid(PutOptions { digests: true, ..on_device() }, "residency=host");
        // Whoever wants it from the host's memory says so; whoever is elsewhere hears what to do.
        put(&near, &caller, &allocation, 2);
        let options = GetOptions { require: Some(Transport::Arena), ..GetOptions::default() };
        let error = near.get_state_dict(&key(), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        let error =
            served.connect_tcp().get_state_dict(&key(), &GetOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("residency=host"), "{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn several_writers_stay_each_on_its_device_and_agree_on_what_all_have() {
    for ordinal in shared() {
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
                divergent: if step == 3 { Divergent::Lowest } else { Divergent::Error },
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
        // The answer was lost: the same again is the same.
        let again = put(1, 0, 7).unwrap();
        assert!(!again.visible);
        assert!(put(1, 1, 7).unwrap().visible);
        assert_eq!(found(&stores[0]), [7; 300]);
        assert!(rows_of(&stores[1]) == rows(1));
        put(2, 0, 8).unwrap();
        let error = put(2, 1, 9).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
        assert!(error.to_string().contains("differ"), "{error}");
        assert_eq!(found(&stores[0]), [7; 300]);
        put(3, 0, 8).unwrap();
        assert!(put(3, 1, 9).unwrap().visible);
        assert_eq!(found(&stores[0]), [8; 300]);
        assert!(rows_of(&stores[1]) == rows(3));
        put(4, 0, 7).unwrap();
        assert!(put(4, 1, 7).unwrap().visible);
        assert_eq!(found(&stores[1]), [7; 300]);
        assert!(rows_of(&stores[0]) == rows(4));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn who_does_not_know_of_memory_of_devices_is_told_so() {
    for ordinal in shared() {
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

/// Until something is so; or long enough to know that it will not be.
fn wait_for(mut is_so: impl FnMut() -> bool, what: &str) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn versions_outlive_their_writer_and_readers_that_die_take_nothing_along() {
    for ordinal in shared() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let served = TestDaemon::new(64 << 20);
        let reader = served.connect();
        let asks = [("TSSD_TESTS_URL", served.url()), ("TSSD_TESTS_DEVICE", ordinal.to_string())];
        let asks = asks.each_ref().map(|(name, value)| (*name, value.as_str()));
        // A writer that is killed: its version stays.
        let mut writer = child("snapshot::as_a_writer_that_is_killed", &asks);
        wait_for(|| reader.exists(&key(), None).unwrap(), "the writer has put");
        writer.kill().unwrap();
        writer.wait().unwrap();
        for _ in 0..3 {
            assert!(found(&reader) == pattern(7, LEN));
        }
        let memory = || reader.status().unwrap().memory.devices;
        let held = memory();
        assert!(held > 0);
        let writer = served.connect();
        for step in 1..4 {
            put(&writer, &caller, &allocation, step);
        }
        // It is gone with its version: nobody could write it again.
        drop(reader.get_state_dict(&key(), &GetOptions::default()).unwrap());
        wait_for(|| memory() <= 2 * held, "the memory of the writer is given up");
        // A reader that is killed while it holds a version: what it read is not written again.
        let mut other = child("snapshot::as_a_reader_that_is_killed", &asks);
        wait_for(|| reader.status().unwrap().leases.len() == 1, "the reader holds a version");
        other.kill().unwrap();
        other.wait().unwrap();
        for step in 4..9 {
            put(&writer, &caller, &allocation, step);
            assert!(found(&reader) == pattern(step, LEN));
        }
        wait_for(|| reader.status().unwrap().leases.is_empty(), "its lease has ended");
        put(&writer, &caller, &allocation, 9);
        wait_for(|| memory() <= 2 * held, "two copies are enough");
    }
}

fn told(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[test]
#[ignore = "is run by another test"]
fn as_a_writer_that_is_killed() {
    let (Some(url), Some(device)) = (told("TSSD_TESTS_URL"), told("TSSD_TESTS_DEVICE")) else {
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
    let (Some(url), Some(_)) = (told("TSSD_TESTS_URL"), told("TSSD_TESTS_DEVICE")) else { return };
    let store = Store::connect(&url).unwrap();
    let _held = store.open(&key(), &GetOptions::default()).unwrap();
    std::thread::sleep(Duration::from_mins(1));
}

/// In a process that has no driver, or sees no device.
#[test]
#[ignore = "needs a GPU"]
fn who_does_not_see_the_device_is_told_what_to_do() {
    for ordinal in shared().take(1) {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let served = TestDaemon::new(64 << 20);
        put(&served.connect(), &caller, &allocation, 1);
        let url = served.url();
        let mut blind = set(
            "snapshot::as_a_reader_without_a_device",
            &[("TSSD_TESTS_URL", url.as_str()), ("TSSD_FAKE_CUDA_DEVICES", "0")],
        );
        if Device::all().unwrap()[0].name() != "a fake GPU" {
            blind.env("CUDA_VISIBLE_DEVICES", "");
        }
        let output = blind.output().unwrap();
        crate::expect_success(&output);
    }
}

#[test]
#[ignore = "is run by another test"]
fn as_a_reader_without_a_device() {
    tssd_gpu::register();
    let Some(url) = told("TSSD_TESTS_URL") else { return };
    let store = Store::connect(&url).unwrap();
    let error = store.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("CUDA"), "{error}");
    // Others it reads, and what it holds it gives back.
    let mut host = StateDict::new();
    host.insert("weight", Tensor::from_slice(&[1.0_f32; 9], &[9]).unwrap());
    store.put_state_dict(&key(), &host, &PutOptions::default()).unwrap();
    assert!(store.get_state_dict(&key(), &GetOptions::default()).unwrap().0 == host);
    assert!(store.status().unwrap().leases.is_empty());
}

/// On a device with little memory.
#[test]
#[ignore = "needs a driver without a GPU that has little memory"]
fn a_device_that_is_full_is_an_error_until_there_is_room() {
    if told("TSSD_FAKE_CUDA_MEMORY").is_none() {
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
    assert!(found(&store) == pattern(2, LEN));
    drop(held);
    for step in 4..8 {
        put(&store, &caller, &allocation, step);
        assert!(found(&store) == pattern(step, LEN));
    }
}
