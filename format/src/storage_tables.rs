//! The tables of storages. A writer adds the checksums after it has written the stored chunks.

use rend::u32_le;

use crate::checksum::{CRCS_PER_PAGE, checksum_pages, combine_crcs};
use crate::chunk::ChunkSize;
use crate::convert::index_to_usize;
use crate::digest::{self, Digest};
use crate::error::Result;
use crate::record::{self, DELTA_STORAGE, NONE};
use crate::storage::{ChunkLocation, StorageReference};
use crate::table::{TableViews, Tables, record_number};
use crate::write_job::ChunkChecksum;

/// The index tables that describe storages.
#[derive(Clone, Debug, Default)]
pub(crate) struct StorageTables {
    storages: Vec<record::Storage>,
    chunks: Vec<record::Chunk>,
    crcs: Vec<u32_le>,
    /// The CRC-32 of each page of `crcs`, or zeros if the CRCs are unknown yet.
    crc_pages: Vec<u32_le>,
    digests: Vec<Digest>,
    subtrees: Vec<Digest>,
    /// The content digest of the base, in a delta.
    base: Option<Digest>,
    base_storages: Vec<u32_le>,
}

impl StorageTables {
    /// Returns the number of storages.
    pub(crate) fn len(&self) -> usize {
        self.storages.len()
    }

    /// Returns the number of stored chunks of all storages.
    pub(crate) fn crc_count(&self) -> usize {
        self.crcs.len()
    }

    /// Makes the file a delta. It must have no storages yet.
    pub(crate) fn set_base(&mut self, content_digest: Digest) {
        self.base = Some(content_digest);
    }

    pub(crate) fn reserve(&mut self, storages: usize) {
        self.storages.reserve(storages);
        self.crcs.reserve(storages);
    }

    /// Appends a storage. Its number is the previous count; the CRCs of its stored chunks are set to 0.
    ///
    /// `subtrees` are the chaining values of the chunks of a storage that was compressed with a digest.
    #[inline]
    pub(crate) fn push(&mut self, storage: &StorageReference, subtrees: &[Digest]) -> Result<()> {
        let crcs = record_number(self.crcs.len())?;
        let first_chunk = record_number(self.chunks.len())?;
        self.crcs.resize(self.crcs.len() + chunk_count(storage.len, storage.chunk_size), 0.into());
        self.crc_pages.resize(self.crcs.len().div_ceil(CRCS_PER_PAGE), 0.into());
        let first_subtree = self.push_subtrees(storage, subtrees)?;
        let layout = storage.compressed_layout.as_ref();
        let chunk = |chunk: &ChunkLocation| record::Chunk {
            offset: chunk.offset.into(),
            stored_len: chunk.len.into(),
            codec: chunk.codec.number().into(),
        };
        let chunks = layout.into_iter().flat_map(|layout| &layout.chunks);
        self.chunks.extend(chunks.map(chunk));
        self.storages.push(record::Storage {
            offset: storage.offset.into(),
            stored_len: storage.stored_len().into(),
            raw_len: storage.len.into(),
            shard: storage.shard.into(),
            chunks: layout.map_or(NONE, |_| first_chunk).into(),
            crcs: crcs.into(),
            crc32: storage.crc32.into(),
            codec: match storage.base {
                Some(_) => DELTA_STORAGE,
                None => layout.is_some().into(),
            },
            align_log2: storage.align_log2,
            chunk_log2: storage.chunk_size.log2(),
            width: layout.map_or(0, |layout| layout.width),
            subtrees: first_subtree.into(),
        });
        self.digests.extend(storage.digest);
        if self.base.is_some() {
            self.base_storages.push(storage.base.unwrap_or(NONE).into());
        }
        record_number(self.storages.len()).map(drop)
    }

    /// Appends the chaining values of the chunks, or zeros if they are unknown yet, and returns the first entry.
    #[inline]
    fn push_subtrees(&mut self, storage: &StorageReference, subtrees: &[Digest]) -> Result<u32> {
        let count = chunk_count(storage.len, storage.chunk_size);
        if storage.digest.is_none() || count < 2 || storage.base.is_some() {
            return Ok(NONE);
        }
        let first = record_number(self.subtrees.len())?;
        self.subtrees.extend(subtrees);
        self.subtrees.resize(index_to_usize(first) + count, [0; 32]);
        Ok(first)
    }

    /// Builds the tables of a manifest from storages whose checksums are known, in the order of their numbers.
    pub(crate) fn from_storages(storages: &[StorageReference]) -> Result<Self> {
        let mut tables = Self::default();
        for storage in storages {
            let first = tables.crcs.len();
            tables.push(storage, &[])?;
            for (entry, crc) in tables.crcs[first..].iter_mut().zip(&storage.crcs) {
                *entry = (*crc).into();
            }
        }
        tables.crc_pages = checksum_pages(&tables.crcs);
        // A file has digests of all its storages or of none.
        if tables.digests.len() != tables.storages.len() {
            tables.digests.clear();
        }
        tables.subtrees.clear();
        for storage in &mut tables.storages {
            storage.subtrees = NONE.into();
        }
        Ok(tables)
    }

    /// Sets the checksums and digests of all storages, given those of all stored chunks in order.
    pub(crate) fn set_checksums(&mut self, sums: &[ChunkChecksum]) {
        for (entry, sum) in self.crcs.iter_mut().zip(sums) {
            *entry = sum.crc.into();
        }
        self.crc_pages = checksum_pages(&self.crcs);
        for (number, storage) in self.storages.iter_mut().enumerate() {
            // Compression has already computed the checksum and digest of the raw bytes.
            if storage.codec != 0 {
                continue;
            }
            let len = storage.raw_len.to_native();
            let first = index_to_usize(storage.crcs.to_native());
            let size = ChunkSize::from_log2(storage.chunk_log2).expect("it was one");
            let chunk_sums = &sums[first..first + chunk_count(len, size)];
            storage.crc32 = combine_crcs(len, size, chunk_sums.iter().map(|sum| sum.crc)).into();
            if let Some(digest) = self.digests.get_mut(number) {
                let parts = chunk_sums.iter().filter_map(|sum| sum.digest.as_deref().copied());
                let parts: Vec<Digest> = parts.collect();
                *digest = digest::merge(len, size, &parts);
                if storage.subtrees != NONE {
                    let first = index_to_usize(storage.subtrees.to_native());
                    self.subtrees[first..first + parts.len()].copy_from_slice(&parts);
                }
            }
        }
    }

    /// Returns views of these tables and of all other tables of an index.
    pub(crate) fn views<'a>(&'a self, others: &'a Tables) -> TableViews<'a> {
        let Self { storages, chunks, crcs, crc_pages, digests, subtrees, base, base_storages } =
            self;
        let base = base.as_slice();
        TableViews {
            storages,
            chunks,
            crcs,
            crc_pages,
            digests,
            subtrees,
            base,
            base_storages,
            ..others.views()
        }
    }
}

/// Returns the number of chunks of a storage whose checksums are in memory.
fn chunk_count(len: u64, size: ChunkSize) -> usize {
    usize::try_from(size.count(len)).expect("it is in memory")
}
