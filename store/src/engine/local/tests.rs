//! Tests of the local controller, with ledgers and volumes that fail or block.

mod effects;
mod located_cache;
mod replicas;
mod verification;
mod writers;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::blob::Reservation;
use crate::blob::backend::{DirectoryVolume, MemoryVolume};
use crate::control::layout::folder_of;
use crate::control::{Catalog, ReplicaLocator, ResolvedReplicas};
use crate::engine::local::effects::{RunningVerification, VERIFICATION_TIMEOUT};
use crate::engine::local::lost_leaves;
use crate::engine::local::version_folder::write;
use crate::io::disk::Disk;
use crate::io::environment::SystemEnvironment;
use crate::io::local_archive::LocalArchive;
use crate::ledger::{ArchiveDigest, Durability, JobId, Reason, Refusal, Selection, SessionId};
use crate::metadata::backend::{DirectoryMeta, MemoryMeta};
use crate::metadata::{LedgerGuard, OwnedLedgers, SharedLedgers};
use crate::{PutOptions, PutReport, Store, VersionPosition};

type Hook = Box<dyn FnOnce() -> Result<()> + Send>;

/// A volume that runs a hook before the next call of a method.
#[derive(Clone, Default)]
struct HookedVolume(MemoryVolume, Arc<Lock<Option<(&'static str, Hook)>>>);

impl HookedVolume {
    fn before(&self, call: &'static str, hook: impl FnOnce() -> Result<()> + Send + 'static) {
        *self.1.lock() = Some((call, Box::new(hook)));
    }

    fn fail(&self, call: &'static str) {
        self.before(call, || Err(Error::new(ErrorKind::Io, "the disk says no")));
    }

    fn run_hook(&self, call: &str) -> Result<()> {
        let hook = self.1.lock().take_if(|(awaited, _)| *awaited == call);
        hook.map_or(Ok(()), |(_, hook)| hook())
    }

    fn controller(&self) -> LocalController {
        let ledgers = Arc::new(OwnedLedgers::default());
        LocalController::new(ledgers, Arc::new(self.clone()), Arc::new(SystemEnvironment))
    }
}

impl Volume for HookedVolume {
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

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        self.run_hook("open")?;
        self.0.open(name)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.0.delete(name)
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.run_hook("list")?;
        self.0.list(name)
    }

    fn route(&self) -> Route {
        self.0.route()
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.0.remove_folder(name)
    }
}

/// Returns the controller of a separate process on a directory, and its volume.
fn directory_controller(root: &tempfile::TempDir) -> (LocalController, Arc<DirectoryVolume>) {
    let disk = Disk::at(root.path().canonicalize().unwrap());
    let ledgers = SharedLedgers::new(Arc::new(DirectoryMeta::new(disk.clone())));
    let volume = Arc::new(DirectoryVolume::new(disk));
    let environment = Arc::new(SystemEnvironment);
    (LocalController::new(Arc::new(ledgers), volume.clone(), environment), volume)
}

/// A clock whose time the test sets.
#[derive(Clone, Default)]
struct Clock(Arc<AtomicU64>);

impl Environment for Clock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }

    fn random_id(&self) -> u128 {
        SystemEnvironment.random_id()
    }
}

/// Writes an archive at a placement. Returns its digest and its length.
fn write_archive(volume: &dyn Volume, place: &ArchivePlacement) -> (ArchiveDigest, u64) {
    let dict = tssd_format::StateDict::new();
    let archive = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let bytes = archive.as_bytes();
    write(volume, &place.path(0), bytes, place.durability).unwrap();
    (ArchiveDigest::compute(bytes), u64::try_from(bytes.len()).unwrap())
}

/// Commits a version of one archive.
async fn put(
    controller: &LocalController,
    volume: &dyn Volume,
    archive: &tssd_format::TorchStoreStateDict,
) -> Result<ArchivePlacement> {
    let (key, proposal) =
        (Key::new("policy").unwrap(), Proposal::single_writer(1, Durability::Memory));
    let (place, _) = controller.open(&key, &proposal, || true).await?;
    let bytes = archive.as_bytes();
    write(volume, &place.path(0), bytes, Durability::Memory)?;
    let lens = [u64::try_from(bytes.len()).unwrap()];
    controller.commit(&place, ArchiveDigest::compute(bytes), &lens).await.map(|_| place)
}

/// Returns the position of a version that was put.
fn position(put: &PutReport) -> VersionPosition {
    VersionPosition { epoch: put.epoch, number: put.version }
}
