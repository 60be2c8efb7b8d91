//! Ledgers that this process alone advances: in memory, and what of them is durable in records.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::sleep;

use super::records::{Record, Records};
use super::{Ledgers, Turn};
use crate::error::Result;
use crate::key::Key;
use crate::ledger::State;
use crate::meta::MetaStore;

#[derive(Clone, Default)]
pub(crate) struct OwnedLedgers {
    slots: Arc<Mutex<BTreeMap<Key, Arc<Slot>>>>,
    /// What the ledger of a key is before anybody has written it.
    blank: Arc<State>,
    records: Option<Records>,
    /// The keys whose records could not be read so far.
    unread: Arc<Mutex<BTreeSet<Key>>>,
}

/// The ledger of one key.
struct Slot {
    /// Its newest record, for whoever has the turn.
    record: Arc<tokio::sync::Mutex<Record>>,
    state: watch::Sender<Arc<State>>,
}

impl OwnedLedgers {
    /// Ledgers that keep so many versions of a key as long as nobody says otherwise.
    pub(crate) fn keeping(keep: NonZeroU32) -> Self {
        Self { blank: Arc::new(State::keeping(keep)), ..Self::default() }
    }

    /// The same, with what is durable of them in a meta store that nobody else writes.
    pub(crate) async fn recover(mut self, meta: Arc<dyn MetaStore>) -> Result<Self> {
        let records = Records::new(meta);
        let keys = records.keys().await?;
        self.records = Some(records);
        for key in keys {
            if let Err(error) = self.read(&key).await {
                tracing::error!(%key, %error, "its ledger cannot be read");
                self.unread().insert(key);
            }
        }
        Ok(self)
    }

    /// Reads the records of a key.
    async fn read(&self, key: &Key) -> Result<()> {
        let Some(records) = &self.records else { return Ok(()) };
        let record = records.load(key).await?;
        // What was there before is no more than a folder.
        let state = if record.number == 0 { (*self.blank).clone() } else { record.state.clone() };
        let slot = Slot::new(record, Arc::new(state));
        self.slots().entry(key.clone()).or_insert_with(|| Arc::new(slot));
        Ok(())
    }

    /// Proves that the records of a key are known, or reads what could not be read before.
    async fn prove_read(&self, key: &Key) -> Result<()> {
        let is_unread = self.unread().contains(key);
        if is_unread {
            self.read(key).await?;
            self.unread().remove(key);
        }
        Ok(())
    }

    fn unread(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.unread.lock().expect("nobody panics while holding the keys")
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Slot>>> {
        self.slots.lock().expect("nobody panics while holding the ledgers")
    }

    /// The slot of a key, which is made if it is not there.
    fn make(&self, key: &Key) -> Arc<Slot> {
        let blank = || Arc::new(Slot::new(Record::default(), self.blank.clone()));
        self.slots().entry(key.clone()).or_insert_with(blank).clone()
    }

    fn slot(&self, key: &Key) -> Option<Arc<Slot>> {
        self.slots().get(key).cloned()
    }

    /// Nothing is kept of a key that nobody has written: asking for keys costs no memory.
    fn forget_blank(&self, key: &Key) {
        let mut slots = self.slots();
        let is_unused = |slot: &Arc<Slot>| {
            // One is the map's own; whoever has another may be about to write.
            Arc::strong_count(slot) == 1
                && **slot.state.borrow() == *self.blank
                && slot.record.try_lock().is_ok_and(|record| record.is_blank())
        };
        if slots.get(key).is_some_and(is_unused) {
            slots.remove(key);
        }
    }
}

impl Slot {
    fn new(record: Record, state: Arc<State>) -> Self {
        Self { record: Arc::new(tokio::sync::Mutex::new(record)), state: watch::Sender::new(state) }
    }
}

#[async_trait]
impl Ledgers for OwnedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        self.prove_read(key).await?;
        let state = self.slot(key).map(|slot| slot.state.borrow().clone());
        Ok(state.unwrap_or_else(|| self.blank.clone()))
    }

    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>> {
        self.prove_read(key).await?;
        loop {
            let slot = self.make(key);
            let record = slot.record.clone().lock_owned().await;
            // Whoever had the turn before may have found nothing worth keeping.
            if self.slot(key).is_some_and(|current| Arc::ptr_eq(&current, &slot)) {
                let state = slot.state.borrow().clone();
                let (ledgers, key) = (self.clone(), key.clone());
                return Ok(Box::new(OwnedTurn { ledgers, key, state, record, slot: Some(slot) }));
            }
        }
    }

    fn are_shared(&self) -> bool {
        false
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys: Vec<Key> = self.slots().keys().cloned().collect();
        keys.extend(self.unread().iter().cloned());
        Ok(keys)
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration) {
        let slot = self.make(key);
        let mut states = slot.state.subscribe();
        let is_other = |state: &Arc<State>| !Arc::ptr_eq(state, seen) && **state != **seen;
        // That the time is over is an answer too.
        tokio::select! {
            _ = states.wait_for(is_other) => {}
            () = sleep(patience) => {}
        }
        drop((states, slot));
        self.forget_blank(key);
    }
}

struct OwnedTurn {
    ledgers: OwnedLedgers,
    key: Key,
    state: Arc<State>,
    record: OwnedMutexGuard<Record>,
    /// There until it is dropped.
    slot: Option<Arc<Slot>>,
}

#[async_trait]
impl Turn for OwnedTurn {
    fn state(&self) -> &State {
        &self.state
    }

    async fn settle(&mut self) -> Result<()> {
        match &self.ledgers.records {
            Some(records) => records.settle(&self.key, &self.record).await,
            None => Ok(()),
        }
    }

    async fn save(&mut self, next: State) -> Result<()> {
        // Who reads needs no disk, even if that is full and the newest record in doubt.
        if let Some(records) = &self.ledgers.records
            && !self.state.differs_in_leases_alone(&next)
        {
            records.append(&self.key, &mut self.record, next.durable()).await?;
        }
        self.state = Arc::new(next);
        if let Some(slot) = &self.slot {
            slot.state.send_replace(self.state.clone());
        }
        Ok(())
    }
}

impl Drop for OwnedTurn {
    fn drop(&mut self) {
        let is_blank = *self.state == *self.ledgers.blank && self.record.is_blank();
        let mut slots = self.ledgers.slots();
        // The map's and this one: nobody else waits for the turn or watches.
        let slot = self.slot.take();
        if is_blank && slot.is_some_and(|slot| Arc::strong_count(&slot) == 2) {
            slots.remove(&self.key);
        }
    }
}
