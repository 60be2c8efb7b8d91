//! The archive of a put: its layout, its bytes and its digest.

use bytes::Bytes;
use tssd_format::{
    AttrValue, ChunkPolicy, CompressJob, Draft, JobChecksums, Layout, Options, StateDict, WriteJob,
};

use super::replicas::without_replicas;
use super::{PutOptions, Replicas};
use crate::blob::{Part, split};
use crate::control::Contribution;
use crate::convert::to_usize;
use crate::error::{Error, Result};
use crate::io::exec::{INLINE_MAX_BYTES, run_blocking, run_inline};
use crate::io::parallel;
use crate::key::Key;
use crate::ledger::{ArchiveDigest, Durability};
use crate::merge::{DIVERGENT_ATTR, DivergencePolicy};
use crate::route::Transport;

/// Number of jobs whose copies from GPUs begin before the first job is checksummed.
///
/// The jobs copy 32 MiB, which takes a millisecond. A stream with much more work blocks its caller.
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
        .map_err(|error| Error::from_request(format_args!("key `{key}`"), error))?;
    let jobs = draft.jobs();
    if jobs.is_empty() {
        place(draft, jobs)
    } else {
        run_blocking(move || place(draft, jobs)).await
    }
}

/// Returns whether all bytes of an archive are in memory of this process.
pub(super) fn is_in_memory(layout: &Layout) -> bool {
    layout.blobs().next().is_none()
}

/// Writes an archive to a contribution. Returns its digest.
pub(super) async fn write(
    mut contribution: Box<dyn Contribution>,
    layout: Layout,
) -> Result<(Box<dyn Contribution>, Result<ArchiveDigest>)> {
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
pub(super) async fn digest(layout: Layout, has_checksums: bool) -> Result<ArchiveDigest> {
    let is_short = is_in_memory(&layout) && layout.file_len() <= INLINE_MAX_BYTES;
    let work = move || {
        let run = |job: WriteJob| {
            let checksums =
                if has_checksums { job.checksum() } else { job.for_each_piece(|_, _| Ok(())) };
            checksums.map_err(|error| Error::from_request("checksum", error))
        };
        let checksums = parallel::map(layout.jobs(), run)?;
        Ok(ArchiveDigest::compute(&seal(&layout, checksums)?))
    };
    if is_short { run_inline(work) } else { run_blocking(work).await }
}

/// Returns a small archive in new memory, and its digest.
pub(super) fn to_bytes(layout: &Layout) -> Result<(Bytes, ArchiveDigest)> {
    let len = to_usize(layout.file_len());
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
    let divergent = match options.on_divergence {
        DivergencePolicy::Error => None,
        DivergencePolicy::Lowest => Some("lowest"),
        DivergencePolicy::Keep => Some("keep"),
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
    let failed = |error| Error::from_request("compression", error);
    let compressed = parallel::map(jobs, |job| job.run()).map_err(failed)?;
    draft.into_layout(compressed).map_err(failed)
}

/// Writes an archive to parts of the requested lengths. Returns its digest.
fn write_parts<'a>(
    parts: impl FnOnce(&[u64]) -> Vec<Box<dyn Part + 'a>>,
    layout: &Layout,
    ahead: usize,
) -> Result<ArchiveDigest> {
    let len = |job: &WriteJob| job.range().end - job.range().start;
    let jobs = layout.jobs();
    let mut lens: Vec<u64> = jobs.iter().map(len).collect();
    lens.push(layout.file_len() - layout.index_off());
    let mut parts = parts(&lens);
    let mut tail_part = parts.pop().expect("the tail is a part");
    let work = jobs.iter().zip(parts).collect();
    let begin = |(job, part): &mut (&WriteJob, Box<dyn Part + 'a>)| part.begin(job);
    let checksums =
        parallel::map_with_lookahead(work, ahead, begin, |(job, mut part)| part.write_job(job))?;
    let tail = seal(layout, checksums)?;
    tail_part.write(&tail)?;
    Ok(ArchiveDigest::compute(&tail))
}

fn seal(layout: &Layout, checksums: Vec<JobChecksums>) -> Result<Vec<u8>> {
    layout.seal(checksums).map_err(|error| Error::from_request("index", error))
}
