//! Gets into device tensors, in place and in any sharding, from every kind of store.

use std::sync::Arc;

use tssd_format::{Dtype, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice};
use tssd_gpu::DeviceMemory;
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, JobId, PutOptions, Target, TargetMemory};
use tssd_tests::device_context::{Allocation, DeviceContext, devices};
use tssd_tests::test_daemon::TestDaemon;

use crate::{key, pattern};

const ROWS: u64 = 1200;
const COLUMNS: u64 = 1000;

/// Returns the bytes of the matrix of a step: `ROWS` x `COLUMNS` elements of 16 bits.
pub(crate) fn matrix(step: u64) -> Vec<u8> {
    pattern(step, (ROWS * COLUMNS * 2) as usize)
}

/// A region of the matrix: first row, first column, number of rows, number of columns.
pub(crate) type Part = [u64; 4];

/// Returns the bytes of a region of the matrix.
pub(crate) fn region_bytes(matrix: &[u8], [row, column, rows, columns]: Part) -> Vec<u8> {
    let row_bytes = |row: u64| {
        let start = ((row * COLUMNS + column) * 2) as usize;
        matrix[start..start + (columns * 2) as usize].iter().copied()
    };
    (row..row + rows).flat_map(row_bytes).collect()
}

/// Returns the shard spec of a region of the matrix.
pub(crate) fn shard_spec([row, column, rows, columns]: Part) -> ShardSpec {
    let slice = TensorSlice::new(&[row, column], &[rows, columns], &[ROWS, COLUMNS]);
    ShardSpec::new(slice.unwrap())
}

/// Puts the matrix by three writers, each with a third of the rows in host memory.
fn put_rows(stores: &[Store], step: u64) {
    put_rows_from(stores, step, &|bytes| (bytes.into(), PutOptions::default()));
}

/// Puts the matrix by three writers.
///
/// `upload` returns the storage for the bytes of a writer, and its put options.
pub(crate) fn put_rows_from(
    stores: &[Store],
    step: u64,
    upload: &dyn Fn(Vec<u8>) -> (Storage, PutOptions),
) {
    let all = matrix(step);
    std::thread::scope(|scope| {
        for writer in 0..3_u32 {
            let part = [u64::from(writer) * 400, 0, 400, COLUMNS];
            let meta = TensorMeta::new(Dtype::Bfloat16, &part[2..]).unwrap();
            let (storage, options) = upload(region_bytes(&all, part));
            let tensor = Tensor::new(meta, storage, 0).unwrap();
            let mut dict = StateDict::new();
            dict.insert("weight", Shard::new(tensor, shard_spec(part)).unwrap());
            let options = PutOptions {
                writer: Some(writer),
                writers: Some("0-2".parse().unwrap()),
                job: Some(JobId("run".to_owned())),
                version: Some(step),
                ..options
            };
            let store = &stores[writer as usize % stores.len()];
            scope.spawn(move || store.put_state_dict(&key(), &dict, &options).unwrap());
        }
    });
}

/// A device tensor for a region of the matrix. `stride` is the distance of its rows in elements.
pub(crate) struct DeviceTarget {
    pub(crate) part: Part,
    stride: u64,
    pub(crate) allocation: Arc<Allocation>,
    pub(crate) target: DeviceMemory,
}

/// Value of the bytes in the gaps between rows.
const GAP: u8 = 0xA5;

impl DeviceTarget {
    pub(crate) fn new(caller: &DeviceContext, part: Part, stride: u64) -> Self {
        let len = ((part[2] - 1) * stride + part[3]) as usize * 2;
        let allocation = caller.allocate(len);
        // The stream executes this fill, with a delay, after the target is created. The get must wait for it.
        caller.enqueue_delay(&allocation);
        caller.enqueue_fill(&allocation, vec![GAP; len]);
        let target = caller.device_memory(&allocation);
        Self { part, stride, allocation, target }
    }

    pub(crate) fn as_target(&self) -> Target<'_> {
        let meta = TensorMeta::new(Dtype::Bfloat16, &self.part[2..]).unwrap();
        let meta = meta.with_strides(&[self.stride, 1]).unwrap();
        let memory = TargetMemory::Device(&self.target);
        Target { fqn: "weight".to_owned(), shard_spec: Some(shard_spec(self.part)), meta, memory }
    }

    /// Returns the expected bytes after a get of a step.
    pub(crate) fn expected(&self, step: u64) -> Vec<u8> {
        let mut bytes = vec![GAP; self.allocation.len];
        let region = region_bytes(&matrix(step), self.part);
        let row_len = (self.part[3] * 2) as usize;
        for (row, elements) in region.chunks(row_len).enumerate() {
            let start = row * (self.stride * 2) as usize;
            bytes[start..start + row_len].copy_from_slice(elements);
        }
        bytes
    }
}

#[test]
#[ignore = "needs a GPU"]
fn get_fills_device_tensors_in_any_sharding() {
    for ordinal in 0..devices().len() {
        let caller = DeviceContext::new(ordinal);
        let folder = tempfile::tempdir().unwrap();
        let served = TestDaemon::new(1 << 30);
        let (memory, directory) =
            (Store::memory().unwrap(), Store::directory(folder.path()).unwrap());
        let puts = [
            vec![memory.clone()],
            vec![directory.clone()],
            vec![served.connect(), served.connect()],
        ];
        // Each reader, and whether the driver has pinned the memory that it reads from.
        let local = (served.connect(), true);
        let gets = [
            vec![(memory, false)],
            vec![(directory, false)],
            vec![local, (served.connect_tcp(), false)],
        ];
        for (writers, readers) in puts.iter().zip(&gets) {
            for step in 1..4 {
                put_rows(writers, step);
                for (store, is_pinned) in readers {
                    let wanted = [
                        // The part of one writer; of two writers; columns; with gaps; everything; one element.
                        ([400, 0, 400, COLUMNS], COLUMNS),
                        ([300, 0, 500, COLUMNS], COLUMNS),
                        ([0, 500, ROWS, 250], 250),
                        ([100, 10, 700, 100], 128),
                        ([0, 0, ROWS, COLUMNS], COLUMNS),
                        ([1199, 999, 1, 1], 1),
                    ]
                    .map(|(part, stride)| DeviceTarget::new(&caller, part, stride));
                    let mut host = vec![0; 200];
                    let mut targets: Vec<Target<'_>> =
                        wanted.iter().map(DeviceTarget::as_target).collect();
                    // One target in host memory among the device targets.
                    let meta = TensorMeta::new(Dtype::Bfloat16, &[1, 100]).unwrap();
                    let part = [7, 0, 1, 100];
                    let memory = TargetMemory::Host(&mut host);
                    targets.insert(
                        3,
                        Target {
                            fqn: "weight".to_owned(),
                            shard_spec: Some(shard_spec(part)),
                            meta,
                            memory,
                        },
                    );
                    let report = store
                        .get_state_dict_into(&key(), &mut targets, &GetOptions::default())
                        .unwrap();
                    drop(targets);
                    assert_eq!(report.version, step);
                    assert_eq!(report.bytes_needed, report.bytes_transferred);
                    for wanted in &wanted {
                        let found = caller.read(&wanted.allocation);
                        assert!(found == wanted.expected(step), "{:?}, step {step}", wanted.part);
                        // For any strides, no byte is copied through a staging buffer.
                        let copied = wanted.target.stats();
                        let bytes = wanted.part[2] * wanted.part[3] * 2;
                        if *is_pinned {
                            assert_eq!((copied.pinned, copied.pageable), (bytes, 0), "{copied:?}");
                        } else {
                            assert_eq!(copied.pinned, 0, "{copied:?}");
                        }
                    }
                    assert!(host == region_bytes(&matrix(step), part));
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn get_rejects_small_target_before_writing() {
    for ordinal in 0..devices().len() {
        let caller = DeviceContext::new(ordinal);
        let store = Store::memory().unwrap();
        put_rows(std::slice::from_ref(&store), 1);
        let small = caller.allocate(100);
        let target = caller.device_memory(&small);
        let part = [0, 0, 10, 10];
        let meta = TensorMeta::new(Dtype::Bfloat16, &part[2..]).unwrap();
        let memory = TargetMemory::Device(&target);
        let target =
            Target { fqn: "weight".to_owned(), shard_spec: Some(shard_spec(part)), meta, memory };
        let error =
            store.get_state_dict_into(&key(), &mut [target], &GetOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(!error.is_target_modified());
        assert_eq!(caller.read(&small), [0; 100]);
    }
}
