//! Versions over a meta store and a volume: the ledger's commands, and the effects that they owe.
//!
//! The state of a key's ledger is a record; the next state is the next record, created only if it is
//! not there. A key is locked from reading a record to creating the next one, and while data is
//! deleted or a manifest gets its name, so that all of these see one order. Whoever finds an effect
//! owed by a process that died carries it out.

use std::sync::Arc;
use std::time::Duration;

use tssd_format::{Archive, AttrValue, MANIFEST};

use crate::environment::Environment;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    Command, Contribution as LedgerContribution, Digest, Effect, ManifestReference, Outcome,
    Refusal, Selection, Selector, State, Status, Step, Timestamp, Version, VersionId, pending,
    step,
};
use crate::merge::{Contribution, Divergent, Label, merge};
use crate::meta::MetaStore;
use crate::version::OpenVersion;
use crate::volume::Volume;

/// A proof that is owed for longer than this is taken over: its prover may have died.
const PROOF_PATIENCE: Duration = Duration::from_secs(2);

/// How often a read starts anew because the version it was about to open is deleted.
const OPEN_TRIES: u32 = 16;

pub(crate) struct Controller {
    meta: Arc<dyn MetaStore>,
    volume: Arc<dyn Volume>,
    environment: Arc<dyn Environment>,
}

/// A ledger's state, the number of its record, and what else is in the folder of the records: older
/// ones, and what processes that died have left behind.
struct Record {
    number: u64,
    state: State,
    stale: Vec<String>,
}

impl Controller {
    pub(crate) fn new(
        meta: Arc<dyn MetaStore>,
        volume: Arc<dyn Volume>,
        environment: Arc<dyn Environment>,
    ) -> Self {
        Self { meta, volume, environment }
    }

    pub(crate) fn volume(&self) -> Arc<dyn Volume> {
        self.volume.clone()
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.environment.now()
    }

    pub(crate) fn random(&self) -> u128 {
        self.environment.random()
    }

    /// Gives a command to the ledger of a key. Time passes first, so that what is too old is gone.
    pub(crate) async fn apply(&self, key: &Key, command: Command) -> Result<Outcome> {
        let _lock = self.lock(key).await?;
        let record = self.load(key).await?;
        let expired = advance(key, &record.state, Command::Expire { now: self.now() })?;
        let next = advance(key, &expired.state, command)?;
        self.save(key, &record, &next.state).await?;
        Ok(next.outcome)
    }

    /// The ledger of a key as it is now; one that was never written is empty.
    pub(crate) async fn state(&self, key: &Key) -> Result<State> {
        let state = self.load(key).await?.state;
        // Somebody who may not write, or cannot now, still reads what is visible.
        if self.owes_old_proof(&state) && self.settle(key).await.is_ok() {
            return Ok(self.load(key).await?.state);
        }
        Ok(state)
    }

    /// Opens a visible version, given the ledger as it was a moment ago.
    pub(crate) async fn open(
        &self,
        key: &Key,
        selector: Selector,
        mut state: State,
    ) -> Result<OpenVersion> {
        let mut failed = None;
        for _ in 0..OPEN_TRIES {
            let newest = state.head().map(|version| version.number);
            let Some(version) = state.version(selector) else {
                return Err(Error::refused(key, Refusal::NotFound { selector, newest }));
            };
            let (folder, id) = (folder(key, version), version.id);
            if failed.replace(id) == Some(id) {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format_args!("key `{key}`: version {} lacks files", version.number),
                ));
            }
            let opened = self.on_disk(move |volume| OpenVersion::open(volume, &folder, id)).await?;
            if let Some(opened) = opened {
                return Ok(opened);
            }
            // It was deleted between the look at the ledger and the opening: look again.
            state = self.state(key).await?;
        }
        Err(Error::new(
            ErrorKind::Busy,
            format_args!("key `{key}`: versions are deleted faster than they can be opened"),
        ))
    }

    /// Carries out what the ledger of a key owes.
    pub(crate) async fn settle(&self, key: &Key) -> Result<()> {
        for effect in pending(&self.load(key).await?.state) {
            if let Effect::Prove { id } = effect {
                self.prove(key, id).await?;
            }
        }
        self.reclaim_owed(key).await
    }

    /// Deletes what the ledger of a key wants deleted.
    pub(crate) async fn reclaim_owed(&self, key: &Key) -> Result<()> {
        for effect in pending(&self.load(key).await?.state) {
            if let Effect::Delete { id, .. } = effect {
                self.reclaim(key, id).await?;
            }
        }
        Ok(())
    }

    /// Proves a version that all writers have committed, and makes it visible or drops it.
    pub(crate) async fn prove(&self, key: &Key, id: VersionId) -> Result<()> {
        let state = self.load(key).await?.state;
        let Some(version) = proving(&state, id).cloned() else { return Ok(()) };
        let folder = folder(key, &version);
        let merged = {
            let (version, folder) = (version.clone(), folder.clone());
            self.on_disk(move |volume| prove(volume, &folder, &version)).await?
        };
        let _lock = self.lock(key).await?;
        let record = self.load(key).await?;
        if proving(&record.state, id).is_none() {
            return Ok(());
        }
        let command = match merged {
            Err(reason) => Command::Rejected { id, reason },
            Ok(manifest) => {
                let digest = digest(&manifest);
                let name = format!("{folder}/{MANIFEST}");
                let (path, named) = (name.clone(), archives(&version));
                self.on_disk(move |volume| {
                    // What tries that died have left behind is no part of the version.
                    sweep(volume, &folder, &named);
                    write(volume, &path, &manifest)
                })
                .await?;
                Command::Proved {
                    id,
                    manifest: ManifestReference { name, digest },
                    now: self.now(),
                }
            }
        };
        let next = advance(key, &record.state, command)?;
        self.save(key, &record, &next.state).await
    }

    /// Deletes the data of a version that nobody can reach.
    ///
    /// The key stays locked meanwhile: its folder may be another version's as soon as the ledger
    /// knows that the data is gone.
    async fn reclaim(&self, key: &Key, id: VersionId) -> Result<()> {
        let _lock = self.lock(key).await?;
        let record = self.load(key).await?;
        let owed = pending(&record.state);
        let is_owed = owed
            .iter()
            .any(|effect| matches!(effect, Effect::Delete { id: other, .. } if *other == id));
        let version = record.state.versions().find(|version| version.id == id);
        let Some(version) = version.filter(|_| is_owed) else { return Ok(()) };
        let (folder, named) = (folder(key, version), archives(version));
        self.on_disk(move |volume| {
            // The manifest first: without it, no reader finds the rest.
            volume.delete(&format!("{folder}/{MANIFEST}"))?;
            for name in named {
                volume.delete(&format!("{folder}/{name}"))?;
            }
            sweep(volume, &folder, &[]);
            volume.remove_folder(&folder)
        })
        .await?;
        let next = advance(key, &record.state, Command::Reclaimed { id })?;
        self.save(key, &record, &next.state).await
    }

    /// Deletes versions; says how many.
    pub(crate) async fn delete(&self, key: &Key, selection: Selection) -> Result<u64> {
        let outcome = self.apply(key, Command::Delete { selection }).await?;
        self.reclaim_owed(key).await?;
        Ok(match outcome {
            Outcome::Deleted { ids } => u64::try_from(ids.len()).unwrap_or(u64::MAX),
            _ => 0,
        })
    }

    /// The keys that have a visible version and begin with a prefix, sorted.
    pub(crate) async fn keys(&self, prefix: &str) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for name in self.meta.list(&folder).await? {
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                let Some(key) = Key::from_path(&path) else {
                    // The beginning of a long key ends so.
                    folders.extend(path.ends_with('%').then_some(path));
                    continue;
                };
                let is_wanted = key.as_str().starts_with(prefix);
                if is_wanted && self.load(&key).await?.state.head().is_some() {
                    keys.push(key);
                }
            }
        }
        keys.sort_unstable();
        Ok(keys)
    }

    fn owes_old_proof(&self, state: &State) -> bool {
        state.open().any(|version| match version.status {
            Status::Proving { since } => since.after(PROOF_PATIENCE) < self.now(),
            _ => false,
        })
    }

    async fn lock(&self, key: &Key) -> Result<Box<dyn std::any::Any + Send>> {
        self.meta.lock(&format!("{}/.lock", key.to_path())).await
    }

    async fn load(&self, key: &Key) -> Result<Record> {
        let folder = format!("{}/.ledger", key.to_path());
        for _ in 0..OPEN_TRIES {
            let mut names = self.meta.list(&folder).await?;
            let numbers = names.iter().filter_map(|name| record_number(name));
            let Some(number) = numbers.max() else {
                return Ok(Record { number: 0, state: State::default(), stale: names });
            };
            // Whoever has created a newer one since may have deleted this one: look again.
            let Some(record) = self.meta.get(&record_name(key, number)).await? else { continue };
            let state = serde_json::from_slice(&record).map_err(|error| {
                let name = record_name(key, number);
                Error::new(ErrorKind::Corrupt, format_args!("ledger record `{name}`: {error}"))
            })?;
            names.retain(|name| !record_name(key, number).ends_with(name.as_str()));
            return Ok(Record { number, state, stale: names });
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format_args!("the records in `{folder}` cannot be read"),
        ))
    }

    /// Creates the next record; the key must be locked since the last one was read.
    async fn save(&self, key: &Key, last: &Record, next: &State) -> Result<()> {
        if last.state == *next {
            return Ok(());
        }
        let bytes = serde_json::to_vec(next).map_err(|error| {
            Error::new(ErrorKind::Invalid, format_args!("key `{key}`: {error}"))
        })?;
        let number = last.number.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format_args!("key `{key}` has no record numbers left"))
        })?;
        if !self.meta.create(&record_name(key, number), bytes).await? {
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("key `{key}` was written without its lock; try again"),
            ));
        }
        // The record before the newest stays, for readers that have just listed it.
        for name in &last.stale {
            // The step is made; what cannot be deleted now is stale the next time too.
            let _ = self.meta.delete(&format!("{}/.ledger/{name}", key.to_path())).await;
        }
        Ok(())
    }

    /// Runs something that waits for the volume on a thread that may wait.
    pub(crate) async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Volume) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let volume = self.volume();
        tokio::task::spawn_blocking(move || work(&*volume)).await.map_err(|error| {
            Error::io("a thread of the store ended", std::io::Error::other(error))
        })?
    }
}

fn advance(key: &Key, state: &State, command: Command) -> Result<Step> {
    step(state, command).map_err(|refusal| Error::refused(key, refusal))
}

/// The number of a record by the last part of its name.
fn record_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".json").filter(|digits| digits.len() == 20)?;
    digits.parse().ok().filter(|number| format!("{number:020}") == digits)
}

fn record_name(key: &Key, number: u64) -> String {
    format!("{}/.ledger/{number:020}.json", key.to_path())
}

/// The folder of a version: a shard set, one archive for each writer and the manifest.
pub(crate) fn folder(key: &Key, version: &Version) -> String {
    folder_of(key, version.epoch, version.number)
}

/// As [`folder`], for a version that has just begun.
pub(crate) fn folder_of(key: &Key, epoch: u32, number: u64) -> String {
    format!("{}/{epoch}-{number}", key.to_path())
}

/// A digest of 16 bytes, for telling contents apart.
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    let mut short = [0; 16];
    short.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    Digest(short)
}

fn proving(state: &State, id: VersionId) -> Option<&Version> {
    let version = state.versions().find(|version| version.id == id)?;
    matches!(version.status, Status::Proving { .. }).then_some(version)
}

/// Merges what the writers of a version have committed. The outer error is the system's, and leaves
/// the proof owed; the inner one is the writers'.
fn prove(volume: &dyn Volume, folder: &str, version: &Version) -> Result<Result<Vec<u8>, String>> {
    let mut contributions = Vec::with_capacity(version.contributions.len());
    for (writer, contribution) in &version.contributions {
        let LedgerContribution::Committed { archive, .. } = contribution else { continue };
        let path = format!("{folder}/{}", archive.name);
        let Some(blob) = volume.open(&path)? else {
            return Ok(Err(format!("the archive of writer {writer} is gone")));
        };
        match Archive::from_blob(blob) {
            Ok(opened) => contributions.push(Contribution {
                writer: *writer,
                file: archive.name.clone(),
                archive: opened,
            }),
            Err(error) => return Ok(Err(format!("the archive of writer {writer}: {error}"))),
        }
    }
    let divergent = match divergent_of(&contributions) {
        Ok(divergent) => divergent,
        Err(reason) => return Ok(Err(reason)),
    };
    let label = Label {
        id: version.id.0,
        epoch: version.epoch,
        number: version.number,
        writers: version.writers.clone(),
    };
    Ok(merge(&contributions, divergent, &label))
}

/// The attribute of an archive that says what its writer wants done with divergent leaves.
pub(crate) const DIVERGENT: &str = "tssd.divergent";

fn divergent_of(contributions: &[Contribution]) -> Result<Divergent, String> {
    let mut agreed = None;
    for contribution in contributions {
        let own = match contribution.archive.attrs().get(DIVERGENT) {
            None => Divergent::Error,
            Some(AttrValue::Text(text)) if text.as_str() == Some("lowest") => Divergent::Lowest,
            Some(AttrValue::Text(text)) if text.as_str() == Some("keep") => Divergent::Keep,
            Some(other) => return Err(format!("divergent={other:?} is unknown")),
        };
        if *agreed.get_or_insert(own) != own {
            let writer = contribution.writer;
            return Err(format!("writers disagree on divergent=: see writer {writer}"));
        }
    }
    Ok(agreed.unwrap_or_default())
}

/// The names of the archives that a version has.
fn archives(version: &Version) -> Vec<String> {
    let name = |contribution: &LedgerContribution| match contribution {
        LedgerContribution::Committed { archive, .. } => Some(archive.name.clone()),
        LedgerContribution::Begun => None,
    };
    version.contributions.values().filter_map(name).collect()
}

/// Deletes everything in a folder but the manifest and what is named, as far as it can be deleted:
/// somebody else may have put something there that is not ours.
fn sweep(volume: &dyn Volume, folder: &str, keep: &[String]) {
    let names = volume.list(folder).unwrap_or_default();
    for name in names.iter().filter(|name| *name != MANIFEST && !keep.contains(name)) {
        let _ = volume.delete(&format!("{folder}/{name}"));
    }
}

/// Writes a blob that may be there already: from an earlier try, with the same bytes.
fn write(volume: &dyn Volume, path: &str, bytes: &[u8]) -> Result<()> {
    let len = u64::try_from(bytes.len()).expect("usize is at most 64 bits");
    let mut reservation = volume.reserve(path, len)?;
    for part in &mut reservation.parts(&[len]) {
        part.write(bytes)?;
    }
    if reservation.seal()? {
        return Ok(());
    }
    let there = volume.open(path)?.ok_or_else(|| {
        Error::new(ErrorKind::Busy, format_args!("`{path}` was there and is gone"))
    })?;
    let same = there.bytes().is_some_and(|there| there == bytes);
    if same {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, format_args!("`{path}` is there with other contents")))
}
