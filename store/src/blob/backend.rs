//! The places that a volume can be in.

mod directory;
mod memory;
#[cfg(feature = "object")]
mod object;
#[cfg(target_os = "linux")]
mod shm;

pub(crate) use self::directory::DirectoryVolume;
pub(crate) use self::memory::MemoryVolume;
#[cfg(feature = "object")]
pub(crate) use self::object::{ObjectVolume, alone};
#[cfg(target_os = "linux")]
pub(crate) use self::shm::ArenaVolume;
