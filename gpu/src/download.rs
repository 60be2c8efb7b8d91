//! An archive on its way from devices to memory of the host that is pinned: all of its copies are begun, in order, and each
//! part is looked at when its own have come, while those of the next ones are still coming.
#![expect(unsafe_code, reason = "what is copied must be there until it is done")]

use std::ops::Range;
use std::sync::Mutex;

use tssd_format::WriteJob;

use crate::device::{Device, OwnLane};
use crate::driver::Event;
use crate::memory::{DeviceMemory, device_memory};
use tssd_store::Result;
use tssd_store::device::{Download, DownloadTarget};

/// The streams that the parts of an archive come on: one for each device.
#[derive(Default)]
pub(crate) struct DmaBatch(Mutex<Vec<OwnLane>>);

/// The memory of a part, to which devices write what they have of it. Nobody looks at it before that is there.
struct DmaTarget<'a> {
    batch: &'a DmaBatch,
    part: &'a mut [u8],
    /// What comes when all is there.
    events: Vec<Event>,
    /// Whose bytes they are: it holds them.
    job: Option<WriteJob>,
}

/// What a part has of a device.
struct Piece<'a> {
    memory: &'a DeviceMemory,
    offset: u64,
    /// Where it belongs in the part.
    place: Range<usize>,
}

impl Download for DmaBatch {
    fn target<'a>(&'a self, part: &'a mut [u8]) -> Box<dyn DownloadTarget + 'a> {
        Box::new(DmaTarget { batch: self, part, events: Vec::new(), job: None })
    }
}

impl DownloadTarget for DmaTarget<'_> {
    /// Begins to copy what of a job is elsewhere to its places, if devices can do that by themselves.
    fn begin(&mut self, job: &WriteJob) -> Result<()> {
        let Some(pieces) = pieces_of(job, self.part) else { return Ok(()) };
        self.job = Some(job.clone());
        let mut lanes = self.batch.0.lock().expect("nobody panics while beginning copies");
        // SAFETY: the part is borrowed by this, which lets nobody look at it before the events have come, and waits for them
        // when it is dropped; nobody forgets it. It has the job. If this fails, the copies are waited for below.
        let begun = unsafe { begin(&mut lanes, &pieces, self.part) };
        if begun.is_err() {
            lanes.clear();
        }
        self.events = begun?;
        Ok(())
    }

    /// The memory, and whether all that the job has elsewhere is there.
    fn finish(&mut self) -> Result<(&mut [u8], bool)> {
        let is_there = !self.events.is_empty();
        self.settle()?;
        Ok((self.part, is_there))
    }
}

impl DmaTarget<'_> {
    fn settle(&mut self) -> Result<()> {
        let waited: Vec<Result<()>> = self.events.drain(..).map(|event| event.wait()).collect();
        self.job = None;
        waited.into_iter().collect()
    }
}

impl Drop for DmaTarget<'_> {
    fn drop(&mut self) {
        let _ = self.settle();
    }
}

/// All that a job has elsewhere, if it is on devices that copy it to the memory by themselves, and there is some.
fn pieces_of<'a>(job: &'a WriteJob, part: &[u8]) -> Option<Vec<Piece<'a>>> {
    let mut pieces: Option<Vec<Piece<'a>>> = Some(Vec::new());
    // That it is pinned holds for all devices.
    let mut is_pinned = None;
    let start = job.range().start;
    job.for_each_blob_range(|at, blob, bytes| {
        let Some(found) = &mut pieces else { return };
        let Some(memory) = device_memory(blob) else { return pieces = None };
        if !*is_pinned.get_or_insert_with(|| memory.pins(part)) {
            return pieces = None;
        }
        let place = native(at - start)..native(at - start + (bytes.end - bytes.start));
        match found.last_mut() {
            // Chunks of one tensor are copied at once.
            Some(last) if last.is_before(memory, bytes.start, place.start) => {
                last.place.end = place.end;
            }
            _ => found.push(Piece { memory, offset: bytes.start, place }),
        }
    });
    pieces.filter(|pieces| !pieces.is_empty())
}

impl Piece<'_> {
    /// Whether what is there goes on with what is here.
    fn is_before(&self, memory: &DeviceMemory, offset: u64, place: usize) -> bool {
        let len = u64::try_from(self.place.len()).unwrap_or(u64::MAX);
        std::ptr::eq(self.memory, memory)
            && self.offset.checked_add(len) == Some(offset)
            && self.place.end == place
    }
}

/// Begins to copy the pieces. Returns what comes when they are there.
///
/// # Safety
///
/// Until the events have come, or, if this fails, the lanes were dropped, the part must be there, and nobody may look at it,
/// and what the pieces are of must be held.
unsafe fn begin(
    lanes: &mut Vec<OwnLane>,
    pieces: &[Piece<'_>],
    part: &mut [u8],
) -> Result<Vec<Event>> {
    let mut used = Vec::new();
    for Piece { memory, offset, place } in pieces {
        let number = number_of(memory.device(), lanes)?;
        // SAFETY: as the caller says.
        unsafe { memory.start_read(&lanes[number], *offset, &mut part[place.clone()])? };
        if !used.contains(&number) {
            used.push(number);
        }
    }
    used.into_iter().map(|number| lanes[number].begun()).collect()
}

/// Which of the streams is that of a device.
fn number_of(device: &Device, lanes: &mut Vec<OwnLane>) -> Result<usize> {
    if let Some(number) = lanes.iter().position(|lane| lane.device() == device) {
        return Ok(number);
    }
    lanes.push(device.lane()?);
    Ok(lanes.len() - 1)
}

fn native(len: u64) -> usize {
    usize::try_from(len).expect("what is in memory fits usize")
}
