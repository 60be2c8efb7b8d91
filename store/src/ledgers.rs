//! Ledgers by key: where their states are, and who may advance one now.

mod owned;
mod records;
mod shared;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::key::Key;
use crate::ledger::State;

pub(crate) use owned::OwnedLedgers;
pub(crate) use shared::SharedLedgers;

/// The ledgers of all keys.
#[async_trait]
pub(crate) trait Ledgers: Send + Sync {
    /// The ledger of a key as it is now; one that was never written is empty.
    async fn state(&self, key: &Key) -> Result<Arc<State>>;

    /// Waits until nobody else advances the ledger of a key; nobody does until the turn is dropped.
    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>>;

    /// The keys that have a ledger, in no order.
    async fn keys(&self) -> Result<Vec<Key>>;

    /// Returns when the ledger of a key may be another than the one that was seen, and after
    /// `patience` at the latest.
    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration);
}

/// The right to advance one ledger.
#[async_trait]
pub(crate) trait Turn: Send {
    /// The ledger, which nobody else advances.
    fn state(&self) -> &State;

    /// Makes this its state.
    async fn save(&mut self, next: State) -> Result<()>;
}
