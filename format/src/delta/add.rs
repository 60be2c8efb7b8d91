//! Adds differences to the elements of a block.

use super::layout::BLOCK_ELEMENTS;
use super::positions::{ESCAPE, for_each_word, has_escape, step};
use crate::element::{load, store};
use crate::isa::{GROUP, Instructions, Kernel};

/// Adds differences to the elements at positions.
pub(super) struct AddAtPositions<'a, const W: usize> {
    pub(super) positions: &'a [u16],
    pub(super) differences: &'a [[u8; W]],
    pub(super) block: &'a mut [[u8; W]],
}

impl<const W: usize> Kernel for AddAtPositions<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        for (position, difference) in self.positions.iter().zip(self.differences) {
            add(self.block, usize::from(*position), load(difference));
        }
    }
}

/// Adds differences to the elements at the set bits of a bitmap.
pub(super) struct AddAtBits<'a, const W: usize> {
    pub(super) bitmap: &'a [u8],
    pub(super) differences: &'a [[u8; W]],
    pub(super) block: &'a mut [[u8; W]],
}

impl<const W: usize> Kernel for AddAtBits<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        let mut differences = self.differences.iter();
        for_each_word(self.bitmap, |number, mut word| {
            while word != 0 {
                let position = (number * GROUP).wrapping_add(word.trailing_zeros() as usize);
                add(self.block, position, differences.next().map_or(0, load));
                word &= word.wrapping_sub(1);
            }
        });
    }
}

/// Adds differences to the elements at gaps.
pub(super) struct AddAtGaps<'a, const W: usize> {
    pub(super) gaps: &'a [u8],
    pub(super) differences: &'a [[u8; W]],
    pub(super) block: &'a mut [[u8; W]],
}

impl<const W: usize> Kernel for AddAtGaps<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        // The compiler omits bounds checks where the block is an array and positions are below its length.
        match <&mut [[u8; W]; BLOCK_ELEMENTS]>::try_from(&mut *self.block) {
            Ok(block) => for_each_change(self.gaps, self.differences, |position, difference| {
                let element = &mut block[position % BLOCK_ELEMENTS];
                *element = store(load(element).wrapping_add(difference));
            }),
            Err(_) => for_each_change(self.gaps, self.differences, |position, difference| {
                add(self.block, position, difference);
            }),
        }
    }
}

/// Calls `visit(position, difference)` for each listed element. For an escape, the difference is 0, and the position
/// is before the next listed one.
#[inline(always)]
fn for_each_change<const W: usize>(
    gaps: &[u8],
    mut differences: &[[u8; W]],
    mut visit: impl FnMut(usize, u32),
) {
    let mut next = 0_usize;
    let (groups, rest) = gaps.as_chunks();
    for group in groups {
        if let Some((first, others)) = differences.split_first_chunk::<8>()
            && !has_escape(*group)
        {
            differences = others;
            for (gap, difference) in group.iter().zip(first) {
                let position = next.wrapping_add(usize::from(*gap));
                next = position.wrapping_add(1);
                visit(position, load(difference));
            }
        } else {
            for gap in group {
                let difference = take_change(&mut differences, *gap);
                visit(step(&mut next, *gap), difference);
            }
        }
    }
    for gap in rest {
        let difference = take_change(&mut differences, *gap);
        visit(step(&mut next, *gap), difference);
    }
}

/// Removes the difference of a gap byte, which is 0 for an escape. Without a branch, which would be predicted badly.
#[inline(always)]
fn take_change<const W: usize>(differences: &mut &[[u8; W]], gap: u8) -> u32 {
    let difference = differences.first().map_or(0, load);
    let is_listed = gap != ESCAPE;
    *differences = differences.get(usize::from(is_listed)..).unwrap_or_default();
    difference & u32::from(is_listed).wrapping_neg()
}

/// Adds to an element modulo `2^(8 * W)`. All positions have been checked: none is outside the block.
#[inline(always)]
fn add<const W: usize>(block: &mut [[u8; W]], position: usize, difference: u32) {
    if let Some(element) = block.get_mut(position) {
        *element = store(load(element).wrapping_add(difference));
    }
}
