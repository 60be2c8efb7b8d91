//! Ledgers that several processes advance: records of a meta store.
//!
//! Each state of a ledger is a record; the next state is the next record, created only if it is not
//! there. A key is locked from reading a record to creating the next one.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{Ledgers, Turn};
use crate::environment::pause;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::State;
use crate::meta::MetaStore;

/// How often a read starts anew because the record it was about to read is deleted.
const READ_TRIES: u32 = 16;

/// How often a ledger is looked at by somebody who waits for a change.
const POLL: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(crate) struct SharedLedgers(Arc<dyn MetaStore>);

/// A ledger's state, the number of its record, and what else is in the folder of the records: older
/// ones, and what processes that died have left behind.
struct Record {
    number: u64,
    state: State,
    stale: Vec<String>,
}

impl SharedLedgers {
    pub(crate) fn new(meta: Arc<dyn MetaStore>) -> Self {
        Self(meta)
    }

    async fn load(&self, key: &Key) -> Result<Record> {
        let folder = format!("{}/.ledger", key.to_path());
        for _ in 0..READ_TRIES {
            let mut names = self.0.list(&folder).await?;
            let numbers = names.iter().filter_map(|name| record_number(name));
            let Some(number) = numbers.max() else {
                return Ok(Record { number: 0, state: State::default(), stale: names });
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
}

#[async_trait]
impl Ledgers for SharedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        Ok(Arc::new(self.load(key).await?.state))
    }

    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>> {
        let lock = self.0.lock(&format!("{}/.lock", key.to_path())).await?;
        let record = self.load(key).await?;
        Ok(Box::new(SharedTurn { ledgers: self.clone(), key: key.clone(), record, _lock: lock }))
    }

    async fn keys(&self) -> Result<Vec<Key>> {
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

    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration) {
        let mut left = patience;
        let mut span = Duration::from_millis(1);
        while !left.is_zero() {
            pause(span.min(left)).await;
            left = left.saturating_sub(span);
            span = (span * 2).min(POLL);
            // What cannot be read now is for the caller to find.
            if self.load(key).await.map_or(true, |record| record.state != **seen) {
                return;
            }
        }
    }
}

struct SharedTurn {
    ledgers: SharedLedgers,
    key: Key,
    record: Record,
    _lock: Box<dyn Any + Send>,
}

#[async_trait]
impl Turn for SharedTurn {
    fn state(&self) -> &State {
        &self.record.state
    }

    /// Creates the next record.
    async fn save(&mut self, next: State) -> Result<()> {
        let (key, last, meta) = (&self.key, &self.record, &self.ledgers.0);
        if last.state == next {
            return Ok(());
        }
        let bytes = serde_json::to_vec(&next).map_err(|error| {
            Error::new(ErrorKind::Invalid, format_args!("key `{key}`: {error}"))
        })?;
        let number = last.number.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format_args!("key `{key}` has no record numbers left"))
        })?;
        if !meta.create(&record_name(key, number), bytes).await? {
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("key `{key}` was written without its lock; try again"),
            ));
        }
        // The record before the newest stays, for readers that have just listed it.
        for name in &last.stale {
            // The step is made; what cannot be deleted now is stale the next time too.
            let _ = meta.delete(&format!("{}/.ledger/{name}", key.to_path())).await;
        }
        let stale = (last.number > 0).then(|| record_name(key, last.number));
        let stale = stale.and_then(|path| path.rsplit_once('/').map(|(_, name)| name.to_owned()));
        self.record = Record { number, state: next, stale: stale.into_iter().collect() };
        Ok(())
    }
}

/// The number of a record by the last part of its name.
fn record_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".json").filter(|digits| digits.len() == 20)?;
    digits.parse().ok().filter(|number| format!("{number:020}") == digits)
}

fn record_name(key: &Key, number: u64) -> String {
    format!("{}/.ledger/{number:020}.json", key.to_path())
}
