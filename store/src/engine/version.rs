//! One visible version, open for reading.

mod contents;
mod held;

use std::any::Any;
use std::collections::BTreeSet;
use std::collections::btree_map::{self, BTreeMap};
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use tssd_format::{Blob, Error as FormatError, RangeDecoder, Runs, StorageReference, copy, zeroed};

use crate::blob::{
    OpenArchive, RangeCopy, RangeReader, RemoteArchive, StreamingVerifier, VerifyMode,
};
use crate::control::LocatedVersion;
use crate::convert::{to_u64, to_usize};
use crate::error::{Error, ErrorKind, Result};
use crate::io::cow_map::{CowBuffer, LeasedCowMap};
use crate::io::local_archive::LocalArchive;
use crate::io::parallel;
use crate::plan::{SingleCopy, StorageId};
use crate::route::Route;

pub(crate) use self::contents::{Contents, RING_ATTR, ReadCounters};

/// Minimum length of an archive for a copy-on-write map. A shorter one is copied faster than mapped.
const COW_MIN_BYTES: u64 = 256 << 10;

/// A version that is open for reading. It stays readable if the ledger retires or deletes it.
#[derive(Clone)]
pub(crate) struct OpenVersion {
    contents: Arc<Contents>,
    /// The archives, in the order of the manifest.
    archives: Arc<[OpenArchive]>,
    /// Whether an archive is remote.
    has_remote_archives: bool,
    /// The bytes of each archive in memory, with the lease. Views are slices of them.
    leased: Arc<[OnceLock<Option<Bytes>>]>,
    lease: Arc<dyn Any + Send + Sync>,
    route: Route,
    /// Span of the get that opened the version.
    span: tracing::Span,
}

impl OpenVersion {
    /// Opens a located version. `known` is reused if it has the contents of the same version.
    pub(crate) fn open(located: LocatedVersion, known: Option<Arc<Contents>>) -> Result<Self> {
        // A rollback gives a version another position.
        let position = located.position;
        let known = known.filter(|known| {
            (known.id, known.epoch, known.number) == (located.id, position.epoch, position.number)
        });
        let is_known = known.is_some();
        let contents = match known {
            Some(known) => known,
            None => Arc::new(Contents::read(&located)?),
        };
        let mut archives = Vec::with_capacity(located.archives.len());
        for shard in contents.manifest.shards() {
            let archive = located.archives.get(&shard.name).ok_or_else(|| {
                let name = &shard.name;
                Error::new(
                    ErrorKind::Corrupt,
                    format_args!("{}: `{name}` is gone", contents.name()),
                )
            })?;
            // An archive that only distributed leaves are in is verified when a storage in it is read for the first time.
            if !is_known && contents.is_verified_at_open(archives.len()) {
                shard
                    .verify(&archive.to_blob())
                    .map_err(|error| Error::from_format(contents.name(), error))?;
            }
            archives.push(archive.clone());
        }
        let span = tracing::Span::current();
        Ok(Self {
            contents,
            leased: archives.iter().map(|_| OnceLock::new()).collect(),
            has_remote_archives: archives.iter().any(|archive| archive.remote().is_some()),
            archives: archives.into(),
            lease: located.lease,
            route: located.route,
            span,
        })
    }

    /// Returns the span for events about reads from the version.
    pub(crate) fn span(&self) -> &tracing::Span {
        &self.span
    }

    /// Returns the route of the bytes.
    pub(crate) fn route(&self) -> &Route {
        &self.route
    }

    /// Returns the index of the version and the state of its verification.
    pub(crate) fn contents(&self) -> &Arc<Contents> {
        &self.contents
    }

    /// Returns the reader of the remote archives, if there are any.
    pub(crate) fn range_reader(&self) -> Option<&Arc<dyn RangeReader>> {
        self.archives.iter().find_map(|archive| archive.remote().map(|remote| &remote.reader))
    }

    /// Describes the storages of distributed leaves among these, before they are read.
    ///
    /// Reads their checksums, or the index of their archive if only that has their places.
    pub(crate) fn load_held(&self, storages: impl Iterator<Item = StorageId>) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let missing: Vec<_> = self.held.missing(storages).into_iter().collect();
        parallel::map(missing, |(shard, storages)| {
            let blob = self.archives[to_usize(u64::from(shard))].to_blob();
            self.held.load(shard, &blob, &storages)
        })
        .map(drop)
        .map_err(|error| Error::from_format(self.name(), error))
    }

    fn archive(&self, reference: &StorageReference) -> &OpenArchive {
        &self.archives[to_usize(u64::from(reference.shard))]
    }

    /// Returns the archive with the raw bytes of a storage, and the offset where they begin.
    ///
    /// Returns `None` if the storage is compressed.
    pub(crate) fn raw_archive(&self, storage: StorageId) -> Option<(&dyn Blob, u64)> {
        let chunks = self.chunks(storage);
        let reference = chunks.reference();
        let is_raw = reference.compressed_layout.is_none();
        is_raw.then(|| (self.archive(reference).blob(), reference.offset))
    }

    /// Returns the remote archive of a storage if the storage is raw. Then ranges of it can be requested.
    pub(crate) fn remote_archive(&self, storage: StorageId) -> Option<&RemoteArchive> {
        if !self.has_remote_archives {
            return None;
        }
        let chunks = self.chunks(storage);
        let reference = chunks.reference();
        self.archive(reference).remote().filter(|_| reference.compressed_layout.is_none())
    }

    /// Returns whether the raw bytes of a storage are in the memory of this process.
    pub(crate) fn is_in_memory(&self, storage: StorageId) -> bool {
        self.raw_archive(storage).is_some_and(|(blob, _)| blob.bytes().is_some())
    }

    /// Adds the range copies that fill a copy from a remote storage.
    ///
    /// This process verifies whole chunks. The remote reader verifies parts of chunks.
    pub(crate) fn add_range_copies(
        &self,
        remote: &RemoteArchive,
        copy: SingleCopy<'_>,
        unverified: bool,
        range_copies: &mut Vec<RangeCopy>,
    ) {
        let chunks = self.chunks(copy.storage);
        let reference = chunks.reference();
        let range_copy = |source: u64, target: u64, runs: Runs, mode: VerifyMode| RangeCopy {
            blob: remote.blob.clone(),
            source: reference.offset + source,
            target,
            runs,
            verify: if unverified { VerifyMode::Skip } else { mode },
        };
        let part = || VerifyMode::PartialChunks(reference.clone());
        if !copy.runs.loops().is_empty() {
            range_copies.push(range_copy(
                copy.source_offset,
                copy.target_offset,
                copy.runs.clone(),
                part(),
            ));
            return;
        }
        let range = copy.source_offset..copy.source_offset + copy.runs.run_bytes();
        let whole = reference.whole_chunks(&range);
        for (wanted, mode) in [
            (range.start..whole.start, part()),
            (whole.clone(), VerifyMode::WholeChunks(reference.clone())),
            (whole.end..range.end, part()),
        ] {
            let (target, len) =
                (copy.target_offset + (wanted.start - range.start), wanted.end - wanted.start);
            if len > 0 {
                range_copies.push(range_copy(wanted.start, target, Runs::contiguous(len), mode));
            }
        }
    }

    /// Returns the archives that contain storages, by their names in the manifest.
    pub(crate) fn archives_of(
        &self,
        storages: impl Iterator<Item = StorageId>,
    ) -> BTreeSet<String> {
        let shard = |storage| match storage {
            StorageId::Own(_) => self.chunks(storage).reference().shard,
            StorageId::Held { group, device } => self.held.shard(group, device),
        };
        let shards: BTreeSet<u32> = storages.map(shard).collect();
        let files = self.manifest.shards();
        shards.into_iter().map(|shard| files[to_usize(u64::from(shard))].name.clone()).collect()
    }

    /// As [`OpenVersion::bytes`], but the bytes hold the lease of the version.
    pub(crate) fn view(
        &self,
        storage: StorageId,
        range: Range<u64>,
        unverified: bool,
    ) -> Result<Bytes> {
        let chunks = self.chunks(storage);
        let reference = chunks.reference();
        let leased =
            self.leased_archive(reference).filter(|_| reference.compressed_layout.is_none());
        let Some(leased) = leased else {
            let bytes = self.bytes(storage, range, unverified)?;
            // Bytes from GPU memory are a copy, which needs no lease.
            let is_copy = !self.archive(reference).has_checksums();
            return Ok(if is_copy { bytes } else { self.with_lease(bytes) });
        };
        if !unverified {
            self.verify_chunks(storage, reference.chunks(&range))?;
        }
        let (start, end) = (reference.offset + range.start, reference.offset + range.end);
        Ok(leased.slice(to_usize(start)..to_usize(end)))
    }

    fn leased_archive(&self, reference: &StorageReference) -> Option<&Bytes> {
        let leased =
            || self.archive(reference).blob().bytes().cloned().map(|all| self.with_lease(all));
        self.leased[to_usize(u64::from(reference.shard))].get_or_init(leased).as_ref()
    }

    fn with_lease(&self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(View { bytes, _lease: self.lease.clone() })
    }

    /// Returns storages in copy-on-write memory of one reader.
    ///
    /// `None` for a storage that is compressed, remote, or not in a file.
    pub(crate) fn cow_buffers(&self, storages: &[u32]) -> Result<Vec<Option<CowBuffer>>> {
        let mut maps: BTreeMap<u32, Option<(Arc<LeasedCowMap>, u64)>> = BTreeMap::new();
        let mut private = Vec::with_capacity(storages.len());
        for storage in storages {
            let chunks = self.chunks(StorageId::Own(*storage));
            let reference = chunks.reference();
            let map = match maps.entry(reference.shard) {
                btree_map::Entry::Occupied(existing) => existing.into_mut(),
                btree_map::Entry::Vacant(vacant) => vacant.insert(self.cow_map(reference.shard)?),
            };
            private.push(map.as_ref().filter(|_| reference.compressed_layout.is_none()).and_then(
                |(map, start)| {
                    let range = reference.offset..reference.offset + reference.len;
                    map.range(to_usize(start + range.start)..to_usize(start + range.end))
                },
            ));
        }
        Ok(private)
    }

    /// Maps an archive copy-on-write. Returns the map, and the byte of the map where the archive begins.
    fn cow_map(&self, shard: u32) -> Result<Option<(Arc<LeasedCowMap>, u64)>> {
        let archive = &self.archives[to_usize(u64::from(shard))];
        let is_large = |local: &&LocalArchive| {
            local.blob.bytes().is_some_and(|bytes| to_u64(bytes.len()) >= COW_MIN_BYTES)
        };
        let local = archive.local().filter(is_large);
        let Some((local, (maps, start))) =
            local.and_then(|local| Some((local, local.maps.as_ref()?)))
        else {
            return Ok(None);
        };
        let map = maps.acquire().map_err(|error| Error::io(self.name(), error))?;
        let lease = (local.blob.clone(), self.lease.clone());
        Ok(Some((LeasedCowMap::new(map, lease), *start)))
    }

    /// Returns raw bytes of a storage, verified unless `unverified`.
    ///
    /// The bytes are a view if the archive is in memory and the storage is raw.
    pub(crate) fn bytes(
        &self,
        storage: StorageId,
        range: Range<u64>,
        unverified: bool,
    ) -> Result<Bytes> {
        let chunks = self.chunks(storage);
        let reference = chunks.reference();
        let blob = self.archive(reference).blob();
        let chunks = reference.chunks(&range);
        let failed = |error: FormatError| Error::from_format(self.name(), error);
        if reference.compressed_layout.is_some() {
            let mut decoder = RangeDecoder::new(reference, range).map_err(failed)?;
            for chunk in chunks {
                let stored = self.verified_chunk(storage, chunk)?;
                let added = decoder.add_chunk(chunk, &stored);
                added.map_err(|error| failed(error.with_path(self.storage_fqn(storage))))?;
            }
            return Ok(decoder.finish());
        }
        if let Some(mapped) = blob.bytes() {
            if !unverified {
                self.verify_chunks(storage, chunks)?;
            }
            return Ok(mapped.slice(
                to_usize(reference.offset + range.start)..to_usize(reference.offset + range.end),
            ));
        }
        // Whole chunks are read, because only whole chunks can be verified.
        let (first, last) =
            (reference.chunk(chunks.start).start, reference.chunk(chunks.end).start);
        let mut read = zeroed(to_usize(last - first)).map_err(failed)?;
        blob.read_exact_at(&mut read, reference.offset + first)
            .map_err(|error| Error::io(self.name(), error))?;
        if self.archive(reference).has_checksums() {
            for (chunk, bytes) in chunks.zip(read.chunks(to_usize(reference.chunk_size.bytes()))) {
                self.verify_chunk(storage, chunk, bytes)?;
            }
        }
        Ok(Bytes::from(read).slice(to_usize(range.start - first)..to_usize(range.end - first)))
    }

    /// Returns raw bytes of a storage from which runs are copied.
    pub(crate) fn window(
        &self,
        storage: StorageId,
        range: Range<u64>,
        unverified: bool,
    ) -> Result<Window<'_>> {
        let chunks = self.chunks(storage);
        let reference = chunks.reference();
        let start = range.start;
        let mapped = self.archive(reference).blob().bytes();
        let in_place = reference.compressed_layout.is_none() && mapped.is_some();
        let bytes = self.bytes(storage, range.clone(), unverified || in_place)?;
        // Bytes that were read or decoded are verified already.
        let verified = if in_place && !unverified { 0..0 } else { range };
        Ok(Window { version: self, storage, start, bytes, verified })
    }

    /// Copies raw bytes of a storage, verified unless `unverified`.
    ///
    /// Chunks that are in memory, and in the range as a whole, are verified during the copy. So `target` may contain
    /// unverified bytes after an error.
    pub(crate) fn copy(
        &self,
        storage: StorageId,
        range: Range<u64>,
        target: &mut [u8],
        unverified: bool,
    ) -> Result<()> {
        let all_chunks = self.chunks(storage);
        let reference = all_chunks.reference();
        let blob = self.archive(reference).blob();
        let mapped = blob.bytes().filter(|_| reference.compressed_layout.is_none());
        let Some(mapped) = mapped else {
            target.copy_from_slice(&self.bytes(storage, range, unverified)?);
            return Ok(());
        };
        let archive_offset = |at: u64| to_usize(reference.offset + at);
        if unverified {
            copy(&mapped[archive_offset(range.start)..archive_offset(range.end)], target);
            return Ok(());
        }
        let chunks = reference.chunks(&range);
        let whole = reference.whole_chunks(&range);
        // Chunks to verify during the copy: those that are not verified yet, and are in the range as a whole.
        let is_inline = |chunk: u64| {
            let place = reference.chunk(chunk);
            let is_whole = whole.start <= place.start && place.end <= whole.end;
            is_whole && !all_chunks.is_verified(chunk)
        };
        let (mut rest, mut next) = (target, chunks.start);
        while next < chunks.end {
            let (first, is_first_inline) = (next, is_inline(next));
            next = (first + 1..chunks.end)
                .find(|it| is_inline(*it) != is_first_inline)
                .unwrap_or(chunks.end);
            let [start, end] = [reference.chunk(first).start, reference.chunk(next - 1).end]
                .map(|at| at.clamp(range.start, range.end));
            let (target, tail) = rest.split_at_mut(to_usize(end - start));
            rest = tail;
            let source = &mapped[archive_offset(start)..archive_offset(end)];
            if !is_first_inline {
                self.verify_chunks(storage, first..next)?;
                copy(source, target);
                continue;
            }
            let mut verifier = StreamingVerifier::new(reference, start);
            verifier.copy_and_update(source, target);
            self.count(ReadCounters { verified: end - start, received: 0 });
            verifier.finish().map_err(|chunk| self.corrupt(storage, chunk))?;
            all_chunks.record_verified(first..next);
        }
        Ok(())
    }

    fn verify_chunks(&self, storage: StorageId, mut chunks: Range<u64>) -> Result<()> {
        chunks.try_for_each(|chunk| self.verified_chunk(storage, chunk).map(drop))
    }

    /// Returns the stored bytes of a chunk. Chunks in memory are verified once.
    fn verified_chunk(&self, storage: StorageId, chunk: u64) -> Result<Bytes> {
        let chunks = self.chunks(storage);
        let reference = chunks.reference();
        let blob = self.archive(reference).blob();
        let place = reference.stored_chunk(chunk);
        if let Some(mapped) = blob.bytes() {
            let stored = mapped.slice(to_usize(place.start)..to_usize(place.end));
            if !chunks.is_verified(chunk) {
                self.verify_chunk(storage, chunk, &stored)?;
                chunks.record_verified(chunk..chunk + 1);
            }
            return Ok(stored);
        }
        let mut stored = vec![0; to_usize(place.end - place.start)];
        blob.read_exact_at(&mut stored, place.start)
            .map_err(|error| Error::io(self.name(), error))?;
        if self.archive(reference).has_checksums() {
            self.verify_chunk(storage, chunk, &stored)?;
        }
        Ok(stored.into())
    }
}

/// A range of a storage, whose chunks are verified on demand.
///
/// A chunk is verified before the first run from it is copied: then it is in the CPU cache.
pub(crate) struct Window<'a> {
    version: &'a OpenVersion,
    storage: StorageId,
    /// Offset of the bytes in the storage.
    start: u64,
    pub(crate) bytes: Bytes,
    /// The range of the storage that needs no verification any longer.
    verified: Range<u64>,
}

impl Window<'_> {
    /// Verifies the chunks that contain a range of the bytes.
    pub(crate) fn verify(&mut self, range: &Range<u64>) -> Result<()> {
        let wanted = self.start + range.start..self.start + range.end;
        if wanted.start >= self.verified.start && wanted.end <= self.verified.end {
            return Ok(());
        }
        let all_chunks = self.version.chunks(self.storage);
        let reference = all_chunks.reference();
        let chunks = reference.chunks(&wanted);
        self.version.verify_chunks(self.storage, chunks.clone())?;
        if !chunks.is_empty() {
            self.verified =
                reference.chunk(chunks.start).start..reference.chunk(chunks.end - 1).end;
        }
        Ok(())
    }
}

/// Bytes of a view, and the lease that holds them.
struct View {
    bytes: Bytes,
    _lease: Arc<dyn Any + Send + Sync>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Deref for OpenVersion {
    type Target = Contents;

    fn deref(&self) -> &Contents {
        &self.contents
    }
}
