//! Selection of leaves by name.

use std::sync::Arc;

use pyo3::prelude::*;
use tssd_format::{Container, Node};
use tssd_store::VersionReader;

use crate::error::Result;

/// Returns for each leaf of a version, in order, whether `names` selects it: see `_names.match_names`.
pub(super) fn match_names(
    py: Python<'_>,
    reader: &VersionReader,
    names: &Bound<'_, PyAny>,
) -> Result<Vec<bool>> {
    let fqns: Vec<String> = reader.leaves().iter().map(|(path, _)| path.fqn()).collect();
    Ok(py.import("tssd._names")?.call_method1("match_names", (fqns, names))?.extract()?)
}

/// Returns the tree without the leaves that `names` does not select.
///
/// The children of a container that is not a dict have fixed positions. So all of it is kept, or none of it.
pub(super) fn select(
    py: Python<'_>,
    reader: &VersionReader,
    names: &Bound<'_, PyAny>,
) -> Result<Arc<Node>> {
    let selection = match_names(py, reader, names)?;
    let mut root = Node::clone(reader.structure());
    prune(&mut root, &mut selection.into_iter());
    Ok(Arc::new(root))
}

/// Removes unselected leaves from dicts. Returns whether any leaf of the node is selected.
fn prune(node: &mut Node, selection: &mut impl Iterator<Item = bool>) -> bool {
    match node {
        Node::Container(Container::Tagged(tag), children) if tag.is_open_dict() => {
            children.retain_mut(|(_, child)| prune(child, selection));
            !children.is_empty()
        }
        Node::Container(Container::Dict | Container::OrderedDict, children) => {
            children.retain_mut(|(_, child)| prune(child, selection));
            !children.is_empty()
        }
        Node::Container(_, children) => {
            let selected: Vec<bool> =
                children.iter().map(|(_, child)| is_selected(child, selection)).collect();
            selected.contains(&true)
        }
        _ => selection.next().unwrap_or(false),
    }
}

/// Returns whether any leaf of the node is selected.
///
/// It consumes the flags of all leaves of the node, so that the iterator stays in step with the tree.
fn is_selected(node: &Node, selection: &mut impl Iterator<Item = bool>) -> bool {
    let Node::Container(_, children) = node else { return selection.next().unwrap_or(false) };
    let selected: Vec<bool> =
        children.iter().map(|(_, child)| is_selected(child, selection)).collect();
    selected.contains(&true)
}
