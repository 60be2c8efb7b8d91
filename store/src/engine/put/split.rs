use tssd_format::{
    Dtype, Error as FormatError, Region, Shard, ShardSpec, Tensor, TensorMeta, TensorSlice,
};

use crate::error::{Error, Result};

/// Splits a shape into regions of at most `limit` bytes each, or of one element if that is larger.
///
/// # Errors
///
/// `Invalid` if no tensor can have this shape.
pub fn pieces(shape: &[u64], dtype: Dtype, limit: u64) -> Result<Vec<Region>> {
    regions(shape, dtype, limit).map_err(|error| Error::from_request("a shape", error))
}

fn regions(shape: &[u64], dtype: Dtype, limit: u64) -> Result<Vec<Region>, FormatError> {
    TensorMeta::new(dtype, shape)?;
    let mut regions = Vec::new();
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    split_region(&mut offsets, &mut sizes, 0, limit / dtype.itemsize(), &mut regions)?;
    Ok(regions)
}

/// Splits a tensor into shards of at most `limit` bytes each.
pub(crate) fn split_tensor(tensor: &Tensor, limit: u64) -> Result<Vec<Shard>, FormatError> {
    let meta = tensor.meta();
    let (itemsize, strides) = (meta.dtype().itemsize(), meta.strides());
    let piece = |region: &Region| {
        let places = region.offsets().iter().zip(&strides);
        let offset: u64 = places.map(|(at, stride)| at * stride).sum();
        let meta = TensorMeta::new(meta.dtype(), region.shape())?
            .with_strides(&strides)?
            .with_flags(meta.flags());
        let local =
            Tensor::new(meta, tensor.storage().clone(), tensor.byte_offset() + offset * itemsize)?;
        let slice = TensorSlice::new(region.offsets(), region.shape(), tensor.meta().shape())?;
        Shard::new(local, ShardSpec::new(slice))
    };
    regions(meta.shape(), meta.dtype(), limit)?.iter().map(piece).collect()
}

/// Splits a region along a dimension, and along the next ones if a single row is too large.
fn split_region(
    offsets: &mut [u64],
    shape: &mut [u64],
    dim: usize,
    limit: u64,
    regions: &mut Vec<Region>,
) -> Result<(), FormatError> {
    let numel: u64 = shape.iter().product();
    if numel <= limit || dim == shape.len() {
        regions.push(Region::new(offsets, shape)?);
        return Ok(());
    }
    let (start, size) = (offsets[dim], shape[dim]);
    let step = (limit / (numel / size)).max(1);
    let mut at = 0;
    while at < size {
        (offsets[dim], shape[dim]) = (start + at, step.min(size - at));
        split_region(offsets, shape, dim + 1, limit, regions)?;
        at += step;
    }
    (offsets[dim], shape[dim]) = (start, size);
    Ok(())
}
