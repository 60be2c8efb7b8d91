//! GPUs, through NVIDIA's driver: it is looked for when the first tensor of a device appears, and not before.

mod arriving;
mod copied;
mod device;
mod driver;
mod filling;
mod legacy;
mod lend;
mod memory;
mod moments;
mod pinned;
mod segment;
mod stream;
mod virtual_memory;

pub(crate) use self::arriving::{Arriving, Landing};
pub use self::copied::Copied;
pub use self::device::Device;
pub(crate) use self::filling::{Filling, home, homes};
pub(crate) use self::lend::lend;
pub use self::memory::DeviceMemory;
pub use self::moments::Moments;
pub(crate) use self::pinned::{mapped, unmapped};
pub(crate) use self::segment::DeviceSegment;
pub use self::stream::Stream;
