//! A controller over ledgers and a volume that fail, wait, or are taken away.

mod keepers;
mod opened;
mod owed;
mod proofs;
mod writers;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::owed::{PROOF_PATIENCE, Proving};
use super::*;
use crate::blob::Reservation;
use crate::blob::backend::{DirectoryVolume, MemoryVolume};
use crate::control::Catalog;
use crate::control::Reached;
use crate::control::layout::folder_of;
use crate::engine::local::folder::write;
use crate::engine::local::lost;
use crate::io::disk::Disk;
use crate::io::environment::SystemEnvironment;
use crate::io::local_archive::Near;
use crate::ledger::{Digest, Durability, JobId, Reason, Refusal, Selection, SessionId};
use crate::metadata::backend::{DirectoryMeta, MemoryMeta};
use crate::metadata::{OwnedLedgers, SharedLedgers, Turn};
use crate::{PutOptions, Store};

type Happening = Box<dyn FnOnce() -> Result<()> + Send>;

/// A volume in which something happens before the next call of a name.
#[derive(Clone, Default)]
struct Hooked(MemoryVolume, Arc<Lock<Option<(&'static str, Happening)>>>);

impl Hooked {
    fn before(&self, call: &'static str, happens: impl FnOnce() -> Result<()> + Send + 'static) {
        *self.1.lock() = Some((call, Box::new(happens)));
    }

    fn fail(&self, call: &'static str) {
        self.before(call, || Err(Error::new(ErrorKind::Io, "the disk says no")));
    }

    fn may(&self, call: &str) -> Result<()> {
        let happens = self.1.lock().take_if(|(awaited, _)| *awaited == call);
        happens.map_or(Ok(()), |(_, happens)| happens())
    }

    fn controller(&self) -> LocalController {
        let ledgers = Arc::new(OwnedLedgers::default());
        LocalController::new(ledgers, Arc::new(self.clone()), Arc::new(SystemEnvironment))
    }
}

impl Volume for Hooked {
    fn is_in_memory(&self, name: &str) -> bool {
        self.0.is_in_memory(name)
    }

    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        self.0.reserve(name, len, durability)
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
        self.may("open")?;
        self.0.open(name)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.0.delete(name)
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.may("list")?;
        self.0.list(name)
    }

    fn route(&self) -> Route {
        self.0.route()
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.0.remove_folder(name)
    }
}

/// That of a process of its own, on a directory; and its volume.
fn on_directory(root: &tempfile::TempDir) -> (LocalController, Arc<DirectoryVolume>) {
    let disk = Disk::at(root.path().canonicalize().unwrap());
    let ledgers = SharedLedgers::new(Arc::new(DirectoryMeta::new(disk.clone())));
    let volume = Arc::new(DirectoryVolume::new(disk));
    let environment = Arc::new(SystemEnvironment);
    (LocalController::new(Arc::new(ledgers), volume.clone(), environment), volume)
}

/// A clock that shows what it is told to.
#[derive(Clone, Default)]
struct Clock(Arc<AtomicU64>);

impl Environment for Clock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }

    fn random(&self) -> u128 {
        SystemEnvironment.random()
    }
}

/// An archive at the place of a writer; its digest, and its length.
fn written(volume: &dyn Volume, place: &Place) -> (Digest, u64) {
    let dict = tssd_format::StateDict::new();
    let archive = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let bytes = archive.as_bytes();
    write(volume, &place.path(0), bytes, place.durability).unwrap();
    (Digest::of(bytes), u64::try_from(bytes.len()).unwrap())
}

/// Commits a version of one archive.
async fn put(
    controller: &LocalController,
    volume: &dyn Volume,
    archive: &tssd_format::TorchStoreStateDict,
) -> Result<Place> {
    let (key, proposal) = (Key::new("policy").unwrap(), Proposal::alone(1, Durability::Memory));
    let (place, _) = controller.open(&key, &proposal, || true).await?;
    let bytes = archive.as_bytes();
    write(volume, &place.path(0), bytes, Durability::Memory)?;
    let lens = [u64::try_from(bytes.len()).unwrap()];
    controller.commit(&place, Digest::of(bytes), &lens).await.map(|_| place)
}
