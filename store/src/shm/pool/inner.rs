//! The state of a pool under its lock: segments, blobs and the peers that have segments mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::{
    PeerId, PoolExhausted, Retain, SEGMENT_GRANULARITY, SegmentId, Span, Unmap, slab_bytes,
};
use crate::io::sync::mpsc;
use crate::shm::extents::Extents;
use crate::shm::segment::{self, ReadMap, SLAB_BYTES, WriteMap};

/// The state of a pool.
#[derive(Default)]
pub(super) struct Inner {
    pub(super) next: SegmentId,
    pub(super) segments: BTreeMap<SegmentId, Segment>,
    /// Retired segments that a process still has mapped.
    pub(super) retired: BTreeMap<SegmentId, RetiredSegment>,
    pub(super) blobs: BTreeMap<String, Span>,
    /// Archives in device memory, by name: the device segment, and the length of the archive in bytes.
    pub(super) device_archives: BTreeMap<String, (SegmentId, u64)>,
    /// Number of holds of each held blob.
    pub(super) holds: BTreeMap<String, u64>,
    /// Blobs to delete when their last hold ends.
    pub(super) pending_delete: BTreeSet<String>,
    /// Deleted blobs that are kept as long as their memory is not needed.
    pub(super) retained: BTreeMap<String, Span>,
    /// Prefixes of names whose deleted blobs are retained, until a time.
    pub(super) retained_prefixes: BTreeMap<(String, Retain), Instant>,
    pub(super) peers: BTreeMap<PeerId, mpsc::UnboundedSender<Unmap>>,
    /// Capacity of all segments, including retired ones.
    pub(super) used: u64,
    pub(super) recycled: u64,
    pub(super) created_bytes: u64,
    pub(super) retired_bytes: u64,
}

/// A closed segment that is still mapped.
pub(super) struct RetiredSegment {
    pub(super) cost: u64,
    pub(super) mappers: BTreeSet<PeerId>,
}

/// A segment and its state.
pub(super) struct Segment {
    pub(super) memory: Backing,
    pub(super) capacity: u64,
    /// Bytes that count against the limit: 0 for a file or device memory.
    pub(super) cost: u64,
    pub(super) writer: Writer,
    /// Number of blobs in it.
    pub(super) blobs: usize,
    /// Whether its writer is writing.
    pub(super) is_acquired: bool,
    /// Peers that have it mapped for reading.
    pub(super) readers: BTreeSet<PeerId>,
    /// Whether a reader of it was lost.
    pub(super) is_recycling_blocked: bool,
    /// Whether this device segment was unused and did not fit a request since it was last acquired.
    pub(super) is_unfit: bool,
    /// The daemon's own map.
    pub(super) map: Option<Arc<ReadMap>>,
}

/// The memory of a segment.
pub(super) enum Backing {
    /// Memory of this host, or a file.
    Host(OwnedFd),
    /// Memory of a GPU, which only the writer can allocate: the descriptor of the driver, once attached.
    Device { uuid: Arc<str>, memory: Option<OwnedFd> },
}

/// The writer of a segment.
pub(super) enum Writer {
    /// A peer.
    Peer(PeerId),
    /// The daemon, which writes small blobs into the free extents.
    Slab(WriteMap, Extents),
    /// The daemon, which writes one blob at a time. None while it writes: the writer has the map.
    Daemon(Option<WriteMap>),
    /// No writer: it has left, or the segment is a file.
    None,
}

impl Inner {
    /// Acquires a segment of at least `len` bytes, and returns whether it is new.
    pub(super) fn acquire(
        &mut self,
        len: u64,
        limit: u64,
        is_own: impl Fn(&Segment) -> bool,
        writer: impl FnOnce() -> Writer,
    ) -> io::Result<Result<(SegmentId, bool), PoolExhausted>> {
        let Some(capacity) = len.max(1).checked_next_multiple_of(SEGMENT_GRANULARITY) else {
            return Ok(Err(PoolExhausted { wanted: len, used: self.used, limit }));
        };
        let is_own = |segment: &Segment| segment.device().is_none() && is_own(segment);
        if let Some(id) = self.find_unused(len, capacity, is_own) {
            self.segments.get_mut(&id).expect("it was just found").is_acquired = true;
            return Ok(Ok((id, false)));
        }
        // The manifest goes into a slab: reserve room for one.
        let slab =
            if self.segments.values().any(|segment| matches!(segment.writer, Writer::Slab(..))) {
                0
            } else {
                SLAB_BYTES
            };
        if let Err(exhausted) = self.make_room(capacity.saturating_add(slab), limit) {
            return Ok(Err(exhausted));
        }
        let memory = Backing::Host(segment::create(capacity)?);
        let mut segment = Segment::new(memory, capacity, writer());
        segment.is_acquired = true;
        Ok(Ok((self.add(segment), true)))
    }

    /// Returns an unused segment of at least `len` bytes: the smallest of at most twice `capacity`.
    pub(super) fn find_unused(
        &mut self,
        len: u64,
        capacity: u64,
        is_own: impl Fn(&Segment) -> bool,
    ) -> Option<SegmentId> {
        let fits = |(_, segment): &(&SegmentId, &Segment)| {
            is_own(segment)
                && segment.is_unused()
                && segment.capacity >= len
                && segment.capacity <= capacity.saturating_mul(2)
        };
        let warm = self.segments.iter().filter(fits).min_by_key(|(_, segment)| segment.capacity);
        let id = warm.map(|(id, _)| *id)?;
        self.recycled += 1;
        Some(id)
    }

    /// Returns a segment that its writer has acquired.
    pub(super) fn acquired_mut(
        &mut self,
        id: SegmentId,
        is_acquired: impl Fn(&Segment) -> bool,
    ) -> io::Result<&mut Segment> {
        let segment = self.segments.get_mut(&id).filter(|segment| is_acquired(segment));
        segment.ok_or_else(|| io::Error::other("the peer has not acquired this segment"))
    }

    /// Publishes the blob that a writer has written into a segment.
    pub(super) fn publish(
        &mut self,
        id: SegmentId,
        name: &str,
        len: u64,
        is_acquired: impl Fn(&Segment) -> bool,
    ) -> io::Result<()> {
        if self.blobs.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let segment = self.acquired_mut(id, is_acquired)?;
        if len > segment.capacity {
            return Err(io::Error::other("the archive is longer than the segment"));
        }
        segment::seal(segment.host()?)?;
        segment.is_acquired = false;
        segment.blobs += 1;
        self.blobs.insert(name.to_owned(), Span { segment: id, offset: 0, len });
        Ok(())
    }

    pub(super) fn add(&mut self, segment: Segment) -> SegmentId {
        let id = self.next;
        self.next += 1;
        self.used += segment.cost;
        self.created_bytes += segment.cost;
        self.segments.insert(id, segment);
        id
    }

    /// Deletes a blob, or retains it. Then blobs with the same prefix are freed that are in another folder.
    pub(super) fn delete(&mut self, name: &str) {
        let Some(span) = self.blobs.remove(name) else { return };
        if let Some((device, _)) = self.device_archives.remove(name) {
            self.remove_blob(device);
        } else if let Some((prefix, folder)) = self.retained_folder(name, span) {
            self.free_retained(&prefix, |other| !other.starts_with(&folder));
            // A blob that was restored meanwhile may be retained already.
            if !self.retained.contains_key(name) {
                self.retained.insert(name.to_owned(), span);
                return;
            }
        }
        self.free(span);
    }

    /// Returns the prefix and the folder of a blob if it must be retained.
    fn retained_folder(&self, name: &str, span: Span) -> Option<(String, String)> {
        let (folder, _) = name.rsplit_once('/')?;
        let (prefix, _) = folder.rsplit_once('/')?;
        let (prefix, folder) = (format!("{prefix}/"), format!("{folder}/"));
        // Small blobs share a segment.
        let is_alone = |span: &Span| {
            let segment = &self.segments[&span.segment];
            segment.cost > 0 && !matches!(segment.writer, Writer::Slab(..))
        };
        if !is_alone(&span) {
            return None;
        }
        if self.is_retained(&prefix, Retain::Superseded) {
            return Some((prefix, folder));
        }
        let others = self.blobs.range(prefix.clone()..);
        let mut others = others.take_while(|(other, _)| other.starts_with(&prefix));
        let is_last = !others.any(|(other, span)| !other.starts_with(&folder) && is_alone(span));
        (is_last && self.is_retained(&prefix, Retain::Last)).then_some((prefix, folder))
    }

    fn is_retained(&self, prefix: &str, retain: Retain) -> bool {
        let until = self.retained_prefixes.get(&(prefix.to_owned(), retain));
        until.is_some_and(|until| Instant::now() < *until)
    }

    /// Frees the retained blobs with a prefix that are selected and not held. Returns whether there was one.
    pub(super) fn free_retained(
        &mut self,
        prefix: &str,
        is_selected: impl Fn(&str) -> bool,
    ) -> bool {
        let names = self.retained.range(prefix.to_owned()..).map(|(name, _)| name);
        let names = names.take_while(|name| name.starts_with(prefix));
        let names = names.filter(|name| is_selected(name) && !self.holds.contains_key(*name));
        let names: Vec<String> = names.cloned().collect();
        for name in &names {
            let span = self.retained.remove(name).expect("it was just found");
            self.free(span);
        }
        !names.is_empty()
    }

    /// Frees a retained blob that is not held. Returns whether there was one.
    pub(super) fn free_one_retained(&mut self) -> bool {
        let name = self.retained.keys().find(|name| !self.holds.contains_key(*name)).cloned();
        name.is_some_and(|name| self.free_retained(&name, |_| true))
    }

    /// Frees the memory of a blob that has no name any more.
    fn free(&mut self, span: Span) {
        let segment = self.segments.get_mut(&span.segment).expect("a blob lies in a segment");
        if let Writer::Slab(_, extents) = &mut segment.writer {
            extents.free(span.offset, slab_bytes(span.len));
        }
        self.remove_blob(span.segment);
    }

    /// Records that a segment has one blob less.
    pub(super) fn remove_blob(&mut self, id: SegmentId) {
        let segment = self.segments.get_mut(&id).expect("a blob lies in a segment");
        segment.blobs -= 1;
        if segment.blobs == 0
            && (segment.is_recycling_blocked || matches!(segment.writer, Writer::None))
        {
            self.retire(id);
        }
    }

    /// Retires unused segments until `wanted` bytes fit.
    pub(super) fn make_room(&mut self, wanted: u64, limit: u64) -> Result<(), PoolExhausted> {
        while self.used.saturating_add(wanted) > limit {
            let warm = self.segments.iter().find(|(_, segment)| segment.frees_memory());
            let Some((&id, _)) = warm else {
                return Err(PoolExhausted { wanted, used: self.used, limit });
            };
            self.retire(id);
        }
        Ok(())
    }

    /// Closes a segment. Its bytes count until no process has it mapped.
    pub(super) fn retire(&mut self, id: SegmentId) {
        let Some(segment) = self.segments.remove(&id) else { return };
        self.retired_bytes += segment.cost;
        let mut mappers = segment.readers;
        if let Writer::Peer(writer) = segment.writer {
            mappers.insert(writer);
        }
        for peer in &mappers {
            if let Some(unmaps) = self.peers.get(peer) {
                // A peer that has closed its receiver is about to leave.
                let _ = unmaps.send(id);
            }
        }
        if mappers.is_empty() {
            self.used -= segment.cost;
        } else {
            self.retired.insert(id, RetiredSegment { cost: segment.cost, mappers });
        }
    }

    /// Records that a peer has unmapped one retired segment, or all of them.
    pub(super) fn remove_mapper(&mut self, peer: PeerId, only: Option<SegmentId>) {
        let mut freed = 0;
        self.retired.retain(|id, retired| {
            if only.is_none_or(|only| only == *id) {
                retired.mappers.remove(&peer);
            }
            if retired.mappers.is_empty() {
                freed += retired.cost;
            }
            !retired.mappers.is_empty()
        });
        self.used -= freed;
    }
}

impl Segment {
    pub(super) fn new(memory: Backing, capacity: u64, writer: Writer) -> Self {
        let cost = if matches!(memory, Backing::Host(_)) { capacity } else { 0 };
        Self {
            memory,
            capacity,
            cost,
            writer,
            blobs: 0,
            is_acquired: false,
            readers: BTreeSet::new(),
            is_recycling_blocked: false,
            is_unfit: false,
            map: None,
        }
    }

    /// Returns the host memory of the segment.
    pub(super) fn host(&self) -> io::Result<&OwnedFd> {
        match &self.memory {
            Backing::Host(memory) => Ok(memory),
            Backing::Device { .. } => Err(io::Error::other("it is memory of a GPU")),
        }
    }

    /// Returns the UUID of the GPU whose memory it is.
    pub(super) fn device(&self) -> Option<&str> {
        match &self.memory {
            Backing::Host(_) => None,
            Backing::Device { uuid, .. } => Some(uuid),
        }
    }

    pub(super) fn device_bytes(&self) -> Option<u64> {
        self.device().map(|_| self.capacity)
    }

    /// Whether retiring it frees memory for others.
    pub(super) fn frees_memory(&self) -> bool {
        self.is_unused() && self.cost > 0 && !matches!(self.writer, Writer::None)
    }

    pub(super) fn belongs_to(&self, peer: PeerId) -> bool {
        matches!(self.writer, Writer::Peer(writer) if writer == peer)
    }

    pub(super) fn is_unused(&self) -> bool {
        self.blobs == 0 && !self.is_acquired
    }

    pub(super) fn is_acquired_by(&self, peer: PeerId) -> bool {
        self.belongs_to(peer) && self.is_acquired
    }

    /// Allocates `len` bytes, if this is a slab with free space.
    ///
    /// A lost reader may still read freed extents of its slab, so nothing is allocated there.
    pub(super) fn allocate(&mut self, len: u64) -> Option<u64> {
        match &mut self.writer {
            Writer::Slab(_, extents) if !self.is_recycling_blocked => extents.allocate(len),
            _ => None,
        }
    }
}
