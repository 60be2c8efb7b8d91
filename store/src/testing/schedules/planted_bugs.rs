//! Ledgers and volumes with planted bugs, for use below a controller.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use shuttle::future::{JoinHandle, spawn};

use super::yield_randomly;
use crate::blob::backend::MemoryVolume;
use crate::blob::{Part, Reservation, Volume, split};
use crate::error::Result;
use crate::io::local_archive::LocalArchive;
use crate::key::Key;
use crate::ledger::{Durability, SessionId, State};
use crate::metadata::{LedgerGuard, Ledgers};
use crate::route::Route;

/// Ledgers without mutual exclusion.
///
/// A save overwrites the states that other tasks have saved meanwhile.
pub(super) struct UnlockedLedgers(pub(super) Arc<dyn Ledgers>);

#[async_trait]
impl Ledgers for UnlockedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        self.0.state(key).await
    }

    async fn lock(&self, key: &Key) -> Result<Box<dyn LedgerGuard>> {
        let state = self.0.state(key).await?;
        Ok(Box::new(UnlockedGuard { ledgers: self.0.clone(), key: key.clone(), state }))
    }

    async fn begin_session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        self.0.begin_session(id).await
    }

    async fn has_ended(&self, id: SessionId) -> Result<bool> {
        self.0.has_ended(id).await
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        self.0.keys().await
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, timeout: Duration) {
        self.0.changed(key, seen, timeout).await;
    }
}

struct UnlockedGuard {
    ledgers: Arc<dyn Ledgers>,
    key: Key,
    state: Arc<State>,
}

#[async_trait]
impl LedgerGuard for UnlockedGuard {
    fn state(&self) -> &State {
        &self.state
    }

    async fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    async fn save(&mut self, next: State) -> Result<bool> {
        self.ledgers.lock(&self.key).await?.save(next).await
    }
}

/// A volume whose blobs get their names before their bytes are written.
#[derive(Clone, Default)]
pub(super) struct TornVolume {
    volume: MemoryVolume,
    /// Tasks that write the bytes of named blobs.
    pending: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl TornVolume {
    /// Waits until the bytes of all blobs are written.
    pub(super) async fn finish_writes(&self) {
        let pending = std::mem::take(&mut *self.pending.lock().unwrap());
        for task in pending {
            task.await.unwrap();
        }
    }
}

struct TornReservation {
    torn: TornVolume,
    name: String,
    bytes: Vec<u8>,
}

fn write(volume: &MemoryVolume, name: &str, bytes: &[u8]) -> Result<bool> {
    let len = u64::try_from(bytes.len()).unwrap();
    let mut reservation = volume.reserve(name, len, Durability::Memory)?;
    for part in &mut reservation.parts(&[len]) {
        part.write(bytes)?;
    }
    reservation.seal()
}

impl Reservation for TornReservation {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        split(&mut self.bytes, lens)
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let Self { torn: TornVolume { volume, pending }, name, bytes } = *self;
        let is_new = write(&volume, &name, &vec![0; bytes.len()])?;
        if is_new {
            pending.lock().unwrap().push(spawn(async move {
                yield_randomly().await;
                volume.delete(&name).unwrap();
                write(&volume, &name, &bytes).unwrap();
            }));
        }
        Ok(is_new)
    }
}

impl Volume for TornVolume {
    fn reserve(&self, name: &str, len: u64, _: Durability) -> Result<Box<dyn Reservation>> {
        let bytes = vec![0; usize::try_from(len).unwrap()];
        Ok(Box::new(TornReservation { torn: self.clone(), name: name.to_owned(), bytes }))
    }

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        self.volume.open(name)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.volume.delete(name)
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.volume.list(name)
    }

    fn route(&self) -> Route {
        self.volume.route()
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.volume.remove_folder(name)
    }
}
