//! The kernel: copies bytes and checksums them in one pass over memory.
//!
//! A block is checksummed, which brings it into the cache as fast as memory gives it, and then stored
//! past the cache, so that the target is not read first and does not push the source out. The stores go
//! to four quarters of the block in turn, which keeps four pages open at once. Where it helps, the core is told
//! to fetch the next block on the way.

use std::ops::Range;

use crc32fast::Hasher;

use crate::runs::Runs;

/// What is checksummed and then copied while it is in the cache. Its quarters do not begin at the same
/// place of a page: loads that lie where a store of another page has just gone would wait for it.
const BLOCK: usize = 4 * 525 * 64;

/// The same where the core is told what to fetch: no more than comes while the block before is copied, which an L1 of
/// 48 KiB mostly keeps. Quarters of whole pages were as fast as others on a Xeon.
#[cfg(target_arch = "x86_64")]
const TOLD_BLOCK: usize = 4 * 128 * 64;

/// Shorter copies stay in the cache: their reader is likely to be near.
#[cfg(target_arch = "x86_64")]
const STREAM_MIN: usize = 32 << 10;

/// Copies bytes to memory of the same length, and feeds them to a checksum on the way: one pass over
/// memory for both. Long copies go past the cache.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy_and_checksum(source: &[u8], target: &mut [u8], crc: &mut Hasher) {
    copy_and_see(source, target, |block| crc.update(block));
}

/// Copies bytes to memory of the same length; long copies go past the cache.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy(source: &[u8], target: &mut [u8]) {
    copy_and_see(source, target, |_| {});
}

/// Shorter runs are not worth it to go past the cache: their first and last lines do not.
#[cfg(target_arch = "x86_64")]
const STREAM_RUN_MIN: u64 = 1 << 10;

/// Runs that have fewer bytes together stay in the cache: their reader is likely to be near.
#[cfg(target_arch = "x86_64")]
const STREAM_ALL_MIN: u64 = 1 << 20;

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
    // Nobody else sees the target before this returns, so one fence at the end is enough.
    #[cfg(target_arch = "x86_64")]
    let _fence = stream::Fence;
    #[cfg(target_arch = "x86_64")]
    let streams = runs.run_bytes() >= STREAM_RUN_MIN && runs.total_bytes() >= STREAM_ALL_MIN;
    let mut outcome = Ok(());
    runs.for_each(|from, to, bytes| {
        if outcome.is_err() {
            return;
        }
        outcome = prove(from..from + bytes);
        if outcome.is_ok() {
            let (source, target) = (&source[part(from, bytes)], &mut target[part(to, bytes)]);
            #[cfg(target_arch = "x86_64")]
            if streams {
                return stream::copy_unfenced(source, target, |_| {});
            }
            target.copy_from_slice(source);
        }
    });
    outcome
}

fn part(start: u64, bytes: u64) -> Range<usize> {
    let place = |at: u64| usize::try_from(at).expect("a place in memory");
    place(start)..place(start + bytes)
}

/// Copies bytes to memory of the same length, in blocks, each of which is shown to `see` before it is copied, when it
/// is about to be in the cache. Long copies go past the cache.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy_and_see(source: &[u8], target: &mut [u8], mut see: impl FnMut(&[u8])) {
    assert_eq!(source.len(), target.len(), "a copy is as long as its source");
    #[cfg(target_arch = "x86_64")]
    if source.len() >= STREAM_MIN {
        return stream::copy_seen(source, target, see);
    }
    for (source, target) in source.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
        see(source);
        target.copy_from_slice(source);
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "stores that bypass the cache exist only as intrinsics")]
mod stream {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    use super::{BLOCK, TOLD_BLOCK};
    use crate::fetch::{Line, fetch, helps};

    /// Lets whoever sees what is published after it see the streaming stores before it.
    pub(super) struct Fence;

    impl Drop for Fence {
        fn drop(&mut self) {
            // SAFETY: the instruction needs SSE, which every x86_64 processor has. It orders the
            // streaming stores before all later stores.
            unsafe { _mm_sfence() }
        }
    }

    pub(super) fn copy_seen(source: &[u8], target: &mut [u8], see: impl FnMut(&[u8])) {
        let _fence = Fence;
        copy_unfenced(source, target, see);
    }

    /// Who calls this drops a [`Fence`] before the target is anybody else's.
    pub(super) fn copy_unfenced(source: &[u8], target: &mut [u8], mut see: impl FnMut(&[u8])) {
        // A line that is stored in two halves costs twice: the target is cut at lines.
        let lead = target.as_ptr().align_offset(size_of::<Line>()).min(source.len());
        let (source_lead, source) = source.split_at(lead);
        let (target_lead, target) = target.split_at_mut(lead);
        see(source_lead);
        target_lead.copy_from_slice(source_lead);

        let is_told = helps();
        let mut rest = source;
        for target in target.chunks_mut(if is_told { TOLD_BLOCK } else { BLOCK }) {
            let (source, next) = rest.split_at(target.len());
            rest = next;
            see(source);
            let ((lines, source_tail), (targets, target_tail)) =
                (source.as_chunks(), target.as_chunks_mut());
            let next: &[Line] = if is_told { next.as_chunks().0 } else { &[] };
            copy_lines(lines, targets, next);
            target_tail.copy_from_slice(source_tail);
        }
    }

    /// Copies lines to a target that is aligned to lines, and fetches as many of the next ones.
    fn copy_lines(source: &[Line], target: &mut [Line], next: &[Line]) {
        let quarter = source.len() / 4;
        for line in 0..quarter {
            for at in [line, line + quarter, line + 2 * quarter, line + 3 * quarter] {
                next.get(at).into_iter().for_each(fetch);
                copy_line(&source[at], &mut target[at]);
            }
        }
        for at in 4 * quarter..source.len() {
            copy_line(&source[at], &mut target[at]);
        }
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
        // we borrow mutably. `copy_unfenced` has cut the target at a multiple of 64, and blocks (whole
        // lines), lines (64 bytes) and their parts (16 bytes) keep to multiples of 16.
        unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), value) }
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
            for shift in [0, 1, 9, 16] {
                let mut target = vec![0xAA; len + shift + 1];
                let mut crc = Hasher::new();
                copy_and_checksum(part, &mut target[shift..shift + len], &mut crc);
                assert_eq!(&target[shift..shift + len], part);
                assert_eq!(target[shift + len], 0xAA, "nothing is written behind the target");
                assert_eq!(crc.finalize(), crc32fast::hash(part));
            }
        }
    }
}
