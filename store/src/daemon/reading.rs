//! Bytes of archives for those who do not share this host's memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Bytes, BytesMut};
use tssd_format::{Archive, Blob, StorageReference};

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{Mutex, MutexGuard};
use crate::wire::{MAX_READ, Range};

/// Of how many archives it is known which chunks are whole.
const MAX_KNOWN: usize = 1024;

/// What is known of the archives that are read, by their names.
#[derive(Default)]
pub(super) struct Reading(Mutex<BTreeMap<String, Arc<Proven>>>);

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
pub(super) fn total(ranges: &[Range], blob_len: u64) -> Result<u64> {
    let bytes =
        ranges.iter().try_fold(0_u64, |all, range| all.checked_add(range.bytes_in(blob_len)?));
    bytes.filter(|bytes| *bytes <= MAX_READ).ok_or_else(|| {
        let text = format_args!(
            "ranges that do not lie in the {blob_len} bytes of the archive, or have more than {MAX_READ}"
        );
        Error::new(ErrorKind::Invalid, text)
    })
}

/// The bytes of ranges, one after the other: a view if they are one piece in memory.
pub(super) fn gather(blob: &dyn Blob, ranges: &[Range], bytes: u64) -> Result<Bytes> {
    let failed = |error| Error::io("archive", error);
    if let (Some(mapped), [only]) = (blob.bytes(), ranges)
        && only.2.is_empty()
    {
        return Ok(mapped.slice(place(only.0)..place(only.0 + only.1)));
    }
    if let Some(mapped) = blob.bytes() {
        return Ok(collect(mapped, ranges, bytes));
    }
    let mut gathered = BytesMut::with_capacity(place(bytes));
    let mut done = Ok(());
    for range in ranges {
        let len = place(range.1);
        range.for_each(|at| {
            if done.is_ok() {
                let start = gathered.len();
                gathered.resize(start + len, 0);
                done = blob.read_exact_at(&mut gathered[start..], at);
            }
        });
    }
    done.map_err(failed)?;
    Ok(gathered.freeze())
}

/// A copy of the bytes of ranges, one after the other.
///
/// # Panics
///
/// If they do not lie in the bytes.
pub(super) fn collect(from: &[u8], ranges: &[Range], bytes: u64) -> Bytes {
    let mut collected = BytesMut::with_capacity(place(bytes));
    for range in ranges {
        let len = place(range.1);
        range.for_each(|at| collected.extend_from_slice(&from[place(at)..][..len]));
    }
    collected.freeze()
}

/// Where a byte is in memory.
pub(super) fn place(at: u64) -> usize {
    usize::try_from(at).expect("a place in memory fits usize")
}

impl Reading {
    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Proven>>> {
        self.0.lock().expect("nobody panics while holding what is proven")
    }

    /// Proves the chunks that ranges of an archive are of, each once.
    ///
    /// # Errors
    ///
    /// `Invalid` for ranges of something else than raw tensors; `Corrupt` for a chunk that is damaged.
    pub(super) fn prove(&self, name: &str, blob: &Arc<dyn Blob>, ranges: &[Range]) -> Result<()> {
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
        let raw = storages.filter(|reference| reference.packing.is_none() && reference.len > 0);
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
        let bytes = gather(blob, &[Range::plain(place.start, len)], len)?;
        if crc32fast::hash(&bytes) != self.reference.crcs[number] {
            let (start, end) = (place.start, place.end);
            let text = format_args!("`{name}`: bytes {start}..{end} do not have their checksum");
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        known.store(true, Ordering::Relaxed);
        Ok(())
    }
}
