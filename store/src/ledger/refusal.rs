//! The reasons for which versions are dropped and commands are refused.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::durability::Durability;
use super::identity::{ArchiveDigest, JobId, LeaseId, RunProcess, VersionId};
use super::selector::Selector;
use super::writers::WriterSet;

/// The reason for which a version was dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// A newer version became visible first.
    Superseded {
        /// The number of the newer version.
        number: u64,
    },
    /// The version was open too long.
    Abandoned {
        /// The writers that did not commit. It is empty if the version was not verified in time.
        missing: WriterSet,
    },
    /// The contributions of the version do not form one state dict.
    Rejected {
        /// The error and its place.
        reason: String,
    },
    /// A newer job has contributed to the key.
    Fenced {
        /// The newer job.
        job: JobId,
    },
    /// The put of a writer failed, and the version could not be completed.
    Aborted {
        /// The writer whose put failed.
        writer: u32,
    },
    /// The version was deleted while it was open.
    Deleted,
    /// All hosts that held one of its archives have ended. The version may have been visible.
    Lost {
        /// The writers of the lost archives.
        writers: WriterSet,
        /// The tensors and slices in the lost archives, if they were known. The text is truncated to
        /// [`MAX_REASON_BYTES`](super::MAX_REASON_BYTES).
        #[serde(default, skip_serializing_if = "String::is_empty")]
        slices: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superseded { number } => {
                write!(f, "superseded: version {number} became visible first")
            }
            Self::Abandoned { missing } if missing.is_empty() => {
                f.write_str("abandoned: no process verified it in time")
            }
            Self::Abandoned { missing } => {
                write!(f, "abandoned: writers {missing} did not commit in time")
            }
            Self::Rejected { reason } => write!(f, "rejected: {reason}"),
            Self::Fenced { job } => write!(f, "fenced: job {job} has taken over the key"),
            Self::Aborted { writer } => write!(f, "aborted: the put of writer {writer} failed"),
            Self::Deleted => f.write_str("deleted while it was open"),
            Self::Lost { writers, slices } => {
                let hosts = "the hosts that kept the archives of writers";
                write!(f, "lost: {hosts} {writers} have ended")?;
                if slices.is_empty() { Ok(()) } else { write!(f, ", and with them {slices}") }
            }
        }
    }
}

impl Reason {
    fn remedy(&self) -> &'static str {
        match self {
            Self::Superseded { .. } => "go on with a newer version",
            Self::Abandoned { .. } | Self::Aborted { .. } => "put again in every writer",
            Self::Rejected { .. } => "mend the state dicts and put again in every writer",
            Self::Fenced { .. } => "end this job, or start it anew as a newer one",
            Self::Deleted => "put again if it is still wanted",
            Self::Lost { .. } => "read another version, or put again in every writer",
        }
    }
}

/// The newest open version, as [`Refusal::NotFound`] names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingVersion {
    /// Its number.
    pub number: u64,
    /// The writers that have not committed to it.
    pub missing: WriterSet,
}

/// An earlier run for whose sake a number is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierRun {
    /// A process of the run.
    pub process: RunProcess,
    /// The number of a version that the run has put.
    pub version: u64,
    /// Why the number is not free.
    pub obstacle: Obstacle,
}

/// The reason for which a put does not take the numbers of an earlier run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Obstacle {
    /// The process is connected.
    Connected,
    /// The version is kept on disk or in a bucket.
    Durable,
    /// A label pins the version.
    Pinned,
}

impl fmt::Display for EarlierRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, version, obstacle } = self;
        match obstacle {
            Obstacle::Connected => {
                write!(f, "{process} has put version {version} and is still connected")
            }
            Obstacle::Durable => write!(f, "{process} has put version {version}, which is durable"),
            Obstacle::Pinned => write!(f, "{process} has put version {version}, which is pinned"),
        }
    }
}

/// The reason for which a command is refused. A refused command changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refusal {
    /// A writer that is not among the declared writers contributes.
    NotAWriter {
        /// The writer.
        writer: u32,
        /// The declared writers.
        writers: WriterSet,
    },
    /// Several writers without a job: their contributions could be mixed with those of an earlier run.
    JobRequired {
        /// The declared writers.
        writers: WriterSet,
    },
    /// Several writers with neither a number nor a sequence number, by which their contributions would be matched.
    SequenceRequired {
        /// The declared writers.
        writers: WriterSet,
    },
    /// A newer job has taken over the key.
    Fenced {
        /// The newest job.
        job: JobId,
    },
    /// The open version with this number belongs to another job, or to no job.
    JobsDisagree {
        /// The number.
        number: u64,
        /// The job of this contribution.
        declared: Option<JobId>,
        /// The job of the version.
        expected: Option<JobId>,
    },
    /// The writers differ from those of the version, or default writers differ from those of the job's previous
    /// version.
    WritersDisagree {
        /// The writers that this contribution declares.
        declared: WriterSet,
        /// The writers of the version or of the previous version.
        expected: WriterSet,
    },
    /// The writers declare different durabilities for the version.
    DurabilityDisagrees {
        /// The number.
        number: u64,
        /// The durability that this contribution declares.
        declared: Durability,
        /// The durability of the version.
        expected: Durability,
    },
    /// The number is not above the highest number that ever became visible.
    VersionNotNewer {
        /// The number.
        number: u64,
        /// The highest number that ever became visible. While a rewind is open, the number before the rewind.
        highest: u64,
        /// The earlier run for whose sake the number is refused, if the put is of another run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        earlier: Option<EarlierRun>,
    },
    /// A later put of the job has opened a version, so this put can no longer open one.
    StaleSequence {
        /// The sequence number of this put.
        sequence: u64,
        /// The number of the version that the later put opened.
        number: u64,
    },
    /// No number or no epoch is left above the highest one.
    NumbersExhausted,
    /// Another version already has the identity that a begin proposes.
    IdTaken {
        /// The identity.
        id: VersionId,
    },
    /// The version was dropped.
    Dropped {
        /// Its number.
        number: u64,
        /// The reason.
        reason: Reason,
    },
    /// The version was visible, and its data has been deleted.
    DataDeleted {
        /// Its number.
        number: u64,
    },
    /// No version has this identity, or the ledger no longer remembers the version.
    UnknownVersion {
        /// The identity.
        id: VersionId,
    },
    /// The writer commits a contribution that it has not begun, or that an abort has withdrawn.
    NotBegun {
        /// The version's number.
        number: u64,
        /// The writer.
        writer: u32,
    },
    /// The writer has already committed other contents to the version.
    ContributionDiffers {
        /// The version's number.
        number: u64,
        /// The writer.
        writer: u32,
        /// The digest that it has committed.
        committed: ArchiveDigest,
        /// The process that opened the version, if it is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        process: Option<RunProcess>,
    },
    /// The version from which a contribution is stored as a delta is deleted, or may be deleted or lost at any time.
    BaseDeleted {
        /// Its identity.
        base: VersionId,
    },
    /// The version is not fully committed, so it can be neither verified nor rejected.
    NotFullyCommitted {
        /// The version's number.
        number: u64,
        /// The writers that have not committed.
        missing: WriterSet,
    },
    /// The version is visible with another manifest.
    ManifestDiffers {
        /// The version's number.
        number: u64,
    },
    /// The version is visible, so it can no longer be rejected.
    AlreadyVisible {
        /// The version's number.
        number: u64,
    },
    /// The version's data must not be deleted: it is open, visible, leased or pinned.
    InUse {
        /// The version's number.
        number: u64,
    },
    /// The selector selects no visible version.
    NotFound {
        /// The selector.
        selector: Selector,
        /// The number of the newest visible version.
        newest: Option<u64>,
        /// The newest open version.
        newest_open: Option<PendingVersion>,
    },
    /// The upload of the version is pending, so its position must not change.
    UploadPending {
        /// The version's number.
        number: u64,
    },
    /// The lease has expired, so it cannot be renewed.
    LeaseExpired {
        /// The lease.
        lease: LeaseId,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f)?;
        write!(f, "; {}", self.remedy())
    }
}

impl std::error::Error for Refusal {}

impl Refusal {
    /// Writes what is wrong.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAWriter { writer, writers } => {
                write!(f, "writer {writer} is not among the declared writers {writers}")
            }
            Self::JobRequired { writers } => {
                write!(f, "writers {writers} contribute to one version without a job")
            }
            Self::SequenceRequired { writers } => {
                write!(
                    f,
                    "writers {writers} contribute to one version without a number or a sequence number"
                )
            }
            Self::Fenced { job } => write!(f, "job {job} has taken over the key"),
            Self::JobsDisagree { number, declared, expected } => {
                let (declared, expected) =
                    (describe_job(declared.as_ref()), describe_job(expected.as_ref()));
                write!(f, "version {number} takes contributions of {expected}, not of {declared}")
            }
            Self::WritersDisagree { declared, expected } => {
                write!(f, "writers {declared} are declared where {expected} are expected")
            }
            Self::DurabilityDisagrees { number, declared, expected } => {
                write!(f, "version {number} is to be kept in {expected}, not in {declared}")
            }
            Self::VersionNotNewer { number, highest, earlier } => {
                write!(f, "version {number} is not newer than {highest}")?;
                earlier.as_ref().map_or(Ok(()), |earlier| write!(f, ": {earlier}"))
            }
            Self::StaleSequence { sequence, number } => {
                write!(
                    f,
                    "sequence number {sequence} is stale: a later put of the job has opened version {number}"
                )
            }
            Self::NumbersExhausted => f.write_str("no number or no epoch is left"),
            Self::IdTaken { id } => write!(f, "another version has the identity {id}"),
            Self::Dropped { number, reason } => write!(f, "version {number} was {reason}"),
            Self::DataDeleted { number } => {
                write!(f, "version {number} was visible and its data is deleted")
            }
            Self::UnknownVersion { id } => write!(f, "no version with the identity {id} is known"),
            Self::NotBegun { number, writer } => {
                write!(f, "writer {writer} has not begun version {number}")
            }
            Self::ContributionDiffers { number, writer, committed, process } => {
                write!(f, "writer {writer} has committed {committed} to version {number} already")?;
                process.as_ref().map_or(Ok(()), |process| write!(f, ": {process} has put it"))
            }
            Self::BaseDeleted { base } => {
                write!(f, "version {base}, the base of the contribution, is deleted")
            }
            Self::NotFullyCommitted { number, missing } => {
                write!(f, "writers {missing} have not committed to version {number}")
            }
            Self::ManifestDiffers { number } => {
                write!(f, "version {number} is visible with another manifest")
            }
            Self::AlreadyVisible { number } => write!(f, "version {number} is visible"),
            Self::InUse { number } => write!(f, "version {number} is in use"),
            Self::NotFound { selector, newest, newest_open } => {
                match (selector, newest) {
                    (Selector::Label(label), _) => write!(f, "no version has the label `{label}`")?,
                    (_, Some(newest)) => {
                        write!(f, "no visible version is {selector}: the newest is {newest}")?;
                    }
                    (_, None) => f.write_str("no version is visible")?,
                }
                match newest_open {
                    Some(PendingVersion { number, missing }) if !missing.is_empty() => {
                        write!(
                            f,
                            ", and version {number} is only partially committed: it waits for \
                             writers {missing}"
                        )
                    }
                    _ => Ok(()),
                }
            }
            Self::UploadPending { number } => {
                write!(f, "version {number} is being uploaded to the bucket")
            }
            Self::LeaseExpired { lease } => write!(f, "lease {lease} has expired"),
        }
    }

    /// Returns what the caller can do.
    fn remedy(&self) -> &'static str {
        match self {
            Self::NotAWriter { .. } => "declare every rank that contributes with writers=",
            Self::JobRequired { .. } => "say job=, the same in every writer and new in every run",
            Self::SequenceRequired { .. } => "say version=, or count the puts",
            Self::Fenced { .. } => "end this job, or start it anew as a newer one",
            Self::JobsDisagree { .. } => "wait until that version has ended, or use another number",
            Self::WritersDisagree { .. } => "say the same writers= in all, also if the set changed",
            Self::DurabilityDisagrees { .. } => "say the same durability= in all",
            Self::VersionNotNewer {
                earlier: Some(EarlierRun { obstacle: Obstacle::Connected, .. }),
                ..
            } => "end that process, use a higher number or none, or rewind",
            Self::VersionNotNewer {
                earlier: Some(EarlierRun { obstacle: Obstacle::Pinned, .. }),
                ..
            } => "unpin it, use a higher number or none, or rewind",
            Self::VersionNotNewer { .. } | Self::ContributionDiffers { .. } => {
                "use a higher number or none, or rewind, which retires the newer versions"
            }
            Self::StaleSequence { .. } => "put again",
            Self::NumbersExhausted => "rewind to a lower number, or use another key",
            Self::IdTaken { .. } => "begin again with a new one",
            Self::Dropped { reason, .. } => reason.remedy(),
            Self::DataDeleted { .. } => "use a newer version",
            Self::UnknownVersion { .. } => "begin again",
            Self::NotBegun { .. } => "begin before you commit, and again after an abort",
            Self::BaseDeleted { .. } => "store the archives whole",
            Self::NotFullyCommitted { .. } => "verify it when they have",
            Self::ManifestDiffers { .. } => "discard this one: a visible version never changes",
            Self::AlreadyVisible { .. } => "it never changes: it can only be deleted",
            Self::InUse { .. } => "delete its data when that is owed",
            Self::NotFound { .. } => "wait for it, or read another",
            Self::UploadPending { .. } => "wait until it is there",
            Self::LeaseExpired { .. } => "release it and take another",
        }
    }
}

fn describe_job(job: Option<&JobId>) -> String {
    job.map_or_else(|| "no job".to_owned(), |job| format!("job {job}"))
}
