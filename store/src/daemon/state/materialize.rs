//! Copies of parts of a version that must be local before it is read.
//!
//! These are manifests of other daemons, prefetched archives, and archives that are restored from the bucket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::DaemonState;
use super::leases::{LocatedVersion, SharedLease};
use crate::daemon::bucket_sync::RestoreReason;
use crate::daemon::control_plane::LeasedVersion;
use crate::daemon::tiered::BlobLocation;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::key::Key;
use crate::ledger::Selector;
use crate::net::tls::Endpoint;
use crate::shm::{PeerId, Pool, Span};

/// The peer id of the daemon itself, which holds the leases of prefetched versions.
const DAEMON_PEER: PeerId = 0;

impl DaemonState {
    /// Releases the version of a key that was restored from the bucket if it is no longer visible.
    pub(crate) async fn release_replaced(&self, key: &Key) {
        if self.replicator.is_some() {
            self.release_retired(key).await;
        }
    }

    /// Releases the version of a key that was prefetched or restored if it is no longer visible.
    pub(crate) async fn release_retired(&self, key: &Key) {
        let fetched = self.inner().prefetched.get(key).map(|grant| (grant.id, grant.lease));
        let Some((id, lease)) = fetched else { return };
        let Ok(versions) = self.control_plane.versions(key).await else { return };
        if versions.iter().all(|version| version.id != id) {
            {
                let mut inner = self.inner();
                if inner.prefetched.get(key).is_some_and(|grant| grant.lease == lease) {
                    inner.prefetched.remove(key);
                }
            }
            self.release(DAEMON_PEER, lease).await;
        }
    }

    /// Restores the blobs of a version that no reachable daemon has from the bucket.
    ///
    /// They stay in memory until another version of the key is prefetched or restored.
    async fn restore_missing(&self, key: &Key, grant: &LeasedVersion) -> Result<()> {
        let Some(replicator) = &self.replicator else { return Ok(()) };
        let (mut missing, now) = (Vec::new(), Instant::now());
        for name in grant.names() {
            match self.volume.locate(name)? {
                None => missing.push((name.clone(), RestoreReason::NoReplica)),
                Some(BlobLocation::Remote(..)) => {
                    let remote_blobs = &self.volume.remote_blobs;
                    let is_only_copy =
                        !grant.is_in_bucket && !remote_blobs.has_several_replicas(name);
                    let is_reachable =
                        is_only_copy || remote_blobs.prefer_reachable(name, now).await;
                    if grant.is_in_bucket && !is_reachable {
                        missing.push((name.clone(), RestoreReason::Unreachable));
                    }
                }
                Some(BlobLocation::Local(_) | BlobLocation::Device(_)) => {}
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let own = match self.control_plane.lease(DAEMON_PEER, key, Selector::Id(grant.id)).await {
            Ok(own) => self.record_lease(DAEMON_PEER, key, own),
            // The version was replaced. The caller leased it before, so its blobs are restored all the same.
            Err(_) => return replicator.restore(key, grant.id, missing).await,
        };
        match replicator.restore(key, own.id, missing).await {
            Ok(()) => self.finish_prefetch(key, own).await,
            Err(error) => {
                self.abort_prefetch(&own).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Restores a leased archive from the bucket after a read from other daemons failed.
    ///
    /// # Errors
    ///
    /// `failed`, the error of that read, if the archive cannot be restored.
    pub(crate) async fn restore_from_bucket(&self, name: &String, failed: Error) -> Result<()> {
        let held = {
            let inner = self.inner();
            let held = inner.leases.values().find(|held| held.names.contains(name));
            held.map(|held| (held.key.clone(), held.id))
        };
        let (Some(replicator), Some((key, id))) = (&self.replicator, held) else {
            return Err(failed);
        };
        let missing = vec![(name.clone(), RestoreReason::Unreachable)];
        let restored = replicator.restore(&key, id, missing).await;
        if restored.is_ok() && self.pool.span(name).is_some() { Ok(()) } else { Err(failed) }
    }

    /// Makes a leased version readable and returns the locations of its manifest and its archives.
    ///
    /// The manifest is in memory of this host afterwards. The archives are on this host or in another daemon.
    pub(crate) async fn materialize(
        &self,
        key: &Key,
        grant: &LeasedVersion,
    ) -> Result<(Span, BTreeMap<String, BlobLocation>)> {
        self.restore_missing(key, grant).await?;
        self.copy_manifest(key, grant).await?;
        let BlobLocation::Local(manifest) = self.locate_blob(key, grant, &grant.manifest)? else {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "this host does not have the bytes of the manifest",
            ));
        };
        let archives = grant.archives.iter();
        let archives =
            archives.map(|(file, name)| Ok((file.clone(), self.locate_blob(key, grant, name)?)));
        Ok((manifest, archives.collect::<Result<_>>()?))
    }

    /// Returns the location of a blob of a version.
    fn locate_blob(&self, key: &Key, grant: &LeasedVersion, name: &str) -> Result<BlobLocation> {
        self.volume.locate(name)?.ok_or_else(|| {
            let text = format_args!("key `{key}`: version {} lacks `{name}`", grant.number);
            Error::new(ErrorKind::Corrupt, text)
        })
    }

    /// Copies the manifest of a version from another daemon into memory, unless it is there.
    ///
    /// The copy is deleted with the last lease of the version.
    async fn copy_manifest(&self, key: &Key, grant: &LeasedVersion) -> Result<()> {
        let missing = grant.remote_manifest.clone().or_else(|| {
            let (holder, len) = self.volume.remote_blobs.locate(&grant.manifest)?;
            Some((grant.manifest.clone(), holder.endpoint, len))
        });
        if missing.is_none() && self.volume.locate(&grant.manifest)?.is_some() {
            return Ok(());
        }
        let _copying = self.manifest_copy_lock.lock().await;
        if self.pool.span(&grant.manifest).is_some() {
            return Ok(());
        }
        let bytes = self.fetch_manifest(key, grant, missing).await?;
        let do_not_wait = std::future::ready(());
        let write = |pool: &Arc<Pool>| pool.write(&grant.manifest, &bytes);
        let written =
            self.volume.replicas.with_memory(&*self.control_plane, do_not_wait, write).await;
        let written = written.map_err(|error| Error::io(&grant.manifest, error))?;
        written.map_err(|exhausted| self.out_of_memory(&exhausted))?;
        // The deletion takes effect with the last lease of the version.
        self.pool.delete(&grant.manifest);
        Ok(())
    }

    /// Reads a manifest from the daemon that has it, or builds it again from the archives.
    ///
    /// It is built again only if that daemon does not answer and every archive is reachable.
    async fn fetch_manifest(
        &self,
        key: &Key,
        grant: &LeasedVersion,
        location: Option<(String, Endpoint, u64)>,
    ) -> Result<Vec<u8>> {
        let (remote_blobs, now) = (&self.volume.remote_blobs, Instant::now());
        let is_reachable = match &location {
            Some((_, endpoint, _)) => remote_blobs.is_reachable(endpoint, now).await,
            None => false,
        };
        if !is_reachable {
            let mut can_rebuild = true;
            for name in grant.archives.values() {
                let is_here = matches!(
                    self.volume.locate(name)?,
                    Some(BlobLocation::Local(_) | BlobLocation::Device(_))
                );
                can_rebuild &= is_here || remote_blobs.prefer_reachable(name, now).await;
            }
            if can_rebuild
                && let Some(rebuilt) = self.control_plane.rebuild_manifest(key, grant.id).await?
            {
                return Ok(rebuilt);
            }
        }
        let Some((name, endpoint, len)) = location else {
            for name in grant.archives.values() {
                self.locate_blob(key, grant, name)?;
            }
            let number = grant.number;
            let text = format_args!("key `{key}`: nobody has the manifest of version {number}");
            return Err(Error::new(ErrorKind::Unreachable, text));
        };
        let connections = remote_blobs.connections(&endpoint);
        run_blocking(move || connections.read_manifest(&name, len)).await
    }

    /// Leases a version for a prefetch, and returns the names and lengths of its archives on other daemons.
    ///
    /// `only` selects archives by name; `None` selects all. The caller ends the prefetch with [`DaemonState::finish_prefetch`] or
    /// [`DaemonState::abort_prefetch`].
    pub(crate) async fn begin_prefetch(
        &self,
        key: &Key,
        selector: Selector,
        only: Option<&[String]>,
    ) -> Result<(LeasedVersion, Vec<(String, u64)>)> {
        let LocatedVersion { grant, archives, .. } = self.lease(DAEMON_PEER, key, selector).await?;
        let selected =
            archives.into_iter().filter(|(file, _)| only.is_none_or(|only| only.contains(file)));
        let remote = selected.filter_map(|(file, place)| match place {
            BlobLocation::Local(_) | BlobLocation::Device(_) => None,
            BlobLocation::Remote(_, len) => Some((grant.archives[&file].clone(), len)),
        });
        let remote = remote.collect();
        Ok((grant, remote))
    }

    /// Completes a prefetch: the version stays in memory until another version of its key is prefetched, or until a
    /// client of this daemon deletes it.
    ///
    /// If all its blobs are local copies, the lease on the originals in the control plane is released.
    pub(crate) async fn finish_prefetch(&self, key: &Key, grant: LeasedVersion) {
        let is_copy = |name: &String| {
            self.pool.is_pending_delete(name) || self.volume.replicas.is_replica(name)
        };
        let is_copied = grant.names().all(is_copy);
        let lease = grant.lease;
        let (earlier, registered) = {
            let mut inner = self.inner();
            let held = inner.leases.get_mut(&lease).filter(|_| is_copied);
            let registered = held.and_then(|held| held.shared_lease.take());
            (inner.prefetched.insert(key.clone(), grant), registered)
        };
        if let Some(SharedLease { key, lease, .. }) = registered.and_then(Arc::into_inner) {
            self.control_plane.release(&key, lease).await;
        }
        if let Some(earlier) = earlier {
            self.release(DAEMON_PEER, earlier.lease).await;
        }
    }

    /// Ends a prefetch that failed.
    pub(crate) async fn abort_prefetch(&self, grant: &LeasedVersion) {
        self.release(DAEMON_PEER, grant.lease).await;
    }
}
