//! Events after the work of the caller's streams: copies wait for them.
#![expect(unsafe_code, reason = "streams are handles of the caller's")]

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use tssd_store::Result;

use crate::Stream;
use crate::device::Device;
use crate::driver::Event;

/// Fences that the tensors of one call share: one per stream, for any number of tensors.
///
/// See [`DeviceMemory::with_fences`](crate::DeviceMemory::with_fences).
#[derive(Default)]
pub struct StreamFences(Mutex<Vec<Fence>>);

struct Fence {
    device: Device,
    stream: Stream,
    /// The handle `CU_STREAM_PER_THREAD` is a different stream in each thread.
    thread: ThreadId,
    event: Arc<Event>,
}

impl StreamFences {
    /// Returns an event after the work that `stream` has been given so far.
    ///
    /// Earlier calls for the same stream share the event, so they wait for that work too.
    ///
    /// # Safety
    ///
    /// The stream must be one of the device's primary context.
    pub(crate) unsafe fn event(&self, device: &Device, stream: Stream) -> Result<Arc<Event>> {
        let mut fences = self.fences();
        let thread = std::thread::current().id();
        let is_same = |known: &&Fence| {
            (&known.device, known.stream, known.thread) == (device, stream, thread)
        };
        let known = fences.iter().find(is_same);
        if let Some(Fence { event, .. }) = known {
            // SAFETY: the caller guarantees the context of the stream, and the event belongs to it.
            unsafe { event.record_again(stream.raw())? };
            return Ok(event.clone());
        }
        // SAFETY: the caller guarantees the context of the stream.
        let event = Arc::new(unsafe { Event::record(device.context()?, stream.raw())? });
        fences.push(Fence { device: device.clone(), stream, thread, event: event.clone() });
        Ok(event)
    }

    fn fences(&self) -> MutexGuard<'_, Vec<Fence>> {
        self.0.lock().expect("no code panics while it holds the fences")
    }
}

impl std::fmt::Debug for StreamFences {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamFences({} streams)", self.fences().len())
    }
}
