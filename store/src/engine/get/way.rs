//! The way to a node of a tree.

use tssd_format::{Node, ObjectPath, Step};

/// The way to a node. Most nodes need none, so it is spelled only when it is asked for.
#[derive(Clone, Copy)]
pub(super) enum Way<'a> {
    To(&'a ObjectPath),
    On(&'a Self, &'a Step),
}

impl Way<'_> {
    pub(super) fn path(&self) -> ObjectPath {
        match self {
            Self::To(path) => (*path).clone(),
            Self::On(way, step) => way.path().step((*step).clone()),
        }
    }
}

/// Calls `each` with every node that is no container, in insertion order.
pub(super) fn leaves<'n>(way: Way<'_>, node: &'n Node, each: &mut impl FnMut(Way<'_>, &'n Node)) {
    let Node::Container(_, children) = node else { return each(way, node) };
    for (step, child) in children {
        leaves(Way::On(&way, step), child, each);
    }
}
