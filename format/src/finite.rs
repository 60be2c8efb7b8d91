//! The search for elements that are NaN or infinite.
// Kernels must be inlined into the function that enables their instructions.
#![allow(clippy::inline_always)]

use std::ops::Range;

use crate::convert::{to_u64, to_usize};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::isa::{Instructions, Isa, Kernel};
use crate::runs::Runs;
use crate::tensor::Tensor;

/// Bytes that are read from a blob at once (256 KiB).
const BLOCK: usize = 256 << 10;

impl Tensor {
    /// Returns the index, in row-major order, of the first element that is NaN or infinite. `None` if there is none.
    ///
    /// Elements of dtypes without NaN and infinity are finite.
    ///
    /// # Errors
    ///
    /// `Io` if the elements are in a blob that cannot be read.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::Tensor;
    /// let tensor = Tensor::from_slice(&[1.0, f32::INFINITY, f32::NAN], &[3])?;
    /// assert_eq!(tensor.first_non_finite()?, Some(1));
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    pub fn first_non_finite(&self) -> Result<Option<u64>> {
        let Some(pattern) = Pattern::of(self.meta().dtype()) else { return Ok(None) };
        if self.meta().numel() == 0 {
            return Ok(None);
        }
        // Without gaps, the order of the elements does not matter to whether there is one.
        if self.meta().span_bytes() == self.meta().nbytes() && !self.span_matches(pattern)? {
            return Ok(None);
        }
        let tensor = self.to_memory()?;
        let (view, meta) = (tensor.view(), tensor.meta());
        let mut first = None;
        Runs::to_row_major(meta.itemsize(), meta.shape(), &meta.strides()).for_each(
            |source, target, run| {
                if first.is_none() {
                    let bytes = &view.span()[to_usize(source)..to_usize(source + run)];
                    let found = pattern.position(bytes);
                    first = found.map(|at| (target + to_u64(at)) / meta.itemsize());
                }
            },
        );
        Ok(first)
    }

    /// Returns whether an element of the span matches the pattern.
    fn span_matches(&self, pattern: Pattern) -> Result<bool> {
        let Some(blob) = self.storage().blob() else {
            return Ok(pattern.matches_any(self.view().span()));
        };
        let mut buffer = vec![0; BLOCK];
        let Range { start, end } =
            self.byte_offset()..self.byte_offset() + self.meta().span_bytes();
        for at in (start..end).step_by(BLOCK) {
            let block = &mut buffer[..to_usize(end - at).min(BLOCK)];
            blob.read_exact_at(block, at)?;
            if pattern.matches_any(block) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The bits of numbers that are NaN or infinite: those for which `bits & mask == value`.
#[derive(Clone, Copy)]
struct Pattern {
    /// Width of a number in bytes. A complex element is two numbers.
    width: usize,
    mask: u64,
    value: u64,
}

impl Pattern {
    fn of(dtype: Dtype) -> Option<Self> {
        let (width, mask) = match dtype {
            Dtype::Float16 | Dtype::Complex32 => (2, 0x7c00),
            Dtype::Bfloat16 => (2, 0x7f80),
            Dtype::Float32 | Dtype::Complex64 => (4, 0x7f80_0000),
            Dtype::Float64 | Dtype::Complex128 => (8, 0x7ff0_0000_0000_0000),
            Dtype::Float8E5m2 => (1, 0x7c),
            // The only NaN has all bits but the sign.
            Dtype::Float8E4m3fn => (1, 0x7f),
            Dtype::Float8E8m0fnu => (1, 0xff),
            // The only NaN is the negative zero.
            Dtype::Float8E5m2fnuz | Dtype::Float8E4m3fnuz => {
                return Some(Self { width: 1, mask: 0xff, value: 0x80 });
            }
            _ => return None,
        };
        Some(Self { width, mask, value: mask })
    }

    /// Returns whether any of these numbers matches.
    fn matches_any(self, bytes: &[u8]) -> bool {
        Isa::detect().run(MatchesAny { pattern: self, bytes })
    }

    /// Returns the offset of the first of these numbers that matches, in bytes.
    fn position(self, bytes: &[u8]) -> Option<usize> {
        let matches = |number: &[u8]| {
            let mut bits = [0; 8];
            bits[..number.len()].copy_from_slice(number);
            u64::from_le_bytes(bits) & self.mask == self.value
        };
        bytes.chunks_exact(self.width).position(matches).map(|at| at * self.width)
    }
}

struct MatchesAny<'a> {
    pattern: Pattern,
    bytes: &'a [u8],
}

/// Numbers that are compared before the result is looked at.
const GROUP: usize = 1024;

macro_rules! matches_any {
    ($number:ty, $search:expr) => {{
        #[allow(
            clippy::cast_possible_truncation,
            reason = "the pattern has the width of the number"
        )]
        let (mask, value) = ($search.pattern.mask as $number, $search.pattern.value as $number);
        let numbers = $search.bytes.as_chunks::<{ size_of::<$number>() }>().0;
        numbers.chunks(GROUP).any(|group| {
            let matches = |number: &[u8; size_of::<$number>()]| {
                <$number>::from_le_bytes(*number) & mask == value
            };
            group.iter().fold(false, |any, number| any | matches(number))
        })
    }};
}

impl Kernel for MatchesAny<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) -> bool {
        match self.pattern.width {
            1 => matches_any!(u8, self),
            2 => matches_any!(u16, self),
            4 => matches_any!(u32, self),
            _ => matches_any!(u64, self),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::cast::Cast;
    use crate::tensor::{Element, TensorMeta};

    fn found<T: Element>(elements: &[T]) -> Option<u64> {
        let tensor = Tensor::from_slice(elements, &[to_u64(elements.len())]).unwrap();
        tensor.first_non_finite().unwrap()
    }

    proptest! {
        #[test]
        fn first_one_is_found(mut numbers in prop::collection::vec(-1e4_f32..1e4, 1..5000), at: prop::sample::Index, kind in 0..4_usize) {
            let at = at.index(numbers.len());
            let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0][kind];
            numbers[at] = bad;
            let expected = (kind < 3).then_some(to_u64(at));
            prop_assert_eq!(found(&numbers), expected);
            prop_assert_eq!(found(&numbers.iter().map(|it| f64::from(*it)).collect::<Vec<_>>()), expected);
            prop_assert_eq!(found(&numbers.iter().map(|it| f16::from_f32(*it)).collect::<Vec<_>>()), expected);
            prop_assert_eq!(found(&numbers.iter().map(|it| bf16::from_f32(*it)).collect::<Vec<_>>()), expected);
        }
    }

    #[test]
    fn elements_between_those_of_tensor_are_ignored() {
        let storage = [1.0_f32, f32::NAN, 2.0, f32::NAN, 3.0, f32::NAN];
        let meta = TensorMeta::new(Dtype::Float32, &[3]).unwrap().with_strides(&[2]).unwrap();
        let tensor = Tensor::new(meta, storage.as_slice().into(), 0).unwrap();
        assert_eq!(tensor.first_non_finite().unwrap(), None);
        let meta = TensorMeta::new(Dtype::Float32, &[3, 2]).unwrap().with_strides(&[1, 3]).unwrap();
        let transposed = Tensor::new(meta, storage.as_slice().into(), 0).unwrap();
        // Elements (0, 0), (0, 1), (1, 0) are numbers 0, 3, 1 of the storage.
        assert_eq!(transposed.first_non_finite().unwrap(), Some(1));
    }

    #[test]
    fn each_dtype_has_its_own_patterns() {
        let cases: [(Dtype, &[u8], &[u8]); 5] = [
            (Dtype::Float8E4m3fn, &[0x7e, 0xfe, 0x80, 0x78], &[0x7f, 0xff]),
            (Dtype::Float8E5m2, &[0x7b, 0xfb, 0x80], &[0x7c, 0x7f, 0xfc]),
            (Dtype::Float8E4m3fnuz, &[0x7f, 0xff, 0x00], &[0x80]),
            (Dtype::Float8E8m0fnu, &[0x7f, 0xfe, 0x00], &[0xff]),
            (Dtype::Int8, &[0x7f, 0x80, 0xff], &[]),
        ];
        for (dtype, finite, others) in cases {
            let is_finite = |byte: u8| {
                let meta = TensorMeta::new(dtype, &[1]).unwrap();
                let tensor = Tensor::new(meta, Bytes::from(vec![byte]).into(), 0).unwrap();
                tensor.first_non_finite().unwrap().is_none()
            };
            assert!(finite.iter().all(|byte| is_finite(*byte)), "{dtype}");
            assert!(!others.iter().any(|byte| is_finite(*byte)), "{dtype}");
        }
    }

    /// A number that is finite in the source can be infinite in the dtype that is stored.
    #[test]
    fn cast_elements_are_looked_at() {
        let numbers: Vec<f32> =
            (0..200_000).map(|at| if at == 150_000 { 70_000.0 } else { 1.0 }).collect();
        let meta = TensorMeta::new(Dtype::Float16, &[400, 500]).unwrap();
        let cast = Cast::between(Dtype::Float32, Dtype::Float16).unwrap();
        let elements = Bytes::copy_from_slice(bytemuck::cast_slice(&numbers));
        let tensor = Tensor::new(meta, cast.storage(elements), 0).unwrap();
        assert_eq!(tensor.first_non_finite().unwrap(), Some(150_000));
    }
}
