//! The control plane of a store: local, or in a daemon.

mod archive_placement;
mod committed_contribution;
pub(crate) mod layout;
mod peers;
mod replica_locator;

use std::any::Any;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tssd_format::Blob;

use crate::blob::{OpenArchive, Part};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    ArchiveDigest, Durability, JobId, Label, RunId, RunProcess, RunStatus, Selection, Selector,
    Timestamp, Version, VersionId, VersionPosition, WriterSet,
};
use crate::route::{Route, Transport};
use crate::status::DaemonStatus;

pub(crate) use archive_placement::ArchivePlacement;
pub(crate) use committed_contribution::CommittedContribution;
pub(crate) use peers::{Peers, RunDirectory};
pub(crate) use replica_locator::{ReplicaLocator, ResolvedReplicas};

/// The versions of all keys, with their retention and their pins.
#[async_trait]
pub(crate) trait Catalog: Send + Sync {
    /// Returns the visible versions of a key, oldest first.
    async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>>;

    /// Waits until a visible version other than `seen` is the newest one, and returns it.
    ///
    /// A version that has another position after a rollback is another one. Returns `None` after `timeout`.
    async fn wait_for_newer(
        &self,
        key: &Key,
        seen: Option<KnownVersion>,
        timeout: Duration,
    ) -> Result<Option<VersionInfo>>;

    /// Returns the keys that begin with `prefix` and have a visible version, sorted.
    async fn keys(&self, prefix: &str) -> Result<Vec<Key>>;

    /// Deletes versions. Returns their number.
    async fn delete(&self, key: &Key, selection: Selection) -> Result<u64>;

    /// Sets the retention of a key: how many of the newest versions are kept, and for how long.
    ///
    /// Without `ttl`, they do not expire.
    async fn retain(&self, key: &Key, keep: NonZeroU32, ttl: Option<Duration>) -> Result<()>;

    /// Pins a version under a label, and returns its number. The label unpins its previous version.
    async fn pin(&self, key: &Key, selector: Selector, label: &Label) -> Result<u64>;

    /// Makes a version the newest one, under the next number in a new epoch.
    async fn rollback(&self, key: &Key, selector: Selector) -> Result<VersionInfo>;

    /// Removes a label, and unpins its version.
    async fn unpin(&self, key: &Key, label: &str) -> Result<()>;

    /// Returns the labels of a key, each with the number of the version that it pins.
    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>>;
}

/// A version that a waiter has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KnownVersion {
    pub(crate) id: VersionId,
    /// Its position at that time, if it is known.
    pub(crate) position: Option<VersionPosition>,
}

impl KnownVersion {
    /// Returns whether this is a version in its current position.
    pub(crate) fn is(&self, version: &Version) -> bool {
        let is_moved = self.position.is_some_and(|seen| seen != version.position());
        self.id == version.id && !is_moved
    }
}

impl From<&VersionInfo> for KnownVersion {
    fn from(info: &VersionInfo) -> Self {
        Self { id: info.id, position: Some(info.position()) }
    }
}

/// A version that was copied to this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefetchedVersion {
    pub(crate) number: u64,
    pub(crate) id: VersionId,
    /// Size in bytes of the archives that were not here.
    pub(crate) size: u64,
    /// Bytes that were received for them.
    pub(crate) bytes: u64,
    /// Number of the version from which they came as differences.
    pub(crate) base: Option<u64>,
}

/// The control plane of a store.
#[async_trait]
pub(crate) trait Controller: Catalog {
    /// Begins a contribution of a writer to a version.
    ///
    /// Waits for the turn of the contribution, and reserves room for its first archive.
    async fn begin(&self, key: &Key, proposal: Proposal) -> Result<BeginResult>;

    /// Opens a visible version for reading.
    async fn locate(&self, key: &Key, selector: Selector) -> Result<LocatedVersion>;

    /// Copies archives of a version into the memory of this host's daemon: `archives` by name, or all.
    async fn prefetch(
        &self,
        key: &Key,
        selector: Selector,
        archives: Option<Vec<String>>,
    ) -> Result<PrefetchedVersion>;

    /// Follows a key: each version that becomes visible is held until the follower has read it.
    ///
    /// # Errors
    ///
    /// `Unsupported` without a daemon.
    async fn follow(&self, _key: &Key) -> Result<Box<dyn VersionFollower>> {
        Err(follow_unsupported())
    }

    /// Waits until at most `max_unread` versions of a key are held for its followers, or `timeout` ends.
    ///
    /// Returns the number of followers, and the number of versions that are held for them.
    ///
    /// # Errors
    ///
    /// `Unsupported` without a daemon.
    async fn wait_until_read(
        &self,
        _key: &Key,
        _max_unread: u64,
        _timeout: Duration,
    ) -> Result<(u64, u64)> {
        Err(follow_unsupported())
    }

    /// Returns the interface for puts in one request, if this controller is remote.
    fn inline_put(&self) -> Option<&dyn InlinePut> {
        None
    }

    /// Returns the route of the bytes of a put.
    fn route(&self) -> Route;

    /// Returns whether archives may stay in GPU memory.
    fn supports_device_memory(&self) -> bool {
        false
    }

    /// Returns whether a process of a run is connected to the daemon.
    async fn run_status(&self, _run: &RunId) -> Result<RunStatus> {
        Ok(RunStatus::Unknown)
    }

    /// Records the statistics of a read.
    fn record_read(&self, _got: ReadStats) {}

    /// Returns whether this controller can be used. A lost connection is not opened again.
    fn is_open(&self) -> bool {
        true
    }

    /// Returns the status of the daemon.
    ///
    /// # Errors
    ///
    /// `Invalid` without a daemon.
    async fn status(&self) -> Result<DaemonStatus>;
}

/// Puts small archives in one request.
#[async_trait]
pub(crate) trait InlinePut: Send + Sync {
    /// Returns the maximum length of such an archive, in bytes.
    fn max_bytes(&self) -> u64;

    /// As [`Controller::begin`], with the only archive of the contribution. Nothing is left to write.
    ///
    /// If the request did not wait for other writers, the contribution is committed, and [`Contribution::commit`] only
    /// reports it.
    async fn put_inline(
        &self,
        key: &Key,
        proposal: Proposal,
        archive: Bytes,
        digest: ArchiveDigest,
    ) -> Result<BeginResult>;
}

/// A follower of a key, which receives each version in order. Dropping it unfollows the key.
#[async_trait]
pub(crate) trait VersionFollower: Send + Sync {
    /// Returns the next version, or `None` after `timeout`.
    async fn next(&mut self, timeout: Duration) -> Result<Option<LocatedVersion>>;
}

fn follow_unsupported() -> Error {
    let text =
        "versions are held for those who follow a key by a daemon of this host: connect to one";
    Error::new(ErrorKind::Unsupported, text)
}

/// Statistics of one read: bytes requested, bytes copied or viewed, and bytes checksummed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReadStats {
    pub(crate) transport: Transport,
    pub(crate) needed: u64,
    pub(crate) transferred: u64,
    pub(crate) verified: u64,
}

/// A request to contribute to a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Proposal {
    pub(crate) writer: u32,
    pub(crate) writers: WriterSet,
    /// Whether `writers` was derived from the state dict and not given by the caller.
    #[serde(default)]
    pub(crate) writers_defaulted: bool,
    #[serde(default)]
    pub(crate) job: Option<JobId>,
    /// Sequence number of this put of the job to the key by this writer, from 1 on.
    #[serde(default)]
    pub(crate) sequence: Option<u64>,
    #[serde(default)]
    pub(crate) number: Option<u64>,
    #[serde(default)]
    pub(crate) rewind: bool,
    /// Whether the number of another run is refused even if that run has ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) keeps_earlier_runs: bool,
    /// The process that puts, and its run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) process: Option<RunProcess>,
    #[serde(default)]
    pub(crate) durability: Durability,
    /// Length of the archive in bytes, or of the first archive.
    pub(crate) file_len: u64,
    /// The GPU memory that is requested for the archive. `None` is host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<DeviceMemoryRequest>,
    /// How long to wait for other writers.
    pub(crate) timeout: Duration,
}

#[cfg(test)]
impl Proposal {
    /// Returns the proposal of a single writer for a version of this number, with a timeout of 0.
    pub(crate) fn single_writer(number: u64, durability: Durability) -> Self {
        Self {
            writer: 0,
            writers: WriterSet::one(0),
            writers_defaulted: false,
            job: None,
            sequence: None,
            number: Some(number),
            rewind: false,
            keeps_earlier_runs: false,
            process: None,
            durability,
            file_len: 1,
            device: None,
            timeout: Duration::ZERO,
        }
    }
}

/// A request for GPU memory for an archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceMemoryRequest {
    pub(crate) uuid: String,
    /// Bytes of the archive in GPU memory: those in front of its index.
    pub(crate) len: u64,
    /// Minimum capacity of the memory in bytes, so that other archives can reuse it.
    #[serde(default)]
    pub(crate) min_capacity: u64,
}

/// The result of [`Controller::begin`].
pub(crate) struct BeginResult {
    pub(crate) id: VersionId,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// Digest that this writer has committed to the version in an earlier attempt.
    ///
    /// Then nothing is written, and the same digest is committed again.
    pub(crate) committed: Option<ArchiveDigest>,
    pub(crate) contribution: Box<dyn Contribution>,
}

/// A contribution in progress. Dropping it before the commit withdraws it.
#[async_trait]
pub(crate) trait Contribution: Send {
    /// Returns whether writes go to memory of this host and never block.
    fn is_in_memory(&self) -> bool {
        false
    }

    /// Returns the parts of the current archive, one for each length in bytes, from its start.
    ///
    /// Each part may be written on its own thread.
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>>;

    /// Completes the current archive, and reserves room for the next one of the contribution.
    ///
    /// `file_len` is the length of the next archive in bytes.
    async fn extend(&mut self, file_len: u64, device: Option<DeviceMemoryRequest>) -> Result<()>;

    /// Completes the last archive, and commits the contribution. `digest` covers all its archives.
    async fn commit(self: Box<Self>, digest: ArchiveDigest) -> Result<CommitResult>;

    /// Withdraws the contribution, and returns the reason why the put failed.
    ///
    /// If the version was dropped, the reason of the drop replaces an `error` that it has caused.
    async fn withdraw(self: Box<Self>, error: Error) -> Error;
}

/// A committed contribution.
pub(crate) struct CommitResult {
    pub(crate) progress: Progress,
    /// The upload of the contribution to a bucket, if it must be there.
    pub(crate) upload: Option<UploadFuture>,
}

/// The upload of a contribution to a bucket. Resolves to the progress of the version in the bucket.
///
/// The upload continues if the future is not polled.
pub(crate) type UploadFuture = Pin<Box<dyn Future<Output = Result<Progress>> + Send>>;

/// The progress of a version after a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Whether the version is visible or has been.
    pub(crate) visible: bool,
    /// The writers that have not committed.
    pub(crate) missing: WriterSet,
}

/// A visible version that is open: its manifest, its archives, and the lease that holds them.
#[derive(Clone)]
pub(crate) struct LocatedVersion {
    pub(crate) id: VersionId,
    pub(crate) position: VersionPosition,
    pub(crate) route: Route,
    pub(crate) manifest: Arc<dyn Blob>,
    /// The archives by their names in the manifest.
    pub(crate) archives: BTreeMap<String, OpenArchive>,
    /// The lease of the version. Each view holds it.
    pub(crate) lease: Arc<dyn Any + Send + Sync>,
}

/// Information about a visible version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VersionInfo {
    /// The number of the version.
    pub number: u64,
    /// The epoch of the version: the number of rewinds of the key before it opened.
    pub epoch: u32,
    /// The identity of the version.
    pub id: VersionId,
    /// Length of all archives, in bytes.
    pub bytes: u64,
    /// All writers of the version.
    pub writers: WriterSet,
    /// When the version became visible.
    pub since: Timestamp,
    /// The process that put it, and its run, if they are known. Of several writers, it is the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<RunProcess>,
    /// The position under which it is stored, if a rollback has given it another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_at: Option<VersionPosition>,
}

impl VersionInfo {
    /// Returns epoch and number, which order the versions of a key.
    pub fn position(&self) -> VersionPosition {
        VersionPosition { epoch: self.epoch, number: self.number }
    }

    /// Returns the position under which the archives are stored.
    pub(crate) fn stored_position(&self) -> VersionPosition {
        self.stored_at.unwrap_or_else(|| self.position())
    }

    pub(crate) fn of(version: &Version) -> Self {
        let archives =
            version.contributions.values().flat_map(crate::ledger::Contribution::archives);
        let lens = archives.map(|archive| archive.file_len);
        Self {
            number: version.number,
            epoch: version.epoch,
            id: version.id,
            bytes: lens.fold(0, u64::saturating_add),
            writers: version.writers.clone(),
            since: version.visible_since(),
            process: version.process.clone(),
            stored_at: version.stored_at,
        }
    }
}
