//! To a bucket and back, beside what the same bucket takes when its library is asked for the same bytes in parallel.
//! The bucket is in this process's memory: a server would be what is measured.

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

/// Where our objects are.
const OURS: &str = "ours";

/// No other object of ours is larger than this.
const SMALL_BYTES: u64 = 8 << 20;

/// As ours.
const PART_BYTES: usize = 16 << 20;
const RANGE_BYTES: usize = 8 << 20;

const UPLOAD: (&str, &str) = ("upload", "a new version in a bucket in memory, checksums included");
const DOWNLOAD: (&str, &str) =
    ("download", "in place, from a bucket in memory, a new version, verified");

pub(crate) fn up_and_down(bench: &mut Bench) {
    // More would tell how soon the system gives memory back and has it again.
    run_on_cores(2, || {
        let (sides, mut memory) = Sides::new(Model::uniform(100, 128 << 20));
        let mut race = |(operation, what), [ours, peer]: [Runner<'_>; 2]| {
            let ours = ours.with_target(Target::Speed(0.8, PEER));
            bench.race(
                Race::new(operation, what, 15)
                    .with_model(&sides.model)
                    .with_runner(ours)
                    .with_runner(peer),
            );
        };
        race(UPLOAD, sides.uploads());
        race(DOWNLOAD, sides.downloads(&mut memory));
        sides.expect(&memory);
    });
}

/// What both take by tensor and by byte.
pub(crate) fn fits(bench: &mut Bench) {
    let (mut up, mut down) = (Curve::fit(UPLOAD.0, UPLOAD.1), Curve::fit(DOWNLOAD.0, DOWNLOAD.1));
    for tensors in [100, 10_000] {
        for bytes in [16_000_000, 128_000_000] {
            run_on_cores(2, || {
                let (sides, mut memory) = Sides::new(Model::uniform(tensors, bytes));
                let size = (tensors, bytes);
                up.measure_size(bench, size, 7, sides.uploads().into());
                down.measure_size(bench, size, 7, sides.downloads(&mut memory).into());
                sides.expect(&memory);
            });
        }
    }
    up.record(bench);
    down.record(bench);
}

/// Our store in a bucket, and what is done without it there.
struct Sides {
    model: Model,
    store: Store,
    theirs: Theirs,
}

/// What is downloaded to.
struct Downloaded {
    tensors: Vec<u8>,
    archive: Vec<u8>,
}

impl Sides {
    fn new(model: Model) -> (Self, Downloaded) {
        let bucket = Arc::new(InMemory::new());
        let store = Store::in_bucket(bucket.clone(), OURS).unwrap();
        let theirs = Theirs::new(bucket, &model);
        let tensors = vec![1; usize::try_from(model.bytes).unwrap()];
        let downloaded = Downloaded { tensors, archive: vec![1; theirs.archive.len()] };
        (Self { model, store, theirs }, downloaded)
    }

    fn put(&self) {
        put_one(&self.store, &self.model);
    }

    fn uploads(&self) -> [Runner<'_>; 2] {
        // Nobody is to wait for what is given up in the background.
        let ours = Runner::ours("tssd", || self.put()).with_teardown(|| self.theirs.settle());
        [ours, Runner::peer(PEER, || self.theirs.replace())]
    }

    fn downloads<'a>(&'a self, to: &'a mut Downloaded) -> [Runner<'a>; 2] {
        let Downloaded { tensors, archive } = to;
        let read = || get_into(&self.store, &self.model, tensors, &GetOptions::default());
        let ours = Runner::ours("tssd", read).with_setup(|| {
            self.put();
            self.theirs.settle();
        });
        let peer = Runner::peer(PEER, || self.theirs.download(archive));
        [ours, peer.with_setup(|| self.theirs.replace())]
    }

    /// What came back is what was sent.
    fn expect(&self, downloaded: &Downloaded) {
        self.model.assert_bytes_equal(&downloaded.tensors);
        assert!(downloaded.archive == self.theirs.archive, "what came back is what was sent");
    }
}

/// The same bytes by the library alone: nothing is laid out, summed or proven.
struct Theirs {
    bucket: Arc<InMemory>,
    archive: Bytes,
    /// The newest version, by its number.
    newest: Cell<u32>,
    runtime: Runtime,
}

impl Theirs {
    fn new(bucket: Arc<InMemory>, model: &Model) -> Self {
        let archive = TorchStoreStateDict::from_state_dict(&model.dict).unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(2).build().unwrap();
        Self { bucket, archive: archive.as_bytes().clone(), newest: Cell::default(), runtime }
    }

    fn path(version: u32) -> Path {
        format!("theirs-{version}").into()
    }

    /// A new version, and then without the one before, as ours.
    fn replace(&self) {
        let before = self.newest.get();
        self.upload(&Self::path(before + 1));
        self.newest.set(before + 1);
        // There was none before the first one.
        let _ = self.runtime.block_on(self.bucket.delete(&Self::path(before)));
    }

    /// Waits until there is one version of ours.
    fn settle(&self) {
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

    /// In parts, all at once. A request has bytes of its own: they are copied, as ours are.
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

    /// In ranges, all at once, to where the caller wants them.
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
