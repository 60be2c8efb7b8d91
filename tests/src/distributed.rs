//! Shard sets whose tensors are divided by mesh and placements.
#![expect(clippy::unwrap_used, reason = "test support fails by panicking")]

use std::sync::Arc;

use tssd_format::{
    Archive, Attrs, ChunkPolicy, Container, CrcTable, DeviceMesh, Dict, DistributedGroups,
    DistributedTensor, Dtype, ManifestContent, MapKey, Node, Options, Placement, Shard, ShardFile,
    ShardSpec, StateDict, Step, Storage, StorageReference, Tensor, TensorMeta, TensorReference,
    TensorSlice, TorchStoreStateDict, Value, encode_manifest, row_major_strides,
};
use tssd_store::plan::{RegionRequest, TensorLeaf};

/// A global tensor and how it is divided.
#[derive(Clone, Debug)]
pub struct GlobalTensor {
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// The mesh whose devices hold it.
    pub mesh: DeviceMesh,
    /// One placement for each dimension of the mesh.
    pub placements: Vec<Placement>,
}

impl GlobalTensor {
    /// Returns the shards that a rank stores: its local tensor, as a store puts it.
    ///
    /// An element is its row-major index in the global tensor, as an int32. Replicas are empty shards. `None` if the rank
    /// is not in the mesh, or if the shard would be a replica of a scalar, which cannot be empty.
    ///
    /// # Panics
    ///
    /// If the placements do not fit the shape.
    pub fn shards_of(&self, rank: u32) -> Option<Value> {
        let coordinates = self.mesh.coordinates_of(rank)?;
        let Self { shape, mesh, placements } = self;
        let is_stored = Placement::is_first_replica(&coordinates, placements);
        if shape.is_empty() && !is_stored {
            return None;
        }
        let regions =
            Placement::local_regions(shape, mesh.shape(), &coordinates, placements).unwrap();
        let held = |dim: usize| -> Vec<u64> {
            let mut indices: Vec<u64> = regions
                .iter()
                .flat_map(|region| {
                    let start = region.offsets()[dim];
                    start..start + region.shape()[dim]
                })
                .collect();
            indices.sort_unstable();
            indices.dedup();
            indices
        };
        let held: Vec<Vec<u64>> = (0..shape.len()).map(held).collect();
        let local_shape: Vec<u64> = held.iter().map(|indices| indices.len() as u64).collect();
        let storage = Storage::from(elements(shape, &held));
        let shard = |offsets: &[u64], size: &[u64]| {
            let slice = TensorSlice::new(offsets, size, shape).unwrap();
            let slice = slice.with_mesh(mesh.shape(), Some(&coordinates)).unwrap();
            let spec = ShardSpec::new(slice).with_mesh(mesh.clone()).unwrap();
            let spec = spec.with_placements(placements.clone()).unwrap();
            let meta = TensorMeta::new(Dtype::Int32, size).unwrap();
            if meta.numel() == 0 {
                return Shard::new(Tensor::new(meta, Storage::default(), 0).unwrap(), spec)
                    .unwrap();
            }
            let strides = row_major_strides(&local_shape);
            let first: u64 = (0..shape.len())
                .map(|dim| {
                    let at = held[dim].binary_search(&offsets[dim]).unwrap();
                    at as u64 * strides[dim]
                })
                .sum();
            let meta = meta.with_strides(&strides).unwrap();
            Shard::new(Tensor::new(meta, storage.clone(), 4 * first).unwrap(), spec).unwrap()
        };
        if !is_stored {
            let zeros = vec![0; shape.len()];
            return Some(Value::Shards(vec![shard(&zeros, &zeros)]));
        }
        let shards = regions.iter().map(|region| shard(region.offsets(), region.shape()));
        Some(Value::Shards(shards.collect()))
    }
}

/// Returns the elements with these indices in each dimension, in row-major order.
fn elements(shape: &[u64], held: &[Vec<u64>]) -> Vec<u8> {
    let mut indices = vec![0_u64];
    for (held, stride) in held.iter().zip(row_major_strides(shape)) {
        indices =
            indices.iter().flat_map(|at| held.iter().map(move |own| at + own * stride)).collect();
    }
    indices.iter().flat_map(|index| i32::try_from(*index).unwrap().to_le_bytes()).collect()
}

/// The archives of writers 0, 1, 2 and so on, and the content of their manifest without distributed leaves.
#[derive(Debug)]
pub struct WrittenSet {
    /// The files by name.
    pub files: Vec<(String, Vec<u8>)>,
    archives: Vec<Archive>,
    content: ManifestContent,
}

impl WrittenSet {
    /// Encodes the state dicts of the writers and merges them.
    ///
    /// The leaves of the root that several writers hold are slices of one tensor.
    ///
    /// # Panics
    ///
    /// If the state dicts do not fit together.
    pub fn new(dicts: &[Dict], options: &Options) -> Self {
        let mut files = Vec::new();
        let mut archives = Vec::new();
        let mut shards: Vec<ShardFile> = Vec::new();
        let mut storages = Vec::new();
        let mut leaves: Vec<(Step, Node)> = Vec::new();
        for (writer, dict) in (0_u32..).zip(dicts) {
            let dict = StateDict::from_value(Value::Dict(dict.clone())).unwrap();
            let encoded = TorchStoreStateDict::with_options(&dict, options).unwrap();
            let bytes = encoded.as_bytes().to_vec();
            let archive = Archive::from_bytes(bytes.clone()).unwrap();
            let first = u32::try_from(storages.len()).unwrap();
            storages.extend(
                (0..archive.storage_count())
                    .map(|number| StorageReference { shard: writer, ..archive.storage(number) }),
            );
            let Node::Container(_, own) = archive.structure() else { unreachable!() };
            for (step, mut node) in own {
                shift_storages(&mut node, first);
                let known = leaves.iter_mut().find(|(other, _)| *other == step);
                match (known, node) {
                    (Some((_, Node::Tensors(run))), Node::Tensors(own)) => run.extend(own),
                    (Some(_), _) => panic!("two writers hold `{step}`"),
                    (None, node) => leaves.push((step, node)),
                }
            }
            let name = format!("{writer}.tssd");
            shards.push(archive.shard_file(&name, writer));
            archives.push(archive);
            files.push((name, bytes));
        }
        for (_, node) in &mut leaves {
            let Node::Tensors(run) = node else { continue };
            let first = run[0].clone();
            run.retain(|reference| reference.meta.numel() > 0);
            if run.is_empty() {
                run.push(first);
            }
        }
        let root = Node::Container(Container::Dict, leaves);
        Self { files, archives, content: ManifestContent { root, storages, shards } }
    }

    /// Returns the manifest, with distributed leaves where possible.
    ///
    /// # Panics
    ///
    /// If it cannot be encoded.
    pub fn distributed_manifest(&self) -> Vec<u8> {
        let mut content = self.content.clone();
        content.distribute(&self.archives.iter().collect::<Vec<_>>(), 0);
        let ManifestContent { root, storages, shards } = content;
        encode_manifest(&root, &storages, &Attrs::new(), &shards).unwrap()
    }

    /// Returns the manifest without distributed leaves.
    ///
    /// # Panics
    ///
    /// If it cannot be encoded.
    pub fn explicit_manifest(&self) -> Vec<u8> {
        let ManifestContent { root, storages, shards } = &self.content;
        encode_manifest(root, storages, &Attrs::new(), shards).unwrap()
    }
}

fn shift_storages(node: &mut Node, first: u32) {
    match node {
        Node::Tensors(run) => {
            for TensorReference { storage, .. } in run {
                *storage = storage.map(|number| number + first);
            }
        }
        Node::StoredLeaf(_, number) => *number += first,
        Node::Container(_, children) => {
            for (_, child) in children {
                shift_storages(child, first);
            }
        }
        Node::Leaf(_) | Node::Distributed(_) => {}
    }
}

/// A model of many tensors whose rows (FSDP) and columns (TP) the dimensions of a mesh divide. It has no bytes.
pub struct LargeModel {
    tensors: Vec<(String, DistributedTensor)>,
    shards: Vec<ShardFile>,
}

impl LargeModel {
    /// Where the index of each archive begins.
    pub const INDEX_OFF: u64 = 1 << 39;

    /// Creates tensors of `bfloat16` with different numbers of rows, which the mesh does not divide.
    ///
    /// The mesh has two dimensions, and ranks from 0 on.
    ///
    /// # Panics
    ///
    /// If there are more than 10^6 tensors.
    pub fn new(tensors: u32, mesh: &Arc<DeviceMesh>) -> Self {
        let placements: Arc<[Placement]> =
            [Placement::Shard { dim: 0 }, Placement::Shard { dim: 1 }].into();
        let tensor = |number: u32| {
            let shape = [8193 + 2 * u64::from(number), 1024];
            let meta = TensorMeta::new(Dtype::Bfloat16, &shape).unwrap();
            let (mesh, placements) = (mesh.clone(), placements.clone());
            let chunks = ChunkPolicy::default();
            let tensor = DistributedTensor::new(meta, mesh, placements, number, chunks).unwrap();
            (format!("model.layers.{}.mlp.experts.{}.weight", number / 8, number % 8), tensor)
        };
        let shard = |rank: &u32| ShardFile {
            name: format!("{rank}-{:032x}.tssd", u128::from(*rank) << 77),
            file_len: 1 << 40,
            index_off: Self::INDEX_OFF,
            index_crc32: *rank,
            writer: *rank,
            digest: None,
            crcs: CrcTable::default(),
            others: Some([].into()),
        };
        let shards = mesh.ranks().iter().map(shard).collect();
        Self { tensors: (0..tensors).map(tensor).collect(), shards }
    }

    /// Returns the groups of the tensors.
    ///
    /// # Panics
    ///
    /// Never: their numbers have no gaps.
    pub fn groups(&self) -> DistributedGroups {
        DistributedGroups::new(self.tensors.iter().map(|(_, tensor)| tensor)).unwrap()
    }

    /// Returns the manifest. `crcs` has the checksum table of each writer.
    ///
    /// # Panics
    ///
    /// If it cannot be encoded.
    pub fn manifest(&self, crcs: impl Fn(u32) -> CrcTable) -> Vec<u8> {
        let mut shards = self.shards.clone();
        for shard in &mut shards {
            shard.crcs = crcs(shard.writer);
        }
        let leaf = |(name, tensor): &(String, DistributedTensor)| {
            (Step::Key(name.as_str().into()), Node::Distributed(tensor.clone()))
        };
        let root = Node::Container(Container::Dict, self.tensors.iter().map(leaf).collect());
        encode_manifest(&root, &[], &Attrs::new(), &shards).unwrap()
    }
}

/// Returns the request of one of 8 readers that divide a dimension of a tensor.
///
/// # Panics
///
/// If the tensor does not have the dimension.
pub fn eighth(leaf: TensorLeaf<'_>, dim: u32, reader: u64) -> RegionRequest {
    let global_shape = leaf.global_shape();
    let placements = [Placement::Shard { dim }];
    let region = Placement::local_region(global_shape, &[8], &[reader], &placements).unwrap();
    let meta = TensorMeta::new(leaf.dtype(), region.shape()).unwrap();
    RegionRequest { region, global_shape: global_shape.into(), meta }
}

/// Returns a dict with these entries, without those that are `None`.
pub fn dict_with(entries: impl IntoIterator<Item = (&'static str, Option<Value>)>) -> Dict {
    let mut dict = Dict::new();
    for (name, value) in entries {
        if let Some(value) = value {
            dict.insert(MapKey::from(name), value);
        }
    }
    dict
}
