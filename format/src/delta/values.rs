//! Values: differences of bit patterns, as codes of 4, 8 and `8 * W` bits.
//!
//! The zigzag code of a difference is at least 1. Codes 1 to 15 are stored in 4 bits, 16 to 270 in 8 more, and all
//! others as a difference of `W` bytes.

use super::positions::{POSITION_SLACK, for_each_word, push_positions};
use crate::element::{store, unzigzag, zigzag};

/// 4-bit code of a value in the wide column.
pub(super) const WIDE: u8 = 15;

/// Zigzag code of the first value in the wide column.
const WIDE_START: u32 = 16;

/// Byte of the wide column of a value in the column of exceptions.
pub(super) const EXCEPTION: u8 = 255;

/// Values of one class.
#[derive(Default)]
pub(super) struct Values {
    /// 4-bit codes, one in a byte.
    pub(super) codes: Vec<u8>,
    pub(super) wide: Vec<u8>,
    pub(super) exceptions: Vec<u8>,
}

impl Values {
    pub(super) fn clear(&mut self) {
        self.codes.clear();
        self.wide.clear();
        self.exceptions.clear();
    }

    /// Appends differences. None of them is 0.
    #[inline(always)]
    pub(super) fn push<const W: usize>(
        &mut self,
        mut differences: impl ExactSizeIterator<Item = u32>,
    ) {
        self.codes.reserve(differences.len());
        while differences.len() >= LANES {
            // The lanes are computed in passes, all but the first of which the compiler vectorizes.
            let (mut lanes, mut codes) = ([0; LANES], [0; LANES]);
            for lane in &mut lanes {
                *lane = differences.next().unwrap_or(0);
            }
            for (code, lane) in codes.iter_mut().zip(&lanes) {
                *code = narrow_code(zigzag::<W>(*lane));
            }
            self.codes.extend_from_slice(&codes);
            if codes.iter().fold(0, |max, code| max.max(*code)) == WIDE {
                self.push_wide::<W>(&lanes);
            }
        }
        for difference in differences {
            self.codes.push(narrow_code(zigzag::<W>(difference)));
            self.push_wide::<W>(&[difference]);
        }
    }

    /// Appends the values among these whose code is [`WIDE`].
    #[inline(always)]
    fn push_wide<const W: usize>(&mut self, differences: &[u32]) {
        for difference in differences {
            let zigzag = zigzag::<W>(*difference);
            if narrow_code(zigzag) == WIDE {
                let wide = zigzag.wrapping_sub(WIDE_START);
                let byte = u8::try_from(wide).unwrap_or(EXCEPTION);
                self.wide.push(byte);
                if byte == EXCEPTION {
                    self.exceptions.extend(store::<W>(*difference));
                }
            }
        }
    }

    /// Packs the codes in pairs, the first in the low bits. The last high bits may be unused and are 0 then.
    #[inline(always)]
    pub(super) fn pack(&self, packed: &mut Vec<u8>) {
        let (pairs, rest) = self.codes.as_chunks::<2>();
        packed.clear();
        packed.extend(pairs.iter().map(|[low, high]| low | high << 4));
        packed.extend(rest);
    }
}

/// Differences that are encoded at once.
const LANES: usize = 16;

/// Returns the 4-bit code of a zigzag code.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "at most 15")]
fn narrow_code(zigzag: u32) -> u8 {
    zigzag.wrapping_sub(1).min(WIDE.into()) as u8
}

/// Returns the bytes of `listed` differences in a sparse block as they are before entropy coding, at most.
pub(super) fn max_value_bytes<const W: usize>(listed: usize) -> usize {
    listed.div_ceil(2) + listed * (1 + W)
}

/// Returns the number of bytes that differences need in the wide column and in that of exceptions.
#[inline(always)]
pub(super) fn wide_bytes<const W: usize>(differences: impl Iterator<Item = u32>) -> usize {
    let bytes = |difference| {
        let zigzag = zigzag::<W>(difference);
        let exception = zigzag >= WIDE_START + u32::from(EXCEPTION);
        usize::from(zigzag >= WIDE_START) + if exception { W } else { 0 }
    };
    differences.map(bytes).sum()
}

/// Returns the number of codes that equal [`WIDE`].
#[inline(always)]
pub(super) fn count_wide(packed: &[u8]) -> usize {
    packed
        .chunks(96)
        .map(|part| {
            usize::from(part.iter().fold(0_u8, |count, pair| {
                let (low, high) = (u8::from(pair & 15 == WIDE), u8::from(pair >> 4 == WIDE));
                count.wrapping_add(low).wrapping_add(high)
            }))
        })
        .sum()
}

/// Returns the number of wide values that are exceptions.
#[expect(clippy::naive_bytecount, reason = "the column is short")]
pub(super) fn count_exceptions(wide: &[u8]) -> usize {
    wide.iter().filter(|byte| **byte == EXCEPTION).count()
}

/// Values that follow in the wide column and in that of exceptions.
pub(super) struct WideReader<'a, const W: usize> {
    pub(super) wide: std::slice::Iter<'a, u8>,
    pub(super) exceptions: std::slice::Iter<'a, [u8; W]>,
}

impl<const W: usize> WideReader<'_, W> {
    /// Writes the differences of codes. `differences` has as many entries as there are codes.
    #[inline(always)]
    pub(super) fn read(&mut self, packed: &[u8], differences: &mut [[u8; W]]) {
        let (pairs, rest) = differences.as_chunks_mut::<2>();
        for (pair, byte) in pairs.iter_mut().zip(packed) {
            *pair = Pairs::<W>::TABLE[usize::from(*byte)];
        }
        if let ([last], Some(byte)) = (rest, packed.last()) {
            [*last, _] = Pairs::<W>::TABLE[usize::from(*byte)];
        }
        // Positions of wide values are collected first, because a branch for each would be predicted badly.
        let mut found = [0; CODES_PER_RUN + POSITION_SLACK];
        let runs = differences.chunks_mut(CODES_PER_RUN).zip(packed.chunks(CODES_PER_RUN / 2));
        for (differences, packed) in runs {
            let mut count = 0;
            for_each_word(packed, |number, codes| {
                let wide = codes & codes >> 1 & codes >> 2 & codes >> 3 & 0x1111_1111_1111_1111;
                push_positions::<2, 4>(wide, 16 * number, &mut found, &mut count);
            });
            for at in &found[..count] {
                let difference = self.next();
                if let (Some(entry), Some(difference)) =
                    (differences.get_mut(usize::from(*at)), difference)
                {
                    *entry = difference;
                }
            }
        }
    }

    /// Returns the next wide value.
    #[inline(always)]
    fn next(&mut self) -> Option<[u8; W]> {
        match self.wide.next()? {
            &EXCEPTION => self.exceptions.next().copied(),
            byte => Some(store(unzigzag(u32::from(*byte) + WIDE_START))),
        }
    }
}

/// Codes among which wide ones are searched at a time.
const CODES_PER_RUN: usize = 2048;

/// Differences of two 4-bit codes in a byte.
struct Pairs<const W: usize>;

impl<const W: usize> Pairs<W> {
    const TABLE: &[[[u8; W]; 2]; 256] = &{
        let mut table = [[[0; W]; 2]; 256];
        let mut at = 0_u32;
        while at < 512 {
            let (pair, half) = (at / 2, at % 2);
            let code = pair >> (4 * half) & 15;
            let difference = unzigzag(code + 1).to_le_bytes();
            let mut byte = 0;
            while byte < W {
                table[pair as usize][half as usize][byte] = difference[byte];
                byte += 1;
            }
            at += 1;
        }
        table
    };
}
