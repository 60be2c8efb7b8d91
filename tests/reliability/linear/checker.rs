//! The fast checker: whether the history of a key is that of a store that does one thing at a time.
//!
//! Checking a history is hard in general. Here it takes little more than sorting, because contents tell which
//! put they are, and so reads tell the number of each put that anybody has seen. Versions become visible in
//! the order of their numbers, and where one version is kept, it is deleted before the next one comes: the
//! order of all changes is known. What is not known is when each was made. So there is one line of positions,
//! from nothing at all to the last change, and the store walks it in one direction while time passes:
//!
//! - a change has been made when its answer is there, and not before it was asked;
//! - a read is right if its answer is true at a position at which the store is between the asking and the
//!   answer.
//!
//! The laziest walk decides: the one that goes on only when an answer says that it must have, and no farther
//! than it must. Any other right walk is at each moment as far or farther, and what it passes during a read,
//! the lazy one has passed as well or still can. So if the lazy walk fails, every walk does.
//!
//! A version that several writers put together is a put that is asked as soon as its last part may have been. One
//! that a label holds (`pins`) is there after it was displaced: no step of the walk, but two moments that the reads
//! between them are compared with.
//!
//! A delete whose outcome is unknown is a change that the walk may pass by. A put whose outcome is unknown and
//! whose contents nobody has ever seen may still have displaced older versions. It is taken into account where
//! a number is missing from the line and a version is gone too early; how many of them there are is counted,
//! but not when each came: this is the one place where the checker accepts more than
//! [`oracle`](super::oracle).

use std::collections::BTreeMap;

use super::history::{Answer, Call, Operation, name_of};
use super::pins::Pins;

/// What cannot have come from a store that does one thing at a time.
#[derive(Debug)]
pub(crate) struct Violation {
    pub(crate) rule: &'static str,
    /// Where it showed.
    pub(crate) operation: Operation,
}

fn violation<T>(rule: &'static str, operation: &Operation) -> Result<T, Violation> {
    Err(Violation { rule, operation: operation.clone() })
}

/// Checks the history of a key of which so many versions are kept. Only where that is one, versions are deleted.
pub(crate) fn check(keep: usize, operations: &[Operation]) -> Result<(), Violation> {
    let puts = Puts::of(operations)?;
    let line = Line::of(keep, operations, puts)?;
    line.walk(operations)
}

/// Which put each visible version is.
struct Puts {
    by_name: BTreeMap<u32, Put>,
    by_number: BTreeMap<u64, u32>,
    numbers: BTreeMap<u32, u64>,
}

/// What would make a version visible.
struct Put {
    asked: u64,
    answer: Option<Answer>,
}

/// Versions that several writers put together: as if one put each, asked when no part was missing any more.
///
/// A part that waits may be lost with its daemon, and be put again. One that fails has done nothing.
fn together(operations: &[Operation]) -> BTreeMap<u32, Put> {
    let mut parts: BTreeMap<u64, Vec<&Operation>> = BTreeMap::new();
    let mut puts = BTreeMap::new();
    for operation in operations.iter().filter(|it| it.answer != Some(Answer::Failed)) {
        if let Call::Part { number, .. } = operation.call {
            parts.entry(number).or_default().push(operation);
        }
    }
    for (number, parts) in parts {
        // Whoever is told that it is visible was not there before.
        let came = parts.iter().filter(|it| matches!(it.answer, None | Some(Answer::Waits)));
        let first = |other: u32| {
            let own = came.clone().filter(|it| it.call.writer() == Some(other));
            own.map(|it| it.asked).min().unwrap_or(u64::MAX)
        };
        let asked = |it: &&Operation| {
            let Call::Part { writer, of, .. } = it.call else { unreachable!("it is a part") };
            let others = (0..of).filter(|other| *other != writer).map(first);
            others.fold(it.asked, u64::max)
        };
        let last = parts.iter().filter(|it| it.answer != Some(Answer::Waits)).map(asked).min();
        if let Some(asked) = last.filter(|asked| *asked != u64::MAX) {
            puts.insert(name_of(number), Put { asked, answer: None });
        }
    }
    puts
}

impl Puts {
    /// From what is seen of them, each answer by itself.
    fn of(operations: &[Operation]) -> Result<Self, Violation> {
        let mut puts = Self {
            by_name: together(operations),
            by_number: BTreeMap::new(),
            numbers: BTreeMap::new(),
        };
        for operation in operations {
            let Operation { call, asked, answer, .. } = *operation;
            if let Call::Put(put) = call
                && puts.by_name.insert(put, Put { asked, answer }).is_some()
            {
                return violation("two puts have one name", operation);
            }
        }
        for operation in operations {
            match (operation.call, operation.answer) {
                (_, Some(Answer::Torn(_))) => return violation("what is read is torn", operation),
                (Call::Part { number: wanted, .. }, Some(Answer::Put(number)))
                | (Call::Numbered(wanted), Some(Answer::Found(number, _)))
                    if number != wanted =>
                {
                    return violation("another number is found than was asked for", operation);
                }
                (Call::Wait(wanted, _), Some(Answer::Found(number, _))) if number < wanted => {
                    return violation("a wait is over before its version is there", operation);
                }
                (Call::Wait(_, patience), Some(Answer::Nothing))
                    if operation.answered - operation.asked < patience =>
                {
                    return violation("a wait is given up before its time is over", operation);
                }
                _ => {}
            }
            if let Some((number, put)) = operation.seen() {
                puts.name(number, put, operation)?;
            }
        }
        Ok(puts)
    }

    /// A put is seen under a number.
    fn name(&mut self, number: u64, put: u32, seen: &Operation) -> Result<(), Violation> {
        match self.by_name.get(&put) {
            None => return violation("what is read was never put", seen),
            Some(put) if put.answer == Some(Answer::Failed) => {
                return violation("what is read is a put that has failed", seen);
            }
            Some(_) => {}
        }
        if *self.by_number.entry(number).or_insert(put) != put {
            return violation("two versions have one number", seen);
        }
        if *self.numbers.entry(put).or_insert(number) != number {
            return violation("one put is two versions", seen);
        }
        Ok(())
    }

    /// When the puts were asked that may be versions that nobody has seen.
    fn unseen(&self) -> Vec<u64> {
        let unseen = self
            .by_name
            .iter()
            .filter(|(name, put)| put.answer.is_none() && !self.numbers.contains_key(name));
        let mut asked: Vec<u64> = unseen.map(|(_, put)| put.asked).collect();
        asked.sort_unstable();
        asked
    }
}

/// All changes in their order. After the n-th of them the store is at position n.
struct Line {
    keep: usize,
    steps: Vec<Step>,
    /// The numbers of the versions, ascending, and at which position each is the newest.
    versions: Vec<(u64, usize)>,
    /// How many versions have become visible by each position.
    come: Vec<usize>,
    /// The first position from each one on at which no version is visible.
    empty: Vec<Option<usize>>,
    /// The numbers that puts are seen under.
    numbers: BTreeMap<u32, u64>,
    unseen: Vec<u64>,
    pins: Pins,
}

/// One change: a version becomes visible, or is deleted.
struct Step {
    asked: u64,
    /// Whether it may never have been made.
    is_optional: bool,
    is_delete: bool,
}

impl Line {
    fn of(keep: usize, operations: &[Operation], puts: Puts) -> Result<Self, Violation> {
        // Of each number: when a delete was asked, and whether it is known to have deleted it.
        let mut deletes: BTreeMap<u64, (u64, bool)> = BTreeMap::new();
        for operation in operations {
            let Call::Delete(number) = operation.call else { continue };
            assert_eq!(keep, 1, "where more versions are kept, their order is not known");
            let is_known = match operation.answer {
                None => false,
                Some(Answer::Deleted) => true,
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
                    let asked = operation.asked.min(*asked);
                    deletes.insert(number, (asked, false));
                }
                _ => drop(deletes.insert(number, (operation.asked, is_known))),
            }
        }
        let (mut steps, mut versions) = (Vec::new(), Vec::new());
        let mut come = vec![0];
        for (number, put) in &puts.by_number {
            let asked = puts.by_name[put].asked;
            steps.push(Step { asked, is_optional: false, is_delete: false });
            versions.push((*number, steps.len()));
            come.push(versions.len());
            if let Some((asked, is_known)) = deletes.get(number) {
                steps.push(Step { asked: *asked, is_optional: !is_known, is_delete: true });
                come.push(versions.len());
            }
        }
        let mut empty = vec![None; come.len()];
        let mut next = None;
        for position in (0..come.len()).rev() {
            if position.checked_sub(1).is_none_or(|step| steps[step].is_delete) {
                next = Some(position);
            }
            empty[position] = next;
        }
        let (unseen, pins) = (puts.unseen(), Pins::of(operations));
        Ok(Self { keep, steps, versions, come, empty, numbers: puts.numbers, unseen, pins })
    }

    /// The place of a version among all, if it is one.
    fn version(&self, number: u64) -> Option<usize> {
        self.versions.binary_search_by_key(&number, |(number, _)| *number).ok()
    }

    /// The first position from one on at which the answer to a read is true.
    fn first_true(&self, read: &Operation, from: usize) -> Option<usize> {
        let not_before = |first: usize| (first >= from).then_some(first);
        match (read.call, read.answer?) {
            (Call::Newest | Call::Wait(..), Answer::Found(number, _)) => {
                not_before(self.versions[self.version(number)?].1)
            }
            (Call::Pin(number, _), Answer::Done)
            | (Call::Numbered(_), Answer::Found(number, _)) => {
                let version = self.version(number)?;
                let first = self.versions[version].1.max(from);
                (first < self.end(version)).then_some(first)
            }
            (Call::Newest, Answer::Nothing) => self.empty[from],
            // Its version has not come, nor a higher one.
            (Call::Part { number, .. }, Answer::Waits) => {
                let newest = self.come[from].checked_sub(1).map(|version| self.versions[version].0);
                newest.is_none_or(|newest| newest < number).then_some(from)
            }
            (Call::Unpin(_), Answer::Done) => Some(from),
            (Call::Wait(number, _), Answer::Nothing) => {
                let newest = self.come[from].checked_sub(1).map(|version| self.versions[version].0);
                let is_old = newest.is_none_or(|newest| newest < number);
                if is_old { Some(from) } else { self.empty[from] }
            }
            (
                Call::Numbered(number) | Call::Delete(number) | Call::Pin(number, _),
                Answer::Nothing,
            ) => {
                let Some(version) = self.version(number) else { return Some(from) };
                let is_released = self.pins.are_released(number, read.answered);
                let is_true = |at: &usize| {
                    *at < self.versions[version].1
                        || is_released && self.is_gone(version, *at, read.answered)
                };
                (from..self.come.len()).find(is_true)
            }
            _ => None,
        }
    }

    /// The first position at which a version is gone, if no unseen one has come.
    fn end(&self, version: usize) -> usize {
        if self.keep == 1 {
            return self.versions[version].1 + 1;
        }
        let displacing = self.versions.get(version + self.keep);
        displacing.map_or(self.come.len(), |(_, position)| *position)
    }

    /// Whether a version that has been visible may be gone at a position and moment.
    fn is_gone(&self, version: usize, at: usize, now: u64) -> bool {
        if at >= self.end(version) {
            return true;
        }
        // Unseen ones have numbers between those that are seen.
        let next = self.versions.get(self.come[at]).map_or(u64::MAX, |(number, _)| *number);
        let numbers = usize::try_from(next - self.versions[version].0 - 1).unwrap_or(usize::MAX);
        let unseen = self.unseen.partition_point(|asked| *asked <= now);
        let newer = self.come[at] - (version + 1);
        numbers.min(newer + unseen) >= self.keep
    }

    /// The position that a change leads to, if it is known to have been made.
    fn reached_by(&self, change: &Operation) -> Option<usize> {
        match (change.call, change.answer) {
            (Call::Part { number, .. }, Some(Answer::Put(_))) => {
                Some(self.versions[self.version(number)?].1)
            }
            (Call::Put(put), _) => {
                let version = self.version(*self.numbers.get(&put)?)?;
                Some(self.versions[version].1)
            }
            (Call::Delete(number), Some(Answer::Deleted)) => {
                Some(self.versions[self.version(number)?].1 + 1)
            }
            _ => None,
        }
    }

    fn walk(&self, operations: &[Operation]) -> Result<(), Violation> {
        let mut moments: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * operations.len());
        for (index, operation) in operations.iter().enumerate() {
            moments.push((operation.asked, false, index));
            moments.push((operation.answered, true, index));
        }
        // What happens in the same moment overlaps.
        moments.sort_unstable();
        let (passed, gone) = (vec![false; self.come.len()], BTreeMap::new());
        let mut walk = Walk { line: self, at: 0, passed, gone };
        let mut from = vec![0; operations.len()];
        for (now, is_answer, index) in moments {
            let operation = &operations[index];
            if !is_answer {
                from[index] = walk.at;
            } else if let Some(position) = self.reached_by(operation) {
                if position > walk.at && !walk.go_to(position, now) {
                    return violation("it is done before something older is asked", operation);
                }
            } else if operation.answer.is_some_and(|answer| answer != Answer::Failed) {
                let from = |index: usize| from[index];
                let satisfied = walk.satisfies(operation, from(index), now);
                let held = || walk.is_held(index, operation, from).then_some(walk.at);
                let Some(position) = satisfied.or_else(held) else {
                    return violation("it was not so at any moment", operation);
                };
                if position > walk.at && !walk.go_to(position, now) {
                    return violation("it was so only before it could be", operation);
                }
                walk.miss(operation, position);
            }
        }
        Ok(())
    }
}

/// The laziest walk along a line.
struct Walk<'a> {
    line: &'a Line,
    at: usize,
    /// Whether an optional change that lies behind was made.
    passed: Vec<bool>,
    /// By when versions were gone, by their numbers.
    gone: BTreeMap<u64, u64>,
}

impl Walk<'_> {
    /// Whether a version that newer ones have displaced is there all the same: a label has held it from a moment on
    /// at which it was there.
    fn is_held(&self, index: usize, read: &Operation, from: impl Fn(usize) -> usize) -> bool {
        let (Call::Numbered(number) | Call::Pin(number, _)) = read.call else { return false };
        if read.answer == Some(Answer::Nothing) {
            return false;
        }
        let Some(version) = self.line.version(number) else { return false };
        let is_gone = self.gone.get(&number).is_some_and(|gone| *gone < read.asked);
        let end = self.line.end(version);
        !is_gone && self.line.pins.hold(number, index, read, |index| from(index) < end)
    }

    /// Remembers that a version was not there any more.
    fn miss(&mut self, read: &Operation, position: usize) {
        let (Call::Numbered(number) | Call::Pin(number, _)) = read.call else { return };
        let version = self.line.version(number);
        let has_come = version.is_some_and(|version| self.line.versions[version].1 <= position);
        if has_come && read.answer == Some(Answer::Nothing) {
            let gone = self.gone.entry(number).or_insert(read.answered);
            *gone = read.answered.min(*gone);
        }
    }

    /// The first position that makes a read true, since it began or from now on.
    fn satisfies(&self, read: &Operation, mut from: usize, now: u64) -> Option<usize> {
        loop {
            let position = self.line.first_true(read, from)?;
            let step = position.checked_sub(1).map(|step| &self.line.steps[step]);
            let can_be = match step {
                Some(step) if step.is_optional && position <= self.at => self.passed[position],
                Some(step) if step.is_optional => step.asked <= now,
                _ => true,
            };
            if can_be {
                return Some(position);
            }
            from = position + 1;
            if from >= self.line.come.len() {
                return None;
            }
        }
    }

    /// Makes all changes up to a position; says whether they have been asked.
    fn go_to(&mut self, position: usize, now: u64) -> bool {
        while self.at < position {
            let step = &self.line.steps[self.at];
            let is_asked = step.asked <= now;
            if !is_asked && !step.is_optional {
                return false;
            }
            self.at += 1;
            self.passed[self.at] = is_asked;
        }
        true
    }
}
