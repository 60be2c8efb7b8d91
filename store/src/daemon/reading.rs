//! Bytes of archives for those who do not share this host's memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Bytes, BytesMut};
use tssd_format::{Archive, Blob, StorageReference, checksum};

use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, MutexGuard};
use crate::net::wire::{Data, MAX_READ, Range};

/// Of how many archives it is known which chunks are whole.
const MAX_KNOWN: usize = 1024;

/// Runs of so many bytes are sent from where they lie; shorter ones are sooner copied than listed.
const LONG: u64 = 16 << 10;

/// What is known of the archives that are read, by their names.
#[derive(Default)]
pub(crate) struct Reading(Lock<BTreeMap<String, Arc<Proven>>>);

/// The raw storages of an archive, by where they begin.
struct Proven(Vec<Storage>);

struct Storage {
    reference: StorageReference,
    /// Which of its chunks are known to be whole.
    chunks: Box<[AtomicBool]>,
}

/// How many bytes ranges have together.
///
/// # Errors
///
/// `Invalid` if they are no ranges of a blob of this length, or too many bytes.
pub(crate) fn total(ranges: &[Range], blob_len: u64) -> Result<u64> {
    let bytes =
        ranges.iter().try_fold(0_u64, |all, range| all.checked_add(range.bytes_in(blob_len)?));
    bytes.filter(|bytes| *bytes <= MAX_READ).ok_or_else(|| {
        let text = format_args!(
            "ranges that do not lie in the {blob_len} bytes of the archive, or have more than {MAX_READ}"
        );
        Error::new(ErrorKind::Invalid, text)
    })
}

/// How many bytes of ranges are copied to be sent: none that lie in memory and are long.
pub(crate) fn copied(blob: &dyn Blob, ranges: &[Range]) -> u64 {
    let is_copied = |range: &&Range| blob.bytes().is_none() || range.1 < LONG;
    ranges.iter().filter(is_copied).filter_map(|range| range.bytes_in(u64::MAX)).sum()
}

/// The bytes of ranges, one after the other: where they lie, if that is in memory and they are long.
pub(crate) fn gather(blob: &dyn Blob, ranges: &[Range]) -> Result<Data> {
    let mut copies = BytesMut::with_capacity(place(copied(blob, ranges)));
    let (mut pieces, mut done) = (Vec::new(), Ok(()));
    for range in ranges {
        let len = place(range.1);
        range.for_each(|at| match blob.bytes() {
            Some(mapped) if range.1 >= LONG => {
                pieces.extend(Some(copies.split().freeze()).filter(|copied| !copied.is_empty()));
                pieces.push(mapped.slice(place(at)..place(at) + len));
            }
            Some(mapped) => copies.extend_from_slice(&mapped[place(at)..][..len]),
            None if done.is_ok() => {
                let start = copies.len();
                copies.resize(start + len, 0);
                done = blob.read_exact_at(&mut copies[start..], at);
            }
            None => {}
        });
    }
    done.map_err(|error| Error::io("archive", error))?;
    pieces.extend(Some(copies.freeze()).filter(|copied| !copied.is_empty()));
    Ok(pieces.into())
}

/// A copy of the bytes of ranges, one after the other.
///
/// # Panics
///
/// If they do not lie in the bytes.
pub(crate) fn collect(from: &[u8], ranges: &[Range], bytes: u64) -> Bytes {
    let mut collected = BytesMut::with_capacity(place(bytes));
    for range in ranges {
        let len = place(range.1);
        range.for_each(|at| collected.extend_from_slice(&from[place(at)..][..len]));
    }
    collected.freeze()
}

/// Where a byte is in memory.
pub(crate) fn place(at: u64) -> usize {
    usize::try_from(at).expect("a place in memory fits usize")
}

impl Reading {
    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Proven>>> {
        self.0.lock()
    }

    /// Proves the chunks that ranges of an archive are of, each once.
    ///
    /// # Errors
    ///
    /// `Invalid` for ranges of something else than raw tensors; `Corrupt` for a chunk that is damaged.
    pub(crate) fn prove(&self, name: &str, blob: &Arc<dyn Blob>, ranges: &[Range]) -> Result<()> {
        let known = self.known().get(name).cloned();
        let proven = if let Some(proven) = known {
            proven
        } else {
            let proven = Arc::new(Proven::of(name, blob)?);
            let mut known = self.known();
            if known.len() >= MAX_KNOWN {
                known.pop_first();
            }
            known.entry(name.to_owned()).or_insert(proven).clone()
        };
        ranges.iter().try_for_each(|range| {
            let mut done = Ok(());
            range.for_each(|at| {
                if done.is_ok() {
                    done = proven.prove(name, &**blob, at, range.1);
                }
            });
            done
        })
    }
}

impl Proven {
    fn of(name: &str, blob: &Arc<dyn Blob>) -> Result<Self> {
        let archive =
            Archive::from_blob(blob.clone()).map_err(|error| Error::format(name, error))?;
        let storages = (0..archive.storage_count()).map(|number| archive.storage(number));
        let raw =
            storages.filter(|reference| reference.compressed_layout.is_none() && reference.len > 0);
        let mut storages: Vec<Storage> = raw.map(Storage::new).collect();
        storages.sort_unstable_by_key(|storage| storage.reference.offset);
        Ok(Self(storages))
    }

    /// Proves the chunks of one run of bytes.
    fn prove(&self, name: &str, blob: &dyn Blob, mut at: u64, len: u64) -> Result<()> {
        let end = at + len;
        while at < end {
            let after = self.0.partition_point(|storage| storage.reference.offset <= at);
            let storage = after.checked_sub(1).map(|place| &self.0[place]);
            let storage = storage.filter(|storage| at < storage.end()).ok_or_else(|| {
                let text = format_args!("`{name}`: byte {at} is none of an uncompressed tensor");
                Error::new(ErrorKind::Invalid, text)
            })?;
            let upto = end.min(storage.end());
            let start = storage.reference.offset;
            for chunk in storage.reference.chunks(&(at - start..upto - start)) {
                storage.prove(name, blob, chunk)?;
            }
            at = upto;
        }
        Ok(())
    }
}

impl Storage {
    fn new(reference: StorageReference) -> Self {
        let chunks = reference.crcs.iter().map(|_| AtomicBool::new(false)).collect();
        Self { reference, chunks }
    }

    fn end(&self) -> u64 {
        self.reference.offset + self.reference.len
    }

    fn prove(&self, name: &str, blob: &dyn Blob, chunk: u64) -> Result<()> {
        let number = usize::try_from(chunk).expect("there are so many checksums");
        let known = &self.chunks[number];
        if known.load(Ordering::Relaxed) {
            return Ok(());
        }
        let place = self.reference.stored_chunk(chunk);
        let len = place.end - place.start;
        let bytes = gather(blob, &[Range::plain(place.start, len)])?.into_bytes();
        if checksum(&bytes) != self.reference.crcs[number] {
            let (start, end) = (place.start, place.end);
            let text = format_args!("`{name}`: bytes {start}..{end} do not have their checksum");
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        known.store(true, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use proptest::prelude::*;

    use super::*;

    /// Bytes that are in no memory.
    struct Stored(Bytes);

    impl Blob for Stored {
        fn size(&self) -> io::Result<u64> {
            u64::try_from(self.0.len()).map_err(io::Error::other)
        }

        fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
            target.copy_from_slice(&self.0[place(offset)..][..target.len()]);
            Ok(())
        }

        fn bytes(&self) -> Option<&Bytes> {
            None
        }
    }

    const SIZE: u64 = 1 << 20;

    /// Runs on both sides of what is sent from where it lies.
    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let len = prop_oneof![1..100_u64, LONG - 1..LONG + 2, LONG..2 * LONG];
        let range = (0..SIZE / 4, len, 1..4_u64, 0..3 * LONG, any::<bool>());
        let range = range.prop_map(|(base, len, count, gap, is_plain)| {
            let loops = if is_plain { Vec::new() } else { vec![(count, len + gap)] };
            Range(base, len, loops)
        });
        proptest::collection::vec(range, 1..8)
    }

    proptest! {
        #[test]
        fn what_is_gathered_is_there_and_what_is_long_lies_where_it_lay(ranges in ranges()) {
            let bytes: Bytes = (0..SIZE).map(|at| (at % 251).to_le_bytes()[0]).collect();
            let mut expected = Vec::new();
            for range in &ranges {
                range.for_each(|at| expected.extend_from_slice(&bytes[place(at)..][..place(range.1)]));
            }
            prop_assert_eq!(total(&ranges, SIZE).unwrap(), expected.len() as u64);
            let gathered = gather(&bytes, &ranges).unwrap();
            let memory = bytes.as_ptr_range();
            let lies_there = |piece: &&Bytes| memory.contains(&piece.as_ptr());
            let shared: usize = gathered.pieces().iter().filter(lies_there).map(Bytes::len).sum();
            prop_assert_eq!((expected.len() - shared) as u64, copied(&bytes, &ranges));
            let short = |range: &&Range| range.1 < LONG;
            let short = ranges.iter().filter(short).filter_map(|range| range.bytes_in(SIZE));
            prop_assert_eq!(copied(&bytes, &ranges), short.sum::<u64>());
            prop_assert_eq!(gathered.into_bytes(), &expected);
            let stored = Stored(bytes);
            prop_assert_eq!(copied(&stored, &ranges), expected.len() as u64);
            prop_assert_eq!(gather(&stored, &ranges).unwrap().into_bytes(), &expected);
        }
    }
}
