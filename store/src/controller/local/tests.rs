use std::time::Duration;

use super::owed::Proving;
use super::*;
use crate::controller::folder::write;
use crate::controller::{Catalog, digest, folder_of};
use crate::disk::Disk;
use crate::environment::SystemEnvironment;
use crate::ledger::{Durability, Selection};
use crate::ledgers::{OwnedLedgers, SharedLedgers};
use crate::meta::DirectoryMeta;
use crate::volume::{DirectoryVolume, MemoryVolume, Near, Reservation};
use crate::{PutOptions, Store};

/// A volume of which the next call of a name fails.
#[derive(Clone, Default)]
struct Failing(MemoryVolume, Arc<Mutex<Option<&'static str>>>);

impl Failing {
    fn fail(&self, call: &'static str) {
        *self.1.lock().unwrap() = Some(call);
    }

    fn may(&self, call: &str) -> Result<()> {
        match self.1.lock().unwrap().take_if(|failing| *failing == call) {
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::Io, "the disk says no")),
        }
    }

    fn controller(&self) -> LocalController {
        let ledgers = Arc::new(OwnedLedgers::default());
        LocalController::new(ledgers, Arc::new(self.clone()), Arc::new(SystemEnvironment))
    }
}

impl Volume for Failing {
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

#[tokio::test]
async fn a_try_that_comes_while_another_one_is_proven_hears_how_that_ends() {
    let (volume, key) = (MemoryVolume::default(), Key::new("policy").unwrap());
    let ledgers = Arc::new(OwnedLedgers::default());
    let controller =
        LocalController::new(ledgers, Arc::new(volume.clone()), Arc::new(SystemEnvironment));
    let proposal = Proposal::alone(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let dict = tssd_format::StateDict::new();
    let archive = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let bytes = archive.as_bytes();
    write(&volume, &place.path(0), bytes, Durability::Memory).unwrap();
    let other = Proving::begin(&controller, place.id).unwrap();
    let lens = [u64::try_from(bytes.len()).unwrap()];
    let mut commit = std::pin::pin!(controller.commit(&place, digest(bytes), &lens));
    tokio::time::timeout(Duration::from_millis(20), &mut commit).await.unwrap_err();
    drop(other);
    assert!(commit.await.unwrap().visible);
}

#[tokio::test]
async fn a_disk_that_fails_at_the_proof_is_not_the_writers_fault() {
    let (volume, key) = (Failing::default(), Key::new("policy").unwrap());
    let store = Store::new(volume.controller());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    volume.fail("open");
    let error = store.put_state_dict(&key, &dict, &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(store.put_state_dict(&key, &dict, &options).await.unwrap().visible);
}

#[tokio::test]
async fn what_another_try_left_is_owed_until_it_is_deleted() {
    let (volume, key) = (Failing::default(), Key::new("policy").unwrap());
    let controller = volume.controller();
    let store = Store::new(controller.clone());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    let put = store.put_state_dict(&key, &dict, &options).await.unwrap();
    let folder = folder_of(&key, put.epoch, put.version, put.id);
    let left = format!("{folder}/0-{:032x}.tssd", 7);
    let left = volume.0.reserve(&left, 0, Durability::Memory);
    assert!(left.unwrap().seal().unwrap());
    volume.fail("list");
    store.delete(&key, None).await.unwrap_err();
    controller.reclaim_owed(&key).await.unwrap();
    assert_eq!(volume.0.list(&folder).unwrap(), [""; 0]);
}

#[tokio::test]
async fn who_withdraws_late_leaves_the_next_version_of_the_number_alone() {
    let root = tempfile::tempdir().unwrap();
    let disk = Disk::at(root.path().canonicalize().unwrap());
    let ledgers = SharedLedgers::new(Arc::new(DirectoryMeta::new(disk.clone())));
    let volume = Arc::new(DirectoryVolume::new(disk));
    let controller =
        LocalController::new(Arc::new(ledgers), volume.clone(), Arc::new(SystemEnvironment));
    let (key, proposal) = (Key::new("policy").unwrap(), Proposal::alone(1, Durability::Disk));
    let (first, _) = controller.open(&key, &proposal, || true).await.unwrap();
    controller.delete(&key, Selection::All).await.unwrap();
    let (second, _) = controller.open(&key, &proposal, || true).await.unwrap();
    assert_ne!(first.folder(), second.folder());
    let reservation = volume.reserve(&second.path(0), 1, Durability::Disk).unwrap();
    controller.withdraw(&first, 1).await;
    assert!(reservation.seal().unwrap());
    // His own folder he takes along.
    controller.withdraw(&second, 1).await;
    assert!(!root.path().join(second.folder()).exists());
}

#[tokio::test]
async fn who_has_no_time_to_wait_is_not_stopped_by_the_dead() {
    let root = tempfile::tempdir().unwrap();
    let disk = Disk::at(root.path().canonicalize().unwrap());
    // As a process each.
    let controller = || {
        let ledgers = SharedLedgers::new(Arc::new(DirectoryMeta::new(disk.clone())));
        let volume = Arc::new(DirectoryVolume::new(disk.clone()));
        LocalController::new(Arc::new(ledgers), volume, Arc::new(SystemEnvironment))
    };
    let key = Key::new("policy").unwrap();
    let numbered = |number| Proposal::alone(number, Durability::Disk);
    let killed = controller();
    for number in [1, 2] {
        killed.open(&key, &numbered(number), || true).await.unwrap();
    }
    // While it lives, two open versions are in the way.
    let other = controller();
    let error = other.open(&key, &numbered(3), || true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    drop(killed);
    let (place, _) = other.open(&key, &numbered(3), || true).await.unwrap();
    assert!(place.folder().contains("-3-"), "{}", place.folder());
}

#[test]
fn what_a_killed_process_has_written_is_taken_over_if_it_is_the_same() {
    let root = tempfile::tempdir().unwrap();
    let volume = DirectoryVolume::new(Disk::at(root.path().canonicalize().unwrap()));
    let put = |bytes: &[u8]| write(&volume, "policy/0-1-7/manifest.tssd", bytes, Durability::Disk);
    put(b"what it is").unwrap();
    // Who proves the version after it writes the same once more.
    put(b"what it is").unwrap();
    for other in [&b"what it was"[..], b"what it iz", b"what it i", b""] {
        assert_eq!(put(other).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
