//! A daemon with a bucket, of which each request in turn fails in each way.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tssd_format::{StateDict, Tensor};

use super::Bucket;
use crate::bucket::faulty::{FAULTS, Faulty};
use crate::daemon::{Daemon, DaemonOptions};
use crate::get::GetOptions;
use crate::key::Key;
use crate::ledger::Durability;
use crate::put::{PutOptions, PutReport};
use crate::store::{Store, over};

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

fn bucket(faulty: &Arc<Faulty>) -> crate::bucket::Bucket {
    crate::bucket::Bucket::new(faulty.clone(), Path::default(), "s3://test").unwrap()
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
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let (ledgers, volume) = over(bucket(faulty));
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
