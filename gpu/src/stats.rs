use std::ops::AddAssign;

/// How bytes of a device were copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyStats {
    /// Bytes copied from or to pinned host memory, by DMA.
    pub pinned: u64,
    /// Bytes copied from or to pageable host memory, which the driver copies once more.
    pub pageable: u64,
    /// Bytes copied within the device.
    pub device: u64,
    /// Reason why the last pageable copy was not pinned.
    pub pageable_reason: Option<String>,
}

impl CopyStats {
    /// Counts bytes of a pageable copy.
    pub fn count_pageable(&mut self, bytes: u64, reason: impl Into<String>) {
        self.pageable += bytes;
        self.pageable_reason = Some(reason.into());
    }
}

impl AddAssign<&Self> for CopyStats {
    fn add_assign(&mut self, other: &Self) {
        self.pinned += other.pinned;
        self.pageable += other.pageable;
        self.device += other.device;
        if other.pageable_reason.is_some() {
            self.pageable_reason.clone_from(&other.pageable_reason);
        }
    }
}
