//! Which leaves are wanted.

use std::sync::Arc;

use pyo3::prelude::*;
use tssd_format::{Container, Node};
use tssd_store::Opened;

use crate::error::Result;

/// Which leaves of a version are named, in their order: `_names.chosen` says.
pub(super) fn chosen(
    py: Python<'_>,
    opened: &Opened,
    names: &Bound<'_, PyAny>,
) -> Result<Vec<bool>> {
    let fqns: Vec<String> = opened.leaves().iter().map(|(path, _)| path.fqn()).collect();
    Ok(py.import("tssd._names")?.call_method1("chosen", (fqns, names))?.extract()?)
}

/// The tree without the leaves that are not named. What is no dict has its parts at places of their own: it
/// comes whole, or not at all.
pub(super) fn select(
    py: Python<'_>,
    opened: &Opened,
    names: &Bound<'_, PyAny>,
) -> Result<Arc<Node>> {
    let chosen = chosen(py, opened, names)?;
    let mut root = Node::clone(opened.structure());
    prune(&mut root, &mut chosen.into_iter());
    Ok(Arc::new(root))
}

/// Says whether anything in a node is chosen.
fn prune(node: &mut Node, chosen: &mut impl Iterator<Item = bool>) -> bool {
    match node {
        Node::Container(Container::Dict | Container::OrderedDict, children) => {
            children.retain_mut(|(_, child)| prune(child, chosen));
            !children.is_empty()
        }
        Node::Container(_, children) => {
            let kept: Vec<bool> =
                children.iter().map(|(_, child)| is_chosen(child, chosen)).collect();
            kept.contains(&true)
        }
        _ => chosen.next().unwrap_or(false),
    }
}

/// The same, and nothing goes.
fn is_chosen(node: &Node, chosen: &mut impl Iterator<Item = bool>) -> bool {
    let Node::Container(_, children) = node else { return chosen.next().unwrap_or(false) };
    let kept: Vec<bool> = children.iter().map(|(_, child)| is_chosen(child, chosen)).collect();
    kept.contains(&true)
}
