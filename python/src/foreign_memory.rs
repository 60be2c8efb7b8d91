//! Tensors whose memory a framework owns.
#![expect(unsafe_code, reason = "the memory of tensors belongs to Python")]

use std::cell::RefCell;
use std::collections::BTreeMap;

use bytes::Bytes;
use pyo3::prelude::*;
use tssd_format::{Storage, Tensor, TensorMeta};

use crate::error::Result;

/// Memory that a Python object keeps alive: a torch storage or a numpy array.
struct ForeignMemory<T> {
    start: *const u8,
    len: usize,
    _owner: T,
}

// SAFETY: the memory is not bound to a thread, and the owner is `Send`.
unsafe impl<T: Send> Send for ForeignMemory<T> {}

impl<T> AsRef<[u8]> for ForeignMemory<T> {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the caller of `borrowed` guarantees that the owner keeps these bytes.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// Creates a tensor whose elements are at the address `start`, in memory that `owner` keeps alive.
///
/// # Safety
///
/// While `owner` lives, the memory from `start` has at least as many bytes as the tensor spans. No code writes to them
/// meanwhile. A Python thread that does so is a race in the caller's program: the docstrings of the saving functions
/// require that tensors do not change.
pub(crate) unsafe fn tensor_from_raw_parts(
    meta: TensorMeta,
    start: usize,
    owner: impl Send + 'static,
) -> Result<Tensor> {
    let len = usize::try_from(meta.span_bytes()).map_err(std::io::Error::other)?;
    if len == 0 {
        return Ok(Tensor::new(meta, Storage::default(), 0)?);
    }
    // SAFETY: the caller guarantees it.
    let bytes = unsafe { bytes_from_raw_parts(start, len, owner) };
    Ok(Tensor::new(meta, bytes.into(), 0)?)
}

/// Returns the `len` bytes at the address `start`, in memory that `owner` keeps alive.
///
/// # Safety
///
/// As [`tensor_from_raw_parts`]: the memory has `len` bytes, and no code writes to them.
pub(crate) unsafe fn bytes_from_raw_parts(
    start: usize,
    len: usize,
    owner: impl Send + 'static,
) -> Bytes {
    if len == 0 {
        return Bytes::new();
    }
    let start = std::ptr::with_exposed_provenance(start);
    Bytes::from_owner(ForeignMemory { start, len, _owner: owner })
}

/// Cache of objects made from tensors, by the location of the tensor: one object for equal memory.
#[derive(Default)]
pub(crate) struct CopyCache<'py>(RefCell<BTreeMap<String, CacheEntry<'py>>>);

struct CacheEntry<'py> {
    copy: Bound<'py, PyAny>,
    /// Keeps the source alive, so that no other tensor gets its address.
    _source: Bound<'py, PyAny>,
}

impl<'py> CopyCache<'py> {
    /// Returns the object made from the tensor at this location, or makes it now.
    pub(crate) fn get_or_insert_with(
        &self,
        source: &Bound<'py, PyAny>,
        key: String,
        make: impl FnOnce() -> Result<Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        if let Some(entry) = self.0.borrow().get(&key) {
            return Ok(entry.copy.clone());
        }
        let copy = make()?;
        let entry = CacheEntry { copy: copy.clone(), _source: source.clone() };
        self.0.borrow_mut().insert(key, entry);
        Ok(copy)
    }
}
