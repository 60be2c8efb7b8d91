//! Blocks of a plane in tiers: their stored form, and the working memory for one.

use crate::error::{Error, ErrorKind, Result};
use crate::isa::{CODE_BYTES, PADDING};

/// Bytes of the plane in a block.
pub(super) const BLOCK: usize = 1 << 15;

/// Codes in a group of codes of 2 bits.
pub(super) const GROUP: usize = 4 * CODE_BYTES;

/// Bits of a code in each tier.
const TIER_BITS: [usize; 3] = [2, 2, 4];

/// Bytes of the counts of a block.
pub(super) const COUNTS_BYTES: usize = 6;

/// Bytes that the tiers of a block escape, from tier 1 on. Each list has room for a group of codes more.
pub(super) struct EscapedBytes(pub(super) [Vec<u8>; 3]);

impl EscapedBytes {
    pub(super) fn new() -> Self {
        Self([(); 3].map(|()| vec![0; BLOCK + GROUP + PADDING]))
    }
}

/// Groups of codes of a tier.
pub(super) type CodeGroups<'a> = &'a [[u8; CODE_BYTES]];

/// A block as it is stored.
pub(super) struct TierBlock<'a> {
    /// The codes of tiers 1 to 3.
    pub(super) codes: [CodeGroups<'a>; 3],
    /// The bytes of tier 4.
    pub(super) bytes: &'a [u8],
    /// The numbers of codes in tiers 2 and 3, and of bytes in tier 4.
    pub(super) counts: [usize; 3],
}

impl<'a> TierBlock<'a> {
    /// Reads a block of `len` bytes of the plane from the start of `stored`, and removes it there.
    ///
    /// # Errors
    ///
    /// `TiersChunk` (F-100) if a part is cut off, or if an unused code is not 0.
    pub(super) fn read(stored: &mut &'a [u8], len: usize) -> Result<Self> {
        let (head, mut rest) = split_at(stored, COUNTS_BYTES, "counts")?;
        let mut counts = [0; 3];
        for (count, bytes) in counts.iter_mut().zip(head.as_chunks().0) {
            *count = u16::from_le_bytes(*bytes).into();
        }
        if !counts.iter().is_sorted_by(|one, next| one >= next) || counts[0] > len {
            return Err(invalid(format_args!("counts {counts:?} of a block of {len} bytes")));
        }
        let lens = [len, counts[0], counts[1]];
        let mut codes: [CodeGroups<'a>; 3] = [&[]; 3];
        for (tier, codes) in codes.iter_mut().enumerate() {
            let (len, bits) = (lens[tier], TIER_BITS[tier]);
            let stored_len = (len * bits).div_ceil(8 * CODE_BYTES) * CODE_BYTES;
            let bytes;
            (bytes, rest) = split_at(rest, stored_len, ["tier 1", "tier 2", "tier 3"][tier])?;
            *codes = bytes.as_chunks().0;
            if !are_unused_zero(codes, len, bits) {
                return Err(invalid(format_args!("tier {}: an unused code is not 0", tier + 1)));
            }
        }
        let (bytes, rest) = split_at(rest, counts[2], "tier 4")?;
        *stored = rest;
        Ok(Self { codes, bytes, counts })
    }
}

/// Returns whether the unused codes of the last group are 0, of a tier of `count` codes.
fn are_unused_zero(groups: CodeGroups<'_>, count: usize, bits: usize) -> bool {
    let Some(group) = groups.last() else { return true };
    let per_group = 8 * CODE_BYTES / bits;
    let used = count - (groups.len() - 1) * per_group;
    let mask = (1 << bits) - 1;
    (used..per_group).all(|code| group[code % CODE_BYTES] >> (code / CODE_BYTES * bits) & mask == 0)
}

/// Splits stored bytes after `len` of them.
pub(super) fn split_at<'a>(
    stored: &'a [u8],
    len: usize,
    part: &str,
) -> Result<(&'a [u8], &'a [u8])> {
    let cut_off =
        || invalid(format_args!("{part} of {len} bytes, of which {} are there", stored.len()));
    stored.split_at_checked(len).ok_or_else(cut_off)
}

#[cold]
pub(super) fn invalid(note: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::TiersChunk).with_detail(note)
}
