//! Shapes and strides: the layout of elements in memory.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

use crate::error::{Error, ErrorKind, Result};

/// The largest rank of a tensor or mesh.
pub const MAX_RANK: usize = 64;

/// The exclusive upper limit of sizes and strides in a file.
///
/// It keeps sums of a few of them from overflowing.
pub(crate) const SIZE_LIMIT: u64 = 1 << 63;

/// The sizes of a tensor. Shapes of at most two dimensions, the common case, need no allocation.
#[derive(Clone)]
pub(crate) enum Sizes {
    Inline(u8, [u64; 2]),
    Heap(Box<[u64]>),
}

impl From<&[u64]> for Sizes {
    fn from(sizes: &[u64]) -> Self {
        match *sizes {
            [] => Self::Inline(0, [0; 2]),
            [only] => Self::Inline(1, [only, 0]),
            [rows, columns] => Self::Inline(2, [rows, columns]),
            _ => Self::Heap(sizes.into()),
        }
    }
}

impl Deref for Sizes {
    type Target = [u64];

    #[inline]
    fn deref(&self) -> &[u64] {
        match self {
            Self::Inline(rank, sizes) => &sizes[..usize::from(*rank)],
            Self::Heap(sizes) => sizes,
        }
    }
}

impl PartialEq for Sizes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Sizes {}

impl Hash for Sizes {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl fmt::Debug for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Returns the strides of a contiguous tensor of this shape, in elements, as torch computes them.
pub fn row_major_strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1_u64;
    for (slot, size) in strides.iter_mut().zip(shape).rev() {
        *slot = stride;
        stride = stride.saturating_mul((*size).max(1));
    }
    strides
}

/// Returns true if these are the strides of a contiguous tensor of this shape.
pub(crate) fn are_row_major(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1_u64;
    shape.iter().zip(strides).rev().all(|(size, stride)| {
        let is_expected = *stride == expected;
        expected = expected.saturating_mul((*size).max(1));
        is_expected
    })
}

/// Returns the number of elements of a tensor of this shape; 1 for a shape without dimensions.
///
/// Saturates at `u64::MAX`, which no checked shape reaches.
#[inline]
pub fn numel(shape: &[u64]) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    shape.iter().fold(1, |numel, size| numel.saturating_mul(*size))
}

/// Checks a shape against the limits of the format, and returns the size of its elements in bytes.
///
/// # Errors
///
/// `RankTooLarge` over 64 dimensions, `ShapeOverflow` if a size, or the product of `itemsize` and all
/// sizes that are not 0, is 2^63 or more.
#[inline]
pub(crate) fn check_shape(itemsize: u64, shape: &[u64]) -> Result<u64> {
    if shape.len() > MAX_RANK {
        return Err(Error::new(ErrorKind::RankTooLarge).with_detail(shape.len()));
    }
    let mut is_empty = false;
    let bytes = shape.iter().try_fold(itemsize, |bytes, size| {
        is_empty |= *size == 0;
        if *size >= SIZE_LIMIT { None } else { bytes.checked_mul((*size).max(1)) }
    });
    match bytes {
        Some(bytes) if bytes < SIZE_LIMIT => Ok(if is_empty { 0 } else { bytes }),
        _ => Err(shape_overflow(shape)),
    }
}

#[cold]
fn shape_overflow(shape: &[u64]) -> Error {
    Error::new(ErrorKind::ShapeOverflow).with_detail(format_args!("shape {shape:?}"))
}

/// Returns the number of bytes from the first element to the end of the last element.
///
/// It is 0 for a tensor without elements. Without strides, the tensor is contiguous.
///
/// # Errors
///
/// `ShapeOverflow` if a stride or the span is 2^63 or more.
#[inline]
pub(crate) fn span_bytes(itemsize: u64, shape: &[u64], strides: Option<&[u64]>) -> Result<u64> {
    if strides.is_some_and(|strides| strides.iter().any(|stride| *stride >= SIZE_LIMIT)) {
        return Err(
            Error::new(ErrorKind::ShapeOverflow).with_detail(format_args!("strides {strides:?}"))
        );
    }
    if shape.contains(&0) {
        return Ok(0);
    }
    let Some(strides) = strides else {
        return Ok(numel(shape).saturating_mul(itemsize));
    };
    let last = shape.iter().zip(strides).try_fold(0_u64, |last, (size, stride)| {
        last.checked_add(size.checked_sub(1)?.checked_mul(*stride)?)
    });
    last.and_then(|last| last.checked_add(1)?.checked_mul(itemsize))
        .filter(|span| *span < SIZE_LIMIT)
        .ok_or_else(|| {
            Error::new(ErrorKind::ShapeOverflow)
                .with_detail(format_args!("shape {shape:?} with strides {strides:?}"))
        })
}
