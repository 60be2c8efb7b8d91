//! Upload of an archive to a device segment: all copies begin, and one call waits for them.
#![expect(unsafe_code, reason = "what is copied must be there until it is done")]

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tssd_format::{JobChecksums, Piece, Runs, WriteJob};

use crate::convert::to_u64;
use crate::device::PooledStream;
use crate::driver::{CopySource, CopyStream};
use crate::memory::device_memory;
use crate::segment::DeviceSegment;
use tssd_store::{Error, Result, device};

/// Writes the data of one archive into a segment.
pub(crate) struct SegmentUpload {
    segment: Arc<DeviceSegment>,
    state: Mutex<UploadState>,
}

struct UploadState {
    /// None once the upload is finished.
    stream: Option<PooledStream>,
    /// Jobs whose bytes are copied. They keep the memory alive.
    jobs: Vec<WriteJob>,
    /// The next copy, delayed until its end is known: chunks of one tensor are copied together.
    next: Option<DeviceCopy>,
}

/// A copy within the device.
#[derive(Clone, Copy)]
struct DeviceCopy {
    target: u64,
    source: u64,
    len: u64,
}

impl SegmentUpload {
    /// Begins the upload of an archive to a segment.
    pub(crate) fn new(segment: &Arc<DeviceSegment>) -> Result<Self> {
        let stream = Some(segment.device().stream()?);
        Ok(Self {
            segment: segment.clone(),
            state: Mutex::new(UploadState { stream, jobs: Vec::new(), next: None }),
        })
    }

    fn state(&self) -> MutexGuard<'_, UploadState> {
        self.state.lock().expect("nobody panics while beginning copies")
    }

    fn begin(
        &self,
        stream: &CopyStream,
        next: &mut Option<DeviceCopy>,
        at: u64,
        piece: Piece<'_>,
    ) -> Result<()> {
        match piece {
            Piece::Memory(bytes) => {
                let target = self.segment.device_address(at, to_u64(bytes.len()))?;
                // SAFETY: the range was checked, and the segment is reserved for this upload. The job holds the bytes,
                // and stays until the stream has finished.
                unsafe { stream.start_write(target, bytes) }
            }
            Piece::Blob { blob, offset, len } => {
                let target = self.segment.device_address(at, len)?;
                let memory =
                    device_memory(blob).filter(|memory| memory.device() == self.segment.device());
                if let Some(memory) = memory {
                    let source = memory.begin_read(stream, offset, len)?;
                    match next {
                        Some(last) if last.is_continued_by(source, target) => last.len += len,
                        _ => {
                            let before = next.replace(DeviceCopy { target, source, len });
                            // SAFETY: as above. The creator of the memory guarantees that it is not written while the
                            // job holds it. `begin_read` has made the stream wait until it is ready.
                            unsafe { begin_copy(stream, before) }?;
                        }
                    }
                    return Ok(());
                }
                // Through a buffer in host memory, which is freed when this call returns.
                let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
                let read = blob.read_exact_at(&mut bytes, offset);
                read.map_err(|error| Error::io("a tensor of another device", error))?;
                // SAFETY: as above.
                unsafe { stream.write(target, &bytes) }
            }
        }
    }
}

impl device::Upload for SegmentUpload {
    /// Begins to copy the bytes of a job to their offsets.
    ///
    /// The first bytes of the archive also go to `head`.
    fn write(&self, job: &WriteJob, head: Option<&mut [u8]>) -> Result<JobChecksums> {
        let mut state = self.state();
        let UploadState { stream, jobs, next } = &mut *state;
        let failed = |error| Error::from_request("the memory of a GPU", error);
        let stream =
            stream.as_ref().ok_or_else(|| Error::io("a GPU", io::Error::other("it is done")))?;
        // Add the job first: it keeps the bytes alive until the copies are done, also after an error.
        jobs.push(job.clone());
        let mut head = head;
        job.for_each_piece(|at, piece| {
            if let (0, Piece::Memory(bytes), Some(head)) = (at, piece, head.take()) {
                let (prefix, rest) = head.split_at_mut(bytes.len().min(head.len()));
                prefix.copy_from_slice(&bytes[..prefix.len()]);
                rest.fill(0);
            }
            self.begin(stream, &mut *next, at, piece).map_err(io::Error::other)
        })
        .map_err(failed)
    }

    /// Waits until all copies are done.
    fn finish(&self) -> Result<()> {
        let mut state = self.state();
        let Some(stream) = state.stream.take() else { return Ok(()) };
        // SAFETY: the segment is reserved for this upload, and the jobs still hold the copied memory.
        let begun = unsafe { begin_copy(&stream, state.next.take()) };
        let finished = stream.finish();
        state.jobs.clear();
        begun.and(finished)
    }
}

impl DeviceCopy {
    fn is_continued_by(&self, source: u64, target: u64) -> bool {
        (self.source + self.len, self.target + self.len) == (source, target)
    }
}

/// Begins a copy within a device.
///
/// # Safety
///
/// As [`CopyStream::start_runs`].
unsafe fn begin_copy(stream: &CopyStream, copy: Option<DeviceCopy>) -> Result<()> {
    let Some(DeviceCopy { target, source, len }) = copy else { return Ok(()) };
    // SAFETY: the caller upholds the same contract.
    unsafe { stream.start_runs(target, CopySource::Device(source), &Runs::contiguous(len)) }
}

impl Drop for SegmentUpload {
    fn drop(&mut self) {
        // Wait also after an error: the sources are dropped next.
        let _ = device::Upload::finish(self);
    }
}

impl device::Segment for DeviceSegment {
    fn read(&self, target: &mut [u8], offset: u64) -> Result<()> {
        let len = u64::try_from(target.len()).unwrap_or(u64::MAX);
        let source = self.device_address(offset, len)?;
        let stream = self.device().stream()?;
        // SAFETY: the range was checked, and exists as long as this segment. A lease prevents writes to it.
        unsafe { stream.read(target, source) }
    }

    fn upload(self: Arc<Self>) -> Result<Box<dyn device::Upload>> {
        Ok(Box::new(SegmentUpload::new(&self)?))
    }
}
