//! One version in the model: its writers, their contributions, its stage.

use std::collections::BTreeMap;

use crate::conformance::merge::merge;
use crate::conformance::types::{Contribution, Dict, Id, ModelError, PutRequest, Writers};

/// Position of a version: epoch and number.
pub(crate) type Position = (u32, u64);

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    Open,
    Visible,
    /// The version has ended. Requests for it fail with this error.
    Ended(ModelError),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Version {
    pub(crate) id: Id,
    pub(crate) position: Position,
    /// The number that the key rewinds to when this version becomes visible.
    pub(crate) rewind_to: Option<u64>,
    /// The request that opened the version.
    pub(crate) request: PutRequest,
    /// Contributions by writer. `None` if the writer has begun and not committed.
    pub(crate) contributions: BTreeMap<u32, Option<Contribution>>,
    pub(crate) stage: Stage,
}

impl Version {
    pub(crate) fn number(&self) -> u64 {
        self.position.1
    }

    pub(crate) fn missing(&self) -> Writers {
        let is_missing = |writer: &&u32| self.contributions.get(writer).is_none_or(Option::is_none);
        self.request.writers.iter().filter(is_missing).copied().collect()
    }

    /// Returns the state dict that readers of this version receive.
    pub(crate) fn dict(&self) -> Dict {
        merge(&self.contributions).expect("it is visible")
    }
}
