//! The ledgers of all keys: where their states are stored, and the lock to advance one.

pub(crate) mod backend;
mod owned;
mod records;
mod shared;

use std::any::Any;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Result};
use crate::io::sync;
use crate::key::Key;
use crate::ledger::{SessionId, State};

pub(crate) use owned::OwnedLedgers;
pub(crate) use records::{RECORD_VERSION, Records};
pub(crate) use shared::SharedLedgers;

/// The ledgers of all keys.
#[async_trait]
pub(crate) trait Ledgers: Send + Sync {
    /// Returns the current state of the ledger of a key. A key that was never written has an empty ledger.
    async fn state(&self, key: &Key) -> Result<Arc<State>>;

    /// Waits for the lock to advance the ledger of a key. It is released when the result is dropped.
    ///
    /// Not every backend can exclude other processes. So actions under the lock must do no harm if another process
    /// advances the ledger at the same time.
    async fn lock(&self, key: &Key) -> Result<Box<dyn LedgerGuard>>;

    /// Begins the session of this process. It lasts until the result is dropped or the process ends.
    ///
    /// Returns `None` if no other process advances the ledgers.
    async fn begin_session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>>;

    /// Whether a session has ended.
    async fn has_ended(&self, id: SessionId) -> Result<bool>;

    /// Returns the keys that have a ledger, in no particular order.
    async fn keys(&self) -> Result<Vec<Key>>;

    /// Returns when the ledger of a key may differ from `seen`, and after `timeout` at the latest.
    async fn changed(&self, key: &Key, seen: &Arc<State>, timeout: Duration);
}

/// Returns the state of a ledger without records: restored from the bucket `origin`, or else `default_state`.
async fn initial_state(
    origin: Option<&Arc<dyn Ledgers>>,
    key: &Key,
    default_state: &Arc<State>,
) -> Result<State> {
    let found = match origin {
        Some(origin) => origin.state(key).await?,
        None => Arc::default(),
    };
    Ok(if *found == State::default() {
        State::clone(default_state)
    } else {
        found.restored_state()
    })
}

/// Saves the next state of a ledger, as [`LedgerGuard::save`].
///
/// If the caller is cancelled, the save continues and the lock is held until the state is written.
pub(crate) async fn save(mut guard: Box<dyn LedgerGuard>, next: State) -> Result<bool> {
    let mut saving = Box::pin(async move { guard.save(next).await });
    // A save without I/O completes at the first poll, so it needs no task.
    let first_poll = poll_fn(|context| Poll::Ready(saving.as_mut().poll(context)));
    if let Poll::Ready(saved) = first_poll.await {
        return saved;
    }
    let join_error =
        |error| Error::io("a step of a ledger was cut off", std::io::Error::other(error));
    sync::spawn(saving).await.map_err(join_error)?
}

/// The right to advance one ledger.
#[async_trait]
pub(crate) trait LedgerGuard: Send {
    /// Returns the state of the ledger at the time when the lock was acquired.
    fn state(&self) -> &State;

    /// Returns once the state is durable, if the backend makes it durable at all.
    ///
    /// Before that, the caller must not act on this state.
    async fn sync(&mut self) -> Result<()>;

    /// Saves the next state. Returns `false` if another process has advanced the ledger despite the lock.
    async fn save(&mut self, next: State) -> Result<bool>;
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::time::timeout;

    use super::*;
    use crate::blob::backend::MemoryVolume;
    use crate::control::Catalog;
    use crate::engine::local::LocalController;
    use crate::error::ErrorKind;
    use crate::io::disk::TEMPORARY_PREFIX;
    use crate::io::environment::SystemEnvironment;
    use crate::metadata::backend::{MemoryMeta, MetaStore};

    /// A meta store in which a record exists before `create` returns, as on a disk.
    ///
    /// The next `create` can return an error nevertheless.
    #[derive(Default)]
    struct SlowMeta {
        inner: MemoryMeta,
        create_delay: Duration,
        fail_next_create: AtomicBool,
    }

    #[async_trait]
    impl MetaStore for SlowMeta {
        async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
            let created = self.inner.create(name, record).await;
            tokio::time::sleep(self.create_delay).await;
            if self.fail_next_create.swap(false, Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Io, "the folder could not be synced"));
            }
            created
        }

        async fn sync(&self, name: &str) -> Result<()> {
            self.inner.sync(name).await
        }

        async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
            self.inner.get(name).await
        }

        async fn list(&self, name: &str) -> Result<Vec<String>> {
            self.inner.list(name).await
        }

        async fn delete(&self, name: &str) -> Result<()> {
            self.inner.delete(name).await
        }

        async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
            self.inner.lock(name).await
        }

        async fn has_ended(&self, name: &str) -> Result<bool> {
            self.inner.has_ended(name).await
        }
    }

    #[tokio::test]
    async fn record_that_failed_to_sync_is_replaced_by_next_record() {
        let meta = Arc::new(SlowMeta::default());
        let key = Key::new("policy").unwrap();
        let state_with_keep = |keep| State::with_keep(NonZeroU32::new(keep).unwrap());
        let recover = || OwnedLedgers::default().recover(meta.clone());
        let ledgers = recover().await.unwrap();
        let save = async |next| save(ledgers.lock(&key).await.unwrap(), next).await;
        save(state_with_keep(2)).await.unwrap();
        meta.fail_next_create.store(true, Ordering::SeqCst);
        save(state_with_keep(3)).await.unwrap_err();
        // This process still has keep 2. The save changes nothing for it, but the next process must find this state.
        save(state_with_keep(2)).await.unwrap();
        assert_eq!(*recover().await.unwrap().state(&key).await.unwrap(), state_with_keep(2));
        save(state_with_keep(4)).await.unwrap();
        assert_eq!(*recover().await.unwrap().state(&key).await.unwrap(), state_with_keep(4));
    }

    #[tokio::test]
    async fn temporary_file_of_first_record_is_deleted_with_next_record() {
        let (meta, key) = (Arc::new(MemoryMeta::default()), Key::new("policy").unwrap());
        let folder = format!("{}/.ledger", key.to_path());
        meta.create(&format!("{folder}/{TEMPORARY_PREFIX}1"), b"cut off".to_vec()).await.unwrap();
        let ledgers = OwnedLedgers::default().recover(meta.clone()).await.unwrap();
        // A lock without a save changes nothing.
        drop(ledgers.lock(&key).await.unwrap());
        let next = State::with_keep(NonZeroU32::new(2).unwrap());
        save(ledgers.lock(&key).await.unwrap(), next).await.unwrap();
        assert_eq!(meta.list(&folder).await.unwrap(), [format!("{:020}.json", 1)]);
    }

    #[test]
    fn cancelled_step_is_completed() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(async {
            let slow = || {
                Arc::new(SlowMeta { create_delay: Duration::from_secs(1), ..SlowMeta::default() })
            };
            let shared: Arc<dyn Ledgers> = Arc::new(SharedLedgers::new(slow()));
            let owned = OwnedLedgers::default().recover(slow()).await.unwrap();
            for ledgers in [shared, Arc::new(owned)] {
                let volume = Arc::new(MemoryVolume::default());
                let controller = LocalController::new(ledgers, volume, Arc::new(SystemEnvironment));
                let key = Key::new("policy").unwrap();
                for keep in 2..6 {
                    let retain = controller.retain(&key, NonZeroU32::new(keep).unwrap(), None);
                    // Every other call is cancelled before it completes.
                    let limit = Duration::from_millis(if keep % 2 == 0 { 100 } else { 10_000 });
                    match timeout(limit, retain).await {
                        Ok(retained) => retained.unwrap(),
                        Err(_) => assert_eq!(keep % 2, 0),
                    }
                }
            }
        });
    }
}
