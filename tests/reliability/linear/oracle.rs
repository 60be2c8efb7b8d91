//! The slow checker: Wing and Gong's search for an order, with Lowe's memory of where it has been.
//!
//! It knows nothing of lines and positions. It tries to do what was asked in any order that the moments allow,
//! with a store of a few lines, and says whether the answers can be had.

use std::collections::{BTreeMap, BTreeSet};

use super::history::{Answer, Call, Operation, name_of};

/// The most operations that it takes.
pub(crate) const LONGEST: usize = 128;

/// A store that does one thing at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Store {
    /// Number and put; none is one that nobody has seen.
    visible: Vec<(u64, Option<u32>)>,
    highest: u64,
    /// Parts that may be there, by number and writer.
    parts: BTreeSet<(u64, u32)>,
    /// Numbers of such versions that have become visible.
    come: BTreeSet<u64>,
    /// By label.
    pins: BTreeMap<u32, u64>,
}

impl Store {
    /// As many stay as are kept, and what has a label.
    fn thin(&mut self, keep: usize) {
        let surplus = self.visible.len().saturating_sub(keep);
        let old: Vec<_> = self.visible.drain(..surplus).collect();
        let is_held = |(number, _): &(u64, _)| self.pins.values().any(|pinned| pinned == number);
        self.visible = old.into_iter().filter(is_held).chain(self.visible.drain(..)).collect();
    }
}

/// Whether there is an order.
pub(crate) fn is_linearizable(keep: usize, operations: &[Operation]) -> bool {
    let seen = operations.iter().filter_map(Operation::seen);
    let seen: BTreeMap<u32, u64> = seen.map(|(number, put)| (put, number)).collect();
    let done = operations.iter().filter(|operation| operation.answer != Some(Answer::Failed));
    let operations: Vec<&Operation> = done.collect();
    assert!(operations.len() <= LONGEST);
    let may_be_missing = |operation: &Operation| match operation.call {
        Call::Put(put) => operation.answer.is_none() && !seen.contains_key(&put),
        _ => operation.answer.is_none(),
    };
    let must = operations.iter().enumerate().filter(|(_, operation)| !may_be_missing(operation));
    let must: u128 = must.map(|(index, _)| 1 << index).sum();
    Search { keep, operations, must, seen, visited: BTreeSet::new() }.orders(0, &Store::default())
}

struct Search<'a> {
    keep: usize,
    operations: Vec<&'a Operation>,
    /// What has been done, for sure.
    must: u128,
    seen: BTreeMap<u32, u64>,
    visited: BTreeSet<(u128, Store)>,
}

impl Search<'_> {
    /// Whether there is an order of what is not done yet.
    fn orders(&mut self, done: u128, store: &Store) -> bool {
        if done & self.must == self.must {
            return true;
        }
        if !self.visited.insert((done, store.clone())) {
            return false;
        }
        let is_left = |index: &usize| done & 1 << index == 0;
        let left: Vec<usize> = (0..self.operations.len()).filter(is_left).collect();
        let musts = left.iter().filter(|index| self.must & 1 << **index != 0);
        let first = musts.map(|index| self.operations[*index].answered).min();
        left.into_iter().any(|index| {
            let operation = self.operations[index];
            first.is_none_or(|first| operation.asked <= first)
                && self
                    .done(store, operation)
                    .is_some_and(|next| self.orders(done | 1 << index, &next))
        })
    }

    /// The store after it has done this, if it then gives this answer.
    fn done(&self, store: &Store, operation: &Operation) -> Option<Store> {
        let mut next = store.clone();
        let newest = store.visible.last();
        let place = |wanted: u64| {
            store.visible.iter().position(|(number, put)| *number == wanted && put.is_some())
        };
        let is_right = match (operation.call, operation.answer) {
            (_, Some(Answer::Torn(_))) => false,
            (Call::Put(put), answer) => {
                let (number, put) = match answer {
                    Some(Answer::Put(number)) => (number, Some(put)),
                    _ => match self.seen.get(&put) {
                        Some(number) => (*number, Some(put)),
                        None => (store.highest + 1, None),
                    },
                };
                next.highest = number;
                next.visible.push((number, put));
                next.thin(self.keep);
                number > store.highest
            }
            (Call::Part { number, writer, of }, answer) => {
                next.parts.insert((number, writer));
                let is_new = number > store.highest;
                let is_whole = (0..of).all(|writer| next.parts.contains(&(number, writer)));
                if is_new && is_whole && answer != Some(Answer::Waits) {
                    next.highest = number;
                    next.visible.push((number, Some(name_of(number))));
                    next.come.insert(number);
                    next.thin(self.keep);
                }
                match answer {
                    Some(Answer::Waits) => is_new,
                    Some(answer) => answer == Answer::Put(number) && next.come.contains(&number),
                    None => true,
                }
            }
            (Call::Pin(number, label), answer) => {
                let is_there = place(number).is_some();
                if is_there && answer != Some(Answer::Nothing) {
                    next.pins.insert(label, number);
                }
                answer.is_none_or(|answer| (answer == Answer::Done) == is_there)
            }
            (Call::Unpin(label), _) => {
                next.pins.remove(&label);
                next.thin(self.keep);
                true
            }
            (Call::Newest, Some(Answer::Found(number, put))) => {
                newest == Some(&(number, Some(put)))
            }
            (Call::Newest, _) => newest.is_none(),
            (Call::Numbered(wanted), Some(Answer::Found(number, put))) => {
                number == wanted && store.visible.contains(&(number, Some(put)))
            }
            (Call::Numbered(number), _) => place(number).is_none(),
            (Call::Wait(wanted, _), Some(Answer::Found(number, put))) => {
                number >= wanted && newest == Some(&(number, Some(put)))
            }
            (Call::Wait(wanted, patience), _) => {
                operation.answered - operation.asked >= patience
                    && newest.is_none_or(|(number, _)| *number < wanted)
            }
            (Call::Delete(number), answer) => {
                let place = place(number);
                if let Some(place) = place.filter(|_| answer != Some(Answer::Nothing)) {
                    next.visible.remove(place);
                }
                answer.is_none_or(|answer| (answer == Answer::Deleted) == place.is_some())
            }
        };
        is_right.then_some(next)
    }
}
