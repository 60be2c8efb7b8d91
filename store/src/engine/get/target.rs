//! The caller's memory: what may be written.

use tssd_format::{Error, ErrorKind, Result, ShardSpec, TensorMeta};

use super::wide;
use crate::device::BlobMut;

/// A tensor in the caller's memory that a get fills.
#[derive(Debug)]
pub struct Target<'a> {
    /// The leaf.
    pub fqn: String,
    /// The part of the leaf that is wanted; none is all of it.
    pub place: Option<ShardSpec>,
    /// Dtype, shape and strides of the memory.
    pub meta: TensorMeta,
    /// The memory, from the first element to the last.
    pub memory: TargetMemory<'a>,
}

/// Memory that a get fills.
#[derive(Debug)]
pub enum TargetMemory<'a> {
    /// This process's.
    Here(&'a mut [u8]),
    /// What is written and not seen, such as a GPU's.
    Elsewhere(&'a dyn BlobMut),
}

impl<'a> From<&'a mut [u8]> for TargetMemory<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self::Here(bytes)
    }
}

impl<'a> From<&'a mut Vec<u8>> for TargetMemory<'a> {
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        Self::Here(bytes)
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for TargetMemory<'a> {
    fn from(bytes: &'a mut [u8; N]) -> Self {
        Self::Here(bytes)
    }
}

impl TargetMemory<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Here(bytes) => wide(bytes.len()),
            Self::Elsewhere(blob) => blob.size(),
        }
    }
}

/// Proves that a target's memory holds its tensor.
pub(super) fn expect_room(target: &Target<'_>) -> Result<()> {
    let (needed, found) = (span(&target.meta), target.memory.len());
    if needed <= found {
        return Ok(());
    }
    let note = format_args!("{found} bytes, needed {needed}");
    Err(Error::new(ErrorKind::TargetSize).with_path(&target.fqn).with_detail(note))
}

/// Proves that each element of a tensor has a place of its own.
pub(super) fn expect_apart(fqn: &str, meta: &TensorMeta) -> Result<()> {
    if meta.is_contiguous() {
        return Ok(());
    }
    let strides = meta.strides();
    let mut dims: Vec<(u64, u64)> = strides
        .into_iter()
        .zip(meta.shape().iter().copied())
        .filter(|(_, size)| *size > 1)
        .collect();
    dims.sort_unstable();
    let mut reach = 1;
    for (stride, size) in dims {
        if stride < reach {
            let strides = meta.strides();
            let note = format_args!("elements of the target overlap: strides {strides:?}");
            return Err(Error::new(ErrorKind::Overlap).with_path(fqn).with_detail(note));
        }
        reach += stride * (size - 1);
    }
    Ok(())
}

/// How many bytes a tensor spans.
pub(super) fn span(meta: &TensorMeta) -> u64 {
    if meta.numel() == 0 { 0 } else { meta.span_bytes() }
}
