//! Edge cases found by adversarial testing of the store.

use std::collections::BTreeMap;
use std::time::Duration;

use tssd_format::{
    DeviceMesh, Dict, Dtype, Placement, Region, Shard, ShardSpec, StateDict, Storage, Tensor,
    TensorMeta, TensorSlice, Value,
};
use tssd_store::blocking::Store;
use tssd_store::ledger::Reason;
use tssd_store::{
    DivergencePolicy, ErrorKind, GetOptions, JobId, Key, PutOptions, Refusal, Rewind, Target,
    TargetMemory, WriterSet,
};

fn key() -> Key {
    Key::new("k").unwrap()
}

fn dict(entries: Vec<(&str, Value)>) -> StateDict {
    StateDict::from_value(Value::Dict(Dict::from_iter(entries))).unwrap()
}

/// A state dict whose step and tensor elements are all `value`.
fn uniform_dict(value: i64) -> StateDict {
    dict(vec![
        ("step", value.into()),
        ("t", Tensor::from_slice(&[value; 64], &[64]).unwrap().into()),
    ])
}

/// Options of one of two writers of the job `job`.
fn two_writer_options(writer: u32) -> PutOptions {
    PutOptions {
        writer: Some(writer),
        writers: Some((0..2).collect()),
        job: Some(JobId("job".into())),
        ..PutOptions::default()
    }
}

fn version_options(version: u64) -> PutOptions {
    PutOptions { version: Some(version), ..PutOptions::default() }
}

fn put(store: &Store, dict: &StateDict, options: &PutOptions) -> Result<bool, tssd_store::Error> {
    store.put_state_dict(&key(), dict, options).map(|report| report.visible)
}

/// A put of a job that names neither its writer nor a version cannot be matched with the puts of other writers.
#[test]
fn puts_of_a_job_need_version_or_writer_and_failed_puts_count() {
    let store = Store::memory().unwrap();
    let anonymous = PutOptions { writer: None, ..two_writer_options(0) };
    let error = put(&store, &uniform_dict(1), &anonymous).unwrap_err();
    assert!(error.to_string().contains("say version= or writer="), "{error}");
    // A put that fails before it begins still counts as a put of its writer, so steps are never mixed.
    let mesh = DeviceMesh::from_shape(&[2]).unwrap();
    let row = |rank: u32, step: f32| {
        let place = [Placement::Shard { dim: 0 }];
        let slice = TensorSlice::from_placements(&[2], &mesh, rank, &place).unwrap().remove(0);
        let local = Tensor::from_slice(&[step], &[1]).unwrap();
        Value::from(Shard::new(local, ShardSpec::new(slice)).unwrap())
    };
    let opaque = Value::Opaque { media: "x/y".into(), bytes: vec![1].into() };
    put(&store, &dict(vec![("m", row(0, 1.0))]), &two_writer_options(0)).unwrap();
    put(&store, &dict(vec![("m", row(1, 1.0)), ("bad", opaque)]), &two_writer_options(1))
        .unwrap_err();
    put(&store, &dict(vec![("m", row(0, 2.0))]), &two_writer_options(0)).unwrap();
    assert!(put(&store, &dict(vec![("m", row(1, 2.0))]), &two_writer_options(1)).unwrap());
    let whole = store.get(&key(), "m", &GetOptions::default()).unwrap();
    assert_eq!(whole.view().as_slice::<f32>().unwrap(), [2.0, 2.0]);
}

#[test]
fn cached_plans_are_specific_to_the_requested_writer() {
    let store = Store::memory().unwrap();
    let writer_dict = |writer: i64| {
        let tensor = Tensor::from_slice(&[10 * writer + 1, 10 * writer + 2], &[2]).unwrap();
        dict(vec![("a", tensor.into()), ("same", 1_i64.into())])
    };
    for writer in 0..2 {
        let options =
            PutOptions { on_divergence: DivergencePolicy::Keep, ..two_writer_options(writer) };
        put(&store, &writer_dict(writer.into()), &options).unwrap();
    }
    let part = TensorSlice::new(&[0], &[2], &[2]).unwrap();
    for writer in [0_u32, 1, 0] {
        let expected = [10 * i64::from(writer) + 1, 10 * i64::from(writer) + 2];
        let options = GetOptions { writer: Some(writer), ..GetOptions::default() };
        let whole = store.get(&key(), "a", &options).unwrap();
        assert_eq!(whole.view().as_slice::<i64>().unwrap(), expected);
        let region = Region::new(&[1], &[1]).unwrap();
        let slice = store.get_slice(&key(), "a", &region, &options).unwrap();
        assert_eq!(slice.view().as_slice::<i64>().unwrap(), &expected[1..]);
        let slices = BTreeMap::from([("a".to_owned(), vec![ShardSpec::new(part.clone())])]);
        let (got, _) =
            store.get_state_dict(&key(), &GetOptions { slices, ..options.clone() }).unwrap();
        let Value::Shards(shards) = got.leaf("a").unwrap() else { panic!("shards") };
        assert_eq!(shards[0].tensor().view().as_slice::<i64>().unwrap(), expected);
        let mut memory = [0; 16];
        let meta = TensorMeta::new(Dtype::Int64, &[2]).unwrap();
        let target =
            Target { fqn: "a".into(), shard_spec: None, meta, memory: (&mut memory).into() };
        store.get_state_dict_into(&key(), &mut [target], &options).unwrap();
        assert_eq!(memory[..8], expected[0].to_le_bytes());
    }
    let error = store.get(&key(), "a", &GetOptions::default()).unwrap_err();
    assert!(error.to_string().contains("writers 0, 1 hold `a` each their own"), "{error}");
}

#[test]
fn rewind_to_head_version_opens_new_epoch() {
    let store = Store::memory().unwrap();
    put(&store, &uniform_dict(5), &version_options(5)).unwrap();
    for (epoch, value) in [(1, 50), (2, 51), (3, 51)] {
        let rewind = PutOptions { rewind: Rewind::Always, ..version_options(5) };
        let report = store.put_state_dict(&key(), &uniform_dict(value), &rewind).unwrap();
        assert_eq!((report.epoch, report.version, report.visible), (epoch, 5, true));
        let (got, _) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
        assert_eq!(got, uniform_dict(value));
    }
}

/// Asserts that a put that races with others is visible, or failed because a newer version superseded it.
fn assert_visible_or_superseded(result: Result<bool, tssd_store::Error>) {
    match result {
        Ok(visible) => assert!(visible),
        Err(error) => {
            let refusal = error.refusal();
            let superseded =
                matches!(refusal, Some(Refusal::Dropped { reason: Reason::Superseded { .. }, .. }));
            assert!(superseded, "{error}");
        }
    }
}

/// A put is acknowledged, or fails because a newer version superseded it. It is never reported as deleted.
#[test]
fn concurrent_puts_end_visible_or_superseded() {
    let folder = tempfile::tempdir().unwrap();
    for store in [Store::memory().unwrap(), Store::directory(folder.path()).unwrap()] {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let store = &store;
                scope.spawn(move || {
                    for step in 0..15 {
                        let dict = uniform_dict(100 * thread + step);
                        assert_visible_or_superseded(put(store, &dict, &PutOptions::default()));
                    }
                });
            }
        });
        assert_eq!(store.head(&key()).unwrap().unwrap().number, 45);
        assert_eq!(store.versions(&key()).unwrap().len(), 1);
    }
}

#[test]
fn concurrent_puts_complete_with_two_blocking_threads() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(2)
        .enable_time()
        .build()
        .unwrap();
    let store = tssd_store::Store::directory(folder.path()).unwrap();
    let put = |key: Key, step| {
        let store = store.clone();
        runtime.spawn(async move {
            let options = PutOptions { timeout: Duration::MAX, ..PutOptions::default() };
            let put = store.put_state_dict(&key, &uniform_dict(step), &options).await;
            put.map(|report| report.visible)
        })
    };
    let separate_keys: Vec<_> =
        (0..8).map(|step| put(Key::new(format!("k{step}")).unwrap(), step)).collect();
    for put in separate_keys {
        assert!(runtime.block_on(put).unwrap().unwrap());
    }
    // Puts under one key wait for each other, and newer ones supersede older ones.
    let same_key: Vec<_> = (0..8).map(|step| put(key(), step)).collect();
    for put in same_key {
        assert_visible_or_superseded(runtime.block_on(put).unwrap());
    }
    let head = runtime.block_on(store.head(&key())).unwrap();
    assert_eq!(head.unwrap().number, 8);
}

#[test]
fn dropped_put_future_withdraws_its_version() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = tssd_store::Store::memory();
        let large = dict(vec![(
            "t",
            Tensor::from_slice(&vec![1_u8; 30 << 20], &[30 << 20]).unwrap().into(),
        )]);
        for _ in 0..3 {
            let options = PutOptions::default();
            let key = key();
            let put = store.put_state_dict(&key, &large, &options);
            let _ = tokio::time::timeout(Duration::from_millis(2), put).await;
        }
        let options = PutOptions { timeout: Duration::from_secs(20), ..PutOptions::default() };
        assert!(store.put_state_dict(&key(), &uniform_dict(1), &options).await.unwrap().visible);
    });
}

#[test]
fn directory_store_ignores_foreign_files() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    put(&store, &uniform_dict(1), &PutOptions::default()).unwrap();
    std::fs::write(folder.path().join("README"), "").unwrap();
    std::fs::create_dir(folder.path().join(".git")).unwrap();
    let ledger = folder.path().join("k/.ledger");
    std::fs::write(ledger.join("99.json"), "").unwrap();
    std::fs::write(ledger.join("notes.txt"), "").unwrap();
    let version = tssd_tests::layout::version_folder(&folder.path().join("k"), "0-1");
    std::fs::create_dir(version.join(".ipynb_checkpoints")).unwrap();
    for step in 2..5 {
        assert!(put(&store, &uniform_dict(step), &PutOptions::default()).unwrap());
    }
    assert_eq!(store.keys(None).unwrap(), [key()]);
    assert_eq!(store.get_state_dict(&key(), &GetOptions::default()).unwrap().0, uniform_dict(4));

    // A record number that cannot be incremented is an error, not a panic.
    let newest =
        std::fs::read_dir(&ledger).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
    std::fs::copy(newest, ledger.join(format!("{}.json", u64::MAX))).unwrap();
    assert_eq!(
        put(&store, &uniform_dict(9), &PutOptions::default()).unwrap_err().kind(),
        ErrorKind::Corrupt
    );
}

#[test]
fn superseded_put_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    // One of two writers commits version 1. Version 2 supersedes it before the other writer commits.
    let superseded = |writer| PutOptions { version: Some(1), ..two_writer_options(writer) };
    put(&store, &uniform_dict(1), &superseded(0)).unwrap();
    put(&store, &uniform_dict(2), &version_options(2)).unwrap();
    let error = put(&store, &uniform_dict(1), &superseded(1)).unwrap_err();
    assert!(error.to_string().contains("superseded"), "{error}");
    store.delete(&key(), None).unwrap();
    let names: Vec<_> = std::fs::read_dir(folder.path().join("k"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    assert!(names.is_empty(), "{names:?}");
}

#[test]
fn reads_into_empty_target_with_huge_stride_succeed() {
    let store = Store::memory().unwrap();
    let empty = Tensor::from_slice::<f32>(&[], &[0, 5]).unwrap();
    put(&store, &dict(vec![("e", empty.into())]), &PutOptions::default()).unwrap();
    let meta =
        TensorMeta::new(Dtype::Float32, &[0, 5]).unwrap().with_strides(&[1, 1 << 62]).unwrap();
    let target =
        Target { fqn: "e".into(), shard_spec: None, meta, memory: TargetMemory::Host(&mut []) };
    store.get_state_dict_into(&key(), &mut [target], &GetOptions::default()).unwrap();
    let whole = store.get(&key(), "e", &GetOptions::default()).unwrap();
    assert!(whole.view().as_slice::<f32>().unwrap().is_empty());
}

/// Two shards of a pebibyte each, each backed by a storage of one byte.
#[test]
fn tensor_larger_than_memory_is_an_error() {
    let store = Store::memory().unwrap();
    let shard = |row: u64| {
        let size = 1 << 50;
        let slice = TensorSlice::new(&[row, 0], &[1, size], &[2, size]).unwrap();
        let meta =
            TensorMeta::new(Dtype::Uint8, &[1, size]).unwrap().with_strides(&[0, 0]).unwrap();
        let local = Tensor::new(meta, Storage::from(vec![7]), 0).unwrap();
        Shard::new(local, ShardSpec::new(slice)).unwrap()
    };
    let both = Value::Shards(vec![shard(0), shard(1)]);
    put(&store, &dict(vec![("huge", both)]), &PutOptions::default()).unwrap();
    let error = store.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("do not fit into memory"), "{error}");
    let error = store.get(&key(), "huge", &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

/// Reading a small view of a large storage copies only the bytes of the view.
#[test]
fn small_view_of_large_storage_reads_only_its_bytes() {
    let store = Store::memory().unwrap();
    let storage = Storage::from(vec![3_u8; 64 << 20]);
    let view = |len: u64| {
        let meta = TensorMeta::new(Dtype::Uint8, &[len]).unwrap();
        Value::from(Tensor::new(meta, storage.clone(), 0).unwrap())
    };
    put(&store, &dict(vec![("all", view(64 << 20)), ("few", view(16))]), &PutOptions::default())
        .unwrap();
    let slices = BTreeMap::new();
    let options = GetOptions { slices, ..GetOptions::default() };
    let few = store.get(&key(), "few", &options).unwrap();
    assert_eq!(few.storage().len(), 16);
}

/// A writer set parsed from text equals the set collected from the same ranks.
#[test]
fn parsed_and_collected_writer_sets_are_equal() {
    let parsed: WriterSet = "0-1".parse().unwrap();
    assert_eq!(parsed, (0..2).collect());
}
