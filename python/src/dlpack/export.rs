//! Export of memory to torch through DLPack. torch calls a deleter when it is done with the memory.
#![expect(unsafe_code, reason = "DLPack is a C interface")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use pyo3::ffi;
use pyo3::prelude::*;
use smallvec::SmallVec;
use tssd_format::TensorMeta;

use super::{CPU, DLPACK_DTYPES, DataType, Device, LEGACY_DTYPE_COUNT, Tensor};
use crate::error::Result;
use crate::memory::MemoryBlock;

const CAPSULE_NAME: &CStr = c"dltensor";
/// `DLManagedTensor` of dlpack.h, followed by what it owns.
#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
    /// The shape, followed by the strides unless the tensor is row-major.
    dims: SmallVec<[i64; 8]>,
    _block: MemoryBlock,
}

/// Exports a block as a DLPack capsule.
///
/// The tensor spans all bytes of the block, and the consumer may write to it. The outer `Err` returns the block if the
/// tensor does not span exactly its bytes, or if an old torch may not support the dtype.
pub(crate) fn export_capsule<'py>(
    py: Python<'py>,
    block: MemoryBlock,
    meta: &TensorMeta,
) -> Result<Result<Bound<'py, PyAny>>, MemoryBlock> {
    let entry =
        DLPACK_DTYPES[..LEGACY_DTYPE_COUNT].iter().find(|(dtype, ..)| *dtype == meta.dtype());
    let Some((_, code, bits)) = entry.filter(|_| meta.span_bytes() == to_u64(block.len())) else {
        return Err(block);
    };
    Ok(new_capsule(py, block, meta, DataType { code: *code, bits: *bits, lanes: 1 }))
}

fn to_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

fn new_capsule<'py>(
    py: Python<'py>,
    block: MemoryBlock,
    meta: &TensorMeta,
    dtype: DataType,
) -> Result<Bound<'py, PyAny>> {
    let strides = if meta.is_contiguous() { Vec::new() } else { meta.strides() };
    let ndim = meta.shape().len();
    let mut dims = SmallVec::with_capacity(ndim + strides.len());
    for size in meta.shape().iter().chain(&strides) {
        dims.push(i64::try_from(*size)?);
    }
    let mut managed = Box::new(ManagedTensor {
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
        deleter: Some(delete_tensor),
        dims,
        _block: block,
    });
    managed.tensor.shape = managed.dims.as_mut_ptr();
    if !strides.is_empty() {
        managed.tensor.strides = managed.tensor.shape.wrapping_add(ndim);
    }
    let managed = Box::into_raw(managed);
    // SAFETY: the pointer is not null, the name is static, and the destructor is one for capsules.
    let capsule =
        unsafe { ffi::PyCapsule_New(managed.cast(), CAPSULE_NAME.as_ptr(), Some(destroy_capsule)) };
    if capsule.is_null() {
        // SAFETY: the pointer comes from `Box::into_raw`, and no capsule owns it.
        unsafe { delete_tensor(managed) };
    }
    // SAFETY: `capsule` is a new reference, or null with an exception set.
    Ok(unsafe { Bound::from_owned_ptr_or_err(py, capsule)? })
}

/// Deleter of the tensor. The consumer calls it once, on any thread, with or without the GIL.
///
/// # Safety
///
/// `managed` comes from [`export_capsule`], and is not used afterwards.
unsafe extern "C" fn delete_tensor(managed: *mut ManagedTensor) {
    // SAFETY: the pointer comes from `Box::into_raw`, and the caller passes it only once.
    drop(unsafe { Box::from_raw(managed) });
}

/// Destructor of the capsule. Deletes the tensor unless a consumer took it, which renames the capsule.
///
/// # Safety
///
/// `object` is a capsule made by [`export_capsule`] that Python is destroying.
unsafe extern "C" fn destroy_capsule(object: *mut ffi::PyObject) {
    // SAFETY: `object` is a capsule, and the name is static.
    let is_ours: c_int = unsafe { ffi::PyCapsule_IsValid(object, CAPSULE_NAME.as_ptr()) };
    if is_ours == 1 {
        // SAFETY: a capsule of this name has a pointer from `Box::into_raw`.
        let managed = unsafe { ffi::PyCapsule_GetPointer(object, CAPSULE_NAME.as_ptr()) };
        // SAFETY: no consumer took the tensor, or the capsule would have another name.
        unsafe { delete_tensor(managed.cast()) };
    }
}
