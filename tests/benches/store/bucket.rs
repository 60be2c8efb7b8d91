//! To a bucket and back, beside what the same bucket takes when its library is asked for the same bytes in parallel.
//! The bucket is in this process's memory: a server would be what is measured.

use std::cell::{Cell, RefCell};
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
use tssd_tests::bench::{Bench, Model, Race, Runner, Target, on_cores};

use crate::copies::{get_into, put_one};

const PEER: &str = "object_store";

/// Where our objects are.
const OURS: &str = "ours";

/// No other object of ours is larger than this.
const SMALL_BYTES: u64 = 1 << 20;

/// As ours.
const PART_BYTES: usize = 16 << 20;
const RANGE_BYTES: usize = 8 << 20;

pub(crate) fn up_and_down(bench: &mut Bench) {
    // More would tell how soon the system gives memory back and has it again.
    let model = &Model::uniform(100, 128 << 20);
    on_cores(2, || {
        let bucket = Arc::new(InMemory::new());
        let store = Store::in_bucket(bucket.clone(), OURS).unwrap();
        let theirs = Theirs::new(bucket.clone(), model);
        let put = || put_one(&store, model);
        // Nobody is to wait for what is given up in the background.
        let settle = || theirs.settle();
        bench.race(
            Race::new("upload", "a new version in a bucket in memory, checksums included", 15)
                .of(model)
                .with(Runner::ours("tssd", put).after(settle).target(Target::Speed(0.8, PEER)))
                .with(Runner::peer(PEER, || theirs.replace())),
        );
        let tensors = RefCell::new(vec![1_u8; usize::try_from(model.bytes).unwrap()]);
        let read = || get_into(&store, model, &mut tensors.borrow_mut(), &GetOptions::default());
        let mut memory = vec![1_u8; theirs.archive.len()];
        let renew = || {
            put();
            settle();
        };
        bench.race(
            Race::new("download", "in place, from a bucket in memory, a new version, verified", 15)
                .of(model)
                .with(Runner::ours("tssd", read).before(renew).target(Target::Speed(0.8, PEER)))
                .with(
                    Runner::peer(PEER, || theirs.download(&mut memory)).before(|| theirs.replace()),
                ),
        );
        model.expect_bytes(&tensors.borrow());
        assert!(memory == theirs.archive, "what came back is what was sent");
    });
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
