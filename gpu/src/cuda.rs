use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tssd_format::{Layout, StateDict};
use tssd_store::Result;
use tssd_store::device::{self, Download, Driver, IpcExport, Segment};

use crate::download::DmaBatch;
use crate::segment::DeviceSegment;
use crate::{export, memory};

/// Registers CUDA as the device driver of this process.
///
/// It loads nothing: the driver's library is loaded when the first tensor of a GPU appears.
pub fn register() {
    device::register(Arc::new(Cuda));
}

struct Cuda;

impl Driver for Cuda {
    fn device_of(&self, layout: &Layout) -> std::result::Result<String, String> {
        memory::device_of(layout)
    }

    fn devices_of(&self, dict: &StateDict) -> BTreeSet<String> {
        memory::devices_of(dict)
    }

    fn allocate(&self, device: &str, len: u64) -> Result<(Arc<dyn Segment>, OwnedFd)> {
        let (segment, memory) = DeviceSegment::create(device, len)?;
        Ok((segment, memory))
    }

    fn import(&self, device: &str, memory: &OwnedFd, len: u64) -> Result<Arc<dyn Segment>> {
        Ok(DeviceSegment::import(device, memory, len)?)
    }

    fn export(&self, layout: &Layout) -> Result<std::result::Result<IpcExport, String>> {
        export::export(layout)
    }

    fn open_export(&self, device: &str, export: &IpcExport, len: u64) -> Result<Arc<dyn Segment>> {
        Ok(DeviceSegment::open_export(device, export, len)?)
    }

    fn download(&self) -> Box<dyn Download> {
        Box::new(DmaBatch::default())
    }
}
