//! Validation of storages: layout in the blob, checksums and chunks. Spec: section 6.

use super::claims::Claims;
use super::{StorageUse, Validator};
use crate::checksum::checksum_pages;
use crate::chunk::ChunkSize;
use crate::chunk_codec::ChunkCodec;
use crate::codec::is_shuffle_width;
use crate::convert::{to_u64, to_usize};
use crate::element::ElementWidth;
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{DATA_START, INDEX_ALIGN};
use crate::planes::is_plane_width;
use crate::record::{self, DELTA_STORAGE, NONE};
use crate::table_views::TableViews;

/// The largest number of decoded bytes for each stored byte of a chunk.
const MAX_EXPANSION: u64 = 1 << 15;

impl Validator<'_> {
    pub(super) fn validate_storages(&self, index_off: u64) -> Result<()> {
        let TableViews { storages, crcs, crc_pages, chunks, digests, shards, subtrees, .. } =
            self.views;
        let is_manifest = !shards.is_empty();
        let mut crc_claims = Claims::new(crcs.len());
        let mut chunk_claims = Claims::new(chunks.len());
        if !digests.is_empty() && digests.len() != storages.len() {
            return Err(Error::new(ErrorKind::DigestTable));
        }
        let has_subtrees = !digests.is_empty() && !is_manifest;
        let mut subtree_claims = Claims::new(subtrees.len());
        let mut end = DATA_START;
        let mut last_shard = 0;
        for (number, storage) in storages.iter().enumerate() {
            let at = |error: Error| error.with_path(format_args!("storage {number}"));
            let size = chunk_size(storage).map_err(at)?;
            let min_offset = if storage.shard == last_shard { end } else { DATA_START };
            let (offset, len) = (storage.offset.to_native(), storage.stored_len.to_native());
            // A mask instead of a division: the low bits of an aligned offset are zero.
            let align_mask = (1_u64 << storage.align_log2) - 1;
            let gap = offset.checked_sub(min_offset).filter(|_| offset & align_mask == 0);
            let storage_end = offset.checked_add(len);
            let is_in_layout = if is_manifest {
                gap.is_some()
                    && storage.shard >= last_shard
                    && self.shard_index_off(storage).is_some_and(|end| storage_end <= Some(end))
            } else {
                gap.is_some_and(|gap| gap <= align_mask) && storage.shard == 0
            };
            let Some(storage_end) = storage_end.filter(|_| is_in_layout) else {
                return Err(at(storage_error(ErrorKind::StorageLayout, storage)));
            };
            end = storage_end;
            last_shard = storage.shard.to_native();
            let count = size.count(storage.raw_len.to_native());
            if !crc_claims.claim_once(u64::from(storage.crcs.to_native()), count) {
                return Err(at(Error::new(ErrorKind::CrcTable)));
            }
            let is_compressed = storage.codec != 0;
            if is_compressed
                && !(chunk_claims.claim_once(u64::from(storage.chunks.to_native()), count)
                    && self.are_chunks_valid(storage, count))
            {
                return Err(at(Error::new(ErrorKind::ChunkTable)));
            }
            let first_subtree = storage.subtrees.to_native();
            let are_subtrees_valid = if has_subtrees && count > 1 && storage.codec != DELTA_STORAGE
            {
                subtree_claims.claim_once(first_subtree.into(), count)
            } else {
                first_subtree == NONE
            };
            if !are_subtrees_valid {
                return Err(at(storage_error(ErrorKind::DigestTable, storage)));
            }
        }
        let blob_end = if is_manifest { DATA_START } else { end };
        if blob_end.checked_next_multiple_of(INDEX_ALIGN) != Some(index_off) {
            return Err(Error::new(ErrorKind::StorageLayout)
                .with_offset(index_off)
                .with_detail("index"));
        }
        if !crc_claims.is_complete() {
            return Err(Error::new(ErrorKind::CrcTable));
        }
        if checksum_pages(crcs) != *crc_pages {
            return Err(Error::new(ErrorKind::CrcPages));
        }
        if !chunk_claims.is_complete() {
            return Err(Error::new(ErrorKind::ChunkTable));
        }
        if !subtree_claims.is_complete() {
            return Err(Error::new(ErrorKind::DigestTable));
        }
        self.validate_base()?;
        match self.uses.iter().position(|uses| *uses == StorageUse::None) {
            Some(unused) => Err(Error::new(ErrorKind::UnusedStorage)
                .with_path(format_args!("storage {unused}"))
                .with_offset(storages[unused].offset.to_native())),
            None => Ok(()),
        }
    }

    /// Checks the tables of a delta, and that no other file has delta storages (F-066).
    fn validate_base(&self) -> Result<()> {
        let TableViews { storages, digests, shards, base, base_storages, .. } = self.views;
        let is_valid = if base.is_empty() {
            base_storages.is_empty()
                && storages.iter().all(|storage| storage.codec != DELTA_STORAGE)
        } else {
            base.len() == 1
                && shards.is_empty()
                && [digests.len(), base_storages.len()] == [storages.len(); 2]
                && storages
                    .iter()
                    .zip(*base_storages)
                    .all(|(storage, base)| (storage.codec == DELTA_STORAGE) == (*base != NONE))
        };
        if is_valid { Ok(()) } else { Err(Error::new(ErrorKind::BaseTable)) }
    }

    /// Returns true if the stored chunks of a compressed storage are valid (F-065).
    ///
    /// They tile the stored bytes. A raw chunk has its raw length, and a chunk of zstd, planes or tiers is
    /// shorter than the chunk, but not shorter than [`MAX_EXPANSION`] allows. At least one chunk is not raw.
    fn are_chunks_valid(&self, storage: &record::Storage, count: u64) -> bool {
        let first = to_usize(u64::from(storage.chunks.to_native()));
        let chunks = &self.views.chunks[first..first + to_usize(count)];
        let is_delta = storage.codec == DELTA_STORAGE;
        let chunk_size = if is_delta { ChunkSize::DELTA } else { ChunkSize::default() };
        let mut remaining_len = storage.raw_len.to_native();
        let mut end = 0;
        for chunk in chunks {
            let raw_len = remaining_len.min(chunk_size.bytes());
            let stored_len = u64::from(chunk.stored_len.to_native());
            let is_shorter = stored_len < raw_len && stored_len >= raw_len.div_ceil(MAX_EXPANSION);
            let is_valid = match ChunkCodec::from_number(chunk.codec.to_native()) {
                Some(ChunkCodec::Raw) => stored_len == raw_len,
                Some(ChunkCodec::Zstd) => is_shorter && !is_delta,
                Some(ChunkCodec::Planes | ChunkCodec::Tiers) => {
                    is_shorter && is_plane_width(storage.width)
                }
                Some(ChunkCodec::Delta) => is_delta,
                None => false,
            };
            if !is_valid || chunk.offset != end {
                return false;
            }
            end += stored_len;
            remaining_len -= raw_len;
        }
        end == storage.stored_len.to_native() && chunks.iter().any(|chunk| chunk.codec != 0)
    }

    /// Returns the offset of the index of the shard that holds this storage, if the shard exists.
    fn shard_index_off(&self, storage: &record::Storage) -> Option<u64> {
        let shard = usize::try_from(storage.shard.to_native()).ok()?;
        self.views.shards.get(shard).map(|shard| shard.index_off.to_native())
    }
}

/// Validates alignment and codec of a storage (F-061, F-063), and returns its chunk size.
#[inline]
fn chunk_size(storage: &record::Storage) -> Result<ChunkSize> {
    if !matches!(storage.align_log2, 6..=21) {
        return Err(storage_error(ErrorKind::Alignment, storage));
    }
    let size = ChunkSize::from_record(storage.chunk_log2, storage.codec);
    let size = size.filter(|_| match storage.codec {
        0 => storage.width == 0 && storage.chunks == NONE && storage.stored_len == storage.raw_len,
        1 => is_shuffle_width(storage.width),
        _ => {
            let width = ElementWidth::from_bytes(storage.width);
            width.is_some_and(|width| {
                storage.raw_len.to_native().is_multiple_of(to_u64(width.bytes()))
            })
        }
    });
    size.ok_or_else(|| storage_error(ErrorKind::UnknownCodec, storage))
}

#[cold]
fn storage_error(kind: ErrorKind, storage: &record::Storage) -> Error {
    Error::new(kind).with_offset(storage.offset.to_native())
}
