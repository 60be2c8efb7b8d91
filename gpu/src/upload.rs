//! An archive on its way to a segment of a device: all of its copies are begun, and waited for once.
#![expect(unsafe_code, reason = "what is copied must be there until it is done")]

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tssd_format::{JobChecksums, Piece, Runs, WriteJob};

use crate::device::OwnLane;
use crate::driver::{Lane, Source};
use crate::memory::device_memory;
use crate::segment::DeviceSegment;
use tssd_store::{Error, Result, device};

/// Writes the data of one archive into a segment.
pub(crate) struct SegmentUpload {
    segment: Arc<DeviceSegment>,
    begun: Mutex<Begun>,
}

struct Begun {
    /// None once all is done.
    lane: Option<OwnLane>,
    /// Whose bytes are being copied: they hold them.
    jobs: Vec<WriteJob>,
    /// What is copied next, as soon as it is known where it ends: chunks of one tensor are copied at once.
    next: Option<Span>,
}

/// Bytes of the device on their way within it.
#[derive(Clone, Copy)]
struct Span {
    target: u64,
    source: u64,
    len: u64,
}

impl SegmentUpload {
    /// Of the archive that a segment is to have.
    pub(crate) fn new(segment: &Arc<DeviceSegment>) -> Result<Self> {
        let lane = Some(segment.device().lane()?);
        Ok(Self {
            segment: segment.clone(),
            begun: Mutex::new(Begun { lane, jobs: Vec::new(), next: None }),
        })
    }

    fn begun(&self) -> MutexGuard<'_, Begun> {
        self.begun.lock().expect("nobody panics while beginning copies")
    }

    fn begin(
        &self,
        (lane, next): (&Lane, &mut Option<Span>),
        at: u64,
        piece: Piece<'_>,
    ) -> Result<()> {
        match piece {
            Piece::Memory(bytes) => {
                let target = self.segment.place(at, wide(bytes.len()))?;
                // SAFETY: so many bytes are there, as proven, and it is lent to this upload alone; the bytes are held by
                // the job, which stays until the lane has finished.
                unsafe { lane.start_write(target, bytes) }
            }
            Piece::Blob { blob, offset, len } => {
                let target = self.segment.place(at, len)?;
                let memory =
                    device_memory(blob).filter(|memory| memory.device() == self.segment.device());
                if let Some(memory) = memory {
                    let source = memory.begin_read(lane, offset, len)?;
                    match next {
                        Some(last) if last.is_before(source, target) => last.len += len,
                        // SAFETY: as above; nobody writes to the memory as long as the job holds it, as its maker has
                        // said. It is settled.
                        _ => unsafe { copy(lane, next.replace(Span { target, source, len }))? },
                    }
                    return Ok(());
                }
                // By way of this process's memory, which is gone when this returns.
                let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
                let read = blob.read_exact_at(&mut bytes, offset);
                read.map_err(|error| Error::io("a tensor of another device", error))?;
                // SAFETY: as above.
                unsafe { lane.write(target, &bytes) }
            }
        }
    }
}

impl device::Upload for SegmentUpload {
    /// Begins to copy what a job is to write, to its places in the file. What the file begins with goes to `head` too.
    fn write(&self, job: &WriteJob, head: Option<&mut [u8]>) -> Result<JobChecksums> {
        let mut begun = self.begun();
        let Begun { lane, jobs, next } = &mut *begun;
        let failed = |error| Error::request("the memory of a GPU", error);
        let lane =
            lane.as_ref().ok_or_else(|| Error::io("a GPU", io::Error::other("it is done")))?;
        // First: whatever comes of it, the bytes stay until the copies that have begun are done.
        jobs.push(job.clone());
        let mut head = head;
        job.for_each_piece(|at, piece| {
            if let (0, Piece::Memory(bytes), Some(head)) = (at, piece, head.take()) {
                let (own, rest) = head.split_at_mut(bytes.len().min(head.len()));
                own.copy_from_slice(&bytes[..own.len()]);
                rest.fill(0);
            }
            self.begin((lane, &mut *next), at, piece).map_err(io::Error::other)
        })
        .map_err(failed)
    }

    /// Waits until all that has begun is there.
    fn finish(&self) -> Result<()> {
        let mut begun = self.begun();
        let Some(lane) = begun.lane.take() else { return Ok(()) };
        // SAFETY: the segment is lent to this, and the jobs are still there, with what is copied.
        let copied = unsafe { copy(&lane, begun.next.take()) };
        let finished = lane.finish();
        begun.jobs.clear();
        copied.and(finished)
    }
}

impl Span {
    fn is_before(&self, source: u64, target: u64) -> bool {
        (self.source + self.len, self.target + self.len) == (source, target)
    }
}

/// Begins to copy bytes within a device.
///
/// # Safety
///
/// As [`Lane::start_runs`].
unsafe fn copy(lane: &Lane, span: Option<Span>) -> Result<()> {
    let Some(Span { target, source, len }) = span else { return Ok(()) };
    // SAFETY: as the caller says.
    unsafe { lane.start_runs(target, Source::Device(source), &Runs::contiguous(len)) }
}

impl Drop for SegmentUpload {
    fn drop(&mut self) {
        // Whatever has come of it: nothing is copied any more when what it is copied from goes.
        let _ = device::Upload::finish(self);
    }
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}

impl device::Segment for DeviceSegment {
    fn read(&self, target: &mut [u8], offset: u64) -> Result<()> {
        let len = u64::try_from(target.len()).unwrap_or(u64::MAX);
        let source = self.place(offset, len)?;
        let lane = self.device().lane()?;
        // SAFETY: so many bytes are there, as proven, as long as this is, and nobody writes them: a lease holds them.
        unsafe { lane.read(target, source) }
    }

    fn upload(self: Arc<Self>) -> Result<Box<dyn device::Upload>> {
        Ok(Box::new(SegmentUpload::new(&self)?))
    }
}
