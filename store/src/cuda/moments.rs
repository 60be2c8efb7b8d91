//! What tensors wait for, before a byte of them is touched: moments of the streams that their caller writes them on.
#![expect(unsafe_code, reason = "streams are handles of the caller's")]

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use super::device::Device;
use super::driver::Event;
use super::memory::DeviceMemory;
use super::stream::Stream;
use crate::error::Result;

/// The moments that the tensors of one call wait for: one for each stream, however many tensors there are.
///
/// # Examples
///
/// ```
/// use tssd_store::{ErrorKind, Moments, Stream};
/// let moments = Moments::default();
/// // SAFETY: there are no bytes.
/// let memory = unsafe { moments.memory(0, 0, Stream::default(), ()) };
/// let kind = memory.unwrap_err().kind();
/// assert!(matches!(kind, ErrorKind::Unsupported | ErrorKind::Invalid));
/// ```
#[derive(Default)]
pub struct Moments(Mutex<Vec<Moment>>);

struct Moment {
    device: Device,
    stream: Stream,
    /// One handle (`CU_STREAM_PER_THREAD`) is another stream in each thread.
    thread: ThreadId,
    event: Arc<Event>,
}

impl Moments {
    /// So many bytes from a pointer on, as [`DeviceMemory::new`]. All that was made of one stream before waits as well for
    /// what the stream was given until now.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::new`]; besides, no stream may be destroyed before all that was made of it is put, or filled.
    pub unsafe fn memory(
        &self,
        pointer: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<DeviceMemory> {
        let device = Device::of(pointer)?;
        // SAFETY: as the caller says.
        let ready = unsafe { self.now(&device, stream)? };
        Ok(DeviceMemory::of(device, (pointer, len), ready, owner))
    }

    /// # Safety
    ///
    /// The stream must be one of the device's primary context.
    unsafe fn now(&self, device: &Device, stream: Stream) -> Result<Arc<Event>> {
        let mut moments = self.moments();
        let thread = std::thread::current().id();
        let is_that = |known: &&Moment| {
            (&known.device, known.stream, known.thread) == (device, stream, thread)
        };
        let known = moments.iter().find(is_that);
        if let Some(Moment { event, .. }) = known {
            // SAFETY: as the caller says, and it is an event of that context.
            unsafe { event.move_to_now(stream.raw())? };
            return Ok(event.clone());
        }
        // SAFETY: as the caller says.
        let event = Arc::new(unsafe { Event::now(device.context()?, stream.raw())? });
        moments.push(Moment { device: device.clone(), stream, thread, event: event.clone() });
        Ok(event)
    }

    fn moments(&self) -> MutexGuard<'_, Vec<Moment>> {
        self.0.lock().expect("nobody panics while holding the moments")
    }
}

impl std::fmt::Debug for Moments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Moments({} streams)", self.moments().len())
    }
}
