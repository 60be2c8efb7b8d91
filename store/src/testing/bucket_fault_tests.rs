//! A store in a bucket whose requests fail: each request in turn, with each kind of fault.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tssd_format::{Compression, Dtype, Region, StateDict, Tensor, TensorMeta};

use crate::Store;
use crate::blob::Volume;
use crate::blob::backend::ObjectVolume;
use crate::engine::get::GetOptions;
use crate::engine::put::{PutOptions, PutReport};
use crate::error::{ErrorKind, Result};
use crate::io::bucket::Bucket;
use crate::key::Key;
use crate::ledger::State;
use crate::metadata::backend::{MetaStore, ObjectMeta};
use crate::metadata::{Ledgers, SharedLedgers, save};
use crate::testing::faulty_bucket::{Fault, FaultyBucket, TRANSIENT_FAULTS};

/// Size of an archive in bytes that needs a multipart upload: 16 MiB + 4 KiB.
const LARGE: usize = (16 << 20) + 4096;

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Returns a state dict that contains its version number and `len` bytes derived from it.
fn dict(number: u64, len: usize) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("number", i64::try_from(number).unwrap());
    let byte = u8::try_from(number % 251).unwrap();
    dict.insert(
        "bytes",
        Tensor::from_slice(&vec![byte; len], &[u64::try_from(len).unwrap()]).unwrap(),
    );
    dict
}

/// A faulty bucket, and the size of the state dicts that are put into it.
struct Fixture {
    faulty: Arc<FaultyBucket>,
    /// Length of the tensor of each state dict in bytes.
    len: usize,
}

impl Fixture {
    /// Opens a new store over the bucket. It shares no cache with other stores, like another process.
    fn store(&self) -> Store {
        let root = Path::parse("some/prefix").unwrap();
        Store::from_bucket(Bucket::new(self.faulty.clone(), root, "s3://test/some/prefix").unwrap())
    }

    async fn put(&self, store: &Store, number: u64) -> Result<PutReport> {
        let options = PutOptions { version: Some(number), ..PutOptions::default() };
        store.put_state_dict(&key(), &dict(number, self.len), &options).await
    }

    /// Gets the newest version, checks its contents, and returns its number.
    async fn newest(&self, store: &Store) -> Result<u64> {
        let (found, report) = store.get_state_dict(&key(), &GetOptions::default()).await?;
        assert_eq!(found, dict(report.version, self.len), "a mix");
        Ok(report.version)
    }
}

/// Lets each request of a put fail with each fault. Returns how many faults took effect.
async fn check_put_faults(len: usize) -> usize {
    let fixture = Fixture { faulty: Arc::default(), len };
    let mut acknowledged = 0;
    assert!(fixture.put(&fixture.store(), 1).await.unwrap().visible);
    let (mut number, mut triggered) = (1, 0);
    for fault in TRANSIENT_FAULTS {
        for at in 0.. {
            let store = fixture.store();
            number += 1;
            fixture.faulty.inject_fault(at, fault);
            let put = fixture.put(&store, number).await;
            let (count, has_triggered) = fixture.faulty.request_stats();
            fixture.faulty.clear_fault();
            triggered += usize::from(has_triggered);
            let context = format!("{fault:?} at {at}: {put:?}");
            // Other processes see the version or do not. The writer gets the result, or an error and retries.
            let seen = fixture.newest(&fixture.store()).await.unwrap();
            match put {
                Ok(report) => {
                    assert!(report.visible, "{context}");
                    assert_eq!(seen, number, "{context}");
                }
                Err(error) => {
                    assert!(
                        [ErrorKind::Unreachable, ErrorKind::Busy].contains(&error.kind()),
                        "{context}"
                    );
                    assert!(
                        [acknowledged, number].contains(&seen) || acknowledged == 0,
                        "{context}"
                    );
                    // A retry with the same version number succeeds, unless the version is visible already.
                    let again = fixture.put(&fixture.store(), number).await;
                    assert!(
                        again.is_ok_and(|report| report.visible) || seen == number,
                        "{context}"
                    );
                }
            }
            acknowledged = fixture.newest(&fixture.store()).await.unwrap();
            assert_eq!(acknowledged, number, "{context}");
            if at >= count {
                break;
            }
        }
    }
    triggered
}

#[tokio::test(flavor = "multi_thread")]
async fn put_survives_failure_of_any_request() {
    let triggered = check_put_faults(1000).await;
    assert!(triggered > 60, "{triggered}");
}

#[tokio::test(flavor = "multi_thread")]
async fn multipart_put_survives_failure_of_any_request() {
    let triggered = check_put_faults(LARGE).await;
    assert!(triggered > 70, "{triggered}");
}

#[tokio::test(flavor = "multi_thread")]
async fn get_survives_failure_of_any_request() {
    let fixture = Fixture { faulty: Arc::default(), len: LARGE };
    for number in 1..3 {
        fixture.put(&fixture.store(), number).await.unwrap();
    }
    let mut triggered = 0;
    for fault in TRANSIENT_FAULTS {
        for at in 0.. {
            let store = fixture.store();
            fixture.faulty.inject_fault(at, fault);
            let got = fixture.newest(&store).await;
            let (count, has_triggered) = fixture.faulty.request_stats();
            fixture.faulty.clear_fault();
            triggered += usize::from(has_triggered);
            // The store retries a failed request, and finds versions that a stale listing lacks.
            assert_eq!(got.unwrap(), 2, "{fault:?} at {at}");
            if at >= count {
                break;
            }
        }
    }
    assert!(triggered > 15, "{triggered}");
}

#[tokio::test(flavor = "multi_thread")]
async fn next_put_aborts_upload_of_killed_process() {
    let fixture = Fixture { faulty: Arc::default(), len: LARGE };
    let store = fixture.store();
    fixture.put(&store, 1).await.unwrap();
    // The process is killed during the upload, so it does not abort the upload.
    let bucket =
        Bucket::new(fixture.faulty.clone(), Path::parse("some/prefix").unwrap(), "s3://test");
    let volume = ObjectVolume::new(bucket.unwrap());
    let name = format!("{}/0-9-0123456789abcdef/0-{:032x}.tssd", key().to_path(), 7);
    let abandoned = tokio::task::spawn_blocking(move || {
        let durability = crate::ledger::Durability::Disk;
        (volume.reserve(&name, u64::try_from(LARGE).unwrap(), durability).unwrap(), volume)
    });
    let abandoned = abandoned.await.unwrap();
    assert_eq!(fixture.faulty.open_uploads(), 1);
    // The next process that puts finds the upload and aborts it.
    fixture.put(&fixture.store(), 2).await.unwrap();
    assert_eq!(fixture.faulty.open_uploads(), 0);
    assert_eq!(fixture.newest(&store).await.unwrap(), 2);
    tokio::task::spawn_blocking(move || drop(abandoned)).await.unwrap();
}

/// Returns ledgers over the bucket that keep superseded records for 100 ms.
fn short_lived_ledgers(fixture: &Fixture) -> SharedLedgers {
    let bucket = Bucket::new(fixture.faulty.clone(), Path::default(), "s3://test").unwrap();
    SharedLedgers::new(Arc::new(
        ObjectMeta::new(bucket).with_grace_period(Duration::from_millis(100)),
    ))
}

fn state_with_keep(keep: u32) -> State {
    State::with_keep(NonZeroU32::new(keep).unwrap())
}

async fn records(fixture: &Fixture) -> usize {
    let folder = Path::parse("policy/.ledger").unwrap();
    fixture.faulty.list_with_delimiter(Some(&folder)).await.unwrap().objects.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn superseded_records_are_deleted_after_their_grace_period() {
    let fixture = Fixture { faulty: Arc::default(), len: 10 };
    let ledgers = short_lived_ledgers(&fixture);
    for round in 0..4 {
        for step in 0..30 {
            loop {
                let guard = ledgers.lock(&key()).await.unwrap();
                match save(guard, state_with_keep(2 + step)).await {
                    // On a busy machine, a step can take longer than the short grace period.
                    Err(error) if error.kind() == ErrorKind::Busy => {}
                    saved => break assert!(saved.unwrap()),
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(records(&fixture).await < 75, "round {round}");
    }
    // A process without cached records finds the newest one.
    assert_eq!(*short_lived_ledgers(&fixture).state(&key()).await.unwrap(), state_with_keep(31));
}

#[tokio::test(flavor = "multi_thread")]
async fn writer_paused_beyond_grace_period_fails_to_commit() {
    let fixture = Fixture { faulty: Arc::default(), len: 10 };
    let (stopped, others) = (short_lived_ledgers(&fixture), short_lived_ledgers(&fixture));
    let guard = stopped.lock(&key()).await.unwrap();
    for round in 0..3 {
        for step in 0..30 {
            assert!(
                save(others.lock(&key()).await.unwrap(), state_with_keep(2 + step)).await.unwrap()
            );
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let _ = round;
    }
    assert!(save(others.lock(&key()).await.unwrap(), state_with_keep(7)).await.unwrap());
    // The record that the paused process is about to create has existed, and is deleted.
    let first = Path::parse(format!("policy/.ledger/{:020}.json", 1)).unwrap();
    fixture.faulty.head(&first).await.unwrap_err();
    let error = save(guard, state_with_keep(99)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(*short_lived_ledgers(&fixture).state(&key()).await.unwrap(), state_with_keep(7));
    // A retry starts from the current state.
    let guard = stopped.lock(&key()).await.unwrap();
    assert_eq!(*guard.state(), state_with_keep(7));
    assert!(save(guard, state_with_keep(8)).await.unwrap());
}

/// Damaged compressed data may decompress without an error, to wrong bytes.
#[tokio::test(flavor = "multi_thread")]
async fn get_detects_damage_in_compressed_data() {
    let fixture = Fixture { faulty: Arc::default(), len: 0 };
    // A zstd frame stores incompressible bytes verbatim.
    let noise = |number: u64| {
        let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes()[6]
    };
    let mut bytes: Vec<u8> = (0..1 << 19).map(noise).collect();
    bytes.resize(1 << 20, 0);
    let mut dict = StateDict::new();
    dict.insert("bytes", Tensor::from_slice(&bytes, &[1 << 20]).unwrap());
    let options = PutOptions { compression: Compression::Zstd, ..PutOptions::default() };
    fixture.store().put_state_dict(&key(), &dict, &options).await.unwrap();
    let mut objects: Vec<_> = fixture.faulty.list(None).try_collect().await.unwrap();
    objects.sort_by_key(|object| object.size);
    let archive = &objects.last().unwrap().location;
    let mut damaged = fixture.faulty.get(archive).await.unwrap().bytes().await.unwrap().to_vec();
    damaged[200_000] ^= 1;
    fixture.faulty.put(archive, damaged.into()).await.unwrap();
    let got = fixture.store().get_state_dict(&key(), &GetOptions::default()).await;
    assert_eq!(got.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[tokio::test(flavor = "multi_thread")]
async fn create_retries_faults_except_permission_denied() {
    let faulty = Arc::<FaultyBucket>::default();
    let bucket = Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap();
    let meta = ObjectMeta::new(bucket);
    for fault in [Fault::LostResponse, Fault::NotExecuted, Fault::Conflict, Fault::Precondition] {
        let name = format!("a/{fault:?}");
        faulty.inject_fault(0, fault);
        assert!(meta.create(&name, b"7".to_vec()).await.unwrap(), "{name}");
        assert!(!meta.create(&name, b"8".to_vec()).await.unwrap(), "{name}");
        assert_eq!(meta.get(&name).await.unwrap(), Some(b"7".to_vec()), "{name}");
    }
    faulty.inject_fault(0, Fault::PermissionDenied);
    let error = meta.create("a/denied", b"7".to_vec()).await.unwrap_err();
    assert_eq!((error.kind(), faulty.request_stats().0), (ErrorKind::Refused, 1), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_superseded_lists_records_when_there_are_many() {
    let faulty = Arc::<FaultyBucket>::default();
    let bucket = Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap();
    let meta = ObjectMeta::new(bucket).with_grace_period(Duration::ZERO);
    let names: Vec<String> = (0..33).map(|number| format!("{number:02}")).collect();
    // Record "-" is not passed to `delete_superseded`, so it must stay.
    for name in ["-"].into_iter().chain(names.iter().map(String::as_str)) {
        assert!(meta.create(&format!("a/{name}"), vec![]).await.unwrap());
    }
    faulty.clear_fault();
    assert_eq!(meta.delete_superseded("a", names[..31].to_vec()).await, names[..31]);
    assert_eq!(faulty.request_stats().0, 0);
    // By the bucket's clock, record 31 was superseded when record 32 was created, which is now. So it stays.
    assert_eq!(meta.delete_superseded("a", names[..32].to_vec()).await, names[31..32]);
    assert_eq!(meta.list("a").await.unwrap(), ["-", "31", "32"]);
}

/// The caller must not continue as if the object were deleted.
#[tokio::test(flavor = "multi_thread")]
async fn failed_delete_returns_error() {
    let faulty = Arc::<FaultyBucket>::default();
    let bucket = Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap();
    let (meta, volume) = (ObjectMeta::new(bucket.clone()), ObjectVolume::new(bucket));
    assert!(meta.create("a/record", b"7".to_vec()).await.unwrap());
    let unreachable = Err(ErrorKind::Unreachable);
    faulty.inject_fault(0, Fault::NotExecuted);
    assert_eq!(meta.delete("a/record").await.map_err(|error| error.kind()), unreachable);
    faulty.inject_fault(0, Fault::NotExecuted);
    assert_eq!(volume.delete("a/record").map_err(|error| error.kind()), unreachable);
    assert_eq!(meta.get("a/record").await.unwrap(), Some(b"7".to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_of_deleted_version_gets_overtaken_error() {
    let fixture = Fixture { faulty: Arc::default(), len: LARGE };
    let (writer, reader) = (fixture.store(), fixture.store());
    fixture.put(&writer, 1).await.unwrap();
    let opened = reader.open(&key(), &GetOptions::default()).await.unwrap();
    fixture.put(&writer, 2).await.unwrap();
    let error = opened.tensor("bytes", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overtaken, "{error}");
    assert!(error.to_string().contains("s3://test/some/prefix/policy/0-1-"), "{error}");
    assert_eq!(fixture.newest(&reader).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_writers_get_distinct_version_numbers() {
    let fixture = Arc::new(Fixture { faulty: Arc::default(), len: 10 });
    let put = |_: u64| {
        let fixture = fixture.clone();
        tokio::spawn(async move {
            let store = fixture.store();
            let mut numbers = Vec::new();
            for _ in 0..5 {
                let put = store.put_state_dict(&key(), &dict(1, 10), &PutOptions::default()).await;
                match put {
                    Ok(report) => numbers.push(report.version),
                    // A newer version of another process became visible first.
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Overtaken, "{error}"),
                }
            }
            numbers
        })
    };
    let mut numbers = Vec::new();
    for writer in (0..4).map(put).collect::<Vec<_>>() {
        numbers.extend(writer.await.unwrap());
    }
    let newest = fixture.store().versions(&key()).await.unwrap().pop().unwrap();
    numbers.sort_unstable();
    let count = numbers.len();
    numbers.dedup();
    assert_eq!(numbers.len(), count, "two of one number");
    assert_eq!(Some(&newest.number), numbers.last());
}

/// Gets random regions of a row-major matrix, a column-major matrix and a tensor of three dimensions.
///
/// Each element is compared, so that the boundaries of the range requests do not matter.
#[tokio::test(flavor = "multi_thread")]
async fn get_slice_returns_region_in_any_memory_layout() {
    let fixture = Fixture { faulty: Arc::default(), len: 0 };
    let store = fixture.store();
    // Each element is its own index in row-major order.
    let shapes: [(&str, [u64; 3], [u64; 3]); 3] = [
        ("rows", [1, 700, 5003], [0, 5003, 1]),
        ("columns", [1, 700, 5003], [0, 1, 700]),
        ("deep", [60, 50, 1201], [60_050, 1201, 1]),
    ];
    let mut dict = StateDict::new();
    for (name, shape, strides) in shapes {
        let mut bytes = vec![0; usize::try_from(shape.iter().product::<u64>()).unwrap() * 4];
        let mut index = 0_u32;
        for i in 0..shape[0] {
            for j in 0..shape[1] {
                for k in 0..shape[2] {
                    let at = i * strides[0] + j * strides[1] + k * strides[2];
                    let at = usize::try_from(at).unwrap() * 4;
                    bytes[at..at + 4].copy_from_slice(&index.to_le_bytes());
                    index += 1;
                }
            }
        }
        let meta = TensorMeta::new(Dtype::Uint32, &shape).unwrap().with_strides(&strides).unwrap();
        dict.insert(name, Tensor::new(meta, bytes.into(), 0).unwrap());
    }
    store.put_state_dict(&key(), &dict, &PutOptions::default()).await.unwrap();
    let mut seed = 7_u64;
    let mut below = |limit: u64| {
        seed = seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (seed >> 33) % limit
    };
    for round in 0..60 {
        let (name, shape, _) = shapes[round % 3];
        let offsets = shape.map(&mut below);
        let mut lens = [0; 3];
        for dim in 0..3 {
            lens[dim] = 1 + below(shape[dim] - offsets[dim]);
        }
        let region = Region::new(&offsets, &lens).unwrap();
        let options = GetOptions { unverified: round % 4 == 3, ..GetOptions::default() };
        let got = fixture.store().get_slice(&key(), name, &region, &options).await.unwrap();
        let view = got.view();
        let mut found = view.contiguous_bytes().unwrap().chunks(4);
        for i in 0..lens[0] {
            for j in 0..lens[1] {
                for k in 0..lens[2] {
                    let [i, j, k] = [i + offsets[0], j + offsets[1], k + offsets[2]];
                    let index = u32::try_from((i * shape[1] + j) * shape[2] + k).unwrap();
                    assert_eq!(found.next().unwrap(), index.to_le_bytes(), "{name} {region:?}");
                }
            }
        }
        assert!(found.next().is_none());
    }
}
