//! Ranges of a blob: runs of bytes, and loops around them. Spec: `spec/protocol.md`, section 9.

use serde::{Deserialize, Serialize};
use tssd_format::Runs;

/// Maximum number of bytes that one request reads.
pub(crate) const MAX_READ_BYTES: u64 = 4 << 20;

/// Maximum number of loops around a run.
pub(crate) const MAX_LOOPS: usize = 3;

/// Runs of bytes with regular strides: offset of the first run, length of a run, and loops.
///
/// The loops are outermost first. Each has a count and a stride in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Range(
    pub(crate) u64,
    pub(crate) u64,
    #[serde(default)] pub(crate) Vec<(u64, u64)>,
);

/// A range and its target: the offset of the first run, and the stride of each loop in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: Range,
    pub(crate) target: u64,
    pub(crate) strides: Vec<u64>,
}

impl Range {
    /// Returns a range of one run.
    pub(crate) fn contiguous(base: u64, len: u64) -> Self {
        Self(base, len, Vec::new())
    }

    /// Returns whether both ranges have one run, and `next` begins where this one ends.
    pub(crate) fn is_followed_by(&self, next: &Self) -> bool {
        self.2.is_empty() && next.2.is_empty() && self.0.checked_add(self.1) == Some(next.0)
    }

    /// Returns the number of bytes, or none if the range is not valid in a blob of this length.
    pub(crate) fn total_bytes(&self, blob_len: u64) -> Option<u64> {
        let Self(base, len, loops) = self;
        if *len == 0 || loops.len() > MAX_LOOPS {
            return None;
        }
        let (mut bytes, mut end) = (*len, base.checked_add(*len)?);
        for (count, stride) in loops {
            bytes = bytes.checked_mul(*count)?;
            end = end.checked_add(count.checked_sub(1)?.checked_mul(*stride)?)?;
        }
        (end <= blob_len).then_some(bytes)
    }

    /// Returns the distance in bytes from the first byte to the end of the last run.
    pub(crate) fn span(&self) -> u64 {
        self.2.iter().fold(self.1, |span, (count, stride)| {
            span.saturating_add(count.saturating_sub(1).saturating_mul(*stride))
        })
    }

    /// Calls `run` with the offset of each run in the blob.
    pub(crate) fn for_each_run(&self, mut run: impl FnMut(u64)) {
        visit_runs(self.0, 0, &self.2, &[], &mut |at, _| run(at));
    }
}

impl Piece {
    /// Calls `run` with the offset of each run in the target, until `run` fails.
    pub(crate) fn for_each_target<E>(
        &self,
        mut run: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = Ok(());
        visit_runs(0, self.target, &self.range.2, &self.strides, &mut |_, target| {
            if done.is_ok() {
                done = run(target);
            }
        });
        done
    }

    /// Splits runs into pieces of at most `limit` bytes.
    ///
    /// The first run begins at `source` in the blob, and at `target` in the target.
    pub(crate) fn split(source: u64, target: u64, runs: &Runs, limit: u64) -> Vec<Self> {
        let mut pieces = Vec::new();
        if runs.total_bytes() > 0 {
            let loops: Vec<_> = runs
                .loops()
                .iter()
                .map(|each| (each.count, each.source_stride, each.target_stride))
                .collect();
            let mut splitter = RunSplitter { run_bytes: runs.run_bytes(), limit, pieces };
            splitter.split(source, target, &loops);
            pieces = splitter.pieces;
        }
        pieces
    }
}

fn visit_runs(
    source: u64,
    target: u64,
    loops: &[(u64, u64)],
    strides: &[u64],
    run: &mut impl FnMut(u64, u64),
) {
    let Some(((count, stride), inner)) = loops.split_first() else { return run(source, target) };
    let (target_stride, strides) =
        strides.split_first().map_or((0, strides), |(s, rest)| (*s, rest));
    for round in 0..*count {
        visit_runs(source + round * stride, target + round * target_stride, inner, strides, run);
    }
}

/// Splits runs of `run_bytes` bytes into pieces of at most `limit` bytes.
struct RunSplitter {
    run_bytes: u64,
    limit: u64,
    pieces: Vec<Piece>,
}

impl RunSplitter {
    fn split(&mut self, source: u64, target: u64, loops: &[(u64, u64, u64)]) {
        let (run, limit) = (self.run_bytes, self.limit);
        let inner_bytes =
            |loops: &[(u64, u64, u64)]| loops.iter().fold(run, |all, each| all * each.0);
        if loops.len() <= MAX_LOOPS && inner_bytes(loops) <= limit {
            let range = Range(source, run, loops.iter().map(|each| (each.0, each.1)).collect());
            let strides = loops.iter().map(|each| each.2).collect();
            return self.pieces.push(Piece { range, target, strides });
        }
        let Some((&(count, stride, target_stride), inner)) = loops.split_first() else {
            // The run exceeds the limit by itself.
            let mut at = 0;
            while at < run {
                let len = limit.min(run - at);
                let range = Range::contiguous(source + at, len);
                self.pieces.push(Piece { range, target: target + at, strides: Vec::new() });
                at += len;
            }
            return;
        };
        // A piece takes as many rounds as fit. If not even one fits, each round is split further.
        let step =
            if loops.len() > MAX_LOOPS { 1 } else { (limit / inner_bytes(inner)).clamp(1, count) };
        let mut round = 0;
        while round < count {
            let rounds = step.min(count - round);
            let (source, target) = (source + round * stride, target + round * target_stride);
            if rounds == 1 {
                self.split(source, target, inner);
            } else {
                let mut loops = vec![(rounds, stride, target_stride)];
                loops.extend(inner);
                self.split(source, target, &loops);
            }
            round += rounds;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tssd_format::Runs;

    use super::*;

    /// Returns boxes in padded memory, with the bytes of an item and a limit for pieces.
    ///
    /// A box has up to five dimensions, each with its size and padding.
    fn padded_boxes() -> impl Strategy<Value = (Vec<(u64, u64)>, u64, u64)> {
        let dims = prop::collection::vec((1..5_u64, 0..3_u64), 0..=5);
        (dims, prop::sample::select(vec![1_u64, 2, 4]), 1..200_u64)
    }

    proptest! {
        #[test]
        fn pieces_cover_exactly_the_split_runs((dims, itemsize, limit) in padded_boxes()) {
            let shape: Vec<u64> = dims.iter().map(|(size, _)| *size).collect();
            let mut source = vec![0; dims.len()];
            let mut target = vec![0; dims.len()];
            let (mut padded_stride, mut dense_stride) = (1, 1);
            for (at, (size, padding)) in dims.iter().enumerate().rev() {
                (source[at], target[at]) = (padded_stride, dense_stride);
                (padded_stride, dense_stride) =
                    (padded_stride * (size + padding), dense_stride * size);
            }
            let runs = Runs::new(itemsize, &shape, &source, &target);
            let mut expected = Vec::new();
            runs.for_each(|from, to, len| {
                expected.extend((0..len).map(|byte| (100 + from + byte, 7 + to + byte)));
            });
            let pieces = Piece::split(100, 7, &runs, limit.max(itemsize));
            let mut copied = Vec::new();
            for piece in &pieces {
                let Range(base, len, _) = piece.range;
                let end = base + piece.range.span();
                let bytes = piece.range.total_bytes(end).unwrap();
                prop_assert!(bytes <= limit.max(itemsize));
                prop_assert!(piece.range.total_bytes(end - 1).is_none());
                let (mut sources, mut targets) = (Vec::new(), Vec::new());
                piece.range.for_each_run(|at| sources.push(at));
                piece.for_each_target(|at| { targets.push(at); Ok::<_, ()>(()) }).unwrap();
                prop_assert_eq!(len * len_u64(&sources), bytes);
                for (from, to) in sources.into_iter().zip(targets) {
                    copied.extend((0..len).map(|byte| (from + byte, to + byte)));
                }
            }
            expected.sort_unstable();
            copied.sort_unstable();
            prop_assert_eq!(copied, expected);
        }
    }

    fn len_u64(items: &[u64]) -> u64 {
        u64::try_from(items.len()).unwrap()
    }

    #[test]
    fn invalid_ranges_are_rejected() {
        let max = u64::MAX;
        for range in [
            Range::contiguous(0, 0),
            Range::contiguous(max, 1),
            Range::contiguous(8, 3),
            Range(0, 1, vec![(0, 1)]),
            Range(0, 1, vec![(max, max)]),
            Range(0, 1, vec![(max, 0), (max, 0)]),
            Range(0, 1, vec![(1, 0); 4]),
            Range(0, 1, vec![(2, 10)]),
        ] {
            assert_eq!(range.total_bytes(10), None, "{range:?}");
        }
        assert_eq!(Range(1, 2, vec![(2, 5), (2, 2)]).total_bytes(10), Some(8));
        assert_eq!(serde_json::from_str::<Range>("[3,4]").unwrap(), Range::contiguous(3, 4));
    }
}
