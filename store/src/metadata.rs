//! Ledgers by key: where their states are, and who may advance one now.

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
pub(crate) use records::Records;
pub(crate) use shared::SharedLedgers;

/// The ledgers of all keys.
#[async_trait]
pub(crate) trait Ledgers: Send + Sync {
    /// The ledger of a key as it is now; one that was never written is empty.
    async fn state(&self, key: &Key) -> Result<Arc<State>>;

    /// Waits until nobody else advances the ledger of a key. Nobody does until the turn is dropped, as far as others
    /// can be kept away: what is done in a turn must harm nobody even if one cannot be.
    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>>;

    /// Begins the session of a process, which lasts until the result is dropped or the process has ended; none
    /// if no other process advances the ledgers.
    async fn session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>>;

    /// Whether a session has ended.
    async fn has_ended(&self, id: SessionId) -> Result<bool>;

    /// The keys that have a ledger, in no order.
    async fn keys(&self) -> Result<Vec<Key>>;

    /// Returns when the ledger of a key may be another than the one that was seen, and after
    /// `patience` at the latest.
    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration);
}

/// What a ledger is of which nothing is recorded: as the bucket has it from which it is restored, or blank.
async fn first(origin: Option<&Arc<dyn Ledgers>>, key: &Key, blank: &Arc<State>) -> Result<State> {
    let found = match origin {
        Some(origin) => origin.state(key).await?,
        None => Arc::default(),
    };
    Ok(if *found == State::default() { State::clone(blank) } else { found.restored() })
}

/// Makes this the state of a ledger, as [`Turn::save`]. Whoever asks may stop waiting: the turn lasts until it is
/// written.
pub(crate) async fn save(mut turn: Box<dyn Turn>, next: State) -> Result<bool> {
    let mut saving = Box::pin(async move { turn.save(next).await });
    // What is written nowhere is done at once: no other thread has to wake up for it.
    let tried = poll_fn(|context| Poll::Ready(saving.as_mut().poll(context)));
    if let Poll::Ready(saved) = tried.await {
        return saved;
    }
    let ended = |error| Error::io("a step of a ledger was cut off", std::io::Error::other(error));
    sync::spawn(saving).await.map_err(ended)?
}

/// The right to advance one ledger.
#[async_trait]
pub(crate) trait Turn: Send {
    /// The ledger as it was when the turn began.
    fn state(&self) -> &State;

    /// Returns once its state is durable, as far as it ever will be. Before that nothing may be done that only
    /// this state allows.
    async fn settle(&mut self) -> Result<()>;

    /// Makes this its state; false if somebody who could not be kept away has advanced it meanwhile.
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
    use crate::io::disk::TEMPORARY;
    use crate::io::environment::SystemEnvironment;
    use crate::metadata::backend::{MemoryMeta, MetaStore};

    /// Records that are there before whoever has made them hears of it, as those of a disk are; or of an
    /// error, next time.
    #[derive(Default)]
    struct Disklike {
        inner: MemoryMeta,
        takes: Duration,
        fails: AtomicBool,
    }

    #[async_trait]
    impl MetaStore for Disklike {
        async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
            let created = self.inner.create(name, record).await;
            tokio::time::sleep(self.takes).await;
            if self.fails.swap(false, Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Io, "the folder could not be synced"));
            }
            created
        }

        async fn settle(&self, name: &str) -> Result<()> {
            self.inner.settle(name).await
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
    async fn a_record_that_could_not_be_synced_is_replaced_by_the_next_one() {
        let meta = Arc::new(Disklike::default());
        let key = Key::new("policy").unwrap();
        let keeping = |keep| State::keeping(NonZeroU32::new(keep).unwrap());
        let recover = || OwnedLedgers::default().recover(meta.clone());
        let ledgers = recover().await.unwrap();
        let save = async |next| save(ledgers.turn(&key).await.unwrap(), next).await;
        save(keeping(2)).await.unwrap();
        meta.fails.store(true, Ordering::SeqCst);
        save(keeping(3)).await.unwrap_err();
        // What the process goes on with is what the next one finds, though for this one nothing has changed.
        save(keeping(2)).await.unwrap();
        assert_eq!(*recover().await.unwrap().state(&key).await.unwrap(), keeping(2));
        save(keeping(4)).await.unwrap();
        assert_eq!(*recover().await.unwrap().state(&key).await.unwrap(), keeping(4));
    }

    #[tokio::test]
    async fn what_is_left_of_a_first_record_goes_with_the_next_one() {
        let (meta, key) = (Arc::new(MemoryMeta::default()), Key::new("policy").unwrap());
        let folder = format!("{}/.ledger", key.to_path());
        meta.create(&format!("{folder}/{TEMPORARY}1"), b"cut off".to_vec()).await.unwrap();
        let ledgers = OwnedLedgers::default().recover(meta.clone()).await.unwrap();
        // Whoever has had a turn and saved nothing leaves all as it was.
        drop(ledgers.turn(&key).await.unwrap());
        let next = State::keeping(NonZeroU32::new(2).unwrap());
        save(ledgers.turn(&key).await.unwrap(), next).await.unwrap();
        assert_eq!(meta.list(&folder).await.unwrap(), [format!("{:020}.json", 1)]);
    }

    #[test]
    fn who_stops_waiting_leaves_no_step_halfway() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(async {
            let slow =
                || Arc::new(Disklike { takes: Duration::from_secs(1), ..Disklike::default() });
            let shared: Arc<dyn Ledgers> = Arc::new(SharedLedgers::new(slow()));
            let owned = OwnedLedgers::default().recover(slow()).await.unwrap();
            for ledgers in [shared, Arc::new(owned)] {
                let volume = Arc::new(MemoryVolume::default());
                let controller = LocalController::new(ledgers, volume, Arc::new(SystemEnvironment));
                let key = Key::new("policy").unwrap();
                for keep in 2..6 {
                    let retain = controller.retain(&key, NonZeroU32::new(keep).unwrap(), None);
                    // Every other one is not waited for.
                    let patience = Duration::from_millis(if keep % 2 == 0 { 100 } else { 10_000 });
                    match timeout(patience, retain).await {
                        Ok(retained) => retained.unwrap(),
                        Err(_) => assert_eq!(keep % 2, 0),
                    }
                }
            }
        });
    }
}
