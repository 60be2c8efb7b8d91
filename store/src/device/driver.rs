use std::any::Any;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use tssd_format::{JobChecksums, Layout, StateDict, WriteJob};

use super::export::IpcExport;
use crate::error::{Error, ErrorKind, Result};

/// Text of the error of a call that needs a device driver.
pub(crate) const NO_DRIVER: &str = "no device driver is registered in this process: `tssd_gpu::register()` registers \
                                    that of CUDA";

static DRIVER: OnceLock<Arc<dyn Driver>> = OnceLock::new();

/// Registers the driver of this process. Only the first call has an effect.
pub fn register(driver: Arc<dyn Driver>) {
    // A second driver would not know the segments of the first.
    let _ = DRIVER.set(driver);
}

/// Returns the registered driver.
///
/// # Errors
///
/// `Unsupported` if there is none.
pub(crate) fn driver() -> Result<&'static dyn Driver> {
    let driver = DRIVER.get().map(|driver| &**driver);
    driver.ok_or_else(|| Error::new(ErrorKind::Unsupported, NO_DRIVER))
}

/// Devices whose memory processes can share.
///
/// Tensors on a device have storages whose [`Blob`](tssd_format::Blob) the driver recognizes.
///
/// The name of a device is its UUID, such as `GPU-01234567-89ab-cdef-0123-456789abcdef`.
pub trait Driver: Send + Sync {
    /// Returns the device that holds most tensors of an archive.
    ///
    /// # Errors
    ///
    /// The reason why the archive cannot stay on a device, for the report of the put.
    fn device_of(&self, layout: &Layout) -> std::result::Result<String, String>;

    /// Returns the devices that hold tensors of a state dict.
    fn devices_of(&self, dict: &StateDict) -> BTreeSet<String>;

    /// Allocates `len` bytes on a device. The descriptor lets other processes [import](Self::import) them.
    ///
    /// # Errors
    ///
    /// `Busy` if the device has too little memory; `Unsupported` if processes cannot share its memory.
    fn allocate(&self, device: &str, len: u64) -> Result<(Arc<dyn Segment>, OwnedFd)>;

    /// Maps `len` bytes that another process has allocated.
    ///
    /// # Errors
    ///
    /// `Unsupported` if this process does not see the device, or the descriptor does not come from its driver.
    fn import(&self, device: &str, memory: &OwnedFd, len: u64) -> Result<Arc<dyn Segment>>;

    /// Exports the tensors of an archive in place, or returns the reason why that is impossible.
    ///
    /// The export is valid after all work that the tensors wait for: the call waits for it.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn export(&self, layout: &Layout) -> Result<std::result::Result<IpcExport, String>>;

    /// Maps the tensors that another process exports, as the first `len` bytes of the archive.
    ///
    /// # Errors
    ///
    /// `Corrupt` if the export contradicts itself; `Unsupported` if the driver cannot open its handles.
    fn open_export(&self, device: &str, export: &IpcExport, len: u64) -> Result<Arc<dyn Segment>>;

    /// Prepares copies of one archive from devices to host memory.
    fn download(&self) -> Box<dyn Download>;
}

/// Device memory that several processes map.
///
/// One process writes it before the commit. The others read it after the commit.
pub trait Segment: Any + Send + Sync {
    /// Copies bytes at `offset` to host memory.
    ///
    /// # Errors
    ///
    /// `Corrupt` if the range lies outside the segment; errors of the device.
    fn read(&self, target: &mut [u8], offset: u64) -> Result<()>;

    /// Prepares to write an archive into the segment.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn upload(self: Arc<Self>) -> Result<Box<dyn Upload>>;
}

/// Writes one archive into a segment. Dropping it waits for the copies in flight.
pub trait Upload: Send + Sync {
    /// Begins to copy the bytes that a job writes to their offsets.
    ///
    /// The beginning of the archive is also written to `head`.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn write(&self, job: &WriteJob, head: Option<&mut [u8]>) -> Result<JobChecksums>;

    /// Waits until all copies are done. No copy can begin afterwards.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn finish(&self) -> Result<()>;
}

/// Copies one archive from devices to host memory: parts are checksummed while the next ones arrive.
pub trait Download: Send + Sync {
    /// Prepares one part of the archive.
    fn target<'a>(&'a self, part: &'a mut [u8]) -> Box<dyn DownloadTarget + 'a>;
}

/// One part of an archive in host memory. Dropping it waits for the copies in flight.
pub trait DownloadTarget: Send {
    /// Begins to copy what the job reads from devices, if the part is pinned memory.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn begin(&mut self, job: &WriteJob) -> Result<()>;

    /// Waits for these copies.
    ///
    /// Returns the part, and whether it has all bytes that the job reads from devices.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn finish(&mut self) -> Result<(&mut [u8], bool)>;
}
