//! Versions that go to other hosts as differences from earlier versions.

use tssd_format::{Dtype, Region, StateDict, Storage, Tensor, TensorMeta};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, PrefetchReport, PutOptions};
use tssd_tests::rng::SeededRng;
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::{key, wait_until};

const MIB: u64 = 1 << 20;
const ROWS: u64 = 2048;
const COLUMNS: u64 = 2048;
pub(crate) const TENSOR_BYTES: u64 = 2 * ROWS * COLUMNS;

/// The bf16 tensors of a model in training.
pub(crate) struct Model {
    tensors: Vec<Vec<u8>>,
    rng: SeededRng,
}

impl Model {
    pub(crate) fn new(tensors: usize) -> Self {
        let mut rng = SeededRng::new(7);
        let mut tensor = || {
            let elements = (0..ROWS * COLUMNS).map(|_| 0x3c00 + rng.below(0x300) as u16);
            elements.flat_map(u16::to_le_bytes).collect()
        };
        let tensors = (0..tensors).map(|_| tensor()).collect();
        Self { tensors, rng }
    }

    /// Changes one element in `interval`, by one unit in the last place.
    pub(crate) fn step(&mut self, interval: u64) {
        for tensor in &mut self.tensors {
            for _ in 0..ROWS * COLUMNS / interval {
                let at = 2 * self.rng.below(ROWS * COLUMNS) as usize;
                tensor[at] = tensor[at].wrapping_add(1);
            }
        }
    }

    /// Changes every element.
    pub(crate) fn change_all(&mut self) {
        self.tensors.iter_mut().flatten().for_each(|byte| *byte = byte.wrapping_mul(77) ^ 0x5a);
    }

    pub(crate) fn dict(&self) -> StateDict {
        let mut dict = StateDict::new();
        for (number, tensor) in self.tensors.iter().enumerate() {
            let meta = TensorMeta::new(Dtype::Bfloat16, &[ROWS, COLUMNS]).unwrap();
            let tensor = Tensor::new(meta, Storage::from(tensor.clone()), 0).unwrap();
            dict.insert(format!("weight{number}"), tensor);
        }
        dict
    }

    fn put(&self, store: &Store) -> u64 {
        store.put_state_dict(&key(), &self.dict(), &PutOptions::default()).unwrap().version
    }

    pub(crate) fn check(&self, store: &Store) {
        let (dict, _) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
        assert!(dict == self.dict(), "another version was read");
    }

    /// Reads half of the columns of all tensors.
    pub(crate) fn check_half(&self, store: &Store, rank: u64) {
        let region = Region::new(&[0, rank * COLUMNS / 2], &[ROWS, COLUMNS / 2]).unwrap();
        for (number, tensor) in self.tensors.iter().enumerate() {
            let name = format!("weight{number}");
            let found = store.get_slice(&key(), &name, &region, &GetOptions::default()).unwrap();
            let found = found.view().to_contiguous(u64::MAX).unwrap();
            let row = |row: &[u8]| row[(rank * COLUMNS) as usize..][..COLUMNS as usize].to_vec();
            let rows = tensor.chunks(2 * COLUMNS as usize);
            assert!(found == rows.flat_map(row).collect::<Vec<u8>>(), "{name}");
        }
    }
}

/// The host of a trainer, and one that reads.
struct Hosts {
    trainer: Store,
    reader: Store,
    generator: TestDaemon,
    _controller: TestDaemon,
}

impl Hosts {
    fn start(memory_limit: u64) -> Self {
        let controller = TestDaemon::new(memory_limit);
        let generator = TestDaemon::with_controller(&controller);
        let (trainer, reader) = (controller.connect(), generator.connect());
        Self { trainer, reader, generator, _controller: controller }
    }
}

fn controller_with_generators(count: usize) -> (TestDaemon, Vec<TestDaemon>) {
    let controller = TestDaemon::new(1 << 30);
    let generators = (0..count).map(|_| TestDaemon::with_controller(&controller)).collect();
    (controller, generators)
}

fn fetch(reader: &Store) -> PrefetchReport {
    reader.prefetch(&key(), &[], &GetOptions::default()).unwrap()
}

#[expect(clippy::cast_sign_loss, reason = "it is a count")]
fn moved(host: &TestDaemon) -> u64 {
    host.metric("tssd_fetched_bytes_total{source=\"origin\"}") as u64
}

/// Runs an action, and returns how many bytes a host has fetched meanwhile.
fn moved_by(host: &TestDaemon, action: impl FnOnce()) -> u64 {
    let before = moved(host);
    action();
    moved(host) - before
}

#[test]
fn prefetch_moves_difference_from_earlier_version() {
    let Hosts { generator, trainer, reader, .. } = &Hosts::start(1 << 30);
    let mut model = Model::new(3);
    let size = 3 * TENSOR_BYTES;
    for number in 1..=5 {
        model.put(trainer);
        let before = moved(generator);
        let report = fetch(reader);
        let bytes = moved(generator) - before;
        if number <= 2 {
            // The trainer's host has no earlier version before another host has asked for one.
            assert!(bytes >= size / 2, "{number}: {bytes}");
            assert_eq!((report.bytes, report.base), (bytes, None));
        } else {
            assert!(bytes < size / 50, "{number}: {bytes} of {size}");
            assert_eq!((report.bytes, report.base), (bytes, Some(number - 1)));
            assert!(report.size >= size);
        }
        model.check(reader);
        model.step(100);
    }
    // Both hosts have the version only. The trainer's host has the differences from the versions before.
    for store in [trainer, reader] {
        wait_until("the base is freed", || store.status().unwrap().memory.retained_bytes == 0);
    }
    let memory = trainer.status().unwrap().memory;
    assert!((1..size / 20).contains(&memory.delta_bytes), "{memory:?}");
}

/// Hosts that read only some of the versions get the difference all the same.
#[test]
fn hosts_that_skip_versions_get_difference() {
    let (controller, generators) = controller_with_generators(3);
    let trainer = controller.connect();
    let readers: Vec<Store> = generators.iter().map(TestDaemon::connect).collect();
    let mut model = Model::new(2);
    let size = 2 * TENSOR_BYTES;
    for number in 1..=12 {
        model.put(&trainer);
        wait_until("the version before is freed", || {
            trainer.status().unwrap().memory.retained_bytes == 0
        });
        // The first host reads every version, the others every fourth one.
        if number <= 2 || number % 4 == 0 {
            let report = fetch(&readers[1]);
            let limit = if number <= 4 { size } else { size / 10 };
            assert!(report.bytes <= limit + MIB, "{number}: {report:?}");
            assert!(number <= 4 || report.base == Some(number - 4), "{number}: {report:?}");
            model.check(&readers[1]);
            let bytes = moved_by(&generators[2], || model.check_half(&readers[2], 1));
            assert!(bytes <= limit / 2 + MIB, "{number}: {bytes}");
        }
        let report = fetch(&readers[0]);
        assert!(number <= 2 || report.bytes < size / 20, "{number}: {report:?}");
        model.check(&readers[0]);
        model.step(200);
    }
}

#[test]
fn box_moves_its_difference_only() {
    let (controller, generators) = controller_with_generators(2);
    let trainer = controller.connect();
    let readers: Vec<Store> = generators.iter().map(TestDaemon::connect).collect();
    let mut model = Model::new(2);
    for number in 1..=4 {
        model.put(&trainer);
        for (rank, (generator, reader)) in generators.iter().zip(&readers).enumerate() {
            let bytes = moved_by(generator, || model.check_half(reader, rank as u64));
            if number > 2 {
                assert!(bytes < TENSOR_BYTES / 50, "{number}: {bytes}");
            } else {
                // In byte planes, if the network is slow.
                assert!(
                    (TENSOR_BYTES / 2..TENSOR_BYTES + MIB).contains(&bytes),
                    "{number}: {bytes}"
                );
            }
        }
        model.step(100);
    }
}

#[test]
fn hosts_pass_differences_on() {
    let (controller, generators) = controller_with_generators(4);
    let trainer = controller.connect();
    let readers: Vec<Store> = generators.iter().map(TestDaemon::connect).collect();
    let mut model = Model::new(2);
    for number in 1..=4 {
        model.put(&trainer);
        std::thread::scope(|scope| {
            for reader in &readers {
                scope.spawn(|| {
                    let report = fetch(reader);
                    let is_whole = number <= 2;
                    assert!(is_whole || report.bytes < TENSOR_BYTES / 10, "{number}: {report:?}");
                });
            }
        });
        for reader in &readers {
            model.check(reader);
        }
        model.step(100);
    }
}

/// A put that needs the memory of a retained archive gets it.
#[test]
fn put_gets_memory_of_retained_archives() {
    let Hosts { trainer, reader, .. } = &Hosts::start(3 * TENSOR_BYTES + 8 * MIB);
    let mut model = Model::new(1);
    for _ in 0..3 {
        model.step(100);
        model.put(trainer);
        fetch(reader);
    }
    let other = Model::new(2);
    let other_key = tssd_store::Key::new("other").unwrap();
    trainer.put_state_dict(&other_key, &other.dict(), &PutOptions::default()).unwrap();
    assert_eq!(trainer.status().unwrap().memory.retained_bytes, 0);
    model.check(reader);
    trainer.delete(&other_key, None).unwrap();
    model.step(100);
    model.put(trainer);
    let report = fetch(reader);
    assert_eq!(report.base, Some(3), "the version before was still there: {report:?}");
    model.check(reader);
}

#[test]
fn changed_model_moves_whole() {
    let Hosts { generator, trainer, reader, .. } = &Hosts::start(1 << 30);
    let mut model = Model::new(2);
    for _ in 0..3 {
        model.put(trainer);
        fetch(reader);
        model.step(100);
    }
    model.change_all();
    model.put(trainer);
    let report = fetch(reader);
    assert!(report.bytes > TENSOR_BYTES, "{report:?}");
    model.check(reader);
    // Another number of tensors: no archive is like the new one.
    let model = Model::new(3);
    model.put(trainer);
    let bytes = moved_by(generator, || {
        fetch(reader);
    });
    assert!(bytes >= 3 * TENSOR_BYTES / 2);
    model.check(reader);
}

#[test]
fn hosts_without_deltas_fetch_whole_versions() {
    let controller = TestDaemon::new(1 << 30);
    let generator = TestDaemon::with_options(1 << 30, |options| {
        options.controller = Some(controller.address().to_owned());
        options.deltas = false;
    });
    let (trainer, reader) = (controller.connect(), generator.connect());
    let mut model = Model::new(1);
    for _ in 0..3 {
        model.put(&trainer);
        let bytes = moved_by(&generator, || {
            fetch(&reader);
        });
        assert!(bytes >= TENSOR_BYTES, "{bytes}");
        model.step(100);
    }
    assert_eq!(trainer.status().unwrap().memory.retained_bytes, 0);
}
