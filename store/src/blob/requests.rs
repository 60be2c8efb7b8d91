//! Requests for range copies from objects.
//!
//! Ranges that lie close together share one request. The bytes of a request are verified before they are copied.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use tssd_format::{Loop, Runs, checksum, copy_runs};

use crate::blob::{RangeCopy, RangeJob, StreamingVerifier, VerifyMode};
use crate::convert::to_usize;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::Lock;

/// Maximum bytes of a request, unless one chunk or one run is longer.
const REQUEST_BYTES: u64 = 8 << 20;

/// Maximum gap between two ranges of one request: to fetch the gap costs less than another request.
const GAP_BYTES: u64 = 64 << 10;

/// Runs of bytes of a blob to copy to a target, and the bytes to fetch for them.
struct PlannedCopy {
    blob: Arc<str>,
    /// The bytes to fetch: more than the runs if whole chunks are verified.
    fetch_range: Range<u64>,
    /// Offset of the first run in the blob.
    source: u64,
    job: usize,
    target: u64,
    runs: Runs,
    verify: VerifyMode,
}

/// One request, and the copies that its bytes are for.
pub(crate) struct Request {
    pub(crate) blob: Arc<str>,
    pub(crate) range: Range<u64>,
    copies: Vec<PlannedCopy>,
}

/// The requests for some jobs.
pub(crate) struct RequestPlan<'a> {
    pub(crate) requests: Vec<Request>,
    targets: Vec<Lock<&'a mut [u8]>>,
}

impl<'a> RequestPlan<'a> {
    /// Plans the requests for jobs.
    pub(crate) fn new(jobs: Vec<RangeJob<'a>>) -> Self {
        let (mut targets, mut parts) = (Vec::with_capacity(jobs.len()), Vec::new());
        for (job, RangeJob { target, copies }) in jobs.into_iter().enumerate() {
            targets.push(Lock::new(target));
            for copy in copies {
                split_copy(job, copy, &mut parts);
            }
        }
        Self { requests: coalesce(parts), targets }
    }

    /// Verifies the bytes of a response and copies them to the targets.
    ///
    /// `show` returns the name of a blob for messages.
    ///
    /// # Errors
    ///
    /// `Corrupt` if a checksum differs.
    pub(crate) fn scatter(
        &self,
        request: &Request,
        bytes: &[u8],
        show: impl Fn(&str) -> String,
    ) -> Result<()> {
        let corrupt = |blob: &str, chunk: &Range<u64>| {
            let (shown, Range { start, end }) = (show(blob), chunk);
            let text = format_args!("checksum mismatch in bytes {start}..{end} of `{shown}`");
            Error::new(ErrorKind::Corrupt, text)
        };
        let within = |range: Range<u64>| {
            &bytes[to_usize(range.start - request.range.start)
                ..to_usize(range.end - request.range.start)]
        };
        let mut verified = BTreeSet::new();
        for copy in &request.copies {
            let source = copy.source..copy.source + copy.runs.source_span();
            let mut target = self.targets[copy.job].lock();
            let target = &mut target[to_usize(copy.target)..];
            match &copy.verify {
                VerifyMode::WholeChunks(storage) => {
                    let mut verifier =
                        StreamingVerifier::new(storage, source.start - storage.offset);
                    let bytes = within(source);
                    verifier.copy_and_update(bytes, &mut target[..bytes.len()]);
                    verifier
                        .finish()
                        .map_err(|chunk| corrupt(&copy.blob, &storage.stored_chunk(chunk)))?;
                    continue;
                }
                VerifyMode::PartialChunks(storage) => {
                    let raw = source.start - storage.offset..source.end - storage.offset;
                    for number in storage.chunks(&raw) {
                        let chunk = storage.stored_chunk(number);
                        if verified.insert(chunk.start) {
                            let crc = checksum(within(chunk.clone()));
                            storage
                                .verify_chunk(number, crc)
                                .map_err(|_| corrupt(&copy.blob, &chunk))?;
                        }
                    }
                }
                VerifyMode::Skip => {}
            }
            copy_runs(&copy.runs, within(source), target, |_| Ok::<(), Error>(()))?;
        }
        Ok(())
    }
}

/// Splits a range copy into copies that fit into one request each.
fn split_copy(job: usize, copy: RangeCopy, copies: &mut Vec<PlannedCopy>) {
    let RangeCopy { blob, source, target, runs, verify } = copy;
    if runs.total_bytes() == 0 {
        return;
    }
    let mut parts = Vec::new();
    // The outermost loop should have the largest source stride. The order in which the runs are copied does not matter.
    let mut loops = runs.loops().to_vec();
    loops.sort_by_key(|each| std::cmp::Reverse(each.source_stride));
    split_runs(source, target, runs.run_bytes(), &loops, &mut parts);
    for (source, target, runs) in parts {
        let end = source + runs.source_span();
        let fetch_range = match &verify {
            VerifyMode::PartialChunks(storage) => {
                let chunks = storage.chunks(&(source - storage.offset..end - storage.offset));
                storage.stored_chunk(chunks.start).start..storage.stored_chunk(chunks.end - 1).end
            }
            VerifyMode::WholeChunks(_) | VerifyMode::Skip => source..end,
        };
        let (blob, verify) = (blob.clone(), verify.clone());
        copies.push(PlannedCopy { blob, fetch_range, source, job, target, runs, verify });
    }
}

/// Splits runs into parts that fit into one request each.
///
/// The source of a part spans at most [`REQUEST_BYTES`], unless one run is longer, and its gaps are at most
/// [`GAP_BYTES`] long.
fn split_runs(
    source: u64,
    target: u64,
    run: u64,
    loops: &[Loop],
    parts: &mut Vec<(u64, u64, Runs)>,
) {
    let span = |loops: &[Loop]| {
        loops.iter().fold(run, |span, each| span + (each.count - 1) * each.source_stride)
    };
    let Some((outer, inner)) = loops.split_first() else {
        for start in (0..run).step_by(to_usize(REQUEST_BYTES)) {
            let part = Runs::contiguous(REQUEST_BYTES.min(run - start));
            parts.push((source + start, target + start, part));
        }
        return;
    };
    let inner_span = span(inner);
    let is_sparse = outer.source_stride > inner_span.saturating_add(GAP_BYTES);
    let count_per_part = match REQUEST_BYTES.checked_sub(inner_span) {
        Some(free) if !is_sparse => free / outer.source_stride.max(1) + 1,
        _ => 1,
    };
    let offsets = |number: u64| {
        (source + number * outer.source_stride, target + number * outer.target_stride)
    };
    if count_per_part == 1 {
        for number in 0..outer.count {
            let (source, target) = offsets(number);
            split_runs(source, target, run, inner, parts);
        }
        return;
    }
    for number in (0..outer.count).step_by(to_usize(count_per_part)) {
        let count = count_per_part.min(outer.count - number);
        let shape: Vec<u64> =
            [count].into_iter().chain(inner.iter().map(|each| each.count)).chain([run]).collect();
        let strides = |stride: fn(&Loop) -> u64| -> Vec<u64> {
            [stride(outer)].into_iter().chain(inner.iter().map(stride)).chain([1]).collect()
        };
        let (from, to) = (strides(|each| each.source_stride), strides(|each| each.target_stride));
        let (source, target) = offsets(number);
        parts.push((source, target, Runs::new(1, &shape, &from, &to)));
    }
}

/// Combines copies whose bytes lie close together into one request.
fn coalesce(mut copies: Vec<PlannedCopy>) -> Vec<Request> {
    copies.sort_by(|one, other| {
        (&one.blob, one.fetch_range.start, one.fetch_range.end).cmp(&(
            &other.blob,
            other.fetch_range.start,
            other.fetch_range.end,
        ))
    });
    let mut requests: Vec<Request> = Vec::new();
    for copy in copies {
        let last = requests.last_mut().filter(|last| {
            let end = last.range.end.max(copy.fetch_range.end);
            last.blob == copy.blob
                && copy.fetch_range.start <= last.range.end.saturating_add(GAP_BYTES)
                && (end == last.range.end || end - last.range.start <= REQUEST_BYTES)
        });
        match last {
            Some(last) => {
                last.range.end = last.range.end.max(copy.fetch_range.end);
                last.copies.push(copy);
            }
            None => requests.push(Request {
                blob: copy.blob.clone(),
                range: copy.fetch_range.clone(),
                copies: vec![copy],
            }),
        }
    }
    requests
}

#[cfg(test)]
mod tests {
    use tssd_format::{ChunkSize, StorageReference, row_major_strides};

    use super::*;

    fn planned_copy(blob: &str, fetch_range: Range<u64>) -> PlannedCopy {
        let (source, runs) =
            (fetch_range.start, Runs::contiguous(fetch_range.end - fetch_range.start));
        PlannedCopy {
            blob: blob.into(),
            fetch_range,
            source,
            job: 0,
            target: 0,
            runs,
            verify: VerifyMode::Skip,
        }
    }

    /// Returns the ranges to fetch for bytes of this shape and these strides, from byte 1000 on.
    fn fetch_ranges(shape: &[u64], strides: &[u64]) -> Vec<Range<u64>> {
        let runs = Runs::new(1, shape, strides, &row_major_strides(shape));
        let (bytes, mut copies) = (runs.total_bytes(), Vec::new());
        let verify = VerifyMode::Skip;
        split_copy(
            7,
            RangeCopy { blob: "blob".into(), source: 1000, target: 3, runs, verify },
            &mut copies,
        );
        assert!(copies.iter().all(|copy| (&*copy.blob, copy.job) == ("blob", 7)));
        assert_eq!(copies.iter().map(|copy| copy.runs.total_bytes()).sum::<u64>(), bytes);
        copies.into_iter().map(|copy| copy.fetch_range).collect()
    }

    fn rows(count: u64, stride: u64, span: u64) -> Vec<Range<u64>> {
        (0..count).map(|row| 1000 + row * stride..1000 + row * stride + span).collect()
    }

    #[test]
    fn copies_are_split_at_large_gaps_and_at_the_request_limit() {
        const MIB: u64 = 1 << 20;
        assert_eq!(fetch_ranges(&[0, 5], &[5, 1]), []);
        assert_eq!(fetch_ranges(&[5], &[1]), rows(1, 0, 5));
        let mut three = rows(3, REQUEST_BYTES, REQUEST_BYTES);
        three[2].end = three[2].start + 1;
        assert_eq!(fetch_ranges(&[2 * REQUEST_BYTES + 1], &[1]), three);
        // Rows with gaps of at most `GAP_BYTES`.
        assert_eq!(fetch_ranges(&[3, 100], &[100 + GAP_BYTES, 1]), rows(1, 0, 300 + 2 * GAP_BYTES));
        assert_eq!(fetch_ranges(&[3, 100], &[101 + GAP_BYTES, 1]), rows(3, 101 + GAP_BYTES, 100));
        // Rows of rows. Each inner group spans 500 bytes.
        let span = 2 * (500 + GAP_BYTES) + 500;
        assert_eq!(fetch_ranges(&[3, 3, 100], &[500 + GAP_BYTES, 200, 1]), rows(1, 0, span));
        assert_eq!(
            fetch_ranges(&[3, 3, 100], &[501 + GAP_BYTES, 200, 1]),
            rows(3, 501 + GAP_BYTES, 500)
        );
        // As many rows as one request may have.
        let row = MIB - 10;
        let mut wanted = rows(3, 8 * MIB, 8 * MIB - 10);
        wanted[2].end = wanted[2].start + 4 * MIB - 10;
        assert_eq!(fetch_ranges(&[20, row], &[MIB, 1]), wanted);
        // Two rows exceed the request limit.
        assert_eq!(fetch_ranges(&[2, 5 * MIB], &[5 * MIB + 1, 1]), rows(2, 5 * MIB + 1, 5 * MIB));
    }

    #[test]
    fn verified_chunks_are_fetched_whole() {
        let chunk_size = ChunkSize::from_log2(12).unwrap();
        let (offset, len, crcs) = (1 << 20, 10_000, vec![0; 3]);
        let storage = StorageReference { offset, len, chunk_size, crcs, ..Default::default() };
        let verify = VerifyMode::PartialChunks(Arc::new(storage));
        for (wanted, chunks) in [
            (5000..5100, 4096..8192),
            (4096..8192, 4096..8192),
            (4095..8193, 0..10_000),
            (9999..10_000, 8192..10_000),
        ] {
            let runs = Runs::contiguous(wanted.end - wanted.start);
            let (source, verify, mut copies) = (offset + wanted.start, verify.clone(), Vec::new());
            split_copy(
                0,
                RangeCopy { blob: "blob".into(), source, target: 0, runs, verify },
                &mut copies,
            );
            let [PlannedCopy { fetch_range, source: start, .. }] = &copies[..] else {
                panic!("{}", copies.len())
            };
            assert_eq!(
                (fetch_range.start - offset..fetch_range.end - offset, *start),
                (chunks, source)
            );
        }
    }

    #[test]
    fn ranges_that_lie_close_together_share_a_request() {
        type Wanted<'a> = &'a [(&'a str, Range<u64>)];
        const R: u64 = REQUEST_BYTES;
        let gap = GAP_BYTES;
        let one: [(Wanted, Range<u64>); 5] = [
            (&[("a", 10 + gap..20 + gap), ("a", 0..10)], 0..20 + gap),
            (&[("a", 0..10), ("a", 0..5), ("a", 5..10)], 0..10),
            (&[("a", 5..R), ("a", 10..R + 5)], 5..R + 5),
            // A range inside a longer one adds no bytes to the request.
            (&[("a", 0..2 * R), ("a", 5..10)], 0..2 * R),
            (&[("a", 0..2 * R), ("a", 0..2 * R)], 0..2 * R),
        ];
        for (wanted, range) in one {
            let requests = coalesce(
                wanted
                    .iter()
                    .map(|(blob, fetch_range)| planned_copy(blob, fetch_range.clone()))
                    .collect(),
            );
            let [request] = &requests[..] else { panic!("{wanted:?}: {}", requests.len()) };
            assert_eq!((&request.range, request.copies.len()), (&range, wanted.len()));
        }
        let apart: [Wanted; 4] = [
            &[("a", 0..10), ("a", 11 + gap..20 + gap)],
            &[("a", 0..10), ("b", 5..20)],
            &[("a", 5..R), ("a", 10..R + 6)],
            &[("a", 0..2 * R), ("a", 5..2 * R + 1)],
        ];
        for wanted in apart {
            let requests = coalesce(
                wanted
                    .iter()
                    .map(|(blob, fetch_range)| planned_copy(blob, fetch_range.clone()))
                    .collect(),
            );
            let found = requests.iter().map(|request| (&*request.blob, request.range.clone()));
            assert!(found.eq(wanted.iter().cloned()), "{wanted:?}");
        }
    }
}
