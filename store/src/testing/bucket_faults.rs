//! A store in a bucket, of which each request in turn fails in each way.

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
use crate::testing::faulty_bucket::{FAULTS, Fault, Faulty};

/// Some archives are larger than what goes in one request.
const LARGE: usize = (16 << 20) + 4096;

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// A state dict that says how many it is.
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

struct Stage {
    faulty: Arc<Faulty>,
    len: usize,
}

impl Stage {
    /// A store over the same objects that knows nothing yet, as another process has it.
    fn store(&self) -> Store {
        let root = Path::parse("some/prefix").unwrap();
        Store::over(Bucket::new(self.faulty.clone(), root, "s3://test/some/prefix").unwrap())
    }

    async fn put(&self, store: &Store, number: u64) -> Result<PutReport> {
        let options = PutOptions { version: Some(number), ..PutOptions::default() };
        store.put_state_dict(&key(), &dict(number, self.len), &options).await
    }

    /// What is newest, whole; how the number of the newest goes with what it holds.
    async fn newest(&self, store: &Store) -> Result<u64> {
        let (found, report) = store.get_state_dict(&key(), &GetOptions::default()).await?;
        assert_eq!(found, dict(report.version, self.len), "a mix");
        Ok(report.version)
    }
}

/// For each request of a publish, and each way in which it can fail.
async fn publish(len: usize) -> usize {
    let stage = Stage { faulty: Arc::default(), len };
    let mut acknowledged = 0;
    assert!(stage.put(&stage.store(), 1).await.unwrap().visible);
    let (mut number, mut happened) = (1, 0);
    for fault in FAULTS {
        for at in 0.. {
            let store = stage.store();
            number += 1;
            stage.faulty.plan(at, fault);
            let put = stage.put(&store, number).await;
            let (count, has_happened) = stage.faulty.seen();
            stage.faulty.mend();
            happened += usize::from(has_happened);
            let what = format!("{fault:?} at {at}: {put:?}");
            // Others see it or not; who has put it knows, or tries again.
            let seen = stage.newest(&stage.store()).await.unwrap();
            match put {
                Ok(report) => {
                    assert!(report.visible, "{what}");
                    assert_eq!(seen, number, "{what}");
                }
                Err(error) => {
                    assert!(
                        [ErrorKind::Unreachable, ErrorKind::Busy].contains(&error.kind()),
                        "{what}"
                    );
                    assert!([acknowledged, number].contains(&seen) || acknowledged == 0, "{what}");
                    // The same once more, with the number that it had.
                    let again = stage.put(&stage.store(), number).await;
                    assert!(again.is_ok_and(|report| report.visible) || seen == number, "{what}");
                }
            }
            acknowledged = stage.newest(&stage.store()).await.unwrap();
            assert_eq!(acknowledged, number, "{what}");
            if at >= count {
                break;
            }
        }
    }
    happened
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_outlives_a_failure_at_every_request() {
    let happened = publish(1000).await;
    assert!(happened > 60, "{happened}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_in_parts_outlives_a_failure_at_every_request() {
    let happened = publish(LARGE).await;
    assert!(happened > 70, "{happened}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_outlives_a_failure_at_every_request() {
    let stage = Stage { faulty: Arc::default(), len: LARGE };
    for number in 1..3 {
        stage.put(&stage.store(), number).await.unwrap();
    }
    let mut happened = 0;
    for fault in FAULTS {
        for at in 0.. {
            let store = stage.store();
            stage.faulty.plan(at, fault);
            let got = stage.newest(&store).await;
            let (count, has_happened) = stage.faulty.seen();
            stage.faulty.mend();
            happened += usize::from(has_happened);
            // What has failed once is asked for again, and what a listing lacks is found all the same.
            assert_eq!(got.unwrap(), 2, "{fault:?} at {at}");
            if at >= count {
                break;
            }
        }
    }
    assert!(happened > 15, "{happened}");
}

/// Who is stopped between two requests, however long, and comes back.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_upload_has_left_is_swept() {
    let stage = Stage { faulty: Arc::default(), len: LARGE };
    let store = stage.store();
    stage.put(&store, 1).await.unwrap();
    // Its process is in the middle of it when it ends: nobody gives it up.
    let bucket =
        Bucket::new(stage.faulty.clone(), Path::parse("some/prefix").unwrap(), "s3://test");
    let volume = ObjectVolume::new(bucket.unwrap());
    let name = format!("{}/0-9-0123456789abcdef/0-{:032x}.tssd", key().to_path(), 7);
    let abandoned = tokio::task::spawn_blocking(move || {
        let durability = crate::ledger::Durability::Disk;
        (volume.reserve(&name, u64::try_from(LARGE).unwrap(), durability).unwrap(), volume)
    });
    let abandoned = abandoned.await.unwrap();
    assert_eq!(stage.faulty.uploads(), 1);
    // The next process that writes finds it.
    stage.put(&stage.store(), 2).await.unwrap();
    assert_eq!(stage.faulty.uploads(), 0);
    assert_eq!(stage.newest(&store).await.unwrap(), 2);
    tokio::task::spawn_blocking(move || drop(abandoned)).await.unwrap();
}

/// Ledgers whose records stay for a moment only.
fn brief(stage: &Stage) -> SharedLedgers {
    let bucket = Bucket::new(stage.faulty.clone(), Path::default(), "s3://test").unwrap();
    SharedLedgers::new(Arc::new(ObjectMeta::new(bucket).keeping(Duration::from_millis(100))))
}

fn keeping(keep: u32) -> State {
    State::keeping(NonZeroU32::new(keep).unwrap())
}

async fn records(stage: &Stage) -> usize {
    let folder = Path::parse("policy/.ledger").unwrap();
    stage.faulty.list_with_delimiter(Some(&folder)).await.unwrap().objects.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_were_followed_long_ago_are_deleted() {
    let stage = Stage { faulty: Arc::default(), len: 10 };
    let ledgers = brief(&stage);
    for round in 0..4 {
        for step in 0..30 {
            let turn = ledgers.turn(&key()).await.unwrap();
            assert!(save(turn, keeping(2 + step)).await.unwrap());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(records(&stage).await < 75, "round {round}");
    }
    // Who knows nothing yet finds the newest.
    assert_eq!(*brief(&stage).state(&key()).await.unwrap(), keeping(31));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_stopped_for_longer_than_records_stay_has_made_no_step() {
    let stage = Stage { faulty: Arc::default(), len: 10 };
    let (stopped, others) = (brief(&stage), brief(&stage));
    let turn = stopped.turn(&key()).await.unwrap();
    for round in 0..3 {
        for step in 0..30 {
            assert!(save(others.turn(&key()).await.unwrap(), keeping(2 + step)).await.unwrap());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let _ = round;
    }
    assert!(save(others.turn(&key()).await.unwrap(), keeping(7)).await.unwrap());
    // The record that it would create was there, and is deleted.
    let first = Path::parse(format!("policy/.ledger/{:020}.json", 1)).unwrap();
    stage.faulty.head(&first).await.unwrap_err();
    let error = save(turn, keeping(99)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(*brief(&stage).state(&key()).await.unwrap(), keeping(7));
    // Who tries again begins with what there is.
    let turn = stopped.turn(&key()).await.unwrap();
    assert_eq!(*turn.state(), keeping(7));
    assert!(save(turn, keeping(8)).await.unwrap());
}

/// It might be decoded to something.
#[tokio::test(flavor = "multi_thread")]
async fn damage_of_what_is_compressed_is_found() {
    let stage = Stage { faulty: Arc::default(), len: 0 };
    // What cannot be compressed stands in a frame as it is.
    let noise = |number: u64| {
        let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes()[6]
    };
    let mut bytes: Vec<u8> = (0..1 << 19).map(noise).collect();
    bytes.resize(1 << 20, 0);
    let mut dict = StateDict::new();
    dict.insert("bytes", Tensor::from_slice(&bytes, &[1 << 20]).unwrap());
    let options = PutOptions { compression: Compression::Zstd, ..PutOptions::default() };
    stage.store().put_state_dict(&key(), &dict, &options).await.unwrap();
    let mut objects: Vec<_> = stage.faulty.list(None).try_collect().await.unwrap();
    objects.sort_by_key(|object| object.size);
    let archive = &objects.last().unwrap().location;
    let mut damaged = stage.faulty.get(archive).await.unwrap().bytes().await.unwrap().to_vec();
    damaged[200_000] ^= 1;
    stage.faulty.put(archive, damaged.into()).await.unwrap();
    let got = stage.store().get_state_dict(&key(), &GetOptions::default()).await;
    assert_eq!(got.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_created_by_the_next_request_unless_that_is_denied() {
    let faulty = Arc::<Faulty>::default();
    let bucket = Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap();
    let meta = ObjectMeta::new(bucket);
    for fault in [Fault::LostAnswer, Fault::NotDone, Fault::Conflict, Fault::Precondition] {
        let name = format!("a/{fault:?}");
        faulty.plan(0, fault);
        assert!(meta.create(&name, b"7".to_vec()).await.unwrap(), "{name}");
        assert!(!meta.create(&name, b"8".to_vec()).await.unwrap(), "{name}");
        assert_eq!(meta.get(&name).await.unwrap(), Some(b"7".to_vec()), "{name}");
    }
    faulty.plan(0, Fault::Denied);
    let error = meta.create("a/denied", b"7".to_vec()).await.unwrap_err();
    assert_eq!((error.kind(), faulty.seen().0), (ErrorKind::Refused, 1), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_looked_through_when_there_are_many() {
    let faulty = Arc::<Faulty>::default();
    let bucket = Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap();
    let meta = ObjectMeta::new(bucket).keeping(Duration::ZERO);
    let names: Vec<String> = (0..33).map(|number| format!("{number:02}")).collect();
    // What is not named is somebody else's.
    for name in ["-"].into_iter().chain(names.iter().map(String::as_str)) {
        assert!(meta.create(&format!("a/{name}"), vec![]).await.unwrap());
    }
    faulty.mend();
    assert_eq!(meta.retire("a", names[..31].to_vec()).await, names[..31]);
    assert_eq!(faulty.seen().0, 0);
    // The last but one was followed when the newest was created, by the bucket's clock: now.
    assert_eq!(meta.retire("a", names[..32].to_vec()).await, names[31..32]);
    assert_eq!(meta.list("a").await.unwrap(), ["-", "31", "32"]);
}

/// Nobody goes on as if it were gone.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_deleted_is_said() {
    let faulty = Arc::<Faulty>::default();
    let bucket = Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap();
    let (meta, volume) = (ObjectMeta::new(bucket.clone()), ObjectVolume::new(bucket));
    assert!(meta.create("a/record", b"7".to_vec()).await.unwrap());
    let unreachable = Err(ErrorKind::Unreachable);
    faulty.plan(0, Fault::NotDone);
    assert_eq!(meta.delete("a/record").await.map_err(|error| error.kind()), unreachable);
    faulty.plan(0, Fault::NotDone);
    assert_eq!(volume.delete("a/record").map_err(|error| error.kind()), unreachable);
    assert_eq!(meta.get("a/record").await.unwrap(), Some(b"7".to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_what_is_deleted_hears_so() {
    let stage = Stage { faulty: Arc::default(), len: LARGE };
    let (writer, reader) = (stage.store(), stage.store());
    stage.put(&writer, 1).await.unwrap();
    let opened = reader.open(&key(), &GetOptions::default()).await.unwrap();
    stage.put(&writer, 2).await.unwrap();
    let error = opened.tensor("bytes", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overtaken, "{error}");
    assert!(error.to_string().contains("s3://test/some/prefix/policy/0-1-"), "{error}");
    assert_eq!(stage.newest(&reader).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn writers_in_several_processes_make_versions_one_after_the_other() {
    let stage = Arc::new(Stage { faulty: Arc::default(), len: 10 });
    let put = |_: u64| {
        let stage = stage.clone();
        tokio::spawn(async move {
            let store = stage.store();
            let mut numbers = Vec::new();
            for _ in 0..5 {
                let put = store.put_state_dict(&key(), &dict(1, 10), &PutOptions::default()).await;
                match put {
                    Ok(report) => numbers.push(report.version),
                    // A newer one of another process has become visible first.
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
    let newest = stage.store().versions(&key()).await.unwrap().pop().unwrap();
    numbers.sort_unstable();
    let count = numbers.len();
    numbers.dedup();
    assert_eq!(numbers.len(), count, "two of one number");
    assert_eq!(Some(&newest.number), numbers.last());
}

/// Boxes of a matrix, of one whose elements lie column by column, and of one in three dimensions: what comes is what
/// each element is, wherever requests are cut.
#[tokio::test(flavor = "multi_thread")]
async fn boxes_are_those_of_the_tensor_however_they_lie() {
    let stage = Stage { faulty: Arc::default(), len: 0 };
    let store = stage.store();
    // The element at row-major place `p` says so.
    let shapes: [(&str, [u64; 3], [u64; 3]); 3] = [
        ("rows", [1, 700, 5003], [0, 5003, 1]),
        ("columns", [1, 700, 5003], [0, 1, 700]),
        ("deep", [60, 50, 1201], [60_050, 1201, 1]),
    ];
    let mut dict = StateDict::new();
    for (name, shape, strides) in shapes {
        let mut bytes = vec![0; usize::try_from(shape.iter().product::<u64>()).unwrap() * 4];
        let mut place = 0_u32;
        for i in 0..shape[0] {
            for j in 0..shape[1] {
                for k in 0..shape[2] {
                    let at = i * strides[0] + j * strides[1] + k * strides[2];
                    let at = usize::try_from(at).unwrap() * 4;
                    bytes[at..at + 4].copy_from_slice(&place.to_le_bytes());
                    place += 1;
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
        let got = stage.store().get_slice(&key(), name, &region, &options).await.unwrap();
        let view = got.view();
        let mut found = view.contiguous_bytes().unwrap().chunks(4);
        for i in 0..lens[0] {
            for j in 0..lens[1] {
                for k in 0..lens[2] {
                    let [i, j, k] = [i + offsets[0], j + offsets[1], k + offsets[2]];
                    let place = u32::try_from((i * shape[1] + j) * shape[2] + k).unwrap();
                    assert_eq!(found.next().unwrap(), place.to_le_bytes(), "{name} {region:?}");
                }
            }
        }
        assert!(found.next().is_none());
    }
}
