//! Chunks whose bytes come one after the other are proven as they come.

use crc32fast::Hasher;
use tssd_format::{StorageReference, copy_chunks};

/// Proves each chunk of a raw storage, from one on.
pub(crate) struct Proving<'a> {
    storage: &'a StorageReference,
    /// Where the next byte is among the raw ones.
    at: u64,
    crc: Hasher,
    /// The first chunk that is not what was put.
    wrong: Option<u64>,
}

impl<'a> Proving<'a> {
    /// From a raw byte of the storage on, at which a chunk begins.
    pub(crate) fn new(storage: &'a StorageReference, at: u64) -> Self {
        Self { storage, at, crc: Hasher::new(), wrong: None }
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
            self.go(chunk.len());
            bytes = rest;
            if self.at == self.storage.chunk(number).end {
                let crc = std::mem::take(&mut self.crc).finalize();
                self.prove(number, crc);
            }
        }
    }

    /// Copies the next chunks, which are whole, to memory of the same length, and adds them: one pass over memory.
    /// What is no chunk is wrong.
    pub(crate) fn copy(&mut self, source: &[u8], target: &mut [u8]) {
        let size = usize::try_from(self.storage.chunk_size.bytes()).expect("at most 1 MiB");
        copy_chunks(source, target, size, |chunk, crc| {
            let start = self.at;
            let number = start >> self.storage.chunk_size.log2();
            self.go(chunk.len());
            if self.storage.chunk(number) == (start..self.at) {
                self.prove(number, crc);
            } else {
                self.wrong.get_or_insert(number);
            }
        });
    }

    fn go(&mut self, len: usize) {
        self.at += u64::try_from(len).expect("usize is at most 64 bits");
    }

    fn prove(&mut self, number: u64, crc: u32) {
        if self.storage.verify_chunk(number, crc).is_err() {
            self.wrong.get_or_insert(number);
        }
    }

    /// Whether all chunks that have come are those that were put.
    ///
    /// # Errors
    ///
    /// The number of the first one that is not, or of which a part has not come.
    pub(crate) fn finish(self) -> Result<(), u64> {
        let number = self.at >> self.storage.chunk_size.log2();
        let place = self.storage.chunk(number);
        let is_cut = place.start < self.at && self.at < place.end;
        self.wrong.or(is_cut.then_some(number)).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use tssd_format::ChunkSize;

    use super::*;

    #[test]
    fn each_chunk_is_proven_however_its_bytes_come() {
        let bytes: Vec<u8> =
            (0..21_000_u32).map(|at| at.wrapping_mul(97).to_le_bytes()[1]).collect();
        let len = bytes.len().try_into().unwrap();
        let chunk_size = ChunkSize::from_log2(12).unwrap();
        let crcs: Vec<u32> = bytes.chunks(4096).map(crc32fast::hash).collect();
        let whole = StorageReference { len, chunk_size, crcs, ..StorageReference::default() };
        for (first, block) in [(0, 1), (0, 4096), (1, 1000), (2, 9000), (5, 7), (0, 50_000)] {
            let proven = |storage: &StorageReference| {
                let from = first << 12;
                let mut proving = Proving::new(storage, from);
                let rest = &bytes[usize::try_from(from).unwrap()..];
                rest.chunks(block).for_each(|block| proving.add(block));
                proving.add(b"beyond its end");
                proving.finish()
            };
            let copied = |storage: &StorageReference| {
                let source = &bytes[usize::try_from(first << 12).unwrap()..];
                let mut target = vec![0; source.len()];
                let mut proving = Proving::new(storage, first << 12);
                proving.copy(source, &mut target);
                assert_eq!(target, source);
                proving.finish()
            };
            assert_eq!(proven(&whole), Ok(()), "{first} {block}");
            assert_eq!(copied(&whole), Ok(()), "{first}");
            let mut cut = Proving::new(&whole, first << 12);
            cut.add(&bytes[usize::try_from(first << 12).unwrap()..bytes.len() - 1]);
            assert_eq!(cut.finish(), Err(5));
            let mut cut = Proving::new(&whole, 0);
            cut.copy(&bytes[..5000], &mut [0; 5000]);
            assert_eq!(cut.finish(), Err(1));
            let long = [&bytes[..], b"beyond its end"].concat();
            let mut beyond = Proving::new(&whole, 0);
            beyond.copy(&long, &mut vec![0; long.len()]);
            assert_eq!(beyond.finish(), Err(5));
            for wrong in 0..6_u64 {
                let mut storage = whole.clone();
                storage.crcs[usize::try_from(wrong).unwrap()] ^= 1;
                // The last one is wrong as well: the first is told.
                storage.crcs[5] ^= 1 << 7;
                let expected = if wrong >= first { wrong } else { 5 };
                assert_eq!(proven(&storage), Err(expected), "{first} {block} {wrong}");
                assert_eq!(copied(&storage), Err(expected), "{first} {wrong}");
            }
        }
    }
}
