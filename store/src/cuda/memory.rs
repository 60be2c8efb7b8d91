//! Memory of devices that tensors lie in.
#![expect(unsafe_code, reason = "the memory of tensors belongs to whoever has made them")]

use std::ops::{AddAssign, Range};
use std::sync::{Arc, Mutex, MutexGuard};
use std::{fmt, io};

use bytes::Bytes;
use tssd_format::Blob;

use super::device::{Device, Stream};
use super::driver::{Event, Lane};
use super::pinned;
use crate::error::Result;
use crate::get::BlobMut;

/// Memory of a device, such as that of a tensor's storage.
///
/// What is put: [`Storage::elsewhere`](tssd_format::Storage::elsewhere) makes tensors of it, which are put as others are.
/// What is filled by a get: [`TargetMemory::Elsewhere`](crate::TargetMemory::Elsewhere). Bytes are copied at the speed of
/// the bus from and to the memory of a daemon of this host.
pub struct DeviceMemory {
    device: Device,
    pointer: u64,
    len: u64,
    /// What must have happened before a byte is touched.
    ready: Event,
    copied: Arc<Mutex<Copied>>,
    _owner: Box<dyn Send + Sync>,
}

/// How bytes of a device have come, or gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Copied {
    /// How many bytes were copied from or to memory of the host that is pinned: at the speed of the bus.
    pub pinned: u64,
    /// How many bytes were copied once more.
    pub pageable: u64,
    /// Why, the last time.
    pub why: Option<String>,
}

impl Copied {
    /// So many bytes went through memory that is not pinned.
    pub fn paged(&mut self, bytes: u64, why: impl Into<String>) {
        self.pageable += bytes;
        self.why = Some(why.into());
    }
}

/// These and those.
impl AddAssign<&Self> for Copied {
    fn add_assign(&mut self, other: &Self) {
        self.pinned += other.pinned;
        self.pageable += other.pageable;
        if other.why.is_some() {
            self.why.clone_from(&other.why);
        }
    }
}

impl DeviceMemory {
    /// So many bytes from a pointer on. They are read, or written, when a stream has done what it was given until now;
    /// what was written is there when the get returns, whatever the stream is given then.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is no driver, `Invalid` if it is not memory of a device.
    ///
    /// # Safety
    ///
    /// As long as `owner` is there, so many bytes from `pointer` on must be memory of one device. As long as this is
    /// there, nobody may write to it, nor read it if a get fills it, but for what the stream was given before. The stream
    /// must be one of the device's primary context, as those of torch are.
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
        let device = Device::of(pointer)?;
        // SAFETY: as the caller says.
        let ready = unsafe { device.now(stream)? };
        let copied = Arc::default();
        Ok(Self { device, pointer, len, ready, copied, _owner: Box::new(owner) })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The same, whose bytes are counted with those of others.
    #[must_use]
    pub fn counted(mut self, copied: &Arc<Mutex<Copied>>) -> Self {
        self.copied = copied.clone();
        self
    }

    /// How its bytes have come, or gone there, until now.
    pub fn copied(&self) -> Copied {
        self.counts().clone()
    }

    fn counts(&self) -> MutexGuard<'_, Copied> {
        self.copied.lock().expect("nobody panics while counting")
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
        match pinned {
            Ok(()) => self.counts().pinned += bytes,
            Err(why) => self.counts().paged(bytes, why),
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {:?}", self.len, self.device)
    }
}

fn addresses(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr().addr();
    start..start + bytes.len()
}

impl Blob for DeviceMemory {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let source = self.place(offset, target.len())?;
        self.copy(addresses(target), |lane| {
            // SAFETY: so many bytes are there, as proven, as long as this is.
            unsafe { lane.read(target, source) }
        })
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

impl BlobMut for DeviceMemory {
    fn size(&self) -> u64 {
        self.len
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let target = self.place(offset, bytes.len())?;
        self.copy(addresses(bytes), |lane| {
            // SAFETY: there is room for so many bytes, as proven, as long as this is there, and nobody else uses it.
            unsafe { lane.write(target, bytes) }
        })
    }
}
