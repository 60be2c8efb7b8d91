//! Archives in the user's own files or in memory: planned, written, read and verified on all cores.
//!
//! Functions with a parameter `check_interrupt` call it before each job, on the thread that runs
//! the job. An error that it returns ends the work.

use std::io::{BufWriter, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tssd_format::{
    Archive, Blob, ChangeCount, CompressJob, DeltaDraft, DeltaJob, Draft, Error, Layout, Options,
    StateDict, StorageReference, VerifyJob, WriteJob, checksum,
};

use crate::convert::{to_u64, to_usize};
pub use crate::engine::address::is_object_url;
pub use crate::io::deferred_drop::wait_for_deferred_drops;
use crate::io::disk::{BUFFER_BYTES, Replacement};
use crate::io::parallel;

/// Files are read and written in parts that end at multiples of this many bytes.
const PART_BYTES: usize = 4 << 20;

/// Plans the archive of a state dict. Compresses the storages for which `options` ask that.
///
/// # Errors
///
/// As [`Layout::plan`]; the error of `check_interrupt`.
pub fn plan<E: From<Error> + Send>(
    dict: &StateDict,
    options: &Options,
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<Layout, E> {
    let draft = Draft::new(dict, options)?;
    let compressed = parallel::map(draft.jobs(), |job: CompressJob| {
        check_interrupt()?;
        Ok::<_, E>(job.run()?)
    })?;
    Ok(draft.into_layout(compressed)?)
}

/// Encodes a delta. Returns its layout, and how many elements it changes.
///
/// # Errors
///
/// As [`DeltaDraft::plan`]; the error of `check_interrupt`.
pub fn plan_delta<E: From<Error> + Send>(
    draft: DeltaDraft,
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<(Layout, ChangeCount), E> {
    let chunks = parallel::map(draft.jobs().to_vec(), |job: DeltaJob| {
        check_interrupt()?;
        Ok::<_, E>(job.run()?)
    })?;
    let mut changes = ChangeCount::default();
    for chunks in &chunks {
        changes += chunks.changes();
    }
    Ok((draft.into_layout(chunks)?, changes))
}

/// Writes an archive.
///
/// It is complete on return, and appears under its name with [`Replacement::commit`].
///
/// # Errors
///
/// `Io`; the error of `check_interrupt`.
pub fn write<E: From<Error> + Send>(
    layout: &Layout,
    file: &Replacement,
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    file.preallocate(layout.file_len());
    let jobs = layout.jobs();
    let has_failed = AtomicBool::new(false);
    let mut writer = BufWriter::with_capacity(BUFFER_BYTES, file.at(0));
    let Some(parts) = layout.parts() else {
        // Bytes that are not in memory are read once: they are checksummed while they are written.
        let write_job = |job: &WriteJob| {
            check_interrupt()?;
            Ok(job.write_to(&mut writer)?)
        };
        let checksums = jobs.iter().map(write_job).collect::<Result<Vec<_>, E>>()?;
        writer.write_all(&layout.seal(checksums)?).map_err(Error::io)?;
        return Ok(writer.flush().map_err(Error::io)?);
    };
    let write = || {
        let mut at = 0;
        for mut part in parts {
            while !part.is_empty() {
                check_interrupt()?;
                let piece;
                (piece, part) = part.split_at(part.len().min(PART_BYTES - at % PART_BYTES));
                writer.write_all(piece).map_err(Error::io)?;
                at += piece.len();
            }
        }
        Ok::<_, E>(writer.flush().map_err(Error::io)?)
    };
    // The kernel lets one thread at a time write to a file. The other threads compute checksums
    // meanwhile.
    let checksums = thread::scope(|scope| {
        let checksums = scope.spawn(|| {
            parallel::map_on_other_cores(jobs.iter().collect(), |job: &WriteJob| {
                if has_failed.load(Ordering::Relaxed) {
                    Err(())
                } else {
                    job.checksum().map_err(drop)
                }
            })
        });
        let written = write();
        has_failed.store(written.is_err(), Ordering::Relaxed);
        let checksums = checksums.join().expect("to sum does not panic");
        written.map(|()| checksums.expect("nothing failed"))
    })?;
    let tail = layout.seal(checksums)?;
    Ok(file.at(layout.index_off()).write_all(&tail).map_err(Error::io)?)
}

/// Opens an object of a bucket. Reads both ends of it at once, and the rest on request.
///
/// The usual environment variables give the region, endpoint and keys.
///
/// # Errors
///
/// - `NotFound` if the object does not exist.
/// - `Unreachable` if the bucket cannot be reached for 30 seconds.
/// - `Refused` if the bucket denies access.
/// - `Invalid` without the feature `object`.
#[cfg(feature = "object")]
pub fn open_object(url: &str) -> crate::Result<Arc<dyn Blob>> {
    use crate::io::bucket::Bucket;
    use crate::{Error, ErrorKind, blob::backend::open_object};
    let missing = || Error::new(ErrorKind::NotFound, format_args!("there is no object `{url}`"));
    let split =
        url.rsplit_once('/').filter(|(folder, name)| !name.is_empty() && !folder.ends_with('/'));
    let (folder, name) = split.ok_or_else(missing)?;
    let bucket = Bucket::open(folder, std::time::Duration::from_secs(30))?;
    Ok(Arc::new(open_object(bucket, name)?.ok_or_else(missing)?))
}

/// Fails, because objects of buckets need the feature `object`.
///
/// # Errors
///
/// `Invalid`, always.
#[cfg(not(feature = "object"))]
pub fn open_object(url: &str) -> crate::Result<Arc<dyn Blob>> {
    let text = format_args!(
        "`{url}`: objects of buckets need the feature `object`: `cargo install --features object`, or the wheel"
    );
    Err(crate::Error::new(crate::ErrorKind::Invalid, text))
}

/// Writes an archive into memory of its exact length.
///
/// # Errors
///
/// The error of `check_interrupt`.
///
/// # Panics
///
/// If the memory has another length.
pub fn write_into<E: From<Error> + Send>(
    layout: &Layout,
    target: &mut [u8],
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    assert_eq!(u64::try_from(target.len()), Ok(layout.file_len()), "the memory fits");
    let mut rest = target;
    let mut jobs = Vec::new();
    for job in layout.jobs() {
        let Range { start, end } = job.range();
        let len = to_usize(end - start);
        let (part, tail) = rest.split_at_mut(len);
        jobs.push((job, part));
        rest = tail;
    }
    let checksums = parallel::map(jobs, |(job, part)| {
        check_interrupt()?;
        Ok::<_, E>(job.run(part)?)
    })?;
    rest.copy_from_slice(&layout.seal(checksums)?);
    Ok(())
}

/// Reads bytes of a blob, from `offset` on.
///
/// # Errors
///
/// `Io`; the error of `check_interrupt`.
pub fn read<E: From<Error> + Send>(
    blob: &dyn Blob,
    offset: u64,
    target: &mut [u8],
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    let parts = (offset..).step_by(PART_BYTES).zip(target.chunks_mut(PART_BYTES)).collect();
    parallel::map(parts, |(offset, part): (u64, &mut [u8])| {
        check_interrupt()?;
        Ok::<_, E>(blob.read_exact_at(part, offset).map_err(Error::io)?)
    })?;
    Ok(())
}

/// Reads raw bytes of a storage, from `start` on. Decodes them if they are compressed.
///
/// # Errors
///
/// As [`Archive::storage_range`]; the error of `check_interrupt`.
///
/// # Panics
///
/// If the bytes do not lie in the storage.
pub fn read_storage<E: From<Error> + Send>(
    archive: &Archive,
    storage: u32,
    start: u64,
    target: &mut [u8],
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    // A part decodes whole chunks.
    let part_bytes = PART_BYTES.max(to_usize(archive.storage(storage).chunk_size.bytes()));
    let parts = (start..).step_by(part_bytes).zip(target.chunks_mut(part_bytes)).collect();
    parallel::map(parts, |(start, part): (u64, &mut [u8])| {
        check_interrupt()?;
        part.copy_from_slice(&archive.storage_range(storage, start..start + to_u64(part.len()))?);
        Ok::<_, E>(())
    })?;
    Ok(())
}

/// Runs verification jobs in any order. Returns the first error that is found.
///
/// # Errors
///
/// As [`VerifyJob::run`]; the error of `check_interrupt`.
pub fn verify<E: From<Error> + Send>(
    jobs: Vec<VerifyJob<'_>>,
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    parallel::map(jobs, |job: VerifyJob<'_>| {
        check_interrupt()?;
        Ok::<_, E>(job.run()?)
    })?;
    Ok(())
}

/// Verifies stored chunks of an uncompressed storage. `bytes` are its bytes from `start` on.
///
/// # Errors
///
/// `ChunkCorrupt`; the error of `check_interrupt`.
///
/// # Panics
///
/// If a chunk does not lie in `bytes`.
pub fn verify_chunks<E: From<Error> + Send>(
    storage: &StorageReference,
    chunks: &[u64],
    start: u64,
    bytes: &[u8],
    check_interrupt: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    parallel::map(chunks.to_vec(), |chunk| {
        check_interrupt()?;
        let Range { start: from, end: to } = storage.chunk(chunk);
        let place = |at: u64| to_usize(at - start);
        let crc = checksum(&bytes[place(from)..place(to)]);
        let at = storage.stored_chunk(chunk).start;
        Ok::<_, E>(storage.verify_chunk(chunk, crc).map_err(|error| error.with_offset(at))?)
    })?;
    Ok(())
}
