//! Tensors of devices are filled in place, in any sharding, from wherever the version is.

use std::sync::Arc;

use tssd_format::{Dtype, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice};
use tssd_gpu::DeviceMemory;
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, JobId, PutOptions, Target, TargetMemory};
use tssd_tests::caller::{Allocation, DeviceContext, devices};
use tssd_tests::served::TestDaemon;

use crate::{key, pattern};

const ROWS: u64 = 1200;
const COLUMNS: u64 = 1000;

/// The bytes of a matrix of 16-bit elements in a step.
pub(crate) fn matrix(step: u64) -> Vec<u8> {
    pattern(step, (ROWS * COLUMNS * 2) as usize)
}

/// A box of it: first row and column, rows and columns.
pub(crate) type Part = [u64; 4];

pub(crate) fn cut(matrix: &[u8], [row, column, rows, columns]: Part) -> Vec<u8> {
    let line = |at: u64| {
        let start = ((at * COLUMNS + column) * 2) as usize;
        matrix[start..start + (columns * 2) as usize].iter().copied()
    };
    (row..row + rows).flat_map(line).collect()
}

pub(crate) fn place([row, column, rows, columns]: Part) -> ShardSpec {
    let slice = TensorSlice::new(&[row, column], &[rows, columns], &[ROWS, COLUMNS]);
    ShardSpec::new(slice.unwrap())
}

/// Three writers put rows of it, from this process's memory.
fn publish(stores: &[Store], step: u64) {
    publish_from(stores, step, &|bytes| (bytes.into(), PutOptions::default()));
}

/// The same from where the bytes are brought first, and as is said.
pub(crate) fn publish_from(
    stores: &[Store],
    step: u64,
    bring: &dyn Fn(Vec<u8>) -> (Storage, PutOptions),
) {
    let all = matrix(step);
    std::thread::scope(|scope| {
        for writer in 0..3_u32 {
            let part = [u64::from(writer) * 400, 0, 400, COLUMNS];
            let meta = TensorMeta::new(Dtype::Bfloat16, &part[2..]).unwrap();
            let (storage, options) = bring(cut(&all, part));
            let tensor = Tensor::new(meta, storage, 0).unwrap();
            let mut dict = StateDict::new();
            dict.insert("weight", Shard::new(tensor, place(part)).unwrap());
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

/// A tensor of a device that is filled: which part it is, and how far its rows are from each other, in elements.
pub(crate) struct Wanted {
    pub(crate) part: Part,
    stride: u64,
    pub(crate) allocation: Arc<Allocation>,
    pub(crate) target: DeviceMemory,
}

/// What it has where it has no element.
const GAP: u8 = 0xA5;

impl Wanted {
    pub(crate) fn new(caller: &DeviceContext, part: Part, stride: u64) -> Self {
        let len = ((part[2] - 1) * stride + part[3]) as usize * 2;
        let allocation = caller.allocate(len);
        // Written when its target is made already, after other work: what is got comes after it.
        caller.enqueue_delay(&allocation);
        caller.enqueue_fill(&allocation, vec![GAP; len]);
        let target = caller.device_memory(&allocation);
        Self { part, stride, allocation, target }
    }

    pub(crate) fn as_target(&self) -> Target<'_> {
        let meta = TensorMeta::new(Dtype::Bfloat16, &self.part[2..]).unwrap();
        let meta = meta.with_strides(&[self.stride, 1]).unwrap();
        let memory = TargetMemory::Elsewhere(&self.target);
        Target { fqn: "weight".to_owned(), place: Some(place(self.part)), meta, memory }
    }

    pub(crate) fn expected(&self, step: u64) -> Vec<u8> {
        let mut bytes = vec![GAP; self.allocation.len];
        let lines = cut(&matrix(step), self.part);
        let line = (self.part[3] * 2) as usize;
        for (row, elements) in lines.chunks(line).enumerate() {
            let start = row * (self.stride * 2) as usize;
            bytes[start..start + line].copy_from_slice(elements);
        }
        bytes
    }
}

#[test]
#[ignore = "needs a GPU"]
fn tensors_are_filled_in_any_sharding_from_anywhere() {
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
        // Whether what is got lies in memory that the driver has pinned.
        let near = (served.connect(), true);
        let gets = [
            vec![(memory, false)],
            vec![(directory, false)],
            vec![near, (served.connect_tcp(), false)],
        ];
        for (writers, readers) in puts.iter().zip(&gets) {
            for step in 1..4 {
                publish(writers, step);
                for (store, is_pinned) in readers {
                    let wanted = [
                        // As it was put; over two of the parts; columns; with gaps; all of it; one element.
                        ([400, 0, 400, COLUMNS], COLUMNS),
                        ([300, 0, 500, COLUMNS], COLUMNS),
                        ([0, 500, ROWS, 250], 250),
                        ([100, 10, 700, 100], 128),
                        ([0, 0, ROWS, COLUMNS], COLUMNS),
                        ([1199, 999, 1, 1], 1),
                    ]
                    .map(|(part, stride)| Wanted::new(&caller, part, stride));
                    let mut host = vec![0; 200];
                    let mut targets: Vec<Target<'_>> =
                        wanted.iter().map(Wanted::as_target).collect();
                    // One of this process's memory among them.
                    let meta = TensorMeta::new(Dtype::Bfloat16, &[1, 100]).unwrap();
                    let part = [7, 0, 1, 100];
                    let memory = TargetMemory::Here(&mut host);
                    targets.insert(
                        3,
                        Target { fqn: "weight".to_owned(), place: Some(place(part)), meta, memory },
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
                        // Whatever its strides are: no byte went through other memory.
                        let copied = wanted.target.stats();
                        let bytes = wanted.part[2] * wanted.part[3] * 2;
                        if *is_pinned {
                            assert_eq!((copied.pinned, copied.pageable), (bytes, 0), "{copied:?}");
                        } else {
                            assert_eq!(copied.pinned, 0, "{copied:?}");
                        }
                    }
                    assert!(host == cut(&matrix(step), part));
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn what_does_not_fit_is_refused_before_a_byte_is_written() {
    for ordinal in 0..devices().len() {
        let caller = DeviceContext::new(ordinal);
        let store = Store::memory().unwrap();
        publish(std::slice::from_ref(&store), 1);
        let small = caller.allocate(100);
        let target = caller.device_memory(&small);
        let part = [0, 0, 10, 10];
        let meta = TensorMeta::new(Dtype::Bfloat16, &part[2..]).unwrap();
        let memory = TargetMemory::Elsewhere(&target);
        let target = Target { fqn: "weight".to_owned(), place: Some(place(part)), meta, memory };
        let error =
            store.get_state_dict_into(&key(), &mut [target], &GetOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(!error.is_target_modified());
        assert_eq!(caller.read(&small), [0; 100]);
    }
}
