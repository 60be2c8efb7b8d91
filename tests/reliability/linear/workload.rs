//! The calls of clients: mostly reads, and enough puts that versions change all the time.

use tssd_tests::dice::Dice;

use super::history::{Answer, Call};
use super::object::Custom;

/// State of a client before its next call of a key.
pub(crate) struct Client {
    pub(crate) custom: Custom,
    pub(crate) keep: usize,
    /// Highest number that the client has observed.
    pub(crate) seen: u64,
    /// Name of its next put.
    pub(crate) put: u32,
    pub(crate) patience: u64,
    /// Its rank in versions of several writers, if it is one of the writers.
    pub(crate) writer: u32,
    /// The version that it has pinned: number and label.
    pub(crate) pinned: Option<(u64, u32)>,
}

impl Client {
    /// Returns the next call.
    pub(crate) fn call(&self, rng: &mut Dice) -> Call {
        let Self { custom, keep, seen, put, patience, writer, pinned } = *self;
        match (rng.below(100), custom) {
            (0..12, Custom::Alone | Custom::Pinned | Custom::Rewound) => Call::Put(put),
            // A number does not identify a version of a rewound key.
            (_, Custom::Rewound) => Call::Newest,
            (0..12 | 44..80, Custom::Together(of)) if writer < of => {
                Call::Part { number: seen + 1, writer, of }
            }
            // A version that existed, or one that will.
            (12..34, _) => Call::Numbered((seen + 1).saturating_sub(rng.below(keep as u64 + 3))),
            (34..38, _) => Call::Wait(seen + rng.below(3), patience),
            // Only observed numbers: the response to a delete of an open version is not defined
            // here.
            (38..44, Custom::Alone) if keep == 1 && seen > 0 => Call::Delete(seen),
            (38..56, Custom::Pinned) if seen > 0 => match pinned {
                None => Call::Pin(seen, put),
                Some((_, label)) if rng.hits(3) => Call::Unpin(label),
                Some((number, _)) => Call::Numbered(number),
            },
            _ => Call::Newest,
        }
    }

    /// Returns the pinned version after a call. If the outcome is unknown, it counts as pinned.
    pub(crate) fn pinned_after(&self, call: Call, answer: Option<Answer>) -> Option<(u64, u32)> {
        match call {
            Call::Pin(number, label) if answer != Some(Answer::Nothing) => Some((number, label)),
            Call::Unpin(_) if answer.is_some() => None,
            _ => self.pinned,
        }
    }
}
