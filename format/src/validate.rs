//! The one validator: proves that the tables of an index mean something. Spec: sections 4 to 7.
//!
//! The work is linear in the size of the index, whatever it holds: ranges that could be long are the
//! same or disjoint, so each byte of them is looked at once, and all others have at most 64 entries
//! or 4096 bytes.

mod claims;
mod files;
mod slices;
mod storages;
mod tensors;
mod tree;

use rend::u64_le;

#[cfg(feature = "safetensors")]
pub(crate) use self::files::is_base_name;

use self::claims::{Claims, HeapClaim, HeapClaims};
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::record::split_heap_range;
use crate::text::is_text;
use crate::views::Views;

/// Proves the tables of a file whose index begins at `index_off`.
///
/// # Errors
///
/// One kind for each rule from F-030 to F-082.
pub(crate) fn validate(views: &Views<'_>, index_off: u64) -> Result<()> {
    let mut validator = Validator {
        views,
        heap: HeapClaims::new(views.heap.len()),
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
    /// Meshes with ranks: the start of each, and its length.
    meshes: std::collections::BTreeMap<u64, u64>,
    /// Nodes inside divergent nodes, as ranges of children in table order.
    divergent: Vec<std::ops::Range<usize>>,
    uses: Vec<Use>,
}

/// What names a storage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    None,
    Tensor,
    Content,
}

impl<'a> Validator<'a> {
    fn claim_heap(&mut self, range: u64) -> Result<&'a [u8]> {
        let bytes = self.views.heap_at(range)?;
        self.claim_range(range).map(|_| bytes)
    }

    fn claim_text(&mut self, range: u64) -> Result<()> {
        let bytes = self.views.heap_at(range)?;
        if let Some(claim) = self.claim_range(range)?
            && !claim.is_text
        {
            if !is_text(bytes) {
                return Err(Error::new(ErrorKind::NotText));
            }
            claim.is_text = true;
        }
        Ok(())
    }

    /// The claim of a range that is not empty.
    fn claim_range(&mut self, range: u64) -> Result<Option<&mut HeapClaim>> {
        let (offset, len) = split_heap_range(range);
        if len == 0 && offset == 0 {
            return Ok(None);
        }
        let claim = self.heap.claim(u64::from(offset), u64::from(len));
        claim.map(Some).ok_or_else(|| {
            Error::new(ErrorKind::HeapRange).note(format_args!("{len} bytes at {offset}"))
        })
    }

    fn claim_dims(&mut self, start: u64, len: u64) -> Result<&'a [u64_le]> {
        let outside =
            || Error::new(ErrorKind::DimsRange).note(format_args!("{len} entries at {start}"));
        if !self.dims.in_order(start, len) {
            return Err(outside());
        }
        let start = u32::try_from(start).map_err(|_| outside())?;
        self.views.dims_at(start, len)
    }
}

fn dtype(code: u64) -> Option<Dtype> {
    u16::try_from(code).ok().and_then(Dtype::from_code)
}

fn natives(words: &[u64_le]) -> Vec<u64> {
    words.iter().map(|word| word.to_native()).collect()
}

/// Indexes that were compared with the length of a table in memory.
fn narrow(index: u64) -> usize {
    usize::try_from(index).expect("the index lies in a table in memory")
}

fn wide(index: usize) -> u64 {
    u64::try_from(index).expect("usize is at most 64 bits")
}
