//! What can be asked of the ledger, what it answers, and what it owes.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::durability::Durability;
use super::identity::{Digest, JobId, LeaseId, SessionId, Timestamp, VersionId};
use super::selector::{Selection, Selector};
use super::version::{ArchiveReference, ManifestReference};
use super::writers::WriterSet;

/// What can be asked of the ledger of one key.
///
/// Every command may be repeated at once: the second time it changes nothing, and either succeeds
/// again or is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Command {
    /// A writer starts to contribute.
    Begin(Begin),
    /// A writer's archive is complete.
    Commit(Commit),
    /// A writer's put failed on its way: its contribution is withdrawn unless it is committed.
    ///
    /// A version with an implicit number is dropped with it, because the writer's next put is
    /// another call: no one will ever complete this one, and the other writers learn it at once. A
    /// version with a number of the caller's stays open for a second try while another writer
    /// contributes to it.
    Abort {
        /// The version.
        id: VersionId,
        /// The writer whose put failed.
        writer: u32,
    },
    /// A process has ended: what it had begun and not committed is withdrawn, as by [`Command::Abort`], its leases are
    /// released, and what it alone has kept of a version is lost, and with that the version.
    SessionEnded {
        /// The process.
        session: SessionId,
        /// What would be lost with it of which versions, if somebody knows: tensors and slices.
        #[serde(default)]
        slices: BTreeMap<VersionId, String>,
    },
    /// A process keeps what these writers have committed, besides those that did before.
    Keep {
        /// The version.
        id: VersionId,
        /// The writers.
        writers: WriterSet,
        /// The process.
        session: SessionId,
    },
    /// A process wants to keep what a writer has committed no longer. It has to if nobody else does: then nothing
    /// changes.
    LetGo {
        /// The version.
        id: VersionId,
        /// The writer.
        writer: u32,
        /// The process.
        session: SessionId,
    },
    /// All of a version is in the bucket that was asked for: it outlives the processes that keep it.
    Stored {
        /// The version.
        id: VersionId,
    },
    /// A version will not be in the bucket that was asked for: it is kept as one that is in memory.
    NotStored {
        /// The version.
        id: VersionId,
    },
    /// The proof of a fully committed version succeeded: it becomes visible.
    Proved {
        /// The version.
        id: VersionId,
        /// Its manifest.
        manifest: ManifestReference,
        /// The moment.
        now: Timestamp,
    },
    /// The proof of a fully committed version failed: it is dropped.
    Rejected {
        /// The version.
        id: VersionId,
        /// What is wrong and where: fqn, region, writers. Longer texts than
        /// [`MAX_REASON_BYTES`](super::MAX_REASON_BYTES) are cut.
        reason: String,
    },
    /// Nobody will ever complete a version that is open: it is dropped at once.
    Abandon {
        /// The version.
        id: VersionId,
    },
    /// Time has passed: open versions that are too old are abandoned, versions and leases past
    /// their time to live end. Carry out what is [`pending`](super::pending) first: a version whose
    /// proof nobody made in time is abandoned too.
    Expire {
        /// The moment.
        now: Timestamp,
    },
    /// A reader takes a visible version, or renews a lease that has not expired.
    Lease {
        /// Which version.
        selector: Selector,
        /// The lease; the same one again is the same version again.
        lease: LeaseId,
        /// Who reads, as [`Command::HolderGone`] will name it.
        holder: String,
        /// For how long new reads may start.
        ttl: Duration,
        /// The moment.
        now: Timestamp,
    },
    /// A reader has dropped its last view.
    Release {
        /// The lease.
        lease: LeaseId,
    },
    /// A reader is proven gone, and its views with it: its leases are released.
    HolderGone {
        /// Who read.
        holder: String,
    },
    /// A label holds a version: retention passes over it. A label that exists moves.
    Pin {
        /// Which version.
        selector: Selector,
        /// The label.
        label: String,
    },
    /// A label holds its version no longer.
    Unpin {
        /// The label.
        label: String,
    },
    /// Which versions are kept from now on.
    Retain {
        /// How many of the newest.
        keep: NonZeroU32,
        /// For how long after they became visible; forever if none is given.
        ttl: Option<Duration>,
    },
    /// Versions are retired, or dropped if they are open. Leases and pins still hold their data.
    Delete {
        /// Which versions.
        selection: Selection,
    },
    /// The data of a version is deleted: the answer to [`Effect::Delete`].
    Reclaimed {
        /// The version.
        id: VersionId,
    },
}

/// A writer starts to contribute to a version, which opens if it is the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// Who contributes.
    pub writer: u32,
    /// Everyone who will.
    pub writers: WriterSet,
    /// Whether the writers were derived from the state dict, not said by the caller.
    pub writers_defaulted: bool,
    /// The job; one writer alone needs none.
    pub job: Option<JobId>,
    /// The how-manieth put of this job, to this key, by this writer it is, failures counted. It
    /// matches the contributions to a version with an implicit number.
    pub call: Option<u64>,
    /// The number, or none: highest + 1.
    pub number: Option<u64>,
    /// Whether a number that is not above the highest opens a new epoch.
    pub rewind: bool,
    /// Whether the version is to outlive the process that holds it.
    #[serde(default)]
    pub durability: Durability,
    /// What the contribution will contain, if that is known already.
    pub digest: Option<Digest>,
    /// The writer's process, if others can tell whether it has ended.
    #[serde(default)]
    pub session: Option<SessionId>,
    /// The identity of the version if this command opens it: random.
    pub id: VersionId,
    /// The epoch of the version, if it is a copy of one that has its place elsewhere; its number is said too.
    #[serde(default)]
    pub epoch: Option<u32>,
    /// The moment.
    pub now: Timestamp,
}

/// A writer's archives are complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The version.
    pub id: VersionId,
    /// Whose archives they are.
    pub writer: u32,
    /// The writer's job.
    pub job: Option<JobId>,
    /// What they contain.
    pub digest: Digest,
    /// Where they are, in their order: usually there is one.
    pub archives: Vec<ArchiveReference>,
    /// The process that keeps them, if they end with it.
    #[serde(default)]
    pub keeper: Option<SessionId>,
    /// The moment.
    pub now: Timestamp,
}

/// What the ledger answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The writer has committed to that version before. A caller that has the same contents is
    /// done: a commit of that digest succeeds, and another one is refused.
    Retry {
        /// The version's identity.
        id: VersionId,
        /// The version's epoch.
        epoch: u32,
        /// The version's number.
        number: u64,
        /// What the writer committed.
        digest: Digest,
    },
    /// Nothing opened: begin again when one of these versions has become visible or is gone. (If
    /// the command came from a newer job, older ones are fenced all the same.)
    Wait {
        /// The open versions, or those whose data is still to be deleted.
        on: Vec<VersionId>,
    },
    /// The contribution is committed.
    Committed {
        /// Whether the version is or was visible.
        visible: bool,
        /// The writers that have not committed; none if only the proof is owed.
        missing: WriterSet,
    },
    /// The lease is held.
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
    /// The label holds that version.
    Pinned {
        /// The version's identity.
        id: VersionId,
        /// The version's number.
        number: u64,
    },
    /// Those versions are retired or dropped; none if there were none, or none was left.
    Deleted {
        /// The versions.
        ids: Vec<VersionId>,
    },
    /// It is so, whether by this command or by an earlier one.
    Done,
}

/// What somebody has to do outside the ledger. It stays owed until the command that reports it: see
/// [`pending`](super::pending).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Effect {
    /// Prove that the contributions fit together; then [`Command::Proved`] or
    /// [`Command::Rejected`].
    Prove {
        /// The version.
        id: VersionId,
    },
    /// Delete the data of a version that nobody can reach; then [`Command::Reclaimed`].
    ///
    /// Two processes may do it at the same time, and once one has reported it another version may
    /// take the number: delete what carries the identity.
    Delete {
        /// The version's identity.
        id: VersionId,
        /// The version's epoch.
        epoch: u32,
        /// The version's number.
        number: u64,
    },
}
