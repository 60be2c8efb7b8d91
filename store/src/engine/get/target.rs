//! The caller's memory that a get fills.

use tssd_format::{Error, ErrorKind, Result, ShardSpec, TensorMeta};

use super::to_u64;
use crate::device::BlobMut;

/// A tensor in the caller's memory that a get fills.
#[derive(Debug)]
pub struct Target<'a> {
    /// The fqn of the leaf.
    pub fqn: String,
    /// The part of the leaf. None is the whole leaf.
    pub shard_spec: Option<ShardSpec>,
    /// Dtype, shape and strides of the memory.
    pub meta: TensorMeta,
    /// The memory, from the first element to the last.
    pub memory: TargetMemory<'a>,
}

/// A tensor leaf, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafPart {
    /// The fqn of the leaf.
    pub fqn: String,
    /// The part of the leaf. None is the whole leaf.
    pub shard_spec: Option<ShardSpec>,
}

/// Memory that a get fills.
#[derive(Debug)]
pub enum TargetMemory<'a> {
    /// Memory of this process.
    Host(&'a mut [u8]),
    /// Memory that can be written and not read, such as that of a GPU.
    Device(&'a dyn BlobMut),
}

impl<'a> From<&'a mut [u8]> for TargetMemory<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self::Host(bytes)
    }
}

impl<'a> From<&'a mut Vec<u8>> for TargetMemory<'a> {
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        Self::Host(bytes)
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for TargetMemory<'a> {
    fn from(bytes: &'a mut [u8; N]) -> Self {
        Self::Host(bytes)
    }
}

impl TargetMemory<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Host(bytes) => to_u64(bytes.len()),
            Self::Device(blob) => blob.size(),
        }
    }
}

/// Checks that the memory of a target is large enough for its tensor.
pub(super) fn check_size(target: &Target<'_>) -> Result<()> {
    let (needed, found) = (span(&target.meta), target.memory.len());
    if needed <= found {
        return Ok(());
    }
    let note = format_args!("{found} bytes, needed {needed}");
    Err(Error::new(ErrorKind::TargetSize).with_path(&target.fqn).with_detail(note))
}

/// Checks that no two elements of a tensor overlap.
pub(super) fn check_no_overlap(fqn: &str, meta: &TensorMeta) -> Result<()> {
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
    let mut end = 1;
    for (stride, size) in dims {
        if stride < end {
            let strides = meta.strides();
            let note = format_args!("elements of the target overlap: strides {strides:?}");
            return Err(Error::new(ErrorKind::Overlap).with_path(fqn).with_detail(note));
        }
        end += stride * (size - 1);
    }
    Ok(())
}

/// Returns the bytes that a tensor spans.
pub(super) fn span(meta: &TensorMeta) -> u64 {
    if meta.numel() == 0 { 0 } else { meta.span_bytes() }
}
