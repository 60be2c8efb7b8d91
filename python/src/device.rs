//! Memory of GPUs that objects of Python lie in.
#![expect(unsafe_code, reason = "the memory of tensors belongs to Python")]

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tssd_format::{Blob, Storage, Tensor};
use tssd_store::{BlobCopy, BlobMut, Copied, DeviceMemory, Moments, Stream, UnderWay};

use crate::error::Result;

/// The memory of GPUs that was found in one call, and how bytes went.
#[derive(Default)]
pub(crate) struct Devices {
    found: Mutex<Found>,
    /// What all of it waits for.
    moments: Moments,
    copied: Copies,
}

/// How bytes of devices went until now, without the memory.
#[derive(Clone, Default)]
pub(crate) struct Copies(Arc<Mutex<Copied>>);

impl Copies {
    /// None if there were none.
    pub(crate) fn copied(&self) -> Option<Copied> {
        Some(self.locked().clone()).filter(|copied| *copied != Copied::default())
    }

    fn locked(&self) -> MutexGuard<'_, Copied> {
        self.0.lock().expect("nothing panics that holds it")
    }
}

#[derive(Default)]
struct Found {
    /// By where it begins, and its length.
    known: BTreeMap<(u64, u64), Arc<DeviceMemory>>,
    /// Where each begins, by where it is itself.
    starts: BTreeMap<usize, (u64, u64)>,
}

impl Devices {
    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().expect("nothing panics that holds it")
    }

    /// So many bytes of a GPU from a pointer on, as a stream leaves them: the same storage again, if it is known.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::new`].
    pub(crate) unsafe fn storage(
        &self,
        (start, len): (u64, u64),
        stream: Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Storage> {
        let found = &mut *self.found();
        let memory = if let Some(memory) = found.known.get(&(start, len)) {
            memory.clone()
        } else {
            // SAFETY: as the caller says.
            let memory = unsafe { self.moments.memory(start, len, stream, owner)? };
            let memory = Arc::new(memory.counted(&self.copied.0));
            found.known.insert((start, len), memory.clone());
            found.starts.insert(Arc::as_ptr(&memory).addr(), (start, len));
            memory
        };
        Ok(Storage::elsewhere(memory)?)
    }

    /// So many bytes are copied from or to a device by torch.
    pub(crate) fn paged(&self, bytes: u64, why: &str) {
        self.copied.locked().paged(bytes, format!("torch has copied them: {why}"));
    }

    /// Where a tensor's elements are, if that is on a GPU.
    pub(crate) fn window(&self, tensor: &Tensor) -> Option<Window> {
        let blob = Arc::as_ptr(tensor.storage().blob()?).addr();
        let found = self.found();
        let place = found.starts.get(&blob)?;
        let memory = found.known.get(place)?.clone();
        let (offset, len) = (tensor.byte_offset(), tensor.meta().span_bytes());
        Some(Window { start: place.0 + offset, offset, len, memory })
    }

    /// Lets go of the memory.
    pub(crate) fn release(&self) {
        *self.found() = Found::default();
    }

    /// How bytes went, and will.
    pub(crate) fn copies(&self) -> &Copies {
        &self.copied
    }
}

/// A part of a GPU's memory that a get fills.
#[derive(Debug)]
pub(crate) struct Window {
    /// Where it is: in no other memory of this process, of whatever device.
    pub(crate) start: u64,
    offset: u64,
    len: u64,
    memory: Arc<DeviceMemory>,
}

impl Window {
    /// The GPU, by its UUID.
    pub(crate) fn device(&self) -> String {
        self.memory.device().uuid()
    }
}

impl BlobMut for Window {
    fn size(&self) -> u64 {
        self.len
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let len = u64::try_from(bytes.len()).map_err(io::Error::other)?;
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.memory.write_all_at(bytes, self.offset + offset)
    }

    fn takes(&self, source: &dyn Blob) -> bool {
        self.memory.takes(source)
    }

    fn begin_copy<'a>(
        &'a self,
        source: &'a dyn Blob,
        copies: &[BlobCopy<'_>],
        under_way: &mut UnderWay<'a>,
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
        self.memory.begin_copy(source, &copies, under_way)
    }
}
