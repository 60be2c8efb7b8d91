//! One round of the demo: all versions in one store.

use std::thread;
use std::time::Instant;

use indicatif::ProgressBar;
use tssd_format::{Runs, ShardSpec, StateDict, Tensor, TensorMeta, Value};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, JobId, Key, PutOptions, Target};

use crate::demo::shard::{self, GENERATORS, TRAINERS};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::store::store_failure;

/// Measurements of one operation, over all versions.
#[derive(Debug, Default)]
pub(super) struct Measurement {
    pub(super) operation: String,
    pub(super) tensors: usize,
    /// Bytes of one version.
    pub(super) bytes: u64,
    /// Duration for each version.
    pub(super) all_seconds: Vec<f64>,
    pub(super) bytes_transferred: u64,
    pub(super) bytes_needed: u64,
    /// Numbers of the versions that were put or read.
    pub(super) versions: Vec<u64>,
    /// Number of bytes that were compared with the source.
    pub(super) bytes_compared: u64,
    /// Descriptions of the differences from the source.
    pub(super) mismatches: Vec<String>,
}

impl Measurement {
    fn new(operation: impl Into<String>, tensors: usize) -> Self {
        Self { operation: operation.into(), tensors, ..Self::default() }
    }

    /// Returns the median duration, because the first version runs on cold memory.
    pub(super) fn seconds(&self) -> f64 {
        let mut seconds = self.all_seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied().unwrap_or_default()
    }

    /// Returns the bytes transferred per byte needed, or `None` for a put.
    #[expect(clippy::cast_precision_loss, reason = "three digits of it are shown")]
    pub(super) fn ratio(&self) -> Option<f64> {
        (self.bytes_needed > 0).then(|| self.bytes_transferred as f64 / self.bytes_needed as f64)
    }
}

/// A store, with the whole state dict of each version.
pub(super) struct Round<'a> {
    store: &'a Store,
    sources: &'a [StateDict],
    spinner: &'a ProgressBar,
    key: Key,
}

/// A generator with its target tensors, which are allocated once and reused for every version.
struct Generator {
    targets: Vec<TargetTensor>,
    measurement: Measurement,
}

struct TargetTensor {
    fqn: String,
    place: Option<ShardSpec>,
    meta: TensorMeta,
    memory: Vec<u8>,
}

impl TargetTensor {
    fn as_target(&mut self) -> Target<'_> {
        Target {
            fqn: self.fqn.clone(),
            shard_spec: self.place.clone(),
            meta: self.meta.clone(),
            memory: (&mut self.memory).into(),
        }
    }
}

impl<'a> Round<'a> {
    pub(super) fn new(
        store: &'a Store,
        sources: &'a [StateDict],
        spinner: &'a ProgressBar,
    ) -> Self {
        let key = Key::new("demo/policy").expect("a key like any other");
        Self { store, sources, spinner, key }
    }

    /// Puts and gets one version after the other.
    pub(super) fn run(self) -> Result<Vec<Measurement>> {
        let [first, ..] = self.sources else { return Ok(Vec::new()) };
        let tensors = tensors_of(first);
        let mut put = Measurement::new(format!("put, {TRAINERS} trainers"), tensors.len());
        let mut whole = Measurement::new("get, whole", tensors.len());
        let mut generators: Vec<Generator> =
            (0..GENERATORS).map(|rank| Generator::new(&tensors, rank)).collect::<Result<_>>()?;
        for (number, source) in (1..).zip(self.sources) {
            let set_status =
                |status: &str| self.spinner.set_message(format!("version {number}: {status}"));
            set_status("put");
            self.put(source, number, &mut put)?;
            set_status("get, sharded");
            self.get_shards(source, number, &mut generators)?;
            set_status("get, whole");
            self.get_whole(source, number, &mut whole)?;
        }
        let mut measurements = vec![put];
        measurements.extend(generators.into_iter().map(|generator| generator.measurement));
        measurements.push(whole);
        Ok(measurements)
    }

    /// Puts a version: all trainers put their shards concurrently.
    fn put(&self, source: &StateDict, number: u64, measurement: &mut Measurement) -> Result<()> {
        let shards = (0..TRAINERS).map(|rank| shard::trainer_shards(source, rank));
        let shards: Vec<StateDict> =
            shards.collect::<tssd_format::Result<_>>().map_err(format_failure)?;
        let put = |rank: u32, dict: &StateDict| {
            let options = PutOptions {
                version: Some(number),
                writer: Some(rank),
                job: Some(JobId("demo".into())),
                ..PutOptions::default()
            };
            self.store.put_state_dict(&self.key, dict, &options)
        };
        let started = Instant::now();
        let reports = thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(&shards)
                .map(|(rank, dict)| scope.spawn(move || put(rank, dict)))
                .collect();
            threads.into_iter().map(join_thread).collect::<Result<Vec<_>, _>>()
        });
        let reports = reports.map_err(|error| store_failure(&error))?;
        measurement.all_seconds.push(started.elapsed().as_secs_f64());
        measurement.bytes = reports.iter().map(|report| report.bytes).sum();
        measurement.versions.push(number);
        let visible = reports.iter().filter(|report| report.visible).count();
        if visible == 0 || reports.iter().any(|report| report.version != number) {
            measurement.mismatches.push(format!("version {number} did not become visible"));
        }
        Ok(())
    }

    /// Gets a version: all generators get their shards concurrently, into their own memory.
    fn get_shards(
        &self,
        source: &StateDict,
        number: u64,
        generators: &mut [Generator],
    ) -> Result<()> {
        let result: Result<(), _> = thread::scope(|scope| {
            let spawn = |each| scope.spawn(|| Generator::get_shards(each, self.store, &self.key));
            let threads: Vec<_> = generators.iter_mut().map(spawn).collect();
            threads.into_iter().try_for_each(join_thread)
        });
        result.map_err(|error| store_failure(&error))?;
        self.spinner.set_message(format!("version {number}: comparing"));
        generators
            .iter_mut()
            .try_for_each(|each| each.compare(source, number))
            .map_err(format_failure)
    }

    fn get_whole(
        &self,
        source: &StateDict,
        number: u64,
        measurement: &mut Measurement,
    ) -> Result<()> {
        let started = Instant::now();
        let (dict, report) = self
            .store
            .get_state_dict(&self.key, &GetOptions::default())
            .map_err(|error| store_failure(&error))?;
        measurement.all_seconds.push(started.elapsed().as_secs_f64());
        measurement.bytes = report.bytes_transferred;
        measurement.bytes_transferred += report.bytes_transferred;
        measurement.bytes_needed += report.bytes_needed;
        measurement.versions.push(report.version);
        measurement.bytes_compared += report.bytes_transferred;
        if report.version != number {
            let found = report.version;
            measurement.mismatches.push(format!("version {number} was put, {found} was read"));
        } else if dict != *source {
            measurement
                .mismatches
                .push(format!("version {number}, whole: {}", first_difference(&dict, source)));
        }
        Ok(())
    }
}

impl Generator {
    fn new(tensors: &[(String, &Tensor)], rank: u32) -> Result<Self> {
        let mut targets = Vec::new();
        for (fqn, tensor) in tensors {
            if !fqn.starts_with("model.") {
                continue;
            }
            let (dtype, shape) = (tensor.meta().dtype(), tensor.meta().shape());
            let place = shard::generator_place(fqn, shape, rank).map_err(format_failure)?;
            let local = place.as_ref().map_or(shape, |place| place.slice().local_shape());
            let meta = TensorMeta::new(dtype, local).map_err(format_failure)?;
            let memory = vec![0; usize::try_from(meta.nbytes()).unwrap_or(usize::MAX)];
            targets.push(TargetTensor { fqn: fqn.clone(), place, meta, memory });
        }
        let operation = format!("get, generator {rank} of {GENERATORS}");
        let measurement = Measurement::new(operation, targets.len());
        Ok(Self { targets, measurement })
    }

    fn get_shards(&mut self, store: &Store, key: &Key) -> Result<(), tssd_store::Error> {
        let mut targets: Vec<Target<'_>> =
            self.targets.iter_mut().map(TargetTensor::as_target).collect();
        let started = Instant::now();
        let report = store.get_state_dict_into(key, &mut targets, &GetOptions::default())?;
        let measurement = &mut self.measurement;
        measurement.all_seconds.push(started.elapsed().as_secs_f64());
        measurement.bytes = report.bytes_needed;
        measurement.bytes_transferred += report.bytes_transferred;
        measurement.bytes_needed += report.bytes_needed;
        measurement.versions.push(report.version);
        Ok(())
    }

    /// Compares every byte with the source, then overwrites the memory.
    ///
    /// Without that, a get that writes nothing could pass with the bytes of the previous version.
    fn compare(&mut self, source: &StateDict, number: u64) -> tssd_format::Result<()> {
        if self.measurement.versions.last() != Some(&number) {
            let found = self.measurement.versions.last();
            let mismatch = format!("version {number} was put, {found:?} was read");
            self.measurement.mismatches.push(mismatch);
        }
        let tensors = tensors_of(source).into_iter().filter(|(fqn, _)| fqn.starts_with("model."));
        for (target, (fqn, tensor)) in self.targets.iter_mut().zip(tensors) {
            let expected = match &target.place {
                Some(place) => shard::slice_tensor(tensor, place.slice().region())?,
                None => tensor.clone(),
            };
            if target.fqn != fqn || !memory_equals(&target.memory, &expected) {
                let region = target.place.as_ref().map(|place| place.slice().region().to_string());
                let region = region.unwrap_or_default();
                self.measurement
                    .mismatches
                    .push(format!("version {number}: {}{region}", target.fqn));
            }
            self.measurement.bytes_compared += target.meta.nbytes();
            target.memory.fill(0xA5);
        }
        Ok(())
    }
}

/// Returns whether the memory has the elements of the tensor in row-major order.
fn memory_equals(memory: &[u8], tensor: &Tensor) -> bool {
    let (meta, view) = (tensor.meta(), tensor.view());
    let to_usize = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    let mut equal = to_usize(meta.nbytes()) == memory.len();
    Runs::to_row_major(meta.dtype().itemsize(), meta.shape(), &meta.strides()).for_each(
        |source, target, run| {
            equal = equal
                && view.span()[to_usize(source)..][..to_usize(run)]
                    == memory[to_usize(target)..][..to_usize(run)];
        },
    );
    equal
}

/// Returns all tensors of a state dict with their fqns.
fn tensors_of(dict: &StateDict) -> Vec<(String, &Tensor)> {
    let leaves = dict.leaves().into_iter();
    let tensors = leaves.filter_map(|(path, leaf)| match leaf {
        Value::Tensor(tensor) => Some((path.fqn(), tensor)),
        _ => None,
    });
    tensors.collect()
}

/// Returns the fqn of the first leaf that differs between two state dicts.
fn first_difference(dict: &StateDict, source: &StateDict) -> String {
    let (leaves, sources) = (dict.leaves(), source.leaves());
    let differing = leaves.iter().zip(&sources).find(|(leaf, source)| leaf != source);
    differing.map_or_else(|| "another structure".into(), |((path, _), _)| path.fqn())
}

fn join_thread<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn format_failure(error: tssd_format::Error) -> Failure {
    Failure::new(Exit::Refused, error)
}

#[cfg(test)]
mod tests {
    use super::memory_equals;
    use crate::demo::shard::{generator_place, slice_tensor};
    use tssd_format::Tensor;

    /// Checks that the comparison can fail.
    #[test]
    fn memory_equals_rejects_one_wrong_byte() {
        let elements: Vec<u8> = (0..24).collect();
        let tensor = Tensor::from_slice(&elements, &[4, 6]).unwrap();
        let place = generator_place("layers.0.mlp.down_proj.weight", &[4, 6], 1).unwrap().unwrap();
        let columns = slice_tensor(&tensor, place.slice().region()).unwrap();
        let mut memory = vec![3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23];
        assert!(memory_equals(&memory, &columns));
        memory[7] ^= 1;
        assert!(!memory_equals(&memory, &columns));
        assert!(!memory_equals(&memory[1..], &columns));
    }
}
