//! Tests of a daemon with a bucket in which each request in turn fails in each way.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tssd_format::{StateDict, Tensor, TorchStoreStateDict};

use super::{Bucket, BucketDeltas, BucketReplicator, UploadOptions};
use crate::Store;
use crate::blob::backend::MemoryVolume;
use crate::blob::{OpenArchive, Reservation, Volume};
use crate::control::layout::is_archive;
use crate::control::{ArchivePlacement, Proposal};
use crate::daemon::remote_blobs::RemoteBlobIndex;
use crate::daemon::tiered::TieredVolume;
use crate::daemon::{Daemon, DaemonOptions};
use crate::engine::address::from_bucket;
use crate::engine::get::GetOptions;
use crate::engine::local::LocalController;
use crate::engine::put::{PutOptions, PutReport};
use crate::io::environment::SystemEnvironment;
use crate::io::local_archive::LocalArchive;
use crate::key::Key;
use crate::ledger::{ArchiveDigest, Durability, Selector, WriterSet};
use crate::metadata::{Ledgers, OwnedLedgers};
use crate::net::link::{FrameReceiver, FrameSender, split_unix};
use crate::net::tls::Identity;
use crate::net::wire::{Data, Frame, FrameKind, Hello, Limits, ProtocolVersion, Request};
use crate::route::Route;
use crate::shm::Pool;
use crate::testing::faulty_bucket::{FaultyBucket, TRANSIENT_FAULTS};

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Returns a state dict with the content of version `number`.
fn dict(number: u64) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("number", number.cast_signed());
    dict.insert("words", Tensor::from_slice(&[number; 1000], &[1000]).unwrap());
    // Between two versions, 1 % of these elements change.
    let weights: Vec<u16> =
        (0..200_000_u64).map(|at| u16::from(at % 200 == number % 200) + 0x3c00).collect();
    dict.insert("weights", Tensor::from_slice(&weights, &[200_000]).unwrap());
    dict
}

/// Returns the sizes of the archives in the bucket in bytes.
async fn archive_sizes(faulty: &FaultyBucket) -> Vec<u64> {
    let objects: Vec<ObjectMeta> = faulty.list(None).try_collect().await.unwrap();
    let has_archive = |object: &&ObjectMeta| object.location.filename().is_some_and(is_archive);
    objects.iter().filter(has_archive).map(|object| object.size).collect()
}

fn bucket(faulty: &Arc<FaultyBucket>) -> crate::io::bucket::Bucket {
    crate::io::bucket::Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap()
}

/// A daemon with no other storage than the bucket.
struct TestDaemon {
    _folder: TempDir,
    socket: PathBuf,
    stop: oneshot::Sender<()>,
    served: JoinHandle<crate::Result<()>>,
}

impl TestDaemon {
    async fn start(faulty: &Arc<FaultyBucket>) -> Self {
        let (ledgers, volume) = from_bucket(bucket(faulty));
        Self::over(ledgers, volume).await
    }

    async fn over(ledgers: Arc<dyn Ledgers>, volume: Arc<dyn Volume>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let bucket = Bucket { ledgers, volume, url: "s3://test".to_owned() };
        let bucket_deltas =
            BucketDeltas { anchor_interval: 32.try_into().unwrap(), ..BucketDeltas::default() };
        let options =
            DaemonOptions { bucket_deltas, ..DaemonOptions::for_socket(&socket, 1 << 28) };
        let daemon = Daemon::bind_with_bucket(options, Some(bucket)).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(daemon.serve(async { drop(stopped.await) }));
        Self { _folder: folder, socket, stop, served }
    }

    async fn connect(&self) -> Store {
        Store::connect(&format!("unix:{}", self.socket.display())).await.unwrap()
    }

    async fn end(self) {
        drop(self.stop);
        self.served.await.unwrap().unwrap();
    }
}

async fn put(store: &Store, number: u64) -> crate::Result<PutReport> {
    let options = PutOptions {
        version: Some(number),
        durability: Durability::Object,
        timeout: Duration::from_secs(30),
        ..PutOptions::default()
    };
    store.put_state_dict(&key(), &dict(number), &options).await
}

/// Returns the proposal of a put of version 1.
fn proposal() -> Proposal {
    Proposal::single_writer(1, Durability::Object)
}

/// Reads the newest version, checks its content and returns its number.
async fn newest(store: &Store) -> u64 {
    let (found, report) = store.get_state_dict(&key(), &GetOptions::default()).await.unwrap();
    assert_eq!(found, dict(report.version), "a mix");
    report.version
}

#[tokio::test(flavor = "multi_thread")]
async fn upload_survives_fault_at_every_request() {
    let faulty = Arc::default();
    let daemon = TestDaemon::start(&faulty).await;
    let store = daemon.connect().await;
    let (mut number, mut happened, mut deltas) = (0, 0, 0);
    for fault in TRANSIENT_FAULTS {
        for at in 0.. {
            number += 1;
            faulty.inject_fault(at, fault);
            let report = put(&store, number).await;
            let (count, is_injected) = faulty.request_stats();
            faulty.clear_fault();
            happened += usize::from(is_injected);
            let report = report.unwrap_or_else(|error| panic!("{fault:?} at {at}: {error}"));
            assert!(report.visible && report.stored, "{fault:?} at {at}: {report:?}");
            let other_store = Store::from_bucket(bucket(&faulty));
            assert_eq!(newest(&other_store).await, number, "{fault:?} at {at}");
            let sizes = archive_sizes(&faulty).await;
            assert!(sizes.iter().any(|size| *size > 400_000), "no anchor: {sizes:?}");
            deltas += usize::from(sizes.iter().any(|size| *size < 50_000));
            if at >= count {
                break;
            }
        }
    }
    assert!(happened > 60, "{happened}");
    assert!(deltas > happened / 2, "{deltas} of {number}");
    drop(store);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_survives_fault_at_every_request() {
    let faulty = Arc::default();
    let daemon = TestDaemon::start(&faulty).await;
    let store = daemon.connect().await;
    for number in 1..=3 {
        put(&store, number).await.unwrap();
    }
    drop(store);
    daemon.end().await;
    let sizes = archive_sizes(&faulty).await;
    assert_eq!(sizes.iter().filter(|size| **size < 50_000).count(), 2, "{sizes:?}");
    let mut happened = 0;
    for fault in TRANSIENT_FAULTS {
        for at in 0.. {
            let daemon = TestDaemon::start(&faulty).await;
            let store = daemon.connect().await;
            faulty.inject_fault(at, fault);
            let found = newest(&store).await;
            let (count, is_injected) = faulty.request_stats();
            faulty.clear_fault();
            happened += usize::from(is_injected);
            assert_eq!(found, 3, "{fault:?} at {at}");
            drop(store);
            daemon.end().await;
            if at >= count {
                break;
            }
        }
    }
    assert!(happened > 5, "{happened}");
}

/// A volume that takes longer to open archives than the keepalive interval.
struct SlowVolume(Arc<dyn Volume>);

impl Volume for SlowVolume {
    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> crate::Result<Box<dyn Reservation>> {
        self.0.reserve(name, len, durability)
    }

    fn open(&self, name: &str) -> crate::Result<Option<LocalArchive>> {
        self.0.open(name)
    }

    fn open_all(&self, names: &[String]) -> crate::Result<Option<Vec<OpenArchive>>> {
        std::thread::sleep(Duration::from_millis(10_500));
        self.0.open_all(names)
    }

    fn delete(&self, name: &str) -> crate::Result<()> {
        self.0.delete(name)
    }

    fn list(&self, name: &str) -> crate::Result<Vec<String>> {
        self.0.list(name)
    }

    fn route(&self) -> Route {
        self.0.route()
    }

    fn remove_folder(&self, name: &str) -> crate::Result<()> {
        self.0.remove_folder(name)
    }
}

/// Sends a request and receives the next frame.
async fn request(
    sender: &mut FrameSender,
    receiver: &mut FrameReceiver,
    number: u64,
    message: &Request,
) -> Frame {
    let (head, data) = (serde_json::to_vec(message).unwrap(), Data::default());
    let frame = Frame { kind: FrameKind::Request, number, head, data, fds: Vec::new() };
    sender.send(&frame).await.unwrap();
    receiver.receive().await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn locate_sends_keepalive_parts_during_restore() {
    let faulty = Arc::default();
    let daemon = TestDaemon::start(&faulty).await;
    put(&daemon.connect().await, 1).await.unwrap();
    daemon.end().await;
    let (ledgers, volume) = from_bucket(bucket(&faulty));
    let daemon = TestDaemon::over(ledgers, Arc::new(SlowVolume(volume))).await;
    let stream = tokio::net::UnixStream::connect(&daemon.socket).await.unwrap();
    let (mut sender, mut receiver) = split_unix(stream, Limits::DAEMON);
    let hello =
        Request::Hello(Hello { protocol: ProtocolVersion::CURRENT, client: "test".to_owned() });
    request(&mut sender, &mut receiver, 1, &hello).await;
    let locate = Request::Locate {
        key: key().to_string(),
        selector: Selector::Newest,
        supports_devices: false,
    };
    let first = request(&mut sender, &mut receiver, 2, &locate).await;
    assert_eq!((first.kind, first.number), (FrameKind::Part, 2));
    assert_eq!(std::str::from_utf8(&first.head).unwrap(), r#"{"archives":{}}"#);
    let last = receiver.receive().await.unwrap().unwrap();
    assert_eq!((last.kind, last.number), (FrameKind::Reply, 2));
    assert!(std::str::from_utf8(&last.head).unwrap().starts_with(r#"{"leased":"#));
    drop((sender, receiver));
    daemon.end().await;
}

/// The commit succeeded, but its reply was lost, so no client has requested the upload.
#[tokio::test(flavor = "multi_thread")]
async fn commit_without_reply_is_uploaded_later() {
    let faulty = Arc::default();
    let pool = Arc::new(Pool::new(1 << 28));
    let tiers = TieredVolume::new(
        pool.clone(),
        None,
        RemoteBlobIndex::new(Identity::default(), None),
        false,
    );
    let ledgers = Arc::new(OwnedLedgers::default());
    let replicas = tiers.replicas.clone();
    let own = LocalController::new(ledgers, Arc::new(tiers), Arc::new(SystemEnvironment));
    let (ledgers, volume) = from_bucket(bucket(&faulty));
    let bucket_controller = LocalController::new(ledgers, volume, Arc::new(SystemEnvironment));
    let replicator = BucketReplicator::new(
        bucket_controller,
        "s3://test".to_owned(),
        own.clone(),
        replicas,
        UploadOptions::default(),
    );
    let (place, _) = own.open(&key(), &proposal(), || true).await.unwrap();
    let archive = TorchStoreStateDict::from_state_dict(&dict(1)).unwrap();
    let bytes = archive.as_bytes();
    pool.write(&place.path(0), bytes).unwrap().unwrap();
    let lens = [u64::try_from(bytes.len()).unwrap()];
    assert!(own.commit(&place, ArchiveDigest::compute(bytes), &lens).await.unwrap().visible);
    replicator.wait_idle().await;
    assert!(!own.state(&key()).await.unwrap().head().unwrap().uploaded);
    // The next put of the key enqueues it.
    replicator.admit(&key(), Instant::now(), || true).await.unwrap();
    replicator.wait_idle().await;
    assert!(own.state(&key()).await.unwrap().head().unwrap().uploaded);
    assert_eq!(newest(&Store::from_bucket(bucket(&faulty))).await, 1);
}

/// The upload of the next daemon needs the number of the abandoned version.
///
/// The daemon abandons it when it starts, or when its own upload conflicts with it.
#[tokio::test(flavor = "multi_thread")]
async fn unfinished_upload_of_killed_daemon_is_abandoned() {
    for starts_before in [true, false] {
        let faulty = Arc::default();
        let early = if starts_before { None } else { Some(TestDaemon::start(&faulty).await) };
        let begun = begin_copy(&faulty).await;
        let daemon = match early {
            Some(daemon) => daemon,
            None => TestDaemon::start(&faulty).await,
        };
        let report = put(&daemon.connect().await, 1).await.unwrap();
        assert!(report.visible && report.stored, "{report:?}");
        assert_eq!(newest(&Store::from_bucket(bucket(&faulty))).await, 1);
        let (_, volume) = from_bucket(bucket(&faulty));
        assert_eq!(volume.list(&begun.folder()).unwrap(), [""; 0]);
        daemon.end().await;
    }
}

/// Leaves the state of a daemon that was killed while it uploaded another version 1.
async fn begin_copy(faulty: &Arc<FaultyBucket>) -> ArchivePlacement {
    let environment = || Arc::new(SystemEnvironment);
    let own = Arc::new(MemoryVolume::default());
    let own = LocalController::new(Arc::new(OwnedLedgers::default()), own, environment());
    let (put, _) = own.open(&key(), &proposal(), || true).await.unwrap();
    let (ledgers, volume) = from_bucket(bucket(faulty));
    let bucket_controller = LocalController::new(ledgers, volume.clone(), environment());
    let copy = bucket_controller.open_copy(&put, WriterSet::one(0), Duration::ZERO).await;
    let (copy, _) = copy.unwrap();
    let archive = TorchStoreStateDict::from_state_dict(&dict(7)).unwrap();
    let len = u64::try_from(archive.as_bytes().len()).unwrap();
    let mut reservation = volume.reserve(&copy.path(0), len, Durability::Disk).unwrap();
    for part in &mut reservation.parts(&[len]) {
        part.write(archive.as_bytes()).unwrap();
    }
    assert!(reservation.seal().unwrap());
    copy
}
