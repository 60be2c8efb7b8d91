//! Device memory that contains tensors.
#![expect(unsafe_code, reason = "the memory of tensors belongs to whoever has made them")]

use std::any::Any;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::{fmt, io};

use bytes::Bytes;
use tssd_format::{Blob, Layout, StateDict, Tensor, Value};

use crate::device::{Device, PooledStream};
use crate::driver::{CopySource, CopyStream, Event};
use crate::fences::StreamFences;
use crate::pinned;
use crate::segment::DeviceSegment;
use crate::virtual_memory;
use crate::{CopyStats, Stream};
use tssd_store::device::{BlobCopy, BlobMut, CopyBatch, DeviceArchive, PendingCopy};
use tssd_store::{Error, Result};

/// Memory of a device, such as that of a tensor's storage.
///
/// - Put: [`Storage::from_blob`](tssd_format::Storage::from_blob) makes a storage of it; its tensors are put like others.
/// - Get: [`TargetMemory::Device`](tssd_store::TargetMemory::Device) makes it the target.
///
/// Copies from and to the memory of a daemon on this host run at the speed of the bus.
pub struct DeviceMemory {
    device: Device,
    pointer: u64,
    len: u64,
    /// Event before the first access to a byte.
    ready: Arc<Event>,
    stats: Arc<Mutex<CopyStats>>,
    _owner: Box<dyn Send + Sync>,
}

impl DeviceMemory {
    /// Creates a view of `len` bytes at `pointer`.
    ///
    /// Copies wait for the work that `stream` has been given so far. A get returns when all bytes are written,
    /// independent of later work of the stream.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is no driver; `Invalid` if `pointer` is not device memory.
    ///
    /// # Safety
    ///
    /// As long as `owner` exists, the `len` bytes at `pointer` must be memory of one device. As long as this view
    /// exists, no other work may write the memory, nor read it if a get fills it, except the work that the stream was
    /// given before. The stream must belong to the primary context of the device, like those of torch.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_gpu::{DeviceMemory, Stream};
    /// use tssd_store::ErrorKind;
    /// // SAFETY: the range is empty.
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

    /// As [`DeviceMemory::new`], for one of many tensors: tensors of one stream share a fence.
    ///
    /// Tensors created earlier with the same fences also wait for the work that the stream has been given since.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::new`]. In addition, `stream` must exist until the memory of all tensors with these fences is
    /// put or filled.
    pub unsafe fn with_fences(
        fences: &StreamFences,
        pointer: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let device = Device::of_pointer(pointer)?;
        // SAFETY: the stream belongs to the primary context of the device, as the caller guarantees.
        let ready = unsafe { fences.event(&device, stream)? };
        Ok(Self { device, pointer, len, ready, stats: Arc::default(), _owner: Box::new(owner) })
    }

    /// Returns the device.
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
        self.lock_stats().clone()
    }

    fn lock_stats(&self) -> MutexGuard<'_, CopyStats> {
        self.stats.lock().expect("nobody panics while counting")
    }

    /// Returns the device address of `len` bytes at an offset, if they lie in this memory.
    fn address(&self, offset: u64, len: usize) -> io::Result<u64> {
        let len = u64::try_from(len).map_err(io::Error::other)?;
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(self.pointer + offset)
    }

    /// As `address`, with errors of the store. The bytes may not be ready yet.
    pub(crate) fn device_address(&self, offset: u64, len: u64) -> Result<u64> {
        let address = usize::try_from(len).map_err(io::Error::other);
        let address = address.and_then(|len| self.address(offset, len));
        address.map_err(|error| Error::io("memory of a GPU", error))
    }

    /// Makes a stream wait until the memory is ready.
    pub(crate) fn wait_until_ready(&self, stream: &CopyStream) -> Result<()> {
        stream.wait(&self.ready)
    }

    /// Makes a stream wait until the memory is ready.
    ///
    /// Returns the device address of `len` bytes at an offset.
    pub(crate) fn begin_read(&self, stream: &CopyStream, offset: u64, len: u64) -> Result<u64> {
        let address = self.device_address(offset, len)?;
        self.wait_until_ready(stream)?;
        self.lock_stats().device += len;
        Ok(address)
    }

    /// Whether the device copies from and to `host` by DMA. Pins it if possible.
    pub(crate) fn can_pin(&self, host: &[u8]) -> bool {
        let context = self.device.context();
        context.is_ok_and(|context| pinned::pin(context, &addresses(host)).is_ok())
    }

    /// Begins to copy bytes at an offset to pinned host memory.
    ///
    /// # Safety
    ///
    /// This memory and the target must exist, and the target must not be accessed, until [`CopyStream::finish`] has returned,
    /// or until an event that was recorded on the stream after this call is done.
    pub(crate) unsafe fn start_read(
        &self,
        stream: &CopyStream,
        offset: u64,
        target: &mut [u8],
    ) -> Result<()> {
        let len = u64::try_from(target.len()).unwrap_or(u64::MAX);
        let source = self.device_address(offset, len)?;
        self.wait_until_ready(stream)?;
        self.lock_stats().pinned += len;
        // SAFETY: the source range was checked; the caller guarantees the rest.
        unsafe { stream.start_read(target, source) }
    }

    /// Copies from or to host memory, which is pinned first if possible.
    fn copy(
        &self,
        host: Range<usize>,
        copy: impl FnOnce(&CopyStream) -> Result<()>,
    ) -> io::Result<()> {
        if host.is_empty() {
            return Ok(());
        }
        let bytes = u64::try_from(host.len()).map_err(io::Error::other)?;
        let context = self.device.context().map_err(io::Error::other)?;
        let pinned = pinned::pin(context, &host);
        let stream = self.device.stream().map_err(io::Error::other)?;
        self.wait_until_ready(&stream).and_then(|()| copy(&stream)).map_err(io::Error::other)?;
        match pinned {
            Ok(()) => self.lock_stats().pinned += bytes,
            Err(reason) => self.lock_stats().count_pageable(bytes, reason),
        }
        Ok(())
    }
}

/// Memory from which the device copies by DMA.
#[derive(Clone, Copy)]
enum DmaSource<'a> {
    /// Memory of the same device.
    Device(&'a DeviceSegment),
    /// Pinned host memory.
    Pinned(&'a [u8]),
}

impl DmaSource<'_> {
    /// Returns the source of `len` bytes at an offset.
    fn at(self, offset: u64, len: u64) -> Result<CopySource> {
        match self {
            Self::Device(segment) => segment.device_address(offset, len).map(CopySource::Device),
            Self::Pinned(bytes) => {
                let end = offset.checked_add(len).and_then(|end| usize::try_from(end).ok());
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let found = end.and_then(|end| bytes.get(start..end));
                let error = || Error::io("memory of the host", io::ErrorKind::UnexpectedEof.into());
                found.map(|bytes| CopySource::Host(bytes.as_ptr())).ok_or_else(error)
            }
        }
    }
}

impl DeviceMemory {
    /// Returns the memory of a blob, if the device can copy from it by DMA.
    fn dma_source<'a>(&self, source: &'a dyn Blob) -> Option<DmaSource<'a>> {
        if let Some(archive) = source.as_any().and_then(|any| any.downcast_ref::<DeviceArchive>()) {
            let segment: &dyn Any = archive.segment()?;
            let segment = segment.downcast_ref::<DeviceSegment>();
            let segment = segment.filter(|segment| *segment.device() == self.device);
            return segment.map(DmaSource::Device);
        }
        let bytes = source.bytes()?;
        self.can_pin(bytes).then_some(DmaSource::Pinned(bytes))
    }

    /// Begins copies by DMA.
    fn begin_dma(
        &self,
        source: DmaSource<'_>,
        copies: &[BlobCopy<'_>],
        batch: &mut CopyBatch<'_>,
    ) -> io::Result<()> {
        let is_ours = |stream: &PooledStream| *stream.device() == self.device;
        let stream =
            batch.get_or_begin(is_ours, || self.device.stream().map_err(io::Error::other))?;
        self.wait_until_ready(stream).map_err(io::Error::other)?;
        for BlobCopy { source: offset, target, runs } in copies {
            let from = source.at(*offset, runs.source_span()).map_err(io::Error::other)?;
            let span = usize::try_from(runs.target_span()).map_err(io::Error::other)?;
            let to = self.address(*target, span)?;
            // SAFETY: both ranges were checked. They exist as long as they are borrowed, which is until the copies are
            // done. A lease prevents writes to the source. No other work uses the target, as its creator guarantees.
            unsafe { stream.start_runs(to, from, runs) }.map_err(io::Error::other)?;
            let mut stats = self.lock_stats();
            match source {
                DmaSource::Device(_) => stats.device += runs.total_bytes(),
                DmaSource::Pinned(_) => stats.pinned += runs.total_bytes(),
            }
        }
        Ok(())
    }
}

impl PendingCopy for PooledStream {
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
        let source = self.address(offset, target.len())?;
        self.copy(addresses(target), |stream| {
            // SAFETY: the range was checked, and exists as long as this memory.
            unsafe { stream.read(target, source) }
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
        let target = self.address(offset, bytes.len())?;
        self.copy(addresses(bytes), |stream| {
            // SAFETY: the range was checked, and exists as long as this memory. No other work uses it, as its creator
            // guarantees.
            unsafe { stream.write(target, bytes) }
        })
    }

    fn can_copy_from(&self, source: &dyn Blob) -> bool {
        self.dma_source(source).is_some()
    }

    fn begin_copy<'a>(
        &'a self,
        source: &'a dyn Blob,
        copies: &[BlobCopy<'_>],
        batch: &mut CopyBatch<'a>,
    ) -> io::Result<()> {
        let source = self.dma_source(source).ok_or(io::ErrorKind::Unsupported)?;
        self.begin_dma(source, copies, batch)
    }
}

/// Implements [`Driver::device_of`](tssd_store::device::Driver::device_of).
pub(crate) fn device_of(layout: &Layout) -> std::result::Result<String, String> {
    let mut tensor_counts: Vec<(&DeviceMemory, usize)> = Vec::new();
    for memory in layout.blobs().filter_map(device_memory) {
        match tensor_counts.iter_mut().find(|(other, _)| other.device() == memory.device()) {
            Some((_, count)) => *count += 1,
            None => tensor_counts.push((memory, 1)),
        }
    }
    let most = tensor_counts.into_iter().max_by_key(|(_, count)| *count);
    let (memory, _) = most.ok_or("none of its tensors is on a GPU")?;
    virtual_memory::check_support(memory.device().raw())?;
    Ok(memory.device().uuid())
}

/// Implements [`Driver::devices_of`](tssd_store::device::Driver::devices_of).
pub(crate) fn devices_of(dict: &StateDict) -> BTreeSet<String> {
    let uuid_of = |tensor: &Tensor| {
        let memory = tensor.storage().blob().and_then(|blob| device_memory(&**blob))?;
        Some(memory.device().uuid())
    };
    let uuids = dict.leaves().into_iter().flat_map(|(_, leaf)| match leaf {
        Value::Tensor(tensor) => uuid_of(tensor).into_iter().collect(),
        Value::Shards(shards) => {
            shards.iter().filter_map(|shard| uuid_of(shard.tensor())).collect()
        }
        _ => Vec::new(),
    });
    uuids.collect()
}

/// Returns a blob as device memory, if it is that.
pub(crate) fn device_memory(blob: &dyn Blob) -> Option<&DeviceMemory> {
    blob.as_any()?.downcast_ref()
}
