//! What a pool knows, under its lock: its segments, the blobs that are in them, who has which of them mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Exhausted, PeerId, STEP, SegmentId, Span, Unmap, room_for};
use crate::io::sync::mpsc;
use crate::shm::extents::Extents;
use crate::shm::segment::{self, ReadMap, SLAB_BYTES, WriteMap};

#[derive(Default)]
pub(super) struct Inner {
    pub(super) next: SegmentId,
    pub(super) segments: BTreeMap<SegmentId, Segment>,
    /// What is retired and still mapped by somebody.
    pub(super) retired: BTreeMap<SegmentId, Retired>,
    pub(super) blobs: BTreeMap<String, Span>,
    /// Of the blobs that are shells, the segments of GPUs that have the rest, and the lengths of the archives.
    pub(super) hollow: BTreeMap<String, (SegmentId, u64)>,
    /// How many read a blob, or will.
    pub(super) holds: BTreeMap<String, u64>,
    /// What is deleted as soon as nobody holds it.
    pub(super) doomed: BTreeSet<String>,
    pub(super) peers: BTreeMap<PeerId, mpsc::UnboundedSender<Unmap>>,
    /// Capacity of all segments, retired ones included.
    pub(super) used: u64,
    pub(super) recycled: u64,
    pub(super) created_bytes: u64,
    pub(super) retired_bytes: u64,
}

pub(super) struct Retired {
    pub(super) cost: u64,
    pub(super) mappers: BTreeSet<PeerId>,
}

pub(super) struct Segment {
    pub(super) memory: Backing,
    pub(super) capacity: u64,
    /// How much of the limit it takes: nothing, if it is a file or a GPU's.
    pub(super) cost: u64,
    pub(super) writer: Writer,
    /// Blobs that are in it.
    pub(super) blobs: usize,
    /// Whether its writer is writing.
    pub(super) is_lent: bool,
    /// Who has it mapped to read.
    pub(super) readers: BTreeSet<PeerId>,
    /// Whether somebody who read it was lost.
    pub(super) is_suspect: bool,
    /// Whether it was warm, of a GPU, and not what was wanted, since it was lent last.
    pub(super) is_unfit: bool,
    /// The daemon's own map.
    pub(super) map: Option<Arc<ReadMap>>,
}

/// What a segment is made of.
pub(super) enum Backing {
    /// Memory of this host, or a file.
    Host(OwnedFd),
    /// Memory of a GPU, which only its writer can make: by its driver's descriptor, once that has come.
    Device { uuid: Arc<str>, memory: Option<OwnedFd> },
}

pub(super) enum Writer {
    Peer(PeerId),
    /// The daemon, which writes small blobs into what is free of it.
    Slab(WriteMap, Extents),
    /// The daemon, one blob at a time; it has no map while it writes.
    Own(Option<WriteMap>),
    Gone,
}

impl Inner {
    /// A segment of somebody for so many bytes, now lent, and whether it is new.
    pub(super) fn prepare(
        &mut self,
        len: u64,
        limit: u64,
        is_own: impl Fn(&Segment) -> bool,
        writer: impl FnOnce() -> Writer,
    ) -> io::Result<Result<(SegmentId, bool), Exhausted>> {
        let Some(capacity) = len.max(1).checked_next_multiple_of(STEP) else {
            return Ok(Err(Exhausted { wanted: len, used: self.used, limit }));
        };
        let is_own = |segment: &Segment| segment.device().is_none() && is_own(segment);
        if let Some(id) = self.warm(len, capacity, is_own) {
            self.segments.get_mut(&id).expect("it was just found").is_lent = true;
            return Ok(Ok((id, false)));
        }
        // The manifest goes into a slab: there must be room for one.
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
        segment.is_lent = true;
        Ok(Ok((self.add(segment), true)))
    }

    /// A segment for so many bytes that is warm: the smallest that is not much larger.
    pub(super) fn warm(
        &mut self,
        len: u64,
        capacity: u64,
        is_own: impl Fn(&Segment) -> bool,
    ) -> Option<SegmentId> {
        let fits = |(_, segment): &(&SegmentId, &Segment)| {
            is_own(segment)
                && segment.is_warm()
                && segment.capacity >= len
                && segment.capacity <= capacity.saturating_mul(2)
        };
        let warm = self.segments.iter().filter(fits).min_by_key(|(_, segment)| segment.capacity);
        let id = warm.map(|(id, _)| *id)?;
        self.recycled += 1;
        Some(id)
    }

    /// A segment that a writer fills.
    pub(super) fn lent(
        &mut self,
        id: SegmentId,
        is_lent: impl Fn(&Segment) -> bool,
    ) -> io::Result<&mut Segment> {
        let segment = self.segments.get_mut(&id).filter(|segment| is_lent(segment));
        segment.ok_or_else(|| io::Error::other("the segment is not lent to it"))
    }

    /// Gives the blob a name that a writer has filled a segment with.
    pub(super) fn publish(
        &mut self,
        id: SegmentId,
        name: &str,
        len: u64,
        is_lent: impl Fn(&Segment) -> bool,
    ) -> io::Result<()> {
        if self.blobs.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let segment = self.lent(id, is_lent)?;
        if len > segment.capacity {
            return Err(io::Error::other("the segment is shorter"));
        }
        segment::seal(segment.host()?)?;
        segment.is_lent = false;
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

    pub(super) fn delete(&mut self, name: &str) {
        let Some(span) = self.blobs.remove(name) else { return };
        if let Some((device, _)) = self.hollow.remove(name) {
            self.vacate(device);
        }
        let segment = self.segments.get_mut(&span.segment).expect("a blob lies in a segment");
        if let Writer::Slab(_, free) = &mut segment.writer {
            free.give(span.offset, room_for(span.len));
        }
        self.vacate(span.segment);
    }

    /// A segment has one blob less.
    pub(super) fn vacate(&mut self, id: SegmentId) {
        let segment = self.segments.get_mut(&id).expect("a blob lies in a segment");
        segment.blobs -= 1;
        if segment.blobs == 0 && (segment.is_suspect || matches!(segment.writer, Writer::Gone)) {
            self.retire(id);
        }
    }

    /// Retires warm segments until there is room.
    pub(super) fn make_room(&mut self, wanted: u64, limit: u64) -> Result<(), Exhausted> {
        while self.used.saturating_add(wanted) > limit {
            let warm = self.segments.iter().find(|(_, segment)| segment.gives_room());
            let Some((&id, _)) = warm else {
                return Err(Exhausted { wanted, used: self.used, limit });
            };
            self.retire(id);
        }
        Ok(())
    }

    /// Closes a segment. Its bytes count until nobody has it mapped.
    pub(super) fn retire(&mut self, id: SegmentId) {
        let Some(segment) = self.segments.remove(&id) else { return };
        self.retired_bytes += segment.cost;
        let mut mappers = segment.readers;
        if let Writer::Peer(writer) = segment.writer {
            mappers.insert(writer);
        }
        for peer in &mappers {
            if let Some(unmaps) = self.peers.get(peer) {
                // Whoever does not listen any more is about to leave.
                let _ = unmaps.send(id);
            }
        }
        if mappers.is_empty() {
            self.used -= segment.cost;
        } else {
            self.retired.insert(id, Retired { cost: segment.cost, mappers });
        }
    }

    /// A peer has one segment mapped no longer, or none.
    pub(super) fn forget_mapper(&mut self, peer: PeerId, only: Option<SegmentId>) {
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
            is_lent: false,
            readers: BTreeSet::new(),
            is_suspect: false,
            is_unfit: false,
            map: None,
        }
    }

    /// Its memory, if that is this host's.
    pub(super) fn host(&self) -> io::Result<&OwnedFd> {
        match &self.memory {
            Backing::Host(memory) => Ok(memory),
            Backing::Device { .. } => Err(io::Error::other("it is memory of a GPU")),
        }
    }

    /// The GPU that it is memory of.
    pub(super) fn device(&self) -> Option<&str> {
        match &self.memory {
            Backing::Host(_) => None,
            Backing::Device { uuid, .. } => Some(uuid),
        }
    }

    pub(super) fn device_bytes(&self) -> Option<u64> {
        self.device().map(|_| self.capacity)
    }

    /// Whether there is more room for others when it is retired.
    pub(super) fn gives_room(&self) -> bool {
        self.is_warm() && self.cost > 0 && !matches!(self.writer, Writer::Gone)
    }

    pub(super) fn is_of(&self, peer: PeerId) -> bool {
        matches!(self.writer, Writer::Peer(writer) if writer == peer)
    }

    pub(super) fn is_warm(&self) -> bool {
        self.blobs == 0 && !self.is_lent
    }

    pub(super) fn is_lent_to(&self, peer: PeerId) -> bool {
        self.is_of(peer) && self.is_lent
    }

    /// Takes so many bytes of it, if it is a slab that has them. Who was lost may still read what is free of it.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        match &mut self.writer {
            Writer::Slab(_, free) if !self.is_suspect => free.take(len),
            _ => None,
        }
    }
}
