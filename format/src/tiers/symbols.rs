//! Symbols of the tiers, and the conversion of blocks of a plane with them.

use super::block::{
    BLOCK, COUNTS_BYTES, CodeGroups, EscapedBytes, GROUP, TierBlock, invalid, split_at,
};
use crate::error::Result;
use crate::isa::{CODE_BYTES, Instructions};
use crate::plane_blocks::{BLOCK_ELEMENTS, Block};

/// One block of 64 elements in so many is a sample for the symbols of a chunk.
const SAMPLE_STEP: usize = 16;

/// Codes in a group of codes of 4 bits.
const WIDE_GROUP: usize = 2 * CODE_BYTES;

/// Symbols of tiers 1 to 3: three, three and 15.
pub(super) struct Symbols([u8; 21]);

impl Symbols {
    /// Reads the symbols from the start of `stored`. Returns the other bytes, too.
    ///
    /// # Errors
    ///
    /// `TiersChunk` (F-100) if they are cut off.
    pub(super) fn read(stored: &[u8]) -> Result<(Self, &[u8])> {
        let (symbols, rest) = split_at(stored, size_of::<Self>(), "symbols")?;
        Ok((Self(symbols.try_into().expect("the split is after 21 bytes")), rest))
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the bytes that are most frequent in the last plane of a sample, the most frequent one first.
    #[inline(always)]
    pub(super) fn of_elements<const W: usize>(elements: &[[u8; W]]) -> Self
    where
        [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
    {
        // Bytes are counted in turn in several tables, because to count a byte twice in a row takes longer.
        let mut counts = [[0_u32; 256]; 4];
        for block in elements.chunks(BLOCK_ELEMENTS).step_by(SAMPLE_STEP) {
            let mut padded = [[0; W]; BLOCK_ELEMENTS];
            padded[..block.len()].copy_from_slice(block);
            for bytes in padded.split()[W - 1][..block.len()].chunks(counts.len()) {
                for (byte, counts) in bytes.iter().zip(&mut counts) {
                    counts[usize::from(*byte)] += 1;
                }
            }
        }
        let mut bytes: [u8; 256] =
            std::array::from_fn(|byte| u8::try_from(byte).expect("256 bytes"));
        bytes.sort_by_key(|byte| {
            let counts = counts.iter().map(|counts| counts[usize::from(*byte)]);
            std::cmp::Reverse(counts.sum::<u32>())
        });
        Self(*bytes.first_chunk().expect("there are 256"))
    }

    /// Returns the symbols of a tier, counted from 0, at the places of their codes.
    fn of_tier(&self, tier: usize) -> [u8; 16] {
        let symbols = &self.0[[0, 3, 6][tier]..][..[3, 3, 15][tier]];
        let mut table = [0; 16];
        table[..symbols.len()].copy_from_slice(symbols);
        table
    }

    /// Appends a block of the plane to `stored`.
    #[inline(always)]
    pub(super) fn encode_block<I: Instructions>(
        &self,
        isa: I,
        plane: &[u8],
        EscapedBytes([first, second, _]): &mut EscapedBytes,
        stored: &mut Vec<u8>,
    ) {
        let start = stored.len();
        stored.extend_from_slice(&[0; COUNTS_BYTES]);
        let second_count = encode_tier(isa, plane, self.of_tier(0), first, stored);
        let first = &first[..second_count];
        let third_count = encode_tier(isa, first, self.of_tier(1), second, stored);
        let bytes_count = encode_wide_tier(&second[..third_count], self.of_tier(2), stored);
        let counts = [second_count, third_count, bytes_count];
        for (target, count) in stored[start..].as_chunks_mut().0.iter_mut().zip(counts) {
            *target = u16::try_from(count).expect("a block has 32,768 bytes").to_le_bytes();
        }
    }

    /// Decodes tiers 4 to 2 of a block. The result decodes tier 1.
    ///
    /// # Errors
    ///
    /// `TiersChunk` (F-100) if counts of codes and escapes differ.
    #[inline(always)]
    pub(super) fn decode_block<'a, I: Instructions>(
        &self,
        isa: I,
        block: &TierBlock<'a>,
        EscapedBytes([first, second, third]): &'a mut EscapedBytes,
    ) -> Result<LastPlane<'a>> {
        third[..block.bytes.len()].copy_from_slice(block.bytes);
        let [codes, second_codes, third_codes] = block.codes;
        let escapes = decode_tier::<I, 4>(isa, third_codes, self.of_tier(2), third, second);
        check_escapes(3, escapes, block.counts[2])?;
        let escapes = decode_tier::<I, 2>(isa, second_codes, self.of_tier(1), second, first);
        check_escapes(2, escapes, block.counts[1])?;
        let symbols = self.of_tier(0);
        Ok(LastPlane { codes, symbols, escaped: first, escapes: 0, count: block.counts[0] })
    }
}

/// Decoder of tier 1 of a block, group by group.
pub(super) struct LastPlane<'a> {
    codes: CodeGroups<'a>,
    symbols: [u8; 16],
    escaped: &'a [u8],
    /// Escapes up to now.
    escapes: usize,
    /// Escapes that the block must have.
    count: usize,
}

impl LastPlane<'_> {
    /// Decodes the next group into `target`, which has a byte for each of its codes.
    #[inline(always)]
    pub(super) fn next_group<I: Instructions>(&mut self, isa: I, target: &mut [u8]) {
        let (codes, rest) =
            self.codes.split_first().expect("the caller asks for the groups of a block");
        self.escapes +=
            isa.decode_codes::<2>(codes, &self.symbols, &self.escaped[self.escapes..], target);
        self.codes = rest;
    }

    /// Checks the number of escapes.
    ///
    /// # Errors
    ///
    /// `TiersChunk` (F-100).
    pub(super) fn finish(self) -> Result<()> {
        check_escapes(1, self.escapes, self.count)
    }
}

fn check_escapes(tier: usize, escapes: usize, count: usize) -> Result<()> {
    if escapes == count {
        return Ok(());
    }
    Err(invalid(format_args!("tier {tier}: {escapes} escapes, but {count} in tier {}", tier + 1)))
}

/// Appends the codes of a tier, and writes the bytes that it escapes. Returns the number of those.
#[inline(always)]
fn encode_tier<I: Instructions>(
    isa: I,
    bytes: &[u8],
    symbols: [u8; 16],
    escaped: &mut [u8],
    stored: &mut Vec<u8>,
) -> usize {
    let symbols = [symbols[0], symbols[1], symbols[2]];
    let (groups, rest) = bytes.as_chunks::<GROUP>();
    // The first symbol has code 0.
    let mut last = [symbols[0]; GROUP];
    last[..rest.len()].copy_from_slice(rest);
    let last = if rest.is_empty() { None } else { Some(&last) };
    let mut escapes = 0;
    for group in groups.iter().chain(last) {
        let mut codes = [0; CODE_BYTES];
        escapes += isa.encode_codes(group, symbols, &mut codes, &mut escaped[escapes..]);
        stored.extend_from_slice(&codes);
    }
    escapes
}

/// Appends the codes of tier 3, and the bytes of tier 4. Returns the number of those.
fn encode_wide_tier(bytes: &[u8], symbols: [u8; 16], stored: &mut Vec<u8>) -> usize {
    let mut code_of = [15; 256];
    for (code, symbol) in (0..15).zip(symbols) {
        code_of[usize::from(symbol)] = code;
    }
    for group in bytes.chunks(WIDE_GROUP) {
        let mut codes = [0; CODE_BYTES];
        for (at, byte) in group.iter().enumerate() {
            codes[at % CODE_BYTES] |= code_of[usize::from(*byte)] << (4 * (at / CODE_BYTES));
        }
        stored.extend_from_slice(&codes);
    }
    let start = stored.len();
    stored.extend(bytes.iter().filter(|byte| code_of[usize::from(**byte)] == 15));
    stored.len() - start
}

/// Decodes a tier of codes of `BITS` bits into `target`. Returns the number of escapes.
#[inline(always)]
fn decode_tier<I: Instructions, const BITS: i32>(
    isa: I,
    groups: CodeGroups<'_>,
    symbols: [u8; 16],
    escaped: &[u8],
    target: &mut [u8],
) -> usize {
    debug_assert!(target.len() >= BLOCK, "the working memory of a block");
    let group = if BITS == 4 { WIDE_GROUP } else { GROUP };
    let mut escapes = 0;
    for (codes, target) in groups.iter().zip(target.chunks_exact_mut(group)) {
        escapes += isa.decode_codes::<BITS>(codes, &symbols, &escaped[escapes..], target);
    }
    escapes
}
