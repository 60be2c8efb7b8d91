//! Segments of a device: memory that one process writes and others read.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::device::Device;
use crate::ipc::OpenExport;
use crate::virtual_memory::{self, Mapped};
use tssd_store::device::IpcExport;
use tssd_store::{Error, ErrorKind, Result};

/// Memory of a device that several processes use: one writes it, others read.
///
/// The rules are those of the arena: nobody writes it from the commit on until the daemon lends it again, and the daemon
/// does not as long as somebody holds a lease on what it contains.
pub(crate) struct DeviceSegment {
    device: Device,
    memory: Memory,
    len: u64,
}

enum Memory {
    Mapped(Mapped),
    /// The owner's: who has lent it does not write it before it is given back.
    Exported(OpenExport),
}

impl DeviceSegment {
    /// New memory of the device of this UUID, and its descriptor, for the daemon.
    pub(crate) fn create(uuid: &str, len: u64) -> Result<(Arc<Self>, OwnedFd)> {
        let device = Device::by_uuid(uuid)?;
        let (map, descriptor) = Mapped::create(device.context()?, device.raw(), len)?;
        let memory = Memory::Mapped(map);
        Ok((Arc::new(Self { device, memory, len }), descriptor))
    }

    /// What another process has made, by its descriptor.
    pub(crate) fn import(uuid: &str, memory: &OwnedFd, len: u64) -> Result<Arc<Self>> {
        let device = Device::by_uuid(uuid)?;
        let unsupported =
            |why| Error::new(ErrorKind::Unsupported, format_args!("{device:?}: {why}"));
        virtual_memory::is_there(device.raw()).map_err(unsupported)?;
        let map = Mapped::import(device.context()?, device.raw(), memory, len)?;
        let memory = Memory::Mapped(map);
        Ok(Arc::new(Self { device, memory, len }))
    }

    /// What another process lends of its own memory: so much of a file of so many bytes.
    pub(crate) fn open_export(uuid: &str, export: &IpcExport, len: u64) -> Result<Arc<Self>> {
        let device = Device::by_uuid(uuid)?;
        let memory = Memory::Exported(OpenExport::new(&device, export)?);
        Ok(Arc::new(Self { device, memory, len }))
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Where so many bytes from an offset on are, if they are there.
    pub(crate) fn place(&self, offset: u64, len: u64) -> Result<u64> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        let place = end.and_then(|_| match &self.memory {
            Memory::Mapped(map) => Some(map.pointer + offset),
            Memory::Exported(memory) => memory.place(offset, len),
        });
        place.ok_or_else(|| {
            let all = self.len;
            let text = format_args!("{len} bytes at {offset} of a segment that has {all}");
            Error::new(ErrorKind::Corrupt, text)
        })
    }
}
