//! The ledger of one key: its versions and their state transitions, as a pure function.
//!
//! [`step`] takes a state and a command. It returns the next state, an outcome and the effects that became pending.
//! It uses no clock, no randomness and no I/O: timestamps and identities are part of the commands. So the same ledger
//! runs in the memory of one process, and over a directory that several processes share. In a directory, each state
//! is one record. The next state is created under the next record number, and only if that number is free.
//!
//! A process may die between two steps, and between a step and its effects. Effects are therefore a function of the
//! state alone. Any process finds them with [`pending`], and may run an effect that another process has already run.
//!
//! The size of a state is bounded: at most [`MAX_OPEN`] open versions, the versions that retention, leases and pins
//! keep, and lists of a maximum length. While [`MAX_PENDING_DELETIONS`] deletions are pending, no version opens. The number of
//! leases and pins is not limited.

mod begin;
mod command;
mod commit;
mod durability;
mod identity;
mod leases;
mod numbering;
mod refusal;
mod retention;
mod rollback;
mod runs;
mod selector;
mod state;
#[cfg(test)]
mod tests;
mod version;
mod writers;

pub use command::{Begin, Command, Commit, Effect, Outcome};
pub use durability::Durability;
pub use identity::{
    ArchiveDigest, InvalidHexadecimal, JobId, LeaseId, RunId, RunProcess, RunStatus, SessionId,
    Timestamp, VersionId,
};
pub use refusal::{EarlierRun, Obstacle, PendingVersion, Reason, Refusal};
pub use selector::{InvalidLabel, Label, MAX_LABEL_BYTES, Selection, Selector};
pub use state::{Lease, State};
pub use version::{
    ArchiveReference, Contribution, ManifestReference, Status, Version, VersionOutcome,
    VersionPosition,
};
pub use writers::{InvalidWriterSet, WriterSet};

use std::time::Duration;

/// Maximum number of open versions of a key. A put that would open another one waits.
pub const MAX_OPEN: usize = 2;

/// Maximum time that a version waits for its writers, and again for its verification (10 minutes each).
pub const OPEN_TIMEOUT: Duration = Duration::from_mins(10);

/// Maximum number of pending deletions. At this number, no version opens.
pub const MAX_PENDING_DELETIONS: usize = 64;

/// Maximum number of tombstones: deleted versions that the ledger still knows.
///
/// A command that names an older deleted version is refused with [`Refusal::UnknownVersion`].
pub const MAX_TOMBSTONES: usize = 64;

/// Maximum number of fenced jobs that the ledger remembers. A job fenced earlier counts as new.
pub const MAX_FENCED_JOBS: usize = 1024;

/// Maximum length of a stored reason, in bytes. Longer reasons are truncated.
pub const MAX_REASON_BYTES: usize = 1024;

/// The result of a command.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The next state.
    pub state: State,
    /// The answer to the caller.
    pub outcome: Outcome,
    /// The effects that are pending in the next state and were not pending before.
    pub effects: Vec<Effect>,
}

/// Applies one command to the state of one key.
///
/// # Errors
///
/// Returns a [`Refusal`] if the ledger does not allow the command. The state does not change then.
pub fn step(state: &State, command: Command) -> Result<Step, Refusal> {
    let mut next = state.clone();
    let outcome = next.apply(command)?;
    let before = pending(state);
    let effects = pending(&next).into_iter().filter(|effect| !before.contains(effect)).collect();
    Ok(Step { state: next, outcome, effects })
}

/// Returns all pending effects of a state, including those that a process is running.
pub fn pending(state: &State) -> Vec<Effect> {
    state.pending_effects()
}

impl State {
    fn apply(&mut self, command: Command) -> Result<Outcome, Refusal> {
        match command {
            Command::Begin(begin) => self.begin(begin),
            Command::Commit(commit) => self.commit(commit),
            Command::Abort { id, writer } => Ok(self.abort(id, writer)),
            Command::SessionEnded { session, slices } => Ok(self.session_ended(session, slices)),
            Command::PublishReplicas { id, writers, session } => {
                Ok(self.publish_replicas(id, &writers, session))
            }
            Command::ReleaseReplica { id, writer, session } => {
                Ok(self.release_replica(id, writer, session))
            }
            Command::Uploaded { id } => self.uploaded(id),
            Command::NotUploaded { id } => Ok(self.not_uploaded(id)),
            Command::Verified { id, manifest, now } => self.verified(id, manifest, now),
            Command::Rejected { id, reason } => self.rejected(id, reason),
            Command::Abandon { id } => Ok(self.abandon(id)),
            Command::Expire { now } => Ok(self.expire(now)),
            Command::Lease { selector, lease, holder, ttl, now } => {
                self.lease_version(&selector, lease, holder, now.saturating_add(ttl))
            }
            Command::Release { lease } => Ok(self.release(lease)),
            Command::Pin { selector, label } => self.pin(&selector, label),
            Command::Unpin { label } => Ok(self.unpin(&label)),
            Command::Rollback { selector, position, now } => {
                self.roll_back(&selector, position, now)
            }
            Command::Retain { keep, ttl } => Ok(self.retain(keep, ttl)),
            Command::Delete { selection } => Ok(self.delete(&selection)),
            Command::Reclaimed { id } => self.reclaimed(id),
        }
    }
}
