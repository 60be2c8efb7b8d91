//! One version in the model: its writers, their contributions, its stage.

use std::collections::BTreeMap;

use super::fit::merged;
use super::words::{Ask, Dict, Fault, Id, Part, Writers};

/// Position of a version: epoch and number.
pub(crate) type Place = (u32, u64);

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    Open,
    Visible,
    /// The version has ended. Requests for it fail with this error.
    Ended(Fault),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Version {
    pub(crate) id: Id,
    pub(crate) place: Place,
    /// The number that the key rewinds to when this version becomes visible.
    pub(crate) rewinds: Option<u64>,
    /// The request that opened the version.
    pub(crate) ask: Ask,
    /// Contributions by writer. `None` if the writer has begun and not committed.
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

    /// Returns the state dict that readers of this version receive.
    pub(crate) fn dict(&self) -> Dict {
        merged(&self.parts).expect("it is visible")
    }
}
