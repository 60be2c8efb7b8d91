//! Write jobs: each writes its own range of an archive. Jobs run in any order and on any thread.

use std::fmt;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::checksum::extend_checksum;
use crate::chunk::ChunkSize;
use crate::convert::{to_u64, to_usize};
use crate::copy::copy_and_checksum;
use crate::digest::{ChunkHasher, Digest};
use crate::error::{Error, ErrorKind, Result};

/// A job ends at the first chunk that ends at least this many bytes (4 MiB) after the start of the job.
const JOB_BYTES: u64 = 4 << 20;

/// Block size in bytes (256 KiB) for passes that read bytes twice: a block fits into the cache.
const BLOCK: usize = 256 << 10;

/// The raw bytes of a storage, in memory or in blobs.
#[derive(Clone, Debug)]
pub(crate) struct RawBytes {
    /// Number of zero bytes in front, which bring the tensors of the storage to their alignment.
    pub(crate) padding: u64,
    /// The bytes after the zeros, in order.
    pub(crate) segments: Segments,
}

/// One segment, as in nearly every storage, or several segments in order.
#[derive(Clone, Debug)]
pub(crate) enum Segments {
    One(Segment),
    Many(Vec<Segment>),
}

/// Bytes of one owner: in memory, or in a blob that is read when the bytes are written.
#[derive(Clone, Debug)]
pub(crate) enum Segment {
    Memory(Bytes),
    // Boxed to keep the enum small: nearly all segments are in memory.
    Blob(Box<BlobRange>),
}

#[derive(Clone)]
pub(crate) struct BlobRange {
    blob: Arc<dyn Blob>,
    range: Range<u64>,
}

impl fmt::Debug for BlobRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Elsewhere({:?})", self.range)
    }
}

/// A part of a segment.
#[derive(Clone, Copy)]
enum SegmentSlice<'a> {
    Memory(&'a [u8]),
    /// A blob, then the offset and the length of the part in bytes.
    Blob(&'a dyn Blob, u64, u64),
}

impl std::ops::Deref for Segments {
    type Target = [Segment];

    fn deref(&self) -> &[Segment] {
        match self {
            Self::One(segment) => std::slice::from_ref(segment),
            Self::Many(segments) => segments,
        }
    }
}

impl From<Bytes> for Segment {
    fn from(bytes: Bytes) -> Self {
        Self::Memory(bytes)
    }
}

impl Segment {
    pub(crate) fn from_blob(blob: Arc<dyn Blob>, range: Range<u64>) -> Self {
        Self::Blob(BlobRange { blob, range }.into())
    }

    fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => length(bytes),
            Self::Blob(it) => it.range.end - it.range.start,
        }
    }

    fn slice(&self, range: Range<u64>) -> Self {
        match self {
            Self::Memory(bytes) => {
                Self::Memory(bytes.slice(to_usize(range.start)..to_usize(range.end)))
            }
            Self::Blob(it) => {
                let start = it.range.start;
                Self::from_blob(it.blob.clone(), start + range.start..start + range.end)
            }
        }
    }

    fn slice_ref(&self, range: Range<u64>) -> SegmentSlice<'_> {
        match self {
            Self::Memory(bytes) => {
                SegmentSlice::Memory(&bytes[to_usize(range.start)..to_usize(range.end)])
            }
            Self::Blob(it) => {
                SegmentSlice::Blob(&*it.blob, it.range.start + range.start, range.end - range.start)
            }
        }
    }
}

/// A storage and its position in the file.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Offset in the file of the first stored byte, in bytes.
    pub(crate) offset: u64,
    /// Index of its first entry in the checksum table.
    pub(crate) first_crc: usize,
    pub(crate) body: Body,
}

/// The stored bytes of a storage.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// The raw bytes. `digest` says whether jobs compute a digest for each chunk.
    Raw { bytes: RawBytes, chunk_size: ChunkSize, digest: bool },
    /// One entry for each chunk: a zstd frame, or the raw bytes if the chunk does not compress well.
    Compressed(Vec<RawBytes>),
}

/// A write job: one range of the file and the bytes that belong there.
///
/// The jobs of a [`Layout`](crate::Layout) tile the file from its first byte to the index.
#[derive(Clone, Debug)]
pub struct WriteJob {
    range: Range<u64>,
    /// The head of the file, if the range contains it.
    head: Option<Bytes>,
    /// All storages of the layout. The bytes between them are zero.
    sources: Arc<Vec<Source>>,
    /// The first stored chunk of the job; the job has `chunk_count` consecutive chunks.
    first_chunk: ChunkPosition,
    chunk_count: usize,
}

/// The position of a stored chunk: index of its source, and index of the chunk in that source.
#[derive(Clone, Copy, Debug, Default)]
struct ChunkPosition {
    source: usize,
    chunk: usize,
}

/// The checksums that a job computed, for [`Layout::seal`](crate::Layout::seal).
#[derive(Debug)]
#[must_use = "the index needs the checksums of all jobs"]
pub struct JobChecksums {
    /// Index in the checksum table of the first checksum.
    pub(crate) first: usize,
    pub(crate) checksums: Vec<ChunkChecksum>,
}

/// A contiguous range of bytes that a job writes.
#[derive(Clone, Copy)]
pub enum Piece<'a> {
    /// Bytes in the memory of this process.
    Memory(&'a [u8]),
    /// Bytes of a blob.
    Blob {
        /// The blob.
        blob: &'a dyn Blob,
        /// Offset in the blob of the first byte, in bytes.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
}

impl fmt::Debug for Piece<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(bytes) => write!(f, "Memory({} bytes)", bytes.len()),
            Self::Blob { offset, len, .. } => write!(f, "Blob({len} bytes at {offset})"),
        }
    }
}

/// The checksum and the digest of one stored chunk.
#[derive(Clone, Debug)]
pub(crate) struct ChunkChecksum {
    pub(crate) crc: u32,
    /// The chunk's part of the digest of its storage, if the storage gets a digest.
    pub(crate) digest: Option<Box<Digest>>,
}

/// Computes the checksum and the digest of one chunk.
#[derive(Default)]
struct ChecksumBuilder {
    crc: u32,
    hasher: Option<Box<ChunkHasher>>,
    /// Whether some bytes of the chunk were skipped. Then the checksum is unknown and recorded as 0.
    has_unseen_bytes: bool,
}

impl ChecksumBuilder {
    fn copy(&mut self, bytes: &[u8], target: &mut [u8]) {
        let Some(hasher) = &mut self.hasher else {
            self.crc = copy_and_checksum(bytes, target, self.crc);
            return;
        };
        for (bytes, target) in bytes.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
            hasher.update(bytes);
            self.crc = copy_and_checksum(bytes, target, self.crc);
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        self.crc = extend_checksum(self.crc, bytes);
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
    }

    fn finish(self) -> ChunkChecksum {
        let digest = self.hasher.map(|hasher| hasher.finish().into());
        ChunkChecksum { crc: if self.has_unseen_bytes { 0 } else { self.crc }, digest }
    }
}

impl WriteJob {
    /// Returns the range of the file that the job writes, in bytes.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Writes the range to `target` and computes its checksums, in one copy.
    ///
    /// The previous content of `target` does not matter.
    ///
    /// # Errors
    ///
    /// `TargetSize` if `target` does not have the length of the range; `Io` if a blob cannot be read.
    pub fn run(&self, target: &mut [u8]) -> Result<JobChecksums> {
        self.write(target, |blob, offset, target| blob.read_exact_at(target, offset))
    }

    /// Completes a range whose blob bytes the caller has already written to `target`.
    ///
    /// The caller writes the ranges that [`WriteJob::for_each_blob_range`] lists. This method writes the rest, and reads the
    /// ranges of the caller to compute their checksums.
    ///
    /// # Errors
    ///
    /// `TargetSize` if `target` does not have the length of the range.
    pub fn run_prefilled(&self, target: &mut [u8]) -> Result<JobChecksums> {
        self.write(target, |_, _, _| Ok(()))
    }

    /// Writes the range to `target`; `read_blob` fills the parts that belong to blobs.
    fn write(
        &self,
        target: &mut [u8],
        read_blob: impl Fn(&dyn Blob, u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<JobChecksums> {
        if u64::try_from(target.len()) != Ok(self.range.end - self.range.start) {
            return Err(Error::new(ErrorKind::TargetSize).with_detail(format_args!(
                "{} bytes for {:?}",
                target.len(),
                self.range
            )));
        }
        let mut rest = target;
        self.for_each_slice(&mut |part, builder| {
            let (target, tail) = std::mem::take(&mut rest).split_at_mut(to_usize(part.len()));
            match (part, builder) {
                (SegmentSlice::Memory(bytes), Some(builder)) => builder.copy(bytes, target),
                (SegmentSlice::Memory(bytes), None) => target.copy_from_slice(bytes),
                (SegmentSlice::Blob(blob, offset, _), None) => read_blob(blob, offset, target)?,
                (SegmentSlice::Blob(blob, mut offset, _), Some(builder)) => {
                    for block in target.chunks_mut(BLOCK) {
                        read_blob(blob, offset, block)?;
                        builder.update(block);
                        offset += length(block);
                    }
                }
            }
            rest = tail;
            Ok(())
        })
    }

    /// Calls `visit` for each part of the range that is in a blob, in order.
    ///
    /// The arguments are the offset in the file, the blob, and the range in the blob, in bytes.
    pub fn for_each_blob_range<'a>(&'a self, mut visit: impl FnMut(u64, &'a dyn Blob, Range<u64>)) {
        let mut at = self.range.start;
        let result = self.for_each_slice(&mut |part, _| {
            if let SegmentSlice::Blob(blob, offset, len) = part {
                visit(at, blob, offset..offset + len);
            }
            at += part.len();
            Ok(())
        });
        let _ = result.expect("nothing is refused");
    }

    /// Writes the range to `writer` and computes its checksums.
    ///
    /// # Errors
    ///
    /// `Io` if the writer fails or a blob cannot be read.
    pub fn write_to(&self, writer: &mut impl Write) -> Result<JobChecksums> {
        let mut buffer = Vec::new();
        self.for_each_slice(&mut |part, mut builder| {
            part.for_each_block(&mut buffer, &mut |block| {
                if let Some(builder) = &mut builder {
                    builder.update(block);
                }
                Ok(writer.write_all(block)?)
            })
        })
    }

    /// Computes the checksums without writing anything.
    ///
    /// # Errors
    ///
    /// `Io` if a blob cannot be read.
    pub fn checksum(&self) -> Result<JobChecksums> {
        let mut buffer = Vec::new();
        self.for_each_slice(&mut |part, builder| {
            let Some(builder) = builder else { return Ok(()) };
            part.for_each_block(&mut buffer, &mut |block| {
                builder.update(block);
                Ok(())
            })
        })
    }

    /// Calls `visit` with each piece of the range and its offset in the file, in order.
    ///
    /// For callers that copy the bytes without reading them, such as into the memory of a GPU. Only bytes in the memory
    /// of this process are checksummed. If a chunk has bytes in a blob, its checksum is 0, and its digest covers only
    /// its bytes in memory.
    ///
    /// # Errors
    ///
    /// `Io` if `visit` fails.
    pub fn for_each_piece(
        &self,
        mut visit: impl FnMut(u64, Piece<'_>) -> io::Result<()>,
    ) -> Result<JobChecksums> {
        let mut at = self.range.start;
        self.for_each_slice(&mut |part, builder| {
            let piece = match part {
                SegmentSlice::Memory(bytes) => {
                    if let Some(builder) = builder {
                        builder.update(bytes);
                    }
                    Piece::Memory(bytes)
                }
                SegmentSlice::Blob(blob, offset, len) => {
                    if let Some(builder) = builder {
                        builder.has_unseen_bytes = true;
                    }
                    Piece::Blob { blob, offset, len }
                }
            };
            visit(at, piece)?;
            at += part.len();
            Ok(())
        })
    }

    /// Calls `visit` with all bytes of the range in order, and with the checksum builder of their chunk.
    ///
    /// The builder is `None` for bytes outside of chunks, which have no checksum.
    fn for_each_slice<'a>(
        &'a self,
        visit: &mut impl FnMut(SegmentSlice<'a>, Option<&mut ChecksumBuilder>) -> Result<()>,
    ) -> Result<JobChecksums> {
        let mut at = self.range.start;
        if let Some(head) = &self.head {
            visit(SegmentSlice::Memory(head), None)?;
            at += length(head);
        }
        let mut checksums = Vec::with_capacity(self.chunk_count);
        for (source, chunk) in self.chunks() {
            if chunk == 0 {
                for_each_zero_block(source.offset - at, &mut |zeros| {
                    visit(SegmentSlice::Memory(zeros), None)
                })?;
                at = source.offset;
            }
            let mut builder = source.checksum_builder(chunk);
            let (bytes, range) = source.locate_chunk(chunk);
            for_each_zero_block(bytes.zeros_in(&range), &mut |zeros| {
                visit(SegmentSlice::Memory(zeros), Some(&mut builder))
            })?;
            for (segment, part) in bytes.segments_in(&range) {
                visit(segment.slice_ref(part), Some(&mut builder))?;
            }
            at += range.end - range.start;
            checksums.push(builder.finish());
        }
        for_each_zero_block(self.range.end - at, &mut |zeros| {
            visit(SegmentSlice::Memory(zeros), None)
        })?;
        let first = self.sources.get(self.first_chunk.source);
        Ok(JobChecksums {
            first: first.map_or(0, |source| source.first_crc + self.first_chunk.chunk),
            checksums,
        })
    }

    /// Returns the stored chunks of the job: for each its source, and its index in that source.
    fn chunks(&self) -> impl Iterator<Item = (&Source, usize)> {
        let ChunkPosition { source: first, chunk } = self.first_chunk;
        let sources = self.sources[first..].iter().enumerate();
        let chunks = sources.flat_map(move |(number, source)| {
            let from = if number == 0 { chunk } else { 0 };
            (from..source.chunk_count()).map(move |chunk| (source, chunk))
        });
        chunks.take(self.chunk_count)
    }
}

/// Calls `visit` with blocks of zeros, `count` bytes in total.
fn for_each_zero_block(
    mut count: u64,
    visit: &mut impl FnMut(&'static [u8]) -> Result<()>,
) -> Result<()> {
    static ZEROS: [u8; 4096] = [0; 4096];
    while count > 0 {
        let part = usize::try_from(count).unwrap_or(ZEROS.len()).min(ZEROS.len());
        visit(&ZEROS[..part])?;
        count -= length(&ZEROS[..part]);
    }
    Ok(())
}

/// Returns the jobs that write `range` of a file.
///
/// `head` is the head of the file, if the range contains it.
pub(crate) fn jobs(
    range: Range<u64>,
    head: Option<Bytes>,
    sources: &Arc<Vec<Source>>,
) -> Vec<WriteJob> {
    let mut jobs = Vec::new();
    let mut next = WriteJob {
        range,
        head,
        sources: sources.clone(),
        first_chunk: ChunkPosition::default(),
        chunk_count: 0,
    };
    for (number, source) in sources.iter().enumerate() {
        let mut end = source.offset;
        for chunk in 0..source.chunk_count() {
            let (_, chunk_range) = source.locate_chunk(chunk);
            end += chunk_range.end - chunk_range.start;
            next.chunk_count += 1;
            if end - next.range.start >= JOB_BYTES {
                let first_chunk = ChunkPosition { source: number, chunk: chunk + 1 };
                let rest = WriteJob {
                    range: end..next.range.end,
                    head: None,
                    first_chunk,
                    chunk_count: 0,
                    ..next.clone()
                };
                jobs.push(WriteJob {
                    range: next.range.start..end,
                    ..std::mem::replace(&mut next, rest)
                });
            }
        }
    }
    if next.range.start < next.range.end {
        jobs.push(next);
    }
    jobs
}

/// Returns the bytes that the write jobs of a file write, in order, as a list of slices.
///
/// Returns `None` if some of the bytes are in a blob.
pub(crate) fn parts<'a>(end: u64, head: &'a [u8], sources: &'a [Source]) -> Option<Vec<&'a [u8]>> {
    let is_in_memory = |bytes: &RawBytes| {
        bytes.segments.iter().all(|segment| matches!(segment, Segment::Memory(_)))
    };
    if !sources.iter().flat_map(Source::stored_bytes).all(is_in_memory) {
        return None;
    }
    let mut parts = vec![head];
    let mut at = length(head);
    let mut push = |bytes: &'a [u8]| {
        parts.push(bytes);
        Ok(())
    };
    let mut collect = || {
        for source in sources {
            for_each_zero_block(source.offset - at, &mut |zeros| push(zeros))?;
            at = source.offset;
            for bytes in source.stored_bytes() {
                let whole = 0..bytes.len();
                for_each_zero_block(bytes.zeros_in(&whole), &mut |zeros| push(zeros))?;
                bytes.segments_in(&whole).try_for_each(|(segment, part)| {
                    match segment.slice_ref(part) {
                        SegmentSlice::Memory(bytes) => push(bytes),
                        SegmentSlice::Blob(..) => Ok(()),
                    }
                })?;
                at += bytes.len();
            }
        }
        for_each_zero_block(end - at, &mut |zeros| push(zeros))
    };
    collect().expect("nothing is refused");
    Some(parts)
}

impl SegmentSlice<'_> {
    fn len(self) -> u64 {
        match self {
            Self::Memory(bytes) => length(bytes),
            Self::Blob(_, _, len) => len,
        }
    }

    /// Calls `visit` with the bytes, block by block. Bytes of a blob are read into `buffer`.
    fn for_each_block(
        self,
        buffer: &mut Vec<u8>,
        visit: &mut impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Memory(bytes) => bytes.chunks(BLOCK).try_for_each(visit),
            Self::Blob(blob, offset, len) => {
                buffer.resize(BLOCK, 0);
                let end = offset + len;
                (offset..end).step_by(BLOCK).try_for_each(|at| {
                    let block = &mut buffer[..to_usize(end - at).min(BLOCK)];
                    blob.read_exact_at(block, at)?;
                    visit(block)
                })
            }
        }
    }
}

impl Source {
    /// Returns the stored bytes: one entry for a raw storage, one entry per chunk for a compressed one.
    fn stored_bytes(&self) -> &[RawBytes] {
        match &self.body {
            Body::Raw { bytes, .. } => std::slice::from_ref(bytes),
            Body::Compressed(chunks) => chunks,
        }
    }

    /// Returns the blobs that contain bytes of the storage, once for each segment.
    pub(crate) fn blobs(&self) -> impl Iterator<Item = &dyn Blob> {
        self.stored_bytes().iter().flat_map(|bytes| bytes.segments.iter()).filter_map(|segment| {
            match segment {
                Segment::Memory(_) => None,
                Segment::Blob(it) => Some(&*it.blob),
            }
        })
    }

    /// Returns the number of stored chunks.
    fn chunk_count(&self) -> usize {
        match &self.body {
            Body::Raw { bytes, chunk_size, .. } => {
                usize::try_from(chunk_size.count(bytes.len())).expect("it is in memory")
            }
            Body::Compressed(chunks) => chunks.len(),
        }
    }

    /// Returns the bytes that contain a stored chunk, and the range of the chunk in them.
    fn locate_chunk(&self, number: usize) -> (&RawBytes, Range<u64>) {
        match &self.body {
            Body::Raw { bytes, chunk_size, .. } => {
                (bytes, chunk_size.range(to_u64(number), bytes.len()))
            }
            Body::Compressed(chunks) => (&chunks[number], 0..chunks[number].len()),
        }
    }

    /// Returns the checksum builder of a stored chunk. It computes a digest if the body asks for one.
    fn checksum_builder(&self, chunk: usize) -> ChecksumBuilder {
        let hasher = match &self.body {
            Body::Raw { bytes, chunk_size, digest: true } => {
                Some(ChunkHasher::new(to_u64(chunk), bytes.len(), *chunk_size).into())
            }
            _ => None,
        };
        ChecksumBuilder { hasher, ..ChecksumBuilder::default() }
    }
}

impl RawBytes {
    pub(crate) fn len(&self) -> u64 {
        self.padding + self.segments.iter().map(Segment::len).sum::<u64>()
    }

    /// Returns the part of the bytes in `range`.
    pub(crate) fn slice(&self, range: &Range<u64>) -> Self {
        let segments = self.segments_in(range).map(|(segment, part)| segment.slice(part));
        Self { padding: self.zeros_in(range), segments: segments.collect::<Vec<_>>().into() }
    }

    /// Returns how many of the leading zeros lie in `range`.
    fn zeros_in(&self, range: &Range<u64>) -> u64 {
        self.padding.clamp(range.start, range.end) - range.start
    }

    /// Returns the segments that have bytes in `range`, each with the range of these bytes in the segment.
    fn segments_in(&self, range: &Range<u64>) -> impl Iterator<Item = (&Segment, Range<u64>)> {
        let mut end = self.padding;
        self.segments.iter().filter_map(move |segment| {
            let start = end;
            end += segment.len();
            let part = start.max(range.start)..end.min(range.end);
            (part.start < part.end).then(|| (segment, part.start - start..part.end - start))
        })
    }

    /// Returns the bytes in `range` as one slice.
    ///
    /// Bytes that are not contiguous in memory are gathered in `buffer`.
    pub(crate) fn contiguous<'a>(
        &'a self,
        range: &Range<u64>,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let zeros = self.zeros_in(range);
        let mut parts = self.segments_in(range).map(|(segment, part)| segment.slice_ref(part));
        if zeros == 0
            && let (Some(SegmentSlice::Memory(only)), None) = (parts.next(), parts.next())
        {
            return Ok(only);
        }
        buffer.clear();
        buffer.resize(to_usize(zeros), 0);
        for (segment, part) in self.segments_in(range) {
            match segment.slice_ref(part) {
                SegmentSlice::Memory(bytes) => buffer.extend_from_slice(bytes),
                SegmentSlice::Blob(blob, offset, len) => {
                    let start = buffer.len();
                    buffer.resize(start + to_usize(len), 0);
                    blob.read_exact_at(&mut buffer[start..], offset)?;
                }
            }
        }
        Ok(buffer)
    }
}

impl RawBytes {
    /// Returns the bytes of these parts, in order.
    pub(crate) fn from_parts(parts: impl Iterator<Item = Bytes>) -> Self {
        let segments: Vec<Segment> = parts.map(Segment::from).collect();
        Self { padding: 0, segments: segments.into() }
    }
}

impl From<Segment> for RawBytes {
    fn from(segment: Segment) -> Self {
        Self { padding: 0, segments: Segments::One(segment) }
    }
}

impl From<Bytes> for RawBytes {
    fn from(bytes: Bytes) -> Self {
        Segment::from(bytes).into()
    }
}

impl From<Vec<Segment>> for Segments {
    fn from(mut segments: Vec<Segment>) -> Self {
        match segments.pop() {
            Some(only) if segments.is_empty() => Self::One(only),
            last => {
                segments.extend(last);
                Self::Many(segments)
            }
        }
    }
}

pub(crate) fn length(bytes: &[u8]) -> u64 {
    to_u64(bytes.len())
}
