//! The state that a store must have after a crash, given the results that it has returned.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

/// Epoch and number of a version. Each later version has a greater position.
pub(super) type Position = (u32, u64);

/// The state that is expected of a store at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct ExpectedState {
    /// Values of acknowledged versions, by position.
    pub(super) acknowledged: BTreeMap<Position, i64>,
    /// All values that were passed to a put, successful or not.
    pub(super) attempted: BTreeSet<i64>,
    /// Minimum number of the newest versions that the store retains.
    pub(super) keep: u32,
    /// Older versions that the store retains because they are pinned.
    pub(super) pinned: BTreeSet<Position>,
    /// Versions that may be missing.
    pub(super) may_be_missing: BTreeSet<Position>,
    /// Values that must be missing.
    pub(super) must_be_missing: BTreeSet<i64>,
    /// First version number that a rewind in progress removes. Set until the rewind is acknowledged.
    pub(super) rewind: Option<u64>,
}

impl ExpectedState {
    /// Returns the value of the next put, and records it as tried.
    pub(super) fn next_value(&mut self) -> i64 {
        let value = i64::try_from(self.attempted.len()).unwrap() + 1;
        self.attempted.insert(value);
        value
    }

    /// Records that a put has reported its version as visible.
    pub(super) fn acknowledge(&mut self, place: Position, value: i64) {
        let is_first = self.newest().is_none_or(|(epoch, _)| epoch < place.0);
        if let Some(number) = self.rewind.take_if(|_| is_first) {
            let is_rewound = |place: &Position| place.1 >= number;
            self.must_be_missing.extend(
                self.acknowledged.extract_if(.., |place, _| is_rewound(place)).map(|it| it.1),
            );
            self.may_be_missing.retain(|place| !is_rewound(place));
            self.pinned.retain(|place| !is_rewound(place));
        }
        self.acknowledged.insert(place, value);
    }

    /// Returns the greatest acknowledged position. Later versions must have greater ones.
    pub(super) fn newest(&self) -> Option<Position> {
        self.acknowledged.keys().next_back().copied()
    }

    /// Checks the visible versions of a store, by position, against this state.
    ///
    /// # Errors
    ///
    /// A description of the first difference.
    pub(super) fn check(&self, visible: &BTreeMap<Position, i64>) -> Result<(), String> {
        let numbers = visible.keys().map(|place| place.1);
        if !numbers.is_sorted_by(|one, next| one < next) {
            return Err(format!("what was taken back is there: {visible:?}"));
        }
        for (place, value) in visible {
            if !self.attempted.contains(value) {
                return Err(format!("version {place:?} is {value}, which nobody has put"));
            }
            if self.acknowledged.get(place).is_some_and(|put| put != value) {
                return Err(format!("version {place:?} is {value}, which it was not"));
            }
            if self.acknowledged.iter().any(|(other, put)| put == value && other != place) {
                return Err(format!("version {place:?} is {value}, which is another one"));
            }
            if self.must_be_missing.contains(value) {
                return Err(format!("version {place:?}, {value}, is back"));
            }
        }
        for (place, value) in &self.acknowledged {
            let newer = visible.range((Excluded(place), Unbounded));
            let is_kept = newer.clone().count() < usize::try_from(self.keep).unwrap()
                || self.pinned.contains(place);
            // A rewind in progress may have removed the version, but only together with its own version becoming
            // visible.
            let is_rewound = self.rewind.is_some_and(|number| place.1 >= number)
                && visible.keys().any(|(epoch, _)| *epoch > place.0);
            let must_exist = is_kept && !is_rewound && !self.may_be_missing.contains(place);
            if must_exist && !visible.contains_key(place) {
                return Err(format!("version {place:?}, {value}, is lost"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the state with versions (0, 1) to (0, 3), `keep` = 3, and a rewind to number 2 in progress.
    fn during_rewind() -> ExpectedState {
        let mut promise = ExpectedState { keep: 3, ..ExpectedState::default() };
        for number in 1..=3 {
            let value = promise.next_value();
            promise.acknowledge((0, number), value);
        }
        assert_eq!(promise.next_value(), 4);
        promise.rewind = Some(2);
        promise
    }

    #[test]
    fn rewind_is_atomic() {
        let promise = during_rewind();
        let expect = |visible: &[(Position, i64)]| {
            promise.check(&visible.iter().copied().collect()).map_err(|_| ())
        };
        for good in [&[((0, 1), 1), ((0, 2), 2), ((0, 3), 3)][..], &[((0, 1), 1), ((1, 2), 4)]] {
            assert_eq!(expect(good), Ok(()), "{good:?}");
        }
        for bad in [
            &[][..],
            &[((0, 1), 1)],
            &[((0, 1), 1), ((0, 2), 2)],
            &[((0, 1), 1), ((0, 3), 3)],
            &[((0, 1), 1), ((0, 2), 2), ((1, 2), 4)],
            &[((0, 1), 1), ((0, 3), 3), ((1, 2), 4)],
            &[((0, 1), 1), ((0, 2), 2), ((0, 3), 3), ((1, 2), 4)],
            &[((1, 2), 4)],
            &[((0, 1), 1), ((1, 2), 2)],
            &[((0, 1), 2), ((1, 2), 4)],
        ] {
            expect(bad).unwrap_err();
        }
    }

    #[test]
    fn versions_removed_by_rewind_stay_removed() {
        for (place, value) in [((1, 2), 4), ((1, 3), 5)] {
            // The first acknowledged version is the rewind itself, or a version after it.
            let mut promise = during_rewind();
            promise.attempted.insert(5);
            promise.acknowledge(place, value);
            assert_eq!(promise.rewind, None);
            assert_eq!(promise.newest(), Some(place));
            promise.check(&[((0, 1), 1), (place, value)].into()).unwrap();
            for back in [((0, 2), 2), ((0, 3), 3)] {
                promise.check(&[((0, 1), 1), back].into()).unwrap_err();
                promise.check(&[((0, 1), 1), back, (place, value)].into()).unwrap_err();
            }
        }
    }
}
