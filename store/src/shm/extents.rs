//! Free extents of a range of memory.

use std::collections::BTreeMap;

/// Lengths of the free extents, by their offsets. No two of them are adjacent.
#[derive(Debug, PartialEq)]
pub(super) struct Extents(BTreeMap<u64, u64>);

impl Extents {
    /// Creates one free extent of `len` bytes.
    pub(super) fn new(len: u64) -> Self {
        Self(BTreeMap::from([(0, len)]))
    }

    /// Allocates `len` bytes, at least 1, from the first extent that has them. Returns the offset.
    pub(super) fn allocate(&mut self, len: u64) -> Option<u64> {
        let (&start, &free) = self.0.iter().find(|(_, free)| **free >= len)?;
        self.0.remove(&start);
        if free > len {
            self.0.insert(start + len, free - len);
        }
        Some(start)
    }

    /// Frees an allocated range.
    pub(super) fn free(&mut self, mut start: u64, mut len: u64) {
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
        /// The reference model looks at each byte.
        #[test]
        fn allocate_takes_the_first_fit(
            operations in vec((any::<bool>(), 1..12_u64, any::<Index>()), 0..80)
        ) {
            let (mut extents, mut taken) = (Extents::new(LEN), Vec::new());
            let mut free: BTreeSet<u64> = (0..LEN).collect();
            for (is_take, len, index) in operations {
                if is_take || taken.is_empty() {
                    let first = (0..LEN).find(|start| (*start..start + len).all(|at| free.contains(&at)));
                    prop_assert_eq!(extents.allocate(len), first);
                    if let Some(start) = first {
                        free.retain(|at| !(start..start + len).contains(at));
                        taken.push((start, len));
                    }
                } else {
                    let (start, len) = taken.swap_remove(index.index(taken.len()));
                    free.extend(start..start + len);
                    extents.free(start, len);
                }
            }
            for (start, len) in taken {
                extents.free(start, len);
            }
            prop_assert_eq!(extents, Extents::new(LEN));
        }
    }
}
