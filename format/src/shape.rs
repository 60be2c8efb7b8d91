//! Shapes and strides: how elements lie in memory.

use crate::error::{Error, ErrorKind, Result};

/// The largest rank of a tensor or mesh.
pub const MAX_RANK: usize = 64;

/// Sizes and strides in a file stay below this, so that sums of a few of them cannot overflow.
pub(crate) const SIZE_LIMIT: u64 = 1 << 63;

/// The strides of a contiguous tensor of this shape, in elements, as torch gives them.
pub fn row_major_strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1_u64;
    for (slot, size) in strides.iter_mut().zip(shape).rev() {
        *slot = stride;
        stride = stride.saturating_mul((*size).max(1));
    }
    strides
}

/// How many elements a tensor of this shape has; 1 for a shape without dimensions. Saturates at
/// `u64::MAX`, which no checked shape reaches.
pub fn numel(shape: &[u64]) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    shape.iter().fold(1, |numel, size| numel.saturating_mul(*size))
}

/// Proves that a shape is within the limits of the format.
pub(crate) fn check_shape(itemsize: u64, shape: &[u64]) -> Result<()> {
    if shape.len() > MAX_RANK {
        return Err(Error::new(ErrorKind::RankTooLarge).note(shape.len()));
    }
    let bytes = shape.iter().try_fold(itemsize, |bytes, size| {
        if *size >= SIZE_LIMIT { None } else { bytes.checked_mul((*size).max(1)) }
    });
    match bytes {
        Some(bytes) if bytes < SIZE_LIMIT => Ok(()),
        _ => Err(Error::new(ErrorKind::ShapeOverflow).note(format_args!("shape {shape:?}"))),
    }
}

/// How many bytes lie between the first byte of the first element and the last byte of the last
/// one; 0 for a tensor without elements.
pub(crate) fn span_bytes(itemsize: u64, shape: &[u64], strides: Option<&[u64]>) -> Result<u64> {
    if strides.is_some_and(|strides| strides.iter().any(|stride| *stride >= SIZE_LIMIT)) {
        return Err(Error::new(ErrorKind::ShapeOverflow).note(format_args!("strides {strides:?}")));
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
                .note(format_args!("shape {shape:?} with strides {strides:?}"))
        })
}
