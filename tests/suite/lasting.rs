//! Versions that go on from memory to a bucket, and come back from there. The bucket is a directory that all have:
//! with an object store the same is in `store/src/daemon/mirror/faults.rs` and `python/tests/test_buckets.py`.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tssd_format::{StateDict, Tensor};
use tssd_store::blocking::Store;
use tssd_store::{Durability, ErrorKind, GetOptions, PutOptions};
use tssd_tests::command::Serve;
use tssd_tests::served::Served;
use tssd_tests::steps::{eventually, key, options, part, publish, publish_as, read};

const OBJECT: Durability = Durability::Object;

fn bucket_of(folder: &Path) -> String {
    format!("file:{}", folder.display())
}

/// A daemon whose versions go to a directory.
fn over(bucket: &Path, keep: u32) -> Served {
    Served::bound(1 << 30, |options| {
        options.bucket = Some(bucket_of(bucket));
        options.keep = keep.try_into().unwrap();
    })
}

fn versions(store: &Store) -> Vec<(u32, u64)> {
    let versions = store.versions(&key()).unwrap();
    versions.iter().map(|version| (version.epoch, version.number)).collect()
}

fn durable(step: u64) -> PutOptions {
    PutOptions { durability: OBJECT, ..options(step, 0, 1) }
}

#[test]
fn what_is_in_the_bucket_outlasts_the_daemon() {
    let [bucket, socket] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let args = ["--bucket", &bucket_of(bucket.path())];
    {
        let daemon = Serve::start(socket.path(), &args);
        let stores = [daemon.connect(), daemon.connect()];
        assert!(!publish_as(&stores, 1, Durability::Memory)[0].stored);
        let reports = publish_as(&stores, 2, OBJECT);
        assert!(reports.iter().any(|report| report.stored), "{reports:?}");
        assert!(reports.iter().any(|report| report.phases.store > 0.0), "{reports:?}");
        publish(&stores, 3);
        // The newest, and the newest that lasts.
        assert_eq!(versions(&stores[0]), [(0, 2), (0, 3)]);
        daemon.signal(Signal::KILL);
    }
    let daemon = Serve::start(socket.path(), &args);
    let store = daemon.connect();
    assert_eq!(read(&store, None, 2).unwrap(), 2);
    // What was in memory alone is gone, and so are its number and its writers.
    let report = store.put_state_dict(&key(), &part(3, 0, 1), &durable(3)).unwrap();
    assert!(report.stored);
    // Who has nothing else finds it in the bucket.
    let elsewhere = Store::connect(&bucket_of(bucket.path())).unwrap();
    assert_eq!(read(&elsewhere, None, 1).unwrap(), 3);
    assert_eq!(elsewhere.versions(&key()).unwrap()[0].id, report.id);
}

#[test]
fn a_version_comes_back_once_for_all_who_read_it() {
    let bucket = tempfile::tempdir().unwrap();
    {
        let served = over(bucket.path(), 1);
        publish_as(&[served.connect(), served.connect()], 1, OBJECT);
    }
    let served = over(bucket.path(), 1);
    let stores: Vec<Store> = (0..4).map(|_| served.connect()).collect();
    std::thread::scope(|scope| {
        for store in stores.iter().chain([&served.connect_far()]) {
            let store = store.clone();
            scope.spawn(move || assert_eq!(read(&store, None, 2).unwrap(), 1));
        }
    });
    let restored = served.metric(r#"tssd_restored_bytes_total{why="alone"}"#);
    let bytes = stores[0].versions(&key()).unwrap()[0].bytes as f64;
    let manifest = 16e3;
    assert!(restored > bytes && restored < bytes + manifest, "{restored} for {bytes}");
    // It stays until another one comes.
    drop(stores);
    assert_eq!(read(&served.connect(), None, 2).unwrap(), 1);
    assert!(served.metric(r#"tssd_restored_bytes_total{why="alone"}"#) <= restored);
}

#[test]
fn the_bucket_keeps_what_is_kept_and_forgets_what_is_deleted() {
    let bucket = tempfile::tempdir().unwrap();
    let served = over(bucket.path(), 2);
    let (store, there) = (served.connect(), Store::connect(&bucket_of(bucket.path())).unwrap());
    let put = |step| store.put_state_dict(&key(), &part(step, 0, 1), &durable(step)).unwrap();
    for step in 1..=4 {
        assert!(put(step).stored);
        if step == 2 {
            store.pin(&key(), Some(2), "best").unwrap();
        }
    }
    assert_eq!(versions(&there), [(0, 2), (0, 3), (0, 4)]);
    assert_eq!(there.pins(&key()).unwrap()["best"], 2);
    store.unpin(&key(), "best").unwrap();
    assert_eq!(versions(&there), [(0, 3), (0, 4)]);
    store.retain(&key(), 1.try_into().unwrap()).unwrap();
    assert_eq!(versions(&there), [(0, 4)]);
    // Back, with a number that the bucket has had.
    let rewound = PutOptions { version: Some(3), rewind: true, ..durable(3) };
    store
        .put_state_dict(
            &key(),
            &part(3, 0, 1),
            &PutOptions { durability: Durability::Memory, ..rewound },
        )
        .unwrap();
    put(4);
    assert_eq!(versions(&there), [(1, 4)]);
    assert_eq!(read(&there, None, 1).unwrap(), 4);
    assert_eq!(store.delete(&key(), None).unwrap(), 1);
    assert_eq!(versions(&there), []);
    // Nothing comes back.
    drop(served);
    let served = over(bucket.path(), 2);
    assert_eq!(served.connect().keys(None).unwrap(), []);
    assert_eq!(
        served.connect().put_state_dict(&key(), &part(5, 0, 1), &durable(5)).unwrap().epoch,
        1
    );
}

#[test]
fn a_bucket_that_is_away_delays_what_is_to_be_there_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let [bucket, away] = ["bucket", "away"].map(|name| folder.path().join(name));
    std::fs::create_dir(&bucket).unwrap();
    let served = over(&bucket, 1);
    let store = served.connect();
    let put = |step, options: &PutOptions| store.put_state_dict(&key(), &part(step, 0, 1), options);
    assert!(put(1, &durable(1)).unwrap().stored);
    std::fs::rename(&bucket, &away).unwrap();
    let soon = |step| PutOptions { timeout: Duration::from_millis(300), ..durable(step) };
    let error = put(2, &soon(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("in memory, and not in the bucket"), "{error}");
    assert_eq!(read(&store, None, 1).unwrap(), 2);
    let mut pending = store.put_state_dict_later(&key(), &part(3, 0, 1), &durable(3)).unwrap();
    assert!(pending.committed().unwrap().visible);
    assert_eq!(read(&store, None, 1).unwrap(), 3);
    // Two are on their way: another one waits, one in memory does not.
    let error = put(4, &soon(4)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("is behind: `policy` version 2"), "{error}");
    put(4, &PutOptions { durability: Durability::Memory, ..soon(4) }).unwrap();
    let status = store.status().unwrap();
    assert_eq!(status.uploads.iter().map(|upload| upload.version).collect::<Vec<_>>(), [2, 3]);
    eventually("it is tried and fails", || {
        store.status().unwrap().uploads[0]
            .error
            .as_ref()
            .is_some_and(|error| error.contains("bucket"))
    });
    // None of them is let go of, and the one that lasts is the one that is in the bucket.
    assert_eq!(versions(&store), [(0, 1), (0, 2), (0, 3), (0, 4)]);
    std::fs::rename(&away, &bucket).unwrap();
    assert!(pending.wait().unwrap().stored);
    assert_eq!(versions(&store), [(0, 3), (0, 4)]);
    assert_eq!(store.status().unwrap().uploads, []);
    assert!(put(5, &durable(5)).unwrap().stored);
    eventually("memory comes back", || {
        let memory = store.status().unwrap().memory;
        memory.used - memory.warm < 10_000_000
    });
}

#[test]
fn who_is_asked_to_end_brings_there_what_is_on_its_way() {
    let [bucket, socket] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let url = bucket_of(bucket.path());
    // Two megabytes take two seconds after the first part.
    let args = ["--bucket", &url, "--bucket-rate", "2MB"];
    let mut daemon = Serve::start(socket.path(), &args);
    let store = daemon.connect();
    let started = Instant::now();
    let pending = [1, 2].map(|step| {
        let mut pending =
            store.put_state_dict_later(&key(), &part(step, 0, 1), &durable(step)).unwrap();
        assert!(pending.committed().unwrap().visible);
        pending
    });
    assert!(!store.status().unwrap().uploads.is_empty(), "they are on their way");
    daemon.signal(Signal::TERM);
    for pending in pending {
        assert!(pending.wait().unwrap().stored);
    }
    assert!(daemon.process.wait().unwrap().success());
    assert!(started.elapsed() > Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(read(&Store::connect(&url).unwrap(), None, 1).unwrap(), 2);
}

#[test]
fn who_has_no_bucket_says_so() {
    let served = Served::new(1 << 30);
    let folder = tempfile::tempdir().unwrap();
    let stores =
        [served.connect(), Store::memory().unwrap(), Store::directory(folder.path()).unwrap()];
    for store in stores {
        let error = store.put_state_dict(&key(), &part(1, 0, 1), &durable(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("bucket"), "{error}");
    }
    // Where another one decides, it is that one's.
    let delegate = Served::under(&served);
    for durability in [Durability::Disk, OBJECT] {
        let options = PutOptions { durability, ..options(1, 0, 1) };
        let error =
            delegate.connect().put_state_dict(&key(), &part(1, 0, 1), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(served.address()), "{error}");
    }
    for wrong in ["tcp://127.0.0.1:1", "memory:", "unix:default", "elsewhere"] {
        let bound = std::panic::catch_unwind(|| {
            Served::bound(1 << 30, |options| options.bucket = Some(wrong.to_owned()))
        });
        assert!(bound.is_err(), "{wrong}");
    }
}

#[test]
fn what_is_deleted_on_its_way_does_not_come_there() {
    let folder = tempfile::tempdir().unwrap();
    let [bucket, away] = ["bucket", "away"].map(|name| folder.path().join(name));
    std::fs::create_dir(&bucket).unwrap();
    let (url, served) = (bucket_of(&bucket), over(&bucket, 2));
    let store = served.connect();
    let put = |step| store.put_state_dict(&key(), &part(step, 0, 1), &durable(step)).unwrap();
    assert!(put(1).stored);
    std::fs::rename(&bucket, &away).unwrap();
    let later = |step| store.put_state_dict_later(&key(), &part(step, 0, 1), &durable(step));
    let pending = [2, 3].map(|step| {
        let mut pending = later(step).unwrap();
        assert!(pending.committed().unwrap().visible);
        pending
    });
    // It is deleted here; the bucket has not heard of it.
    let error = store.delete(&key(), None).unwrap_err();
    assert!(error.to_string().contains("is gone"), "{error}");
    assert_eq!(versions(&store), []);
    store.delete(&key(), None).unwrap_err();
    std::fs::rename(&away, &bucket).unwrap();
    assert_eq!(store.delete(&key(), None).unwrap(), 0);
    for pending in pending {
        let error = pending.wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overtaken, "{error}");
    }
    assert_eq!(versions(&Store::connect(&url).unwrap()), []);
    drop(served);
    assert_eq!(over(&bucket, 2).connect().keys(None).unwrap(), []);
}

#[test]
fn a_label_goes_with_its_version() {
    let folder = tempfile::tempdir().unwrap();
    let [bucket, away] = ["bucket", "away"].map(|name| folder.path().join(name));
    std::fs::create_dir(&bucket).unwrap();
    let (url, served) = (bucket_of(&bucket), over(&bucket, 1));
    let store = served.connect();
    std::fs::rename(&bucket, &away).unwrap();
    let mut pending = store.put_state_dict_later(&key(), &part(1, 0, 1), &durable(1)).unwrap();
    assert!(pending.committed().unwrap().visible);
    store.pin(&key(), Some(1), "best").unwrap();
    assert_eq!(store.pins(&key()).unwrap()["best"], 1);
    std::fs::rename(&away, &bucket).unwrap();
    assert!(pending.wait().unwrap().stored);
    store.put_state_dict(&key(), &part(2, 0, 1), &durable(2)).unwrap();
    let there = Store::connect(&url).unwrap();
    assert_eq!(there.pins(&key()).unwrap()["best"], 1);
    assert_eq!(versions(&there), [(0, 1), (0, 2)]);
}

#[test]
fn what_comes_back_needs_room() {
    let bucket = tempfile::tempdir().unwrap();
    let put = |store: &Store| publish_as(&[store.clone(), store.clone()], 1, OBJECT);
    put(&over(bucket.path(), 1).connect());
    // Of two archives of two megabytes one fits.
    let served = Served::bound(7 << 20, |options| options.bucket = Some(bucket_of(bucket.path())));
    let store = served.connect();
    let read = std::thread::spawn({
        let store = store.clone();
        move || read(&store, None, 2).unwrap_err()
    });
    let error = read.join().unwrap();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("no memory for a version of `policy`"), "{error}");
}

/// What is put in memory goes on although what lasts has filled it.
#[test]
fn memory_of_what_lasts_elsewhere_is_let_go_of_when_it_is_needed() {
    const LEN: usize = 8 << 20;
    let large = |step: u8| {
        let mut dict = StateDict::new();
        dict.insert("weight", Tensor::from_slice(&vec![step; LEN], &[LEN as u64]).unwrap());
        dict
    };
    for lasts in [Durability::Object, Durability::Disk] {
        let folder = tempfile::tempdir().unwrap();
        // For two versions, not for three.
        let served = Served::bound(24 << 20, |options| match lasts {
            Durability::Object => options.bucket = Some(bucket_of(folder.path())),
            _ => options.root = Some(folder.path().to_owned()),
        });
        let store = served.connect();
        let put = |step: u8, durability| {
            let timeout = Duration::from_secs(10);
            let options = PutOptions {
                version: Some(step.into()),
                durability,
                timeout,
                ..PutOptions::default()
            };
            store.put_state_dict(&key(), &large(step), &options).unwrap();
        };
        put(1, lasts);
        for step in 2..5 {
            put(step, Durability::Memory);
        }
        assert_eq!(versions(&store), [(0, 1), (0, 4)]);
        let weight = |step: u8| {
            let options = GetOptions { version: Some(step.into()), ..GetOptions::default() };
            store.get(&key(), "weight", &options).unwrap()
        };
        for step in [4, 1] {
            assert!(weight(step).view().span().iter().all(|byte| *byte == step), "{lasts:?}");
        }
        store.delete(&key(), None).unwrap();
    }
}
