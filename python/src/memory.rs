//! Private memory that holds the elements of Python tensors. It lives as long as the last tensor.
//!
//! torch has no read-only tensors, so files are mapped copy-on-write: a write to a tensor changes a private copy of
//! the page, never the file.
#![expect(unsafe_code, reason = "memory is shared with Python, which Rust cannot look into")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
#[cfg(unix)]
use memmap2::UncheckedAdvice;
use memmap2::{MmapMut, MmapOptions, MmapRaw};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tssd_store::CowBuffer;

/// Page size in bytes that also suits systems with large pages.
///
/// Only whole pages are returned to the system.
const PAGE_BYTES: usize = 64 << 10;

/// A private mapping of this process: anonymous memory, or a copy-on-write view of a file.
#[derive(Clone, Debug)]
pub(crate) struct PrivateMapping(Arc<MmapRaw>);

impl PrivateMapping {
    /// Allocates `len` bytes, and initialises them with `fill`.
    pub(crate) fn allocate_with<E: From<io::Error>>(
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut map = MmapMut::map_anon(len)?;
        fill(&mut map)?;
        Ok(Self(Arc::new(map.into())))
    }

    /// Maps a range of a file copy-on-write.
    ///
    /// Returns the memory, and the offset of the range in it, in bytes.
    pub(crate) fn map_file(file: &File, range: Range<u64>) -> io::Result<(Self, usize)> {
        // The mapping must start at a page boundary of the system.
        let lead = range.start % PAGE_BYTES as u64;
        let size = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        let mut options = MmapOptions::new();
        options.offset(range.start - lead).len(size(range.end - range.start + lead)?);
        // Pages that are never written to need no reserved swap.
        options.no_reserve_swap();
        // SAFETY: a mapping is sound while its file does not change. Like every reader that maps files, this crate
        // requires that of its caller: the docstrings of the loading functions say so, and offer `backend="pread"`.
        let map = unsafe { options.map_copy(file)? };
        Ok((Self(Arc::new(map.into())), size(lead)?))
    }

    /// Returns all of the memory as bytes.
    ///
    /// The bytes must not be read after a [`MemoryBlock`] of them was given to Python, which may write to it.
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }

    /// Returns a range for Python that has no other user. Dropping it returns its pages to the system.
    pub(crate) fn exclusive_block(&self, range: Range<usize>) -> MemoryBlock {
        self.range_block(range, true)
    }

    /// Returns a range for Python that has other users too.
    pub(crate) fn shared_block(&self, range: Range<usize>) -> MemoryBlock {
        self.range_block(range, false)
    }

    fn range_block(&self, range: Range<usize>, is_exclusive: bool) -> MemoryBlock {
        assert!(range.start <= range.end && range.end <= self.0.len(), "a range of the memory");
        MemoryBlock(BlockMemory::Mapped(MappedRange { memory: self.clone(), range, is_exclusive }))
    }
}

impl AsRef<[u8]> for PrivateMapping {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping has that many initialised bytes, and lives as long as `self`. They are not written to
        // meanwhile: see `PrivateMapping::bytes`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

/// A range of memory for Python. It keeps the memory alive.
#[derive(Debug)]
pub(crate) struct MemoryBlock(BlockMemory);

#[derive(Debug)]
enum BlockMemory {
    Mapped(MappedRange),
    /// A storage of a store.
    Private(CowBuffer),
}

#[derive(Debug)]
struct MappedRange {
    memory: PrivateMapping,
    range: Range<usize>,
    #[cfg_attr(not(unix), expect(dead_code, reason = "pages go with their memory there"))]
    is_exclusive: bool,
}

impl MemoryBlock {
    pub(crate) fn start(&self) -> *mut u8 {
        match &self.0 {
            BlockMemory::Mapped(mapped) => {
                mapped.memory.0.as_mut_ptr().wrapping_add(mapped.range.start)
            }
            BlockMemory::Private(private) => private.as_mut_ptr(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.0 {
            BlockMemory::Mapped(mapped) => mapped.range.len(),
            BlockMemory::Private(private) => private.len(),
        }
    }
}

impl From<CowBuffer> for MemoryBlock {
    fn from(private: CowBuffer) -> Self {
        Self(BlockMemory::Private(private))
    }
}

/// Returns the pages of an exclusive range to the system at once.
///
/// It does so even if other blocks keep the mapping alive. On Windows the pages are freed with the mapping.
#[cfg(unix)]
impl Drop for MappedRange {
    fn drop(&mut self) {
        let page_start = self.range.start.next_multiple_of(PAGE_BYTES);
        let page_end = self.range.end / PAGE_BYTES * PAGE_BYTES;
        if !self.is_exclusive || page_start >= page_end || Arc::strong_count(&self.memory.0) == 1 {
            return;
        }
        // SAFETY: the range is in the mapping. Its content is lost, or becomes that of the file again, which no code
        // observes: the range belonged to this block exclusively.
        let advised = unsafe {
            self.memory.0.unchecked_advise_range(
                UncheckedAdvice::DontNeed,
                page_start,
                page_end - page_start,
            )
        };
        // If the call fails, the pages are freed with the mapping.
        drop(advised);
    }
}

/// A range of memory for numpy: `numpy.asarray(buffer)` is a read-only view of its bytes.
#[pyclass(frozen, name = "_Buffer")]
pub(crate) struct Buffer(MemoryBlock);

impl Buffer {
    pub(crate) fn new(block: MemoryBlock) -> Self {
        Self(block)
    }
}

#[pymethods]
impl Buffer {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("shape", (self.0.len(),))?;
        let is_read_only = true;
        interface.set_item("data", (self.0.start().addr(), is_read_only))?;
        Ok(interface)
    }
}
