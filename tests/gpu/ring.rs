//! Versions that go to readers of a GPU through a few buckets in its memory.

use std::num::NonZeroU32;
use std::thread;
use std::time::Duration;

use tssd_format::{Dtype, StateDict, Storage, Tensor, TensorMeta};
use tssd_store::{
    Device, DeviceMemory, GetOptions, PutOptions, Residency, Ring, Target, TargetMemory, Transport,
};
use tssd_tests::served::Served;

use crate::caller::{Caller, devices};
use crate::{key, pattern};

/// One that is cut, and some that are not, of other dtypes: each where its elements may be.
const TENSORS: [(&str, Dtype, usize); 5] = [
    ("bias", Dtype::Float8E4m3fn, 1001),
    ("weight", Dtype::Bfloat16, 5_000_002),
    ("scale", Dtype::Float32, 4000),
    ("packed", Dtype::Uint8, 777_777),
    ("zero", Dtype::Float64, 800_000),
];

const SOON: Duration = Duration::from_secs(60);

fn meta(dtype: Dtype, len: usize) -> TensorMeta {
    TensorMeta::new(dtype, &[len as u64 / dtype.itemsize()]).unwrap()
}

/// Each version comes whole, in the memory of two buckets; the caller may change its tensors as soon as the put returns.
#[test]
#[ignore = "needs a GPU"]
fn versions_go_through_the_memory_of_two_buckets() {
    if std::env::var_os("TSSD_FAKE_CUDA_NO_VMM").is_some() {
        return;
    }
    for (ordinal, device) in devices().into_iter().enumerate() {
        let served = Served::new(64 << 20);
        let (writer, status) = (served.connect(), served.connect());
        let buckets = NonZeroU32::new(2).unwrap();
        let ring = Ring { bucket_bytes: 1 << 20, buckets, readers: 2 };
        let options = PutOptions {
            residency: Residency::Ring(ring),
            require: Some(Transport::CudaIpc),
            timeout: SOON,
            ..PutOptions::default()
        };
        thread::scope(|scope| {
            for _ in 0..2 {
                let (reader, device) = (served.connect(), &device);
                scope.spawn(move || read(&reader, (ordinal, device)));
            }
            let caller = Caller::new(ordinal);
            let tensors = TENSORS.map(|(name, dtype, len)| (name, dtype, caller.allocate(len)));
            let mut used = None;
            for version in VERSIONS {
                let mut dict = StateDict::new();
                for (at, (name, dtype, allocation)) in (0..).zip(&tensors) {
                    caller.stall(allocation);
                    caller.fill(allocation, pattern(version * 10 + at, allocation.len));
                    let memory = std::sync::Arc::new(caller.memory(allocation));
                    let storage = Storage::elsewhere(memory).unwrap();
                    let tensor = Tensor::new(meta(*dtype, allocation.len), storage, 0).unwrap();
                    dict.insert(*name, tensor);
                }
                let report = writer.put_state_dict(&key(), &dict, &options).unwrap();
                assert_eq!((report.version, report.transport), (version, Transport::CudaIpc));
                for (_, _, allocation) in &tensors {
                    caller.fill(allocation, vec![0xFF; allocation.len]);
                }
                let memory = status.status().unwrap().memory;
                if version > 2 {
                    assert_eq!(*used.get_or_insert(memory.devices), memory.devices, "{version}");
                    assert!(memory.devices <= 2 * (2 << 20), "{memory:?}");
                }
            }
        });
    }
}

const VERSIONS: std::ops::RangeInclusive<u64> = 1..=6;

fn read(reader: &tssd_store::blocking::Store, (ordinal, device): (usize, &Device)) {
    let caller = Caller::new(ordinal);
    let mut receiver = reader.receiver(&key(), Some(&device.uuid())).unwrap();
    for version in VERSIONS {
        let tensors = TENSORS.map(|(name, dtype, len)| (name, dtype, caller.allocate(len)));
        let memories: Vec<DeviceMemory> =
            tensors.iter().map(|(_, _, allocation)| caller.memory(allocation)).collect();
        let targets = tensors.iter().zip(&memories).map(|((name, dtype, allocation), memory)| {
            let (fqn, meta) = ((*name).to_owned(), meta(*dtype, allocation.len));
            Target { fqn, place: None, meta, memory: TargetMemory::Elsewhere(memory) }
        });
        let mut targets: Vec<Target<'_>> = targets.collect();
        let report = receiver.receive(&mut targets, &GetOptions::default(), SOON).unwrap();
        assert_eq!((report.version, report.transport), (version, Transport::CudaIpc));
        for (at, ((name, _, allocation), memory)) in (0..).zip(tensors.iter().zip(&memories)) {
            let expected = pattern(version * 10 + at, allocation.len);
            assert!(caller.read(allocation) == expected, "{name} of version {version}");
            assert_eq!(memory.copied().device, allocation.len as u64);
        }
    }
}
