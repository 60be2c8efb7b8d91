//! Ledgers that this process alone advances: in memory, and what of them is durable in records.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::records::{Record, Records};
use super::{Ledgers, Turn, first};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{AsyncMutex, Lock, MutexGuard, OwnedMutexGuard, select, sleep, watch};
use crate::key::Key;
use crate::ledger::{SessionId, State};
use crate::metadata::backend::MetaStore;

#[derive(Clone, Default)]
pub(crate) struct OwnedLedgers {
    slots: Arc<Lock<BTreeMap<Key, Arc<Slot>>>>,
    /// What the ledger of a key is before anybody has written it.
    blank: Arc<State>,
    records: Option<Records>,
    /// Where keys are found of which nothing is recorded.
    origin: Option<Arc<dyn Ledgers>>,
    /// The keys whose records could not be read so far.
    unread: Arc<Lock<BTreeSet<Key>>>,
}

/// The ledger of one key.
struct Slot {
    /// Its newest record, for whoever has the turn.
    record: Arc<AsyncMutex<Record>>,
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

    /// The same, with the versions that are in a bucket, of the keys that are not known otherwise.
    pub(crate) async fn restore(mut self, origin: Arc<dyn Ledgers>) -> Result<Self> {
        let keys = origin.keys().await?;
        self.origin = Some(origin);
        for key in keys.into_iter().filter(|key| !self.slots().contains_key(key)) {
            if let Err(error) = self.read(&key).await {
                tracing::error!(%key, %error, "its ledger in the bucket cannot be read");
                self.unread().insert(key);
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
        // What was there before is no more than a folder.
        let state = if record.number == 0 {
            first(self.origin.as_ref(), key, &self.blank).await?
        } else {
            record.state.clone()
        };
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
        self.unread.lock()
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Slot>>> {
        self.slots.lock()
    }

    /// The slot of a key, which is made if it is not there, for as long as it is needed.
    fn visit(&self, key: &Key) -> Visit {
        let blank = || Arc::new(Slot::new(Record::default(), self.blank.clone()));
        let slot = self.slots().entry(key.clone()).or_insert_with(blank).clone();
        Visit { ledgers: self.clone(), key: key.clone(), slot: Some(slot) }
    }

    /// Forgets a key whoever waits for it: a bug to be found.
    #[cfg(feature = "shuttle")]
    pub(crate) fn forget(&self, key: &Key) {
        self.slots().remove(key);
    }
}

/// A slot in use. Whoever needs it last takes it away if nothing was written: asking for keys costs no memory,
/// not even if one stops waiting for the answer.
struct Visit {
    ledgers: OwnedLedgers,
    key: Key,
    /// There until it is dropped.
    slot: Option<Arc<Slot>>,
}

impl Visit {
    fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut slots = self.ledgers.slots();
        // Of two that go at once, the second one finds itself alone.
        self.slot = None;
        let is_unused = |slot: &Arc<Slot>| {
            // The map's own.
            Arc::strong_count(slot) == 1
                && **slot.state.borrow() == *self.ledgers.blank
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
        self.prove_read(key).await?;
        let slots = self.slots();
        let state = slots.get(key).map(|slot| slot.state.borrow().clone());
        Ok(state.unwrap_or_else(|| self.blank.clone()))
    }

    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>> {
        self.prove_read(key).await?;
        let visit = self.visit(key);
        let record = visit.slot().record.clone().lock_owned().await;
        let state = visit.slot().state.borrow().clone();
        Ok(Box::new(OwnedTurn { state, record, visit }))
    }

    async fn session(&self, _id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        Ok(None)
    }

    async fn has_ended(&self, _id: SessionId) -> Result<bool> {
        Ok(false)
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys: Vec<Key> = self.slots().keys().cloned().collect();
        keys.extend(self.unread().iter().cloned());
        Ok(keys)
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration) {
        let visit = self.visit(key);
        let mut states = visit.slot().state.subscribe();
        let is_other = |state: &Arc<State>| !Arc::ptr_eq(state, seen) && **state != **seen;
        // That the time is over is an answer too.
        select! {
            _ = states.wait_for(is_other) => {}
            () = sleep(patience) => {}
        }
    }
}

struct OwnedTurn {
    state: Arc<State>,
    /// The turn itself, which ends before the visit does.
    record: OwnedMutexGuard<Record>,
    visit: Visit,
}

#[async_trait]
impl Turn for OwnedTurn {
    fn state(&self) -> &State {
        &self.state
    }

    async fn settle(&mut self) -> Result<()> {
        match &self.visit.ledgers.records {
            Some(records) => records.settle(&self.visit.key, &self.record).await,
            None => Ok(()),
        }
    }

    async fn save(&mut self, next: State) -> Result<bool> {
        // Who reads needs no disk, even if that is full and the newest record in doubt.
        if let Some(records) = &self.visit.ledgers.records
            && !self.state.differs_in_leases_alone(&next)
            && !records.append(&self.visit.key, &mut self.record, next.durable()).await?
        {
            let key = &self.visit.key;
            let text = format_args!("key `{key}` was written by another process than its daemon");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.state = Arc::new(next);
        self.visit.slot().state.send_replace(self.state.clone());
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[tokio::test]
    async fn who_stops_waiting_for_a_key_that_nobody_writes_leaves_nothing_behind() {
        let (ledgers, key) = (OwnedLedgers::default(), Key::new("policy").unwrap());
        let seen = ledgers.state(&key).await.unwrap();
        let turn = ledgers.turn(&key).await.unwrap();
        // Both are dropped while they wait.
        let soon = Duration::from_millis(10);
        let next = tokio::time::timeout(soon, ledgers.turn(&key)).await;
        assert!(next.is_err());
        drop(turn);
        let changed = ledgers.changed(&key, &seen, Duration::from_hours(1));
        tokio::time::timeout(soon, changed).await.unwrap_err();
        assert_eq!(ledgers.keys().await.unwrap(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_hears_of_what_is_other_and_of_nothing_else() {
        let (ledgers, key) = (OwnedLedgers::default(), Key::new("policy").unwrap());
        let seen = ledgers.state(&key).await.unwrap();
        let mut changed = std::pin::pin!(ledgers.changed(&key, &seen, Duration::from_hours(1)));
        let soon = Duration::from_millis(10);
        tokio::time::timeout(soon, &mut changed).await.unwrap_err();
        let save = async |next| ledgers.turn(&key).await.unwrap().save(next).await.unwrap();
        assert!(save(State::clone(&seen)).await);
        tokio::time::timeout(soon, &mut changed).await.unwrap_err();
        assert!(save(State::keeping(NonZeroU32::new(7).unwrap())).await);
        tokio::time::timeout(soon, &mut changed).await.unwrap();
    }
}
