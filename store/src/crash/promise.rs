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
    /// What must be gone.
    pub(super) gone: BTreeSet<i64>,
    /// The last rewind that nobody has heard of yet that it is done.
    pub(super) rewind: Option<Rewind>,
}

/// What takes back all versions from its number on, once it is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Rewind {
    number: u64,
    value: i64,
}

impl Promise {
    /// The next value that is put, whatever comes of it.
    pub(super) fn try_next(&mut self) -> i64 {
        let value = i64::try_from(self.tried.len()).unwrap() + 1;
        self.tried.insert(value);
        value
    }

    /// The next value is put as this version, and takes back all from that one on.
    pub(super) fn try_rewind(&mut self, number: u64) -> i64 {
        let value = self.try_next();
        self.doomed.extend(self.acknowledged.range(number..).map(|(number, _)| *number));
        self.rewind = Some(Rewind { number, value });
        value
    }

    /// A put has said that its version is visible.
    pub(super) fn acknowledge(&mut self, number: u64, value: i64) {
        if let Some(rewind) = self.rewind.take_if(|rewind| rewind.value == value) {
            let taken_back = self.acknowledged.split_off(&rewind.number);
            self.gone.extend(taken_back.values());
            self.doomed.retain(|each| *each < rewind.number);
            self.pinned.retain(|each| *each < rewind.number);
        }
        self.acknowledged.insert(number, value);
    }

    /// The highest number that no later version has again.
    pub(super) fn highest(&self) -> Option<u64> {
        let end = self.rewind.map_or(u64::MAX, |rewind| rewind.number);
        self.acknowledged.range(..end).next_back().map(|(number, _)| *number)
    }

    /// Whether a store keeps it: the visible versions, by number.
    pub(super) fn expect(&self, visible: &BTreeMap<u64, i64>) -> Result<(), String> {
        let is_done = |rewind: &Rewind| visible.values().any(|value| *value == rewind.value);
        let rewound = self.rewind.filter(is_done);
        for (number, value) in visible {
            if !self.tried.contains(value) {
                return Err(format!("version {number} is {value}, which nobody has put"));
            }
            if rewound.is_some_and(|rewind| *number >= rewind.number && *value < rewind.value) {
                return Err(format!("version {number}, {value}, is not taken back"));
            }
            let may_be_another = rewound.is_some_and(|rewind| *number >= rewind.number);
            if !may_be_another && self.acknowledged.get(number).is_some_and(|put| put != value) {
                return Err(format!("version {number} is {value}, which it was not"));
            }
            if self.gone.contains(value) {
                return Err(format!("version {number}, {value}, is back"));
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
