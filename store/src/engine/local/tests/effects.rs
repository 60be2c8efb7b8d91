//! Data that processes have left, pending deletions, durable and lost archives.

use super::*;

#[tokio::test]
async fn foreign_files_and_folders_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().canonicalize().unwrap();
    let key = Key::new("policy").unwrap();
    let of_key = path.join(key.to_path());
    let (id, name) = ("0123456789abcdef", "0123456789abcdef0123456789abcdef");
    let lost = of_key.join(format!("7-1-{id}"));
    let foreign = ["notes", "1-2", "7-0123456789abcdef", "x-1-0123456789abcdef", "1-2-abc"];
    let foreign = foreign.map(str::to_owned).into_iter();
    let foreign = foreign.chain(["1-2-ghijklmnopqrstuv".to_owned(), format!("1-2-{id}-3")]);
    let foreign: Vec<_> = foreign.map(|name| of_key.join(name)).collect();
    for folder in foreign.iter().chain([&lost]) {
        std::fs::create_dir_all(folder).unwrap();
    }
    let store = Store::new(directory_controller(&root).0);
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    let put = store.put_state_dict(&key, &dict, &options).await.unwrap();
    assert!(!lost.exists(), "what a process that died has left is swept");
    for folder in &foreign {
        assert!(folder.exists(), "{}", folder.display());
    }
    let folder = path.join(folder_of(&key, position(&put), put.id));
    let left = [format!("0-{name}.tssd"), format!("0-{name}-1.tssd"), ".tmp-1-1".to_owned()];
    let foreign = ["notes.tssd", "0.tssd", "0-0123.tssd"].map(str::to_owned).into_iter();
    let foreign: Vec<_> = foreign
        .chain([format!("x-{name}.tssd"), format!("-{name}.tssd"), format!("0-{name}")])
        .chain([format!("0-{name}-x.tssd"), format!("0-{}.tssd", name.replace('0', "g"))])
        .collect();
    for name in foreign.iter().chain(&left) {
        std::fs::write(folder.join(name), b"what it is").unwrap();
    }
    assert_eq!(store.delete(&key, None).await.unwrap(), 1);
    let there = std::fs::read_dir(&folder).unwrap();
    let mut there: Vec<_> =
        there.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    there.sort();
    let mut foreign = foreign;
    foreign.sort();
    assert_eq!(there, foreign);
}

#[tokio::test]
async fn durable_archives_exclude_newest_version() {
    let controller = HookedVolume::default().controller();
    let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
    store.retain(&key, std::num::NonZeroU32::new(9).unwrap()).await.unwrap();
    let mut folders = Vec::new();
    for durability in [Durability::Disk, Durability::Memory, Durability::Disk, Durability::Disk] {
        let options = PutOptions { durability, ..PutOptions::default() };
        let dict = tssd_format::StateDict::new();
        let put = store.put_state_dict(&key, &dict, &options).await.unwrap();
        folders.push(folder_of(&key, position(&put), put.id));
    }
    let durable = controller.durable_archives(&key).await.unwrap();
    let of: Vec<_> = durable.iter().map(|name| name.rsplit_once('/').unwrap().0).collect();
    assert_eq!(of, [&folders[0], &folders[2]]);
}

#[tokio::test]
async fn failed_upload_is_no_longer_pending() {
    let volume = MemoryVolume::default();
    let (key, ledgers) = (Key::new("policy").unwrap(), Arc::new(OwnedLedgers::default()));
    let controller =
        LocalController::new(ledgers, Arc::new(volume.clone()), Arc::new(SystemEnvironment));
    let proposal = Proposal::single_writer(1, Durability::Object);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let (digest, len) = write_archive(&volume, &place);
    controller.commit(&place, digest, &[len]).await.unwrap();
    assert_eq!(controller.pending_uploads(&key).await.unwrap().len(), 1);
    controller.mark_not_stored(&key, place.id).await.unwrap();
    assert_eq!(controller.pending_uploads(&key).await.unwrap().len(), 0);
}

#[tokio::test]
async fn recovery_deletes_unknown_data_and_abandons_open_versions() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().canonicalize().unwrap();
    let (killed, volume) = directory_controller(&root);
    let keys = ["one", "other"].map(|key| Key::new(key).unwrap());
    let mut left = Vec::new();
    for key in &keys {
        let (store, dict) = (Store::new(killed.clone()), tssd_format::StateDict::new());
        store.put_state_dict(key, &dict, &PutOptions::default()).await.unwrap();
        let proposal = Proposal::single_writer(2, Durability::Disk);
        let (open, _) = killed.open(key, &proposal, || true).await.unwrap();
        write_archive(&*volume, &open);
        left.push(path.join(open.folder()));
        left.push(path.join(format!("{}/7-1-0123456789abcdef", key.to_path())));
        std::fs::create_dir(left.last().unwrap()).unwrap();
    }
    let (next, _) = directory_controller(&root);
    next.recover().await.unwrap();
    let there: Vec<bool> = left.iter().map(|folder| folder.exists()).collect();
    assert_eq!(there, [true, false, true, false], "what no ledger knows is gone");
    next.abandon_all_open().await.unwrap();
    for key in &keys {
        assert_eq!(next.state(key).await.unwrap().open().count(), 0);
        assert_eq!(next.versions(key).await.unwrap().len(), 1);
    }
    assert!(left.iter().all(|folder| !folder.exists()), "what was given up is gone");
}

#[tokio::test]
async fn lost_leaves_are_listed_up_to_limit() {
    let list_lost = async |count: usize| {
        let volume = HookedVolume::default();
        let mut dict = tssd_format::StateDict::new();
        for number in 0..count {
            dict.insert(format!("{number}"), bytes::Bytes::from(vec![7; 100_000]));
        }
        let archive = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
        let place = put(&volume.controller(), &volume, &archive).await.unwrap();
        let manifest = format!("{}/{MANIFEST_NAME}", place.folder());
        let name = place.path(0).rsplit_once('/').unwrap().1.to_owned();
        let lost = |name: String| {
            lost_leaves::list_lost_leaves(&volume, &manifest, &[name].into()).unwrap().unwrap()
        };
        assert_eq!(lost("another.tssd".to_owned()), "");
        lost(name)
    };
    assert_eq!(list_lost(2).await, "0, 1");
    assert_eq!(list_lost(8).await, "0, 1, 2, 3, 4, 5, 6, 7");
    assert_eq!(list_lost(10).await, "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
}
