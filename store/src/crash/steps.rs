//! Writers that die at every step: what a process has done to the meta store and the volume before it
//! died is all that the next one finds, and that must be enough.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tssd_format::{Shard, ShardPlace, StateDict, Tensor, TensorSlice, Value};

use super::{Clock, Fake};
use crate::controller::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::Durability;
use crate::ledgers::SharedLedgers;
use crate::meta::{MemoryMeta, MetaStore};
use crate::route::Route;
use crate::volume::{MemoryVolume, Near, Reservation, Volume};
use crate::{GetOptions, JobId, Key, PutOptions, Store};

/// What outlives a process: records, blobs, and time.
#[derive(Clone, Default)]
struct World {
    meta: Arc<MemoryMeta>,
    volume: MemoryVolume,
    clock: Clock,
}

/// How many more steps a process lives; none are counted down below zero.
#[derive(Clone)]
struct Life(Arc<AtomicI64>);

impl Life {
    /// Before every step that the world would see: dead processes take none.
    fn step(&self) -> Result<()> {
        if self.0.fetch_sub(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Io, "this process is dead"))
    }
}

struct Mortal<T> {
    inner: T,
    life: Life,
}

#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl MetaStore for Mortal<Arc<MemoryMeta>> {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        self.life.step()?;
        self.inner.create(name, record).await
    }

    async fn settle(&self, name: &str) -> Result<()> {
        self.life.step()?;
        self.inner.settle(name).await
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.life.step()?;
        self.inner.get(name).await
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        self.life.step()?;
        self.inner.list(name).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.life.step()?;
        self.inner.delete(name).await
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        self.life.step()?;
        self.inner.lock(name).await
    }
}

#[deny(clippy::missing_trait_methods)]
impl Volume for Mortal<MemoryVolume> {
    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        self.life.step()?;
        self.inner.reserve(name, len, durability)
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
        self.life.step()?;
        self.inner.open(name)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.life.step()?;
        self.inner.delete(name)
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.life.step()?;
        self.inner.list(name)
    }

    fn route(&self) -> Route {
        self.inner.route()
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.life.step()?;
        self.inner.remove_folder(name)
    }
}

impl World {
    /// A process that dies after so many steps.
    fn process(&self, number: u64, steps: i64) -> Store {
        let life = Life(Arc::new(AtomicI64::new(steps)));
        let meta = Mortal { inner: self.meta.clone(), life: life.clone() };
        Store::new(LocalController::new(
            Arc::new(SharedLedgers::new(Arc::new(meta))),
            Arc::new(Mortal { inner: self.volume.clone(), life }),
            Arc::new(Fake::new(&self.clock, number)),
        ))
    }
}

/// One of two rows of a matrix that holds the step.
fn contribution(writer: u64, step: i64) -> StateDict {
    let slice = TensorSlice::new(&[writer, 0], &[1, 2], &[2, 2]).unwrap();
    let local = Tensor::from_slice(&[step, step], &[1, 2]).unwrap();
    let shard = Shard::new(local, ShardPlace::new(slice)).unwrap();
    let mut dict = StateDict::new();
    dict.insert("m", Value::from(shard));
    dict.insert("step", step);
    dict
}

fn as_writer(writer: u32, job: &str) -> PutOptions {
    PutOptions {
        writer: Some(writer),
        writers: Some((0..2).collect()),
        job: Some(JobId(job.to_owned())),
        timeout: Duration::ZERO,
        ..PutOptions::default()
    }
}

/// The step of the newest version, which is one step throughout.
async fn newest(store: &Store, key: &Key) -> Option<i64> {
    store.head(key).await.unwrap()?;
    let (dict, _) = store.get_state_dict(key, &GetOptions::default()).await.unwrap();
    let Value::Tensor(matrix) = dict.leaf("m").unwrap() else { panic!("a tensor") };
    let elements = matrix.view().as_slice::<i64>().unwrap();
    let Value::Int(step) = dict.leaf("step").unwrap() else { panic!("an int") };
    let step = step.as_i64().unwrap();
    assert!(elements == [step; 4], "steps are mixed: {elements:?} and {step}");
    Some(step)
}

/// The second writer of the second version dies after `steps` steps.
async fn dies_after(steps: i64) -> bool {
    let world = World::default();
    let key = Key::new("policy").unwrap();
    let writers = [world.process(1, i64::MAX), world.process(2, i64::MAX)];
    for (writer, store) in (0..).zip(&writers) {
        let dict = contribution(u64::from(writer), 1);
        store.put_state_dict(&key, &dict, &as_writer(writer, "first")).await.unwrap();
    }
    let [first, second] = writers;
    // Its next process continues the same job: the number of its puts is its own to count.
    first
        .put_state_dict(&key, &contribution(0, 2), &numbered(as_writer(0, "first")))
        .await
        .unwrap();
    drop(second);
    let mortal = world.process(3, steps);
    let died =
        mortal.put_state_dict(&key, &contribution(1, 2), &numbered(as_writer(1, "first"))).await;
    let completed = died.as_ref().is_ok_and(|report| report.visible);

    // Whatever it left behind, a reader sees a whole version: the old one, or the new one.
    let reader = world.process(4, i64::MAX);
    let seen = newest(&reader, &key).await;
    assert!(seen == Some(1) || seen == Some(2), "after {steps} steps: {seen:?}");
    assert!(!completed || seen == Some(2), "what was acknowledged is there");

    // A reader that comes later completes a proof that is owed; what is visible never goes back.
    world.clock.pass(Duration::from_secs(5));
    let later = newest(&reader, &key).await;
    assert!(later >= seen);

    // The writer starts anew and puts again: the version completes, or it had.
    let again = world.process(5, i64::MAX);
    let options = numbered(as_writer(1, "first"));
    let report = again.put_state_dict(&key, &contribution(1, 2), &options).await;
    assert!(report.as_ref().is_ok_and(|report| report.visible), "after {steps} steps: {report:?}");
    assert_eq!(newest(&reader, &key).await, Some(2));

    // A new job goes on, and nothing is left of what was replaced.
    for writer in 0..2 {
        let dict = contribution(u64::from(writer), 3);
        again.put_state_dict(&key, &dict, &as_writer(writer, "second")).await.unwrap();
    }
    assert_eq!(newest(&reader, &key).await, Some(3));
    assert_eq!(reader.versions(&key).await.unwrap().len(), 1);
    let folders = world.volume.list(&key.to_path()).unwrap();
    assert_eq!(folders, ["0-3"], "after {steps} steps");
    completed
}

/// The second writer dies after every step, and its next process has other contents: the version has
/// those of one of the two, and of the second if its put succeeds.
async fn comes_back_after(steps: i64) -> bool {
    let world = World::default();
    let key = Key::new("policy").unwrap();
    let options = |writer| numbered(as_writer(writer, "job"));
    let first = world.process(1, i64::MAX);
    first.put_state_dict(&key, &one_row(0, 0), &options(0)).await.unwrap();
    let died = world.process(2, steps).put_state_dict(&key, &one_row(1, 1), &options(1)).await;
    let again = world.process(3, i64::MAX).put_state_dict(&key, &one_row(1, 2), &options(1)).await;
    world.clock.pass(Duration::from_secs(5));
    let reader = world.process(4, i64::MAX);
    let (dict, _) = reader.get_state_dict(&key, &GetOptions::default()).await.unwrap();
    let Value::Tensor(matrix) = dict.leaf("m").unwrap() else { panic!("a tensor") };
    let found = matrix.view().as_slice::<i64>().unwrap()[2];
    let expected = if again.is_ok() { 2 } else { 1 };
    assert_eq!(found, expected, "after {steps} steps: {again:?}");
    let files = world.volume.list(&format!("{}/0-2", key.to_path())).unwrap();
    assert_eq!(files.len(), 3, "two archives and the manifest: {files:?}");
    died.is_ok()
}

/// A row of the matrix, and nothing that the writers would have to agree on.
fn one_row(writer: u64, value: i64) -> StateDict {
    let slice = TensorSlice::new(&[writer, 0], &[1, 2], &[2, 2]).unwrap();
    let local = Tensor::from_slice(&[value, value], &[1, 2]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("m", Value::from(Shard::new(local, ShardPlace::new(slice)).unwrap()));
    dict
}

#[tokio::test]
async fn a_writer_may_come_back_with_other_contents() {
    let mut steps = 0;
    while !comes_back_after(steps).await {
        steps += 1;
        assert!(steps < 500, "a put takes fewer steps");
    }
}

fn numbered(options: PutOptions) -> PutOptions {
    PutOptions { version: Some(2), ..options }
}

#[tokio::test]
async fn a_writer_may_die_at_every_step() {
    let mut steps = 0;
    while !dies_after(steps).await {
        steps += 1;
        assert!(steps < 500, "a put takes fewer steps");
    }
    assert!(steps > 15, "there were steps to die at: {steps}");
}
