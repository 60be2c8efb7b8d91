//! Which bytes of a blob are read: runs, and loops around them. Spec: `spec/protocol.md`, section 9.

use serde::{Deserialize, Serialize};
use tssd_format::Runs;

/// The most bytes that are read at once.
pub(crate) const MAX_READ: u64 = 4 << 20;

/// The most loops around a run.
pub(crate) const MAX_LOOPS: usize = 3;

/// Runs of bytes at regular distances: where the first begins, how long each is, and the loops around
/// them, outermost first, as count and stride in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Range(
    pub(crate) u64,
    pub(crate) u64,
    #[serde(default)] pub(crate) Vec<(u64, u64)>,
);

/// A range, and where its runs go: each loop's stride in the target, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: Range,
    pub(crate) target: u64,
    pub(crate) strides: Vec<u64>,
}

impl Range {
    /// Bytes without a gap.
    pub(crate) fn plain(base: u64, len: u64) -> Self {
        Self(base, len, Vec::new())
    }

    /// Whether another one begins where this one ends.
    pub(crate) fn continues(&self, next: &Self) -> bool {
        self.2.is_empty() && next.2.is_empty() && self.0.checked_add(self.1) == Some(next.0)
    }

    /// How many bytes it has; none if it is no range of a blob of this length, or has none.
    pub(crate) fn bytes_in(&self, blob_len: u64) -> Option<u64> {
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

    /// How many bytes there are from its first to its last.
    #[cfg(test)]
    fn span(&self) -> u64 {
        self.2.iter().fold(self.1, |span, (count, stride)| {
            span.saturating_add(count.saturating_sub(1).saturating_mul(*stride))
        })
    }

    /// Calls `run` with where each run begins.
    pub(crate) fn for_each(&self, mut run: impl FnMut(u64)) {
        each(self.0, 0, &self.2, &[], &mut |at, _| run(at));
    }
}

impl Piece {
    /// Calls `run` with where each run goes.
    pub(crate) fn for_each_target<E>(
        &self,
        mut run: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = Ok(());
        each(0, self.target, &self.range.2, &self.strides, &mut |_, target| {
            if done.is_ok() {
                done = run(target);
            }
        });
        done
    }

    /// Pieces of at most `limit` bytes, or of one run, that are these runs together. Their source begins
    /// at `source` of the blob, their target at `target`.
    pub(crate) fn cut(source: u64, target: u64, runs: &Runs, limit: u64) -> Vec<Self> {
        let mut pieces = Vec::new();
        if runs.total_bytes() > 0 {
            let loops: Vec<_> = runs
                .loops()
                .iter()
                .map(|each| (each.count, each.source_stride, each.target_stride))
                .collect();
            cut(source, target, runs.run_bytes(), &loops, limit, &mut pieces);
        }
        pieces
    }
}

fn each(
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
        each(source + round * stride, target + round * target_stride, inner, strides, run);
    }
}

fn cut(
    source: u64,
    target: u64,
    run: u64,
    loops: &[(u64, u64, u64)],
    limit: u64,
    pieces: &mut Vec<Piece>,
) {
    let inner_bytes = |loops: &[(u64, u64, u64)]| loops.iter().fold(run, |all, each| all * each.0);
    if loops.len() <= MAX_LOOPS && inner_bytes(loops) <= limit {
        let range = Range(source, run, loops.iter().map(|each| (each.0, each.1)).collect());
        let strides = loops.iter().map(|each| each.2).collect();
        return pieces.push(Piece { range, target, strides });
    }
    let Some((&(count, stride, target_stride), inner)) = loops.split_first() else {
        // A run that is too long for one.
        let mut at = 0;
        while at < run {
            let len = limit.min(run - at);
            let range = Range::plain(source + at, len);
            pieces.push(Piece { range, target: target + at, strides: Vec::new() });
            at += len;
        }
        return;
    };
    // As many rounds at once as fit; one by one if not even that does.
    let step =
        if loops.len() > MAX_LOOPS { 1 } else { (limit / inner_bytes(inner)).clamp(1, count) };
    let mut round = 0;
    while round < count {
        let rounds = step.min(count - round);
        let (source, target) = (source + round * stride, target + round * target_stride);
        if rounds == 1 {
            cut(source, target, run, inner, limit, pieces);
        } else {
            let mut loops = vec![(rounds, stride, target_stride)];
            loops.extend(inner);
            cut(source, target, run, &loops, limit, pieces);
        }
        round += rounds;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tssd_format::Runs;

    use super::*;

    /// A box of up to five dimensions in a padded memory, with a limit for pieces.
    fn boxes() -> impl Strategy<Value = (Vec<(u64, u64)>, u64, u64)> {
        let dims = prop::collection::vec((1..5_u64, 0..3_u64), 0..=5);
        (dims, prop::sample::select(vec![1_u64, 2, 4]), 1..200_u64)
    }

    proptest! {
        #[test]
        fn pieces_are_the_runs_that_they_were_cut_from((dims, itemsize, limit) in boxes()) {
            let shape: Vec<u64> = dims.iter().map(|(size, _)| *size).collect();
            let mut source = vec![0; dims.len()];
            let mut target = vec![0; dims.len()];
            let (mut wide, mut dense) = (1, 1);
            for (at, (size, padding)) in dims.iter().enumerate().rev() {
                (source[at], target[at]) = (wide, dense);
                (wide, dense) = (wide * (size + padding), dense * size);
            }
            let runs = Runs::new(itemsize, &shape, &source, &target);
            let mut wanted = Vec::new();
            runs.for_each(|from, to, len| {
                wanted.extend((0..len).map(|byte| (100 + from + byte, 7 + to + byte)));
            });
            let pieces = Piece::cut(100, 7, &runs, limit.max(itemsize));
            let mut found = Vec::new();
            for piece in &pieces {
                let Range(base, len, _) = piece.range;
                let end = base + piece.range.span();
                let bytes = piece.range.bytes_in(end).unwrap();
                prop_assert!(bytes <= limit.max(itemsize));
                prop_assert!(piece.range.bytes_in(end - 1).is_none());
                let (mut sources, mut targets) = (Vec::new(), Vec::new());
                piece.range.for_each(|at| sources.push(at));
                piece.for_each_target(|at| { targets.push(at); Ok::<_, ()>(()) }).unwrap();
                prop_assert_eq!(len * wide_len(&sources), bytes);
                for (from, to) in sources.into_iter().zip(targets) {
                    found.extend((0..len).map(|byte| (from + byte, to + byte)));
                }
            }
            wanted.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, wanted);
        }
    }

    fn wide_len(items: &[u64]) -> u64 {
        u64::try_from(items.len()).unwrap()
    }

    #[test]
    fn ranges_that_are_none_are_found() {
        let max = u64::MAX;
        for range in [
            Range::plain(0, 0),
            Range::plain(max, 1),
            Range::plain(8, 3),
            Range(0, 1, vec![(0, 1)]),
            Range(0, 1, vec![(max, max)]),
            Range(0, 1, vec![(max, 0), (max, 0)]),
            Range(0, 1, vec![(1, 0); 4]),
            Range(0, 1, vec![(2, 10)]),
        ] {
            assert_eq!(range.bytes_in(10), None, "{range:?}");
        }
        assert_eq!(Range(1, 2, vec![(2, 5), (2, 2)]).bytes_in(10), Some(8));
        assert_eq!(serde_json::from_str::<Range>("[3,4]").unwrap(), Range::plain(3, 4));
    }
}
