//! Where the ledger's records are kept.

#[cfg(test)]
mod conformance;
mod directory;
#[cfg(any(test, feature = "shuttle"))]
mod memory;
#[cfg(feature = "object")]
mod object;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::sync::{AsyncMutex, Mutex, OwnedMutexGuard, sleep};

pub(crate) use directory::DirectoryMeta;
#[cfg(any(test, feature = "shuttle"))]
pub(crate) use memory::MemoryMeta;
#[cfg(feature = "object")]
pub(crate) use object::ObjectMeta;

/// Small records by name, created once: what a ledger needs of the thing that it runs over.
///
/// # Contract
///
/// - A record is there completely or not at all, also after a crash, and never changes. It is durable once
///   `create` or `settle` has returned.
/// - Of several that create one name at once, one succeeds. Who is answered by an error may have succeeded.
/// - Names are `/`-separated; a listing gives the names directly below one. It may lack what was created last.
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

    /// Deletes records directly below `folder` that others have followed, oldest first, and gives the names of
    /// those that stay for now. What cannot be deleted now is listed the next time too.
    async fn retire(&self, folder: &str, names: Vec<String>) -> Vec<String> {
        for name in names {
            let _ = self.delete(&format!("{folder}/{name}")).await;
        }
        Vec::new()
    }

    /// How long a record stays at least after another one has followed it, where no lock keeps others away: who
    /// takes longer than that from reading one to creating the next could create what was there and is deleted.
    fn grace(&self) -> Option<Duration> {
        None
    }

    /// Waits until nobody else holds `name`, and holds it until the result is dropped; fails after a minute. Where
    /// other processes cannot be kept away ([`MetaStore::grace`]), it is this one's alone.
    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>>;

    /// Whether nobody holds `name`, or whoever did has ended, as far as other processes can tell; then what is left
    /// of the lock is removed.
    async fn has_ended(&self, name: &str) -> Result<bool>;

    /// Tells of changes directly below `name`, for as long as `patience` lasts.
    fn watch(&self, _name: &str, patience: Duration) -> Box<dyn Watch> {
        Box::new(Poll::new(Duration::from_millis(100), patience))
    }
}

/// Who waits for changes.
#[async_trait]
pub(crate) trait Watch: Send {
    /// Returns when something may have changed; false if nobody waits any longer.
    async fn changed(&mut self) -> bool;
}

/// Nobody tells: it is looked at again, soon at first.
struct Poll {
    span: Duration,
    longest: Duration,
    left: Duration,
}

impl Poll {
    fn new(longest: Duration, patience: Duration) -> Self {
        Self { span: Duration::from_millis(1), longest, left: patience }
    }
}

#[async_trait]
impl Watch for Poll {
    async fn changed(&mut self) -> bool {
        if self.left.is_zero() {
            return false;
        }
        sleep(self.span.min(self.left)).await;
        self.left = self.left.saturating_sub(self.span);
        self.span = (self.span * 2).min(self.longest);
        true
    }
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
