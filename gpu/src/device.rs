//! Devices, and what copies from and to them.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cudarc::driver::result;
use cudarc::driver::sys::{CUdevice, CUstream};

use crate::Stream;
use crate::driver::{self, Context, Lane, failed};
use tssd_store::{Error, ErrorKind, Result};

/// A GPU that this process sees.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    raw: CUdevice,
    uuid: [u8; 16],
    name: String,
    context: OnceLock<Context>,
    /// Streams that are not used.
    lanes: Mutex<Vec<Lane>>,
}

impl Stream {
    pub(crate) fn raw(self) -> CUstream {
        std::ptr::without_provenance_mut(self.0)
    }
}

impl Device {
    /// All that this process sees, in the driver's order.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is no driver, or no device.
    pub fn all() -> Result<Vec<Self>> {
        static ALL: OnceLock<Vec<Device>> = OnceLock::new();
        if let Some(all) = ALL.get() {
            return Ok(all.clone());
        }
        driver::load()?;
        let count = result::device::get_count().map_err(|error| failed("its devices", error))?;
        let all = (0..count).map(Self::find).collect::<Result<Vec<_>>>()?;
        Ok(ALL.get_or_init(|| all).clone())
    }

    fn find(ordinal: i32) -> Result<Self> {
        let failed = |error| failed(format_args!("device {ordinal}"), error);
        let raw = result::device::get(ordinal).map_err(failed)?;
        let uuid = result::device::get_uuid(raw).map_err(failed)?;
        Ok(Self(Arc::new(Inner {
            raw,
            uuid: uuid.bytes.map(|byte| byte.to_le_bytes()[0]),
            name: result::device::get_name(raw).map_err(failed)?,
            context: OnceLock::new(),
            lanes: Mutex::default(),
        })))
    }

    /// The one whose memory a pointer is of.
    pub(crate) fn of(pointer: u64) -> Result<Self> {
        let all = Self::all()?;
        let device = driver::device_of(pointer)
            .and_then(|ordinal| usize::try_from(ordinal).ok())
            .and_then(|ordinal| all.into_iter().nth(ordinal));
        device.ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format_args!("{pointer:#x} is no memory of a GPU"))
        })
    }

    /// What it is known by, in all processes and whatever they call it.
    pub fn uuid(&self) -> String {
        let mut bytes = self.0.uuid;
        bytes.reverse();
        let hex = format!("{:032x}", u128::from_le_bytes(bytes));
        let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]);
        format!("GPU-{}", parts.join("-"))
    }

    /// What its maker calls it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn context(&self) -> Result<Context> {
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let context = Context::of(self.0.raw).map_err(|error| failed(self.name(), error))?;
        Ok(*self.0.context.get_or_init(|| context))
    }

    /// A stream of this library's own, on which nothing is on its way.
    pub(crate) fn lane(&self) -> Result<OwnLane> {
        let idle = self.lanes().pop();
        let lane = idle.map_or_else(|| Lane::new(self.context()?), Ok)?;
        Ok(OwnLane { device: self.clone(), lane: Some(lane) })
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.0.lanes.lock().expect("nobody panics while holding the streams")
    }

    /// How the driver calls it.
    pub(crate) fn raw(&self) -> CUdevice {
        self.0.raw
    }

    /// The one that has a UUID, as [`Device::uuid`] says it.
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

/// A stream that nobody else uses meanwhile. All that was begun on it is done when it is dropped, and others may use it.
pub(crate) struct OwnLane {
    device: Device,
    /// There until it is dropped.
    lane: Option<Lane>,
}

impl OwnLane {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl Deref for OwnLane {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        self.lane.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for OwnLane {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            // Nothing is read or written any more when what that needs goes. One that has failed is not used again.
            if lane.finish().is_ok() {
                self.device.lanes().push(lane);
            }
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({} {})", self.name(), self.uuid())
    }
}

/// Two of the same GPU are equal.
impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.0.uuid == other.0.uuid
    }
}
