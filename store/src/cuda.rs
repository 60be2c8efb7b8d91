//! GPUs, through NVIDIA's driver: it is looked for when the first tensor of a device appears, and not before.

mod device;
mod driver;
mod memory;
mod pinned;

pub use self::device::{Device, Stream};
pub use self::memory::{Copied, DeviceMemory};
pub(crate) use self::pinned::{mapped, unmapped};
