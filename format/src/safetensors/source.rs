use std::ops::Range;

use bytes::Bytes;

use crate::archive::Archive;
use crate::convert::to_u64;
use crate::error::Result;

/// The source of the bytes of storages.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Archive(Archive),
    Memory(Vec<Bytes>),
}

impl Source {
    pub(super) fn storage(&self, number: u32) -> Result<Bytes> {
        match self {
            Self::Archive(archive) => archive.storage_bytes(number),
            Self::Memory(storages) => {
                let position = usize::try_from(number).expect("it numbers what is in memory");
                Ok(storages[position].clone())
            }
        }
    }

    /// Returns a range of the bytes of a storage.
    pub(super) fn range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        match self {
            Self::Archive(archive) => archive.storage_range(number, range),
            Self::Memory(_) => {
                let size = |at: u64| usize::try_from(at).expect("it is in memory");
                Ok(self.storage(number)?.slice(size(range.start)..size(range.end)))
            }
        }
    }

    /// Returns the length of a storage in bytes.
    pub(super) fn len(&self, number: u32) -> u64 {
        match self {
            Self::Archive(archive) => archive.storage(number).len,
            Self::Memory(storages) => {
                let position = usize::try_from(number).expect("it numbers what is in memory");
                to_u64(storages[position].len())
            }
        }
    }
}
