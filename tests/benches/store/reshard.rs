//! Resharding: ranks put shards, and other ranks get shards of another layout, all in parallel.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use tssd_format::{
    DeviceMesh, Dtype, Placement, Shard, ShardSpec, StateDict, Storage, Tensor, TensorSlice,
};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, JobId, PutOptions, Target as Wanted, TargetMemory};
use tssd_tests::bench::{Bench, CopyBuffers, Race, Runner, run_on_cores};
use tssd_tests::sharding::local_meta;
use tssd_tests::test_daemon::TestDaemon;

use crate::copies::LIMIT;
use crate::key;

const DTYPE: Dtype = Dtype::Bfloat16;

/// Number of matrices, of about 16 MiB each.
const TENSORS: u32 = 16;

/// How a global tensor is sharded.
pub(crate) struct Layout {
    mesh: DeviceMesh,
    placements: Vec<Placement>,
}

impl Layout {
    pub(crate) fn new(mesh: &[u64], placements: Vec<Placement>) -> Self {
        Self { mesh: DeviceMesh::from_shape(mesh).unwrap(), placements }
    }

    fn ranks(&self) -> u32 {
        u32::try_from(self.mesh.shape().iter().product::<u64>()).unwrap()
    }

    /// Returns the shard of a rank.
    fn place(&self, shape: &[u64], rank: u32) -> ShardSpec {
        let slices = TensorSlice::from_placements(shape, &self.mesh, rank, &self.placements);
        let place = ShardSpec::new(slices.unwrap().remove(0)).with_mesh(self.mesh.clone()).unwrap();
        place.with_placements(self.placements.clone()).unwrap()
    }
}

pub(crate) fn all(bench: &mut Bench) {
    let rows = || Placement::Shard { dim: 0 };
    let columns = || Placement::Shard { dim: 1 };
    for (name, shape, writers, readers) in [
        (
            "FSDP 4 to TP 2",
            [4096, 2048],
            Layout::new(&[4], vec![rows()]),
            Layout::new(&[2], vec![columns()]),
        ),
        (
            "HSDP 2 x 2 to TP 2",
            [4096, 2048],
            Layout::new(&[2, 2], vec![Placement::Replicate, rows()]),
            Layout::new(&[2], vec![columns()]),
        ),
        (
            "8 to 3, uneven",
            [4100, 2047],
            Layout::new(&[8], vec![rows()]),
            Layout::new(&[3], vec![rows()]),
        ),
    ] {
        run_on_cores(2, || race(bench, name, &shape, &writers, &readers));
    }
}

fn race(bench: &mut Bench, name: &str, shape: &[u64], writers: &Layout, readers: &Layout) {
    let served = TestDaemon::new(LIMIT);
    let writer_ranks = Writers::new(&served, shape, writers);
    let reader_ranks = RefCell::new(Readers::new(&served, shape, readers));
    (0..3).for_each(|_| {
        writer_ranks.put();
        reader_ranks.borrow_mut().get();
    });
    let bytes = reader_ranks.borrow().bytes();
    let mut memory = CopyBuffers::new(bytes);
    let case = format!("put shards, {name}");
    bench.race(
        Race::new(&case, "all ranks at once, 2 cores", 9)
            .with_bytes(bytes)
            .with_runner(Runner::ours("tssd", || writer_ranks.put()))
            .with_runner(Runner::limit("memcpy", || memory.copy(2))),
    );
    let case = format!("reshard, {name}");
    bench.race(
        Race::new(&case, "all ranks get in place at once, verified, 2 cores", 9)
            .with_bytes(bytes)
            .with_runner(
                Runner::ours("tssd", || {
                    reader_ranks.borrow_mut().get();
                })
                .with_setup(|| writer_ranks.put()),
            )
            .with_runner(Runner::limit("memcpy", || memory.copy(2))),
    );
    reader_ranks.borrow().check(shape, readers);
}

/// Ranks that write, each with its own connection.
pub(crate) struct Writers {
    ranks: Vec<(Store, StateDict)>,
    step: AtomicU64,
}

impl Writers {
    pub(crate) fn new(served: &TestDaemon, shape: &[u64], layout: &Layout) -> Self {
        let rank = |rank| (served.connect(), shards(shape, layout, rank));
        Self { ranks: (0..layout.ranks()).map(rank).collect(), step: AtomicU64::new(0) }
    }

    /// Puts the next version, with all ranks in parallel.
    pub(crate) fn put(&self) {
        let step = self.step.fetch_add(1, Ordering::Relaxed) + 1;
        thread::scope(|scope| {
            for (rank, (store, dict)) in (0..).zip(&self.ranks) {
                let options = PutOptions {
                    version: Some(step),
                    writer: Some(rank),
                    job: Some(JobId("bench".into())),
                    ..PutOptions::default()
                };
                scope.spawn(move || store.put_state_dict(&key(), dict, &options).unwrap());
            }
        });
    }
}

fn shards(shape: &[u64], layout: &Layout, rank: u32) -> StateDict {
    let place = layout.place(shape, rank);
    let mut dict = StateDict::new();
    for number in 0..TENSORS {
        let bytes = elements(shape, &place, number);
        let tensor = Tensor::new(local_meta(DTYPE, &place), Storage::from(bytes), 0).unwrap();
        dict.insert(format!("layers.{number}"), Shard::new(tensor, place.clone()).unwrap());
    }
    dict
}

/// Returns elements that depend on their position in the global tensor.
fn elements(shape: &[u64], place: &ShardSpec, number: u32) -> Vec<u8> {
    let region = place.slice().region();
    let mut bytes = Vec::with_capacity(usize::try_from(local_meta(DTYPE, place).nbytes()).unwrap());
    for row in region.offsets()[0]..region.offsets()[0] + region.shape()[0] {
        for column in region.offsets()[1]..region.offsets()[1] + region.shape()[1] {
            let element = (row * shape[1] + column).wrapping_mul(0x9E37_79B9) + u64::from(number);
            bytes.extend_from_slice(&element.to_le_bytes()[..2]);
        }
    }
    bytes
}

/// Ranks that read into their own memory, each with its own connection.
pub(crate) struct Readers {
    ranks: Vec<(Store, ShardSpec, Vec<u8>)>,
}

impl Readers {
    pub(crate) fn new(served: &TestDaemon, shape: &[u64], layout: &Layout) -> Self {
        let rank = |rank| {
            let place = layout.place(shape, rank);
            let len =
                usize::try_from(local_meta(DTYPE, &place).nbytes() * u64::from(TENSORS)).unwrap();
            (served.connect(), place, vec![0_u8; len])
        };
        Self { ranks: (0..layout.ranks()).map(rank).collect() }
    }

    fn bytes(&self) -> u64 {
        self.ranks.iter().map(|(.., memory)| memory.len() as u64).sum()
    }

    /// Gets the newest version, with all ranks in parallel.
    pub(crate) fn get(&mut self) {
        thread::scope(|scope| {
            for (store, place, memory) in &mut self.ranks {
                scope.spawn(move || {
                    let mut targets = layer_targets(place, memory);
                    let options = GetOptions::default();
                    let report = store.get_state_dict_into(&key(), &mut targets, &options).unwrap();
                    assert_eq!(report.bytes_transferred, report.bytes_needed);
                });
            }
        });
    }

    /// Compares the results of the last get with the elements that were put.
    pub(crate) fn check(&self, shape: &[u64], layout: &Layout) {
        for (rank, (_, place, memory)) in (0..).zip(&self.ranks) {
            assert_eq!(place, &layout.place(shape, rank));
            let len = usize::try_from(local_meta(DTYPE, place).nbytes()).unwrap();
            for (number, bytes) in (0..TENSORS).zip(memory.chunks(len)) {
                assert!(bytes == elements(shape, place, number), "layers.{number} of {rank}");
            }
        }
    }
}

/// Returns targets for the same shard of each matrix, consecutive in memory.
pub(crate) fn layer_targets<'a>(place: &ShardSpec, memory: &'a mut [u8]) -> Vec<Wanted<'a>> {
    let meta = local_meta(DTYPE, place);
    let len = usize::try_from(meta.nbytes()).unwrap();
    let target = |(number, bytes)| Wanted {
        fqn: format!("layers.{number}"),
        shard_spec: Some(place.clone()),
        meta: meta.clone(),
        memory: TargetMemory::Host(bytes),
    };
    memory.chunks_mut(len).enumerate().map(target).collect()
}
