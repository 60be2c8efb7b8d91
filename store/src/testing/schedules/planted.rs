//! What is planted below a controller: ledgers and volumes with bugs.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use shuttle::future::{JoinHandle, spawn};

use super::dawdle;
use crate::blob::backend::MemoryVolume;
use crate::blob::{Part, Reservation, Volume, split};
use crate::error::Result;
use crate::io::local_archive::Near;
use crate::key::Key;
use crate::ledger::{Durability, SessionId, State};
use crate::metadata::{Ledgers, Turn};
use crate::route::Route;

/// Ledgers whose turns are not waited for: what is saved replaces whatever was saved meanwhile.
pub(super) struct Hasty(pub(super) Arc<dyn Ledgers>);

#[async_trait]
impl Ledgers for Hasty {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        self.0.state(key).await
    }

    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>> {
        let state = self.0.state(key).await?;
        Ok(Box::new(HastyTurn { ledgers: self.0.clone(), key: key.clone(), state }))
    }

    async fn session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        self.0.session(id).await
    }

    async fn has_ended(&self, id: SessionId) -> Result<bool> {
        self.0.has_ended(id).await
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        self.0.keys().await
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration) {
        self.0.changed(key, seen, patience).await;
    }
}

struct HastyTurn {
    ledgers: Arc<dyn Ledgers>,
    key: Key,
    state: Arc<State>,
}

#[async_trait]
impl Turn for HastyTurn {
    fn state(&self) -> &State {
        &self.state
    }

    async fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    async fn save(&mut self, next: State) -> Result<bool> {
        self.ledgers.turn(&self.key).await?.save(next).await
    }
}

/// A volume whose blobs have their names before their bytes.
#[derive(Clone, Default)]
pub(super) struct Torn {
    volume: MemoryVolume,
    /// What is still to be written.
    late: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Torn {
    /// All is written.
    pub(super) async fn end(&self) {
        let late = std::mem::take(&mut *self.late.lock().unwrap());
        for written in late {
            written.await.unwrap();
        }
    }
}

struct Reserved {
    torn: Torn,
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

impl Reservation for Reserved {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        split(&mut self.bytes, lens)
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let Self { torn: Torn { volume, late }, name, bytes } = *self;
        let is_new = write(&volume, &name, &vec![0; bytes.len()])?;
        if is_new {
            late.lock().unwrap().push(spawn(async move {
                dawdle().await;
                volume.delete(&name).unwrap();
                write(&volume, &name, &bytes).unwrap();
            }));
        }
        Ok(is_new)
    }
}

impl Volume for Torn {
    fn reserve(&self, name: &str, len: u64, _: Durability) -> Result<Box<dyn Reservation>> {
        let bytes = vec![0; usize::try_from(len).unwrap()];
        Ok(Box::new(Reserved { torn: self.clone(), name: name.to_owned(), bytes }))
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
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
