//! The reshard planner: the byte ranges to copy from storages to a reader's memory. Spec: `spec/reshard.md`, section 3.
//!
//! Planning is a pure function. A plan copies exactly the requested elements, each from one stored slice.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tssd_format::{
    Container, DeviceMesh, DistributedTensor, Dtype, Error, ErrorKind, HeldPart, Node, Placement,
    Region, Result, Runs, ShardSpec, StorageReference, TensorFlags, TensorMeta, TensorReference,
    held_parts, row_major_strides,
};

use crate::convert::to_u64;

/// A request of a reader: a region of a leaf, and its layout in the reader's memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RegionRequest {
    /// The region of the global tensor.
    pub region: Region,
    /// The shape of the whole global tensor.
    pub global_shape: Box<[u64]>,
    /// Dtype and strides of the memory. Its shape is the shape of the region.
    pub meta: TensorMeta,
}

/// A tensor leaf of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorLeaf<'a> {
    /// A plain tensor, or slices of a global tensor.
    Run(&'a [TensorReference]),
    /// A tensor that devices of a mesh hold, whose slices are computed.
    Distributed(&'a DistributedTensor),
}

impl<'a> TensorLeaf<'a> {
    /// Returns the tensor leaf of a node; `None` for any other node.
    pub fn of(node: &'a Node) -> Option<Self> {
        match node {
            Node::Tensors(run) => Some(Self::Run(run)),
            Node::Distributed(tensor) => Some(Self::Distributed(tensor)),
            Node::Leaf(_) | Node::StoredLeaf(..) | Node::Container(..) => None,
        }
    }

    fn meta(self) -> &'a TensorMeta {
        match self {
            Self::Run(run) => &run[0].meta,
            Self::Distributed(tensor) => &tensor.meta,
        }
    }

    /// Returns the dtype.
    pub fn dtype(self) -> Dtype {
        self.meta().dtype()
    }

    /// Returns the flags.
    pub fn flags(self) -> TensorFlags {
        self.meta().flags()
    }

    /// Returns the shape of the global tensor, in elements.
    pub fn global_shape(self) -> &'a [u64] {
        let slice = match self {
            Self::Run(run) => run[0].shard_spec.as_ref().map(ShardSpec::slice),
            Self::Distributed(_) => None,
        };
        slice.map_or_else(|| self.meta().shape(), |slice| slice.global_shape())
    }

    /// Returns the only reference of a leaf, if it holds the whole tensor.
    pub fn whole(self) -> Option<&'a TensorReference> {
        let Self::Run([reference]) = self else { return None };
        let slice = reference.shard_spec.as_ref().map(ShardSpec::slice);
        let is_whole = slice.is_none_or(|slice| slice.local_shape() == slice.global_shape());
        is_whole.then_some(reference)
    }
}

/// A storage of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StorageId {
    /// The storage with this number in the manifest.
    Own(u32),
    /// The storage of a group of distributed leaves in the archive of a device.
    Held {
        /// The number of the group.
        group: u32,
        /// The row-major index of the device in the mesh of the group.
        device: u64,
    },
}

impl StorageId {
    /// Returns the number in the manifest; `None` for a storage of a group.
    pub fn own(self) -> Option<u32> {
        match self {
            Self::Own(number) => Some(number),
            Self::Held { .. } => None,
        }
    }
}

impl From<u32> for StorageId {
    fn from(number: u32) -> Self {
        Self::Own(number)
    }
}

/// Copies of regions from storages into the memory of a request: one, or several at regular distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionCopy {
    /// The source storage.
    pub storage: StorageId,
    /// Offset of the region in the raw bytes of the storage.
    pub source_offset: u64,
    /// Offset of the region in the reader's memory, in bytes.
    pub target_offset: u64,
    /// The byte runs of the region.
    pub runs: Runs,
    /// Repetitions with the storages of other devices, outermost first. Empty: one copy.
    pub repeats: Vec<CopyRepeat>,
}

/// A repetition of a copy. Source offset and runs are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRepeat {
    /// Number of copies in all.
    pub count: u64,
    /// Distance from one device to the next one.
    pub device_step: u64,
    /// Distance from one target offset to the next one, in bytes.
    pub target_step: u64,
}

/// One of the copies of a [`RegionCopy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SingleCopy<'a> {
    /// The source storage.
    pub storage: StorageId,
    /// Offset of the region in the raw bytes of the storage.
    pub source_offset: u64,
    /// Offset of the region in the reader's memory, in bytes.
    pub target_offset: u64,
    /// The byte runs of the region.
    pub runs: &'a Runs,
}

impl RegionCopy {
    /// Returns the number of copies.
    pub fn count(&self) -> u64 {
        self.repeats.iter().map(|repeat| repeat.count).product()
    }

    /// Returns the bytes of all copies.
    pub fn total_bytes(&self) -> u64 {
        self.runs.total_bytes() * self.count()
    }

    /// Returns each copy.
    pub fn each(&self) -> impl Iterator<Item = SingleCopy<'_>> {
        (0..self.count()).map(|number| self.nth(number))
    }

    fn nth(&self, mut number: u64) -> SingleCopy<'_> {
        let Self { mut storage, source_offset, mut target_offset, .. } = *self;
        for repeat in self.repeats.iter().rev() {
            let step = number % repeat.count;
            number /= repeat.count;
            target_offset += step * repeat.target_step;
            if let StorageId::Held { device, .. } = &mut storage {
                *device += step * repeat.device_step;
            }
        }
        SingleCopy { storage, source_offset, target_offset, runs: &self.runs }
    }
}

/// Returns the copies that fill the region of a request from a stored leaf.
///
/// Of slices with equal regions, the first one is copied. The regions of a committed version are disjoint. If
/// those of other archives have both gaps and overlaps of the same size, this function does not notice.
///
/// # Errors
///
/// - `Uncovered`, with the region that no slice holds.
/// - `Overlap` if slices of different regions overlap in the region of the request.
/// - `OutsideGlobal` if the region is outside the leaf, or the global shapes differ.
/// - `WrongType` if the dtypes differ.
pub fn plan(leaf: TensorLeaf<'_>, wanted: &RegionRequest) -> Result<Vec<RegionCopy>> {
    let copies = plan_partial(leaf, wanted)?;
    // The shards of a distributed tensor tile it by their definition.
    let TensorLeaf::Run(stored) = leaf else { return Ok(copies) };
    // The regions of a committed version tile the global tensor, so counting bytes is sufficient.
    let total = |copies: &[RegionCopy]| -> u64 { copies.iter().map(RegionCopy::total_bytes).sum() };
    let needed = wanted.meta.nbytes();
    if total(&copies) == needed {
        return Ok(copies);
    }
    // An archive of one writer can hold a region more than once. The first one counts.
    let mut regions = BTreeSet::new();
    let distinct: Vec<TensorReference> =
        stored.iter().filter(|slice| regions.insert(region(slice).into_owned())).cloned().collect();
    let mut holes = vec![wanted.region.clone()];
    for stored_region in &regions {
        holes = holes.iter().flat_map(|hole| hole.subtract(stored_region)).collect();
    }
    if let Some(hole) = holes.iter().find(|hole| !hole.is_empty()) {
        return Err(Error::new(ErrorKind::Uncovered).with_region(hole.offsets(), hole.shape()));
    }
    let copies = plan_partial(TensorLeaf::Run(&distinct), wanted)?;
    if total(&copies) == needed {
        return Ok(copies);
    }
    Err(Error::new(ErrorKind::Overlap).with_region(wanted.region.offsets(), wanted.region.shape()))
}

/// Returns the copies of those parts of the region that the given slices hold: all of it, a part, or none.
///
/// # Errors
///
/// As [`plan`], except that a region that no slice holds is no error. `Uncovered` if there is no slice at all.
pub(crate) fn plan_partial(
    leaf: TensorLeaf<'_>,
    wanted: &RegionRequest,
) -> Result<Vec<RegionCopy>> {
    if leaf == TensorLeaf::Run(&[]) {
        return Err(Error::new(ErrorKind::Uncovered)
            .with_region(wanted.region.offsets(), wanted.region.shape()));
    }
    let (dtype, found) = (wanted.meta.dtype(), leaf.dtype());
    if dtype != found {
        return Err(Error::new(ErrorKind::WrongType)
            .with_detail(format_args!("wanted {dtype}, stored {found}")));
    }
    let global_shape = leaf.global_shape();
    if *wanted.global_shape != *global_shape {
        return Err(Error::new(ErrorKind::OutsideGlobal).with_detail(format_args!(
            "wanted a part of shape {:?}, stored {global_shape:?}",
            wanted.global_shape
        )));
    }
    if !Region::whole(global_shape).contains(&wanted.region) {
        return Err(Error::new(ErrorKind::OutsideGlobal)
            .with_region(wanted.region.offsets(), wanted.region.shape()));
    }
    match leaf {
        TensorLeaf::Run(stored) => Ok(copy_slices(stored, wanted)),
        TensorLeaf::Distributed(tensor) => copy_held_parts(tensor, wanted),
    }
}

/// Returns the copies from slices.
fn copy_slices(stored: &[TensorReference], wanted: &RegionRequest) -> Vec<RegionCopy> {
    let target_strides = wanted.meta.strides();
    let itemsize = wanted.meta.dtype().itemsize();
    let mut copies = Vec::new();
    for slice in stored {
        let stored_region = region(slice);
        let Some(overlap) = stored_region.intersect(&wanted.region) else { continue };
        let Some(storage) = slice.storage else { continue };
        let source_strides = slice.meta.strides();
        let offset = |outer: &Region, strides: &[u64]| {
            let inner = overlap.relative_to(outer);
            let elements: u64 =
                inner.offsets().iter().zip(strides).map(|(at, stride)| at * stride).sum();
            elements * itemsize
        };
        copies.push(RegionCopy {
            storage: storage.into(),
            source_offset: slice.byte_offset + offset(&stored_region, &source_strides),
            target_offset: offset(&wanted.region, &target_strides),
            runs: Runs::new(itemsize, overlap.shape(), &source_strides, &target_strides),
            repeats: Vec::new(),
        });
    }
    copies
}

/// Returns the copies from the devices of a distributed tensor.
fn copy_held_parts(tensor: &DistributedTensor, wanted: &RegionRequest) -> Result<Vec<RegionCopy>> {
    let mesh_shape = tensor.mesh().shape();
    let parts = held_parts(tensor.global_shape(), mesh_shape, tensor.placements(), &wanted.region)?;
    let target_strides = wanted.meta.strides();
    let itemsize = wanted.meta.dtype().itemsize();
    let bytes = |offsets: &[u64], strides: &[u64]| -> u64 {
        let elements = offsets.iter().zip(strides).map(|(at, stride)| at * stride);
        elements.sum::<u64>() * itemsize
    };
    let copy = |part: HeldPart| {
        let source_strides = row_major_strides(&part.local_shape);
        let within = part.region.relative_to(&wanted.region);
        let repeats = part.repeats.iter().map(|repeat| CopyRepeat {
            count: repeat.count,
            device_step: repeat.device_step,
            target_step: repeat.offset_step * target_strides[repeat.dim] * itemsize,
        });
        RegionCopy {
            storage: StorageId::Held { group: tensor.group, device: part.device },
            source_offset: bytes(&part.local_offsets, &source_strides),
            target_offset: bytes(within.offsets(), &target_strides),
            runs: Runs::new(itemsize, part.region.shape(), &source_strides, &target_strides),
            repeats: repeats.collect(),
        }
    };
    Ok(parts.into_iter().map(copy).collect())
}

/// Returns the region of the global tensor that a reference holds. A plain tensor holds all of it.
pub fn region(reference: &TensorReference) -> Cow<'_, Region> {
    match &reference.shard_spec {
        Some(spec) => Cow::Borrowed(spec.slice().region()),
        None => Cow::Owned(Region::whole(reference.meta.shape())),
    }
}

/// Returns number and itemsize of a dtype in one word, which plans of equal layouts share.
///
/// The itemsize matters for dtypes that files describe: two files can describe one number differently.
pub(crate) fn dtype_word(dtype: Dtype) -> u64 {
    u64::from(dtype.number()) | dtype.itemsize() << 16
}

/// Returns a fingerprint of the layout of a version, under which plans are cached.
///
/// Two versions have the same fingerprint if their leaves, shapes, slices and storages are the same. Contents do not
/// count.
pub(crate) fn fingerprint(root: &Node, storages: &[StorageReference]) -> [u8; 16] {
    let mut hasher = LayoutHasher::default();
    for storage in storages {
        hasher.hash_words(&[u64::from(storage.shard), storage.offset, storage.len]);
    }
    hasher.hash_node(root);
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finish().as_bytes()[..16]);
    short
}

/// Returns a fingerprint of what the storages of groups of distributed leaves hold.
///
/// A plan reads within these storages if it was made for groups with the same fingerprint.
pub(crate) fn group_fingerprint(groups: &[DistributedTensor]) -> [u8; 16] {
    let mut hasher = LayoutHasher::default();
    for group in groups {
        hasher.hash_distributed(group);
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finish().as_bytes()[..16]);
    short
}

/// A hasher of the layout of a tree: its keys and the metadata of its tensors.
#[derive(Default)]
struct LayoutHasher {
    hash: blake3::Hasher,
    /// Pending input. Hashing a few bytes at a time is slow, so up to 64 KiB are collected first.
    bytes: Vec<u8>,
    /// The number of each mesh of the distributed tensors so far. Tensors of one file share the object of a mesh.
    meshes: BTreeMap<*const DeviceMesh, usize>,
}

impl LayoutHasher {
    fn hash_node(&mut self, node: &Node) {
        match node {
            Node::Leaf(_) | Node::StoredLeaf(..) => self.hash_words(&[0]),
            Node::Container(container, children) => {
                // The fqn of a leaf does not contain its writer, so a divergent node is marked here.
                let kind = if *container == Container::Divergent { 3 } else { 1 };
                self.hash_words(&[kind, to_u64(children.len())]);
                for (step, child) in children {
                    let step = step.to_string();
                    self.hash_words(&[to_u64(step.len())]);
                    self.bytes.extend(step.as_bytes());
                    self.hash_node(child);
                }
            }
            Node::Tensors(references) => {
                self.hash_words(&[2, to_u64(references.len())]);
                for reference in references {
                    self.hash_tensor(reference);
                }
            }
            Node::Distributed(tensor) => {
                self.hash_words(&[4, u64::from(tensor.group)]);
                self.hash_distributed(tensor);
            }
        }
    }

    fn hash_distributed(&mut self, tensor: &DistributedTensor) {
        let shape = tensor.global_shape();
        self.hash_words(&[dtype_word(tensor.meta.dtype()), to_u64(shape.len())]);
        self.hash_words(shape);
        // Thousands of tensors have one mesh, which can have thousands of ranks.
        let mesh = tensor.mesh();
        let next = self.meshes.len();
        let number = *self.meshes.entry(Arc::as_ptr(mesh)).or_insert(next);
        self.hash_words(&[to_u64(number)]);
        if number == next {
            self.hash_words(&[to_u64(mesh.shape().len())]);
            self.hash_words(mesh.shape());
            let ranks: Vec<u64> = mesh.ranks().iter().copied().map(u64::from).collect();
            self.hash_words(&ranks);
        }
        for placement in tensor.placements() {
            let words = match placement {
                Placement::Shard { dim } => [1, u64::from(*dim), 0],
                Placement::StridedShard { dim, split_factor } => {
                    [2, u64::from(*dim), *split_factor]
                }
                // No file has other placements.
                _ => [0; 3],
            };
            self.hash_words(&words);
        }
    }

    fn hash_tensor(&mut self, reference: &TensorReference) {
        let meta = &reference.meta;
        self.hash_words(&[
            dtype_word(meta.dtype()),
            reference.storage.map_or(u64::MAX, u64::from),
            reference.byte_offset,
        ]);
        let (strides, region) = (meta.strides(), region(reference));
        let global_shape = TensorLeaf::Run(std::slice::from_ref(reference)).global_shape();
        for vector in [meta.shape(), &strides, region.offsets(), global_shape] {
            self.hash_words(&[to_u64(vector.len())]);
            self.hash_words(vector);
        }
    }

    fn hash_words(&mut self, words: &[u64]) {
        for word in words {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        if self.bytes.len() >= 64 << 10 {
            self.hash.update(&self.bytes);
            self.bytes.clear();
        }
    }

    fn finish(mut self) -> blake3::Hash {
        self.hash.update(&self.bytes);
        self.hash.finalize()
    }
}

#[cfg(test)]
mod tests {
    use tssd_format::{MapKey, Step, TensorSlice};

    use super::*;

    /// Returns a slice of 4 bytes of a tensor of 8 bytes, in a storage of its own.
    fn slice_at(offset: u64, storage: u32) -> TensorReference {
        let slice = TensorSlice::new(&[offset], &[4], &[8]).unwrap();
        TensorReference {
            meta: TensorMeta::new(Dtype::Uint8, &[4]).unwrap(),
            storage: Some(storage),
            byte_offset: 0,
            shard_spec: Some(ShardSpec::new(slice)),
        }
    }

    fn plan_whole(stored: &[TensorReference]) -> Result<Vec<u32>> {
        let wanted = RegionRequest {
            region: Region::whole(&[8]),
            global_shape: [8].into(),
            meta: TensorMeta::new(Dtype::Uint8, &[8])?,
        };
        let copies = plan(TensorLeaf::Run(stored), &wanted)?;
        Ok(copies.into_iter().map(|copy| copy.storage.own().unwrap()).collect())
    }

    #[test]
    fn plan_takes_first_of_equal_regions() {
        let stored = [(0, 7), (0, 3), (4, 1), (0, 9), (4, 2)];
        let stored = stored.map(|(offset, storage)| slice_at(offset, storage));
        assert_eq!(plan_whole(&stored).unwrap(), [7, 1]);
    }

    #[test]
    fn plan_refuses_overlap_and_gap() {
        for (offsets, kind) in [
            (&[0, 2, 4][..], ErrorKind::Overlap),
            (&[0, 0, 2, 4], ErrorKind::Overlap),
            (&[2], ErrorKind::Uncovered),
            (&[0, 2, 2], ErrorKind::Uncovered),
        ] {
            let stored: Vec<_> =
                offsets.iter().zip(0..).map(|(offset, number)| slice_at(*offset, number)).collect();
            assert_eq!(plan_whole(&stored).unwrap_err().kind(), kind, "{offsets:?}");
        }
    }

    #[test]
    fn divergent_node_and_dict_have_different_fingerprints() {
        let leaf = Node::Tensors(vec![TensorReference {
            meta: TensorMeta::new(Dtype::Uint8, &[2]).unwrap(),
            storage: Some(0),
            byte_offset: 0,
            shard_spec: None,
        }]);
        let children = [0, 1].map(|writer| (Step::Key(MapKey::from_writer(writer)), leaf.clone()));
        let of = |container| fingerprint(&Node::Container(container, children.to_vec()), &[]);
        assert_eq!(of(Container::Dict), of(Container::OrderedDict));
        assert_ne!(of(Container::Dict), of(Container::Divergent));
    }
}
