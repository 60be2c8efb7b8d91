//! The verification of versions, by this process and by others.

use super::*;

#[tokio::test]
async fn commit_waits_for_verification_by_concurrent_attempt() {
    let (volume, key) = (MemoryVolume::default(), Key::new("policy").unwrap());
    let ledgers = Arc::new(OwnedLedgers::default());
    let controller =
        LocalController::new(ledgers, Arc::new(volume.clone()), Arc::new(SystemEnvironment));
    let proposal = Proposal::single_writer(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let dict = tssd_format::StateDict::new();
    let archive = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let bytes = archive.as_bytes();
    write(&volume, &place.path(0), bytes, Durability::Memory).unwrap();
    let other = RunningVerification::begin(&controller, place.id).unwrap();
    let lens = [u64::try_from(bytes.len()).unwrap()];
    let mut commit =
        std::pin::pin!(controller.commit(&place, ArchiveDigest::compute(bytes), &lens));
    tokio::time::timeout(Duration::from_millis(20), &mut commit).await.unwrap_err();
    drop(other);
    assert!(commit.await.unwrap().visible);
}

#[tokio::test]
async fn io_error_during_verification_is_not_a_rejection() {
    let (volume, key) = (HookedVolume::default(), Key::new("policy").unwrap());
    let store = Store::new(volume.controller());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    volume.fail("open");
    let error = store.put_state_dict(&key, &dict, &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(store.put_state_dict(&key, &dict, &options).await.unwrap().visible);
}

#[tokio::test]
async fn failed_deletion_stays_pending() {
    let (volume, key) = (HookedVolume::default(), Key::new("policy").unwrap());
    let controller = volume.controller();
    let store = Store::new(controller.clone());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    let put = store.put_state_dict(&key, &dict, &options).await.unwrap();
    let folder = folder_of(&key, position(&put), put.id);
    let left = format!("{folder}/0-{:032x}.tssd", 7);
    let left = volume.0.reserve(&left, 0, Durability::Memory);
    assert!(left.unwrap().seal().unwrap());
    volume.fail("list");
    store.delete(&key, None).await.unwrap_err();
    controller.run_pending_deletions(&key).await.unwrap();
    assert_eq!(volume.0.list(&folder).unwrap(), [""; 0]);
}

#[test]
fn existing_manifest_is_accepted_only_if_identical() {
    let root = tempfile::tempdir().unwrap();
    let volume = DirectoryVolume::new(Disk::at(root.path().canonicalize().unwrap()));
    let put = |bytes: &[u8]| write(&volume, "policy/0-1-7/manifest.tssd", bytes, Durability::Disk);
    put(b"what it is").unwrap();
    // A process that takes over the verification writes the same bytes again.
    put(b"what it is").unwrap();
    for other in [&b"what it was"[..], b"what it iz", b"what it i", b""] {
        assert_eq!(put(other).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[tokio::test]
async fn overdue_verification_is_taken_over_unless_running_here() {
    let (volume, clock) = (MemoryVolume::default(), Clock::default());
    let (key, ledgers) = (Key::new("policy").unwrap(), Arc::new(OwnedLedgers::default()));
    let controller =
        LocalController::new(ledgers, Arc::new(volume.clone()), Arc::new(clock.clone()));
    let proposal = Proposal::single_writer(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let dict = tssd_format::StateDict::new();
    let archive = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let bytes = archive.as_bytes();
    write(&volume, &place.path(0), bytes, Durability::Memory).unwrap();
    let running = RunningVerification::begin(&controller, place.id).unwrap();
    let lens = [u64::try_from(bytes.len()).unwrap()];
    {
        let commit = controller.commit(&place, ArchiveDigest::compute(bytes), &lens);
        tokio::time::timeout(Duration::from_millis(20), commit).await.unwrap_err();
    }
    let is_visible = async |now| {
        clock.0.store(now, Ordering::SeqCst);
        controller.state(&key).await.unwrap().head().is_some()
    };
    let timeout = u64::try_from(VERIFICATION_TIMEOUT.as_millis()).unwrap();
    for now in [0, timeout + 1] {
        assert!(!is_visible(now).await, "{now}");
    }
    drop(running);
    for now in [0, timeout] {
        assert!(!is_visible(now).await, "{now}");
    }
    assert!(is_visible(timeout + 1).await);
}

#[tokio::test]
async fn rebuilt_manifest_is_identical_or_refused() {
    let volume = HookedVolume::default();
    let (controller, key) = (volume.controller(), Key::new("policy").unwrap());
    let proposal = Proposal::single_writer(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let (digest, len) = write_archive(&volume, &place);
    assert!(controller.commit(&place, digest, &[len]).await.unwrap().visible);
    let rebuilt = controller.rebuild_manifest(&key, place.id).await.unwrap().unwrap();
    let original =
        volume.0.open(&format!("{}/{MANIFEST_NAME}", place.folder())).unwrap().unwrap().blob;
    let mut bytes = vec![0; rebuilt.len()];
    original.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(rebuilt, bytes);
    let mut dict = tssd_format::StateDict::new();
    dict.insert("step", 1_i64);
    let other = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    volume.0.delete(&place.path(0)).unwrap();
    write(&volume, &place.path(0), other.as_bytes(), Durability::Memory).unwrap();
    let error = controller.rebuild_manifest(&key, place.id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

#[tokio::test]
async fn unknown_divergent_option_is_rejected() {
    for (text, is_known) in [("lowest", true), ("keep", true), ("kept", false), ("", false)] {
        let volume = HookedVolume::default();
        let attr = tssd_format::AttrValue::Text(text.into());
        let options = tssd_format::Options::new().attr(crate::merge::DIVERGENT_ATTR, attr);
        let dict = tssd_format::StateDict::new();
        let archive = tssd_format::TorchStoreStateDict::with_options(&dict, &options).unwrap();
        let put = put(&volume.controller(), &volume, &archive).await;
        assert_eq!(put.is_ok(), is_known, "{text}");
    }
}
