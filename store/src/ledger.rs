//! The ledger of one key: which versions there are and what may happen to them, as a pure function.
//!
//! [`step`] takes the state and a command and gives the next state, an outcome and the effects that
//! are owed from now on. There is no clock, no randomness and no I/O: moments and identities come
//! with the commands. So the same ledger runs in the memory of one process, and over a directory
//! that several share, where each state is stored create-if-absent as the record after the one that
//! it was computed from.
//!
//! A process may die between any two steps, and between a step and its effects. So effects are a
//! function of the state alone: whoever comes next finds them with [`pending`], and may carry out
//! again what another has carried out already.
//!
//! The size of a state is bounded: at most [`MAX_OPEN`] open versions, those that retention, leases
//! and pins keep, and memories of a fixed length. While [`MAX_DELETIONS`] deletions are owed nothing
//! opens. Leases and pins are as many as their holders take.

mod begin;
mod command;
mod commit;
mod durability;
mod identity;
mod place;
mod reading;
mod refusal;
mod retention;
mod selector;
mod state;
#[cfg(test)]
mod tests;
mod version;
mod writers;

pub use command::{Begin, Command, Commit, Effect, Outcome};
pub use durability::Durability;
pub use identity::{Digest, InvalidHexadecimal, JobId, LeaseId, SessionId, Timestamp, VersionId};
pub use refusal::{Reason, Refusal};
pub use selector::{Selection, Selector};
pub use state::{Lease, State};
pub use version::{ArchiveReference, Contribution, Fate, ManifestReference, Status, Version};
pub use writers::{InvalidWriterSet, WriterSet};

use std::time::Duration;

/// How many versions of a key are open at most: a put that would open another one waits.
pub const MAX_OPEN: usize = 2;

/// How long a version may stay open, and again how long its proof may take.
pub const OPEN_LIMIT: Duration = Duration::from_mins(10);

/// How many deletions are owed at most when a version opens.
pub const MAX_DELETIONS: usize = 64;

/// How many versions whose data is gone are remembered: a writer or waiter that asks about an older
/// one is told that it is unknown.
pub const MAX_ENDED: usize = 64;

/// How many fenced jobs are remembered: an older one would count as new.
pub const MAX_FENCED: usize = 1024;

/// How much of the reason of a rejection is kept.
pub const MAX_REASON_BYTES: usize = 1024;

/// What a command leads to.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The next state.
    pub state: State,
    /// The answer to whoever gave the command.
    pub outcome: Outcome,
    /// What is owed in the next state and was not in the one before.
    pub effects: Vec<Effect>,
}

/// Applies one command to the state of one key.
///
/// # Errors
///
/// The [`Refusal`] that says why the command changes nothing.
pub fn step(state: &State, command: Command) -> Result<Step, Refusal> {
    let mut next = state.clone();
    let outcome = next.apply(command)?;
    let owed = pending(state);
    let effects = pending(&next).into_iter().filter(|effect| !owed.contains(effect)).collect();
    Ok(Step { state: next, outcome, effects })
}

/// All effects that a state owes, whether or not somebody is carrying them out.
pub fn pending(state: &State) -> Vec<Effect> {
    state.versions().filter_map(|version| state.owed(version)).collect()
}

impl State {
    fn apply(&mut self, command: Command) -> Result<Outcome, Refusal> {
        match command {
            Command::Begin(begin) => self.begin(begin),
            Command::Commit(commit) => self.commit(commit),
            Command::Abort { id, writer } => Ok(self.abort(id, writer)),
            Command::SessionEnded { session, slices } => Ok(self.session_ended(session, slices)),
            Command::Keep { id, writers, session } => Ok(self.keep(id, &writers, session)),
            Command::LetGo { id, writer, session } => Ok(self.let_go(id, writer, session)),
            Command::Stored { id } => self.stored(id),
            Command::NotStored { id } => Ok(self.not_stored(id)),
            Command::Proved { id, manifest, now } => self.proved(id, manifest, now),
            Command::Rejected { id, reason } => self.rejected(id, reason),
            Command::Abandon { id } => Ok(self.abandon(id)),
            Command::Expire { now } => Ok(self.expire(now)),
            Command::Lease { selector, lease, holder, ttl, now } => {
                self.lease_version(selector, lease, holder, now.after(ttl))
            }
            Command::Release { lease } => Ok(self.release(lease)),
            Command::HolderGone { holder } => Ok(self.holder_gone(&holder)),
            Command::Pin { selector, label } => self.pin(selector, label),
            Command::Unpin { label } => Ok(self.unpin(&label)),
            Command::Retain { keep, ttl } => Ok(self.retain(keep, ttl)),
            Command::Delete { selection } => Ok(self.delete(selection)),
            Command::Reclaimed { id } => self.reclaimed(id),
        }
    }
}
