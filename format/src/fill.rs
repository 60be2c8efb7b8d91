//! Jobs that write the bytes of an archive, each its own part, in any order and on any thread.

use std::fmt;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::checksum::checksum_after;
use crate::chunk::ChunkSize;
use crate::copy::copy_and_checksum;
use crate::digest::{ChunkHasher, Digest};
use crate::error::{Error, ErrorKind, Result};

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
    pub(crate) segments: Segments,
}

/// Bytes of one owner, as nearly always, or of several in turn.
#[derive(Clone, Debug)]
pub(crate) enum Segments {
    One(Segment),
    Many(Vec<Segment>),
}

/// Bytes that are in memory, or that are read when they are written.
#[derive(Clone, Debug)]
pub(crate) enum Segment {
    Memory(Bytes),
    // In a box: tensors in memory are the many.
    Elsewhere(Box<Elsewhere>),
}

#[derive(Clone)]
pub(crate) struct Elsewhere {
    blob: Arc<dyn Blob>,
    range: Range<u64>,
}

impl fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Elsewhere({:?})", self.range)
    }
}

/// A part of a segment.
#[derive(Clone, Copy)]
enum Part<'a> {
    Memory(&'a [u8]),
    /// That many bytes of a blob, from an offset on.
    Elsewhere(&'a dyn Blob, u64, u64),
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
    pub(crate) fn elsewhere(blob: Arc<dyn Blob>, range: Range<u64>) -> Self {
        Self::Elsewhere(Elsewhere { blob, range }.into())
    }

    fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => length(bytes),
            Self::Elsewhere(it) => it.range.end - it.range.start,
        }
    }

    fn slice(&self, part: Range<u64>) -> Self {
        match self {
            Self::Memory(bytes) => Self::Memory(bytes.slice(native(part.start)..native(part.end))),
            Self::Elsewhere(it) => {
                let start = it.range.start;
                Self::elsewhere(it.blob.clone(), start + part.start..start + part.end)
            }
        }
    }

    fn part(&self, part: Range<u64>) -> Part<'_> {
        match self {
            Self::Memory(bytes) => Part::Memory(&bytes[native(part.start)..native(part.end)]),
            Self::Elsewhere(it) => {
                Part::Elsewhere(&*it.blob, it.range.start + part.start, part.end - part.start)
            }
        }
    }
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
    /// Its raw bytes, in chunks of what size, with or without a digest of them.
    Raw { bytes: RawBytes, chunk_size: ChunkSize, digest: bool },
    /// Chunks that are compressed, or not worth it.
    Packed(Vec<RawBytes>),
}

/// One job: a range of the file, and what belongs there.
///
/// The jobs of a [`Layout`](crate::Layout) tile the file from its first byte to the index.
#[derive(Clone, Debug)]
pub struct Fill {
    range: Range<u64>,
    /// What the file begins with, if that is in the range.
    head: Option<Bytes>,
    /// All storages of the layout. What lies between them is zero.
    sources: Arc<Vec<Source>>,
    /// Its stored chunks: from this one on, that many.
    first: Place,
    count: usize,
}

/// A stored chunk, by the numbers of its source and of itself in there.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    source: usize,
    chunk: usize,
}

/// What a job has found out: checksums, to be given to [`Layout::seal`](crate::Layout::seal).
#[derive(Debug)]
#[must_use = "the index needs the checksums of all jobs"]
pub struct Filled {
    /// The entry of the checksum table that the first is for.
    pub(crate) first: usize,
    pub(crate) sums: Vec<Sum>,
}

/// Bytes that a job writes, in one piece.
#[derive(Clone, Copy)]
pub enum Piece<'a> {
    /// They are in this process's memory.
    Memory(&'a [u8]),
    /// So many bytes of a blob, from an offset on.
    Elsewhere {
        /// Whose they are.
        blob: &'a dyn Blob,
        /// Their first byte.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
}

impl fmt::Debug for Piece<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(bytes) => write!(f, "Memory({} bytes)", bytes.len()),
            Self::Elsewhere { offset, len, .. } => write!(f, "Elsewhere({len} bytes at {offset})"),
        }
    }
}

/// What is known of the stored bytes of a chunk.
#[derive(Clone, Debug)]
pub(crate) struct Sum {
    pub(crate) crc: u32,
    /// Its part of the digest of its storage, if there is to be one.
    pub(crate) digest: Option<Box<Digest>>,
}

/// Sums in the making.
#[derive(Default)]
struct Summing {
    crc: u32,
    digest: Option<Box<ChunkHasher>>,
    /// Whether some of the bytes were not seen: then nothing is known.
    is_unknown: bool,
}

impl Summing {
    fn copy(&mut self, bytes: &[u8], target: &mut [u8]) {
        let Some(digest) = &mut self.digest else {
            self.crc = copy_and_checksum(bytes, target, self.crc);
            return;
        };
        for (bytes, target) in bytes.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
            digest.update(bytes);
            self.crc = copy_and_checksum(bytes, target, self.crc);
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        self.crc = checksum_after(self.crc, bytes);
        if let Some(digest) = &mut self.digest {
            digest.update(bytes);
        }
    }

    fn finish(self) -> Sum {
        let digest = self.digest.map(|digest| digest.finish().into());
        Sum { crc: if self.is_unknown { 0 } else { self.crc }, digest }
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
        self.write(target, |blob, offset, target| blob.read_exact_at(target, offset))
    }

    /// The same where whoever calls this has written what [`Fill::elsewhere`] says: that is only looked at.
    ///
    /// # Errors
    ///
    /// As [`Fill::run`].
    pub fn complete(&self, target: &mut [u8]) -> Result<Filled> {
        self.write(target, |_, _, _| Ok(()))
    }

    /// Writes the range into memory, and lets `bring` write what is elsewhere.
    fn write(
        &self,
        target: &mut [u8],
        bring: impl Fn(&dyn Blob, u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<Filled> {
        if u64::try_from(target.len()) != Ok(self.range.end - self.range.start) {
            return Err(Error::new(ErrorKind::TargetSize).note(format_args!(
                "{} bytes for {:?}",
                target.len(),
                self.range
            )));
        }
        let mut rest = target;
        self.each(&mut |part, summing| {
            let (target, tail) = std::mem::take(&mut rest).split_at_mut(native(part.len()));
            match (part, summing) {
                (Part::Memory(bytes), Some(summing)) => summing.copy(bytes, target),
                (Part::Memory(bytes), None) => target.copy_from_slice(bytes),
                (Part::Elsewhere(blob, offset, _), summing) => {
                    bring(blob, offset, target)?;
                    if let Some(summing) = summing {
                        summing.update(target);
                    }
                }
            }
            rest = tail;
            Ok(())
        })
    }

    /// Gives what is in no memory, piece by piece in order: the place in the file, and which bytes of which blob belong
    /// there.
    pub fn elsewhere<'a>(&'a self, mut put: impl FnMut(u64, &'a dyn Blob, Range<u64>)) {
        let mut at = self.range.start;
        let walked = self.each(&mut |part, _| {
            if let Part::Elsewhere(blob, offset, len) = part {
                put(at, blob, offset..offset + len);
            }
            at += part.len();
            Ok(())
        });
        let _ = walked.expect("nothing is refused");
    }

    /// Writes the range to `writer`, checksums on the way.
    ///
    /// # Errors
    ///
    /// `Io` if the writer fails, or what is elsewhere cannot be read.
    pub fn write_to(&self, writer: &mut impl Write) -> Result<Filled> {
        let mut memory = Vec::new();
        self.each(&mut |part, mut summing| {
            part.blocks(&mut memory, &mut |block| {
                if let Some(summing) = &mut summing {
                    summing.update(block);
                }
                Ok(writer.write_all(block)?)
            })
        })
    }

    /// The checksums alone.
    ///
    /// # Errors
    ///
    /// `Io` if what is elsewhere cannot be read.
    pub fn sum(&self) -> Result<Filled> {
        let mut memory = Vec::new();
        self.each(&mut |part, summing| {
            let Some(summing) = summing else { return Ok(()) };
            part.blocks(&mut memory, &mut |block| {
                summing.update(block);
                Ok(())
            })
        })
    }

    /// Gives the range, piece by piece with its place in the file, to whoever copies it without looking, such as to the
    /// memory of a GPU. Checksums are those of what is in this process's memory: of a chunk with bytes that are
    /// elsewhere the checksum is 0, and its digest that of what was seen.
    ///
    /// # Errors
    ///
    /// `Io` if `put` fails.
    pub fn pieces(&self, mut put: impl FnMut(u64, Piece<'_>) -> io::Result<()>) -> Result<Filled> {
        let mut at = self.range.start;
        self.each(&mut |part, summing| {
            let piece = match part {
                Part::Memory(bytes) => {
                    if let Some(summing) = summing {
                        summing.update(bytes);
                    }
                    Piece::Memory(bytes)
                }
                Part::Elsewhere(blob, offset, len) => {
                    if let Some(summing) = summing {
                        summing.is_unknown = true;
                    }
                    Piece::Elsewhere { blob, offset, len }
                }
            };
            put(at, piece)?;
            at += part.len();
            Ok(())
        })
    }

    /// Calls `put` with all bytes of the range in order; with sums where they are wanted.
    fn each<'a>(
        &'a self,
        put: &mut impl FnMut(Part<'a>, Option<&mut Summing>) -> Result<()>,
    ) -> Result<Filled> {
        let mut at = self.range.start;
        if let Some(head) = &self.head {
            put(Part::Memory(head), None)?;
            at += length(head);
        }
        let mut sums = Vec::with_capacity(self.count);
        for (source, chunk) in self.chunks() {
            if chunk == 0 {
                zeros(source.offset - at, &mut |zeros| put(Part::Memory(zeros), None))?;
                at = source.offset;
            }
            let mut summing = source.summing(chunk);
            let (bytes, range) = source.chunk(chunk);
            zeros(bytes.zeros(&range), &mut |zeros| put(Part::Memory(zeros), Some(&mut summing)))?;
            for (segment, part) in bytes.cut(&range) {
                put(segment.part(part), Some(&mut summing))?;
            }
            at += range.end - range.start;
            sums.push(summing.finish());
        }
        zeros(self.range.end - at, &mut |zeros| put(Part::Memory(zeros), None))?;
        let first = self.sources.get(self.first.source);
        Ok(Filled { first: first.map_or(0, |source| source.first_crc + self.first.chunk), sums })
    }

    /// Its stored chunks, each with its number in its source.
    fn chunks(&self) -> impl Iterator<Item = (&Source, usize)> {
        let Place { source: first, chunk } = self.first;
        let sources = self.sources[first..].iter().enumerate();
        let chunks = sources.flat_map(move |(number, source)| {
            let from = if number == 0 { chunk } else { 0 };
            (from..source.chunks()).map(move |chunk| (source, chunk))
        });
        chunks.take(self.count)
    }
}

/// Calls `put` with that many zeros.
fn zeros(mut count: u64, put: &mut impl FnMut(&'static [u8]) -> Result<()>) -> Result<()> {
    static ZEROS: [u8; 4096] = [0; 4096];
    while count > 0 {
        let part = usize::try_from(count).unwrap_or(ZEROS.len()).min(ZEROS.len());
        put(&ZEROS[..part])?;
        count -= length(&ZEROS[..part]);
    }
    Ok(())
}

/// The jobs that write `start..end` of a file, given the head if it is in there, and the storages.
pub(crate) fn jobs(
    range: Range<u64>,
    head: Option<Bytes>,
    sources: &Arc<Vec<Source>>,
) -> Vec<Fill> {
    let mut jobs = Vec::new();
    let mut next =
        Fill { range, head, sources: sources.clone(), first: Place::default(), count: 0 };
    for (number, source) in sources.iter().enumerate() {
        let mut end = source.offset;
        for chunk in 0..source.chunks() {
            let (_, chunk_range) = source.chunk(chunk);
            end += chunk_range.end - chunk_range.start;
            next.count += 1;
            if end - next.range.start >= JOB_BYTES {
                let first = Place { source: number, chunk: chunk + 1 };
                let rest = Fill {
                    range: end..next.range.end,
                    head: None,
                    first,
                    count: 0,
                    ..next.clone()
                };
                jobs.push(Fill {
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

/// What [`jobs`] write, in order and in pieces as large as can be; none if some of it is elsewhere.
pub(crate) fn parts<'a>(end: u64, head: &'a [u8], sources: &'a [Source]) -> Option<Vec<&'a [u8]>> {
    let is_here = |bytes: &RawBytes| {
        bytes.segments.iter().all(|segment| matches!(segment, Segment::Memory(_)))
    };
    if !sources.iter().flat_map(Source::pieces).all(is_here) {
        return None;
    }
    let mut parts = vec![head];
    let mut at = length(head);
    let mut put = |bytes: &'a [u8]| {
        parts.push(bytes);
        Ok(())
    };
    let mut fill = || {
        for source in sources {
            zeros(source.offset - at, &mut |zeros| put(zeros))?;
            at = source.offset;
            for bytes in source.pieces() {
                let whole = 0..bytes.len();
                zeros(bytes.zeros(&whole), &mut |zeros| put(zeros))?;
                bytes.cut(&whole).try_for_each(|(segment, part)| match segment.part(part) {
                    Part::Memory(bytes) => put(bytes),
                    Part::Elsewhere(..) => Ok(()),
                })?;
                at += bytes.len();
            }
        }
        zeros(end - at, &mut |zeros| put(zeros))
    };
    fill().expect("nothing is refused");
    Some(parts)
}

impl Part<'_> {
    fn len(self) -> u64 {
        match self {
            Self::Memory(bytes) => length(bytes),
            Self::Elsewhere(_, _, len) => len,
        }
    }

    /// Gives its bytes block by block; what is elsewhere comes into `memory`.
    fn blocks(
        self,
        memory: &mut Vec<u8>,
        take: &mut impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Memory(bytes) => bytes.chunks(BLOCK).try_for_each(take),
            Self::Elsewhere(blob, offset, len) => {
                memory.resize(BLOCK, 0);
                let end = offset + len;
                (offset..end).step_by(BLOCK).try_for_each(|at| {
                    let block = &mut memory[..native(end - at).min(BLOCK)];
                    blob.read_exact_at(block, at)?;
                    take(block)
                })
            }
        }
    }
}

impl Source {
    /// Its stored bytes: all at once, or its chunks.
    fn pieces(&self) -> &[RawBytes] {
        match &self.body {
            Body::Raw { bytes, .. } => std::slice::from_ref(bytes),
            Body::Packed(chunks) => chunks,
        }
    }

    /// The blobs that its bytes are of, where they are in no memory.
    pub(crate) fn elsewhere(&self) -> impl Iterator<Item = &dyn Blob> {
        self.pieces().iter().flat_map(|bytes| bytes.segments.iter()).filter_map(|segment| {
            match segment {
                Segment::Memory(_) => None,
                Segment::Elsewhere(it) => Some(&*it.blob),
            }
        })
    }

    /// How many stored chunks it has.
    fn chunks(&self) -> usize {
        match &self.body {
            Body::Raw { bytes, chunk_size, .. } => {
                usize::try_from(chunk_size.count(bytes.len())).expect("it is in memory")
            }
            Body::Packed(chunks) => chunks.len(),
        }
    }

    /// A stored chunk, as a range of bytes.
    fn chunk(&self, number: usize) -> (&RawBytes, Range<u64>) {
        match &self.body {
            Body::Raw { bytes, chunk_size, .. } => {
                (bytes, chunk_size.range(wide(number), bytes.len()))
            }
            Body::Packed(chunks) => (&chunks[number], 0..chunks[number].len()),
        }
    }

    /// What is wanted to be known of a stored chunk.
    fn summing(&self, chunk: usize) -> Summing {
        let digest = match &self.body {
            Body::Raw { bytes, chunk_size, digest: true } => {
                Some(ChunkHasher::new(wide(chunk), (bytes.len(), *chunk_size)).into())
            }
            _ => None,
        };
        Summing { digest, ..Summing::default() }
    }
}

impl RawBytes {
    pub(crate) fn len(&self) -> u64 {
        self.lead + self.segments.iter().map(Segment::len).sum::<u64>()
    }

    /// The part of it that lies in `range`.
    pub(crate) fn part(&self, range: &Range<u64>) -> Self {
        let segments = self.cut(range).map(|(segment, part)| segment.slice(part));
        Self { lead: self.zeros(range), segments: segments.collect::<Vec<_>>().into() }
    }

    /// How many of its zeros lie in `range`.
    fn zeros(&self, range: &Range<u64>) -> u64 {
        self.lead.clamp(range.start, range.end) - range.start
    }

    /// The segments that have bytes in `range`, and where in them.
    fn cut(&self, range: &Range<u64>) -> impl Iterator<Item = (&Segment, Range<u64>)> {
        let mut end = self.lead;
        self.segments.iter().filter_map(move |segment| {
            let start = end;
            end += segment.len();
            let part = start.max(range.start)..end.min(range.end);
            (part.start < part.end).then(|| (segment, part.start - start..part.end - start))
        })
    }

    /// What of it lies in `range` in one piece, in `gathered` if it is not so already.
    pub(crate) fn contiguous<'a>(
        &'a self,
        range: &Range<u64>,
        gathered: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let zeros = self.zeros(range);
        let mut parts = self.cut(range).map(|(segment, part)| segment.part(part));
        if zeros == 0
            && let (Some(Part::Memory(only)), None) = (parts.next(), parts.next())
        {
            return Ok(only);
        }
        gathered.clear();
        gathered.resize(native(zeros), 0);
        for (segment, part) in self.cut(range) {
            match segment.part(part) {
                Part::Memory(bytes) => gathered.extend_from_slice(bytes),
                Part::Elsewhere(blob, offset, len) => {
                    let start = gathered.len();
                    gathered.resize(start + native(len), 0);
                    blob.read_exact_at(&mut gathered[start..], offset)?;
                }
            }
        }
        Ok(gathered)
    }
}

impl From<Bytes> for RawBytes {
    fn from(bytes: Bytes) -> Self {
        Self { lead: 0, segments: Segments::One(bytes.into()) }
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
    wide(bytes.len())
}

/// A length of what is in memory, or a place in it.
fn native(bytes: u64) -> usize {
    usize::try_from(bytes).expect("what is in memory fits usize")
}

fn wide(count: usize) -> u64 {
    u64::try_from(count).expect("usize is at most 64 bits")
}
