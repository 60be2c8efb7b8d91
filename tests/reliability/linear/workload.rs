//! What clients ask: mostly reads, enough puts that versions come and go all the time.

use tssd_tests::dice::Dice;

use super::history::{Answer, Call};
use super::object::Custom;

/// A client that is about to ask for a key.
pub(crate) struct Client {
    pub(crate) custom: Custom,
    pub(crate) keep: usize,
    /// The number that it has seen.
    pub(crate) seen: u64,
    /// The name of its next put.
    pub(crate) put: u32,
    pub(crate) patience: u64,
    /// Which of several writers it is, if it is one.
    pub(crate) writer: u32,
    /// What it has pinned: number and label.
    pub(crate) pinned: Option<(u64, u32)>,
}

impl Client {
    /// What it asks next.
    pub(crate) fn call(&self, dice: &mut Dice) -> Call {
        let Self { custom, keep, seen, put, patience, writer, pinned } = *self;
        match (dice.below(100), custom) {
            (0..12, Custom::Alone | Custom::Pinned | Custom::Rewound) => Call::Put(put),
            // A number says less than a place there.
            (_, Custom::Rewound) => Call::Newest,
            (0..12 | 44..80, Custom::Together(of)) if writer < of => {
                Call::Part { number: seen + 1, writer, of }
            }
            // One that was, one that will be.
            (12..34, _) => Call::Numbered((seen + 1).saturating_sub(dice.below(keep as u64 + 3))),
            (34..38, _) => Call::Wait(seen + dice.below(3), patience),
            // Only what was seen: nobody knows how a number is taken that is open at the moment.
            (38..44, Custom::Alone) if keep == 1 && seen > 0 => Call::Delete(seen),
            (38..56, Custom::Pinned) if seen > 0 => match pinned {
                None => Call::Pin(seen, put),
                Some((_, label)) if dice.hits(3) => Call::Unpin(label),
                Some((number, _)) => Call::Numbered(number),
            },
            _ => Call::Newest,
        }
    }

    /// What it has pinned after a call, or may have: that it takes away too.
    pub(crate) fn pinned_after(&self, call: Call, answer: Option<Answer>) -> Option<(u64, u32)> {
        match call {
            Call::Pin(number, label) if answer != Some(Answer::Nothing) => Some((number, label)),
            Call::Unpin(_) if answer.is_some() => None,
            _ => self.pinned,
        }
    }
}
