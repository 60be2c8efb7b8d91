//! Compression jobs: each compresses some chunks of a storage. Jobs run in any order and on any thread.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::checksum::checksum;
use crate::chunk::ChunkSize;
use crate::chunk_codec::{ChunkEncoder, StorageCodec};
use crate::codec_choice::{CodecChooser, sample_ranges};
use crate::digest::{ChunkHasher, Digest};
use crate::error::Result;
use crate::options::RequestedCodec;
use crate::write_job::RawBytes;

/// Maximum number of chunks of a job.
const JOB_CHUNKS: u64 = 4;

/// A compression job: some consecutive chunks of one storage.
///
/// The jobs of a [`Draft`](crate::Draft) are independent of each other.
#[derive(Clone, Debug)]
pub struct CompressJob {
    storage: usize,
    raw: RawBytes,
    chunks: std::ops::Range<u64>,
    codec: SharedCodec,
    level: i32,
    digest: bool,
}

/// The codec of a storage, which all of its jobs share.
#[derive(Clone, Debug)]
struct SharedCodec {
    requested: RequestedCodec,
    /// The codec that the first job to run has chosen.
    chosen: Arc<OnceLock<StorageCodec>>,
}

impl SharedCodec {
    /// Returns the codec, and chooses it from samples if the options ask for that.
    ///
    /// Two jobs that start at the same time may both choose: the result depends on the bytes of the storage alone.
    fn get(&self, raw: &RawBytes, level: i32) -> Result<StorageCodec> {
        let (shuffle_width, plane_width) = match self.requested {
            RequestedCodec::Fixed(codec) => return Ok(codec),
            RequestedCodec::Auto { shuffle_width, plane_width } => (shuffle_width, plane_width),
        };
        if let Some(codec) = self.chosen.get() {
            return Ok(*codec);
        }
        let mut chooser = CodecChooser::new(level, shuffle_width, plane_width)?;
        let mut buffer = Vec::new();
        for range in sample_ranges(raw.len()) {
            chooser.add_sample(raw.contiguous(&range, &mut buffer)?)?;
        }
        Ok(*self.chosen.get_or_init(|| chooser.choose()))
    }
}

/// The stored chunks that a job produced, for [`Draft::into_layout`](crate::Draft::into_layout).
#[derive(Debug)]
#[must_use = "the layout needs the chunks of all jobs"]
pub struct CompressedChunks {
    /// The first chunk: index of its storage, and index of the chunk in that storage.
    pub(crate) first_chunk: (usize, u64),
    pub(crate) codec: StorageCodec,
    pub(crate) chunks: Vec<StoredChunk>,
}

/// A chunk as it will be stored, with the checksum and the digest of its raw bytes.
#[derive(Debug)]
pub(crate) struct StoredChunk {
    /// The encoded chunk; `None` if the chunk stays raw.
    pub(crate) encoded: Option<Bytes>,
    /// CRC-32 of the raw bytes.
    pub(crate) crc: u32,
    /// The chunk's part of the digest of its storage, if the archive gets digests.
    pub(crate) digest: Option<Digest>,
}

impl CompressJob {
    /// Returns the jobs that compress one storage.
    pub(crate) fn jobs(
        storage: usize,
        raw: &RawBytes,
        codec: RequestedCodec,
        level: i32,
        digest: bool,
    ) -> impl Iterator<Item = Self> {
        let count = ChunkSize::default().count(raw.len());
        let codec = SharedCodec { requested: codec, chosen: Arc::default() };
        (0..count).step_by(usize::try_from(JOB_CHUNKS).expect("4")).map(move |first| Self {
            storage,
            raw: raw.clone(),
            chunks: first..(first + JOB_CHUNKS).min(count),
            codec: codec.clone(),
            level,
            digest,
        })
    }

    /// Returns the number of raw bytes that the job reads.
    pub fn len(&self) -> u64 {
        let start = |chunk: u64| ChunkSize::default().range(chunk, self.raw.len()).start;
        start(self.chunks.end) - start(self.chunks.start)
    }

    /// Returns whether the job reads no bytes, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compresses the chunks of the job.
    ///
    /// # Errors
    ///
    /// `Io` if zstd fails (only if it cannot allocate memory) or a blob cannot be read; `FeatureMissing` in a build
    /// without zstd.
    pub fn run(&self) -> Result<CompressedChunks> {
        let codec = self.codec.get(&self.raw, self.level)?;
        let mut encoder = ChunkEncoder::new(codec.codec, self.level)?;
        let mut buffer = Vec::new();
        let mut chunks = Vec::new();
        for number in self.chunks.clone() {
            let (size, len) = (ChunkSize::default(), self.raw.len());
            let range = size.range(number, len);
            let raw = self.raw.contiguous(&range, &mut buffer)?;
            let digest = self.digest.then(|| {
                let mut hasher = ChunkHasher::new(number, len, size);
                hasher.update(raw);
                hasher.finish()
            });
            chunks.push(StoredChunk {
                encoded: encoder.encode(raw, codec.width)?.map(Bytes::from),
                crc: checksum(raw),
                digest,
            });
        }
        Ok(CompressedChunks { first_chunk: (self.storage, self.chunks.start), codec, chunks })
    }
}
