//! Jobs that compress storages, each some chunks, in any order and on any thread.

use bytes::Bytes;

use crate::checksum::checksum;
use crate::chunk::ChunkSize;
use crate::codec::Encoder;
use crate::digest::{ChunkHasher, Digest};
use crate::error::Result;
use crate::fill::RawBytes;

/// Jobs have at most this many chunks.
const JOB_CHUNKS: u64 = 4;

/// One job: some chunks of a storage that is to be compressed.
///
/// The jobs of a [`Draft`](crate::Draft) are independent of each other.
#[derive(Clone, Debug)]
pub struct Pack {
    storage: usize,
    raw: RawBytes,
    chunks: std::ops::Range<u64>,
    shuffle: u8,
    level: i32,
    digest: bool,
}

/// What a job has made: stored chunks, to be given to [`Draft::place`](crate::Draft::place).
#[derive(Debug)]
#[must_use = "the layout needs the chunks of all jobs"]
pub struct Packed {
    /// The storage, and its chunk, that the first is.
    pub(crate) place: (usize, u64),
    pub(crate) chunks: Vec<StoredChunk>,
}

/// A chunk as it will be stored, and what is known of its raw bytes.
#[derive(Debug)]
pub(crate) struct StoredChunk {
    /// The frame; `None` if the chunk stays raw.
    pub(crate) frame: Option<Bytes>,
    /// CRC-32 of the raw bytes.
    pub(crate) crc: u32,
    /// Their part of the digest, if it is wanted.
    pub(crate) digest: Option<Digest>,
}

impl Pack {
    /// The jobs that compress one storage.
    pub(crate) fn jobs(
        storage: usize,
        raw: &RawBytes,
        shuffle: u8,
        level: i32,
        digest: bool,
    ) -> impl Iterator<Item = Self> {
        let count = ChunkSize::default().count(raw.len());
        (0..count).step_by(usize::try_from(JOB_CHUNKS).expect("4")).map(move |first| Self {
            storage,
            raw: raw.clone(),
            chunks: first..(first + JOB_CHUNKS).min(count),
            shuffle,
            level,
            digest,
        })
    }

    /// How many raw bytes the job reads.
    pub fn len(&self) -> u64 {
        let start = |chunk: u64| ChunkSize::default().range(chunk, self.raw.len()).start;
        start(self.chunks.end) - start(self.chunks.start)
    }

    /// True if the job reads nothing; no job does.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compresses its chunks.
    ///
    /// # Errors
    ///
    /// `Io` if zstd fails, which it does only without memory, or what is elsewhere cannot be read; `FeatureMissing` in a build without zstd.
    pub fn run(&self) -> Result<Packed> {
        let mut encoder = Encoder::new(self.level)?;
        let mut gathered = Vec::new();
        let mut chunks = Vec::new();
        for number in self.chunks.clone() {
            let (size, len) = (ChunkSize::default(), self.raw.len());
            let range = size.range(number, len);
            let raw = self.raw.contiguous(&range, &mut gathered)?;
            let digest = self.digest.then(|| {
                let mut hasher = ChunkHasher::new(number, (len, size));
                hasher.update(raw);
                hasher.finish()
            });
            chunks.push(StoredChunk {
                frame: encoder.encode(raw, self.shuffle)?.map(Bytes::from),
                crc: checksum(raw),
                digest,
            });
        }
        Ok(Packed { place: (self.storage, self.chunks.start), chunks })
    }
}
