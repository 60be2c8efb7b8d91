//! Positions of listed elements: masks, gaps and rank bitmaps.

/// Gap byte that means: 255 more, and the gap goes on in the next byte.
pub(super) const ESCAPE: u8 = 255;

/// Entries after the last one that [`push_positions`] may overwrite.
pub(super) const POSITION_SLACK: usize = 8;

/// Writes the positions of the set bits of `mask`, one of `STRIDE` bits for each element, to `positions[*count..]`, and increases `count` by their number.
///
/// Writes `FIRST` entries in any case, so that most masks need no branch. `positions` must have
/// [`POSITION_SLACK`] entries more than there are positions.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "positions are below 65,536")]
pub(super) fn push_positions<const FIRST: usize, const STRIDE: usize>(
    mut mask: u64,
    start: usize,
    positions: &mut [u16],
    count: &mut usize,
) {
    let end = count.wrapping_add(mask.count_ones() as usize);
    let mut at = *count;
    loop {
        for entry in &mut positions[at..at.wrapping_add(FIRST)] {
            *entry = start.wrapping_add(mask.trailing_zeros() as usize / STRIDE) as u16;
            mask &= mask.wrapping_sub(1);
        }
        at = at.wrapping_add(FIRST);
        if at >= end {
            break;
        }
    }
    *count = end;
}

/// Returns the largest number of gap bytes of `count` positions.
pub(super) fn max_gap_bytes(count: usize) -> usize {
    count + 65_536 / usize::from(ESCAPE)
}

/// Gaps that are written or applied at once, if none of them needs an escape.
const LANES: usize = 16;

/// Appends the gaps between ascending positions.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "gaps below 255 and remainders fit a byte")]
pub(super) fn push_gaps(positions: &[u16], gaps: &mut Vec<u8>) {
    let mut at = gaps.len();
    gaps.resize(at + max_gap_bytes(positions.len()) + LANES, 0);
    let mut last = u16::MAX;
    let (groups, rest) = positions.as_chunks::<LANES>();
    for group in groups {
        let mut lanes = [0_u16; LANES];
        for (lane, (position, before)) in
            lanes.iter_mut().zip(group.iter().zip([last].iter().chain(group)))
        {
            *lane = position.wrapping_sub(*before).wrapping_sub(1);
        }
        last = group[LANES - 1];
        if lanes.iter().fold(true, |all, gap| all & (*gap < u16::from(ESCAPE))) {
            if let Some(entries) = gaps[at..].first_chunk_mut::<LANES>() {
                *entries = lanes.map(|gap| gap as u8);
            }
            at = at.wrapping_add(LANES);
        } else {
            for gap in lanes {
                push_gap(gap, gaps, &mut at);
            }
        }
    }
    for position in rest {
        push_gap(position.wrapping_sub(last).wrapping_sub(1), gaps, &mut at);
        last = *position;
    }
    gaps.truncate(at);
}

/// Writes one gap, and as many escapes as it needs.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the remainder is below 255")]
fn push_gap(gap: u16, gaps: &mut [u8], at: &mut usize) {
    // `gap / 255`, exact for all u16.
    let escapes = u32::from(gap).wrapping_mul(257).wrapping_add(257) >> 16;
    // Written in any case, because a branch would be predicted badly.
    if let Some(entries) = gaps[*at..].first_chunk_mut::<4>() {
        *entries = [ESCAPE; 4];
    }
    if escapes > 4 {
        gaps[*at..at.wrapping_add(escapes as usize)].fill(ESCAPE);
    }
    *at = at.wrapping_add(escapes as usize);
    gaps[*at] = u32::from(gap).wrapping_sub(escapes.wrapping_mul(255)) as u8;
    *at = at.wrapping_add(1);
}

/// Number of positions in a run of gap bytes, and the elements that they span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GapStats {
    pub(super) listed: usize,
    /// One more than the last position.
    pub(super) span: usize,
}

impl GapStats {
    /// Returns the statistics, or `None` if the last byte is an escape.
    #[inline(always)]
    pub(super) fn new(gaps: &[u8]) -> Option<Self> {
        if gaps.last() == Some(&ESCAPE) {
            return None;
        }
        let (mut sum, mut escapes) = (0_usize, 0_usize);
        // 128 bytes at a time: their sum fits a u16 and the count of escapes a u8, which the compiler vectorizes well.
        for part in gaps.chunks(128) {
            sum += usize::from(part.iter().fold(0_u16, |sum, gap| sum.wrapping_add((*gap).into())));
            let count = |count: u8, gap: &u8| count.wrapping_add(u8::from(*gap == ESCAPE));
            escapes += usize::from(part.iter().fold(0_u8, count));
        }
        let listed = gaps.len() - escapes;
        Some(Self { listed, span: sum + listed })
    }
}

/// Moves `next` by one gap byte, and returns the position before it, which is listed if the byte is no escape.
#[inline(always)]
pub(super) fn step(next: &mut usize, gap: u8) -> usize {
    *next = next.wrapping_add(usize::from(gap)).wrapping_add(usize::from(gap != ESCAPE));
    next.wrapping_sub(1)
}

/// Returns whether one of 8 gap bytes is an escape.
#[inline(always)]
pub(super) fn has_escape(gaps: [u8; 8]) -> bool {
    let inverted = !u64::from_le_bytes(gaps);
    let low = 0x0101_0101_0101_0101;
    // Bit 7 of the lowest byte of `inverted` that is 0, if there is one.
    inverted.wrapping_sub(low) & !inverted & low << 7 != 0
}

/// Writes the positions of gaps to the front of `positions`.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "positions are below 65,536")]
pub(super) fn read_gaps(gaps: &[u8], positions: &mut [u16]) {
    let (mut next, mut count) = (0, 0_usize);
    for gap in gaps {
        let position = step(&mut next, *gap);
        // Written for escapes too, because a branch would be predicted badly.
        if let Some(entry) = positions.get_mut(count) {
            *entry = position as u16;
        }
        count = count.wrapping_add(usize::from(*gap != ESCAPE));
    }
}

/// Bits by rank within a class, for one block.
pub(super) struct RankBits {
    words: Box<[u64; WORDS]>,
    len: usize,
}

/// Words of [`RankBits`]: one bit for each element of a block, and one word that [`RankBits::get`] may read.
const WORDS: usize = 65_536 / 64 + 1;

impl Default for RankBits {
    fn default() -> Self {
        Self { words: Box::new([0; WORDS]), len: 0 }
    }
}

impl RankBits {
    /// Sets the bits of these ranks, and the length.
    #[inline(always)]
    pub(super) fn set(&mut self, ranks: &[u16], len: usize) {
        self.clear();
        for rank in ranks {
            self.words[usize::from(rank / 64)] |= 1 << (rank % 64);
        }
        self.len = len;
    }

    /// Sets all bits to 0 and the length to 0.
    #[inline(always)]
    pub(super) fn clear(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }

    /// Returns 64 bits from bit `start`.
    #[inline(always)]
    pub(super) fn get(&self, start: usize) -> u64 {
        let (word, shift) = (start / 64, start % 64);
        match self.words.get(word..word.wrapping_add(2)) {
            Some([low, high]) => low >> shift | high << 1 << (63 - shift),
            _ => 0,
        }
    }

    fn words(&self) -> &[u64] {
        &self.words[..self.len.div_ceil(64)]
    }

    /// Appends the bits as a bitmap, 8 in a byte, the lowest rank in bit 0.
    pub(super) fn write_bitmap(&self, bitmap: &mut Vec<u8>) {
        let end = bitmap.len() + self.len.div_ceil(8);
        self.words().iter().for_each(|word| bitmap.extend(word.to_le_bytes()));
        bitmap.truncate(end);
    }
}

/// Number of set bits of a bitmap, and one more than the position of the last.
#[inline(always)]
pub(super) fn bitmap_stats(bitmap: &[u8]) -> GapStats {
    let listed = bitmap.iter().map(|byte| byte.count_ones() as usize).sum();
    let span = bitmap.iter().rposition(|byte| *byte != 0);
    let span = span.map_or(0, |at| 8 * at + 8 - bitmap[at].leading_zeros() as usize);
    GapStats { listed, span }
}

/// Calls `visit` for each 64 bits of a bitmap, the last of which may be missing.
#[inline(always)]
pub(super) fn for_each_word(bitmap: &[u8], mut visit: impl FnMut(usize, u64)) {
    let (words, rest) = bitmap.as_chunks::<8>();
    words.iter().enumerate().for_each(|(number, word)| visit(number, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    visit(words.len(), u64::from_le_bytes(last));
}
