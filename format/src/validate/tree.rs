//! Validation of the tree: nodes, keys and leaves. Spec: section 5.

use std::ops::Range;

use super::claims::Claims;
use super::{Use, Validator, dtype, narrow, wide};
use crate::error::{Error, ErrorKind, Result};
use crate::key::{self, KeyOrder, python_twins};
use crate::number::is_shortest_big;
use crate::record::{self, INLINE_MAX, NONE, STORED, kind, split_heap_range};
use crate::shape::MAX_RANK;
use crate::state_dict::MAX_DEPTH;
use crate::views::{Views, native, outside_dims, path_of};

impl Validator<'_> {
    pub(super) fn nodes(&mut self) -> Result<()> {
        let Views { nodes, by_key, tensors, .. } = self.views;
        let Some(root) = nodes.first() else {
            return Err(Error::new(ErrorKind::RootKind).note("there is no root"));
        };
        let is_dict = matches!(root.kind, kind::DICT | kind::ORDERED_DICT);
        if !is_dict || root.key_kind != key::kind::INDEX || root.key != 0 {
            return Err(Error::new(ErrorKind::RootKind));
        }
        if by_key.len() != nodes.len() || by_key[0] != 0 {
            return Err(Error::new(ErrorKind::ChildRange).at("by_key"));
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
                result.map_err(|error| error.at(path_of(self.views, number)))?;
            }
            level = level.end..narrow(children.claimed);
            depth += 1;
        }
        if !children.is_complete() {
            return Err(Error::new(ErrorKind::ChildRange).note("nodes of no container"));
        }
        if !tensor_claims.is_complete() {
            return Err(Error::new(ErrorKind::TensorRun).note("tensors of no leaf"));
        }
        Ok(())
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
            self.validate_leaf(node, tensor_claims)
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
            self.claim(key)?;
            if node.key_kind == key::kind::STR {
                return self.text(key, bytes);
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
        if !children.once(first, count) {
            return Err(Error::new(ErrorKind::ChildRange)
                .note(format_args!("{count} children from node {first}")));
        }
        if node.flags != 0 {
            return Err(Error::new(ErrorKind::LeafValue).note("flags of a container"));
        }
        if node.kind == kind::NAMEDTUPLE {
            self.claim_text(node.b.to_native())?;
        } else if node.b != 0 {
            return Err(Error::new(ErrorKind::LeafValue).note("b of a container"));
        }
        let range = narrow(first)..narrow(first + count);
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
        if node.kind == kind::DIVERGENT && (inside_divergent || self.views.shards.is_empty()) {
            return Err(Error::new(ErrorKind::ShardTable)
                .note("a divergent node stands in a manifest, and in no other one"));
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
        if children.clone().map(wide).eq(order) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::ChildRange).note("by_key of a list is not in order"))
        }
    }

    /// Checks that keys fit their container and increase strictly along `by_key`.
    ///
    /// So no key and no child occurs twice, and no two keys are equal in Python (F-045).
    fn validate_keys(&self, container: u8, children: &Range<usize>) -> Result<()> {
        let order = &self.views.by_key[children.clone()];
        let nodes = &self.views.nodes[children.clone()];
        let mut last: Option<KeyOrder<'_>> = None;
        for child in order {
            let child = native(child.to_native());
            let Some(node) = child.checked_sub(children.start).and_then(|at| nodes.get(at)) else {
                return Err(Error::new(ErrorKind::DuplicateKey).note("by_key names no child"));
            };
            if !key_fits(container, node) {
                return Err(key_kind_error(container, node));
            }
            let next = self.views.key_order(node)?;
            check_key_len(next.1)?;
            if last.is_some_and(|last| last >= next) {
                return Err(Error::new(ErrorKind::DuplicateKey).at(path_of(self.views, child)));
            }
            last = Some(next);
        }
        // Only bools and floats can equal keys of other kinds. The last key has the highest kind.
        if last.is_none_or(|(highest, ..)| highest < key::kind::BOOL) {
            return Ok(());
        }
        for child in order {
            let child = native(child.to_native());
            let node = &self.views.nodes[child];
            for twin in python_twins(node.key_kind, node.key.to_native()) {
                if self.views.child_with(children.clone(), &twin).is_some() {
                    return Err(Error::new(ErrorKind::KeysCollide).at(path_of(self.views, child)));
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn validate_leaf(&mut self, node: &record::Node, tensor_claims: &mut Claims) -> Result<()> {
        let value_error = |what: &str| Err(Error::new(ErrorKind::LeafValue).note(what));
        let (a, b, count) = (node.a.to_native(), node.b.to_native(), node.count.to_native());
        // The fast path for plain tensors, the most frequent leaves.
        if node.kind == kind::TENSOR
            && node.flags == 0
            && count == 1
            && b == 0
            && tensor_claims.once(a, 1)
        {
            return Ok(());
        }
        let is_content = matches!(node.kind, kind::STR | kind::BYTES | kind::OPAQUE);
        if node.flags != 0 && !(is_content && node.flags == STORED) {
            return value_error("flags");
        }
        if node.kind > kind::OPAQUE {
            return Err(Error::new(ErrorKind::UnknownKind).note(node.kind));
        }
        if count != 0 && !matches!(node.kind, kind::SIZE | kind::TENSOR) {
            return value_error("count");
        }
        if b != 0 && !matches!(node.kind, kind::COMPLEX | kind::OPAQUE) {
            return value_error("b");
        }
        match node.kind {
            kind::NONE if a != 0 => return value_error("a"),
            kind::BOOL if a > 1 => return value_error("bool"),
            kind::DTYPE if dtype(a).is_none() => return value_error("dtype"),
            kind::SIZE if wide(MAX_RANK) < u64::from(count) => return value_error("size"),
            kind::BIGINT if !is_shortest_big(self.claim_heap(a)?) => {
                return Err(Error::new(ErrorKind::NonCanonicalInt));
            }
            kind::STR | kind::BYTES | kind::OPAQUE => {
                self.validate_content(node)?;
                if node.kind == kind::OPAQUE {
                    self.claim_text(b)?;
                }
            }
            kind::SIZE => {
                let len = u64::from(count);
                let start = u32::try_from(a).map_err(|_| outside_dims(a, len))?;
                self.claim_dims(start, len)?;
            }
            kind::DEVICE => self.claim_text(a)?,
            kind::TENSOR if count == 0 || !tensor_claims.once(a, u64::from(count)) => {
                return Err(
                    Error::new(ErrorKind::TensorRun).note(format_args!("{count} tensors from {a}"))
                );
            }
            kind::TENSOR => self.validate_run(a, count)?,
            _ => {}
        }
        Ok(())
    }

    /// Validates the content of a str, bytes or opaque leaf: in the heap or in its own storage (F-049).
    fn validate_content(&mut self, node: &record::Node) -> Result<()> {
        let a = node.a.to_native();
        let content_error = || Error::new(ErrorKind::TextPlace);
        if node.flags == STORED {
            let storage = usize::try_from(a).ok().and_then(|a| self.views.storages.get(a));
            let storage = storage.ok_or_else(content_error)?;
            let uses = &mut self.uses[narrow(a)];
            if storage.raw_len <= INLINE_MAX || *uses != Use::None {
                return Err(content_error());
            }
            *uses = Use::Content;
            return Ok(());
        }
        if u64::from(split_heap_range(a).1) > INLINE_MAX {
            return Err(content_error());
        }
        if node.kind == kind::STR { self.claim_text(a) } else { self.claim_heap(a).map(drop) }
    }

    /// Checks that the records of a tensor leaf with several records agree (F-051, F-074).
    fn validate_run(&self, first: u64, count: u32) -> Result<()> {
        let run = &self.views.tensors[narrow(first)..narrow(first + u64::from(count))];
        if run.iter().any(|tensor| tensor.slice == NONE) {
            return Err(Error::new(ErrorKind::TensorRun).note("a whole tensor among slices"));
        }
        let [one, others @ ..] = run else { return Ok(()) };
        for other in others {
            let is_consistent =
                one.dtype == other.dtype && self.global(one)? == self.global(other)?;
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
    Error::new(ErrorKind::KeyKind).note(format_args!("key of {len} bytes"))
}

#[cold]
fn key_kind_error(container: u8, child: &record::Node) -> Error {
    Error::new(ErrorKind::KeyKind)
        .note(format_args!("key kind {} in node kind {container}", child.key_kind))
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
