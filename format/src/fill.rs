//! Jobs that write the bytes of an archive, each its own part, in any order and on any thread.

use std::io::Write;
use std::ops::Range;

use bytes::Bytes;
use crc32fast::Hasher;

use crate::copy::copy_and_checksum;
use crate::error::{Error, ErrorKind, Result};
use crate::structure::CHUNK_BYTES;

/// Jobs are cut at the first chunk that ends beyond this many bytes.
const JOB_BYTES: u64 = 4 << 20;

/// Where the bytes of one storage come from.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Where it begins in the file.
    pub(crate) offset: u64,
    /// Its length, the lead included.
    pub(crate) len: u64,
    /// Zeros in front, which bring its tensors to their alignment.
    pub(crate) lead: u64,
    /// The rest of it, in order.
    pub(crate) segments: Vec<Bytes>,
    /// Its first entry of the checksum table.
    pub(crate) first_crc: usize,
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
    lead: u64,
    segments: Vec<Bytes>,
    /// The entry of the checksum table; the head of the file has none.
    crc: Option<usize>,
}

/// What a job has found out: checksums, to be given to [`Layout::seal`](crate::Layout::seal).
#[derive(Debug)]
#[must_use = "the index needs the checksums of all jobs"]
pub struct Filled {
    pub(crate) crcs: Vec<(usize, u32)>,
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
        self.each(&mut |bytes, crc| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            match crc {
                Some(crc) => copy_and_checksum(bytes, part, crc),
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
        self.each(&mut |bytes, crc| {
            let Some(crc) = crc else { return Ok(writer.write_all(bytes)?) };
            // Small enough to be in the cache still when it is written.
            for block in bytes.chunks(256 << 10) {
                crc.update(block);
                writer.write_all(block)?;
            }
            Ok(())
        })
    }

    /// Calls `put` with all bytes of the range in order; with a checksum where one is wanted.
    fn each(
        &self,
        put: &mut impl FnMut(&[u8], Option<&mut Hasher>) -> Result<()>,
    ) -> Result<Filled> {
        let mut at = self.range.start;
        let mut crcs = Vec::with_capacity(self.pieces.len());
        for piece in &self.pieces {
            zeros(piece.offset - at, &mut |zeros| put(zeros, None))?;
            let mut crc = Hasher::new();
            zeros(piece.lead, &mut |zeros| put(zeros, Some(&mut crc)))?;
            at = piece.offset + piece.lead;
            for segment in &piece.segments {
                put(segment, Some(&mut crc))?;
                at += length(segment);
            }
            crcs.extend(piece.crc.map(|entry| (entry, crc.finalize())));
        }
        zeros(self.range.end - at, &mut |zeros| put(zeros, None))?;
        Ok(Filled { crcs })
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
    pieces.extend(head.map(|head| Piece { offset: 0, lead: 0, segments: vec![head], crc: None }));
    for source in sources {
        for (chunk, crc) in (0..source.len.div_ceil(CHUNK_BYTES)).zip(source.first_crc..) {
            let start = chunk * CHUNK_BYTES;
            let end = (start + CHUNK_BYTES).min(source.len);
            pieces.push(source.piece(start..end, crc));
            let end = source.offset + end;
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
    /// The part of a storage that lies in `range` of it.
    fn piece(&self, range: Range<u64>, crc: usize) -> Piece {
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
        Piece { offset: self.offset + range.start, lead, segments, crc: Some(crc) }
    }
}

pub(crate) fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).expect("usize is at most 64 bits")
}
