//! A simulated store directory, the processes that use it, and the state that they expect.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tssd_format::{Shard, ShardSpec, StateDict, Tensor, TensorSlice, Value};

use super::{ManualClock, TestEnvironment};
use crate::blob::backend::DirectoryVolume;
use crate::engine::local::LocalController;
use crate::io::disk::{Disk, FileSystem};
use crate::ledger::{Durability, OPEN_TIMEOUT};
use crate::metadata::backend::DirectoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers};
use crate::testing::crash::expected_state::{ExpectedState, Position};
use crate::testing::crash::faulty_protocol::{FaultyFiles, ProtocolFault};
use crate::testing::crash::killable_fs::{CallBudget, KillableFs};
use crate::testing::crash::rng::SeededRng;
use crate::testing::simulated_disk::{Event, SimulatedFiles};
use crate::{ErrorKind, GetOptions, JobId, Key, PutOptions, PutReport, Rewind, Store};

/// How processes access the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Several processes, which lock each key.
    Shared,
    /// One process, like a daemon.
    Exclusive,
}

pub(super) const ROOT: &str = "/";

pub(super) fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Opens the store of a process over files.
pub(super) async fn store(
    files: Arc<dyn FileSystem>,
    users: Access,
    clock: &ManualClock,
    process: u64,
) -> crate::Result<Store> {
    let disk = Disk::with_files(files, PathBuf::from(ROOT));
    let meta = Arc::new(DirectoryMeta::new(disk.clone()));
    let ledgers: Arc<dyn Ledgers> = match users {
        Access::Shared => Arc::new(SharedLedgers::new(meta)),
        Access::Exclusive => Arc::new(OwnedLedgers::default().recover(meta).await?),
    };
    let volume = Arc::new(DirectoryVolume::new(disk));
    let controller =
        LocalController::new(ledgers, volume, Arc::new(TestEnvironment::new(clock, process)));
    if users == Access::Exclusive {
        controller.recover().await?;
    }
    Ok(Store::new(controller))
}

/// Returns a state dict whose elements all equal `value`. With a writer: only its row of the two.
pub(super) fn contents(value: i64, writer: Option<u64>) -> StateDict {
    let mut dict = StateDict::new();
    match writer {
        None => {
            let rows = Tensor::from_slice(&[value; 64], &[2, 32]).unwrap();
            dict.insert("rows", rows);
        }
        Some(writer) => {
            let slice = TensorSlice::new(&[writer, 0], &[1, 32], &[2, 32]).unwrap();
            let row = Tensor::from_slice(&[value; 32], &[1, 32]).unwrap();
            dict.insert("rows", Value::from(Shard::new(row, ShardSpec::new(slice)).unwrap()));
        }
    }
    dict.insert("value", value);
    dict
}

/// Reads a version, and returns the value that all of its elements have.
///
/// # Errors
///
/// A description, if the version cannot be read or its elements differ.
pub(super) async fn value_of(store: &Store, number: u64) -> Result<i64, String> {
    let options = GetOptions { version: number.into(), ..GetOptions::default() };
    let got = store.get_state_dict(&key(), &options).await;
    let (dict, _) = got.map_err(|error| format!("version {number}: {error}"))?;
    let (Ok(Value::Tensor(rows)), Ok(Value::Int(value))) = (dict.leaf("rows"), dict.leaf("value"))
    else {
        return Err(format!("version {number} is no version of ours"));
    };
    let (rows, value) = (rows.view().as_slice::<i64>().unwrap(), value.as_i64().unwrap());
    if rows == [value; 64] { Ok(value) } else { Err(format!("version {number} is torn")) }
}

/// An operation on the store. Calls are file system calls.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    /// One writer puts a version.
    Put,
    /// Two writers put a version.
    PutTogether,
    /// One of two writers puts its part.
    PutHalf,
    /// One writer publishes a version tensor by tensor.
    Publish,
    /// A put rewinds the newest version, and this many before it.
    Rewind(u64),
    /// A process is killed after this many calls of a put.
    KillDuringPut(i64),
    /// A process is killed after this many calls of a put, and another process retries the put.
    KillAndRetryPut(i64),
    /// The number of retained versions is set.
    Retain(u32),
    /// The newest version is pinned.
    Pin,
    /// The pin is removed.
    Unpin,
    /// The version that is this many before the newest one is deleted.
    Delete(u64),
    /// Time passes until open versions expire.
    ExpireOpen,
}

impl Operation {
    /// Returns a random operation.
    pub(super) fn random(dice: &mut SeededRng) -> Self {
        // Publish and rewind leave more states than all other operations together, so they are rare.
        match dice.below(40) {
            0..13 => Self::Put,
            13..20 => Self::PutTogether,
            20..23 => Self::PutHalf,
            23..26 => Self::KillDuringPut(i64::try_from(dice.below(80)).unwrap()),
            26..29 => Self::KillAndRetryPut(i64::try_from(dice.below(80)).unwrap()),
            29..32 => Self::Retain(1 + u32::try_from(dice.below(3)).unwrap()),
            32..34 => {
                if dice.below(2) == 0 {
                    Self::Pin
                } else {
                    Self::Unpin
                }
            }
            34..37 => Self::Delete(dice.below(3)),
            37 => Self::Publish,
            38 => Self::Rewind(dice.below(3)),
            _ => Self::ExpireOpen,
        }
    }
}

/// An entry of the trace: a change of the files, or the state that is expected from then on.
#[derive(Clone, Debug)]
pub(super) enum TraceEntry {
    Event(Event),
    Promise(ExpectedState),
}

/// A simulated store directory, the processes that use it, and the trace of their operations.
pub(super) struct Simulation {
    files: SimulatedFiles,
    users: Access,
    bug: Option<ProtocolFault>,
    pub(super) clock: ManualClock,
    /// Number of processes started so far.
    processes: u64,
    stores: Vec<Store>,
    promise: ExpectedState,
    pub(super) trace: Vec<TraceEntry>,
}

impl Simulation {
    pub(super) async fn new(users: Access, bug: Option<ProtocolFault>) -> Self {
        let promise = ExpectedState { keep: 1, ..ExpectedState::default() };
        let mut world = Self {
            files: SimulatedFiles::default(),
            users,
            bug,
            clock: ManualClock::default(),
            processes: 0,
            stores: Vec::new(),
            promise,
            trace: Vec::new(),
        };
        world.restart().await;
        world
    }

    fn files(&self) -> Arc<dyn FileSystem> {
        let files: Arc<dyn FileSystem> = Arc::new(self.files.clone());
        match self.bug {
            Some(bug) => Arc::new(FaultyFiles::new(files, bug)),
            None => files,
        }
    }

    async fn start_process(&mut self, files: Arc<dyn FileSystem>) -> crate::Result<Store> {
        self.processes += 1;
        store(files, self.users, &self.clock, self.processes).await
    }

    /// Replaces the processes by new ones.
    async fn restart(&mut self) {
        self.stores.clear();
        for _ in 0..2 {
            let files = self.files();
            let store = match (self.users, self.stores.first()) {
                (Access::Exclusive, Some(only)) => only.clone(),
                _ => self.start_process(files).await.unwrap(),
            };
            self.stores.push(store);
        }
    }

    /// Appends the events since the last call, and then the current expected state, to the trace.
    fn record(&mut self) {
        self.trace.extend(self.files.take_events().into_iter().map(TraceEntry::Event));
        self.trace.push(TraceEntry::Promise(self.promise.clone()));
    }

    /// Returns an unused value, and records that it is about to be put.
    fn next_value(&mut self) -> i64 {
        let value = self.promise.next_value();
        self.record();
        value
    }

    /// Records the result of a put, if its version is visible.
    fn acknowledge(&mut self, put: Option<PutReport>, value: i64) {
        if let Some(report) = put.filter(|report| report.visible) {
            self.promise.acknowledge((report.epoch, report.version), value);
        }
    }

    /// Starts a process that is killed after this many calls of a put.
    ///
    /// All other processes restart afterwards.
    async fn kill_during_put(&mut self, calls: i64, value: i64) {
        if self.users == Access::Exclusive {
            self.stores.clear();
        }
        let files = Arc::new(KillableFs { inner: self.files(), budget: CallBudget::new(calls) });
        if let Ok(killed) = self.start_process(files).await {
            let put = put(&killed, value).await;
            self.acknowledge(put.ok(), value);
        }
        self.restart().await;
    }

    /// Runs an operation, checks the visible versions, and appends both to the trace.
    pub(super) async fn run(&mut self, act: Operation) {
        match act {
            Operation::Put => {
                let value = self.next_value();
                let put = put(&self.stores[0], value).await;
                self.acknowledge(put.ok(), value);
            }
            Operation::PutTogether => {
                let value = self.next_value();
                let [first, second] = [0, 1].map(|writer: usize| self.stores[writer].clone());
                if put_half(&first, value, 0).await.is_ok() {
                    let put = put_half(&second, value, 1).await;
                    self.acknowledge(put.ok(), value);
                }
            }
            Operation::PutHalf => {
                let value = self.next_value();
                let _ = put_half(&self.stores[0], value, 0).await;
            }
            Operation::Publish => {
                let value = self.next_value();
                let published = report_unless_busy(publish(&self.stores[0], value).await);
                self.acknowledge(published, value);
            }
            Operation::Rewind(back) => {
                let back = usize::try_from(back).unwrap();
                let acknowledged = &self.promise.acknowledged;
                let number = acknowledged.keys().rev().nth(back).map_or(1, |place| place.1);
                let value = self.promise.next_value();
                self.promise.rewind = Some(number);
                self.record();
                let options =
                    PutOptions { version: Some(number), rewind: Rewind::Always, ..options(value) };
                let dict = contents(value, None);
                let put = self.stores[0].put_state_dict(&key(), &dict, &options).await;
                let put = report_unless_busy(put);
                if put.is_none() {
                    self.promise.rewind = None;
                }
                self.acknowledge(put, value);
            }
            Operation::KillDuringPut(calls) => {
                let value = self.next_value();
                self.kill_during_put(calls, value).await;
            }
            Operation::KillAndRetryPut(calls) => {
                let value = self.next_value();
                self.kill_during_put(calls, value).await;
                self.record();
                let put = put(&self.stores[0], value).await;
                self.acknowledge(put.ok(), value);
            }
            Operation::Retain(keep) => {
                self.promise.keep = self.promise.keep.min(keep);
                self.record();
                let newest = NonZeroU32::new(keep).unwrap();
                self.stores[1].retain(&key(), newest).await.unwrap();
                self.promise.keep = keep;
            }
            Operation::Pin => {
                self.promise.pinned.clear();
                self.record();
                if let Ok(number) = self.stores[0].pin(&key(), None, "label").await {
                    let is_pinned = |place: &&Position| place.1 == number;
                    let place = self.promise.acknowledged.keys().rev().find(is_pinned).copied();
                    self.promise.pinned.extend(place);
                }
            }
            Operation::Unpin => {
                self.promise.pinned.clear();
                self.record();
                let _ = self.stores[1].unpin(&key(), "label").await;
            }
            Operation::Delete(back) => {
                let back = usize::try_from(back).unwrap();
                let acknowledged = &self.promise.acknowledged;
                let Some((place, value)) = acknowledged.iter().rev().nth(back) else { return };
                let (place, value) = (*place, *value);
                self.promise.may_be_missing.insert(place);
                self.record();
                if self.stores[0].delete(&key(), Some(place.1)).await.unwrap() > 0 {
                    self.promise.must_be_missing.insert(value);
                }
            }
            Operation::ExpireOpen => self.clock.advance(2 * OPEN_TIMEOUT),
        }
        let visible = visible_versions(&self.stores[0]).await.unwrap();
        self.promise.check(&visible).unwrap();
        let missing = self.promise.acknowledged.keys().filter(|place| !visible.contains_key(place));
        self.promise.may_be_missing.extend(missing);
        self.record();
    }
}

/// Puts a value as the only writer.
pub(super) async fn put(store: &Store, value: i64) -> crate::Result<PutReport> {
    store.put_state_dict(&key(), &contents(value, None), &options(value)).await
}

/// Puts one of the two parts of a value.
pub(super) async fn put_half(store: &Store, value: i64, writer: u32) -> crate::Result<PutReport> {
    let dict = contents(value, Some(u64::from(writer)));
    let (writer, writers) = (Some(writer), Some((0..2).collect()));
    let options = PutOptions { writer, writers, ..options(value) };
    store.put_state_dict(&key(), &dict, &options).await
}

/// Publishes a value in buckets of one tensor or value each.
async fn publish(store: &Store, value: i64) -> crate::Result<PutReport> {
    let mut publisher = store.publish(&key(), &options(value), 1)?;
    let dict = contents(value, None);
    for name in ["rows", "value"] {
        publisher.add(name, dict.leaf(name).unwrap().clone()).await?;
    }
    publisher.finish().await
}

/// Returns put options. Each value has its own job.
pub(super) fn options(value: i64) -> PutOptions {
    PutOptions {
        writer: Some(0),
        job: Some(JobId(format!("job {value}"))),
        durability: Durability::Disk,
        timeout: Duration::ZERO,
        ..PutOptions::default()
    }
}

/// Returns the values of the visible versions, by position.
pub(super) async fn visible_versions(store: &Store) -> Result<BTreeMap<Position, i64>, String> {
    let versions = store.versions(&key()).await.map_err(|error| error.to_string())?;
    let mut visible = BTreeMap::new();
    for version in versions {
        let place = (version.epoch, version.number);
        visible.insert(place, value_of(store, version.number).await?);
    }
    Ok(visible)
}

/// Returns the report of a put. `None` if the put failed because the key was busy.
fn report_unless_busy(put: crate::Result<PutReport>) -> Option<PutReport> {
    match put {
        Err(error) if error.kind() == ErrorKind::Busy => None,
        put => Some(put.unwrap()),
    }
}
