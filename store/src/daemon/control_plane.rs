//! The control plane of a daemon: decides which versions exist.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::control::layout::{archives, folder};
use crate::control::{ArchivePlacement, Catalog, Progress, Proposal, ResolvedReplicas};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    ArchiveDigest, Durability, LeaseId, Refusal, RunId, Selector, Version, VersionId,
};
use crate::net::tls::Endpoint;
use crate::shm::PeerId;
use crate::status::HostStatus;

/// The control plane that a daemon uses for its clients: local, or in another daemon.
#[async_trait]
pub(crate) trait ControlPlane: Catalog {
    /// Opens a version for a writer, or joins an open one.
    ///
    /// Waits for conflicting versions while `is_wanted` returns true. Also returns the digest that the writer has
    /// committed to the version in an earlier try.
    async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(ArchivePlacement, Option<ArchiveDigest>)>;

    /// Commits a contribution whose archives have these lengths in bytes.
    async fn commit(
        &self,
        place: &ArchivePlacement,
        digest: ArchiveDigest,
        lens: &[u64],
    ) -> Result<Progress>;

    /// Returns why a put failed. The outcome of the version takes precedence over `error`, its consequence.
    async fn failure_cause(&self, place: &ArchivePlacement, error: Error) -> Error;

    /// Withdraws a contribution that is not committed, with up to `count` archives.
    async fn withdraw(&self, place: &ArchivePlacement, count: usize);

    /// Leases a visible version for a holder, until it is released.
    async fn lease(&self, holder: PeerId, key: &Key, selector: Selector) -> Result<LeasedVersion>;

    /// Builds the manifest of a version again from its archives.
    ///
    /// Returns `None` if the control plane is in another daemon.
    async fn rebuild_manifest(&self, key: &Key, id: VersionId) -> Result<Option<Vec<u8>>>;

    /// Releases a lease.
    async fn release(&self, key: &Key, lease: LeaseId);

    /// Gives up a cached replica of an archive. Returns false if no other daemon stores the archive.
    async fn release_replica(&self, key: &Key, name: &str) -> Result<bool>;

    /// Returns the archives of visible versions of a key that are durable, oldest first.
    ///
    /// The names are those in the volume. The newest version is left out.
    async fn durable_archives(&self, key: &Key) -> Result<Vec<String>>;

    /// Whether a version, or a part of one, would be lost if this daemon exited.
    async fn has_volatile_versions(&self) -> Result<bool>;

    /// Ends the session of this daemon.
    ///
    /// Daemons that share its ledgers then need not wait until the session expires.
    async fn end_session(&self);

    /// Records that no process of these runs is connected to this daemon any more.
    async fn runs_disconnected(&self, _runs: Vec<RunId>) {}

    /// Returns the daemons that share the ledgers, this one included, or this daemon and its controller.
    async fn peers(&self) -> Result<Vec<HostStatus>>;

    /// Checks that versions of a durability may be put to this daemon.
    ///
    /// # Errors
    ///
    /// `Invalid` if not.
    fn check_durability(&self, durability: Durability) -> Result<()>;

    /// Returns a number that changes when earlier leases may be lost.
    fn instance(&self) -> u64;

    /// Whether other daemons decide about the blobs of this host too.
    fn is_shared(&self) -> bool;
}

/// A lease on a version, and the names of its blobs.
#[derive(Clone)]
pub(crate) struct LeasedVersion {
    pub(crate) lease: LeaseId,
    pub(crate) id: VersionId,
    pub(crate) number: u64,
    pub(crate) epoch: u32,
    /// The instance of the control plane that granted it.
    pub(crate) instance: u64,
    /// Name of the manifest in the volume.
    pub(crate) manifest: String,
    /// Whether the version is in the bucket too.
    pub(crate) is_in_bucket: bool,
    /// Name, daemon and length in bytes of the manifest, if it must be copied to this host.
    pub(crate) remote_manifest: Option<(String, Endpoint, u64)>,
    /// Names of the archives in the volume, by their names in the manifest.
    pub(crate) archives: BTreeMap<String, String>,
    /// Keeps the entries of the remote archives in the blob index.
    pub(crate) replica_guard: Option<Arc<dyn Any + Send + Sync>>,
}

impl LeasedVersion {
    /// Returns the names of its archives and its manifest.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.archives.values().chain([&self.manifest])
    }
}

/// Time for which a lease allows new reads.
const LEASE_TTL: std::time::Duration = std::time::Duration::from_mins(10);

/// The control plane on local or shared ledgers.
#[async_trait]
impl ControlPlane for LocalController {
    async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(ArchivePlacement, Option<ArchiveDigest>)> {
        LocalController::open(self, key, proposal, is_wanted).await
    }

    async fn commit(
        &self,
        place: &ArchivePlacement,
        digest: ArchiveDigest,
        lens: &[u64],
    ) -> Result<Progress> {
        LocalController::commit(self, place, digest, lens).await
    }

    async fn failure_cause(&self, place: &ArchivePlacement, error: Error) -> Error {
        LocalController::failure_cause(self, place, error).await
    }

    async fn withdraw(&self, place: &ArchivePlacement, count: usize) {
        LocalController::withdraw(self, place, count).await;
    }

    async fn lease(&self, holder: PeerId, key: &Key, selector: Selector) -> Result<LeasedVersion> {
        let taken = self.lease_version(key, selector, holder.to_string(), LEASE_TTL).await?;
        let (lease, version, ResolvedReplicas { guard: replica_guard, .. }) = taken;
        let Version { id, epoch, number, uploaded, .. } = version;
        let folder = folder(key, &version);
        let manifest = version.manifest().map(|manifest| manifest.name.clone());
        let manifest =
            manifest.ok_or_else(|| Error::from_refusal(key, Refusal::UnknownVersion { id }))?;
        let names = archives(&version).into_iter();
        let archives = names.map(|name| (name.clone(), format!("{folder}/{name}"))).collect();
        Ok(LeasedVersion {
            lease,
            id,
            number,
            epoch,
            instance: 0,
            manifest,
            is_in_bucket: uploaded,
            remote_manifest: None,
            archives,
            replica_guard,
        })
    }

    async fn rebuild_manifest(&self, key: &Key, id: VersionId) -> Result<Option<Vec<u8>>> {
        LocalController::rebuild_manifest(self, key, id).await
    }

    async fn release(&self, key: &Key, lease: LeaseId) {
        LocalController::release(self, key, lease).await;
    }

    async fn release_replica(&self, key: &Key, name: &str) -> Result<bool> {
        LocalController::release_replica(self, key, name).await
    }

    async fn durable_archives(&self, key: &Key) -> Result<Vec<String>> {
        LocalController::durable_archives(self, key).await
    }

    async fn has_volatile_versions(&self) -> Result<bool> {
        LocalController::has_volatile_versions(self).await
    }

    async fn end_session(&self) {
        LocalController::end_session(self).await;
    }

    async fn peers(&self) -> Result<Vec<HostStatus>> {
        LocalController::hosts(self).await
    }

    fn check_durability(&self, durability: Durability) -> Result<()> {
        if self.is_multi_host() && durability == Durability::Disk {
            let text = "the disk of one host does not outlast that: put with durability `object`, to daemons with \
                        serve --bucket URL";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(())
    }

    fn instance(&self) -> u64 {
        0
    }

    fn is_shared(&self) -> bool {
        self.is_multi_host()
    }
}
