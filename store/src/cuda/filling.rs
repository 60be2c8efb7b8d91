//! An archive on its way to a segment of a device: all of its copies are begun, and waited for once.
#![expect(unsafe_code, reason = "what is copied must be there until it is done")]

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tssd_format::{Blob, Fill, Filled, Layout, Piece, Runs, StateDict, Tensor, Value};

use super::device::OwnLane;
use super::driver::{Lane, Source};
use super::memory::DeviceMemory;
use super::segment::DeviceSegment;
use super::virtual_memory;
use crate::error::{Error, Result};

/// The device that an archive is put to: that of the most of its tensors. Or why it is put to none.
pub(crate) fn home(layout: &Layout) -> std::result::Result<String, String> {
    let mut homes: Vec<(&DeviceMemory, usize)> = Vec::new();
    for memory in layout.elsewhere().filter_map(device_memory) {
        match homes.iter_mut().find(|(home, _)| home.device() == memory.device()) {
            Some((_, count)) => *count += 1,
            None => homes.push((memory, 1)),
        }
    }
    let most = homes.into_iter().max_by_key(|(_, count)| *count);
    let (memory, _) = most.ok_or("none of its tensors is on a GPU")?;
    virtual_memory::is_there(memory.device().raw())?;
    Ok(memory.device().uuid())
}

/// The devices that tensors of a state dict are on.
pub(crate) fn homes(dict: &StateDict) -> BTreeSet<String> {
    let of = |tensor: &Tensor| {
        let memory = tensor.storage().blob().and_then(|blob| device_memory(&**blob))?;
        Some(memory.device().uuid())
    };
    let homes = dict.leaves().into_iter().flat_map(|(_, leaf)| match leaf {
        Value::Tensor(tensor) => of(tensor).into_iter().collect(),
        Value::Shards(shards) => shards.iter().filter_map(|shard| of(shard.tensor())).collect(),
        _ => Vec::new(),
    });
    homes.collect()
}

pub(super) fn device_memory(blob: &dyn Blob) -> Option<&DeviceMemory> {
    blob.kind()?.downcast_ref()
}

/// What an archive has in front of its index, in the making.
pub(crate) struct Filling {
    segment: Arc<DeviceSegment>,
    begun: Mutex<Begun>,
}

struct Begun {
    /// None once all is done.
    lane: Option<OwnLane>,
    /// Whose bytes are being copied: they hold them.
    jobs: Vec<Fill>,
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

impl Filling {
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

    /// Begins to copy what a job is to write, to its places in the file. What the file begins with goes to `head` too.
    pub(crate) fn fill(&self, job: &Fill, head: Option<&mut [u8]>) -> Result<Filled> {
        let mut begun = self.begun();
        let Begun { lane, jobs, next } = &mut *begun;
        let failed = |error| Error::request("the memory of a GPU", error);
        let lane =
            lane.as_ref().ok_or_else(|| Error::io("a GPU", io::Error::other("it is done")))?;
        // First: whatever comes of it, the bytes stay until the copies that have begun are done.
        jobs.push(job.clone());
        let mut head = head;
        job.pieces(|at, piece| {
            if let (0, Piece::Memory(bytes), Some(head)) = (at, piece, head.take()) {
                let (own, rest) = head.split_at_mut(bytes.len().min(head.len()));
                own.copy_from_slice(&bytes[..own.len()]);
                rest.fill(0);
            }
            self.begin((lane, &mut *next), at, piece).map_err(io::Error::other)
        })
        .map_err(failed)
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
                // SAFETY: so many bytes are there, as proven, and it is lent to this filling alone; the bytes are held by
                // the job, which stays until the lane has finished.
                unsafe { lane.start_write(target, bytes) }
            }
            Piece::Elsewhere { blob, offset, len } => {
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

    /// Waits until all that has begun is there.
    pub(crate) fn finish(&self) -> Result<()> {
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
    unsafe { lane.start_runs(target, Source::Device(source), &Runs::run(len)) }
}

impl Drop for Filling {
    fn drop(&mut self) {
        // Whatever has come of it: nothing is copied any more when what it is copied from goes.
        let _ = self.finish();
    }
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
