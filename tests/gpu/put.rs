//! Puts of device tensors.

use std::sync::Arc;
use std::time::Duration;

use tssd_format::{
    Compression, Dtype, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice,
    Value,
};
use tssd_gpu::{DeviceMemory, Stream};
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, PutOptions, Residency, Target, TargetMemory};
use tssd_tests::device_context::{Allocation, DeviceContext, devices};
use tssd_tests::test_daemon::TestDaemon;

use crate::{bytes_of, key, pattern};

/// Device tensors of a trainer: dtypes of all widths, tied tensors, strides, shards, an empty tensor.
pub(crate) struct Model {
    pub(crate) caller: DeviceContext,
    storages: Vec<Arc<Allocation>>,
}

/// Name, storage number, dtype, shape, strides unless row-major, offset in bytes, whether a shard.
type Leaf = (&'static str, usize, Dtype, &'static [u64], Option<&'static [u64]>, u64, bool);

/// Lengths of the storages in bytes.
const LENS: [usize; 4] = [3 << 20, 5_000_001, 640, 1 << 20];

const LEAVES: [Leaf; 11] = [
    ("embedding", 0, Dtype::Bfloat16, &[1024, 1536], None, 0, false),
    ("head", 0, Dtype::Bfloat16, &[1024, 1536], None, 0, false),
    ("transposed", 0, Dtype::Float32, &[512, 1024], Some(&[1, 512]), 0, false),
    ("odd", 1, Dtype::Uint8, &[5_000_001], None, 0, false),
    ("part", 1, Dtype::Float8E4m3fn, &[1000, 1000], Some(&[2000, 2]), 1, false),
    ("pairs", 1, Dtype::Float4E2m1fnX2, &[500, 33], None, 7, false),
    ("nibbles", 2, Dtype::Uint4, &[100], None, 201, false),
    ("scale", 2, Dtype::Float32, &[160], None, 0, false),
    ("scalar", 2, Dtype::Float64, &[], None, 8, false),
    ("rows", 3, Dtype::Int32, &[512, 512], None, 0, true),
    ("empty", 2, Dtype::Float16, &[0, 7], None, 0, false),
];

impl Model {
    pub(crate) fn new(ordinal: usize) -> Self {
        let caller = DeviceContext::new(ordinal);
        let storages = LENS.iter().map(|len| caller.allocate(*len)).collect();
        Self { caller, storages }
    }

    /// Enqueues the writes of a step, after a delay.
    pub(crate) fn write_step(&self, step: u64) {
        self.caller.enqueue_delay(&self.storages[0]);
        for (number, storage) in self.storages.iter().enumerate() {
            self.caller.enqueue_fill(storage, pattern(step * 100 + number as u64, storage.len));
        }
    }

    /// Returns the state dict, whose contents are valid when the stream has executed the writes.
    pub(crate) fn dict(&self) -> StateDict {
        dict(&self.storages(), true)
    }

    fn storages(&self) -> Vec<Storage> {
        self.caller.to_storages(&self.storages)
    }
}

/// Returns the state dict over these storages.
///
/// With `is_put`, some tensors are shards that cover their whole tensor. A get returns such shards as tensors.
fn dict(storages: &[Storage], is_put: bool) -> StateDict {
    let mut dict = StateDict::new();
    for (name, storage, dtype, shape, strides, offset, is_shard) in LEAVES {
        let mut meta = TensorMeta::new(dtype, shape).unwrap();
        if let Some(strides) = strides {
            meta = meta.with_strides(strides).unwrap();
        }
        let tensor = Tensor::new(meta, storages[storage].clone(), offset).unwrap();
        if is_shard && is_put {
            let slice = TensorSlice::new(&[0, 0], shape, shape).unwrap();
            dict.insert(name, Shard::new(tensor, ShardSpec::new(slice)).unwrap());
        } else {
            dict.insert(name, tensor);
        }
    }
    dict.insert("step", 7_i64);
    dict
}

/// Returns the state dict that a get of a step must return.
pub(crate) fn expected(step: u64) -> StateDict {
    let storage =
        |(number, len): (usize, &usize)| Storage::from(pattern(step * 100 + number as u64, *len));
    dict(&LENS.iter().enumerate().map(storage).collect::<Vec<_>>(), false)
}

#[test]
#[ignore = "needs a GPU"]
fn put_waits_for_the_stream() {
    for (ordinal, device) in devices().iter().enumerate() {
        assert!(device.uuid().starts_with("GPU-") && !device.name().is_empty());
        let folder = tempfile::tempdir().unwrap();
        let served = TestDaemon::new(1 << 30);
        let stores = [
            Store::memory().unwrap(),
            Store::directory(folder.path()).unwrap(),
            served.connect(),
            served.connect_tcp(),
        ];
        let model = Model::new(ordinal);
        for (number, store) in stores.iter().enumerate() {
            for step in 1..4 {
                model.write_step(step);
                // The test does not wait for the stream, so the put must.
                let storages = model.storages();
                let compression =
                    if step == 3 { Compression::ShuffledZstd } else { Compression::None };
                let options = PutOptions { compression, ..PutOptions::default() };
                let report =
                    store.put_state_dict(&key(), &dict(&storages, true), &options).unwrap();
                assert!(report.visible);
                drop(storages);
                // Later writes do not change the version.
                model.write_step(99);
                let found = store.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
                assert!(found == expected(step), "store {number}, step {step}");
                let [Value::Tensor(one), Value::Tensor(other)] =
                    ["embedding", "head"].map(|name| found.leaf(name).unwrap().clone())
                else {
                    panic!("tensors")
                };
                assert_eq!(one.view().span().as_ptr(), other.view().span().as_ptr(), "tied");
                model.caller.synchronize();
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn put_waits_for_work_enqueued_between_tensors() {
    const LEN: usize = 1 << 20;
    for ordinal in 0..devices().len() {
        let (caller, served) = (DeviceContext::new(ordinal), TestDaemon::new(1 << 30));
        let (store, own) = (served.connect(), [caller.allocate(LEN), caller.allocate(LEN)]);
        for (step, residency) in (0..).zip([Residency::Host, Residency::Device, Residency::Host]) {
            // The first tensor is written after its storage was created, like the source of a later cast.
            let write = |(number, allocation)| {
                if number == 1 {
                    caller.enqueue_delay(&own[1]);
                    caller.enqueue_fill(&own[0], pattern(step, LEN));
                }
                allocation
            };
            let storages = caller.to_storages(own.iter().enumerate().map(write));
            let meta = TensorMeta::new(Dtype::Uint8, &[LEN as u64]).unwrap();
            let mut dict = StateDict::new();
            dict.insert("first", Tensor::new(meta, storages[0].clone(), 0).unwrap());
            let options = PutOptions { residency, ..PutOptions::default() };
            store.put_state_dict(&key(), &dict, &options).unwrap();
            let found = store.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
            assert!(bytes_of(&found, "first") == pattern(step, LEN), "{step}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn archive_bytes_are_equal_for_device_and_host_tensors() {
    for ordinal in 0..devices().len() {
        let model = Model::new(ordinal);
        model.write_step(1);
        let storages = model.storages();
        let [device, host] = [dict(&storages, false), expected(1)].map(|dict| {
            let options = tssd_format::Options::new().digests();
            tssd_format::TorchStoreStateDict::with_options(&dict, &options).unwrap()
        });
        assert!(device.as_bytes() == host.as_bytes());
        let Value::Tensor(tensor) = dict(&storages, false).leaf("part").unwrap().clone() else {
            panic!("a tensor")
        };
        let Value::Tensor(same) = expected(1).leaf("part").unwrap().clone() else {
            panic!("a tensor")
        };
        assert!(tensor.to_memory().unwrap() == same);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn non_device_pointer_is_refused() {
    for ordinal in 0..devices().len() {
        let _caller = DeviceContext::new(ordinal);
        let host = [0_u8; 100];
        for pointer in [0, host.as_ptr().addr() as u64] {
            // SAFETY: the pointer is rejected, so it is not accessed.
            let memory = unsafe { DeviceMemory::new(pointer, 100, Stream::default(), ()) };
            assert_eq!(memory.unwrap_err().kind(), ErrorKind::Invalid, "{pointer:#x}");
        }
    }
}

/// A put of tensors of one device must not change the current context of the calling thread.
#[test]
#[ignore = "needs several GPUs"]
fn current_context_of_the_caller_is_preserved() {
    let devices = devices();
    if devices.len() < 2 {
        println!("only one device");
        return;
    }
    let other = Model::new(1);
    let own = Model::new(0);
    let before = cudarc::driver::result::ctx::get_current().unwrap();
    other.write_step(1);
    let store = Store::memory().unwrap();
    let storages = other.storages();
    let options = PutOptions { timeout: Duration::from_secs(5), ..PutOptions::default() };
    store.put_state_dict(&key(), &dict(&storages, true), &options).unwrap();
    assert_eq!(cudarc::driver::result::ctx::get_current().unwrap(), before);
    drop((storages, other));
    assert_eq!(cudarc::driver::result::ctx::get_current().unwrap(), before);
    drop(own);
}

/// Returns the bytes that the fake driver has copied from and to pinned and pageable host memory.
///
/// `None` for a real driver.
fn copied() -> Option<[u64; 2]> {
    type Copied = extern "C" fn(bool) -> u64;
    // SAFETY: the driver is loaded already.
    let library = unsafe { cudarc::driver::sys::culib() };
    // SAFETY: only the fake driver has this symbol, and there it is a function of this type.
    let copied = unsafe { library.get::<Copied>(b"tssd_fake_cuda_copied") }.ok()?;
    Some([copied(true), copied(false)])
}

/// Returns the numbers of created events, of waits, and of copies of the fake driver.
///
/// `None` for a real driver.
fn calls() -> Option<[u64; 3]> {
    type Count = extern "C" fn() -> u64;
    // SAFETY: the driver is loaded already.
    let library = unsafe { cudarc::driver::sys::culib() };
    let count = |name: &[u8]| {
        // SAFETY: only the fake driver has these symbols, and there they are functions of this type.
        let count = unsafe { library.get::<Count>(name) }.ok()?;
        Some(count())
    };
    let names: [&[u8]; 3] =
        [b"tssd_fake_cuda_events", b"tssd_fake_cuda_waits", b"tssd_fake_cuda_copies"];
    let [events, waits, copies] = names.map(count);
    Some([events?, waits?, copies?])
}

#[test]
#[ignore = "needs a GPU"]
fn many_chunks_are_combined_into_few_copies() {
    const LEN: usize = 64 << 20;
    for ordinal in 0..devices().len() {
        let (caller, served) = (DeviceContext::new(ordinal), TestDaemon::new(1 << 30));
        let (store, own) = (served.connect(), caller.allocate(LEN));
        let meta = TensorMeta::new(Dtype::Uint8, &[LEN as u64]).unwrap();
        // Within the device, all chunks are one copy. To the host, copies of 4 MiB overlap with checksums.
        for (residency, max_copies) in [(Residency::Device, 4), (Residency::Host, 20)] {
            caller.write(&own, &pattern(max_copies, LEN));
            let before = calls();
            let mut dict = StateDict::new();
            dict.insert("weight", Tensor::new(meta.clone(), caller.to_storage(&own), 0).unwrap());
            let options = PutOptions { residency, ..PutOptions::default() };
            store.put_state_dict(&key(), &dict, &options).unwrap();
            if let (Some(before), Some(after)) = (before, calls()) {
                let copies = after[2] - before[2];
                assert!(copies <= max_copies, "{residency:?}: {copies} copies");
            }
            let found = store.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
            assert!(bytes_of(&found, "weight") == pattern(max_copies, LEN));
        }
    }
}

/// Each flush waits for the writes enqueued before it, even if the driver reuses event handles.
#[test]
#[ignore = "needs a GPU"]
fn publisher_waits_for_the_stream_at_each_flush() {
    const LEN: usize = 1 << 20;
    for ordinal in 0..devices().len() {
        let (caller, served) = (DeviceContext::new(ordinal), TestDaemon::new(1 << 30));
        let (store, own) = (served.connect(), caller.allocate(LEN));
        for residency in [Residency::Host, Residency::Device] {
            let options = PutOptions { residency, ..PutOptions::default() };
            let mut publisher = store.publish(&key(), &options, 1 << 30).unwrap();
            for part in 0..8 {
                caller.enqueue_delay(&own);
                caller.enqueue_fill(&own, pattern(part, LEN));
                let meta = TensorMeta::new(Dtype::Uint8, &[LEN as u64]).unwrap();
                let tensor = Tensor::new(meta, caller.to_storage(&own), 0).unwrap();
                publisher.add(format!("{part}"), tensor).unwrap();
                publisher.flush().unwrap();
            }
            publisher.finish().unwrap();
            let found = store.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
            for part in 0..8 {
                let found = bytes_of(&found, &format!("{part}"));
                assert!(found == pattern(part, LEN), "{residency:?}: {part}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn many_tensors_share_events_and_waits() {
    const LEN: usize = 4096;
    const TENSORS: u64 = 500;
    for ordinal in 0..devices().len() {
        let caller = DeviceContext::new(ordinal);
        let own: Vec<_> = (0..TENSORS).map(|_| caller.allocate(LEN)).collect();
        let others: Vec<_> = (0..TENSORS).map(|_| caller.allocate(LEN)).collect();
        let served = TestDaemon::new(1 << 30);
        let (store, meta) =
            (served.connect(), TensorMeta::new(Dtype::Uint8, &[LEN as u64]).unwrap());
        for (step, residency) in
            [Residency::Host, Residency::Host, Residency::Device].into_iter().enumerate()
        {
            for (number, allocation) in (0..).zip(&own) {
                caller.enqueue_fill(allocation, pattern(step as u64 * TENSORS + number, LEN));
            }
            let before = calls();
            let mut dict = StateDict::new();
            for (number, storage) in caller.to_storages(&own).into_iter().enumerate() {
                dict.insert(format!("{number}"), Tensor::new(meta.clone(), storage, 0).unwrap());
            }
            let options = PutOptions { residency, ..PutOptions::default() };
            store.put_state_dict(&key(), &dict, &options).unwrap();
            let memories = caller.device_memories(&others);
            let targets = memories.iter().enumerate().map(|(number, memory)| {
                let (fqn, memory) = (format!("{number}"), TargetMemory::Device(memory));
                Target { fqn, shard_spec: None, meta: meta.clone(), memory }
            });
            let mut targets: Vec<Target<'_>> = targets.collect();
            store.get_state_dict_into(&key(), &mut targets, &GetOptions::default()).unwrap();
            if let (Some(before), Some(after)) = (before, calls()) {
                let [events, waits] = [after[0] - before[0], after[1] - before[1]];
                // One event for the put, one for the get, and one for each 4 MiB.
                assert!(events <= 6 && waits <= 8, "{residency:?}: {events} events, {waits} waits");
            }
            drop(targets);
            for (number, allocation) in (0..).zip(&others) {
                assert!(caller.read(allocation) == pattern(step as u64 * TENSORS + number, LEN));
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn daemon_memory_is_pinned() {
    const LEN: usize = 16 << 20;
    for ordinal in 0..devices().len() {
        let caller = DeviceContext::new(ordinal);
        let allocation = caller.allocate(LEN);
        let (served, folder) = (TestDaemon::new(1 << 30), tempfile::tempdir().unwrap());
        let (local, directory) = (served.connect(), Store::directory(folder.path()).unwrap());
        let before = copied();
        let mut expected = [0, 0];
        for step in 0..4 {
            caller.enqueue_fill(&allocation, pattern(step, LEN));
            // The copy of the fill itself.
            expected[1] += LEN as u64;
            let memory = Arc::new(caller.device_memory(&allocation));
            let storage = Storage::from_blob(memory.clone()).unwrap();
            let meta = TensorMeta::new(Dtype::Uint8, &[LEN as u64]).unwrap();
            let mut dict = StateDict::new();
            dict.insert("weight", Tensor::new(meta.clone(), storage, 0).unwrap());
            let is_pinned = step < 3;
            let store = if is_pinned { &local } else { &directory };
            store.put_state_dict(&key(), &dict, &PutOptions::default()).unwrap();
            let target = caller.device_memory(&allocation);
            let into = TargetMemory::Device(&target);
            let wanted = Target { fqn: "weight".to_owned(), shard_spec: None, meta, memory: into };
            store.get_state_dict_into(&key(), &mut [wanted], &GetOptions::default()).unwrap();
            for copied in [memory.stats(), target.stats()] {
                let found = [copied.pinned, copied.pageable];
                assert_eq!(found, if is_pinned { [LEN as u64, 0] } else { [0, LEN as u64] });
                assert_eq!(copied.pageable_reason.is_some(), !is_pinned, "{copied:?}");
            }
            expected[usize::from(!is_pinned)] += 2 * LEN as u64;
        }
        // The counts of the driver are equal.
        if let (Some(before), Some(after)) = (before, copied()) {
            assert_eq!([after[0] - before[0], after[1] - before[1]], expected);
        }
    }
}
