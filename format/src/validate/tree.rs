//! Validation of the tree: nodes, keys and leaves. Spec: section 5.

use std::ops::Range;

use super::claims::Claims;
use super::{StorageUse, Validator};
use crate::class_tag::{ClassTag, check_tagged_nodes};
use crate::convert::{index_to_usize, to_u64, to_usize};
use crate::error::{Error, ErrorKind, Result};
use crate::key::{self, SortKey};
use crate::number::is_canonical_bigint;
use crate::record::{
    self, INLINE_MAX_BYTES, MAX_NAME_BYTES, NONE, STORED_FLAG, kind, split_heap_range,
};
use crate::shape::MAX_RANK;
use crate::state_dict::MAX_DEPTH;
use crate::table_views::{TableViews, dims_range_error, path_of};

impl Validator<'_> {
    pub(super) fn validate_nodes(&mut self) -> Result<()> {
        let TableViews { nodes, by_key, tensors, .. } = self.views;
        let Some(root) = nodes.first() else {
            return Err(Error::new(ErrorKind::RootKind).with_detail("there is no root"));
        };
        let is_dict = matches!(root.kind, kind::DICT | kind::ORDERED_DICT);
        if !is_dict || root.key_kind != key::kind::INDEX || root.key != 0 {
            return Err(Error::new(ErrorKind::RootKind));
        }
        if by_key.len() != nodes.len() || by_key[0] != 0 {
            return Err(Error::new(ErrorKind::ChildRange).with_path("by_key"));
        }
        let mut children = Claims { claimed: 1, ..Claims::new(nodes.len()) };
        let mut tensor_claims = Claims::new(tensors.len());
        // The children of all nodes of one level form the next level.
        let (mut level, mut depth) = (0..1, 1);
        while !level.is_empty() {
            for (number, node) in level.clone().zip(&nodes[level.clone()]) {
                let result = if depth > MAX_DEPTH && kind::is_container(node.kind) {
                    Err(Error::new(ErrorKind::TooDeep))
                } else {
                    self.validate_node(number, node, &mut children, &mut tensor_claims)
                };
                result.map_err(|error| error.with_path(path_of(self.views, number)))?;
            }
            level = level.end..to_usize(children.claimed);
            depth += 1;
        }
        if !children.is_complete() {
            return Err(Error::new(ErrorKind::ChildRange).with_detail("nodes of no container"));
        }
        if !tensor_claims.is_complete() {
            return Err(Error::new(ErrorKind::TensorRun).with_detail("tensors of no leaf"));
        }
        if self.has_tags { check_tagged_nodes(self.views) } else { Ok(()) }
    }

    #[inline]
    fn validate_node(
        &mut self,
        number: usize,
        node: &record::Node,
        children: &mut Claims,
        tensor_claims: &mut Claims,
    ) -> Result<()> {
        self.validate_key(node)?;
        if kind::is_container(node.kind) {
            self.validate_container(number, node, children)
        } else {
            self.validate_leaf(number, node, tensor_claims)
        }
    }

    /// Validates the key of a node. `validate_container` checks that it fits the container.
    #[inline]
    fn validate_key(&mut self, node: &record::Node) -> Result<()> {
        let key = node.key.to_native();
        if node.key_kind == key::kind::INDEX {
            return if key == 0 { Ok(()) } else { Err(Error::new(ErrorKind::KeyKind)) };
        }
        if key::kind::is_heap(node.key_kind) {
            let bytes = self.views.heap_at(key)?;
            check_key_len(bytes)?;
            self.claim_heap_range(key)?;
            if node.key_kind == key::kind::STR {
                return self.check_text(key, bytes);
            }
        }
        self.views.file_key(node)?.check()
    }

    fn validate_container(
        &mut self,
        number: usize,
        node: &record::Node,
        children: &mut Claims,
    ) -> Result<()> {
        // The ranges are in order, so only the last one that starts at or before the node can contain it.
        let before = self.divergent.partition_point(|range| range.start <= number);
        let inside_divergent =
            before.checked_sub(1).is_some_and(|last| self.divergent[last].contains(&number));
        let (first, count) = (node.a.to_native(), u64::from(node.count.to_native()));
        if !children.claim_once(first, count) {
            return Err(Error::new(ErrorKind::ChildRange)
                .with_detail(format_args!("{count} children from node {first}")));
        }
        if node.flags != 0 {
            return Err(Error::new(ErrorKind::LeafValue).with_detail("flags of a container"));
        }
        if node.kind == kind::NAMEDTUPLE {
            self.claim_name(node.b.to_native(), 1..=MAX_NAME_BYTES)?;
        } else if node.b != 0 {
            if node.kind == kind::DIVERGENT {
                return Err(Error::new(ErrorKind::LeafValue).with_detail("b of a container"));
            }
            if number == 0 {
                return Err(Error::new(ErrorKind::ClassTag).with_detail("the root has one"));
            }
            self.validate_tag(node)?;
        }
        let range = to_usize(first)..to_usize(first + count);
        let is_keyed = kind::is_keyed(node.kind);
        let order_result = if is_keyed {
            self.validate_keys(node.kind, &range)
        } else {
            self.validate_index_order(&range)
        };
        // `validate_keys` also checks key kinds. If it fails, a wrong key kind of any child takes
        // precedence over its error.
        if !is_keyed || order_result.is_err() {
            let mut records = self.views.nodes[range.clone()].iter();
            if let Some(child) = records.find(|child| !key_fits(node.kind, child)) {
                return Err(key_kind_error(node.kind, child));
            }
        }
        if node.kind == kind::DIVERGENT {
            let violation = if self.views.shards.is_empty() {
                Some("the file has no shards")
            } else if inside_divergent {
                Some("it is inside another divergent node")
            } else {
                (count < 2).then_some("it has fewer than two children")
            };
            if let Some(violation) = violation {
                return Err(Error::new(ErrorKind::DivergentNode).with_detail(violation));
            }
        }
        if node.kind == kind::DIVERGENT || inside_divergent {
            self.divergent.push(range);
        }
        order_result
    }

    /// Checks that `by_key` lists the children of a list or tuple in order.
    fn validate_index_order(&self, children: &Range<usize>) -> Result<()> {
        let order =
            self.views.by_key[children.clone()].iter().map(|child| u64::from(child.to_native()));
        if children.clone().map(to_u64).eq(order) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::ChildRange).with_detail("by_key of a list is not in order"))
        }
    }

    /// Checks that keys fit their container and increase strictly along `by_key`.
    ///
    /// So no key and no child occurs twice, and no two keys are equal in Python (F-045).
    fn validate_keys(&self, container: u8, children: &Range<usize>) -> Result<()> {
        let order = &self.views.by_key[children.clone()];
        let nodes = &self.views.nodes[children.clone()];
        let mut last: Option<SortKey<'_>> = None;
        for child in order {
            let child = index_to_usize(child.to_native());
            let Some(node) = child.checked_sub(children.start).and_then(|at| nodes.get(at)) else {
                return Err(
                    Error::new(ErrorKind::DuplicateKey).with_detail("by_key names no child")
                );
            };
            if !key_fits(container, node) {
                return Err(key_kind_error(container, node));
            }
            let next = self.views.key_order(node)?;
            check_key_len(next.1)?;
            if last.is_some_and(|last| last >= next) {
                return Err(
                    Error::new(ErrorKind::DuplicateKey).with_path(path_of(self.views, child))
                );
            }
            last = Some(next);
        }
        match self.views.find_equal_keys(order) {
            Some([first, second]) => Err(Error::new(ErrorKind::KeysCollide)
                .with_path(path_of(self.views, first))
                .with_detail(path_of(self.views, second))),
            None => Ok(()),
        }
    }

    #[inline]
    fn validate_leaf(
        &mut self,
        number: usize,
        node: &record::Node,
        tensor_claims: &mut Claims,
    ) -> Result<()> {
        let value_error = |what: &str| Err(Error::new(ErrorKind::LeafValue).with_detail(what));
        let (a, b, count) = (node.a.to_native(), node.b.to_native(), node.count.to_native());
        // The fast path for plain tensors, the most frequent leaves.
        if node.kind == kind::TENSOR
            && node.flags == 0
            && count == 1
            && b == 0
            && tensor_claims.claim_once(a, 1)
        {
            return Ok(());
        }
        let is_content = matches!(node.kind, kind::STR | kind::BYTES | kind::OPAQUE);
        if node.flags != 0 && !(is_content && node.flags == STORED_FLAG) {
            return value_error("flags");
        }
        if node.kind > kind::DISTRIBUTED {
            return Err(Error::new(ErrorKind::UnknownKind).with_detail(node.kind));
        }
        if count != 0 && !matches!(node.kind, kind::SIZE | kind::TENSOR | kind::DISTRIBUTED) {
            return value_error("count");
        }
        let has_b =
            matches!(node.kind, kind::STR | kind::COMPLEX | kind::OPAQUE | kind::DISTRIBUTED);
        if b != 0 && !has_b {
            return value_error("b");
        }
        match node.kind {
            kind::NONE if a != 0 => return value_error("a"),
            kind::BOOL if a > 1 => return value_error("bool"),
            kind::DTYPE => {
                let number = u16::try_from(a)
                    .map_err(|_| Error::new(ErrorKind::UnknownDtype).with_detail(a))?;
                self.itemsize(number)?;
            }
            kind::SIZE if to_u64(MAX_RANK) < u64::from(count) => return value_error("size"),
            kind::BIGINT => {
                let bytes = self.views.heap_at(a)?;
                if !is_canonical_bigint(bytes) {
                    return Err(Error::new(ErrorKind::NonCanonicalInt));
                }
                self.claim_heap_range(a)?;
            }
            kind::STR | kind::BYTES | kind::OPAQUE => {
                if b != 0 && node.kind == kind::STR {
                    self.validate_tag(node)?;
                }
                self.validate_content(node)?;
                if node.kind == kind::OPAQUE {
                    self.claim_name(b, 1..=MAX_NAME_BYTES)?;
                }
            }
            kind::SIZE => {
                let len = u64::from(count);
                let start = u32::try_from(a).map_err(|_| dims_range_error(a, len))?;
                self.claim_dims(start, len)?;
            }
            kind::DEVICE => drop(self.claim_name(a, 1..=MAX_NAME_BYTES)?),
            kind::TENSOR if count == 0 || !tensor_claims.claim_once(a, u64::from(count)) => {
                return Err(Error::new(ErrorKind::TensorRun)
                    .with_detail(format_args!("{count} tensors from {a}")));
            }
            kind::TENSOR => self.validate_run(a, count)?,
            kind::DISTRIBUTED if count != 1 || !tensor_claims.claim_once(a, 1) => {
                return Err(Error::new(ErrorKind::TensorRun)
                    .with_detail(format_args!("{count} tensors from {a}")));
            }
            kind::DISTRIBUTED => {
                let first = u32::try_from(a).expect("it is in tensors");
                self.distributed.push((number, first));
            }
            _ => {}
        }
        Ok(())
    }

    /// Validates the class tag of a node (F-077). `validate_nodes` checks the content of the node.
    #[cold]
    fn validate_tag(&mut self, node: &record::Node) -> Result<()> {
        self.has_tags = true;
        ClassTag::from_word(node.b.to_native(), node.kind).map(drop)
    }

    /// Validates the content of a str, bytes or opaque leaf: in the heap or in its own storage (F-049).
    fn validate_content(&mut self, node: &record::Node) -> Result<()> {
        let a = node.a.to_native();
        let content_error = || Error::new(ErrorKind::TextPlace);
        if node.flags == STORED_FLAG {
            let storage = usize::try_from(a).ok().and_then(|a| self.views.storages.get(a));
            let storage = storage.ok_or_else(content_error)?;
            let uses = &mut self.uses[to_usize(a)];
            if storage.raw_len <= INLINE_MAX_BYTES || *uses != StorageUse::None {
                return Err(content_error());
            }
            *uses = StorageUse::Content;
            return Ok(());
        }
        if u64::from(split_heap_range(a).1) > INLINE_MAX_BYTES {
            return Err(content_error());
        }
        if node.kind == kind::STR { self.claim_text(a) } else { self.claim_heap(a).map(drop) }
    }

    /// Checks that the records of a tensor leaf with several records agree (F-051, F-074).
    fn validate_run(&self, first: u64, count: u32) -> Result<()> {
        let run = &self.views.tensors[to_usize(first)..to_usize(first + u64::from(count))];
        if run.iter().any(|tensor| tensor.slice == NONE) {
            return Err(Error::new(ErrorKind::TensorRun).with_detail("a whole tensor among slices"));
        }
        let [one, others @ ..] = run else { return Ok(()) };
        for other in others {
            let is_consistent =
                one.dtype == other.dtype && self.global_shape(one)? == self.global_shape(other)?;
            if !is_consistent {
                return Err(Error::new(ErrorKind::MixedRun));
            }
        }
        Ok(())
    }
}

/// Rejects a key that is too long.
///
/// Keys are compared before they are claimed, so the limit must be checked first.
#[inline]
fn check_key_len(bytes: &[u8]) -> Result<()> {
    if bytes.len() > key::MAX_KEY_BYTES {
        return Err(key_len_error(bytes.len()));
    }
    Ok(())
}

#[cold]
fn key_len_error(len: usize) -> Error {
    Error::new(ErrorKind::KeyKind).with_detail(format_args!("key of {len} bytes"))
}

#[cold]
fn key_kind_error(container: u8, child: &record::Node) -> Error {
    Error::new(ErrorKind::KeyKind)
        .with_detail(format_args!("key kind {} in node kind {container}", child.key_kind))
}

/// Returns true if the container allows the key kind of a child (F-043).
#[inline]
fn key_fits(container: u8, child: &record::Node) -> bool {
    match container {
        kind::DICT | kind::ORDERED_DICT => {
            (key::kind::STR..=key::kind::TUPLE).contains(&child.key_kind)
        }
        kind::NAMEDTUPLE => child.key_kind == key::kind::STR,
        kind::DIVERGENT => {
            child.key_kind == key::kind::INT && u32::try_from(child.key.to_native()).is_ok()
        }
        _ => child.key_kind == key::kind::INDEX,
    }
}
