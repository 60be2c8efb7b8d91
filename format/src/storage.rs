//! Storages: byte ranges that hold tensors, and their stored form. Spec: section 6.

use std::ops::Range;

use bytes::Bytes;

use crate::checksum::combine_crcs;
use crate::chunk::ChunkSize;
use crate::chunk_codec::{ChunkCodec, ChunkDecoder, StorageCodec, delta_width};
use crate::convert::to_usize;
use crate::delta::ChangeCount;
use crate::digest::Digest;
use crate::element::ElementWidth;
use crate::error::{Error, ErrorKind, Result};
use crate::frame::default_align_log2;
use crate::memory::zeroed;

/// One storage: a byte range of the blob, or of another file of the shard set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageReference {
    /// Offset of the stored bytes in their file, in bytes.
    pub offset: u64,
    /// Number of raw bytes.
    pub len: u64,
    /// The CRC-32 of the raw bytes.
    pub crc32: u32,
    /// Number of raw bytes per chunk.
    pub chunk_size: ChunkSize,
    /// The CRC-32 of each stored chunk.
    pub crcs: Vec<u32>,
    /// Log2 of the alignment, in bytes.
    pub align_log2: u8,
    /// The number of the shard that holds the storage; 0 in a file without shards.
    pub shard: u32,
    /// The compressed chunks; `None` if the stored bytes are the raw bytes.
    pub compressed_layout: Option<CompressedLayout>,
    /// Of a delta storage, the number of its base storage: its place in the order of the content digest of the base.
    pub base: Option<u32>,
    /// The BLAKE3 of the raw bytes, if the file has digests.
    pub digest: Option<Digest>,
}

/// The stored chunks of a compressed storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompressedLayout {
    /// Width of an element in bytes, for the codecs of the chunks.
    pub width: u8,
    /// The stored chunks in order, without gaps.
    pub chunks: Vec<ChunkLocation>,
}

impl CompressedLayout {
    /// Returns the codec of the first chunk that is not raw. At least one is not (F-065).
    pub fn codec(&self) -> ChunkCodec {
        let mut codecs = self.chunks.iter().map(|chunk| chunk.codec);
        codecs.find(|codec| *codec != ChunkCodec::Raw).unwrap_or(ChunkCodec::Raw)
    }
}

/// One stored chunk of a compressed storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLocation {
    /// Offset in the stored bytes of the storage, in bytes.
    pub offset: u64,
    /// Number of stored bytes.
    pub len: u32,
    /// How the stored bytes encode the chunk.
    pub codec: ChunkCodec,
}

impl StorageReference {
    /// Describes a storage that is stored as its raw bytes. `crcs` has the CRC-32 of each chunk.
    ///
    /// Offset and length are in bytes.
    pub fn from_raw(
        shard: u32,
        offset: u64,
        len: u64,
        chunk_size: ChunkSize,
        crcs: Vec<u32>,
    ) -> Self {
        Self {
            offset,
            len,
            crc32: combine_crcs(len, chunk_size, crcs.iter().copied()),
            chunk_size,
            crcs,
            align_log2: default_align_log2(len),
            shard,
            ..Self::default()
        }
    }

    /// Returns true if both have the same stored form at the same offset of their files.
    ///
    /// Ignores shard numbers, and digests unless both have one.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        // A manifest omits digests unless all of its archives have them.
        let ignores_digest = self.digest.is_none() || other.digest.is_none();
        *self == Self { shard: self.shard, digest: self.digest, ..other.clone() }
            && (ignores_digest || self.digest == other.digest)
    }

    /// Checks the CRC-32 of the stored bytes of a chunk against the recorded one.
    ///
    /// # Errors
    ///
    /// `ChunkCorrupt` (F-090) if they differ.
    pub fn verify_chunk(&self, number: u64, crc: u32) -> Result<()> {
        let expected = usize::try_from(number).ok().and_then(|number| self.crcs.get(number));
        if expected == Some(&crc) {
            return Ok(());
        }
        let range = self.stored_chunk(number);
        let len = range.end - range.start;
        Err(Error::new(ErrorKind::ChunkCorrupt).with_detail(format_args!("{len} bytes")))
    }

    /// Checks the CRC-32 of the raw bytes against the recorded one.
    ///
    /// # Errors
    ///
    /// `StorageCorrupt` (F-091) if they differ.
    pub(crate) fn verify_crc32(&self, crc: u32) -> Result<()> {
        if crc == self.crc32 { Ok(()) } else { Err(Error::new(ErrorKind::StorageCorrupt)) }
    }

    /// Returns the number of bytes that the storage occupies in its file.
    pub fn stored_len(&self) -> u64 {
        self.compressed_layout.as_ref().map_or(self.len, |layout| {
            layout.chunks.last().map_or(0, |chunk| chunk.offset + u64::from(chunk.len))
        })
    }

    /// Returns the byte range of the storage in its file.
    pub fn stored_range(&self) -> Range<u64> {
        self.offset..self.offset + self.stored_len()
    }

    /// Returns the range of a chunk in the raw bytes.
    pub fn chunk(&self, number: u64) -> Range<u64> {
        self.chunk_size.range(number, self.len)
    }

    /// Returns the numbers of the chunks that a range of raw bytes touches.
    pub fn chunks(&self, range: &Range<u64>) -> Range<u64> {
        range.start >> self.chunk_size.log2()..self.chunk_size.count(range.end)
    }

    /// Returns the part of a range of raw bytes that consists of whole chunks.
    ///
    /// If the range contains no whole chunk, the result is empty and starts at the end of the range.
    ///
    /// ```
    /// use tssd_format::{MAX_CHUNK_BYTES, StorageReference};
    ///
    /// let storage = StorageReference { len: 2 * MAX_CHUNK_BYTES + 5, ..StorageReference::default() };
    /// assert_eq!(storage.whole_chunks(&(7..storage.len)), MAX_CHUNK_BYTES..storage.len);
    /// assert_eq!(storage.whole_chunks(&(0..MAX_CHUNK_BYTES + 1)), 0..MAX_CHUNK_BYTES);
    /// assert_eq!(storage.whole_chunks(&(7..9)), 9..9);
    /// ```
    pub fn whole_chunks(&self, range: &Range<u64>) -> Range<u64> {
        let mask = self.chunk_size.bytes() - 1;
        let start = range.start.checked_add(mask).map_or(range.end, |start| start & !mask);
        let end = if range.end == self.len { range.end } else { range.end & !mask };
        if start < end { start..end } else { range.end..range.end }
    }

    /// Returns codec and element width of a chunk.
    pub(crate) fn chunk_codec(&self, number: u64) -> StorageCodec {
        let raw = StorageCodec { codec: ChunkCodec::Raw, width: 0 };
        self.compressed_layout.as_ref().map_or(raw, |layout| {
            let codec = layout.chunks[to_usize(number)].codec;
            StorageCodec { codec, width: layout.width }
        })
    }

    /// Returns the width of the elements of a delta storage.
    pub(crate) fn delta_width(&self) -> ElementWidth {
        delta_width(self.chunk_codec(0).width)
    }

    /// Returns the byte range of a stored chunk in the file of the storage.
    ///
    /// # Panics
    ///
    /// Panics if the storage is compressed and has no such chunk.
    pub fn stored_chunk(&self, number: u64) -> Range<u64> {
        let range = match &self.compressed_layout {
            None => self.chunk(number),
            Some(layout) => {
                let chunk = &layout.chunks[to_usize(number)];
                chunk.offset..chunk.offset + u64::from(chunk.len)
            }
        };
        self.offset + range.start..self.offset + range.end
    }
}

/// Decodes a range of raw bytes of a storage from the stored chunks that it touches.
///
/// Decoding allocates exactly the length of the range and at most one chunk, regardless of the sizes that a frame
/// claims.
pub struct RangeDecoder<'a> {
    decoder: StorageDecoder<'a>,
    range: Range<u64>,
    bytes: Vec<u8>,
    /// Number of bytes decoded so far.
    filled: usize,
}

impl<'a> RangeDecoder<'a> {
    /// Creates a decoder for a range of raw bytes, which must lie in the storage.
    ///
    /// # Errors
    ///
    /// `TooLarge` if the range does not fit into memory; `Io` if zstd fails to allocate.
    pub fn new(storage: &'a StorageReference, range: Range<u64>) -> Result<Self> {
        let len = usize::try_from(range.end - range.start);
        let bytes = zeroed(len.map_err(|_| Error::new(ErrorKind::TooLarge))?)?;
        Ok(Self { decoder: StorageDecoder::new(storage)?, range, bytes, filled: 0 })
    }

    /// Decodes a chunk from its stored bytes. The caller must add all chunks of the range in order.
    ///
    /// # Errors
    ///
    /// `FrameCorrupt` or `PlaneLengths` if the chunk does not decode; `BaseMissing` for a delta chunk; `FeatureMissing` in
    /// a build without zstd.
    pub fn add_chunk(&mut self, number: u64, stored: &[u8]) -> Result<()> {
        self.add_chunk_of(number, stored, None)
    }

    /// Decodes a chunk, given the same chunk of the base storage if it is a delta chunk.
    pub(crate) fn add_chunk_of(
        &mut self,
        number: u64,
        stored: &[u8],
        base: Option<&[u8]>,
    ) -> Result<()> {
        let chunk = self.decoder.storage.chunk(number);
        let part = chunk.start.max(self.range.start)..chunk.end.min(self.range.end);
        let local = to_usize(part.start - chunk.start)..to_usize(part.end - chunk.start);
        let target = &mut self.bytes[self.filled..][..local.len()];
        if part == chunk {
            self.decoder.decode_into(number, stored, base, target)?;
        } else {
            target.copy_from_slice(&self.decoder.decode(number, stored, base)?[local]);
        }
        self.filled += target.len();
        Ok(())
    }

    /// Returns the decoded bytes.
    pub fn finish(self) -> Bytes {
        Bytes::from(self.bytes).slice(..self.filled)
    }
}

/// Decodes chunks of a storage, reusing its buffer and decoder between chunks.
pub(crate) struct StorageDecoder<'a> {
    storage: &'a StorageReference,
    decoder: ChunkDecoder,
    chunk: Vec<u8>,
}

impl<'a> StorageDecoder<'a> {
    pub(crate) fn new(storage: &'a StorageReference) -> Result<Self> {
        Ok(Self { storage, decoder: ChunkDecoder::new()?, chunk: Vec::new() })
    }

    /// Returns the raw bytes of a chunk, given its stored bytes.
    ///
    /// `base` is the same chunk of the base storage, which a delta chunk needs.
    pub(crate) fn decode<'b>(
        &'b mut self,
        number: u64,
        stored: &'b [u8],
        base: Option<&[u8]>,
    ) -> Result<&'b [u8]> {
        let codec = self.storage.chunk_codec(number);
        if codec.codec == ChunkCodec::Raw {
            return Ok(stored);
        }
        let chunk = self.storage.chunk(number);
        self.chunk.resize(to_usize(chunk.end - chunk.start), 0);
        self.decoder.decode(codec, stored, base, &mut self.chunk)?;
        Ok(&self.chunk)
    }

    /// Decodes a chunk into `target`, which must have the length of its raw bytes.
    fn decode_into(
        &mut self,
        number: u64,
        stored: &[u8],
        base: Option<&[u8]>,
        target: &mut [u8],
    ) -> Result<()> {
        self.decoder.decode(self.storage.chunk_codec(number), stored, base, target)
    }

    /// Checks a chunk without its base, and returns how many elements it changes. Chunks that need no base are decoded.
    ///
    /// # Errors
    ///
    /// As [`ChunkDecoder::decode`], but for `DeltaMismatch` and `BaseMissing`.
    pub(crate) fn check(&mut self, number: u64, stored: &[u8]) -> Result<ChangeCount> {
        let StorageCodec { codec, width } = self.storage.chunk_codec(number);
        let range = self.storage.chunk(number);
        let len = range.end - range.start;
        if codec == ChunkCodec::Delta {
            return self.decoder.count_changes(stored, width, to_usize(len));
        }
        self.decode(number, stored, None)?;
        Ok(ChangeCount { listed: 0, dense: len / u64::from(width.max(1)) })
    }
}
