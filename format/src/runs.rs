//! Boxes of elements as runs of bytes: how one strided memory is copied to another.

use crate::shape::row_major_strides;

/// One loop around a run: how often, and how many bytes further each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// How often.
    pub count: u64,
    /// Bytes from one round to the next in the source.
    pub source_stride: u64,
    /// Bytes from one round to the next in the target.
    pub target_stride: u64,
}

/// A box of elements in two memories, as nested loops around runs that are contiguous in both.
///
/// Dimensions that continue each other in both memories are joined, so a box that is contiguous in
/// both is one run without loops.
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
    run: u64,
    loops: Vec<Loop>,
}

impl Runs {
    /// The runs of a box of this shape (elements), whose strides in the two memories (elements)
    /// are given; `itemsize` is in bytes. Shapes and strides must have been checked: sums and
    /// products of them that overflow saturate.
    pub fn new(itemsize: u64, shape: &[u64], source: &[u64], target: &[u64]) -> Self {
        if shape.contains(&0) {
            return Self { run: 0, loops: Vec::new() };
        }
        let mut run = itemsize;
        let mut loops: Vec<Loop> = Vec::new();
        let dims = shape.iter().zip(source).zip(target).rev().filter(|((size, _), _)| **size != 1);
        for ((&count, source), target) in dims {
            let next = Loop {
                count,
                source_stride: source.saturating_mul(itemsize),
                target_stride: target.saturating_mul(itemsize),
            };
            match loops.last_mut() {
                None if next.source_stride == run && next.target_stride == run => {
                    run = run.saturating_mul(count);
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
        Self { run, loops }
    }

    /// One run of so many bytes.
    pub fn run(bytes: u64) -> Self {
        Self { run: bytes, loops: Vec::new() }
    }

    /// The runs that lay a strided tensor out row-major.
    pub fn to_row_major(itemsize: u64, shape: &[u64], source: &[u64]) -> Self {
        Self::new(itemsize, shape, source, &row_major_strides(shape))
    }

    /// Length of each run in bytes; 0 if the box is empty.
    pub fn run_bytes(&self) -> u64 {
        self.run
    }

    /// The loops around the run, outermost first.
    pub fn loops(&self) -> &[Loop] {
        &self.loops
    }

    /// How many bytes all runs have together.
    pub fn total_bytes(&self) -> u64 {
        self.loops.iter().fold(self.run, |bytes, each| bytes.saturating_mul(each.count))
    }

    /// From the first byte to the last one in the source.
    pub fn source_span(&self) -> u64 {
        self.span(|each| each.source_stride)
    }

    /// From the first byte to the last one in the target.
    pub fn target_span(&self) -> u64 {
        self.span(|each| each.target_stride)
    }

    fn span(&self, stride: impl Fn(&Loop) -> u64) -> u64 {
        self.loops.iter().fold(self.run, |span, each| {
            let last = each.count.saturating_sub(1);
            span.saturating_add(last.saturating_mul(stride(each)))
        })
    }

    /// Calls `copy` with source offset and target offset of the first run of each innermost loop, in bytes, and that loop,
    /// for whoever copies rows at once. Without loops it is one round.
    pub fn for_each_rows(&self, mut copy: impl FnMut(u64, u64, Loop)) {
        if self.run == 0 {
            return;
        }
        match self.loops.split_last() {
            Some((rows, outer)) => {
                nest(outer, 0, 0, &mut |source, target| copy(source, target, *rows));
            }
            None => copy(0, 0, Loop { count: 1, source_stride: 0, target_stride: 0 }),
        }
    }

    /// Calls `copy` with source offset, target offset and length of every run, in bytes, in
    /// row-major order of the box.
    pub fn for_each(&self, mut copy: impl FnMut(u64, u64, u64)) {
        if self.run > 0 {
            nest(&self.loops, 0, 0, &mut |source, target| copy(source, target, self.run));
        }
    }
}

/// At most as deep as tensors have dimensions.
fn nest(loops: &[Loop], source: u64, target: u64, copy: &mut impl FnMut(u64, u64)) {
    let Some((outer, inner)) = loops.split_first() else {
        return copy(source, target);
    };
    for round in 0..outer.count {
        nest(
            inner,
            source.saturating_add(round.saturating_mul(outer.source_stride)),
            target.saturating_add(round.saturating_mul(outer.target_stride)),
            copy,
        );
    }
}
