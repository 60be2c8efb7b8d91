//! Device memory, such as that of GPUs: the interface between the store and a device driver.
//!
//! The store contains no driver. A driver implements [`Driver`] and [registers](register) itself. `tssd-gpu` is the
//! driver for CUDA. Everything here is experimental: it has run on a simulated driver only, and may change in any
//! release.

#[cfg(target_os = "linux")]
mod archive;
mod copy;
#[cfg(target_os = "linux")]
mod driver;
#[cfg(target_os = "linux")]
mod export;
#[cfg(target_os = "linux")]
pub mod host_maps;

#[cfg(target_os = "linux")]
pub use self::archive::DeviceArchive;
#[cfg(target_os = "linux")]
pub(crate) use self::archive::{HEAD_BYTES, HEAD_LEN};
pub use self::copy::{BlobCopy, BlobMut, CopyBatch, PendingCopy};
#[cfg(target_os = "linux")]
pub use self::driver::{Download, DownloadTarget, Driver, Segment, Upload, register};
#[cfg(target_os = "linux")]
pub(crate) use self::driver::{NO_DRIVER, driver};
#[cfg(target_os = "linux")]
pub use self::export::{ExportedAllocation, ExportedRange, HANDLE_BYTES, IpcExport};
