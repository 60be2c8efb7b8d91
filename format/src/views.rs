//! Looking at the tables of an index: ranges, keys, children.

use std::cmp::Ordering;
use std::ops::Range;

use rend::u32_le;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{self, FileKey, KeyOrder, ObjectPath, Step};
use crate::record::{self, NONE, kind, split_heap_range};

use crate::text::Text;

pub(crate) use crate::table::Views;

/// So few children are looked at one by one: they lie side by side, and their order lies elsewhere.
pub(crate) const FEW: usize = 4;

/// Looks at tables that are in bounds, or says what is not.
impl<'a> Views<'a> {
    #[inline]
    pub(crate) fn heap_at(&self, range: u64) -> Result<&'a [u8]> {
        let (offset, len) = split_heap_range(range);
        let (offset, len) = (native(offset), native(len));
        offset
            .checked_add(len)
            .and_then(|end| self.heap.get(offset..end))
            .ok_or_else(|| outside_heap(range))
    }

    #[inline]
    pub(crate) fn dims_at(&self, start: u32, len: u64) -> Result<&'a [u64]> {
        let first = native(start);
        usize::try_from(len)
            .ok()
            .and_then(|len| self.dims.get(first..first.checked_add(len)?))
            // This crate compiles for little-endian hosts only.
            .map(bytemuck::cast_slice)
            .ok_or_else(|| outside_dims(start.into(), len))
    }

    /// The key of a node that has one.
    pub(crate) fn file_key(&self, node: &record::Node) -> Result<FileKey<'a>> {
        let key = node.key.to_native();
        Ok(if key::kind::is_heap(node.key_kind) {
            FileKey::heap(node.key_kind, self.heap_at(key)?)
        } else {
            FileKey::word(node.key_kind, key)
        })
    }

    /// What the key of a node is ordered by, as [`FileKey::order`] says.
    #[inline]
    pub(crate) fn key_order(&self, node: &record::Node) -> Result<KeyOrder<'a>> {
        let key = node.key.to_native();
        Ok(if key::kind::is_heap(node.key_kind) {
            (node.key_kind, self.heap_at(key)?, 0)
        } else {
            (node.key_kind, &[], key)
        })
    }

    /// The child of a container, if it has it.
    pub(crate) fn child(&self, container: usize, step: &Step) -> Option<usize> {
        let node = &self.nodes[container];
        let children = self.children(container);
        match (kind::is_keyed(node.kind), step) {
            (false, Step::Index(index)) => children.clone().nth(native(*index)),
            // A key that no file can hold is in none.
            (true, Step::Key(key)) => self.child_with(children, &FileKey::of(key).ok()?),
            _ => None,
        }
    }

    /// The one of these children of a keyed container that has this key.
    pub(crate) fn child_with(&self, children: Range<usize>, key: &FileKey<'_>) -> Option<usize> {
        if children.len() <= FEW {
            return children.into_iter().find(|child| self.key_proven(*child) == key.order());
        }
        let order = &self.by_key[children];
        let found = self.search(order, key.order());
        found.ok().map(|place| native(order[place].to_native()))
    }

    /// Where a key is in a part of `by_key`, or where it would be.
    ///
    /// Each step is a branch, which processors guess: so they fetch the next key before they have
    /// compared this one. The standard library's search has no branches, and takes 1.6 times as long.
    pub(crate) fn search(&self, order: &[u32_le], key: KeyOrder<'_>) -> Result<usize, usize> {
        let (mut low, mut high) = (0, order.len());
        while low < high {
            let mid = low.midpoint(high);
            match self.key_proven(native(order[mid].to_native())).cmp(&key) {
                Ordering::Less => low = mid + 1,
                Ordering::Equal => return Ok(mid),
                Ordering::Greater => high = mid,
            }
        }
        Err(low)
    }

    #[inline]
    pub(crate) fn key_proven(&self, node: usize) -> KeyOrder<'a> {
        self.key_order(&self.nodes[node]).expect("the validator has proven the key")
    }

    pub(crate) fn children(&self, container: usize) -> Range<usize> {
        let node = &self.nodes[container];
        if !kind::is_container(node.kind) {
            return 0..0;
        }
        let first = usize::try_from(node.a.to_native()).unwrap_or(usize::MAX);
        first..first.saturating_add(native(node.count.to_native()))
    }

    pub(crate) fn heap_proven(&self, range: u64) -> &'a [u8] {
        self.heap_at(range).expect("the validator has proven the range")
    }

    pub(crate) fn text(&self, range: u64) -> Text {
        Text::from_generalized_utf8(self.heap_proven(range).to_vec())
            .expect("the validator has proven the text")
    }

    pub(crate) fn dims_proven(&self, start: u32, len: usize) -> &'a [u64] {
        let len = u64::try_from(len).expect("usize is at most 64 bits");
        self.dims_at(start, len).expect("the validator has proven the range")
    }
}

/// The path of a node, for errors; works on tables that are not proven yet, as far as they make
/// sense.
pub(crate) fn path_of(views: &Views<'_>, mut node: usize) -> ObjectPath {
    let mut steps = Vec::new();
    while let Some(parent) = (0..node).find(|parent| views.children(*parent).contains(&node)) {
        let place = node - views.children(parent).start;
        let step = if kind::is_keyed(views.nodes[parent].kind) {
            match views.file_key(&views.nodes[node]).and_then(|key| key.to_key()) {
                Ok(key) => Step::Key(key),
                Err(_) => Step::Index(u32::try_from(place).unwrap_or(NONE)),
            }
        } else {
            Step::Index(u32::try_from(place).unwrap_or(NONE))
        };
        steps.push(step);
        node = parent;
    }
    steps.into_iter().rev().collect()
}

/// A range of the heap that is not one: by value and out of the way, like all errors of what is proven for each tensor.
/// Who formats a number where it is computed keeps it in memory.
#[cold]
pub(crate) fn outside_heap(range: u64) -> Error {
    let (offset, len) = split_heap_range(range);
    Error::new(ErrorKind::HeapRange).note(format_args!("{len} bytes at {offset}"))
}

/// A range of dims that is not one.
#[cold]
pub(crate) fn outside_dims(start: u64, len: u64) -> Error {
    Error::new(ErrorKind::DimsRange).note(format_args!("{len} entries at {start}"))
}

/// Numbers of records, on machines where `usize` has 32 bits at least.
pub(crate) fn native(number: u32) -> usize {
    usize::try_from(number).expect("usize has at least 32 bits")
}
