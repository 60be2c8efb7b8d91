//! Finding a leaf by its fqn.

use std::collections::BTreeSet;

use crate::key::{self, Key, Step};
use crate::number::Int;
use crate::record::kind;
use crate::views::{Views, native};

/// The leaves that an fqn may mean: two at most, as two are one too many.
pub(crate) fn leaves_named(views: &Views<'_>, fqn: &str) -> Vec<usize> {
    let mut search = FqnSearch { views, fqn, seen: BTreeSet::new(), found: Vec::new() };
    search.descend(0, 0);
    search.found
}

/// All ways to split an fqn into keys. Each pair of node and position is tried once, so the work is
/// bounded by nodes times dots, whatever the file holds.
struct FqnSearch<'a> {
    views: &'a Views<'a>,
    fqn: &'a str,
    seen: BTreeSet<(usize, usize)>,
    found: Vec<usize>,
}

impl FqnSearch<'_> {
    fn descend(&mut self, node: usize, from: usize) {
        if !kind::is_container(self.views.nodes[node].kind) || !self.seen.insert((node, from)) {
            return;
        }
        let rest = &self.fqn[from..];
        let ends = rest.match_indices('.').map(|(dot, _)| dot).chain([rest.len()]);
        for end in ends {
            for step in spellings(&rest[..end]) {
                if let Some(child) = self.views.child(node, &step) {
                    self.reach(child, from + end);
                }
            }
        }
        for (child, spelled) in unspelled(self.views, node) {
            let behind = rest.strip_prefix(&spelled);
            if behind.is_some_and(|behind| behind.is_empty() || behind.starts_with('.')) {
                self.reach(child, from + spelled.len());
            }
        }
    }

    /// A child whose key ends at this place of the fqn.
    fn reach(&mut self, child: usize, end: usize) {
        if self.found.len() > 1 {
            return;
        }
        if end < self.fqn.len() {
            self.descend(child, end + 1);
        } else if !kind::is_container(self.views.nodes[child].kind) {
            self.found.push(child);
        }
    }
}

/// The children whose keys cannot be told from an fqn, and are compared with it one by one: floats,
/// bytes and tuples, which are the last in key order. (Keys with surrogates have the exact path.)
fn unspelled<'a>(
    views: &'a Views<'a>,
    container: usize,
) -> impl Iterator<Item = (usize, String)> + 'a {
    let is_keyed = kind::is_keyed(views.nodes[container].kind);
    let order = views.by_key.get(views.children(container)).filter(|_| is_keyed);
    let children = order.unwrap_or_default().iter().rev().map(|child| native(child.to_native()));
    let is_late = |child: &usize| views.nodes[*child].key_kind >= key::kind::FLOAT;
    children.take_while(is_late).filter_map(|child| {
        let node = &views.nodes[child];
        let key = views.file_key(node).and_then(|key| key.to_key()).ok()?;
        (node.key_kind != key::kind::NONE).then(|| (child, key.to_string()))
    })
}

/// The steps that a part of an fqn may stand for.
fn spellings(part: &str) -> Vec<Step> {
    let mut steps = vec![Step::Key(Key::from(part))];
    if let Ok(int) = part.parse::<Int>()
        && int.to_string() == part
    {
        if let Some(index) = int.as_i64().and_then(|int| u32::try_from(int).ok()) {
            steps.push(Step::Index(index));
        }
        steps.push(Step::Key(Key::Int(int)));
    }
    match part {
        "True" => steps.push(Step::Key(Key::Bool(true))),
        "False" => steps.push(Step::Key(Key::Bool(false))),
        "None" => steps.push(Step::Key(Key::None)),
        _ => {}
    }
    steps
}
