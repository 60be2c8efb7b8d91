//! One version in the ledger: its writers, its contributions and its status.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::durability::Durability;
use super::identity::{ArchiveDigest, JobId, RunProcess, SessionId, Timestamp, VersionId};
use super::refusal::{Reason, Refusal};
use super::writers::WriterSet;

/// The number of a version, and its epoch. Versions of a key are ordered by epoch, then number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VersionPosition {
    /// The epoch: the number of rewinds and rollbacks of the key before.
    pub epoch: u32,
    /// The number within the epoch.
    pub number: u64,
}

/// A set of archives, from all declared writers, that becomes visible in one step or never.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Version {
    /// Its identity.
    pub id: VersionId,
    /// Number of rewinds and rollbacks of the key when the version opened, or when it was rolled back to.
    pub epoch: u32,
    /// Its number. The pair of epoch and number is unique among the versions that have data.
    pub number: u64,
    /// The position under which its data is stored, if a rollback has given it another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_at: Option<VersionPosition>,
    /// The number at which its epoch begins, if no version of that epoch was visible when it opened.
    ///
    /// When this version becomes visible, versions of older epochs with this number or a higher one are retired.
    pub rewind_from: Option<u64>,
    /// Whether its epoch begins because the processes of earlier runs have disconnected, and not by request.
    ///
    /// Then neither durable nor pinned versions are retired.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaces_ended_runs: bool,
    /// The job whose contributions it accepts.
    pub job: Option<JobId>,
    /// Sequence number of the put within its job, if the number of the version is implicit.
    pub sequence: Option<u64>,
    /// Every writer that must contribute.
    pub writers: WriterSet,
    /// The contributions by writer.
    pub contributions: BTreeMap<u32, Contribution>,
    /// The sessions of writers that have begun and not committed, if they have one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sessions: BTreeMap<u32, SessionId>,
    /// Whether the version must outlive the process that holds it.
    #[serde(default)]
    pub durability: Durability,
    /// Whether the version is uploaded to the bucket.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uploaded: bool,
    /// The process that opened the version, and its run, if they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<RunProcess>,
    /// Whether it is a copy of a version of another store. That store abandons it; it has no time limit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_copy: bool,
    /// Its status.
    pub status: Status,
}

/// The contribution of one writer to a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contribution {
    /// The writer has begun and may be writing.
    Begun,
    /// The archives are complete and never change.
    Committed {
        /// Digest of the archives.
        digest: ArchiveDigest,
        /// The archives in order. Usually there is one.
        archives: Vec<ArchiveReference>,
        /// Sessions of the processes that hold a replica of all archives, if the archives end with the last of them.
        ///
        /// The first is the process to which the writer put them, unless it has ended.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        replica_sessions: Vec<SessionId>,
        /// The version from whose archives these are stored as deltas. `None` if they are stored whole.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base: Option<VersionId>,
    },
}

/// The name and the length of a writer's archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveReference {
    /// Its name in the volume that holds it.
    pub name: String,
    /// Its length in bytes.
    pub file_len: u64,
}

/// The name, digest and length of the manifest of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestReference {
    /// Its name in the volume that holds it.
    pub name: String,
    /// Digest of its contents.
    pub digest: ArchiveDigest,
    /// Its length in bytes.
    pub file_len: u64,
    /// Session of the process that holds it, if the manifest ends with that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_session: Option<SessionId>,
}

impl ManifestReference {
    /// Whether another reference names the same manifest. The process that holds it may differ.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (&self.name, self.digest) == (&other.name, other.digest)
    }
}

/// The status of a version.
///
/// Every transition goes down this list: to `Visible` and `Retired`, or to `Dropped`. Then the data is deleted, and a
/// tombstone replaces the version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The version accepts contributions.
    Open {
        /// When the version opened.
        since: Timestamp,
    },
    /// All declared writers have committed, and the verification is pending. The version still counts as open.
    Verifying {
        /// When the last writer committed.
        since: Timestamp,
    },
    /// Readers see the version.
    Visible {
        /// When the version became visible.
        since: Timestamp,
        /// Its manifest.
        manifest: ManifestReference,
    },
    /// The version accepts no new leases. Its data stays while a lease or a pin holds it.
    Retired {
        /// Its manifest.
        manifest: ManifestReference,
    },
    /// The version will never become visible, or it was visible and has lost archives. Its data will be deleted.
    Dropped {
        /// The reason.
        reason: Reason,
    },
}

/// The outcome of a version, for a caller that waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionOutcome {
    /// The version is open.
    Pending {
        /// The writers that have not committed. It is empty if only the verification is pending.
        missing: WriterSet,
    },
    /// The version became visible. It may have been retired since, and its data deleted.
    Visible,
    /// The version will never become visible, or it was visible and is lost.
    Dropped(Reason),
}

impl Contribution {
    /// Returns the committed archives.
    pub fn archives(&self) -> &[ArchiveReference] {
        match self {
            Self::Begun => &[],
            Self::Committed { archives, .. } => archives,
        }
    }

    /// Returns the sessions that hold a replica of the archives, if the archives end with the last of them.
    pub fn replica_sessions(&self) -> impl Iterator<Item = SessionId> {
        let sessions = match self {
            Self::Begun => None,
            Self::Committed { replica_sessions, .. } => Some(replica_sessions),
        };
        sessions.into_iter().flatten().copied()
    }

    /// Returns the version from whose archives these are stored as deltas.
    pub fn base(&self) -> Option<VersionId> {
        match self {
            Self::Begun => None,
            Self::Committed { base, .. } => *base,
        }
    }

    /// Adds a session that holds a replica of the archives. Does nothing if the archives do not depend on sessions.
    pub(super) fn add_replica(&mut self, session: SessionId) {
        if let Self::Committed { replica_sessions, .. } = self
            && !replica_sessions.is_empty()
            && !replica_sessions.contains(&session)
        {
            replica_sessions.push(session);
        }
    }

    /// Removes a session that held a replica. Returns whether it was the last one.
    pub(super) fn remove_replica(&mut self, session: SessionId) -> bool {
        match self {
            Self::Begun => false,
            Self::Committed { replica_sessions, .. } => {
                let count = replica_sessions.len();
                replica_sessions.retain(|holder| *holder != session);
                replica_sessions.is_empty() && count > 0
            }
        }
    }
}

impl Version {
    /// Whether the version is open: it accepts contributions, or its verification is pending.
    pub fn is_open(&self) -> bool {
        matches!(self.status, Status::Open { .. } | Status::Verifying { .. })
    }

    /// Whether readers see the version.
    pub fn is_visible(&self) -> bool {
        matches!(self.status, Status::Visible { .. })
    }

    /// Whether the version has been visible and outlives the processes that hold it.
    pub fn is_durable(&self) -> bool {
        let is_persistent = match self.durability {
            Durability::Memory => false,
            Durability::Disk => true,
            Durability::Object => self.uploaded,
        };
        is_persistent && self.manifest().is_some()
    }

    /// Whether the version must be uploaded to a bucket and is not yet.
    pub fn is_upload_pending(&self) -> bool {
        self.durability == Durability::Object && !self.uploaded
    }

    /// Returns the versions from whose archives some of this one are stored as deltas.
    pub fn bases(&self) -> impl Iterator<Item = VersionId> {
        self.contributions.values().filter_map(Contribution::base)
    }

    /// Returns its manifest, if the version is visible or retired.
    pub fn manifest(&self) -> Option<&ManifestReference> {
        match &self.status {
            Status::Visible { manifest, .. } | Status::Retired { manifest } => Some(manifest),
            Status::Open { .. } | Status::Verifying { .. } | Status::Dropped { .. } => None,
        }
    }

    /// Returns when the version became visible, if it is.
    pub(crate) fn visible_since(&self) -> Timestamp {
        match self.status {
            Status::Visible { since, .. } => since,
            _ => Timestamp(0),
        }
    }

    /// Returns the declared writers that have not committed.
    pub fn missing(&self) -> WriterSet {
        self.writers.without(&self.committed())
    }

    /// Returns the digest that a writer has committed.
    pub fn digest_of(&self, writer: u32) -> Option<ArchiveDigest> {
        match self.contributions.get(&writer)? {
            Contribution::Begun => None,
            Contribution::Committed { digest, .. } => Some(*digest),
        }
    }

    /// Returns the outcome of the version.
    pub fn outcome(&self) -> VersionOutcome {
        match &self.status {
            Status::Open { .. } | Status::Verifying { .. } => {
                VersionOutcome::Pending { missing: self.missing() }
            }
            Status::Visible { .. } | Status::Retired { .. } => VersionOutcome::Visible,
            Status::Dropped { reason } => VersionOutcome::Dropped(reason.clone()),
        }
    }

    /// Returns number and epoch, which order the versions of the key.
    pub fn position(&self) -> VersionPosition {
        VersionPosition { epoch: self.epoch, number: self.number }
    }

    /// Returns the position under which its data is stored, which never changes.
    pub fn stored_position(&self) -> VersionPosition {
        self.stored_at.unwrap_or_else(|| self.position())
    }

    /// Refuses with the reason if the version was dropped.
    pub(super) fn refuse_dropped(&self) -> Result<(), Refusal> {
        match &self.status {
            Status::Dropped { reason } => {
                Err(Refusal::Dropped { number: self.number, reason: reason.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Refuses a job that differs from the job of the version.
    pub(super) fn refuse_other_job(&self, declared: Option<&JobId>) -> Result<(), Refusal> {
        if self.job.as_ref() == declared {
            return Ok(());
        }
        Err(Refusal::JobsDisagree {
            number: self.number,
            declared: declared.cloned(),
            expected: self.job.clone(),
        })
    }

    /// Refuses a set of writers that differs from the writers of the version.
    pub(super) fn refuse_other_writers(&self, declared: &WriterSet) -> Result<(), Refusal> {
        if self.writers == *declared {
            return Ok(());
        }
        Err(Refusal::WritersDisagree { declared: declared.clone(), expected: self.writers.clone() })
    }

    /// Refuses a durability that differs from the durability of the version.
    pub(super) fn refuse_other_durability(&self, declared: Durability) -> Result<(), Refusal> {
        let (number, expected) = (self.number, self.durability);
        if expected == declared {
            return Ok(());
        }
        Err(Refusal::DurabilityDisagrees { number, declared, expected })
    }

    /// Drops an open version.
    pub(super) fn mark_dropped(&mut self, reason: Reason) {
        debug_assert!(self.is_open(), "only an open version is dropped");
        self.status = Status::Dropped { reason };
    }

    /// Removes the replicas of a session that has ended. Returns whether the version is lost and was dropped.
    ///
    /// The version is lost if the session held the only replica of an archive and the version is not in a bucket.
    pub(super) fn remove_replicas(&mut self, session: SessionId, slices: String) -> bool {
        let lost = self.contributions.iter_mut().filter_map(|(writer, contribution)| {
            contribution.remove_replica(session).then_some(*writer)
        });
        let writers = WriterSet::from_iter(lost.collect::<Vec<_>>());
        let is_lost =
            !writers.is_empty() && !self.uploaded && (self.is_open() || self.is_visible());
        if is_lost {
            self.status = Status::Dropped { reason: Reason::Lost { writers, slices } };
        }
        is_lost
    }

    /// Retires a visible version: it accepts no new leases.
    pub(super) fn retire(&mut self) {
        if let Status::Visible { manifest, .. } = &self.status {
            self.status = Status::Retired { manifest: manifest.clone() };
        }
    }

    fn committed(&self) -> BTreeSet<u32> {
        let writers = self.contributions.keys().copied();
        writers.filter(|writer| self.digest_of(*writer).is_some()).collect()
    }
}

/// The tombstone of a version whose data is deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tombstone {
    pub(super) id: VersionId,
    pub(super) number: u64,
    pub(super) job: Option<JobId>,
    pub(super) sequence: Option<u64>,
    /// The reason if the version was dropped; `None` if it was visible and then retired.
    pub(super) reason: Option<Reason>,
}

impl Tombstone {
    /// Returns the refusal of a command that names the version.
    pub(super) fn refusal(&self) -> Refusal {
        match &self.reason {
            Some(reason) => Refusal::Dropped { number: self.number, reason: reason.clone() },
            None => Refusal::DataDeleted { number: self.number },
        }
    }

    pub(super) fn outcome(&self) -> VersionOutcome {
        self.reason.clone().map_or(VersionOutcome::Visible, VersionOutcome::Dropped)
    }
}

impl From<Version> for Tombstone {
    fn from(version: Version) -> Self {
        let reason = match version.status {
            Status::Dropped { reason } => Some(reason),
            _ => None,
        };
        let Version { id, number, job, sequence, .. } = version;
        Self { id, number, job, sequence, reason }
    }
}
