//! Versions that pass to their readers through a ring of buckets, and followers of a key.

use std::num::NonZeroU32;
use std::thread;
use std::time::Duration;

use tssd_format::{
    DeviceMesh, Dtype, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice, Value,
};
use tssd_store::blocking::{Receiver, Store};
use tssd_store::{
    Durability, ErrorKind, GetOptions, PutOptions, PutReport, ReceiveReport, Refusal, Residency,
    Ring, Target,
};
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::{key, wait_until};

const ROWS: u64 = 300;
const COLUMNS: u64 = 200;

/// A ring of two buckets, each of which holds a third of the large tensor.
const RING: Ring = {
    let buckets = NonZeroU32::new(2).unwrap();
    Ring { bucket_bytes: 80 << 10, buckets, readers: 1 }
};

const TIMEOUT: Duration = Duration::from_secs(20);

fn element(version: u64, tensor: u64, at: u64) -> u8 {
    ((version << 40 | tensor << 32 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn elements(version: u64, tensor: u64, count: u64) -> Vec<u8> {
    (0..count).map(|at| element(version, tensor, at)).collect()
}

/// Returns a model with one tensor larger than a bucket, and 22 that fit into one.
fn model(version: u64) -> StateDict {
    let bytes = |tensor, shape: &[u64]| {
        let meta = TensorMeta::new(Dtype::Uint8, shape).unwrap();
        let elements = elements(version, tensor, shape.iter().product());
        Tensor::new(meta, Storage::from(elements), 0).unwrap()
    };
    let mut dict = StateDict::new();
    dict.insert("small", bytes(1, &[10]));
    dict.insert("large", bytes(2, &[ROWS * 4, COLUMNS]));
    for layer in 0..20 {
        dict.insert(format!("layers.{layer}"), bytes(3 + layer, &[ROWS, COLUMNS / 4]));
    }
    dict.insert("empty", bytes(50, &[0, 7]));
    dict
}

fn tensor(bytes: &[u8]) -> Tensor {
    Tensor::from_slice(bytes, &[bytes.len() as u64]).unwrap()
}

fn put(store: &Store, version: Option<u64>, dict: &StateDict) -> tssd_store::Result<PutReport> {
    let residency = Residency::Ring(RING);
    let options = PutOptions { version, residency, timeout: TIMEOUT, ..PutOptions::default() };
    store.put_state_dict(&key(), dict, &options)
}

/// Memory of a reader: some columns of the large tensor, and all layers.
struct ReadTargets {
    columns: std::ops::Range<u64>,
    large: Vec<u8>,
    layers: Vec<(u64, Vec<u8>)>,
}

impl ReadTargets {
    fn new(columns: std::ops::Range<u64>) -> Self {
        let large = vec![0; (ROWS * 4 * (columns.end - columns.start)) as usize];
        let layers = (0..20).map(|layer| (layer, vec![0; (ROWS * COLUMNS / 4) as usize])).collect();
        Self { columns, large, layers }
    }

    fn targets(&mut self) -> Vec<Target<'_>> {
        let width = self.columns.end - self.columns.start;
        let slice =
            TensorSlice::new(&[0, self.columns.start], &[ROWS * 4, width], &[ROWS * 4, COLUMNS]);
        let meta = TensorMeta::new(Dtype::Uint8, &[ROWS * 4, width]).unwrap();
        let place = Some(ShardSpec::new(slice.unwrap()));
        let memory = (&mut self.large).into();
        let mut targets = vec![Target { fqn: "large".to_owned(), shard_spec: place, meta, memory }];
        for (layer, bytes) in &mut self.layers {
            let meta = TensorMeta::new(Dtype::Uint8, &[ROWS, COLUMNS / 4]).unwrap();
            let fqn = format!("layers.{layer}");
            targets.push(Target { fqn, shard_spec: None, meta, memory: bytes.into() });
        }
        targets
    }

    fn receive(&mut self, receiver: &mut Receiver) -> tssd_store::Result<ReceiveReport> {
        receiver.receive(&mut self.targets(), &GetOptions::default(), TIMEOUT)
    }

    fn check(&self, version: u64) {
        let width = self.columns.end - self.columns.start;
        for (at, found) in (0..).zip(&self.large) {
            let place = at / width * COLUMNS + self.columns.start + at % width;
            assert_eq!(*found, element(version, 2, place), "version {version}, element {at}");
        }
        for (layer, bytes) in &self.layers {
            assert!(*bytes == elements(version, 3 + layer, ROWS * COLUMNS / 4), "layer {layer}");
        }
    }
}

/// Every reader gets every version in its own sharding.
///
/// The memory stays that of the buckets for any number of versions.
#[test]
fn every_reader_gets_every_version_in_memory_of_ring() {
    let served = TestDaemon::new(1 << 30);
    let writer = served.connect();
    let readers: Vec<Store> = (0..3).map(|_| served.connect()).collect();
    let receivers: Vec<Receiver> =
        readers.iter().map(|store| store.receiver(&key(), None).unwrap()).collect();
    let versions = 1..=20_u64;
    thread::scope(|scope| {
        for (number, mut receiver) in receivers.into_iter().enumerate() {
            let (start, versions) = (number as u64 * 60, versions.clone());
            scope.spawn(move || {
                let mut targets = ReadTargets::new(start..start + 70);
                for version in versions {
                    let report = targets.receive(&mut receiver).unwrap();
                    assert_eq!(report.version, version);
                    assert!(report.buckets > 6, "{report:?}");
                    targets.check(version);
                }
            });
        }
        let mut memory = None;
        for version in versions.clone() {
            let report = put(&writer, None, &model(version)).unwrap();
            assert_eq!(report.version, version);
            assert!(report.transport_reason.contains("3 readers"), "{report:?}");
            let created = writer.status().unwrap().memory.created_bytes_total;
            // The first versions allocate the buckets.
            if version > 3 {
                assert_eq!(*memory.get_or_insert(created), created, "version {version}");
            }
        }
    });
    // No version can be read later.
    assert!(writer.versions(&key()).unwrap().is_empty());
    let error = writer.get_state_dict(&key(), &GetOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn ring_put_rejects_missing_reader_and_old_number() {
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let residency = Residency::Ring(RING);
    let timeout = Duration::from_millis(50);
    let options = PutOptions { residency, timeout, ..PutOptions::default() };
    let error = writer.put_state_dict(&key(), &model(1), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("open a receiver"), "{error}");
    let mut receiver = reader.receiver(&key(), None).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut targets = ReadTargets::new(0..COLUMNS);
            for version in [7, 8] {
                assert_eq!(targets.receive(&mut receiver).unwrap().version, version);
                targets.check(version);
            }
        });
        put(&writer, Some(7), &model(7)).unwrap();
        let error = put(&writer, Some(7), &model(7)).unwrap_err();
        let refusal = Refusal::VersionNotNewer { number: 7, highest: 7, earlier: None };
        assert_eq!(error.refusal(), Some(&refusal), "{error}");
        put(&writer, None, &model(8)).unwrap();
    });
    // An unsupported put is rejected before it waits for readers.
    let mut dict = model(9);
    dict.insert("step", 3_i64);
    let mut twice = StateDict::new();
    twice.insert("a", Value::Dict([("b", tensor(&[1]))].into_iter().collect()));
    twice.insert("a.b", tensor(&[2]));
    let mut sharded = StateDict::new();
    let mesh = DeviceMesh::new(&[2], &[0, 1]).unwrap();
    let slice = TensorSlice::new(&[0], &[1], &[2]).unwrap().with_mesh(&[2], Some(&[0])).unwrap();
    let place = ShardSpec::new(slice).with_mesh(mesh).unwrap();
    sharded.insert("w", Value::Shards(vec![Shard::new(tensor(&[1]), place).unwrap()]));
    let ring = PutOptions { residency: Residency::Ring(RING), ..PutOptions::default() };
    let durable = PutOptions { durability: Durability::Disk, ..ring.clone() };
    for (dict, options, text) in [
        (&dict, &ring, "`step` is no tensor"),
        (&twice, &ring, "a.b"),
        (&sharded, &ring, "one writer"),
        (&model(9), &durable, "residency=host"),
    ] {
        let error = writer.put_state_dict(&key(), dict, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
}

/// Tensors in host memory cannot stay in place, so `Residency::Lent` sends them through the ring, too.
/// `publish` and `put_state_dict_later` also use the ring.
#[test]
fn every_kind_of_put_uses_the_ring() {
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let mut receiver = reader.receiver(&key(), None).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut targets = ReadTargets::new(20..COLUMNS);
            for version in 1..=4 {
                assert_eq!(targets.receive(&mut receiver).unwrap().version, version);
                targets.check(version);
            }
        });
        let options =
            |residency| PutOptions { residency, timeout: TIMEOUT, ..PutOptions::default() };
        let report =
            writer.put_state_dict(&key(), &model(1), &options(Residency::InPlace(RING))).unwrap();
        assert!(
            report.transport_reason.contains("not in place: its tensors are in the host's memory"),
            "{report:?}"
        );
        for (version, residency) in [(2, Residency::Ring(RING)), (3, Residency::InPlace(RING))] {
            let mut publisher =
                writer.publish(&key(), &options(residency), RING.bucket_bytes).unwrap();
            for (path, leaf) in model(version).leaves() {
                publisher.add(path.fqn(), leaf.clone()).unwrap();
                if path.fqn() == "large" {
                    publisher.flush().unwrap();
                }
            }
            assert_eq!(publisher.finish().unwrap().version, version);
        }
        let pending = writer
            .put_state_dict_later(&key(), &model(4), &options(Residency::Ring(RING)))
            .unwrap();
        assert_eq!(pending.wait().unwrap().version, 4);
    });
}

/// A target that no bucket contains fails the receive, after the last bucket.
#[test]
fn receive_names_target_that_no_bucket_contains() {
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let mut receiver = reader.receiver(&key(), None).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; 10];
            let meta = TensorMeta::new(Dtype::Uint8, &[10]).unwrap();
            let fqn = "missing".to_owned();
            let target = Target { fqn, shard_spec: None, meta, memory: (&mut bytes).into() };
            let error =
                receiver.receive(&mut [target], &GetOptions::default(), TIMEOUT).unwrap_err();
            assert!(error.to_string().contains("missing"), "{error}");
            assert!(!error.is_target_modified(), "{error}");
        });
        put(&writer, None, &model(1)).unwrap();
    });
}

/// The ring carries shards unchanged. A reader can receive the whole tensor from them.
#[test]
fn reader_receives_whole_tensor_from_shards() {
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let mut receiver = reader.receiver(&key(), None).unwrap();
    let all = elements(1, 9, ROWS * COLUMNS);
    let half = |first: u64| {
        let rows = ROWS / 2;
        let meta = TensorMeta::new(Dtype::Uint8, &[rows, COLUMNS]).unwrap();
        let (start, end) = ((first * COLUMNS) as usize, ((first + rows) * COLUMNS) as usize);
        let tensor = Tensor::new(meta, Storage::from(all[start..end].to_vec()), 0).unwrap();
        let slice = TensorSlice::new(&[first, 0], &[rows, COLUMNS], &[ROWS, COLUMNS]).unwrap();
        Shard::new(tensor, ShardSpec::new(slice)).unwrap()
    };
    let mut dict = StateDict::new();
    dict.insert("weight", Value::Shards(vec![half(0), half(ROWS / 2)]));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; all.len()];
            let meta = TensorMeta::new(Dtype::Uint8, &[ROWS, COLUMNS]).unwrap();
            let fqn = "weight".to_owned();
            let target = Target { fqn, shard_spec: None, meta, memory: (&mut bytes).into() };
            receiver.receive(&mut [target], &GetOptions::default(), TIMEOUT).unwrap();
            assert!(bytes == all);
        });
        put(&writer, None, &dict).unwrap();
    });
}

/// A reader that disconnects does not block the others. A late one starts with the next version.
#[test]
fn readers_join_and_leave_a_ring() {
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let mut receiver = reader.receiver(&key(), None).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut targets = ReadTargets::new(10..90);
            for version in 1..=3 {
                assert_eq!(targets.receive(&mut receiver).unwrap().version, version);
                targets.check(version);
            }
        });
        let served = &served;
        scope.spawn(move || {
            // Receives nothing. Its connection ends while the writer waits for it.
            let store = served.connect();
            let _receiver = store.receiver(&key(), None).unwrap();
            thread::sleep(Duration::from_millis(300));
        });
        thread::sleep(Duration::from_millis(100));
        put(&writer, None, &model(1)).unwrap();
        let late = served.connect();
        let mut late = late.receiver(&key(), None).unwrap();
        let late_reader = scope.spawn(move || {
            let mut targets = ReadTargets::new(0..5);
            for version in 2..=3 {
                assert_eq!(targets.receive(&mut late).unwrap().version, version);
                targets.check(version);
            }
        });
        put(&writer, None, &model(2)).unwrap();
        put(&writer, None, &model(3)).unwrap();
        late_reader.join().unwrap();
    });
}

/// The store retains each version for a follower until it is read, for any number of newer versions.
#[test]
fn follower_misses_no_version() {
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let mut follower = reader.follow(&key()).unwrap();
    for version in 1..=30 {
        writer.put_state_dict(&key(), &model(version), &PutOptions::default()).unwrap();
    }
    for version in 1..=30 {
        let opened = follower.next(&GetOptions::default(), TIMEOUT).unwrap().unwrap();
        assert_eq!(opened.version(), version);
        let tensor = opened.tensor("small", None).unwrap();
        assert_eq!(tensor.view().span(), elements(version, 1, 10));
    }
    assert!(follower.next(&GetOptions::default(), Duration::ZERO).unwrap().is_none());
    drop(follower);
    // The follower releases what it has read.
    wait_until("the follower holds no lease", || writer.status().unwrap().leases.is_empty());
    let error = Store::memory().unwrap().follow(&key()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// Independent writers make versions visible concurrently.
///
/// The follower gets each of them in order, although only the newest is retained.
#[test]
fn follower_gets_versions_of_independent_writers_in_order() {
    let served = TestDaemon::new(1 << 30);
    let reader = served.connect();
    reader.retain(&key(), NonZeroU32::MIN).unwrap();
    let mut follower = reader.follow(&key()).unwrap();
    let visible = thread::scope(|scope| {
        let writer = |writer: u64| {
            let served = &served;
            let mut dict = StateDict::new();
            dict.insert("writer", tensor(&writer.to_le_bytes()));
            scope.spawn(move || {
                let store = served.connect();
                let put = |_| store.put_state_dict(&key(), &dict, &PutOptions::default());
                (0..30).map(put).filter_map(Result::ok).map(|report| report.version).collect()
            })
        };
        let writers: Vec<_> = (0..8).map(writer).collect();
        let visible = writers.into_iter().flat_map(|writer| -> Vec<u64> { writer.join().unwrap() });
        visible.collect::<std::collections::BTreeSet<_>>()
    });
    let mut followed = Vec::new();
    while let Some(opened) = follower.next(&GetOptions::default(), Duration::ZERO).unwrap() {
        followed.push(opened.version());
    }
    assert!(visible.len() > 100, "{visible:?}");
    assert_eq!(followed, Vec::from_iter(visible));
}
