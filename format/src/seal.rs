//! The tables of storages: made before the sums of their stored chunks are known, sealed with them.

use crc32fast::Hasher;
use rend::u32_le;

use crate::chunk::ChunkSize;
use crate::digest::{self, Digest};
use crate::error::Result;
use crate::fill::Sum;
use crate::record::{self, NONE};
use crate::storage::{PackedChunk, StorageReference};
use crate::table::{Tables, Views, number};
use crate::views::native;

/// The tables that storages fill.
#[derive(Clone, Debug, Default)]
pub(crate) struct StorageTables {
    storages: Vec<record::Storage>,
    chunks: Vec<record::Chunk>,
    crcs: Vec<u32_le>,
    digests: Vec<Digest>,
}

impl StorageTables {
    /// How many storages there are.
    pub(crate) fn len(&self) -> usize {
        self.storages.len()
    }

    /// How many stored chunks they have.
    pub(crate) fn crc_count(&self) -> usize {
        self.crcs.len()
    }

    pub(crate) fn reserve(&mut self, storages: usize) {
        self.storages.reserve(storages);
        self.crcs.reserve(storages);
    }

    /// Adds a storage, whose number is the next one. The sums of its stored chunks are left open.
    #[inline]
    pub(crate) fn push(&mut self, storage: &StorageReference) -> Result<()> {
        let crcs = number(self.crcs.len())?;
        let first_chunk = number(self.chunks.len())?;
        self.crcs.resize(self.crcs.len() + chunk_count(storage.len, storage.chunk_size), 0.into());
        let packing = storage.packing.as_ref();
        let chunk = |chunk: &PackedChunk| record::Chunk {
            offset: chunk.offset.into(),
            stored_len: chunk.len.into(),
            codec: u32::from(chunk.is_zstd).into(),
        };
        let chunks = packing.into_iter().flat_map(|packing| &packing.chunks);
        self.chunks.extend(chunks.map(chunk));
        self.storages.push(record::Storage {
            offset: storage.offset.into(),
            stored_len: storage.stored_len().into(),
            raw_len: storage.len.into(),
            shard: storage.shard.into(),
            chunks: packing.map_or(NONE, |_| first_chunk).into(),
            crcs: crcs.into(),
            crc32: storage.crc32.into(),
            codec: packing.is_some().into(),
            align_log2: storage.align_log2,
            chunk_log2: storage.chunk_size.log2(),
            shuffle: packing.map_or(0, |packing| packing.shuffle),
            reserved: 0.into(),
        });
        self.digests.extend(storage.digest);
        number(self.storages.len()).map(drop)
    }

    /// The tables of storages whose sums are known, in the order of their numbers.
    pub(crate) fn of(storages: &[StorageReference]) -> Result<Self> {
        let mut tables = Self::default();
        for storage in storages {
            let first = tables.crcs.len();
            tables.push(storage)?;
            for (slot, crc) in tables.crcs[first..].iter_mut().zip(&storage.crcs) {
                *slot = (*crc).into();
            }
        }
        // A file has digests of all its storages or of none.
        if tables.digests.len() != tables.storages.len() {
            tables.digests.clear();
        }
        Ok(tables)
    }

    /// Puts in what is known of all stored chunks, in their order.
    pub(crate) fn seal(&mut self, sums: &[Sum]) {
        for (slot, sum) in self.crcs.iter_mut().zip(sums) {
            *slot = sum.crc.into();
        }
        for (number, storage) in self.storages.iter_mut().enumerate() {
            // What is compressed is known already.
            if storage.codec != 0 {
                continue;
            }
            let len = storage.raw_len.to_native();
            let first = native(storage.crcs.to_native());
            let size = ChunkSize::from_log2(storage.chunk_log2).expect("it was one");
            let own = &sums[first..first + chunk_count(len, size)];
            storage.crc32 = combine((len, size), own.iter().map(|sum| sum.crc)).into();
            if let Some(digest) = self.digests.get_mut(number) {
                let parts = own.iter().filter_map(|sum| sum.digest.as_deref().copied());
                *digest = digest::merge((len, size), &parts.collect::<Vec<_>>());
            }
        }
    }

    /// These and the other tables of an index.
    pub(crate) fn views<'a>(&'a self, others: &'a Tables) -> Views<'a> {
        let Self { storages, chunks, crcs, digests } = self;
        Views { storages, chunks, crcs, digests, ..others.views() }
    }
}

/// The number of chunks of a storage that is in memory, or in tables that are.
fn chunk_count(len: u64, size: ChunkSize) -> usize {
    usize::try_from(size.count(len)).expect("it is in memory")
}

/// The CRC-32 of `len` bytes, given that of each of their chunks of this size.
pub(crate) fn combine((len, size): (u64, ChunkSize), crcs: impl IntoIterator<Item = u32>) -> u32 {
    let mut crcs = crcs.into_iter();
    let first_len = len.min(size.bytes());
    let Some(first) = crcs.next() else { return 0 };
    if first_len == len {
        return first;
    }
    let mut whole = Hasher::new_with_initial_len(first, first_len);
    let mut rest = len - first_len;
    for crc in crcs {
        let chunk = rest.min(size.bytes());
        whole.combine(&Hasher::new_with_initial_len(crc, chunk));
        rest -= chunk;
    }
    whole.finalize()
}
