//! CRC-32 of bytes in memory, at memory bandwidth.

use crc32fast::Hasher;
use rend::u32_le;

use crate::chunk::ChunkSize;
use crate::prefetch::{CacheLine, prefetch, should_prefetch};

/// Lines per checksum step (2 KiB). Shorter steps are slower, because each one ends with a reduction.
const STEP_LINES: usize = (2 << 10) / size_of::<CacheLine>();

/// Prefetch distance in steps.
const PREFETCH_STEPS: usize = 4;

/// Returns the CRC-32 of bytes, with the polynomial of zlib, PNG and Ethernet.
///
/// # Examples
///
/// ```
/// assert_eq!(tssd_format::checksum(b"123456789"), 0xCBF4_3926);
/// ```
pub fn checksum(bytes: &[u8]) -> u32 {
    let is_long = bytes.len() / size_of::<CacheLine>() > PREFETCH_STEPS * STEP_LINES;
    if is_long && should_prefetch() { checksum_prefetched(bytes) } else { crc32fast::hash(bytes) }
}

/// Computes the same checksum with software prefetch, for processors that gain from it.
fn checksum_prefetched(bytes: &[u8]) -> u32 {
    let (lines, tail) = bytes.as_chunks();
    let (steps, lines) = lines.as_chunks::<STEP_LINES>();
    let mut crc = Hasher::new();
    for (number, step) in steps.iter().enumerate() {
        if let Some(next) = steps.get(number + PREFETCH_STEPS) {
            next.iter().for_each(prefetch_one);
        }
        crc.update(step.as_flattened());
    }
    crc.update(lines.as_flattened());
    crc.update(tail);
    crc.finalize()
}

/// Prefetches one line.
///
/// Not inlined: a core that issues many prefetches back to back stalls until most of the lines have arrived. The
/// calls give it other work in between.
#[inline(never)]
fn prefetch_one(line: &CacheLine) {
    prefetch(line);
}

/// Extends `crc`, the CRC-32 of the preceding bytes, by further bytes. The CRC-32 of no bytes is 0.
pub(crate) fn extend_checksum(crc: u32, bytes: &[u8]) -> u32 {
    let mut crc = Hasher::new_with_initial(crc);
    crc.update(bytes);
    crc.finalize()
}

/// Number of entries of `crcs` in one page (4 KiB).
pub(crate) const CRCS_PER_PAGE: usize = 1024;

/// Returns the CRC-32 of each page of `crcs` (F-067).
pub(crate) fn checksum_pages(crcs: &[u32_le]) -> Vec<u32_le> {
    let pages = crcs.chunks(CRCS_PER_PAGE);
    pages.map(|page| checksum(bytemuck::cast_slice(page)).into()).collect()
}

/// Combines the CRC-32s of chunks of this size into the CRC-32 of all `len` bytes.
pub(crate) fn combine_crcs(len: u64, size: ChunkSize, crcs: impl IntoIterator<Item = u32>) -> u32 {
    let mut crcs = crcs.into_iter();
    let first_len = len.min(size.bytes());
    let Some(first) = crcs.next() else { return 0 };
    if first_len == len {
        return first;
    }
    let mut combined = Hasher::new_with_initial_len(first, first_len);
    let mut remaining = len - first_len;
    for crc in crcs {
        let chunk = remaining.min(size.bytes());
        combined.combine(&Hasher::new_with_initial_len(crc, chunk));
        remaining -= chunk;
    }
    combined.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_matches_crc32fast_at_any_length_and_alignment() {
        let bytes: Vec<u8> =
            (0..100_000_u32).map(|index| index.wrapping_mul(31).to_le_bytes()[1]).collect();
        for len in
            [0, 1, 63, 64, 2048, 8191, 10_239, 10_240, 10_304, 10_305, 12_345, 65_536, 99_999]
        {
            for shift in [0, 1] {
                let bytes = &bytes[shift..shift + len];
                let expected = crc32fast::hash(bytes);
                assert_eq!(
                    (checksum(bytes), checksum_prefetched(bytes)),
                    (expected, expected),
                    "{len} bytes"
                );
            }
        }
    }
}
