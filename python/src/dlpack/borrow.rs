//! Memory of other frameworks.
#![expect(unsafe_code, reason = "DLPack is a C interface")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::PyTypeError;
use pyo3::types::{PyCapsule, PyDict};
use pyo3::{ffi, intern, prelude::*};
use tssd_format::{Dtype, TensorMeta};

use super::{CPU, CUDA, CUDA_MANAGED, TYPES, Tensor};
use crate::error::{Refusal, Result};

/// The version of the protocol whose structs these are: fields of later minor ones come after them.
const MAJOR: u32 = 1;

/// The default stream of the device, as the protocol calls it.
const DEFAULT_STREAM: i32 = 1;

const READ_ONLY: u64 = 1;

/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned` of dlpack.h.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// What a framework has lent, until this is dropped.
enum Loan {
    Managed(NonNull<Managed>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: it is only kept, and given back once: a deleter may be called on any thread, and takes the GIL if it needs it.
unsafe impl Send for Loan {}
// SAFETY: nothing is done through a reference.
unsafe impl Sync for Loan {}

impl Drop for Loan {
    fn drop(&mut self) {
        match self {
            Self::Managed(managed) => {
                // SAFETY: the capsule's pointer, which nobody else has taken, is there until its deleter is called.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above; this is the only call.
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

/// A tensor of another framework.
pub(crate) struct Borrowed {
    pub(crate) meta: TensorMeta,
    /// Where its element 0 is.
    pub(crate) start: usize,
    /// Whether that is memory of a GPU. It has what it should once the default stream has done what it was given.
    pub(crate) is_cuda: bool,
    /// Whether the framework says that it may be written to.
    pub(crate) is_writable: bool,
    /// It keeps the memory.
    pub(crate) owner: Box<dyn Send + Sync>,
}

/// An object that says by DLPack which memory of the host or of a GPU it is. None if it is none, or on another device.
pub(crate) fn borrow(object: &Bound<'_, PyAny>) -> Result<Option<Borrowed>> {
    let py = object.py();
    let Some(device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else {
        return Ok(None);
    };
    let Some(function) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
    // A class of objects is none.
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
    options.set_item("max_version", (MAJOR, 0))?;
    let capsule = match function.call((), Some(&options)) {
        // It is older than versions are.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item("max_version")?;
            function.call((), Some(&options))?
        }
        capsule => capsule?,
    };
    let loan = taken(capsule.cast::<PyCapsule>().map_err(PyErr::from)?)?;
    let (tensor, is_writable) = match &loan {
        // SAFETY: it is there as long as the loan.
        Loan::Managed(managed) => (unsafe { &managed.as_ref().tensor }, false),
        Loan::Versioned(managed) => {
            // SAFETY: as above.
            let managed = unsafe { managed.as_ref() };
            if managed.major != MAJOR {
                let text = format!("it speaks version {} of DLPack", managed.major);
                return Err(Refusal::leaf(text, "convert it to a tensor of torch").into());
            }
            (&managed.tensor, managed.flags & READ_ONLY == 0)
        }
    };
    let meta = meta(tensor)?;
    let offset = usize::try_from(tensor.byte_offset).map_err(std::io::Error::other)?;
    let start = tensor.data.addr().wrapping_add(offset);
    if !is_cuda {
        // Whoever looks there does it by the address.
        tensor.data.expose_provenance();
    }
    Ok(Some(Borrowed { meta, start, is_cuda, is_writable, owner: Box::new(loan) }))
}

/// What is in a capsule, which nobody can take once more.
fn taken(capsule: &Bound<'_, PyCapsule>) -> Result<Loan> {
    /// The pointer in a capsule of this name, under which nobody finds it any more.
    fn pointer(
        capsule: &Bound<'_, PyCapsule>,
        name: &'static CStr,
        used: &'static CStr,
    ) -> Option<NonNull<c_void>> {
        let raw = capsule.as_ptr();
        // SAFETY: it is a capsule, and the name is one.
        if unsafe { ffi::PyCapsule_IsValid(raw, name.as_ptr()) } != 1 {
            return None;
        }
        // SAFETY: it is a capsule of this name.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(raw, name.as_ptr()) };
        // SAFETY: it is a capsule, and the name lives as long as the process.
        unsafe { ffi::PyCapsule_SetName(raw, used.as_ptr()) };
        NonNull::new(pointer)
    }
    if let Some(managed) = pointer(capsule, c"dltensor_versioned", c"used_dltensor_versioned") {
        return Ok(Loan::Versioned(managed.cast()));
    }
    let managed = pointer(capsule, c"dltensor", c"used_dltensor").ok_or_else(|| {
        Refusal::leaf("its `__dlpack__` gave no tensor", "convert it to a tensor of torch")
    })?;
    Ok(Loan::Managed(managed.cast()))
}

fn meta(tensor: &Tensor) -> Result<TensorMeta> {
    let (code, bits, lanes) = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
    let dtype = dtype(code, bits).filter(|_| lanes == 1).ok_or_else(|| {
        let text = format!("DLPack's type {code} of {bits} bits in {lanes} lanes is no dtype");
        Refusal::leaf(text, "convert the array first")
    })?;
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let dims = |at: *const i64| -> Result<Option<Vec<u64>>> {
        if ndim == 0 {
            return Ok(Some(Vec::new()));
        }
        if at.is_null() {
            return Ok(None);
        }
        // SAFETY: dlpack.h: shape and strides, where they are given, have so many numbers.
        let dims = unsafe { std::slice::from_raw_parts(at, ndim) };
        let dims: Option<Vec<u64>> = dims.iter().map(|dim| u64::try_from(*dim).ok()).collect();
        Ok(Some(
            dims.ok_or_else(|| Refusal::leaf("it runs backwards", "give a contiguous copy of it"))?,
        ))
    };
    let shape =
        dims(tensor.shape)?.ok_or_else(|| Refusal::leaf("it has no shape", "convert it"))?;
    let meta = TensorMeta::new(dtype, &shape)?;
    Ok(match dims(tensor.strides)? {
        Some(strides) => meta.with_strides(&strides)?,
        None => meta,
    })
}

fn dtype(code: u8, bits: u8) -> Option<Dtype> {
    let is_it = |(_, of, wide): &&(Dtype, u8, u8)| (*of, *wide) == (code, bits);
    TYPES.iter().find(is_it).map(|(dtype, ..)| *dtype)
}
