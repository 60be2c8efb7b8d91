//! Replication of versions from memory to a bucket, and their restore. The bucket is a shared directory here.
//! `store/src/daemon/bucket_sync/fault_tests.rs` and `python/tests/test_buckets.py` test the same with an object store.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tssd_format::{StateDict, Tensor};
use tssd_store::blocking::Store;
use tssd_store::{Durability, ErrorKind, GetOptions, PutOptions, Rewind};
use tssd_tests::command::DaemonProcess;
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::{
    key, options, publish, publish_with_durability, read_step, step_part, wait_until,
};

const OBJECT: Durability = Durability::Object;

fn bucket_url(folder: &Path) -> String {
    format!("file:{}", folder.display())
}

/// Starts a daemon that replicates to the bucket `bucket`, and retains `keep` versions.
fn daemon_with_bucket(bucket: &Path, keep: u32) -> TestDaemon {
    TestDaemon::with_options(1 << 30, |options| {
        options.bucket = Some(bucket_url(bucket));
        options.keep = keep.try_into().unwrap();
    })
}

/// Returns epoch and number of each visible version.
fn versions(store: &Store) -> Vec<(u32, u64)> {
    let versions = store.versions(&key()).unwrap();
    versions.iter().map(|version| (version.epoch, version.number)).collect()
}

fn object_options(step: u64) -> PutOptions {
    PutOptions { durability: OBJECT, ..options(step, 0, 1) }
}

#[test]
fn versions_in_bucket_outlive_daemon() {
    let [bucket, socket] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let args = ["--bucket", &bucket_url(bucket.path())];
    {
        let daemon = DaemonProcess::start(socket.path(), &args);
        let stores = [daemon.connect(), daemon.connect()];
        assert!(!publish_with_durability(&stores, 1, Durability::Memory)[0].stored);
        let reports = publish_with_durability(&stores, 2, OBJECT);
        assert!(reports.iter().any(|report| report.stored), "{reports:?}");
        assert!(reports.iter().any(|report| report.phases.store > 0.0), "{reports:?}");
        publish(&stores, 3);
        // Retained: the newest version, and the newest one in the bucket.
        assert_eq!(versions(&stores[0]), [(0, 2), (0, 3)]);
        daemon.signal(Signal::KILL);
    }
    let daemon = DaemonProcess::start(socket.path(), &args);
    let store = daemon.connect();
    assert_eq!(read_step(&store, None, 2).unwrap(), 2);
    // Version 3 was only in memory. Its number is free again, and its writer set no longer applies.
    let report = store.put_state_dict(&key(), &step_part(3, 0, 1), &object_options(3)).unwrap();
    assert!(report.stored);
    // A store on another host, with access to the bucket only, reads the version.
    let bucket_store = Store::connect(&bucket_url(bucket.path())).unwrap();
    assert_eq!(read_step(&bucket_store, None, 1).unwrap(), 3);
    assert_eq!(bucket_store.versions(&key()).unwrap()[0].id, report.id);
}

#[test]
fn version_is_restored_once_for_concurrent_readers() {
    let bucket = tempfile::tempdir().unwrap();
    {
        let daemon = daemon_with_bucket(bucket.path(), 1);
        publish_with_durability(&[daemon.connect(), daemon.connect()], 1, OBJECT);
    }
    let daemon = daemon_with_bucket(bucket.path(), 1);
    let stores: Vec<Store> = (0..4).map(|_| daemon.connect()).collect();
    std::thread::scope(|scope| {
        for store in stores.iter().chain([&daemon.connect_tcp()]) {
            let store = store.clone();
            scope.spawn(move || assert_eq!(read_step(&store, None, 2).unwrap(), 1));
        }
    });
    let restored = daemon.metric(r#"tssd_restored_bytes_total{reason="no_replica"}"#);
    let bytes = stores[0].versions(&key()).unwrap()[0].bytes as f64;
    let max_manifest_bytes = 16e3;
    assert!(restored > bytes && restored < bytes + max_manifest_bytes, "{restored} for {bytes}");
    // The restored version stays in memory until a newer one replaces it.
    drop(stores);
    assert_eq!(read_step(&daemon.connect(), None, 2).unwrap(), 1);
    assert!(daemon.metric(r#"tssd_restored_bytes_total{reason="no_replica"}"#) <= restored);
}

#[test]
fn bucket_follows_retention_pins_and_deletions() {
    let bucket = tempfile::tempdir().unwrap();
    let daemon = daemon_with_bucket(bucket.path(), 2);
    let (store, bucket_store) =
        (daemon.connect(), Store::connect(&bucket_url(bucket.path())).unwrap());
    let put =
        |step| store.put_state_dict(&key(), &step_part(step, 0, 1), &object_options(step)).unwrap();
    for step in 1..=4 {
        assert!(put(step).stored);
        if step == 2 {
            store.pin(&key(), Some(2), "best").unwrap();
        }
    }
    assert_eq!(versions(&bucket_store), [(0, 2), (0, 3), (0, 4)]);
    assert_eq!(bucket_store.pins(&key()).unwrap()["best"], 2);
    store.unpin(&key(), "best").unwrap();
    assert_eq!(versions(&bucket_store), [(0, 3), (0, 4)]);
    store.retain(&key(), 1.try_into().unwrap()).unwrap();
    assert_eq!(versions(&bucket_store), [(0, 4)]);
    // Rewinds to a number that the bucket has stored before.
    let rewound = PutOptions { version: Some(3), rewind: Rewind::Always, ..object_options(3) };
    store
        .put_state_dict(
            &key(),
            &step_part(3, 0, 1),
            &PutOptions { durability: Durability::Memory, ..rewound },
        )
        .unwrap();
    put(4);
    assert_eq!(versions(&bucket_store), [(1, 4)]);
    assert_eq!(read_step(&bucket_store, None, 1).unwrap(), 4);
    assert_eq!(store.delete(&key(), None).unwrap(), 1);
    assert_eq!(versions(&bucket_store), []);
    // A new daemon restores nothing.
    drop(daemon);
    let daemon = daemon_with_bucket(bucket.path(), 2);
    assert_eq!(daemon.connect().keys(None).unwrap(), []);
    assert_eq!(
        daemon
            .connect()
            .put_state_dict(&key(), &step_part(5, 0, 1), &object_options(5))
            .unwrap()
            .epoch,
        1
    );
}

#[test]
fn unavailable_bucket_delays_only_object_durability() {
    let folder = tempfile::tempdir().unwrap();
    let [bucket, away] = ["bucket", "away"].map(|name| folder.path().join(name));
    std::fs::create_dir(&bucket).unwrap();
    let daemon = daemon_with_bucket(&bucket, 1);
    let store = daemon.connect();
    let put =
        |step, options: &PutOptions| store.put_state_dict(&key(), &step_part(step, 0, 1), options);
    assert!(put(1, &object_options(1)).unwrap().stored);
    std::fs::rename(&bucket, &away).unwrap();
    let short_timeout =
        |step| PutOptions { timeout: Duration::from_millis(300), ..object_options(step) };
    let error = put(2, &short_timeout(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("in memory, and not in the bucket"), "{error}");
    assert_eq!(read_step(&store, None, 1).unwrap(), 2);
    let mut pending =
        store.put_state_dict_later(&key(), &step_part(3, 0, 1), &object_options(3)).unwrap();
    assert!(pending.committed().unwrap().visible);
    assert_eq!(read_step(&store, None, 1).unwrap(), 3);
    // Two uploads are pending. A third put with durability `object` waits, a put to memory does not.
    let error = put(4, &short_timeout(4)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("is behind: `policy` version 2"), "{error}");
    put(4, &PutOptions { durability: Durability::Memory, ..short_timeout(4) }).unwrap();
    let status = store.status().unwrap();
    assert_eq!(status.uploads.iter().map(|upload| upload.version).collect::<Vec<_>>(), [2, 3]);
    wait_until("the upload reports its error", || {
        store.status().unwrap().uploads[0]
            .error
            .as_ref()
            .is_some_and(|error| error.contains("bucket"))
    });
    // No pending version is evicted. Version 1 is retained as the newest one in the bucket.
    assert_eq!(versions(&store), [(0, 1), (0, 2), (0, 3), (0, 4)]);
    std::fs::rename(&away, &bucket).unwrap();
    assert!(pending.wait().unwrap().stored);
    assert_eq!(versions(&store), [(0, 3), (0, 4)]);
    assert_eq!(store.status().unwrap().uploads, []);
    assert!(put(5, &object_options(5)).unwrap().stored);
    wait_until("the daemon frees the memory of retired versions", || {
        let memory = store.status().unwrap().memory;
        memory.used_bytes - memory.free_bytes < 10_000_000
    });
}

#[test]
fn daemon_finishes_pending_uploads_on_sigterm() {
    let [bucket, socket] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let url = bucket_url(bucket.path());
    // At 2 MB/s, the uploads of two versions of 2 MiB take more than one second.
    let args = ["--bucket", &url, "--bucket-rate", "2MB"];
    let mut daemon = DaemonProcess::start(socket.path(), &args);
    let store = daemon.connect();
    let started = Instant::now();
    let pending = [1, 2].map(|step| {
        let mut pending = store
            .put_state_dict_later(&key(), &step_part(step, 0, 1), &object_options(step))
            .unwrap();
        assert!(pending.committed().unwrap().visible);
        pending
    });
    assert!(!store.status().unwrap().uploads.is_empty(), "the uploads are pending");
    daemon.signal(Signal::TERM);
    for pending in pending {
        assert!(pending.wait().unwrap().stored);
    }
    assert!(daemon.process.wait().unwrap().success());
    assert!(started.elapsed() > Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(read_step(&Store::connect(&url).unwrap(), None, 1).unwrap(), 2);
}

#[test]
fn object_durability_without_bucket_is_refused() {
    let daemon = TestDaemon::new(1 << 30);
    let folder = tempfile::tempdir().unwrap();
    let stores =
        [daemon.connect(), Store::memory().unwrap(), Store::directory(folder.path()).unwrap()];
    for store in stores {
        let error =
            store.put_state_dict(&key(), &step_part(1, 0, 1), &object_options(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("bucket"), "{error}");
    }
    // A proxy daemon refuses durable puts, and names the address of its controller.
    let proxy_daemon = TestDaemon::with_controller(&daemon);
    for durability in [Durability::Disk, OBJECT] {
        let options = PutOptions { durability, ..options(1, 0, 1) };
        let error = proxy_daemon
            .connect()
            .put_state_dict(&key(), &step_part(1, 0, 1), &options)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(daemon.address()), "{error}");
    }
    for wrong in ["tcp://127.0.0.1:1", "memory:", "unix:default", "elsewhere"] {
        let bound = std::panic::catch_unwind(|| {
            TestDaemon::with_options(1 << 30, |options| options.bucket = Some(wrong.to_owned()))
        });
        assert!(bound.is_err(), "{wrong}");
    }
}

#[test]
fn deleted_version_is_not_uploaded() {
    let folder = tempfile::tempdir().unwrap();
    let [bucket, away] = ["bucket", "away"].map(|name| folder.path().join(name));
    std::fs::create_dir(&bucket).unwrap();
    let (url, daemon) = (bucket_url(&bucket), daemon_with_bucket(&bucket, 2));
    let store = daemon.connect();
    let put =
        |step| store.put_state_dict(&key(), &step_part(step, 0, 1), &object_options(step)).unwrap();
    assert!(put(1).stored);
    std::fs::rename(&bucket, &away).unwrap();
    let later =
        |step| store.put_state_dict_later(&key(), &step_part(step, 0, 1), &object_options(step));
    let pending = [2, 3].map(|step| {
        let mut pending = later(step).unwrap();
        assert!(pending.committed().unwrap().visible);
        pending
    });
    // The version is deleted in memory. The deletion in the bucket fails.
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
    drop(daemon);
    assert_eq!(daemon_with_bucket(&bucket, 2).connect().keys(None).unwrap(), []);
}

#[test]
fn pin_is_replicated_with_its_version() {
    let folder = tempfile::tempdir().unwrap();
    let [bucket, away] = ["bucket", "away"].map(|name| folder.path().join(name));
    std::fs::create_dir(&bucket).unwrap();
    let (url, daemon) = (bucket_url(&bucket), daemon_with_bucket(&bucket, 1));
    let store = daemon.connect();
    std::fs::rename(&bucket, &away).unwrap();
    let mut pending =
        store.put_state_dict_later(&key(), &step_part(1, 0, 1), &object_options(1)).unwrap();
    assert!(pending.committed().unwrap().visible);
    store.pin(&key(), Some(1), "best").unwrap();
    assert_eq!(store.pins(&key()).unwrap()["best"], 1);
    std::fs::rename(&away, &bucket).unwrap();
    assert!(pending.wait().unwrap().stored);
    store.put_state_dict(&key(), &step_part(2, 0, 1), &object_options(2)).unwrap();
    let bucket_store = Store::connect(&url).unwrap();
    assert_eq!(bucket_store.pins(&key()).unwrap()["best"], 1);
    assert_eq!(versions(&bucket_store), [(0, 1), (0, 2)]);
}

#[test]
fn restore_fails_without_enough_memory() {
    let bucket = tempfile::tempdir().unwrap();
    let put = |store: &Store| publish_with_durability(&[store.clone(), store.clone()], 1, OBJECT);
    put(&daemon_with_bucket(bucket.path(), 1).connect());
    // Room for one of the two archives of 2 MiB.
    let daemon = TestDaemon::with_options(7 << 20, |options| {
        options.bucket = Some(bucket_url(bucket.path()));
    });
    let store = daemon.connect();
    let read = std::thread::spawn({
        let store = store.clone();
        move || read_step(&store, None, 2).unwrap_err()
    });
    let error = read.join().unwrap();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("no memory for a version of `policy`"), "{error}");
}

/// Puts to memory continue after durable versions have filled the memory limit.
#[test]
fn memory_of_durable_versions_is_evicted_on_demand() {
    const LEN: usize = 8 << 20;
    let large = |step: u8| {
        let mut dict = StateDict::new();
        dict.insert("weight", Tensor::from_slice(&vec![step; LEN], &[LEN as u64]).unwrap());
        dict
    };
    for durability in [Durability::Object, Durability::Disk] {
        let folder = tempfile::tempdir().unwrap();
        // Room for two versions, not for three.
        let daemon = TestDaemon::with_options(24 << 20, |options| match durability {
            Durability::Object => options.bucket = Some(bucket_url(folder.path())),
            _ => options.root = Some(folder.path().to_owned()),
        });
        let store = daemon.connect();
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
        put(1, durability);
        for step in 2..5 {
            put(step, Durability::Memory);
        }
        assert_eq!(versions(&store), [(0, 1), (0, 4)]);
        let weight = |step: u8| {
            let options = GetOptions { version: u64::from(step).into(), ..GetOptions::default() };
            store.get(&key(), "weight", &options).unwrap()
        };
        for step in [4, 1] {
            assert!(weight(step).view().span().iter().all(|byte| *byte == step), "{durability:?}");
        }
        store.delete(&key(), None).unwrap();
    }
}
