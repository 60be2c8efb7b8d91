//! GPU memory that holds the elements of Python tensors.
#![expect(unsafe_code, reason = "the memory of tensors belongs to Python")]

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tssd_format::{Blob, Storage, Tensor};
use tssd_gpu::{CopyStats, DeviceMemory, Stream, StreamFences};
use tssd_store::device::{BlobCopy, BlobMut, CopyBatch};

use crate::error::Result;

/// GPU memory regions that one call uses, with statistics of the copies from and to them.
#[derive(Default)]
pub(crate) struct DeviceRegions {
    table: Mutex<MemoryTable>,
    /// Stream fences that the regions of this call wait for.
    fences: StreamFences,
    copy_stats: SharedCopyStats,
}

/// Statistics of the device copies so far, shared with [`DeviceRegions`]. Does not keep the memory alive.
#[derive(Clone, Default)]
pub(crate) struct SharedCopyStats(Arc<Mutex<CopyStats>>);

impl SharedCopyStats {
    /// Returns a snapshot of the statistics; `None` if nothing was copied.
    pub(crate) fn snapshot(&self) -> Option<CopyStats> {
        Some(self.lock().clone()).filter(|stats| *stats != CopyStats::default())
    }

    fn lock(&self) -> MutexGuard<'_, CopyStats> {
        self.0.lock().expect("nothing panics that holds it")
    }
}

#[derive(Default)]
struct MemoryTable {
    /// Regions by start address and length in bytes.
    by_range: BTreeMap<(u64, u64), Arc<DeviceMemory>>,
    /// Start address and length of each region, by the address of its [`DeviceMemory`].
    range_by_blob: BTreeMap<usize, (u64, u64)>,
}

impl DeviceRegions {
    fn lock_table(&self) -> MutexGuard<'_, MemoryTable> {
        self.table.lock().expect("nothing panics that holds it")
    }

    /// Returns a range of GPU memory as a storage. An equal range returns the same memory.
    ///
    /// The range has `len` bytes from the address `start`. Accesses wait for the work that `stream` has queued so far.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::new`].
    pub(crate) unsafe fn register(
        &self,
        start: u64,
        len: u64,
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Storage> {
        let table = &mut *self.lock_table();
        let memory = if let Some(memory) = table.by_range.get(&(start, len)) {
            memory.clone()
        } else {
            // SAFETY: the caller upholds the contract of `DeviceMemory::new`.
            let memory =
                unsafe { DeviceMemory::with_fences(&self.fences, start, len, stream, owner)? };
            let memory = Arc::new(memory.with_stats(&self.copy_stats.0));
            table.by_range.insert((start, len), memory.clone());
            table.range_by_blob.insert(Arc::as_ptr(&memory).addr(), (start, len));
            memory
        };
        Ok(Storage::from_blob(memory)?)
    }

    /// Counts bytes that torch copied from or to a device, and records why.
    pub(crate) fn record_pageable_copy(&self, bytes: u64, why: &str) {
        self.copy_stats.lock().count_pageable(bytes, format!("torch has copied them: {why}"));
    }

    /// Returns the GPU memory that a tensor spans; `None` if its storage is none of these regions.
    pub(crate) fn target(&self, tensor: &Tensor) -> Option<DeviceTarget> {
        let blob_addr = Arc::as_ptr(tensor.storage().blob()?).addr();
        let table = self.lock_table();
        let range = table.range_by_blob.get(&blob_addr)?;
        let memory = table.by_range.get(range)?.clone();
        let (offset, len) = (tensor.byte_offset(), tensor.meta().span_bytes());
        Some(DeviceTarget { address: range.0 + offset, offset, len, memory })
    }

    /// Drops all regions.
    pub(crate) fn release(&self) {
        *self.lock_table() = MemoryTable::default();
    }

    /// Returns the copy statistics. Later copies update them.
    pub(crate) fn copy_stats(&self) -> &SharedCopyStats {
        &self.copy_stats
    }
}

/// A span of GPU memory that a get fills.
#[derive(Debug)]
pub(crate) struct DeviceTarget {
    /// Address of the first byte. No other memory of this process, on the host or on a device, has it.
    pub(crate) address: u64,
    offset: u64,
    len: u64,
    memory: Arc<DeviceMemory>,
}

impl DeviceTarget {
    /// Returns the UUID of the GPU.
    pub(crate) fn device(&self) -> String {
        self.memory.device().uuid()
    }
}

impl BlobMut for DeviceTarget {
    fn size(&self) -> u64 {
        self.len
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let len = u64::try_from(bytes.len()).map_err(io::Error::other)?;
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.memory.write_all_at(bytes, self.offset + offset)
    }

    fn can_copy_from(&self, source: &dyn Blob) -> bool {
        self.memory.can_copy_from(source)
    }

    fn begin_copy<'a>(
        &'a self,
        source: &'a dyn Blob,
        copies: &[BlobCopy<'_>],
        batch: &mut CopyBatch<'a>,
    ) -> io::Result<()> {
        let is_within = |copy: &BlobCopy<'_>| {
            let end = copy.target.checked_add(copy.runs.target_span());
            end.is_some_and(|end| end <= self.len)
        };
        if !copies.iter().all(is_within) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let copies = copies.iter().map(|copy| {
            let target = self.offset + copy.target;
            BlobCopy { target, ..*copy }
        });
        let copies: Vec<BlobCopy<'_>> = copies.collect();
        self.memory.begin_copy(source, &copies, batch)
    }
}
