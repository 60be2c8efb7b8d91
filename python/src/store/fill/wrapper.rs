//! Comparison of the tensors in `into` that wrap tensors with the stored ones.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tssd_format::{Container, MapKey, Node, ObjectPath, Step, TaggedClass};

use super::{Leaf, TaggedContainers, is_plain, read_values};
use crate::builder::Framework;
use crate::error::{BindingError, Failure, Result};
use crate::store::connection::VersionRead;

/// The key of the inner tensors in the plain value of a wrapper.
pub(super) const TENSORS_KEY: &str = "tensors";

/// The key of the context in the plain value of a wrapper.
const CONTEXT_KEY: &str = "context";

/// A tensor in `into` that wraps tensors.
pub(super) struct WrapperTarget<'py> {
    pub(super) fqn: String,
    pub(super) object: Bound<'py, PyAny>,
    /// Its plain value, with the inner tensors.
    pub(super) plain: Bound<'py, PyAny>,
}

/// The fields of a stored wrapper, by their names.
type StoredWrapper<'a> = BTreeMap<String, &'a Node>;

/// Stored wrappers by their fqns, also those in other wrappers.
type StoredWrappers<'a> = BTreeMap<String, StoredWrapper<'a>>;

/// Checks that the wrappers in `into` are those that are stored, and agree with them in all but the elements.
///
/// # Errors
///
/// As [`check_classes`], then as [`check_fields`].
pub(super) fn check_wrappers(
    read: &VersionRead<'_>,
    tagged: &TaggedContainers<'_>,
    wrappers: &[WrapperTarget<'_>],
    tensors: &[Leaf<'_>],
    stored: &mut BTreeMap<String, &Node>,
    allow_pickle: bool,
) -> Result<()> {
    let stored_wrappers = find_wrappers(tagged);
    check_classes(&stored_wrappers, wrappers, tensors, stored)?;
    check_fields(read, &stored_wrappers, wrappers, stored, allow_pickle)
}

/// Returns the wrappers in tagged containers: a wrapper is one.
fn find_wrappers<'a>(tagged: &TaggedContainers<'a>) -> StoredWrappers<'a> {
    let mut wrappers = BTreeMap::new();
    for (path, node) in tagged.values() {
        collect_wrappers(node, &mut path.clone(), &mut wrappers);
    }
    wrappers
}

/// Checks that a tensor in `into` is a wrapper exactly if the stored one is.
///
/// # Errors
///
/// `WrongType`, with the fqn.
fn check_classes(
    stored_wrappers: &StoredWrappers<'_>,
    wrappers: &[WrapperTarget<'_>],
    tensors: &[Leaf<'_>],
    stored: &BTreeMap<String, &Node>,
) -> Result<()> {
    if let Some(leaf) = tensors.iter().find(|leaf| stored_wrappers.contains_key(&leaf.fqn)) {
        let text = "it is stored as a tensor that wraps tensors, and `into` has one that does not";
        return Err(wrong_class(text, &leaf.fqn));
    }
    // The inner tensors of a wrapper that is not stored are reported as missing.
    let is_plain = |wrapper: &&WrapperTarget<'_>| {
        !stored_wrappers.contains_key(&wrapper.fqn) && stored.contains_key(&wrapper.fqn)
    };
    if let Some(wrapper) = wrappers.iter().find(is_plain) {
        let text =
            "it is stored as a tensor that wraps none, and `into` has one that wraps tensors";
        return Err(wrong_class(text, &wrapper.fqn));
    }
    Ok(())
}

/// Checks that each wrapper in `into` agrees with the stored one in all but the elements of the inner tensors.
///
/// Removes from `stored` the tensors in the contexts of these wrappers, which are compared and not filled.
///
/// # Errors
///
/// `MeshMismatch` for another sharding; `SliceMismatch` for another size or stride; `WrongType` for any other difference.
fn check_fields(
    read: &VersionRead<'_>,
    stored_wrappers: &StoredWrappers<'_>,
    wrappers: &[WrapperTarget<'_>],
    stored: &mut BTreeMap<String, &Node>,
    allow_pickle: bool,
) -> Result<()> {
    let pairs = wrappers
        .iter()
        .filter_map(|wrapper| stored_wrappers.get(&wrapper.fqn).map(|found| (wrapper, found)));
    let pairs: Vec<_> = pairs.collect();
    let Some((first, _)) = pairs.first() else { return Ok(()) };
    let fields = pairs.iter().map(|(wrapper, found)| {
        let plain = found.iter().filter(|(name, _)| *name != TENSORS_KEY);
        let plain = plain.map(|(name, node)| (key_step(name), Node::clone(node)));
        (key_step(&wrapper.fqn), Node::Container(Container::Dict, plain.collect()))
    });
    let py = first.object.py();
    let fields = read_values(py, read, fields.collect(), Framework::Torch, allow_pickle)?;
    for (wrapper, found) in pairs {
        let Some(plain) = fields.get_item(&wrapper.fqn)? else { continue };
        let plain = plain.cast_into::<PyDict>()?;
        plain.set_item(TENSORS_KEY, inner_names(found))?;
        check_wrapper(wrapper, &plain, allow_pickle)
            .map_err(|error| error.with_fqn(&wrapper.fqn))?;
        if found.get(CONTEXT_KEY).is_some_and(|context| !is_plain(context, true)) {
            let context = format!("{}.{CONTEXT_KEY}", wrapper.fqn);
            let prefix = format!("{context}.");
            stored.retain(|fqn, _| *fqn != context && !fqn.starts_with(&prefix));
        }
    }
    Ok(())
}

fn check_wrapper(
    wrapper: &WrapperTarget<'_>,
    stored: &Bound<'_, PyDict>,
    allow_pickle: bool,
) -> Result<()> {
    let classes = stored.py().import("tssd._classes")?;
    let arguments = (&wrapper.plain, stored, allow_pickle);
    let difference = classes.call_method1("find_difference", arguments)?;
    let Some((kind, message, advice)) = difference.extract::<Option<(String, String, String)>>()?
    else {
        return Ok(());
    };
    let kind = match kind.as_str() {
        "MeshMismatch" => "MeshMismatch",
        "SliceMismatch" => "SliceMismatch",
        _ => "WrongType",
    };
    Err(BindingError::new(kind, message).advice(advice).into())
}

fn wrong_class(text: &str, fqn: &str) -> Failure {
    let advice = "give a tensor of the stored class, or get it without `into`";
    BindingError::new("WrongType", text).advice(advice).with_fqn(fqn).into()
}

fn key_step(name: &str) -> Step {
    Step::Key(MapKey::from(name))
}

/// Returns the names of the inner tensors of a stored wrapper.
fn inner_names(wrapper: &StoredWrapper<'_>) -> Vec<String> {
    match wrapper.get(TENSORS_KEY) {
        Some(Node::Container(_, children)) => {
            children.iter().map(|(step, _)| ObjectPath::from_iter([step.clone()]).fqn()).collect()
        }
        _ => Vec::new(),
    }
}

/// Adds the wrappers in a tree by their fqns, also those in other wrappers.
fn collect_wrappers<'a>(node: &'a Node, path: &mut Vec<Step>, wrappers: &mut StoredWrappers<'a>) {
    let Node::Container(container, children) = node else { return };
    if matches!(container, Container::Tagged(tag) if tag.class() == TaggedClass::Wrapper) {
        let fields = children.iter();
        let fields =
            fields.map(|(step, child)| (ObjectPath::from_iter([step.clone()]).fqn(), child));
        let path: ObjectPath = path.iter().cloned().collect();
        wrappers.insert(path.fqn(), fields.collect());
    }
    for (step, child) in children {
        path.push(step.clone());
        collect_wrappers(child, path, wrappers);
        path.pop();
    }
}
