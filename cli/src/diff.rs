//! `tssd diff`: compares two state dicts.

mod elements;
mod storage_diff;
mod ties;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use serde_json::{Value as Json, json};
use tssd_format::{
    AttrValue, Container, ContentKind, MapKey, Node, ObjectPath, Step, TensorReference, abridge,
    abridge_name,
};

use crate::console::{Console, print, print_json};
use crate::diff::storage_diff::StorageDiff;
use crate::document::Document;
use crate::exit::Exit;
use crate::failure::Result;
use crate::model::Links;
use crate::size::{Size, pluralize};
use crate::value::{self, repr};

/// Compare two files (.tssd or .safetensors), shard sets or directories of models: structure, dtypes, shapes and values.
///
/// The directory of a Hugging Face model equals the archive that `tssd pack` makes of it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The one file; a directory with a manifest.tssd or a model; `-`: stdin
    a: PathBuf,
    /// The other file or directory; `-`: stdin
    b: PathBuf,
    /// The base of the other file, if that is a delta
    #[arg(long, value_name = "BASE")]
    base: Option<PathBuf>,
    /// Compare dtype, shape and values of each leaf only: not the nesting, the order, strides or flags
    #[arg(long)]
    values: bool,
    #[command(flatten)]
    links: Links,
}

/// Prints every difference. The exit code says whether there is one.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let open = |path: &Path| Document::open_with(path, args.links, None);
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let b = match &args.base {
        Some(base) => b.with_base(&open(base)?, console)?,
        None => b,
    };
    let Findings { differences, leaves, storage_diff } = compare(&a, &b, args.values, console)?;
    let equal = differences.is_empty();
    if console.json {
        let differences: Vec<Json> = differences.iter().map(Difference::json).collect();
        let json = json!({
            "equal": equal, "leaves_in_both": leaves, "differences": differences,
            "stored": storage_diff.json(),
        });
        print_json(&json)?;
    } else if !console.quiet {
        let width = differences
            .iter()
            .map(|each| abridge_name(&each.path).chars().count())
            .max()
            .unwrap_or(0);
        for each in &differences {
            print(format_args!("{}\n", each.line(width)))?;
        }
        let summary = if equal {
            let content = format!("{}, {}", pluralize(leaves, "leaf"), Size(a.file_len()));
            match storage_diff.describe() {
                Some(storage_diff) => {
                    format!("equal in meaning: {content}; stored otherwise: {storage_diff}")
                }
                None => format!("equal: {content}"),
            }
        } else {
            let common = pluralize(leaves, "leaf");
            format!("{}; {common} in both files", pluralize(differences.len(), "difference"))
        };
        print(format_args!("{summary}\n"))?;
    }
    Ok(if equal { Exit::Ok } else { Exit::Mismatch })
}

/// Result of a comparison.
pub(crate) struct Findings {
    /// Differences in meaning.
    pub(crate) differences: Vec<Difference>,
    /// Number of leaves that are in both files.
    leaves: u64,
    storage_diff: StorageDiff,
}

/// Compares two files leaf by leaf. Memory holds two leaves at a time.
pub(crate) fn compare(
    a: &Document,
    b: &Document,
    values_only: bool,
    console: Console,
) -> Result<Findings> {
    let (mut left, mut right) = (a.structure(), b.structure());
    if values_only {
        (left, right) = (flatten(left), flatten(right));
    }
    let mut comparison = Comparison {
        a,
        b,
        values_only,
        bar: console.bytes_bar("comparing", a.file_len()),
        differences: Vec::new(),
        leaves: 0,
        storage_diff: StorageDiff::from_archives(a.archive(), b.archive()),
        tensors: Vec::new(),
    };
    if !values_only {
        comparison.compare_attributes();
    }
    comparison.compare_nodes(&left, &right, &ObjectPath::root())?;
    if !values_only {
        comparison.compare_ties();
    }
    comparison.bar.finish_and_clear();
    let Comparison { differences, leaves, storage_diff, .. } = comparison;
    Ok(Findings { differences, leaves, storage_diff })
}

/// Flattens a tree into one dict of all leaves by fqn.
fn flatten(node: Node) -> Node {
    let leaves = node.into_leaves().into_iter();
    let leaves = leaves.map(|(path, leaf)| (Step::Key(MapKey::from(path.fqn())), leaf));
    Node::Container(Container::Dict, leaves.collect())
}

/// One difference between two files.
pub(crate) struct Difference {
    kind: &'static str,
    path: String,
    detail: String,
    elements: Option<elements::Delta>,
}

impl Difference {
    /// Returns the difference as one line. `width` is the width of the path column in characters.
    pub(crate) fn line(&self, width: usize) -> String {
        let detail = abridge(self.detail.as_str());
        format!("{:9}  {:width$}  {detail}", self.kind, abridge_name(&self.path))
    }

    fn json(&self) -> Json {
        let mut json = json!({ "what": self.kind, "leaf": self.path, "how": self.detail });
        if let Some(delta) = &self.elements {
            json["elements"] = json!(delta.differing);
            json["max_abs_difference"] = json!(delta.max_abs);
            json["max_ulp_difference"] = json!(delta.max_ulps);
        }
        json
    }
}

struct Comparison<'a> {
    a: &'a Document,
    b: &'a Document,
    values_only: bool,
    bar: ProgressBar,
    differences: Vec<Difference>,
    /// Number of leaves that are in both files.
    leaves: u64,
    storage_diff: StorageDiff,
    /// Path and references of the tensors with equal dtype and shape in both files, in the order of `a`.
    tensors: Vec<(String, TensorReference, TensorReference)>,
}

impl Comparison<'_> {
    fn add_difference(&mut self, kind: &'static str, path: &ObjectPath, detail: impl Into<String>) {
        let path = if path.steps().is_empty() { "(all)".into() } else { path.fqn() };
        self.differences.push(Difference { kind, path, detail: detail.into(), elements: None });
    }

    /// Compares the attributes of the files.
    fn compare_attributes(&mut self) {
        let (a, b) = if self.a.is_shard_set() || self.b.is_shard_set() {
            (self.a.attrs_without_version(), self.b.attrs_without_version())
        } else {
            (self.a.attrs(), self.b.attrs())
        };
        let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for name in names.into_iter().filter(|name| a.get(*name) != b.get(*name)) {
            let display = |value: Option<&AttrValue>| {
                value.map_or_else(|| "nothing".into(), value::attr_repr)
            };
            let detail = format!("{} -> {}", display(a.get(name)), display(b.get(name)));
            let path = format!("(attribute) {name}");
            self.differences.push(Difference { kind: "value", path, detail, elements: None });
        }
    }

    fn compare_nodes(&mut self, a: &Node, b: &Node, path: &ObjectPath) -> Result<()> {
        match (a, b) {
            (Node::Container(kind, children), Node::Container(other_kind, other_children)) => {
                if kind != other_kind {
                    self.add_difference(
                        "type",
                        path,
                        format!("{} -> {}", describe(a), describe(b)),
                    );
                }
                return self.compare_children(children, other_children, path);
            }
            (Node::Tensors(a), Node::Tensors(b)) => {
                self.leaves += 1;
                return self.compare_shards(a, b, path);
            }
            _ => {}
        }
        self.leaves += 1;
        if let (Node::StoredLeaf(_, one), Node::StoredLeaf(_, other)) = (a, b) {
            self.compare_storages(*one, *other);
        }
        let equal = match (a, b) {
            (Node::Leaf(a), Node::Leaf(b)) => a == b,
            (Node::StoredLeaf(a, one), Node::StoredLeaf(b, other)) => {
                a == b && self.a.storage(*one)? == self.b.storage(*other)?
            }
            _ => false,
        };
        if !equal {
            self.add_difference("value", path, format!("{} -> {}", describe(a), describe(b)));
        }
        Ok(())
    }

    /// Counts how the files store one leaf differently.
    fn compare_storages(&mut self, one: u32, other: u32) {
        if let (Some(a), Some(b)) = (self.a.archive(), self.b.archive()) {
            self.storage_diff.count(&a.storage(one), &b.storage(other));
        }
    }

    /// Finds tensors that share bytes in one file, but not in the same way in the other.
    fn compare_ties(&mut self) {
        let tensors = std::mem::take(&mut self.tensors);
        let a = ties::groups(&tensors.iter().map(|(_, a, _)| a).collect::<Vec<_>>());
        let b = ties::groups(&tensors.iter().map(|(.., b)| b).collect::<Vec<_>>());
        for (at, (path, ..)) in tensors.iter().enumerate().filter(|(at, _)| a[*at] != b[*at]) {
            let [a, b] =
                [a[at], b[at]].map(|(first, distance)| match (&tensors[first].0, distance) {
                    _ if first == at => "bytes of its own".to_owned(),
                    (first, 0) => format!("tied to {first}"),
                    (first, distance) => format!("tied to {first}, {distance} bytes further"),
                });
            let (path, detail) = (path.clone(), format!("{a} -> {b}"));
            self.differences.push(Difference { kind: "ties", path, detail, elements: None });
        }
    }

    fn compare_children(
        &mut self,
        left_children: &[(Step, Node)],
        right_children: &[(Step, Node)],
        path: &ObjectPath,
    ) -> Result<()> {
        let right_by_step: BTreeMap<&Step, (usize, &Node)> = right_children
            .iter()
            .enumerate()
            .map(|(position, (step, node))| (step, (position, node)))
            .collect();
        let mut last_position = None;
        let mut in_order = true;
        for (step, child) in left_children {
            let path = path.clone().step(step.clone());
            let Some((position, other)) = right_by_step.get(step) else {
                self.add_difference("only in A", &path, describe(child));
                continue;
            };
            in_order &= last_position < Some(*position);
            last_position = Some(*position);
            self.compare_nodes(child, other, &path)?;
        }
        let left_steps: BTreeSet<&Step> = left_children.iter().map(|(step, _)| step).collect();
        for (step, other) in right_children {
            if !left_steps.contains(step) {
                self.add_difference("only in B", &path.clone().step(step.clone()), describe(other));
            }
        }
        if !in_order && !self.values_only {
            self.add_difference("order", path, "the same keys, in another order");
        }
        Ok(())
    }

    fn compare_shards(
        &mut self,
        a: &[TensorReference],
        b: &[TensorReference],
        path: &ObjectPath,
    ) -> Result<()> {
        if a.len() != b.len() {
            self.add_difference("shards", path, format!("{} -> {}", a.len(), b.len()));
            return Ok(());
        }
        for (a, b) in a.iter().zip(b) {
            self.compare_tensor(a, b, path)?;
        }
        Ok(())
    }

    fn compare_tensor(
        &mut self,
        a: &TensorReference,
        b: &TensorReference,
        path: &ObjectPath,
    ) -> Result<()> {
        self.bar.inc(a.meta.span_bytes());
        if a.meta.dtype() != b.meta.dtype() {
            let detail = format!("{} -> {}", a.meta.dtype(), b.meta.dtype());
            self.add_difference("dtype", path, detail);
        }
        if a.meta.shape() != b.meta.shape() {
            self.add_difference(
                "shape",
                path,
                format!("{:?} -> {:?}", a.meta.shape(), b.meta.shape()),
            );
        }
        if a.meta.dtype() != b.meta.dtype() || a.meta.shape() != b.meta.shape() {
            return Ok(());
        }
        if let (Some(one), Some(other)) = (a.storage, b.storage) {
            self.compare_storages(one, other);
        }
        self.tensors.push((path.fqn(), a.clone(), b.clone()));
        if a.shard_spec != b.shard_spec {
            let region_of = |tensor: &TensorReference| {
                let region =
                    tensor.shard_spec.as_ref().map(|place| place.slice().region().to_string());
                region.unwrap_or_else(|| "whole".into())
            };
            self.add_difference("slice", path, format!("{} -> {}", region_of(a), region_of(b)));
        }
        if !self.values_only && a.meta.strides() != b.meta.strides() {
            let detail = format!("{:?} -> {:?}", a.meta.strides(), b.meta.strides());
            self.add_difference("strides", path, detail);
        }
        if !self.values_only && a.meta.flags() != b.meta.flags() {
            self.add_difference("flags", path, "the same tensor as another kind of object");
        }
        let (left, right) = (self.a.tensor(a)?, self.b.tensor(b)?);
        let (left, right) = (left.view(), right.view());
        if left.elements_equal(&right) {
            return Ok(());
        }
        let delta = elements::compare(&left, &right);
        let detail = delta.describe(a.meta.numel());
        self.add_difference("values", path, detail);
        if let Some(last) = self.differences.last_mut() {
            last.elements = Some(delta);
        }
        Ok(())
    }
}

fn describe(node: &Node) -> String {
    match node {
        Node::Leaf(value) => {
            let (kind, text) = repr(value);
            format!("{kind} {text}").trim_end().to_owned()
        }
        Node::StoredLeaf(ContentKind::Str, _) => "a long str".into(),
        Node::StoredLeaf(ContentKind::Bytes, _) => "long bytes".into(),
        Node::StoredLeaf(ContentKind::Opaque(media), _) => format!("opaque {media}"),
        Node::Tensors(shards) => match shards.as_slice() {
            [only] => format!("{} {:?}", only.meta.dtype(), only.meta.shape()),
            shards => format!("{} shards", shards.len()),
        },
        Node::Distributed(tensor) => {
            format!("{} {:?}, distributed", tensor.meta.dtype(), tensor.global_shape())
        }
        Node::Container(container, children) => {
            let kind = match container {
                Container::Dict => "dict",
                Container::OrderedDict => "ordered dict",
                Container::List => "list",
                Container::Tuple => "tuple",
                Container::NamedTuple(name) => return format!("namedtuple {name}"),
                Container::Divergent => "divergent",
                Container::Tagged(tag) => tag.class().name(),
            };
            format!("{kind} of {}", children.len())
        }
    }
}
