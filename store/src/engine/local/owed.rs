//! What ledgers owe: proofs, and the deletion of what nobody can reach. Whoever finds it owed by a process that died
//! carries it out.

use std::collections::BTreeSet;
use std::time::Duration;

use tssd_format::MANIFEST_NAME;

use super::{LocalController, advance};
use crate::blob::Volume;
use crate::control::layout::{archives, folder, is_version};
use crate::engine::local::folder::{clear, remove, write};
use crate::engine::local::proof::prove;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::MutexGuard;
use crate::key::Key;
use crate::ledger::{
    Command, Digest, Durability, Effect, ManifestReference, Refusal, State, Status, Version,
    VersionId, pending,
};
use crate::metadata::save;

/// A proof that is owed for longer than this is taken over: its prover may have died.
pub(super) const PROOF_PATIENCE: Duration = Duration::from_secs(2);

/// A proof that is under way in this process.
pub(super) struct Proving {
    controller: LocalController,
    id: VersionId,
}

impl Proving {
    /// None if it is already.
    pub(super) fn begin(controller: &LocalController, id: VersionId) -> Option<Self> {
        let is_new = controller.proving().insert(id);
        is_new.then(|| Self { controller: controller.clone(), id })
    }
}

impl Drop for Proving {
    fn drop(&mut self) {
        self.controller.proving().remove(&self.id);
    }
}

impl LocalController {
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
        let proven = version.clone();
        let work = move |volume: &dyn Volume, folder: &str| prove(volume, folder, &proven);
        let merged = self.on_version(key, &version, work).await?;
        let mut turn = self.0.ledgers.turn(key).await?;
        if proving(turn.state(), id).is_none() {
            return Ok(false);
        }
        let is_proven = merged.is_ok();
        let command = match merged {
            Err(reason) => Command::Rejected { id, reason },
            Ok(manifest) => {
                let name = format!("{}/{MANIFEST_NAME}", folder(key, &version));
                let file_len = u64::try_from(manifest.len()).expect("usize is at most 64 bits");
                let (path, named) = (name.clone(), archives(&version));
                let manifest_reference =
                    ManifestReference { name, digest: Digest::of(&manifest), file_len, keeper };
                let durability = version.durability;
                let work = move |volume: &dyn Volume, folder: &str| {
                    // What tries that died have left behind is no part of the version, and goes with it at
                    // the latest.
                    let _ = clear(volume, folder, &named);
                    write(volume, &path, &manifest, durability)
                };
                self.on_version(key, &version, work).await?;
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
            Ok(manifest) if shown == Some(Digest::of(&manifest)) => Ok(Some(manifest)),
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
        let (version, named) = (version.clone(), archives(version));
        // What others have kept who have ended is gone.
        let _reached = self.reach(key, &version).await?;
        // That it may be deleted must outlast what is deleted.
        turn.settle().await?;
        self.close(key, id);
        let work = move |volume: &dyn Volume, folder: &str| remove(volume, folder, &named);
        self.on_version(key, &version, work).await?;
        loop {
            let next = advance(key, turn.state(), Command::Reclaimed { id })?;
            if save(turn, next.state).await? {
                return Ok(());
            }
            turn = self.0.ledgers.turn(key).await?;
        }
    }

    pub(super) fn owes_old_proof(&self, state: &State) -> bool {
        let proving = self.proving();
        state.open().any(|version| match version.status {
            Status::Proving { since } => {
                since.after(PROOF_PATIENCE) < self.now() && !proving.contains(&version.id)
            }
            _ => false,
        })
    }

    fn proving(&self) -> MutexGuard<'_, BTreeSet<VersionId>> {
        self.0.proving.lock()
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
    pub(super) async fn sweep(&self, key: &Key) -> Result<()> {
        if !self.swept().contains(key) {
            self.clean(key).await?;
            self.swept().insert(key.clone());
        }
        Ok(())
    }

    /// Deletes the data of versions that the ledger of a key does not know.
    pub(super) async fn clean(&self, key: &Key) -> Result<()> {
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

    fn swept(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.0.swept.lock()
    }

    /// The archives of a key's visible versions that are durable, by their names in the volume, the oldest first; without
    /// those of the newest version.
    pub(crate) async fn lasting(&self, key: &Key) -> Result<Vec<String>> {
        let state = self.0.ledgers.state(key).await?;
        let newest = state.head().map(|head| head.id);
        let lasting = state.visible().filter(|it| it.is_durable() && Some(it.id) != newest);
        let named = lasting.flat_map(|version| {
            let folder = folder(key, version);
            archives(version).into_iter().map(move |name| format!("{folder}/{name}"))
        });
        Ok(named.collect())
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
}

fn proving(state: &State, id: VersionId) -> Option<&Version> {
    let version = state.versions().find(|version| version.id == id)?;
    matches!(version.status, Status::Proving { .. }).then_some(version)
}
