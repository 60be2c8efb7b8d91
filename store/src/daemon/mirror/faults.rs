//! A daemon with a bucket, of which each request in turn fails in each way.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::path::Path;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tssd_format::{StateDict, Tensor, TorchStoreStateDict};

use super::{Bucket, Mirror};
use crate::Store;
use crate::blob::backend::MemoryVolume;
use crate::blob::{Archived, Reservation, Volume};
use crate::control::{Place, Proposal};
use crate::daemon::elsewhere::Elsewhere;
use crate::daemon::tiers::Tiers;
use crate::daemon::{Daemon, DaemonOptions};
use crate::engine::address::over;
use crate::engine::get::GetOptions;
use crate::engine::local::LocalController;
use crate::engine::put::{PutOptions, PutReport};
use crate::io::environment::SystemEnvironment;
use crate::io::local_archive::Near;
use crate::key::Key;
use crate::ledger::{Digest, Durability, Selector, WriterSet};
use crate::metadata::{Ledgers, OwnedLedgers};
use crate::net::link::{Receiver, Sender, split};
use crate::net::tls::Identity;
use crate::net::wire::{Data, Frame, FrameKind, Hello, Limits, Protocol, Request};
use crate::route::Route;
use crate::shm::Pool;
use crate::testing::faulty_bucket::{FAULTS, Faulty};

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// A state dict that says how many it is.
fn dict(number: u64) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("number", number.cast_signed());
    dict.insert("words", Tensor::from_slice(&[number; 1000], &[1000]).unwrap());
    dict
}

fn bucket(faulty: &Arc<Faulty>) -> crate::io::bucket::Bucket {
    crate::io::bucket::Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap()
}

/// A daemon of a host that has nothing but the bucket.
struct Host {
    _folder: TempDir,
    socket: PathBuf,
    stop: oneshot::Sender<()>,
    served: JoinHandle<crate::Result<()>>,
}

impl Host {
    async fn start(faulty: &Arc<Faulty>) -> Self {
        let (ledgers, volume) = over(bucket(faulty));
        Self::over(ledgers, volume).await
    }

    async fn over(ledgers: Arc<dyn Ledgers>, volume: Arc<dyn Volume>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let bucket = Bucket { ledgers, volume, shown: "s3://test".to_owned() };
        let options = DaemonOptions::at(&socket, 1 << 28);
        let daemon = Daemon::over(options, Some(bucket)).await.unwrap();
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

/// A put of version 1 that nothing has come of yet.
fn proposal() -> Proposal {
    Proposal::alone(1, Durability::Object)
}

/// What is newest, whole.
async fn newest(store: &Store) -> u64 {
    let (found, report) = store.get_state_dict(&key(), &GetOptions::default()).await.unwrap();
    assert_eq!(found, dict(report.version), "a mix");
    report.version
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_stored_outlives_a_failure_at_every_request() {
    let faulty = Arc::default();
    let host = Host::start(&faulty).await;
    let store = host.connect().await;
    let (mut number, mut happened) = (0, 0);
    for fault in FAULTS {
        for at in 0.. {
            number += 1;
            faulty.plan(at, fault);
            let report = put(&store, number).await;
            let (count, has_happened) = faulty.seen();
            faulty.mend();
            happened += usize::from(has_happened);
            let report = report.unwrap_or_else(|error| panic!("{fault:?} at {at}: {error}"));
            assert!(report.visible && report.stored, "{fault:?} at {at}: {report:?}");
            let elsewhere = Store::over(bucket(&faulty));
            assert_eq!(newest(&elsewhere).await, number, "{fault:?} at {at}");
            if at >= count {
                break;
            }
        }
    }
    assert!(happened > 60, "{happened}");
    drop(store);
    host.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_back_outlives_a_failure_at_every_request() {
    let faulty = Arc::default();
    let host = Host::start(&faulty).await;
    put(&host.connect().await, 1).await.unwrap();
    host.end().await;
    let mut happened = 0;
    for fault in FAULTS {
        for at in 0.. {
            let host = Host::start(&faulty).await;
            let store = host.connect().await;
            faulty.plan(at, fault);
            let found = newest(&store).await;
            let (count, has_happened) = faulty.seen();
            faulty.mend();
            happened += usize::from(has_happened);
            assert_eq!(found, 1, "{fault:?} at {at}");
            drop(store);
            host.end().await;
            if at >= count {
                break;
            }
        }
    }
    assert!(happened > 5, "{happened}");
}

/// A bucket from which nothing comes for a while.
struct Slow(Arc<dyn Volume>);

impl Volume for Slow {
    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> crate::Result<Box<dyn Reservation>> {
        self.0.reserve(name, len, durability)
    }

    fn open(&self, name: &str) -> crate::Result<Option<Near>> {
        self.0.open(name)
    }

    fn open_all(&self, names: &[String]) -> crate::Result<Option<Vec<Archived>>> {
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

async fn ask(
    sender: &mut Sender,
    receiver: &mut Receiver,
    number: u64,
    request: &Request,
) -> Frame {
    let (head, data) = (serde_json::to_vec(request).unwrap(), Data::default());
    let frame = Frame { kind: FrameKind::Request, number, head, data, fds: Vec::new() };
    sender.send(&frame).await.unwrap();
    receiver.receive().await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_the_bucket_hears_that_it_comes() {
    let faulty = Arc::default();
    let host = Host::start(&faulty).await;
    put(&host.connect().await, 1).await.unwrap();
    host.end().await;
    let (ledgers, volume) = over(bucket(&faulty));
    let host = Host::over(ledgers, Arc::new(Slow(volume))).await;
    let stream = tokio::net::UnixStream::connect(&host.socket).await.unwrap();
    let (mut sender, mut receiver) = split(stream, Limits::DAEMON);
    let hello = Request::Hello(Hello { protocol: Protocol::OWN, client: "test".to_owned() });
    ask(&mut sender, &mut receiver, 1, &hello).await;
    let locate =
        Request::Locate { key: key().to_string(), selector: Selector::Newest, devices: false };
    let first = ask(&mut sender, &mut receiver, 2, &locate).await;
    assert_eq!((first.kind, first.number), (FrameKind::Part, 2));
    assert_eq!(std::str::from_utf8(&first.head).unwrap(), r#"{"archives":{}}"#);
    let last = receiver.receive().await.unwrap().unwrap();
    assert_eq!((last.kind, last.number), (FrameKind::Reply, 2));
    assert!(std::str::from_utf8(&last.head).unwrap().starts_with(r#"{"leased":"#));
    drop((sender, receiver));
    host.end().await;
}

/// The ledger has it, and the answer was lost: nobody has asked for it to be stored.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_committed_unheard_is_taken_up() {
    let faulty = Arc::default();
    let pool = Arc::new(Pool::new(1 << 28));
    let tiers = Tiers::new(pool.clone(), None, Elsewhere::new(Identity::default()));
    let ledgers = Arc::new(OwnedLedgers::default());
    let replicas = tiers.replicas.clone();
    let own = LocalController::new(ledgers, Arc::new(tiers), Arc::new(SystemEnvironment));
    let (ledgers, volume) = over(bucket(&faulty));
    let there = LocalController::new(ledgers, volume, Arc::new(SystemEnvironment));
    let mirror = Mirror::new(there, "s3://test".to_owned(), own.clone(), replicas, None);
    let (place, _) = own.open(&key(), &proposal(), || true).await.unwrap();
    let archive = TorchStoreStateDict::from_state_dict(&dict(1)).unwrap();
    let bytes = archive.as_bytes();
    pool.write(&place.path(0), bytes).unwrap().unwrap();
    let lens = [u64::try_from(bytes.len()).unwrap()];
    assert!(own.commit(&place, Digest::of(bytes), &lens).await.unwrap().visible);
    mirror.idle().await;
    assert!(!own.state(&key()).await.unwrap().head().unwrap().stored);
    // The next one that is put, or would be.
    mirror.admit(&key(), Instant::now(), || true).await.unwrap();
    mirror.idle().await;
    assert!(own.state(&key()).await.unwrap().head().unwrap().stored);
    assert_eq!(newest(&Store::over(bucket(&faulty))).await, 1);
}

/// Not before it is given up does its number come free, which the next daemon's copy wants: when that begins, or when it
/// comes across it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_daemon_has_begun_to_copy_is_given_up() {
    for is_there_before in [true, false] {
        let faulty = Arc::default();
        let early = if is_there_before { None } else { Some(Host::start(&faulty).await) };
        let begun = begin_a_copy(&faulty).await;
        let host = match early {
            Some(host) => host,
            None => Host::start(&faulty).await,
        };
        let report = put(&host.connect().await, 1).await.unwrap();
        assert!(report.visible && report.stored, "{report:?}");
        assert_eq!(newest(&Store::over(bucket(&faulty))).await, 1);
        let (_, volume) = over(bucket(&faulty));
        assert_eq!(volume.list(&begun.folder()).unwrap(), [""; 0]);
        host.end().await;
    }
}

/// What a daemon leaves in a bucket that is killed while it copies another version 1 there.
async fn begin_a_copy(faulty: &Arc<Faulty>) -> Place {
    let environment = || Arc::new(SystemEnvironment);
    let own = Arc::new(MemoryVolume::default());
    let own = LocalController::new(Arc::new(OwnedLedgers::default()), own, environment());
    let (put, _) = own.open(&key(), &proposal(), || true).await.unwrap();
    let (ledgers, volume) = over(bucket(faulty));
    let there = LocalController::new(ledgers, volume.clone(), environment());
    let copy = there.open_copy(&put, WriterSet::one(0), Duration::ZERO).await;
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
