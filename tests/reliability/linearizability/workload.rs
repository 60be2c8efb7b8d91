//! The calls of clients: mostly reads, and enough puts that versions change all the time.

use tssd_tests::rng::SeededRng;

use super::history::{Call, Response};
use crate::linearizability::keys::KeyUsage;

/// State of a client before its next call of a key.
pub(crate) struct ClientState {
    pub(crate) usage: KeyUsage,
    pub(crate) keep: usize,
    /// Highest number that the client has observed.
    pub(crate) observed: u64,
    /// Name of its next put.
    pub(crate) put: u32,
    pub(crate) wait_timeout: u64,
    /// Its rank in versions of several writers, if it is one of the writers.
    pub(crate) writer: u32,
    /// The version that it has pinned: number and label.
    pub(crate) pinned: Option<(u64, u32)>,
}

impl ClientState {
    /// Returns the next call.
    pub(crate) fn next_call(&self, rng: &mut SeededRng) -> Call {
        let Self { usage, keep, observed, put, wait_timeout, writer, pinned } = *self;
        match (rng.below(100), usage) {
            (0..12, KeyUsage::Plain | KeyUsage::Pinned | KeyUsage::Rewound) => Call::Put(put),
            // A number does not identify a version of a rewound key.
            (_, KeyUsage::Rewound) => Call::GetNewest,
            (0..12 | 44..80, KeyUsage::MultiWriter(of)) if writer < of => {
                Call::Part { number: observed + 1, writer, writers: of }
            }
            // A version that existed, or one that will.
            (12..34, _) => {
                Call::GetVersion((observed + 1).saturating_sub(rng.below(keep as u64 + 3)))
            }
            (34..38, _) => Call::Wait(observed + rng.below(3), wait_timeout),
            // Only observed numbers: the response to a delete of an open version is not defined
            // here.
            (38..44, KeyUsage::Plain) if keep == 1 && observed > 0 => Call::Delete(observed),
            (38..56, KeyUsage::Pinned) if observed > 0 => match pinned {
                None => Call::Pin(observed, put),
                Some((_, label)) if rng.one_in(3) => Call::Unpin(label),
                Some((number, _)) => Call::GetVersion(number),
            },
            _ => Call::GetNewest,
        }
    }

    /// Returns the pinned version after a call. If the outcome is unknown, it counts as pinned.
    pub(crate) fn pinned_after(&self, call: Call, answer: Option<Response>) -> Option<(u64, u32)> {
        match call {
            Call::Pin(number, label) if answer != Some(Response::NotFound) => Some((number, label)),
            Call::Unpin(_) if answer.is_some() => None,
            _ => self.pinned,
        }
    }
}
