//! Meta stores: the storage of the records of ledgers.

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

/// A store of small immutable records by name, on which ledgers are built.
///
/// # Contract
///
/// - A record exists completely or not at all, also after a crash, and never changes. It is durable once
///   `create` or `sync` has returned.
/// - If several processes create the same name at the same time, one of them succeeds. A call that returns an error may
///   have created the record.
/// - Names are separated by `/`. A listing returns the names directly below a name. It may lack the newest records.
#[async_trait]
pub(crate) trait MetaStore: Send + Sync {
    /// Creates a record. Returns `false` if a record with this name exists.
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool>;

    /// Lists names as `list` does, with the records if the backend returns them with the listing.
    async fn list_records(&self, name: &str) -> Result<Vec<(String, Option<Vec<u8>>)>> {
        Ok(self.list(name).await?.into_iter().map(|name| (name, None)).collect())
    }

    /// Creates the next record of a folder, after `last` if the folder has records.
    ///
    /// Returns `false` if a record with the name `next` exists, or if the backend detects that `last` is no longer the
    /// last record. Records older than `last` may be deleted in the same operation.
    async fn create_next(
        &self,
        folder: &str,
        _last: Option<&str>,
        next: &str,
        record: Vec<u8>,
    ) -> Result<bool> {
        self.create(&format!("{folder}/{next}"), record).await
    }

    /// Makes the records directly below `name` durable, also those of other processes.
    ///
    /// A process may have been killed after it created a record and before the record was durable.
    async fn sync(&self, name: &str) -> Result<()>;

    /// Returns a record, if it exists.
    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Returns the last components of the names directly below `name`, sorted.
    async fn list(&self, name: &str) -> Result<Vec<String>>;

    /// Deletes a record, if it exists.
    async fn delete(&self, name: &str) -> Result<()>;

    /// Deletes superseded records directly below `folder`, oldest first. Returns the names of those that stay for now.
    ///
    /// A record that cannot be deleted now is listed again the next time.
    async fn delete_superseded(&self, folder: &str, names: Vec<String>) -> Vec<String> {
        for name in names {
            let _ = self.delete(&format!("{folder}/{name}")).await;
        }
        Vec::new()
    }

    /// Returns how long a superseded record stays at least, for a backend whose locks do not exclude other processes.
    ///
    /// A process that takes longer between reading a record and creating the next one could create a record that
    /// existed before and was deleted.
    fn grace_period(&self) -> Option<Duration> {
        None
    }

    /// Whether a lock excludes other processes, and not only other tasks of this process.
    fn excludes_other_processes(&self) -> bool {
        true
    }

    /// Waits for the lock `name`, and holds it until the result is dropped. Fails after one minute.
    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>>;

    /// Holds the session `name` until the result is dropped or this process ends.
    ///
    /// Processes of other hosts find the record under this name.
    async fn hold_session(&self, name: &str, _record: Vec<u8>) -> Result<Box<dyn Any + Send>> {
        self.lock(name).await
    }

    /// Whether the session `name` has ended, as far as other processes can detect. If so, its remains are removed.
    async fn has_ended(&self, name: &str) -> Result<bool>;

    /// Watches for changes directly below `name`. The watch ends after `timeout`.
    fn watch(&self, _name: &str, timeout: Duration) -> Box<dyn Watch> {
        Box::new(PollingWatch::new(Duration::from_millis(100), timeout))
    }
}

/// Opens the meta store at an address, which several hosts share.
///
/// # Errors
///
/// - `Invalid` if the address is not valid, or without the feature `etcd`.
/// - `Unreachable` if no server answers there.
/// - `Refused` if the server denies access.
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

/// A watch for changes of records.
#[async_trait]
pub(crate) trait Watch: Send {
    /// Returns when something may have changed, or `false` when the timeout of the watch is over.
    async fn changed(&mut self) -> bool;
}

/// A watch that polls: it reports a possible change after an interval, which doubles up to a maximum.
struct PollingWatch {
    interval: Duration,
    max_interval: Duration,
    remaining: Duration,
}

impl PollingWatch {
    fn new(max_interval: Duration, timeout: Duration) -> Self {
        Self { interval: Duration::from_millis(1), max_interval, remaining: timeout }
    }
}

#[async_trait]
impl Watch for PollingWatch {
    async fn changed(&mut self) -> bool {
        if self.remaining.is_zero() {
            return false;
        }
        sleep(self.interval.min(self.remaining)).await;
        self.remaining = self.remaining.saturating_sub(self.interval);
        self.interval = (self.interval * 2).min(self.max_interval);
        true
    }
}

/// Locks by name within this process.
#[derive(Debug, Default)]
struct NameLocks(Lock<BTreeMap<String, Arc<AsyncMutex<()>>>>);

impl NameLocks {
    async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock();
            locks.entry(name.to_owned()).or_default().clone()
        };
        lock.lock_owned().await
    }

    #[cfg(any(test, feature = "shuttle"))]
    fn is_free(&self, name: &str) -> bool {
        let locks = self.0.lock();
        locks.get(name).is_none_or(|lock| lock.try_lock().is_ok())
    }
}
