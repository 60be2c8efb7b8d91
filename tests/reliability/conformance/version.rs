//! One version of the model: who writes it, what has arrived, how far it has come.

use std::collections::BTreeMap;

use super::words::{Dict, End, Fault, Id, Job, Part, Writers};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    Open,
    Visible(Dict),
    Retired,
    Dropped(End),
}

#[derive(Clone, Debug)]
pub(crate) struct Version {
    pub(crate) id: Id,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// The number that the key goes back to when this becomes visible.
    pub(crate) rewinds: Option<u64>,
    pub(crate) job: Option<Job>,
    pub(crate) call: Option<u64>,
    pub(crate) writers: Writers,
    pub(crate) durable: bool,
    /// By writer; none from whoever has begun and not committed.
    pub(crate) parts: BTreeMap<u32, Option<Part>>,
    pub(crate) stage: Stage,
    /// How many hold it, though it may be retired.
    pub(crate) readers: usize,
    /// Whether its bytes are still to be deleted: its place is taken until then.
    pub(crate) owed: bool,
}

impl Version {
    pub(crate) fn missing(&self) -> Writers {
        let is_missing = |writer: &&u32| self.parts.get(writer).is_none_or(Option::is_none);
        self.writers.iter().filter(is_missing).copied().collect()
    }

    pub(crate) fn end(&mut self, end: End) {
        if self.stage == Stage::Open {
            self.stage = Stage::Dropped(end);
        }
    }

    pub(crate) fn retire(&mut self) {
        if matches!(self.stage, Stage::Visible(_)) {
            self.stage = Stage::Retired;
        }
    }
}

/// What is said of a version whose bytes are gone.
pub(crate) fn gone(version: &Version) -> Fault {
    match &version.stage {
        Stage::Dropped(End::Fenced) => Fault::Fenced,
        Stage::Dropped(end) => Fault::Dropped(end.clone()),
        _ => Fault::Gone,
    }
}
