//! Archives that are files of the user's own, or memory: planned, written, read and proven on all cores.
//!
//! What is passed as `pause` is called before each job, on the thread that is to do it. An error that it
//! returns ends the work.

use std::io::{BufWriter, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tssd_format::{
    Archive, Blob, CompressJob, Draft, Error, Layout, Options, StateDict, StorageReference,
    VerifyJob, WriteJob, checksum,
};

pub use crate::engine::address::is_object;
pub use crate::io::deferred_drop::settle;
use crate::io::disk::{BUFFER_BYTES, Replacement};
use crate::io::parallel;

/// Files are read and written in parts that end at multiples of this many bytes.
const PART_BYTES: usize = 4 << 20;

/// Plans the archive of a state dict; what is to be compressed, is.
///
/// # Errors
///
/// As [`Layout::plan`]; what `pause` returns.
pub fn plan<E: From<Error> + Send>(
    dict: &StateDict,
    options: &Options,
    pause: impl Fn() -> Result<(), E> + Sync,
) -> Result<Layout, E> {
    let draft = Draft::new(dict, options)?;
    let packed = parallel::map(draft.jobs(), |job: CompressJob| {
        pause()?;
        Ok::<_, E>(job.run()?)
    })?;
    Ok(draft.into_layout(packed)?)
}

/// Writes an archive. It is whole once this returns, and appears with [`Replacement::commit`].
///
/// # Errors
///
/// `Io`; what `pause` returns.
pub fn write<E: From<Error> + Send>(
    layout: &Layout,
    file: &Replacement,
    pause: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    file.expect(layout.file_len());
    let jobs = layout.jobs();
    let has_failed = AtomicBool::new(false);
    let mut writer = BufWriter::with_capacity(BUFFER_BYTES, file.at(0));
    let Some(parts) = layout.parts() else {
        // What is elsewhere comes once: it is summed on its way.
        let fill = |job: &WriteJob| {
            pause()?;
            Ok(job.write_to(&mut writer)?)
        };
        let filled = jobs.iter().map(fill).collect::<Result<Vec<_>, E>>()?;
        writer.write_all(&layout.seal(filled)?).map_err(Error::io)?;
        return Ok(writer.flush().map_err(Error::io)?);
    };
    let write = || {
        let mut at = 0;
        for mut part in parts {
            while !part.is_empty() {
                pause()?;
                let piece;
                (piece, part) = part.split_at(part.len().min(PART_BYTES - at % PART_BYTES));
                writer.write_all(piece).map_err(Error::io)?;
                at += piece.len();
            }
        }
        Ok::<_, E>(writer.flush().map_err(Error::io)?)
    };
    // A system lets one thread at a time write to a file: others sum meanwhile.
    let filled = thread::scope(|scope| {
        let sums = scope.spawn(|| {
            parallel::map_beside(jobs.iter().collect(), |job: &WriteJob| {
                if has_failed.load(Ordering::Relaxed) {
                    Err(())
                } else {
                    job.checksum().map_err(drop)
                }
            })
        });
        let written = write();
        has_failed.store(written.is_err(), Ordering::Relaxed);
        let sums = sums.join().expect("to sum does not panic");
        written.map(|()| sums.expect("nothing failed"))
    })?;
    let tail = layout.seal(filled)?;
    Ok(file.at(layout.index_off()).write_all(&tail).map_err(Error::io)?)
}

/// Opens an object of a bucket. Its two ends come at once, the rest as it is asked for. Regions, endpoints and keys
/// are those that the usual environment variables say.
///
/// # Errors
///
/// `NotFound` if there is no such object; `Unreachable` if the bucket cannot be reached for half a minute, `Refused`
/// if it does not let us; `Invalid` without the feature `object`.
#[cfg(feature = "object")]
pub fn open_object(url: &str) -> crate::Result<Arc<dyn Blob>> {
    use crate::io::bucket::Bucket;
    use crate::{Error, ErrorKind, blob::backend::alone};
    let missing = || Error::new(ErrorKind::NotFound, format_args!("there is no object `{url}`"));
    let named =
        url.rsplit_once('/').filter(|(folder, name)| !name.is_empty() && !folder.ends_with('/'));
    let (folder, name) = named.ok_or_else(missing)?;
    let bucket = Bucket::open(folder, std::time::Duration::from_secs(30))?;
    Ok(Arc::new(alone(bucket, name)?.ok_or_else(missing)?))
}

/// As with the feature `object`.
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

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).expect("usize is at most 64 bits")
}

/// Writes an archive into memory of its exact length.
///
/// # Errors
///
/// What `pause` returns.
///
/// # Panics
///
/// If the memory has another length.
pub fn fill<E: From<Error> + Send>(
    layout: &Layout,
    target: &mut [u8],
    pause: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    assert_eq!(u64::try_from(target.len()), Ok(layout.file_len()), "the memory fits");
    let mut rest = target;
    let mut jobs = Vec::new();
    for job in layout.jobs() {
        let Range { start, end } = job.range();
        let len = usize::try_from(end - start).expect("it is in memory");
        let (part, tail) = rest.split_at_mut(len);
        jobs.push((job, part));
        rest = tail;
    }
    let filled = parallel::map(jobs, |(job, part)| {
        pause()?;
        Ok::<_, E>(job.run(part)?)
    })?;
    rest.copy_from_slice(&layout.seal(filled)?);
    Ok(())
}

/// Reads a blob from `offset` on.
///
/// # Errors
///
/// `Io`; what `pause` returns.
pub fn read<E: From<Error> + Send>(
    blob: &dyn Blob,
    offset: u64,
    target: &mut [u8],
    pause: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    let parts = (offset..).step_by(PART_BYTES).zip(target.chunks_mut(PART_BYTES)).collect();
    parallel::map(parts, |(offset, part): (u64, &mut [u8])| {
        pause()?;
        Ok::<_, E>(blob.read_exact_at(part, offset).map_err(Error::io)?)
    })?;
    Ok(())
}

/// The raw bytes of a storage from `start` on, decoded if they are compressed.
///
/// # Errors
///
/// As [`Archive::storage_range`]; what `pause` returns.
///
/// # Panics
///
/// If they do not lie in the storage.
pub fn raw<E: From<Error> + Send>(
    archive: &Archive,
    storage: u32,
    start: u64,
    target: &mut [u8],
    pause: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    let parts = (start..).step_by(PART_BYTES).zip(target.chunks_mut(PART_BYTES)).collect();
    parallel::map(parts, |(start, part): (u64, &mut [u8])| {
        pause()?;
        part.copy_from_slice(&archive.storage_range(storage, start..start + length(part))?);
        Ok::<_, E>(())
    })?;
    Ok(())
}

/// Proves what the jobs are about, in any order; the first thing that is wrong is the error.
///
/// # Errors
///
/// As [`VerifyJob::run`]; what `pause` returns.
pub fn verify<E: From<Error> + Send>(
    jobs: Vec<VerifyJob<'_>>,
    pause: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    parallel::map(jobs, |job: VerifyJob<'_>| {
        pause()?;
        Ok::<_, E>(job.run()?)
    })?;
    Ok(())
}

/// Proves stored chunks of a storage that is not compressed, of which `bytes` begin at its byte `start`.
///
/// # Errors
///
/// `ChunkCorrupt`; what `pause` returns.
///
/// # Panics
///
/// If a chunk does not lie in the bytes.
pub fn prove<E: From<Error> + Send>(
    storage: &StorageReference,
    chunks: &[u64],
    start: u64,
    bytes: &[u8],
    pause: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    parallel::map(chunks.to_vec(), |chunk| {
        pause()?;
        let Range { start: from, end: to } = storage.chunk(chunk);
        let place = |at: u64| usize::try_from(at - start).expect("it is in memory");
        let crc = checksum(&bytes[place(from)..place(to)]);
        let at = storage.stored_chunk(chunk).start;
        Ok::<_, E>(storage.verify_chunk(chunk, crc).map_err(|error| error.with_offset(at))?)
    })?;
    Ok(())
}
