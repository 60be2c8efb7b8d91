//! Import of plain tensors and arrays, to be stored or to be filled.

use std::cell::RefCell;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{Dtype, Storage, Tensor, TensorFlags};
use tssd_gpu::Stream;

use crate::cast_rule::{CastRule, ObjectPart};
use crate::device::DeviceRegions;
use crate::dlpack::ImportedTensor;
use crate::error::{BindingError, Result};
use crate::foreign_memory::tensor_from_raw_parts;
use crate::numpy::Numpy;
use crate::torch::Torch;

/// Purpose for which plain tensors are imported.
pub(crate) enum ImportPurpose<'py> {
    /// The tensors are stored. With a [`CastRule`], some of them are stored as another dtype.
    Store(Option<CastRule<'py>>),
    /// The tensors are filled.
    Fill(FillState<'py>),
}

/// State of an import of tensors that are filled.
pub(crate) struct FillState<'py> {
    /// Dtype in which the tensors are stored.
    stored_dtype: Dtype,
    /// Whether staging memory of the host is filled in any case.
    is_buffered: bool,
    /// Objects that cannot be filled directly, each with the staging memory that is filled instead.
    pub(crate) staging: RefCell<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>>,
}

impl<'py> FillState<'py> {
    pub(crate) fn new(stored_dtype: Dtype, is_buffered: bool) -> Self {
        Self { stored_dtype, is_buffered, staging: RefCell::default() }
    }

    /// Allocates staging memory of this dtype, which is filled instead of the object.
    fn allocate_staging(
        &self,
        module: &Bound<'py, PyModule>,
        object: &Bound<'py, PyAny>,
        dtype: &Bound<'py, PyAny>,
        options: &Bound<'py, PyDict>,
    ) -> Result<Bound<'py, PyAny>> {
        options.set_item("dtype", dtype)?;
        let shape: Vec<u64> = object.getattr("shape")?.extract()?;
        let shape = PyTuple::new(object.py(), shape)?;
        let empty = module.getattr("empty")?.call((shape,), Some(options))?;
        self.staging.borrow_mut().push((object.clone(), empty.clone()));
        Ok(empty)
    }
}

impl<'py> ImportPurpose<'py> {
    /// Returns the part of each object that is imported; `None`: all of it.
    pub(crate) fn part(&self) -> Option<&ObjectPart> {
        match self {
            Self::Store(Some(transfer)) => transfer.part(),
            Self::Store(None) | Self::Fill(_) => None,
        }
    }

    /// Imports a plain torch tensor.
    pub(crate) fn import_torch(
        &self,
        torch: &Torch<'py>,
        devices: &DeviceRegions,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        fqn: impl FnOnce() -> String,
    ) -> Result<Tensor> {
        let py = tensor.py();
        match self {
            Self::Store(None) => torch.import_tensor(tensor, flags, devices),
            Self::Store(Some(transfer)) => {
                let dtype = torch.to_dtype(&tensor.getattr(intern!(py, "dtype"))?);
                if !transfer.should_cast(dtype, fqn)? {
                    return torch.import_tensor(tensor, flags, devices);
                }
                transfer.import_torch(torch, tensor, flags, devices)
            }
            Self::Fill(filling) => {
                let dtype = torch.to_dtype(&tensor.getattr(intern!(py, "dtype"))?);
                Torch::check_fillable(tensor)?;
                let options = PyDict::new(py);
                if filling.is_buffered {
                    options.set_item("device", "cpu")?;
                    options.set_item("pin_memory", tensor.getattr("is_cuda")?)?;
                } else {
                    match torch.try_share(tensor, flags, devices)? {
                        Ok(shared) if dtype == Some(filling.stored_dtype) => return Ok(shared),
                        // The cast runs on the device of the tensor.
                        Ok(_) => options.set_item("device", tensor.getattr("device")?)?,
                        Err(reason) => {
                            let bytes = tensor.getattr("nbytes")?.extract()?;
                            devices.record_pageable_copy(bytes, &reason);
                            options.set_item("device", "cpu")?;
                        }
                    }
                }
                let dtype = torch.torch_dtype(filling.stored_dtype)?;
                let staged = filling.allocate_staging(&torch.module, tensor, dtype, &options)?;
                torch.import_tensor(&staged, flags, devices)
            }
        }
    }

    /// Imports an array of another framework.
    pub(crate) fn import_foreign(
        &self,
        devices: &DeviceRegions,
        borrowed: ImportedTensor,
        fqn: impl FnOnce() -> String,
    ) -> Result<Tensor> {
        let dtype = borrowed.meta.dtype();
        let refuse = |text: &str| {
            let advice = "convert it to a tensor of torch: `torch.from_dlpack`";
            Err(BindingError::untyped_leaf(text, advice).into())
        };
        match self {
            Self::Store(None) => {}
            Self::Store(Some(transfer)) => {
                if transfer.should_cast(Some(dtype), fqn)? {
                    return refuse("transfer_dtype casts tensors of torch and arrays of numpy");
                }
            }
            Self::Fill(filling) => {
                if !borrowed.is_writable {
                    return refuse("its framework does not say that it may be written to");
                }
                if dtype != filling.stored_dtype {
                    return refuse("what is cast is a tensor of torch or an array of numpy");
                }
                if filling.is_buffered {
                    return refuse("what is staged is a tensor of torch or an array of numpy");
                }
            }
        }
        import_borrowed(devices, borrowed)
    }

    /// Imports a plain numpy array.
    pub(crate) fn import_numpy(
        &self,
        numpy: &Numpy<'py>,
        array: &Bound<'py, PyAny>,
        fqn: impl FnOnce() -> String,
    ) -> Result<Tensor> {
        let flags = TensorFlags::NDARRAY;
        match self {
            Self::Store(None) => numpy.import_array(array, flags),
            Self::Store(Some(transfer)) => {
                let dtype = numpy.to_dtype(&array.getattr("dtype")?).ok();
                if !transfer.should_cast(dtype, fqn)? {
                    return numpy.import_array(array, flags);
                }
                transfer.import_numpy(numpy, array, flags)
            }
            Self::Fill(filling) => {
                let dtype = numpy.to_dtype(&array.getattr("dtype")?)?;
                Numpy::check_fillable(array)?;
                if dtype == filling.stored_dtype && !filling.is_buffered {
                    return numpy.import_array(array, flags);
                }
                let dtype = numpy.numpy_dtype(filling.stored_dtype)?;
                let options = PyDict::new(array.py());
                numpy.import_array(
                    &filling.allocate_staging(&numpy.module, array, &dtype, &options)?,
                    flags,
                )
            }
        }
    }
}

/// Converts a tensor that was imported through DLPack. The memory is shared.
#[expect(unsafe_code, reason = "the memory belongs to the framework")]
fn import_borrowed(devices: &DeviceRegions, imported: ImportedTensor) -> Result<Tensor> {
    let ImportedTensor { meta, address, is_cuda, owner, .. } = imported;
    if meta.numel() == 0 {
        return Ok(Tensor::new(meta, Storage::default(), 0)?);
    }
    if !is_cuda {
        // SAFETY: the producer guarantees that the memory of the tensor is valid while `owner` lives.
        return unsafe { tensor_from_raw_parts(meta, address, owner) };
    }
    let (start, len) = (u64::try_from(address)?, meta.span_bytes());
    // SAFETY: as above. The producer was asked to order its pending work on the memory before later work on the default
    // stream.
    let storage = unsafe { devices.register(start, len, Stream::default(), owner)? };
    Ok(Tensor::new(meta, storage, 0)?)
}
