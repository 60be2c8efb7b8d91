//! Retention: versions that come and are replaced, deleted and too old, while others pin, lease and read them.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tssd_format::Blob;

use super::planted::Hasty;
use super::{Bug, Observer, World, archive, below, dawdle, digest_of, once_in, value_of};
use crate::blob::backend::MemoryVolume;
use crate::blob::{Reservation, Volume};
use crate::control::layout::folder;
use crate::control::{Catalog, Controller, Proposal};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::local_archive::Near;
use crate::io::sync::spawn;
use crate::key::Key;
use crate::ledger::{
    Command, Durability, LeaseId, Outcome, Selection, Selector, VersionId, WriterSet, pending,
};
use crate::metadata::backend::MemoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers};
use crate::route::Route;

/// A volume that counts what is open of it.
#[derive(Clone, Default)]
struct Counted {
    volume: MemoryVolume,
    open: Arc<AtomicI64>,
}

/// A blob of it.
struct Open {
    blob: Arc<dyn Blob>,
    open: Arc<AtomicI64>,
}

impl Volume for Counted {
    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        self.volume.reserve(name, len, durability)
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
        Ok(self.volume.open(name)?.map(|near| {
            self.open.fetch_add(1, Ordering::SeqCst);
            Near::new(Open { blob: near.blob, open: self.open.clone() })
        }))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.volume.delete(name)
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.volume.list(name)
    }

    fn route(&self) -> Route {
        self.volume.route()
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.volume.remove_folder(name)
    }
}

impl Blob for Open {
    fn size(&self) -> std::io::Result<u64> {
        self.blob.size()
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.blob.read_exact_at(target, offset)
    }

    fn bytes(&self) -> Option<&Bytes> {
        self.blob.bytes()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Stage {
    controller: LocalController,
    world: Arc<World>,
    volume: Counted,
    /// Whether versions have become too old.
    observer: Observer<bool>,
    bug: Option<Bug>,
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

pub(super) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let ledgers: Arc<dyn Ledgers> = match below(3) {
            0 => Arc::new(SharedLedgers::new(Arc::new(MemoryMeta::default()))),
            _ => Arc::new(OwnedLedgers::default()),
        };
        let ledgers: Arc<dyn Ledgers> = match bug {
            Some(Bug::TakesNoTurns) => Arc::new(Hasty(ledgers)),
            _ => ledgers,
        };
        let (world, volume) = (Arc::new(World::default()), Counted::default());
        let controller = LocalController::new(ledgers, Arc::new(volume.clone()), world.clone());
        let stage =
            Arc::new(Stage { controller, world, volume, observer: Observer::default(), bug });
        stage.put(0).await;
        let mut tasks = vec![spawn(put(stage.clone())), spawn(get(stage.clone()))];
        tasks.push(match below(2) {
            0 => spawn(pin(stage.clone())),
            _ => spawn(lease(stage.clone())),
        });
        tasks.push(match below(3) {
            0 => spawn(delete(stage.clone())),
            1 => spawn(retain(stage.clone())),
            _ => spawn(lease(stage.clone())),
        });
        for task in tasks {
            task.await.unwrap();
        }
        stage.end().await;
        stage.observer.end();
    });
}

async fn put(stage: Arc<Stage>) {
    for value in 1..3 {
        stage.put(value).await;
        dawdle().await;
    }
}

/// A reader: what it has open stays as it is.
async fn get(stage: Arc<Stage>) {
    for _ in 0..2 {
        let Some(located) = stage.found(stage.controller.locate(&key(), Selector::Newest).await)
        else {
            continue;
        };
        let value = || {
            let archive = located.archives.values().next()?;
            value_of(archive.blob().bytes()?)
        };
        let before = value();
        dawdle().await;
        let is_same = before.is_some() && before == value();
        stage.observer.must(is_same, || format!("{before:?} has become {:?}", value()));
    }
}

/// Somebody who wants to have a version for longer.
async fn pin(stage: Arc<Stage>) {
    for label in ["one", "other"] {
        let pinned = stage.controller.pin(&key(), Selector::Newest, label).await;
        let Some(number) = stage.found(pinned) else { continue };
        dawdle().await;
        stage.check(number, "pinned").await;
        if once_in(2) {
            // A label that moves lets go of what it held.
            let moved = stage.controller.pin(&key(), Selector::Newest, label).await;
            if let Some(number) = stage.found(moved) {
                dawdle().await;
                stage.check(number, "pinned").await;
            }
        }
        stage.controller.unpin(&key(), label).await.unwrap();
    }
}

/// A reader of what others keep for it.
async fn lease(stage: Arc<Stage>) {
    for _ in 0..2 {
        let leased = stage.lease().await;
        let Some((lease, number)) = stage.found(leased) else { continue };
        dawdle().await;
        // The right to read ends, and what is read stays all the same.
        if once_in(3) {
            stage.world.pass(Duration::from_secs(2));
        }
        stage.check(number, "leased").await;
        if let Some(lease) = lease {
            stage.controller.apply(&key(), Command::Release { lease }).await.unwrap();
        }
        stage.controller.reclaim_owed(&key()).await.unwrap();
    }
}

async fn delete(stage: Arc<Stage>) {
    dawdle().await;
    let selection = if once_in(2) { Selection::All } else { Selection::Number(1 + below(3)) };
    stage.controller.delete(&key(), selection).await.unwrap();
}

async fn retain(stage: Arc<Stage>) {
    let ttl = once_in(2).then_some(Duration::from_secs(1));
    *stage.observer.seen() |= ttl.is_some();
    for keep in [2, 1] {
        let keep = NonZeroU32::new(keep).unwrap();
        stage.controller.retain(&key(), keep, ttl).await.unwrap();
        dawdle().await;
    }
}

impl Stage {
    /// Makes a version.
    async fn put(&self, value: u64) {
        let bytes = archive(0, value);
        let len = u64::try_from(bytes.len()).unwrap();
        let proposal = Proposal {
            writer: 0,
            writers: WriterSet::one(0),
            writers_defaulted: false,
            job: None,
            call: None,
            number: None,
            rewind: false,
            durability: Durability::Memory,
            file_len: len,
            device: None,
            timeout: Duration::from_hours(1),
        };
        let put = async {
            let mut begun = self.controller.begin(&key(), proposal).await?;
            for part in &mut begun.contribution.parts(&[len]) {
                part.write(bytes)?;
            }
            begun.contribution.commit(digest_of(0, value)).await.map(|committed| committed.progress)
        };
        match put.await {
            Ok(progress) => {
                self.observer.must(progress.visible, || format!("{value} is not visible"));
            }
            // Whoever deletes takes what is open too.
            Err(error) => {
                let is_deleted = error.kind() == ErrorKind::Overtaken;
                self.observer.must(is_deleted, || format!("a put of {value}: {error}"));
            }
        }
    }

    /// Takes a lease of the newest version, for a second: its name, and which version it is.
    async fn lease(&self) -> Result<(Option<LeaseId>, u64)> {
        if self.bug == Some(Bug::LeasesNothing) {
            let state = self.controller.state(&key()).await?;
            let head = state.found(Selector::Newest);
            return head
                .map(|head| (None, head.number))
                .map_err(|refusal| Error::refused(key(), refusal));
        }
        let lease = LeaseId(self.controller.random());
        let command = Command::Lease {
            selector: Selector::Newest,
            lease,
            holder: "reader".into(),
            ttl: Duration::from_secs(1),
            now: self.controller.now(),
        };
        match self.controller.apply(&key(), command).await? {
            Outcome::Leased { number, .. } => Ok((Some(lease), number)),
            other => unreachable!("a lease does not lead to {other:?}"),
        }
    }

    /// What somebody asked for, unless it has been deleted.
    fn found<T>(&self, answer: Result<T>) -> Option<T> {
        let kind = answer.as_ref().err().map(Error::kind);
        let is_missing = kind.is_none_or(|kind| kind == ErrorKind::NotFound);
        self.observer.must(is_missing, || format!("{:?}", answer.as_ref().err()));
        answer.ok()
    }

    /// A version that is held has all that it consists of.
    async fn check(&self, number: u64, held: &str) {
        let state = self.controller.state(&key()).await.unwrap();
        let version = state.versions().find(|version| version.number == number);
        let names = version.map(|version| {
            let folder = folder(&key(), version);
            self.volume.list(&folder).unwrap()
        });
        let is_there = names.as_ref().is_some_and(|names| names.len() == 2);
        self.observer.must(is_there, || format!("version {number} is {held} and has {names:?}"));
    }

    /// Nobody holds anything: one version is left, then none.
    async fn end(&self) {
        let state = self.controller.state(&key()).await.unwrap();
        let (owed, count) = (pending(&state), state.versions().count());
        self.observer.must(owed.is_empty() && count <= 1, || format!("{count}, {owed:?}"));
        let is_deleted = count == 0 && !*self.observer.seen();
        let open = self.volume.open.load(Ordering::SeqCst);
        self.observer
            .must(!is_deleted || open == 0, || format!("all is deleted, {open} blobs are open"));
        let ids: Vec<VersionId> = state.versions().map(|version| version.id).collect();
        let folders = self.volume.list(&key().to_path()).unwrap();
        self.observer.must(folders.len() == count, || format!("{folders:?} of {ids:?}"));
        self.controller.delete(&key(), Selection::All).await.unwrap();
        let left = self.volume.list(&key().to_path()).unwrap();
        self.observer.must(left.is_empty(), || format!("{left:?} are left"));
    }
}
