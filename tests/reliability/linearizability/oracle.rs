//! The slow checker: the search of Wing and Gong for an order, with the memoization of Lowe.
//!
//! It uses no timeline. It tries the operations in every order that their times allow, on a simple
//! sequential store, and returns whether one order gives all responses.

use std::collections::{BTreeMap, BTreeSet};

use super::history::{Call, Operation, Response, shared_put_id};

/// Maximum number of operations.
pub(crate) const MAX_OPERATIONS: usize = 128;

/// A sequential store.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Store {
    /// Number and put. `None` is a put that no client has observed.
    visible: Vec<(u64, Option<u32>)>,
    highest: u64,
    /// Parts that may be stored, by number and writer.
    parts: BTreeSet<(u64, u32)>,
    /// Numbers of versions of several writers that have become visible.
    completed: BTreeSet<u64>,
    /// Version numbers by label.
    pins: BTreeMap<u32, u64>,
}

impl Store {
    /// Applies retention: keeps the newest versions, and those with a label.
    fn apply_retention(&mut self, keep: usize) {
        let surplus = self.visible.len().saturating_sub(keep);
        let old: Vec<_> = self.visible.drain(..surplus).collect();
        let is_held = |(number, _): &(u64, _)| self.pins.values().any(|pinned| pinned == number);
        self.visible = old.into_iter().filter(is_held).chain(self.visible.drain(..)).collect();
    }
}

/// Returns whether an order exists.
pub(crate) fn is_linearizable(keep: usize, operations: &[Operation]) -> bool {
    let seen = operations.iter().filter_map(Operation::observed_version);
    let observed: BTreeMap<u32, u64> = seen.map(|(number, put)| (put, number)).collect();
    let effective =
        operations.iter().filter(|operation| operation.response != Some(Response::Failed));
    let operations: Vec<&Operation> = effective.collect();
    assert!(operations.len() <= MAX_OPERATIONS);
    let is_optional = |operation: &Operation| match operation.call {
        Call::Put(put) => operation.response.is_none() && !observed.contains_key(&put),
        _ => operation.response.is_none(),
    };
    let required = operations.iter().enumerate().filter(|(_, operation)| !is_optional(operation));
    let required: u128 = required.map(|(index, _)| 1 << index).sum();
    Search { keep, operations, required, observed, visited: BTreeSet::new() }
        .has_order(0, &Store::default())
}

struct Search<'a> {
    keep: usize,
    operations: Vec<&'a Operation>,
    /// Bit set of the operations that certainly took effect.
    required: u128,
    observed: BTreeMap<u32, u64>,
    visited: BTreeSet<(u128, Store)>,
}

impl Search<'_> {
    /// Returns whether an order exists of the operations that are not executed yet.
    fn has_order(&mut self, executed: u128, store: &Store) -> bool {
        if executed & self.required == self.required {
            return true;
        }
        if !self.visited.insert((executed, store.clone())) {
            return false;
        }
        let is_remaining = |index: &usize| executed & 1 << index == 0;
        let remaining: Vec<usize> = (0..self.operations.len()).filter(is_remaining).collect();
        let required_left = remaining.iter().filter(|index| self.required & 1 << **index != 0);
        let earliest_response =
            required_left.map(|index| self.operations[*index].returned_at).min();
        remaining.into_iter().any(|index| {
            let operation = self.operations[index];
            earliest_response
                .is_none_or(|earliest_response| operation.invoked_at <= earliest_response)
                && self
                    .execute(store, operation)
                    .is_some_and(|next| self.has_order(executed | 1 << index, &next))
        })
    }

    /// Executes an operation. Returns the store after it, if the response is right.
    fn execute(&self, store: &Store, operation: &Operation) -> Option<Store> {
        let mut next = store.clone();
        let newest = store.visible.last();
        let find = |wanted: u64| {
            store.visible.iter().position(|(number, put)| *number == wanted && put.is_some())
        };
        let is_consistent = match (operation.call, operation.response) {
            (_, Some(Response::Torn(_))) => false,
            (Call::Put(put), answer) => {
                let (number, put) = match answer {
                    Some(Response::Put(number)) => (number, Some(put)),
                    _ => match self.observed.get(&put) {
                        Some(number) => (*number, Some(put)),
                        None => (store.highest + 1, None),
                    },
                };
                next.highest = number;
                next.visible.push((number, put));
                next.apply_retention(self.keep);
                number > store.highest
            }
            (Call::Part { number, writer, writers }, answer) => {
                next.parts.insert((number, writer));
                let is_new = number > store.highest;
                let is_whole = (0..writers).all(|writer| next.parts.contains(&(number, writer)));
                if is_new && is_whole && answer != Some(Response::PartsMissing) {
                    next.highest = number;
                    next.visible.push((number, Some(shared_put_id(number))));
                    next.completed.insert(number);
                    next.apply_retention(self.keep);
                }
                match answer {
                    Some(Response::PartsMissing) => is_new,
                    Some(answer) => {
                        answer == Response::Put(number) && next.completed.contains(&number)
                    }
                    None => true,
                }
            }
            (Call::Pin(number, label), answer) => {
                let exists = find(number).is_some();
                if exists && answer != Some(Response::NotFound) {
                    next.pins.insert(label, number);
                }
                answer.is_none_or(|answer| (answer == Response::Done) == exists)
            }
            (Call::Unpin(label), _) => {
                next.pins.remove(&label);
                next.apply_retention(self.keep);
                true
            }
            (Call::GetNewest, Some(Response::Found(number, put))) => {
                newest == Some(&(number, Some(put)))
            }
            (Call::GetNewest, _) => newest.is_none(),
            (Call::GetVersion(wanted), Some(Response::Found(number, put))) => {
                number == wanted && store.visible.contains(&(number, Some(put)))
            }
            (Call::GetVersion(number), _) => find(number).is_none(),
            (Call::Wait(wanted, _), Some(Response::Found(number, put))) => {
                number >= wanted && newest == Some(&(number, Some(put)))
            }
            (Call::Wait(wanted, timeout), _) => {
                operation.returned_at - operation.invoked_at >= timeout
                    && newest.is_none_or(|(number, _)| *number < wanted)
            }
            (Call::Delete(number), answer) => {
                let place = find(number);
                if let Some(place) = place.filter(|_| answer != Some(Response::NotFound)) {
                    next.visible.remove(place);
                }
                answer.is_none_or(|answer| (answer == Response::Deleted) == place.is_some())
            }
        };
        is_consistent.then_some(next)
    }
}
