//! Copy kernels: copy bytes and compute their CRC-32 in one pass over memory.
//!
//! Long copies use non-temporal stores, which bypass the cache, where the processor has them. Such stores do not
//! read the target first, and do not evict the source from the cache.

#[cfg(target_arch = "x86_64")]
mod fold;
#[cfg(target_arch = "x86_64")]
mod stream;

use std::ops::Range;

use crate::checksum::extend_checksum;
use crate::runs::Runs;

#[cfg(target_arch = "x86_64")]
use self::stream::StreamingCopy;

/// Shortest copy that bypasses the cache, in bytes. Shorter copies are likely to be read again soon.
const STREAM_MIN_BYTES: usize = 32 << 10;

/// Shortest run that bypasses the cache, in bytes.
///
/// The first and the last line of a run never bypass the cache, so a shorter run gains nothing.
const STREAM_MIN_RUN_BYTES: u64 = 1 << 10;

/// Smallest total of the runs of a box that bypass the cache, in bytes.
///
/// Smaller boxes are likely to be read again soon.
const STREAM_MIN_TOTAL_BYTES: u64 = 1 << 20;

/// Block size in bytes: a block is checksummed, then copied while it is in the L1 cache.
const BLOCK_BYTES: usize = 32 << 10;

/// Copies bytes to memory of the same length and extends a CRC-32 by them, in one pass over memory.
///
/// `crc` is the CRC-32 of the preceding bytes, 0 if there are none. Returns the CRC-32 of these bytes followed by
/// `source`. Long copies bypass the cache.
///
/// # Panics
///
/// Panics if the lengths differ.
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

/// Copies bytes to memory of the same length, and computes the CRC-32 of each chunk.
///
/// A chunk has `size` bytes; the last one may be shorter. `on_chunk` is called with each chunk and its CRC-32. The copy
/// and the checksums take one pass over memory. Long copies bypass the cache, however small the chunks are. The copied
/// bytes are visible to other threads only after this function has returned.
///
/// # Panics
///
/// Panics if the lengths differ, or if `size` is 0.
///
/// # Examples
///
/// ```
/// let (mut target, mut crcs) = ([0; 9], Vec::new());
/// tssd_format::copy_chunks(b"123456789", &mut target, 4, |_, crc| crcs.push(crc));
/// assert_eq!(&target, b"123456789");
/// assert_eq!(crcs, [&b"1234"[..], b"5678", b"9"].map(tssd_format::checksum));
/// ```
pub fn copy_chunks(
    source: &[u8],
    target: &mut [u8],
    size: usize,
    mut on_chunk: impl FnMut(&[u8], u32),
) {
    assert_same_len(source, target);
    let kernel = Kernel::for_len(source.len());
    for (source, target) in source.chunks(size).zip(target.chunks_mut(size)) {
        on_chunk(source, kernel.copy_and_checksum(source, target, 0));
    }
}

/// Copies bytes to memory of the same length. Long copies bypass the cache.
///
/// # Panics
///
/// Panics if the lengths differ.
pub fn copy(source: &[u8], target: &mut [u8]) {
    assert_same_len(source, target);
    Kernel::for_len(source.len()).copy(source, target);
}

/// Copies the runs of a box from one strided memory to another.
///
/// Before each run is copied, `verify` is called with its byte range in `source`. Runs of at least 1 KiB bypass the
/// cache if they have at least 1 MiB in total.
///
/// # Errors
///
/// The first error of `verify`. That run and the runs after it are not copied.
///
/// # Panics
///
/// Panics if a run does not lie in `source` or `target`.
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
    mut verify: impl FnMut(Range<u64>) -> Result<(), E>,
) -> Result<(), E> {
    let is_long =
        runs.run_bytes() >= STREAM_MIN_RUN_BYTES && runs.total_bytes() >= STREAM_MIN_TOTAL_BYTES;
    let kernel = Kernel::new(is_long);
    let mut result = Ok(());
    runs.for_each(|from, to, bytes| {
        if result.is_err() {
            return;
        }
        result = verify(from..from + bytes);
        if result.is_ok() {
            let (source, target) =
                (&source[byte_range(from, bytes)], &mut target[byte_range(to, bytes)]);
            kernel.copy(source, target);
        }
    });
    result
}

fn byte_range(start: u64, len: u64) -> Range<usize> {
    let index = |offset: u64| usize::try_from(offset).expect("a place in memory");
    index(start)..index(start + len)
}

fn assert_same_len(source: &[u8], target: &[u8]) {
    assert_eq!(source.len(), target.len(), "a copy is as long as its source");
}

/// Method of copying bytes.
enum Kernel {
    /// Stores through the cache.
    Cached,
    /// Non-temporal stores, which bypass the cache.
    #[cfg(target_arch = "x86_64")]
    Streaming(StreamingCopy),
}

impl Kernel {
    fn new(bypass_cache: bool) -> Self {
        match bypass_cache {
            #[cfg(target_arch = "x86_64")]
            true => Self::Streaming(StreamingCopy::select()),
            _ => Self::Cached,
        }
    }

    fn for_len(len: usize) -> Self {
        Self::new(len >= STREAM_MIN_BYTES)
    }

    fn copy(&self, source: &[u8], target: &mut [u8]) {
        match self {
            Self::Cached => target.copy_from_slice(source),
            #[cfg(target_arch = "x86_64")]
            Self::Streaming(stream) => stream.copy(source, target),
        }
    }

    fn copy_and_checksum(&self, source: &[u8], target: &mut [u8], mut crc: u32) -> u32 {
        match self {
            Self::Cached => {
                for (source, target) in
                    source.chunks(BLOCK_BYTES).zip(target.chunks_mut(BLOCK_BYTES))
                {
                    crc = extend_checksum(crc, source);
                    target.copy_from_slice(source);
                }
                crc
            }
            #[cfg(target_arch = "x86_64")]
            Self::Streaming(stream) => stream.copy_and_checksum(source, target, crc),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_runs_copies_runs_of_any_length() {
        let source: Vec<u8> =
            (0..3_000_000_u32).map(|index| index.wrapping_mul(31).to_le_bytes()[1]).collect();
        for (run, count) in
            [(1, 5), (1023, 1100), (1024, 1100), (1031, 1030), (40_000, 30), (700, 1)]
        {
            // Columns of a matrix of bytes that is twice as wide.
            let runs = Runs::new(1, &[count, run], &[2 * run, 1], &[run, 1]);
            let len = usize::try_from(run * count).unwrap();
            for shift in [0, 3] {
                let mut target = vec![0xAA; len + shift + 1];
                let mut verified = Vec::new();
                let copied = copy_runs(&runs, &source, &mut target[shift..shift + len], |run| {
                    verified.push(run);
                    Ok::<(), ()>(())
                });
                assert_eq!(copied, Ok(()));
                let mut expected = Vec::new();
                for (row, range) in (0..count).zip(&verified) {
                    assert_eq!(*range, 2 * run * row..2 * run * row + run);
                    expected.extend_from_slice(&source[byte_range(2 * run * row, run)]);
                }
                assert!(target[shift..shift + len] == expected, "{run} x {count}");
                assert_eq!(target[shift + len], 0xAA, "nothing is written behind the target");
            }
        }
    }

    #[test]
    fn copy_runs_stops_at_the_first_unverified_run() {
        let runs = Runs::new(1, &[4, 2], &[4, 1], &[2, 1]);
        let mut target = [0xAA; 8];
        let verify = |run: Range<u64>| if run.start < 8 { Ok(()) } else { Err(run.start) };
        assert_eq!(copy_runs(&runs, &[1; 16], &mut target, verify), Err(8));
        assert_eq!(target, [1, 1, 1, 1, 0xAA, 0xAA, 0xAA, 0xAA]);
    }

    #[test]
    fn copy_and_checksum_supports_every_alignment() {
        let source: Vec<u8> =
            (0..700_001_u32).map(|i| i.wrapping_mul(31).to_le_bytes()[1]).collect();
        for (skip, len) in [(0, 700_001), (1, 700_000), (3, 262_144), (7, 262_143), (15, 0), (2, 5)]
        {
            let part = &source[skip..skip + len];
            for (shift, crc) in [(0, 0), (1, 1), (9, 0xCBF4_3926), (16, !0)] {
                let mut target = vec![0xAA; len + shift + 1];
                let copied = copy_and_checksum(part, &mut target[shift..shift + len], crc);
                assert_eq!(copied, extend_checksum(crc, part));
                assert_eq!(&target[shift..shift + len], part);
                assert_eq!(target[shift + len], 0xAA, "nothing is written behind the target");
            }
        }
    }

    #[test]
    fn copy_chunks_supports_chunks_of_any_size() {
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
                let expected: Vec<_> =
                    source.chunks(size).map(|it| (it.to_vec(), crc32fast::hash(it))).collect();
                assert!(seen == expected, "{len} bytes in chunks of {size}");
                assert_eq!(&target[shift..shift + len], source);
                assert_eq!(target[shift + len], 0xAA, "nothing is written behind the target");
            }
        }
    }
}
