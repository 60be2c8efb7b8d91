//! BLAKE3 of storages, put together from those of their chunks, and of whole files. Spec: section 8.
//!
//! BLAKE3 is a tree, and a chunk, a power of two of bytes, is a subtree of it: so chunks are hashed by independent
//! jobs, like their checksums.

use blake3::hazmat::{
    HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

use crate::chunk::ChunkSize;

/// A BLAKE3 digest.
pub type Digest = [u8; 32];

/// Hashes one chunk of a storage.
pub(crate) struct ChunkHasher {
    hasher: blake3::Hasher,
    is_whole: bool,
}

impl ChunkHasher {
    /// For a chunk of a storage of `len` bytes, whose chunks have this size.
    pub(crate) fn new(chunk: u64, (len, size): (u64, ChunkSize)) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(chunk * size.bytes());
        Self { hasher, is_whole: len <= size.bytes() }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// What [`merge`] needs of it.
    pub(crate) fn finish(&self) -> Digest {
        if self.is_whole {
            *self.hasher.finalize().as_bytes()
        } else {
            self.hasher.finalize_non_root()
        }
    }
}

/// The digest of a storage of `len` bytes, given what was found out about its chunks of this size.
pub(crate) fn merge((len, size): (u64, ChunkSize), chunks: &[Digest]) -> Digest {
    fn halves(len: u64, size: ChunkSize, chunks: &[Digest]) -> (Digest, Digest) {
        let left_len = left_subtree_len(len);
        let at = usize::try_from(left_len / size.bytes()).unwrap_or(chunks.len());
        let (left, right) = chunks.split_at(at);
        (subtree(left_len, size, left), subtree(len - left_len, size, right))
    }

    fn subtree(len: u64, size: ChunkSize, chunks: &[Digest]) -> Digest {
        if let [chunk] = chunks {
            return *chunk;
        }
        let (left, right) = halves(len, size, chunks);
        merge_subtrees_non_root(&left, &right, Mode::Hash)
    }

    if let [whole] = chunks {
        return *whole;
    }
    let (left, right) = halves(len, size, chunks);
    *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()
}

/// The digest of these parts in a row.
pub(crate) fn hash(parts: &[&[u8]]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_merge_to_the_digest_of_the_whole() {
        for log2 in [12, 13, 20] {
            merge_as_the_whole(ChunkSize::from_log2(log2).unwrap());
        }
    }

    fn merge_as_the_whole(size: ChunkSize) {
        let chunk = usize::try_from(size.bytes()).unwrap();
        let bytes: Vec<u8> =
            (0..5 * chunk + 77).map(|i| (i % 251).to_string().as_bytes()[0]).collect();
        for len in [0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 5, 5 * chunk + 77] {
            let bytes = &bytes[..len];
            let wide = u64::try_from(len).unwrap();
            let parts: Vec<Digest> = if len == 0 {
                vec![ChunkHasher::new(0, (0, size)).finish()]
            } else {
                (0..)
                    .zip(bytes.chunks(chunk))
                    .map(|(number, part)| {
                        let mut hasher = ChunkHasher::new(number, (wide, size));
                        let (one, other) = part.split_at(part.len() / 3);
                        hasher.update(one);
                        hasher.update(other);
                        hasher.finish()
                    })
                    .collect()
            };
            assert_eq!(merge((wide, size), &parts), *blake3::hash(bytes).as_bytes(), "{len} bytes");
        }
    }
}
