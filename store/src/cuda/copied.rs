//! How bytes of devices go.

use std::ops::AddAssign;

/// How bytes of a device have come, or gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Copied {
    /// How many bytes were copied from or to memory of the host that is pinned: at the speed of the bus.
    pub pinned: u64,
    /// How many bytes were copied once more.
    pub pageable: u64,
    /// How many bytes stayed on the device: they were copied from its memory to its memory.
    pub device: u64,
    /// Why, the last time.
    pub why: Option<String>,
}

impl Copied {
    /// So many bytes went through memory that is not pinned.
    pub fn paged(&mut self, bytes: u64, why: impl Into<String>) {
        self.pageable += bytes;
        self.why = Some(why.into());
    }
}

/// These and those.
impl AddAssign<&Self> for Copied {
    fn add_assign(&mut self, other: &Self) {
        self.pinned += other.pinned;
        self.pageable += other.pageable;
        self.device += other.device;
        if other.why.is_some() {
            self.why.clone_from(&other.why);
        }
    }
}
