//! Reads into the caller's tensors.
#![expect(unsafe_code, reason = "the memory of tensors belongs to Python")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use tssd_format::{
    Container, ContentKind, Dtype, MAX_DEPTH, MapKey, Node, ObjectPath, ShardSpec, Step, Tensor,
    TensorFlags, TensorMeta, Value,
};
use tssd_gpu::CopyStats;
use tssd_store::plan::TensorLeaf;
use tssd_store::{GetOptions, GetReport, LeafPart, ReceiveReport, Receiver, Target, TargetMemory};

use crate::builder::{Framework, ObjectBuilder};
use crate::cast_rule::is_floating;
use crate::classes;
use crate::device::{DeviceRegions, DeviceTarget};
use crate::error::{BindingError, Result};
use crate::importer::{StagingPairs, TargetImporter, namedtuple_fields, to_map_key};
use crate::mapping::{Mapping, Piece, Plan, Problem, problem_kind, split_tensor};
use crate::store::connection::{Connection, VersionRead};
use crate::store::loaded_tree::LoadedTree;

/// Staging: everything about a fill but the copy to the caller's tensors.
mod stage;
/// Tensors that are computed from stored elements.
mod transform;
/// Comparison of wrappers in `into` with the stored ones.
mod wrapper;

pub(crate) use self::stage::StagedTargets;
use self::transform::{Computation, Transform};
use self::wrapper::{TENSORS_KEY, WrapperTarget};

/// A batch is filled once its staging tensors have this many bytes.
const BATCH_STAGED_BYTES: u64 = 512 << 20;

/// Options of a read into the caller's tensors.
#[derive(Clone, Copy, Default)]
pub(crate) struct FillOptions<'a, 'py> {
    /// The stored tensors that tensors of `into` consist of. `None`: each is the stored one of its fqn.
    pub(crate) mapping: Option<&'a Mapping<'py>>,
    /// Whether `into` must have exactly the tensors of the version.
    pub(crate) strict: bool,
    /// Whether floating dtypes may differ.
    pub(crate) cast: bool,
    /// Whether pickled leaves are unpickled.
    pub(crate) allow_pickle: bool,
}

/// The differences between `into` and the version that the options allow. All names are fqns.
#[derive(Default)]
pub(crate) struct Differences {
    /// Tensors in `into` that are not stored.
    pub(crate) missing: Vec<String>,
    /// Stored tensors that are not in `into`.
    pub(crate) unexpected: Vec<String>,
    /// Tensors in `into` whose dtype differs from the stored one.
    pub(crate) cast: Vec<String>,
}

/// The result of filling tensors.
pub(crate) struct FillResult {
    pub(crate) report: GetReport,
    /// The copies to devices. `None` if there were none.
    pub(crate) copy_stats: Option<CopyStats>,
    /// Bytes of the staging tensors.
    pub(crate) staged_bytes: u64,
}

/// A tensor in `into`.
struct Leaf<'py> {
    fqn: String,
    object: Bound<'py, PyAny>,
    /// `None` if there is nothing to fill.
    dtype: Option<Dtype>,
    /// The global shape, in elements.
    shape: Vec<u64>,
    /// Whether a wrapper has it: it is not cast.
    is_in_wrapper: bool,
    /// The stored tensors that it consists of. `None`: the stored tensor of its fqn.
    pieces: Option<Vec<Piece>>,
    /// What computes it from its pieces. `None`: it consists of them.
    transform: Option<Transform<'py>>,
    /// The reason why it does not fit its rule of the mapping.
    problem: Option<Problem>,
}

impl<'py> Leaf<'py> {
    fn new(
        fqn: String,
        object: Bound<'py, PyAny>,
        (dtype, shape): (Option<Dtype>, Vec<u64>),
        is_in_wrapper: bool,
    ) -> Self {
        let (pieces, transform, problem) = (None, None, None);
        Self { fqn, object, dtype, shape, is_in_wrapper, pieces, transform, problem }
    }
}

/// The position in `into` of a leaf that is not a tensor.
struct Slot<'py> {
    fqn: String,
    /// A dict or a list. Items of a tuple cannot be replaced.
    container: Bound<'py, PyAny>,
    key: Bound<'py, PyAny>,
}

/// A visitor that collects the leaves of a nested object.
struct LeafCollector<'a, 'py> {
    importer: &'a TargetImporter<'py>,
    path: Vec<Step>,
    tensors: Vec<Leaf<'py>>,
    wrappers: Vec<WrapperTarget<'py>>,
    slots: Vec<Slot<'py>>,
    is_in_wrapper: bool,
}

/// The container of an object, if its items can be replaced, and the key or index of the object in it.
type Parent<'a, 'py> = Option<(&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>)>;

impl<'a, 'py> LeafCollector<'a, 'py> {
    fn collect(importer: &'a TargetImporter<'py>, into: &Bound<'py, PyAny>) -> Result<Self> {
        let mut leaves = Self::new(importer);
        let targets = into.py().import(intern!(into.py(), "tssd._targets"))?.getattr("Targets")?;
        if into.is_instance(&targets)? {
            leaves.add_targets(into)?;
        } else {
            leaves.visit(into, None)?;
        }
        Ok(leaves)
    }

    /// Adds the tensors of a `tssd.Targets`.
    fn add_targets(&mut self, targets: &Bound<'py, PyAny>) -> Result<()> {
        for entry in targets.getattr(intern!(targets.py(), "entries"))?.try_iter()? {
            let (fqn, object): (String, Bound<'py, PyAny>) = entry?.extract()?;
            let found = self.importer.dtype_and_shape(&object);
            let found =
                found.map_err(|error| error.with_fqn(&fqn))?.ok_or_else(|| no_tensor(&fqn))?;
            self.tensors.push(Leaf::new(fqn, object, found, false));
        }
        Ok(())
    }

    fn new(importer: &'a TargetImporter<'py>) -> Self {
        let (path, tensors, wrappers, slots) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { importer, path, tensors, wrappers, slots, is_in_wrapper: false }
    }

    fn visit(&mut self, object: &Bound<'py, PyAny>, parent: Parent<'_, 'py>) -> Result<()> {
        if self.path.len() > MAX_DEPTH {
            return Err(BindingError::untyped_leaf(
                "`into` is nested too deeply",
                "make it flatter",
            )
            .into());
        }
        if let Ok(dict) = object.cast::<PyDict>() {
            for item in dict.items().iter() {
                let (name, value) = (item.get_item(0)?, item.get_item(1)?);
                let key: MapKey = to_map_key(&name, MAX_DEPTH)
                    .map_err(|error| error.with_path(&self.current_path()))?;
                self.visit_child(Step::Key(key), &value, Some((object, &name)))?;
            }
            return Ok(());
        }
        if let Some(fields) = namedtuple_fields(object)? {
            let values = object.cast::<PyTuple>()?;
            for (field, value) in fields.into_iter().zip(values.iter()) {
                self.visit_child(Step::Key(MapKey::Str(field)), &value, None)?;
            }
            return Ok(());
        }
        if let Ok(list) = object.cast::<PyList>() {
            for (index, item) in (0_u32..).zip(list.to_tuple().iter()) {
                let position = index.into_pyobject(object.py()).map_err(PyErr::from)?.into_any();
                self.visit_child(Step::Index(index), &item, Some((object, &position)))?;
            }
            return Ok(());
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            for (index, item) in (0..).zip(tuple.iter()) {
                self.visit_child(Step::Index(index), &item, None)?;
            }
            return Ok(());
        }
        self.visit_leaf(object, parent).map_err(|error| error.with_path(&self.current_path()))
    }

    fn visit_leaf(&mut self, object: &Bound<'py, PyAny>, parent: Parent<'_, 'py>) -> Result<()> {
        if let Some(parts) = self.importer.decompose_wrapper(object)? {
            return self.visit_wrapper(object, parts.plain);
        }
        let (found, fqn) = (self.importer.dtype_and_shape(object)?, || self.current_path().fqn());
        match (found, parent) {
            (Some(found), _) => {
                self.tensors.push(Leaf::new(fqn(), object.clone(), found, self.is_in_wrapper));
            }
            (None, Some((container, key))) => {
                let (container, key) = (container.clone(), key.clone());
                let slot = Slot { fqn: fqn(), container, key };
                self.slots.push(slot);
            }
            (None, None) => {}
        }
        Ok(())
    }

    /// Visits the inner tensors of a wrapper.
    fn visit_wrapper(
        &mut self,
        object: &Bound<'py, PyAny>,
        plain: Bound<'py, PyAny>,
    ) -> Result<()> {
        let tensors = plain.get_item(TENSORS_KEY)?;
        let wrapper =
            WrapperTarget { fqn: self.current_path().fqn(), object: object.clone(), plain };
        self.wrappers.push(wrapper);
        let is_in_wrapper = std::mem::replace(&mut self.is_in_wrapper, true);
        self.path.push(Step::Key(MapKey::from(TENSORS_KEY)));
        for item in tensors.cast::<PyDict>()?.items().iter() {
            let (name, inner) = (item.get_item(0)?, item.get_item(1)?);
            let step = Step::Key(to_map_key(&name, MAX_DEPTH)?);
            if let Some(parts) = classes::stacked_wrapper(&inner)? {
                self.path.push(step);
                self.visit_wrapper(object, parts.plain)?;
                self.path.pop();
            } else {
                self.visit_child(step, &inner, None)?;
            }
        }
        self.path.pop();
        self.is_in_wrapper = is_in_wrapper;
        Ok(())
    }

    fn visit_child(
        &mut self,
        step: Step,
        object: &Bound<'py, PyAny>,
        parent: Parent<'_, 'py>,
    ) -> Result<()> {
        self.path.push(step);
        self.visit(object, parent)?;
        self.path.pop();
        Ok(())
    }

    fn current_path(&self) -> ObjectPath {
        self.path.iter().cloned().collect()
    }
}

/// The leaves of `into`, matched with the stored ones.
struct MatchedTree<'py> {
    /// The tensors that are stored, each with its stored dtype.
    leaves: Vec<(Leaf<'py>, Dtype)>,
    differences: Differences,
    /// The other stored leaves that replace those of `into`.
    values: Vec<Replacement<'py>>,
    /// The tensors that wrap tensors.
    wrappers: Vec<Bound<'py, PyAny>>,
}

/// A leaf that replaces another: the dict or list that contains it, its key or index, and the value.
type Replacement<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Matches the leaves in a nested object with the stored ones, by their fqns. Reads the leaves that are no tensors.
///
/// # Errors
///
/// All differences that `options` does not allow, in one error.
fn match_tree<'py>(
    read: &VersionRead<'_>,
    importer: &TargetImporter<'py>,
    into: &Bound<'py, PyAny>,
    options: FillOptions<'_, 'py>,
) -> Result<MatchedTree<'py>> {
    let py = into.py();
    let LeafCollector { mut tensors, wrappers, slots, .. } =
        LeafCollector::collect(importer, into)?;
    let mut stored: BTreeMap<String, &Node> =
        read.reader.leaves().iter().map(|(path, node)| (path.fqn(), node)).collect();
    let tagged = find_tagged(read.reader.structure());
    wrapper::check_wrappers(read, &tagged, &wrappers, &tensors, &mut stored, options.allow_pickle)?;
    if let Some(mapping) = options.mapping {
        apply_mapping(mapping, &mut tensors, &stored)?;
    }
    let (leaves, differences) = match_leaves(tensors, &stored, options)?;
    let plain = slots.iter().filter_map(|slot| {
        let tagged = || tagged.get(&slot.fqn).map(|(_, node)| node);
        let node = stored.get(&slot.fqn).or_else(tagged);
        let node = node.filter(|node| is_plain(node, options.allow_pickle))?;
        Some((Step::Key(MapKey::Str(slot.fqn.as_str().into())), Node::clone(node)))
    });
    // None of the leaves is a tensor of torch. Values such as `torch.dtype` are made by torch regardless.
    let found = read_values(py, read, plain.collect(), Framework::Numpy, options.allow_pickle)?;
    let mut values = Vec::new();
    for Slot { fqn, container, key } in slots {
        values.extend(found.get_item(fqn)?.map(|value| (container, key, value)));
    }
    let wrappers = wrappers.into_iter().map(|wrapper| wrapper.object).collect();
    Ok(MatchedTree { leaves, differences, values, wrappers })
}

/// Fills the tensors in a nested object, by their fqns.
///
/// The other leaves in its dicts and lists are replaced by the stored leaves.
///
/// # Errors
///
/// As [`match_tree`], before the first byte of a tensor is written.
pub(crate) fn fill_state_dict<'py>(
    read: &VersionRead<'_>,
    into: &Bound<'py, PyAny>,
    options: FillOptions<'_, 'py>,
) -> Result<(FillResult, Differences)> {
    let py = into.py();
    let mut importer = TargetImporter::new(py)?;
    let MatchedTree { leaves, differences, values, wrappers } =
        match_tree(read, &importer, into, options)?;
    let filled = fill_leaves(py, read, &mut importer, leaves)?;
    for (container, key, value) in values {
        container.set_item(key, value)?;
    }
    increment_versions(py, wrappers)?;
    Ok((filled, differences))
}

/// Sets the pieces of the tensors that have a rule in the mapping.
fn apply_mapping<'py>(
    mapping: &Mapping<'py>,
    tensors: &mut [Leaf<'py>],
    stored: &BTreeMap<String, &Node>,
) -> Result<()> {
    let wanted = tensors.iter().map(|leaf| (leaf.fqn.as_str(), leaf.shape.as_slice())).collect();
    let stored = stored
        .iter()
        .filter_map(|(fqn, node)| Some((fqn.as_str(), TensorLeaf::of(node)?.global_shape())))
        .collect();
    let Plan(mut plans, problems, mut transforms) = mapping.plan_get(&wanted, &stored)?;
    let mut problems: BTreeMap<String, Problem> =
        problems.into_iter().map(|problem| (problem.0.clone(), problem)).collect();
    for leaf in tensors {
        leaf.pieces = plans.remove(&leaf.fqn);
        leaf.transform = transforms.remove(&leaf.fqn).map(Transform::new).transpose()?;
        leaf.problem = problems.remove(&leaf.fqn);
    }
    Ok(())
}

/// Reads leaves and containers. Returns a dict of fqns to values.
fn read_values<'py>(
    py: Python<'py>,
    read: &VersionRead<'_>,
    leaves: Vec<(Step, Node)>,
    framework: Framework,
    allow_pickle: bool,
) -> Result<Bound<'py, PyDict>> {
    if leaves.is_empty() {
        return Ok(PyDict::new(py));
    }
    let root = Arc::new(Node::Container(Container::Dict, leaves));
    let version = LoadedTree::read(py, read, root, false)?;
    let maker = ObjectBuilder::new(py, &version, &version, framework).allow_pickle(allow_pickle);
    Ok(maker.build_state_dict()?.cast_into()?)
}

/// Containers with a class tag, such as sets, that are in no other one, by their fqns. Each has its path.
type TaggedContainers<'a> = BTreeMap<String, (Vec<Step>, &'a Node)>;

/// Returns the containers with a class tag.
fn find_tagged(structure: &Node) -> TaggedContainers<'_> {
    let mut tagged = TaggedContainers::new();
    collect_tagged(structure, &mut Vec::new(), &mut tagged);
    tagged
}

/// Adds the containers with a class tag. They are replaced as a whole.
fn collect_tagged<'a>(node: &'a Node, path: &mut Vec<Step>, tagged: &mut TaggedContainers<'a>) {
    match node {
        Node::Container(Container::Tagged(_), _) => {
            let fqn = path.iter().cloned().collect::<ObjectPath>().fqn();
            tagged.insert(fqn, (path.clone(), node));
        }
        Node::Container(_, children) => {
            for (step, child) in children {
                path.push(step.clone());
                collect_tagged(child, path, tagged);
                path.pop();
            }
        }
        _ => {}
    }
}

/// Returns whether a stored leaf, or each leaf of a container, is not a tensor, and may be read.
fn is_plain(node: &Node, allow_pickle: bool) -> bool {
    match node {
        Node::Leaf(Value::Opaque { .. }) | Node::StoredLeaf(ContentKind::Opaque(_), _) => {
            allow_pickle
        }
        Node::Leaf(_) | Node::StoredLeaf(..) => true,
        Node::Tensors(_) | Node::Distributed(_) => !is_tensor(node),
        Node::Container(_, children) => {
            children.iter().all(|(_, child)| is_plain(child, allow_pickle))
        }
    }
}

/// Fills one tensor with the stored tensor of an fqn.
pub(crate) fn fill_tensor(
    read: &VersionRead<'_>,
    into: &Bound<'_, PyAny>,
    fqn: &str,
) -> Result<()> {
    let mut importer = TargetImporter::new(into.py())?;
    if let Some(parts) = importer.decompose_wrapper(into)? {
        let mut leaves = LeafCollector::new(&importer);
        leaves.path.push(Step::Key(MapKey::from(fqn)));
        leaves.visit_wrapper(into, parts.plain)?;
        let LeafCollector { tensors, wrappers, .. } = leaves;
        return fill_wrapper(read, &mut importer, fqn, tensors, wrappers);
    }
    let found = importer.dtype_and_shape(into)?.ok_or_else(|| no_tensor(fqn))?;
    let (_, node) = read.reader.leaf(fqn)?;
    if TensorLeaf::of(&node).is_none() {
        return Err(BindingError::new("WrongType", format!("`{fqn}` is no tensor")).into());
    }
    let leaf = Leaf::new(fqn.to_owned(), into.clone(), found, false);
    let stored = BTreeMap::from([(fqn.to_owned(), &node)]);
    let (leaves, _) = match_leaves(vec![leaf], &stored, FillOptions::default())?;
    fill_leaves(into.py(), read, &mut importer, leaves)?;
    Ok(())
}

/// Fills the inner tensors of one wrapper, and of those in it, with the stored ones of an fqn.
fn fill_wrapper<'py>(
    read: &VersionRead<'_>,
    importer: &mut TargetImporter<'py>,
    fqn: &str,
    tensors: Vec<Leaf<'py>>,
    wrappers: Vec<WrapperTarget<'py>>,
) -> Result<()> {
    let prefix = format!("{fqn}.{TENSORS_KEY}.");
    let leaves = read.reader.leaves().iter().map(|(path, node)| (path.fqn(), node));
    let mut stored: BTreeMap<String, &Node> =
        leaves.filter(|(name, _)| name == fqn || name.starts_with(&prefix)).collect();
    if stored.is_empty() {
        // Reports that there is no such leaf.
        read.reader.leaf(fqn)?;
    }
    let tagged = find_tagged(read.reader.structure());
    wrapper::check_wrappers(read, &tagged, &wrappers, &tensors, &mut stored, false)?;
    let options = FillOptions { strict: true, ..FillOptions::default() };
    let (leaves, _) = match_leaves(tensors, &stored, options)?;
    let py = wrappers[0].object.py();
    fill_leaves(py, read, importer, leaves)?;
    increment_versions(py, wrappers.into_iter().map(|wrapper| wrapper.object).collect())
}

fn no_tensor(fqn: &str) -> BindingError {
    BindingError::untyped_leaf("`into` is no tensor", "give a tensor, a TensorShard or an array")
        .with_fqn(fqn)
}

/// Returns whether a leaf is a tensor that can be filled. A scalar of numpy cannot be filled.
fn is_tensor(node: &Node) -> bool {
    TensorLeaf::of(node).is_some_and(|leaf| !leaf.flags().contains(TensorFlags::SCALAR))
}

/// The leaves of `into` that are stored, each with its stored dtype; and the differences.
type MatchedLeaves<'py> = (Vec<(Leaf<'py>, Dtype)>, Differences);

/// Matches the tensors in `into` with the stored ones.
///
/// # Errors
///
/// One error for all differences that `options` does not allow.
fn match_leaves<'py>(
    leaves: Vec<Leaf<'py>>,
    stored: &BTreeMap<String, &Node>,
    options: FillOptions<'_, '_>,
) -> Result<MatchedLeaves<'py>> {
    let mut differences = Differences::default();
    let mut mismatches: Vec<(&str, &'static str, String)> = Vec::new();
    let mut stored_dtypes = Vec::with_capacity(leaves.len());
    let mut requested = BTreeSet::new();
    for leaf in &leaves {
        let names: Vec<&str> = match &leaf.pieces {
            Some(pieces) => pieces.iter().map(|piece| piece.stored.as_str()).collect(),
            None => vec![&leaf.fqn],
        };
        requested.extend(names.iter().copied());
        let tensor = |name: &&str| stored.get(*name).and_then(|node| TensorLeaf::of(node));
        let found: Vec<TensorLeaf<'_>> = names.iter().filter_map(tensor).collect();
        let problem = match &leaf.problem {
            Some(Problem(_, kind, text)) => Some((problem_kind(kind), text.clone())),
            None if leaf.pieces.is_none() && found.is_empty() => {
                Some(("NotFound", format!("`{}` is not stored", leaf.fqn)))
            }
            None => None,
        };
        stored_dtypes.push(found.first().map(|part| part.dtype()).filter(|_| problem.is_none()));
        if let Some((kind, text)) = problem {
            let is_missing = kind == "NotFound";
            if is_missing {
                differences.missing.push(leaf.fqn.clone());
            }
            // A tensor of which no rank has any element is not stored.
            if !is_missing || (options.strict && leaf.dtype.is_some()) {
                mismatches.push((&leaf.fqn, kind, text));
            }
            continue;
        }
        // A tensor without elements has no pieces.
        let Some(first) = found.first() else { continue };
        if leaf.pieces.is_none() && first.global_shape() != leaf.shape {
            let (shape, own) = (first.global_shape(), &leaf.shape);
            let text = format!("`{}` has shape {own:?}, stored {shape:?}", leaf.fqn);
            mismatches.push((&leaf.fqn, "SliceMismatch", text));
        } else if let Some((part, other)) =
            names.iter().zip(&found).find(|(_, part)| part.dtype() != first.dtype())
        {
            let (own, dtype, other) = (names[0], first.dtype(), other.dtype());
            let text = format!("`{}`: `{own}` is stored as {dtype}, `{part}` as {other}", leaf.fqn);
            mismatches.push((&leaf.fqn, "WrongType", text));
        } else if let Some(transform) = &leaf.transform {
            let (made, stored) = (transform.dtype, first.dtype());
            if leaf.dtype.is_some_and(|own| own != made) {
                let own = leaf.dtype.expect("it was just looked at");
                let text = format!("`{}` is {own}, its rule computes {made}", leaf.fqn);
                mismatches.push((&leaf.fqn, "WrongType", text));
            } else if !is_floating(stored) || stored.itemsize() < 2 {
                let text = format!("`{}` cannot be computed from {stored}", leaf.fqn);
                mismatches.push((&leaf.fqn, "WrongType", text));
            }
        } else if let Some(own) = leaf.dtype
            && own != first.dtype()
        {
            let dtype = first.dtype();
            differences.cast.push(leaf.fqn.clone());
            let is_cast = options.cast && !leaf.is_in_wrapper;
            if !(is_cast && is_floating(dtype) && is_floating(own)) {
                let text = format!("`{}` is {own}, stored {dtype}", leaf.fqn);
                mismatches.push((&leaf.fqn, "WrongType", text));
            }
        }
    }
    for (fqn, node) in stored {
        if is_tensor(node) && !requested.contains(fqn.as_str()) {
            differences.unexpected.push(fqn.clone());
            if options.strict {
                mismatches.push((fqn, "invalid", format!("`{fqn}` is stored and not in `into`")));
            }
        }
    }
    if let Some(first) = mismatches.first() {
        return Err(mismatch_error(first.0, &mismatches, options).into());
    }
    let leaves = leaves.into_iter().zip(stored_dtypes);
    Ok((leaves.filter_map(|(leaf, dtype)| Some((leaf, dtype?))).collect(), differences))
}

/// The largest number of differences that an error lists.
const MAX_SHOWN: usize = 10;

fn mismatch_error(
    fqn: &str,
    mismatches: &[(&str, &'static str, String)],
    options: FillOptions<'_, '_>,
) -> BindingError {
    let mut shown: Vec<&str> =
        mismatches.iter().take(MAX_SHOWN).map(|(.., text)| text.as_str()).collect();
    let others = format!("and {} more", mismatches.len().saturating_sub(MAX_SHOWN));
    if mismatches.len() > MAX_SHOWN {
        shown.push(&others);
    }
    // Differences of one kind give the error of that kind. Differences of several kinds give "invalid".
    let kind = match mismatches {
        [(_, first, _), rest @ ..] if rest.iter().all(|(_, kind, _)| kind == first) => first,
        _ => "invalid",
    };
    let has = |kind: &str| mismatches.iter().any(|(_, other, _)| *other == kind);
    let advice = if has("SliceMismatch") {
        "give tensors of the stored shapes"
    } else if has("WrongType") && !options.cast {
        "give tensors of the stored dtypes; with cast=True get_state_dict converts floats"
    } else if has("WrongType") {
        "give tensors of the stored dtypes: only floats are converted"
    } else {
        "say strict=False to fill what both have"
    };
    BindingError::new(kind, shown.join("; ")).advice(advice).with_fqn(fqn)
}

/// Tensors that are filled together.
#[derive(Default)]
struct Batch<'py> {
    targets: Vec<FillTarget>,
    /// The caller's objects that `targets` belong to.
    objects: Vec<Bound<'py, PyAny>>,
    /// The caller's tensors that cannot be filled directly, each with its staging tensor.
    staged: StagingPairs<'py>,
    /// The boxes that are computed.
    computations: Vec<Computation<'py>>,
    /// The size of the staging tensors.
    staged_bytes: u64,
}

impl<'py> Batch<'py> {
    /// Adds a leaf, to be filled with elements of the stored dtype. If `is_buffered`, staging tensors are filled.
    fn add(
        &mut self,
        importer: &mut TargetImporter<'py>,
        leaf: &Leaf<'py>,
        stored: Dtype,
        is_buffered: bool,
    ) -> Result<()> {
        if let (Some(transform), Some(pieces)) = (&leaf.transform, &leaf.pieces) {
            return self.add_computed(importer, leaf, (transform, pieces), stored, is_buffered);
        }
        let imported = importer.import_targets(&leaf.object, stored, is_buffered);
        let (imported, staged) = imported.map_err(|error| error.with_fqn(&leaf.fqn))?;
        if !staged.is_empty() {
            let bytes = imported.iter().map(|(tensor, _)| tensor.meta().nbytes());
            self.staged_bytes += bytes.sum::<u64>();
        }
        self.staged.extend(staged);
        self.objects.push(leaf.object.clone());
        let devices = importer.devices();
        for (tensor, part) in imported {
            let Some(pieces) = &leaf.pieces else {
                self.targets.push(FillTarget::new(leaf.fqn.clone(), devices, tensor, part));
                continue;
            };
            for part in split_tensor(&tensor, part.as_ref(), pieces)? {
                let spec = Some(part.spec);
                self.targets.push(FillTarget::new(part.stored, devices, part.tensor, spec));
            }
        }
        Ok(())
    }
}

/// Fills leaves, in batches of about [`BATCH_STAGED_BYTES`] of staging tensors.
fn fill_leaves<'py>(
    py: Python<'py>,
    read: &VersionRead<'_>,
    importer: &mut TargetImporter<'py>,
    leaves: Vec<(Leaf<'py>, Dtype)>,
) -> Result<FillResult> {
    let mut report = read.reader.report();
    let (mut batch, mut staged_bytes) = (Batch::default(), 0);
    for (leaf, stored) in leaves {
        batch.add(importer, &leaf, stored, false)?;
        if batch.staged_bytes >= BATCH_STAGED_BYTES {
            staged_bytes += batch.staged_bytes;
            std::mem::take(&mut batch).fill(py, read, &mut report)?;
            importer.devices().release();
        }
    }
    staged_bytes += batch.staged_bytes;
    batch.fill(py, read, &mut report)?;
    let last = read.reader.report();
    (report.bytes_received, report.bytes_verified) = (last.bytes_received, last.bytes_verified);
    report.seconds = last.seconds;
    let copy_stats = importer.devices().copy_stats().snapshot();
    Ok(FillResult { report, copy_stats, staged_bytes })
}

impl Batch<'_> {
    /// Fills all targets, and adds to the counts of `report`.
    fn fill(self, py: Python<'_>, read: &VersionRead<'_>, report: &mut GetReport) -> Result<()> {
        fill_rounds(py, read, &split_into_rounds(self.targets), report)?;
        self.computations.iter().try_for_each(Computation::run)?;
        finish_fill(py, &self.staged, self.objects)
    }
}

/// Fills targets round by round, and adds to the counts of `report`.
fn fill_rounds(
    py: Python<'_>,
    read: &VersionRead<'_>,
    rounds: &[Vec<FillTarget>],
    report: &mut GetReport,
) -> Result<()> {
    py.detach(|| {
        for round in rounds {
            let mut targets: Vec<Target<'_>> = round.iter().map(store_target).collect();
            let round_report = read.fill(&mut targets)?;
            report.bytes_needed += round_report.bytes_needed;
            report.bytes_transferred += round_report.bytes_transferred;
            report.plan_seconds += round_report.plan_seconds;
        }
        Ok(())
    })
}

/// Copies staging tensors to the caller's tensors, and reports all filled tensors to torch's autograd.
fn finish_fill<'py>(
    py: Python<'py>,
    staged: &StagingPairs<'py>,
    objects: Vec<Bound<'py, PyAny>>,
) -> Result<()> {
    for (object, staged) in staged {
        if let Some(detach) = object.getattr_opt("detach")? {
            detach.call0()?.call_method1("copy_", (staged,))?;
        } else {
            let options = PyDict::new(py);
            options.set_item("casting", "unsafe")?;
            let copy = py.import("numpy")?.getattr("copyto")?;
            copy.call((object, staged), Some(&options))?;
        }
    }
    increment_versions(py, objects)
}

/// Reports filled tensors to torch's autograd.
fn increment_versions<'py>(py: Python<'py>, objects: Vec<Bound<'py, PyAny>>) -> Result<()> {
    if !objects.is_empty() {
        py.import("tssd._autograd")?.call_method1("increment_versions", (objects,))?;
    }
    Ok(())
}

/// Returns a batch with all tensors of a nested object.
fn collect_batch<'py>(
    into: &Bound<'py, PyAny>,
    importer: &mut TargetImporter<'py>,
) -> Result<Batch<'py>> {
    let leaves = LeafCollector::collect(importer, into)?;
    if let Some(wrapper) = leaves.wrappers.first() {
        return Err(BindingError::untyped_leaf(
            "a receiver cannot fill a tensor that wraps tensors",
            "get it with get_state_dict, or receive into its inner tensors",
        )
        .with_fqn(&wrapper.fqn)
        .into());
    }
    let mut batch = Batch::default();
    for leaf in leaves.tensors {
        if let Some(dtype) = leaf.dtype {
            batch.add(importer, &leaf, dtype, false)?;
        }
    }
    Ok(batch)
}

/// Returns the UUID of the GPU that all tensors are on. `None` if they are in the host's memory.
pub(crate) fn common_device(into: &Bound<'_, PyAny>) -> Result<Option<String>> {
    let mut importer = TargetImporter::new(into.py())?;
    let batch = collect_batch(into, &mut importer)?;
    // A tensor without elements is on no device.
    let targets = batch.targets.iter().filter(|target| target.meta.numel() > 0);
    let devices = targets.map(|target| target.window.as_ref().map(DeviceTarget::device));
    let mut devices: Vec<Option<String>> = devices.collect();
    devices.sort_unstable();
    devices.dedup();
    if devices.len() > 1 {
        let text = "what comes through a ring is on one GPU, or in the host's memory: `into` has tensors of several";
        return Err(BindingError::new("invalid", text).advice("make a receiver for each").into());
    }
    Ok(devices.pop().flatten())
}

/// Fills the tensors in a nested object with the next version of a ring.
pub(crate) fn receive(
    connection: &Connection,
    receiver: &mut Receiver,
    into: &Bound<'_, PyAny>,
    options: &GetOptions,
    timeout: Duration,
) -> Result<(ReceiveReport, Option<CopyStats>)> {
    let py = into.py();
    let mut importer = TargetImporter::new(py)?;
    let Batch { mut targets, objects, staged, .. } = collect_batch(into, &mut importer)?;
    // Tied tensors are filled once, under the first of their names.
    targets.sort_by_key(|target| (target.start, target.len));
    targets.dedup_by(|next, target| next.is_same_memory(target));
    let is_disjoint =
        |target: &FillTarget, next: &FillTarget| target.start + target.len <= next.start;
    if !targets.is_sorted_by(is_disjoint) {
        let text = "two tensors of `into` have bytes in common, and are not the same";
        return Err(BindingError::new("invalid", text).advice("receive into others").into());
    }
    let mut store_targets: Vec<Target<'_>> = targets.iter().map(store_target).collect();
    let report =
        connection.block_on(py, None, receiver.receive(&mut store_targets, options, timeout))?;
    drop(store_targets);
    finish_fill(py, &staged, objects)?;
    Ok((report, importer.devices().copy_stats().snapshot()))
}

/// A tensor to fill, or a box of it.
struct FillTarget {
    fqn: String,
    part: Option<ShardSpec>,
    meta: TensorMeta,
    /// The address. Addresses of GPU memory differ from those of the host's memory.
    start: usize,
    /// The length in bytes, gaps between elements included.
    len: usize,
    /// The memory, if it is on a GPU.
    window: Option<DeviceTarget>,
    /// Keeps the memory allocated.
    _tensor: Tensor,
}

impl FillTarget {
    fn new(fqn: String, devices: &DeviceRegions, tensor: Tensor, part: Option<ShardSpec>) -> Self {
        let meta = tensor.meta().clone();
        let window = devices.target(&tensor);
        let in_memory = "it is in memory";
        let start = match &window {
            Some(window) => usize::try_from(window.address).expect(in_memory),
            None => tensor.view().span().as_ptr().addr(),
        };
        let len = usize::try_from(meta.span_bytes()).expect(in_memory);
        Self { fqn, part, meta, start, len, window, _tensor: tensor }
    }

    /// Returns the part of a leaf that it is filled with.
    fn into_part(self) -> LeafPart {
        LeafPart { fqn: self.fqn, shard_spec: self.part }
    }

    /// Returns whether both are the same memory under the same fqn.
    fn is_same_target(&self, other: &Self) -> bool {
        self.fqn == other.fqn && self.is_same_memory(other)
    }

    /// Returns whether both are the same memory, under the same fqn or another.
    fn is_same_memory(&self, other: &Self) -> bool {
        self.start == other.start
            && self.meta == other.meta
            && self.part.as_ref().map(ShardSpec::slice) == other.part.as_ref().map(ShardSpec::slice)
    }
}

/// Splits targets into as few rounds as possible, so that no two targets of a round share a byte.
///
/// Rounds are filled one after the other. A target that occurs twice is filled once.
fn split_into_rounds(mut targets: Vec<FillTarget>) -> Vec<Vec<FillTarget>> {
    targets.sort_by_key(|target| target.start);
    let mut rounds: Vec<(usize, Vec<FillTarget>)> = Vec::new();
    for target in targets {
        let last_targets = rounds.iter().filter_map(|(_, round)| round.last());
        if last_targets.clone().any(|last| last.is_same_target(&target)) {
            continue;
        }
        let end = target.start + target.len;
        match rounds.iter_mut().find(|(last_end, _)| *last_end <= target.start) {
            Some((last_end, round)) => {
                *last_end = end;
                round.push(target);
            }
            None => rounds.push((end, vec![target])),
        }
    }
    rounds.into_iter().map(|(_, round)| round).collect()
}

fn store_target(target: &FillTarget) -> Target<'_> {
    let memory = if let Some(window) = &target.window {
        TargetMemory::Device(window)
    } else if target.len == 0 {
        TargetMemory::Host(&mut [])
    } else {
        let start = std::ptr::with_exposed_provenance_mut(target.start);
        // SAFETY: `TargetImporter` verified that the tensor has these bytes and may be written to, and `_tensor` keeps them
        // allocated. No two targets that are filled at the same time share a byte: `split_into_rounds` separates
        // them and rounds run one after the other, and `receive` rejects them. If Python accesses the tensor
        // meanwhile, that is a race in the caller's program, as with torch's own `copy_`.
        TargetMemory::Host(unsafe { std::slice::from_raw_parts_mut(start, target.len) })
    };
    Target {
        fqn: target.fqn.clone(),
        shard_spec: target.part.clone(),
        meta: target.meta.clone(),
        memory,
    }
}
