//! Versions that are uploaded to a bucket as deltas. The bucket is a shared directory here.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tssd_store::blocking::Store;
use tssd_store::{BucketDeltas, Durability, ErrorKind, GetOptions, PutOptions, Selector};
use tssd_tests::command::binary;
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::key;

use crate::delta_transfers::{Model, TENSOR_BYTES};

fn bucket_url(folder: &Path) -> String {
    format!("file:{}", folder.display())
}

/// Starts a daemon that uploads one version in `anchor_interval` whole.
fn daemon_with_bucket(bucket: &Path, keep: u32, anchor_interval: u32) -> TestDaemon {
    TestDaemon::with_options(1 << 30, |options| {
        options.bucket = Some(bucket_url(bucket));
        options.keep = keep.try_into().unwrap();
        let anchor_interval = anchor_interval.try_into().unwrap();
        options.bucket_deltas = BucketDeltas { anchor_interval, ..BucketDeltas::default() };
    })
}

fn put(store: &Store, model: &Model) -> u64 {
    let options = PutOptions { durability: Durability::Object, ..PutOptions::default() };
    let report = store.put_state_dict(&key(), &model.dict(), &options).unwrap();
    assert!(report.stored);
    report.version
}

/// Returns the sizes of the archives in the bucket, by the number of their version.
fn archive_sizes(bucket: &Path) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    for version in fs::read_dir(bucket.join(key().to_string())).unwrap() {
        let version = version.unwrap();
        let name = version.file_name().into_string().unwrap();
        let Some(number) = name.split('-').nth(1).and_then(|number| number.parse().ok()) else {
            continue;
        };
        for file in fs::read_dir(version.path()).unwrap() {
            let file = file.unwrap();
            if file.file_name() != "manifest.tssd" {
                *sizes.entry(number).or_default() += file.metadata().unwrap().len();
            }
        }
    }
    sizes
}

fn get(store: &Store, number: u64) -> Result<tssd_format::StateDict, tssd_store::Error> {
    let options = GetOptions { version: Selector::Number(number), ..GetOptions::default() };
    store.get_state_dict(&key(), &options).map(|(dict, _)| dict)
}

/// Returns the path of the archive of a version in the bucket.
fn archive_path(bucket: &Path, number: u64) -> PathBuf {
    let folder = bucket.join(key().to_string());
    let mut folders = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let prefix = format!("0-{number}-");
    let is_version = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_str().unwrap().starts_with(&prefix))
    };
    let version = folders.find(is_version).unwrap();
    let mut files = fs::read_dir(version).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| !path.ends_with("manifest.tssd")).unwrap()
}

#[test]
fn versions_are_uploaded_as_deltas() {
    let bucket = tempfile::tempdir().unwrap();
    let daemon = daemon_with_bucket(bucket.path(), 8, 4);
    let (store, reader) = (daemon.connect(), Store::connect(&bucket_url(bucket.path())).unwrap());
    let (mut model, mut dicts) = (Model::new(2), Vec::new());
    for number in 1..=6 {
        assert_eq!(put(&store, &model), number);
        model.check(&reader);
        // Parts of tensors are computed from parts of the chain.
        model.check_half(&reader, number % 2);
        dicts.push(model.dict());
        model.step(100);
    }
    let size = 2 * TENSOR_BYTES;
    for (number, bytes) in archive_sizes(bucket.path()) {
        if number % 4 == 1 {
            assert!(bytes >= size, "{number}: {bytes}");
        } else {
            assert!(bytes < size / 50, "{number}: {bytes}");
        }
    }
    for (number, dict) in (1..).zip(&dicts) {
        assert!(get(&reader, number).unwrap() == *dict, "version {number}");
    }
    let uploaded = daemon.metric("tssd_uploaded_bytes_total");
    assert!(uploaded < 2.5 * size as f64, "{uploaded}");
    assert!(tssd_store::scrub(bucket.path()).unwrap().is_empty());
    // The command verifies the contents of deltas too.
    let verify = || {
        let mut command = Command::new(binary());
        let output = command.args(["verify", "--quiet"]).arg(bucket.path()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(verify(), "");
    let path = archive_path(bucket.path(), 6);
    let mut damaged = fs::read(&path).unwrap();
    damaged[20_000] ^= 1;
    fs::write(&path, damaged).unwrap();
    let found = verify();
    assert!(found.starts_with("DAMAGED") && found.contains("0-6-"), "{found}");
}

/// The archives from which a version is computed stay as long as it is readable.
#[test]
fn bases_are_deleted_with_the_last_version_that_needs_them() {
    let bucket = tempfile::tempdir().unwrap();
    let daemon = daemon_with_bucket(bucket.path(), 1, 3);
    let (store, reader) = (daemon.connect(), Store::connect(&bucket_url(bucket.path())).unwrap());
    let mut model = Model::new(1);
    let stored = [vec![1], vec![1, 2], vec![1, 2, 3], vec![4], vec![4, 5]];
    for (number, expected) in (1..).zip(stored) {
        assert_eq!(put(&store, &model), number);
        assert!(archive_sizes(bucket.path()).into_keys().eq(expected), "{number}");
        assert_eq!(reader.versions(&key()).unwrap().len(), 1);
        model.check(&reader);
        if number == 2 {
            store.pin(&key(), Some(2), "best").unwrap();
            store.unpin(&key(), "best").unwrap();
        }
        model.step(100);
    }
    store.delete(&key(), None).unwrap();
    assert!(archive_sizes(bucket.path()).is_empty());
}

/// A daemon that starts anew does not know what the bucket has: it uploads a version whole, and restores deltas.
#[test]
fn restarted_daemon_restores_deltas() {
    let bucket = tempfile::tempdir().unwrap();
    let mut model = Model::new(2);
    {
        let daemon = daemon_with_bucket(bucket.path(), 1, 8);
        let store = daemon.connect();
        for _ in 1..=3 {
            model.step(100);
            put(&store, &model);
        }
    }
    let daemon = daemon_with_bucket(bucket.path(), 1, 8);
    let store = daemon.connect();
    model.check(&store);
    model.step(100);
    put(&store, &model);
    let sizes = archive_sizes(bucket.path());
    assert!(sizes.len() == 1 && sizes[&4] >= 2 * TENSOR_BYTES, "{sizes:?}");
    model.step(100);
    put(&store, &model);
    assert!(archive_sizes(bucket.path())[&5] < TENSOR_BYTES / 20);
    let reader = Store::connect(&bucket_url(bucket.path())).unwrap();
    model.check(&reader);
}

#[test]
fn changed_models_are_uploaded_whole() {
    let bucket = tempfile::tempdir().unwrap();
    let daemon = daemon_with_bucket(bucket.path(), 1, 8);
    let store = daemon.connect();
    let mut model = Model::new(1);
    put(&store, &model);
    // Another number of tensors, then another value of each element.
    model = Model::new(2);
    put(&store, &model);
    assert!(archive_sizes(bucket.path())[&2] >= 2 * TENSOR_BYTES);
    model.change_all();
    put(&store, &model);
    assert!(archive_sizes(bucket.path())[&3] >= 2 * TENSOR_BYTES);
    model.step(100);
    put(&store, &model);
    assert!(archive_sizes(bucket.path())[&4] < TENSOR_BYTES / 10);
    let reader = Store::connect(&bucket_url(bucket.path())).unwrap();
    model.check(&reader);
}

#[test]
fn damaged_deltas_are_rejected() {
    let bucket = tempfile::tempdir().unwrap();
    let daemon = daemon_with_bucket(bucket.path(), 4, 8);
    let store = daemon.connect();
    let mut model = Model::new(1);
    for _ in 1..=3 {
        put(&store, &model);
        model.step(100);
    }
    let read = || {
        let reader = Store::connect(&bucket_url(bucket.path())).unwrap();
        get(&reader, 3).map(drop)
    };
    read().unwrap();
    let second = archive_path(bucket.path(), 2);
    let intact = fs::read(&second).unwrap();
    // Each part of the file: data, table, names and trailer.
    for at in [intact.len() / 2, intact.len() - 120, intact.len() - 60, intact.len() - 20] {
        let mut damaged = intact.clone();
        damaged[at] ^= 0x10;
        fs::write(&second, &damaged).unwrap();
        let kind = read().err().map(|error| error.kind());
        assert_eq!(kind, Some(ErrorKind::Corrupt), "byte {at} of {}", intact.len());
    }
    fs::write(&second, &intact[..intact.len() / 2]).unwrap();
    assert_eq!(read().unwrap_err().kind(), ErrorKind::Corrupt);
    // Another archive in the place of a base.
    fs::copy(archive_path(bucket.path(), 3), &second).unwrap();
    assert_eq!(read().unwrap_err().kind(), ErrorKind::Corrupt);
    fs::remove_file(&second).unwrap();
    let error = read().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overtaken);
    assert!(error.to_string().contains("was deleted"), "{error}");
    let defects = tssd_store::scrub(bucket.path()).unwrap();
    assert!(!defects.is_empty());
    fs::write(&second, &intact).unwrap();
    read().unwrap();
    // An anchor with other bytes.
    let anchor = archive_path(bucket.path(), 1);
    let mut damaged = fs::read(&anchor).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(&anchor, damaged).unwrap();
    assert_eq!(read().unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn deltas_can_be_switched_off() {
    let bucket = tempfile::tempdir().unwrap();
    let daemon = TestDaemon::with_options(1 << 30, |options| {
        options.bucket = Some(bucket_url(bucket.path()));
        options.deltas = false;
    });
    let store = daemon.connect();
    let mut model = Model::new(1);
    for number in 1..=3 {
        put(&store, &model);
        assert!(archive_sizes(bucket.path())[&number] >= TENSOR_BYTES);
        model.step(100);
    }
    assert_eq!(store.status().unwrap().memory.retained_bytes, 0);
}
