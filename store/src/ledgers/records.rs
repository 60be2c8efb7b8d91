//! Ledgers as records of a meta store: each state is a record, and the next state is the next record,
//! created only if it is not there.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::State;
use crate::meta::MetaStore;

/// How often a read starts anew because the record it was about to read is deleted.
const READ_TRIES: u32 = 16;

/// The records of all keys.
#[derive(Clone)]
pub(super) struct Records(pub(super) Arc<dyn MetaStore>);

/// A ledger's state, the number of its record, and what else is in the folder of the records: older
/// ones, and what processes that died have left behind.
#[derive(Default)]
pub(super) struct Record {
    pub(super) number: u64,
    pub(super) state: State,
    stale: Vec<String>,
}

impl Records {
    /// The newest record of a key; an empty one of a key that has none.
    pub(super) async fn load(&self, key: &Key) -> Result<Record> {
        let folder = format!("{}/.ledger", key.to_path());
        for _ in 0..READ_TRIES {
            let mut names = self.0.list(&folder).await?;
            let numbers = names.iter().filter_map(|name| record_number(name));
            let Some(number) = numbers.max() else {
                return Ok(Record { stale: names, ..Record::default() });
            };
            // Whoever has created a newer one since may have deleted this one: look again.
            let Some(record) = self.0.get(&record_name(key, number)).await? else { continue };
            let state = serde_json::from_slice(&record).map_err(|error| {
                let name = record_name(key, number);
                Error::new(ErrorKind::Corrupt, format_args!("ledger record `{name}`: {error}"))
            })?;
            names.retain(|name| !record_name(key, number).ends_with(name.as_str()));
            return Ok(Record { number, state, stale: names });
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format_args!("the records in `{folder}` cannot be read"),
        ))
    }

    /// Creates the next record, unless nothing has changed.
    pub(super) async fn append(&self, key: &Key, last: &mut Record, next: State) -> Result<()> {
        if last.state == next {
            return Ok(());
        }
        let bytes = serde_json::to_vec(&next).map_err(|error| {
            Error::new(ErrorKind::Invalid, format_args!("key `{key}`: {error}"))
        })?;
        let number = last.number.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format_args!("key `{key}` has no record numbers left"))
        })?;
        if !self.0.create(&record_name(key, number), bytes).await? {
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("key `{key}` was written without its lock; try again"),
            ));
        }
        // The record before the newest stays, for readers that have just listed it.
        for name in &last.stale {
            // The step is made; what cannot be deleted now is stale the next time too.
            let _ = self.0.delete(&format!("{}/.ledger/{name}", key.to_path())).await;
        }
        let stale = (last.number > 0).then(|| file_name(last.number)).into_iter().collect();
        *last = Record { number, state: next, stale };
        Ok(())
    }

    /// The keys that have a folder, in no order.
    pub(super) async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for name in self.0.list(&folder).await? {
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

fn record_name(key: &Key, number: u64) -> String {
    format!("{}/.ledger/{}", key.to_path(), file_name(number))
}
