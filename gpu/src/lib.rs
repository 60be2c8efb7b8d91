//! The CUDA driver of the TSSD store: tensors in the memory of NVIDIA GPUs.
//!
//! [`register`] registers the driver with `tssd_store` in this process. [`DeviceMemory`] then describes tensors on a
//! GPU. The crate loads `libcuda.so.1` when the first tensor of a GPU appears, and runs without it until then.
//!
//! Experimental: it has run on a simulated driver only, and may change in any release. It works on Linux. On other
//! systems every call returns `Unsupported`.
//!
//! # Examples
//!
//! ```
//! use tssd_gpu::{Device, DeviceMemory, Stream};
//! tssd_gpu::register();
//! // SAFETY: the range is empty.
//! let memory = unsafe { DeviceMemory::new(0, 0, Stream::default(), ()) };
//! assert!(memory.is_err(), "address 0 is not memory of a GPU");
//! ```

mod stats;
mod stream;

pub use self::stats::CopyStats;
pub use self::stream::Stream;

#[cfg(target_os = "linux")]
mod convert;
#[cfg(target_os = "linux")]
mod cuda;
#[cfg(target_os = "linux")]
mod device;
#[cfg(target_os = "linux")]
mod download;
#[cfg(target_os = "linux")]
mod driver;
#[cfg(target_os = "linux")]
mod export;
#[cfg(target_os = "linux")]
mod fences;
#[cfg(target_os = "linux")]
mod ipc;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(target_os = "linux")]
mod pinned;
#[cfg(target_os = "linux")]
mod segment;
#[cfg(not(target_os = "linux"))]
mod unsupported;
#[cfg(target_os = "linux")]
mod upload;
#[cfg(target_os = "linux")]
mod virtual_memory;

#[cfg(target_os = "linux")]
pub use self::{cuda::register, device::Device, fences::StreamFences, memory::DeviceMemory};
#[cfg(not(target_os = "linux"))]
pub use crate::unsupported::{Device, DeviceMemory, StreamFences, register};
