//! DLPack: how torch takes memory that is not its own, and says when it is done with it.
#![expect(unsafe_code, reason = "DLPack is a C interface")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::memory::Block;

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;
const UINT: u8 = 1;

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor` of dlpack.h, and what it keeps.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    shape: [i64; 1],
    _block: Block,
}

/// A capsule with a block as a tensor of bytes. Whoever takes it may write there.
pub(crate) fn capsule(py: Python<'_>, block: Block) -> PyResult<Bound<'_, PyAny>> {
    let mut managed = Box::new(Managed {
        tensor: Tensor {
            data: block.start().cast(),
            device: Device { kind: CPU, id: 0 },
            ndim: 1,
            dtype: DataType { code: UINT, bits: 8, lanes: 1 },
            shape: null_mut(),
            strides: null_mut(),
            byte_offset: 0,
        },
        context: null_mut(),
        deleter: Some(delete),
        shape: [i64::try_from(block.len())?],
        _block: block,
    });
    managed.tensor.shape = managed.shape.as_mut_ptr();
    let managed = Box::into_raw(managed);
    // SAFETY: the pointer is not null, the name is static, and the destructor is one for capsules.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(destroy)) };
    if capsule.is_null() {
        // SAFETY: it comes from `Box::into_raw`, and nobody has taken it.
        unsafe { delete(managed) };
    }
    // SAFETY: it is a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
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
