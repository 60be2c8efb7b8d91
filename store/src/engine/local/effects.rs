//! Pending effects of ledgers: verifications, and deletions of data that no reader can reach.
//!
//! If a process dies before it has run its effects, any other process runs them.

use std::collections::BTreeSet;
use std::time::Duration;

use tssd_format::MANIFEST_NAME;

use super::{LocalController, advance};
use crate::blob::Volume;
use crate::control::layout::{archives, folder, is_version};
use crate::convert::to_u64;
use crate::engine::local::verification::merge_archives;
use crate::engine::local::version_folder::{delete_surplus_archives, remove, write};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::MutexGuard;
use crate::key::Key;
use crate::ledger::{
    ArchiveDigest, Command, Durability, Effect, ManifestReference, Refusal, State, Status, Version,
    VersionId, pending,
};
use crate::metadata::save;

/// A verification that is pending for longer is taken over: the process that began it may have died.
pub(super) const VERIFICATION_TIMEOUT: Duration = Duration::from_secs(2);

/// A verification that this process is running.
pub(super) struct RunningVerification {
    controller: LocalController,
    id: VersionId,
}

impl RunningVerification {
    /// Returns `None` if this process is already verifying the version.
    pub(super) fn begin(controller: &LocalController, id: VersionId) -> Option<Self> {
        let is_new = controller.running_verifications().insert(id);
        is_new.then(|| Self { controller: controller.clone(), id })
    }
}

impl Drop for RunningVerification {
    fn drop(&mut self) {
        self.controller.running_verifications().remove(&self.id);
    }
}

impl LocalController {
    /// Runs the pending effects of the ledger of a key.
    pub(crate) async fn run_pending_effects(&self, key: &Key) -> Result<()> {
        for effect in pending(&*self.0.ledgers.state(key).await?) {
            if let Effect::Verify { id } = effect {
                self.verify_version(key, id).await?;
            }
        }
        self.run_pending_deletions(key).await
    }

    /// Runs the pending deletions of the ledger of a key.
    pub(crate) async fn run_pending_deletions(&self, key: &Key) -> Result<()> {
        for effect in pending(&*self.0.ledgers.state(key).await?) {
            if let Effect::Delete { id, .. } = effect {
                self.reclaim(key, id).await?;
            }
        }
        Ok(())
    }

    /// Verifies a version that all writers have committed, and makes it visible or drops it.
    ///
    /// Returns whether this call has made it visible.
    pub(crate) async fn verify_version(&self, key: &Key, id: VersionId) -> Result<bool> {
        let Some(_running) = RunningVerification::begin(self, id) else { return Ok(false) };
        let state = self.0.ledgers.state(key).await?;
        let Some(version) = find_unverified(&state, id).cloned() else { return Ok(false) };
        let (replica_session, resolved) =
            (self.replica_holder().await?, self.resolve_replicas(key, &version).await?);
        if !resolved.ended_sessions.is_empty() {
            self.mark_sessions_ended(key, resolved.ended_sessions).await?;
            return Ok(false);
        }
        let unverified = version.clone();
        let work =
            move |volume: &dyn Volume, folder: &str| merge_archives(volume, folder, &unverified);
        let merged = self.run_on_version_folder(key, &version, work).await?;
        let mut guard = self.0.ledgers.lock(key).await?;
        if find_unverified(guard.state(), id).is_none() {
            return Ok(false);
        }
        let is_visible = merged.is_ok();
        let command = match merged {
            Err(reason) => Command::Rejected { id, reason },
            Ok(manifest) => {
                let name = format!("{}/{MANIFEST_NAME}", folder(key, &version));
                let file_len = to_u64(manifest.len());
                let (path, names) = (name.clone(), archives(&version));
                let manifest_reference = ManifestReference {
                    name,
                    digest: ArchiveDigest::compute(&manifest),
                    file_len,
                    replica_session,
                };
                let durability = version.durability;
                let work = move |volume: &dyn Volume, folder: &str| {
                    // Files of attempts that died are not part of the version. If their deletion fails now, they are
                    // deleted with the version.
                    let _ = delete_surplus_archives(volume, folder, &names);
                    write(volume, &path, &manifest, durability)
                };
                self.run_on_version_folder(key, &version, work).await?;
                Command::Verified { id, manifest: manifest_reference, now: self.now() }
            }
        };
        loop {
            let next = advance(key, guard.state(), command.clone())?;
            if save(guard, next.state).await? {
                return Ok(is_visible);
            }
            guard = self.0.ledgers.lock(key).await?;
            if find_unverified(guard.state(), id).is_none() {
                return Ok(false);
            }
        }
    }

    /// Rebuilds the manifest of a visible version from its archives.
    ///
    /// It is called if the holder of the manifest has ended or does not answer.
    ///
    /// # Errors
    ///
    /// `Corrupt` if the result is not the manifest that the ledger names.
    pub(crate) async fn rebuild_manifest(
        &self,
        key: &Key,
        id: VersionId,
    ) -> Result<Option<Vec<u8>>> {
        let state = self.0.ledgers.state(key).await?;
        let version = state.versions().find(|version| version.id == id).cloned();
        let version =
            version.ok_or_else(|| Error::from_refusal(key, Refusal::UnknownVersion { id }))?;
        let _reached = self.resolve_replicas(key, &version).await?;
        let (folder, number) = (folder(key, &version), version.number);
        let expected = version.manifest().map(|manifest| manifest.digest);
        let rebuilt =
            self.run_on_volume(move |volume| merge_archives(volume, &folder, &version)).await?;
        match rebuilt {
            Ok(rebuild_manifest) if expected == Some(ArchiveDigest::compute(&rebuild_manifest)) => {
                Ok(Some(rebuild_manifest))
            }
            rebuilt => {
                let why = rebuilt.err().unwrap_or_else(|| "it is another one".to_owned());
                let text =
                    format_args!("key `{key}`: the manifest of version {number}, made anew: {why}");
                Err(Error::new(ErrorKind::Corrupt, text))
            }
        }
    }

    /// Deletes the data of a version that no reader can reach. Until then the ledger keeps its number.
    async fn reclaim(&self, key: &Key, id: VersionId) -> Result<()> {
        let mut guard = self.0.ledgers.lock(key).await?;
        let effects = pending(guard.state());
        let is_pending = effects
            .iter()
            .any(|effect| matches!(effect, Effect::Delete { id: other, .. } if *other == id));
        let version = guard.state().versions().find(|version| version.id == id);
        let Some(version) = version.filter(|_| is_pending) else { return Ok(()) };
        let (version, names) = (version.clone(), archives(version));
        // The archives of ended processes no longer exist, so `ended` is ignored.
        let _reached = self.resolve_replicas(key, &version).await?;
        // The state that allows the deletion must be durable before anything is deleted.
        guard.sync().await?;
        self.evict_located(key, id);
        let work = move |volume: &dyn Volume, folder: &str| remove(volume, folder, &names);
        self.run_on_version_folder(key, &version, work).await?;
        loop {
            let next = advance(key, guard.state(), Command::Reclaimed { id })?;
            if save(guard, next.state).await? {
                return Ok(());
            }
            guard = self.0.ledgers.lock(key).await?;
        }
    }

    /// Returns whether a verification is overdue that this process is not running.
    pub(super) fn has_overdue_verification(&self, state: &State) -> bool {
        let running = self.running_verifications();
        state.open().any(|version| match version.status {
            Status::Verifying { since } => {
                since.saturating_add(VERIFICATION_TIMEOUT) < self.now()
                    && !running.contains(&version.id)
            }
            _ => false,
        })
    }

    fn running_verifications(&self) -> MutexGuard<'_, BTreeSet<VersionId>> {
        self.0.running_verifications.lock()
    }

    /// Runs the pending deletions of all keys, and deletes data of versions that no ledger knows.
    ///
    /// A failure for one key does not affect the others.
    pub(crate) async fn recover(&self) -> Result<()> {
        for key in self.0.ledgers.keys().await? {
            if let Err(error) = self.recover_key(&key).await {
                tracing::warn!(%key, %error, "what is left of it cannot be deleted");
            }
        }
        Ok(())
    }

    async fn recover_key(&self, key: &Key) -> Result<()> {
        self.run_pending_deletions(key).await?;
        self.sweep(key).await
    }

    /// Deletes the data of versions that the ledger of a key does not know, once per process.
    ///
    /// Processes that died have left it, or a power cut has restored what was deleted just before.
    pub(super) async fn sweep(&self, key: &Key) -> Result<()> {
        if !self.swept_keys().contains(key) {
            self.delete_unknown_versions(key).await?;
            self.swept_keys().insert(key.clone());
        }
        Ok(())
    }

    /// Deletes the data of versions that the ledger of a key does not know.
    pub(super) async fn delete_unknown_versions(&self, key: &Key) -> Result<()> {
        // List the folders before the versions: a version that begins meanwhile has none of these folders.
        let path = key.to_path();
        let names = self.run_on_volume(move |volume| volume.list(&path)).await?;
        let mut guard = self.0.ledgers.lock(key).await?;
        let folders = names.iter().filter(|name| is_version(name));
        let mut unknown: BTreeSet<String> =
            folders.map(|name| format!("{}/{name}", key.to_path())).collect();
        for version in guard.state().versions() {
            unknown.remove(&folder(key, version));
        }
        if !unknown.is_empty() {
            guard.sync().await?;
            self.run_on_volume(move |volume| {
                unknown.iter().try_for_each(|folder| remove(volume, folder, &[]))
            })
            .await?;
        }
        Ok(())
    }

    fn swept_keys(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.0.swept_keys.lock()
    }

    /// Returns the paths of all archives of durable visible versions of a key, oldest first.
    ///
    /// Those of the newest version are left out.
    pub(crate) async fn durable_archives(&self, key: &Key) -> Result<Vec<String>> {
        let state = self.0.ledgers.state(key).await?;
        let newest = state.head().map(|head| head.id);
        let durable = state.visible().filter(|it| it.is_durable() && Some(it.id) != newest);
        let paths = durable.flat_map(|version| {
            let folder = folder(key, version);
            archives(version).into_iter().map(move |name| format!("{folder}/{name}"))
        });
        Ok(paths.collect())
    }

    /// Returns whether a version, or a part of one, is lost when this process ends.
    pub(crate) async fn has_volatile_versions(&self) -> Result<bool> {
        for key in self.0.ledgers.keys().await? {
            // A ledger that cannot be read has no version in memory.
            let state = self.0.ledgers.state(&key).await.unwrap_or_default();
            let is_volatile = |version: &Version| {
                version.durability == Durability::Memory || version.is_upload_pending()
            };
            if state.versions().any(is_volatile) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Abandons the open versions of all keys. The processes that began them have ended.
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
        self.run_pending_deletions(key).await
    }
}

/// Returns a version if its verification is pending.
fn find_unverified(state: &State, id: VersionId) -> Option<&Version> {
    let version = state.versions().find(|version| version.id == id)?;
    matches!(version.status, Status::Verifying { .. }).then_some(version)
}
