//! Memory that torch takes, and says when it is done with it.
#![expect(unsafe_code, reason = "DLPack is a C interface")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use pyo3::ffi;
use pyo3::prelude::*;
use smallvec::SmallVec;
use tssd_format::TensorMeta;

use super::{CPU, DataType, Device, OLD, TYPES, Tensor};
use crate::error::Result;
use crate::memory::Block;

const NAME: &CStr = c"dltensor";
/// `DLManagedTensor` of dlpack.h, and what it keeps.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    /// The shape, and after it the strides unless they are row-major.
    dims: SmallVec<[i64; 8]>,
    _block: Block,
}

/// A capsule with a block as this tensor, whose bytes are those of the block. Whoever takes it may write there.
/// None if torch might not know the dtype.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    block: Block,
    meta: &TensorMeta,
) -> Result<Result<Bound<'py, PyAny>>, Block> {
    let known = TYPES[..OLD].iter().find(|(dtype, ..)| *dtype == meta.dtype());
    let Some((_, code, bits)) = known.filter(|_| meta.span_bytes() == wide(block.len())) else {
        return Err(block);
    };
    Ok(made(py, block, meta, DataType { code: *code, bits: *bits, lanes: 1 }))
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

fn made<'py>(
    py: Python<'py>,
    block: Block,
    meta: &TensorMeta,
    dtype: DataType,
) -> Result<Bound<'py, PyAny>> {
    let strides = if meta.is_contiguous() { Vec::new() } else { meta.strides() };
    let ndim = meta.shape().len();
    let mut dims = SmallVec::with_capacity(ndim + strides.len());
    for size in meta.shape().iter().chain(&strides) {
        dims.push(i64::try_from(*size)?);
    }
    let mut managed = Box::new(Managed {
        tensor: Tensor {
            data: block.start().cast(),
            device: Device { kind: CPU, id: 0 },
            ndim: i32::try_from(ndim)?,
            dtype,
            shape: null_mut(),
            strides: null_mut(),
            byte_offset: 0,
        },
        context: null_mut(),
        deleter: Some(delete),
        dims,
        _block: block,
    });
    managed.tensor.shape = managed.dims.as_mut_ptr();
    if !strides.is_empty() {
        managed.tensor.strides = managed.tensor.shape.wrapping_add(ndim);
    }
    let managed = Box::into_raw(managed);
    // SAFETY: the pointer is not null, the name is static, and the destructor is one for capsules.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(destroy)) };
    if capsule.is_null() {
        // SAFETY: it comes from `Box::into_raw`, and nobody has taken it.
        unsafe { delete(managed) };
    }
    // SAFETY: it is a new reference, or null with an exception set.
    Ok(unsafe { Bound::from_owned_ptr_or_err(py, capsule)? })
}

/// Called once by whoever took the tensor, on any thread, with or without the GIL.
///
/// # Safety
///
/// `managed` comes from [`capsule`], and nobody uses it afterwards.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: it comes from `Box::into_raw`, once, as the caller vouches.
    drop(unsafe { Box::from_raw(managed) });
}

/// A capsule whose tensor nobody took deletes it; who takes it renames the capsule.
///
/// # Safety
///
/// `object` is a capsule of [`capsule`] at its end.
unsafe extern "C" fn destroy(object: *mut ffi::PyObject) {
    // SAFETY: the object is a capsule, and the name is static.
    let is_ours: c_int = unsafe { ffi::PyCapsule_IsValid(object, NAME.as_ptr()) };
    if is_ours == 1 {
        // SAFETY: a capsule of this name has a pointer from `Box::into_raw`.
        let managed = unsafe { ffi::PyCapsule_GetPointer(object, NAME.as_ptr()) };
        // SAFETY: nobody has taken it, or the capsule would have another name.
        unsafe { delete(managed.cast()) };
    }
}
