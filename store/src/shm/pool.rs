//! The segments of a daemon: whose they are, what is in them, and when they are written again.
//!
//! A segment belongs to one writer, which has it mapped. It is recycled, warm as it is, only when
//! everybody who read it has handed it back; if somebody was lost instead, it is retired: closed, and
//! its bytes count until the last one who had it mapped has unmapped it or is gone.

mod inner;
mod writing;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_trait::async_trait;

pub(crate) use self::writing::Writing;

use self::inner::{Backing, Inner, Segment, Writer};
use super::extents::Extents;
use super::segment::{self, ReadMap, SLAB_BYTES, WriteMap};
use crate::device::DeviceArchive;
use crate::io::local_archive::Near;
use crate::io::sync::{Lock, MutexGuard, Notify, mpsc, select};
use crate::status::Memory;

/// A segment's name in its daemon.
pub(crate) type SegmentId = u64;

/// A connection's name in its daemon.
pub(crate) type PeerId = u64;

/// Where a blob is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Span {
    pub(crate) segment: SegmentId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// An archive in the memory of a GPU: a segment of its own, at the places that its bytes have in the file. Only its shell
/// is in this host's memory: its head, its index and its trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Hollow {
    pub(crate) shell: Span,
    pub(crate) device: SegmentId,
    /// Of the archive.
    pub(crate) len: u64,
}

/// What a peer is told to unmap.
pub(crate) type Unmap = SegmentId;

/// Blobs begin at multiples of this many bytes.
const PAGE: u64 = 4096;

/// Segments of writers are multiples of this many bytes, so that archives that grow a little still fit.
const STEP: u64 = 2 << 20;

/// A writer has at most so many segments of GPUs: each is a descriptor of the daemon.
const MAX_DEVICE: usize = 4096;

/// Segments of writers and of the daemon, within a limit.
pub(crate) struct Pool {
    inner: Lock<Inner>,
    limit: u64,
    /// Rung whenever bytes become free.
    pub(crate) freed: Notify,
}

/// A segment that a writer may write.
pub(crate) struct Lent {
    pub(crate) segment: SegmentId,
    pub(crate) capacity: u64,
    /// The memory, if the writer has not mapped it yet.
    pub(crate) memory: Option<OwnedFd>,
}

/// Memory of a segment, for a reader that does not have it yet.
pub(crate) struct Shared {
    pub(crate) memory: OwnedFd,
    pub(crate) capacity: u64,
    /// The GPU that it is of, if it is.
    pub(crate) device: Option<Arc<str>>,
}

/// What is in memory and can be had again.
#[async_trait]
pub(crate) trait Spare: Sync {
    /// Lets go of something. Says whether there was something.
    async fn let_go_of_one(&self) -> bool;
}

/// How much of a slab a blob of so many bytes takes.
fn room_for(len: u64) -> u64 {
    len.max(1).next_multiple_of(PAGE)
}

/// There is no room now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted {
    pub(crate) wanted: u64,
    pub(crate) used: u64,
    pub(crate) limit: u64,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, used, limit } = self;
        write!(f, "{wanted} bytes are wanted, {used} of {limit} are in use")
    }
}

impl Pool {
    pub(crate) fn new(limit: u64) -> Self {
        Self { inner: Lock::default(), limit, freed: Notify::new() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// A new peer. It is to unmap what comes from here.
    pub(crate) fn join(&self, peer: PeerId) -> mpsc::UnboundedReceiver<Unmap> {
        let (unmaps, unmapped) = mpsc::unbounded_channel();
        self.inner().peers.insert(peer, unmaps);
        unmapped
    }

    /// Does something that needs memory: again whenever some becomes free, until there is enough of it or
    /// nobody waits any more. What is more than the limit is not waited for. What is spare goes before anybody waits.
    pub(crate) async fn when_free<T>(
        self: &Arc<Self>,
        waits_no_more: impl Future<Output = ()>,
        spare: &dyn Spare,
        mut work: impl FnMut(&Arc<Self>) -> io::Result<Result<T, Exhausted>>,
    ) -> io::Result<Result<T, Exhausted>> {
        let mut waits_no_more = std::pin::pin!(waits_no_more);
        loop {
            // What becomes free while it is tried counts too.
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            let exhausted = match work(self)? {
                Err(exhausted) if exhausted.wanted <= exhausted.limit => exhausted,
                done => return Ok(done),
            };
            if spare.let_go_of_one().await {
                continue;
            }
            select! {
                () = freed => {}
                () = &mut waits_no_more => return Ok(Err(exhausted)),
            }
        }
    }

    /// A segment for a writer: a warm one of its own if there is one, else a new one.
    pub(crate) fn lend(&self, peer: PeerId, len: u64) -> io::Result<Result<Lent, Exhausted>> {
        let mut inner = self.inner();
        let prepared =
            inner.prepare(len, self.limit, |segment| segment.is_of(peer), || Writer::Peer(peer))?;
        let (id, is_new) = match prepared {
            Ok(prepared) => prepared,
            Err(exhausted) => return Ok(Err(exhausted)),
        };
        let segment = &inner.segments[&id];
        let memory = if is_new { Some(segment.host()?.try_clone()?) } else { None };
        Ok(Ok(Lent { segment: id, capacity: segment.capacity, memory }))
    }

    /// A segment of a GPU for a writer: a warm one of its own if there is one, else one whose memory the writer
    /// [makes](Pool::bring).
    pub(crate) fn lend_device(&self, peer: PeerId, uuid: &str, len: u64) -> Option<Lent> {
        let mut inner = self.inner();
        let capacity = len.max(1).checked_next_multiple_of(STEP)?;
        let is_own = |segment: &Segment| segment.is_of(peer) && segment.device() == Some(uuid);
        let id = if let Some(warm) = inner.warm(len, capacity, is_own) {
            warm
        } else {
            // What did not fit twice makes room for what does. Once is no reason: versions of several sizes take turns.
            let unfit = inner.segments.iter_mut().map(|(id, segment)| (*id, segment));
            let unfit = unfit.filter(|(_, segment)| is_own(segment) && segment.is_warm());
            let twice = unfit.filter_map(|(id, segment)| {
                std::mem::replace(&mut segment.is_unfit, true).then_some(id)
            });
            for id in twice.collect::<Vec<_>>() {
                inner.retire(id);
            }
            let all = inner.segments.values().filter(|it| it.is_of(peer) && it.device().is_some());
            if all.count() >= MAX_DEVICE {
                return None;
            }
            let memory = Backing::Device { uuid: uuid.into(), memory: None };
            inner.add(Segment::new(memory, capacity, Writer::Peer(peer)))
        };
        let segment = inner.segments.get_mut(&id).expect("it was just found or made");
        (segment.is_lent, segment.is_unfit) = (true, false);
        Some(Lent { segment: id, capacity: segment.capacity, memory: None })
    }

    /// The memory of a GPU's segment, from the writer that it is lent to. What it is made of, nobody can prove here:
    /// who maps it does.
    pub(crate) fn bring(&self, peer: PeerId, id: SegmentId, brought: OwnedFd) -> io::Result<()> {
        let mut inner = self.inner();
        let segment = inner.segments.get_mut(&id).filter(|segment| segment.is_lent_to(peer));
        // Whoever was interrupted when it brought some brings other memory: nobody else has seen that yet.
        let segment = segment.filter(|segment| segment.readers.is_empty());
        let earlier = match segment.map(|segment| &mut segment.memory) {
            Some(Backing::Device { memory, .. }) => memory.replace(brought),
            _ => return Err(io::Error::other("no memory of a GPU is wanted for that segment")),
        };
        drop(inner);
        // To close it may take a while.
        drop(earlier);
        Ok(())
    }

    /// A segment for the daemon itself, to write a blob of this many bytes into.
    pub(crate) fn write_own(self: &Arc<Self>, len: u64) -> io::Result<Result<Writing, Exhausted>> {
        self.write_by(len, WriteMap::new)
    }

    /// The same for a blob of which perhaps only parts come: others take no pages.
    pub(crate) fn write_sparse(
        self: &Arc<Self>,
        len: u64,
    ) -> io::Result<Result<Writing, Exhausted>> {
        self.write_by(len, WriteMap::sparse)
    }

    fn write_by(
        self: &Arc<Self>,
        len: u64,
        map_new: impl FnOnce(&OwnedFd, u64) -> io::Result<WriteMap>,
    ) -> io::Result<Result<Writing, Exhausted>> {
        let mut inner = self.inner();
        let is_own = |segment: &Segment| matches!(segment.writer, Writer::Own(_));
        let prepared = inner.prepare(len, self.limit, is_own, || Writer::Own(None))?;
        let id = match prepared {
            Ok((id, _)) => id,
            Err(exhausted) => return Ok(Err(exhausted)),
        };
        let segment = inner.segments.get_mut(&id).expect("it was just found or made");
        let Writer::Own(map) = &mut segment.writer else { unreachable!("it is the daemon's") };
        let (map, capacity) = (map.take(), segment.capacity);
        let memory = if map.is_some() { None } else { Some(segment.host()?.try_clone()?) };
        drop(inner);
        // Given back by its drop from here on.
        let mut writing = Writing { pool: self.clone(), segment: Some(id), map, len };
        if let Some(memory) = memory {
            writing.map = Some(map_new(&memory, capacity)?);
        }
        Ok(Ok(writing))
    }

    /// A writer has filled a segment that it was lent: the blob has a name now.
    pub(crate) fn publish(
        &self,
        peer: PeerId,
        id: SegmentId,
        name: &str,
        len: u64,
    ) -> io::Result<()> {
        self.inner().publish(id, name, len, |segment| segment.is_lent_to(peer))
    }

    /// The blob of a name is the shell of an archive of so many bytes, the rest of which a writer has put into a segment
    /// of a GPU.
    pub(crate) fn publish_hollow(
        &self,
        peer: PeerId,
        id: SegmentId,
        name: &str,
        len: u64,
    ) -> io::Result<()> {
        let mut inner = self.inner();
        if !inner.blobs.contains_key(name) || inner.hollow.contains_key(name) {
            return Err(io::Error::other("it is no shell"));
        }
        let segment = inner.lent(id, |segment| segment.is_lent_to(peer))?;
        if !matches!(segment.memory, Backing::Device { memory: Some(_), .. }) {
            return Err(io::Error::other("the memory of the GPU has not come"));
        }
        segment.is_lent = false;
        segment.blobs += 1;
        inner.hollow.insert(name.to_owned(), (id, len));
        Ok(())
    }

    /// A writer gives back what it was lent, unused.
    pub(crate) fn give_back(&self, peer: PeerId, id: SegmentId) {
        let mut inner = self.inner();
        if let Some(segment) = inner.segments.get_mut(&id).filter(|each| each.is_lent_to(peer)) {
            segment.is_lent = false;
            // Whether its memory has come, and whether the writer knows that, only the writer can tell: it makes new.
            if segment.device().is_some() {
                inner.retire(id);
            }
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Writes a small blob into a segment of the daemon; none if there is no room.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<Result<(), Exhausted>> {
        let mut inner = self.inner();
        if inner.blobs.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let len = u64::try_from(bytes.len()).map_err(io::Error::other)?;
        let room = room_for(len);
        let mut segments = inner.segments.iter_mut();
        let found = segments.find_map(|(id, segment)| Some((*id, segment.take(room)?)));
        let (id, offset) = if let Some(found) = found {
            found
        } else {
            let capacity = room.max(SLAB_BYTES);
            if let Err(exhausted) = inner.make_room(capacity, self.limit) {
                return Ok(Err(exhausted));
            }
            let memory = segment::create(capacity)?;
            // The pages of what is larger than a slab are all written now.
            let map = if capacity > SLAB_BYTES { WriteMap::new } else { WriteMap::sparse };
            let map = map(&memory, capacity)?;
            segment::seal(&memory)?;
            let mut free = Extents::all(capacity);
            let offset = free.take(room).expect("it is as long at least");
            let memory = Backing::Host(memory);
            (inner.add(Segment::new(memory, capacity, Writer::Slab(map, free))), offset)
        };
        let segment = inner.segments.get_mut(&id).expect("it was just found or made");
        let Writer::Slab(map, _) = &mut segment.writer else { unreachable!("it is a slab") };
        let start = usize::try_from(offset).expect("it lies in the map");
        map.range_mut(start..start + bytes.len()).copy_from_slice(bytes);
        segment.blobs += 1;
        inner.blobs.insert(name.to_owned(), Span { segment: id, offset, len });
        Ok(Ok(()))
    }

    /// Where a blob is.
    pub(crate) fn span(&self, name: &str) -> Option<Span> {
        self.inner().blobs.get(name).copied()
    }

    /// Where an archive is that is in the memory of a GPU.
    pub(crate) fn hollow(&self, name: &str) -> Option<Hollow> {
        let inner = self.inner();
        let (device, len) = *inner.hollow.get(name)?;
        Some(Hollow { shell: *inner.blobs.get(name)?, device, len })
    }

    /// Takes a file as a segment of one blob: it costs no memory.
    pub(crate) fn adopt(&self, name: &str, file: OwnedFd, len: u64) -> Span {
        let mut inner = self.inner();
        if let Some(span) = inner.blobs.get(name) {
            return *span;
        }
        let mut segment = Segment::new(Backing::Host(file), len, Writer::Gone);
        (segment.cost, segment.blobs) = (0, 1);
        let span = Span { segment: inner.add(segment), offset: 0, len };
        inner.blobs.insert(name.to_owned(), span);
        span
    }

    /// The names of blobs that begin with a prefix.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let inner = self.inner();
        let names = inner.blobs.range(prefix.to_owned()..).map(|(name, _)| name);
        names.take_while(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// A blob, as the daemon reads it.
    pub(crate) fn open(&self, name: &str) -> io::Result<Option<Near>> {
        let mut inner = self.inner();
        let Some(&Span { segment, offset, len }) = inner.blobs.get(name) else { return Ok(None) };
        let hollow = inner.hollow.get(name).copied();
        let segment = inner.segments.get_mut(&segment).expect("a blob lies in a segment");
        let map = if let Some(map) = &segment.map {
            map.clone()
        } else {
            let map = ReadMap::bare(segment.host()?, segment.capacity)?;
            segment.map.insert(map).clone()
        };
        let near = map.archive(offset, len).expect("a blob lies in its segment");
        let Some((_, len)) = hollow else { return Ok(Some(near)) };
        let shell = near.blob.bytes().cloned().unwrap_or_default();
        Ok(Some(Near::without_checksums(DeviceArchive::new(shell, len, None)?)))
    }

    /// The memory of a segment and its length, for a reader that does not have it yet.
    pub(crate) fn share(&self, peer: PeerId, id: SegmentId) -> io::Result<Option<Shared>> {
        let mut inner = self.inner();
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the segment is gone");
        let segment = inner.segments.get_mut(&id).ok_or_else(gone)?;
        if segment.readers.contains(&peer) {
            return Ok(None);
        }
        let (memory, device) = match &segment.memory {
            Backing::Host(memory) => (segment::read_only(memory)?, None),
            Backing::Device { uuid, memory } => {
                let memory = memory.as_ref().ok_or_else(gone)?;
                (memory.try_clone()?, Some(uuid.clone()))
            }
        };
        segment.readers.insert(peer);
        Ok(Some(Shared { memory, capacity: segment.capacity, device }))
    }

    /// Somebody who read a blob was lost: nobody says that it is handed back.
    pub(crate) fn suspect(&self, name: &str) {
        let mut inner = self.inner();
        let host = inner.blobs.get(name).map(|span| span.segment);
        let device = inner.hollow.get(name).map(|(device, _)| *device);
        for id in host.into_iter().chain(device) {
            if let Some(segment) = inner.segments.get_mut(&id) {
                segment.is_suspect = true;
            }
        }
    }

    /// Somebody reads these blobs, or will: none of them is deleted before they are let go.
    pub(crate) fn hold(&self, names: &[String]) {
        let mut inner = self.inner();
        for name in names {
            *inner.holds.entry(name.clone()).or_default() += 1;
        }
    }

    /// Somebody reads them no longer.
    pub(crate) fn let_go(&self, names: &[String]) {
        let mut inner = self.inner();
        for name in names {
            let Some(holds) = inner.holds.get_mut(name) else { continue };
            *holds -= 1;
            if *holds == 0 {
                inner.holds.remove(name);
                if inner.doomed.remove(name) {
                    inner.delete(name);
                }
            }
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Whether somebody reads a blob, or will.
    pub(crate) fn is_held(&self, name: &str) -> bool {
        self.inner().holds.contains_key(name)
    }

    /// Whether a blob takes memory, which nobody reads: a file takes none.
    pub(crate) fn takes_idle_memory(&self, name: &str) -> bool {
        let inner = self.inner();
        let segment = inner.blobs.get(name).and_then(|span| inner.segments.get(&span.segment));
        segment.is_some_and(|segment| segment.cost > 0) && !inner.holds.contains_key(name)
    }

    /// Whether a blob is held, and deleted when it no longer is.
    pub(crate) fn is_doomed(&self, name: &str) -> bool {
        self.inner().doomed.contains(name)
    }

    /// Deletes a blob, now or as soon as nobody holds it.
    pub(crate) fn delete(&self, name: &str) {
        let mut inner = self.inner();
        if !inner.holds.contains_key(name) {
            inner.delete(name);
        } else if inner.blobs.contains_key(name) {
            inner.doomed.insert(name.to_owned());
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Gives a blob another name; false if that is taken.
    pub(crate) fn rename(&self, from: &str, to: &str) -> bool {
        let mut inner = self.inner();
        if inner.blobs.contains_key(to) {
            return false;
        }
        let span = inner.blobs.remove(from);
        inner.blobs.extend(span.map(|span| (to.to_owned(), span)));
        let hollow = inner.hollow.remove(from);
        inner.hollow.extend(hollow.map(|hollow| (to.to_owned(), hollow)));
        span.is_some()
    }

    /// A peer has unmapped a segment.
    pub(crate) fn unmapped(&self, peer: PeerId, id: SegmentId) {
        let mut inner = self.inner();
        if let Some(segment) = inner.segments.get_mut(&id) {
            segment.readers.remove(&peer);
        }
        inner.forget_mapper(peer, Some(id));
        drop(inner);
        self.freed.notify_waiters();
    }

    /// A peer's connection is lost: what it was to write is gone, what it has written stays.
    pub(crate) fn leave(&self, peer: PeerId) {
        let mut inner = self.inner();
        inner.peers.remove(&peer);
        let own: Vec<SegmentId> = inner
            .segments
            .iter()
            .filter(|(_, segment)| segment.is_of(peer))
            .map(|(id, _)| *id)
            .collect();
        for id in own {
            let segment = inner.segments.get_mut(&id).expect("it was just found");
            if matches!(segment.memory, Backing::Device { memory: None, .. }) {
                inner.segments.remove(&id);
                continue;
            }
            // Its map is still there, as long as the process is.
            segment.readers.insert(peer);
            segment.writer = Writer::Gone;
            segment.is_lent = false;
            if segment.blobs == 0 {
                inner.retire(id);
            }
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// Whether a peer that has left may have something mapped.
    pub(crate) fn is_mapped_by(&self, peer: PeerId) -> bool {
        let inner = self.inner();
        inner.segments.values().any(|segment| segment.readers.contains(&peer))
            || inner.retired.values().any(|retired| retired.mappers.contains(&peer))
    }

    /// A peer that has left is proven gone, with all its maps.
    pub(crate) fn exited(&self, peer: PeerId) {
        let mut inner = self.inner();
        inner.forget_mapper(peer, None);
        for segment in inner.segments.values_mut() {
            segment.readers.remove(&peer);
        }
        drop(inner);
        self.freed.notify_waiters();
    }

    /// What the pool holds now.
    pub(crate) fn status(&self) -> Memory {
        let inner = self.inner();
        let warm = |segment: &&Segment| segment.is_warm();
        Memory {
            limit: self.limit,
            used: inner.used,
            retired: inner.retired.values().map(|retired| retired.cost).sum(),
            warm: inner.segments.values().filter(warm).map(|segment| segment.cost).sum(),
            devices: (inner.segments.values().filter_map(Segment::device_bytes))
                .fold(0, u64::saturating_add),
            segments: u64::try_from(inner.segments.len()).unwrap_or(u64::MAX),
            recycled: inner.recycled,
            created_bytes: inner.created_bytes,
            retired_bytes: inner.retired_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_published_twice_leaves_no_memory_behind() {
        let pool = Arc::new(Pool::new(1 << 30));
        let written = || pool.write_own(1 << 20).unwrap().unwrap();
        let (first, second) = (written(), written());
        first.publish("a").unwrap();
        let _ = second.publish("a");
        pool.delete("a");
        let memory = pool.status();
        assert_eq!(memory.warm, memory.used, "{memory:?}");
    }

    #[test]
    fn a_small_blob_that_stays_keeps_no_other_memory() {
        let pool = Pool::new(1 << 30);
        let bytes = vec![7; 3 * 4096];
        for round in 0..100 {
            for number in 0..100 {
                pool.write(&format!("{round}/{number}"), &bytes).unwrap().unwrap();
            }
            // One of each round stays.
            (1..100).for_each(|number| pool.delete(&format!("{round}/{number}")));
        }
        let memory = pool.status();
        assert!(memory.used <= 2 * SLAB_BYTES, "{memory:?}");
        for round in 0..100 {
            let blob = pool.open(&format!("{round}/0")).unwrap().unwrap().blob;
            assert_eq!(blob.bytes().unwrap(), &bytes);
        }
    }

    #[test]
    fn what_is_held_is_deleted_when_nobody_holds_it_any_more() {
        let pool = Arc::new(Pool::new(1 << 30));
        pool.write_own(1 << 20).unwrap().unwrap().publish("a").unwrap();
        let names = ["a".to_owned()];
        pool.hold(&names);
        pool.hold(&names);
        pool.delete("a");
        pool.let_go(&names);
        assert!(pool.span("a").is_some() && pool.is_doomed("a"));
        pool.let_go(&names);
        assert!(pool.span("a").is_none() && !pool.is_doomed("a"));
        pool.let_go(&names);
        assert_eq!(pool.status().warm, pool.status().used);
    }

    #[test]
    fn a_segment_that_is_gone_is_not_shared() {
        let pool = Arc::new(Pool::new(1 << 30));
        pool.write_own(1 << 20).unwrap().unwrap().publish("a").unwrap();
        let span = pool.span("a").unwrap();
        // As when another instance decides, between the place of a blob and its reply.
        pool.suspect("a");
        pool.delete("a");
        assert!(!matches!(pool.share(7, span.segment), Ok(Some(_))));
    }
}
