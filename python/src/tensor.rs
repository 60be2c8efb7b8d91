//! Tensors of either framework.
#![expect(unsafe_code, reason = "the memory of tensors belongs to Python")]

use std::cell::RefCell;
use std::collections::BTreeMap;

use bytes::Bytes;
use pyo3::prelude::*;
use tssd_format::{Storage, Tensor, TensorMeta};

use crate::error::Result;

/// Memory that an object of Python keeps: a storage of torch, an array of numpy.
struct Borrowed<T> {
    start: *const u8,
    len: usize,
    _owner: T,
}

// SAFETY: memory has no thread of its own, and the owner may be sent.
unsafe impl<T: Send> Send for Borrowed<T> {}

impl<T> AsRef<[u8]> for Borrowed<T> {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: whoever made this vouches that the owner has these bytes (see `borrowed`).
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// A tensor whose elements lie at `start`, in memory that `owner` keeps.
///
/// # Safety
///
/// From `start` on there are as many bytes as the tensor spans, for as long as `owner` lives. They may be
/// written to meanwhile by other threads of Python only as in any program with a race: the docstrings of
/// what saves say that tensors must rest.
pub(crate) unsafe fn borrowed(
    meta: TensorMeta,
    start: usize,
    owner: impl Send + 'static,
) -> Result<Tensor> {
    let len = usize::try_from(meta.span_bytes()).map_err(std::io::Error::other)?;
    if len == 0 {
        return Ok(Tensor::new(meta, Storage::default(), 0)?);
    }
    let start = std::ptr::with_exposed_provenance(start);
    let bytes = Bytes::from_owner(Borrowed { start, len, _owner: owner });
    Ok(Tensor::new(meta, bytes.into(), 0)?)
}

/// What was made of tensors, by where they lie: of the same memory it is made once.
#[derive(Default)]
pub(crate) struct Copies<'py>(RefCell<BTreeMap<String, Copied<'py>>>);

struct Copied<'py> {
    copy: Bound<'py, PyAny>,
    /// Without it, its address might be another's.
    _source: Bound<'py, PyAny>,
}

impl<'py> Copies<'py> {
    /// What was made of the tensor at this place, or is now.
    pub(crate) fn once(
        &self,
        source: &Bound<'py, PyAny>,
        place: String,
        make: impl FnOnce() -> Result<Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        if let Some(known) = self.0.borrow().get(&place) {
            return Ok(known.copy.clone());
        }
        let copy = make()?;
        let copied = Copied { copy: copy.clone(), _source: source.clone() };
        self.0.borrow_mut().insert(place, copied);
        Ok(copy)
    }
}
