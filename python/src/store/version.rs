//! What a get without `into` reads: views where a stored slice has what is wanted, new memory elsewhere.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use pyo3::prelude::*;
use tssd_format::{
    Attrs, Node, ObjectPath, Region, ShardPlace, Step, TensorMeta, TensorReference, TensorSlice,
};
use tssd_store::{GetReport, Opened, Private, Target};

use super::connected::{Connected, Patience};
use crate::error::{Failure, Refusal, Result};
use crate::memory::{Block, Memory};
use crate::object::{Contents, Framework, Maker, Source};

/// How leaves are read.
#[derive(Clone, Copy, Default)]
pub(crate) struct Reading {
    /// Whether all of them get memory of their own.
    pub(crate) copy: bool,
    /// For how many seconds the store's answer is waited for.
    pub(crate) timeout: Option<f64>,
}

/// Leaves whose bytes are in memory of this process.
pub(crate) struct Version {
    root: Arc<Node>,
    attrs: Attrs,
    pub(super) report: GetReport,
    /// How many bytes are seen through views.
    pub(super) viewed: u64,
    /// By storage, in that order. Each is asked for once.
    blocks: Mutex<Vec<(u32, Option<Block>)>>,
    stored: BTreeMap<u32, Bytes>,
}

/// A tensor, or a box of it, that no stored slice has: the number that it gets as a storage.
struct Assembled {
    number: u32,
    fqn: String,
    meta: TensorMeta,
    part: Option<ShardPlace>,
}

/// What is to be read of a version.
#[derive(Default)]
struct Wanted {
    /// Storages that leaves are views of.
    storages: Vec<u32>,
    /// Those that are no tensors.
    stored: Vec<u32>,
    made: Vec<Assembled>,
}

impl Wanted {
    /// Goes through a tree; tensors of several slices become whole ones. None if there are none: it is as wanted.
    fn of<'a>(&mut self, path: &mut Vec<&'a Step>, node: &'a Node) -> Result<Option<Node>> {
        match node {
            Node::Container(container, children) => {
                let mut others = Vec::with_capacity(children.len());
                for (step, child) in children {
                    path.push(step);
                    others.push(self.of(path, child)?);
                    path.pop();
                }
                if others.iter().all(Option::is_none) {
                    return Ok(None);
                }
                let children = children.iter().zip(others);
                let children = children.map(|((step, child), other)| {
                    (step.clone(), other.unwrap_or_else(|| child.clone()))
                });
                Ok(Some(Node::Container(container.clone(), children.collect())))
            }
            Node::Stored(_, storage) => {
                self.stored.push(*storage);
                Ok(None)
            }
            Node::Tensors(run) => match &run[..] {
                [TensorReference { place: None, storage, .. }] => {
                    self.storages.extend(*storage);
                    Ok(None)
                }
                _ => Ok(Some(Node::Tensors(vec![self.tensor(path, run, None)?]))),
            },
            Node::Leaf(_) => Ok(None),
        }
    }

    /// One tensor, or a box of it: what it will be a view of.
    fn tensor(
        &mut self,
        path: &[&Step],
        run: &[TensorReference],
        slice: Option<&TensorSlice>,
    ) -> Result<TensorReference> {
        let global = global_shape(run);
        if let Some(slice) = slice
            && slice.global_shape() != global
        {
            let (fqn, given) = (fqn(path), slice.global_shape());
            let text = format!("`{fqn}` has shape {global:?}, the slice is one of {given:?}");
            return Err(Refusal::new("SliceMismatch", text).of(&fqn).into());
        }
        let wanted = &slice.map_or_else(|| Region::whole(global), TensorSlice::region);
        if let Some(part) = run.iter().find_map(|reference| part_of(reference, wanted)) {
            let part = part?;
            self.storages.extend(part.storage);
            return Ok(part);
        }
        let meta = TensorMeta::new(run[0].meta.dtype(), wanted.shape())?;
        let meta = meta.with_flags(run[0].meta.flags());
        let number = u32::MAX - u32::try_from(self.made.len()).unwrap_or(u32::MAX);
        let storage = (meta.nbytes() > 0).then_some(number);
        let box_of = |_| TensorSlice::new(wanted.offsets(), wanted.shape(), global);
        let part = slice.map(box_of).transpose()?.map(ShardPlace::new);
        let fqn = fqn(path);
        self.made.push(Assembled { number, fqn, meta: meta.clone(), part });
        Ok(TensorReference { meta, storage, byte_offset: 0, place: None })
    }
}

/// The shape of a tensor as a whole.
pub(super) fn global_shape(run: &[TensorReference]) -> &[u64] {
    let slice = run[0].place.as_ref().map(ShardPlace::slice);
    slice.map_or_else(|| run[0].meta.shape(), |slice| slice.global_shape())
}

fn fqn(path: &[&Step]) -> String {
    path.iter().copied().cloned().collect::<ObjectPath>().fqn()
}

/// A box of a tensor as a view of one stored slice of it, if that has all of the box.
fn part_of(reference: &TensorReference, wanted: &Region) -> Option<Result<TensorReference>> {
    let meta = &reference.meta;
    let has = match &reference.place {
        Some(place) => place.slice().region(),
        None => Region::whole(meta.shape()),
    };
    if !has.contains(wanted) {
        return None;
    }
    let strides = meta.strides();
    let skipped = wanted.offsets().iter().zip(has.offsets()).zip(&strides);
    let skipped: u64 = skipped.map(|((wanted, has), stride)| (wanted - has) * stride).sum();
    let is_empty = wanted.shape().contains(&0);
    let view = || {
        Ok(TensorReference {
            meta: TensorMeta::new(meta.dtype(), wanted.shape())?
                .with_strides(&strides)?
                .with_flags(meta.flags()),
            storage: reference.storage.filter(|_| !is_empty),
            byte_offset: if is_empty {
                0
            } else {
                reference.byte_offset + skipped * meta.dtype().itemsize()
            },
            place: None,
        })
    };
    Some(view())
}

impl Version {
    /// What was read, if it is one leaf.
    pub(crate) fn object<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let mut maker = Maker::new(py, self, self, Framework::of(py, None)?);
        maker.leaf(&self.root)
    }

    /// A tree of a version.
    pub(crate) fn read(
        py: Python<'_>,
        own: &Connected,
        opened: &Opened,
        root: Arc<Node>,
        reading: Reading,
    ) -> Result<Self> {
        let mut wanted = Wanted::default();
        let root = wanted.of(&mut Vec::new(), &root)?.map_or(root, Arc::new);
        Self::of(py, own, opened, root, wanted, reading)
    }

    /// One leaf, or a box of one tensor.
    pub(crate) fn read_leaf(
        py: Python<'_>,
        own: &Connected,
        opened: &Opened,
        fqn: &str,
        slice: Option<&TensorSlice>,
        reading: Reading,
    ) -> Result<Self> {
        let found = opened.leaf(fqn);
        if fqn.is_empty() && found.is_err() {
            let text = "it is a state dict, and no single value";
            let advice = "get it with get_state_dict(key), or say fqn=";
            return Err(Refusal::new("not_found", text).advice(advice).into());
        }
        let (path, node) = found?;
        let mut path: Vec<&Step> = path.steps().iter().collect();
        let mut wanted = Wanted::default();
        let other = match (&node, slice) {
            (Node::Tensors(run), Some(_)) => {
                Some(Node::Tensors(vec![wanted.tensor(&path, run, slice)?]))
            }
            (_, Some(_)) => {
                return Err(Refusal::new("WrongType", format!("`{fqn}` is no tensor")).into());
            }
            (node, None) => wanted.of(&mut path, node)?,
        };
        let root = Arc::new(other.unwrap_or(node));
        Self::of(py, own, opened, root, wanted, reading)
    }

    fn of(
        py: Python<'_>,
        own: &Connected,
        opened: &Opened,
        root: Arc<Node>,
        mut wanted: Wanted,
        Reading { copy, timeout }: Reading,
    ) -> Result<Self> {
        wanted.storages.sort_unstable();
        wanted.storages.dedup();
        let storages = &wanted.storages;
        let patience = Patience::new(timeout)?;
        let (seen, copied, stored) = own.run(py, timeout, async {
            let seen: Vec<Option<Private>> = if copy {
                storages.iter().map(|_| None).collect()
            } else {
                opened.private(storages).await?
            };
            let is_copied = |(_, private): &(&u32, &Option<Private>)| private.is_none();
            let copied = storages.iter().zip(&seen).filter(is_copied);
            let copied: Vec<u32> = copied.map(|(number, _)| *number).collect();
            let bytes = opened.storages(&copied).await?;
            let copied: Vec<(u32, Bytes)> = copied.into_iter().zip(bytes).collect();
            Ok((seen, copied, opened.storages(&wanted.stored).await?))
        })?;
        let size = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
        let viewed = storages.iter().zip(seen);
        let viewed = viewed.filter_map(|(number, private)| Some((*number, private?.into())));
        let mut blocks: Vec<(u32, Block)> = viewed.collect();
        let viewed = blocks.iter().map(|(_, block)| size(block.len())).sum();
        let read: u64 = copied.iter().map(|(_, bytes)| size(bytes.len())).sum();
        let made = || made(own, opened, &patience, &copied, wanted.made);
        let (made, assembled) = py.detach(made)?;
        let mut report = opened.report();
        report.bytes_needed = viewed + read;
        report.bytes_transferred = viewed + read;
        if let Some(assembled) = assembled {
            report.bytes_needed += assembled.bytes_needed;
            report.bytes_transferred += assembled.bytes_transferred;
            report.plan_seconds = assembled.plan_seconds;
        }
        blocks.extend(made);
        blocks.sort_unstable_by_key(|(number, _)| *number);
        let blocks = blocks.into_iter().map(|(number, block)| (number, Some(block))).collect();
        let stored = wanted.stored.into_iter().zip(stored).collect();
        let blocks = Mutex::new(blocks);
        Ok(Self { root, attrs: opened.attrs().clone(), report, viewed, blocks, stored })
    }
}

/// Blocks of new memory by storage, and how those that were assembled came.
type Made = (Vec<(u32, Block)>, Option<GetReport>);

/// Storages that are copied, and tensors that are assembled, in new memory.
fn made(
    own: &Connected,
    opened: &Opened,
    patience: &Patience,
    copied: &[(u32, Bytes)],
    assembled: Vec<Assembled>,
) -> Result<Made> {
    let mut places = Vec::with_capacity(copied.len() + assembled.len());
    let mut len = 0_usize;
    let mut place = |number: u32, bytes: usize| {
        // As torch aligns what it allocates.
        let start = len.next_multiple_of(64);
        len = start + bytes;
        places.push((number, start..len));
    };
    for (number, bytes) in copied {
        place(*number, bytes.len());
    }
    for each in &assembled {
        place(each.number, usize::try_from(each.meta.nbytes()).map_err(std::io::Error::other)?);
    }
    if places.is_empty() {
        return Ok((Vec::new(), None));
    }
    let mut report = None;
    let memory = Memory::filled(len.max(1), |target| {
        let (first, second) = places.split_at(copied.len());
        for ((_, bytes), (_, range)) in copied.iter().zip(first) {
            tssd_format::copy(bytes, &mut target[range.clone()]);
        }
        let (mut rest, mut at) = (target, 0);
        let mut targets = Vec::with_capacity(assembled.len());
        for (each, (_, range)) in assembled.into_iter().zip(second) {
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(range.start - at);
            let (bytes, tail) = tail.split_at_mut(range.len());
            (rest, at) = (tail, range.end);
            let Assembled { fqn, meta, part: place, .. } = each;
            targets.push(Target { fqn, place, meta, memory: bytes.into() });
        }
        if !targets.is_empty() {
            report = Some(own.fill(opened, &mut targets, patience)?);
        }
        Ok::<_, Failure>(())
    })?;
    let block = |(number, range)| (number, memory.block(range));
    Ok((places.into_iter().map(block).collect(), report))
}

impl Contents for Version {
    fn structure(&self) -> Arc<Node> {
        self.root.clone()
    }

    fn attrs(&self) -> Attrs {
        self.attrs.clone()
    }

    fn stored(&self, storage: u32) -> Result<Bytes> {
        Ok(self.stored[&storage].clone())
    }
}

impl Source for Version {
    fn block(&self, storage: u32) -> Result<(Block, u64)> {
        let mut blocks = self.blocks.lock().expect("nothing panics that holds it");
        let place = blocks.binary_search_by_key(&storage, |(number, _)| *number);
        let block = place.ok().and_then(|place| blocks[place].1.take());
        Ok((block.expect("the maker asks once for each"), 0))
    }
}
