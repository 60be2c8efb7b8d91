//! Bases: archives of an earlier version, from which a host gets later ones as differences.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tssd_format::Blob;

use crate::control::layout::ArchiveName;
use crate::daemon::chunk_verifier::gather;
use crate::net::wire::Range;
use crate::shm::{Pool, Retain};

/// Time for which the archives of a version are retained after its deletion, if no put needs the memory.
pub(crate) const RETENTION: Duration = Duration::from_hours(1);

/// An archive of an earlier version, or a part of one. It keeps its memory until the drop.
pub(crate) trait DeltaBase: Send + Sync {
    /// Returns the name of the archive.
    fn name(&self) -> &str;

    /// Returns the bytes of ranges, concatenated. `None` if some are not here.
    fn read(&self, ranges: &[Range]) -> Option<Bytes>;
}

/// An archive in a pool that does not lose its memory.
pub(crate) struct HeldArchive {
    name: String,
    /// `None` after the drop has begun, and if there is no such archive in host memory.
    blob: Option<Arc<dyn Blob>>,
    pool: Arc<Pool>,
}

impl HeldArchive {
    /// Opens an archive that is stored or retained in host memory.
    pub(crate) fn open(pool: &Arc<Pool>, name: &str) -> Option<Self> {
        // Held before it is opened: memory that is not held may be reused.
        pool.hold(&[name.to_owned()]);
        let opened = pool.open_retained(name).ok().flatten();
        let blob = opened.map(|archive| archive.blob).filter(|blob| blob.bytes().is_some());
        let archive = Self { name: name.to_owned(), blob, pool: pool.clone() };
        archive.blob.is_some().then_some(archive)
    }

    /// Returns all bytes of the archive.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        self.blob.as_ref()?.bytes().map(|bytes| &bytes[..])
    }
}

impl DeltaBase for HeldArchive {
    fn name(&self) -> &str {
        &self.name
    }

    fn read(&self, ranges: &[Range]) -> Option<Bytes> {
        let blob = &**self.blob.as_ref()?;
        let len = blob.size().ok()?;
        if ranges.iter().any(|range| range.total_bytes(len).is_none()) {
            return None;
        }
        Some(gather(blob, ranges).ok()?.into_bytes())
    }
}

impl Drop for HeldArchive {
    fn drop(&mut self) {
        self.blob = None;
        self.pool.release(&[std::mem::take(&mut self.name)]);
    }
}

/// Returns the name of the newest earlier archive of the same writer and key among archives with their lengths.
///
/// It has the same length `len`.
pub(crate) fn newest_earlier(
    name: &str,
    len: u64,
    archives: impl IntoIterator<Item = (String, u64)>,
) -> Option<String> {
    let position = ArchiveName::parse(name)?.position;
    let earlier = alike(name, len, archives).filter(|(other, _)| *other < position);
    Some(earlier.max()?.1)
}

/// As [`newest_earlier`], but returns the oldest later archive.
pub(crate) fn oldest_later(
    name: &str,
    len: u64,
    archives: impl IntoIterator<Item = (String, u64)>,
) -> Option<String> {
    let position = ArchiveName::parse(name)?.position;
    let later = alike(name, len, archives).filter(|(other, _)| *other > position);
    Some(later.min()?.1)
}

/// Returns the archives of the writer and the key of `name` that have a length, with their positions.
fn alike(
    name: &str,
    len: u64,
    archives: impl IntoIterator<Item = (String, u64)>,
) -> impl Iterator<Item = ((u32, u64), String)> {
    let archives = archives.into_iter().filter(move |(_, other_len)| *other_len == len);
    archives.filter_map(move |(other, _)| {
        let (archive, parsed) = (ArchiveName::parse(name)?, ArchiveName::parse(&other)?);
        let is_alike = parsed.prefix() == archive.prefix() && parsed.role() == archive.role();
        is_alike.then_some((parsed.position, other.clone()))
    })
}

/// Has the archives of the version retained that is deleted last of a key, if `name` is an archive of that key.
pub(crate) fn retain_versions(pool: &Pool, name: &str, retain: Retain) {
    if let Some(archive) = ArchiveName::parse(name) {
        pool.retain_deleted(&archive.prefix(), retain, Instant::now() + RETENTION);
    }
}
