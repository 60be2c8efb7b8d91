//! The fast checker: decides whether the history of a key is that of a sequential store.
//!
//! Checking linearizability is hard in general. Here it takes little more than sorting. The
//! contents of a version identify its put, so reads reveal the number of each put that any client
//! has observed. Versions become visible in the order of their numbers. Where one version is kept,
//! it is deleted before the next one becomes visible. So the order of all changes is known, but not
//! the time of each.
//!
//! The checker uses one timeline of positions, from the empty store to the last change. The store
//! moves along it in one direction as time passes:
//!
//! - A change has been made when its response arrives, and not before its invocation.
//! - A read is correct if its response is true at a position that the store has between the
//!   invocation and the response.
//!
//! The laziest walk decides. It advances only when a response requires it, and no farther than
//! required. Any other correct walk is at each moment at the same position or farther. What it
//! passes during a read, the lazy walk has passed as well, or still can. So if the lazy walk fails,
//! every walk fails.
//!
//! A version of several writers counts as one put, which is invoked as soon as its last part may
//! have been. A version with a label (`pins`) exists after newer versions have displaced it. That
//! is no change on the timeline, but two moments with which the reads between them are compared.
//!
//! A delete of unknown outcome is a change that the walk may skip. A put of unknown outcome whose
//! contents no client has observed may still have displaced older versions. It is considered where
//! a number is missing on the timeline and a version disappears too early. Such puts are counted,
//! but not located in time. This is the one place where the checker accepts more than
//! [`oracle`](super::oracle).

use std::collections::BTreeMap;

use super::history::{Call, Operation, Response, shared_put_id};
use super::pins::Pins;

/// A response that no sequential store gives.
#[derive(Debug)]
pub(crate) struct Violation {
    pub(crate) rule: &'static str,
    /// The operation at which the violation was found.
    pub(crate) operation: Operation,
}

fn violation<T>(rule: &'static str, operation: &Operation) -> Result<T, Violation> {
    Err(Violation { rule, operation: operation.clone() })
}

/// Checks the history of a key of which `keep` versions are kept.
///
/// Only if `keep` is 1, the history may have deletes.
pub(crate) fn check(keep: usize, operations: &[Operation]) -> Result<(), Violation> {
    let puts = Puts::from_operations(operations)?;
    let timeline = Timeline::new(keep, operations, puts)?;
    timeline.walk(operations)
}

/// Puts of the visible versions, by id and by number.
struct Puts {
    by_id: BTreeMap<u32, Put>,
    by_number: BTreeMap<u64, u32>,
    numbers: BTreeMap<u32, u64>,
}

/// A put that may have made a version visible.
struct Put {
    asked: u64,
    answer: Option<Response>,
}

/// Combines the parts of each version of several writers into one put.
///
/// The put counts as invoked at the earliest time by which every part was invoked. A part of an
/// incomplete version may be lost with its daemon, and be put again. A part that fails has had no
/// effect.
fn combine_parts(operations: &[Operation]) -> BTreeMap<u32, Put> {
    let mut parts: BTreeMap<u64, Vec<&Operation>> = BTreeMap::new();
    let mut puts = BTreeMap::new();
    for operation in operations.iter().filter(|it| it.response != Some(Response::Failed)) {
        if let Call::Part { number, .. } = operation.call {
            parts.entry(number).or_default().push(operation);
        }
    }
    for (number, parts) in parts {
        // A part whose response is that the version is visible was not stored while others were
        // missing.
        let pending_parts =
            parts.iter().filter(|it| matches!(it.response, None | Some(Response::PartsMissing)));
        let first_call = |other: u32| {
            let parts_of_writer =
                pending_parts.clone().filter(|it| it.call.writer() == Some(other));
            parts_of_writer.map(|it| it.invoked_at).min().unwrap_or(u64::MAX)
        };
        let asked = |it: &&Operation| {
            let Call::Part { writer, writers, .. } = it.call else { unreachable!("it is a part") };
            let others = (0..writers).filter(|other| *other != writer).map(first_call);
            others.fold(it.invoked_at, u64::max)
        };
        let last =
            parts.iter().filter(|it| it.response != Some(Response::PartsMissing)).map(asked).min();
        if let Some(asked) = last.filter(|asked| *asked != u64::MAX) {
            puts.insert(shared_put_id(number), Put { asked, answer: None });
        }
    }
    puts
}

impl Puts {
    /// Collects the puts, and checks each response on its own.
    fn from_operations(operations: &[Operation]) -> Result<Self, Violation> {
        let mut puts = Self {
            by_id: combine_parts(operations),
            by_number: BTreeMap::new(),
            numbers: BTreeMap::new(),
        };
        for operation in operations {
            let Operation { call, invoked_at, response, .. } = *operation;
            if let Call::Put(put) = call
                && puts.by_id.insert(put, Put { asked: invoked_at, answer: response }).is_some()
            {
                return violation("two puts have one name", operation);
            }
        }
        for operation in operations {
            match (operation.call, operation.response) {
                (_, Some(Response::Torn(_))) => {
                    return violation("what is read is torn", operation);
                }
                (Call::Part { number: wanted, .. }, Some(Response::Put(number)))
                | (Call::GetVersion(wanted), Some(Response::Found(number, _)))
                    if number != wanted =>
                {
                    return violation("another number is found than was asked for", operation);
                }
                (Call::Wait(wanted, _), Some(Response::Found(number, _))) if number < wanted => {
                    return violation("a wait is over before its version is there", operation);
                }
                (Call::Wait(_, timeout), Some(Response::NotFound))
                    if operation.returned_at - operation.invoked_at < timeout =>
                {
                    return violation("a wait is given up before its time is over", operation);
                }
                _ => {}
            }
            if let Some((number, put)) = operation.observed_version() {
                puts.observe(number, put, operation)?;
            }
        }
        Ok(puts)
    }

    /// Records that a put is observed under a number.
    fn observe(&mut self, number: u64, put: u32, operation: &Operation) -> Result<(), Violation> {
        match self.by_id.get(&put) {
            None => return violation("what is read was never put", operation),
            Some(put) if put.answer == Some(Response::Failed) => {
                return violation("what is read is a put that has failed", operation);
            }
            Some(_) => {}
        }
        if *self.by_number.entry(number).or_insert(put) != put {
            return violation("two versions have one number", operation);
        }
        if *self.numbers.entry(put).or_insert(number) != number {
            return violation("one put is two versions", operation);
        }
        Ok(())
    }

    /// Returns when the puts were invoked that may be versions which no client has observed.
    fn unobserved(&self) -> Vec<u64> {
        let unobserved = self
            .by_id
            .iter()
            .filter(|(id, put)| put.answer.is_none() && !self.numbers.contains_key(id));
        let mut asked: Vec<u64> = unobserved.map(|(_, put)| put.asked).collect();
        asked.sort_unstable();
        asked
    }
}

/// All changes in order. After the n-th change the store is at position n.
struct Timeline {
    keep: usize,
    changes: Vec<Change>,
    /// Numbers of the versions, ascending, and the position at which each is the newest.
    versions: Vec<(u64, usize)>,
    /// Number of versions that have become visible, by position.
    visible_counts: Vec<usize>,
    /// For each position, the first one from there on at which no version is visible.
    first_empty: Vec<Option<usize>>,
    /// Numbers under which puts are observed, by put.
    numbers: BTreeMap<u32, u64>,
    unobserved: Vec<u64>,
    pins: Pins,
}

/// A change: a version becomes visible, or is deleted.
struct Change {
    asked: u64,
    /// Whether the change may never have been made.
    is_optional: bool,
    is_delete: bool,
}

impl Timeline {
    fn new(keep: usize, operations: &[Operation], puts: Puts) -> Result<Self, Violation> {
        // By number: when a delete was invoked, and whether it is known to have deleted the
        // version.
        let mut deletes: BTreeMap<u64, (u64, bool)> = BTreeMap::new();
        for operation in operations {
            let Call::Delete(number) = operation.call else { continue };
            assert_eq!(keep, 1, "the order of changes is unknown if more versions are kept");
            let is_known = match operation.response {
                None => false,
                Some(Response::Deleted) => true,
                Some(_) => continue,
            };
            if is_known && !puts.by_number.contains_key(&number) {
                return violation("what was deleted was never there", operation);
            }
            match deletes.get(&number) {
                Some((_, true)) if is_known => {
                    return violation("one version is deleted twice", operation);
                }
                Some((_, true)) => {}
                Some((asked, false)) if !is_known => {
                    let asked = operation.invoked_at.min(*asked);
                    deletes.insert(number, (asked, false));
                }
                _ => drop(deletes.insert(number, (operation.invoked_at, is_known))),
            }
        }
        let (mut changes, mut versions) = (Vec::new(), Vec::new());
        let mut visible_counts = vec![0];
        for (number, put) in &puts.by_number {
            let asked = puts.by_id[put].asked;
            changes.push(Change { asked, is_optional: false, is_delete: false });
            versions.push((*number, changes.len()));
            visible_counts.push(versions.len());
            if let Some((asked, is_known)) = deletes.get(number) {
                changes.push(Change { asked: *asked, is_optional: !is_known, is_delete: true });
                visible_counts.push(versions.len());
            }
        }
        let mut first_empty = vec![None; visible_counts.len()];
        let mut next = None;
        for position in (0..visible_counts.len()).rev() {
            if position.checked_sub(1).is_none_or(|change| changes[change].is_delete) {
                next = Some(position);
            }
            first_empty[position] = next;
        }
        let (unobserved, pins) = (puts.unobserved(), Pins::from_operations(operations));
        Ok(Self {
            keep,
            changes,
            versions,
            visible_counts,
            first_empty,
            numbers: puts.numbers,
            unobserved,
            pins,
        })
    }

    /// Returns the index of a version, if one has this number.
    fn version(&self, number: u64) -> Option<usize> {
        self.versions.binary_search_by_key(&number, |(number, _)| *number).ok()
    }

    /// Returns the first position from `from` on at which the response of a read is true.
    fn first_position(&self, read: &Operation, from: usize) -> Option<usize> {
        let not_before = |first: usize| (first >= from).then_some(first);
        match (read.call, read.response?) {
            (Call::GetNewest | Call::Wait(..), Response::Found(number, _)) => {
                not_before(self.versions[self.version(number)?].1)
            }
            (Call::Pin(number, _), Response::Done)
            | (Call::GetVersion(_), Response::Found(number, _)) => {
                let version = self.version(number)?;
                let first = self.versions[version].1.max(from);
                (first < self.displaced_at(version)).then_some(first)
            }
            (Call::GetNewest, Response::NotFound) => self.first_empty[from],
            // Neither its version nor a higher one is visible.
            (Call::Part { number, .. }, Response::PartsMissing) => {
                let newest = self.visible_counts[from]
                    .checked_sub(1)
                    .map(|version| self.versions[version].0);
                newest.is_none_or(|newest| newest < number).then_some(from)
            }
            (Call::Unpin(_), Response::Done) => Some(from),
            (Call::Wait(number, _), Response::NotFound) => {
                let newest = self.visible_counts[from]
                    .checked_sub(1)
                    .map(|version| self.versions[version].0);
                let is_old = newest.is_none_or(|newest| newest < number);
                if is_old { Some(from) } else { self.first_empty[from] }
            }
            (
                Call::GetVersion(number) | Call::Delete(number) | Call::Pin(number, _),
                Response::NotFound,
            ) => {
                let Some(version) = self.version(number) else { return Some(from) };
                let is_released = self.pins.may_be_released(number, read.returned_at);
                let is_true = |at: &usize| {
                    *at < self.versions[version].1
                        || is_released && self.may_be_displaced(version, *at, read.returned_at)
                };
                (from..self.visible_counts.len()).find(is_true)
            }
            _ => None,
        }
    }

    /// Returns the first position at which a version is displaced, without regard to unobserved versions.
    fn displaced_at(&self, version: usize) -> usize {
        if self.keep == 1 {
            return self.versions[version].1 + 1;
        }
        let displacing = self.versions.get(version + self.keep);
        displacing.map_or(self.visible_counts.len(), |(_, position)| *position)
    }

    /// Returns whether a version that was visible may have been displaced at a position and moment.
    fn may_be_displaced(&self, version: usize, position: usize, now: u64) -> bool {
        if position >= self.displaced_at(version) {
            return true;
        }
        // Unobserved versions have numbers between those that are observed.
        let next = self
            .versions
            .get(self.visible_counts[position])
            .map_or(u64::MAX, |(number, _)| *number);
        let numbers = usize::try_from(next - self.versions[version].0 - 1).unwrap_or(usize::MAX);
        let unobserved = self.unobserved.partition_point(|asked| *asked <= now);
        let newer = self.visible_counts[position] - (version + 1);
        numbers.min(newer + unobserved) >= self.keep
    }

    /// Returns the position that a change leads to, if the change is known to have been made.
    fn position_after(&self, operation: &Operation) -> Option<usize> {
        match (operation.call, operation.response) {
            (Call::Part { number, .. }, Some(Response::Put(_))) => {
                Some(self.versions[self.version(number)?].1)
            }
            (Call::Put(put), _) => {
                let version = self.version(*self.numbers.get(&put)?)?;
                Some(self.versions[version].1)
            }
            (Call::Delete(number), Some(Response::Deleted)) => {
                Some(self.versions[self.version(number)?].1 + 1)
            }
            _ => None,
        }
    }

    fn walk(&self, operations: &[Operation]) -> Result<(), Violation> {
        let mut moments: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * operations.len());
        for (index, operation) in operations.iter().enumerate() {
            moments.push((operation.invoked_at, false, index));
            moments.push((operation.returned_at, true, index));
        }
        // Operations at the same moment overlap.
        moments.sort_unstable();
        let (applied, missing_since) = (vec![false; self.visible_counts.len()], BTreeMap::new());
        let mut walk = Walk { timeline: self, at: 0, applied, missing_since };
        let mut from = vec![0; operations.len()];
        for (now, is_answer, index) in moments {
            let operation = &operations[index];
            if !is_answer {
                from[index] = walk.at;
            } else if let Some(position) = self.position_after(operation) {
                if position > walk.at && !walk.advance_to(position, now) {
                    return violation("it is done before something older is asked", operation);
                }
            } else if operation.response.is_some_and(|answer| answer != Response::Failed) {
                let from = |index: usize| from[index];
                let satisfied = walk.first_satisfying(operation, from(index), now);
                let pinned = || walk.is_pinned(index, operation, from).then_some(walk.at);
                let Some(position) = satisfied.or_else(pinned) else {
                    return violation("it was not so at any moment", operation);
                };
                if position > walk.at && !walk.advance_to(position, now) {
                    return violation("it was so only before it could be", operation);
                }
                walk.record_missing(operation, position);
            }
        }
        Ok(())
    }
}

/// The laziest walk along a timeline.
struct Walk<'a> {
    timeline: &'a Timeline,
    at: usize,
    /// Whether an optional change behind the current position was made.
    applied: Vec<bool>,
    /// When a version was known to be missing, by number.
    missing_since: BTreeMap<u64, u64>,
}

impl Walk<'_> {
    /// Returns whether a label keeps a version that newer ones have displaced.
    ///
    /// The label must have been given when the version existed.
    fn is_pinned(&self, index: usize, read: &Operation, from: impl Fn(usize) -> usize) -> bool {
        let (Call::GetVersion(number) | Call::Pin(number, _)) = read.call else { return false };
        if read.response == Some(Response::NotFound) {
            return false;
        }
        let Some(version) = self.timeline.version(number) else { return false };
        let is_missing = self
            .missing_since
            .get(&number)
            .is_some_and(|missing_since| *missing_since < read.invoked_at);
        let end = self.timeline.displaced_at(version);
        !is_missing && self.timeline.pins.may_keep(number, index, read, |index| from(index) < end)
    }

    /// Records that a version was missing.
    fn record_missing(&mut self, read: &Operation, position: usize) {
        let (Call::GetVersion(number) | Call::Pin(number, _)) = read.call else { return };
        let version = self.timeline.version(number);
        let has_come = version.is_some_and(|version| self.timeline.versions[version].1 <= position);
        if has_come && read.response == Some(Response::NotFound) {
            let missing_since = self.missing_since.entry(number).or_insert(read.returned_at);
            *missing_since = read.returned_at.min(*missing_since);
        }
    }

    /// Returns the first position that makes a read true, since its invocation or from now on.
    fn first_satisfying(&self, read: &Operation, mut from: usize, now: u64) -> Option<usize> {
        loop {
            let position = self.timeline.first_position(read, from)?;
            let change = position.checked_sub(1).map(|change| &self.timeline.changes[change]);
            let can_be = match change {
                Some(change) if change.is_optional && position <= self.at => self.applied[position],
                Some(change) if change.is_optional => change.asked <= now,
                _ => true,
            };
            if can_be {
                return Some(position);
            }
            from = position + 1;
            if from >= self.timeline.visible_counts.len() {
                return None;
            }
        }
    }

    /// Makes all changes up to a position. Returns whether they have been invoked.
    fn advance_to(&mut self, position: usize, now: u64) -> bool {
        while self.at < position {
            let change = &self.timeline.changes[self.at];
            let is_asked = change.asked <= now;
            if !is_asked && !change.is_optional {
                return false;
            }
            self.at += 1;
            self.applied[self.at] = is_asked;
        }
        true
    }
}
