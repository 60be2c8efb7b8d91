//! Paths of nodes, which are built on demand.

use tssd_format::{Node, ObjectPath, Step};

/// The path of a node. Most nodes need none, so it is built on demand.
#[derive(Clone, Copy)]
pub(crate) enum LazyPath<'a> {
    Full(&'a ObjectPath),
    Child(&'a Self, &'a Step),
}

impl LazyPath<'_> {
    pub(crate) fn path(&self) -> ObjectPath {
        match self {
            Self::Full(path) => (*path).clone(),
            Self::Child(path, step) => path.path().step((*step).clone()),
        }
    }
}

/// Calls `each` with every node that is not a container, in insertion order.
pub(crate) fn for_each_leaf<'n>(
    path: LazyPath<'_>,
    node: &'n Node,
    each: &mut impl FnMut(LazyPath<'_>, &'n Node),
) {
    let Node::Container(_, children) = node else { return each(path, node) };
    for (step, child) in children {
        for_each_leaf(LazyPath::Child(&path, step), child, each);
    }
}
