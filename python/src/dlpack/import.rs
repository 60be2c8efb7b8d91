//! Import of tensors from other frameworks through DLPack.
#![expect(unsafe_code, reason = "DLPack is a C interface")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::PyTypeError;
use pyo3::types::{PyCapsule, PyDict};
use pyo3::{ffi, intern, prelude::*};
use tssd_format::{Dtype, TensorMeta};

use super::{CPU, CUDA, CUDA_MANAGED, DLPACK_DTYPES, Tensor};
use crate::error::{BindingError, Result};

/// Major version of the structs below. Later minor versions only append fields.
const MAJOR_VERSION: u32 = 1;

/// Number of the device's default stream in the protocol.
const DEFAULT_STREAM: i32 = 1;

const READ_ONLY: u64 = 1;

/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned` of dlpack.h.
#[repr(C)]
struct ManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// Owner of a tensor that a framework exported. Dropping it calls the deleter.
enum ManagedPtr {
    Unversioned(NonNull<ManagedTensor>),
    Versioned(NonNull<ManagedTensorVersioned>),
}

// SAFETY: the pointer is only stored and passed to its deleter once. DLPack allows the deleter on any thread; a deleter
// that needs the GIL acquires it.
unsafe impl Send for ManagedPtr {}
// SAFETY: once the tensor is imported, no code reads it through a shared reference.
unsafe impl Sync for ManagedPtr {}

impl Drop for ManagedPtr {
    fn drop(&mut self) {
        match self {
            Self::Unversioned(managed) => {
                // SAFETY: the pointer comes from a capsule that no other consumer took. It is valid until the
                // deleter runs.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above; this is the only call of the deleter.
                    unsafe { deleter(managed.as_ptr()) }
                }
            }
            Self::Versioned(managed) => {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { deleter(managed.as_ptr()) }
                }
            }
        }
    }
}

/// A tensor imported from another framework.
pub(crate) struct ImportedTensor {
    pub(crate) meta: TensorMeta,
    /// Address of element 0.
    pub(crate) address: usize,
    /// Whether the memory is on a GPU.
    ///
    /// If so, its content is complete once the default stream has done its queued work.
    pub(crate) is_cuda: bool,
    /// Whether the producer allows writes.
    pub(crate) is_writable: bool,
    /// Keeps the memory alive.
    pub(crate) owner: Box<dyn Send + Sync>,
}

/// Imports the tensor of an object that supports DLPack.
///
/// Returns `None` if the object does not support DLPack, is a class, or is neither in host memory nor on a CUDA device.
pub(crate) fn import_tensor(object: &Bound<'_, PyAny>) -> Result<Option<ImportedTensor>> {
    let py = object.py();
    let Some(device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else {
        return Ok(None);
    };
    let Some(function) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
    // A class has the methods of its instances, but is no tensor.
    if object.is_instance_of::<pyo3::types::PyType>() {
        return Ok(None);
    }
    let kind: i32 = device.call0()?.get_item(0)?.extract()?;
    let is_cuda = match kind {
        CPU => false,
        CUDA | CUDA_MANAGED => true,
        _ => return Ok(None),
    };
    let options = PyDict::new(py);
    if is_cuda {
        options.set_item("stream", DEFAULT_STREAM)?;
    }
    options.set_item("max_version", (MAJOR_VERSION, 0))?;
    let capsule = match function.call((), Some(&options)) {
        // The producer predates the argument `max_version`.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item("max_version")?;
            function.call((), Some(&options))?
        }
        capsule => capsule?,
    };
    let managed_ptr = consume_capsule(capsule.cast::<PyCapsule>().map_err(PyErr::from)?)?;
    let (tensor, is_writable) = match &managed_ptr {
        // SAFETY: the pointer is valid until `managed_ptr` is dropped.
        ManagedPtr::Unversioned(managed) => (unsafe { &managed.as_ref().tensor }, false),
        ManagedPtr::Versioned(managed) => {
            // SAFETY: as above.
            let managed = unsafe { managed.as_ref() };
            if managed.major != MAJOR_VERSION {
                let text = format!("it speaks version {} of DLPack", managed.major);
                return Err(
                    BindingError::untyped_leaf(text, "convert it to a tensor of torch").into()
                );
            }
            (&managed.tensor, managed.flags & READ_ONLY == 0)
        }
    };
    let meta = tensor_meta(tensor)?;
    let offset = usize::try_from(tensor.byte_offset).map_err(std::io::Error::other)?;
    let start = tensor.data.addr().wrapping_add(offset);
    if !is_cuda {
        // Readers rebuild the pointer from its address.
        tensor.data.expose_provenance();
    }
    Ok(Some(ImportedTensor {
        meta,
        address: start,
        is_cuda,
        is_writable,
        owner: Box::new(managed_ptr),
    }))
}

/// Takes the tensor out of a capsule, and marks the capsule as consumed.
fn consume_capsule(capsule: &Bound<'_, PyCapsule>) -> Result<ManagedPtr> {
    /// Returns the pointer of a capsule if it has this name, and renames the capsule to `used_name`.
    fn take_pointer(
        capsule: &Bound<'_, PyCapsule>,
        name: &'static CStr,
        used_name: &'static CStr,
    ) -> Option<NonNull<c_void>> {
        let raw = capsule.as_ptr();
        // SAFETY: `raw` is a capsule, and `name` is a C string.
        if unsafe { ffi::PyCapsule_IsValid(raw, name.as_ptr()) } != 1 {
            return None;
        }
        // SAFETY: `raw` is a capsule of this name, as checked above.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(raw, name.as_ptr()) };
        // SAFETY: `raw` is a capsule, and the name is static.
        unsafe { ffi::PyCapsule_SetName(raw, used_name.as_ptr()) };
        NonNull::new(pointer)
    }
    if let Some(managed) = take_pointer(capsule, c"dltensor_versioned", c"used_dltensor_versioned")
    {
        return Ok(ManagedPtr::Versioned(managed.cast()));
    }
    let managed = take_pointer(capsule, c"dltensor", c"used_dltensor").ok_or_else(|| {
        BindingError::untyped_leaf(
            "its `__dlpack__` gave no tensor",
            "convert it to a tensor of torch",
        )
    })?;
    Ok(ManagedPtr::Unversioned(managed.cast()))
}

fn tensor_meta(tensor: &Tensor) -> Result<TensorMeta> {
    let (code, bits, lanes) = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
    let dtype = find_dtype(code, bits).filter(|_| lanes == 1).ok_or_else(|| {
        let text = format!("DLPack's type {code} of {bits} bits in {lanes} lanes is no dtype");
        BindingError::untyped_leaf(text, "convert the array first")
    })?;
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let read_dims = |at: *const i64| -> Result<Option<Vec<u64>>> {
        if ndim == 0 {
            return Ok(Some(Vec::new()));
        }
        if at.is_null() {
            return Ok(None);
        }
        // SAFETY: dlpack.h requires that `shape` and `strides`, unless null, point to `ndim` numbers.
        let dims = unsafe { std::slice::from_raw_parts(at, ndim) };
        let dims: Option<Vec<u64>> = dims.iter().map(|dim| u64::try_from(*dim).ok()).collect();
        Ok(Some(dims.ok_or_else(|| {
            BindingError::untyped_leaf("it runs backwards", "give a contiguous copy of it")
        })?))
    };
    let shape = read_dims(tensor.shape)?
        .ok_or_else(|| BindingError::untyped_leaf("it has no shape", "convert it"))?;
    let meta = TensorMeta::new(dtype, &shape)?;
    Ok(match read_dims(tensor.strides)? {
        Some(strides) => meta.with_strides(&strides)?,
        None => meta,
    })
}

fn find_dtype(code: u8, bits: u8) -> Option<Dtype> {
    let matches =
        |(_, entry_code, entry_bits): &&(Dtype, u8, u8)| (*entry_code, *entry_bits) == (code, bits);
    DLPACK_DTYPES.iter().find(matches).map(|(dtype, ..)| *dtype)
}
