//! Positions of the listed elements of a chunk.

use std::ops::Range;

use super::class_map::ClassMaps;
use super::error::mismatch;
use super::layout::{Header, MAX_CLASSES};
use super::positions::{
    GapStats, POSITION_SLACK, RankBits, bitmap_stats, for_each_word, push_positions, read_gaps,
};
use crate::error::Result;
use crate::isa::{GROUP, Instructions, Kernel};

/// Decoded columns of one class, and data derived from them.
#[derive(Default)]
pub(super) struct ClassDecoder {
    /// Gaps, or bitmaps.
    pub(super) gaps: Vec<u8>,
    /// 4-bit codes of the values.
    pub(super) packed: Vec<u8>,
    /// Number of values in the wide column.
    pub(super) wide: usize,
    pub(super) differences: Vec<u8>,
    /// Positions of the listed elements within their blocks, and slack.
    pub(super) positions: Vec<u16>,
    /// Where the next block begins, in `positions` and in `gaps`.
    pub(super) next_position: usize,
    pub(super) next_gap: usize,
    pub(super) ranks: RankBits,
}

impl ClassDecoder {
    /// Prepares `positions` for `listed` elements.
    pub(super) fn start(&mut self, listed: usize) {
        self.positions.resize(listed + POSITION_SLACK, 0);
        (self.next_position, self.next_gap) = (0, 0);
    }

    /// Passes over a block of which no position is needed.
    pub(super) fn skip(&mut self, count: u16, listed: usize) {
        self.take_gaps(count);
        self.next_position += listed;
    }

    pub(super) fn differences<const W: usize>(&self) -> &[[u8; W]] {
        self.differences.as_chunks().0
    }

    /// Returns the next bytes of the position column.
    pub(super) fn take_gaps(&mut self, count: u16) -> Range<usize> {
        let range = self.next_gap..self.next_gap + usize::from(count);
        self.next_gap = range.end;
        range
    }
}

/// Finds the positions of a block of one class.
pub(super) struct ReadPositions<'a> {
    pub(super) class: &'a mut ClassDecoder,
    pub(super) is_bitmap: bool,
    pub(super) count: u16,
    pub(super) listed: usize,
}

impl Kernel for ReadPositions<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        let range = self.class.take_gaps(self.count);
        let ClassDecoder { gaps, positions, next_position, .. } = self.class;
        let positions = &mut positions[*next_position..][..self.listed + POSITION_SLACK];
        *next_position += self.listed;
        read_positions(&gaps[range], self.is_bitmap, positions);
    }
}

/// Writes the positions that gaps or a bitmap list.
#[inline(always)]
fn read_positions(bytes: &[u8], is_bitmap: bool, positions: &mut [u16]) {
    if is_bitmap {
        let mut count = 0;
        for_each_word(bytes, |number, word| {
            push_positions::<4, 1>(word, number * GROUP, positions, &mut count);
        });
    } else {
        read_gaps(bytes, positions);
    }
}

/// Listed elements of a class up to which a search for each is faster than a pass over the block.
const MAX_SEARCHED: usize = 512;

/// Finds the positions of a block of at most `C` classes.
pub(super) struct ResolveRanks<'a, const W: usize, const C: usize> {
    pub(super) base: &'a [[u8; W]],
    pub(super) header: &'a Header,
    pub(super) counts: &'a [u16; MAX_CLASSES],
    pub(super) listed: &'a [usize; MAX_CLASSES],
    pub(super) maps: &'a mut ClassMaps,
    pub(super) classes: &'a mut [ClassDecoder; MAX_CLASSES],
}

impl<const W: usize, const C: usize> Kernel for ResolveRanks<'_, W, C> {
    type Output = Result<()>;

    #[inline(always)]
    fn run<I: Instructions>(self, isa: I) -> Result<()> {
        let Self { base, header, counts, listed, maps, classes } = self;
        maps.clear();
        maps.push::<W, C, I>(isa, base, &header.thresholds, |_| {});
        maps.finish();
        for (class, decoder) in classes.iter_mut().enumerate().take(header.classes) {
            let map = maps.class(class);
            let range = decoder.take_gaps(counts[class]);
            let ClassDecoder { gaps, positions, next_position, ranks, .. } = decoder;
            let bytes = &gaps[range];
            let positions = &mut positions[*next_position..][..listed[class] + POSITION_SLACK];
            *next_position += listed[class];
            let span = if header.bitmaps[class] {
                check_bitmap_len(bytes.len(), map.len()).map_err(mismatch)?;
                bitmap_stats(bytes).span
            } else {
                GapStats::new(bytes).map_or(0, |stats| stats.span)
            };
            if span > map.len() {
                let (rank, len) = (span - 1, map.len());
                return Err(mismatch(format_args!(
                    "rank {rank} in class {class} of {len} elements"
                )));
            }
            read_positions(bytes, header.bitmaps[class], positions);
            if listed[class] <= MAX_SEARCHED {
                for position in &mut positions[..listed[class]] {
                    *position = map.position(isa, *position);
                }
                continue;
            }
            ranks.set(&positions[..listed[class]], map.len());
            let mut count = 0;
            for (number, (mask, start)) in map.groups().enumerate() {
                let listed = isa.deposit(ranks.get(start), mask);
                push_positions::<4, 1>(listed, number * GROUP, positions, &mut count);
            }
        }
        Ok(())
    }
}

/// Checks that a bitmap has a bit for each element. The error is the detail of a message.
pub(super) fn check_bitmap_len(len: usize, elements: usize) -> Result<(), String> {
    if len == elements.div_ceil(8) {
        Ok(())
    } else {
        Err(format!("a bitmap of {len} bytes for {elements} elements"))
    }
}
