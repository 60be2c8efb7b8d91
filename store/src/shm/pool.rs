//! The segments of a daemon: their writers, their blobs and their reuse.
//!
//! A segment belongs to one writer, which has it mapped. It is recycled with its pages when all readers have returned
//! it. If a reader was lost instead, the segment is retired: the daemon closes it, and its bytes count until the last
//! process that has it mapped unmaps it or dies.

mod blob_writer;
mod inner;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;

pub(crate) use crate::shm::pool::blob_writer::BlobWriter;

use self::inner::{Backing, Inner, Segment, Writer};
use super::extents::Extents;
use super::segment::{self, ReadMap, SLAB_BYTES, WriteMap};
use crate::convert::to_usize;
use crate::device::DeviceArchive;
use crate::io::local_archive::LocalArchive;
use crate::io::sync::{Lock, MutexGuard, Notify, mpsc, select};
use crate::status::MemoryStatus;

/// ID of a segment in its daemon.
pub(crate) type SegmentId = u64;

/// ID of a connection in its daemon.
pub(crate) type PeerId = u64;

/// Location of a blob in the host memory of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Span {
    pub(crate) segment: SegmentId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Location of an archive in the memory of a GPU.
///
/// The archive has a device segment of its own, in which each byte has its offset in the file. Only the host part is in
/// host memory: head, index and trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct DeviceSpan {
    pub(crate) host_part: Span,
    pub(crate) device_segment: SegmentId,
    /// Length of the archive in bytes.
    pub(crate) len: u64,
}

/// The segment that a peer must unmap.
pub(crate) type Unmap = SegmentId;

/// Alignment of blobs in bytes.
const PAGE: u64 = 4096;

/// Granularity of the segments of writers, in bytes, so that an archive that grows a little still fits.
const SEGMENT_GRANULARITY: u64 = 2 << 20;

/// Maximum number of device segments per writer: each uses a descriptor of the daemon.
const MAX_DEVICE_SEGMENTS: usize = 4096;

/// The segments of the writers and of the daemon, with a limit on their bytes.
pub(crate) struct Pool {
    inner: Lock<Inner>,
    limit: u64,
    /// Notified whenever bytes become free.
    pub(crate) freed: Notify,
    /// Notified when a blob is retained, or the hold of a retained one ends.
    has_retained: Notify,
}

/// A segment that a writer may write.
pub(crate) struct AcquiredSegment {
    pub(crate) segment: SegmentId,
    pub(crate) capacity: u64,
    /// The memory, unless the writer has mapped it already.
    pub(crate) memory: Option<OwnedFd>,
}

/// Memory of a segment, for a reader that has not mapped it yet.
pub(crate) struct SegmentMemory {
    pub(crate) memory: OwnedFd,
    pub(crate) capacity: u64,
    /// The UUID of the GPU whose memory it is. None for host memory.
    pub(crate) device: Option<Arc<str>>,
}

/// A cache whose items can be evicted and restored.
#[async_trait]
pub(crate) trait Evictor: Sync {
    /// Evicts one item. Returns false if there is no evict candidate.
    async fn evict_one(&self) -> bool;
}

/// Which deleted blobs are retained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Retain {
    /// Those after which no other folder with the prefix has blobs.
    Last,
    /// All.
    Superseded,
}

/// Returns the bytes of a slab that a blob of `len` bytes takes.
fn slab_bytes(len: u64) -> u64 {
    len.max(1).next_multiple_of(PAGE)
}

/// The error of a full pool: the request does not fit now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolExhausted {
    pub(crate) wanted: u64,
    pub(crate) used: u64,
    pub(crate) limit: u64,
}

impl fmt::Display for PoolExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, used, limit } = self;
        write!(f, "{wanted} bytes are wanted, {used} of {limit} are in use")
    }
}

impl Pool {
    pub(crate) fn new(limit: u64) -> Self {
        Self { inner: Lock::default(), limit, freed: Notify::new(), has_retained: Notify::new() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Adds a peer. The receiver yields the segments that the peer must unmap.
    pub(crate) fn add_peer(&self, peer: PeerId) -> mpsc::UnboundedReceiver<Unmap> {
        let (unmaps, unmapped) = mpsc::unbounded_channel();
        self.inner().peers.insert(peer, unmaps);
        unmapped
    }

    /// Runs work that needs memory, and retries it whenever memory becomes free.
    ///
    /// It returns when the work succeeds, or when `cancelled` completes. A request above the limit is not retried.
    /// Evict candidates are evicted before the call waits.
    pub(crate) async fn with_memory<T>(
        self: &Arc<Self>,
        cancelled: impl Future<Output = ()>,
        evictor: &dyn Evictor,
        mut work: impl FnMut(&Arc<Self>) -> io::Result<Result<T, PoolExhausted>>,
    ) -> io::Result<Result<T, PoolExhausted>> {
        let mut cancelled = std::pin::pin!(cancelled);
        loop {
            // Register first: memory that becomes free during the attempt counts too.
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            let exhausted = match work(self)? {
                Err(exhausted) if exhausted.wanted <= exhausted.limit => exhausted,
                result => return Ok(result),
            };
            if evictor.evict_one().await {
                continue;
            }
            select! {
                () = freed => {}
                () = &mut cancelled => return Ok(Err(exhausted)),
            }
        }
    }

    /// Acquires a segment for a writer: an unused one of its own, else a new one.
    pub(crate) fn acquire_segment(
        &self,
        peer: PeerId,
        len: u64,
    ) -> io::Result<Result<AcquiredSegment, PoolExhausted>> {
        let mut inner = self.inner();
        let prepared = inner.acquire(
            len,
            self.limit,
            |segment| segment.belongs_to(peer),
            || Writer::Peer(peer),
        )?;
        let (id, is_new) = match prepared {
            Ok(prepared) => prepared,
            Err(exhausted) => return Ok(Err(exhausted)),
        };
        let segment = &inner.segments[&id];
        let memory = if is_new { Some(segment.host()?.try_clone()?) } else { None };
        Ok(Ok(AcquiredSegment { segment: id, capacity: segment.capacity, memory }))
    }

    /// Acquires a device segment for a writer: an unused one of its own, else a new one.
    ///
    /// The writer allocates the memory of a new one and [attaches](Pool::attach_device_memory) it. Returns none if the writer has too
    /// many device segments.
    pub(crate) fn acquire_device_segment(
        &self,
        peer: PeerId,
        uuid: &str,
        len: u64,
    ) -> Option<AcquiredSegment> {
        let mut inner = self.inner();
        let capacity = len.max(1).checked_next_multiple_of(SEGMENT_GRANULARITY)?;
        let is_own = |segment: &Segment| segment.belongs_to(peer) && segment.device() == Some(uuid);
        let id = if let Some(warm) = inner.find_unused(len, capacity, is_own) {
            warm
        } else {
            // Retire segments that have not fit twice. Once is no reason: versions of several sizes may alternate.
            let unfit = inner.segments.iter_mut().map(|(id, segment)| (*id, segment));
            let unfit = unfit.filter(|(_, segment)| is_own(segment) && segment.is_unused());
            let unfit_twice = unfit.filter_map(|(id, segment)| {
                std::mem::replace(&mut segment.is_unfit, true).then_some(id)
            });
            for id in unfit_twice.collect::<Vec<_>>() {
                inner.retire(id);
            }
            let all =
                inner.segments.values().filter(|it| it.belongs_to(peer) && it.device().is_some());
            if all.count() >= MAX_DEVICE_SEGMENTS {
                return None;
            }
            let memory = Backing::Device { uuid: uuid.into(), memory: None };
            inner.add(Segment::new(memory, capacity, Writer::Peer(peer)))
        };
        let segment = inner.segments.get_mut(&id).expect("it was just found or made");
        (segment.is_acquired, segment.is_unfit) = (true, false);
        Some(AcquiredSegment { segment: id, capacity: segment.capacity, memory: None })
    }

    /// Attaches the memory of a device segment, from the writer that has acquired it.
    ///
    /// The daemon cannot verify the memory: the process that maps it does.
    pub(crate) fn attach_device_memory(
        &self,
        peer: PeerId,
        id: SegmentId,
        new_memory: OwnedFd,
    ) -> io::Result<()> {
        let mut inner = self.inner();
        let segment = inner.segments.get_mut(&id).filter(|segment| segment.is_acquired_by(peer));
        // A writer that was interrupted attaches other memory on its retry. No reader has the earlier one yet.
        let segment = segment.filter(|segment| segment.readers.is_empty());
        let earlier = match segment.map(|segment| &mut segment.memory) {
            Some(Backing::Device { memory, .. }) => memory.replace(new_memory),
            _ => return Err(io::Error::other("no memory of a GPU is wanted for that segment")),
        };
        drop(inner);
        // To close the descriptor may take a while: do it without the lock.
        drop(earlier);
        Ok(())
    }

    /// Acquires a segment for the daemon itself, to write a blob of `len` bytes.
    pub(crate) fn begin_blob(
        self: &Arc<Self>,
        len: u64,
    ) -> io::Result<Result<BlobWriter, PoolExhausted>> {
        self.write_by(len, WriteMap::new)
    }

    /// As [`begin_blob`](Self::begin_blob), for a blob of which only parts may arrive.
    ///
    /// The rest takes no pages.
    pub(crate) fn begin_sparse_blob(
        self: &Arc<Self>,
        len: u64,
    ) -> io::Result<Result<BlobWriter, PoolExhausted>> {
        self.write_by(len, WriteMap::sparse)
    }

    fn write_by(
        self: &Arc<Self>,
        len: u64,
        new_map: impl FnOnce(&OwnedFd, u64) -> io::Result<WriteMap>,
    ) -> io::Result<Result<BlobWriter, PoolExhausted>> {
        let mut inner = self.inner();
        let is_own = |segment: &Segment| matches!(segment.writer, Writer::Daemon(_));
        let prepared = inner.acquire(len, self.limit, is_own, || Writer::Daemon(None))?;
        let id = match prepared {
            Ok((id, _)) => id,
            Err(exhausted) => return Ok(Err(exhausted)),
        };
        let segment = inner.segments.get_mut(&id).expect("it was just found or made");
        let Writer::Daemon(map) = &mut segment.writer else { unreachable!("it is the daemon's") };
        let (map, capacity) = (map.take(), segment.capacity);
        let memory = if map.is_some() { None } else { Some(segment.host()?.try_clone()?) };
        drop(inner);
        // From here on, its drop returns the segment.
        let mut writer = BlobWriter { pool: self.clone(), segment: Some(id), map, len };
        if let Some(memory) = memory {
            writer.map = Some(new_map(&memory, capacity)?);
        }
        Ok(Ok(writer))
    }

    /// Publishes the blob that a writer has written into its segment, under a name.
    pub(crate) fn publish(
        &self,
        peer: PeerId,
        id: SegmentId,
        name: &str,
        len: u64,
    ) -> io::Result<()> {
        self.inner().publish(id, name, len, |segment| segment.is_acquired_by(peer))
    }

    /// Publishes an archive of `len` bytes in a device segment of its writer.
    ///
    /// The blob `name` is its host part.
    pub(crate) fn publish_device_archive(
        &self,
        peer: PeerId,
        id: SegmentId,
        name: &str,
        len: u64,
    ) -> io::Result<()> {
        let mut inner = self.inner();
        if !inner.blobs.contains_key(name) || inner.device_archives.contains_key(name) {
            return Err(io::Error::other("it is not the host part of an archive"));
        }
        let segment = inner.acquired_mut(id, |segment| segment.is_acquired_by(peer))?;
        if !matches!(segment.memory, Backing::Device { memory: Some(_), .. }) {
            return Err(io::Error::other("the memory of the GPU has not come"));
        }
        segment.is_acquired = false;
        segment.blobs += 1;
        inner.device_archives.insert(name.to_owned(), (id, len));
        Ok(())
    }

    /// Releases a segment that its writer has acquired and not used.
    pub(crate) fn release_segment(&self, peer: PeerId, id: SegmentId) {
        let mut inner = self.inner();
        if let Some(segment) = inner.segments.get_mut(&id).filter(|each| each.is_acquired_by(peer))
        {
            segment.is_acquired = false;
            // Only the writer knows whether it attached the memory. It allocates new memory next time.
            if segment.device().is_some() {
                inner.retire(id);
            }
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Writes a small blob into a slab of the daemon.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<Result<(), PoolExhausted>> {
        let mut inner = self.inner();
        if inner.blobs.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let len = u64::try_from(bytes.len()).map_err(io::Error::other)?;
        let slab_len = slab_bytes(len);
        let mut segments = inner.segments.iter_mut();
        let slot = segments.find_map(|(id, segment)| Some((*id, segment.allocate(slab_len)?)));
        let (id, offset) = if let Some(slot) = slot {
            slot
        } else {
            let capacity = slab_len.max(SLAB_BYTES);
            while let Err(exhausted) = inner.make_room(capacity, self.limit) {
                if !inner.free_one_retained() {
                    return Ok(Err(exhausted));
                }
            }
            let memory = segment::create(capacity)?;
            // A segment larger than a slab contains one blob, so all its pages are written now.
            let map = if capacity > SLAB_BYTES { WriteMap::new } else { WriteMap::sparse };
            let map = map(&memory, capacity)?;
            segment::seal(&memory)?;
            let mut extents = Extents::new(capacity);
            let offset = extents.allocate(slab_len).expect("it is as long at least");
            let memory = Backing::Host(memory);
            (inner.add(Segment::new(memory, capacity, Writer::Slab(map, extents))), offset)
        };
        let segment = inner.segments.get_mut(&id).expect("it was just found or made");
        let Writer::Slab(map, _) = &mut segment.writer else { unreachable!("it is a slab") };
        let start = to_usize(offset);
        map.range_mut(start..start + bytes.len()).copy_from_slice(bytes);
        segment.blobs += 1;
        inner.blobs.insert(name.to_owned(), Span { segment: id, offset, len });
        Ok(Ok(()))
    }

    /// Returns the location of a blob.
    pub(crate) fn span(&self, name: &str) -> Option<Span> {
        self.inner().blobs.get(name).copied()
    }

    /// Returns the location of an archive in the memory of a GPU.
    pub(crate) fn device_span(&self, name: &str) -> Option<DeviceSpan> {
        let inner = self.inner();
        let (device_segment, len) = *inner.device_archives.get(name)?;
        Some(DeviceSpan { host_part: *inner.blobs.get(name)?, device_segment, len })
    }

    /// Adds a file as a segment that contains one blob. It takes no memory.
    pub(crate) fn add_file(&self, name: &str, file: OwnedFd, len: u64) -> Span {
        let mut inner = self.inner();
        if let Some(span) = inner.blobs.get(name) {
            return *span;
        }
        let mut segment = Segment::new(Backing::Host(file), len, Writer::None);
        (segment.cost, segment.blobs) = (0, 1);
        let span = Span { segment: inner.add(segment), offset: 0, len };
        inner.blobs.insert(name.to_owned(), span);
        span
    }

    /// Returns the names of the blobs that begin with a prefix.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let inner = self.inner();
        let names = inner.blobs.range(prefix.to_owned()..).map(|(name, _)| name);
        names.take_while(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Has deleted blobs retained until `until`, or until the memory is needed, whose names begin with a prefix.
    ///
    /// After the prefix, a name has a folder and a file. Only blobs of the folder that was deleted last are retained, and no small
    /// ones.
    pub(crate) fn retain_deleted(&self, prefix: &str, retain: Retain, until: Instant) {
        let mut inner = self.inner();
        inner.retained_prefixes.retain(|_, until| Instant::now() < *until);
        inner.retained_prefixes.insert((prefix.to_owned(), retain), until);
    }

    /// Returns the prefixes of names whose deleted blobs are retained.
    pub(crate) fn retained_prefixes(&self) -> Vec<String> {
        let inner = self.inner();
        let retained = inner.retained_prefixes.iter().filter(|(_, until)| Instant::now() < **until);
        retained.map(|((prefix, _), _)| prefix.clone()).collect()
    }

    /// Frees the retained blobs whose time has passed.
    pub(crate) fn free_expired(&self) {
        let mut inner = self.inner();
        let prefixes = inner.retained_prefixes.clone();
        inner.free_retained("", |name| {
            let is_kept = |((prefix, _), until): (&(String, Retain), &Instant)| {
                name.starts_with(prefix) && Instant::now() < *until
            };
            !prefixes.iter().any(is_kept)
        });
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Frees the retained blobs with a prefix that are not held.
    pub(crate) fn free_retained(&self, prefix: &str) {
        self.inner().free_retained(prefix, |_| true);
        self.freed.notify_waiters();
    }

    /// Frees a retained blob that is not held. Returns whether there was one.
    pub(crate) fn free_one_retained(&self) -> bool {
        let has_freed = self.inner().free_one_retained();
        self.freed.notify_waiters();
        has_freed
    }

    /// Waits until a blob is retained.
    pub(crate) async fn wait_for_retained(&self) {
        self.has_retained.notified().await;
    }

    /// Returns whether a blob is retained.
    pub(crate) fn is_retained(&self, name: &str) -> bool {
        self.inner().retained.contains_key(name)
    }

    /// Returns the names and lengths of the retained blobs that are not held.
    pub(crate) fn retained(&self) -> Vec<(String, u64)> {
        let inner = self.inner();
        let retained = inner.retained.iter().filter(|(name, _)| !inner.holds.contains_key(*name));
        retained.map(|(name, span)| (name.clone(), span.len)).collect()
    }

    /// Returns the names and lengths of the blobs that begin with a prefix, retained ones included.
    pub(crate) fn names_with_retained(&self, prefix: &str) -> Vec<(String, u64)> {
        let inner = self.inner();
        let all = [&inner.blobs, &inner.retained].map(|blobs| {
            let blobs = blobs.range(prefix.to_owned()..);
            blobs.take_while(|(name, _)| name.starts_with(prefix))
        });
        all.into_iter().flatten().map(|(name, span)| (name.clone(), span.len)).collect()
    }

    /// Opens a blob for the daemon itself.
    pub(crate) fn open(&self, name: &str) -> io::Result<Option<LocalArchive>> {
        let mut inner = self.inner();
        let span = inner.blobs.get(name).copied();
        span.map(|span| Self::open_span(&mut inner, name, span)).transpose()
    }

    /// As [`Pool::open`], also for a retained blob. The blob must be held.
    pub(crate) fn open_retained(&self, name: &str) -> io::Result<Option<LocalArchive>> {
        let mut inner = self.inner();
        let span = inner.blobs.get(name).or_else(|| inner.retained.get(name)).copied();
        span.map(|span| Self::open_span(&mut inner, name, span)).transpose()
    }

    fn open_span(inner: &mut Inner, name: &str, span: Span) -> io::Result<LocalArchive> {
        let Span { segment, offset, len } = span;
        let device_archive = inner.device_archives.get(name).copied();
        let segment = inner.segments.get_mut(&segment).expect("a blob lies in a segment");
        let map = if let Some(map) = &segment.map {
            map.clone()
        } else {
            let map = ReadMap::without_cow_maps(segment.host()?, segment.capacity)?;
            segment.map.insert(map).clone()
        };
        let archive = map.archive(offset, len).expect("a blob lies in its segment");
        let Some((_, len)) = device_archive else { return Ok(archive) };
        let host_part = archive.blob.bytes().cloned().unwrap_or_default();
        Ok(LocalArchive::without_checksums(DeviceArchive::new(host_part, len, None)?))
    }

    /// Returns the memory of a segment and its length. Returns none if the reader has it already.
    pub(crate) fn share(&self, peer: PeerId, id: SegmentId) -> io::Result<Option<SegmentMemory>> {
        let mut inner = self.inner();
        let not_found = || {
            let text = format!("segment {id} does not exist, or has no memory yet");
            io::Error::new(io::ErrorKind::NotFound, text)
        };
        let segment = inner.segments.get_mut(&id).ok_or_else(not_found)?;
        if segment.readers.contains(&peer) {
            return Ok(None);
        }
        let (memory, device) = match &segment.memory {
            Backing::Host(memory) => (segment::read_only(memory)?, None),
            Backing::Device { uuid, memory } => {
                let memory = memory.as_ref().ok_or_else(not_found)?;
                (memory.try_clone()?, Some(uuid.clone()))
            }
        };
        segment.readers.insert(peer);
        Ok(Some(SegmentMemory { memory, capacity: segment.capacity, device }))
    }

    /// Excludes the segments of a blob from reuse, because a reader was lost without returning it.
    pub(crate) fn block_recycling(&self, name: &str) {
        let mut inner = self.inner();
        let host = inner.blobs.get(name).map(|span| span.segment);
        let device = inner.device_archives.get(name).map(|(device, _)| *device);
        for id in host.into_iter().chain(device) {
            if let Some(segment) = inner.segments.get_mut(&id) {
                segment.is_recycling_blocked = true;
            }
        }
    }

    /// Holds blobs for a reader: they are not deleted before [`release`](Self::release).
    pub(crate) fn hold(&self, names: &[String]) {
        let mut inner = self.inner();
        for name in names {
            *inner.holds.entry(name.clone()).or_default() += 1;
        }
    }

    /// Ends the hold of a reader on these blobs.
    pub(crate) fn release(&self, names: &[String]) {
        let mut inner = self.inner();
        for name in names {
            let Some(holds) = inner.holds.get_mut(name) else { continue };
            *holds -= 1;
            if *holds == 0 {
                inner.holds.remove(name);
                if inner.pending_delete.remove(name) {
                    inner.delete(name);
                }
                if inner.retained.contains_key(name) {
                    self.has_retained.notify_one();
                }
            }
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Whether a reader holds a blob.
    pub(crate) fn is_held(&self, name: &str) -> bool {
        self.inner().holds.contains_key(name)
    }

    /// Whether a blob takes memory and no reader holds it. A file takes no memory.
    pub(crate) fn is_evictable(&self, name: &str) -> bool {
        let inner = self.inner();
        let segment = inner.blobs.get(name).and_then(|span| inner.segments.get(&span.segment));
        segment.is_some_and(|segment| segment.cost > 0) && !inner.holds.contains_key(name)
    }

    /// Whether a blob will be deleted when its last hold ends.
    pub(crate) fn is_pending_delete(&self, name: &str) -> bool {
        self.inner().pending_delete.contains(name)
    }

    /// Deletes a blob now, or when its last hold ends.
    pub(crate) fn delete(&self, name: &str) {
        let mut inner = self.inner();
        if !inner.holds.contains_key(name) {
            inner.delete(name);
            if inner.retained.contains_key(name) {
                self.has_retained.notify_one();
            }
        } else if inner.blobs.contains_key(name) {
            inner.pending_delete.insert(name.to_owned());
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Renames a blob. Returns false if the new name is taken, or if the blob does not exist.
    pub(crate) fn rename(&self, from: &str, to: &str) -> bool {
        let mut inner = self.inner();
        if inner.blobs.contains_key(to) {
            return false;
        }
        let span = inner.blobs.remove(from);
        inner.blobs.extend(span.map(|span| (to.to_owned(), span)));
        let device_archive = inner.device_archives.remove(from);
        inner.device_archives.extend(device_archive.map(|archive| (to.to_owned(), archive)));
        span.is_some()
    }

    /// Records that a peer has unmapped a segment.
    pub(crate) fn record_unmap(&self, peer: PeerId, id: SegmentId) {
        let mut inner = self.inner();
        if let Some(segment) = inner.segments.get_mut(&id) {
            segment.readers.remove(&peer);
        }
        inner.remove_mapper(peer, Some(id));
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Removes a peer whose connection is lost.
    ///
    /// Its segments without blobs are retired. Its published blobs stay.
    pub(crate) fn remove_peer(&self, peer: PeerId) {
        let mut inner = self.inner();
        inner.peers.remove(&peer);
        let own: Vec<SegmentId> = inner
            .segments
            .iter()
            .filter(|(_, segment)| segment.belongs_to(peer))
            .map(|(id, _)| *id)
            .collect();
        for id in own {
            let segment = inner.segments.get_mut(&id).expect("it was just found");
            if matches!(segment.memory, Backing::Device { memory: None, .. }) {
                inner.segments.remove(&id);
                continue;
            }
            // The process still has the segment mapped until it exits.
            segment.readers.insert(peer);
            segment.writer = Writer::None;
            segment.is_acquired = false;
            if segment.blobs == 0 {
                inner.retire(id);
            }
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Whether a removed peer may still have a segment mapped.
    pub(crate) fn is_mapped_by(&self, peer: PeerId) -> bool {
        let inner = self.inner();
        inner.segments.values().any(|segment| segment.readers.contains(&peer))
            || inner.retired.values().any(|retired| retired.mappers.contains(&peer))
    }

    /// Records that the process of a removed peer has exited, and with it all its maps.
    pub(crate) fn record_exit(&self, peer: PeerId) {
        let mut inner = self.inner();
        inner.remove_mapper(peer, None);
        for segment in inner.segments.values_mut() {
            segment.readers.remove(&peer);
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Returns the current memory usage.
    pub(crate) fn status(&self) -> MemoryStatus {
        let inner = self.inner();
        let warm = |segment: &&Segment| segment.is_unused();
        MemoryStatus {
            limit_bytes: self.limit,
            used_bytes: inner.used,
            retired_bytes: inner.retired.values().map(|retired| retired.cost).sum(),
            retained_bytes: inner.retained.values().map(|span| span.len).sum(),
            delta_bytes: 0,
            free_bytes: inner.segments.values().filter(warm).map(|segment| segment.cost).sum(),
            device_bytes: (inner.segments.values().filter_map(Segment::device_bytes))
                .fold(0, u64::saturating_add),
            segments: u64::try_from(inner.segments.len()).unwrap_or(u64::MAX),
            recycled_total: inner.recycled,
            created_bytes_total: inner.created_bytes,
            retired_bytes_total: inner.retired_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_publish_frees_its_segment() {
        let pool = Arc::new(Pool::new(1 << 30));
        let write = || pool.begin_blob(1 << 20).unwrap().unwrap();
        let (first, second) = (write(), write());
        first.publish("a").unwrap();
        let _ = second.publish("a");
        pool.delete("a");
        let memory = pool.status();
        assert_eq!(memory.free_bytes, memory.used_bytes, "{memory:?}");
    }

    #[test]
    fn slab_memory_is_reused_around_a_remaining_blob() {
        let pool = Pool::new(1 << 30);
        let bytes = vec![7; 3 * 4096];
        for round in 0..100 {
            for number in 0..100 {
                pool.write(&format!("{round}/{number}"), &bytes).unwrap().unwrap();
            }
            // One blob of each round stays.
            (1..100).for_each(|number| pool.delete(&format!("{round}/{number}")));
        }
        let memory = pool.status();
        assert!(memory.used_bytes <= 2 * SLAB_BYTES, "{memory:?}");
        for round in 0..100 {
            let blob = pool.open(&format!("{round}/0")).unwrap().unwrap().blob;
            assert_eq!(blob.bytes().unwrap(), &bytes);
        }
    }

    #[test]
    fn held_blob_is_deleted_with_its_last_hold() {
        let pool = Arc::new(Pool::new(1 << 30));
        pool.begin_blob(1 << 20).unwrap().unwrap().publish("a").unwrap();
        let names = ["a".to_owned()];
        pool.hold(&names);
        pool.hold(&names);
        pool.delete("a");
        pool.release(&names);
        assert!(pool.span("a").is_some() && pool.is_pending_delete("a"));
        pool.release(&names);
        assert!(pool.span("a").is_none() && !pool.is_pending_delete("a"));
        pool.release(&names);
        assert_eq!(pool.status().free_bytes, pool.status().used_bytes);
    }

    #[test]
    fn deleted_blobs_are_retained_until_memory_is_needed() {
        let pool = Arc::new(Pool::new(64 << 20));
        let publish = |name: &str| pool.begin_blob(4 << 20).unwrap().unwrap().publish(name);
        let until = Instant::now() + std::time::Duration::from_mins(1);
        for name in ["k/1/a", "k/1/b", "k/2/a", "other/1/a"] {
            publish(name).unwrap();
        }
        pool.delete("other/1/a");
        pool.retain_deleted("k/", Retain::Superseded, until);
        pool.write("k/1/small", &[1]).unwrap().unwrap();
        for name in ["k/1/a", "k/1/b", "k/1/small"] {
            pool.delete(name);
        }
        let names = || pool.names_with_retained("k/").into_iter().map(|(name, _)| name);
        assert_eq!(names().collect::<Vec<_>>(), ["k/2/a", "k/1/a", "k/1/b"]);
        assert_eq!((pool.span("k/1/a"), pool.status().retained_bytes), (None, 8 << 20));
        assert!(pool.open("k/1/a").unwrap().is_none());
        assert!(pool.open_retained("k/1/a").unwrap().is_some());
        // A held one stays.
        pool.hold(&["k/1/a".to_owned()]);
        pool.delete("k/2/a");
        assert_eq!(names().collect::<Vec<_>>(), ["k/1/a", "k/2/a"]);
        assert!(pool.free_one_retained() && !pool.free_one_retained());
        pool.release(&["k/1/a".to_owned()]);
        pool.free_retained("k/");
        assert_eq!((names().count(), pool.status().retained_bytes), (0, 0));
        // A blob that was restored is retained once.
        for _ in 0..2 {
            publish("k/2/a").unwrap();
            pool.delete("k/2/a");
        }
        assert_eq!(names().collect::<Vec<_>>(), ["k/2/a"]);
        pool.free_retained("k/");
        let memory = pool.status();
        assert_eq!(memory.free_bytes, memory.used_bytes, "{memory:?}");
        // After its time, nothing is retained.
        pool.retain_deleted("k/", Retain::Superseded, Instant::now());
        publish("k/3/a").unwrap();
        pool.delete("k/3/a");
        assert_eq!(names().count(), 0);
        // Only the last one is retained.
        pool.retain_deleted("k/", Retain::Last, until);
        publish("k/4/a").unwrap();
        publish("k/5/a").unwrap();
        pool.delete("k/4/a");
        assert_eq!(pool.status().retained_bytes, 0);
        pool.delete("k/5/a");
        assert_eq!(names().collect::<Vec<_>>(), ["k/5/a"]);
    }

    #[test]
    fn share_fails_for_retired_segment() {
        let pool = Arc::new(Pool::new(1 << 30));
        pool.begin_blob(1 << 20).unwrap().unwrap().publish("a").unwrap();
        let span = pool.span("a").unwrap();
        // The segment may disappear between the lookup of a blob and the reply, when the control plane runs in another
        // process.
        pool.block_recycling("a");
        pool.delete("a");
        assert!(!matches!(pool.share(7, span.segment), Ok(Some(_))));
    }
}
