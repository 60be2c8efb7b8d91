//! Versions over ledgers and a volume: the ledger's commands, and the effects that they owe.
//!
//! A key's turn is kept from one step of its ledger to the next, and while data is deleted or
//! a manifest gets its name, so that all of these see one order. Whoever finds an effect owed by
//! a process that died carries it out.

mod sessions;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tssd_format::MANIFEST;

use self::sessions::Session;
use super::attempt::Attempt;
use super::contributed::Contributed;
use super::folder::{archives, clear, folder, folder_of, is_version, locate, remove, write};
use super::keepers::{Everyone, Keepers};
use super::proof::{digest, prove};
use super::{Begun, Catalog, Controller, Located, Progress, Proposal, VersionInfo};
use crate::environment::{Environment, wait};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    ArchiveReference, Begin, Command, Commit, Digest, Durability, Effect, Fate, JobId, LeaseId,
    ManifestReference, Outcome, Reason, Refusal, Selection, Selector, State, Status, Step,
    Timestamp, Version, VersionId, WriterSet, pending, step,
};
use crate::ledgers::{Ledgers, save};
use crate::route::Route;
use crate::status::DaemonStatus;
use crate::sync::{Mutex, MutexGuard, OnceCell};
use crate::volume::Volume;

/// A proof that is owed for longer than this is taken over: its prover may have died.
const PROOF_PATIENCE: Duration = Duration::from_secs(2);

/// How often a read starts anew because the version it was about to open is deleted.
const OPEN_TRIES: u32 = 16;

/// How often others that are in the way are looked at.
const WAIT: Duration = Duration::from_millis(100);

/// How many keys' versions stay open between reads.
const MAX_OPENED: usize = 16;

#[derive(Clone)]
pub(crate) struct LocalController(Arc<Inner>);

struct Inner {
    ledgers: Arc<dyn Ledgers>,
    volume: Arc<dyn Volume>,
    keepers: Arc<dyn Keepers>,
    environment: Arc<dyn Environment>,
    opened: Mutex<Opened>,
    /// What this process proves now: nobody takes that over.
    proving: Mutex<BTreeSet<VersionId>>,
    /// The keys in whose folders nothing is left of others' versions.
    swept: Mutex<BTreeSet<Key>>,
    session: OnceCell<Option<Session>>,
    /// The leases that could not be released yet.
    unreleased: Mutex<Vec<(Key, LeaseId)>>,
}

#[derive(Default)]
struct Opened {
    /// The version of each key that was located last: whoever reads it again finds it mapped.
    located: BTreeMap<Key, Located>,
    /// How often somebody has deleted something: what was looked up before is not kept after that.
    deletions: u64,
}

/// A proof that is under way in this process.
struct Proving {
    controller: LocalController,
    id: VersionId,
}

impl Proving {
    /// None if it is already.
    fn begin(controller: &LocalController, id: VersionId) -> Option<Self> {
        let is_new = controller.proving().insert(id);
        is_new.then(|| Self { controller: controller.clone(), id })
    }
}

impl Drop for Proving {
    fn drop(&mut self) {
        self.controller.proving().remove(&self.id);
    }
}

/// The place of a writer's archives: of which version, and under which names.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) key: Key,
    pub(crate) id: VersionId,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    pub(crate) writer: u32,
    pub(crate) job: Option<JobId>,
    pub(crate) durability: Durability,
    /// Each try has files of its own: one that died may have left others behind.
    pub(crate) stem: String,
    /// Whether it is that of a copy.
    pub(crate) is_copy: bool,
}

impl Place {
    pub(crate) fn folder(&self) -> String {
        folder_of(&self.key, self.epoch, self.number, self.id)
    }

    /// The name of an archive, by its number.
    fn file(&self, number: usize) -> String {
        match number {
            0 => format!("{}.tssd", self.stem),
            _ => format!("{}-{number}.tssd", self.stem),
        }
    }

    /// The name of an archive in the volume, by its number.
    pub(crate) fn path(&self, number: usize) -> String {
        format!("{}/{}", self.folder(), self.file(number))
    }
}

impl LocalController {
    pub(crate) fn new(
        ledgers: Arc<dyn Ledgers>,
        volume: Arc<dyn Volume>,
        environment: Arc<dyn Environment>,
    ) -> Self {
        Self::among(ledgers, volume, Arc::new(Everyone), environment)
    }

    /// One of several, each of which keeps what is put to it.
    pub(crate) fn among(
        ledgers: Arc<dyn Ledgers>,
        volume: Arc<dyn Volume>,
        keepers: Arc<dyn Keepers>,
        environment: Arc<dyn Environment>,
    ) -> Self {
        let (opened, proving, swept) = (Mutex::default(), Mutex::default(), Mutex::default());
        let session = OnceCell::new();
        Self(Arc::new(Inner {
            ledgers,
            volume,
            keepers,
            environment,
            opened,
            proving,
            swept,
            session,
            unreleased: Mutex::default(),
        }))
    }

    /// How many use it, those included who were not waited for.
    #[cfg(feature = "shuttle")]
    pub(crate) fn users(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.0.environment.now()
    }

    pub(crate) fn random(&self) -> u128 {
        self.0.environment.random()
    }

    /// Gives a command to the ledger of a key. Time passes first, so that what is too old is gone.
    pub(crate) async fn apply(&self, key: &Key, command: Command) -> Result<Outcome> {
        loop {
            let turn = self.0.ledgers.turn(key).await?;
            let expired = advance(key, turn.state(), Command::Expire { now: self.now() })?;
            let next = advance(key, &expired.state, command.clone())?;
            if save(turn, next.state).await? {
                return Ok(next.outcome);
            }
        }
    }

    /// The ledger of a key as it is now; one that was never written is empty.
    pub(crate) async fn state(&self, key: &Key) -> Result<Arc<State>> {
        let state = self.0.ledgers.state(key).await?;
        // Somebody who may not write, or cannot now, still reads what is visible.
        if self.owes_old_proof(&state) && self.settle(key).await.is_ok() {
            return self.0.ledgers.state(key).await;
        }
        Ok(state)
    }

    /// Opens a version for a writer, or joins one; waits for others that are in the way, as long as it
    /// is wanted. Returns also what the writer has committed to it before.
    pub(crate) async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: impl Fn() -> bool + Sync,
    ) -> Result<(Place, Option<Digest>)> {
        let place = Place {
            key: key.clone(),
            id: VersionId(self.random()),
            epoch: 0,
            number: 0,
            writer: proposal.writer,
            job: proposal.job.clone(),
            durability: proposal.durability,
            stem: format!("{}-{:032x}", proposal.writer, self.random()),
            is_copy: false,
        };
        let begin = Begin {
            writer: proposal.writer,
            writers: proposal.writers.clone(),
            writers_defaulted: proposal.writers_defaulted,
            job: proposal.job.clone(),
            call: proposal.call,
            number: proposal.number,
            rewind: proposal.rewind,
            durability: proposal.durability,
            digest: None,
            session: self.session().await?,
            id: place.id,
            epoch: None,
            now: self.now(),
        };
        self.open_at(place, begin, proposal.timeout, is_wanted).await
    }

    /// The same for a copy of what a writer has committed elsewhere, at that place.
    pub(crate) async fn open_copy(
        &self,
        of: &Place,
        writers: WriterSet,
        timeout: Duration,
    ) -> Result<(Place, Option<Digest>)> {
        let place = Place { durability: Durability::Disk, is_copy: true, ..of.clone() };
        let begin = Begin {
            writer: place.writer,
            writers,
            writers_defaulted: false,
            job: place.job.clone(),
            call: None,
            number: Some(place.number),
            rewind: false,
            durability: place.durability,
            digest: None,
            session: self.session().await?,
            id: place.id,
            epoch: Some(place.epoch),
            now: self.now(),
        };
        self.open_at(place, begin, timeout, || true).await
    }

    /// Opens the version of a place, or the one that is found there instead.
    async fn open_at(
        &self,
        place: Place,
        begin: Begin,
        timeout: Duration,
        is_wanted: impl Fn() -> bool + Sync,
    ) -> Result<(Place, Option<Digest>)> {
        let key = &place.key;
        // A timeout beyond all time is none.
        let deadline = Instant::now().checked_add(timeout);
        self.be_found(deadline).await?;
        if begin.session.is_some() {
            // Who has the ledgers alone has looked when it began. What cannot be deleted hinders nobody.
            let _ = self.sweep(key).await;
        }
        let mut is_cleared = false;
        loop {
            let begin = Begin { now: self.now(), ..begin.clone() };
            let on = match self.apply(key, Command::Begin(begin)).await? {
                Outcome::Begun { id, epoch, number } => {
                    return Ok((Place { id, epoch, number, ..place }, None));
                }
                Outcome::Retry { id, epoch, number, digest } => {
                    return Ok((Place { id, epoch, number, ..place }, Some(digest)));
                }
                Outcome::Wait { on } => on,
                other => unreachable!("begin does not lead to {other:?}"),
            };
            let now = Instant::now();
            let is_late = deadline.is_some_and(|deadline| now >= deadline) || !is_wanted();
            // Who has no time to wait need not, if nobody who lives is in the way.
            if is_late && is_cleared {
                let on: Vec<String> = on.iter().map(ToString::to_string).collect();
                return Err(Error::new(
                    ErrorKind::Busy,
                    format_args!(
                        "key `{key}`: versions {} are still open after {:?}",
                        on.join(", "),
                        timeout
                    ),
                ));
            }
            // Deletions that are owed, and who has died on his way or at a proof, are in the way too.
            self.end_sessions(key).await?;
            let seen = self.state(key).await?;
            self.reclaim_owed(key).await?;
            is_cleared = true;
            let left = deadline.map_or(WAIT, |deadline| deadline.saturating_duration_since(now));
            if !is_late {
                self.0.ledgers.changed(key, &seen, left.min(WAIT)).await;
            }
        }
    }

    /// What is committed to the versions of a key that are on their way to a bucket.
    pub(crate) async fn to_be_stored(&self, key: &Key) -> Result<Vec<Contributed>> {
        let state = self.0.ledgers.state(key).await?;
        let coming = state.versions().filter(|version| version.is_to_be_stored());
        Ok(coming.flat_map(|version| Contributed::of(key, version)).collect())
    }

    /// All of a version is in the bucket that was asked for.
    pub(crate) async fn stored(&self, key: &Key, id: VersionId) -> Result<()> {
        self.apply(key, Command::Stored { id }).await?;
        // What this has retired.
        let _ = self.reclaim_owed(key).await;
        Ok(())
    }

    /// Gives up what is open of all keys: whoever has begun it has ended.
    pub(crate) async fn abandon_all_open(&self) -> Result<()> {
        for key in self.0.ledgers.keys().await? {
            if let Err(error) = self.abandon_open(&key).await {
                tracing::warn!(%key, %error, "what is open of it cannot be given up");
            }
        }
        Ok(())
    }

    async fn abandon_open(&self, key: &Key) -> Result<()> {
        for version in self.0.ledgers.state(key).await?.open() {
            self.apply(key, Command::Abandon { id: version.id }).await?;
        }
        self.reclaim_owed(key).await
    }

    /// A version will not be in the bucket that was asked for.
    pub(crate) async fn not_stored(&self, key: &Key, id: VersionId) -> Result<()> {
        self.apply(key, Command::NotStored { id }).await?;
        self.reclaim_owed(key).await
    }

    /// Commits the contribution, whose archives have these lengths in bytes, and proves the version if it
    /// was the last one.
    pub(crate) async fn commit(
        &self,
        place: &Place,
        digest: Digest,
        lens: &[u64],
    ) -> Result<Progress> {
        let Place { key, id, writer, job, .. } = place;
        let archive = |(number, len): (usize, &u64)| ArchiveReference {
            name: place.file(number),
            file_len: *len,
            bytes: *len,
        };
        let archives: Vec<_> = lens.iter().enumerate().map(archive).collect();
        let keeper = self.keeper().await?;
        let commit = || Commit {
            id: *id,
            writer: *writer,
            job: job.clone(),
            digest,
            archives: archives.clone(),
            keeper,
            now: self.now(),
        };
        let committed = |outcome| match outcome {
            Outcome::Committed { visible, missing } => Progress { visible, missing },
            other => unreachable!("commit does not lead to {other:?}"),
        };
        let is_decided = |progress: &Progress| progress.visible || !progress.missing.is_empty();
        let progress = committed(self.apply(key, Command::Commit(commit())).await?);
        if is_decided(&progress) {
            return Ok(progress);
        }
        loop {
            let proven = self.prove(key, *id).await;
            if let Err(error) = proven {
                if place.is_copy {
                    // It is what it was, and is tried again.
                    return Err(error);
                }
                // Nobody is left to complete it: a version that cannot be proven now is no version.
                let reason = error.to_string();
                let _ = self.apply(key, Command::Rejected { id: *id, reason }).await;
                return Err(error);
            }
            // What is owed beyond the version itself stays owed if it cannot be done now.
            let _ = self.reclaim_owed(key).await;
            if let Ok(true) = proven {
                return Ok(Progress { visible: true, missing: WriterSet::default() });
            }
            let seen = self.0.ledgers.state(key).await?;
            // The same commit again tells how the proof went: visible, or the reason why not.
            match self.apply(key, Command::Commit(commit())).await {
                Ok(outcome) => {
                    let progress = committed(outcome);
                    if is_decided(&progress) {
                        return Ok(progress);
                    }
                }
                // A newer version has replaced it already.
                Err(error) if matches!(error.refusal(), Some(Refusal::Gone { .. })) => {
                    return Ok(Progress { visible: true, missing: WriterSet::default() });
                }
                Err(error) => return Err(error),
            }
            // Another try of the same put proves it, in this process, or has just stopped to.
            self.0.ledgers.changed(key, &seen, WAIT).await;
        }
    }

    /// Why a put failed: what has become of the version comes before what that has led to.
    pub(crate) async fn reason(&self, place: &Place, error: Error) -> Error {
        let state = self.state(&place.key).await;
        match state.ok().and_then(|state| state.outcome_of(place.id)) {
            // Who could not be reached has not been heard.
            _ if error.kind() == ErrorKind::Unreachable => error,
            // It is what the version was dropped for.
            Some(Fate::Dropped(Reason::Rejected { reason })) if begins(&error, &reason) => error,
            Some(Fate::Dropped(reason)) if error.refusal().is_none() => {
                Error::refused(&place.key, Refusal::Dropped { number: place.number, reason })
            }
            _ => error,
        }
    }

    /// Whether the ledger needs no archive to answer a commit: the writer has committed in another try, or the
    /// version has ended.
    pub(crate) async fn is_decided(&self, place: &Place) -> bool {
        let Ok(state) = self.state(&place.key).await else { return false };
        let is_pending = matches!(state.outcome_of(place.id), None | Some(Fate::Pending { .. }));
        let version = state.versions().find(|version| version.id == place.id);
        !is_pending || version.is_some_and(|version| version.digest_of(place.writer).is_some())
    }

    /// Takes back what is not committed, up to so many archives. The put has failed already; if this fails
    /// too, the version ends by its age.
    pub(crate) async fn withdraw(&self, place: &Place, count: usize) {
        let abort = Command::Abort { id: place.id, writer: place.writer };
        let aborted = self.apply(&place.key, abort).await;
        if aborted.is_err_and(|error| error.kind() == ErrorKind::Unreachable) {
            // What was asked before may still be done: then the version needs its archives.
            return;
        }
        let state = self.state(&place.key).await;
        let is_committed =
            |version: &Version| version.id == place.id && version.digest_of(place.writer).is_some();
        if state.is_ok_and(|state| !state.versions().any(is_committed)) {
            let paths: Vec<String> = (0..count).map(|number| place.path(number)).collect();
            let delete =
                move |volume: &dyn Volume| paths.iter().try_for_each(|path| volume.delete(path));
            let _ = self.on_disk(delete).await;
            let _ = self.remove_unowned(place).await;
        }
        let _ = self.reclaim_owed(&place.key).await;
    }

    /// Removes the folder of a place unless its version is still there.
    async fn remove_unowned(&self, place: &Place) -> Result<()> {
        let state = self.0.ledgers.state(&place.key).await?;
        if state.versions().any(|version| version.id == place.id) {
            return Ok(());
        }
        let unowned = place.folder();
        self.on_disk(move |volume| volume.remove_folder(&unowned)).await
    }

    /// Carries out what is owed of all keys, and deletes what is left of versions that no ledger knows. What cannot
    /// be done of one key hinders nobody who wants another.
    pub(crate) async fn recover(&self) -> Result<()> {
        for key in self.0.ledgers.keys().await? {
            if let Err(error) = self.recover_key(&key).await {
                tracing::warn!(%key, %error, "what is left of it cannot be deleted");
            }
        }
        Ok(())
    }

    async fn recover_key(&self, key: &Key) -> Result<()> {
        self.reclaim_owed(key).await?;
        self.sweep(key).await
    }

    /// Deletes the data of versions that the ledger of a key does not know, once: processes that died have left
    /// it behind, and a power cut brings back what was deleted just before.
    async fn sweep(&self, key: &Key) -> Result<()> {
        if !self.swept().contains(key) {
            self.clean(key).await?;
            self.swept().insert(key.clone());
        }
        Ok(())
    }

    /// Deletes the data of versions that the ledger of a key does not know.
    async fn clean(&self, key: &Key) -> Result<()> {
        // First the folders, then the versions: what begins meanwhile has none of these.
        let path = key.to_path();
        let names = self.on_disk(move |volume| volume.list(&path)).await?;
        let mut turn = self.0.ledgers.turn(key).await?;
        let folders = names.iter().filter(|name| is_version(name));
        let mut unknown: BTreeSet<String> =
            folders.map(|name| format!("{}/{name}", key.to_path())).collect();
        for version in turn.state().versions() {
            unknown.remove(&folder(key, version));
        }
        if !unknown.is_empty() {
            turn.settle().await?;
            self.on_disk(move |volume| {
                unknown.iter().try_for_each(|folder| remove(volume, folder, &[]))
            })
            .await?;
        }
        Ok(())
    }

    /// Whether there is a version, or a part of one, that ends with this process.
    pub(crate) async fn holds_memory(&self) -> Result<bool> {
        for key in self.0.ledgers.keys().await? {
            // Of what cannot be read nothing is in memory.
            let state = self.0.ledgers.state(&key).await.unwrap_or_default();
            let ends = |version: &Version| {
                version.durability == Durability::Memory || version.is_to_be_stored()
            };
            if state.versions().any(ends) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Carries out what the ledger of a key owes.
    pub(crate) async fn settle(&self, key: &Key) -> Result<()> {
        for effect in pending(&*self.0.ledgers.state(key).await?) {
            if let Effect::Prove { id } = effect {
                self.prove(key, id).await?;
            }
        }
        self.reclaim_owed(key).await
    }

    /// Deletes what the ledger of a key wants deleted.
    pub(crate) async fn reclaim_owed(&self, key: &Key) -> Result<()> {
        for effect in pending(&*self.0.ledgers.state(key).await?) {
            if let Effect::Delete { id, .. } = effect {
                self.reclaim(key, id).await?;
            }
        }
        Ok(())
    }

    /// Proves a version that all writers have committed, and makes it visible or drops it. Says whether it has made it
    /// visible.
    pub(crate) async fn prove(&self, key: &Key, id: VersionId) -> Result<bool> {
        let Some(_proving) = Proving::begin(self, id) else { return Ok(false) };
        let state = self.0.ledgers.state(key).await?;
        let Some(version) = proving(&state, id).cloned() else { return Ok(false) };
        let (keeper, reached) = (self.keeper().await?, self.reach(key, &version).await?);
        if !reached.ended.is_empty() {
            self.say_ended(key, reached.ended).await?;
            return Ok(false);
        }
        let folder = folder(key, &version);
        let merged = {
            let (version, folder) = (version.clone(), folder.clone());
            self.on_disk(move |volume| prove(volume, &folder, &version)).await?
        };
        let mut turn = self.0.ledgers.turn(key).await?;
        if proving(turn.state(), id).is_none() {
            return Ok(false);
        }
        let is_proven = merged.is_ok();
        let command = match merged {
            Err(reason) => Command::Rejected { id, reason },
            Ok(manifest) => {
                let name = format!("{folder}/{MANIFEST}");
                let file_len = u64::try_from(manifest.len()).expect("usize is at most 64 bits");
                let (path, named) = (name.clone(), archives(&version));
                let manifest_reference =
                    ManifestReference { name, digest: digest(&manifest), file_len, keeper };
                let durability = version.durability;
                self.on_disk(move |volume| {
                    // What tries that died have left behind is no part of the version, and goes with it at
                    // the latest.
                    let _ = clear(volume, &folder, &named);
                    write(volume, &path, &manifest, durability)
                })
                .await?;
                Command::Proved { id, manifest: manifest_reference, now: self.now() }
            }
        };
        loop {
            let next = advance(key, turn.state(), command.clone())?;
            if save(turn, next.state).await? {
                return Ok(is_proven);
            }
            turn = self.0.ledgers.turn(key).await?;
            if proving(turn.state(), id).is_none() {
                return Ok(false);
            }
        }
    }

    /// The manifest of a visible version, made of its archives once more: whoever kept it is gone, or does not answer.
    pub(crate) async fn manifest(&self, key: &Key, id: VersionId) -> Result<Option<Vec<u8>>> {
        let state = self.0.ledgers.state(key).await?;
        let version = state.versions().find(|version| version.id == id).cloned();
        let version = version.ok_or_else(|| Error::refused(key, Refusal::Unknown { id }))?;
        let _reached = self.reach(key, &version).await?;
        let (folder, number) = (folder(key, &version), version.number);
        let shown = version.manifest().map(|manifest| manifest.digest);
        let made = self.on_disk(move |volume| prove(volume, &folder, &version)).await?;
        match made {
            Ok(manifest) if shown == Some(digest(&manifest)) => Ok(Some(manifest)),
            made => {
                let why = made.err().unwrap_or_else(|| "it is another one".to_owned());
                let text =
                    format_args!("key `{key}`: the manifest of version {number}, made anew: {why}");
                Err(Error::new(ErrorKind::Corrupt, text))
            }
        }
    }

    /// Deletes the data of a version that nobody can reach. Until that is done the ledger keeps its number.
    async fn reclaim(&self, key: &Key, id: VersionId) -> Result<()> {
        let mut turn = self.0.ledgers.turn(key).await?;
        let owed = pending(turn.state());
        let is_owed = owed
            .iter()
            .any(|effect| matches!(effect, Effect::Delete { id: other, .. } if *other == id));
        let version = turn.state().versions().find(|version| version.id == id);
        let Some(version) = version.filter(|_| is_owed) else { return Ok(()) };
        let (folder, named) = (folder(key, version), archives(version));
        // What others have kept who have ended is gone.
        let _reached = self.reach(key, version).await?;
        // That it may be deleted must outlast what is deleted.
        turn.settle().await?;
        self.on_disk(move |volume| remove(volume, &folder, &named)).await?;
        loop {
            let next = advance(key, turn.state(), Command::Reclaimed { id })?;
            if save(turn, next.state).await? {
                return Ok(());
            }
            turn = self.0.ledgers.turn(key).await?;
        }
    }

    fn owes_old_proof(&self, state: &State) -> bool {
        let proving = self.proving();
        state.open().any(|version| match version.status {
            Status::Proving { since } => {
                since.after(PROOF_PATIENCE) < self.now() && !proving.contains(&version.id)
            }
            _ => false,
        })
    }

    fn swept(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.0.swept.lock().expect("nobody panics while holding the keys")
    }

    fn proving(&self) -> MutexGuard<'_, BTreeSet<VersionId>> {
        self.0.proving.lock().expect("nobody panics while holding what is proven")
    }

    /// Runs something that waits for the volume on a thread that may wait.
    pub(crate) async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Volume) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let volume = self.0.volume.clone();
        wait(move || work(&*volume)).await
    }

    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.0.opened.lock().expect("nobody panics while holding the open versions")
    }
}

#[async_trait]
impl Catalog for LocalController {
    async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        Ok(self.state(key).await?.visible().map(VersionInfo::of).collect())
    }

    async fn newer(
        &self,
        key: &Key,
        seen: Option<VersionId>,
        patience: Duration,
    ) -> Result<Option<VersionInfo>> {
        let deadline = Instant::now().checked_add(patience);
        loop {
            let state = self.state(key).await?;
            if let Some(head) = state.head().filter(|head| Some(head.id) != seen) {
                return Ok(Some(VersionInfo::of(head)));
            }
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Ok(None);
            }
            // A proof that is owed is looked at again by then.
            self.0.ledgers.changed(key, &state, left.min(PROOF_PATIENCE)).await;
        }
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<Key>> {
        let mut keys = self.0.ledgers.keys().await?;
        keys.retain(|key| key.as_str().starts_with(prefix));
        let mut visible = Vec::with_capacity(keys.len());
        for key in keys {
            // What a key has whose ledger cannot be read, nobody can say: whoever asks for it is told why.
            if self.0.ledgers.state(&key).await.is_ok_and(|state| state.head().is_none()) {
                continue;
            }
            visible.push(key);
        }
        visible.sort_unstable();
        Ok(visible)
    }

    async fn delete(&self, key: &Key, selection: Selection) -> Result<u64> {
        let outcome = self.apply(key, Command::Delete { selection }).await?;
        {
            let mut opened = self.opened();
            opened.deletions += 1;
            opened.located.remove(key);
        }
        self.reclaim_owed(key).await?;
        Ok(match outcome {
            Outcome::Deleted { ids } => u64::try_from(ids.len()).unwrap_or(u64::MAX),
            _ => 0,
        })
    }

    async fn retain(&self, key: &Key, keep: NonZeroU32, ttl: Option<Duration>) -> Result<()> {
        self.apply(key, Command::Retain { keep, ttl }).await?;
        self.reclaim_owed(key).await
    }

    async fn pin(&self, key: &Key, selector: Selector, label: &str) -> Result<u64> {
        let command = Command::Pin { selector, label: label.to_owned() };
        let outcome = self.apply(key, command).await?;
        self.reclaim_owed(key).await?;
        match outcome {
            Outcome::Pinned { number, .. } => Ok(number),
            other => unreachable!("pin does not lead to {other:?}"),
        }
    }

    async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        self.apply(key, Command::Unpin { label: label.to_owned() }).await?;
        self.reclaim_owed(key).await
    }

    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        let state = self.state(key).await?;
        let number = |id| state.versions().find(|version| version.id == id);
        let pins = state
            .pins()
            .filter_map(|(label, id)| number(id).map(|version| (label.to_owned(), version.number)));
        Ok(pins.collect())
    }
}

#[async_trait]
impl Controller for LocalController {
    async fn begin(&self, key: &Key, mut proposal: Proposal) -> Result<Begun> {
        proposal.durability = self.0.volume.admit(proposal.durability)?;
        let (place, committed) = self.open(key, &proposal, || true).await?;
        let Place { id, epoch, number, .. } = place;
        let mut attempt = Box::new(Attempt::new(self.clone(), place, proposal.file_len));
        if committed.is_none() {
            attempt.reserve().await?;
        }
        Ok(Begun { id, epoch, number, committed, contribution: attempt })
    }

    async fn locate(&self, key: &Key, selector: Selector) -> Result<Located> {
        let mut failed = None;
        for _ in 0..OPEN_TRIES {
            let deletions = self.opened().deletions;
            let state = self.state(key).await?;
            let found = state.found(selector);
            let version = found.map_err(|refusal| Error::refused(key, refusal))?;
            let (folder, names, id) = (folder(key, version), archives(version), version.id);
            {
                let mut opened = self.opened();
                if let Some(located) = opened.located.get(key).filter(|located| located.id == id) {
                    return Ok(located.clone());
                }
                // What was replaced is let go before its successor is opened.
                opened.located.remove(key);
            }
            if failed.replace(id) == Some(id) {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format_args!("key `{key}`: version {} lacks files", version.number),
                ));
            }
            let located = self.on_disk(move |volume| locate(volume, &folder, names, id)).await?;
            if let Some(located) = located {
                let mut opened = self.opened();
                if opened.deletions == deletions {
                    if opened.located.len() >= MAX_OPENED {
                        opened.located.pop_first();
                    }
                    opened.located.insert(key.clone(), located.clone());
                }
                return Ok(located);
            }
            // It was deleted between the look at the ledger and the opening: look again.
        }
        Err(Error::new(
            ErrorKind::Busy,
            format_args!("key `{key}`: versions are deleted faster than they can be opened"),
        ))
    }

    async fn prefetch(
        &self,
        _key: &Key,
        _selector: Selector,
        _archives: Option<Vec<String>>,
    ) -> Result<(u64, VersionId, u64)> {
        let text = "the store is this process's own or a directory: there is nothing to fetch";
        Err(Error::new(ErrorKind::Invalid, text))
    }

    fn route(&self) -> Route {
        self.0.volume.route()
    }

    async fn status(&self) -> Result<DaemonStatus> {
        let text = "the store is this process's own or a directory: there is no daemon to ask";
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

fn advance(key: &Key, state: &State, command: Command) -> Result<Step> {
    step(state, command).map_err(|refusal| Error::refused(key, refusal))
}

/// Whether a reason is what the ledger keeps of this error, which is no more than its beginning.
fn begins(error: &Error, reason: &str) -> bool {
    error.to_string().starts_with(reason)
}

fn proving(state: &State, id: VersionId) -> Option<&Version> {
    let version = state.versions().find(|version| version.id == id)?;
    matches!(version.status, Status::Proving { .. }).then_some(version)
}
