//! Why a version was dropped, and why a command is refused.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::durability::Durability;
use super::identity::{Digest, JobId, LeaseId, VersionId};
use super::selector::Selector;
use super::writers::WriterSet;

/// Why a version never became visible, or is so no longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// A newer one became visible first.
    Superseded {
        /// The number of the newer one.
        by: u64,
    },
    /// It was open too long.
    Abandoned {
        /// The writers that did not commit; none if the proof did not come.
        missing: WriterSet,
    },
    /// Its contributions do not fit together.
    Rejected {
        /// What is wrong and where.
        reason: String,
    },
    /// A newer job contributed to the key.
    Fenced {
        /// The newer job.
        by: JobId,
    },
    /// A put failed on its way and nobody could have completed the version.
    Aborted {
        /// The writer whose put failed.
        writer: u32,
    },
    /// It was deleted while it was open.
    Deleted,
    /// The hosts that kept some of its archives have ended. It may have been visible.
    Lost {
        /// The writers whose archives they were.
        writers: WriterSet,
        /// The tensors and slices that were in them, as far as somebody knew; longer texts than
        /// [`MAX_REASON_BYTES`](super::MAX_REASON_BYTES) are cut.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        slices: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superseded { by } => write!(f, "superseded: version {by} became visible first"),
            Self::Abandoned { missing } if missing.is_empty() => {
                f.write_str("abandoned: nobody proved it in time")
            }
            Self::Abandoned { missing } => {
                write!(f, "abandoned: writers {missing} did not commit in time")
            }
            Self::Rejected { reason } => write!(f, "rejected: {reason}"),
            Self::Fenced { by } => write!(f, "fenced: job {by} has taken over the key"),
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

/// Why a command is refused. A refused command has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refusal {
    /// A writer that is not declared wants to contribute.
    NotAWriter {
        /// The writer.
        writer: u32,
        /// The declared writers.
        writers: WriterSet,
    },
    /// Several writers, and no job to tell their contributions from those of an earlier run.
    JobRequired {
        /// The declared writers.
        writers: WriterSet,
    },
    /// Several writers, and neither a number nor a call to match their contributions by.
    CallRequired {
        /// The declared writers.
        writers: WriterSet,
    },
    /// A newer job has taken over the key.
    Fenced {
        /// The newest job.
        by: JobId,
    },
    /// The number is open for another job, or for none.
    JobsDisagree {
        /// The number.
        number: u64,
        /// The job of this contribution.
        declared: Option<JobId>,
        /// The job of the version.
        expected: Option<JobId>,
    },
    /// The writers are not those of the version, or a defaulted set is not that of the same job's
    /// previous version.
    WritersDisagree {
        /// The writers that this contribution declares.
        declared: WriterSet,
        /// The writers that the version or the previous version has.
        expected: WriterSet,
    },
    /// The writers do not want the version equally durable.
    DurabilityDisagrees {
        /// The number.
        number: u64,
        /// What this contribution declares.
        declared: Durability,
        /// What the version has.
        expected: Durability,
    },
    /// The number is not above the highest that ever became visible.
    VersionNotNewer {
        /// The number.
        number: u64,
        /// The highest that ever became visible; while a rewind is open, what it rewinds to.
        highest: u64,
    },
    /// A later call of the job has opened its version; this one can no longer open.
    LateCall {
        /// The call.
        call: u64,
        /// The number of the version that the last call opened.
        number: u64,
    },
    /// There is no number or no epoch left above the highest.
    NumbersExhausted,
    /// The identity that a begin proposes is that of another version.
    IdTaken {
        /// The identity.
        id: VersionId,
    },
    /// The version was dropped.
    Dropped {
        /// Its number.
        number: u64,
        /// Why.
        reason: Reason,
    },
    /// The version was visible, and its data has been deleted since.
    Gone {
        /// Its number.
        number: u64,
    },
    /// No version has that identity, or the ledger has forgotten it.
    Unknown {
        /// The identity.
        id: VersionId,
    },
    /// The writer commits what it has not begun, or what was withdrawn by an abort.
    NotBegun {
        /// The version's number.
        number: u64,
        /// The writer.
        writer: u32,
    },
    /// The writer has committed other contents to the version.
    ContributionDiffers {
        /// The version's number.
        number: u64,
        /// The writer.
        writer: u32,
        /// What it has committed.
        committed: Digest,
    },
    /// The version is not fully committed, so it cannot be proved or rejected.
    NotProving {
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
    /// No visible version is meant by the selector.
    NotFound {
        /// The selector.
        selector: Selector,
        /// The number of the newest visible version.
        newest: Option<u64>,
        /// The number of the newest open version, and the writers that it waits for.
        coming: Option<(u64, WriterSet)>,
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
    /// What is wrong.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAWriter { writer, writers } => {
                write!(f, "writer {writer} is not among the declared writers {writers}")
            }
            Self::JobRequired { writers } => {
                write!(f, "writers {writers} contribute to one version without a job")
            }
            Self::CallRequired { writers } => {
                write!(f, "writers {writers} contribute to one version without a number or call")
            }
            Self::Fenced { by } => write!(f, "job {by} has taken over the key"),
            Self::JobsDisagree { number, declared, expected } => {
                let (declared, expected) = (named(declared.as_ref()), named(expected.as_ref()));
                write!(f, "version {number} takes contributions of {expected}, not of {declared}")
            }
            Self::WritersDisagree { declared, expected } => {
                write!(f, "writers {declared} are declared where {expected} are expected")
            }
            Self::DurabilityDisagrees { number, declared, expected } => {
                write!(f, "version {number} is to be kept in {expected}, not in {declared}")
            }
            Self::VersionNotNewer { number, highest } => {
                write!(f, "version {number} is not newer than {highest}")
            }
            Self::LateCall { call, number } => {
                write!(f, "call {call} is late: a later call has opened version {number}")
            }
            Self::NumbersExhausted => f.write_str("no number or no epoch is left"),
            Self::IdTaken { id } => write!(f, "another version has the identity {id}"),
            Self::Dropped { number, reason } => write!(f, "version {number} was {reason}"),
            Self::Gone { number } => {
                write!(f, "version {number} was visible and its data is deleted")
            }
            Self::Unknown { id } => write!(f, "no version with the identity {id} is known"),
            Self::NotBegun { number, writer } => {
                write!(f, "writer {writer} has not begun version {number}")
            }
            Self::ContributionDiffers { number, writer, committed } => {
                write!(f, "writer {writer} has committed {committed} to version {number} already")
            }
            Self::NotProving { number, missing } => {
                write!(f, "writers {missing} have not committed to version {number}")
            }
            Self::ManifestDiffers { number } => {
                write!(f, "version {number} is visible with another manifest")
            }
            Self::AlreadyVisible { number } => write!(f, "version {number} is visible"),
            Self::InUse { number } => write!(f, "version {number} is in use"),
            Self::NotFound { selector, newest, coming } => {
                match newest {
                    Some(newest) => {
                        write!(f, "no visible version is {selector}: the newest is {newest}")?;
                    }
                    None => f.write_str("no version is visible")?,
                }
                match coming {
                    Some((number, missing)) if !missing.is_empty() => {
                        write!(f, ", and version {number} waits for writers {missing}")
                    }
                    _ => Ok(()),
                }
            }
            Self::LeaseExpired { lease } => write!(f, "lease {lease} has expired"),
        }
    }

    /// What to do about it.
    fn remedy(&self) -> &'static str {
        match self {
            Self::NotAWriter { .. } => "declare every rank that contributes with writers=",
            Self::JobRequired { .. } => "say job=, the same in every writer and new in every run",
            Self::CallRequired { .. } => "say version=, or count the puts",
            Self::Fenced { .. } => "end this job, or start it anew as a newer one",
            Self::JobsDisagree { .. } => "wait until that version has ended, or use another number",
            Self::WritersDisagree { .. } => "say the same writers= in all, also if the set changed",
            Self::DurabilityDisagrees { .. } => "say the same durability= in all",
            Self::VersionNotNewer { .. } | Self::ContributionDiffers { .. } => {
                "use a higher number, or rewind"
            }
            Self::LateCall { .. } => "put again",
            Self::NumbersExhausted => "rewind to a lower number, or use another key",
            Self::IdTaken { .. } => "begin again with a new one",
            Self::Dropped { reason, .. } => reason.remedy(),
            Self::Gone { .. } => "use a newer version",
            Self::Unknown { .. } => "begin again",
            Self::NotBegun { .. } => "begin before you commit, and again after an abort",
            Self::NotProving { .. } => "prove it when they have",
            Self::ManifestDiffers { .. } => "discard this one: a visible version never changes",
            Self::AlreadyVisible { .. } => "it never changes: it can only be deleted",
            Self::InUse { .. } => "delete its data when that is owed",
            Self::NotFound { .. } => "wait for it, or read another",
            Self::LeaseExpired { .. } => "release it and take another",
        }
    }
}

fn named(job: Option<&JobId>) -> String {
    job.map_or_else(|| "no job".to_owned(), |job| format!("job {job}"))
}
