//! What tensors wait for, before a byte of them is touched: moments of the streams that their caller writes them on.
#![expect(unsafe_code, reason = "streams are handles of the caller's")]

use std::sync::{Arc, Mutex, MutexGuard};

use super::device::{Device, Stream};
use super::driver::Event;
use super::memory::DeviceMemory;
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
    event: Arc<Event>,
}

impl Moments {
    /// So many bytes from a pointer on, as [`DeviceMemory::new`]. All that was made of one stream before waits as well for
    /// what the stream was given until now: so make all of it before any of it is put, or filled.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::new`].
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
        let known = moments.iter().find(|known| (&known.device, known.stream) == (device, stream));
        if let Some(Moment { event, .. }) = known {
            // SAFETY: as the caller says, and it is an event of that context.
            unsafe { event.move_to_now(stream.raw())? };
            return Ok(event.clone());
        }
        // SAFETY: as the caller says.
        let event = Arc::new(unsafe { Event::now(device.context()?, stream.raw())? });
        moments.push(Moment { device: device.clone(), stream, event: event.clone() });
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
