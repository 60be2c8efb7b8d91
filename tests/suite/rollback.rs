//! Rollbacks and labels, in every kind of store.

use std::path::Path;
use std::thread;
use std::time::Duration;

use tssd_format::{StateDict, Tensor};
use tssd_store::blocking::Store;
use tssd_store::{
    Durability, ErrorKind, GetOptions, Key, Label, PutOptions, SeenVersion, Selection, Selector,
    WaitOptions,
};

fn key() -> Key {
    Key::new("policy").unwrap()
}

fn dict(value: u32) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::from_slice(&vec![value; 300_000], &[300_000]).unwrap());
    dict.insert("value", i64::from(value));
    dict
}

fn good() -> Selector {
    Selector::Label(Label::new("good").unwrap())
}

/// Puts versions 1 to 4, and keeps all.
fn put_four(store: &Store, durability: Durability) {
    store.retain(&key(), 9.try_into().unwrap()).unwrap();
    for number in 1..=4_u32 {
        let options =
            PutOptions { version: Some(number.into()), durability, ..PutOptions::default() };
        store.put_state_dict(&key(), &dict(number), &options).unwrap();
    }
}

/// Checks that a version has these contents, and that its report names this position.
fn check(store: &Store, version: Selector, value: u32, position: (u32, u64)) {
    let options = GetOptions { version, ..GetOptions::default() };
    let (got, report) = store.get_state_dict(&key(), &options).unwrap();
    assert_eq!(got, dict(value));
    assert_eq!((report.epoch, report.version), position);
}

fn positions(store: &Store) -> Vec<(u32, u64)> {
    store.versions(&key()).unwrap().iter().map(|info| (info.epoch, info.number)).collect()
}

/// Rolls back twice, and reads the versions by number and by label.
fn check_rollbacks(store: &Store, durability: Durability) {
    put_four(store, durability);
    // The version is open for later reads already.
    check(store, 2.into(), 2, (0, 2));
    assert_eq!(store.pin(&key(), 2, "good").unwrap(), 2);
    check(store, good(), 2, (0, 2));
    let newest = store.rollback(&key(), 2).unwrap();
    assert_eq!((newest.epoch, newest.number), (1, 5));
    assert_eq!(positions(store), [(0, 1), (0, 3), (0, 4), (1, 5)]);
    for version in [Selector::Newest, 5.into(), good()] {
        check(store, version, 2, (1, 5));
    }
    let old = GetOptions { version: 2.into(), ..GetOptions::default() };
    let error = store.get_state_dict(&key(), &old).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(store.rollback(&key(), Selector::Newest).unwrap(), newest, "nothing changes");
    // Puts go on after it, and a second rollback finds it by its label.
    let options = PutOptions { durability, ..PutOptions::default() };
    let put = store.put_state_dict(&key(), &dict(6), &options).unwrap();
    assert_eq!((put.epoch, put.version), (1, 6));
    let newest = store.rollback(&key(), good()).unwrap();
    assert_eq!((newest.epoch, newest.number), (2, 7));
    check(store, Selector::Newest, 2, (2, 7));
    check(store, 6.into(), 6, (1, 6));
    // Retention deletes by the new numbers.
    store.retain(&key(), 1.try_into().unwrap()).unwrap();
    assert_eq!(positions(store), [(2, 7)]);
    // Without its number, the version is still found by its label.
    assert_eq!(store.delete(&key(), Selection::All).unwrap(), 1);
    assert!(!store.exists(&key(), Selector::Newest).unwrap());
    assert!(store.exists(&key(), good()).unwrap());
    check(store, good(), 2, (2, 7));
    let newest = store.rollback(&key(), good()).unwrap();
    assert_eq!((newest.epoch, newest.number), (3, 8));
    check(store, Selector::Newest, 2, (3, 8));
    store.unpin(&key(), "good").unwrap();
    assert_eq!(store.delete(&key(), 8).unwrap(), 1);
    let error = store.rollback(&key(), good()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("no version has the label `good`"), "{error}");
}

#[test]
fn rollback_in_memory() {
    check_rollbacks(&Store::memory().unwrap(), Durability::Memory);
}

#[test]
fn invalid_labels_are_refused() {
    let store = Store::memory().unwrap();
    put_four(&store, Durability::Memory);
    for label in ["", "17", "a\nb"] {
        let error = store.pin(&key(), 1, label).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("not only digits"), "{error}");
    }
}

/// Checks that the files of a store in a directory are as its ledger says.
fn assert_sound(root: &Path) {
    let defects = tssd_store::scrub(root).unwrap();
    assert!(defects.is_empty(), "{defects:?}");
}

#[test]
fn rollback_in_directory_moves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    put_four(&store, Durability::Disk);
    let folders = || {
        let entries = std::fs::read_dir(folder.path().join("policy")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    };
    let before = folders();
    store.rollback(&key(), 1).unwrap();
    assert_eq!(folders(), before);
    assert_sound(folder.path());
    // Another process finds it, also if it sweeps the directory for its first put.
    let other = Store::directory(folder.path()).unwrap();
    check(&other, Selector::Newest, 1, (1, 5));
    other.put_state_dict(&key(), &dict(6), &PutOptions::default()).unwrap();
    check(&other, 5.into(), 1, (1, 5));
    assert_eq!(folders().len(), before.len() + 1);
    drop((store, other));
    let folder = tempfile::tempdir().unwrap();
    check_rollbacks(&Store::directory(folder.path()).unwrap(), Durability::Disk);
}

#[cfg(target_os = "linux")]
mod daemons {
    use tssd_tests::test_daemon::TestDaemon;

    use super::*;

    #[test]
    fn rollback_in_daemon() {
        let daemon = TestDaemon::new(1 << 30);
        check_rollbacks(&daemon.connect(), Durability::Memory);
        let controller = TestDaemon::new(1 << 30);
        let proxy = TestDaemon::with_controller(&controller);
        check_rollbacks(&proxy.connect(), Durability::Memory);
        let folder = tempfile::tempdir().unwrap();
        let daemon = TestDaemon::with_root(folder.path());
        check_rollbacks(&daemon.connect(), Durability::Disk);
        drop(daemon);
        // The newest version is the same after a restart.
        let folder = tempfile::tempdir().unwrap();
        let daemon = TestDaemon::with_root(folder.path());
        put_four(&daemon.connect(), Durability::Disk);
        let newest = daemon.connect().rollback(&key(), 2).unwrap();
        drop(daemon);
        assert_sound(folder.path());
        let daemon = TestDaemon::with_root(folder.path());
        check(&daemon.connect(), Selector::Newest, 2, (newest.epoch, newest.number));
    }

    #[test]
    fn waiters_subscribers_and_followers_get_rolled_back_version() {
        let daemon = TestDaemon::new(1 << 30);
        let (writer, reader) = (daemon.connect(), daemon.connect());
        put_four(&writer, Durability::Memory);
        let seen = reader.head(&key()).unwrap().as_ref().map(SeenVersion::from);
        let mut follower = reader.follow(&key()).unwrap();
        let mut subscription = reader.subscribe(&key());
        assert_eq!(subscription.next().unwrap().unwrap().number, 4);
        let waiting = daemon.connect();
        let waiter = thread::spawn(move || {
            let options = WaitOptions { after: seen, ..WaitOptions::default() };
            waiting.wait_for_version_with(&key(), &options).unwrap()
        });
        writer.rollback(&key(), 3).unwrap();
        assert_eq!(waiter.join().unwrap().number, 5);
        let info = subscription.next().unwrap().unwrap();
        assert_eq!((info.epoch, info.number), (1, 5));
        let followed = follower.next(&GetOptions::default(), Duration::from_mins(1)).unwrap();
        assert_eq!(followed.unwrap().version(), 5);
        // A subscriber that has seen version 5 gets it again if it was replaced meanwhile.
        writer.put_state_dict(&key(), &dict(6), &PutOptions::default()).unwrap();
        writer.rollback(&key(), 5).unwrap();
        assert_eq!(subscription.next().unwrap().unwrap().number, 7);
    }

    #[test]
    fn bucket_follows_rollback() {
        let bucket = tempfile::tempdir().unwrap();
        let url = format!("file:{}", bucket.path().display());
        let start = || {
            TestDaemon::with_options(1 << 30, |options| {
                options.bucket = Some(url.clone());
                options.keep = 9.try_into().unwrap();
            })
        };
        let daemon = start();
        let store = daemon.connect();
        put_four(&store, Durability::Object);
        store.rollback(&key(), 2).unwrap();
        let in_bucket = Store::directory(bucket.path()).unwrap();
        assert_eq!(positions(&in_bucket), [(0, 1), (0, 3), (0, 4), (1, 5)]);
        check(&in_bucket, Selector::Newest, 2, (1, 5));
        let options = PutOptions { durability: Durability::Object, ..PutOptions::default() };
        assert!(store.put_state_dict(&key(), &dict(6), &options).unwrap().stored);
        drop((store, daemon));
        // Another daemon restores it from the bucket.
        let daemon = start();
        let store = daemon.connect();
        check(&store, 5.into(), 2, (1, 5));
        check(&store, Selector::Newest, 6, (1, 6));
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn rollback_on_one_host_is_seen_on_others() {
        let etcd = tssd_tests::etcd::Etcd::start(1);
        let start = || {
            TestDaemon::with_options(1 << 30, |options| {
                options.meta = Some(etcd.url());
                options.keep = 9.try_into().unwrap();
            })
        };
        let hosts = [start(), start()];
        let (writer, reader) = (hosts[0].connect(), hosts[1].connect());
        put_four(&writer, Durability::Memory);
        check(&reader, 2.into(), 2, (0, 2));
        reader.rollback(&key(), 2).unwrap();
        for store in [&writer, &reader] {
            check(store, Selector::Newest, 2, (1, 5));
            check(store, 4.into(), 4, (0, 4));
        }
    }
}
