//! Devices and their streams.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cudarc::driver::result;
use cudarc::driver::sys::{CUdevice, CUstream};

use crate::Stream;
use crate::driver::{self, Context, CopyStream, driver_error};
use tssd_store::{Error, ErrorKind, Result};

/// A GPU that this process sees.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    raw: CUdevice,
    uuid: [u8; 16],
    name: String,
    context: OnceLock<Context>,
    /// Idle streams.
    idle_streams: Mutex<Vec<CopyStream>>,
}

impl Stream {
    pub(crate) fn raw(self) -> CUstream {
        std::ptr::without_provenance_mut(self.0)
    }
}

impl Device {
    /// Returns all GPUs that this process sees, in the order of the driver.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is no driver or no device.
    pub fn all() -> Result<Vec<Self>> {
        static ALL: OnceLock<Vec<Device>> = OnceLock::new();
        if let Some(all) = ALL.get() {
            return Ok(all.clone());
        }
        driver::load()?;
        let count =
            result::device::get_count().map_err(|error| driver_error("its devices", error))?;
        let all = (0..count).map(Self::open).collect::<Result<Vec<_>>>()?;
        Ok(ALL.get_or_init(|| all).clone())
    }

    fn open(ordinal: i32) -> Result<Self> {
        let failed = |error| driver_error(format_args!("device {ordinal}"), error);
        let raw = result::device::get(ordinal).map_err(failed)?;
        let uuid = result::device::get_uuid(raw).map_err(failed)?;
        Ok(Self(Arc::new(Inner {
            raw,
            uuid: uuid.bytes.map(|byte| byte.to_le_bytes()[0]),
            name: result::device::get_name(raw).map_err(failed)?,
            context: OnceLock::new(),
            idle_streams: Mutex::default(),
        })))
    }

    /// Returns the device whose memory a pointer points to.
    pub(crate) fn of_pointer(pointer: u64) -> Result<Self> {
        let all = Self::all()?;
        let device = driver::device_of(pointer)
            .and_then(|ordinal| usize::try_from(ordinal).ok())
            .and_then(|ordinal| all.into_iter().nth(ordinal));
        device.ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format_args!("{pointer:#x} is no memory of a GPU"))
        })
    }

    /// Returns the UUID, which is the same in all processes, for any ordinal that they give the device.
    pub fn uuid(&self) -> String {
        let mut bytes = self.0.uuid;
        bytes.reverse();
        let hex = format!("{:032x}", u128::from_le_bytes(bytes));
        let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]);
        format!("GPU-{}", parts.join("-"))
    }

    /// Returns the product name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn context(&self) -> Result<Context> {
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let context =
            Context::primary(self.0.raw).map_err(|error| driver_error(self.name(), error))?;
        Ok(*self.0.context.get_or_init(|| context))
    }

    /// Returns an idle stream of this crate.
    pub(crate) fn stream(&self) -> Result<PooledStream> {
        let idle = self.idle_streams().pop();
        let stream = idle.map_or_else(|| CopyStream::new(self.context()?), Ok)?;
        Ok(PooledStream { device: self.clone(), stream: Some(stream) })
    }

    fn idle_streams(&self) -> MutexGuard<'_, Vec<CopyStream>> {
        self.0.idle_streams.lock().expect("nobody panics while holding the streams")
    }

    /// Returns the handle of the driver.
    pub(crate) fn raw(&self) -> CUdevice {
        self.0.raw
    }

    /// Returns the device with a UUID in the format of [`Device::uuid`].
    pub(crate) fn by_uuid(uuid: &str) -> Result<Self> {
        let all = Self::all()?;
        let found = all.iter().find(|device| device.uuid() == uuid).cloned();
        found.ok_or_else(|| {
            let text = format_args!(
                "no CUDA device {uuid}: this process sees {all:?}. Readers of what is in the memory of a GPU must see \
                 that GPU, or it is put with residency=host"
            );
            Error::new(ErrorKind::Unsupported, text)
        })
    }
}

/// A stream for exclusive use. Dropping it waits for its copies and returns it to the device.
pub(crate) struct PooledStream {
    device: Device,
    /// None only during the drop.
    stream: Option<CopyStream>,
}

impl PooledStream {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl Deref for PooledStream {
    type Target = CopyStream;

    fn deref(&self) -> &CopyStream {
        self.stream.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for PooledStream {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // Wait for the copies before their sources and targets are dropped. A stream that failed is not reused.
            if stream.finish().is_ok() {
                self.device.idle_streams().push(stream);
            }
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({} {})", self.name(), self.uuid())
    }
}

/// Handles of the same GPU are equal.
impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.0.uuid == other.0.uuid
    }
}
