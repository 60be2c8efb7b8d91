//! Ledgers that only this process advances. They are in memory; their durable part is in records.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::records::{Record, Records};
use super::{LedgerGuard, Ledgers, initial_state};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{AsyncMutex, Lock, MutexGuard, OwnedMutexGuard, select, sleep, watch};
use crate::key::Key;
use crate::ledger::{SessionId, State};
use crate::metadata::backend::MetaStore;

#[derive(Clone, Default)]
pub(crate) struct OwnedLedgers {
    slots: Arc<Lock<BTreeMap<Key, Arc<Slot>>>>,
    /// The state of a key that was never written.
    default_state: Arc<State>,
    records: Option<Records>,
    /// The ledgers of the bucket from which keys without records are restored.
    origin: Option<Arc<dyn Ledgers>>,
    /// The keys whose records could not be read yet.
    stale: Arc<Lock<BTreeSet<Key>>>,
}

/// The ledger of one key.
struct Slot {
    /// The newest record. Its mutex is the lock to advance the ledger.
    record: Arc<AsyncMutex<Record>>,
    state: watch::Sender<Arc<State>>,
}

impl OwnedLedgers {
    /// Creates ledgers in which a new key keeps its newest `keep` versions.
    pub(crate) fn with_keep(keep: NonZeroU32) -> Self {
        Self { default_state: Arc::new(State::with_keep(keep)), ..Self::default() }
    }

    /// Loads the durable part of the ledgers from a meta store that no other process writes.
    pub(crate) async fn recover(mut self, meta: Arc<dyn MetaStore>) -> Result<Self> {
        let records = Records::new(meta);
        let keys = records.keys().await?;
        self.records = Some(records);
        for key in keys {
            if let Err(error) = self.read(&key).await {
                tracing::error!(%key, %error, "its ledger cannot be read");
                self.stale().insert(key);
            }
        }
        Ok(self)
    }

    /// Restores keys that have no ledger yet from the ledgers of a bucket.
    pub(crate) async fn restore(mut self, origin: Arc<dyn Ledgers>) -> Result<Self> {
        let keys = origin.keys().await?;
        self.origin = Some(origin);
        for key in keys.into_iter().filter(|key| !self.slots().contains_key(key)) {
            if let Err(error) = self.read(&key).await {
                tracing::error!(%key, %error, "its ledger in the bucket cannot be read");
                self.stale().insert(key);
            }
        }
        Ok(self)
    }

    /// Reads the records of a key.
    async fn read(&self, key: &Key) -> Result<()> {
        let record = match &self.records {
            Some(records) => records.load(key).await?,
            None => Record::default(),
        };
        // A key without a record has at most a folder.
        let state = if record.number == 0 {
            initial_state(self.origin.as_ref(), key, &self.default_state).await?
        } else {
            record.state.clone()
        };
        let slot = Slot::new(record, Arc::new(state));
        self.slots().entry(key.clone()).or_insert_with(|| Arc::new(slot));
        Ok(())
    }

    /// Reads the records of a key if they could not be read before.
    async fn ensure_read(&self, key: &Key) -> Result<()> {
        let must_read = self.stale().contains(key);
        if must_read {
            self.read(key).await?;
            self.stale().remove(key);
        }
        Ok(())
    }

    fn stale(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.stale.lock()
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Slot>>> {
        self.slots.lock()
    }

    /// Returns the slot of a key. The slot is created if the key has none.
    fn acquire_slot(&self, key: &Key) -> SlotGuard {
        let new_slot = || Arc::new(Slot::new(Record::default(), self.default_state.clone()));
        let slot = self.slots().entry(key.clone()).or_insert_with(new_slot).clone();
        SlotGuard { ledgers: self.clone(), key: key.clone(), slot: Some(slot) }
    }

    /// Removes a key although other tasks wait for it: a planted bug that the schedules must find.
    #[cfg(feature = "shuttle")]
    pub(crate) fn remove_slot(&self, key: &Key) {
        self.slots().remove(key);
    }
}

/// A reference to a slot in use. The last reference removes the slot if nothing was written.
///
/// So requests for keys that do not exist use no memory, also if they are cancelled.
struct SlotGuard {
    ledgers: OwnedLedgers,
    key: Key,
    /// `Some` until the guard is dropped.
    slot: Option<Arc<Slot>>,
}

impl SlotGuard {
    fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let mut slots = self.ledgers.slots();
        // Under the lock of the map: of two guards that are dropped at once, the second sees itself as the last.
        self.slot = None;
        let is_unused = |slot: &Arc<Slot>| {
            // The map holds the only reference.
            Arc::strong_count(slot) == 1
                && **slot.state.borrow() == *self.ledgers.default_state
                && slot.record.try_lock().is_ok_and(|record| record.is_blank())
        };
        if slots.get(&self.key).is_some_and(is_unused) {
            slots.remove(&self.key);
        }
    }
}

impl Slot {
    fn new(record: Record, state: Arc<State>) -> Self {
        Self { record: Arc::new(AsyncMutex::new(record)), state: watch::channel(state).0 }
    }
}

#[async_trait]
impl Ledgers for OwnedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        self.ensure_read(key).await?;
        let slots = self.slots();
        let state = slots.get(key).map(|slot| slot.state.borrow().clone());
        Ok(state.unwrap_or_else(|| self.default_state.clone()))
    }

    async fn lock(&self, key: &Key) -> Result<Box<dyn LedgerGuard>> {
        self.ensure_read(key).await?;
        let guard = self.acquire_slot(key);
        let record = guard.slot().record.clone().lock_owned().await;
        let state = guard.slot().state.borrow().clone();
        Ok(Box::new(OwnedLedgerGuard { state, record, guard }))
    }

    async fn begin_session(&self, _id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        Ok(None)
    }

    async fn has_ended(&self, _id: SessionId) -> Result<bool> {
        Ok(false)
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys: Vec<Key> = self.slots().keys().cloned().collect();
        keys.extend(self.stale().iter().cloned());
        Ok(keys)
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, timeout: Duration) {
        let guard = self.acquire_slot(key);
        let mut states = guard.slot().state.subscribe();
        let is_different = |state: &Arc<State>| !Arc::ptr_eq(state, seen) && **state != **seen;
        // The end of the timeout is a valid result.
        select! {
            _ = states.wait_for(is_different) => {}
            () = sleep(timeout) => {}
        }
    }
}

struct OwnedLedgerGuard {
    state: Arc<State>,
    /// The lock. It is declared before `guard`, so it is released before the slot.
    record: OwnedMutexGuard<Record>,
    guard: SlotGuard,
}

#[async_trait]
impl LedgerGuard for OwnedLedgerGuard {
    fn state(&self) -> &State {
        &self.state
    }

    async fn sync(&mut self) -> Result<()> {
        match &self.guard.ledgers.records {
            Some(records) => records.sync(&self.guard.key, &self.record).await,
            None => Ok(()),
        }
    }

    async fn save(&mut self, next: State) -> Result<bool> {
        // A change of leases alone needs no record. So reads work if the disk is full or the newest record is in doubt.
        if let Some(records) = &self.guard.ledgers.records
            && !self.state.differs_only_in_leases(&next)
            && !records.append(&self.guard.key, &mut self.record, next.durable_state()).await?
        {
            let key = &self.guard.key;
            let text = format_args!("key `{key}` was written by another process than its daemon");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.state = Arc::new(next);
        self.guard.slot().state.send_replace(self.state.clone());
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[tokio::test]
    async fn cancelled_waits_leave_no_slot() {
        let (ledgers, key) = (OwnedLedgers::default(), Key::new("policy").unwrap());
        let seen = ledgers.state(&key).await.unwrap();
        let guard = ledgers.lock(&key).await.unwrap();
        // Both calls are cancelled while they wait.
        let short = Duration::from_millis(10);
        let next = tokio::time::timeout(short, ledgers.lock(&key)).await;
        assert!(next.is_err());
        drop(guard);
        let changed = ledgers.changed(&key, &seen, Duration::from_hours(1));
        tokio::time::timeout(short, changed).await.unwrap_err();
        assert_eq!(ledgers.keys().await.unwrap(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn changed_returns_only_for_different_state() {
        let (ledgers, key) = (OwnedLedgers::default(), Key::new("policy").unwrap());
        let seen = ledgers.state(&key).await.unwrap();
        let mut changed = std::pin::pin!(ledgers.changed(&key, &seen, Duration::from_hours(1)));
        let short = Duration::from_millis(10);
        tokio::time::timeout(short, &mut changed).await.unwrap_err();
        let save = async |next| ledgers.lock(&key).await.unwrap().save(next).await.unwrap();
        assert!(save(State::clone(&seen)).await);
        tokio::time::timeout(short, &mut changed).await.unwrap_err();
        assert!(save(State::with_keep(NonZeroU32::new(7).unwrap())).await);
        tokio::time::timeout(short, &mut changed).await.unwrap();
    }
}
