//! What is free of a stretch of memory.

use std::collections::BTreeMap;

/// How long each free part is, by where it begins; no two of them touch.
#[derive(Debug, PartialEq)]
pub(super) struct Extents(BTreeMap<u64, u64>);

impl Extents {
    /// All of so many bytes.
    pub(super) fn all(len: u64) -> Self {
        Self(BTreeMap::from([(0, len)]))
    }

    /// Takes so many bytes, at least one, from the first part that has them; says where they begin.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        let (&start, &free) = self.0.iter().find(|(_, free)| **free >= len)?;
        self.0.remove(&start);
        if free > len {
            self.0.insert(start + len, free - len);
        }
        Some(start)
    }

    /// Gives back what was taken.
    pub(super) fn give(&mut self, mut start: u64, mut len: u64) {
        if let Some(after) = self.0.remove(&(start + len)) {
            len += after;
        }
        if let Some((&before, &free)) = self.0.range(..start).next_back()
            && before + free == start
        {
            (start, len) = (before, free + len);
        }
        self.0.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    const LEN: u64 = 64;

    proptest! {
        /// As if each byte were looked at.
        #[test]
        fn what_is_taken_begins_where_so_much_is_free_first(
            turns in vec((any::<bool>(), 1..12_u64, any::<Index>()), 0..80)
        ) {
            let (mut extents, mut taken) = (Extents::all(LEN), Vec::new());
            let mut free: BTreeSet<u64> = (0..LEN).collect();
            for (takes, len, which) in turns {
                if takes || taken.is_empty() {
                    let first = (0..LEN).find(|start| (*start..start + len).all(|at| free.contains(&at)));
                    prop_assert_eq!(extents.take(len), first);
                    if let Some(start) = first {
                        free.retain(|at| !(start..start + len).contains(at));
                        taken.push((start, len));
                    }
                } else {
                    let (start, len) = taken.swap_remove(which.index(taken.len()));
                    free.extend(start..start + len);
                    extents.give(start, len);
                }
            }
            for (start, len) in taken {
                extents.give(start, len);
            }
            prop_assert_eq!(extents, Extents::all(LEN));
        }
    }
}
