//! Lookups in the tables of an index: ranges, keys and children.

use std::cmp::Ordering;
use std::ops::Range;

use rend::u32_le;

use crate::convert::index_to_usize;
use crate::dtype::{CompactDtype, OtherDtype, listed_itemsize};
use crate::error::{Error, ErrorKind, Result};
use crate::key::{
    self, EncodedKey, ObjectPath, SortKey, Step, equal_python_keys, push_python_form,
};
use crate::record::{self, NONE, kind, split_heap_range};

use crate::text::Text;

pub(crate) use crate::table::TableViews;

/// The largest number of children to search linearly.
///
/// Children are adjacent in memory, while a search in `by_key` reads another table.
pub(crate) const LINEAR_SEARCH_MAX: usize = 4;

/// Lookups that return a `Result` also accept unvalidated tables; all others expect validated tables.
impl<'a> TableViews<'a> {
    #[inline]
    pub(crate) fn heap_at(&self, range: u64) -> Result<&'a [u8]> {
        let (offset, len) = split_heap_range(range);
        let (offset, len) = (index_to_usize(offset), index_to_usize(len));
        offset
            .checked_add(len)
            .and_then(|end| self.heap.get(offset..end))
            .ok_or_else(|| heap_range_error(range))
    }

    #[inline]
    pub(crate) fn dims_at(&self, start: u32, len: u64) -> Result<&'a [u64]> {
        let first = index_to_usize(start);
        usize::try_from(len)
            .ok()
            .and_then(|len| self.dims.get(first..first.checked_add(len)?))
            // This crate compiles for little-endian hosts only.
            .map(bytemuck::cast_slice)
            .ok_or_else(|| dims_range_error(start.into(), len))
    }

    /// Decodes and validates a Dtype record by itself (F-057).
    pub(crate) fn other_dtype(&self, record: &record::Dtype) -> Result<OtherDtype> {
        OtherDtype::from_record(record, self.heap_at(record.name.to_native())?)
    }

    /// Returns the dtype with this number, listed or described in the file, if there is one.
    #[inline]
    pub(crate) fn dtype(&self, number: u16) -> Option<CompactDtype> {
        match listed_itemsize(number) {
            0 => self.described_dtype(number),
            _ => Some(CompactDtype::Listed(number)),
        }
    }

    #[cold]
    fn described_dtype(&self, number: u16) -> Option<CompactDtype> {
        let key = |record: &record::Dtype| record.number.to_native();
        let position = self.dtypes.binary_search_by_key(&number, key).ok()?;
        self.other_dtype(&self.dtypes[position]).ok().map(|other| CompactDtype::Other(other.into()))
    }

    /// Returns the key of a node that has one.
    pub(crate) fn file_key(&self, node: &record::Node) -> Result<EncodedKey<'a>> {
        let key = node.key.to_native();
        Ok(if key::kind::is_heap(node.key_kind) {
            EncodedKey::heap(node.key_kind, self.heap_at(key)?)
        } else {
            EncodedKey::word(node.key_kind, key)
        })
    }

    /// Returns the sort key of a node in its container, as [`EncodedKey::sort_key`] defines it.
    #[inline]
    pub(crate) fn key_order(&self, node: &record::Node) -> Result<SortKey<'a>> {
        let key = node.key.to_native();
        Ok(if key::kind::is_heap(node.key_kind) {
            (node.key_kind, self.heap_at(key)?, 0)
        } else {
            (node.key_kind, &[], key)
        })
    }

    /// Returns the child of a container that a step leads to, if it exists.
    pub(crate) fn child(&self, container: usize, step: &Step) -> Option<usize> {
        let node = &self.nodes[container];
        let children = self.children(container);
        match (kind::is_keyed(node.kind), step) {
            (false, Step::Index(index)) => children.clone().nth(index_to_usize(*index)),
            // A key that files cannot hold is in no container.
            (true, Step::Key(key)) => self.child_by_key(children, &EncodedKey::encode(key).ok()?),
            _ => None,
        }
    }

    /// Returns the child with this key among these children of a keyed container.
    pub(crate) fn child_by_key(
        &self,
        children: Range<usize>,
        key: &EncodedKey<'_>,
    ) -> Option<usize> {
        if children.len() <= LINEAR_SEARCH_MAX {
            return children.into_iter().find(|child| self.validated_key(*child) == key.sort_key());
        }
        let order = &self.by_key[children];
        let found = self.search(order, key.sort_key());
        found.ok().map(|position| index_to_usize(order[position].to_native()))
    }

    /// Returns two children whose keys are equal in Python, if there are such keys (F-045).
    ///
    /// `order` lists the children in the order of their keys.
    pub(crate) fn find_equal_keys(&self, order: &[u32_le]) -> Option<[usize; 2]> {
        let child = |position: usize| index_to_usize(order[position].to_native());
        let key = |position| self.validated_key(child(position));
        // Only bools, floats and tuples can be equal to keys of another encoding. The last key has the highest kind.
        if order.is_empty() || key(order.len() - 1).0 < key::kind::BOOL {
            return None;
        }
        for position in 0..order.len() {
            for twin in equal_python_keys(key(position)) {
                if let Ok(other) = self.search(order, twin.sort_key()) {
                    return Some([child(position), child(other)]);
                }
            }
        }
        let first_tuple = order.partition_point(|child| {
            self.nodes[index_to_usize(child.to_native())].key_kind < key::kind::TUPLE
        });
        self.find_equal_tuples(&order[first_tuple..])
    }

    /// Returns two children whose tuple keys are equal in Python, if there are such keys.
    fn find_equal_tuples(&self, children: &[u32_le]) -> Option<[usize; 2]> {
        if children.len() < 2 {
            return None;
        }
        let mut bytes = Vec::new();
        let mut forms = Vec::new();
        for child in children {
            let child = index_to_usize(child.to_native());
            // The validator rejects a malformed key later.
            if let Ok(key) = self.file_key(&self.nodes[child]).and_then(|key| key.decode()) {
                let start = bytes.len();
                push_python_form(&key, &mut bytes);
                forms.push((start..bytes.len(), child));
            }
        }
        forms.sort_unstable_by(|(left, _), (right, _)| {
            bytes[left.clone()].cmp(&bytes[right.clone()])
        });
        let is_same =
            |pair: &&[(Range<usize>, usize)]| bytes[pair[0].0.clone()] == bytes[pair[1].0.clone()];
        forms.windows(2).find(is_same).map(|pair| [pair[0].1, pair[1].1])
    }

    /// Returns the position of a key in a part of `by_key`, or the position to insert it at.
    ///
    /// Each step is a branch, so the processor predicts it and loads the next key before it has compared
    /// the current one. The branchless search of the standard library takes 1.6 times as long.
    pub(crate) fn search(&self, order: &[u32_le], key: SortKey<'_>) -> Result<usize, usize> {
        let (mut low, mut high) = (0, order.len());
        while low < high {
            let mid = low.midpoint(high);
            match self.validated_key(index_to_usize(order[mid].to_native())).cmp(&key) {
                Ordering::Less => low = mid + 1,
                Ordering::Equal => return Ok(mid),
                Ordering::Greater => high = mid,
            }
        }
        Err(low)
    }

    #[inline]
    pub(crate) fn validated_key(&self, node: usize) -> SortKey<'a> {
        self.key_order(&self.nodes[node]).expect("the validator has proven the key")
    }

    pub(crate) fn children(&self, container: usize) -> Range<usize> {
        let node = &self.nodes[container];
        if !kind::is_container(node.kind) {
            return 0..0;
        }
        let first = usize::try_from(node.a.to_native()).unwrap_or(usize::MAX);
        first..first.saturating_add(index_to_usize(node.count.to_native()))
    }

    pub(crate) fn validated_heap(&self, range: u64) -> &'a [u8] {
        self.heap_at(range).expect("the validator has proven the range")
    }

    pub(crate) fn text(&self, range: u64) -> Text {
        Text::from_generalized_utf8(self.validated_heap(range).to_vec())
            .expect("the validator has proven the text")
    }

    pub(crate) fn validated_dims(&self, start: u32, len: usize) -> &'a [u64] {
        let len = u64::try_from(len).expect("usize is at most 64 bits");
        self.dims_at(start, len).expect("the validator has proven the range")
    }
}

/// Returns the path of a node, for errors.
///
/// Also accepts tables that are not validated yet. A key that cannot be read becomes an index.
pub(crate) fn path_of(views: &TableViews<'_>, mut node: usize) -> ObjectPath {
    let mut steps = Vec::new();
    while let Some(parent) = (0..node).find(|parent| views.children(*parent).contains(&node)) {
        let position = node - views.children(parent).start;
        let step = if kind::is_keyed(views.nodes[parent].kind) {
            match views.file_key(&views.nodes[node]).and_then(|key| key.decode()) {
                Ok(key) => Step::Key(key),
                Err(_) => Step::Index(u32::try_from(position).unwrap_or(NONE)),
            }
        } else {
            Step::Index(u32::try_from(position).unwrap_or(NONE))
        };
        steps.push(step);
        node = parent;
    }
    steps.into_iter().rev().collect()
}

/// Returns the error of a range outside the heap.
///
/// Takes the range by value and is cold, like all errors of checks that run for each tensor. Formatting
/// a number in place would take its address and so force it from a register into memory.
#[cold]
pub(crate) fn heap_range_error(range: u64) -> Error {
    let (offset, len) = split_heap_range(range);
    Error::new(ErrorKind::HeapRange).with_detail(format_args!("{len} bytes at {offset}"))
}

/// Returns the error of a range outside dims.
#[cold]
pub(crate) fn dims_range_error(start: u64, len: u64) -> Error {
    Error::new(ErrorKind::DimsRange).with_detail(format_args!("{len} entries at {start}"))
}
