//! What a store has promised.

use std::collections::{BTreeMap, BTreeSet};

/// What is promised at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Promise {
    /// Numbers of versions that were acknowledged, with what they are.
    pub(super) acknowledged: BTreeMap<u64, i64>,
    /// All that somebody has tried to put.
    pub(super) tried: BTreeSet<i64>,
    /// How many of the newest versions are kept at least.
    pub(super) keep: u32,
    /// Those that are kept though they are older.
    pub(super) pinned: BTreeSet<u64>,
    /// Those that may be gone.
    pub(super) doomed: BTreeSet<u64>,
    /// Those that must be gone.
    pub(super) deleted: BTreeSet<u64>,
}

impl Promise {
    /// The next value that is put, whatever comes of it.
    pub(super) fn try_next(&mut self) -> i64 {
        let value = i64::try_from(self.tried.len()).unwrap() + 1;
        self.tried.insert(value);
        value
    }

    /// Whether a store keeps it: the visible versions, by number.
    pub(super) fn expect(&self, visible: &BTreeMap<u64, i64>) -> Result<(), String> {
        for (number, value) in visible {
            if !self.tried.contains(value) {
                return Err(format!("version {number} is {value}, which nobody has put"));
            }
            if self.acknowledged.get(number).is_some_and(|put| put != value) {
                return Err(format!("version {number} is {value}, which it was not"));
            }
            if self.deleted.contains(number) {
                return Err(format!("version {number} is back"));
            }
        }
        for (number, value) in &self.acknowledged {
            let newer = visible.range(number + 1..).count();
            let is_kept =
                newer < usize::try_from(self.keep).unwrap() || self.pinned.contains(number);
            if is_kept && !self.doomed.contains(number) && !visible.contains_key(number) {
                return Err(format!("version {number}, {value}, is lost"));
            }
        }
        Ok(())
    }
}
