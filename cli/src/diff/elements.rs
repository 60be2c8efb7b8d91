//! How far apart the elements of two tensors are.

use tssd_format::{Runs, TensorView};

use crate::element::Reader;

/// How the elements of two tensors of one dtype and shape differ.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Delta {
    /// How many are not the same bits.
    pub(super) differing: u64,
    /// The largest absolute difference, for dtypes that are numbers.
    pub(super) max_abs: Option<f64>,
    /// How many floats of the dtype the two furthest are apart, for dtypes that are floats.
    pub(super) max_ulps: Option<u64>,
    /// How many are a number in at most one of the two.
    pub(super) nan: u64,
}

impl Delta {
    /// The same for people.
    pub(super) fn describe(&self, numel: u64) -> String {
        let mut text = format!("{} of {numel} elements differ", self.differing);
        if let Some(max_abs) = self.max_abs {
            let is_handy = max_abs == 0.0 || (1e-3..1e6).contains(&max_abs);
            let max_abs = if is_handy { format!("{max_abs:.4}") } else { format!("{max_abs:.3e}") };
            text = format!("{text}, max |a - b| {max_abs}");
            if let Some(max_ulps) = self.max_ulps {
                text = format!("{text}, max {max_ulps} ulp");
            }
        }
        if self.nan > 0 {
            text = format!("{text}, {} with NaN", self.nan);
        }
        text
    }
}

/// Element by element; both tensors must have the same dtype and shape.
pub(super) fn compare(a: &TensorView<'_>, b: &TensorView<'_>) -> Delta {
    let dtype = a.meta().dtype();
    let item = usize::try_from(dtype.itemsize()).expect("at most 16");
    let reader = Reader::of(dtype);
    let mut delta = Delta::default();
    let size = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    Runs::new(dtype.itemsize(), a.meta().shape(), &a.meta().strides(), &b.meta().strides())
        .for_each(|left, right, run| {
            // Runs of equal bytes are passed over at the speed of memory.
            const BLOCK: usize = 4096;
            let left = a.span()[size(left)..][..size(run)].chunks(BLOCK * item);
            let right = b.span()[size(right)..][..size(run)].chunks(BLOCK * item);
            for (left, right) in left.zip(right).filter(|(left, right)| left != right) {
                let pairs = left.chunks_exact(item).zip(right.chunks_exact(item));
                for (left, right) in pairs.filter(|(left, right)| left != right) {
                    delta.count(reader, left, right);
                }
            }
        });
    delta
}

impl Delta {
    fn count(&mut self, reader: Option<Reader>, left: &[u8], right: &[u8]) {
        self.differing += 1;
        let Some(reader) = reader else { return };
        let mut has_nan = false;
        for (a, b) in reader.numbers(left).zip(reader.numbers(right)) {
            let apart = a.apart(b);
            has_nan |= apart.is_nan();
            // `max` passes NaN over.
            self.max_abs = Some(self.max_abs.unwrap_or(0.0).max(apart));
            self.max_ulps = self.max_ulps.max(a.ulps(b));
        }
        self.nan += u64::from(has_nan);
    }
}
