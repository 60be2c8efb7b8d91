//! Chunks: the units in which bytes are checksummed and verified. Spec: section 6.

use std::ops::Range;

/// Largest chunk size in raw bytes (1 MiB), and the only one of compressed storages.
///
/// The chunks of raw storages may be smaller: see [`ChunkSize`].
pub const MAX_CHUNK_BYTES: u64 = 1 << MAX_LOG2;

/// Chunk size of delta storages in raw bytes (8 MiB).
pub(crate) const DELTA_CHUNK_BYTES: u64 = 1 << DELTA_LOG2;

/// log2 of the chunk size of delta storages in bytes.
const DELTA_LOG2: u8 = 23;

/// log2 of the smallest chunk size in bytes.
const MIN_LOG2: u8 = 12;

/// log2 of the largest chunk size in bytes.
const MAX_LOG2: u8 = 20;

/// Largest number of chunks of a finely chunked storage, as long as its chunks are smaller than 1 MiB.
///
/// A reader of a slice reads whole chunks. With 256 to 512 chunks, 5 % of a storage span at least 13 chunks, so that
/// the reader reads few bytes that do not belong to the slice.
const FINE_MAX_CHUNKS: u64 = 512;

/// Number of raw bytes in each chunk of a storage but the last: a power of two from 4 KiB to 1 MiB, or 8 MiB in deltas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkSize {
    log2: u8,
}

impl Default for ChunkSize {
    /// Returns 1 MiB.
    fn default() -> Self {
        Self { log2: MAX_LOG2 }
    }
}

impl ChunkSize {
    /// The size of the chunks of delta storages: 8 MiB.
    pub const DELTA: Self = Self { log2: DELTA_LOG2 };

    /// Returns the chunk size in a Storage record, or `None` if it does not fit the codec of the storage (F-063).
    #[inline]
    pub(crate) fn from_record(log2: u8, storage_codec: u8) -> Option<Self> {
        match storage_codec {
            0 => Self::from_log2(log2),
            1 => Some(Self::default()).filter(|size| size.log2 == log2),
            2 => Some(Self::DELTA).filter(|size| size.log2 == log2),
            _ => None,
        }
    }

    /// Returns the size with this log2, or `None` if it is not from 12 to 20.
    pub fn from_log2(log2: u8) -> Option<Self> {
        (MIN_LOG2..=MAX_LOG2).contains(&log2).then_some(Self { log2 })
    }

    /// Returns the chunk size for a storage of `len` bytes from which readers read slices.
    ///
    /// The size is from `len / 512` to `len / 256`, but at least 4 KiB and at most 1 MiB.
    ///
    /// ```
    /// use tssd_format::ChunkSize;
    ///
    /// assert_eq!(ChunkSize::fine(6 << 20).bytes(), 16 << 10);
    /// assert_eq!(ChunkSize::fine(100).bytes(), 4 << 10);
    /// assert_eq!(ChunkSize::fine(1 << 40).bytes(), 1 << 20);
    /// ```
    pub fn fine(len: u64) -> Self {
        let bytes =
            len.div_ceil(FINE_MAX_CHUNKS).clamp(1 << MIN_LOG2, 1 << MAX_LOG2).next_power_of_two();
        Self { log2: u8::try_from(bytes.trailing_zeros()).expect("it is below 64") }
    }

    /// Returns the size of `bytes` bytes, or `None` unless that is a power of two from 4 KiB to 1 MiB.
    ///
    /// ```
    /// use tssd_format::ChunkSize;
    ///
    /// assert_eq!(ChunkSize::from_bytes(64 << 10), ChunkSize::from_log2(16));
    /// assert_eq!(ChunkSize::from_bytes(1 << 20), Some(ChunkSize::default()));
    /// for invalid in [0, 1, 2 << 10, (64 << 10) + 1, 2 << 20, u64::MAX] {
    ///     assert_eq!(ChunkSize::from_bytes(invalid), None);
    /// }
    /// ```
    pub fn from_bytes(bytes: u64) -> Option<Self> {
        let log2 = u8::try_from(bytes.checked_ilog2()?).ok()?;
        Self::from_log2(log2).filter(|size| size.bytes() == bytes)
    }

    /// Returns log2 of the size in bytes.
    pub fn log2(self) -> u8 {
        self.log2
    }

    /// Returns the size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.log2
    }

    /// Returns the number of chunks of `len` raw bytes.
    pub(crate) fn count(self, len: u64) -> u64 {
        (len >> self.log2) + u64::from(len & (self.bytes() - 1) != 0)
    }

    /// Returns the byte range of chunk `number` of `len` raw bytes.
    pub(crate) fn range(self, number: u64, len: u64) -> Range<u64> {
        let start = number.saturating_mul(self.bytes()).min(len);
        start..start.saturating_add(self.bytes()).min(len)
    }
}

/// How a writer splits raw storages into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ChunkPolicy {
    /// One chunk size for all storages.
    Fixed(ChunkSize),
    /// A chunk size by the length of each storage: see [`ChunkSize::fine`].
    ///
    /// A reader that fetches a slice over the network then fetches few additional bytes to verify it. The index
    /// grows by 1 to 2 KiB for each storage of 2 MiB or more.
    Fine,
}

impl Default for ChunkPolicy {
    /// Returns chunks of 1 MiB for all storages.
    fn default() -> Self {
        Self::Fixed(ChunkSize::default())
    }
}

impl ChunkPolicy {
    /// Returns the chunk size of a storage of `len` bytes.
    pub fn chunk_size(self, len: u64) -> ChunkSize {
        match self {
            Self::Fixed(size) => size,
            Self::Fine => ChunkSize::fine(len),
        }
    }

    /// Infers how storages were split, from the length and the chunk size of each.
    ///
    /// Returns `Fine` if another writer chose sizes that no variant gives.
    pub(crate) fn infer(storages: &[(u64, ChunkSize)]) -> Self {
        let first = storages.first().map(|(_, size)| Self::Fixed(*size)).unwrap_or_default();
        let fits_all =
            |chunks: &Self| storages.iter().all(|(len, size)| chunks.chunk_size(*len) == *size);
        [Self::default(), Self::Fine, first].into_iter().find(fits_all).unwrap_or(Self::Fine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_from_4_kib_to_1_mib() {
        let sizes: Vec<u64> = (0..=u8::MAX)
            .filter_map(ChunkSize::from_log2)
            .map(|size| {
                assert_eq!(ChunkSize::from_bytes(size.bytes()), Some(size));
                assert_eq!(ChunkSize::from_bytes(size.bytes() + 1), None);
                size.bytes()
            })
            .collect();
        assert_eq!(sizes, [4, 8, 16, 32, 64, 128, 256, 512, 1024].map(|kib: u64| kib << 10));
    }

    #[test]
    fn recorded_infers_chunks_from_storages() {
        let of = |log2| ChunkSize::from_log2(log2).unwrap();
        let large = 6 << 20;
        for (storages, expected) in [
            (vec![], ChunkPolicy::default()),
            (vec![(100, of(20)), (large, of(20))], ChunkPolicy::default()),
            (vec![(100, of(12)), (large, of(14))], ChunkPolicy::Fine),
            // Both variants give this size. `Fine` is preferred: it fits storages of other lengths too.
            (vec![(100, of(12))], ChunkPolicy::Fine),
            (vec![(100, of(16)), (large, of(16))], ChunkPolicy::Fixed(of(16))),
            (vec![(100, of(12)), (large, of(12))], ChunkPolicy::Fixed(of(12))),
            (vec![(100, of(13)), (large, of(17))], ChunkPolicy::Fine),
        ] {
            assert_eq!(ChunkPolicy::infer(&storages), expected, "{storages:?}");
        }
    }
}
