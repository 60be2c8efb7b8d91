//! Class and rank of each element of a block.

use std::hint::select_unpredictable;

use super::layout::{BLOCK_ELEMENTS, MAX_CLASSES};
use crate::element::magnitude_mask;
use crate::isa::{GROUP, Instructions, elements_at_least};

/// Groups of a block.
const GROUPS: usize = BLOCK_ELEMENTS / GROUP;

/// The elements of each class in one block.
///
/// The tables of all classes lie one after the other, so that the loop over groups needs few pointers.
pub(super) struct ClassMaps {
    /// The elements of each class, for each group.
    masks: Box<[[u64; GROUPS]; MAX_CLASSES]>,
    /// Rank of the first element of each class in each group. `u16::MAX` after the last group.
    starts: Box<[[u16; GROUPS]; MAX_CLASSES]>,
    /// Number of elements of each class.
    lens: [usize; MAX_CLASSES],
    /// Number of groups.
    groups: usize,
}

/// The elements of one class in one block.
#[derive(Clone, Copy)]
pub(super) struct ClassMap<'a> {
    masks: &'a [u64; GROUPS],
    starts: &'a [u16; GROUPS],
    len: usize,
}

impl Default for ClassMaps {
    #[expect(clippy::large_stack_arrays, reason = "32 KiB, once for each encoder or decoder")]
    fn default() -> Self {
        Self {
            masks: Box::new([[0; GROUPS]; MAX_CLASSES]),
            starts: Box::new([[u16::MAX; GROUPS]; MAX_CLASSES]),
            lens: [0; MAX_CLASSES],
            groups: 0,
        }
    }
}

impl ClassMaps {
    /// Removes all elements.
    pub(super) fn clear(&mut self) {
        (self.groups, self.lens) = (0, [0; MAX_CLASSES]);
    }

    /// Appends elements of a block to the maps of the first `C` classes, and calls `visit` with the number of each
    /// group. All parts of a block but the last must be whole groups.
    ///
    /// Classes whose threshold is above all patterns stay empty.
    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "fewer than 65,536 elements precede a group"
    )]
    pub(super) fn push<const W: usize, const C: usize, I: Instructions>(
        &mut self,
        isa: I,
        base: &[[u8; W]],
        thresholds: &[u32; MAX_CLASSES - 1],
        mut visit: impl FnMut(usize),
    ) {
        let (groups, tail) = base.as_chunks::<GROUP>();
        // One more than all patterns, so that every threshold fits a signed comparison.
        let thresholds = thresholds.map(|threshold| threshold.min(magnitude_mask::<W>() + 1));
        let (all_masks, all_starts) = (&mut *self.masks, &mut *self.starts);
        let (first, mut lens) = (self.groups, self.lens);
        let mut push = |number: usize, masks: [u64; C]| {
            let number = first.wrapping_add(number) % GROUPS;
            for class in 0..C {
                all_masks[class][number] = masks[class];
                all_starts[class][number] = lens[class] as u16;
                lens[class] = lens[class].wrapping_add(masks[class].count_ones() as usize);
            }
        };
        for (number, group) in groups.iter().enumerate() {
            visit(number);
            push(number, split(u64::MAX, &thresholds, |limit| isa.at_least(group, limit)));
        }
        if !tail.is_empty() {
            let all = u64::MAX >> (GROUP - tail.len());
            let masks = split(all, &thresholds, |limit| elements_at_least(tail, limit));
            push(groups.len(), masks);
        }
        self.lens = lens;
        self.groups = first.wrapping_add(base.len().div_ceil(GROUP));
    }

    /// Ends a block of fewer than 65,536 elements.
    #[inline(always)]
    pub(super) fn finish(&mut self) {
        let end = self.groups.min(GROUPS);
        self.starts.iter_mut().for_each(|starts| starts[end..].fill(u16::MAX));
        self.masks.iter_mut().for_each(|masks| masks[end..].fill(0));
    }

    /// Returns the map of one class.
    #[inline(always)]
    pub(super) fn class(&self, class: usize) -> ClassMap<'_> {
        let [masks, starts] = [class % MAX_CLASSES; 2];
        ClassMap { masks: &self.masks[masks], starts: &self.starts[starts], len: self.lens[masks] }
    }
}

impl<'a> ClassMap<'a> {
    /// Returns the number of elements of the class.
    pub(super) fn len(self) -> usize {
        self.len
    }

    /// Returns the rank of the element at a position, which must be in the class.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "at most 63")]
    pub(super) fn rank(self, position: u16) -> u16 {
        let group = usize::from(position) / GROUP;
        let before = !(u64::MAX << (position % GROUP as u16));
        let count = (self.masks[group] & before).count_ones();
        self.starts[group].wrapping_add(count as u16)
    }

    /// Returns the position of the element with a rank, which must be below [`Self::len`].
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "positions are below 65,536")]
    pub(super) fn position<I: Instructions>(self, isa: I, rank: u16) -> u16 {
        // The last group that starts at or before the rank. The compiler must not make branches of this search: half
        // of them would be mispredicted.
        let mut group = 0;
        let mut step = GROUPS / 2;
        while step > 0 {
            let next = (group + step) % GROUPS;
            group = select_unpredictable(self.starts[next] <= rank, next, group);
            step /= 2;
        }
        let within = rank.wrapping_sub(self.starts[group]) % GROUP as u16;
        let bit = isa.deposit(1 << within, self.masks[group]).trailing_zeros();
        (group * GROUP).wrapping_add(bit as usize) as u16
    }

    /// Returns the mask of the elements and the rank of the first, for each group.
    #[inline(always)]
    pub(super) fn groups(self) -> impl Iterator<Item = (u64, usize)> + 'a {
        let starts = self.starts.iter().map(|start| usize::from(*start));
        self.masks.iter().copied().zip(starts)
    }
}

/// Returns a mask of the elements of each class. `all` is a mask of the elements that the group has.
#[inline(always)]
fn split<const C: usize>(
    all: u64,
    thresholds: &[u32; MAX_CLASSES - 1],
    at_least: impl Fn(u32) -> u64,
) -> [u64; C] {
    let mut above = all;
    std::array::from_fn(|class| {
        let next = if class + 1 < C { at_least(thresholds[class]) } else { 0 };
        let mask = above & !next;
        above = next;
        mask
    })
}
