//! What a manifest records about the archives of its storages. Spec: section 7, Shard and Other.

use std::sync::Arc;

use crate::digest::Digest;

/// Record of a manifest about an archive that holds some of its storages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardFile {
    /// Base name of the file.
    pub name: String,
    /// Length of the file in bytes.
    pub file_len: u64,
    /// Offset of the index in the file, in bytes.
    pub index_off: u64,
    /// CRC-32 of the index of the file.
    pub index_crc32: u32,
    /// Number of the writer that wrote the file.
    pub writer: u32,
    /// Content digest of the file, if the manifest records one.
    pub digest: Option<Digest>,
    /// The checksum table of the file.
    pub crcs: CrcTable,
    /// The storages of the file that belong to no group of distributed leaves, in the order of the file.
    ///
    /// With them, places of storages are computed: see [`DistributedGroups::places`]. `None`: only the index of the
    /// file has the places.
    ///
    /// [`DistributedGroups::places`]: crate::DistributedGroups::places
    pub others: Option<Arc<[OtherStorage]>>,
}

/// Location and checksum of the checksum table (`crcs`) in the index of a file. Spec: section 7, Shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrcTable {
    /// Where the table begins in the index, in bytes.
    pub offset: u32,
    /// Number of entries, of 4 bytes each.
    pub len: u32,
    /// CRC-32 of the table `crc_pages`, which lies directly behind.
    pub pages_crc32: u32,
}

/// A storage of a shard that belongs to no group of distributed leaves. Spec: section 7, Other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OtherStorage {
    /// Number of storages of groups that lie before it in the file.
    pub position: u32,
    /// Length as stored, in bytes.
    pub stored_len: u64,
    /// Number of its entries of `crcs`.
    pub crcs: u32,
}

impl ShardFile {
    /// Returns the length of the index of the file in bytes.
    pub(crate) fn index_len(&self) -> u64 {
        self.file_len.saturating_sub(self.index_off + 64)
    }
}
