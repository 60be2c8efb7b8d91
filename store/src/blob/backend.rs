//! Implementations of a volume: a directory, memory, a bucket, the shared memory of a daemon.

mod directory;
mod memory;
#[cfg(feature = "object")]
mod object;
#[cfg(target_os = "linux")]
mod shm;

pub(crate) use self::directory::DirectoryVolume;
pub(crate) use self::memory::MemoryVolume;
#[cfg(feature = "object")]
pub(crate) use self::object::{ObjectVolume, open_object};
#[cfg(target_os = "linux")]
pub(crate) use self::shm::PoolVolume;
