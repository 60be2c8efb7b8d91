//! Verification of chunks, each once, or while their bytes arrive.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crc32fast::Hasher;
use tssd_format::{StorageReference, copy_chunks};

use crate::convert::{to_u64, to_usize};

/// Storages, and for each of their chunks whether it is verified.
pub(crate) struct VerifiedChunks {
    storages: Vec<Arc<StorageReference>>,
    /// Index in `is_verified` of the first chunk of each storage.
    first_chunks: Box<[usize]>,
    is_verified: Box<[AtomicBool]>,
}

impl VerifiedChunks {
    /// Begins with no chunk verified.
    pub(crate) fn new(storages: Vec<Arc<StorageReference>>) -> Self {
        let mut count = 0;
        let first_chunk = |storage: &Arc<StorageReference>| {
            count += storage.crcs.len();
            count - storage.crcs.len()
        };
        let first_chunks = storages.iter().map(first_chunk).collect();
        let is_verified = (0..count).map(|_| AtomicBool::new(false)).collect();
        Self { storages, first_chunks, is_verified }
    }

    /// Returns the storages, in the order given.
    pub(crate) fn storages(&self) -> &[Arc<StorageReference>] {
        &self.storages
    }

    /// Returns whether a chunk of a storage is verified.
    pub(crate) fn contains(&self, storage: usize, chunk: u64) -> bool {
        self.is_verified[self.index(storage, chunk)].load(Ordering::Relaxed)
    }

    /// Records that chunks of a storage are verified.
    pub(crate) fn insert(&self, storage: usize, chunks: Range<u64>) {
        let range = self.index(storage, chunks.start)..self.index(storage, chunks.end);
        for is_verified in &self.is_verified[range] {
            is_verified.store(true, Ordering::Relaxed);
        }
    }

    fn index(&self, storage: usize, chunk: u64) -> usize {
        self.first_chunks[storage] + to_usize(chunk)
    }
}

/// Verifies the raw chunks of a storage while their bytes arrive, from one chunk on.
pub(crate) struct StreamingVerifier<'a> {
    storage: &'a StorageReference,
    /// Raw offset in the storage of the next byte.
    position: u64,
    crc: Hasher,
    /// The first chunk whose checksum does not match.
    mismatch: Option<u64>,
}

impl<'a> StreamingVerifier<'a> {
    /// Starts at raw offset `position` of the storage, which must be the start of a chunk.
    pub(crate) fn new(storage: &'a StorageReference, position: u64) -> Self {
        Self { storage, position, crc: Hasher::new(), mismatch: None }
    }

    /// Adds the next bytes. Bytes after the last chunk are ignored.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let number = self.position >> self.storage.chunk_size.log2();
            let left = self.storage.chunk(number).end.saturating_sub(self.position);
            if left == 0 {
                return;
            }
            let (chunk, rest) = bytes
                .split_at(usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len())));
            self.crc.update(chunk);
            self.advance(chunk.len());
            bytes = rest;
            if self.position == self.storage.chunk(number).end {
                let crc = std::mem::take(&mut self.crc).finalize();
                self.check(number, crc);
            }
        }
    }

    /// Copies the next bytes to `target` and verifies them in one pass over memory.
    ///
    /// `target` has the length of `source`, which must consist of whole chunks. Anything else counts as a mismatch.
    pub(crate) fn copy_and_update(&mut self, source: &[u8], target: &mut [u8]) {
        let size = to_usize(self.storage.chunk_size.bytes());
        copy_chunks(source, target, size, |chunk, crc| {
            let start = self.position;
            let number = start >> self.storage.chunk_size.log2();
            self.advance(chunk.len());
            if self.storage.chunk(number) == (start..self.position) {
                self.check(number, crc);
            } else {
                self.mismatch.get_or_insert(number);
            }
        });
    }

    fn advance(&mut self, len: usize) {
        self.position += to_u64(len);
    }

    fn check(&mut self, number: u64, crc: u32) {
        if self.storage.verify_chunk(number, crc).is_err() {
            self.mismatch.get_or_insert(number);
        }
    }

    /// Checks that all chunks so far match their checksums.
    ///
    /// # Errors
    ///
    /// Number of the first chunk that does not match or is incomplete.
    pub(crate) fn finish(self) -> Result<(), u64> {
        let number = self.position >> self.storage.chunk_size.log2();
        let chunk = self.storage.chunk(number);
        let is_cut = chunk.start < self.position && self.position < chunk.end;
        self.mismatch.or(is_cut.then_some(number)).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use tssd_format::ChunkSize;

    use super::*;

    #[test]
    fn verifier_checks_each_chunk_for_any_block_size() {
        let bytes: Vec<u8> =
            (0..21_000_u32).map(|at| at.wrapping_mul(97).to_le_bytes()[1]).collect();
        let len = bytes.len().try_into().unwrap();
        let chunk_size = ChunkSize::from_log2(12).unwrap();
        let crcs: Vec<u32> = bytes.chunks(4096).map(crc32fast::hash).collect();
        let whole = StorageReference { len, chunk_size, crcs, ..StorageReference::default() };
        for (first, block) in [(0, 1), (0, 4096), (1, 1000), (2, 9000), (5, 7), (0, 50_000)] {
            let verify_streamed = |storage: &StorageReference| {
                let start = first << 12;
                let mut verifier = StreamingVerifier::new(storage, start);
                let rest = &bytes[usize::try_from(start).unwrap()..];
                rest.chunks(block).for_each(|block| verifier.update(block));
                verifier.update(b"beyond its end");
                verifier.finish()
            };
            let verify_copied = |storage: &StorageReference| {
                let source = &bytes[usize::try_from(first << 12).unwrap()..];
                let mut target = vec![0; source.len()];
                let mut verifier = StreamingVerifier::new(storage, first << 12);
                verifier.copy_and_update(source, &mut target);
                assert_eq!(target, source);
                verifier.finish()
            };
            assert_eq!(verify_streamed(&whole), Ok(()), "{first} {block}");
            assert_eq!(verify_copied(&whole), Ok(()), "{first}");
            let mut cut = StreamingVerifier::new(&whole, first << 12);
            cut.update(&bytes[usize::try_from(first << 12).unwrap()..bytes.len() - 1]);
            assert_eq!(cut.finish(), Err(5));
            let mut cut = StreamingVerifier::new(&whole, 0);
            cut.copy_and_update(&bytes[..5000], &mut [0; 5000]);
            assert_eq!(cut.finish(), Err(1));
            let long = [&bytes[..], b"beyond its end"].concat();
            let mut beyond = StreamingVerifier::new(&whole, 0);
            beyond.copy_and_update(&long, &mut vec![0; long.len()]);
            assert_eq!(beyond.finish(), Err(5));
            for wrong in 0..6_u64 {
                let mut storage = whole.clone();
                storage.crcs[usize::try_from(wrong).unwrap()] ^= 1;
                // The last chunk is wrong too: the first wrong one must be reported.
                storage.crcs[5] ^= 1 << 7;
                let expected = if wrong >= first { wrong } else { 5 };
                assert_eq!(verify_streamed(&storage), Err(expected), "{first} {block} {wrong}");
                assert_eq!(verify_copied(&storage), Err(expected), "{first} {wrong}");
            }
        }
    }
}
