//! The commands, outcomes and effects of the ledger.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use super::durability::Durability;
use super::identity::{
    ArchiveDigest, JobId, LeaseId, RunId, RunProcess, RunStatus, SessionId, Timestamp, VersionId,
};
use super::selector::{Label, Selection, Selector};
use super::version::{ArchiveReference, ManifestReference, VersionPosition};
use super::writers::WriterSet;

/// A command to the ledger of one key.
///
/// Every command may be repeated immediately. The repeated command changes nothing; it succeeds again or is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// A writer starts to contribute.
    Begin(Begin),
    /// The archives of a writer are complete.
    Commit(Commit),
    /// A writer's put failed: its contribution is withdrawn unless it is committed.
    ///
    /// A version with an implicit number is dropped too. The writer's next put is another call, so this version can
    /// never be completed, and its other writers get the reason at once. A version with an explicit number stays open
    /// for a retry as long as another writer contributes to it.
    Abort {
        /// The version.
        id: VersionId,
        /// The writer whose put failed.
        writer: u32,
    },
    /// A process has ended.
    ///
    /// - Its uncommitted contributions are withdrawn, as by [`Command::Abort`].
    /// - Its leases are released.
    /// - A version is dropped if the process held the only replica of one of its archives.
    SessionEnded {
        /// The process.
        session: SessionId,
        /// By version, the tensors and slices that would be lost, if the caller knows them.
        slices: BTreeMap<VersionId, String>,
    },
    /// A process has a replica of the archives that these writers have committed.
    ///
    /// It does not replace the processes that hold these archives already.
    PublishReplicas {
        /// The version.
        id: VersionId,
        /// The writers.
        writers: WriterSet,
        /// The process.
        session: SessionId,
    },
    /// A process asks to release its replica of the archives that a writer has committed.
    ///
    /// If no other process holds one, nothing changes: the process must keep the last replica.
    ReleaseReplica {
        /// The version.
        id: VersionId,
        /// The writer.
        writer: u32,
        /// The process.
        session: SessionId,
    },
    /// The upload of a version to the bucket is complete: the version outlives the processes that hold its archives.
    Uploaded {
        /// The version.
        id: VersionId,
    },
    /// A version will not be uploaded to the bucket: it is retained as a version in memory.
    NotUploaded {
        /// The version.
        id: VersionId,
    },
    /// The verification of a fully committed version succeeded: the version becomes visible.
    Verified {
        /// The version.
        id: VersionId,
        /// Its manifest.
        manifest: ManifestReference,
        /// The current time.
        now: Timestamp,
    },
    /// The verification of a fully committed version failed: the version is dropped.
    Rejected {
        /// The version.
        id: VersionId,
        /// The error and its place: fqn, region, writers. It is truncated to
        /// [`MAX_REASON_BYTES`](super::MAX_REASON_BYTES).
        reason: String,
    },
    /// An open version can never be completed: it is dropped at once.
    Abandon {
        /// The version.
        id: VersionId,
    },
    /// Time has passed: open versions past their limit are abandoned, and versions and leases past their time to live
    /// end.
    ///
    /// Run the [`pending`](super::pending) effects first: a version that was not verified in time is abandoned too.
    Expire {
        /// The current time.
        now: Timestamp,
    },
    /// A reader takes a lease on a visible version, or renews a lease that has not expired.
    Lease {
        /// The version.
        selector: Selector,
        /// The identity of the lease. The same identity again renews the lease of the same version.
        lease: LeaseId,
        /// The reader, for status reports.
        holder: String,
        /// How long new reads may start.
        ttl: Duration,
        /// The current time.
        now: Timestamp,
    },
    /// A reader has dropped its last view.
    Release {
        /// The lease.
        lease: LeaseId,
    },
    /// A label pins a version: retention skips it. An existing label moves to this version.
    Pin {
        /// The version.
        selector: Selector,
        /// The label.
        label: Label,
    },
    /// A label is removed, and its version is no longer pinned by it.
    Unpin {
        /// The label.
        label: String,
    },
    /// An old version becomes the newest one, under the next number in a new epoch. Its data stays where it is.
    ///
    /// It retires and drops versions as a version that becomes visible does.
    Rollback {
        /// The version.
        selector: Selector,
        /// The position that it gets, if it is a copy of a version of another store.
        position: Option<VersionPosition>,
        /// The current time.
        now: Timestamp,
    },
    /// Sets the retention of the key.
    Retain {
        /// The number of newest versions to keep.
        keep: NonZeroU32,
        /// How long a version is kept after it became visible; without limit if `None`.
        ttl: Option<Duration>,
    },
    /// Visible versions are retired and open versions are dropped. Leases and pins still hold their data.
    Delete {
        /// The versions.
        selection: Selection,
    },
    /// The data of a version is deleted: [`Effect::Delete`] is done.
    Reclaimed {
        /// The version.
        id: VersionId,
    },
}

/// A writer starts to contribute to a version. The first writer opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// The writer that contributes.
    pub writer: u32,
    /// All writers of the version.
    pub writers: WriterSet,
    /// Whether `writers` was derived from the state dict and not given by the caller.
    pub writers_defaulted: bool,
    /// The job. A single writer needs none.
    pub job: Option<JobId>,
    /// Sequence number of this put of the job to the key by this writer, failed puts included.
    ///
    /// Contributions to a version with an implicit number belong together if their sequence numbers are equal.
    pub sequence: Option<u64>,
    /// The number of the version; `None` is the highest number + 1.
    pub number: Option<u64>,
    /// Whether a number that is not above the highest one opens a new epoch.
    pub rewind: bool,
    /// Whether the version must outlive the process that holds it.
    pub durability: Durability,
    /// Digest of the contribution, if it is already known.
    pub digest: Option<ArchiveDigest>,
    /// Session of the writer's process, if other processes can detect its end.
    pub session: Option<SessionId>,
    /// Identity of the version if this command opens it. It is random.
    pub id: VersionId,
    /// Epoch of the version, if it is a copy of a version of another store. `number` is given too then.
    pub epoch: Option<u32>,
    /// Whether the number of another run is refused even if that run has ended.
    pub keeps_earlier_runs: bool,
    /// The process that puts, and its run.
    pub process: Option<RunProcess>,
    /// The answers to an earlier [`Outcome::CheckRuns`].
    pub run_statuses: BTreeMap<RunId, RunStatus>,
    /// The current time.
    pub now: Timestamp,
}

/// A writer commits its complete archives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The version.
    pub id: VersionId,
    /// The writer of the archives.
    pub writer: u32,
    /// The writer's job.
    pub job: Option<JobId>,
    /// Digest of the archives.
    pub digest: ArchiveDigest,
    /// The archives in order. Usually there is one.
    pub archives: Vec<ArchiveReference>,
    /// Session of the process that holds the archives, if they end with that process.
    pub replica_session: Option<SessionId>,
    /// The version from whose archives these are stored as deltas. `None` if they are stored whole.
    pub base: Option<VersionId>,
    /// The current time.
    pub now: Timestamp,
}

/// The answer of the ledger to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The writer may write its contribution and commit it.
    Begun {
        /// The version's identity.
        id: VersionId,
        /// The version's epoch.
        epoch: u32,
        /// The version's number.
        number: u64,
    },
    /// The writer has already committed to this version.
    ///
    /// A caller with the same contents is done. A commit with this digest succeeds; one with another digest is
    /// refused.
    Retry {
        /// The version's identity.
        id: VersionId,
        /// The version's epoch.
        epoch: u32,
        /// The version's number.
        number: u64,
        /// Digest that the writer committed.
        digest: ArchiveDigest,
    },
    /// No version opened. Begin again when one of these versions has become visible or was deleted.
    ///
    /// If the command came from a newer job, older jobs are fenced nevertheless.
    Wait {
        /// The open versions, or the versions whose deletion is pending.
        blocking: Vec<VersionId>,
    },
    /// Nothing has changed. Begin again, and say for each of these runs whether a process of it is connected.
    CheckRuns {
        /// Earlier runs, whose numbers the put would take again.
        runs: BTreeSet<RunId>,
    },
    /// The contribution is committed.
    Committed {
        /// Whether the version is visible or has been.
        visible: bool,
        /// The writers that have not committed. It is empty if only the verification is pending.
        missing: WriterSet,
    },
    /// The lease is granted.
    Leased {
        /// The version's identity.
        id: VersionId,
        /// The version's epoch.
        epoch: u32,
        /// The version's number.
        number: u64,
        /// The version's manifest.
        manifest: ManifestReference,
    },
    /// The label pins this version.
    Pinned {
        /// The version's identity.
        id: VersionId,
        /// The version's number.
        number: u64,
    },
    /// The version is the newest one.
    RolledBack {
        /// The version's identity.
        id: VersionId,
    },
    /// These versions are retired or dropped. The list is empty if the selection matched no open or visible version.
    Deleted {
        /// The versions.
        ids: Vec<VersionId>,
    },
    /// The command is in effect, by itself or by an earlier one.
    Done,
}

/// An action outside the ledger.
///
/// It stays pending until a command reports its completion: see [`pending`](super::pending).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Effect {
    /// Verify that the contributions form one state dict. Report with [`Command::Verified`] or [`Command::Rejected`].
    Verify {
        /// The version.
        id: VersionId,
    },
    /// Delete the data of a version that no reader can reach. Report with [`Command::Reclaimed`].
    ///
    /// Two processes may delete at the same time. Once one of them has reported it, another version may take the
    /// number. So delete by identity, not by number.
    Delete {
        /// The version's identity.
        id: VersionId,
        /// The version's epoch.
        epoch: u32,
        /// The version's number.
        number: u64,
    },
}

impl Effect {
    /// Whether it deletes the data of a version.
    pub(crate) fn is_deletion_of(&self, version: VersionId) -> bool {
        matches!(self, Self::Delete { id, .. } if *id == version)
    }
}
