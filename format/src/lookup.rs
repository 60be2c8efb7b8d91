//! Finding a node by its path, a leaf by its fqn.

use crate::error::{Error, ErrorKind, Result};
use crate::key::kind::{FLOAT, NONE, STR};
use crate::key::{Key, ObjectPath, Step};
use crate::number::Int;
use crate::record::kind;
use crate::views::{FEW, Views, native, path_of};

/// The number of the node at an exact path, by one search per level.
pub(crate) fn find(views: &Views<'_>, path: &ObjectPath) -> Result<usize> {
    let mut node = 0;
    for step in path.steps() {
        node = views.child(node, step).ok_or_else(|| Error::new(ErrorKind::NotFound).at(path))?;
    }
    Ok(node)
}

/// The number of the leaf with an fqn.
pub(crate) fn find_fqn(views: &Views<'_>, fqn: &str) -> Result<usize> {
    match leaves_named(views, fqn) {
        [None, _] => Err(Error::new(ErrorKind::NotFound).at(fqn)),
        [Some(leaf), None] => Ok(leaf),
        [Some(one), Some(other)] => {
            let [one, other] = [one.min(other), one.max(other)].map(|leaf| path_of(views, leaf));
            Err(Error::new(ErrorKind::AmbiguousFqn).at(fqn).note(format_args!("{one} and {other}")))
        }
    }
}

/// The leaves that an fqn may mean: two at most, as two are one too many.
fn leaves_named(views: &Views<'_>, fqn: &str) -> [Option<usize>; 2] {
    let mut search = FqnSearch { views, fqn, found: [None; 2] };
    search.descend(0, 0);
    search.found
}

/// All ways to split an fqn into keys. A node is reached by one of them at most, as all keys above it
/// are spelled in one way, so the work is bounded by nodes times dots, whatever the file holds.
struct FqnSearch<'a> {
    views: &'a Views<'a>,
    fqn: &'a str,
    found: [Option<usize>; 2],
}

impl FqnSearch<'_> {
    fn descend(&mut self, node: usize, from: usize) {
        let views = self.views;
        let kind = views.nodes[node].kind;
        if !kind::is_container(kind) {
            return;
        }
        let rest = &self.fqn[from..];
        let part = rest.split('.').next().unwrap_or_default();
        if !kind::is_keyed(kind) {
            let index = spelled_int(part).and_then(|int| int.as_i64()?.try_into().ok());
            if let Some(child) = index.and_then(|index| views.child(node, &Step::Index(index))) {
                self.reach(child, from + part.len());
            }
            return;
        }
        let children = views.children(node);
        let is_str = |child: usize| views.nodes[child].key_kind == STR;
        if children.len() <= FEW && children.clone().all(is_str) {
            for child in children {
                let (_, key, _) = views.key_proven(child);
                let behind = rest.as_bytes().strip_prefix(key);
                if behind.is_some_and(|behind| behind.first().is_none_or(|byte| *byte == b'.')) {
                    self.reach(child, from + key.len());
                }
            }
            return;
        }
        let last = views.by_key[children].last();
        if last.is_some_and(|last| views.nodes[native(last.to_native())].key_kind > STR) {
            let key = spelled_key(part).map(Step::Key);
            if let Some(child) = key.and_then(|key| views.child(node, &key)) {
                self.reach(child, from + part.len());
            }
            for (child, spelled) in unspelled(views, node) {
                let behind = rest.strip_prefix(&spelled);
                if behind.is_some_and(|behind| behind.is_empty() || behind.starts_with('.')) {
                    self.reach(child, from + spelled.len());
                }
            }
        }
        self.descend_by_str(node, from);
    }

    /// Tries the strs that the rest of the fqn may begin with, from the longest on: its parts up to
    /// each dot. A shorter one that is there comes before a longer one in key order, and whatever lies
    /// between begins with it. So what the key before a longer one shares with it bounds the next, and
    /// mostly is it.
    fn descend_by_str(&mut self, node: usize, from: usize) {
        let views = self.views;
        let rest = &self.fqn.as_bytes()[from..];
        let mut order = &views.by_key[views.children(node)];
        let mut len = rest.len();
        let mut found = views.search(order, (STR, rest, 0));
        loop {
            if let Ok(at) = found {
                self.reach(native(order[at].to_native()), from + len);
            }
            // The children of children come after all of them: in a flat dict there are none to look for.
            if views.children(node).end == views.nodes.len() {
                return;
            }
            let (Ok(at) | Err(at)) = found;
            order = &order[..at];
            let Some(last) = order.last() else { return };
            let (kind, before, _) = views.key_proven(native(last.to_native()));
            let shared = before.iter().zip(&rest[..len]).take_while(|(one, other)| one == other);
            let shared = shared.count();
            let bound = len.min(shared + 1);
            let Some(dot) = rest[..bound].iter().rposition(|byte| *byte == b'.') else { return };
            len = dot;
            found = if kind == STR && before.len() == len && shared == len {
                Ok(at - 1)
            } else {
                views.search(order, (STR, &rest[..len], 0))
            };
        }
    }

    /// A child whose key ends at this place of the fqn.
    fn reach(&mut self, child: usize, end: usize) {
        if end < self.fqn.len() {
            self.descend(child, end + 1);
        } else if !kind::is_container(self.views.nodes[child].kind)
            && let Some(slot) = self.found.iter_mut().find(|slot| slot.is_none())
        {
            *slot = Some(child);
        }
    }
}

/// The children of a keyed container whose keys cannot be told from an fqn, and are compared with it one by one: floats,
/// bytes and tuples, which are the last in key order. (Keys with surrogates have the exact path.)
fn unspelled<'a>(
    views: &'a Views<'a>,
    container: usize,
) -> impl Iterator<Item = (usize, String)> + 'a {
    let order = views.by_key[views.children(container)].iter();
    let children = order.rev().map(|child| native(child.to_native()));
    let is_late = |child: &usize| views.nodes[*child].key_kind >= FLOAT;
    children.take_while(is_late).filter_map(|child| {
        let node = &views.nodes[child];
        let key = views.file_key(node).and_then(|key| key.to_key()).ok()?;
        (node.key_kind != NONE).then(|| (child, key.to_string()))
    })
}

/// The key that a part of an fqn may stand for: no str, and none of those that are compared.
fn spelled_key(part: &str) -> Option<Key> {
    match part {
        "True" => Some(Key::Bool(true)),
        "False" => Some(Key::Bool(false)),
        "None" => Some(Key::None),
        _ => spelled_int(part).map(Key::Int),
    }
}

/// The int that Python spells so.
fn spelled_int(part: &str) -> Option<Int> {
    part.parse::<Int>().ok().filter(|int| int.to_string() == part)
}
