//! Conversion between torch tensors and tensors, without a copy.
#![expect(unsafe_code, reason = "the memory of tensors belongs to torch")]

use std::cell::OnceCell;

use bytes::Bytes;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use tssd_format::{Dtype, Storage, Tensor, TensorFlags, TensorMeta, TensorReference};
use tssd_gpu::Stream;
use tssd_store::ErrorKind;

use crate::device::DeviceRegions;
use crate::dlpack::export_capsule;
use crate::error::{BindingError, Failure, Result, require_listed};
use crate::foreign_memory::{CopyCache, bytes_from_raw_parts, tensor_from_raw_parts};
use crate::memory::MemoryBlock;

/// The module torch, with cached attributes.
pub(crate) struct Torch<'py> {
    pub(crate) module: Bound<'py, PyModule>,
    tensor: Bound<'py, PyAny>,
    parameter: OnceCell<Bound<'py, PyType>>,
    from_dlpack: OnceCell<Bound<'py, PyAny>>,
    strided: Bound<'py, PyAny>,
    /// Dtypes of torch that were looked up, in the order of `Dtype::ALL`; `None` for those that this torch lacks.
    dtype_cache: [OnceCell<Option<Bound<'py, PyAny>>>; Dtype::ALL.len()],
    /// Tensors that were copied from devices to the host.
    host_copies: CopyCache<'py>,
}

impl<'py> Torch<'py> {
    /// Returns torch if this process has imported it. If it has not, no object is a torch tensor.
    pub(crate) fn if_imported(py: Python<'py>) -> Result<Option<Self>> {
        let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
        let Some(module) = modules.get_item("torch")? else { return Ok(None) };
        let Ok(module) = module.cast_into::<PyModule>() else { return Ok(None) };
        // The module is incomplete while it is being imported.
        if !module.hasattr("Tensor")? || !module.hasattr("strided")? {
            return Ok(None);
        }
        Self::from_module(module).map(Some)
    }

    pub(crate) fn import(py: Python<'py>) -> Result<Self> {
        Self::from_module(py.import("torch")?)
    }

    fn from_module(module: Bound<'py, PyModule>) -> Result<Self> {
        Ok(Self {
            tensor: module.getattr("Tensor")?,
            parameter: OnceCell::new(),
            from_dlpack: OnceCell::new(),
            strided: module.getattr("strided")?,
            dtype_cache: [const { OnceCell::new() }; Dtype::ALL.len()],
            host_copies: CopyCache::default(),
            module,
        })
    }

    fn parameter(&self) -> Result<&Bound<'py, PyType>> {
        if let Some(class) = self.parameter.get() {
            return Ok(class);
        }
        let class = self.module.py().import("torch.nn")?.getattr("Parameter")?;
        Ok(self.parameter.get_or_init(|| class.cast_into().expect("Parameter is a class")))
    }

    pub(crate) fn is_tensor(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        Ok(self.is_builtin_class(object)? || object.is_instance(&self.tensor)?)
    }

    /// Returns whether the class of the object is `torch.Tensor` or `Parameter`.
    pub(crate) fn is_builtin_class(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        let class = object.get_type();
        Ok(class.is(&self.tensor) || class.is(self.parameter()?))
    }

    /// Returns the dtype for an object that is a torch dtype; `None` for any other object.
    pub(crate) fn to_dtype(&self, object: &Bound<'py, PyAny>) -> Option<Dtype> {
        let matches = |dtype: &Dtype| {
            self.lookup_dtype(*dtype).is_some_and(|torch_dtype| torch_dtype.is(object))
        };
        Dtype::ALL.iter().copied().find(matches)
    }

    /// Returns the torch dtype for a dtype; `None` if this torch lacks it.
    fn lookup_dtype(&self, dtype: Dtype) -> Option<&Bound<'py, PyAny>> {
        let lookup = || self.module.getattr(dtype.name()).ok();
        let index = Dtype::ALL.binary_search(&dtype).ok()?;
        self.dtype_cache[index].get_or_init(lookup).as_ref()
    }

    /// Returns the torch dtype for a dtype.
    ///
    /// # Errors
    ///
    /// `UnsupportedDtype` if only the file describes it; `FeatureMissing` if this torch lacks it.
    pub(crate) fn torch_dtype(&self, dtype: Dtype) -> Result<&Bound<'py, PyAny>> {
        require_listed(dtype)?;
        self.lookup_dtype(dtype).ok_or_else(|| {
            BindingError::new("FeatureMissing", format!("this torch has no dtype {dtype}"))
                .advice("read it with a newer torch")
                .into()
        })
    }

    /// Returns the flags of a tensor: whether it requires a gradient, and whether it is a parameter.
    pub(crate) fn flags(&self, tensor: &Bound<'py, PyAny>) -> Result<TensorFlags> {
        let mut flags = TensorFlags::default();
        if tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()? {
            flags = flags.union(TensorFlags::REQUIRES_GRAD);
        }
        let is_plain = tensor.get_type().is(&self.tensor);
        if !is_plain && tensor.is_instance(self.parameter()?)? {
            flags = flags.union(TensorFlags::PARAMETER);
        }
        Ok(flags)
    }

    /// Imports a tensor whose class is `torch.Tensor` or `Parameter`.
    ///
    /// Host memory is shared, and GPU memory if there is a driver. A tensor on another device is copied to the host.
    pub(crate) fn import_tensor(
        &self,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &DeviceRegions,
    ) -> Result<Tensor> {
        self.check_strided(tensor)?;
        self.import_resolved(&Self::resolve_lazy(tensor)?, flags, devices)
    }

    /// As [`Torch::import_tensor`], for a tensor that [`Torch::resolve_storable`] returned or that was made from one.
    pub(crate) fn import_resolved(
        &self,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &DeviceRegions,
    ) -> Result<Tensor> {
        match self.try_share(tensor, flags, devices)? {
            Ok(shared) => Ok(shared),
            Err(reason) => {
                let copy = self.copy_to_host(tensor)?;
                devices.record_pageable_copy(tensor.getattr("nbytes")?.extract()?, &reason);
                Ok(self.try_share(&copy, flags, devices)?.expect("it is the host's"))
            }
        }
    }

    /// Returns the tensor with all elements in memory, for work on it before the import.
    ///
    /// Rejects the tensors that [`Torch::import_tensor`] rejects.
    pub(crate) fn resolve_storable(&self, tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        self.check_strided(tensor)?;
        let tensor = Self::resolve_lazy(tensor)?;
        let py = tensor.py();
        let shape: Vec<u64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<u64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let itemsize: u64 = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
        let steps = shape.iter().zip(&strides);
        let steps = steps.map(|(size, stride)| size.saturating_sub(1).saturating_mul(*stride));
        let last_element = steps.fold(offset, u64::saturating_add);
        let end = last_element.saturating_add(1).saturating_mul(itemsize);
        let len = Self::storage_bytes(&tensor)?;
        if end > len && !shape.contains(&0) {
            Err(storage_too_small(end, len).into())
        } else {
            Ok(tensor)
        }
    }

    /// Materializes a tensor that torch conjugates, negates or zeros lazily.
    ///
    /// Returns any other tensor unchanged.
    fn resolve_lazy(tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let mut tensor = tensor.clone();
        for (is_lazy, resolve) in
            [("is_conj", "resolve_conj"), ("is_neg", "resolve_neg"), ("_is_zerotensor", "clone")]
        {
            if tensor.call_method0(is_lazy)?.is_truthy()? {
                tensor = tensor.call_method0("detach")?.call_method0(resolve)?;
            }
        }
        Ok(tensor)
    }

    /// Returns the size of the storage of a tensor, in bytes.
    pub(crate) fn storage_bytes(tensor: &Bound<'py, PyAny>) -> Result<u64> {
        let py = tensor.py();
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        Ok(storage.call_method0(intern!(py, "nbytes"))?.extract()?)
    }

    /// Rejects tensors that have no strided elements in memory.
    fn check_strided(&self, tensor: &Bound<'py, PyAny>) -> Result<()> {
        let py = tensor.py();
        let is = |name: &Bound<'py, _>| tensor.getattr(name)?.is_truthy();
        if !tensor.getattr(intern!(py, "layout"))?.is(&self.strided) {
            let layout = tensor.getattr("layout")?;
            return Err(BindingError::untyped_leaf(
                format!("a tensor of layout {layout} cannot be stored"),
                "convert it with `.to_dense()`",
            )
            .into());
        }
        if is(intern!(py, "is_nested"))? {
            return Err(BindingError::untyped_leaf(
                "a nested tensor cannot be stored",
                "store the tensors that `.unbind()` gives, or `.to_padded_tensor(0)`",
            )
            .into());
        }
        if is(intern!(py, "is_quantized"))? {
            return Err(BindingError::untyped_leaf(
                "a quantized tensor cannot be stored",
                "store `.int_repr()` with its scale and zero point, or `.dequantize()`",
            )
            .into());
        }
        if is(intern!(py, "is_meta"))? {
            return Err(BindingError::untyped_leaf(
                "a tensor on the meta device has no elements",
                "materialize the model first",
            )
            .into());
        }
        Ok(())
    }

    /// Imports a tensor without a copy: from host memory, or from GPU memory if there is a driver.
    ///
    /// If the memory cannot be shared, the inner `Err` is the reason.
    pub(crate) fn try_share(
        &self,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &DeviceRegions,
    ) -> Result<Result<Tensor, String>> {
        let py = tensor.py();
        let is_cpu = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
        if !is_cpu && !tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
            return Ok(Err(format!("they are on {}", tensor.getattr("device")?)));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let dtype = self.to_dtype(&dtype).ok_or_else(|| {
            BindingError::untyped_leaf(
                format!("the format has no {dtype}"),
                "convert the tensor first",
            )
        })?;
        let shape: Vec<u64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<u64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let meta = TensorMeta::new(dtype, &shape)?.with_strides(&strides)?.with_flags(flags);
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let len: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let end = offset.saturating_mul(dtype.itemsize()).saturating_add(meta.span_bytes());
        if meta.numel() > 0 && end > len {
            return Err(storage_too_small(end, len).into());
        }
        if meta.numel() == 0 {
            return Ok(Ok(Tensor::new(meta, Storage::default(), 0)?));
        }
        if is_cpu {
            let start: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
            // SAFETY: `data_ptr` is the start of the storage plus the offset. The check above ensures that the storage
            // has the bytes that the tensor spans from there. The owner keeps the storage alive.
            return unsafe { tensor_from_raw_parts(meta, start, storage.unbind()) }.map(Ok);
        }
        let start: u64 = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let stream = self.stream(&tensor.getattr(intern!(py, "device"))?)?;
        // SAFETY: the storage has `len` bytes from `start`, and the owner keeps it alive. The docstrings require that
        // the caller does not change the tensors meanwhile. Earlier work on them is queued on the current stream of
        // the device.
        let storage = unsafe { devices.register(start, len, stream, storage.unbind()) };
        Ok(match storage {
            Ok(storage) => Ok(Tensor::new(meta, storage, offset * dtype.itemsize())?),
            Err(Failure::Store(error, ..)) if error.kind() == ErrorKind::Unsupported => {
                Err(error.to_string())
            }
            Err(error) => return Err(error),
        })
    }

    /// Returns the current stream of a GPU.
    fn stream(&self, device: &Bound<'py, PyAny>) -> Result<Stream> {
        let cuda = self.module.getattr(intern!(self.module.py(), "cuda"))?;
        let stream = cuda.call_method1(intern!(self.module.py(), "current_stream"), (device,))?;
        Ok(Stream(stream.getattr("cuda_stream")?.extract()?))
    }

    /// Returns a key of the memory of a tensor, and of its dtype, shape and strides.
    pub(crate) fn memory_key(tensor: &Bound<'py, PyAny>) -> Result<String> {
        Ok(format!(
            "{} {} {} {} {}",
            tensor.getattr("device")?,
            tensor.call_method0("data_ptr")?,
            tensor.getattr("dtype")?,
            tensor.getattr("shape")?,
            tensor.call_method0("stride")?,
        ))
    }

    /// Returns the bytes of the storage of a tensor, without a copy.
    ///
    /// # Safety
    ///
    /// The tensor is in host memory.
    pub(crate) unsafe fn storage_memory(tensor: &Bound<'py, PyAny>) -> Result<Bytes> {
        let py = tensor.py();
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let len: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let start: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        // SAFETY: the tensor is in host memory, so its storage has `len` bytes from `start`, and the owner keeps it alive.
        // The docstrings require that the caller does not change the tensors meanwhile.
        Ok(unsafe { bytes_from_raw_parts(start, len, storage.unbind()) })
    }

    /// Rejects tensors that have no memory, or that cannot be filled in place.
    pub(crate) fn check_fillable(tensor: &Bound<'py, PyAny>) -> Result<()> {
        if tensor.getattr(intern!(tensor.py(), "is_meta"))?.is_truthy()? {
            let text = "a tensor on the meta device has no memory";
            return Err(BindingError::untyped_leaf(
                text,
                "materialize it first, as with `to_empty`",
            )
            .into());
        }
        let shape: Vec<u64> = tensor.getattr(intern!(tensor.py(), "shape"))?.extract()?;
        let strides: Vec<u64> = tensor.call_method0(intern!(tensor.py(), "stride"))?.extract()?;
        if shape.iter().zip(&strides).any(|(size, stride)| *size > 1 && *stride == 0) {
            let text = "an expanded tensor has elements that share memory";
            return Err(
                BindingError::untyped_leaf(text, "give a copy of it: `.contiguous()`").into()
            );
        }
        for is_lazy in ["is_conj", "is_neg"] {
            if tensor.call_method0(is_lazy)?.is_truthy()? {
                let text = "a view that conjugates or negates cannot be filled";
                return Err(BindingError::untyped_leaf(text, "resolve it first").into());
            }
        }
        Ok(())
    }

    /// Copies a tensor from a device to the host. Equal views of one storage become one copy.
    fn copy_to_host(&self, tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let copy = || Ok(tensor.call_method0("detach")?.call_method0("cpu")?);
        self.host_copies.get_or_insert_with(tensor, Self::memory_key(tensor)?, copy)
    }

    /// Returns memory as a tensor of bytes.
    pub(crate) fn bytes_tensor(&self, block: MemoryBlock) -> Result<Bound<'py, PyAny>> {
        let len = u64::try_from(block.len()).map_err(std::io::Error::other)?;
        let meta = TensorMeta::new(Dtype::Uint8, &[len])?;
        self.tensor_from_block(block, &meta)?
            .map_err(|_| BindingError::new("FeatureMissing", "no bytes").into())
    }

    /// Returns memory as a tensor that spans all of it.
    ///
    /// The inner `Err` returns the memory if the tensor does not span exactly its bytes, or if an old torch may not
    /// support the dtype.
    pub(crate) fn tensor_from_block(
        &self,
        block: MemoryBlock,
        meta: &TensorMeta,
    ) -> Result<Result<Bound<'py, PyAny>, MemoryBlock>> {
        Ok(match export_capsule(self.module.py(), block, meta) {
            Ok(capsule) => Ok(self.capsule_importer()?.call1((capsule?,))?),
            Err(block) => Err(block),
        })
    }

    /// Returns the storage of a host tensor as a numpy array of bytes.
    pub(crate) fn storage_array(&self, tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let py = self.module.py();
        let untyped = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let len: u64 = untyped.call_method0(intern!(py, "nbytes"))?.extract()?;
        let meta = TensorMeta::new(Dtype::Uint8, &[len])?;
        let reference = TensorReference { meta, storage: None, byte_offset: 0, shard_spec: None };
        let bytes = self.make_tensor(&reference, Some(&untyped), None)?;
        Ok(bytes.call_method0(intern!(py, "numpy"))?)
    }

    /// Returns the function that imports a DLPack capsule. The public one does additional checks.
    fn capsule_importer(&self) -> Result<&Bound<'py, PyAny>> {
        if let Some(function) = self.from_dlpack.get() {
            return Ok(function);
        }
        let private = self.module.getattr("_C")?.getattr_opt("_from_dlpack")?;
        let function = match private {
            Some(function) => function,
            None => self.module.py().import("torch.utils.dlpack")?.getattr("from_dlpack")?,
        };
        Ok(self.from_dlpack.get_or_init(|| function))
    }

    /// Creates a tensor over a storage. `storage` is `None` if the tensor has no elements.
    pub(crate) fn make_tensor(
        &self,
        reference: &TensorReference,
        storage: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let py = self.module.py();
        let meta = &reference.meta;
        let options = PyDict::new(py);
        options.set_item(intern!(py, "dtype"), self.torch_dtype(meta.dtype())?)?;
        // The default device may have been changed.
        match device {
            Some(device) => options.set_item(intern!(py, "device"), device)?,
            None => options.set_item(intern!(py, "device"), intern!(py, "cpu"))?,
        }
        let shape = PyTuple::new(py, meta.shape())?;
        let strides = PyTuple::new(py, meta.strides())?;
        let tensor = match storage {
            None => {
                let empty = self.module.getattr(intern!(py, "empty_strided"))?;
                empty.call((shape, strides), Some(&options))?
            }
            Some(storage) => {
                let empty = self.module.getattr(intern!(py, "empty"))?;
                let empty = empty.call(((0,),), Some(&options))?;
                let offset = reference.byte_offset / meta.dtype().itemsize();
                empty.call_method1(intern!(py, "set_"), (storage, offset, shape, strides))?
            }
        };
        self.with_flags(tensor, meta.flags())
    }

    /// Applies a basic index to a tensor of this shape. Does not read any memory.
    ///
    /// Returns the shape, the strides, and the offset of element 0, all in elements.
    pub(crate) fn apply_index(
        &self,
        meta: &TensorMeta,
        index: &Bound<'py, PyTuple>,
    ) -> Result<(Vec<u64>, Vec<i64>, i64)> {
        let py = self.module.py();
        let options = PyDict::new(py);
        options.set_item("dtype", self.module.getattr("uint8")?)?;
        options.set_item("device", "meta")?;
        let shape = PyTuple::new(py, meta.shape())?;
        let strides = PyTuple::new(py, meta.strides())?;
        let whole = self.module.getattr("empty_strided")?.call((shape, strides), Some(&options))?;
        let part = whole.get_item(index)?;
        Ok((
            part.getattr("shape")?.extract()?,
            part.call_method0("stride")?.extract()?,
            part.call_method0("storage_offset")?.extract()?,
        ))
    }

    /// Applies the flags to a tensor: makes it a parameter, or makes it require a gradient.
    pub(crate) fn with_flags(
        &self,
        tensor: Bound<'py, PyAny>,
        flags: TensorFlags,
    ) -> Result<Bound<'py, PyAny>> {
        let requires_grad = flags.contains(TensorFlags::REQUIRES_GRAD);
        if flags.contains(TensorFlags::PARAMETER) {
            return Ok(self.parameter()?.call1((tensor, requires_grad))?);
        }
        if requires_grad {
            return Ok(tensor.call_method1(intern!(tensor.py(), "requires_grad_"), (true,))?);
        }
        Ok(tensor)
    }
}

/// Creates the error for a storage that is smaller than the span of its tensor, in bytes.
fn storage_too_small(end: u64, len: u64) -> BindingError {
    BindingError::untyped_leaf(
        format!("the tensor spans {end} bytes and its storage has {len}"),
        "its memory was freed or resized, as FSDP does: gather it first",
    )
}
