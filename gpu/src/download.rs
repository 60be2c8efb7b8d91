//! Download of an archive from devices to pinned host memory.
//!
//! All copies begin in the order of the parts. Each part is processed when its own copies are done, while those of the
//! next parts are in flight.
#![expect(unsafe_code, reason = "what is copied must be there until it is done")]

use std::ops::Range;
use std::sync::Mutex;

use tssd_format::WriteJob;

use crate::convert::to_usize;
use crate::device::{Device, PooledStream};
use crate::driver::Event;
use crate::memory::{DeviceMemory, device_memory};
use tssd_store::Result;
use tssd_store::device::{Download, DownloadTarget};

/// The streams of the copies of one archive: one per device.
#[derive(Default)]
pub(crate) struct DmaBatch(Mutex<Vec<PooledStream>>);

/// The memory of a part, into which devices copy. It is not accessed before the copies are done.
struct DmaTarget<'a> {
    batch: &'a DmaBatch,
    part: &'a mut [u8],
    /// Events after the copies.
    events: Vec<Event>,
    /// The job whose bytes are copied. It keeps the device memory alive.
    job: Option<WriteJob>,
}

/// A range of the part that one device holds.
struct Piece<'a> {
    memory: &'a DeviceMemory,
    offset: u64,
    /// Range in the part.
    place: Range<usize>,
}

impl Download for DmaBatch {
    fn target<'a>(&'a self, part: &'a mut [u8]) -> Box<dyn DownloadTarget + 'a> {
        Box::new(DmaTarget { batch: self, part, events: Vec::new(), job: None })
    }
}

impl DownloadTarget for DmaTarget<'_> {
    /// Begins to copy the device bytes of a job to the part, if the devices can do so by DMA.
    fn begin(&mut self, job: &WriteJob) -> Result<()> {
        let Some(pieces) = device_pieces(job, self.part) else { return Ok(()) };
        self.job = Some(job.clone());
        let mut streams = self.batch.0.lock().expect("nobody panics while beginning copies");
        // SAFETY: this target borrows the part. It gives no access to it before the events are done, and its drop waits
        // for them; it is never forgotten. It holds the job. If this call fails, the copies are waited for below.
        let result = unsafe { begin(&mut streams, &pieces, self.part) };
        if result.is_err() {
            streams.clear();
        }
        self.events = result?;
        Ok(())
    }

    /// Returns the part, and whether it has all device bytes of the job.
    fn finish(&mut self) -> Result<(&mut [u8], bool)> {
        let is_there = !self.events.is_empty();
        self.wait_for_copies()?;
        Ok((self.part, is_there))
    }
}

impl DmaTarget<'_> {
    fn wait_for_copies(&mut self) -> Result<()> {
        let results: Vec<Result<()>> = self.events.drain(..).map(|event| event.wait()).collect();
        self.job = None;
        results.into_iter().collect()
    }
}

impl Drop for DmaTarget<'_> {
    fn drop(&mut self) {
        let _ = self.wait_for_copies();
    }
}

/// Returns the device bytes of a job as pieces.
///
/// Returns none if there are none, or if a device cannot copy them to the part by DMA.
fn device_pieces<'a>(job: &'a WriteJob, part: &[u8]) -> Option<Vec<Piece<'a>>> {
    let mut pieces: Option<Vec<Piece<'a>>> = Some(Vec::new());
    // Memory pinned for one device is pinned for all.
    let mut is_pinned = None;
    let start = job.range().start;
    job.for_each_blob_range(|at, blob, bytes| {
        let Some(found) = &mut pieces else { return };
        let Some(memory) = device_memory(blob) else { return pieces = None };
        if !*is_pinned.get_or_insert_with(|| memory.can_pin(part)) {
            return pieces = None;
        }
        let place = to_usize(at - start)..to_usize(at - start + (bytes.end - bytes.start));
        match found.last_mut() {
            // Chunks of one tensor are copied together.
            Some(last) if last.is_continued_by(memory, bytes.start, place.start) => {
                last.place.end = place.end;
            }
            _ => found.push(Piece { memory, offset: bytes.start, place }),
        }
    });
    pieces.filter(|pieces| !pieces.is_empty())
}

impl Piece<'_> {
    /// Whether a range continues this piece, in the memory and in the part.
    fn is_continued_by(&self, memory: &DeviceMemory, offset: u64, place: usize) -> bool {
        let len = u64::try_from(self.place.len()).unwrap_or(u64::MAX);
        std::ptr::eq(self.memory, memory)
            && self.offset.checked_add(len) == Some(offset)
            && self.place.end == place
    }
}

/// Begins to copy the pieces. Returns events after the copies.
///
/// # Safety
///
/// The part and the memory of the pieces must exist, and the part must not be accessed, until the events are done, or,
/// if this call fails, until the streams were dropped.
unsafe fn begin(
    streams: &mut Vec<PooledStream>,
    pieces: &[Piece<'_>],
    part: &mut [u8],
) -> Result<Vec<Event>> {
    let mut used_streams = Vec::new();
    for Piece { memory, offset, place } in pieces {
        let index = stream_index(memory.device(), streams)?;
        // SAFETY: the caller upholds the same contract.
        unsafe { memory.start_read(&streams[index], *offset, &mut part[place.clone()])? };
        if !used_streams.contains(&index) {
            used_streams.push(index);
        }
    }
    used_streams.into_iter().map(|index| streams[index].record_event()).collect()
}

/// Returns the index of the stream of a device. Creates the stream if needed.
fn stream_index(device: &Device, streams: &mut Vec<PooledStream>) -> Result<usize> {
    if let Some(index) = streams.iter().position(|stream| stream.device() == device) {
        return Ok(index);
    }
    streams.push(device.stream()?);
    Ok(streams.len() - 1)
}
