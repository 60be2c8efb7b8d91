//! Where the ledger's records are kept.

mod directory;
#[cfg(any(test, feature = "shuttle"))]
mod memory;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::error::Result;
use crate::sync::{AsyncMutex, Mutex, OwnedMutexGuard};

pub(crate) use directory::DirectoryMeta;
#[cfg(any(test, feature = "shuttle"))]
pub(crate) use memory::MemoryMeta;

/// Small records by name, created once: what a ledger needs of the thing that it runs over.
///
/// # Contract
///
/// - A record is there completely or not at all, also after a crash, and never changes. It is durable once
///   `create` or `settle` has returned.
/// - Of several that create one name at once, one succeeds.
/// - Names are `/`-separated; a listing gives the names directly below one.
#[async_trait]
pub(crate) trait MetaStore: Send + Sync {
    /// Creates a record; false if there is one of this name.
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool>;

    /// Makes the records directly below `name` durable, whoever has created them: he may have been killed
    /// before they were.
    async fn settle(&self, name: &str) -> Result<()>;

    /// A record, if it is there.
    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// The last parts of the names directly below `name`, sorted.
    async fn list(&self, name: &str) -> Result<Vec<String>>;

    /// Deletes a record, if it is there.
    async fn delete(&self, name: &str) -> Result<()>;

    /// Waits until nobody else holds `name`, and holds it until the result is dropped; fails after
    /// a minute.
    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>>;

    /// Whether nobody holds `name`, or whoever did has ended; then what is left of the lock is removed.
    async fn is_free(&self, name: &str) -> Result<bool>;
}

/// Whose turn it is in this process: one at a time for each name.
#[derive(Debug, Default)]
struct Turns(Mutex<BTreeMap<String, Arc<AsyncMutex<()>>>>);

impl Turns {
    async fn take(&self, name: &str) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.0.lock().expect("nobody panics while holding the turns");
            turns.entry(name.to_owned()).or_default().clone()
        };
        turn.lock_owned().await
    }

    #[cfg(any(test, feature = "shuttle"))]
    fn is_free(&self, name: &str) -> bool {
        let turns = self.0.lock().expect("nobody panics while holding the turns");
        turns.get(name).is_none_or(|turn| turn.try_lock().is_ok())
    }
}
