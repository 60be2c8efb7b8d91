//! The manifest of a shard set without distributed leaves: each one as the tensor leaf that it means.
//!
//! Spec: section 7, "Distributed leaves"; F-084.

use std::collections::{BTreeMap, BTreeSet};

use crate::archive::Archive;
use crate::convert::index_to_usize;
use crate::distributed::{DistributedGroups, DistributedTensor, HeldStorages};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::layout::encode_manifest;
use crate::lookup::find;
use crate::reference::TensorReference;
use crate::shard_file::{OtherStorage, ShardFile};
use crate::storage::StorageReference;
use crate::structure::Node;

/// Encodes a manifest anew, with the tensor leaf that each distributed leaf means.
///
/// `archives` are the archives of the shards, in their order.
///
/// # Errors
///
/// `DistributedMismatch` (F-084); `TooLarge` if the index would exceed 1 GiB.
pub(crate) fn expand_manifest(manifest: &Archive, archives: &[Archive]) -> Result<Vec<u8>> {
    let mut root = manifest.structure();
    let leaves = distributed_leaves(&root);
    let groups = DistributedGroups::new(leaves.iter().map(|(_, leaf)| leaf))?;
    let mut shards = manifest.shards();
    let places = shards.iter().zip(archives).map(|(shard, archive)| {
        shard.verify_index(archive, &groups).map_err(|error| error.with_path(&shard.name))
    });
    let places = places.collect::<Result<_>>()?;
    let mut expander = Expander {
        shards: &shards,
        archives,
        groups: &groups,
        places,
        by_group: BTreeMap::new(),
        groups_of: BTreeMap::new(),
    };
    let mut runs = BTreeMap::new();
    for (path, leaf) in &leaves {
        runs.insert(path.clone(), expander.run(path, leaf)?);
    }
    let merged = MergedStorages::new(manifest, archives, expander.groups_of.into_keys())?;
    for_each_leaf(&mut root, &mut ObjectPath::root(), &mut |path, node| match node {
        Node::Distributed(_) => {
            let run = runs.remove(path).expect("each leaf has been expanded");
            let reference = |(shard, mut reference): (u32, TensorReference)| {
                let number = reference.storage.expect("a shard has elements");
                reference.storage = Some(merged.found[&(shard, number)]);
                reference
            };
            *node = Node::Tensors(run.into_iter().map(reference).collect());
        }
        Node::StoredLeaf(_, number) => *number = merged.own[index_to_usize(*number)],
        Node::Tensors(run) => {
            for number in run.iter_mut().filter_map(|reference| reference.storage.as_mut()) {
                *number = merged.own[index_to_usize(*number)];
            }
        }
        Node::Leaf(_) | Node::Container(..) => {}
    });
    for shard in &mut shards {
        shard.others = None;
    }
    encode_manifest(&root, &merged.storages, &manifest.attrs(), &shards)
}

/// The storages of a manifest and those of its groups, sorted by (shard, offset).
struct MergedStorages {
    storages: Vec<StorageReference>,
    /// The new number of each storage of the manifest.
    own: Vec<u32>,
    /// The number of each storage of a group, by shard and by its number in the archive of the shard.
    found: BTreeMap<(u32, u32), u32>,
}

impl MergedStorages {
    /// Adds storages of archives, which have their shard and their number there, to those of a manifest.
    ///
    /// # Errors
    ///
    /// `DistributedMismatch` (F-084) if the manifest names one of them.
    fn new(
        manifest: &Archive,
        archives: &[Archive],
        added: impl Iterator<Item = (u32, u32)>,
    ) -> Result<Self> {
        let place = |storage: &StorageReference| (storage.shard, storage.offset);
        let own = (0..manifest.storage_count()).map(|number| manifest.storage(number));
        let mut storages: BTreeMap<_, _> = own.map(|storage| (place(&storage), storage)).collect();
        let own_places: Vec<(u32, u64)> = storages.keys().copied().collect();
        let mut added_places = Vec::new();
        for (shard, number) in added {
            let archive = &archives[index_to_usize(shard)];
            let storage = StorageReference { shard, ..archive.storage(number) };
            added_places.push(((shard, number), place(&storage)));
            if storages.insert(place(&storage), storage).is_some() {
                let file = &manifest.shards()[index_to_usize(shard)];
                return Err(mismatch(file, "the manifest names a storage of a group"));
            }
        }
        let numbers: BTreeMap<(u32, u64), u32> = storages.keys().copied().zip(0..).collect();
        Ok(Self {
            own: own_places.iter().map(|place| numbers[place]).collect(),
            found: added_places.into_iter().map(|(key, place)| (key, numbers[&place])).collect(),
            storages: storages.into_values().collect(),
        })
    }
}

/// Returns the distributed leaves of a tree with their paths.
fn distributed_leaves(root: &Node) -> Vec<(ObjectPath, DistributedTensor)> {
    let leaves = root.clone().into_leaves().into_iter();
    let distributed = leaves.filter_map(|(path, node)| match node {
        Node::Distributed(leaf) => Some((path, leaf)),
        _ => None,
    });
    distributed.collect()
}

/// Calls `visit` with each node that is no container, and its path.
fn for_each_leaf(
    node: &mut Node,
    path: &mut ObjectPath,
    visit: &mut impl FnMut(&ObjectPath, &mut Node),
) {
    let Node::Container(_, children) = node else { return visit(path, node) };
    for (step, child) in children {
        path.push(step.clone());
        for_each_leaf(child, path, visit);
        path.pop();
    }
}

/// The shards of distributed leaves, found in the archives that hold them.
struct Expander<'a> {
    shards: &'a [ShardFile],
    archives: &'a [Archive],
    groups: &'a DistributedGroups,
    /// The computed places in each shard that has them.
    places: Vec<Option<HeldStorages>>,
    /// The storage of each group in each shard that has one.
    by_group: BTreeMap<(u32, u32), u32>,
    /// The group of each storage: shard, and number in the archive of the shard.
    groups_of: BTreeMap<(u32, u32), u32>,
}

impl Expander<'_> {
    /// Returns the run that a distributed leaf means. Each reference has its shard, and the number of its storage there.
    fn run(
        &mut self,
        path: &ObjectPath,
        leaf: &DistributedTensor,
    ) -> Result<Vec<(u32, TensorReference)>> {
        let mut run = Vec::new();
        for (shard, file) in (0_u32..).zip(self.shards) {
            let Some(device) = self.groups.device(index_to_usize(leaf.group), file.writer) else {
                continue;
            };
            let mut references = leaf.local_references(device)?;
            if references.is_empty() {
                continue;
            }
            let archive = &self.archives[index_to_usize(shard)];
            let storage = leaf.find_references(archive, path, &references);
            let storage = storage.map_err(|note| mismatch(file, note).with_path(path))?;
            if !self.is_in_place(shard, leaf.group, archive.storage(storage).offset) {
                return Err(mismatch(file, "the storage of another group is there").with_path(path));
            }
            if *self.by_group.entry((leaf.group, shard)).or_insert(storage) != storage {
                return Err(
                    mismatch(file, "leaves of one group are in two storages").with_path(path)
                );
            }
            if *self.groups_of.entry((shard, storage)).or_insert(leaf.group) != leaf.group {
                return Err(mismatch(file, "two groups are in one storage").with_path(path));
            }
            for reference in &mut references {
                reference.storage = Some(storage);
            }
            run.extend(references.into_iter().map(|reference| (shard, reference)));
        }
        Ok(run)
    }

    /// Whether the storage at an offset of a shard is that of a group, as far as places are computed.
    fn is_in_place(&self, shard: u32, group: u32, offset: u64) -> bool {
        let Some(places) = &self.places[index_to_usize(shard)] else { return true };
        let found = places.storages.binary_search_by_key(&group, |place| place.group);
        found.is_ok_and(|at| places.storages[at].offset == offset)
    }
}

impl DistributedTensor {
    /// Returns the number of the storage that holds the local tensor of a device, in the archive of the device.
    ///
    /// `path` is the path of the leaf.
    ///
    /// # Errors
    ///
    /// - `DistributedMismatch` (F-084) if the archive does not hold it.
    /// - As [`DistributedTensor::local_shape`].
    pub fn find_storage(&self, archive: &Archive, path: &ObjectPath, device: u64) -> Result<u32> {
        let found = self.find_references(archive, path, &self.local_references(device)?);
        found.map_err(|note| {
            Error::new(ErrorKind::DistributedMismatch).with_detail(note).with_path(path)
        })
    }

    /// Returns the storage of these references in an archive, or what is wrong with the archive.
    fn find_references(
        &self,
        archive: &Archive,
        path: &ObjectPath,
        expected: &[TensorReference],
    ) -> Result<u32, &'static str> {
        if !archive.shards().is_empty() {
            return Err("it is a manifest");
        }
        let node = find(&archive.index_views(), path).map_err(|_| "the leaf is missing")?;
        let Node::Tensors(found) = archive.decode_node(node) else {
            return Err("the leaf is no tensor");
        };
        let number = match_references(&found, expected)?;
        let storage = archive.storage(number);
        if storage.base.is_some() {
            return Err("the leaf is in a delta storage");
        }
        let elements: u64 = expected.iter().map(|each| each.meta.numel()).sum();
        if storage.len != elements * self.meta.dtype().itemsize() {
            return Err("the storage does not hold the local tensor alone");
        }
        let is_raw = storage.compressed_layout.is_none();
        if is_raw && storage.chunk_size != self.chunks.chunk_size(storage.len) {
            return Err("the storage has chunks of another size");
        }
        Ok(number)
    }
}

/// Returns the storage of references if they are the expected ones, or what is wrong with them.
pub(crate) fn match_references(
    found: &[TensorReference],
    expected: &[TensorReference],
) -> Result<u32, &'static str> {
    let is_same = found.len() == expected.len()
        && found.iter().zip(expected).all(|(one, other)| is_same_part(one, other));
    if !is_same {
        return Err("the leaf has another dtype, other flags, regions or places");
    }
    let storages: BTreeSet<Option<u32>> = found.iter().map(|each| each.storage).collect();
    let only = storages.first().copied().flatten().filter(|_| storages.len() == 1);
    only.ok_or("the leaf is in several storages")
}

/// Whether two references are to the same region at the same place of a storage.
fn is_same_part(one: &TensorReference, other: &TensorReference) -> bool {
    let place = |reference: &TensorReference| {
        let slice = reference.shard_spec.as_ref()?.slice();
        let vectors = [slice.global_shape(), slice.mesh_shape()].map(<[u64]>::to_vec);
        Some((slice.region().clone(), vectors))
    };
    // Two files can describe a dtype under two numbers.
    let dtype = |reference: &TensorReference| {
        let dtype = reference.meta.dtype();
        let name = dtype.name().to_owned();
        (name, dtype.itemsize(), dtype.bits(), dtype.values(), dtype.class().number())
    };
    let layout = |reference: &TensorReference| {
        let meta = &reference.meta;
        (meta.shape().to_vec(), meta.explicit_strides().map(<[u64]>::to_vec), meta.flags())
    };
    one.byte_offset == other.byte_offset
        && layout(one) == layout(other)
        && place(one) == place(other)
        && (one.meta.dtype() == other.meta.dtype() || dtype(one) == dtype(other))
}

/// Checks that the storages of an archive are where the manifest says (F-084, "Places").
fn verify_places(
    file: &ShardFile,
    archive: &Archive,
    groups: &DistributedGroups,
    others: &[OtherStorage],
) -> Result<HeldStorages> {
    let places = groups.places(file.writer, others)?;
    let count = places.storages.len() + others.len();
    // The storages of a manifest are in other files.
    let is_manifest = !archive.index_views().shards.is_empty();
    let found = if is_manifest { 0 } else { archive.storage_count() };
    if usize::try_from(found).ok() != Some(count) {
        return Err(no_match("another number of storages"));
    }
    let mut held = places.storages.iter().peekable();
    let mut others = others.iter().zip(&places.other_offsets).peekable();
    let (mut position, mut first_crc) = (0, 0);
    for number in 0..found {
        let storage = archive.storage(number);
        let crcs = u64::try_from(storage.crcs.len()).unwrap_or(u64::MAX);
        let is_other = others.peek().is_some_and(|(other, _)| other.position <= position)
            || held.peek().is_none();
        let is_in_place = if is_other {
            let other = others.next();
            other.is_some_and(|(other, offset)| {
                *offset == storage.offset
                    && other.stored_len == storage.stored_len()
                    && u64::from(other.crcs) == crcs
            })
        } else {
            position += 1;
            held.next().is_some_and(|place| {
                storage.compressed_layout.is_none()
                    && storage.offset == place.offset
                    && storage.len == place.len
                    && storage.chunk_size == place.chunk_size
                    && first_crc == place.first_crc
            })
        };
        if !is_in_place {
            return Err(no_match("a storage is at another place").with_offset(storage.offset));
        }
        first_crc += crcs;
    }
    Ok(places)
}

fn no_match(note: &str) -> Error {
    Error::new(ErrorKind::DistributedMismatch).with_detail(note)
}

fn mismatch(file: &ShardFile, note: &str) -> Error {
    Error::new(ErrorKind::DistributedMismatch).with_detail(format_args!("{}: {note}", file.name))
}

impl ShardFile {
    /// Checks that checksum table and storages of an archive are where the manifest says (F-084).
    ///
    /// Returns the places of the storages of groups, if they are computed.
    ///
    /// # Errors
    ///
    /// `DistributedMismatch`.
    pub(crate) fn verify_index(
        &self,
        archive: &Archive,
        groups: &DistributedGroups,
    ) -> Result<Option<HeldStorages>> {
        if archive.crc_table() != self.crcs {
            return Err(no_match("another checksum table"));
        }
        let others = self.others.as_deref();
        others.map(|others| verify_places(self, archive, groups, others)).transpose()
    }
}
