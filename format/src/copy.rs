//! The kernel: copies bytes and checksums them in one pass over memory.
//!
//! Long copies go past the cache, where the processor can, so that the target is not read first and does not
//! push the source out.

#[cfg(target_arch = "x86_64")]
mod fold;
#[cfg(target_arch = "x86_64")]
mod stream;

use std::ops::Range;

use crate::checksum::checksum_after;
use crate::runs::Runs;

#[cfg(target_arch = "x86_64")]
use self::stream::Stream;

/// Shorter copies stay in the cache: their reader is likely to be near.
const STREAM_MIN: usize = 32 << 10;

/// Shorter runs are not worth it to go past the cache: their first and last lines do not.
const STREAM_RUN_MIN: u64 = 1 << 10;

/// Runs that have fewer bytes together stay in the cache: their reader is likely to be near.
const STREAM_ALL_MIN: u64 = 1 << 20;

/// What is checksummed and then copied while it is in an L1.
const BLOCK: usize = 32 << 10;

/// Copies bytes to memory of the same length, and returns the CRC-32 of what `crc` is of, followed by them: one
/// pass over memory for both. Nothing has the CRC-32 0. Long copies go past the cache.
///
/// # Panics
///
/// If the lengths differ.
///
/// # Examples
///
/// ```
/// let mut target = [0; 9];
/// let crc = tssd_format::copy_and_checksum(b"1234", &mut target[..4], 0);
/// let crc = tssd_format::copy_and_checksum(b"56789", &mut target[4..], crc);
/// assert_eq!((&target, crc), (b"123456789", tssd_format::checksum(b"123456789")));
/// ```
pub fn copy_and_checksum(source: &[u8], target: &mut [u8], crc: u32) -> u32 {
    assert_same_len(source, target);
    Kernel::for_len(source.len()).copy_and_checksum(source, target, crc)
}

/// Copies chunks of `size` bytes, of which the last can have fewer, to memory of the same length: one pass over memory
/// for that and the checksums. `see` is called with each chunk and its CRC-32. Long copies go past the cache, of
/// however small chunks. Others see the copies when this has returned.
///
/// # Panics
///
/// If the lengths differ, or `size` is 0.
///
/// # Examples
///
/// ```
/// let (mut target, mut crcs) = ([0; 9], Vec::new());
/// tssd_format::copy_chunks(b"123456789", &mut target, 4, |_, crc| crcs.push(crc));
/// assert_eq!(&target, b"123456789");
/// assert_eq!(crcs, [&b"1234"[..], b"5678", b"9"].map(tssd_format::checksum));
/// ```
pub fn copy_chunks(source: &[u8], target: &mut [u8], size: usize, mut see: impl FnMut(&[u8], u32)) {
    assert_same_len(source, target);
    let kernel = Kernel::for_len(source.len());
    for (source, target) in source.chunks(size).zip(target.chunks_mut(size)) {
        see(source, kernel.copy_and_checksum(source, target, 0));
    }
}

/// Copies bytes to memory of the same length; long copies go past the cache.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy(source: &[u8], target: &mut [u8]) {
    assert_same_len(source, target);
    Kernel::for_len(source.len()).copy(source, target);
}

/// Copies the runs of a box, past the cache if they are many bytes. `prove` is called with the place of each run
/// in `source`, in bytes, before it is copied.
///
/// # Errors
///
/// What `prove` returns: then no more is copied.
///
/// # Panics
///
/// If a run does not lie in `source` or `target`.
///
/// # Examples
///
/// ```
/// // Columns 2 and 3 of a 3 x 8 matrix of bytes.
/// let runs = tssd_format::Runs::new(1, &[3, 2], &[8, 1], &[2, 1]);
/// let source: Vec<u8> = (0..24).collect();
/// let mut target = [0; 6];
/// tssd_format::copy_runs(&runs, &source[2..], &mut target, |_| Ok::<(), ()>(()))?;
/// assert_eq!(target, [2, 3, 10, 11, 18, 19]);
/// # Ok::<(), ()>(())
/// ```
pub fn copy_runs<E>(
    runs: &Runs,
    source: &[u8],
    target: &mut [u8],
    mut prove: impl FnMut(Range<u64>) -> Result<(), E>,
) -> Result<(), E> {
    let is_long = runs.run_bytes() >= STREAM_RUN_MIN && runs.total_bytes() >= STREAM_ALL_MIN;
    let kernel = Kernel::past_cache(is_long);
    let mut outcome = Ok(());
    runs.for_each(|from, to, bytes| {
        if outcome.is_err() {
            return;
        }
        outcome = prove(from..from + bytes);
        if outcome.is_ok() {
            let (source, target) = (&source[part(from, bytes)], &mut target[part(to, bytes)]);
            kernel.copy(source, target);
        }
    });
    outcome
}

fn part(start: u64, bytes: u64) -> Range<usize> {
    let place = |at: u64| usize::try_from(at).expect("a place in memory");
    place(start)..place(start + bytes)
}

fn assert_same_len(source: &[u8], target: &[u8]) {
    assert_eq!(source.len(), target.len(), "a copy is as long as its source");
}

/// How bytes are copied.
enum Kernel {
    /// The target stays in the cache.
    Near,
    #[cfg(target_arch = "x86_64")]
    Past(Stream),
}

impl Kernel {
    fn past_cache(is_worth_it: bool) -> Self {
        match is_worth_it {
            #[cfg(target_arch = "x86_64")]
            true => Self::Past(Stream::begin()),
            _ => Self::Near,
        }
    }

    fn for_len(len: usize) -> Self {
        Self::past_cache(len >= STREAM_MIN)
    }

    fn copy(&self, source: &[u8], target: &mut [u8]) {
        match self {
            Self::Near => target.copy_from_slice(source),
            #[cfg(target_arch = "x86_64")]
            Self::Past(stream) => stream.copy(source, target),
        }
    }

    fn copy_and_checksum(&self, source: &[u8], target: &mut [u8], mut crc: u32) -> u32 {
        match self {
            Self::Near => {
                for (source, target) in source.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
                    crc = checksum_after(crc, source);
                    target.copy_from_slice(source);
                }
                crc
            }
            #[cfg(target_arch = "x86_64")]
            Self::Past(stream) => stream.copy_and_checksum(source, target, crc),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_any_length_are_copied() {
        let source: Vec<u8> =
            (0..3_000_000_u32).map(|at| at.wrapping_mul(31).to_le_bytes()[1]).collect();
        for (run, count) in
            [(1, 5), (1023, 1100), (1024, 1100), (1031, 1030), (40_000, 30), (700, 1)]
        {
            // Columns of a matrix of bytes that is twice as wide.
            let runs = Runs::new(1, &[count, run], &[2 * run, 1], &[run, 1]);
            let len = usize::try_from(run * count).unwrap();
            for shift in [0, 3] {
                let mut target = vec![0xAA; len + shift + 1];
                let mut proven = Vec::new();
                let copied = copy_runs(&runs, &source, &mut target[shift..shift + len], |run| {
                    proven.push(run);
                    Ok::<(), ()>(())
                });
                assert_eq!(copied, Ok(()));
                let mut wanted = Vec::new();
                for (row, proven) in (0..count).zip(&proven) {
                    assert_eq!(*proven, 2 * run * row..2 * run * row + run);
                    wanted.extend_from_slice(&source[part(2 * run * row, run)]);
                }
                assert!(target[shift..shift + len] == wanted, "{run} x {count}");
                assert_eq!(target[shift + len], 0xAA, "nothing is written behind the target");
            }
        }
    }

    #[test]
    fn what_is_not_proven_is_not_copied() {
        let runs = Runs::new(1, &[4, 2], &[4, 1], &[2, 1]);
        let mut target = [0xAA; 8];
        let proven = |run: Range<u64>| if run.start < 8 { Ok(()) } else { Err(run.start) };
        assert_eq!(copy_runs(&runs, &[1; 16], &mut target, proven), Err(8));
        assert_eq!(target, [1, 1, 1, 1, 0xAA, 0xAA, 0xAA, 0xAA]);
    }

    #[test]
    fn copies_and_checksums_at_every_alignment() {
        let source: Vec<u8> =
            (0..700_001_u32).map(|i| i.wrapping_mul(31).to_le_bytes()[1]).collect();
        for (skip, len) in [(0, 700_001), (1, 700_000), (3, 262_144), (7, 262_143), (15, 0), (2, 5)]
        {
            let part = &source[skip..skip + len];
            for (shift, crc) in [(0, 0), (1, 1), (9, 0xCBF4_3926), (16, !0)] {
                let mut target = vec![0xAA; len + shift + 1];
                let copied = copy_and_checksum(part, &mut target[shift..shift + len], crc);
                assert_eq!(copied, checksum_after(crc, part));
                assert_eq!(&target[shift..shift + len], part);
                assert_eq!(target[shift + len], 0xAA, "nothing is written behind the target");
            }
        }
    }

    #[test]
    fn chunks_of_any_size_are_copied_and_checksummed() {
        let source: Vec<u8> =
            (0..300_001_u32).map(|i| i.wrapping_mul(31).to_le_bytes()[1]).collect();
        for (len, size) in [
            (300_001, 4096),
            (300_001, 1 << 16),
            (300_000, 300_000),
            (20_000, 4096),
            (7, 9),
            (0, 1),
        ] {
            let source = &source[..len];
            for shift in [0, 3] {
                let mut target = vec![0xAA; len + shift + 1];
                let mut seen = Vec::new();
                copy_chunks(source, &mut target[shift..shift + len], size, |chunk, crc| {
                    seen.push((chunk.to_vec(), crc));
                });
                let wanted: Vec<_> =
                    source.chunks(size).map(|it| (it.to_vec(), crc32fast::hash(it))).collect();
                assert!(seen == wanted, "{len} bytes in chunks of {size}");
                assert_eq!(&target[shift..shift + len], source);
                assert_eq!(target[shift + len], 0xAA, "nothing is written behind the target");
            }
        }
    }
}
