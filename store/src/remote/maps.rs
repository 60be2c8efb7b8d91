//! What of a daemon's memory this process has mapped.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::broken;
use crate::arena::{ReadMap, SegmentId, Span, WriteMap, check_lent, check_shared};
use crate::error::{Error, Result};
use crate::volume::Near;
use crate::wire::{Begun, Reply, Room};

/// Segments by their names: those to read, and those to write that are not being written.
#[derive(Default)]
pub(super) struct Maps {
    inner: Mutex<Inner>,
    /// Whoever has it maps: who wants the same waits, and finds it mapped.
    mapping: Mutex<()>,
}

#[derive(Default)]
struct Inner {
    /// Memory that has come and is not mapped yet, to read and to write.
    shared: BTreeMap<SegmentId, (OwnedFd, u64)>,
    lent: BTreeMap<SegmentId, OwnedFd>,
    read: BTreeMap<SegmentId, Arc<ReadMap>>,
    write: BTreeMap<SegmentId, WriteMap>,
    /// Those that are let go, and may be held by views still.
    gone: BTreeMap<SegmentId, Weak<ReadMap>>,
}

impl Maps {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding the maps")
    }

    /// Keeps the memory that came with a reply, whether or not somebody still waits for it: the daemon
    /// sends it once.
    pub(super) fn receive(&self, reply: &Reply, fds: Vec<OwnedFd>) {
        let mut inner = self.inner();
        match reply {
            Reply::Leased(leased) => {
                for (each, memory) in leased.segments.iter().zip(fds) {
                    inner.shared.insert(each.segment, (memory, each.capacity));
                }
            }
            Reply::Begun(Begun { room: Room::Segment { segment, .. }, .. })
            | Reply::Room(Room::Segment { segment, .. }) => {
                inner.lent.extend(fds.into_iter().map(|memory| (*segment, memory)));
            }
            // Nobody has asked for what comes with other replies.
            _ => {}
        }
    }

    /// An archive. Its segment is mapped if it is not yet, which takes long.
    pub(super) fn archive(&self, Span { segment, offset, len }: Span) -> Result<Near> {
        let map = self.read_map(segment)?;
        map.archive(offset, len).ok_or_else(|| broken("an archive reaches beyond its segment"))
    }

    fn read_map(&self, segment: SegmentId) -> Result<Arc<ReadMap>> {
        if let Some(map) = self.inner().read.get(&segment) {
            return Ok(map.clone());
        }
        let _mapping = self.mapping.lock().expect("nobody panics while mapping");
        let mut inner = self.inner();
        if let Some((memory, capacity)) = inner.shared.remove(&segment) {
            drop(inner);
            let map = check_shared(&memory, capacity)
                .and_then(|()| ReadMap::new(memory, capacity))
                .map_err(|error| Error::io(format_args!("segment {segment}"), error))?;
            inner = self.inner();
            inner.read.insert(segment, map);
        }
        inner.read.get(&segment).cloned().ok_or_else(|| broken("it names a segment it never sent"))
    }

    /// Maps a segment to write, if its memory is new. It is kept, whether or not somebody still waits for
    /// it: the daemon sends it once.
    pub(super) fn lent(&self, segment: SegmentId, capacity: u64) -> Result<()> {
        let failed = |error| Error::io(format_args!("segment {segment}"), error);
        let memory = self.inner().lent.remove(&segment);
        if let Some(memory) = memory {
            check_lent(&memory, capacity).map_err(failed)?;
            self.keep(segment, WriteMap::new(&memory, capacity).map_err(failed)?);
        }
        Ok(())
    }

    /// A segment to write that is mapped and was lent.
    pub(super) fn take(&self, segment: SegmentId) -> Result<WriteMap> {
        let map = self.inner().write.remove(&segment);
        map.ok_or_else(|| broken("it lends a segment it never sent"))
    }

    /// Keeps a segment that is written, warm for the next time.
    pub(super) fn keep(&self, segment: SegmentId, map: WriteMap) {
        self.inner().write.insert(segment, map);
    }

    /// Lets go of segments that the daemon has retired; returns those that nobody has mapped any more,
    /// of these and of earlier ones.
    pub(super) fn unmap(&self, segments: &[SegmentId]) -> Vec<SegmentId> {
        let mut inner = self.inner();
        for segment in segments {
            inner.write.remove(segment);
            inner.lent.remove(segment);
            inner.shared.remove(segment);
            let map = inner.read.remove(segment).map_or_else(Weak::new, |map| Arc::downgrade(&map));
            inner.gone.insert(*segment, map);
        }
        let unmapped = inner.gone.extract_if(.., |_, map| map.strong_count() == 0);
        unmapped.map(|(segment, _)| segment).collect()
    }

    /// Lets go of all.
    pub(super) fn clear(&self) {
        let mut inner = self.inner();
        inner.write.clear();
        inner.lent.clear();
        inner.shared.clear();
        let read = std::mem::take(&mut inner.read);
        inner.gone.extend(read.iter().map(|(segment, map)| (*segment, Arc::downgrade(map))));
    }

    /// Whether no view holds a map any more.
    pub(super) fn is_all_unmapped(&self) -> bool {
        self.inner().gone.values().all(|map| map.strong_count() == 0)
    }
}
