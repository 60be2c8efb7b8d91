//! Maps of a daemon's memory in this process.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use super::protocol_violation;
use crate::device::{self, DeviceArchive};
use crate::error::{Error, Result};
use crate::io::local_archive::LocalArchive;
use crate::io::sync::{Lock, MutexGuard};
use crate::net::wire::{BeginReply, Reply, SharedSegment, WriteTarget};
use crate::shm::{DeviceSpan, ReadMap, SegmentId, Span, WriteMap, check_readable, check_writable};

/// Segments by id: maps for reading, and maps for writing that no contribution uses.
#[derive(Default)]
pub(super) struct SegmentMaps {
    inner: Lock<Inner>,
    /// Held while a segment is mapped for reading. Other readers of it wait, and find the map.
    read_lock: Lock<()>,
    /// The same for writing, which takes longer: new memory is mapped with all its pages.
    write_lock: Lock<()>,
}

#[derive(Default)]
struct Inner {
    /// Received descriptors that are not mapped yet: for reading, with the capacity in bytes, and
    /// for writing.
    read_fds: BTreeMap<SegmentId, (OwnedFd, u64)>,
    write_fds: BTreeMap<SegmentId, Arc<OwnedFd>>,
    read_maps: BTreeMap<SegmentId, Arc<ReadMap>>,
    write_maps: BTreeMap<SegmentId, WriteMap>,
    /// GPU memory: received descriptors that are not mapped yet, and maps for reading and for
    /// writing.
    device_fds: BTreeMap<SegmentId, (Arc<OwnedFd>, SharedSegment)>,
    device_read_maps: BTreeMap<SegmentId, Arc<dyn device::Segment>>,
    device_write_maps: BTreeMap<SegmentId, Arc<dyn device::Segment>>,
    /// Retired segments that views may still use.
    retired: BTreeMap<SegmentId, RetiredMaps>,
}

/// Weak references to the maps of a retired segment.
enum RetiredMaps {
    Host(Weak<ReadMap>),
    Device([Option<Weak<dyn device::Segment>>; 2]),
}

impl RetiredMaps {
    fn is_unmapped(&self) -> bool {
        match self {
            Self::Host(map) => map.strong_count() == 0,
            Self::Device(maps) => maps.iter().flatten().all(|map| map.strong_count() == 0),
        }
    }
}

impl SegmentMaps {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Stores the descriptors of a reply.
    ///
    /// That happens even if no caller waits for it, because the daemon sends them once.
    pub(super) fn store_descriptors(&self, reply: &Reply, fds: Vec<OwnedFd>) {
        let mut inner = self.inner();
        match reply {
            Reply::Leased(leased) => {
                for (each, memory) in leased.segments.iter().zip(fds) {
                    if each.device_uuid.is_some() {
                        inner.device_fds.insert(each.segment, (memory.into(), each.clone()));
                    } else {
                        inner.read_fds.insert(each.segment, (memory, each.capacity));
                    }
                }
            }
            Reply::Begun(BeginReply {
                write_target: WriteTarget::Segment { segment, .. }, ..
            })
            | Reply::WriteTarget(WriteTarget::Segment { segment, .. })
            | Reply::DeviceWriteTargets {
                write_target: WriteTarget::Segment { segment, .. },
                ..
            } => {
                inner.write_fds.extend(fds.into_iter().map(|memory| (*segment, memory.into())));
            }
            // Descriptors of other replies were not requested.
            _ => {}
        }
    }

    /// Opens an archive. Maps its segment if that is not mapped yet, which takes long.
    pub(super) fn open_archive(&self, Span { segment, offset, len }: Span) -> Result<LocalArchive> {
        let map = self.read_map(segment)?;
        map.archive(offset, len)
            .ok_or_else(|| protocol_violation("an archive reaches beyond its segment"))
    }

    /// Returns whether a segment is mapped for reading.
    pub(super) fn is_mapped(&self, segment: SegmentId) -> bool {
        self.inner().read_maps.contains_key(&segment)
    }

    fn read_map(&self, segment: SegmentId) -> Result<Arc<ReadMap>> {
        if let Some(map) = self.inner().read_maps.get(&segment) {
            return Ok(map.clone());
        }
        let _guard = self.read_lock.lock();
        let mut inner = self.inner();
        if let Some((memory, capacity)) = inner.read_fds.remove(&segment) {
            drop(inner);
            let map = check_readable(&memory, capacity)
                .and_then(|()| ReadMap::new(memory, capacity))
                .map_err(|error| Error::io(format_args!("segment {segment}"), error))?;
            inner = self.inner();
            inner.read_maps.insert(segment, map);
        }
        inner
            .read_maps
            .get(&segment)
            .cloned()
            .ok_or_else(|| protocol_violation("it names a segment it never sent"))
    }

    /// Opens an archive in GPU memory. Maps its segment if that is not mapped yet.
    pub(super) fn open_device_archive(
        &self,
        DeviceSpan { host_part, device_segment, len }: DeviceSpan,
    ) -> Result<LocalArchive> {
        let host_part = self.open_archive(host_part)?.blob.bytes().cloned().unwrap_or_default();
        let segment = self.device_map(device_segment)?;
        let blob = DeviceArchive::new(host_part, len, Some(segment))
            .map_err(|error| Error::io(format_args!("segment {device_segment}"), error))?;
        Ok(LocalArchive::without_checksums(blob))
    }

    fn device_map(&self, segment: SegmentId) -> Result<Arc<dyn device::Segment>> {
        if let Some(map) = self.inner().device_read_maps.get(&segment) {
            return Ok(map.clone());
        }
        let _guard = self.read_lock.lock();
        let inner = self.inner();
        if let Some(map) = inner.device_read_maps.get(&segment) {
            return Ok(map.clone());
        }
        let received = inner.device_fds.get(&segment);
        let (memory, SharedSegment { capacity, device_uuid, .. }) = received
            .ok_or_else(|| protocol_violation("it names a segment of a GPU that it never sent"))?;
        let (memory, uuid) = (memory.clone(), device_uuid.clone().unwrap_or_default());
        let capacity = *capacity;
        drop(inner);
        // The descriptor stays until the map exists, so that a later call can try again.
        let map = device::driver()?.import(&uuid, &memory, capacity)?;
        let mut inner = self.inner();
        // The daemon may have retired it meanwhile, and does not send that notice again.
        if inner.device_fds.remove(&segment).is_none() {
            return Err(protocol_violation("it has let go of a segment of a GPU that it names"));
        }
        inner.device_read_maps.insert(segment, map.clone());
        Ok(map)
    }

    /// Returns a GPU segment for writing.
    ///
    /// Allocates it if needed, and then also returns its descriptor, which the daemon needs.
    pub(super) fn device_write_segment(
        &self,
        shared: &SharedSegment,
    ) -> Result<(Arc<dyn device::Segment>, Option<OwnedFd>)> {
        if let Some(map) = self.inner().device_write_maps.get(&shared.segment) {
            return Ok((map.clone(), None));
        }
        let uuid = shared.device_uuid.as_deref().unwrap_or_default();
        let (map, memory) = device::driver()?.allocate(uuid, shared.capacity)?;
        Ok((map, Some(memory)))
    }

    /// Stores a GPU segment whose descriptor the daemon has.
    pub(super) fn add_device_segment(&self, segment: SegmentId, map: Arc<dyn device::Segment>) {
        self.inner().device_write_maps.insert(segment, map);
    }

    /// Returns whether the descriptor of a segment for writing is not mapped yet.
    pub(super) fn needs_write_map(&self, segment: SegmentId) -> bool {
        self.inner().write_fds.contains_key(&segment)
    }

    /// Maps a segment for writing, if its descriptor is new.
    ///
    /// The map is stored even if the caller no longer waits: the daemon sends the descriptor once.
    pub(super) fn map_for_writing(&self, segment: SegmentId, capacity: u64) -> Result<()> {
        let io_error = |error| Error::io(format_args!("segment {segment}"), error);
        // A cancelled put may still be mapping it.
        let _guard = self.write_lock.lock();
        let Some(memory) = self.inner().write_fds.get(&segment).cloned() else { return Ok(()) };
        check_writable(&memory, capacity).map_err(io_error)?;
        let map = WriteMap::new(&memory, capacity).map_err(io_error)?;
        // The descriptor stays until the map exists, for the next put that gets the segment. The
        // daemon may have retired it meanwhile.
        let mut inner = self.inner();
        if inner.write_fds.remove(&segment).is_some() {
            inner.write_maps.insert(segment, map);
        }
        Ok(())
    }

    /// Removes and returns the map of a segment for writing.
    pub(super) fn take_write_map(&self, segment: SegmentId) -> Result<WriteMap> {
        let map = self.inner().write_maps.remove(&segment);
        map.ok_or_else(|| protocol_violation("it lends a segment it never sent"))
    }

    /// Stores the map of a written segment for later puts.
    pub(super) fn put_back_write_map(&self, segment: SegmentId, map: WriteMap) {
        self.inner().write_maps.insert(segment, map);
    }

    /// Removes segments that the daemon has retired.
    ///
    /// Returns those that no view uses any longer, of these and of earlier ones.
    pub(super) fn unmap(&self, segments: &[SegmentId]) -> Vec<SegmentId> {
        let mut inner = self.inner();
        for segment in segments {
            inner.write_maps.remove(segment);
            inner.write_fds.remove(segment);
            inner.read_fds.remove(segment);
            inner.device_fds.remove(segment);
            let device =
                [inner.device_read_maps.remove(segment), inner.device_write_maps.remove(segment)];
            let retired = if device.iter().any(Option::is_some) {
                RetiredMaps::Device(device.map(|map| map.as_ref().map(Arc::downgrade)))
            } else {
                let map = inner.read_maps.remove(segment);
                RetiredMaps::Host(map.map_or_else(Weak::new, |map| Arc::downgrade(&map)))
            };
            inner.retired.insert(*segment, retired);
        }
        let unmapped = inner.retired.extract_if(.., |_, retired| retired.is_unmapped());
        unmapped.map(|(segment, _)| segment).collect()
    }

    /// Removes all segments.
    pub(super) fn clear(&self) {
        let mut inner = self.inner();
        inner.write_maps.clear();
        inner.write_fds.clear();
        inner.read_fds.clear();
        inner.device_fds.clear();
        inner.device_write_maps.clear();
        let read = std::mem::take(&mut inner.read_maps);
        let host =
            read.iter().map(|(segment, map)| (*segment, RetiredMaps::Host(Arc::downgrade(map))));
        inner.retired.extend(host);
        let read = std::mem::take(&mut inner.device_read_maps);
        let retired =
            |map: &Arc<dyn device::Segment>| RetiredMaps::Device([Some(Arc::downgrade(map)), None]);
        inner.retired.extend(read.iter().map(|(segment, map)| (*segment, retired(map))));
    }

    /// Returns whether no view uses a retired segment.
    pub(super) fn is_all_unmapped(&self) -> bool {
        self.inner().retired.values().all(RetiredMaps::is_unmapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::create;

    const CAPACITY: u64 = 8 << 20;

    fn maps_with_segments(segments: impl IntoIterator<Item = SegmentId>) -> SegmentMaps {
        let maps = SegmentMaps::default();
        for segment in segments {
            let target = WriteTarget::Segment { segment, capacity: CAPACITY };
            maps.store_descriptors(&Reply::WriteTarget(target), vec![create(CAPACITY).unwrap()]);
        }
        maps
    }

    #[test]
    fn failed_map_is_retried() {
        let maps = maps_with_segments([1]);
        assert!(maps.map_for_writing(1, 2 * CAPACITY).is_err());
        maps.map_for_writing(1, CAPACITY).unwrap();
        assert_eq!(maps.take_write_map(1).unwrap().len() as u64, CAPACITY);
        assert!(maps.take_write_map(1).is_err(), "it is being written");
    }

    /// A cancelled put leaves a thread that maps the segment, while the daemon assigns it to
    /// another put.
    #[test]
    fn segment_that_another_thread_maps_is_found_mapped() {
        let maps = &maps_with_segments(0..16);
        for segment in 0..16 {
            std::thread::scope(|scope| {
                scope.spawn(move || maps.map_for_writing(segment, CAPACITY).unwrap());
                while maps.needs_write_map(segment) {
                    maps.map_for_writing(segment, CAPACITY).unwrap();
                }
                assert!(maps.take_write_map(segment).is_ok(), "{segment}");
            });
        }
    }

    #[test]
    fn retired_segment_is_not_mapped() {
        let maps = maps_with_segments([1, 2]);
        assert_eq!(maps.unmap(&[1]), [1]);
        maps.map_for_writing(1, CAPACITY).unwrap();
        assert!(
            maps.take_write_map(1).is_err() && maps.needs_write_map(2) && !maps.needs_write_map(1)
        );
    }
}
