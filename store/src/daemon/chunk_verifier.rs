//! Reads and verifies ranges of archives for clients that do not share the memory of this host.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tssd_format::{Archive, Blob, StorageReference, checksum};

use crate::blob::VerifiedChunks;
use crate::convert::to_usize;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, MutexGuard};
use crate::net::wire::{Data, MAX_READ_BYTES, Range};

/// Maximum number of archives for which verified chunks are recorded.
const MAX_ARCHIVES: usize = 1024;

/// Minimum length in bytes of a run that is sent without a copy.
///
/// Below it, a copy is cheaper than another slice.
const MIN_SHARED_BYTES: u64 = 16 << 10;

/// Verifier of the chunks of archives. It verifies each chunk once.
#[derive(Default)]
pub(crate) struct ChunkVerifier(Lock<BTreeMap<String, Arc<VerifiedArchive>>>);

/// The uncompressed storages of an archive, sorted by offset.
struct VerifiedArchive(VerifiedChunks);

/// Returns the total length of ranges in bytes.
///
/// # Errors
///
/// `Invalid` if a range is outside of a blob of this length, or if the total exceeds [`MAX_READ_BYTES`].
pub(crate) fn total_bytes(ranges: &[Range], blob_len: u64) -> Result<u64> {
    let bytes =
        ranges.iter().try_fold(0_u64, |all, range| all.checked_add(range.total_bytes(blob_len)?));
    bytes.filter(|bytes| *bytes <= MAX_READ_BYTES).ok_or_else(|| {
        let text = format_args!(
            "ranges that do not lie in the {blob_len} bytes of the archive, or have more than {MAX_READ_BYTES}"
        );
        Error::new(ErrorKind::Invalid, text)
    })
}

/// Returns how many bytes of ranges [`gather`] copies. It does not copy long runs in memory.
pub(crate) fn copied_bytes(blob: &dyn Blob, ranges: &[Range]) -> u64 {
    let is_copied = |range: &&Range| blob.bytes().is_none() || range.1 < MIN_SHARED_BYTES;
    ranges.iter().filter(is_copied).filter_map(|range| range.total_bytes(u64::MAX)).sum()
}

/// Returns the bytes of ranges, concatenated. Long runs in memory are shared with the blob, not copied.
pub(crate) fn gather(blob: &dyn Blob, ranges: &[Range]) -> Result<Data> {
    let mut copies = BytesMut::with_capacity(to_usize(copied_bytes(blob, ranges)));
    let (mut pieces, mut result) = (Vec::new(), Ok(()));
    for range in ranges {
        let len = to_usize(range.1);
        range.for_each_run(|at| match blob.bytes() {
            Some(mapped) if range.1 >= MIN_SHARED_BYTES => {
                pieces.extend(Some(copies.split().freeze()).filter(|copied| !copied.is_empty()));
                pieces.push(mapped.slice(to_usize(at)..to_usize(at) + len));
            }
            Some(mapped) => copies.extend_from_slice(&mapped[to_usize(at)..][..len]),
            None if result.is_ok() => {
                let start = copies.len();
                copies.resize(start + len, 0);
                result = blob.read_exact_at(&mut copies[start..], at);
            }
            None => {}
        });
    }
    result.map_err(|error| Error::io("archive", error))?;
    pieces.extend(Some(copies.freeze()).filter(|copied| !copied.is_empty()));
    Ok(pieces.into())
}

/// Returns a copy of the bytes of ranges, concatenated. `bytes` is their total length.
///
/// # Panics
///
/// If a range is outside of `from`.
pub(crate) fn copy_ranges(from: &[u8], ranges: &[Range], bytes: u64) -> Bytes {
    let mut collected = BytesMut::with_capacity(to_usize(bytes));
    for range in ranges {
        let len = to_usize(range.1);
        range.for_each_run(|at| collected.extend_from_slice(&from[to_usize(at)..][..len]));
    }
    collected.freeze()
}

impl ChunkVerifier {
    fn archives(&self) -> MutexGuard<'_, BTreeMap<String, Arc<VerifiedArchive>>> {
        self.0.lock()
    }

    /// Verifies the chunks that contain ranges of an archive, unless they are verified already.
    ///
    /// # Errors
    ///
    /// `Invalid` if a range is not within uncompressed tensors; `Corrupt` if a chunk is damaged.
    pub(crate) fn verify(&self, name: &str, blob: &Arc<dyn Blob>, ranges: &[Range]) -> Result<()> {
        let archive = self.archives().get(name).cloned();
        let archive = if let Some(archive) = archive {
            archive
        } else {
            let archive = Arc::new(VerifiedArchive::open(name, blob)?);
            let mut archives = self.archives();
            if archives.len() >= MAX_ARCHIVES {
                archives.pop_first();
            }
            archives.entry(name.to_owned()).or_insert(archive).clone()
        };
        ranges.iter().try_for_each(|range| {
            let mut result = Ok(());
            range.for_each_run(|at| {
                if result.is_ok() {
                    result = archive.verify(name, &**blob, at, range.1);
                }
            });
            result
        })
    }
}

impl VerifiedArchive {
    fn open(name: &str, blob: &Arc<dyn Blob>) -> Result<Self> {
        let archive =
            Archive::from_blob(blob.clone()).map_err(|error| Error::from_format(name, error))?;
        let storages = (0..archive.storage_count()).map(|number| archive.storage(number));
        let raw =
            storages.filter(|reference| reference.compressed_layout.is_none() && reference.len > 0);
        let mut storages: Vec<Arc<StorageReference>> = raw.map(Arc::new).collect();
        storages.sort_unstable_by_key(|storage| storage.offset);
        Ok(Self(VerifiedChunks::new(storages)))
    }

    /// Verifies the chunks of one run of bytes.
    fn verify(&self, name: &str, blob: &dyn Blob, mut at: u64, len: u64) -> Result<()> {
        let end = at + len;
        let storages = self.0.storages();
        while at < end {
            let next = storages.partition_point(|storage| storage.offset <= at);
            let number = next.checked_sub(1).filter(|number| {
                let storage = &storages[*number];
                at < storage.offset + storage.len
            });
            let number = number.ok_or_else(|| {
                let text = format_args!("`{name}`: byte {at} is not in an uncompressed tensor");
                Error::new(ErrorKind::Invalid, text)
            })?;
            let storage = &storages[number];
            let run_end = end.min(storage.offset + storage.len);
            for chunk in storage.chunks(&(at - storage.offset..run_end - storage.offset)) {
                self.verify_chunk(name, blob, number, chunk)?;
            }
            at = run_end;
        }
        Ok(())
    }

    fn verify_chunk(&self, name: &str, blob: &dyn Blob, storage: usize, chunk: u64) -> Result<()> {
        if self.0.contains(storage, chunk) {
            return Ok(());
        }
        let reference = &self.0.storages()[storage];
        let std::ops::Range { start, end } = reference.stored_chunk(chunk);
        let bytes = gather(blob, &[Range::contiguous(start, end - start)])?.into_bytes();
        reference.verify_chunk(chunk, checksum(&bytes)).map_err(|_| {
            let text = format_args!("`{name}`: checksum mismatch in bytes {start}..{end}");
            Error::new(ErrorKind::Corrupt, text)
        })?;
        self.0.insert(storage, chunk..chunk + 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use proptest::prelude::*;

    use super::*;

    /// A blob whose bytes are not in memory.
    struct UnmappedBlob(Bytes);

    impl Blob for UnmappedBlob {
        fn size(&self) -> io::Result<u64> {
            u64::try_from(self.0.len()).map_err(io::Error::other)
        }

        fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
            target.copy_from_slice(&self.0[to_usize(offset)..][..target.len()]);
            Ok(())
        }

        fn bytes(&self) -> Option<&Bytes> {
            None
        }
    }

    const SIZE: u64 = 1 << 20;

    /// Ranges whose runs are shorter and longer than `MIN_SHARED_BYTES`.
    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let len = prop_oneof![
            1..100_u64,
            MIN_SHARED_BYTES - 1..MIN_SHARED_BYTES + 2,
            MIN_SHARED_BYTES..2 * MIN_SHARED_BYTES
        ];
        let range = (0..SIZE / 4, len, 1..4_u64, 0..3 * MIN_SHARED_BYTES, any::<bool>());
        let range = range.prop_map(|(base, len, count, gap, is_plain)| {
            let loops = if is_plain { Vec::new() } else { vec![(count, len + gap)] };
            Range(base, len, loops)
        });
        proptest::collection::vec(range, 1..8)
    }

    proptest! {
        #[test]
        fn gather_copies_short_runs_and_shares_long_ones(ranges in ranges()) {
            let bytes: Bytes = (0..SIZE).map(|at| (at % 251).to_le_bytes()[0]).collect();
            let mut expected = Vec::new();
            for range in &ranges {
                range.for_each_run(|at| expected.extend_from_slice(&bytes[to_usize(at)..][..to_usize(range.1)]));
            }
            prop_assert_eq!(total_bytes(&ranges, SIZE).unwrap(), expected.len() as u64);
            let gathered = gather(&bytes, &ranges).unwrap();
            let memory = bytes.as_ptr_range();
            let is_shared = |piece: &&Bytes| memory.contains(&piece.as_ptr());
            let shared: usize = gathered.pieces().iter().filter(is_shared).map(Bytes::len).sum();
            prop_assert_eq!((expected.len() - shared) as u64, copied_bytes(&bytes, &ranges));
            let short = |range: &&Range| range.1 < MIN_SHARED_BYTES;
            let short = ranges.iter().filter(short).filter_map(|range| range.total_bytes(SIZE));
            prop_assert_eq!(copied_bytes(&bytes, &ranges), short.sum::<u64>());
            prop_assert_eq!(gathered.into_bytes(), &expected);
            let unmapped = UnmappedBlob(bytes);
            prop_assert_eq!(copied_bytes(&unmapped, &ranges), expected.len() as u64);
            prop_assert_eq!(gather(&unmapped, &ranges).unwrap().into_bytes(), &expected);
        }
    }
}
