//! Copies that bypass the cache with non-temporal stores.

#![expect(unsafe_code, reason = "stores that bypass the cache exist only as intrinsics")]

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

use super::BLOCK_BYTES;
use super::fold::FoldingCrc;
use crate::checksum::extend_checksum;
use crate::prefetch::{self, CacheLine, prefetch};

/// Strategy of copying with non-temporal stores.
///
/// Dropping it is a store fence: a thread that observes a store made after the drop also observes the copies.
///
/// Each strategy was the fastest of those tried on some processor (docs/performance.md): the first on an AMD of
/// family 26, the last on an Intel Xeon.
pub(super) enum StreamingCopy {
    /// Checksums each line and stores it from the same register.
    Fold(FoldingCrc),
    /// Checksums a block, which loads it into the cache, then stores it. For processors that cannot fold.
    Blocks,
    /// As `Blocks`, and prefetches the next block while it stores one. For processors of Intel.
    PrefetchedBlocks,
}

impl Drop for StreamingCopy {
    fn drop(&mut self) {
        // SAFETY: `_mm_sfence` requires SSE, which every x86_64 processor has. It orders the non-temporal
        // stores before all later stores.
        unsafe { _mm_sfence() }
    }
}

impl StreamingCopy {
    /// Selects the fastest strategy for this processor.
    pub(super) fn select() -> Self {
        if prefetch::should_prefetch() {
            return Self::PrefetchedBlocks;
        }
        FoldingCrc::detect().map_or(Self::Blocks, Self::Fold)
    }

    /// Copies bytes to memory of the same length.
    pub(super) fn copy(&self, source: &[u8], target: &mut [u8]) {
        let (_, source, target) = copy_unaligned_head(source, target);
        self.copy_blocks(source, target, |_| {});
    }

    /// Copies bytes to memory of the same length, and returns `crc` extended by them.
    pub(super) fn copy_and_checksum(&self, source: &[u8], target: &mut [u8], crc: u32) -> u32 {
        let (head, source, target) = copy_unaligned_head(source, target);
        let mut crc = extend_checksum(crc, head);
        if let Self::Fold(folding) = self {
            return folding.copy_and_checksum(source, target, crc);
        }
        self.copy_blocks(source, target, |block| crc = extend_checksum(crc, block));
        crc
    }

    /// Copies bytes to a target that is aligned to lines.
    ///
    /// Calls `on_block` with each block before it is copied. If `on_block` reads the block, it is then in the cache.
    fn copy_blocks(&self, source: &[u8], target: &mut [u8], mut on_block: impl FnMut(&[u8])) {
        let mut rest = source;
        for target in target.chunks_mut(BLOCK_BYTES) {
            assert!(
                target.as_ptr().addr().is_multiple_of(size_of::<CacheLine>()),
                "a line begins there"
            );
            let (source, next) = rest.split_at(target.len());
            rest = next;
            on_block(source);
            let (lines, source_tail) = source.as_chunks();
            let (targets, target_tail) = target.as_chunks_mut();
            if let Self::PrefetchedBlocks = self {
                copy_and_prefetch(lines, targets, next.as_chunks().0);
            } else {
                copy_lines(lines, targets);
            }
            target_tail.copy_from_slice(source_tail);
        }
    }
}

/// Copies the bytes before the first line boundary of the target.
///
/// The stores that follow then write whole lines. A line that is written in two parts costs twice as much. Returns the
/// copied bytes, and the rest of source and target.
fn copy_unaligned_head<'a>(
    source: &'a [u8],
    target: &'a mut [u8],
) -> (&'a [u8], &'a [u8], &'a mut [u8]) {
    let head = target.as_ptr().align_offset(size_of::<CacheLine>()).min(target.len());
    let (head, source) = source.split_at(head);
    let (target_head, target) = target.split_at_mut(head.len());
    target_head.copy_from_slice(head);
    (head, source, target)
}

/// Copies lines to a target that is aligned to lines.
fn copy_lines(source: &[CacheLine], target: &mut [CacheLine]) {
    for (source, target) in source.iter().zip(target) {
        copy_line(source, target);
    }
}

/// Copies lines to a target that is aligned to lines, and prefetches the lines of the next block.
///
/// The copy alternates between the four quarters of the block, which keeps four memory pages open at once.
fn copy_and_prefetch(source: &[CacheLine], target: &mut [CacheLine], next: &[CacheLine]) {
    let quarter = source.len() / 4;
    for line in 0..quarter {
        for at in [line, line + quarter, line + 2 * quarter, line + 3 * quarter] {
            next.get(at).into_iter().for_each(prefetch);
            copy_line(&source[at], &mut target[at]);
        }
    }
    copy_lines(&source[4 * quarter..], &mut target[4 * quarter..]);
}

fn copy_line(source: &CacheLine, target: &mut CacheLine) {
    let (source, _) = source.as_chunks::<16>();
    let (target, _) = target.as_chunks_mut::<16>();
    for (source, target) in source.iter().zip(target) {
        store_streaming(target, load(source));
    }
}

fn load(source: &[u8; 16]) -> __m128i {
    // SAFETY: `_mm_loadu_si128` reads 16 bytes at any alignment, and `source` is 16 bytes. It requires SSE2, which
    // every x86_64 processor has.
    unsafe { _mm_loadu_si128(source.as_ptr().cast()) }
}

fn store_streaming(target: &mut [u8; 16], value: __m128i) {
    debug_assert!(target.as_ptr().addr().is_multiple_of(16));
    // SAFETY: `_mm_stream_si128` writes 16 bytes at a multiple of 16. `target` is 16 bytes that we borrow mutably.
    // `copy_blocks` asserts that each block begins at a multiple of 64, so lines (64 bytes) and their parts (16 bytes)
    // begin at multiples of 16. The instruction requires SSE2, which every x86_64 processor has.
    unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_strategies_copy_and_checksum_alike() {
        let source: Vec<u8> =
            (0..200_000_u32).map(|index| index.wrapping_mul(31).to_le_bytes()[1]).collect();
        let strategies: [fn() -> Option<StreamingCopy>; 3] = [
            || Some(StreamingCopy::Blocks),
            || Some(StreamingCopy::PrefetchedBlocks),
            || FoldingCrc::detect().map(StreamingCopy::Fold),
        ];
        for strategy in strategies {
            for len in [0, 1, 63, 64, 100, 255, 256, 319, 320, 511, 512, 40_000, 199_999] {
                for (crc, from, to) in [(0, 0, 0), (7, 1, 1), (!0, 0, 64), (!0, 1, 16)] {
                    let source = &source[from..from + len];
                    let mut copied = vec![0xAA; to + len + 1];
                    let Some(stream) = strategy() else { continue };
                    stream.copy(source, &mut copied[to..to + len]);
                    drop(stream);
                    assert!(copied[to..to + len] == *source, "{len} bytes");
                    assert_eq!(copied[to + len], 0xAA, "nothing is written behind it");
                    let mut copied = vec![0xAA; to + len + 1];
                    let Some(stream) = strategy() else { continue };
                    let result = stream.copy_and_checksum(source, &mut copied[to..to + len], crc);
                    drop(stream);
                    assert_eq!(result, extend_checksum(crc, source), "{len} bytes after {crc}");
                    assert!(copied[to..to + len] == *source, "{len} bytes");
                    assert_eq!(copied[to + len], 0xAA, "nothing is written behind it");
                }
            }
        }
    }
}
