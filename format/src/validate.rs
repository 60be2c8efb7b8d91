//! The validator of index tables. Spec: sections 4 to 7.
//!
//! Time is linear in the size of the index for every input. Ranges that can be long are equal or
//! disjoint, so each of their bytes is read once. All other ranges have at most 64 entries or 4096
//! bytes.
//!
//! Memory is linear too, and never exceeds the size of the index: two bits for each byte of the heap,
//! one byte for each storage, and a few words for each mesh, divergent node and shard.

mod attrs_and_shards;
mod claims;
mod distributed;
mod dtypes;
mod slices;
mod storages;
mod tensors;
mod tree;

#[cfg(feature = "safetensors")]
pub(crate) use crate::validate::attrs_and_shards::is_base_name;

use std::ops::RangeInclusive;

use self::claims::{Claims, HeapClaims};
use self::dtypes::OtherDtypes;
use crate::convert::index_to_usize;
use crate::error::{Error, ErrorKind, Result};
use crate::record::split_heap_range;
use crate::table_views::{TableViews, dims_range_error, heap_range_error};
use crate::text::{check_name_len, is_text};

/// Validates the tables of a file whose index begins at `index_off`, in bytes.
///
/// # Errors
///
/// One kind for each rule from F-030 to F-082.
pub(crate) fn validate(views: &TableViews<'_>, index_off: u64) -> Result<()> {
    let mut validator = Validator {
        views,
        dtypes: OtherDtypes::new(views)?,
        heap: HeapClaims::new(views.heap),
        meshes: std::collections::BTreeMap::new(),
        dims: Claims::new(views.dims.len()),
        divergent: Vec::new(),
        uses: vec![StorageUse::None; views.storages.len()],
        has_tags: false,
        distributed: Vec::new(),
    };
    validator.validate_nodes()?;
    validator.validate_tensors()?;
    validator.validate_slices()?;
    validator.validate_storages(index_off)?;
    validator.validate_attrs()?;
    validator.validate_shards()?;
    validator.validate_distributed()?;
    validator.validate_dtypes()?;
    if !validator.heap.claims.is_complete() {
        return Err(Error::new(ErrorKind::HeapUnclaimed).with_path("heap"));
    }
    if !validator.dims.is_complete() {
        return Err(Error::new(ErrorKind::HeapUnclaimed).with_path("dims"));
    }
    Ok(())
}

struct Validator<'a> {
    views: &'a TableViews<'a>,
    heap: HeapClaims,
    dims: Claims,
    /// The dtypes that the file describes.
    dtypes: OtherDtypes,
    /// Meshes with ranks: the length of each range in dims, by its start.
    meshes: std::collections::BTreeMap<u64, u64>,
    /// Ranges of nodes inside divergent nodes, in table order.
    divergent: Vec<std::ops::Range<usize>>,
    /// The use of each storage, by number.
    uses: Vec<StorageUse>,
    /// Whether a node has a class tag.
    has_tags: bool,
    /// The distributed leaves: node, and first tensor record. Both increase.
    distributed: Vec<(usize, u32)>,
}

/// The kind of record that refers to a storage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StorageUse {
    None,
    Tensor,
    Content,
}

impl<'a> Validator<'a> {
    fn claim_heap(&mut self, range: u64) -> Result<&'a [u8]> {
        let bytes = self.views.heap_at(range)?;
        self.claim_heap_range(range)?;
        Ok(bytes)
    }

    fn claim_text(&mut self, range: u64) -> Result<()> {
        let bytes = self.claim_heap(range)?;
        self.check_text(range, bytes)
    }

    /// Claims a name whose length in bytes must lie in a range.
    fn claim_name(&mut self, range: u64, lengths: RangeInclusive<usize>) -> Result<&'a str> {
        let bytes = self.views.heap_at(range)?;
        check_name_len(bytes, lengths)?;
        self.claim_heap_range(range)?;
        std::str::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::NotText))
    }

    /// Claims a range that the caller has checked to lie in the heap.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    fn claim_heap_range(&mut self, range: u64) -> Result<()> {
        let (offset, len) = split_heap_range(range);
        if range == 0 || self.heap.claim(offset.into(), len.into()) {
            Ok(())
        } else {
            Err(heap_range_error(range))
        }
    }

    /// Checks that the bytes of a claimed range are text.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    fn check_text(&mut self, range: u64, bytes: &[u8]) -> Result<()> {
        let start = index_to_usize(split_heap_range(range).0);
        if bytes.is_empty() || self.heap.is_text(start, || is_text(bytes)) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::NotText))
        }
    }

    #[inline]
    fn claim_dims(&mut self, start: u32, len: u64) -> Result<&'a [u64]> {
        let dims = self.views.dims_at(start, len)?;
        if self.dims.claim_in_order(start.into(), len) {
            Ok(dims)
        } else {
            Err(dims_range_error(start.into(), len))
        }
    }
}
