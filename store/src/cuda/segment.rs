//! Segments of a device: memory that one process writes and others read.
#![expect(unsafe_code, reason = "who has a segment keeps the rules of the arena")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::device::Device;
use super::driver::Lane;
use super::virtual_memory::{self, Mapped};
use crate::error::{Error, ErrorKind, Result};

/// Memory of a device, mapped: to write by the one process that has made it, to read by others.
///
/// The rules are those of the arena: nobody writes it from the commit on until the daemon lends it again, and the daemon
/// does not as long as somebody holds a lease on what it contains.
pub(crate) struct DeviceSegment {
    device: Device,
    map: Mapped,
    len: u64,
}

impl DeviceSegment {
    /// New memory of the device of this UUID, and its descriptor, for the daemon.
    pub(crate) fn create(uuid: &str, len: u64) -> Result<(Arc<Self>, OwnedFd)> {
        let device = Device::by_uuid(uuid)?;
        let (map, descriptor) = Mapped::create(device.context()?, device.raw(), len)?;
        Ok((Arc::new(Self { device, map, len }), descriptor))
    }

    /// What another process has made, by its descriptor.
    pub(crate) fn import(uuid: &str, memory: &OwnedFd, len: u64) -> Result<Arc<Self>> {
        let device = Device::by_uuid(uuid)?;
        let unsupported =
            |why| Error::new(ErrorKind::Unsupported, format_args!("{device:?}: {why}"));
        virtual_memory::is_there(device.raw()).map_err(unsupported)?;
        let map = Mapped::import(device.context()?, device.raw(), memory, len)?;
        Ok(Arc::new(Self { device, map, len }))
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Where so many bytes from an offset on are, if they are there.
    pub(super) fn place(&self, offset: u64, len: u64) -> Result<u64> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.ok_or_else(|| {
            let all = self.len;
            let text = format_args!("{len} bytes at {offset} of a segment that has {all}");
            Error::new(ErrorKind::Corrupt, text)
        })?;
        Ok(self.map.pointer + offset)
    }

    /// Copies bytes of it to this process's memory.
    pub(crate) fn read(&self, target: &mut [u8], offset: u64) -> Result<()> {
        let len = u64::try_from(target.len()).unwrap_or(u64::MAX);
        let source = self.place(offset, len)?;
        self.device.with_lane(|lane: &Lane| {
            // SAFETY: so many bytes are there, as proven, as long as this is, and nobody writes them: a lease holds them.
            unsafe { lane.read(target, source) }
        })
    }
}
