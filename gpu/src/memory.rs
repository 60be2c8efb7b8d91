//! Memory of devices that tensors lie in.
#![expect(unsafe_code, reason = "the memory of tensors belongs to whoever has made them")]

use std::any::Any;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::{fmt, io};

use bytes::Bytes;
use tssd_format::{Blob, Layout, StateDict, Tensor, Value};

use crate::device::{Device, OwnLane};
use crate::driver::{Event, Lane, Source};
use crate::fences::StreamFences;
use crate::pinned;
use crate::segment::DeviceSegment;
use crate::virtual_memory;
use crate::{CopyStats, Stream};
use tssd_store::device::{BlobCopy, BlobMut, CopyBatch, DeviceArchive, PendingCopy};
use tssd_store::{Error, Result};

/// Memory of a device, such as that of a tensor's storage.
///
/// What is put: [`Storage::from_blob`](tssd_format::Storage::from_blob) makes tensors of it, which are put as others are.
/// What is filled by a get: [`TargetMemory::Elsewhere`](tssd_store::TargetMemory::Elsewhere). Bytes are copied at the speed of
/// the bus from and to the memory of a daemon of this host.
pub struct DeviceMemory {
    device: Device,
    pointer: u64,
    len: u64,
    /// What must have happened before a byte is touched.
    ready: Arc<Event>,
    stats: Arc<Mutex<CopyStats>>,
    _owner: Box<dyn Send + Sync>,
}

impl DeviceMemory {
    /// So many bytes from a pointer on. They are read, or written, when a stream has done what it was given until now;
    /// what was written is there when the get returns, whatever the stream is given then.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is no driver, `Invalid` if it is not memory of a device.
    ///
    /// # Safety
    ///
    /// As long as `owner` is there, so many bytes from `pointer` on must be memory of one device. As long as this is
    /// there, nobody may write to it, nor read it if a get fills it, but for what the stream was given before. The stream
    /// must be one of the device's primary context, as those of torch are.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_gpu::{DeviceMemory, Stream};
    /// use tssd_store::ErrorKind;
    /// // SAFETY: there are no bytes.
    /// let memory = unsafe { DeviceMemory::new(0, 0, Stream::default(), ()) };
    /// let kind = memory.unwrap_err().kind();
    /// assert!(matches!(kind, ErrorKind::Unsupported | ErrorKind::Invalid));
    /// ```
    pub unsafe fn new(
        pointer: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        // SAFETY: the caller upholds the same contract. The fence is dropped with the memory.
        unsafe { Self::with_fences(&StreamFences::default(), pointer, len, stream, owner) }
    }

    /// As [`DeviceMemory::new`], for one of many tensors: tensors of one stream share a fence. Tensors that were made with
    /// these fences before also wait for the work that the stream has been given since.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::new`]. Besides, `stream` must exist until the memory of all tensors of these fences is put, or
    /// filled.
    pub unsafe fn with_fences(
        fences: &StreamFences,
        pointer: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let device = Device::of(pointer)?;
        // SAFETY: the stream belongs to the primary context of the device, as the caller guarantees.
        let ready = unsafe { fences.event(&device, stream)? };
        Ok(Self { device, pointer, len, ready, stats: Arc::default(), _owner: Box::new(owner) })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Counts the copies of this memory in `stats`, which other memory may share.
    #[must_use]
    pub fn with_stats(mut self, stats: &Arc<Mutex<CopyStats>>) -> Self {
        self.stats = stats.clone();
        self
    }

    /// Returns the copies from and to this memory so far.
    pub fn stats(&self) -> CopyStats {
        self.counts().clone()
    }

    fn counts(&self) -> MutexGuard<'_, CopyStats> {
        self.stats.lock().expect("nobody panics while counting")
    }

    /// Where so many bytes from an offset on are, if they are there.
    fn place(&self, offset: u64, len: usize) -> io::Result<u64> {
        let len = u64::try_from(len).map_err(io::Error::other)?;
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(self.pointer + offset)
    }

    /// Where so many bytes from an offset on are, whether or not they are there already.
    pub(crate) fn begins(&self, offset: u64, len: u64) -> Result<u64> {
        let place = usize::try_from(len).map_err(io::Error::other);
        let place = place.and_then(|len| self.place(offset, len));
        place.map_err(|error| Error::io("memory of a GPU", error))
    }

    /// Lets a stream wait until its bytes are there.
    pub(crate) fn settle(&self, lane: &Lane) -> Result<()> {
        lane.wait(&self.ready)
    }

    /// Lets a stream wait until its bytes are there; says where so many of them from an offset on are.
    pub(crate) fn begin_read(&self, lane: &Lane, offset: u64, len: u64) -> Result<u64> {
        let place = self.begins(offset, len)?;
        self.settle(lane)?;
        self.counts().device += len;
        Ok(place)
    }

    /// Whether its device copies from and to memory of the host by itself: that is pinned, if it can be.
    pub(crate) fn pins(&self, host: &[u8]) -> bool {
        let context = self.device.context();
        context.is_ok_and(|context| pinned::pin(context, &addresses(host)).is_ok())
    }

    /// Begins to copy bytes from an offset on to memory of the host that is pinned.
    ///
    /// # Safety
    ///
    /// Until [`Lane::finish`] has returned, or an event has come that was made of the lane after this, this and the target
    /// must be there, and nobody may look at the target.
    pub(crate) unsafe fn start_read(
        &self,
        lane: &Lane,
        offset: u64,
        target: &mut [u8],
    ) -> Result<()> {
        let len = u64::try_from(target.len()).unwrap_or(u64::MAX);
        let source = self.begins(offset, len)?;
        self.settle(lane)?;
        self.counts().pinned += len;
        // SAFETY: so many bytes are there, as proven; the rest is as the caller says.
        unsafe { lane.start_read(target, source) }
    }

    /// Copies from or to memory of the host, which is pinned first if it can be.
    fn copy(&self, host: Range<usize>, copy: impl FnOnce(&Lane) -> Result<()>) -> io::Result<()> {
        if host.is_empty() {
            return Ok(());
        }
        let bytes = u64::try_from(host.len()).map_err(io::Error::other)?;
        let context = self.device.context().map_err(io::Error::other)?;
        let pinned = pinned::pin(context, &host);
        let lane = self.device.lane().map_err(io::Error::other)?;
        self.settle(&lane).and_then(|()| copy(&lane)).map_err(io::Error::other)?;
        match pinned {
            Ok(()) => self.counts().pinned += bytes,
            Err(why) => self.counts().count_pageable(bytes, why),
        }
        Ok(())
    }
}

/// What a device copies from by itself.
#[derive(Clone, Copy)]
enum Straight<'a> {
    /// Memory of its own.
    Device(&'a DeviceSegment),
    /// Memory of the host that is pinned.
    Pinned(&'a [u8]),
}

impl Straight<'_> {
    /// So many bytes from an offset on.
    fn at(self, offset: u64, len: u64) -> Result<Source> {
        match self {
            Self::Device(segment) => segment.place(offset, len).map(Source::Device),
            Self::Pinned(bytes) => {
                let end = offset.checked_add(len).and_then(|end| usize::try_from(end).ok());
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let found = end.and_then(|end| bytes.get(start..end));
                let error = || Error::io("memory of the host", io::ErrorKind::UnexpectedEof.into());
                found.map(|bytes| Source::Host(bytes.as_ptr())).ok_or_else(error)
            }
        }
    }
}

impl DeviceMemory {
    /// What it can copy from by itself, if a blob is that.
    fn straight<'a>(&self, source: &'a dyn Blob) -> Option<Straight<'a>> {
        if let Some(archive) = source.as_any().and_then(|kind| kind.downcast_ref::<DeviceArchive>())
        {
            let segment: &dyn Any = archive.segment()?;
            let segment = segment.downcast_ref::<DeviceSegment>();
            let segment = segment.filter(|segment| *segment.device() == self.device);
            return segment.map(Straight::Device);
        }
        let bytes = source.bytes()?;
        self.pins(bytes).then_some(Straight::Pinned(bytes))
    }

    /// Begins to copy from there.
    fn begin_from(
        &self,
        source: Straight<'_>,
        copies: &[BlobCopy<'_>],
        batch: &mut CopyBatch<'_>,
    ) -> io::Result<()> {
        let is_ours = |lane: &OwnLane| *lane.device() == self.device;
        let lane = batch.get_or_begin(is_ours, || self.device.lane().map_err(io::Error::other))?;
        self.settle(lane).map_err(io::Error::other)?;
        for BlobCopy { source: offset, target, runs } in copies {
            let from = source.at(*offset, runs.source_span()).map_err(io::Error::other)?;
            let span = usize::try_from(runs.target_span()).map_err(io::Error::other)?;
            let to = self.place(*target, span)?;
            // SAFETY: both are there, as proven, as long as they are borrowed, which is until the copies are done. Nobody
            // writes the source: a lease holds what is read. Nobody else uses the target, as its maker has said.
            unsafe { lane.start_runs(to, from, runs) }.map_err(io::Error::other)?;
            let mut counts = self.counts();
            match source {
                Straight::Device(_) => counts.device += runs.total_bytes(),
                Straight::Pinned(_) => counts.pinned += runs.total_bytes(),
            }
        }
        Ok(())
    }
}

impl PendingCopy for OwnLane {
    fn wait(self: Box<Self>) -> io::Result<()> {
        self.finish().map_err(io::Error::other)
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {:?}", self.len, self.device)
    }
}

fn addresses(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr().addr();
    start..start + bytes.len()
}

impl Blob for DeviceMemory {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let source = self.place(offset, target.len())?;
        self.copy(addresses(target), |lane| {
            // SAFETY: so many bytes are there, as proven, as long as this is.
            unsafe { lane.read(target, source) }
        })
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl BlobMut for DeviceMemory {
    fn size(&self) -> u64 {
        self.len
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let target = self.place(offset, bytes.len())?;
        self.copy(addresses(bytes), |lane| {
            // SAFETY: there is room for so many bytes, as proven, as long as this is there, and nobody else uses it.
            unsafe { lane.write(target, bytes) }
        })
    }

    fn can_copy_from(&self, source: &dyn Blob) -> bool {
        self.straight(source).is_some()
    }

    fn begin_copy<'a>(
        &'a self,
        source: &'a dyn Blob,
        copies: &[BlobCopy<'_>],
        batch: &mut CopyBatch<'a>,
    ) -> io::Result<()> {
        let source = self.straight(source).ok_or(io::ErrorKind::Unsupported)?;
        self.begin_from(source, copies, batch)
    }
}

/// See [`device::Driver::device_of`](tssd_store::device::Driver::device_of).
pub(crate) fn device_of(layout: &Layout) -> std::result::Result<String, String> {
    let mut counts: Vec<(&DeviceMemory, usize)> = Vec::new();
    for memory in layout.blobs().filter_map(device_memory) {
        match counts.iter_mut().find(|(home, _)| home.device() == memory.device()) {
            Some((_, count)) => *count += 1,
            None => counts.push((memory, 1)),
        }
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    let (memory, _) = most.ok_or("none of its tensors is on a GPU")?;
    virtual_memory::is_there(memory.device().raw())?;
    Ok(memory.device().uuid())
}

/// See [`device::Driver::devices_of`](tssd_store::device::Driver::devices_of).
pub(crate) fn devices_of(dict: &StateDict) -> BTreeSet<String> {
    let of = |tensor: &Tensor| {
        let memory = tensor.storage().blob().and_then(|blob| device_memory(&**blob))?;
        Some(memory.device().uuid())
    };
    let counts = dict.leaves().into_iter().flat_map(|(_, leaf)| match leaf {
        Value::Tensor(tensor) => of(tensor).into_iter().collect(),
        Value::Shards(shards) => shards.iter().filter_map(|shard| of(shard.tensor())).collect(),
        _ => Vec::new(),
    });
    counts.collect()
}

/// The device memory that a blob is.
pub(crate) fn device_memory(blob: &dyn Blob) -> Option<&DeviceMemory> {
    blob.as_any()?.downcast_ref()
}
