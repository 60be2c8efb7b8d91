//! Bases: archives of an earlier version, from which a host gets later ones as differences.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tssd_format::Blob;

use crate::control::layout::ArchiveName;
use crate::daemon::chunk_verifier::{gather, total_bytes};
use crate::net::wire::Range;
use crate::shm::{Pool, Retain};

/// Time for which the archives of a version are retained after its deletion, if no put needs the memory.
const RETENTION: Duration = Duration::from_hours(1);

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
}

impl DeltaBase for HeldArchive {
    fn name(&self) -> &str {
        &self.name
    }

    fn read(&self, ranges: &[Range]) -> Option<Bytes> {
        let blob = &**self.blob.as_ref()?;
        total_bytes(ranges, blob.size().ok()?).ok()?;
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
    let archive = ArchiveName::parse(name)?;
    let alike = archives.into_iter().filter(|(_, other_len)| *other_len == len);
    let earlier = alike.filter_map(|(other, _)| {
        let parsed = ArchiveName::parse(&other)?;
        let is_earlier = parsed.prefix() == archive.prefix()
            && parsed.role() == archive.role()
            && parsed.position < archive.position;
        is_earlier.then_some((parsed.position, other.clone()))
    });
    Some(earlier.max()?.1)
}

/// Has the archives of the version retained that is deleted last of a key, if `name` is an archive of that key.
pub(crate) fn retain_versions(pool: &Pool, name: &str, retain: Retain) {
    if let Some(archive) = ArchiveName::parse(name) {
        pool.retain_deleted(&archive.prefix(), retain, Instant::now() + RETENTION);
    }
}
