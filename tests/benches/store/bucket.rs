//! Uploads to a bucket and downloads from it.
//!
//! The peer is `object_store`, with parallel requests for the same bytes.
//!
//! The bucket is in the memory of this process, so that the benchmark does not measure a server.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use tokio::runtime::{Builder, Runtime};
use tssd_format::TorchStoreStateDict;
use tssd_store::GetOptions;
use tssd_store::blocking::Store;
use tssd_tests::bench::{Bench, Curve, Model, Race, Runner, Target, run_on_cores};

use crate::copies::{get_into, put_one};

const PEER: &str = "object_store";

/// Prefix of the objects of TSSD.
const OURS: &str = "ours";

/// Maximum size of objects of TSSD other than archives, in bytes: 8 MiB.
const SMALL_BYTES: u64 = 8 << 20;

/// Size of the parts of an upload in bytes, as in TSSD: 16 MiB.
const PART_BYTES: usize = 16 << 20;
/// Size of the ranges of a download in bytes, as in TSSD: 8 MiB.
const RANGE_BYTES: usize = 8 << 20;

const UPLOAD: (&str, &str) = ("upload", "a new version in a bucket in memory, checksums included");
const DOWNLOAD: (&str, &str) =
    ("download", "in place, from a bucket in memory, a new version, verified");

/// Races uploads and downloads of one model.
pub(crate) fn upload_and_download(bench: &mut Bench) {
    // Larger models would measure how fast the operating system frees and allocates memory.
    run_on_cores(2, || {
        let (competitors, mut memory) = Competitors::new(Model::uniform(100, 128 << 20));
        let mut race = |(operation, what), [ours, peer]: [Runner<'_>; 2]| {
            let ours = ours.with_target(Target::Speed(0.8, PEER));
            bench.race(
                Race::new(operation, what, 15)
                    .with_model(&competitors.model)
                    .with_runner(ours)
                    .with_runner(peer),
            );
        };
        race(UPLOAD, competitors.uploads());
        race(DOWNLOAD, competitors.downloads(&mut memory));
        competitors.assert_equal(&memory);
    });
}

/// Measures the cost of both per tensor and per byte.
pub(crate) fn fits(bench: &mut Bench) {
    let (mut up, mut down) = (Curve::fit(UPLOAD.0, UPLOAD.1), Curve::fit(DOWNLOAD.0, DOWNLOAD.1));
    for tensors in [100, 10_000] {
        for bytes in [16_000_000, 128_000_000] {
            run_on_cores(2, || {
                let (competitors, mut memory) = Competitors::new(Model::uniform(tensors, bytes));
                let size = (tensors, bytes);
                up.measure_size(bench, size, 7, competitors.uploads().into());
                down.measure_size(bench, size, 7, competitors.downloads(&mut memory).into());
                competitors.assert_equal(&memory);
            });
        }
    }
    up.record(bench);
    down.record(bench);
}

/// The two competitors: the store and plain `object_store`, in the same bucket.
struct Competitors {
    model: Model,
    store: Store,
    plain: PlainBucket,
}

/// The targets of the downloads.
struct Downloads {
    tensors: Vec<u8>,
    archive: Vec<u8>,
}

impl Competitors {
    fn new(model: Model) -> (Self, Downloads) {
        let bucket = Arc::new(InMemory::new());
        let store = Store::in_bucket(bucket.clone(), OURS).unwrap();
        let plain = PlainBucket::new(bucket, &model);
        let tensors = vec![1; usize::try_from(model.bytes).unwrap()];
        let downloads = Downloads { tensors, archive: vec![1; plain.archive.len()] };
        (Self { model, store, plain }, downloads)
    }

    fn put(&self) {
        put_one(&self.store, &self.model);
    }

    fn uploads(&self) -> [Runner<'_>; 2] {
        // Deletions in the background must not slow down the next turn.
        let ours =
            Runner::ours("tssd", || self.put()).with_teardown(|| self.plain.wait_for_deletions());
        [ours, Runner::peer(PEER, || self.plain.replace())]
    }

    fn downloads<'a>(&'a self, targets: &'a mut Downloads) -> [Runner<'a>; 2] {
        let Downloads { tensors, archive } = targets;
        let read = || get_into(&self.store, &self.model, tensors, &GetOptions::default());
        let ours = Runner::ours("tssd", read).with_setup(|| {
            self.put();
            self.plain.wait_for_deletions();
        });
        let peer = Runner::peer(PEER, || self.plain.download(archive));
        [ours, peer.with_setup(|| self.plain.replace())]
    }

    /// Compares the downloads with their sources.
    fn assert_equal(&self, downloads: &Downloads) {
        self.model.assert_bytes_equal(&downloads.tensors);
        assert!(downloads.archive == self.plain.archive, "what came back is what was sent");
    }
}

/// Plain `object_store` with the same bytes: no encoding, no checksums, no verification.
struct PlainBucket {
    bucket: Arc<InMemory>,
    archive: Bytes,
    /// Number of the newest version.
    newest: Cell<u32>,
    runtime: Runtime,
}

impl PlainBucket {
    fn new(bucket: Arc<InMemory>, model: &Model) -> Self {
        let archive = TorchStoreStateDict::from_state_dict(&model.dict).unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(2).build().unwrap();
        Self { bucket, archive: archive.as_bytes().clone(), newest: Cell::default(), runtime }
    }

    fn path(version: u32) -> Path {
        format!("theirs-{version}").into()
    }

    /// Uploads a new version, and deletes the previous one, like TSSD.
    fn replace(&self) {
        let previous = self.newest.get();
        self.upload(&Self::path(previous + 1));
        self.newest.set(previous + 1);
        // Fails for the first version, which has no predecessor.
        let _ = self.runtime.block_on(self.bucket.delete(&Self::path(previous)));
    }

    /// Waits until TSSD has deleted all versions except one.
    fn wait_for_deletions(&self) {
        let ours = Path::from(OURS);
        let archives = || {
            let listed = self.bucket.list(Some(&ours)).try_collect::<Vec<_>>();
            let objects = self.runtime.block_on(listed).unwrap();
            objects.iter().filter(|object| object.size > SMALL_BYTES).count()
        };
        while archives() > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Uploads all parts in parallel. Each request owns a copy of its bytes, as in TSSD.
    fn upload(&self, path: &Path) {
        self.runtime.block_on(async {
            let mut upload = self.bucket.put_multipart(path).await.unwrap();
            let mut parts = Vec::new();
            for start in (0..self.archive.len()).step_by(PART_BYTES) {
                let end = self.archive.len().min(start + PART_BYTES);
                let part = self.archive.slice(start..end);
                parts.push(tokio::spawn(async move { PutPayload::from(part.to_vec()) }));
            }
            for part in parts {
                upload.put_part(part.await.unwrap()).await.unwrap();
            }
            upload.complete().await.unwrap();
        });
    }

    /// Downloads all ranges in parallel into the memory of the caller.
    fn download(&self, memory: &mut [u8]) {
        let (bucket, runtime, path) = (&self.bucket, &self.runtime, &Self::path(self.newest.get()));
        let half_len = self.archive.len().div_ceil(2);
        std::thread::scope(|scope| {
            for (thread, half) in memory.chunks_mut(half_len).enumerate() {
                scope.spawn(move || {
                    let start = thread * half_len;
                    for (number, target) in half.chunks_mut(RANGE_BYTES).enumerate() {
                        let from = u64::try_from(start + number * RANGE_BYTES).unwrap();
                        let to = from + u64::try_from(target.len()).unwrap();
                        let range = bucket.get_range(path, from..to);
                        target.copy_from_slice(&runtime.block_on(range).unwrap());
                    }
                });
            }
        });
    }
}
