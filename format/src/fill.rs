//! Jobs that write the bytes of an archive, each its own part, in any order and on any thread.

use std::io::Write;
use std::ops::Range;

use bytes::Bytes;
use crc32fast::Hasher;

use crate::copy::copy_and_checksum;
use crate::digest::{ChunkHasher, Digest};
use crate::error::{Error, ErrorKind, Result};
use crate::storage::CHUNK_BYTES;

/// Jobs are cut at the first chunk that ends beyond this many bytes.
const JOB_BYTES: u64 = 4 << 20;

/// What is looked at twice is looked at in blocks of this many bytes, which the cache holds.
const BLOCK: usize = 256 << 10;

/// The raw bytes of a storage, wherever they are.
#[derive(Clone, Debug)]
pub(crate) struct RawBytes {
    /// Zeros in front, which bring its tensors to their alignment.
    pub(crate) lead: u64,
    /// The rest of it, in order.
    pub(crate) segments: Vec<Bytes>,
}

/// A storage and its place in the file.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Where it begins in the file.
    pub(crate) offset: u64,
    /// Its first entry of the checksum table.
    pub(crate) first_crc: usize,
    pub(crate) body: Body,
}

/// The stored bytes of a storage.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// Its raw bytes, with or without a digest of them.
    Raw { bytes: RawBytes, digest: bool },
    /// Chunks that are compressed, or not worth it.
    Packed(Vec<RawBytes>),
}

/// One job: a range of the file, and what belongs there.
///
/// The jobs of a [`Layout`](crate::Layout) tile the file from its first byte to the index.
#[derive(Clone, Debug)]
pub struct Fill {
    range: Range<u64>,
    pieces: Vec<Piece>,
}

/// What lies between pieces is zero.
#[derive(Clone, Debug)]
struct Piece {
    offset: u64,
    bytes: RawBytes,
    /// What is wanted to be known of it: nothing of the head of the file.
    sums: Option<Sums>,
}

#[derive(Clone, Debug)]
struct Sums {
    /// The entry of the checksum table.
    entry: usize,
    /// Its number among the chunks of a storage of this many bytes, if a digest is wanted.
    digest: Option<(u64, u64)>,
}

/// What a job has found out: checksums, to be given to [`Layout::seal`](crate::Layout::seal).
#[derive(Debug)]
#[must_use = "the index needs the checksums of all jobs"]
pub struct Filled {
    /// By entry of the checksum table.
    pub(crate) sums: Vec<(usize, Sum)>,
}

/// What is known of the stored bytes of a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    pub(crate) crc: u32,
    /// Its part of the digest of its storage, if there is to be one.
    pub(crate) digest: Option<Digest>,
}

/// Sums in the making.
#[derive(Default)]
struct Summing {
    crc: Hasher,
    digest: Option<ChunkHasher>,
}

impl Summing {
    fn of(sums: &Sums) -> Self {
        let digest = sums.digest.map(|(chunk, len)| ChunkHasher::new(chunk, len));
        Self { crc: Hasher::new(), digest }
    }

    fn copy(&mut self, bytes: &[u8], target: &mut [u8]) {
        let Some(digest) = &mut self.digest else {
            return copy_and_checksum(bytes, target, &mut self.crc);
        };
        for (bytes, target) in bytes.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
            digest.update(bytes);
            copy_and_checksum(bytes, target, &mut self.crc);
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        self.crc.update(bytes);
        if let Some(digest) = &mut self.digest {
            digest.update(bytes);
        }
    }

    fn finish(self) -> Sum {
        Sum { crc: self.crc.finalize(), digest: self.digest.map(|digest| digest.finish()) }
    }
}

impl Fill {
    /// The range of the file that the job writes, in bytes.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Writes the range into memory, whatever was there before: one copy, checksums on the way.
    ///
    /// # Errors
    ///
    /// `TargetSize` if the memory is not as long as the range.
    pub fn run(&self, target: &mut [u8]) -> Result<Filled> {
        if u64::try_from(target.len()) != Ok(self.range.end - self.range.start) {
            return Err(Error::new(ErrorKind::TargetSize).note(format_args!(
                "{} bytes for {:?}",
                target.len(),
                self.range
            )));
        }
        let mut rest = target;
        self.each(&mut |bytes, summing| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            match summing {
                Some(summing) => summing.copy(bytes, part),
                None => part.copy_from_slice(bytes),
            }
            rest = tail;
            Ok(())
        })
    }

    /// Writes the range to `writer`, checksums on the way.
    ///
    /// # Errors
    ///
    /// `Io` if the writer fails.
    pub fn write_to(&self, writer: &mut impl Write) -> Result<Filled> {
        self.each(&mut |bytes, summing| {
            let Some(summing) = summing else { return Ok(writer.write_all(bytes)?) };
            for block in bytes.chunks(BLOCK) {
                summing.update(block);
                writer.write_all(block)?;
            }
            Ok(())
        })
    }

    /// Calls `put` with all bytes of the range in order; with sums where they are wanted.
    fn each(
        &self,
        put: &mut impl FnMut(&[u8], Option<&mut Summing>) -> Result<()>,
    ) -> Result<Filled> {
        let mut at = self.range.start;
        let mut sums = Vec::with_capacity(self.pieces.len());
        for piece in &self.pieces {
            zeros(piece.offset - at, &mut |zeros| put(zeros, None))?;
            let mut summing = piece.sums.as_ref().map(Summing::of).unwrap_or_default();
            zeros(piece.bytes.lead, &mut |zeros| put(zeros, Some(&mut summing)))?;
            for segment in &piece.bytes.segments {
                put(segment, Some(&mut summing))?;
            }
            at = piece.offset + piece.bytes.len();
            sums.extend(piece.sums.as_ref().map(|wanted| (wanted.entry, summing.finish())));
        }
        zeros(self.range.end - at, &mut |zeros| put(zeros, None))?;
        Ok(Filled { sums })
    }
}

/// Calls `put` with that many zeros.
fn zeros(mut count: u64, put: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    const ZEROS: [u8; 4096] = [0; 4096];
    while count > 0 {
        let part = usize::try_from(count).unwrap_or(ZEROS.len()).min(ZEROS.len());
        put(&ZEROS[..part])?;
        count -= length(&ZEROS[..part]);
    }
    Ok(())
}

/// The jobs that write `start..end` of a file, given the head if it is in there, and the storages.
pub(crate) fn jobs(range: Range<u64>, head: Option<Bytes>, sources: &[Source]) -> Vec<Fill> {
    let mut jobs = Vec::new();
    let mut from = range.start;
    let mut pieces = Vec::new();
    pieces.extend(head.map(|head| Piece { offset: 0, bytes: head.into(), sums: None }));
    for source in sources {
        for piece in source.pieces() {
            let end = piece.offset + piece.bytes.len();
            pieces.push(piece);
            if end - from >= JOB_BYTES {
                jobs.push(Fill { range: from..end, pieces: std::mem::take(&mut pieces) });
                from = end;
            }
        }
    }
    if from < range.end {
        jobs.push(Fill { range: from..range.end, pieces });
    }
    jobs
}

impl Source {
    /// Its stored chunks, and where each belongs.
    fn pieces(&self) -> Vec<Piece> {
        let (digest, chunks) = match &self.body {
            Body::Raw { bytes, digest } => {
                let starts = (0..bytes.len()).step_by(usize::try_from(CHUNK_BYTES).expect("2^20"));
                let part = |start| bytes.part(start..(start + CHUNK_BYTES).min(bytes.len()));
                (digest.then_some(bytes.len()), starts.map(part).collect())
            }
            Body::Packed(chunks) => (None, chunks.clone()),
        };
        let mut offset = self.offset;
        let mut pieces = Vec::with_capacity(chunks.len());
        for ((number, entry), bytes) in (0..).zip(self.first_crc..).zip(chunks) {
            let len = bytes.len();
            let sums = Some(Sums { entry, digest: digest.map(|len| (number, len)) });
            pieces.push(Piece { offset, bytes, sums });
            offset += len;
        }
        pieces
    }
}

impl RawBytes {
    pub(crate) fn len(&self) -> u64 {
        self.lead + self.segments.iter().map(|segment| length(segment)).sum::<u64>()
    }

    /// The part of it that lies in `range`.
    pub(crate) fn part(&self, range: Range<u64>) -> Self {
        let lead = self.lead.clamp(range.start, range.end) - range.start;
        let mut segments = Vec::new();
        let mut at = self.lead;
        for segment in &self.segments {
            let end = at + length(segment);
            let part = at.max(range.start)..end.min(range.end);
            if part.start < part.end {
                let index =
                    |byte: u64| usize::try_from(byte - at).expect("a place in memory fits usize");
                segments.push(segment.slice(index(part.start)..index(part.end)));
            }
            at = end;
        }
        Self { lead, segments }
    }

    /// All of it in one piece, in `gathered` if it is not so already.
    pub(crate) fn contiguous<'a>(&'a self, gathered: &'a mut Vec<u8>) -> &'a [u8] {
        if let (0, [segment]) = (self.lead, self.segments.as_slice()) {
            return segment;
        }
        gathered.clear();
        gathered.resize(usize::try_from(self.lead).expect("at most 15"), 0);
        for segment in &self.segments {
            gathered.extend_from_slice(segment);
        }
        gathered
    }
}

impl From<Bytes> for RawBytes {
    fn from(bytes: Bytes) -> Self {
        Self { lead: 0, segments: vec![bytes] }
    }
}

pub(crate) fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).expect("usize is at most 64 bits")
}
