//! A simple sequential store, with bugs that can be enabled.

use std::collections::{BTreeMap, BTreeSet};

use tssd_format::StateDict;
use tssd_tests::rng::SeededRng;

use super::contents::{dict, identify_put, part};
use super::history::{Call, Response, shared_put_id};

/// Bugs of the store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bug {
    /// Some reads return the version before the newest.
    StaleRead,
    /// A put is acknowledged and lost.
    LostUpdate,
    /// A put gets a number below that of existing versions.
    NumberNotMonotonic,
    /// Two puts get the same number.
    DuplicateNumber,
    /// One put becomes two versions, and has no response.
    DuplicateVersion,
    /// A put that fails is visible.
    FailedPutVisible,
    /// Reads return a mixture of two versions.
    TornRead,
    /// Half of the readers use a replica that lags behind.
    NotMonotonic,
    /// A deleted version can be read by its number.
    DeletedVersionFound,
    /// A deleted version is the newest again.
    DeletedNewest,
    /// A version is deleted twice.
    DeletedTwice,
    /// A put is acknowledged before it is visible.
    AcknowledgedTooEarly,
    /// A wait returns before its version is visible.
    WaitTooEarly,
    /// A wait returns before its timeout.
    WaitTooShort,
    /// A version is displaced while retention still keeps it.
    DisplacedTooEarly,
    /// A version can be read after newer ones have displaced it.
    DisplacedTooLate,
    /// Reads return contents that were never put.
    NeverPut,
    /// The part of one writer is that of another version.
    TornParts,
    /// A version is visible before all its writers have put.
    VisibleTooEarly,
    /// The response to a part is that others are missing, after the version is visible.
    PendingAfterVisible,
    /// A label does not keep its version.
    PinLost,
    /// A label keeps its version after it was removed.
    PinNotRemoved,
}

pub(crate) const BUGS: [Bug; 22] = [
    Bug::StaleRead,
    Bug::LostUpdate,
    Bug::NumberNotMonotonic,
    Bug::DuplicateNumber,
    Bug::DuplicateVersion,
    Bug::FailedPutVisible,
    Bug::TornRead,
    Bug::NotMonotonic,
    Bug::DeletedVersionFound,
    Bug::DeletedNewest,
    Bug::DeletedTwice,
    Bug::AcknowledgedTooEarly,
    Bug::WaitTooEarly,
    Bug::WaitTooShort,
    Bug::DisplacedTooEarly,
    Bug::DisplacedTooLate,
    Bug::NeverPut,
    Bug::TornParts,
    Bug::VisibleTooEarly,
    Bug::PendingAfterVisible,
    Bug::PinLost,
    Bug::PinNotRemoved,
];

type Version = (u64, StateDict);

/// A store of one key.
pub(crate) struct ToyStore {
    keep: usize,
    bug: Option<Bug>,
    visible: Vec<Version>,
    highest: u64,
    /// Versions that are no longer visible.
    removed: Vec<Version>,
    /// A version that is acknowledged and not visible yet.
    acknowledged: Option<Version>,
    /// Writers that have put a part, by number.
    parts: BTreeMap<u64, BTreeSet<u32>>,
    /// Number of writers of a version.
    writers: u32,
    /// Version numbers by label.
    pins: BTreeMap<u32, u64>,
    rng: SeededRng,
}

const KEY: u8 = 0;

impl ToyStore {
    pub(crate) fn new(keep: usize, bug: Option<Bug>) -> Self {
        let (visible, removed, acknowledged) = (Vec::new(), Vec::new(), None);
        let (parts, pins, rng) = (BTreeMap::new(), BTreeMap::new(), SeededRng::new(7));
        Self { keep, bug, visible, highest: 0, removed, acknowledged, parts, writers: 1, pins, rng }
    }

    /// Returns whether the bug is enabled and occurs this time.
    fn occurs(&mut self, bug: Bug) -> bool {
        self.bug == Some(bug) && self.rng.one_in(4)
    }

    /// Skips a number, as after a put that failed after it had begun.
    pub(crate) fn skip_number(&mut self) {
        self.highest += 1;
    }

    /// Executes a call. Some bugs affect every second client only.
    pub(crate) fn execute(&mut self, call: Call, is_odd: bool) -> Option<Response> {
        match call {
            Call::Put(put) => self.put(put),
            Call::GetNewest => Some(self.newest(is_odd)),
            Call::GetVersion(number) => Some(self.numbered(number)),
            Call::Wait(number, _) => Some(self.wait(number)),
            Call::Delete(number) => Some(self.delete(number)),
            Call::Part { number, writer, writers } => Some(self.part(number, writer, writers)),
            Call::Pin(number, label) => {
                let is_there = self.visible.iter().any(|version| version.0 == number);
                if is_there {
                    self.pins.insert(label, number);
                }
                Some(if is_there { Response::Done } else { Response::NotFound })
            }
            Call::Unpin(label) => {
                if !self.occurs(Bug::PinNotRemoved) {
                    self.pins.remove(&label);
                }
                self.apply_retention();
                Some(Response::Done)
            }
        }
    }

    fn put(&mut self, put: u32) -> Option<Response> {
        if self.occurs(Bug::FailedPutVisible) {
            self.make_visible(self.highest + 1, dict(KEY, put));
            return Some(Response::Failed);
        }
        if self.occurs(Bug::DuplicateVersion) {
            self.make_visible(self.highest + 1, dict(KEY, put));
            self.make_visible(self.highest + 1, dict(KEY, put));
            return None;
        }
        let number = if self.occurs(Bug::DuplicateNumber) {
            self.highest.max(1)
        } else if self.occurs(Bug::NumberNotMonotonic) && self.highest > 8 {
            self.highest - 8
        } else {
            self.highest + 1
        };
        if self.occurs(Bug::LostUpdate) {
            self.highest = number;
            return Some(Response::Put(number));
        }
        if let Some((number, dict)) = self.acknowledged.take() {
            self.make_visible(number, dict);
        }
        if self.occurs(Bug::AcknowledgedTooEarly) {
            self.highest = number;
            self.acknowledged = Some((number, dict(KEY, put)));
        } else {
            self.make_visible(number, dict(KEY, put));
        }
        Some(Response::Put(number))
    }

    fn make_visible(&mut self, number: u64, dict: StateDict) {
        self.highest = self.highest.max(number);
        self.visible.push((number, dict));
        self.apply_retention();
    }

    /// Applies retention, except to versions with a label.
    fn apply_retention(&mut self) {
        let mut keep = self.keep;
        if self.occurs(Bug::DisplacedTooEarly) {
            keep -= 1;
        }
        let surplus = self.visible.len().saturating_sub(keep);
        let old: Vec<Version> = self.visible.drain(..surplus).collect();
        let is_lost = self.occurs(Bug::PinLost);
        let is_held =
            |version: &Version| !is_lost && self.pins.values().any(|number| *number == version.0);
        let (held, removed): (Vec<_>, Vec<_>) = old.into_iter().partition(is_held);
        self.visible.splice(..0, held);
        self.removed.extend(removed);
    }

    /// Puts a part. The version is visible when all its parts are stored.
    fn part(&mut self, number: u64, writer: u32, writers: u32) -> Response {
        self.writers = writers;
        let parts = self.parts.entry(number).or_default();
        let is_complete = parts.len() == writers as usize;
        if is_complete && !self.occurs(Bug::PendingAfterVisible) {
            return Response::Put(number);
        }
        if number <= self.highest {
            return if is_complete { Response::PartsMissing } else { Response::Failed };
        }
        let is_early = self.occurs(Bug::VisibleTooEarly);
        let parts = self.parts.entry(number).or_default();
        parts.insert(writer);
        if is_early {
            parts.extend(0..writers);
        }
        if parts.len() < writers as usize {
            return Response::PartsMissing;
        }
        let is_torn = self.occurs(Bug::TornParts);
        let mut whole = part(KEY, shared_put_id(number), 0);
        for writer in 1..writers {
            let number = if is_torn { number - 1 } else { number };
            for (name, value) in part(KEY, shared_put_id(number), writer).leaves() {
                whole.insert(name.fqn(), value.clone());
            }
        }
        whole.insert("put", i64::from(shared_put_id(number)));
        self.make_visible(number, whole);
        Response::Put(number)
    }

    fn newest(&mut self, is_odd: bool) -> Response {
        let is_stale = self.occurs(Bug::StaleRead) || is_odd && self.occurs(Bug::NotMonotonic);
        let is_stale = is_stale || self.visible.is_empty() && self.occurs(Bug::DeletedNewest);
        let newest = if is_stale { self.removed.last() } else { self.visible.last() };
        let Some((number, stored)) = newest.cloned() else { return Response::NotFound };
        if self.occurs(Bug::TornRead)
            && let Some((_, other)) = self.removed.last()
        {
            let mut torn = stored;
            torn.insert("layer.2", other.leaf("layer.2").unwrap().clone());
            return self.found(number, &torn);
        }
        if self.occurs(Bug::NeverPut) {
            return self.found(number, &dict(KEY, u32::MAX));
        }
        self.found(number, &stored)
    }

    fn numbered(&mut self, number: u64) -> Response {
        let is_of = |version: &&Version| version.0 == number;
        let mut version = self.visible.iter().find(is_of).cloned();
        let is_late = self.occurs(Bug::DisplacedTooLate) || self.occurs(Bug::DeletedVersionFound);
        if version.is_none() && is_late {
            version = self.removed.iter().find(is_of).cloned();
        }
        version.map_or(Response::NotFound, |(number, dict)| self.found(number, &dict))
    }

    /// Never waits. Its clients use a timeout of zero.
    fn wait(&mut self, wanted: u64) -> Response {
        if self.occurs(Bug::WaitTooEarly) {
            return self.newest(false);
        }
        match self.visible.last() {
            Some((number, dict)) if *number >= wanted => self.found(*number, dict),
            _ => Response::NotFound,
        }
    }

    /// Returns the timeout of a wait, in nanoseconds.
    pub(crate) fn wait_timeout(&mut self) -> u64 {
        if self.occurs(Bug::WaitTooShort) { 1_000_000_000 } else { 0 }
    }

    fn delete(&mut self, number: u64) -> Response {
        if let Some(place) = self.visible.iter().position(|version| version.0 == number) {
            self.removed.push(self.visible.remove(place));
            return Response::Deleted;
        }
        if self.occurs(Bug::DeletedTwice) { Response::Deleted } else { Response::NotFound }
    }

    fn found(&self, number: u64, dict: &StateDict) -> Response {
        let put = identify_put(KEY, self.writers, dict);
        put.map_or(Response::Torn(number), |put| Response::Found(number, put))
    }
}
