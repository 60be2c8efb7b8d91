//! Device segments: memory that one process writes and others read.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::device::Device;
use crate::ipc::OpenExport;
use crate::virtual_memory::{self, DeviceMap};
use tssd_store::device::IpcExport;
use tssd_store::{Error, ErrorKind, Result};

/// Device memory that several processes use: one writes it, others read it.
///
/// The rules of the shared memory pool apply. The writer stops writing at the commit, and the daemon does not recycle
/// the segment while a reader holds a lease on its contents.
pub(crate) struct DeviceSegment {
    device: Device,
    memory: Memory,
    len: u64,
}

enum Memory {
    Mapped(DeviceMap),
    /// Memory of the exporting process, which does not write it until the export is returned.
    Exported(OpenExport),
}

impl DeviceSegment {
    /// Allocates memory on the device with this UUID. Returns it with its descriptor, for the daemon.
    pub(crate) fn create(uuid: &str, len: u64) -> Result<(Arc<Self>, OwnedFd)> {
        let device = Device::by_uuid(uuid)?;
        let (map, descriptor) = DeviceMap::create(device.context()?, device.raw(), len)?;
        let memory = Memory::Mapped(map);
        Ok((Arc::new(Self { device, memory, len }), descriptor))
    }

    /// Maps memory that another process has allocated, by its descriptor.
    pub(crate) fn import(uuid: &str, memory: &OwnedFd, len: u64) -> Result<Arc<Self>> {
        let device = Device::by_uuid(uuid)?;
        let unsupported =
            |reason| Error::new(ErrorKind::Unsupported, format_args!("{device:?}: {reason}"));
        virtual_memory::check_support(device.raw()).map_err(unsupported)?;
        let map = DeviceMap::import(device.context()?, device.raw(), memory, len)?;
        let memory = Memory::Mapped(map);
        Ok(Arc::new(Self { device, memory, len }))
    }

    /// Opens the memory that another process exports, as the first `len` bytes of the archive.
    pub(crate) fn open_export(uuid: &str, export: &IpcExport, len: u64) -> Result<Arc<Self>> {
        let device = Device::by_uuid(uuid)?;
        let memory = Memory::Exported(OpenExport::new(&device, export)?);
        Ok(Arc::new(Self { device, memory, len }))
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the device address of `len` bytes at an offset.
    ///
    /// # Errors
    ///
    /// `Corrupt` if the range exceeds the segment.
    pub(crate) fn device_address(&self, offset: u64, len: u64) -> Result<u64> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        let place = end.and_then(|_| match &self.memory {
            Memory::Mapped(map) => Some(map.pointer + offset),
            Memory::Exported(memory) => memory.device_address(offset, len),
        });
        place.ok_or_else(|| {
            let all = self.len;
            let text = format_args!("{len} bytes at {offset} of a segment that has {all}");
            Error::new(ErrorKind::Corrupt, text)
        })
    }
}
