//! Ledgers that this process alone advances: in memory.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{OwnedMutexGuard, watch};

use super::{Ledgers, Turn};
use crate::environment::pause;
use crate::error::Result;
use crate::key::Key;
use crate::ledger::State;

#[derive(Clone, Default)]
pub(crate) struct OwnedLedgers {
    slots: Arc<Mutex<BTreeMap<Key, Arc<Slot>>>>,
    /// What the ledger of a key is before anybody has written it.
    blank: Arc<State>,
}

/// The ledger of one key.
struct Slot {
    turn: Arc<tokio::sync::Mutex<()>>,
    state: watch::Sender<Arc<State>>,
}

impl OwnedLedgers {
    /// Ledgers that keep so many versions of a key as long as nobody says otherwise.
    pub(crate) fn keeping(keep: NonZeroU32) -> Self {
        Self { slots: Arc::default(), blank: Arc::new(State::keeping(keep)) }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Slot>>> {
        self.slots.lock().expect("nobody panics while holding the ledgers")
    }

    /// The slot of a key, which is made if it is not there.
    fn make(&self, key: &Key) -> Arc<Slot> {
        let blank = || {
            Arc::new(Slot { turn: Arc::default(), state: watch::Sender::new(self.blank.clone()) })
        };
        self.slots().entry(key.clone()).or_insert_with(blank).clone()
    }

    fn slot(&self, key: &Key) -> Option<Arc<Slot>> {
        self.slots().get(key).cloned()
    }
}

#[async_trait]
impl Ledgers for OwnedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        let state = self.slot(key).map(|slot| slot.state.borrow().clone());
        Ok(state.unwrap_or_else(|| self.blank.clone()))
    }

    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>> {
        loop {
            let slot = self.make(key);
            let lock = slot.turn.clone().lock_owned().await;
            let state = slot.state.borrow().clone();
            let turn =
                OwnedTurn { ledgers: self.clone(), key: key.clone(), slot, state, _lock: lock };
            // Whoever had the turn before may have found nothing worth keeping.
            if turn.is_current() {
                return Ok(Box::new(turn));
            }
        }
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        Ok(self.slots().keys().cloned().collect())
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration) {
        let slot = self.make(key);
        let mut states = slot.state.subscribe();
        let is_other = |state: &Arc<State>| !Arc::ptr_eq(state, seen) && **state != **seen;
        // That the time is over is an answer too.
        tokio::select! {
            _ = states.wait_for(is_other) => {}
            () = pause(patience) => {}
        }
        drop((states, slot));
        self.forget_empty(key);
    }
}

impl OwnedLedgers {
    /// Nothing is kept of a key that nobody has written: asking for keys costs no memory.
    fn forget_empty(&self, key: &Key) {
        let mut slots = self.slots();
        let is_unused = |slot: &Arc<Slot>| {
            // One is the map's own; whoever has another may be about to write.
            Arc::strong_count(slot) == 1 && **slot.state.borrow() == *self.blank
        };
        if slots.get(key).is_some_and(is_unused) {
            slots.remove(key);
        }
    }
}

struct OwnedTurn {
    ledgers: OwnedLedgers,
    key: Key,
    slot: Arc<Slot>,
    state: Arc<State>,
    _lock: OwnedMutexGuard<()>,
}

impl OwnedTurn {
    fn is_current(&self) -> bool {
        self.ledgers.slot(&self.key).is_some_and(|slot| Arc::ptr_eq(&slot, &self.slot))
    }
}

#[async_trait]
impl Turn for OwnedTurn {
    fn state(&self) -> &State {
        &self.state
    }

    async fn save(&mut self, next: State) -> Result<()> {
        self.state = Arc::new(next);
        self.slot.state.send_replace(self.state.clone());
        Ok(())
    }
}

impl Drop for OwnedTurn {
    fn drop(&mut self) {
        let mut slots = self.ledgers.slots();
        // The map's and this one: nobody else waits for the turn or watches.
        if *self.state == *self.ledgers.blank && Arc::strong_count(&self.slot) == 2 {
            slots.remove(&self.key);
        }
    }
}
