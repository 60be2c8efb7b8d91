//! Devices, and what copies from and to them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cudarc::driver::result;
use cudarc::driver::sys::CUdevice;

use super::driver::{self, Context, Event, Lane, failed};
use crate::error::{Error, ErrorKind, Result};

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

/// A stream of the caller's, by the driver's handle; `Stream::default()` is the device's default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub usize);

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
            uuid: uuid.bytes.map(i8::cast_unsigned),
            name: result::device::get_name(raw).map_err(failed)?,
            context: OnceLock::new(),
            lanes: Mutex::default(),
        })))
    }

    /// The one whose memory a pointer is of.
    pub(super) fn of(pointer: u64) -> Result<Self> {
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

    pub(super) fn context(&self) -> Result<Context> {
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let context = Context::of(self.0.raw).map_err(|error| failed(self.name(), error))?;
        Ok(*self.0.context.get_or_init(|| context))
    }

    /// What a stream of it has been given until now.
    ///
    /// # Safety
    ///
    /// The stream must be one of this device's primary context.
    #[expect(unsafe_code, reason = "a handle of the caller's")]
    pub(super) unsafe fn now(&self, stream: Stream) -> Result<Event> {
        let raw = std::ptr::without_provenance_mut(stream.0);
        // SAFETY: as the caller says.
        unsafe { Event::now(self.context()?, raw) }
    }

    /// A stream of this library's own, on which nothing is on its way.
    pub(super) fn lane(&self) -> Result<Lane> {
        let idle = self.lanes().pop();
        idle.map_or_else(|| Lane::new(self.context()?), Ok)
    }

    /// Nothing is on its way on it any more.
    pub(super) fn give_back(&self, lane: Lane) {
        self.lanes().push(lane);
    }

    /// Does something on a stream of its own, which is done when this returns.
    pub(super) fn with_lane<T>(&self, work: impl FnOnce(&Lane) -> Result<T>) -> Result<T> {
        let lane = self.lane()?;
        let done = work(&lane);
        self.give_back(lane);
        done
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.0.lanes.lock().expect("nobody panics while holding the streams")
    }

    /// How the driver calls it.
    pub(super) fn raw(&self) -> CUdevice {
        self.0.raw
    }

    /// The one that has a UUID, as [`Device::uuid`] says it.
    pub(super) fn by_uuid(uuid: &str) -> Result<Self> {
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
