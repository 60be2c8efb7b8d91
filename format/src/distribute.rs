//! The choice of tensor leaves that a manifest describes as distributed leaves.
//!
//! Spec: section 7, "Distributed leaves". The inverse is `expand`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::archive::Archive;
use crate::chunk::ChunkPolicy;
use crate::convert::index_to_usize;
use crate::distributed::{DistributedGroups, DistributedTensor, MeshIds};
use crate::error::Result;
use crate::expand::match_references;
use crate::held_parts::held_parts;
use crate::key::ObjectPath;
use crate::reference::TensorReference;
use crate::region::Region;
use crate::shard_file::{OtherStorage, ShardFile};
use crate::storage::StorageReference;
use crate::structure::Node;
use crate::tensor::TensorMeta;

/// What a manifest describes: its tree, its storages by (shard, offset), and the archives that hold them.
#[derive(Clone, Debug)]
pub struct ManifestContent {
    /// The tree. Storages have their index in `storages`.
    pub root: Node,
    /// The storages that leaves of the tree name.
    pub storages: Vec<StorageReference>,
    /// The archives, by number of the shard.
    pub shards: Vec<ShardFile>,
}

impl ManifestContent {
    /// Describes tensor leaves as distributed leaves, if their shards follow from mesh and placements.
    ///
    /// These are leaves of several shards. Each device must hold its part in a storage of its own, which no leaf names
    /// that is divided in another way. Does nothing if the leaves with such slices have fewer than `min_slices` in all.
    /// The content does not change: see [`Archive::from_shard_set`].
    ///
    /// `archives` are the archives of the shards, in their order.
    pub fn distribute(&mut self, archives: &[&Archive], min_slices: usize) {
        let mut candidates = Vec::new();
        let mut finder = CandidateFinder::new(&self.shards, &self.storages);
        for_each_leaf(&mut self.root, &mut |leaf, node| {
            if let Node::Tensors(run) = node {
                candidates.extend(finder.find(leaf, run));
            }
        });
        let slices: usize = candidates.iter().map(|candidate| candidate.slices).sum();
        if candidates.is_empty() || slices < min_slices {
            return;
        }
        self.retain_unmerged(&mut candidates, archives);
        let mut users = StorageUsers::new(self.storages.len());
        for_each_leaf(&mut self.root, &mut |leaf, node| users.add(leaf, node));
        let chosen = choose(candidates, &users);
        if chosen.is_empty() {
            return;
        }
        let leaves: Vec<DistributedTensor> =
            chosen.values().map(|candidate| candidate.tensor.clone()).collect();
        let Ok(groups) = DistributedGroups::new(&leaves) else { return };
        let (held, none) = (self.remove_groups(chosen), HeldOffsets::new());
        for (number, shard) in (0_u32..).zip(&mut self.shards) {
            let archive = archives[index_to_usize(number)];
            let own = held.get(&number).unwrap_or(&none);
            shard.others = other_storages(archive, shard.writer, own, &groups).unwrap_or_default();
        }
    }

    /// Removes candidates of which an archive has other regions than the run, such as replicas that the merge left out.
    fn retain_unmerged(&self, candidates: &mut Vec<Candidate>, archives: &[&Archive]) {
        let paths: Vec<ObjectPath> = leaf_paths(&self.root);
        for (shard, archive) in (0_u32..).zip(archives) {
            let leaves: BTreeMap<ObjectPath, Node> =
                archive.structure().into_leaves().into_iter().collect();
            candidates.retain(|candidate| {
                let shard_of = |number: &u32| self.storages[index_to_usize(*number)].shard;
                let Ok(at) = candidate.storages.binary_search_by_key(&shard, shard_of) else {
                    return true;
                };
                let place = &self.storages[index_to_usize(candidate.storages[at])];
                let leaf = leaves.get(&paths[candidate.leaf]);
                let found = candidate.tensor.find_in_leaf(candidate.devices[at], leaf);
                found.is_some_and(|number| archive.storage(number).offset == place.offset)
            });
        }
    }

    /// Replaces the chosen leaves, and removes their storages.
    ///
    /// Returns for each shard the groups of the removed storages, by offset.
    fn remove_groups(
        &mut self,
        mut chosen: BTreeMap<usize, Candidate>,
    ) -> BTreeMap<u32, HeldOffsets> {
        let mut groups = vec![None; self.storages.len()];
        for candidate in chosen.values() {
            for number in &candidate.storages {
                groups[index_to_usize(*number)] = Some(candidate.tensor.group);
            }
        }
        let mut held: BTreeMap<u32, HeldOffsets> = BTreeMap::new();
        let mut numbers = vec![0_u32; groups.len()];
        let mut kept = Vec::new();
        for (old, storage) in std::mem::take(&mut self.storages).into_iter().enumerate() {
            if let Some(group) = groups[old] {
                held.entry(storage.shard).or_default().insert(storage.offset, group);
            } else {
                numbers[old] = u32::try_from(kept.len()).expect("fewer than before");
                kept.push(storage);
            }
        }
        self.storages = kept;
        for_each_leaf(&mut self.root, &mut |leaf, node| {
            let number = |old: &mut u32| *old = numbers[index_to_usize(*old)];
            match (chosen.remove(&leaf), node) {
                (Some(candidate), node) => *node = Node::Distributed(candidate.tensor),
                (None, Node::StoredLeaf(_, storage)) => number(storage),
                (None, Node::Tensors(run)) => {
                    run.iter_mut().filter_map(|each| each.storage.as_mut()).for_each(number);
                }
                (None, _) => {}
            }
        });
        held
    }
}

impl DistributedTensor {
    /// Returns the storage of the local tensor of a device, if a leaf of its archive has its regions and no others.
    fn find_in_leaf(&self, device: u64, leaf: Option<&Node>) -> Option<u32> {
        let Node::Tensors(found) = leaf? else { return None };
        match_references(found, &self.local_references(device).ok()?).ok()
    }
}

/// Returns the paths of all nodes that are no containers, in insertion order, depth first.
fn leaf_paths(root: &Node) -> Vec<ObjectPath> {
    root.clone().into_leaves().into_iter().map(|(path, _)| path).collect()
}

/// The groups of storages of one shard, by the offset of the storage.
type HeldOffsets = BTreeMap<u64, u32>;

/// Calls `visit` with each node that is no container, and its number in insertion order, depth first.
fn for_each_leaf(root: &mut Node, visit: &mut impl FnMut(usize, &mut Node)) {
    fn descend(node: &mut Node, next: &mut usize, visit: &mut impl FnMut(usize, &mut Node)) {
        if let Node::Container(_, children) = node {
            for (_, child) in children {
                descend(child, next, visit);
            }
        } else {
            visit(*next, node);
            *next += 1;
        }
    }
    descend(root, &mut 0, visit);
}

/// A tensor leaf that can be a distributed leaf, if its storages hold nothing else.
struct Candidate {
    leaf: usize,
    /// The number of the group is set later.
    tensor: DistributedTensor,
    /// The storages of its devices, by shard.
    storages: Vec<u32>,
    /// The device of each of these storages.
    devices: Vec<u64>,
    slices: usize,
}

/// Finds leaves whose slices follow from mesh and placements.
struct CandidateFinder<'a> {
    storages: &'a [StorageReference],
    /// The shard of each rank that is the writer of exactly one.
    shards: BTreeMap<u32, u32>,
    meshes: MeshIds,
}

impl<'a> CandidateFinder<'a> {
    fn new(shards: &[ShardFile], storages: &'a [StorageReference]) -> Self {
        let mut by_rank: BTreeMap<u32, Option<u32>> = BTreeMap::new();
        for (number, shard) in (0_u32..).zip(shards) {
            by_rank.entry(shard.writer).and_modify(|found| *found = None).or_insert(Some(number));
        }
        let single = by_rank.into_iter().filter_map(|(rank, shard)| Some((rank, shard?)));
        Self { storages, shards: single.collect(), meshes: MeshIds::default() }
    }

    /// Returns the distributed leaf that means the same as a run of slices, if there is one.
    fn find(&mut self, leaf: usize, run: &[TensorReference]) -> Option<Candidate> {
        let [first, _, ..] = run else { return None };
        let spec = first.shard_spec.as_ref()?;
        let (mesh, placements) = (spec.shared_mesh()?, spec.shared_placements()?);
        let meta = TensorMeta::new(first.meta.dtype(), spec.slice().global_shape()).ok()?;
        let meta = meta.with_flags(first.meta.flags());
        let (mesh, placements) = (mesh.clone(), placements.clone());
        let chunks = ChunkPolicy::default();
        let mut tensor = DistributedTensor::new(meta, mesh, placements, 0, chunks).ok()?;
        let mut rest = run;
        let mut own = Vec::with_capacity(tensor.mesh().ranks().len());
        let mut devices = Vec::with_capacity(own.capacity());
        for (shard, device) in self.devices_by_shard(&tensor)? {
            // A long run of another form is recognized by its first slice.
            let (count, len) = self.match_device(&tensor, device, rest)?;
            let (part, tail) = rest.split_at(count);
            rest = tail;
            let Some(first) = part.first() else { continue };
            let number = first.storage?;
            let storage = &self.storages[index_to_usize(number)];
            let is_alone = part.iter().all(|each| each.storage == Some(number));
            if storage.shard != shard || storage.len != len || !is_alone {
                return None;
            }
            own.push(number);
            devices.push(device);
        }
        if !rest.is_empty() {
            return None;
        }
        // A reader must be able to plan.
        let (shape, mesh) = (tensor.global_shape(), tensor.mesh().shape());
        held_parts(shape, mesh, tensor.placements(), &Region::whole(shape)).ok()?;
        let storages = own.iter().map(|number| &self.storages[index_to_usize(*number)]);
        tensor.chunks = common_chunks(storages)?;
        Some(Candidate { leaf, tensor, storages: own, devices, slices: run.len() })
    }

    /// Returns the devices of a tensor with their shards, in the order of the shards.
    fn devices_by_shard(&self, tensor: &DistributedTensor) -> Option<Vec<(u32, u64)>> {
        let ranks = tensor.mesh().ranks().iter();
        let devices = ranks.zip(0..).map(|(rank, device)| Some((*self.shards.get(rank)?, device)));
        let mut devices: Vec<(u32, u64)> = devices.collect::<Option<_>>()?;
        devices.sort_unstable();
        Some(devices)
    }

    /// Checks that a run begins with the slices of a device. Returns their number, and the bytes of the local tensor.
    fn match_device(
        &mut self,
        tensor: &DistributedTensor,
        device: u64,
        run: &[TensorReference],
    ) -> Option<(usize, u64)> {
        let expected = tensor.local_references(device).ok()?;
        let found = run.get(..expected.len())?;
        let is_same = |(one, other): (&TensorReference, &TensorReference)| {
            let (Some(found), Some(expected)) = (&one.shard_spec, &other.shard_spec) else {
                return false;
            };
            one.meta == other.meta
                && one.byte_offset == other.byte_offset
                && found.slice() == expected.slice()
                && found.placements() == expected.placements()
                && self.meshes.have_same_mesh(found, expected)
        };
        if !found.iter().zip(&expected).all(is_same) {
            return None;
        }
        let elements: u64 = expected.iter().map(|each| each.meta.numel()).sum();
        Some((expected.len(), elements * tensor.meta.dtype().itemsize()))
    }
}

/// Returns how all raw storages are split into chunks, if they are split alike.
fn common_chunks<'a>(
    storages: impl Iterator<Item = &'a StorageReference> + Clone,
) -> Option<ChunkPolicy> {
    let raw = storages.filter(|storage| storage.compressed_layout.is_none());
    let first = raw.clone().next();
    let fixed = first.map_or_else(ChunkPolicy::default, |it| ChunkPolicy::Fixed(it.chunk_size));
    let fits = |policy: &ChunkPolicy| {
        raw.clone().all(|storage| storage.chunk_size == policy.chunk_size(storage.len))
    };
    [fixed, ChunkPolicy::Fine].into_iter().find(fits)
}

/// The leaves that name each storage.
struct StorageUsers(Vec<BTreeSet<usize>>);

impl StorageUsers {
    fn new(storages: usize) -> Self {
        Self(vec![BTreeSet::new(); storages])
    }

    fn add(&mut self, leaf: usize, node: &Node) {
        for storage in node.storages() {
            self.0[index_to_usize(storage)].insert(leaf);
        }
    }
}

/// Returns the candidates whose storages no other leaf names, except tied ones of the same form, by leaf.
///
/// Sets the numbers of their groups.
fn choose(candidates: Vec<Candidate>, users: &StorageUsers) -> BTreeMap<usize, Candidate> {
    let mut by_storages: BTreeMap<Vec<u32>, Vec<Candidate>> = BTreeMap::new();
    for candidate in candidates {
        by_storages.entry(candidate.storages.clone()).or_default().push(candidate);
    }
    let mut groups: Vec<Vec<Candidate>> = by_storages
        .into_values()
        .filter(|tied| {
            let leaves: BTreeSet<usize> = tied.iter().map(|candidate| candidate.leaf).collect();
            let first = &tied[0];
            let is_alike = |other: &Candidate| {
                first.tensor.shard_spec == other.tensor.shard_spec
                    && first.tensor.meta.dtype() == other.tensor.meta.dtype()
            };
            let is_alone = |storage: &u32| users.0[index_to_usize(*storage)] == leaves;
            tied.iter().all(is_alike) && first.storages.iter().all(is_alone)
        })
        .collect();
    groups.sort_by_key(|tied| tied[0].leaf);
    let mut chosen = BTreeMap::new();
    for (group, tied) in (0..).zip(groups) {
        for mut candidate in tied {
            candidate.tensor.group = group;
            chosen.insert(candidate.leaf, candidate);
        }
    }
    chosen
}

/// Returns the storages of an archive that belong to no group, if the places of all storages can be computed.
fn other_storages(
    archive: &Archive,
    writer: u32,
    held: &HeldOffsets,
    groups: &DistributedGroups,
) -> Result<Option<Arc<[OtherStorage]>>> {
    let mut others = Vec::new();
    let mut found = Vec::new();
    let (mut position, mut crcs) = (0, 0);
    for number in 0..archive.storage_count() {
        let storage = archive.storage(number);
        let entries = u32::try_from(storage.crcs.len()).unwrap_or(u32::MAX);
        if let Some(group) = held.get(&storage.offset) {
            position += 1;
            let is_raw = storage.compressed_layout.is_none();
            found.push((*group, storage.offset, storage.len, is_raw, crcs));
        } else {
            others.push(OtherStorage { position, stored_len: storage.stored_len(), crcs: entries });
        }
        crcs += u64::from(entries);
    }
    let places = groups.places(writer, &others)?;
    let computed =
        places.storages.iter().map(|it| (it.group, it.offset, it.len, true, it.first_crc));
    let is_computed = computed.eq(found.iter().copied())
        && places.crcs == crcs
        && places.end.checked_next_multiple_of(64) == Some(archive.index_range().start);
    Ok(is_computed.then(|| others.into()))
}
