//! One round of the demo: all versions through one store.

use std::thread;
use std::time::Instant;

use indicatif::ProgressBar;
use tssd_format::{Runs, ShardPlace, StateDict, Tensor, TensorMeta, Value};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, JobId, Key, PutOptions, Target};

use crate::demo::shard::{self, GENERATORS, TRAINERS};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::store::failure;

/// What one party did with every version.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) operation: String,
    pub(super) tensors: usize,
    /// Bytes of one version.
    pub(super) bytes: u64,
    /// One figure per version.
    pub(super) all_seconds: Vec<f64>,
    pub(super) transferred: u64,
    pub(super) needed: u64,
    /// The numbers that the store gave to what was put or read.
    pub(super) versions: Vec<u64>,
    /// Bytes that were compared with the source.
    pub(super) compared: u64,
    /// What was not equal.
    pub(super) mismatches: Vec<String>,
}

impl Measured {
    fn new(operation: impl Into<String>, tensors: usize) -> Self {
        Self { operation: operation.into(), tensors, ..Self::default() }
    }

    /// The median: the first version finds nothing warm.
    pub(super) fn seconds(&self) -> f64 {
        let mut seconds = self.all_seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied().unwrap_or_default()
    }

    /// Bytes transferred per byte needed; a put has no such figure.
    #[expect(clippy::cast_precision_loss, reason = "three digits of it are shown")]
    pub(super) fn ratio(&self) -> Option<f64> {
        (self.needed > 0).then(|| self.transferred as f64 / self.needed as f64)
    }
}

/// A store, and the whole state dict of each version.
pub(super) struct Round<'a> {
    store: &'a Store,
    sources: &'a [StateDict],
    spinner: &'a ProgressBar,
    key: Key,
}

/// One generator: its tensors, allocated once and filled again with every version.
struct Generator {
    wanted: Vec<Wanted>,
    measured: Measured,
}

struct Wanted {
    fqn: String,
    place: Option<ShardPlace>,
    meta: TensorMeta,
    memory: Vec<u8>,
}

impl Wanted {
    fn as_target(&mut self) -> Target<'_> {
        Target {
            fqn: self.fqn.clone(),
            place: self.place.clone(),
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

    /// Puts and pulls one version after the other.
    pub(super) fn run(self) -> Result<Vec<Measured>> {
        let [first, ..] = self.sources else { return Ok(Vec::new()) };
        let tensors = tensors_of(first);
        let mut put = Measured::new(format!("put, {TRAINERS} trainers"), tensors.len());
        let mut whole = Measured::new("get, whole", tensors.len());
        let mut generators: Vec<Generator> =
            (0..GENERATORS).map(|rank| Generator::new(&tensors, rank)).collect::<Result<_>>()?;
        for (number, source) in (1..).zip(self.sources) {
            let say = |what: &str| self.spinner.set_message(format!("version {number}: {what}"));
            say("put");
            self.put(source, number, &mut put)?;
            say("get, sharded");
            self.pull(source, number, &mut generators)?;
            say("get, whole");
            self.pull_whole(source, number, &mut whole)?;
        }
        let mut measured = vec![put];
        measured.extend(generators.into_iter().map(|generator| generator.measured));
        measured.push(whole);
        Ok(measured)
    }

    /// All trainers at once, each its shards.
    fn put(&self, source: &StateDict, number: u64, measured: &mut Measured) -> Result<()> {
        let shards = (0..TRAINERS).map(|rank| shard::of_trainer(source, rank));
        let shards: Vec<StateDict> =
            shards.collect::<tssd_format::Result<_>>().map_err(of_format)?;
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
            threads.into_iter().map(joined).collect::<Result<Vec<_>, _>>()
        });
        let reports = reports.map_err(|error| failure(&error))?;
        measured.all_seconds.push(started.elapsed().as_secs_f64());
        measured.bytes = reports.iter().map(|report| report.bytes).sum();
        measured.versions.push(number);
        let visible = reports.iter().filter(|report| report.visible).count();
        if visible == 0 || reports.iter().any(|report| report.version != number) {
            measured.mismatches.push(format!("version {number} did not become visible"));
        }
        Ok(())
    }

    /// Both generators at once, each into its own memory.
    fn pull(&self, source: &StateDict, number: u64, generators: &mut [Generator]) -> Result<()> {
        let pulled: Result<(), _> = thread::scope(|scope| {
            let pull = |each| scope.spawn(|| Generator::pull(each, self.store, &self.key));
            let threads: Vec<_> = generators.iter_mut().map(pull).collect();
            threads.into_iter().try_for_each(joined)
        });
        pulled.map_err(|error| failure(&error))?;
        self.spinner.set_message(format!("version {number}: comparing"));
        generators.iter_mut().try_for_each(|each| each.compare(source, number)).map_err(of_format)
    }

    fn pull_whole(&self, source: &StateDict, number: u64, measured: &mut Measured) -> Result<()> {
        let started = Instant::now();
        let (dict, report) = self
            .store
            .get_state_dict(&self.key, &GetOptions::default())
            .map_err(|error| failure(&error))?;
        measured.all_seconds.push(started.elapsed().as_secs_f64());
        measured.bytes = report.bytes_transferred;
        measured.transferred += report.bytes_transferred;
        measured.needed += report.bytes_needed;
        measured.versions.push(report.version);
        measured.compared += report.bytes_transferred;
        if report.version != number {
            let found = report.version;
            measured.mismatches.push(format!("version {number} was put, {found} was read"));
        } else if dict != *source {
            measured.mismatches.push(format!("version {number}, whole: {}", first(&dict, source)));
        }
        Ok(())
    }
}

impl Generator {
    fn new(tensors: &[(String, &Tensor)], rank: u32) -> Result<Self> {
        let mut wanted = Vec::new();
        for (fqn, tensor) in tensors {
            if !fqn.starts_with("model.") {
                continue;
            }
            let (dtype, shape) = (tensor.meta().dtype(), tensor.meta().shape());
            let place = shard::of_generator(fqn, shape, rank).map_err(of_format)?;
            let local = place.as_ref().map_or(shape, |place| place.slice().local_shape());
            let meta = TensorMeta::new(dtype, local).map_err(of_format)?;
            let memory = vec![0; usize::try_from(meta.nbytes()).unwrap_or(usize::MAX)];
            wanted.push(Wanted { fqn: fqn.clone(), place, meta, memory });
        }
        let operation = format!("get, generator {rank} of {GENERATORS}");
        let measured = Measured::new(operation, wanted.len());
        Ok(Self { wanted, measured })
    }

    fn pull(&mut self, store: &Store, key: &Key) -> Result<(), tssd_store::Error> {
        let mut targets: Vec<Target<'_>> = self.wanted.iter_mut().map(Wanted::as_target).collect();
        let started = Instant::now();
        let report = store.get_state_dict_into(key, &mut targets, &GetOptions::default())?;
        let measured = &mut self.measured;
        measured.all_seconds.push(started.elapsed().as_secs_f64());
        measured.bytes = report.bytes_needed;
        measured.transferred += report.bytes_transferred;
        measured.needed += report.bytes_needed;
        measured.versions.push(report.version);
        Ok(())
    }

    /// Every byte that arrived, with the one of the source; then nothing of it is left for the next
    /// version to be mistaken for.
    fn compare(&mut self, source: &StateDict, number: u64) -> tssd_format::Result<()> {
        if self.measured.versions.last() != Some(&number) {
            let found = self.measured.versions.last();
            let mismatch = format!("version {number} was put, {found:?} was read");
            self.measured.mismatches.push(mismatch);
        }
        let tensors = tensors_of(source).into_iter().filter(|(fqn, _)| fqn.starts_with("model."));
        for (wanted, (fqn, tensor)) in self.wanted.iter_mut().zip(tensors) {
            let expected = match &wanted.place {
                Some(place) => shard::cut(tensor, &place.slice().region())?,
                None => tensor.clone(),
            };
            if wanted.fqn != fqn || !holds(&wanted.memory, &expected) {
                let region = wanted.place.as_ref().map(|place| place.slice().region().to_string());
                let region = region.unwrap_or_default();
                self.measured.mismatches.push(format!("version {number}: {}{region}", wanted.fqn));
            }
            self.measured.compared += wanted.meta.nbytes();
            wanted.memory.fill(0xA5);
        }
        Ok(())
    }
}

/// True if the memory is the tensor laid out row-major.
fn holds(memory: &[u8], tensor: &Tensor) -> bool {
    let (meta, view) = (tensor.meta(), tensor.view());
    let size = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    let mut equal = size(meta.nbytes()) == memory.len();
    Runs::to_row_major(meta.dtype().itemsize(), meta.shape(), &meta.strides()).for_each(
        |source, target, run| {
            equal = equal
                && view.span()[size(source)..][..size(run)] == memory[size(target)..][..size(run)];
        },
    );
    equal
}

/// All tensors of a whole state dict by fqn.
fn tensors_of(dict: &StateDict) -> Vec<(String, &Tensor)> {
    let leaves = dict.leaves().into_iter();
    let tensors = leaves.filter_map(|(path, leaf)| match leaf {
        Value::Tensor(tensor) => Some((path.fqn(), tensor)),
        _ => None,
    });
    tensors.collect()
}

/// The first leaf in which two state dicts differ.
fn first(dict: &StateDict, source: &StateDict) -> String {
    let (leaves, sources) = (dict.leaves(), source.leaves());
    let differing = leaves.iter().zip(&sources).find(|(leaf, source)| leaf != source);
    differing.map_or_else(|| "another structure".into(), |((path, _), _)| path.fqn())
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn of_format(error: tssd_format::Error) -> Failure {
    Failure::new(Exit::Refused, error)
}

#[cfg(test)]
mod tests {
    use super::holds;
    use crate::demo::shard::{cut, of_generator};
    use tssd_format::Tensor;

    /// A demo that cannot fail proves nothing.
    #[test]
    fn one_wrong_byte_is_a_mismatch() {
        let elements: Vec<u8> = (0..24).collect();
        let tensor = Tensor::from_slice(&elements, &[4, 6]).unwrap();
        let place = of_generator("layers.0.mlp.down_proj.weight", &[4, 6], 1).unwrap().unwrap();
        let columns = cut(&tensor, &place.slice().region()).unwrap();
        let mut memory = vec![3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23];
        assert!(holds(&memory, &columns));
        memory[7] ^= 1;
        assert!(!holds(&memory, &columns));
        assert!(!holds(&memory[1..], &columns));
    }
}
