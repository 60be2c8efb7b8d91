//! Copies that leave the cache alone, by stores that go to memory itself.

#![expect(unsafe_code, reason = "stores that bypass the cache exist only as intrinsics")]

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

use super::BLOCK;
use super::fold::Folding;
use crate::checksum::checksum_after;
use crate::fetch::{self, Line, fetch};

/// Copies past the cache. All threads that see what is written after it is dropped see the copies.
///
/// Each way was the fastest of those that were tried on some processor (docs/performance.md): the first on an AMD of
/// family 26, the last on an Intel Xeon.
pub(super) enum Stream {
    /// Each line is stored while it is checksummed.
    Folding(Folding),
    /// Blocks are checksummed, which brings them into the cache, and then stored. For those that cannot fold.
    Blocks,
    /// The same, and the core is told to fetch the next block while it stores one. For Intel's.
    Told,
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the instruction needs SSE, which every x86_64 processor has. It orders the
        // streaming stores before all later stores.
        unsafe { _mm_sfence() }
    }
}

impl Stream {
    pub(super) fn begin() -> Self {
        if fetch::helps() {
            return Self::Told;
        }
        Folding::find().map_or(Self::Blocks, Self::Folding)
    }

    /// Copies bytes to memory of the same length.
    pub(super) fn copy(&self, source: &[u8], target: &mut [u8]) {
        let (_, source, target) = copy_lead(source, target);
        self.copy_blocks(source, target, |_| {});
    }

    /// The same, and returns the CRC-32 of what `crc` is of, followed by the bytes.
    pub(super) fn copy_and_checksum(&self, source: &[u8], target: &mut [u8], crc: u32) -> u32 {
        let (lead, source, target) = copy_lead(source, target);
        let mut crc = checksum_after(crc, lead);
        if let Self::Folding(folding) = self {
            return folding.copy_and_checksum(source, target, crc);
        }
        self.copy_blocks(source, target, |block| crc = checksum_after(crc, block));
        crc
    }

    /// Copies bytes to a target that is aligned to lines. Each block is shown to `see` before it is copied, when it
    /// is about to be in the cache.
    fn copy_blocks(&self, source: &[u8], target: &mut [u8], mut see: impl FnMut(&[u8])) {
        let mut rest = source;
        for target in target.chunks_mut(BLOCK) {
            assert!(
                target.as_ptr().addr().is_multiple_of(size_of::<Line>()),
                "a line begins there"
            );
            let (source, next) = rest.split_at(target.len());
            rest = next;
            see(source);
            let (lines, source_tail) = source.as_chunks();
            let (targets, target_tail) = target.as_chunks_mut();
            if let Self::Told = self {
                copy_and_fetch(lines, targets, next.as_chunks().0);
            } else {
                copy_lines(lines, targets);
            }
            target_tail.copy_from_slice(source_tail);
        }
    }
}

/// Copies what lies before the first line of the target, for a line that is stored in two halves costs twice; returns
/// that, and what is left of both.
fn copy_lead<'a>(source: &'a [u8], target: &'a mut [u8]) -> (&'a [u8], &'a [u8], &'a mut [u8]) {
    let lead = target.as_ptr().align_offset(size_of::<Line>()).min(target.len());
    let (lead, source) = source.split_at(lead);
    let (target_lead, target) = target.split_at_mut(lead.len());
    target_lead.copy_from_slice(lead);
    (lead, source, target)
}

/// Copies lines to a target that is aligned to lines.
fn copy_lines(source: &[Line], target: &mut [Line]) {
    for (source, target) in source.iter().zip(target) {
        copy_line(source, target);
    }
}

/// Copies lines to a target that is aligned to lines, to its four quarters in turn, which keeps four pages open at
/// once, and fetches as many of the next ones.
fn copy_and_fetch(source: &[Line], target: &mut [Line], next: &[Line]) {
    let quarter = source.len() / 4;
    for line in 0..quarter {
        for at in [line, line + quarter, line + 2 * quarter, line + 3 * quarter] {
            next.get(at).into_iter().for_each(fetch);
            copy_line(&source[at], &mut target[at]);
        }
    }
    copy_lines(&source[4 * quarter..], &mut target[4 * quarter..]);
}

fn copy_line(source: &Line, target: &mut Line) {
    let (source, _) = source.as_chunks::<16>();
    let (target, _) = target.as_chunks_mut::<16>();
    for (source, target) in source.iter().zip(target) {
        store(target, load(source));
    }
}

fn load(source: &[u8; 16]) -> __m128i {
    // SAFETY: `_mm_loadu_si128` reads 16 bytes at any alignment, and `source` is 16 bytes. It
    // needs SSE2, which every x86_64 processor has.
    unsafe { _mm_loadu_si128(source.as_ptr().cast()) }
}

fn store(target: &mut [u8; 16], value: __m128i) {
    debug_assert!(target.as_ptr().addr().is_multiple_of(16));
    // SAFETY: `_mm_stream_si128` writes 16 bytes at a multiple of 16; `target` is 16 bytes that
    // we borrow mutably. `copy_blocks` has seen that each block begins at a multiple of 64; lines (64 bytes) and
    // their parts (16 bytes) keep to multiples of 16.
    unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_copies_and_checksums_the_same() {
        let source: Vec<u8> =
            (0..200_000_u32).map(|at| at.wrapping_mul(31).to_le_bytes()[1]).collect();
        let ways: [fn() -> Option<Stream>; 3] = [
            || Some(Stream::Blocks),
            || Some(Stream::Told),
            || Folding::find().map(Stream::Folding),
        ];
        for way in ways {
            for len in [0, 1, 63, 64, 100, 255, 256, 319, 320, 511, 512, 40_000, 199_999] {
                for (crc, from, to) in [(0, 0, 0), (7, 1, 1), (!0, 0, 64), (!0, 1, 16)] {
                    let source = &source[from..from + len];
                    let mut copied = vec![0xAA; to + len + 1];
                    let Some(stream) = way() else { continue };
                    stream.copy(source, &mut copied[to..to + len]);
                    drop(stream);
                    assert!(copied[to..to + len] == *source, "{len} bytes");
                    assert_eq!(copied[to + len], 0xAA, "nothing is written behind it");
                    let mut copied = vec![0xAA; to + len + 1];
                    let Some(stream) = way() else { continue };
                    let sum = stream.copy_and_checksum(source, &mut copied[to..to + len], crc);
                    drop(stream);
                    assert_eq!(sum, checksum_after(crc, source), "{len} bytes after {crc}");
                    assert!(copied[to..to + len] == *source, "{len} bytes");
                    assert_eq!(copied[to + len], 0xAA, "nothing is written behind it");
                }
            }
        }
    }
}
