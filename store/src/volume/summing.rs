//! Sums of chunks whose bytes come one after the other.

use crc32fast::Hasher;
use tssd_format::StorageReference;

/// Sums each chunk of a storage, from one on, and says what each sum is.
pub(crate) struct Summing<'a, F> {
    storage: &'a StorageReference,
    /// Where the next byte is among the raw ones.
    at: u64,
    crc: Hasher,
    /// Is called with the number of a chunk and its sum.
    summed: F,
}

impl<'a, F: FnMut(u64, u32)> Summing<'a, F> {
    /// From a raw byte of the storage on, at which a chunk begins.
    pub(crate) fn new(storage: &'a StorageReference, at: u64, summed: F) -> Self {
        Self { storage, at, crc: Hasher::new(), summed }
    }

    /// Adds the next bytes. What follows the last chunk is in none.
    pub(crate) fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let number = self.at >> self.storage.chunk_size.log2();
            let left = self.storage.chunk(number).end.saturating_sub(self.at);
            if left == 0 {
                return;
            }
            let (chunk, rest) = bytes
                .split_at(usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len())));
            self.crc.update(chunk);
            self.at += u64::try_from(chunk.len()).expect("usize is at most 64 bits");
            bytes = rest;
            if self.at == self.storage.chunk(number).end {
                (self.summed)(number, std::mem::take(&mut self.crc).finalize());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tssd_format::ChunkSize;

    use super::*;

    #[test]
    fn each_chunk_is_summed_however_its_bytes_come() {
        let bytes: Vec<u8> =
            (0..21_000_u32).map(|at| at.wrapping_mul(97).to_le_bytes()[1]).collect();
        let len = bytes.len().try_into().unwrap();
        let chunk_size = ChunkSize::from_log2(12).unwrap();
        let storage = StorageReference { len, chunk_size, ..StorageReference::default() };
        let expected: Vec<(u64, u32)> =
            (0..).zip(bytes.chunks(4096).map(crc32fast::hash)).collect();
        for (first, block) in [(0, 1), (0, 4096), (1, 1000), (2, 9000), (5, 7), (0, 50_000)] {
            let mut sums = Vec::new();
            let from = first << 12;
            let mut summing = Summing::new(&storage, from, |number, crc| sums.push((number, crc)));
            let rest = &bytes[usize::try_from(from).unwrap()..];
            rest.chunks(block).for_each(|block| summing.add(block));
            summing.add(b"beyond its end");
            assert_eq!(sums, expected[usize::try_from(first).unwrap()..], "{first} {block}");
        }
    }
}
