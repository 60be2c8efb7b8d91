//! Validation of tensors: shapes, strides, byte ranges and slices. Spec: sections 6 and 7.

use super::claims::Claims;
use super::{StorageUse, Validator};
use crate::convert::to_u64;
use crate::dtype::DtypeClass;
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::prefetch::prefetch_ahead;
use crate::record::{self, NONE, kind};
use crate::shape::{MAX_RANK, SIZE_LIMIT, are_row_major, check_shape, span_bytes};
use crate::table_views::{TableViews, path_of};
use crate::tensor::TensorFlags;

impl<'a> Validator<'a> {
    pub(super) fn global_shape(&self, tensor: &record::Tensor) -> Result<&[u64]> {
        let slice = self.slice_of(tensor)?;
        self.views.dims_at(slice.global_shape.to_native(), u64::from(slice.rank))
    }

    fn slice_of(&self, tensor: &record::Tensor) -> Result<&'a record::Slice> {
        usize::try_from(tensor.slice.to_native())
            .ok()
            .and_then(|slice| self.views.slices.get(slice))
            .ok_or_else(|| Error::new(ErrorKind::SliceTable).with_detail("there is no such slice"))
    }

    pub(super) fn validate_tensors(&mut self) -> Result<()> {
        let views = self.views;
        let mut slices = Claims::new(views.slices.len());
        for (number, tensor) in views.tensors.iter().enumerate() {
            prefetch_ahead(views.tensors, number);
            // Most tensors have their own storage, so tensor and storage numbers advance together.
            prefetch_ahead(views.storages, number);
            self.validate_tensor(number, tensor, &mut slices)
                .map_err(|error| error.with_path(path_of_tensor(views, number)))?;
        }
        if !slices.is_complete() {
            return Err(Error::new(ErrorKind::SliceTable).with_detail("slices of no tensor"));
        }
        Ok(())
    }

    fn validate_tensor(
        &mut self,
        number: usize,
        tensor: &record::Tensor,
        slices: &mut Claims,
    ) -> Result<()> {
        let dtype = tensor.dtype.to_native();
        let itemsize = self.itemsize(dtype)?;
        if usize::from(tensor.rank) > MAX_RANK {
            return Err(Error::new(ErrorKind::RankTooLarge).with_detail(tensor.rank));
        }
        let class =
            || self.views.dtype(dtype).map_or(DtypeClass::Other, |dtype| dtype.to_dtype().class());
        let flags = TensorFlags::from_bits(tensor.flags);
        let fit = flags.is_some_and(|flags| flags.fit(tensor.rank.into(), class));
        if !fit || tensor.reserved != 0 {
            return Err(Error::new(ErrorKind::TensorFlags));
        }
        let rank = u64::from(tensor.rank);
        let shape = self.claim_dims(tensor.shape.to_native(), rank)?;
        let strides = match tensor.strides.to_native() {
            NONE => None,
            start => Some(self.claim_dims(start, rank)?),
        };
        let contiguous = check_shape(itemsize, shape)?;
        let span = match strides {
            None => contiguous,
            Some(strides) => {
                let span = span_bytes(itemsize, shape, Some(strides))?;
                if are_row_major(shape, strides) {
                    return Err(Error::new(ErrorKind::RowMajorStrides));
                }
                span
            }
        };
        let byte_offset = tensor.byte_offset.to_native();
        let end = byte_offset.checked_add(span).filter(|end| *end < SIZE_LIMIT || span == 0);
        let end = end.ok_or_else(|| Error::new(ErrorKind::ShapeOverflow))?;
        self.validate_byte_range(number, tensor, span, end)?;
        // Most offsets are 0; testing that first avoids a division.
        if byte_offset != 0 && !byte_offset.is_multiple_of(itemsize) {
            return Err(Error::new(ErrorKind::Misaligned).with_detail(byte_offset));
        }
        if tensor.slice == NONE {
            return Ok(());
        }
        let slice = self.slice_of(tensor)?;
        if slice.rank != tensor.rank {
            return Err(slice_rank_error(slice, tensor));
        }
        if !slices.claim_in_order(u64::from(tensor.slice.to_native()), 1) {
            return Err(Error::new(ErrorKind::SliceTable).with_detail("slices are out of order"));
        }
        self.validate_slice_bounds(slice, itemsize, shape)
    }

    /// Checks that the span of a tensor lies in its storage, and marks the storage as used.
    ///
    /// `end` is the byte offset plus the span.
    fn validate_byte_range(
        &mut self,
        tensor_number: usize,
        tensor: &record::Tensor,
        span: u64,
        end: u64,
    ) -> Result<()> {
        let range_error = |note: &str| Err(Error::new(ErrorKind::TensorRange).with_detail(note));
        let number = tensor.storage.to_native();
        if span == 0 {
            return if number == NONE && tensor.byte_offset == 0 {
                Ok(())
            } else {
                range_error("a tensor without elements has a storage")
            };
        }
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let is_distributed = self.is_distributed(tensor_number);
        let Some(storage) = self.views.storages.get(number).filter(|_| !is_distributed) else {
            return if is_distributed && tensor.storage == NONE && tensor.byte_offset == 0 {
                Ok(())
            } else {
                range_error("there is no such storage")
            };
        };
        if end > storage.raw_len.to_native() {
            return Err(storage_range_error(tensor, end, storage));
        }
        if self.uses[number] == StorageUse::Content {
            return Err(
                Error::new(ErrorKind::TextPlace).with_detail("a tensor lies in a leaf's content")
            );
        }
        self.uses[number] = StorageUse::Tensor;
        Ok(())
    }

    /// Whether a tensor record belongs to a distributed leaf.
    fn is_distributed(&self, tensor: usize) -> bool {
        let tensor = u32::try_from(tensor).unwrap_or(NONE);
        !self.distributed.is_empty()
            && self.distributed.binary_search_by_key(&tensor, |(_, first)| *first).is_ok()
    }

    fn validate_slice_bounds(
        &self,
        slice: &record::Slice,
        itemsize: u64,
        shape: &[u64],
    ) -> Result<()> {
        let bounds_error = |note: String| Error::new(ErrorKind::OutsideGlobal).with_detail(note);
        let rank = u64::from(slice.rank);
        let offsets = self.views.dims_at(slice.offsets.to_native(), rank)?;
        let global = self.views.dims_at(slice.global_shape.to_native(), rank)?;
        check_shape(itemsize, global).map_err(|error| bounds_error(error.to_string()))?;
        for ((offset, size), global) in offsets.iter().zip(shape).zip(global) {
            if offset.checked_add(*size).is_none_or(|end| end > *global) {
                return Err(bounds_error(format!("{shape:?} at {offsets:?} of {global}")));
            }
        }
        Ok(())
    }
}

#[cold]
fn slice_rank_error(slice: &record::Slice, tensor: &record::Tensor) -> Error {
    let (slice, tensor) = (slice.rank, tensor.rank);
    Error::new(ErrorKind::SliceTable)
        .with_detail(format_args!("slice of rank {slice}, tensor of rank {tensor}"))
}

#[cold]
fn storage_range_error(tensor: &record::Tensor, end: u64, storage: &record::Storage) -> Error {
    Error::new(ErrorKind::TensorRange).with_detail(format_args!(
        "bytes {}..{end} of a storage of {}",
        tensor.byte_offset, storage.raw_len
    ))
}

/// Returns the path of the leaf that claims a tensor record.
///
/// It is the last tensor leaf whose first record is at or before `tensor`.
fn path_of_tensor(views: &TableViews<'_>, tensor: usize) -> ObjectPath {
    let starts_before = |node: &record::Node| {
        matches!(node.kind, kind::TENSOR | kind::DISTRIBUTED)
            && node.a.to_native() <= to_u64(tensor)
    };
    let leaf = views.nodes.iter().rposition(starts_before);
    path_of(views, leaf.unwrap_or_default())
}
