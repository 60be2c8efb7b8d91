//! Storages: how they tile the blob, and their checksums. Spec: section 6.

use super::claims::Claims;
use super::{Use, Validator, narrow};
use crate::chunk::{CHUNK_BYTES, ChunkSize};
use crate::codec::is_width;
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{DATA_START, INDEX_ALIGN};
use crate::record::{self, NONE};
use crate::views::Views;

/// How many bytes a stored byte can decode to at most.
const MAX_EXPANSION: u64 = 1 << 15;

impl Validator<'_> {
    pub(super) fn storages(&self, index_off: u64) -> Result<()> {
        let Views { storages, crcs, chunks, digests, shards, .. } = self.views;
        let is_manifest = !shards.is_empty();
        let mut checksums = Claims::new(crcs.len());
        let mut packed = Claims::new(chunks.len());
        let mut end = DATA_START;
        let mut last_shard = 0;
        for (number, storage) in storages.iter().enumerate() {
            let at = |error: Error| error.at(format_args!("storage {number}"));
            let size = chunk_size(storage).map_err(at)?;
            let from = if storage.shard == last_shard { end } else { DATA_START };
            let (offset, len) = (storage.offset.to_native(), storage.stored_len.to_native());
            // The lower bits of a multiple of the alignment, which are zero: no division.
            let below = (1_u64 << storage.align_log2) - 1;
            let gap = offset.checked_sub(from).filter(|_| offset & below == 0 && len > 0);
            let next = offset.checked_add(len);
            let tiles = if is_manifest {
                gap.is_some()
                    && storage.shard >= last_shard
                    && self.shard_end(storage).is_some_and(|end| next <= Some(end))
            } else {
                gap.is_some_and(|gap| gap <= below) && storage.shard == 0
            };
            let Some(next) = next.filter(|_| tiles) else {
                return Err(at(odd_storage(ErrorKind::StorageLayout, storage)));
            };
            end = next;
            last_shard = storage.shard.to_native();
            let count = size.count(storage.raw_len.to_native());
            if !checksums.once(u64::from(storage.crcs.to_native()), count) {
                return Err(at(Error::new(ErrorKind::CrcTable)));
            }
            let is_packed = storage.codec != 0;
            if is_packed
                && !(packed.once(u64::from(storage.chunks.to_native()), count)
                    && self.chunks_fit(storage, count))
            {
                return Err(at(Error::new(ErrorKind::ChunkTable)));
            }
        }
        let blob_end = if is_manifest { DATA_START } else { end };
        if blob_end.checked_next_multiple_of(INDEX_ALIGN) != Some(index_off) {
            return Err(Error::new(ErrorKind::StorageLayout).byte(index_off).note("index"));
        }
        if !checksums.is_complete() {
            return Err(Error::new(ErrorKind::CrcTable));
        }
        if !packed.is_complete() {
            return Err(Error::new(ErrorKind::ChunkTable));
        }
        if !digests.is_empty() && digests.len() != storages.len() {
            return Err(Error::new(ErrorKind::DigestTable));
        }
        match self.uses.iter().position(|uses| *uses == Use::None) {
            Some(unused) => Err(Error::new(ErrorKind::UnusedStorage)
                .at(format_args!("storage {unused}"))
                .byte(storages[unused].offset.to_native())),
            None => Ok(()),
        }
    }

    /// Whether the stored chunks of a compressed storage tile its stored bytes, none of them longer
    /// than what it decodes to, or shorter than a frame of it can be.
    fn chunks_fit(&self, storage: &record::Storage, count: u64) -> bool {
        let first = narrow(u64::from(storage.chunks.to_native()));
        let chunks = &self.views.chunks[first..first + narrow(count)];
        let mut rest = storage.raw_len.to_native();
        let mut end = 0;
        for chunk in chunks {
            let raw_len = rest.min(CHUNK_BYTES);
            let stored_len = u64::from(chunk.stored_len.to_native());
            let fits = match chunk.codec.to_native() {
                0 => stored_len == raw_len,
                1 => stored_len < raw_len && stored_len >= raw_len.div_ceil(MAX_EXPANSION),
                _ => false,
            };
            if !fits || chunk.offset != end {
                return false;
            }
            end += stored_len;
            rest -= raw_len;
        }
        end == storage.stored_len.to_native() && chunks.iter().any(|chunk| chunk.codec == 1)
    }

    /// Where the blob of the shard that holds this storage ends at the latest.
    fn shard_end(&self, storage: &record::Storage) -> Option<u64> {
        let shard = usize::try_from(storage.shard.to_native()).ok()?;
        self.views.shards.get(shard).map(|shard| shard.index_off.to_native())
    }
}

/// The chunks that a storage has, if its alignment and its codec are ones that there are.
#[inline]
fn chunk_size(storage: &record::Storage) -> Result<ChunkSize> {
    if !matches!(storage.align_log2, 6..=21) {
        return Err(odd_storage(ErrorKind::Alignment, storage));
    }
    let size = ChunkSize::from_log2(storage.chunk_log2).filter(|size| {
        let fits = match storage.codec {
            0 => {
                storage.shuffle == 0
                    && storage.chunks == NONE
                    && storage.stored_len == storage.raw_len
            }
            1 => {
                (storage.shuffle == 0 || is_width(storage.shuffle)) && *size == ChunkSize::default()
            }
            _ => false,
        };
        fits && storage.reserved == 0
    });
    size.ok_or_else(|| odd_storage(ErrorKind::UnknownCodec, storage))
}

#[cold]
fn odd_storage(kind: ErrorKind, storage: &record::Storage) -> Error {
    Error::new(kind).byte(storage.offset.to_native())
}
