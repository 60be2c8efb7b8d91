//! BLAKE3 digests of storages and of their chunks. Spec: section 8.
//!
//! The digest of a storage is merged from the digests of its chunks. BLAKE3 is a tree hash, and the size of a chunk is
//! a power of two, so a chunk is a subtree. Independent jobs hash the chunks of a storage, as they compute checksums.

use blake3::hazmat::{
    HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

use crate::chunk::ChunkSize;

/// A BLAKE3 digest.
pub type Digest = [u8; 32];

/// Hasher of one chunk of a storage.
pub(crate) struct ChunkHasher {
    hasher: blake3::Hasher,
    is_only_chunk: bool,
}

impl ChunkHasher {
    /// Creates the hasher for chunk number `chunk` of a storage of `len` bytes with chunks of `size`.
    pub(crate) fn new(chunk: u64, len: u64, size: ChunkSize) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(chunk * size.bytes());
        Self { hasher, is_only_chunk: len <= size.bytes() }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// Returns the chaining value of the chunk, an input of [`merge`].
    ///
    /// If the storage has one chunk, this is the digest of the storage.
    pub(crate) fn finish(&self) -> Digest {
        if self.is_only_chunk {
            *self.hasher.finalize().as_bytes()
        } else {
            self.hasher.finalize_non_root()
        }
    }
}

/// Merges the chaining values of all chunks of a storage of `len` bytes into the digest of the storage.
pub(crate) fn merge(len: u64, size: ChunkSize, chunks: &[Digest]) -> Digest {
    fn halves(len: u64, size: ChunkSize, chunks: &[Digest]) -> (Digest, Digest) {
        let left_len = left_subtree_len(len);
        let left_chunks = usize::try_from(left_len / size.bytes()).unwrap_or(chunks.len());
        let (left, right) = chunks.split_at(left_chunks);
        (subtree(left_len, size, left), subtree(len - left_len, size, right))
    }

    fn subtree(len: u64, size: ChunkSize, chunks: &[Digest]) -> Digest {
        if let [chunk] = chunks {
            return *chunk;
        }
        let (left, right) = halves(len, size, chunks);
        merge_subtrees_non_root(&left, &right, Mode::Hash)
    }

    if let [chunk] = chunks {
        return *chunk;
    }
    let (left, right) = halves(len, size, chunks);
    *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()
}

/// Returns the digest of `bytes`.
pub(crate) fn hash(bytes: &[u8]) -> Digest {
    *blake3::hash(bytes).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_matches_the_digest_of_the_whole() {
        for log2 in [12, 13, 20] {
            assert_merge_matches_whole(ChunkSize::from_log2(log2).unwrap());
        }
    }

    fn assert_merge_matches_whole(size: ChunkSize) {
        let chunk = usize::try_from(size.bytes()).unwrap();
        let bytes: Vec<u8> =
            (0..5 * chunk + 77).map(|i| (i % 251).to_string().as_bytes()[0]).collect();
        for len in [0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 5, 5 * chunk + 77] {
            let bytes = &bytes[..len];
            let wide = u64::try_from(len).unwrap();
            let parts: Vec<Digest> = if len == 0 {
                vec![ChunkHasher::new(0, 0, size).finish()]
            } else {
                (0..)
                    .zip(bytes.chunks(chunk))
                    .map(|(number, part)| {
                        let mut hasher = ChunkHasher::new(number, wide, size);
                        let (one, other) = part.split_at(part.len() / 3);
                        hasher.update(one);
                        hasher.update(other);
                        hasher.finish()
                    })
                    .collect()
            };
            assert_eq!(merge(wide, size, &parts), *blake3::hash(bytes).as_bytes(), "{len} bytes");
        }
    }
}
