//! `tssd diff`: how two files differ.

mod elements;
mod storing;
mod ties;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use indicatif::ProgressBar;
use serde_json::{Value as Json, json};
use tssd_format::{AttrValue, Container, Key, Node, ObjectPath, Step, Stored, TensorReference};

use self::storing::Storing;
use crate::console::{Console, print, print_json};
use crate::document::Document;
use crate::exit::Exit;
use crate::failure::Result;
use crate::size::{Size, count};
use crate::value::{self, repr};

/// Compare two files (.tssd or .safetensors) or shard sets: structure, dtypes, shapes and values.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The one file; `-`: stdin
    a: PathBuf,
    /// The other file; `-`: stdin
    b: PathBuf,
    /// Compare dtype, shape and values of each leaf only: not the nesting, the order, strides or flags
    #[arg(long)]
    values: bool,
}

/// Says every difference; the exit code says whether there is one.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let (a, b) = (Document::open(&args.a)?, Document::open(&args.b)?);
    let Findings { found, leaves, stored } = compare(&a, &b, args.values, console)?;
    let equal = found.is_empty();
    if console.json {
        let differences: Vec<Json> = found.iter().map(Difference::json).collect();
        let json = json!({ "equal": equal, "leaves_in_both": leaves, "differences": differences, "stored": stored.json() });
        print_json(&json)?;
    } else if !console.quiet {
        let width = found.iter().map(|each| each.path.chars().count()).max().unwrap_or(0);
        for each in &found {
            print(format_args!("{}\n", each.line(width)))?;
        }
        let summary = if equal {
            let what = format!("{}, {}", count(leaves, "leaf"), Size(a.file_len()));
            match stored.describe() {
                Some(stored) => format!("equal in meaning: {what}; stored otherwise: {stored}"),
                None => format!("equal: {what}"),
            }
        } else {
            let common = count(leaves, "leaf");
            format!("{}; {common} in both files", count(found.len(), "difference"))
        };
        print(format_args!("{summary}\n"))?;
    }
    Ok(if equal { Exit::Ok } else { Exit::Differs })
}

/// What a comparison has found.
pub(crate) struct Findings {
    /// All ways in which the files do not mean the same.
    pub(crate) found: Vec<Difference>,
    /// How many leaves are in both files.
    leaves: u64,
    stored: Storing,
}

/// Compares two files leaf by leaf, so that memory holds two of them at a time.
pub(crate) fn compare(
    a: &Document,
    b: &Document,
    values_only: bool,
    console: Console,
) -> Result<Findings> {
    let (mut left, mut right) = (a.structure(), b.structure());
    if values_only {
        (left, right) = (flat(left), flat(right));
    }
    let mut comparison = Comparison {
        a,
        b,
        values_only,
        bar: console.bytes_bar("comparing", a.file_len()),
        found: Vec::new(),
        leaves: 0,
        stored: Storing::of(a.archive(), b.archive()),
        tensors: Vec::new(),
    };
    if !values_only {
        comparison.attributes();
    }
    comparison.nodes(&left, &right, &ObjectPath::root())?;
    if !values_only {
        comparison.ties();
    }
    comparison.bar.finish_and_clear();
    let Comparison { found, leaves, stored, .. } = comparison;
    Ok(Findings { found, leaves, stored })
}

/// All leaves by fqn, side by side.
fn flat(node: Node) -> Node {
    let leaves = node.into_leaves().into_iter();
    let leaves = leaves.map(|(path, leaf)| (Step::Key(Key::from(path.fqn())), leaf));
    Node::Container(Container::Dict, leaves.collect())
}

/// One way in which the files differ.
pub(crate) struct Difference {
    what: &'static str,
    path: String,
    how: String,
    elements: Option<elements::Delta>,
}

impl Difference {
    /// The same on one line.
    pub(crate) fn line(&self, width: usize) -> String {
        format!("{:9}  {:width$}  {}", self.what, self.path, self.how)
    }

    fn json(&self) -> Json {
        let mut json = json!({ "what": self.what, "leaf": self.path, "how": self.how });
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
    found: Vec<Difference>,
    /// How many are in both files.
    leaves: u64,
    stored: Storing,
    /// The tensors that both files have alike, in the order of the first.
    tensors: Vec<(String, TensorReference, TensorReference)>,
}

impl Comparison<'_> {
    fn differ(&mut self, what: &'static str, path: &ObjectPath, how: impl Into<String>) {
        let path = if path.steps().is_empty() { "(all)".into() } else { path.fqn() };
        self.found.push(Difference { what, path, how: how.into(), elements: None });
    }

    /// What is said of the files as wholes.
    fn attributes(&mut self) {
        let (a, b) = if self.a.is_set() || self.b.is_set() {
            (self.a.own_attrs(), self.b.own_attrs())
        } else {
            (self.a.attrs(), self.b.attrs())
        };
        let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for name in names.into_iter().filter(|name| a.get(*name) != b.get(*name)) {
            let shown =
                |value: Option<&AttrValue>| value.map_or_else(|| "nothing".into(), value::of_attr);
            let how = format!("{} -> {}", shown(a.get(name)), shown(b.get(name)));
            let path = format!("(attribute) {name}");
            self.found.push(Difference { what: "value", path, how, elements: None });
        }
    }

    fn nodes(&mut self, a: &Node, b: &Node, path: &ObjectPath) -> Result<()> {
        match (a, b) {
            (Node::Container(kind, children), Node::Container(other, others)) => {
                if kind != other {
                    self.differ("type", path, format!("{} -> {}", describe(a), describe(b)));
                }
                return self.children(children, others, path);
            }
            (Node::Tensors(a), Node::Tensors(b)) => {
                self.leaves += 1;
                return self.tensors(a, b, path);
            }
            _ => {}
        }
        self.leaves += 1;
        if let (Node::Stored(_, one), Node::Stored(_, other)) = (a, b) {
            self.storages(*one, *other);
        }
        let equal = match (a, b) {
            (Node::Leaf(a), Node::Leaf(b)) => a == b,
            (Node::Stored(a, one), Node::Stored(b, other)) => {
                a == b && self.a.storage(*one)? == self.b.storage(*other)?
            }
            _ => false,
        };
        if !equal {
            self.differ("value", path, format!("{} -> {}", describe(a), describe(b)));
        }
        Ok(())
    }

    /// How both files store one leaf.
    fn storages(&mut self, one: u32, other: u32) {
        if let (Some(a), Some(b)) = (self.a.archive(), self.b.archive()) {
            self.stored.count(&a.storage(one), &b.storage(other));
        }
    }

    /// Tensors that share bytes in one file, and not in the same way in the other.
    fn ties(&mut self) {
        let tensors = std::mem::take(&mut self.tensors);
        let a = ties::groups(&tensors.iter().map(|(_, a, _)| a).collect::<Vec<_>>());
        let b = ties::groups(&tensors.iter().map(|(.., b)| b).collect::<Vec<_>>());
        for (at, (path, ..)) in tensors.iter().enumerate().filter(|(at, _)| a[*at] != b[*at]) {
            let [a, b] = [a[at], b[at]].map(|(first, apart)| match (&tensors[first].0, apart) {
                _ if first == at => "bytes of its own".to_owned(),
                (first, 0) => format!("tied to {first}"),
                (first, apart) => format!("tied to {first}, {apart} bytes further"),
            });
            let (path, how) = (path.clone(), format!("{a} -> {b}"));
            self.found.push(Difference { what: "ties", path, how, elements: None });
        }
    }

    fn children(
        &mut self,
        children: &[(Step, Node)],
        others: &[(Step, Node)],
        path: &ObjectPath,
    ) -> Result<()> {
        let by_step: BTreeMap<&Step, (usize, &Node)> =
            others.iter().enumerate().map(|(place, (step, node))| (step, (place, node))).collect();
        let mut last = None;
        let mut in_order = true;
        for (step, child) in children {
            let path = path.clone().step(step.clone());
            let Some((place, other)) = by_step.get(step) else {
                self.differ("only in A", &path, describe(child));
                continue;
            };
            in_order &= last < Some(*place);
            last = Some(*place);
            self.nodes(child, other, &path)?;
        }
        let own: BTreeSet<&Step> = children.iter().map(|(step, _)| step).collect();
        for (step, other) in others {
            if !own.contains(step) {
                self.differ("only in B", &path.clone().step(step.clone()), describe(other));
            }
        }
        if !in_order && !self.values_only {
            self.differ("order", path, "the same keys, in another order");
        }
        Ok(())
    }

    fn tensors(
        &mut self,
        a: &[TensorReference],
        b: &[TensorReference],
        path: &ObjectPath,
    ) -> Result<()> {
        if a.len() != b.len() {
            self.differ("shards", path, format!("{} -> {}", a.len(), b.len()));
            return Ok(());
        }
        for (a, b) in a.iter().zip(b) {
            self.tensor(a, b, path)?;
        }
        Ok(())
    }

    fn tensor(
        &mut self,
        a: &TensorReference,
        b: &TensorReference,
        path: &ObjectPath,
    ) -> Result<()> {
        self.bar.inc(a.meta.span_bytes());
        if a.meta.dtype() != b.meta.dtype() {
            let how = format!("{} -> {}", a.meta.dtype(), b.meta.dtype());
            self.differ("dtype", path, how);
        }
        if a.meta.shape() != b.meta.shape() {
            self.differ("shape", path, format!("{:?} -> {:?}", a.meta.shape(), b.meta.shape()));
        }
        if a.meta.dtype() != b.meta.dtype() || a.meta.shape() != b.meta.shape() {
            return Ok(());
        }
        if let (Some(one), Some(other)) = (a.storage, b.storage) {
            self.storages(one, other);
        }
        self.tensors.push((path.fqn(), a.clone(), b.clone()));
        if a.place != b.place {
            let box_of = |each: &TensorReference| {
                let region = each.place.as_ref().map(|place| place.slice().region().to_string());
                region.unwrap_or_else(|| "whole".into())
            };
            self.differ("slice", path, format!("{} -> {}", box_of(a), box_of(b)));
        }
        if !self.values_only && a.meta.strides() != b.meta.strides() {
            let how = format!("{:?} -> {:?}", a.meta.strides(), b.meta.strides());
            self.differ("strides", path, how);
        }
        if !self.values_only && a.meta.flags() != b.meta.flags() {
            self.differ("flags", path, "the same tensor as another kind of object");
        }
        let (left, right) = (self.a.tensor(a)?, self.b.tensor(b)?);
        let (left, right) = (left.view(), right.view());
        if left.elements_equal(&right) {
            return Ok(());
        }
        let delta = elements::compare(&left, &right);
        let how = delta.describe(a.meta.numel());
        self.differ("values", path, how);
        if let Some(last) = self.found.last_mut() {
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
        Node::Stored(Stored::Str, _) => "a long str".into(),
        Node::Stored(Stored::Bytes, _) => "long bytes".into(),
        Node::Stored(Stored::Opaque(media), _) => format!("opaque {media}"),
        Node::Tensors(run) => match run.as_slice() {
            [only] => format!("{} {:?}", only.meta.dtype(), only.meta.shape()),
            run => format!("{} shards", run.len()),
        },
        Node::Container(container, children) => {
            let kind = match container {
                Container::Dict => "dict",
                Container::OrderedDict => "ordered dict",
                Container::List => "list",
                Container::Tuple => "tuple",
                Container::NamedTuple(name) => return format!("namedtuple {name}"),
                Container::Divergent => "divergent",
            };
            format!("{kind} of {}", children.len())
        }
    }
}
