//! The pieces in which bytes are proven. Spec: section 6.

use std::ops::Range;

/// Storages are checksummed, and compressed, in pieces of this many raw bytes, or if they are raw in smaller ones: see
/// [`ChunkSize`].
pub const CHUNK_BYTES: u64 = 1 << LARGEST;

/// log2 of what a chunk has at least, and at most.
const SMALLEST: u8 = 12;
const LARGEST: u8 = 20;

/// Into how many chunks a storage is cut at most, as long as they are larger than the smallest, so that who reads a
/// slice reads little beside it: 5 % of a storage have 13 chunks or more.
const FINE: u64 = 512;

/// How many raw bytes a chunk of a storage has, if it is not the last: a power of two from 4 KiB to 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkSize {
    log2: u8,
}

impl Default for ChunkSize {
    /// 1 MiB.
    fn default() -> Self {
        Self { log2: LARGEST }
    }
}

impl ChunkSize {
    /// The size of this logarithm, if chunks can have it (F-063).
    pub fn from_log2(log2: u8) -> Option<Self> {
        (SMALLEST..=LARGEST).contains(&log2).then_some(Self { log2 })
    }

    /// That of a storage of `len` bytes of which slices are read: a 512th to a 256th of it, as far as there is such a
    /// size.
    ///
    /// ```
    /// use tssd_format::ChunkSize;
    ///
    /// assert_eq!(ChunkSize::fine(6 << 20).bytes(), 16 << 10);
    /// assert_eq!(ChunkSize::fine(100).bytes(), 4 << 10);
    /// assert_eq!(ChunkSize::fine(1 << 40).bytes(), 1 << 20);
    /// ```
    pub fn fine(len: u64) -> Self {
        let bytes = len.div_ceil(FINE).clamp(1 << SMALLEST, 1 << LARGEST).next_power_of_two();
        Self { log2: u8::try_from(bytes.trailing_zeros()).expect("it is below 64") }
    }

    /// The size of so many bytes, if chunks can have it: a power of two from 4 KiB to 1 MiB.
    ///
    /// ```
    /// use tssd_format::ChunkSize;
    ///
    /// assert_eq!(ChunkSize::from_bytes(64 << 10), ChunkSize::from_log2(16));
    /// assert_eq!(ChunkSize::from_bytes(1 << 20), Some(ChunkSize::default()));
    /// for none in [0, 1, 2 << 10, (64 << 10) + 1, 2 << 20, u64::MAX] {
    ///     assert_eq!(ChunkSize::from_bytes(none), None);
    /// }
    /// ```
    pub fn from_bytes(bytes: u64) -> Option<Self> {
        let log2 = u8::try_from(bytes.checked_ilog2()?).ok()?;
        Self::from_log2(log2).filter(|size| size.bytes() == bytes)
    }

    /// log2 of it.
    pub fn log2(self) -> u8 {
        self.log2
    }

    /// In bytes.
    pub fn bytes(self) -> u64 {
        1 << self.log2
    }

    /// How many chunks bytes have.
    pub(crate) fn count(self, len: u64) -> u64 {
        (len >> self.log2) + u64::from(len & (self.bytes() - 1) != 0)
    }

    /// Where a chunk of so many bytes lies in them.
    pub(crate) fn range(self, number: u64, len: u64) -> Range<u64> {
        let start = number.saturating_mul(self.bytes()).min(len);
        start..start.saturating_add(self.bytes()).min(len)
    }
}

/// How a writer cuts storages that are not compressed into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Chunks {
    /// All of one size.
    Of(ChunkSize),
    /// Each by its own length, as [`ChunkSize::fine`] says, so that who reads a slice from far away reads little beside
    /// it to prove it. The index is longer: by 1 to 2 KiB for each storage of 2 MiB or more.
    Fine,
}

impl Default for Chunks {
    /// Of 1 MiB.
    fn default() -> Self {
        Self::Of(ChunkSize::default())
    }
}

impl Chunks {
    /// What chunks of a storage of `len` bytes have.
    pub fn size(self, len: u64) -> ChunkSize {
        match self {
            Self::Of(size) => size,
            Self::Fine => ChunkSize::fine(len),
        }
    }

    /// How storages were cut, given the length and the chunks of each. Where another writer had a way of its own, fine.
    pub(crate) fn recorded(storages: &[(u64, ChunkSize)]) -> Self {
        let first = storages.first().map(|(_, size)| Self::Of(*size)).unwrap_or_default();
        let is_so = |chunks: &Self| storages.iter().all(|(len, size)| chunks.size(*len) == *size);
        [Self::default(), Self::Fine, first].into_iter().find(is_so).unwrap_or(Self::Fine)
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
    fn how_storages_were_cut_is_found() {
        let of = |log2| ChunkSize::from_log2(log2).unwrap();
        let large = 6 << 20;
        for (storages, expected) in [
            (vec![], Chunks::default()),
            (vec![(100, of(20)), (large, of(20))], Chunks::default()),
            (vec![(100, of(12)), (large, of(14))], Chunks::Fine),
            // Both ways lead to it; by the length is what was meant if there are others.
            (vec![(100, of(12))], Chunks::Fine),
            (vec![(100, of(16)), (large, of(16))], Chunks::Of(of(16))),
            (vec![(100, of(12)), (large, of(12))], Chunks::Of(of(12))),
            (vec![(100, of(13)), (large, of(17))], Chunks::Fine),
        ] {
            assert_eq!(Chunks::recorded(&storages), expected, "{storages:?}");
        }
    }
}
