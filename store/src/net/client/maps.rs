//! What of a daemon's memory this process has mapped.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use super::broken;
use crate::device::{self, DeviceArchive};
use crate::error::{Error, Result};
use crate::io::local_archive::Near;
use crate::io::sync::{Lock, MutexGuard};
use crate::net::wire::{Begun, Reply, Room, SharedSegment};
use crate::shm::{Hollow, ReadMap, SegmentId, Span, WriteMap, check_lent, check_shared};

/// Segments by their names: those to read, and those to write that are not being written.
#[derive(Default)]
pub(super) struct Maps {
    inner: Lock<Inner>,
    /// Whoever has it maps to read: who wants the same waits, and finds it mapped.
    mapping: Lock<()>,
    /// The same to write, which takes longer: new memory comes with all its pages.
    mapping_to_write: Lock<()>,
}

#[derive(Default)]
struct Inner {
    /// Memory that has come and is not mapped yet, to read and to write.
    shared: BTreeMap<SegmentId, (OwnedFd, u64)>,
    lent: BTreeMap<SegmentId, Arc<OwnedFd>>,
    read: BTreeMap<SegmentId, Arc<ReadMap>>,
    write: BTreeMap<SegmentId, WriteMap>,
    /// Memory of GPUs: which has come and is not mapped yet, and which is, to read, and to write.
    brought: BTreeMap<SegmentId, (Arc<OwnedFd>, SharedSegment)>,
    device_read: BTreeMap<SegmentId, Arc<dyn device::Segment>>,
    device_write: BTreeMap<SegmentId, Arc<dyn device::Segment>>,
    /// Those that are let go, and may be held by views still.
    gone: BTreeMap<SegmentId, Gone>,
}

/// What may hold a segment still.
enum Gone {
    Host(Weak<ReadMap>),
    Device([Option<Weak<dyn device::Segment>>; 2]),
}

impl Gone {
    fn is_unmapped(&self) -> bool {
        match self {
            Self::Host(map) => map.strong_count() == 0,
            Self::Device(maps) => maps.iter().flatten().all(|map| map.strong_count() == 0),
        }
    }
}

impl Maps {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Keeps the memory that came with a reply, whether or not somebody still waits for it: the daemon
    /// sends it once.
    pub(super) fn receive(&self, reply: &Reply, fds: Vec<OwnedFd>) {
        let mut inner = self.inner();
        match reply {
            Reply::Leased(leased) => {
                for (each, memory) in leased.segments.iter().zip(fds) {
                    if each.device.is_some() {
                        inner.brought.insert(each.segment, (memory.into(), each.clone()));
                    } else {
                        inner.shared.insert(each.segment, (memory, each.capacity));
                    }
                }
            }
            Reply::Begun(Begun { room: Room::Segment { segment, .. }, .. })
            | Reply::Room(Room::Segment { segment, .. })
            | Reply::Rooms { room: Room::Segment { segment, .. }, .. } => {
                inner.lent.extend(fds.into_iter().map(|memory| (*segment, memory.into())));
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

    /// Whether a segment is mapped to read.
    pub(super) fn has(&self, segment: SegmentId) -> bool {
        self.inner().read.contains_key(&segment)
    }

    fn read_map(&self, segment: SegmentId) -> Result<Arc<ReadMap>> {
        if let Some(map) = self.inner().read.get(&segment) {
            return Ok(map.clone());
        }
        let _mapping = self.mapping.lock();
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

    /// An archive in a segment of a GPU. It is mapped if it is not yet.
    pub(super) fn hollow(&self, Hollow { shell, device, len }: Hollow) -> Result<Near> {
        let shell = self.archive(shell)?.blob.bytes().cloned().unwrap_or_default();
        let segment = self.device_map(device)?;
        let blob = DeviceArchive::new(shell, len, Some(segment))
            .map_err(|error| Error::io(format_args!("segment {device}"), error))?;
        Ok(Near::without_checksums(blob))
    }

    fn device_map(&self, segment: SegmentId) -> Result<Arc<dyn device::Segment>> {
        if let Some(map) = self.inner().device_read.get(&segment) {
            return Ok(map.clone());
        }
        let _mapping = self.mapping.lock();
        let inner = self.inner();
        if let Some(map) = inner.device_read.get(&segment) {
            return Ok(map.clone());
        }
        let brought = inner.brought.get(&segment);
        let (memory, SharedSegment { capacity, device, .. }) =
            brought.ok_or_else(|| broken("it names a segment of a GPU that it never sent"))?;
        let (memory, uuid) = (memory.clone(), device.clone().unwrap_or_default());
        let capacity = *capacity;
        drop(inner);
        // Until it is mapped its descriptor stays: whoever asks again is told the same, or finds it.
        let map = device::driver()?.import(&uuid, &memory, capacity)?;
        let mut inner = self.inner();
        // It may have been let go of meanwhile: then nobody says so again.
        if inner.brought.remove(&segment).is_none() {
            return Err(broken("it has let go of a segment of a GPU that it names"));
        }
        inner.device_read.insert(segment, map.clone());
        Ok(map)
    }

    /// A segment of a GPU to write; if there is none yet, it is made, and its descriptor is to go to the daemon.
    pub(super) fn device_lent(
        &self,
        lent: &SharedSegment,
    ) -> Result<(Arc<dyn device::Segment>, Option<OwnedFd>)> {
        if let Some(map) = self.inner().device_write.get(&lent.segment) {
            return Ok((map.clone(), None));
        }
        let uuid = lent.device.as_deref().unwrap_or_default();
        let (map, memory) = device::driver()?.allocate(uuid, lent.capacity)?;
        Ok((map, Some(memory)))
    }

    /// Keeps a segment of a GPU that the daemon has.
    pub(super) fn keep_device(&self, segment: SegmentId, map: Arc<dyn device::Segment>) {
        self.inner().device_write.insert(segment, map);
    }

    /// Whether a segment to write has come that is not mapped yet.
    pub(super) fn is_new(&self, segment: SegmentId) -> bool {
        self.inner().lent.contains_key(&segment)
    }

    /// Maps a segment to write, if its memory is new. It is kept, whether or not somebody still waits for
    /// it: the daemon sends it once.
    pub(super) fn lent(&self, segment: SegmentId, capacity: u64) -> Result<()> {
        let failed = |error| Error::io(format_args!("segment {segment}"), error);
        // A put that was given up may be mapping it still.
        let _mapping = self.mapping_to_write.lock();
        let Some(memory) = self.inner().lent.get(&segment).cloned() else { return Ok(()) };
        check_lent(&memory, capacity).map_err(failed)?;
        let map = WriteMap::new(&memory, capacity).map_err(failed)?;
        // Until it is mapped its descriptor stays, for whoever is lent it next. It may be retired meanwhile.
        let mut inner = self.inner();
        if inner.lent.remove(&segment).is_some() {
            inner.write.insert(segment, map);
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
            inner.brought.remove(segment);
            let device = [inner.device_read.remove(segment), inner.device_write.remove(segment)];
            let gone = if device.iter().any(Option::is_some) {
                Gone::Device(device.map(|map| map.as_ref().map(Arc::downgrade)))
            } else {
                let map = inner.read.remove(segment);
                Gone::Host(map.map_or_else(Weak::new, |map| Arc::downgrade(&map)))
            };
            inner.gone.insert(*segment, gone);
        }
        let unmapped = inner.gone.extract_if(.., |_, gone| gone.is_unmapped());
        unmapped.map(|(segment, _)| segment).collect()
    }

    /// Lets go of all.
    pub(super) fn clear(&self) {
        let mut inner = self.inner();
        inner.write.clear();
        inner.lent.clear();
        inner.shared.clear();
        inner.brought.clear();
        inner.device_write.clear();
        let read = std::mem::take(&mut inner.read);
        let host = read.iter().map(|(segment, map)| (*segment, Gone::Host(Arc::downgrade(map))));
        inner.gone.extend(host);
        let read = std::mem::take(&mut inner.device_read);
        let gone = |map: &Arc<dyn device::Segment>| Gone::Device([Some(Arc::downgrade(map)), None]);
        inner.gone.extend(read.iter().map(|(segment, map)| (*segment, gone(map))));
    }

    /// Whether no view holds a map any more.
    pub(super) fn is_all_unmapped(&self) -> bool {
        self.inner().gone.values().all(Gone::is_unmapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::create;

    const CAPACITY: u64 = 8 << 20;

    fn lent(segments: impl IntoIterator<Item = SegmentId>) -> Maps {
        let maps = Maps::default();
        for segment in segments {
            let room = Room::Segment { segment, capacity: CAPACITY };
            maps.receive(&Reply::Room(room), vec![create(CAPACITY).unwrap()]);
        }
        maps
    }

    #[test]
    fn memory_that_could_not_be_mapped_is_mapped_the_next_time() {
        let maps = lent([1]);
        assert!(maps.lent(1, 2 * CAPACITY).is_err());
        maps.lent(1, CAPACITY).unwrap();
        assert_eq!(maps.take(1).unwrap().len() as u64, CAPACITY);
        assert!(maps.take(1).is_err(), "it is being written");
    }

    /// A put that is cancelled leaves the thread that maps behind, and the daemon lends the segment again.
    #[test]
    fn who_is_lent_what_another_one_is_mapping_finds_it_mapped() {
        let maps = &lent(0..16);
        for segment in 0..16 {
            std::thread::scope(|scope| {
                scope.spawn(move || maps.lent(segment, CAPACITY).unwrap());
                while maps.is_new(segment) {
                    maps.lent(segment, CAPACITY).unwrap();
                }
                assert!(maps.take(segment).is_ok(), "{segment}");
            });
        }
    }

    #[test]
    fn memory_that_is_retired_before_it_is_mapped_is_never_mapped() {
        let maps = lent([1, 2]);
        assert_eq!(maps.unmap(&[1]), [1]);
        maps.lent(1, CAPACITY).unwrap();
        assert!(maps.take(1).is_err() && maps.is_new(2) && !maps.is_new(1));
    }
}
