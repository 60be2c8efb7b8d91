//! Boxes of elements as runs of bytes: the copy of a box between two strided memory layouts.

use crate::shape::row_major_strides;

/// A loop around runs: the number of iterations, and the strides in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Number of iterations.
    pub count: u64,
    /// Bytes between two iterations in the source.
    pub source_stride: u64,
    /// Bytes between two iterations in the target.
    pub target_stride: u64,
}

/// A box of elements in a source and a target memory, as nested loops around contiguous runs.
///
/// A run is contiguous in both memories. Dimensions that are contiguous with each other in both memories are merged,
/// so a box that is contiguous in both is one run without loops.
///
/// # Examples
///
/// ```
/// use tssd_format::Runs;
/// // Columns 2 and 3 of a row-major 3 x 8 matrix of 4-byte elements, into a 3 x 2 one.
/// let runs = Runs::new(4, &[3, 2], &[8, 1], &[2, 1]);
/// let mut copies = Vec::new();
/// runs.for_each(|source, target, bytes| copies.push((source, target, bytes)));
/// assert_eq!(copies, [(0, 0, 8), (32, 8, 8), (64, 16, 8)]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    run_bytes: u64,
    loops: Vec<Loop>,
}

impl Runs {
    /// Creates the runs of a box of `shape`, with the strides of the source and of the target.
    ///
    /// Shape and strides are in elements; `itemsize` is in bytes. The caller must have validated shape and strides:
    /// sums and products that overflow saturate.
    pub fn new(itemsize: u64, shape: &[u64], source: &[u64], target: &[u64]) -> Self {
        if shape.contains(&0) {
            return Self { run_bytes: 0, loops: Vec::new() };
        }
        let mut run_bytes = itemsize;
        let mut loops: Vec<Loop> = Vec::new();
        let dims = shape.iter().zip(source).zip(target).rev().filter(|((size, _), _)| **size != 1);
        for ((&count, source), target) in dims {
            let next = Loop {
                count,
                source_stride: source.saturating_mul(itemsize),
                target_stride: target.saturating_mul(itemsize),
            };
            match loops.last_mut() {
                None if next.source_stride == run_bytes && next.target_stride == run_bytes => {
                    run_bytes = run_bytes.saturating_mul(count);
                }
                Some(inner)
                    if inner.source_stride.saturating_mul(inner.count) == next.source_stride
                        && inner.target_stride.saturating_mul(inner.count)
                            == next.target_stride =>
                {
                    inner.count = inner.count.saturating_mul(count);
                }
                _ => loops.push(next),
            }
        }
        loops.reverse();
        Self { run_bytes, loops }
    }

    /// Creates a single run of `bytes` bytes.
    pub fn contiguous(bytes: u64) -> Self {
        Self { run_bytes: bytes, loops: Vec::new() }
    }

    /// Creates the runs that copy a strided tensor to row-major order.
    pub fn to_row_major(itemsize: u64, shape: &[u64], source: &[u64]) -> Self {
        Self::new(itemsize, shape, source, &row_major_strides(shape))
    }

    /// Returns the length of each run in bytes; 0 if the box is empty.
    pub fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// Returns the loops around the run, outermost first.
    pub fn loops(&self) -> &[Loop] {
        &self.loops
    }

    /// Returns the total length of all runs in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.loops.iter().fold(self.run_bytes, |bytes, level| bytes.saturating_mul(level.count))
    }

    /// Returns the number of bytes from the first to the last byte in the source, inclusive.
    pub fn source_span(&self) -> u64 {
        self.span(|level| level.source_stride)
    }

    /// Returns the number of bytes from the first to the last byte in the target, inclusive.
    pub fn target_span(&self) -> u64 {
        self.span(|level| level.target_stride)
    }

    fn span(&self, stride: impl Fn(&Loop) -> u64) -> u64 {
        self.loops.iter().fold(self.run_bytes, |span, level| {
            let last = level.count.saturating_sub(1);
            span.saturating_add(last.saturating_mul(stride(level)))
        })
    }

    /// Calls `copy` for each innermost loop, for callers that copy several rows in one call.
    ///
    /// The arguments are the offsets in the source and in the target of the first run of the loop, in bytes, and the
    /// loop. Without loops, `copy` is called once with a loop of one iteration.
    pub fn for_each_inner_loop(&self, mut copy: impl FnMut(u64, u64, Loop)) {
        if self.run_bytes == 0 {
            return;
        }
        match self.loops.split_last() {
            Some((rows, outer)) => {
                visit_loops(outer, 0, 0, &mut |source, target| copy(source, target, *rows));
            }
            None => copy(0, 0, Loop { count: 1, source_stride: 0, target_stride: 0 }),
        }
    }

    /// Calls `copy` for each run, in row-major order of the box.
    ///
    /// The arguments are the offset in the source, the offset in the target and the length of the run, in bytes.
    pub fn for_each(&self, mut copy: impl FnMut(u64, u64, u64)) {
        if self.run_bytes > 0 {
            visit_loops(&self.loops, 0, 0, &mut |source, target| {
                copy(source, target, self.run_bytes);
            });
        }
    }
}

/// Calls `copy` with the source and target offsets of each iteration of the nested loops.
///
/// The recursion is at most as deep as tensors have dimensions.
fn visit_loops(loops: &[Loop], source: u64, target: u64, copy: &mut impl FnMut(u64, u64)) {
    let Some((outer, inner)) = loops.split_first() else {
        return copy(source, target);
    };
    for iteration in 0..outer.count {
        visit_loops(
            inner,
            source.saturating_add(iteration.saturating_mul(outer.source_stride)),
            target.saturating_add(iteration.saturating_mul(outer.target_stride)),
            copy,
        );
    }
}
