//! Storages: runs of bytes that tensors lie in, and how they are stored. Spec: section 6.

use std::ops::Range;

use bytes::Bytes;

use crate::chunk::ChunkSize;
use crate::codec::Decoder;
use crate::digest::Digest;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::zeroed;

/// One storage: a run of bytes of the blob, or of another file of the shard set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageReference {
    /// Where its stored bytes begin in their file.
    pub offset: u64,
    /// How many raw bytes it has.
    pub len: u64,
    /// The CRC-32 of the raw bytes.
    pub crc32: u32,
    /// How many raw bytes its chunks have.
    pub chunk_size: ChunkSize,
    /// The CRC-32 of each stored chunk.
    pub crcs: Vec<u32>,
    /// log2 of its alignment.
    pub align_log2: u8,
    /// The number of its shard; 0 in a file without shards.
    pub shard: u32,
    /// How its chunks are compressed; `None` if the stored bytes are the raw bytes.
    pub packing: Option<Packing>,
    /// The BLAKE3 of the raw bytes, if the file has digests.
    pub digest: Option<Digest>,
}

/// How the chunks of a compressed storage are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Width of the byte shuffle in bytes; 0 for none.
    pub shuffle: u8,
    /// The stored chunks, one after the other.
    pub chunks: Vec<PackedChunk>,
}

/// One stored chunk of a compressed storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedChunk {
    /// Where it begins in the stored bytes of its storage.
    pub offset: u64,
    /// How many stored bytes it has.
    pub len: u32,
    /// Whether it is a zstd frame; otherwise it is its raw bytes.
    pub is_zstd: bool,
}

impl StorageReference {
    /// Whether both are stored alike, at the same place of their files.
    pub(crate) fn same_bytes(&self, other: &Self) -> bool {
        // A manifest leaves digests out if not all of its archives have them.
        let digests = self.digest.is_none() || other.digest.is_none();
        *self == Self { shard: self.shard, digest: self.digest, ..other.clone() }
            && (digests || self.digest == other.digest)
    }

    /// Proves the CRC-32 of the stored bytes of a chunk.
    ///
    /// # Errors
    ///
    /// `ChunkCorrupt` (F-090) if it is another one.
    pub fn prove_chunk(&self, number: u64, crc: u32) -> Result<()> {
        let expected = usize::try_from(number).ok().and_then(|number| self.crcs.get(number));
        if expected == Some(&crc) {
            return Ok(());
        }
        let place = self.stored_chunk(number);
        let len = place.end - place.start;
        Err(Error::new(ErrorKind::ChunkCorrupt).note(format_args!("{len} bytes")))
    }

    /// How many bytes it takes in its file.
    pub fn stored_len(&self) -> u64 {
        self.packing.as_ref().map_or(self.len, |packing| {
            packing.chunks.last().map_or(0, |chunk| chunk.offset + u64::from(chunk.len))
        })
    }

    /// Where its stored bytes are in its file.
    pub fn stored_range(&self) -> Range<u64> {
        self.offset..self.offset + self.stored_len()
    }

    /// Where a chunk lies in the raw bytes.
    pub fn chunk(&self, number: u64) -> Range<u64> {
        self.chunk_size.range(number, self.len)
    }

    /// The chunks that these raw bytes touch.
    pub fn chunks(&self, range: &Range<u64>) -> Range<u64> {
        range.start >> self.chunk_size.log2()..self.chunk_size.count(range.end)
    }

    /// The part of these raw bytes that is whole chunks; nothing, from their end on, if they have none.
    ///
    /// ```
    /// use tssd_format::{CHUNK_BYTES, StorageReference};
    ///
    /// let storage = StorageReference { len: 2 * CHUNK_BYTES + 5, ..StorageReference::default() };
    /// assert_eq!(storage.whole_chunks(&(7..storage.len)), CHUNK_BYTES..storage.len);
    /// assert_eq!(storage.whole_chunks(&(0..CHUNK_BYTES + 1)), 0..CHUNK_BYTES);
    /// assert_eq!(storage.whole_chunks(&(7..9)), 9..9);
    /// ```
    pub fn whole_chunks(&self, range: &Range<u64>) -> Range<u64> {
        let within = self.chunk_size.bytes() - 1;
        let start = range.start.checked_add(within).map_or(range.end, |start| start & !within);
        let end = if range.end == self.len { range.end } else { range.end & !within };
        if start < end { start..end } else { range.end..range.end }
    }

    /// Where a chunk is in the file of the storage.
    ///
    /// # Panics
    ///
    /// If the storage has no such chunk.
    pub fn stored_chunk(&self, number: u64) -> Range<u64> {
        let within = match &self.packing {
            None => self.chunk(number),
            Some(packing) => {
                let chunk = &packing.chunks[place(number)];
                chunk.offset..chunk.offset + u64::from(chunk.len)
            }
        };
        self.offset + within.start..self.offset + within.end
    }
}

/// Raw bytes of a compressed storage, decoded from the chunks that they touch.
///
/// The memory has exactly the length of the range; it and one chunk of 1 MiB are all that decoding
/// takes, whatever a frame claims.
pub struct Unpack<'a> {
    reader: ChunkReader<'a>,
    range: Range<u64>,
    bytes: Vec<u8>,
    /// How many of them have been added.
    filled: usize,
}

impl<'a> Unpack<'a> {
    /// For a range of the raw bytes, which must lie in the storage.
    ///
    /// # Errors
    ///
    /// `TooLarge` if it does not fit into memory; `Io` if zstd has no memory.
    pub fn new(storage: &'a StorageReference, range: Range<u64>) -> Result<Self> {
        let len = usize::try_from(range.end - range.start);
        let bytes = zeroed(len.map_err(|_| Error::new(ErrorKind::TooLarge))?)?;
        Ok(Self { reader: ChunkReader::new(storage)?, range, bytes, filled: 0 })
    }

    /// Adds a chunk, given its stored bytes; chunks come in order.
    ///
    /// # Errors
    ///
    /// `FrameCorrupt`; `FeatureMissing` in a build without zstd.
    pub fn add(&mut self, number: u64, stored: &[u8]) -> Result<()> {
        let chunk = self.reader.storage.chunk(number);
        let part = chunk.start.max(self.range.start)..chunk.end.min(self.range.end);
        let within = place(part.start - chunk.start)..place(part.end - chunk.start);
        let target = &mut self.bytes[self.filled..][..within.len()];
        if part == chunk {
            self.reader.read_into(number, stored, target)?;
        } else {
            target.copy_from_slice(&self.reader.read(number, stored)?[within]);
        }
        self.filled += target.len();
        Ok(())
    }

    /// The bytes, once all chunks are added.
    pub fn finish(self) -> Bytes {
        Bytes::from(self.bytes).slice(..self.filled)
    }
}

/// Decodes chunks of a storage; keeps its working memory from one to the next.
pub(crate) struct ChunkReader<'a> {
    storage: &'a StorageReference,
    decoder: Decoder,
    chunk: Vec<u8>,
}

impl<'a> ChunkReader<'a> {
    pub(crate) fn new(storage: &'a StorageReference) -> Result<Self> {
        Ok(Self { storage, decoder: Decoder::new()?, chunk: Vec::new() })
    }

    /// The raw bytes of a chunk, given its stored ones.
    pub(crate) fn read<'b>(&'b mut self, number: u64, stored: &'b [u8]) -> Result<&'b [u8]> {
        let Some(shuffle) = self.shuffle(number) else { return Ok(stored) };
        let chunk = self.storage.chunk(number);
        self.chunk.resize(place(chunk.end - chunk.start), 0);
        self.decoder.decode(stored, shuffle, &mut self.chunk)?;
        Ok(&self.chunk)
    }

    /// As [`Self::read`], into memory of their length.
    fn read_into(&mut self, number: u64, stored: &[u8], target: &mut [u8]) -> Result<()> {
        if let Some(shuffle) = self.shuffle(number) {
            return self.decoder.decode(stored, shuffle, target);
        }
        target.copy_from_slice(stored);
        Ok(())
    }

    /// How a chunk is shuffled, if it is compressed.
    fn shuffle(&self, number: u64) -> Option<u8> {
        let packing = self.storage.packing.as_ref()?;
        packing.chunks[place(number)].is_zstd.then_some(packing.shuffle)
    }
}

/// Places in one chunk, and chunk numbers that were compared with tables in memory.
fn place(number: u64) -> usize {
    usize::try_from(number).expect("a place in memory fits usize")
}
