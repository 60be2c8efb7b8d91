//! The validator of index tables. Spec: sections 4 to 7.
//!
//! Time is linear in the size of the index for every input. Ranges that can be long are equal or
//! disjoint, so each of their bytes is read once. All other ranges have at most 64 entries or 4096
//! bytes.
//!
//! Memory is linear too, and never exceeds the size of the index: two bits for each byte of the heap,
//! one byte for each storage, and a few words for each mesh, divergent node and shard.

mod claims;
mod files;
mod slices;
mod storages;
mod tensors;
mod tree;

#[cfg(feature = "safetensors")]
pub(crate) use self::files::is_base_name;

use self::claims::{Claims, HeapClaims};
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::record::split_heap_range;
use crate::text::is_text;
use crate::views::{Views, native, outside_dims, outside_heap};

/// Validates the tables of a file whose index begins at `index_off`, in bytes.
///
/// # Errors
///
/// One kind for each rule from F-030 to F-082.
pub(crate) fn validate(views: &Views<'_>, index_off: u64) -> Result<()> {
    let mut validator = Validator {
        views,
        heap: HeapClaims::new(views.heap),
        meshes: std::collections::BTreeMap::new(),
        dims: Claims::new(views.dims.len()),
        divergent: Vec::new(),
        uses: vec![Use::None; views.storages.len()],
    };
    validator.nodes()?;
    validator.tensors()?;
    validator.slices()?;
    validator.storages(index_off)?;
    validator.attrs()?;
    validator.shards()?;
    if !validator.heap.claims.is_complete() {
        return Err(Error::new(ErrorKind::HeapUnclaimed).at("heap"));
    }
    if !validator.dims.is_complete() {
        return Err(Error::new(ErrorKind::HeapUnclaimed).at("dims"));
    }
    Ok(())
}

struct Validator<'a> {
    views: &'a Views<'a>,
    heap: HeapClaims,
    dims: Claims,
    /// Meshes with ranks: the length of each range in dims, by its start.
    meshes: std::collections::BTreeMap<u64, u64>,
    /// Ranges of nodes inside divergent nodes, in table order.
    divergent: Vec<std::ops::Range<usize>>,
    /// The use of each storage, by number.
    uses: Vec<Use>,
}

/// The kind of record that refers to a storage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    None,
    Tensor,
    Content,
}

impl<'a> Validator<'a> {
    fn claim_heap(&mut self, range: u64) -> Result<&'a [u8]> {
        let bytes = self.views.heap_at(range)?;
        self.claim(range)?;
        Ok(bytes)
    }

    fn claim_text(&mut self, range: u64) -> Result<()> {
        let bytes = self.claim_heap(range)?;
        self.text(range, bytes)
    }

    /// Claims a range that the caller has checked to lie in the heap.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    fn claim(&mut self, range: u64) -> Result<()> {
        let (offset, len) = split_heap_range(range);
        if range == 0 || self.heap.claim(offset.into(), len.into()) {
            Ok(())
        } else {
            Err(outside_heap(range))
        }
    }

    /// Checks that the bytes of a claimed range are text.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    fn text(&mut self, range: u64, bytes: &[u8]) -> Result<()> {
        let start = native(split_heap_range(range).0);
        if bytes.is_empty() || self.heap.is_text(start, || is_text(bytes)) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::NotText))
        }
    }

    #[inline]
    fn claim_dims(&mut self, start: u32, len: u64) -> Result<&'a [u64]> {
        let dims = self.views.dims_at(start, len)?;
        if self.dims.in_order(start.into(), len) {
            Ok(dims)
        } else {
            Err(outside_dims(start.into(), len))
        }
    }
}

fn dtype(code: u64) -> Option<Dtype> {
    u16::try_from(code).ok().and_then(Dtype::from_code)
}

/// Converts an index that has been checked against the length of a table in memory.
fn narrow(index: u64) -> usize {
    usize::try_from(index).expect("the index lies in a table in memory")
}

fn wide(index: usize) -> u64 {
    u64::try_from(index).expect("usize is at most 64 bits")
}
