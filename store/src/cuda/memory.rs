//! Memory of devices that tensors lie in.
#![expect(unsafe_code, reason = "the memory of tensors belongs to whoever has made them")]

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::{fmt, io};

use bytes::Bytes;
use tssd_format::Blob;

use super::device::{Device, Stream};
use super::driver::{Event, Lane};
use super::pinned;
use crate::error::Result;
use crate::get::BlobMut;

/// Bytes of a device, and what must have happened before they are touched.
struct Memory {
    device: Device,
    pointer: u64,
    len: u64,
    ready: Event,
    copied: Mutex<Copied>,
    _owner: Box<dyn Send + Sync>,
}

/// How bytes of a device have come, or gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Copied {
    /// How many bytes were copied from or to memory of the host that is pinned: at the speed of the bus.
    pub pinned: u64,
    /// How many bytes the driver had to copy once more.
    pub pageable: u64,
    /// Why, the last time.
    pub why: Option<String>,
}

impl Memory {
    /// # Safety
    ///
    /// As long as `owner` is there, so many bytes from `pointer` on must be memory of one device; the stream must be one
    /// of its primary context.
    unsafe fn new(
        pointer: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let device = Device::of(pointer)?;
        // SAFETY: as the caller says.
        let ready = unsafe { device.now(stream)? };
        let copied = Mutex::default();
        Ok(Self { device, pointer, len, ready, copied, _owner: Box::new(owner) })
    }

    /// Where so many bytes from an offset on are, if they are there.
    fn place(&self, offset: u64, len: usize) -> io::Result<u64> {
        let len = u64::try_from(len).map_err(io::Error::other)?;
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(self.pointer + offset)
    }

    /// Copies from or to memory of the host, which is pinned first if it can be.
    fn copy(&self, host: Range<usize>, copy: impl FnOnce(&Lane) -> Result<()>) -> io::Result<()> {
        if host.is_empty() {
            return Ok(());
        }
        let bytes = u64::try_from(host.len()).map_err(io::Error::other)?;
        let context = self.device.context().map_err(io::Error::other)?;
        let pinned = pinned::pin(context, host);
        self.device.on_lane(&self.ready, copy).map_err(io::Error::other)?;
        let mut copied = self.copied();
        match pinned {
            Ok(()) => copied.pinned += bytes,
            Err(why) => {
                copied.pageable += bytes;
                copied.why = Some(why);
            }
        }
        Ok(())
    }

    fn copied(&self) -> MutexGuard<'_, Copied> {
        self.copied.lock().expect("nobody panics while counting")
    }
}

fn addresses(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr().addr();
    start..start + bytes.len()
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {:?}", self.len, self.device)
    }
}

/// Memory of a device, such as that of a tensor's storage:
/// [`Storage::elsewhere`](tssd_format::Storage::elsewhere) makes tensors of it, which are put as others are. It is
/// copied into the archive, at the speed of the bus where that lies in a daemon's memory.
#[derive(Debug)]
pub struct DeviceMemory(Memory);

impl DeviceMemory {
    /// So many bytes from a pointer on, as they are when a stream has done what it was given until now.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is no driver, `Invalid` if it is not memory of a device.
    ///
    /// # Safety
    ///
    /// As long as `owner` is there, so many bytes from `pointer` on must be memory of one device. As long as this is
    /// there, nobody may write to it, but for what the stream was given before. The stream must be one of the device's
    /// primary context, as those of torch are.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_store::{DeviceMemory, ErrorKind, Stream};
    /// // SAFETY: there are no bytes.
    /// let memory = unsafe { DeviceMemory::new(0, 0, Stream::default(), ()) };
    /// let kind = memory.unwrap_err().kind();
    /// assert!(matches!(kind, ErrorKind::Unsupported | ErrorKind::Invalid));
    /// ```
    pub unsafe fn new(
        pointer: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        // SAFETY: as the caller says.
        unsafe { Memory::new(pointer, len, stream, owner) }.map(Self)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// How its bytes have come until now.
    pub fn copied(&self) -> Copied {
        self.0.copied().clone()
    }
}

impl Blob for DeviceMemory {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let source = self.0.place(offset, target.len())?;
        self.0.copy(addresses(target), |lane| {
            // SAFETY: so many bytes are there, as proven, as long as this is.
            unsafe { lane.read(target, source) }
        })
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

/// Memory of a device that a get fills: [`TargetMemory::Elsewhere`](crate::TargetMemory::Elsewhere).
#[derive(Debug)]
pub struct DeviceTarget(Memory);

impl DeviceTarget {
    /// So many bytes from a pointer on, which are written when a stream has done what it was given until now. They are
    /// there when the get returns, whatever the stream is given then.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::new`]; as long as this is there, nobody else may use the memory, but for what the stream was
    /// given before.
    pub unsafe fn new(
        pointer: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        // SAFETY: as the caller says.
        unsafe { Memory::new(pointer, len, stream, owner) }.map(Self)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// How bytes have gone there until now.
    pub fn copied(&self) -> Copied {
        self.0.copied().clone()
    }
}

impl BlobMut for DeviceTarget {
    fn size(&self) -> u64 {
        self.0.len
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let target = self.0.place(offset, bytes.len())?;
        self.0.copy(addresses(bytes), |lane| {
            // SAFETY: there is room for so many bytes, as proven, as long as this is there, and nobody else uses it.
            unsafe { lane.write(target, bytes) }
        })
    }
}
