//! The caller's own tensors, which a get fills.
#![expect(unsafe_code, reason = "the memory of tensors belongs to Python")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use tssd_format::{
    Container, Dtype, Key, MAX_DEPTH, Node, ObjectPath, ShardPlace, Step, Stored, Tensor,
    TensorFlags, TensorMeta, Value,
};
use tssd_store::{
    Copied, GetOptions, GetReport, Opened, ReceiveReport, Receiver, Target, TargetMemory,
};

use super::connected::{Connected, Patience};
use super::version::{Reading, Version, global_shape};
use crate::device::{Devices, Window};
use crate::error::{Failure, Refusal, Result};
use crate::local::is_floating;
use crate::object::{Framework, Maker};
use crate::value::{Lender, Staged, fields_of, key_of};

/// So many bytes, about, are filled in place of others at a time.
const STAGED_BYTES: u64 = 512 << 20;

/// What a caller allows.
#[derive(Clone, Copy)]
pub(crate) struct Allowed {
    /// Whether `into` and the version have the same tensors.
    pub(crate) strict: bool,
    /// Whether floating dtypes may differ.
    pub(crate) cast: bool,
    /// Whether what was pickled is unpickled.
    pub(crate) pickle: bool,
}

/// What was found to differ, and was allowed.
#[derive(Default)]
pub(crate) struct Differences {
    /// In `into`, and not stored.
    pub(crate) missing: Vec<String>,
    /// Stored, and not in `into`.
    pub(crate) unexpected: Vec<String>,
    /// Of another dtype.
    pub(crate) cast: Vec<String>,
}

/// What filling tensors has done.
pub(crate) struct Filled {
    pub(crate) report: GetReport,
    /// How bytes went to devices.
    pub(crate) copied: Option<Copied>,
}

/// A tensor in `into`.
struct Leaf<'py> {
    fqn: String,
    object: Bound<'py, PyAny>,
    /// None if there is nothing to fill.
    dtype: Option<Dtype>,
    shape: Vec<u64>,
}

/// Where in `into` something is that is no tensor.
struct Slot<'py> {
    fqn: String,
    /// A dict or a list: in a tuple nothing can be put.
    container: Bound<'py, PyAny>,
    key: Bound<'py, PyAny>,
}

/// The leaves in a nested object.
struct Leaves<'a, 'py> {
    lender: &'a Lender<'py>,
    path: Vec<Step>,
    found: Vec<Leaf<'py>>,
    slots: Vec<Slot<'py>>,
}

/// What a leaf is in, and where.
type Around<'a, 'py> = Option<(&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>)>;

impl<'a, 'py> Leaves<'a, 'py> {
    fn of(lender: &'a Lender<'py>, into: &Bound<'py, PyAny>) -> Result<Self> {
        let mut leaves = Self { lender, path: Vec::new(), found: Vec::new(), slots: Vec::new() };
        leaves.gather(into, None)?;
        Ok(leaves)
    }

    fn gather(&mut self, object: &Bound<'py, PyAny>, around: Around<'_, 'py>) -> Result<()> {
        if self.path.len() > MAX_DEPTH {
            return Err(Refusal::leaf("`into` is nested too deeply", "make it flatter").into());
        }
        if let Ok(dict) = object.cast::<PyDict>() {
            for item in dict.items().iter() {
                let (name, value) = (item.get_item(0)?, item.get_item(1)?);
                let key: Key = key_of(&name, MAX_DEPTH).map_err(|error| error.at(&self.here()))?;
                self.child(Step::Key(key), &value, Some((object, &name)))?;
            }
            return Ok(());
        }
        if let Some(fields) = fields_of(object)? {
            let values = object.cast::<PyTuple>()?;
            for (field, value) in fields.into_iter().zip(values.iter()) {
                self.child(Step::Key(Key::Str(field)), &value, None)?;
            }
            return Ok(());
        }
        if let Ok(list) = object.cast::<PyList>() {
            for (index, item) in (0_u32..).zip(list.to_tuple().iter()) {
                let place = index.into_pyobject(object.py()).map_err(PyErr::from)?.into_any();
                self.child(Step::Index(index), &item, Some((object, &place)))?;
            }
            return Ok(());
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            for (index, item) in (0..).zip(tuple.iter()) {
                self.child(Step::Index(index), &item, None)?;
            }
            return Ok(());
        }
        self.leaf(object, around).map_err(|error| error.at(&self.here()))
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>, around: Around<'_, 'py>) -> Result<()> {
        let (found, fqn) = (self.lender.look(object)?, || self.here().fqn());
        match (found, around) {
            (Some((dtype, shape)), _) => {
                let leaf = Leaf { fqn: fqn(), object: object.clone(), dtype, shape };
                self.found.push(leaf);
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

    fn child(
        &mut self,
        step: Step,
        object: &Bound<'py, PyAny>,
        around: Around<'_, 'py>,
    ) -> Result<()> {
        self.path.push(step);
        self.gather(object, around)?;
        self.path.pop();
        Ok(())
    }

    fn here(&self) -> ObjectPath {
        self.path.iter().cloned().collect()
    }
}

/// Fills the tensors in a nested object, by their fqns. Other leaves that are in a dict or a list are replaced by those
/// that are stored.
///
/// Everything that does not fit is found before the first byte of a tensor is written.
pub(crate) fn fill_all(
    own: &Connected,
    opened: &Opened,
    into: &Bound<'_, PyAny>,
    allowed: Allowed,
    (timeout, patience): (Option<f64>, &Patience),
) -> Result<(Filled, Differences)> {
    let py = into.py();
    let mut lender = Lender::new(py)?;
    let Leaves { found, slots, .. } = Leaves::of(&lender, into)?;
    let stored = opened.leaves().iter().map(|(path, node)| (path.fqn(), node)).collect();
    let (leaves, differences) = compare(found, &stored, allowed)?;
    let plain = slots.iter().filter_map(|slot| {
        let node = stored.get(&slot.fqn).filter(|node| is_plain(node, allowed.pickle))?;
        Some((Step::Key(Key::Str(slot.fqn.as_str().into())), Node::clone(node)))
    });
    let reading = Reading { timeout, ..Reading::default() };
    let values = values(py, (own, opened), plain.collect(), reading, allowed.pickle)?;
    let filled = fill_leaves(py, own, opened, patience, &mut lender, leaves)?;
    for Slot { fqn, container, key } in slots {
        if let Some(value) = values.get_item(fqn)? {
            container.set_item(key, value)?;
        }
    }
    Ok((filled, differences))
}

/// Leaves that are no tensors, by fqn.
fn values<'py>(
    py: Python<'py>,
    (own, opened): (&Connected, &Opened),
    leaves: Vec<(Step, Node)>,
    reading: Reading,
    allow_pickle: bool,
) -> Result<Bound<'py, PyDict>> {
    if leaves.is_empty() {
        return Ok(PyDict::new(py));
    }
    let root = Arc::new(Node::Container(Container::Dict, leaves));
    let version = Version::read(py, own, opened, root, reading)?;
    // What only torch has, torch is asked for.
    let maker = Maker::new(py, &version, &version, Framework::Numpy).allow_pickle(allow_pickle);
    Ok(maker.state_dict()?.cast_into()?)
}

/// Whether a stored leaf is no tensor, and may be read.
fn is_plain(node: &Node, allow_pickle: bool) -> bool {
    match node {
        Node::Leaf(Value::Opaque { .. }) | Node::Stored(Stored::Opaque(_), _) => allow_pickle,
        Node::Leaf(_) | Node::Stored(..) => true,
        Node::Tensors(_) => !is_tensor(node),
        Node::Container(..) => false,
    }
}

/// Fills one tensor.
pub(crate) fn fill_one(
    own: &Connected,
    opened: &Opened,
    into: &Bound<'_, PyAny>,
    fqn: &str,
    patience: &Patience,
) -> Result<()> {
    let mut lender = Lender::new(into.py())?;
    let (dtype, shape) = lender.look(into)?.ok_or_else(|| {
        Refusal::leaf("`into` is no tensor", "give a tensor, a TensorShard or an array")
    })?;
    let (_, node) = opened.leaf(fqn)?;
    if !matches!(node, Node::Tensors(_)) {
        return Err(Refusal::new("WrongType", format!("`{fqn}` is no tensor")).into());
    }
    let leaf = Leaf { fqn: fqn.to_owned(), object: into.clone(), dtype, shape };
    let stored = BTreeMap::from([(fqn.to_owned(), &node)]);
    let (leaves, _) =
        compare(vec![leaf], &stored, Allowed { strict: false, cast: false, pickle: false })?;
    fill_leaves(into.py(), own, opened, patience, &mut lender, leaves)?;
    Ok(())
}

/// Whether a leaf is a tensor that can be filled: a scalar of numpy is none.
fn is_tensor(node: &Node) -> bool {
    let Node::Tensors(run) = node else { return false };
    !run[0].meta.flags().contains(TensorFlags::SCALAR)
}

/// The leaves that are stored, each with the dtype that it is stored as.
type Compared<'py> = (Vec<(Leaf<'py>, Dtype)>, Differences);

/// Finds all that differs; it is one error unless it is allowed.
fn compare<'py>(
    leaves: Vec<Leaf<'py>>,
    stored: &BTreeMap<String, &Node>,
    allowed: Allowed,
) -> Result<Compared<'py>> {
    let mut differences = Differences::default();
    let mut wrong: Vec<(&str, &'static str, String)> = Vec::new();
    let mut kept = Vec::with_capacity(leaves.len());
    let mut wanted = BTreeSet::new();
    for leaf in &leaves {
        wanted.insert(leaf.fqn.as_str());
        let Some(Node::Tensors(run)) = stored.get(&leaf.fqn) else {
            differences.missing.push(leaf.fqn.clone());
            let text = format!("`{}` is not stored", leaf.fqn);
            // Where nobody had anything of it, it is not stored.
            if allowed.strict && leaf.dtype.is_some() {
                wrong.push((&leaf.fqn, "NotFound", text));
            }
            continue;
        };
        let (dtype, shape) = (run[0].meta.dtype(), global_shape(run));
        if shape != leaf.shape {
            let text = format!("`{}` has shape {:?}, stored {shape:?}", leaf.fqn, leaf.shape);
            wrong.push((&leaf.fqn, "SliceMismatch", text));
        } else if let Some(own) = leaf.dtype
            && own != dtype
        {
            differences.cast.push(leaf.fqn.clone());
            if !(allowed.cast && is_floating(dtype) && is_floating(own)) {
                let text = format!("`{}` is {own}, stored {dtype}", leaf.fqn);
                wrong.push((&leaf.fqn, "WrongType", text));
            }
        }
        kept.push(dtype);
    }
    for (fqn, node) in stored {
        if is_tensor(node) && !wanted.contains(fqn.as_str()) {
            differences.unexpected.push(fqn.clone());
            if allowed.strict {
                wrong.push((fqn, "invalid", format!("`{fqn}` is stored and not in `into`")));
            }
        }
    }
    if let Some(first) = wrong.first() {
        return Err(differs(first.0, &wrong, allowed).into());
    }
    let missing = std::mem::take(&mut differences.missing);
    let absent: BTreeSet<&str> = missing.iter().map(String::as_str).collect();
    let is_stored = |leaf: &Leaf<'_>| !absent.contains(leaf.fqn.as_str());
    let leaves = leaves.into_iter().filter(is_stored).zip(kept).collect();
    Ok((leaves, Differences { missing, ..differences }))
}

/// How many differences an error shows.
const SHOWN: usize = 10;

fn differs(fqn: &str, wrong: &[(&str, &'static str, String)], allowed: Allowed) -> Refusal {
    let mut shown: Vec<&str> = wrong.iter().take(SHOWN).map(|(.., text)| text.as_str()).collect();
    let others = format!("and {} more", wrong.len().saturating_sub(SHOWN));
    if wrong.len() > SHOWN {
        shown.push(&others);
    }
    // One kind of difference is its own kind of error; several are a wrong value.
    let kind = match wrong {
        [(_, first, _), rest @ ..] if rest.iter().all(|(_, kind, _)| kind == first) => first,
        _ => "invalid",
    };
    let has = |kind: &str| wrong.iter().any(|(_, other, _)| *other == kind);
    let advice = if has("SliceMismatch") {
        "give tensors of the stored shapes"
    } else if has("WrongType") && !allowed.cast {
        "give tensors of the stored dtypes; with cast=True get_state_dict converts floats"
    } else if has("WrongType") {
        "give tensors of the stored dtypes: only floats are converted"
    } else {
        "say strict=False to fill what both have"
    };
    Refusal::new(kind, shown.join("; ")).advice(advice).of(fqn)
}

/// Tensors that are filled in one go.
#[derive(Default)]
struct Batch<'py> {
    places: Vec<Place>,
    /// What they are places of.
    objects: Vec<Bound<'py, PyAny>>,
    staged: Staged<'py>,
    staged_bytes: u64,
}

impl<'py> Batch<'py> {
    /// One more, lent as what is stored.
    fn add(&mut self, lender: &mut Lender<'py>, leaf: Leaf<'py>, stored: Dtype) -> Result<()> {
        let lent = lender.lend(&leaf.object, stored);
        let (lent, staged) = lent.map_err(|error| error.of(&leaf.fqn))?;
        if !staged.is_empty() {
            let bytes = lent.iter().map(|(tensor, _)| tensor.meta().nbytes());
            self.staged_bytes += bytes.sum::<u64>();
        }
        self.staged.extend(staged);
        self.objects.push(leaf.object);
        let devices = lender.devices();
        let place = |(tensor, part)| Place::new(leaf.fqn.clone(), devices, tensor, part);
        self.places.extend(lent.into_iter().map(place));
        Ok(())
    }
}

fn fill_leaves<'py>(
    py: Python<'py>,
    own: &Connected,
    opened: &Opened,
    patience: &Patience,
    lender: &mut Lender<'py>,
    leaves: Vec<(Leaf<'py>, Dtype)>,
) -> Result<Filled> {
    let mut report = opened.report();
    let mut batch = Batch::default();
    for (leaf, stored) in leaves {
        batch.add(lender, leaf, stored)?;
        if batch.staged_bytes >= STAGED_BYTES {
            std::mem::take(&mut batch).fill(py, own, opened, patience, &mut report)?;
            lender.devices().release();
        }
    }
    batch.fill(py, own, opened, patience, &mut report)?;
    let last = opened.report();
    (report.bytes_received, report.bytes_verified) = (last.bytes_received, last.bytes_verified);
    report.seconds = last.seconds;
    Ok(Filled { report, copied: lender.devices().copies().copied() })
}

impl Batch<'_> {
    fn fill(
        self,
        py: Python<'_>,
        own: &Connected,
        opened: &Opened,
        patience: &Patience,
        report: &mut GetReport,
    ) -> Result<()> {
        let rounds = rounds(self.places);
        py.detach(|| {
            for round in &rounds {
                let mut targets: Vec<Target<'_>> = round.iter().map(target).collect();
                let filled = own.fill(opened, &mut targets, patience)?;
                report.bytes_needed += filled.bytes_needed;
                report.bytes_transferred += filled.bytes_transferred;
                report.plan_seconds += filled.plan_seconds;
            }
            Ok::<_, Failure>(())
        })?;
        filled(py, &self.staged, self.objects)
    }
}

/// What was filled in place of the caller's tensors goes there, and torch is told of all that was.
fn filled<'py>(
    py: Python<'py>,
    staged: &Staged<'py>,
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
    py.import("tssd._autograd")?.call_method1("filled", (objects,))?;
    Ok(())
}

/// The tensors of a nested object, lent.
fn lend_all<'py>(into: &Bound<'py, PyAny>, lender: &mut Lender<'py>) -> Result<Batch<'py>> {
    let leaves = Leaves::of(lender, into)?;
    let mut batch = Batch::default();
    for leaf in leaves.found {
        if let Some(dtype) = leaf.dtype {
            batch.add(lender, leaf, dtype)?;
        }
    }
    Ok(batch)
}

/// The GPU that tensors are on; none if they are in the host's memory.
pub(crate) fn device_of(into: &Bound<'_, PyAny>) -> Result<Option<String>> {
    let mut lender = Lender::new(into.py())?;
    let batch = lend_all(into, &mut lender)?;
    // What has no elements is nowhere.
    let places = batch.places.iter().filter(|place| place.meta.numel() > 0);
    let devices = places.map(|place| place.window.as_ref().map(Window::device));
    let mut devices: Vec<Option<String>> = devices.collect();
    devices.sort_unstable();
    devices.dedup();
    if devices.len() > 1 {
        let text = "what comes through a ring is on one GPU, or in the host's memory: `into` has tensors of several";
        return Err(Refusal::new("invalid", text).advice("make a receiver for each").into());
    }
    Ok(devices.pop().flatten())
}

/// Fills the tensors in a nested object with the next version of a ring.
pub(crate) fn receive(
    own: &Connected,
    receiver: &mut Receiver,
    into: &Bound<'_, PyAny>,
    (options, patience): (&GetOptions, Duration),
) -> Result<(ReceiveReport, Option<Copied>)> {
    let py = into.py();
    let mut lender = Lender::new(py)?;
    let Batch { mut places, objects, staged, .. } = lend_all(into, &mut lender)?;
    // Tied tensors are filled once, by the first of their names.
    places.sort_by_key(|place| (place.start, place.len));
    places.dedup_by(|next, place| next.is_where(place));
    let is_apart = |place: &Place, next: &Place| place.start + place.len <= next.start;
    if !places.is_sorted_by(is_apart) {
        let text = "two tensors of `into` have bytes in common, and are not the same";
        return Err(Refusal::new("invalid", text).advice("receive into others").into());
    }
    let mut targets: Vec<Target<'_>> = places.iter().map(target).collect();
    let report = own.run(py, None, receiver.receive(&mut targets, options, patience))?;
    drop(targets);
    filled(py, &staged, objects)?;
    Ok((report, lender.devices().copies().copied()))
}

/// One tensor to fill, or one box of it.
struct Place {
    fqn: String,
    part: Option<ShardPlace>,
    meta: TensorMeta,
    /// Where it is: memory of a GPU has addresses of its own.
    start: usize,
    len: usize,
    /// On a GPU.
    window: Option<Window>,
    /// It keeps the memory.
    _tensor: Tensor,
}

impl Place {
    fn new(fqn: String, devices: &Devices, tensor: Tensor, part: Option<ShardPlace>) -> Self {
        let meta = tensor.meta().clone();
        let window = devices.window(&tensor);
        let in_memory = "it is in memory";
        let start = match &window {
            Some(window) => usize::try_from(window.start).expect(in_memory),
            None => tensor.view().span().as_ptr().addr(),
        };
        let len = usize::try_from(meta.span_bytes()).expect(in_memory);
        Self { fqn, part, meta, start, len, window, _tensor: tensor }
    }

    /// Whether it is the same memory, as a tied tensor is.
    fn is(&self, other: &Self) -> bool {
        self.fqn == other.fqn && self.is_where(other)
    }

    /// Whether it is the same memory, by whatever name.
    fn is_where(&self, other: &Self) -> bool {
        self.start == other.start
            && self.meta == other.meta
            && self.part.as_ref().map(ShardPlace::slice)
                == other.part.as_ref().map(ShardPlace::slice)
    }
}

/// All of them, in as few rounds as there are places that have a byte in common: memory that interleaves is
/// filled one after the other.
fn rounds(mut places: Vec<Place>) -> Vec<Vec<Place>> {
    places.sort_by_key(|place| place.start);
    let mut rounds: Vec<(usize, Vec<Place>)> = Vec::new();
    for place in places {
        let same = rounds.iter().filter_map(|(_, round)| round.last());
        if same.clone().any(|last| last.is(&place)) {
            continue;
        }
        let end = place.start + place.len;
        match rounds.iter_mut().find(|(last, _)| *last <= place.start) {
            Some((last, round)) => {
                *last = end;
                round.push(place);
            }
            None => rounds.push((end, vec![place])),
        }
    }
    rounds.into_iter().map(|(_, round)| round).collect()
}

fn target(place: &Place) -> Target<'_> {
    let memory = if let Some(window) = &place.window {
        TargetMemory::Elsewhere(window)
    } else if place.len == 0 {
        TargetMemory::Here(&mut [])
    } else {
        let start = std::ptr::with_exposed_provenance_mut(place.start);
        // SAFETY: what lent the tensor, which the place keeps, has proven that it has these bytes and may be
        // written to. No other target of a round has one of them (see `rounds`), and rounds follow one
        // another. That Python looks at a tensor that is being filled is a race in the caller's program,
        // as with torch's own `copy_`.
        TargetMemory::Here(unsafe { std::slice::from_raw_parts_mut(start, place.len) })
    };
    Target { fqn: place.fqn.clone(), place: place.part.clone(), meta: place.meta.clone(), memory }
}
