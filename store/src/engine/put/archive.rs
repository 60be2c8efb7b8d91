//! The archive of a put: its layout, its bytes and its digest.

use bytes::Bytes;
use tssd_format::{
    AttrValue, ChunkPolicy, CompressJob, Draft, JobChecksums, Layout, Options, StateDict, WriteJob,
};

use super::replicas::without_replicas;
use super::{PutOptions, Replicas};
use crate::blob::{Part, split};
use crate::control::Contribution;
use crate::error::{Error, Result};
use crate::io::exec::{INLINE_MAX_BYTES, run_blocking, run_inline};
use crate::io::parallel;
use crate::key::Key;
use crate::ledger::{Digest, Durability};
use crate::merge::{DIVERGENT_ATTR, Divergent};
use crate::route::Transport;

/// Number of jobs whose copies from GPUs begin before the first of them is checksummed: 32 MiB, which take a millisecond. A
/// stream with much more work blocks its caller.
const DMA_AHEAD_JOBS: usize = 8;

/// Lays out what this writer stores, and compresses it if the options say so.
pub(super) async fn layout(
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
    transport: Transport,
) -> Result<Layout> {
    // Readers of a bucket request ranges, and each byte beside them is transferred too.
    let fine_chunks = options.durability == Durability::Object || transport == Transport::Object;
    let draft = draft(dict, options, fine_chunks)
        .map_err(|error| Error::request(format_args!("key `{key}`"), error))?;
    let jobs = draft.jobs();
    if jobs.is_empty() {
        place(draft, jobs)
    } else {
        run_blocking(move || place(draft, jobs)).await
    }
}

/// Whether all bytes of an archive are in memory of this process.
pub(super) fn is_in_memory(layout: &Layout) -> bool {
    layout.blobs().next().is_none()
}

/// Writes an archive to a contribution. Returns its digest.
pub(super) async fn write(
    mut contribution: Box<dyn Contribution>,
    layout: Layout,
) -> Result<(Box<dyn Contribution>, Result<Digest>)> {
    let is_in_memory = is_in_memory(&layout);
    let is_short =
        is_in_memory && contribution.is_in_memory() && layout.file_len() <= INLINE_MAX_BYTES;
    let work = move || {
        let ahead = if is_in_memory { 0 } else { DMA_AHEAD_JOBS };
        let digest = write_parts(|lens| contribution.parts(lens), &layout, ahead);
        Ok((contribution, digest))
    };
    if is_short { run_inline(work) } else { run_blocking(work).await }
}

/// Computes the digest of an archive that is stored already.
pub(super) async fn digest(layout: Layout, has_checksums: bool) -> Result<Digest> {
    let is_short = is_in_memory(&layout) && layout.file_len() <= INLINE_MAX_BYTES;
    let work = move || {
        let run = |job: WriteJob| {
            let filled =
                if has_checksums { job.checksum() } else { job.for_each_piece(|_, _| Ok(())) };
            filled.map_err(|error| Error::request("checksum", error))
        };
        let filled = parallel::map(layout.jobs(), run)?;
        Ok(Digest::of(&seal(&layout, filled)?))
    };
    if is_short { run_inline(work) } else { run_blocking(work).await }
}

/// A small archive in new memory, and its digest.
pub(super) fn to_bytes(layout: &Layout) -> Result<(Bytes, Digest)> {
    let len = usize::try_from(layout.file_len()).expect("it is at most `INLINE_MAX_BYTES`");
    let mut archive = vec![0; len];
    let digest = run_inline(|| write_parts(|lens| split(&mut archive, lens), layout, 0))?;
    Ok((archive.into(), digest))
}

fn draft(dict: &StateDict, options: &PutOptions, fine_chunks: bool) -> tssd_format::Result<Draft> {
    let mut format = Options::new().compress(options.compression);
    if fine_chunks {
        format = format.chunks(ChunkPolicy::Fine);
    }
    if options.digests {
        format = format.digests();
    }
    for (name, value) in &options.attrs {
        format = format.attr(name, value.clone());
    }
    if options.allow_opaque {
        format = format.allow_opaque();
    }
    let divergent = match options.divergent {
        Divergent::Error => None,
        Divergent::Lowest => Some("lowest"),
        Divergent::Keep => Some("keep"),
    };
    if let Some(divergent) = divergent {
        format = format.attr(DIVERGENT_ATTR, AttrValue::Text(divergent.into()));
    }
    match options.replicas {
        Replicas::All => Draft::new(dict, &format),
        Replicas::Primary => Draft::new(&without_replicas(dict)?, &format),
    }
}

/// Compresses on all cores, then places the storages.
fn place(draft: Draft, jobs: Vec<CompressJob>) -> Result<Layout> {
    let failed = |error| Error::request("compression", error);
    let packed = parallel::map(jobs, |job| job.run()).map_err(failed)?;
    draft.into_layout(packed).map_err(failed)
}

/// Writes an archive to parts of the requested lengths. Returns its digest.
fn write_parts<'a>(
    parts: impl FnOnce(&[u64]) -> Vec<Box<dyn Part + 'a>>,
    layout: &Layout,
    ahead: usize,
) -> Result<Digest> {
    let len = |job: &WriteJob| job.range().end - job.range().start;
    let jobs = layout.jobs();
    let mut lens: Vec<u64> = jobs.iter().map(len).collect();
    lens.push(layout.file_len() - layout.index_off());
    let mut parts = parts(&lens);
    let mut tail_part = parts.pop().expect("the tail is a part");
    let work = jobs.iter().zip(parts).collect();
    let begin = |(job, part): &mut (&WriteJob, Box<dyn Part + 'a>)| part.begin(job);
    let filled = parallel::map_ahead(work, (ahead, begin), |(job, mut part)| part.fill(job))?;
    let tail = seal(layout, filled)?;
    tail_part.write(&tail)?;
    Ok(Digest::of(&tail))
}

fn seal(layout: &Layout, filled: Vec<JobChecksums>) -> Result<Vec<u8>> {
    layout.seal(filled).map_err(|error| Error::request("index", error))
}
