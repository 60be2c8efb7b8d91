//! Ledgers as records of a meta store: each state is a record, and the next state is the next record,
//! created only if it is not there.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::State;
use crate::meta::MetaStore;
use crate::sync::{Mutex, MutexGuard};

/// How often a read starts anew because the record it was about to read is deleted.
const READ_TRIES: u32 = 16;

/// The records of all keys.
#[derive(Clone)]
pub(super) struct Records {
    pub(super) meta: Arc<dyn MetaStore>,
    /// The number of the newest record of each key that this process knows to be durable.
    settled: Arc<Mutex<BTreeMap<Key, u64>>>,
}

/// A ledger's state, the number of its record, and what else is in the folder of the records: older
/// ones, and what processes that died have left behind.
#[derive(Default)]
pub(super) struct Record {
    pub(super) number: u64,
    pub(super) state: State,
    stale: Vec<String>,
    /// Whether there may be a newer one, which could not be made durable.
    is_in_doubt: bool,
}

impl Record {
    /// Whether nothing of a key is there.
    pub(super) fn is_blank(&self) -> bool {
        self.number == 0 && self.stale.is_empty()
    }
}

impl Records {
    pub(super) fn new(meta: Arc<dyn MetaStore>) -> Self {
        Self { meta, settled: Arc::default() }
    }

    /// Returns once a record is durable. Whoever has created it may have been killed before it was.
    pub(super) async fn settle(&self, key: &Key, record: &Record) -> Result<()> {
        if record.number > 0 && self.settled().get(key) != Some(&record.number) {
            self.meta.settle(&folder(key)).await?;
            self.settled().insert(key.clone(), record.number);
        }
        Ok(())
    }

    fn settled(&self) -> MutexGuard<'_, BTreeMap<Key, u64>> {
        self.settled.lock().expect("nobody panics while holding the numbers")
    }

    /// The newest record of a key; an empty one of a key that has none.
    pub(super) async fn load(&self, key: &Key) -> Result<Record> {
        let folder = folder(key);
        for _ in 0..READ_TRIES {
            let mut names = self.meta.list(&folder).await?;
            let numbers = names.iter().filter_map(|name| record_number(name));
            let Some(number) = numbers.max() else {
                return Ok(Record { stale: names, ..Record::default() });
            };
            // Whoever has created a newer one since may have deleted this one: look again.
            let Some(record) = self.meta.get(&record_name(key, number)).await? else { continue };
            let state = serde_json::from_slice(&record).map_err(|error| {
                let name = record_name(key, number);
                Error::new(ErrorKind::Corrupt, format_args!("ledger record `{name}`: {error}"))
            })?;
            names.retain(|name| !record_name(key, number).ends_with(name.as_str()));
            return Ok(Record { number, state, stale: names, is_in_doubt: false });
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format_args!("the records in `{folder}` cannot be read"),
        ))
    }

    /// Creates the next record, unless nothing has changed.
    ///
    /// If that fails, the record may be there all the same. Then the one that is created next replaces it too.
    pub(super) async fn append(&self, key: &Key, last: &mut Record, next: State) -> Result<()> {
        if last.state == next && !last.is_in_doubt {
            // Whoever gets the answer takes it for durable.
            return self.settle(key, last).await;
        }
        let bytes = serde_json::to_vec(&next).map_err(|error| {
            Error::new(ErrorKind::Invalid, format_args!("key `{key}`: {error}"))
        })?;
        let number = last.number.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format_args!("key `{key}` has no record numbers left"))
        })?;
        let created = self.meta.create(&record_name(key, number), bytes).await;
        if created.is_err() {
            last.stale.extend([last.number, number].map(file_name));
            (last.number, last.is_in_doubt) = (number, true);
        }
        if !created? {
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("key `{key}` was written without its lock; try again"),
            ));
        }
        self.settled().insert(key.clone(), number);
        // The record before the newest stays, for readers that have just listed it.
        for name in &last.stale {
            // The step is made; what cannot be deleted now is stale the next time too.
            let _ = self.meta.delete(&format!("{}/{name}", folder(key))).await;
        }
        let stale = (last.number > 0).then(|| file_name(last.number)).into_iter().collect();
        *last = Record { number, state: next, stale, is_in_doubt: false };
        Ok(())
    }

    /// The keys that have a folder, in no order.
    pub(super) async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for name in self.meta.list(&folder).await? {
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                match Key::from_path(&path) {
                    Some(key) => keys.push(key),
                    // The beginning of a long key ends so.
                    None => folders.extend(path.ends_with('%').then_some(path)),
                }
            }
        }
        Ok(keys)
    }
}

/// The number of a record by the last part of its name.
fn record_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".json").filter(|digits| digits.len() == 20)?;
    digits.parse().ok().filter(|number| format!("{number:020}") == digits)
}

fn file_name(number: u64) -> String {
    format!("{number:020}.json")
}

/// Where the records of a key are.
fn folder(key: &Key) -> String {
    format!("{}/.ledger", key.to_path())
}

fn record_name(key: &Key, number: u64) -> String {
    format!("{}/{}", folder(key), file_name(number))
}
