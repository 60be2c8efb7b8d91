//! One version in the ledger: who writes it, what has arrived, how far it has come.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::durability::Durability;
use super::identity::{Digest, JobId, SessionId, Timestamp, VersionId};
use super::refusal::{Reason, Refusal};
use super::writers::WriterSet;

/// A set of archives, one per declared writer, that becomes visible in one step or never.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Version {
    /// Its identity.
    pub id: VersionId,
    /// How often the key had been rewound when it opened.
    pub epoch: u32,
    /// Its name. The pair of epoch and number is unique among the versions that have data.
    pub number: u64,
    /// The number at which its epoch begins, if readers had not reached that epoch when it opened:
    /// what is numbered so or higher in older epochs is retired when this version becomes visible.
    pub rewinds: Option<u64>,
    /// The one job whose contributions it takes.
    pub job: Option<JobId>,
    /// Which call of put of its job it is, if its number is implicit.
    pub call: Option<u64>,
    /// Every writer that must contribute.
    pub writers: WriterSet,
    /// What has arrived, by writer.
    pub contributions: BTreeMap<u32, Contribution>,
    /// The processes of writers that have begun and not committed, as far as they have said.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sessions: BTreeMap<u32, SessionId>,
    /// Whether it outlives the process that holds it.
    #[serde(default)]
    pub durability: Durability,
    /// Whether all of it is in the bucket that was asked for, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stored: bool,
    /// Whether it is a copy of a version of another store, which says when it ends.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy: bool,
    /// How far it has come.
    pub status: Status,
}

/// What one writer has given to a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Contribution {
    /// The writer has begun and may be writing.
    Begun,
    /// The archives are complete and never change.
    Committed {
        /// What they contain.
        digest: Digest,
        /// Where they are, in their order: usually there is one.
        archives: Vec<ArchiveReference>,
        /// The processes that keep them, each all of them, if they end with the last of these. The first is the one
        /// that they were put to, unless it has ended.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        keepers: Vec<SessionId>,
    },
}

/// Where a writer's archive is and how long it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveReference {
    /// Its name, as the volume that holds it knows it.
    pub name: String,
    /// Its whole length.
    pub file_len: u64,
    /// How many bytes of tensors it holds.
    pub bytes: u64,
}

/// Where the manifest of a version is and what it contains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestReference {
    /// Its name, as the volume that holds it knows it.
    pub name: String,
    /// What it contains.
    pub digest: Digest,
    /// Its whole length.
    #[serde(default)]
    pub file_len: u64,
    /// The process that keeps it, if it ends with that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper: Option<SessionId>,
}

impl ManifestReference {
    /// Whether another one is of the same manifest, whoever keeps it.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (&self.name, self.digest) == (&other.name, other.digest)
    }
}

/// How far a version has come. Each step leads down this list, to `Visible` and `Retired` or
/// straight to `Dropped`; then the data is deleted and the version is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// Contributions arrive.
    Open {
        /// When it opened.
        since: Timestamp,
    },
    /// All declared writers have committed; the proof is owed. It still counts as open.
    Proving {
        /// When the last writer committed.
        since: Timestamp,
    },
    /// Readers see it.
    Visible {
        /// When it became visible.
        since: Timestamp,
        /// Its manifest.
        manifest: ManifestReference,
    },
    /// It takes no new leases; its data stays while a lease or a pin holds it.
    Retired {
        /// Its manifest.
        manifest: ManifestReference,
    },
    /// It never became visible and never will, or it was and has lost archives; its data is to be deleted.
    Dropped {
        /// Why.
        reason: Reason,
    },
}

/// What became of a version, as one who waits for it sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fate {
    /// It is open.
    Pending {
        /// The writers that have not committed; none if only the proof is owed.
        missing: WriterSet,
    },
    /// It became visible. (It may have been retired since, and its data deleted.)
    Visible,
    /// It never became visible and never will, or it was and is lost.
    Dropped(Reason),
}

impl Contribution {
    /// The archives that are complete.
    pub fn archives(&self) -> &[ArchiveReference] {
        match self {
            Self::Begun => &[],
            Self::Committed { archives, .. } => archives,
        }
    }

    /// The processes that keep them, if they end with the last of these.
    pub fn keepers(&self) -> impl Iterator<Item = SessionId> {
        let keepers = match self {
            Self::Begun => None,
            Self::Committed { keepers, .. } => Some(keepers),
        };
        keepers.into_iter().flatten().copied()
    }

    /// A process keeps them too, if they end with those who do.
    pub(super) fn keep(&mut self, session: SessionId) {
        if let Self::Committed { keepers, .. } = self
            && !keepers.is_empty()
            && !keepers.contains(&session)
        {
            keepers.push(session);
        }
    }

    /// A process keeps them no longer. Says whether now nobody does.
    pub(super) fn lose(&mut self, session: SessionId) -> bool {
        match self {
            Self::Begun => false,
            Self::Committed { keepers, .. } => {
                let had = keepers.len();
                keepers.retain(|keeper| *keeper != session);
                keepers.is_empty() && had > 0
            }
        }
    }
}

impl Version {
    /// Whether it is open: contributions arrive, or the proof is owed.
    pub fn is_open(&self) -> bool {
        matches!(self.status, Status::Open { .. } | Status::Proving { .. })
    }

    /// Whether readers see it.
    pub fn is_visible(&self) -> bool {
        matches!(self.status, Status::Visible { .. })
    }

    /// Whether it was visible, and outlives the processes that hold it.
    pub fn is_durable(&self) -> bool {
        let lasts = match self.durability {
            Durability::Memory => false,
            Durability::Disk => true,
            Durability::Object => self.stored,
        };
        lasts && self.manifest().is_some()
    }

    /// Whether it is to be in a bucket, and is not so far.
    pub fn is_to_be_stored(&self) -> bool {
        self.durability == Durability::Object && !self.stored
    }

    /// Its manifest, if it ever became visible.
    pub fn manifest(&self) -> Option<&ManifestReference> {
        match &self.status {
            Status::Visible { manifest, .. } | Status::Retired { manifest } => Some(manifest),
            Status::Open { .. } | Status::Proving { .. } | Status::Dropped { .. } => None,
        }
    }

    /// The declared writers that have not committed.
    pub fn missing(&self) -> WriterSet {
        self.writers.without(&self.committed())
    }

    /// What the writer has committed.
    pub fn digest_of(&self, writer: u32) -> Option<Digest> {
        match self.contributions.get(&writer)? {
            Contribution::Begun => None,
            Contribution::Committed { digest, .. } => Some(*digest),
        }
    }

    /// What became of it.
    pub fn fate(&self) -> Fate {
        match &self.status {
            Status::Open { .. } | Status::Proving { .. } => {
                Fate::Pending { missing: self.missing() }
            }
            Status::Visible { .. } | Status::Retired { .. } => Fate::Visible,
            Status::Dropped { reason } => Fate::Dropped(reason.clone()),
        }
    }

    /// Its place in the order of the versions of the key.
    pub(super) fn place(&self) -> (u32, u64) {
        (self.epoch, self.number)
    }

    /// Refuses with the reason for which it was dropped, if it was.
    pub(super) fn refuse_dropped(&self) -> Result<(), Refusal> {
        match &self.status {
            Status::Dropped { reason } => {
                Err(Refusal::Dropped { number: self.number, reason: reason.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Refuses a job other than its own.
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

    /// Refuses a set of writers other than its own.
    pub(super) fn refuse_other_writers(&self, declared: &WriterSet) -> Result<(), Refusal> {
        if self.writers == *declared {
            return Ok(());
        }
        Err(Refusal::WritersDisagree { declared: declared.clone(), expected: self.writers.clone() })
    }

    /// Refuses a durability other than its own.
    pub(super) fn refuse_other_durability(&self, declared: Durability) -> Result<(), Refusal> {
        let (number, expected) = (self.number, self.durability);
        if expected == declared {
            return Ok(());
        }
        Err(Refusal::DurabilityDisagrees { number, declared, expected })
    }

    /// Ends an open version.
    pub(super) fn drop_because(&mut self, reason: Reason) {
        debug_assert!(self.is_open(), "only an open version is dropped");
        self.status = Status::Dropped { reason };
    }

    /// A process has ended. If it alone has kept something that is not in a bucket too, that is lost, and nobody can read
    /// the version any more; says whether that is so.
    pub(super) fn lose(&mut self, session: SessionId, slices: String) -> bool {
        let lost = self
            .contributions
            .iter_mut()
            .filter_map(|(writer, contribution)| contribution.lose(session).then_some(*writer));
        let writers = WriterSet::from_iter(lost.collect::<Vec<_>>());
        let is_lost = !writers.is_empty() && !self.stored && (self.is_open() || self.is_visible());
        if is_lost {
            self.status = Status::Dropped { reason: Reason::Lost { writers, slices } };
        }
        is_lost
    }

    /// Takes a visible version from the readers.
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

/// What the ledger remembers of a version whose data is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ended {
    pub(super) id: VersionId,
    pub(super) number: u64,
    pub(super) job: Option<JobId>,
    pub(super) call: Option<u64>,
    /// Why it was dropped; none if it was visible to its end.
    pub(super) reason: Option<Reason>,
}

impl Ended {
    /// What a command that names the version is told.
    pub(super) fn refusal(&self) -> Refusal {
        match &self.reason {
            Some(reason) => Refusal::Dropped { number: self.number, reason: reason.clone() },
            None => Refusal::Gone { number: self.number },
        }
    }

    pub(super) fn fate(&self) -> Fate {
        self.reason.clone().map_or(Fate::Visible, Fate::Dropped)
    }
}

impl From<Version> for Ended {
    fn from(version: Version) -> Self {
        let reason = match version.status {
            Status::Dropped { reason } => Some(reason),
            _ => None,
        };
        let Version { id, number, job, call, .. } = version;
        Self { id, number, job, call, reason }
    }
}
