//! One version of the model: who writes it, what has arrived, how far it has come.

use std::collections::BTreeMap;

use super::fit::merged;
use super::words::{Ask, Dict, Fault, Id, Part, Writers};

/// An epoch and a number.
pub(crate) type Place = (u32, u64);

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    Open,
    Visible,
    /// Whoever asks for it is told this.
    Ended(Fault),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Version {
    pub(crate) id: Id,
    pub(crate) place: Place,
    /// The number that the key goes back to when this becomes visible.
    pub(crate) rewinds: Option<u64>,
    /// What the writer has said that began it.
    pub(crate) ask: Ask,
    /// By writer; none from whoever has begun and not committed.
    pub(crate) parts: BTreeMap<u32, Option<Part>>,
    pub(crate) stage: Stage,
}

impl Version {
    pub(crate) fn number(&self) -> u64 {
        self.place.1
    }

    pub(crate) fn missing(&self) -> Writers {
        let is_missing = |writer: &&u32| self.parts.get(writer).is_none_or(Option::is_none);
        self.ask.writers.iter().filter(is_missing).copied().collect()
    }

    /// What its readers get.
    pub(crate) fn dict(&self) -> Dict {
        merged(&self.parts).expect("it is visible")
    }
}
