//! Where the ledger's records are kept.

mod directory;
#[cfg(feature = "etcd")]
mod etcd;
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
use crate::io::sync::{AsyncMutex, Lock, OwnedMutexGuard, sleep};

pub(crate) use directory::DirectoryMeta;
#[cfg(feature = "etcd")]
pub(crate) use etcd::EtcdMeta;
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

    /// The same with the records themselves, where they come along.
    async fn list_records(&self, name: &str) -> Result<Vec<(String, Option<Vec<u8>>)>> {
        Ok(self.list(name).await?.into_iter().map(|name| (name, None)).collect())
    }

    /// Creates the record of a folder that follows its last one, if it has any; false if there is one of this name, or
    /// it is seen that `last` is the last no more. What is older than `last` may go with it.
    async fn follow(
        &self,
        folder: &str,
        _last: Option<&str>,
        next: &str,
        record: Vec<u8>,
    ) -> Result<bool> {
        self.create(&format!("{folder}/{next}"), record).await
    }

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

    /// Whether a lock keeps other processes away, and not only others in this one.
    fn keeps_away(&self) -> bool {
        true
    }

    /// Waits until nobody else holds `name`, and holds it until the result is dropped; fails after a minute.
    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>>;

    /// Holds `name` until the result is dropped or this process has ended. Processes of other hosts find the record
    /// under that name.
    async fn session(&self, name: &str, _record: Vec<u8>) -> Result<Box<dyn Any + Send>> {
        self.lock(name).await
    }

    /// Whether nobody holds `name`, or whoever did has ended, as far as other processes can tell; then what is left
    /// of it is removed.
    async fn has_ended(&self, name: &str) -> Result<bool>;

    /// Tells of changes directly below `name`, for as long as `patience` lasts.
    fn watch(&self, _name: &str, patience: Duration) -> Box<dyn Watch> {
        Box::new(Poll::new(Duration::from_millis(100), patience))
    }
}

/// The meta store at an address that several hosts share.
///
/// # Errors
///
/// `Invalid` for an address that is none, or without the feature `etcd`; `Unreachable` or `Refused` if nobody answers
/// there, or lets us.
#[cfg(feature = "etcd")]
pub(crate) async fn open(url: &str) -> Result<Arc<dyn MetaStore>> {
    Ok(Arc::new(EtcdMeta::connect(url).await?))
}

#[cfg(not(feature = "etcd"))]
#[expect(clippy::unused_async, reason = "it is with the feature")]
pub(crate) async fn open(url: &str) -> Result<Arc<dyn MetaStore>> {
    let text = format_args!(
        "`{url}`: etcd needs the feature `etcd`: `cargo install --features etcd`, which needs protoc, or the wheel"
    );
    Err(crate::error::Error::new(crate::error::ErrorKind::Invalid, text))
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
struct Turns(Lock<BTreeMap<String, Arc<AsyncMutex<()>>>>);

impl Turns {
    async fn take(&self, name: &str) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.0.lock();
            turns.entry(name.to_owned()).or_default().clone()
        };
        turn.lock_owned().await
    }

    #[cfg(any(test, feature = "shuttle"))]
    fn is_free(&self, name: &str) -> bool {
        let turns = self.0.lock();
        turns.get(name).is_none_or(|turn| turn.try_lock().is_ok())
    }
}
