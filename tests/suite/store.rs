//! The store: versions, rejected puts, damage, several processes, crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use tssd_format::{
    DeviceMesh, Dict, Dtype, Placement, Region, Shard, ShardSpec, StateDict, Tensor, TensorMeta,
    TensorSlice, Value,
};
use tssd_store::blocking::{PendingPut, Store};
use tssd_store::{
    DivergencePolicy, Error, ErrorKind, GetOptions, JobId, Key, PutOptions, PutReport, Refusal,
    Replicas, Rewind, Target, WriterSet,
};
use tssd_tests::test_daemon::TestDaemon;

fn key() -> Key {
    Key::new("policy/actor").unwrap()
}

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, &[values.len().try_into().unwrap()]).unwrap()
}

fn dict(entries: Vec<(&str, Value)>) -> StateDict {
    StateDict::from_value(Value::Dict(Dict::from_iter(entries))).unwrap()
}

/// Returns a row of a matrix of `rows` rows, as a shard.
fn row(row: u64, rows: u64, values: &[f32]) -> Value {
    let columns = values.len().try_into().unwrap();
    let slice = TensorSlice::new(&[row, 0], &[1, columns], &[rows, columns]).unwrap();
    let local = Tensor::from_slice(values, &[1, columns]).unwrap();
    Shard::new(local, ShardSpec::new(slice)).unwrap().into()
}

/// Returns the options of one of several writers of the same job.
fn writer_options(writer: u32, writers: u32) -> PutOptions {
    PutOptions {
        writer: Some(writer),
        writers: Some((0..writers).collect()),
        job: Some(JobId("run-1".into())),
        ..PutOptions::default()
    }
}

fn put(store: &Store, dict: &StateDict, options: &PutOptions) -> Result<PutReport, Error> {
    store.put_state_dict(&key(), dict, options)
}

fn get(store: &Store) -> StateDict {
    store.get_state_dict(&key(), &GetOptions::default()).unwrap().0
}

/// Backend of a store, with the folder or daemon that keeps it alive.
enum Backend {
    Memory,
    Directory(tempfile::TempDir),
    Daemon(TestDaemon),
    /// A daemon that shares no memory with the store.
    RemoteDaemon(TestDaemon),
}

impl Backend {
    fn folder(&self) -> Option<&Path> {
        match self {
            Self::Directory(folder) => Some(folder.path()),
            Self::Memory | Self::Daemon(_) | Self::RemoteDaemon(_) => None,
        }
    }

    /// Opens the store as another process would.
    fn reopen(&self, store: &Store) -> Store {
        match self {
            Self::Memory => store.clone(),
            Self::Directory(folder) => Store::directory(folder.path()).unwrap(),
            Self::Daemon(served) => served.connect(),
            Self::RemoteDaemon(served) => served.connect_tcp(),
        }
    }
}

/// Returns a store of every backend.
fn stores() -> Vec<(Store, Backend)> {
    let folder = tempfile::tempdir().unwrap();
    let (served, remote) = (TestDaemon::new(1 << 30), TestDaemon::new(1 << 30));
    vec![
        (Store::memory().unwrap(), Backend::Memory),
        (Store::directory(folder.path()).unwrap(), Backend::Directory(folder)),
        (served.connect(), Backend::Daemon(served)),
        (remote.connect_tcp(), Backend::RemoteDaemon(remote)),
    ]
}

#[test]
fn single_writer_makes_versions() {
    for (store, _backend) in stores() {
        assert_eq!(store.head(&key()).unwrap(), None);
        let missing = store.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        for step in 1..=3_u64 {
            let dict = dict(vec![
                ("w", tensor(&[1.0, 2.0]).into()),
                ("step", Value::from(step.cast_signed())),
            ]);
            let report = put(&store, &dict, &PutOptions::default()).unwrap();
            assert!(report.visible && report.missing.is_empty());
            assert_eq!(report.version, step);
            assert_eq!(get(&store), dict);
        }
        let versions = store.versions(&key()).unwrap();
        assert_eq!(versions.iter().map(|version| version.number).collect::<Vec<_>>(), [3]);
        assert_eq!(store.keys(None).unwrap(), [key()]);
        assert_eq!(store.keys(Some("other")).unwrap(), []);
        assert!(store.exists(&key(), Some(3)).unwrap() && !store.exists(&key(), Some(2)).unwrap());
        assert_eq!(store.delete(&key(), None).unwrap(), 1);
        assert_eq!(store.delete(&key(), None).unwrap(), 0);
        assert_eq!(store.keys(None).unwrap(), []);
        // A version number is never reused.
        let report = put(&store, &dict(vec![]), &PutOptions::default()).unwrap();
        assert_eq!(report.version, 4);
    }
}

#[test]
fn reader_keeps_its_version_while_newer_ones_appear() {
    for (store, _backend) in stores() {
        let first = dict(vec![("w", tensor(&[1.0; 1000]).into())]);
        put(&store, &first, &PutOptions::default()).unwrap();
        let read = get(&store);
        for step in 0_u16..5 {
            let next = dict(vec![("w", tensor(&[f32::from(step); 1000]).into())]);
            put(&store, &next, &PutOptions::default()).unwrap();
        }
        assert_eq!(read, first);
    }
}

#[test]
fn retention_keeps_newest_versions() {
    for (store, backend) in stores() {
        store.retain(&key(), NonZeroU32::new(2).unwrap()).unwrap();
        for step in 1..=5_i64 {
            put(&store, &dict(vec![("step", step.into())]), &PutOptions::default()).unwrap();
        }
        let options = GetOptions { version: 4.into(), ..GetOptions::default() };
        let (older, _) = store.get_state_dict(&key(), &options).unwrap();
        assert_eq!(older.leaf("step").unwrap(), &Value::from(4_i64));
        let options = GetOptions { version: 3.into(), ..GetOptions::default() };
        let error = store.get_state_dict(&key(), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("the newest is 5"), "{error}");
        if let Some(folder) = backend.folder() {
            let key_folder = folder.join("policy%2Factor");
            let mut folders: Vec<_> = std::fs::read_dir(key_folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| !name.starts_with('.'))
                .collect();
            folders.sort();
            let numbers: Vec<_> =
                folders.iter().map(|name| name.rsplit_once('-').unwrap().0).collect();
            assert_eq!(numbers, ["0-4", "0-5"], "the data of older versions is deleted");
        }
    }
}

#[test]
fn pins_retain_versions() {
    for (store, backend) in stores() {
        let step = |step: i64| {
            put(&store, &dict(vec![("step", step.into())]), &PutOptions::default()).unwrap();
        };
        assert_eq!(store.pin(&key(), None, "best").unwrap_err().kind(), ErrorKind::NotFound);
        step(1);
        assert_eq!(store.pin(&key(), None, "best").unwrap(), 1);
        assert_eq!(store.pin(&key(), Some(1), "first").unwrap(), 1);
        (2..=4).for_each(step);
        let other = backend.reopen(&store);
        let numbers = || -> Vec<u64> {
            other.versions(&key()).unwrap().iter().map(|version| version.number).collect()
        };
        assert_eq!(numbers(), [1, 4]);
        let pins = BTreeMap::from([("best".to_owned(), 1), ("first".to_owned(), 1)]);
        assert_eq!(other.pins(&key()).unwrap(), pins);
        assert_eq!(store.pin(&key(), None, "best").unwrap(), 4);
        assert_eq!(numbers(), [1, 4], "one pin retains the version");
        store.unpin(&key(), "first").unwrap();
        store.unpin(&key(), "never").unwrap();
        assert_eq!(numbers(), [4]);
    }
}

#[test]
fn publish_in_buckets_makes_one_version() {
    let tensor = |first: u16, rows: u64, columns: u64| {
        let elements: Vec<u16> = (0..rows * columns).map(|at| first + at as u16).collect();
        Tensor::from_slice(&elements, &[rows, columns]).unwrap()
    };
    let entries = || -> Vec<(&str, Value)> {
        vec![
            ("large", tensor(1, 8, 90).into()),
            ("step", 7_i64.into()),
            ("wide", tensor(3, 1, 800).into()),
            ("a", tensor(5, 3, 3).into()),
            ("b", tensor(6, 3, 3).into()),
            ("scalar", Tensor::from_slice(&[1.5_f64], &[]).unwrap().into()),
            ("empty", Tensor::from_slice(&[0_u8; 0], &[0, 5]).unwrap().into()),
            ("name", "policy".into()),
        ]
    };
    for (store, backend) in stores() {
        // From buckets of one or two elements to one bucket for all tensors.
        for bucket in [3, 64, 1000, 4096, 1 << 20] {
            let mut publisher = store.publish(&key(), &PutOptions::default(), bucket).unwrap();
            for (name, value) in entries() {
                publisher.add(name, value).unwrap();
                if bucket == 4096 {
                    publisher.flush().unwrap();
                }
            }
            let before = store.head(&key()).unwrap().map(|head| head.number);
            let report = publisher.finish().unwrap();
            assert!(report.visible && Some(report.version) > before, "visible at the end");
            let other = backend.reopen(&store);
            assert_eq!(get(&other), dict(entries()), "buckets of {bucket} bytes");
            // An open version can be read leaf by leaf while newer versions appear.
            let opened = other.open(&key(), &GetOptions::default()).unwrap();
            assert_eq!(opened.version(), report.version);
            put(&store, &dict(vec![("newer", 1_i64.into())]), &PutOptions::default()).unwrap();
            let column = Region::new(&[0, 89], &[8, 1]).unwrap();
            let column = opened.tensor("large", Some(&column)).unwrap();
            assert_eq!(column.view().as_slice::<u16>().unwrap()[..2], [90, 180]);
            let read: Vec<(String, Value)> =
                opened.map(|leaf| leaf.map(|(path, value)| (path.fqn(), value)).unwrap()).collect();
            let expected: Vec<(String, Value)> =
                entries().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            assert_eq!(read, expected);
        }
        assert!(store.publish(&key(), &PutOptions::default(), 0).is_err());
    }
}

#[test]
fn put_later_completes_in_background() {
    for (store, _backend) in stores() {
        let step_dict = |step: i64| dict(vec![("step", step.into())]);
        let options = PutOptions::default();
        let pending = store.put_state_dict_later(&key(), &step_dict(1), &options).unwrap();
        assert!(pending.wait().unwrap().visible);
        // Dropping the pending put does not cancel it.
        drop(store.put_state_dict_later(&key(), &step_dict(2), &options).unwrap());
        let timeout = Duration::from_mins(1);
        assert_eq!(store.wait_for_version(&key(), 2, timeout).unwrap().number, 2);
        assert_eq!(get(&store), step_dict(2));
        let twice = PutOptions { version: Some(1), ..PutOptions::default() };
        // Until version 1 is deleted, this put may be a retry of it. The contents tell the difference.
        let put = store.put_state_dict_later(&key(), &step_dict(3), &twice);
        let error = put.and_then(PendingPut::wait).unwrap_err();
        assert!(error.refusal().is_some(), "{error}");
    }
}

#[test]
fn unfinished_publish_leaves_nothing() {
    for (store, backend) in stores() {
        put(&store, &dict(vec![("step", 1_i64.into())]), &PutOptions::default()).unwrap();
        let add = || {
            let mut publisher = store.publish(&key(), &PutOptions::default(), 64).unwrap();
            for number in 0..5_u8 {
                let tensor = Tensor::from_slice(&[number; 60], &[60]).unwrap();
                publisher.add(number.to_string(), tensor).unwrap();
            }
            publisher
        };
        drop(add());
        // An unsupported value aborts the version. `finish` returns the reason.
        let mut publisher = add();
        let opaque = Value::Opaque { media: "x/y".into(), bytes: vec![1].into() };
        publisher.add("opaque", opaque).unwrap();
        let error = publisher.finish().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert_eq!(get(&store), dict(vec![("step", 1_i64.into())]));
        // The store aborts the versions in the background and then deletes their folders.
        put(&store, &dict(vec![("step", 2_i64.into())]), &PutOptions::default()).unwrap();
        assert_eq!(store.versions(&key()).unwrap().len(), 1);
        if let Some(folder) = backend.folder() {
            let folder = folder.join("policy%2Factor");
            let versions = || {
                let names = std::fs::read_dir(&folder).unwrap();
                let names = names.map(|entry| entry.unwrap().file_name());
                names.filter(|name| !name.to_string_lossy().starts_with('.')).count()
            };
            let started = std::time::Instant::now();
            while versions() > 1 && started.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(versions(), 1);
        }
    }
}

/// Regression: a directory store deleted the files of the slow attempt when the version became visible.
#[test]
fn attempt_overtaken_by_its_retry_succeeds() {
    for (store, _backend) in stores() {
        let of = |writer: u32| dict(vec![("m", row(writer.into(), 2, &[1.0, 2.0]))]);
        let first = PutOptions { version: Some(1), ..writer_options(0, 2) };
        let start = || {
            let mut slow = store.publish(&key(), &first, 1 << 20).unwrap();
            slow.add("m", row(0, 2, &[1.0, 2.0])).unwrap();
            slow.flush().unwrap();
            slow
        };
        let (slow, slower) = (start(), start());
        put(&store, &of(0), &first).unwrap();
        put(&store, &of(1), &PutOptions { version: Some(1), ..writer_options(1, 2) }).unwrap();
        assert!(slow.finish().unwrap().visible);
        put(&store, &dict(vec![]), &PutOptions::default()).unwrap();
        let error = slower.finish().unwrap_err();
        assert!(matches!(error.refusal(), Some(Refusal::DataDeleted { number: 1 })), "{error}");
    }
}

#[test]
fn wait_and_subscription_return_newest_version() {
    for (store, backend) in stores() {
        let error = store.wait_for_version(&key(), 1, Duration::from_millis(30)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("there is none"), "{error}");
        let mut subscription = store.subscribe(&key());
        let writer = backend.reopen(&store);
        let writing = std::thread::spawn(move || {
            for step in 1..=3_i64 {
                std::thread::sleep(Duration::from_millis(20));
                put(&writer, &dict(vec![("step", step.into())]), &PutOptions::default()).unwrap();
            }
        });
        let timeout = Duration::from_mins(1);
        assert_eq!(store.wait_for_version(&key(), 3, timeout).unwrap().number, 3);
        writing.join().unwrap();
        assert_eq!(store.wait_for_version(&key(), 2, timeout).unwrap().number, 3, "3 is newer");
        assert_eq!(subscription.next().unwrap().unwrap().number, 3, "the newest comes first");
        let error = store.wait_for_version(&key(), 4, Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("the newest is 3"), "{error}");
        put(&store, &dict(vec![("step", 4_i64.into())]), &PutOptions::default()).unwrap();
        assert_eq!(subscription.next().unwrap().unwrap().number, 4);
    }
}

#[test]
fn version_becomes_visible_when_last_writer_puts() {
    for (store, _backend) in stores() {
        let of = |writer: u32| {
            dict(vec![
                ("m", row(writer.into(), 3, &[f32::from(u8::try_from(writer).unwrap()); 2])),
                ("buffer", tensor(&[5.0]).into()),
            ])
        };
        for writer in [2, 0] {
            let report = put(&store, &of(writer), &writer_options(writer, 3)).unwrap();
            assert!(!report.visible && report.missing.contains(1));
            assert_eq!(store.head(&key()).unwrap(), None);
        }
        let report = put(&store, &of(1), &writer_options(1, 3)).unwrap();
        assert!(report.visible);
        let whole = get(&store);
        let matrix = Tensor::from_slice(&[0.0_f32, 0.0, 1.0, 1.0, 2.0, 2.0], &[3, 2]).unwrap();
        assert_eq!(whole, dict(vec![("m", matrix.into()), ("buffer", tensor(&[5.0]).into())]));
        let region = Region::new(&[1, 1], &[2, 1]).unwrap();
        let slice = store.get_slice(&key(), "m", &region, &GetOptions::default()).unwrap();
        assert_eq!(slice.view().as_slice::<f32>().unwrap(), [1.0, 2.0]);
    }
}

/// Puts all dicts as one version, one per writer. Returns the report of the last put.
fn put_all(
    store: &Store,
    dicts: &[StateDict],
    divergent: DivergencePolicy,
) -> Result<PutReport, Error> {
    let of = u32::try_from(dicts.len()).unwrap();
    let mut last = None;
    for (writer, dict) in (0..).zip(dicts) {
        let options = PutOptions { on_divergence: divergent, ..writer_options(writer, of) };
        last = Some(put(store, dict, &options)?);
    }
    Ok(last.unwrap())
}

/// Asserts that a version of these dicts is rejected, with an error that contains `parts`.
#[track_caller]
fn assert_rejected(dicts: &[StateDict], parts: &[&str]) {
    for (store, _backend) in stores() {
        let before = dict(vec![("before", 1_i64.into())]);
        put(&store, &before, &PutOptions { version: Some(1), ..PutOptions::default() }).unwrap();
        let error = put_all(&store, dicts, DivergencePolicy::Error).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
        }
        assert_eq!(get(&store), before, "the visible version stays visible");
        let versions = store.versions(&key()).unwrap();
        assert_eq!(versions.len(), 1);
        // The rejected version does not affect the next one of the same job.
        let good = [dict(vec![("a", 1_i64.into())]), dict(vec![("b", 2_i64.into())])];
        assert!(put_all(&store, &good, DivergencePolicy::Error).unwrap().visible);
    }
}

#[test]
fn put_rejects_inconsistent_contributions() {
    let one = |value: Value| dict(vec![("layers", Value::from(Dict::from_iter([("w", value)])))]);
    let bytes = |row: u64| {
        let slice = TensorSlice::new(&[row, 0], &[1, 2], &[2, 2]).unwrap();
        let local = Tensor::from_slice(&[1_u8, 2], &[1, 2]).unwrap();
        Value::from(Shard::new(local, ShardSpec::new(slice)).unwrap())
    };
    let wide = |start: u64| {
        let slice = TensorSlice::new(&[start, 0], &[2, 1], &[3, 1]).unwrap();
        let local = Tensor::from_slice(&[1.0_f32, 2.0], &[2, 1]).unwrap();
        Value::from(Shard::new(local, ShardSpec::new(slice)).unwrap())
    };
    let f32 = |at| row(at, 2, &[1.0, 2.0]);
    // A hole. The error names its region.
    assert_rejected(
        &[one(row(0, 3, &[1.0])), one(row(2, 3, &[1.0]))],
        &["`layers.w`", "[1:2, 0:1]", "0-1"],
    );
    // Slices that overlap without being equal.
    assert_rejected(&[one(wide(0)), one(wide(1))], &["`layers.w`", "overlap", "[1:2, 0:1]"]);
    // Dtype, global shape.
    assert_rejected(&[one(f32(0)), one(bytes(1))], &["`layers.w`", "float32", "uint8", "writer 1"]);
    assert_rejected(&[one(f32(0)), one(row(1, 3, &[1.0, 2.0]))], &["[2, 2]", "[3, 2]", "writer 1"]);
    // A slice and a whole tensor, a container and a leaf, lists of different lengths, different kinds of dict.
    assert_rejected(&[one(f32(0)), one(tensor(&[1.0]).into())], &["`layers.w`", "slices"]);
    assert_rejected(&[one(1_i64.into()), one(Value::List(vec![]))], &["`layers.w`", "container"]);
    assert_rejected(
        &[one(Value::List(vec![Value::None])), one(Value::List(vec![]))],
        &["`layers.w`", "numbers of elements"],
    );
    assert_rejected(
        &[one(Value::from(Dict::new())), one(Value::OrderedDict(Dict::new()))],
        &["`layers.w`", "different kinds"],
    );
    // Leaves that differ.
    assert_rejected(
        &[one(1_i64.into()), one(2_i64.into())],
        &["`layers.w`", "writers 0-1", "on_divergence="],
    );
    assert_rejected(
        &[one(tensor(&[1.0]).into()), one(tensor(&[-1.0]).into())],
        &["different values"],
    );
}

#[test]
fn divergent_option_keeps_lowest_or_all_leaves() {
    for (store, _backend) in stores() {
        let of =
            |seed: i64| dict(vec![("seed", seed.into()), ("t", tensor(&[seed as f32]).into())]);
        put_all(&store, &[of(1), of(2)], DivergencePolicy::Lowest).unwrap();
        assert_eq!(get(&store), of(1));
        put_all(&store, &[of(1), of(2)], DivergencePolicy::Keep).unwrap();
        for (writer, seed) in [(0, 1), (1, 2)] {
            let options = GetOptions { writer: Some(writer), ..GetOptions::default() };
            assert_eq!(store.get_state_dict(&key(), &options).unwrap().0, of(seed));
        }
        let error = store.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
        assert!(error.to_string().contains("say writer="), "{error}");
    }
}

/// A cached plan must not serve another version, or another leaf of the same fqn.
#[test]
fn plan_cache_distinguishes_leaves_of_same_name() {
    let float = || TensorMeta::new(Dtype::Float32, &[1]).unwrap();
    let read_into = |store: &Store, fqn: &str, writer| {
        let mut memory = [0; 4];
        let mut targets = [Target {
            fqn: fqn.into(),
            shard_spec: None,
            meta: float(),
            memory: (&mut memory).into(),
        }];
        let options = GetOptions { writer, ..GetOptions::default() };
        let result = store.get_state_dict_into(&key(), &mut targets, &options);
        result.map(|_| memory)
    };
    for (store, _backend) in stores() {
        // A dict with a key per writer, and a leaf that diverges by writer, have the same tree.
        let of = |key: i64, value: f32| {
            let inner = Dict::from_iter([(key, Value::from(tensor(&[value])))]);
            dict(vec![("w", inner.into())])
        };
        put_all(&store, &[of(0, 1.0), of(1, 2.0)], DivergencePolicy::Error).unwrap();
        assert_eq!(read_into(&store, "w.0", None).unwrap(), 1.0_f32.to_le_bytes());
        let own = |value: f32| dict(vec![("w", tensor(&[value]).into())]);
        put_all(&store, &[own(1.0), own(2.0)], DivergencePolicy::Keep).unwrap();
        assert_eq!(read_into(&store, "w.0", None).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(read_into(&store, "w", Some(1)).unwrap(), 2.0_f32.to_le_bytes());
        put_all(&store, &[of(0, 1.0), of(1, 2.0)], DivergencePolicy::Error).unwrap();
        assert_eq!(read_into(&store, "w", Some(1)).unwrap_err().kind(), ErrorKind::NotFound);

        // Two leaves of the same fqn, each with a row of each writer.
        let rows = |at: u64, one: f32, other: f32| {
            let inner = Dict::from_iter([("b", row(at, 2, &[other]))]);
            dict(vec![("a.b", row(at, 2, &[one])), ("a", inner.into())])
        };
        put_all(&store, &[rows(0, 1.0, 5.0), rows(1, 2.0, 6.0)], DivergencePolicy::Error).unwrap();
        let mut read = Vec::new();
        for leaf in store.open(&key(), &GetOptions::default()).unwrap() {
            let (_, Value::Tensor(tensor)) = leaf.unwrap() else { panic!("a tensor") };
            read.push(tensor.view().to_contiguous(8).unwrap());
        }
        let floats = |values: [f32; 2]| values.map(f32::to_le_bytes).concat();
        assert_eq!(read, [floats([1.0, 2.0]), floats([5.0, 6.0])]);
        let mut memory = [0; 8];
        let meta = TensorMeta::new(Dtype::Float32, &[2, 1]).unwrap();
        let mut targets =
            [Target { fqn: "a.b".into(), shard_spec: None, meta, memory: (&mut memory).into() }];
        let error = store.get_state_dict_into(&key(), &mut targets, &GetOptions::default());
        assert!(error.unwrap_err().to_string().contains("a.b"));
    }
}

#[test]
fn trees_merge_in_order_of_writers_and_keep_ties() {
    for (store, _backend) in stores() {
        let (one, other) = (tensor(&[1.0, 2.0]), tensor(&[3.0]));
        let first = dict(vec![("b", one.clone().into()), ("a", one.clone().into())]);
        let second = dict(vec![("c", other.into()), ("a", one.clone().into())]);
        put_all(&store, &[first, second], DivergencePolicy::Error).unwrap();
        let whole = get(&store);
        let keys: Vec<String> = whole.entries().iter().map(|(key, _)| key.to_string()).collect();
        assert_eq!(keys, ["b", "a", "c"]);
        let address_of = |fqn: &str| match whole.leaf(fqn).unwrap() {
            Value::Tensor(tensor) => tensor.view().span().as_ptr(),
            _ => panic!("a tensor"),
        };
        assert_eq!(address_of("a"), address_of("b"), "the only writer that has both ties them");

        // A second writer has both, and does not tie them.
        let untied = dict(vec![("a", one.clone().into()), ("b", tensor(&[1.0, 2.0]).into())]);
        let tied = dict(vec![("b", one.clone().into()), ("a", one.into())]);
        put_all(&store, &[tied, untied], DivergencePolicy::Error).unwrap();
        let whole = get(&store);
        let address_of = |fqn: &str| match whole.leaf(fqn).unwrap() {
            Value::Tensor(tensor) => tensor.view().span().as_ptr(),
            _ => panic!("a tensor"),
        };
        assert_ne!(address_of("a"), address_of("b"));
    }
}

#[test]
fn replicas_are_stored_once() {
    let mesh = DeviceMesh::from_shape(&[2, 2]).unwrap();
    let placements = vec![Placement::Replicate, Placement::Shard { dim: 0 }];
    let of = |rank: u32| {
        let global: Vec<u32> = (0..4096).collect();
        let shards = tssd_tests::sharding::local_shards(&global, &[4096], &mesh, rank, &placements);
        dict(vec![("w", Value::Shards(shards))])
    };
    for (store, _backend) in stores() {
        for (replicas, copies) in [(Replicas::Primary, 1), (Replicas::All, 2)] {
            let mut stored = 0;
            for rank in 0..4 {
                let options = PutOptions {
                    writer: Some(rank),
                    job: Some(JobId(format!("{replicas:?}"))),
                    replicas,
                    ..PutOptions::default()
                };
                stored += put(&store, &of(rank), &options).unwrap().bytes;
            }
            let payload = 4096 * 4 * copies;
            assert!(
                (payload..payload + 4 * 8192).contains(&stored),
                "{stored} bytes for {payload}"
            );
            let whole = store.get(&key(), "w", &GetOptions::default()).unwrap();
            assert_eq!(tssd_tests::sharding::to_u32s(&whole), (0..4096).collect::<Vec<u32>>());
        }
    }
}

#[test]
fn attributes_of_writers_are_merged() {
    const MODULES: &str = "tssd.module_metadata";
    let text = |modules: &[String]| {
        tssd_format::AttrValue::Text(format!(r#"{{"[]":{{{}}}}}"#, modules.join(",")).into())
    };
    for (store, _backend) in stores() {
        let module = |writer: u32| format!(r#""{writer}":{{"version":1}}"#);
        let with_attrs = |writer: u32, format: &str| PutOptions {
            attrs: tssd_format::Attrs::from([
                ("format".to_owned(), tssd_format::AttrValue::Text(format.into())),
                (MODULES.to_owned(), text(&[module(writer)])),
                (format!("writer {writer}"), tssd_format::AttrValue::Int(writer.into())),
            ]),
            ..writer_options(writer, 2)
        };
        let some = dict(vec![("a", 1_i64.into())]);
        put(&store, &some, &with_attrs(0, "pt")).unwrap();
        put(&store, &some, &with_attrs(1, "pt")).unwrap();
        let (_, report) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
        let names: Vec<&str> = report.attrs.keys().map(String::as_str).collect();
        assert_eq!(names, ["format", MODULES, "writer 0", "writer 1"]);
        // The module metadata of both writers is merged.
        assert_eq!(report.attrs[MODULES], text(&[module(0), module(1)]));

        put(&store, &some, &with_attrs(0, "pt")).unwrap();
        let error = put(&store, &some, &with_attrs(1, "tf")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rejected);
        assert!(error.to_string().contains("`format`"), "{error}");
    }
}

#[test]
fn connect_does_not_create_missing_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("typo");
    let error = Store::connect(path.to_str().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(error.to_string().contains("typo"), "{error}");
    assert!(!path.exists());
    Store::create(path.to_str().unwrap()).unwrap();
    assert!(Store::connect(path.to_str().unwrap()).is_ok());
    let error = Store::connect("https://bucket").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn io_error_includes_reason_of_system() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    // A file has the path of the key's folder.
    std::fs::write(folder.path().join("policy%2Factor"), "").unwrap();
    let error = put(&store, &dict(vec![]), &PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("not a directory"), "{error}");
    assert_eq!(error.errno(), Some(20));
}

#[test]
fn put_reports_refusals_of_ledger() {
    for (store, _backend) in stores() {
        let some = dict(vec![("a", 1_i64.into())]);
        let numbered = |version| PutOptions { version: Some(version), ..PutOptions::default() };
        put(&store, &some, &numbered(7)).unwrap();
        let error = put(&store, &dict(vec![]), &numbered(7)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        assert!(
            matches!(
                error.refusal(),
                Some(Refusal::ContributionDiffers { .. } | Refusal::VersionNotNewer { .. })
            ),
            "{error}"
        );
        // The same put again is a retry and succeeds.
        assert!(put(&store, &some, &numbered(7)).unwrap().visible);
        let error = put(&store, &some, &numbered(3)).unwrap_err();
        assert!(
            matches!(error.refusal(), Some(Refusal::VersionNotNewer { highest: 7, .. })),
            "{error}"
        );
        let rewind = PutOptions { rewind: Rewind::Always, ..numbered(3) };
        assert_eq!(put(&store, &some, &rewind).unwrap().epoch, 1);
        assert_eq!(store.head(&key()).unwrap().unwrap().number, 3);

        let without_job = PutOptions { job: None, ..writer_options(0, 2) };
        let error = put(&store, &some, &without_job).unwrap_err();
        assert!(error.to_string().contains("say job="), "{error}");
        let error = put(&store, &some, &writer_options(5, 2)).unwrap_err();
        assert!(error.to_string().contains("writers="), "{error}");

        put(&store, &some, &writer_options(0, 2)).unwrap();
        let other_set =
            PutOptions { writers: Some((0..3).collect::<WriterSet>()), ..writer_options(1, 2) };
        let error = put(&store, &some, &other_set).unwrap_err();
        assert!(matches!(error.refusal(), Some(Refusal::WritersDisagree { .. })), "{error}");

        // A new run takes over the key. The old one is fenced, and its version is never completed.
        let newer = PutOptions { job: Some(JobId("run-2".into())), ..writer_options(0, 2) };
        put(&store, &some, &newer).unwrap();
        let error = put(&store, &some, &writer_options(1, 2)).unwrap_err();
        assert!(matches!(error.refusal(), Some(Refusal::Fenced { .. })), "{error}");
    }
}

#[test]
fn unsupported_value_leaves_no_trace() {
    for (store, backend) in stores() {
        let opaque =
            Value::Opaque { media: "application/x-python-pickle".into(), bytes: vec![1].into() };
        let error = put(&store, &dict(vec![("rng", opaque)]), &PutOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(r#"["rng"]"#), "{error}");
        assert!(store.versions(&key()).unwrap().is_empty());
        if let Some(folder) = backend.folder() {
            assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
        }
    }
    let slice = TensorSlice::new(&[0], &[2], &[2]).unwrap().with_mesh(&[2], Some(&[0])).unwrap();
    let partial = Placement::Partial { reduce_op: "sum".into() };
    let error = ShardSpec::new(slice).with_placements(vec![partial]).unwrap_err();
    assert_eq!(error.kind(), tssd_format::ErrorKind::PartialPlacement);
}

#[test]
fn targets_are_validated_before_they_are_written() {
    for (store, _backend) in stores() {
        put(
            &store,
            &dict(vec![("w", tensor(&[1.0, 2.0, 3.0, 4.0]).into())]),
            &PutOptions::default(),
        )
        .unwrap();
        let try_into = |fqn: &str, meta: TensorMeta, len: usize| {
            let mut memory = vec![0xEE_u8; len];
            let target =
                Target { fqn: fqn.into(), shard_spec: None, meta, memory: (&mut memory).into() };
            let result = store.get_state_dict_into(&key(), &mut [target], &GetOptions::default());
            (result, memory)
        };
        let meta = |dtype, shape: &[u64]| TensorMeta::new(dtype, shape).unwrap();
        let overlapping = meta(Dtype::Float32, &[4]).with_strides(&[0]).unwrap();
        for (fqn, bad, len, part) in [
            ("w", overlapping, 16, "overlap"),
            ("w", meta(Dtype::Float32, &[4]), 12, "12 bytes, needed 16"),
            ("w", meta(Dtype::Float64, &[4]), 32, "wanted float64, stored float32"),
            ("w", meta(Dtype::Float32, &[5]), 20, "target [5], wanted [4]"),
            ("v", meta(Dtype::Float32, &[4]), 16, "no such leaf"),
        ] {
            let (result, memory) = try_into(fqn, bad, len);
            let error = result.unwrap_err();
            assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
            assert!(!error.is_target_modified() && memory.iter().all(|byte| *byte == 0xEE));
        }
        let (result, memory) = try_into("w", meta(Dtype::Float32, &[4]), 16);
        assert_eq!(result.unwrap().bytes_transferred, 16);
        assert_eq!(memory, [1.0_f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat());
    }
}

/// Returns the paths of all files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(self::files(&path)) } else { files.push(path) }
    }
    files
}

#[test]
fn version_on_disk_is_a_shard_set_of_ordinary_files() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    let of = |writer: u64| dict(vec![("m", row(writer, 2, &[1.0, 2.0]))]);
    put_all(&store, &[of(0), of(1)], DivergencePolicy::Error).unwrap();
    let mut archives = 0;
    for path in files(folder.path()) {
        if path.extension().is_some_and(|extension| extension == "tssd") {
            tssd_format::Archive::open(&path).unwrap().verify().unwrap();
            archives += 1;
        }
        assert!(!path.file_name().unwrap().to_str().unwrap().starts_with(".tmp"), "{path:?}");
    }
    assert_eq!(archives, 3);
}

#[test]
fn damaged_file_is_reported_with_its_leaf() {
    let folder = tempfile::tempdir().unwrap();
    let whole = dict(vec![("w", tensor(&[1.0; 4096]).into())]);
    put(&Store::directory(folder.path()).unwrap(), &whole, &PutOptions::default()).unwrap();
    let is_archive = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("0-")
    };
    let archive = files(folder.path()).into_iter().find(is_archive).unwrap();
    let mut bytes = std::fs::read(&archive).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&archive, &bytes).unwrap();
    let error = Store::directory(folder.path())
        .unwrap()
        .get_state_dict(&key(), &GetOptions::default())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("`w`"), "{error}");

    let mut memory = vec![0; 4096 * 4];
    let meta = TensorMeta::new(Dtype::Float32, &[4096]).unwrap();
    let target = Target { fqn: "w".into(), shard_spec: None, meta, memory: (&mut memory).into() };
    let error = Store::directory(folder.path())
        .unwrap()
        .get_state_dict_into(&key(), &mut [target], &GetOptions::default())
        .unwrap_err();
    assert!(error.is_target_modified() && error.kind() == ErrorKind::Corrupt, "{error}");

    std::fs::write(&archive, &bytes[..4000]).unwrap();
    let error = Store::directory(folder.path())
        .unwrap()
        .get_state_dict(&key(), &GetOptions::default())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    std::fs::remove_file(&archive).unwrap();
    let error = Store::directory(folder.path())
        .unwrap()
        .get_state_dict(&key(), &GetOptions::default())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

/// Starts a process of this test binary that runs one ignored test with these variables.
fn spawn(test: &str, folder: &Path, variables: &BTreeMap<&str, String>) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--ignored", "--nocapture"])
        .env("TSSD_TEST_FOLDER", folder)
        .envs(variables)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is set by the parent process"))
}

#[test]
fn writers_in_several_processes_make_one_version() {
    let folder = tempfile::tempdir().unwrap();
    let child = |writer: u32| {
        spawn(
            "store::child_writer",
            folder.path(),
            &BTreeMap::from([("TSSD_TEST_WRITER", writer.to_string())]),
        )
    };
    let children: Vec<Child> = (0..4).map(child).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let store = Store::directory(folder.path()).unwrap();
    let versions = store.versions(&key()).unwrap();
    assert_eq!(versions.iter().map(|version| version.number).collect::<Vec<_>>(), [5]);
    assert_eq!(versions[0].writers, (0..4).collect());
    let whole = store.get(&key(), "m", &GetOptions::default()).unwrap();
    let expected: Vec<f32> = (0_u8..4).flat_map(|writer| [f32::from(writer), 5.0]).collect();
    assert_eq!(whole.view().as_slice::<f32>().unwrap(), expected);
}

#[test]
#[ignore = "a process of writers_in_several_processes_make_one_version"]
fn child_writer() {
    let store = Store::directory(variable("TSSD_TEST_FOLDER")).unwrap();
    let writer: u8 = variable("TSSD_TEST_WRITER").parse().unwrap();
    for step in 1_u8..=5 {
        let dict = dict(vec![("m", row(writer.into(), 4, &[f32::from(writer), f32::from(step)]))]);
        put(&store, &dict, &writer_options(writer.into(), 4)).unwrap();
    }
}

/// Kills a writer repeatedly. The visible version is always complete, and the next writer succeeds.
#[test]
fn killed_writer_leaves_no_partial_version() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    let head = || store.head(&key()).unwrap();
    let mut newest = 0;
    for round in 0..25_u64 {
        let mut child = spawn("store::child_to_be_killed", folder.path(), &BTreeMap::new());
        // Only every fifth round waits for a put. In the others the child may die before it puts anything.
        while round % 5 == 0 && head().is_none_or(|head| head.number <= newest) {
            assert!(child.try_wait().unwrap().is_none(), "the child exited by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(round * 7 % 60));
        child.kill().unwrap();
        child.wait().unwrap();
        let store = Store::directory(folder.path()).unwrap();
        let head = store.head(&key()).unwrap().unwrap();
        assert!(head.number >= newest, "the visible version stays visible");
        newest = head.number;
        let (dict, report) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
        let Value::Int(step) = dict.leaf("step").unwrap() else { panic!("an int") };
        for fqn in ["a", "b"] {
            let Value::Tensor(tensor) = dict.leaf(fqn).unwrap() else { panic!("a tensor") };
            let values = tensor.view().as_slice::<i64>().unwrap();
            assert!(
                values.iter().all(|value| Some(*value) == step.as_i64()),
                "version {}",
                report.version
            );
        }
    }
    put(&store, &dict(vec![]), &PutOptions::default()).unwrap();
    assert_eq!(store.versions(&key()).unwrap().len(), 1);
    let sessions = std::fs::read_dir(folder.path().join(".sessions")).unwrap();
    assert_eq!(sessions.count(), 1, "only the session of this process is left");
}

#[test]
#[ignore = "a process of killed_writer_leaves_no_partial_version"]
fn child_to_be_killed() {
    let store = Store::directory(variable("TSSD_TEST_FOLDER")).unwrap();
    let first = store.head(&key()).unwrap().map_or(0, |head| head.number);
    for step in first + 1.. {
        let step = step.cast_signed();
        let tensor = || Tensor::from_slice(&vec![step; 5000], &[5000]).unwrap();
        let dict =
            dict(vec![("a", tensor().into()), ("step", step.into()), ("b", tensor().into())]);
        put(&store, &dict, &PutOptions::default()).unwrap();
    }
}

#[test]
fn full_disk_fails_put_and_keeps_older_version() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    let before = dict(vec![("before", 1_i64.into())]);
    put(&store, &before, &PutOptions::default()).unwrap();
    // `ulimit` limits files of the child to 64 blocks of 512 bytes; the child ignores SIGXFSZ. Its output goes to a
    // pipe, since the stdout of this process may be a larger file.
    let child = Command::new("sh")
        .args(["-c", r#"trap "" XFSZ; ulimit -f 64; exec "$0" "$@""#])
        .arg(std::env::current_exe().unwrap())
        .args(["store::child_on_a_full_disk", "--exact", "--ignored"])
        .env("TSSD_TEST_FOLDER", folder.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(get(&store), before);
    assert!(files(folder.path()).iter().all(|path| !path.to_str().unwrap().contains(".tmp-")));
}

#[test]
#[ignore = "a process of full_disk_fails_put_and_keeps_older_version"]
fn child_on_a_full_disk() {
    let store = Store::directory(variable("TSSD_TEST_FOLDER")).unwrap();
    let error =
        put(&store, &dict(vec![("w", tensor(&[1.0; 100_000]).into())]), &PutOptions::default())
            .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(get(&store).leaf("before").is_ok());
}

/// The store ignores a link in place of a version's folder, and leaves its target unchanged.
#[test]
fn store_follows_no_link_out_of_its_directory() {
    use std::os::unix::fs::symlink;
    let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let archive = outside.path().join(format!("0-{:032x}.tssd", 1));
    let precious = [archive, outside.path().join("manifest.tssd"), outside.path().join("text")];
    for path in &precious {
        std::fs::write(path, "precious").unwrap();
    }
    let of = |step: i64| dict(vec![("step", step.into())]);
    put(&Store::directory(folder.path()).unwrap(), &of(1), &PutOptions::default()).unwrap();
    symlink(outside.path(), folder.path().join("policy%2Factor/0-7-0123456789abcdef")).unwrap();
    // The next store deletes version folders that are not in the ledger.
    let store = Store::directory(folder.path()).unwrap();
    put(&store, &of(2), &PutOptions::default()).unwrap();
    store.delete(&key(), None).unwrap();
    // The store makes files in the folder of a key, and writes to the claim file `.daemon`.
    symlink(outside.path(), folder.path().join("linked")).unwrap();
    let linked = Key::new("linked").unwrap();
    let put_is_rejected = |store: &Store, key: &Key| {
        let error = store.put_state_dict(key, &of(1), &PutOptions::default()).unwrap_err();
        assert!(error.to_string().contains("is a link"), "{error}");
    };
    put_is_rejected(&store, &linked);
    drop(store);
    std::fs::remove_file(folder.path().join(".daemon")).unwrap();
    symlink(outside.path().join("text"), folder.path().join(".daemon")).unwrap();
    put_is_rejected(&Store::directory(folder.path()).unwrap(), &key());
    for path in precious {
        assert_eq!(std::fs::read(path).unwrap(), b"precious");
    }
}

/// Returns the directory of a store with one version of `policy/actor` and of a second key, that key, and their value.
fn directory_with_two_keys() -> (tempfile::TempDir, Key, StateDict) {
    let folder = tempfile::tempdir().unwrap();
    let other = Key::new("other").unwrap();
    let value = dict(vec![("step", 1_i64.into())]);
    let store = Store::directory(folder.path()).unwrap();
    put(&store, &value, &PutOptions::default()).unwrap();
    store.put_state_dict(&other, &value, &PutOptions::default()).unwrap();
    (folder, other, value)
}

/// A record of another release with a right checksum refuses its key, and leaves all files as they are.
#[test]
fn ledger_record_of_other_version_is_left_unchanged() {
    let (folder, other, value) = directory_with_two_keys();
    let record = files(&folder.path().join("policy%2Factor/.ledger")).into_iter().max().unwrap();
    let text = std::fs::read_to_string(&record).unwrap();
    let body = text.lines().next().unwrap().replace("_version\":1,", "_version\":2,");
    let name = record.strip_prefix(folder.path()).unwrap().to_str().unwrap();
    let checksum = crc32fast::hash(format!("{name}{body}").as_bytes());
    std::fs::write(&record, format!("{body}\n{checksum:08x}\n")).unwrap();
    let checksums = || {
        let mut paths = files(&folder.path().join("policy%2Factor"));
        paths.retain(|path| !path.ends_with(".lock"));
        let checksum = |path: &PathBuf| crc32fast::hash(&std::fs::read(path).unwrap());
        paths.into_iter().map(|path| (checksum(&path), path)).collect::<BTreeSet<_>>()
    };
    let before = checksums();
    let store = Store::directory(folder.path()).unwrap();
    for error in [
        store.versions(&key()).unwrap_err(),
        put(&store, &value, &PutOptions::default()).unwrap_err(),
        store.get_state_dict(&key(), &GetOptions::default()).unwrap_err(),
        store.delete(&key(), None).unwrap_err(),
        tssd_store::scrub(folder.path()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("record version 2 is not supported"), "{error}");
    }
    assert_eq!(store.versions(&other).unwrap().len(), 1);
    assert_eq!(checksums(), before);
}

#[test]
fn damaged_ledger_record_is_detected() {
    let (folder, other, of) = directory_with_two_keys();
    let records = |key: &str| {
        let mut records = files(&folder.path().join(key).join(".ledger"));
        records.sort();
        records
    };
    let newest = records("policy%2Factor").pop().unwrap();
    let good = std::fs::read(&newest).unwrap();
    // Three and eight have no common divisor, so each bit of a byte occurs.
    let mut damaged: Vec<Vec<u8>> = (0..good.len() * 8)
        .step_by(3)
        .map(|bit| {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            bad
        })
        .collect();
    // A record of another key is not valid for this key.
    damaged.push(std::fs::read(records("other").pop().unwrap()).unwrap());
    for (number, bad) in damaged.into_iter().enumerate() {
        std::fs::write(&newest, bad).unwrap();
        let store = Store::directory(folder.path()).unwrap();
        let error = store.versions(&key()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{number}: {error}");
    }
    let defects = tssd_store::scrub(folder.path()).unwrap();
    let paths: Vec<_> = defects.iter().map(|defect| defect.path.as_path()).collect();
    assert_eq!(paths, [newest.as_path()]);
    // A daemon still serves the other key, and this one after its record is restored.
    let served = TestDaemon::with_root(folder.path());
    let store = served.connect();
    assert_eq!(store.get_state_dict(&other, &GetOptions::default()).unwrap().0, of);
    assert_eq!(store.versions(&key()).unwrap_err().kind(), ErrorKind::Corrupt);
    std::fs::write(&newest, good).unwrap();
    assert_eq!(get(&store), of);
}

/// Tied leaves that start at the same byte and have different strides.
#[test]
fn tied_leaves_of_different_strides_are_sliced_separately() {
    let all: Vec<f32> = (0..16_u8).map(f32::from).collect();
    let whole = Tensor::from_slice(&all, &[4, 4]).unwrap();
    let transposed =
        TensorMeta::new(Dtype::Float32, &[4, 4]).unwrap().with_strides(&[1, 4]).unwrap();
    let transposed = Tensor::new(transposed, whole.storage().clone(), 0).unwrap();
    let store = Store::memory().unwrap();
    put(
        &store,
        &dict(vec![("w", whole.into()), ("turned", transposed.into())]),
        &PutOptions::default(),
    )
    .unwrap();
    let first_row = |fqn: &str| {
        let slice = TensorSlice::new(&[0, 0], &[1, 4], &[4, 4]).unwrap();
        let slices = [(fqn.to_owned(), vec![ShardSpec::new(slice)])].into();
        let options = GetOptions { slices, ..GetOptions::default() };
        let (found, _) = store.get_state_dict(&key(), &options).unwrap();
        let Value::Shards(shards) = found.leaf(fqn).unwrap() else { panic!("a slice") };
        let bytes = shards[0].tensor().view().to_contiguous(64).unwrap();
        bytes.chunks(4).map(|item| f32::from_le_bytes(item.try_into().unwrap())).collect::<Vec<_>>()
    };
    // The plan of one leaf is not reused for the other.
    for _ in 0..2 {
        assert_eq!(first_row("w"), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(first_row("turned"), [0.0, 4.0, 8.0, 12.0]);
    }
}
