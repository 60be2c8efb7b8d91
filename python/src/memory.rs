//! Memory that Python's tensors lie in: pages of this process alone, which live as long as the last
//! tensor.
//!
//! torch has no read-only tensors. So a file is mapped copy-on-write: whoever writes into a tensor gets
//! pages of his own, and the file never sees it.
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
use tssd_store::Private;

/// What systems with large pages have as well: only whole ones are given back.
const PAGE: usize = 64 << 10;

/// Pages that this process alone sees.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Arc<MmapRaw>);

impl Memory {
    /// New memory, filled by `fill`.
    pub(crate) fn filled<E: From<io::Error>>(
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut map = MmapMut::map_anon(len)?;
        fill(&mut map)?;
        Ok(Self(Arc::new(map.into())))
    }

    /// A range of a file, copy-on-write; and where in the memory the range begins.
    pub(crate) fn of_file(file: &File, range: Range<u64>) -> io::Result<(Self, usize)> {
        // So that pages of the memory are pages of the system.
        let lead = range.start % PAGE as u64;
        let size = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        let mut options = MmapOptions::new();
        options.offset(range.start - lead).len(size(range.end - range.start + lead)?);
        // What nobody writes to takes no memory.
        options.no_reserve_swap();
        // SAFETY: a map is as safe as its file is unchanged. Like every reader that maps files we ask
        // our caller for that: the docstrings of what loads files say so, and offer `backend="pread"`.
        let map = unsafe { options.map_copy(file)? };
        Ok((Self(Arc::new(map.into())), size(lead)?))
    }

    /// All of it, as bytes.
    ///
    /// They must not be looked at any more once a [`Block`] of them was given to Python, which may
    /// write there.
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }

    /// A range of it, for Python, which nobody else looks at: its pages go back with it.
    pub(crate) fn block(&self, range: Range<usize>) -> Block {
        self.part(range, true)
    }

    /// A range of it, for Python, which others look at too.
    pub(crate) fn view(&self, range: Range<usize>) -> Block {
        self.part(range, false)
    }

    fn part(&self, range: Range<usize>, is_alone: bool) -> Block {
        assert!(range.start <= range.end && range.end <= self.0.len(), "a range of the memory");
        Block(Kept::Part(Part { memory: self.clone(), range, is_alone }))
    }
}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the map has that many bytes, which are initialised, and lives as long as `self`. That
        // nobody writes to them meanwhile: see `Memory::bytes`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

/// A range of memory that Python gets, and which keeps the memory.
#[derive(Debug)]
pub(crate) struct Block(Kept);

#[derive(Debug)]
enum Kept {
    Part(Part),
    /// A storage of a store.
    Private(Private),
}

#[derive(Debug)]
struct Part {
    memory: Memory,
    range: Range<usize>,
    #[cfg_attr(not(unix), expect(dead_code, reason = "pages go with their memory there"))]
    is_alone: bool,
}

impl Block {
    pub(crate) fn start(&self) -> *mut u8 {
        match &self.0 {
            Kept::Part(part) => part.memory.0.as_mut_ptr().wrapping_add(part.range.start),
            Kept::Private(private) => private.as_mut_ptr(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.0 {
            Kept::Part(part) => part.range.len(),
            Kept::Private(private) => private.len(),
        }
    }
}

impl From<Private> for Block {
    fn from(private: Private) -> Self {
        Self(Kept::Private(private))
    }
}

/// Pages that nobody can reach any more go back at once, though other blocks keep their memory. On Windows they go with
/// the memory.
#[cfg(unix)]
impl Drop for Part {
    fn drop(&mut self) {
        let from = self.range.start.next_multiple_of(PAGE);
        let to = self.range.end / PAGE * PAGE;
        if !self.is_alone || from >= to || Arc::strong_count(&self.memory.0) == 1 {
            return;
        }
        // SAFETY: the range lies in the map. What it holds is lost, or is what the file has again: it
        // was this block's alone, and nobody else looks there.
        let given_back = unsafe {
            self.memory.0.unchecked_advise_range(UncheckedAdvice::DontNeed, from, to - from)
        };
        // If the system does not want them now, it gets them with the memory.
        drop(given_back);
    }
}

/// Memory, as numpy takes it: `numpy.asarray(buffer)` is a read-only view of its bytes.
#[pyclass(frozen, name = "_Buffer")]
pub(crate) struct Buffer(Block);

impl Buffer {
    pub(crate) fn new(block: Block) -> Self {
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
