//! What is proven, and by whom.

use super::*;

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
    let mut commit = std::pin::pin!(controller.commit(&place, Digest::of(bytes), &lens));
    tokio::time::timeout(Duration::from_millis(20), &mut commit).await.unwrap_err();
    drop(other);
    assert!(commit.await.unwrap().visible);
}

#[tokio::test]
async fn a_disk_that_fails_at_the_proof_is_not_the_writers_fault() {
    let (volume, key) = (Hooked::default(), Key::new("policy").unwrap());
    let store = Store::new(volume.controller());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    volume.fail("open");
    let error = store.put_state_dict(&key, &dict, &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(store.put_state_dict(&key, &dict, &options).await.unwrap().visible);
}

#[tokio::test]
async fn what_another_try_left_is_owed_until_it_is_deleted() {
    let (volume, key) = (Hooked::default(), Key::new("policy").unwrap());
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

#[tokio::test]
async fn a_proof_is_taken_over_when_it_is_owed_for_long_and_not_under_way_here() {
    let (volume, clock) = (MemoryVolume::default(), Clock::default());
    let (key, ledgers) = (Key::new("policy").unwrap(), Arc::new(OwnedLedgers::default()));
    let controller =
        LocalController::new(ledgers, Arc::new(volume.clone()), Arc::new(clock.clone()));
    let proposal = Proposal::alone(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let dict = tssd_format::StateDict::new();
    let archive = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    let bytes = archive.as_bytes();
    write(&volume, &place.path(0), bytes, Durability::Memory).unwrap();
    let under_way = Proving::begin(&controller, place.id).unwrap();
    let lens = [u64::try_from(bytes.len()).unwrap()];
    {
        let commit = controller.commit(&place, Digest::of(bytes), &lens);
        tokio::time::timeout(Duration::from_millis(20), commit).await.unwrap_err();
    }
    let is_visible = async |now| {
        clock.0.store(now, Ordering::SeqCst);
        controller.state(&key).await.unwrap().head().is_some()
    };
    let patience = u64::try_from(PROOF_PATIENCE.as_millis()).unwrap();
    for now in [0, patience + 1] {
        assert!(!is_visible(now).await, "{now}");
    }
    drop(under_way);
    for now in [0, patience] {
        assert!(!is_visible(now).await, "{now}");
    }
    assert!(is_visible(patience + 1).await);
}

#[tokio::test]
async fn a_manifest_that_is_made_anew_is_the_one_that_was_shown_or_none() {
    let volume = Hooked::default();
    let (controller, key) = (volume.controller(), Key::new("policy").unwrap());
    let proposal = Proposal::alone(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let (digest, len) = written(&volume, &place);
    assert!(controller.commit(&place, digest, &[len]).await.unwrap().visible);
    let made = controller.manifest(&key, place.id).await.unwrap().unwrap();
    let shown =
        volume.0.open(&format!("{}/{MANIFEST_NAME}", place.folder())).unwrap().unwrap().blob;
    let mut bytes = vec![0; made.len()];
    shown.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(made, bytes);
    let mut dict = tssd_format::StateDict::new();
    dict.insert("step", 1_i64);
    let other = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
    volume.0.delete(&place.path(0)).unwrap();
    write(&volume, &place.path(0), other.as_bytes(), Durability::Memory).unwrap();
    let error = controller.manifest(&key, place.id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

#[tokio::test]
async fn what_nobody_knows_to_do_with_divergent_leaves_is_refused() {
    for (text, is_known) in [("lowest", true), ("keep", true), ("kept", false), ("", false)] {
        let volume = Hooked::default();
        let attr = tssd_format::AttrValue::Text(text.into());
        let options = tssd_format::Options::new().attr(crate::merge::DIVERGENT_ATTR, attr);
        let dict = tssd_format::StateDict::new();
        let archive = tssd_format::TorchStoreStateDict::with_options(&dict, &options).unwrap();
        let put = put(&volume.controller(), &volume, &archive).await;
        assert_eq!(put.is_ok(), is_known, "{text}");
    }
}
