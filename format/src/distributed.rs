//! Distributed leaves: tensors of which a manifest records mesh and placements, and no shards.
//!
//! Spec: section 7, "Distributed leaves".

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use indexmap::IndexMap;

use crate::chunk::{ChunkPolicy, ChunkSize};
use crate::convert::{index_to_usize, to_u64};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{DATA_START, default_align_log2};
use crate::held_indices::MAX_PIECES;
use crate::held_parts::local_shape_of;
use crate::mesh::DeviceMesh;
use crate::placement::Placement;
use crate::reference::TensorReference;
use crate::region::Region;
use crate::shape::{numel, row_major_strides};
use crate::shard::ShardSpec;
use crate::shard_file::OtherStorage;
use crate::slice::TensorSlice;
use crate::tensor::TensorMeta;

/// A tensor leaf of a manifest whose shards follow from its mesh and placements.
///
/// It stands for the run of all shards that the devices of the mesh hold: see
/// [`DistributedTensor::local_references`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedTensor {
    /// Dtype, global shape in elements, and flags.
    pub meta: TensorMeta,
    /// The whole tensor as a slice, with mesh and placements, and without coordinates.
    pub shard_spec: ShardSpec,
    /// The number of the group. Leaves of one group are tied: each device has one storage for all of them.
    pub group: u32,
    /// How raw storages of the group are split into chunks.
    pub chunks: ChunkPolicy,
}

impl Hash for DistributedTensor {
    /// Leaves out mesh and placements, because a mesh can have thousands of ranks.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.meta.hash(state);
        self.group.hash(state);
    }
}

impl DistributedTensor {
    /// Creates the leaf of a tensor that the devices of `mesh` hold.
    ///
    /// The shape of `meta` is the global shape, in elements.
    ///
    /// # Errors
    ///
    /// - `DistributedLeaf` (F-068) if the tensor has no elements or explicit strides, or if the product of the split
    ///   factors exceeds 65,536.
    /// - The errors of [`ShardSpec::with_placements`].
    pub fn new(
        meta: TensorMeta,
        mesh: Arc<DeviceMesh>,
        placements: Arc<[Placement]>,
        group: u32,
        chunks: ChunkPolicy,
    ) -> Result<Self> {
        let failed = |note: &str| Err(Error::new(ErrorKind::DistributedLeaf).with_detail(note));
        if meta.numel() == 0 {
            return failed("the tensor has no elements");
        }
        if meta.explicit_strides().is_some() {
            return failed("the tensor has strides");
        }
        let split_factors = placements.iter().map(|placement| match placement {
            Placement::StridedShard { split_factor, .. } => *split_factor,
            _ => 1,
        });
        if split_factors.fold(1_u64, u64::saturating_mul) > MAX_PIECES {
            return failed("the split factors of its placements are too large");
        }
        let shape = meta.shape();
        let whole = TensorSlice::new(&vec![0; shape.len()], shape, shape)?;
        let slice = whole.with_mesh(mesh.shape(), None)?;
        let shard_spec = ShardSpec::new(slice).with_mesh(mesh)?.with_placements(placements)?;
        Ok(Self { meta, shard_spec, group, chunks })
    }

    /// Returns the shape of the global tensor, in elements.
    pub fn global_shape(&self) -> &[u64] {
        self.meta.shape()
    }

    /// Returns the mesh of the devices.
    pub fn mesh(&self) -> &Arc<DeviceMesh> {
        self.shard_spec.shared_mesh().expect("the constructor and the validator require a mesh")
    }

    /// Returns the placements, one for each dimension of the mesh.
    pub fn placements(&self) -> &[Placement] {
        self.shard_spec.placements().expect("the constructor and the validator require placements")
    }

    /// Returns the shape of the local tensor of a device, in elements; `None` if the device stores none.
    ///
    /// `device` is a row-major index in the mesh. A device stores a tensor if it holds the primary replica of a shard
    /// with elements.
    ///
    /// # Errors
    ///
    /// `NotABox` if the shard has too many pieces.
    pub fn local_shape(&self, device: u64) -> Result<Option<Vec<u64>>> {
        let coordinates = self.mesh().coordinates_at(device);
        if !Placement::is_first_replica(&coordinates, self.placements()) {
            return Ok(None);
        }
        let mesh_shape = self.mesh().shape();
        let shape =
            local_shape_of(self.global_shape(), mesh_shape, &coordinates, self.placements())?;
        Ok((!shape.contains(&0)).then_some(shape))
    }

    /// Returns the bytes of the local tensor of a device, 0 if the device stores none.
    ///
    /// # Errors
    ///
    /// As [`DistributedTensor::local_shape`].
    pub fn local_len(&self, device: u64) -> Result<u64> {
        let shape = self.local_shape(device)?;
        Ok(shape.map_or(0, |shape| numel(&shape).saturating_mul(self.meta.dtype().itemsize())))
    }

    /// Returns a reference for each region that a device stores, in the order of the regions.
    ///
    /// The references have no storage. Their byte offsets and strides are those in the local tensor.
    ///
    /// # Errors
    ///
    /// As [`DistributedTensor::local_shape`].
    pub fn local_references(&self, device: u64) -> Result<Vec<TensorReference>> {
        let Some(local_shape) = self.local_shape(device)? else { return Ok(Vec::new()) };
        let mesh = self.mesh();
        let coordinates = mesh.coordinates_at(device);
        let regions = Placement::local_regions(
            self.global_shape(),
            mesh.shape(),
            &coordinates,
            self.placements(),
        )?;
        let strides = row_major_strides(&local_shape);
        let starts = local_starts(&regions);
        let placements = self.shard_spec.shared_placements();
        let placements = placements.expect("the constructor and the validator require placements");
        let reference = |region: &Region| {
            let local = region.offsets().iter().zip(&starts).map(|(offset, starts)| starts[offset]);
            let elements: u64 = local.zip(&strides).map(|(local, stride)| local * stride).sum();
            let meta =
                TensorMeta::new(self.meta.dtype(), region.shape())?.with_flags(self.meta.flags());
            let slice = TensorSlice::new(region.offsets(), region.shape(), self.global_shape())?
                .with_mesh(mesh.shape(), Some(&coordinates))?;
            let spec = ShardSpec::new(slice).with_mesh(mesh.clone())?;
            Ok(TensorReference {
                meta: meta.with_strides(&strides)?,
                storage: None,
                byte_offset: elements * self.meta.dtype().itemsize(),
                shard_spec: Some(spec.with_placements(placements.clone())?),
            })
        };
        regions.iter().map(reference).collect()
    }

    /// Returns the distribution: word `b` of the node.
    pub(crate) fn to_word(&self) -> u64 {
        let chunk_log2 = match self.chunks {
            ChunkPolicy::Fixed(size) => size.log2(),
            ChunkPolicy::Fine => 0,
        };
        u64::from(self.group) << 32 | u64::from(chunk_log2)
    }

    /// Whether two leaves can have the same storages.
    fn has_same_storages(&self, other: &Self) -> bool {
        let Self { meta, shard_spec, group: _, chunks } = other;
        self.meta.dtype() == meta.dtype()
            && self.shard_spec == *shard_spec
            && self.chunks == *chunks
    }
}

/// Decodes a distribution into the number of the group and the chunks; `None` if it breaks F-068.
pub(crate) fn parse_distribution(word: u64) -> Option<(u32, ChunkPolicy)> {
    let [chunk_log2, 0, 0, 0, group @ ..] = word.to_le_bytes() else { return None };
    let chunks = match chunk_log2 {
        0 => ChunkPolicy::Fine,
        log2 => ChunkPolicy::Fixed(ChunkSize::from_log2(log2)?),
    };
    Some((u32::from_le_bytes(group), chunks))
}

/// Returns for each dimension where the runs of a product of runs begin in the local tensor, by their global offset.
fn local_starts(regions: &[Region]) -> Vec<BTreeMap<u64, u64>> {
    let rank = regions.first().map_or(0, Region::rank);
    let starts = |dim: usize| {
        let mut runs: Vec<(u64, u64)> =
            regions.iter().map(|region| (region.offsets()[dim], region.shape()[dim])).collect();
        runs.sort_unstable();
        runs.dedup();
        let mut next = 0;
        let start = |(offset, size)| {
            next += size;
            (offset, next - size)
        };
        runs.into_iter().map(start).collect()
    };
    (0..rank).map(starts).collect()
}

/// Numbers meshes, which can have thousands of ranks. Equal meshes have one number.
///
/// Most meshes are shared objects, whose ranks are hashed once.
#[derive(Default)]
pub(crate) struct MeshIds {
    by_object: BTreeMap<*const DeviceMesh, usize>,
    by_mesh: FastMap<Arc<DeviceMesh>, usize>,
}

impl MeshIds {
    pub(crate) fn have_same_mesh(&mut self, one: &ShardSpec, other: &ShardSpec) -> bool {
        match (one.shared_mesh(), other.shared_mesh()) {
            (Some(one), Some(other)) => self.id(one) == self.id(other),
            _ => false,
        }
    }

    /// Returns the number of a mesh. The mesh must outlive `self`.
    fn id(&mut self, mesh: &Arc<DeviceMesh>) -> usize {
        let Self { by_object, by_mesh } = self;
        *by_object.entry(Arc::as_ptr(mesh)).or_insert_with(|| {
            let next = by_mesh.len();
            *by_mesh.entry(mesh.clone()).or_insert(next)
        })
    }
}

/// A map with a fast hash. No result depends on its order.
type FastMap<K, V> = IndexMap<K, V, foldhash::fast::RandomState>;

/// The groups of distributed leaves of a manifest, and the devices of their meshes.
#[derive(Clone, Debug, Default)]
pub struct DistributedGroups {
    /// The first leaf of each group, by number.
    groups: Vec<DistributedTensor>,
    /// The number of the mesh of each group.
    meshes: Vec<usize>,
    /// For each mesh the device of each rank.
    devices: Vec<FastMap<u32, u64>>,
}

/// A storage of a shard for one group. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldStorage {
    /// The number of the group.
    pub group: u32,
    /// Where the storage begins in its file.
    pub offset: u64,
    /// Its length.
    pub len: u64,
    /// The size of its chunks.
    pub chunk_size: ChunkSize,
    /// Its first entry of `crcs`.
    pub first_crc: u64,
}

impl HeldStorage {
    /// Returns its entries of `crcs`.
    pub fn crc_range(&self) -> Range<u64> {
        self.first_crc..self.first_crc + self.chunk_size.count(self.len)
    }
}

/// The computed places of the storages of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldStorages {
    /// The storages of the groups, by number of the group.
    pub storages: Vec<HeldStorage>,
    /// The end of the last storage of the file, those of no group included, in bytes.
    pub end: u64,
    /// The offsets of the storages that belong to no group, in bytes.
    pub other_offsets: Vec<u64>,
    /// The number of entries of `crcs`.
    pub crcs: u64,
}

impl DistributedGroups {
    /// Collects the groups of leaves.
    ///
    /// # Errors
    ///
    /// `DistributedLeaf` (F-068) if the groups are not numbered from 0 without gaps, or if leaves of one group have other
    /// storages.
    pub fn new<'a>(leaves: impl IntoIterator<Item = &'a DistributedTensor>) -> Result<Self> {
        let failed = |note: &str| Error::new(ErrorKind::DistributedLeaf).with_detail(note);
        let mut leaves: Vec<&DistributedTensor> = leaves.into_iter().collect();
        leaves.sort_by_key(|leaf| leaf.group);
        let mut this = Self::default();
        let mut meshes = MeshIds::default();
        for leaf in leaves {
            if let Some(last) = this.groups.last().filter(|last| last.group == leaf.group) {
                if !last.has_same_storages(leaf) {
                    return Err(failed("leaves of one group differ"));
                }
                continue;
            }
            if u64::from(leaf.group) != to_u64(this.groups.len()) {
                return Err(failed("a number of a group is missing"));
            }
            let mesh = meshes.id(leaf.mesh());
            if mesh == this.devices.len() {
                this.devices.push(leaf.mesh().ranks().iter().copied().zip(0..).collect());
            }
            this.meshes.push(mesh);
            this.groups.push(leaf.clone());
        }
        Ok(this)
    }

    /// Returns the first leaf of each group, by number.
    pub fn groups(&self) -> &[DistributedTensor] {
        &self.groups
    }

    /// Returns the row-major index of a rank in the mesh of a group; `None` if the mesh does not have the rank.
    ///
    /// # Panics
    ///
    /// Panics if there is no such group.
    pub fn device(&self, group: usize, rank: u32) -> Option<u64> {
        self.devices[self.meshes[group]].get(&rank).copied()
    }

    /// Returns the groups of which a rank stores a shard, each with the device of the rank and the bytes of the shard.
    ///
    /// # Errors
    ///
    /// As [`DistributedTensor::local_shape`].
    pub fn held_by(&self, rank: u32) -> Result<Vec<(u32, u64, u64)>> {
        // Thousands of groups have one mesh.
        let devices: Vec<Option<u64>> =
            self.devices.iter().map(|devices| devices.get(&rank).copied()).collect();
        let mut held = Vec::with_capacity(self.groups.len());
        for (group, mesh) in self.groups.iter().zip(&self.meshes) {
            let Some(device) = devices[*mesh] else { continue };
            let len = group.local_len(device)?;
            if len > 0 {
                held.push((group.group, device, len));
            }
        }
        Ok(held)
    }

    /// Computes the places of the storages of the shard that a rank wrote.
    ///
    /// `others` are the storages of the shard that belong to no group.
    ///
    /// # Errors
    ///
    /// - `DistributedMismatch` (F-084) if an offset exceeds 2^63, or if a position exceeds the number of storages of groups.
    /// - As [`DistributedTensor::local_shape`].
    pub fn places(&self, rank: u32, others: &[OtherStorage]) -> Result<HeldStorages> {
        let mut cursor = Cursor { end: DATA_START, crcs: 0 };
        let held = self.held_by(rank)?;
        if others.iter().any(|other| index_to_usize(other.position) > held.len()) {
            return Err(Error::new(ErrorKind::DistributedMismatch)
                .with_detail("a position is not among the storages"));
        }
        let mut others = others.iter().peekable();
        let mut other_offsets = Vec::with_capacity(others.len());
        let mut storages = Vec::with_capacity(held.len());
        for (position, (group, _, len)) in (0_u32..).zip(held) {
            while let Some(other) = others.next_if(|other| other.position <= position) {
                other_offsets.push(cursor.push(other.stored_len, other.crcs.into())?);
            }
            let chunk_size = self.groups[index_to_usize(group)].chunks.chunk_size(len);
            let first_crc = cursor.crcs;
            let offset = cursor.push(len, chunk_size.count(len))?;
            storages.push(HeldStorage { group, offset, len, chunk_size, first_crc });
        }
        for other in others {
            other_offsets.push(cursor.push(other.stored_len, other.crcs.into())?);
        }
        let Cursor { end, crcs } = cursor;
        Ok(HeldStorages { storages, end, other_offsets, crcs })
    }
}

/// The end of the storages of a file so far.
struct Cursor {
    end: u64,
    crcs: u64,
}

impl Cursor {
    /// Places the next storage and returns its offset.
    fn push(&mut self, stored_len: u64, crcs: u64) -> Result<u64> {
        let alignment = 1 << default_align_log2(stored_len);
        let place = self.end.checked_next_multiple_of(alignment).and_then(|offset| {
            let end = offset.checked_add(stored_len).filter(|end| *end < 1 << 63)?;
            Some((offset, end))
        });
        let (offset, end) = place.ok_or_else(|| {
            Error::new(ErrorKind::DistributedMismatch).with_detail("an offset exceeds 2^63")
        })?;
        self.end = end;
        self.crcs = self.crcs.saturating_add(crcs);
        Ok(offset)
    }
}
