//! A directory, those who use it and die, and what they were promised.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tssd_format::{Shard, ShardSpec, StateDict, Tensor, TensorSlice, Value};

use super::dice::Dice;
use super::faulty::{Bug, Faulty};
use super::mortal::{Life, Mortal};
use super::promise::{Place, Promise};
use super::{Clock, Fake};
use crate::blob::backend::DirectoryVolume;
use crate::engine::local::LocalController;
use crate::io::disk::{Disk, Files};
use crate::ledger::{Durability, OPEN_LIMIT};
use crate::metadata::backend::DirectoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers};
use crate::testing::simulated_disk::{Event, SimulatedFiles};
use crate::{ErrorKind, GetOptions, JobId, Key, PutOptions, PutReport, Store};

/// Who uses the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Users {
    /// Several processes, which lock each key.
    Several,
    /// One, as a daemon does.
    One,
}

pub(super) const ROOT: &str = "/";

pub(super) fn key() -> Key {
    Key::new("policy").unwrap()
}

/// A process's store over files.
pub(super) async fn store(
    files: Arc<dyn Files>,
    users: Users,
    clock: &Clock,
    process: u64,
) -> crate::Result<Store> {
    let disk = Disk::of(files, PathBuf::from(ROOT));
    let meta = Arc::new(DirectoryMeta::new(disk.clone()));
    let ledgers: Arc<dyn Ledgers> = match users {
        Users::Several => Arc::new(SharedLedgers::new(meta)),
        Users::One => Arc::new(OwnedLedgers::default().recover(meta).await?),
    };
    let volume = Arc::new(DirectoryVolume::new(disk));
    let controller = LocalController::new(ledgers, volume, Arc::new(Fake::new(clock, process)));
    if users == Users::One {
        controller.recover().await?;
    }
    Ok(Store::new(controller))
}

/// A state dict that is one value throughout, or one of two writers' row of it.
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

/// The value that a version is throughout.
pub(super) async fn value_of(store: &Store, number: u64) -> Result<i64, String> {
    let options = GetOptions { version: Some(number), ..GetOptions::default() };
    let got = store.get_state_dict(&key(), &options).await;
    let (dict, _) = got.map_err(|error| format!("version {number}: {error}"))?;
    let (Ok(Value::Tensor(rows)), Ok(Value::Int(value))) = (dict.leaf("rows"), dict.leaf("value"))
    else {
        return Err(format!("version {number} is no version of ours"));
    };
    let (rows, value) = (rows.view().as_slice::<i64>().unwrap(), value.as_i64().unwrap());
    if rows == [value; 64] { Ok(value) } else { Err(format!("version {number} is torn")) }
}

/// What happens next. Calls are those of the file system.
#[derive(Clone, Copy, Debug)]
pub(super) enum Act {
    /// A version of one writer.
    Put,
    /// A version of two writers.
    PutTogether,
    /// One of two writers puts.
    PutHalf,
    /// A version of one writer, in buckets.
    Publish,
    /// A version that takes back the newest one, and so many before it.
    Rewind(u64),
    /// A process is killed after so many calls while it puts.
    Die(i64),
    /// And another one puts the same once more.
    DieAndRetry(i64),
    /// So many versions are kept.
    Retain(u32),
    /// The newest version is pinned.
    Pin,
    Unpin,
    /// The version of so many before the newest one is deleted.
    Delete(u64),
    /// Open versions become too old.
    Pass,
}

impl Act {
    pub(super) fn any(dice: &mut Dice) -> Self {
        // Publish and rewind leave more states than all others together.
        match dice.roll(40) {
            0..13 => Self::Put,
            13..20 => Self::PutTogether,
            20..23 => Self::PutHalf,
            23..26 => Self::Die(i64::try_from(dice.roll(80)).unwrap()),
            26..29 => Self::DieAndRetry(i64::try_from(dice.roll(80)).unwrap()),
            29..32 => Self::Retain(1 + u32::try_from(dice.roll(3)).unwrap()),
            32..34 => {
                if dice.roll(2) == 0 {
                    Self::Pin
                } else {
                    Self::Unpin
                }
            }
            34..37 => Self::Delete(dice.roll(3)),
            37 => Self::Publish,
            38 => Self::Rewind(dice.roll(3)),
            _ => Self::Pass,
        }
    }
}

/// Something that has happened, or is promised from now on.
#[derive(Clone, Debug)]
pub(super) enum Moment {
    Event(Event),
    Promise(Promise),
}

/// A directory, those who use it, and what they were promised.
pub(super) struct World {
    files: SimulatedFiles,
    users: Users,
    bug: Option<Bug>,
    pub(super) clock: Clock,
    /// How many processes there were.
    processes: u64,
    stores: Vec<Store>,
    promise: Promise,
    pub(super) moments: Vec<Moment>,
}

impl World {
    pub(super) async fn new(users: Users, bug: Option<Bug>) -> Self {
        let promise = Promise { keep: 1, ..Promise::default() };
        let mut world = Self {
            files: SimulatedFiles::default(),
            users,
            bug,
            clock: Clock::default(),
            processes: 0,
            stores: Vec::new(),
            promise,
            moments: Vec::new(),
        };
        world.restart().await;
        world
    }

    fn files(&self) -> Arc<dyn Files> {
        let files: Arc<dyn Files> = Arc::new(self.files.clone());
        match self.bug {
            Some(bug) => Arc::new(Faulty::new(files, bug)),
            None => files,
        }
    }

    async fn process(&mut self, files: Arc<dyn Files>) -> crate::Result<Store> {
        self.processes += 1;
        store(files, self.users, &self.clock, self.processes).await
    }

    /// New processes, in the place of those that are there.
    async fn restart(&mut self) {
        self.stores.clear();
        for _ in 0..2 {
            let files = self.files();
            let store = match (self.users, self.stores.first()) {
                (Users::One, Some(only)) => only.clone(),
                _ => self.process(files).await.unwrap(),
            };
            self.stores.push(store);
        }
    }

    /// What has happened until now led to what is promised.
    fn note(&mut self) {
        self.moments.extend(self.files.take_events().into_iter().map(Moment::Event));
        self.moments.push(Moment::Promise(self.promise.clone()));
    }

    /// What somebody is about to put, and nobody has put yet.
    fn next_value(&mut self) -> i64 {
        let value = self.promise.try_next();
        self.note();
        value
    }

    /// A put has said that its version is visible.
    fn acknowledge(&mut self, put: Option<PutReport>, value: i64) {
        if let Some(report) = put.filter(|report| report.visible) {
            self.promise.acknowledge((report.epoch, report.version), value);
        }
    }

    /// A process of its own is killed while it puts; what was there starts anew.
    async fn die_in_put(&mut self, calls: i64, value: i64) {
        if self.users == Users::One {
            self.stores.clear();
        }
        let files = Arc::new(Mortal { inner: self.files(), life: Life::of(calls) });
        if let Ok(mortal) = self.process(files).await {
            let put = put(&mortal, value).await;
            self.acknowledge(put.ok(), value);
        }
        self.restart().await;
    }

    pub(super) async fn play(&mut self, act: Act) {
        match act {
            Act::Put => {
                let value = self.next_value();
                let put = put(&self.stores[0], value).await;
                self.acknowledge(put.ok(), value);
            }
            Act::PutTogether => {
                let value = self.next_value();
                let [first, second] = [0, 1].map(|writer: usize| self.stores[writer].clone());
                if put_half(&first, value, 0).await.is_ok() {
                    let put = put_half(&second, value, 1).await;
                    self.acknowledge(put.ok(), value);
                }
            }
            Act::PutHalf => {
                let value = self.next_value();
                let _ = put_half(&self.stores[0], value, 0).await;
            }
            Act::Publish => {
                let value = self.next_value();
                let published = begun(publish(&self.stores[0], value).await);
                self.acknowledge(published, value);
            }
            Act::Rewind(back) => {
                let back = usize::try_from(back).unwrap();
                let acknowledged = &self.promise.acknowledged;
                let number = acknowledged.keys().rev().nth(back).map_or(1, |place| place.1);
                let value = self.promise.try_next();
                self.promise.rewind = Some(number);
                self.note();
                let options = PutOptions { version: Some(number), rewind: true, ..options(value) };
                let dict = contents(value, None);
                let put = self.stores[0].put_state_dict(&key(), &dict, &options).await;
                let put = begun(put);
                if put.is_none() {
                    self.promise.rewind = None;
                }
                self.acknowledge(put, value);
            }
            Act::Die(calls) => {
                let value = self.next_value();
                self.die_in_put(calls, value).await;
            }
            Act::DieAndRetry(calls) => {
                let value = self.next_value();
                self.die_in_put(calls, value).await;
                self.note();
                let put = put(&self.stores[0], value).await;
                self.acknowledge(put.ok(), value);
            }
            Act::Retain(keep) => {
                self.promise.keep = self.promise.keep.min(keep);
                self.note();
                let newest = NonZeroU32::new(keep).unwrap();
                self.stores[1].retain(&key(), newest).await.unwrap();
                self.promise.keep = keep;
            }
            Act::Pin => {
                self.promise.pinned.clear();
                self.note();
                if let Ok(number) = self.stores[0].pin(&key(), None, "label").await {
                    let is_meant = |place: &&Place| place.1 == number;
                    let place = self.promise.acknowledged.keys().rev().find(is_meant).copied();
                    self.promise.pinned.extend(place);
                }
            }
            Act::Unpin => {
                self.promise.pinned.clear();
                self.note();
                let _ = self.stores[1].unpin(&key(), "label").await;
            }
            Act::Delete(back) => {
                let back = usize::try_from(back).unwrap();
                let acknowledged = &self.promise.acknowledged;
                let Some((place, value)) = acknowledged.iter().rev().nth(back) else { return };
                let (place, value) = (*place, *value);
                self.promise.doomed.insert(place);
                self.note();
                if self.stores[0].delete(&key(), Some(place.1)).await.unwrap() > 0 {
                    self.promise.gone.insert(value);
                }
            }
            Act::Pass => self.clock.pass(2 * OPEN_LIMIT),
        }
        let visible = visible(&self.stores[0]).await.unwrap();
        self.promise.expect(&visible).unwrap();
        let gone = self.promise.acknowledged.keys().filter(|place| !visible.contains_key(place));
        self.promise.doomed.extend(gone);
        self.note();
    }
}

/// Puts a value, alone.
pub(super) async fn put(store: &Store, value: i64) -> crate::Result<PutReport> {
    store.put_state_dict(&key(), &contents(value, None), &options(value)).await
}

/// Puts a writer's half of a value.
pub(super) async fn put_half(store: &Store, value: i64, writer: u32) -> crate::Result<PutReport> {
    let dict = contents(value, Some(u64::from(writer)));
    let (writer, writers) = (Some(writer), Some((0..2).collect()));
    let options = PutOptions { writer, writers, ..options(value) };
    store.put_state_dict(&key(), &dict, &options).await
}

/// Puts a value in buckets, of one tensor or value each.
async fn publish(store: &Store, value: i64) -> crate::Result<PutReport> {
    let mut publisher = store.publish(&key(), &options(value), 1)?;
    let dict = contents(value, None);
    for name in ["rows", "value"] {
        publisher.add(name, dict.leaf(name).unwrap().clone()).await?;
    }
    publisher.finish().await
}

/// Each value is put by a job of its own.
pub(super) fn options(value: i64) -> PutOptions {
    PutOptions {
        writer: Some(0),
        job: Some(JobId(format!("job {value}"))),
        durability: Durability::Disk,
        timeout: Duration::ZERO,
        ..PutOptions::default()
    }
}

/// The visible versions, by place, and what they are.
pub(super) async fn visible(store: &Store) -> Result<BTreeMap<Place, i64>, String> {
    let versions = store.versions(&key()).await.map_err(|error| error.to_string())?;
    let mut visible = BTreeMap::new();
    for version in versions {
        let place = (version.epoch, version.number);
        visible.insert(place, value_of(store, version.number).await?);
    }
    Ok(visible)
}

/// What has come of a put; none if others are in its way, so that it has not begun.
fn begun(put: crate::Result<PutReport>) -> Option<PutReport> {
    match put {
        Err(error) if error.kind() == ErrorKind::Busy => None,
        put => Some(put.unwrap()),
    }
}
