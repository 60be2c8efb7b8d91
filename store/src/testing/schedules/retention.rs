//! Scenario "retention": tasks pin, lease and read versions that are replaced, deleted or expire.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tssd_format::Blob;

use super::{
    Bug, Observer, TestEnvironment, archive, digest_of, one_in, random_below, value_of,
    yield_randomly,
};
use crate::blob::backend::MemoryVolume;
use crate::blob::{Reservation, Volume};
use crate::control::layout::folder;
use crate::control::{Catalog, Controller, Proposal};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::local_archive::LocalArchive;
use crate::io::sync::spawn;
use crate::key::Key;
use crate::ledger::{
    Command, Durability, Label, LeaseId, Outcome, Selection, Selector, VersionId, WriterSet,
    pending,
};
use crate::metadata::backend::MemoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers};
use crate::route::Route;
use crate::testing::schedules::planted_bugs::UnlockedLedgers;

/// A volume that counts its open blobs.
#[derive(Clone, Default)]
struct CountingVolume {
    volume: MemoryVolume,
    open: Arc<AtomicI64>,
}

/// An open blob of a [`CountingVolume`].
struct OpenBlob {
    blob: Arc<dyn Blob>,
    open: Arc<AtomicI64>,
}

impl Volume for CountingVolume {
    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        self.volume.reserve(name, len, durability)
    }

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        Ok(self.volume.open(name)?.map(|archive| {
            self.open.fetch_add(1, Ordering::SeqCst);
            LocalArchive::new(OpenBlob { blob: archive.blob, open: self.open.clone() })
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

impl Blob for OpenBlob {
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

impl Drop for OpenBlob {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// State that the tasks share.
struct Fixture {
    controller: LocalController,
    world: Arc<TestEnvironment>,
    volume: CountingVolume,
    /// Whether versions have had a time to live.
    observer: Observer<bool>,
    bug: Option<Bug>,
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

pub(super) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let ledgers: Arc<dyn Ledgers> = match random_below(3) {
            0 => Arc::new(SharedLedgers::new(Arc::new(MemoryMeta::default()))),
            _ => Arc::new(OwnedLedgers::default()),
        };
        let ledgers: Arc<dyn Ledgers> = match bug {
            Some(Bug::NoLedgerLock) => Arc::new(UnlockedLedgers(ledgers)),
            _ => ledgers,
        };
        let (world, volume) = (Arc::new(TestEnvironment::default()), CountingVolume::default());
        let controller = LocalController::new(ledgers, Arc::new(volume.clone()), world.clone());
        let fixture =
            Arc::new(Fixture { controller, world, volume, observer: Observer::default(), bug });
        fixture.put(0).await;
        let mut tasks = vec![spawn(put(fixture.clone())), spawn(get(fixture.clone()))];
        tasks.push(match random_below(2) {
            0 => spawn(pin(fixture.clone())),
            _ => spawn(lease(fixture.clone())),
        });
        tasks.push(match random_below(3) {
            0 => spawn(delete(fixture.clone())),
            1 => spawn(retain(fixture.clone())),
            _ => spawn(lease(fixture.clone())),
        });
        for task in tasks {
            task.await.unwrap();
        }
        fixture.check_final_state().await;
        fixture.observer.assert_no_violation();
    });
}

async fn put(fixture: Arc<Fixture>) {
    for value in 1..3 {
        fixture.put(value).await;
        yield_randomly().await;
    }
}

/// Opens the newest version twice. Its bytes must not change while it is open.
async fn get(fixture: Arc<Fixture>) {
    for _ in 0..2 {
        let Some(located) =
            fixture.unless_deleted(fixture.controller.locate(&key(), Selector::Newest).await)
        else {
            continue;
        };
        let value = || {
            let archive = located.archives.values().next()?;
            value_of(archive.blob().bytes()?)
        };
        let before = value();
        yield_randomly().await;
        let is_same = before.is_some() && before == value();
        fixture.observer.check(is_same, || format!("{before:?} has become {:?}", value()));
    }
}

/// Pins the newest version, and moves the pin. A pinned version must keep its data.
async fn pin(fixture: Arc<Fixture>) {
    for label in ["one", "other"].map(|label| Label::new(label).unwrap()) {
        let pinned = fixture.controller.pin(&key(), Selector::Newest, &label).await;
        let Some(number) = fixture.unless_deleted(pinned) else { continue };
        yield_randomly().await;
        fixture.check(number, "pinned").await;
        if one_in(2) {
            // A label that moves to another version no longer pins the first one.
            let moved = fixture.controller.pin(&key(), Selector::Newest, &label).await;
            if let Some(number) = fixture.unless_deleted(moved) {
                yield_randomly().await;
                fixture.check(number, "pinned").await;
            }
        }
        fixture.controller.unpin(&key(), label.as_str()).await.unwrap();
    }
}

/// Leases the newest version twice. A leased version must keep its data.
async fn lease(fixture: Arc<Fixture>) {
    for _ in 0..2 {
        let leased = fixture.lease().await;
        let Some((lease, number)) = fixture.unless_deleted(leased) else { continue };
        yield_randomly().await;
        // The lease expires, but the data stays until the lease is released.
        if one_in(3) {
            fixture.world.advance(Duration::from_secs(2));
        }
        fixture.check(number, "leased").await;
        if let Some(lease) = lease {
            fixture.controller.apply(&key(), Command::Release { lease }).await.unwrap();
        }
        fixture.controller.run_pending_deletions(&key()).await.unwrap();
    }
}

async fn delete(fixture: Arc<Fixture>) {
    yield_randomly().await;
    let selection = if one_in(2) { Selection::All } else { Selection::Number(1 + random_below(3)) };
    fixture.controller.delete(&key(), selection).await.unwrap();
}

async fn retain(fixture: Arc<Fixture>) {
    let ttl = one_in(2).then_some(Duration::from_secs(1));
    *fixture.observer.observed() |= ttl.is_some();
    for keep in [2, 1] {
        let keep = NonZeroU32::new(keep).unwrap();
        fixture.controller.retain(&key(), keep, ttl).await.unwrap();
        yield_randomly().await;
    }
}

impl Fixture {
    /// Puts a version.
    async fn put(&self, value: u64) {
        let bytes = archive(0, value);
        let len = u64::try_from(bytes.len()).unwrap();
        let proposal = Proposal {
            writer: 0,
            writers: WriterSet::one(0),
            writers_defaulted: false,
            job: None,
            sequence: None,
            number: None,
            rewind: false,
            keeps_earlier_runs: false,
            process: None,
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
                self.observer.check(progress.visible, || format!("{value} is not visible"));
            }
            // A delete aborts open versions too.
            Err(error) => {
                let is_deleted = error.kind() == ErrorKind::Overtaken;
                self.observer.check(is_deleted, || format!("a put of {value}: {error}"));
            }
        }
    }

    /// Leases the newest version for one second. Returns the lease and the version number.
    async fn lease(&self) -> Result<(Option<LeaseId>, u64)> {
        if self.bug == Some(Bug::NoLease) {
            let state = self.controller.state(&key()).await?;
            let head = state.select(&Selector::Newest);
            return head
                .map(|head| (None, head.number))
                .map_err(|refusal| Error::from_refusal(key(), refusal));
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

    /// Returns a result, or `None` if the version has been deleted. Other errors are violations.
    fn unless_deleted<T>(&self, result: Result<T>) -> Option<T> {
        let kind = result.as_ref().err().map(Error::kind);
        let is_expected = kind.is_none_or(|kind| kind == ErrorKind::NotFound);
        self.observer.check(is_expected, || format!("{:?}", result.as_ref().err()));
        result.ok()
    }

    /// Checks that a pinned or leased version has all of its blobs.
    async fn check(&self, number: u64, held: &str) {
        let state = self.controller.state(&key()).await.unwrap();
        let version = state.versions().find(|version| version.number == number);
        let names = version.map(|version| {
            let folder = folder(&key(), version);
            self.volume.list(&folder).unwrap()
        });
        let is_there = names.as_ref().is_some_and(|names| names.len() == 2);
        self.observer.check(is_there, || format!("version {number} is {held} and has {names:?}"));
    }

    /// Checks the final state: at most one version, and none after a deletion of all versions.
    async fn check_final_state(&self) {
        let state = self.controller.state(&key()).await.unwrap();
        let (effects, count) = (pending(&state), state.versions().count());
        self.observer.check(effects.is_empty() && count <= 1, || format!("{count}, {effects:?}"));
        let is_deleted = count == 0 && !*self.observer.observed();
        let open = self.volume.open.load(Ordering::SeqCst);
        self.observer
            .check(!is_deleted || open == 0, || format!("all is deleted, {open} blobs are open"));
        let ids: Vec<VersionId> = state.versions().map(|version| version.id).collect();
        let folders = self.volume.list(&key().to_path()).unwrap();
        self.observer.check(folders.len() == count, || format!("{folders:?} of {ids:?}"));
        self.controller.delete(&key(), Selection::All).await.unwrap();
        let left = self.volume.list(&key().to_path()).unwrap();
        self.observer.check(left.is_empty(), || format!("{left:?} are left"));
    }
}
