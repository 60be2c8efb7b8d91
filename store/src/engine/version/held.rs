//! The storages of distributed leaves, which are described when they are read for the first time.

use std::collections::BTreeMap;
use std::sync::Arc;

use tssd_format::{
    Archive, Blob, DistributedGroups, DistributedTensor, Error as FormatError,
    ErrorKind as FormatKind, HeldStorage, Node, ObjectPath, Result, ShardFile, StorageReference,
};

use crate::blob::VerifiedChunks;
use crate::convert::to_usize;
use crate::engine::lazy_path::{LazyPath, for_each_leaf};
use crate::io::sync::Lock;
use crate::plan::{StorageId, group_fingerprint};

/// The storages of the groups of a manifest. A manifest does not record their places and checksums.
pub(crate) struct HeldStorages {
    groups: DistributedGroups,
    /// The path of the first leaf of each group.
    paths: Vec<ObjectPath>,
    shards: Vec<ShardFile>,
    /// The shard of each writer. The writers of distributed leaves have one shard (F-068).
    by_writer: BTreeMap<u32, u32>,
    /// For each group the storages that are described so far, by device.
    known: Vec<Lock<BTreeMap<u64, Arc<VerifiedChunks>>>>,
    fingerprint: [u8; 16],
}

/// Storages of one shard: group and device of each.
pub(crate) type ShardStorages = Vec<(u32, u64)>;

impl HeldStorages {
    pub(super) fn new(root: &Node, shards: Vec<ShardFile>) -> Result<Self> {
        let mut leaves: BTreeMap<u32, (ObjectPath, &DistributedTensor)> = BTreeMap::new();
        let mut all = Vec::new();
        for_each_leaf(LazyPath::Full(&ObjectPath::root()), root, &mut |path, node| {
            if let Node::Distributed(leaf) = node {
                leaves.entry(leaf.group).or_insert_with(|| (path.path(), leaf));
                all.push(leaf);
            }
        });
        let groups = DistributedGroups::new(all)?;
        Ok(Self {
            paths: leaves.into_values().map(|(path, _)| path).collect(),
            by_writer: (0..).zip(&shards).map(|(number, shard)| (shard.writer, number)).collect(),
            known: groups.groups().iter().map(|_| Lock::default()).collect(),
            fingerprint: group_fingerprint(groups.groups()),
            shards,
            groups,
        })
    }

    /// Returns a fingerprint of what the storages hold.
    pub(crate) fn fingerprint(&self) -> [u8; 16] {
        self.fingerprint
    }

    /// Whether there are distributed leaves.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Returns the path of the first leaf of a group.
    pub(super) fn path(&self, group: u32) -> &ObjectPath {
        &self.paths[to_usize(group.into())]
    }

    /// Returns the shard of a device of a group.
    pub(super) fn shard(&self, group: u32, device: u64) -> u32 {
        let mesh = self.groups.groups()[to_usize(group.into())].mesh();
        // The validator has checked that each rank of the mesh is the writer of a shard.
        self.by_writer[&mesh.ranks()[to_usize(device)]]
    }

    /// Returns a storage, if it is described.
    pub(super) fn get(&self, group: u32, device: u64) -> Option<Arc<VerifiedChunks>> {
        self.known[to_usize(group.into())].lock().get(&device).cloned()
    }

    /// Returns those of the storages that are not described yet, by shard.
    pub(super) fn missing(
        &self,
        storages: impl Iterator<Item = StorageId>,
    ) -> BTreeMap<u32, ShardStorages> {
        let mut missing: BTreeMap<u32, ShardStorages> = BTreeMap::new();
        for storage in storages {
            let StorageId::Held { group, device } = storage else { continue };
            if self.get(group, device).is_none() {
                missing.entry(self.shard(group, device)).or_default().push((group, device));
            }
        }
        for storages in missing.values_mut() {
            storages.sort_unstable();
            storages.dedup();
        }
        missing
    }

    /// Describes storages of a shard, whose archive is `blob`.
    ///
    /// # Errors
    ///
    /// - `ShardMismatch` (F-083), `DistributedMismatch` (F-084) or `CrcPages` (F-067) if the archive is not the one that
    ///   the manifest describes.
    /// - `Io` if the archive cannot be read.
    pub(super) fn load(
        &self,
        shard: u32,
        blob: &Arc<dyn Blob>,
        storages: &[(u32, u64)],
    ) -> Result<()> {
        let file = &self.shards[to_usize(shard.into())];
        file.verify(blob)?;
        let described = match &file.others {
            Some(_) => self.describe_places(shard, &**blob, storages)?,
            None => self.describe_from_index(shard, blob, storages)?,
        };
        for ((group, device), reference) in storages.iter().zip(described) {
            let chunks = Arc::new(VerifiedChunks::new(vec![reference.into()]));
            let mut known = self.known[to_usize((*group).into())].lock();
            known.entry(*device).or_insert(chunks);
        }
        Ok(())
    }

    /// Describes storages whose places are computed. Reads their checksums.
    fn describe_places(
        &self,
        shard: u32,
        blob: &dyn Blob,
        storages: &[(u32, u64)],
    ) -> Result<Vec<StorageReference>> {
        let file = &self.shards[to_usize(shard.into())];
        let mismatch = |note: &str| {
            FormatError::new(FormatKind::DistributedMismatch)
                .with_detail(format_args!("{}: {note}", file.name))
        };
        let others = file.others.as_deref().unwrap_or_default();
        let places = self.groups.places(file.writer, others)?;
        if places.crcs != u64::from(file.crcs.len) || places.end > file.index_off {
            return Err(mismatch("its storages do not fit"));
        }
        let place = |(group, _): &(u32, u64)| {
            let found = places.storages.binary_search_by_key(group, |place| place.group);
            found.map(|at| &places.storages[at]).map_err(|_| mismatch("a storage is missing"))
        };
        let wanted: Vec<&HeldStorage> = storages.iter().map(place).collect::<Result<_>>()?;
        let ranges: Vec<_> = wanted.iter().map(|place| place.crc_range()).collect();
        let crcs = file.read_crcs(blob, &ranges)?;
        let reference = |(place, crcs): (&&HeldStorage, Vec<u32>)| {
            StorageReference::from_raw(shard, place.offset, place.len, place.chunk_size, crcs)
        };
        Ok(wanted.iter().zip(crcs).map(reference).collect())
    }

    /// Describes storages whose places are only in the index of their archive.
    fn describe_from_index(
        &self,
        shard: u32,
        blob: &Arc<dyn Blob>,
        storages: &[(u32, u64)],
    ) -> Result<Vec<StorageReference>> {
        let archive = Archive::from_blob(blob.clone())?;
        if archive.index_crc32() != self.shards[to_usize(shard.into())].index_crc32 {
            return Err(FormatError::new(FormatKind::ShardMismatch).with_detail("another index"));
        }
        let describe = |(group, device): &(u32, u64)| {
            let tensor = &self.groups.groups()[to_usize((*group).into())];
            let number = tensor.find_storage(&archive, self.path(*group), *device)?;
            Ok(StorageReference { shard, ..archive.storage(number) })
        };
        storages.iter().map(describe).collect()
    }
}

/// A storage, and which of its chunks are verified.
pub(crate) enum StorageChunks<'a> {
    /// A storage of the manifest: its number.
    Own(&'a VerifiedChunks, usize),
    /// A storage of a group.
    Held(Arc<VerifiedChunks>),
}

impl StorageChunks<'_> {
    pub(super) fn reference(&self) -> &Arc<StorageReference> {
        let (chunks, number) = self.location();
        &chunks.storages()[number]
    }

    /// Returns whether a chunk is verified.
    pub(super) fn is_verified(&self, chunk: u64) -> bool {
        let (chunks, number) = self.location();
        chunks.contains(number, chunk)
    }

    /// Records that chunks are verified.
    pub(super) fn record_verified(&self, range: std::ops::Range<u64>) {
        let (chunks, number) = self.location();
        chunks.insert(number, range);
    }

    fn location(&self) -> (&VerifiedChunks, usize) {
        match self {
            Self::Own(chunks, number) => (chunks, *number),
            Self::Held(chunks) => (chunks, 0),
        }
    }
}
