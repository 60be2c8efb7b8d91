//! Reads without `into`: a view if one stored slice contains the requested box, otherwise new memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use pyo3::prelude::*;
use tssd_format::{
    Attrs, Node, ObjectPath, Region, ShardSpec, Step, TensorMeta, TensorReference, TensorSlice,
};
use tssd_store::plan::{self, TensorLeaf};
use tssd_store::{CowBuffer, GetOptions, GetReport, Target};

use crate::builder::{ArchiveContents, Framework, ObjectBuilder, StorageSource};
use crate::error::{BindingError, Failure, Result};
use crate::memory::{MemoryBlock, PrivateMapping};
use crate::store::connection::VersionRead;

/// A tree of leaves, with their bytes in the memory of this process.
pub(crate) struct LoadedTree {
    root: Arc<Node>,
    attrs: Attrs,
    pub(super) report: GetReport,
    /// The number of bytes that are views of stored bytes.
    pub(super) viewed_bytes: u64,
    /// The memory of tensors, sorted by storage number. Each block is taken once.
    blocks: Mutex<Vec<(u32, Option<MemoryBlock>)>>,
    /// The bytes of leaves that are not tensors, by storage number.
    leaf_bytes: BTreeMap<u32, Bytes>,
}

/// A tensor, or a box of it, that is copied from several stored slices into new memory.
struct AssembledTensor {
    /// The storage number that stands for the new memory. Such numbers count down from `u32::MAX`.
    number: u32,
    fqn: String,
    meta: TensorMeta,
    part: Option<ShardSpec>,
}

/// The storages to read for a tree, and the tensors to assemble.
#[derive(Default)]
struct ReadPlan {
    /// Storages that contain a whole tensor, or the whole requested box.
    storages: Vec<u32>,
    /// Storages of leaves that are not tensors.
    leaf_storages: Vec<u32>,
    assembled: Vec<AssembledTensor>,
}

impl ReadPlan {
    /// Adds all leaves of a tree. Returns the tree with sharded tensors replaced by whole ones.
    ///
    /// `None` if the tree has no sharded tensors: the given tree can be used as it is.
    fn add_node<'a>(&mut self, path: &mut Vec<&'a Step>, node: &'a Node) -> Result<Option<Node>> {
        match node {
            Node::Container(container, children) => {
                let mut replacements = Vec::with_capacity(children.len());
                for (step, child) in children {
                    path.push(step);
                    replacements.push(self.add_node(path, child)?);
                    path.pop();
                }
                if replacements.iter().all(Option::is_none) {
                    return Ok(None);
                }
                let children = children.iter().zip(replacements);
                let children = children.map(|((step, child), replacement)| {
                    (step.clone(), replacement.unwrap_or_else(|| child.clone()))
                });
                Ok(Some(Node::Container(container.clone(), children.collect())))
            }
            Node::StoredLeaf(_, storage) => {
                self.leaf_storages.push(*storage);
                Ok(None)
            }
            Node::Tensors(references) => match &references[..] {
                [TensorReference { shard_spec: None, storage, .. }] => {
                    self.storages.extend(*storage);
                    Ok(None)
                }
                _ => self.add_sharded(path, TensorLeaf::Run(references)),
            },
            Node::Distributed(tensor) => self.add_sharded(path, TensorLeaf::Distributed(tensor)),
            Node::Leaf(_) => Ok(None),
        }
    }

    /// Adds a sharded tensor. Returns the whole tensor that replaces it.
    fn add_sharded(&mut self, path: &[&Step], leaf: TensorLeaf<'_>) -> Result<Option<Node>> {
        Ok(Some(Node::Tensors(vec![self.add_tensor(path, leaf, None)?])))
    }

    /// Adds a tensor, or a box of it. Returns a reference to its bytes once they are read.
    fn add_tensor(
        &mut self,
        path: &[&Step],
        leaf: TensorLeaf<'_>,
        slice: Option<&TensorSlice>,
    ) -> Result<TensorReference> {
        let global = leaf.global_shape();
        if let Some(slice) = slice
            && slice.global_shape() != global
        {
            let (fqn, given) = (join_fqn(path), slice.global_shape());
            let text = format!("`{fqn}` has shape {global:?}, the slice is one of {given:?}");
            return Err(BindingError::new("SliceMismatch", text).with_fqn(&fqn).into());
        }
        let region = &slice.map_or_else(|| Region::whole(global), |slice| slice.region().clone());
        if let TensorLeaf::Run(references) = leaf
            && let Some(view) = references.iter().find_map(|reference| view_of(reference, region))
        {
            let view = view?;
            self.storages.extend(view.storage);
            return Ok(view);
        }
        self.assemble(path, leaf, region)
    }

    /// Adds a box of a tensor, of which no other bytes are read. Returns a reference to its bytes once they are read.
    fn assemble(
        &mut self,
        path: &[&Step],
        leaf: TensorLeaf<'_>,
        region: &Region,
    ) -> Result<TensorReference> {
        let global = leaf.global_shape();
        let meta = TensorMeta::new(leaf.dtype(), region.shape())?.with_flags(leaf.flags());
        let number = u32::MAX - u32::try_from(self.assembled.len()).unwrap_or(u32::MAX);
        let storage = (meta.nbytes() > 0).then_some(number);
        let part = if *region == Region::whole(global) {
            None
        } else {
            let slice = TensorSlice::new(region.offsets(), region.shape(), global)?;
            Some(ShardSpec::new(slice))
        };
        let fqn = join_fqn(path);
        self.assembled.push(AssembledTensor { number, fqn, meta: meta.clone(), part });
        Ok(TensorReference { meta, storage, byte_offset: 0, shard_spec: None })
    }
}

fn join_fqn(path: &[&Step]) -> String {
    path.iter().copied().cloned().collect::<ObjectPath>().fqn()
}

/// Returns a box of a tensor as a view of one stored slice.
///
/// `None` if the slice does not contain the whole box.
fn view_of(reference: &TensorReference, region: &Region) -> Option<Result<TensorReference>> {
    let meta = &reference.meta;
    let slice_region = plan::region(reference);
    if !slice_region.contains(region) {
        return None;
    }
    let strides = meta.strides();
    let dims = region.offsets().iter().zip(slice_region.offsets()).zip(&strides);
    let skipped: u64 = dims.map(|((offset, start), stride)| (offset - start) * stride).sum();
    let is_empty = region.shape().contains(&0);
    let view = || {
        Ok(TensorReference {
            meta: TensorMeta::new(meta.dtype(), region.shape())?
                .with_strides(&strides)?
                .with_flags(meta.flags()),
            storage: reference.storage.filter(|_| !is_empty),
            byte_offset: if is_empty {
                0
            } else {
                reference.byte_offset + skipped * meta.dtype().itemsize()
            },
            shard_spec: None,
        })
    };
    Some(view())
}

impl LoadedTree {
    /// Converts the leaf that [`LoadedTree::read_leaf`] read to a Python object.
    pub(crate) fn to_object<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let mut maker = ObjectBuilder::new(py, self, self, Framework::parse(py, None)?);
        maker.build_leaf(&self.root)
    }

    /// Reads a tree of a version. Tensors become whole ones.
    ///
    /// With `copy`, every leaf gets memory of its own. Otherwise leaves are views of the stored bytes if possible.
    pub(crate) fn read(
        py: Python<'_>,
        read: &VersionRead<'_>,
        root: Arc<Node>,
        copy: bool,
    ) -> Result<Self> {
        let mut plan = ReadPlan::default();
        let root = plan.add_node(&mut Vec::new(), &root)?.map_or(root, Arc::new);
        Self::from_plan(py, read, root, plan, copy)
    }

    /// Reads one leaf, or a box of one tensor.
    pub(crate) fn read_leaf(
        py: Python<'_>,
        read: &VersionRead<'_>,
        fqn: &str,
        slice: Option<&TensorSlice>,
    ) -> Result<Self> {
        let leaf = read.reader.leaf(fqn);
        if fqn.is_empty() && leaf.is_err() {
            let text = "the version is a state dict, not a single value";
            let advice = "get it with get_state_dict(key), or pass fqn=";
            return Err(BindingError::new("not_found", text).advice(advice).into());
        }
        let (path, node) = leaf?;
        let mut path: Vec<&Step> = path.steps().iter().collect();
        let mut plan = ReadPlan::default();
        let replacement = match (TensorLeaf::of(&node), slice) {
            (Some(leaf), Some(part)) => {
                let mut reference = plan.add_tensor(&path, leaf, slice)?;
                if !are_viewable(py, read, &plan.storages)? {
                    // The whole storage would be read for the box.
                    plan = ReadPlan::default();
                    reference = plan.assemble(&path, leaf, part.region())?;
                }
                Some(Node::Tensors(vec![reference]))
            }
            (None, Some(_)) => {
                return Err(BindingError::new("WrongType", format!("`{fqn}` is no tensor")).into());
            }
            (_, None) => plan.add_node(&mut path, &node)?,
        };
        let root = Arc::new(replacement.unwrap_or(node));
        Self::from_plan(py, read, root, plan, false)
    }

    /// Reads the storages of a plan, and assembles its tensors.
    fn from_plan(
        py: Python<'_>,
        read: &VersionRead<'_>,
        root: Arc<Node>,
        mut plan: ReadPlan,
        copy: bool,
    ) -> Result<Self> {
        plan.storages.sort_unstable();
        plan.storages.dedup();
        let storages = &plan.storages;
        let reader = read.reader;
        let (views, copies, leaf_bytes) = read.block_on(py, async {
            let views: Vec<Option<CowBuffer>> = if copy {
                storages.iter().map(|_| None).collect()
            } else {
                reader.cow_buffers(storages).await?
            };
            let is_copy = |(_, view): &(&u32, &Option<CowBuffer>)| view.is_none();
            let copies = storages.iter().zip(&views).filter(is_copy);
            let copies: Vec<u32> = copies.map(|(number, _)| *number).collect();
            let bytes = reader.read_storages(&copies).await?;
            let copies: Vec<(u32, Bytes)> = copies.into_iter().zip(bytes).collect();
            Ok((views, copies, reader.read_storages(&plan.leaf_storages).await?))
        })?;
        let size = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
        let views = storages.iter().zip(views);
        let views = views.filter_map(|(number, view)| Some((*number, view?.into())));
        let mut blocks: Vec<(u32, MemoryBlock)> = views.collect();
        let viewed = blocks.iter().map(|(_, block)| size(block.len())).sum();
        let copied: u64 = copies.iter().map(|(_, bytes)| size(bytes.len())).sum();
        let make_blocks = || copy_to_blocks(read, &copies, plan.assembled);
        let (new_blocks, fill_report) = py.detach(make_blocks)?;
        let mut report = reader.report();
        report.bytes_needed = viewed + copied;
        report.bytes_transferred = viewed + copied;
        if let Some(fill_report) = fill_report {
            report.bytes_needed += fill_report.bytes_needed;
            report.bytes_transferred += fill_report.bytes_transferred;
            report.plan_seconds = fill_report.plan_seconds;
        }
        blocks.extend(new_blocks);
        blocks.sort_unstable_by_key(|(number, _)| *number);
        let blocks = blocks.into_iter().map(|(number, block)| (number, Some(block))).collect();
        let leaf_bytes = plan.leaf_storages.into_iter().zip(leaf_bytes).collect();
        let blocks = Mutex::new(blocks);
        Ok(Self {
            root,
            attrs: reader.attrs().clone(),
            report,
            viewed_bytes: viewed,
            blocks,
            leaf_bytes,
        })
    }
}

/// Returns whether storages can be viewed in the memory or the files of this host. Reads no bytes.
fn are_viewable(py: Python<'_>, read: &VersionRead<'_>, storages: &[u32]) -> Result<bool> {
    let unverified = GetOptions { unverified: true, ..read.reader.options().clone() };
    let reader = read.reader.with_options(&unverified)?;
    let views = read.block_on(py, reader.cow_buffers(storages))?;
    Ok(views.iter().all(Option::is_some))
}

/// Blocks of new memory by storage number, and the report of the assembled tensors, if there are any.
type NewBlocks = (Vec<(u32, MemoryBlock)>, Option<GetReport>);

/// Allocates memory, copies storages to it, and assembles tensors in it.
fn copy_to_blocks(
    read: &VersionRead<'_>,
    copies: &[(u32, Bytes)],
    assembled: Vec<AssembledTensor>,
) -> Result<NewBlocks> {
    let mut ranges = Vec::with_capacity(copies.len() + assembled.len());
    let mut len = 0_usize;
    let mut reserve = |number: u32, bytes: usize| {
        // Aligned like the allocations of torch: to 64 bytes.
        let start = len.next_multiple_of(64);
        len = start + bytes;
        ranges.push((number, start..len));
    };
    for (number, bytes) in copies {
        reserve(*number, bytes.len());
    }
    for tensor in &assembled {
        reserve(
            tensor.number,
            usize::try_from(tensor.meta.nbytes()).map_err(std::io::Error::other)?,
        );
    }
    if ranges.is_empty() {
        return Ok((Vec::new(), None));
    }
    let mut report = None;
    let memory = PrivateMapping::allocate_with(len.max(1), |target| {
        let (copy_ranges, tensor_ranges) = ranges.split_at(copies.len());
        for ((_, bytes), (_, range)) in copies.iter().zip(copy_ranges) {
            tssd_format::copy(bytes, &mut target[range.clone()]);
        }
        let (mut rest, mut offset) = (target, 0);
        let mut targets = Vec::with_capacity(assembled.len());
        for (tensor, (_, range)) in assembled.into_iter().zip(tensor_ranges) {
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(range.start - offset);
            let (bytes, tail) = tail.split_at_mut(range.len());
            (rest, offset) = (tail, range.end);
            let AssembledTensor { fqn, meta, part: place, .. } = tensor;
            targets.push(Target { fqn, shard_spec: place, meta, memory: bytes.into() });
        }
        if !targets.is_empty() {
            report = Some(read.fill(&mut targets)?);
        }
        Ok::<_, Failure>(())
    })?;
    let block = |(number, range)| (number, memory.exclusive_block(range));
    Ok((ranges.into_iter().map(block).collect(), report))
}

impl ArchiveContents for LoadedTree {
    fn structure(&self) -> Arc<Node> {
        self.root.clone()
    }

    fn attrs(&self) -> Attrs {
        self.attrs.clone()
    }

    fn storage_bytes(&self, storage: u32) -> Result<Bytes> {
        Ok(self.leaf_bytes[&storage].clone())
    }
}

impl StorageSource for LoadedTree {
    fn block(&self, storage: u32) -> Result<(MemoryBlock, u64)> {
        let mut blocks = self.blocks.lock().expect("nothing panics that holds it");
        let index = blocks.binary_search_by_key(&storage, |(number, _)| *number);
        let block = index.ok().and_then(|index| blocks[index].1.take());
        Ok((block.expect("the maker asks once for each"), 0))
    }
}
