//! Lookup of a node by its path, and of a leaf by its fqn.

use crate::convert::index_to_usize;
use crate::error::{Error, ErrorKind, Result};
use crate::key::kind::{FLOAT, NONE, STR};
use crate::key::{MapKey, ObjectPath, Step};
use crate::number::Int;
use crate::record::kind;
use crate::table_views::{LINEAR_SEARCH_MAX, TableViews, path_of};

/// Returns the number of the node at an exact path, with one search per level.
pub(crate) fn find(views: &TableViews<'_>, path: &ObjectPath) -> Result<usize> {
    let mut node = 0;
    for step in path.steps() {
        node = views
            .child(node, step)
            .ok_or_else(|| Error::new(ErrorKind::NotFound).with_path(path))?;
    }
    Ok(node)
}

/// Returns the number of the leaf with an fqn.
pub(crate) fn find_fqn(views: &TableViews<'_>, fqn: &str) -> Result<usize> {
    match find_leaves(views, fqn) {
        [None, _] => Err(Error::new(ErrorKind::NotFound).with_path(fqn)),
        [Some(leaf), None] => Ok(leaf),
        [Some(one), Some(other)] => {
            let [one, other] = [one.min(other), one.max(other)].map(|leaf| path_of(views, leaf));
            Err(Error::new(ErrorKind::AmbiguousFqn)
                .with_path(fqn)
                .with_detail(format_args!("{one} and {other}")))
        }
    }
}

/// Returns the leaves that an fqn names, at most two: a second leaf already makes the fqn ambiguous.
fn find_leaves(views: &TableViews<'_>, fqn: &str) -> [Option<usize>; 2] {
    let mut search = FqnSearch { views, fqn, found: [None; 2] };
    search.descend(0, 0);
    search.found
}

/// A search over all ways to split an fqn into keys.
///
/// Each key has one spelling, so at most one split reaches a given node. The work is therefore bounded by the number
/// of nodes times the number of dots, for any file.
struct FqnSearch<'a> {
    views: &'a TableViews<'a>,
    fqn: &'a str,
    found: [Option<usize>; 2],
}

impl FqnSearch<'_> {
    fn descend(&mut self, node: usize, start: usize) {
        let views = self.views;
        let kind = views.nodes[node].kind;
        if !kind::is_container(kind) {
            return;
        }
        let rest = &self.fqn[start..];
        let part = rest.split('.').next().unwrap_or_default();
        if !kind::is_keyed(kind) {
            let index = parse_int(part).and_then(|int| int.as_i64()?.try_into().ok());
            if let Some(child) = index.and_then(|index| views.child(node, &Step::Index(index))) {
                self.visit_child(child, start + part.len());
            }
            return;
        }
        let children = views.children(node);
        let is_str = |child: usize| views.nodes[child].key_kind == STR;
        if children.len() <= LINEAR_SEARCH_MAX && children.clone().all(is_str) {
            for child in children {
                let (_, key, _) = views.validated_key(child);
                let tail = rest.as_bytes().strip_prefix(key);
                if tail.is_some_and(|tail| tail.first().is_none_or(|byte| *byte == b'.')) {
                    self.visit_child(child, start + key.len());
                }
            }
            return;
        }
        let last = views.by_key[children].last();
        if last.is_some_and(|last| views.nodes[index_to_usize(last.to_native())].key_kind > STR) {
            let key = parse_key(part).map(Step::Key);
            if let Some(child) = key.and_then(|key| views.child(node, &key)) {
                self.visit_child(child, start + part.len());
            }
            for (child, text) in children_with_formatted_keys(views, node) {
                let tail = rest.strip_prefix(&text);
                if tail.is_some_and(|tail| tail.is_empty() || tail.starts_with('.')) {
                    self.visit_child(child, start + text.len());
                }
            }
        }
        self.descend_by_str(node, start);
    }

    /// Looks up every prefix of the remaining fqn that ends before a dot as a `str` key, the longest first.
    ///
    /// A shorter prefix sorts before a longer one, and every key between the two begins with the shorter one. So the
    /// part that a prefix shares with the key directly before it bounds the length of the next prefix to look up. In
    /// most cases that key is the next prefix itself.
    fn descend_by_str(&mut self, node: usize, start: usize) {
        let views = self.views;
        let rest = &self.fqn.as_bytes()[start..];
        let mut order = &views.by_key[views.children(node)];
        let mut len = rest.len();
        let mut found = views.search(order, (STR, rest, 0));
        loop {
            if let Ok(at) = found {
                self.visit_child(index_to_usize(order[at].to_native()), start + len);
            }
            // Nodes are in breadth-first order: if the children are the last nodes, none of them has children.
            if views.children(node).end == views.nodes.len() {
                return;
            }
            let (Ok(at) | Err(at)) = found;
            order = &order[..at];
            let Some(last) = order.last() else { return };
            let (kind, previous, _) = views.validated_key(index_to_usize(last.to_native()));
            let shared = previous.iter().zip(&rest[..len]).take_while(|(one, other)| one == other);
            let shared = shared.count();
            let bound = len.min(shared + 1);
            let Some(dot) = rest[..bound].iter().rposition(|byte| *byte == b'.') else { return };
            len = dot;
            found = if kind == STR && previous.len() == len && shared == len {
                Ok(at - 1)
            } else {
                views.search(order, (STR, &rest[..len], 0))
            };
        }
    }

    /// Visits a child whose key ends at offset `end` of the fqn.
    fn visit_child(&mut self, child: usize, end: usize) {
        if end < self.fqn.len() {
            self.descend(child, end + 1);
        } else if !kind::is_container(self.views.nodes[child].kind)
            && let Some(slot) = self.found.iter_mut().find(|slot| slot.is_none())
        {
            *slot = Some(child);
        }
    }
}

/// Returns the children of a keyed container with float, bytes or tuple keys, and their formatted keys.
///
/// Such keys cannot be parsed from an fqn, so the caller compares them one by one. They are the last in key order.
/// Keys with surrogates can only be found by their exact path.
fn children_with_formatted_keys<'a>(
    views: &'a TableViews<'a>,
    container: usize,
) -> impl Iterator<Item = (usize, String)> + 'a {
    let order = views.by_key[views.children(container)].iter();
    let children = order.rev().map(|child| index_to_usize(child.to_native()));
    let sorts_last = |child: &usize| views.nodes[*child].key_kind >= FLOAT;
    children.take_while(sorts_last).filter_map(|child| {
        let node = &views.nodes[child];
        let key = views.file_key(node).and_then(|key| key.decode()).ok()?;
        (node.key_kind != NONE).then(|| (child, key.to_string()))
    })
}

/// Parses a part of an fqn as a bool, `None` or an int key.
fn parse_key(part: &str) -> Option<MapKey> {
    match part {
        "True" => Some(MapKey::Bool(true)),
        "False" => Some(MapKey::Bool(false)),
        "None" => Some(MapKey::None),
        _ => parse_int(part).map(MapKey::Int),
    }
}

/// Parses an int that is written as Python's `str` writes it.
fn parse_int(part: &str) -> Option<Int> {
    part.parse::<Int>().ok().filter(|int| int.to_string() == part)
}
