//! Comparison of two tensors element by element.

use tssd_format::{Runs, TensorView};

use crate::element::ElementDecoder;

/// Differences between the elements of two tensors of the same dtype and shape.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Delta {
    /// Number of elements with different bits.
    pub(super) differing: u64,
    /// Largest absolute difference, for dtypes of numbers.
    pub(super) max_abs: Option<f64>,
    /// Largest distance in ULPs, for float dtypes.
    pub(super) max_ulps: Option<u64>,
    /// Number of the differing elements that are NaN in at least one tensor.
    pub(super) nan: u64,
}

impl Delta {
    /// Returns the differences as text.
    pub(super) fn describe(&self, numel: u64) -> String {
        let mut text = format!("{} of {numel} elements differ", self.differing);
        if let Some(max_abs) = self.max_abs {
            let is_fixed_point = max_abs == 0.0 || (1e-3..1e6).contains(&max_abs);
            let max_abs =
                if is_fixed_point { format!("{max_abs:.4}") } else { format!("{max_abs:.3e}") };
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

/// Compares two tensors element by element. Both must have the same dtype and shape.
pub(super) fn compare(a: &TensorView<'_>, b: &TensorView<'_>) -> Delta {
    let dtype = a.meta().dtype();
    let itemsize = usize::try_from(dtype.itemsize()).expect("at most 16");
    let reader = ElementDecoder::for_dtype(dtype);
    let mut delta = Delta::default();
    let to_usize = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    Runs::new(dtype.itemsize(), a.meta().shape(), &a.meta().strides(), &b.meta().strides())
        .for_each(|left, right, run| {
            // Compare whole blocks first: equal bytes are skipped at the speed of memory.
            const BLOCK_ELEMENTS: usize = 4096;
            let left =
                a.span()[to_usize(left)..][..to_usize(run)].chunks(BLOCK_ELEMENTS * itemsize);
            let right =
                b.span()[to_usize(right)..][..to_usize(run)].chunks(BLOCK_ELEMENTS * itemsize);
            for (left, right) in left.zip(right).filter(|(left, right)| left != right) {
                let pairs = left.chunks_exact(itemsize).zip(right.chunks_exact(itemsize));
                for (left, right) in pairs.filter(|(left, right)| left != right) {
                    delta.count_element(reader, left, right);
                }
            }
        });
    delta
}

impl Delta {
    fn count_element(&mut self, reader: Option<ElementDecoder>, left: &[u8], right: &[u8]) {
        self.differing += 1;
        let Some(reader) = reader else { return };
        let mut has_nan = false;
        for (a, b) in reader.numbers(left).zip(reader.numbers(right)) {
            let difference = a.abs_difference(b);
            has_nan |= difference.is_nan();
            // `f64::max` ignores NaN.
            self.max_abs = Some(self.max_abs.unwrap_or(0.0).max(difference));
            self.max_ulps = self.max_ulps.max(a.ulps(b));
        }
        self.nan += u64::from(has_nan);
    }
}
