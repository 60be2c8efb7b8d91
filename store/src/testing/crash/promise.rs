//! What a store has promised.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

/// The epoch and the number of a version: each later version has a higher place.
pub(super) type Place = (u32, u64);

/// What is promised at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Promise {
    /// Places of versions that were acknowledged, with what they are.
    pub(super) acknowledged: BTreeMap<Place, i64>,
    /// All that somebody has tried to put.
    pub(super) tried: BTreeSet<i64>,
    /// How many of the newest versions are kept at least.
    pub(super) keep: u32,
    /// Those that are kept though they are older.
    pub(super) pinned: BTreeSet<Place>,
    /// Those that may be gone.
    pub(super) doomed: BTreeSet<Place>,
    /// What must be gone.
    pub(super) gone: BTreeSet<i64>,
    /// The number from which on a rewind takes versions back that has begun, and of which nobody has heard yet that it is
    /// visible.
    pub(super) rewind: Option<u64>,
}

impl Promise {
    /// The next value that is put, whatever comes of it.
    pub(super) fn try_next(&mut self) -> i64 {
        let value = i64::try_from(self.tried.len()).unwrap() + 1;
        self.tried.insert(value);
        value
    }

    /// A put has said that its version is visible.
    pub(super) fn acknowledge(&mut self, place: Place, value: i64) {
        let is_first = self.newest().is_none_or(|(epoch, _)| epoch < place.0);
        if let Some(number) = self.rewind.take_if(|_| is_first) {
            let is_back = |place: &Place| place.1 >= number;
            self.gone
                .extend(self.acknowledged.extract_if(.., |place, _| is_back(place)).map(|it| it.1));
            self.doomed.retain(|place| !is_back(place));
            self.pinned.retain(|place| !is_back(place));
        }
        self.acknowledged.insert(place, value);
    }

    /// The highest place that was acknowledged: what comes later has a higher one.
    pub(super) fn newest(&self) -> Option<Place> {
        self.acknowledged.keys().next_back().copied()
    }

    /// Whether a store keeps it: the visible versions, by place.
    pub(super) fn expect(&self, visible: &BTreeMap<Place, i64>) -> Result<(), String> {
        let numbers = visible.keys().map(|place| place.1);
        if !numbers.is_sorted_by(|one, next| one < next) {
            return Err(format!("what was taken back is there: {visible:?}"));
        }
        for (place, value) in visible {
            if !self.tried.contains(value) {
                return Err(format!("version {place:?} is {value}, which nobody has put"));
            }
            if self.acknowledged.get(place).is_some_and(|put| put != value) {
                return Err(format!("version {place:?} is {value}, which it was not"));
            }
            if self.acknowledged.iter().any(|(other, put)| put == value && other != place) {
                return Err(format!("version {place:?} is {value}, which is another one"));
            }
            if self.gone.contains(value) {
                return Err(format!("version {place:?}, {value}, is back"));
            }
        }
        for (place, value) in &self.acknowledged {
            let newer = visible.range((Excluded(place), Unbounded));
            let is_kept = newer.clone().count() < usize::try_from(self.keep).unwrap()
                || self.pinned.contains(place);
            // Only what takes it back excuses that it is gone, once that is there.
            let is_back = self.rewind.is_some_and(|number| place.1 >= number)
                && visible.keys().any(|(epoch, _)| *epoch > place.0);
            let is_owed = is_kept && !is_back && !self.doomed.contains(place);
            if is_owed && !visible.contains_key(place) {
                return Err(format!("version {place:?}, {value}, is lost"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Versions (0, 1) to (0, 3), of which three are kept, and a rewind to 2 that has begun.
    fn rewinding() -> Promise {
        let mut promise = Promise { keep: 3, ..Promise::default() };
        for number in 1..=3 {
            let value = promise.try_next();
            promise.acknowledge((0, number), value);
        }
        assert_eq!(promise.try_next(), 4);
        promise.rewind = Some(2);
        promise
    }

    #[test]
    fn a_rewind_is_done_as_a_whole_or_not_at_all() {
        let promise = rewinding();
        let expect = |visible: &[(Place, i64)]| {
            promise.expect(&visible.iter().copied().collect()).map_err(|_| ())
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
    fn what_a_rewind_took_back_stays_away() {
        for (place, value) in [((1, 2), 4), ((1, 3), 5)] {
            // The rewind itself, or what follows it, is the first that is heard of.
            let mut promise = rewinding();
            promise.tried.insert(5);
            promise.acknowledge(place, value);
            assert_eq!(promise.rewind, None);
            assert_eq!(promise.newest(), Some(place));
            promise.expect(&[((0, 1), 1), (place, value)].into()).unwrap();
            for back in [((0, 2), 2), ((0, 3), 3)] {
                promise.expect(&[((0, 1), 1), back].into()).unwrap_err();
                promise.expect(&[((0, 1), 1), back, (place, value)].into()).unwrap_err();
            }
        }
    }
}
