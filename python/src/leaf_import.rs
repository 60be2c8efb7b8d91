//! Import of plain tensors and arrays, to be stored or to be filled.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{Cast, Dtype, DtypeClass, Region, Storage, Tensor, TensorFlags, TensorMeta};
use tssd_gpu::Stream;
use tssd_store::pieces;

use crate::device::DeviceRegions;
use crate::dlpack::ImportedTensor;
use crate::error::{BindingError, Result};
use crate::foreign_memory::{CopyCache, tensor_from_raw_parts};
use crate::numpy::Numpy;
use crate::slice::{LocalTensors, box_index};
use crate::torch::Torch;

/// Purpose for which plain tensors are imported.
pub(crate) enum ImportPurpose<'py> {
    /// The tensors are stored. With a [`CastRule`], some of them are stored as another dtype.
    Store(Option<CastRule<'py>>),
    /// The tensors are filled.
    Fill(FillState<'py>),
}

/// Rule for casting floating tensors: the dtype that they are stored as, and which tensors are exempt.
pub(crate) struct CastRule<'py> {
    dtype: Dtype,
    keep_matcher: Bound<'py, PyAny>,
    /// Part of each object that is imported; `None`: all of it.
    part: Option<ObjectPart>,
    /// Tensors that were cast, so that tied tensors stay tied.
    cast_cache: CopyCache<'py>,
    /// Storages that are cast when they are read, by address, length and dtype, so that tied tensors stay tied.
    cast_storages: RefCell<BTreeMap<(usize, usize, Dtype), Storage>>,
}

/// A selection of the local tensors of an object.
#[derive(Clone)]
pub(crate) struct ObjectPart {
    /// Indices of the selected local tensors.
    pub(crate) local_indices: Range<usize>,
    /// Box of the tensor, if one tensor is selected; `None`: all of each tensor.
    pub(crate) region: Option<Region>,
}

impl ObjectPart {
    /// Returns the part with only the first element of its box, or unchanged if it has no box.
    pub(crate) fn first_element(&self) -> Result<Self> {
        let first_element =
            |region: &Region| Region::new(region.offsets(), &vec![1; region.shape().len()]);
        Ok(Self {
            local_indices: self.local_indices.clone(),
            region: self.region.as_ref().map(first_element).transpose()?,
        })
    }
}

impl<'py> CastRule<'py> {
    /// Creates a rule from a dtype of torch or numpy, or from its name.
    ///
    /// A tensor whose fqn matches a pattern in `keep` is exempt.
    ///
    /// # Errors
    ///
    /// `WrongType` if the dtype is not a floating dtype.
    pub(crate) fn new(dtype: &Bound<'py, PyAny>, keep: Option<&Bound<'py, PyAny>>) -> Result<Self> {
        let py = dtype.py();
        // A dtype of numpy can be a class, such as `numpy.float16`.
        let name = dtype.getattr_opt("__name__")?.map_or_else(|| dtype.str(), |name| name.str())?;
        let name = name.to_string();
        let name = name.strip_prefix("torch.").unwrap_or(&name);
        let floating = Dtype::from_name(name).filter(|dtype| is_floating(*dtype));
        let dtype = floating.ok_or_else(|| {
            let text =
                format!("transfer_dtype is a floating dtype, such as \"bfloat16\", not {name}");
            BindingError::new("WrongType", text)
        })?;
        let keep = keep.cloned().unwrap_or_else(|| PyTuple::empty(py).into_any());
        let keep_matcher = py.import("tssd._names")?.call_method1("matcher", (keep,))?;
        Ok(Self::from_parts(dtype, keep_matcher, None))
    }

    /// Returns the same rule for one part of each object.
    pub(crate) fn with_part(&self, part: ObjectPart) -> Self {
        Self::from_parts(self.dtype, self.keep_matcher.clone(), Some(part))
    }

    fn from_parts(dtype: Dtype, keep_matcher: Bound<'py, PyAny>, part: Option<ObjectPart>) -> Self {
        let (cast_cache, cast_storages) = (CopyCache::default(), RefCell::default());
        Self { dtype, keep_matcher, part, cast_cache, cast_storages }
    }

    /// Splits a large object into parts that are cast one after another; `None` if it is not split.
    ///
    /// An object is split if it is a tensor, or shards of one, that is cast and has more than `limit` bytes in the
    /// target dtype.
    pub(crate) fn split(
        &self,
        object: &Bound<'py, PyAny>,
        fqn: &str,
        limit: u64,
    ) -> Result<Option<Vec<ObjectPart>>> {
        let py = object.py();
        let Some(local) = LocalTensors::from_object(object)? else { return Ok(None) };
        let tensors = local.tensors();
        let mut shapes: Vec<Vec<u64>> = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            // The import of the object reports the error.
            let Ok(shape) = tensor.getattr(intern!(py, "shape")).and_then(|shape| shape.extract())
            else {
                return Ok(None);
            };
            shapes.push(shape);
        }
        let itemsize = self.dtype.itemsize();
        let bytes_of =
            |shape: &Vec<u64>| shape.iter().fold(itemsize, |all, size| all.saturating_mul(*size));
        if shapes.iter().map(bytes_of).fold(0, u64::saturating_add) <= limit {
            return Ok(None);
        }
        let mut cast_bytes = Vec::with_capacity(tensors.len());
        for (tensor, shape) in tensors.iter().zip(&shapes) {
            let Some(info) = storage_info(tensor)? else { return Ok(None) };
            if !self.should_cast(Some(info.dtype), || fqn.to_owned())? {
                return Ok(None);
            }
            // An expanded tensor is cast as it is stored: a repeated element counts once.
            cast_bytes.push(bytes_of(shape).min(info.elements.saturating_mul(itemsize)));
        }
        let is_small =
            cast_bytes.iter().fold(0, |all: u64, bytes| all.saturating_add(*bytes)) <= limit;
        // A tensor without dimensions has no boxes: indexing it gives a scalar, or the tensor itself.
        if is_small || shapes.iter().any(Vec::is_empty) || !local.matches_shape(&shapes[0])? {
            return Ok(None);
        }
        self.pack_parts(&shapes, &cast_bytes, limit).map(Some)
    }

    /// Groups local tensors into parts of at most `limit` bytes. Consecutive small tensors share a part.
    ///
    /// A tensor of more than `limit` bytes is cut into boxes, one part each. `bytes` are the sizes of the tensors.
    fn pack_parts(
        &self,
        shapes: &[Vec<u64>],
        bytes: &[u64],
        limit: u64,
    ) -> Result<Vec<ObjectPart>> {
        let mut parts = Vec::new();
        let (mut start, mut packed_bytes) = (0, 0_u64);
        for (index, (shape, bytes)) in shapes.iter().zip(bytes).enumerate() {
            if packed_bytes.saturating_add(*bytes) > limit && start < index {
                parts.push(ObjectPart { local_indices: start..index, region: None });
                (start, packed_bytes) = (index, 0);
            }
            if *bytes > limit {
                let regions = pieces(shape, self.dtype, limit)?.into_iter();
                let part =
                    |region| ObjectPart { local_indices: index..index + 1, region: Some(region) };
                parts.extend(regions.map(part));
                (start, packed_bytes) = (index + 1, 0);
            } else {
                packed_bytes += *bytes;
            }
        }
        if start < shapes.len() {
            parts.push(ObjectPart { local_indices: start..shapes.len(), region: None });
        }
        Ok(parts)
    }

    fn region(&self) -> Option<&Region> {
        self.part.as_ref()?.region.as_ref()
    }

    fn should_cast(&self, dtype: Option<Dtype>, fqn: impl FnOnce() -> String) -> Result<bool> {
        // The scale of a dtype with fewer than 16 bits is stored elsewhere.
        let is_wide = dtype.is_some_and(|dtype| is_floating(dtype) && dtype.itemsize() >= 2);
        Ok(is_wide && dtype != Some(self.dtype) && self.keep_matcher.call1((fqn(),))?.is_none())
    }

    /// Imports a torch tensor in host memory so that it is cast when it is written. `None`: there is no such cast.
    fn import_cast_torch(
        &self,
        torch: &Torch<'py>,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &DeviceRegions,
    ) -> Result<Option<Tensor>> {
        let py = tensor.py();
        let dtype = torch.to_dtype(&tensor.getattr(intern!(py, "dtype"))?);
        let is_cpu = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
        let Some(cast) = dtype.filter(|_| is_cpu).and_then(|from| Cast::between(from, self.dtype))
        else {
            return Ok(None);
        };
        let mut view = tensor.clone();
        if let Some(region) = self.region() {
            view = region_view(&view.call_method0("detach")?, region)?;
        }
        let source = torch.import_resolved(&view, flags, devices)?;
        if source.meta().numel() == 0 {
            return Ok(Some(Tensor::new(self.cast_meta(source.meta())?, Storage::default(), 0)?));
        }
        let offset: u64 = view.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let storage = self.cast_storage(cast, source.meta().dtype(), Torch::storage_memory(&view)?);
        let offset = offset * self.dtype.itemsize();
        Ok(Some(Tensor::new(self.cast_meta(source.meta())?, storage, offset)?))
    }

    /// Imports an array of numpy so that it is cast when it is written. `None`: there is no such cast.
    fn import_cast_numpy(
        &self,
        numpy: &Numpy<'py>,
        array: &Bound<'py, PyAny>,
        flags: TensorFlags,
    ) -> Result<Option<Tensor>> {
        let dtype = numpy.to_dtype(&array.getattr("dtype")?)?;
        let Some(cast) = Cast::between(dtype, self.dtype) else { return Ok(None) };
        let view = match self.region() {
            Some(region) => region_view(array, region)?,
            None => array.clone(),
        };
        let source = numpy.import_array(&view, flags)?;
        let meta = self.cast_meta(source.meta())?;
        let Some(elements) = source.storage().bytes().filter(|bytes| !bytes.is_empty()) else {
            return Ok(Some(Tensor::new(meta, Storage::default(), 0)?));
        };
        let storage = self.cast_storage(cast, dtype, elements.clone());
        Ok(Some(Tensor::new(meta, storage, 0)?))
    }

    /// Returns the metadata of a cast tensor.
    fn cast_meta(&self, meta: &TensorMeta) -> Result<TensorMeta> {
        let cast = TensorMeta::new(self.dtype, meta.shape())?.with_strides(&meta.strides())?;
        Ok(cast.with_flags(meta.flags()))
    }

    /// Returns the storage with the cast elements, the same one for the same memory.
    fn cast_storage(&self, cast: Cast, from: Dtype, elements: Bytes) -> Storage {
        // The storage keeps the memory alive, so no other tensor gets its address.
        let key = (elements.as_ptr().addr(), elements.len(), from);
        let mut storages = self.cast_storages.borrow_mut();
        storages.entry(key).or_insert_with(|| cast.storage(elements)).clone()
    }

    /// Casts a torch tensor to the target dtype.
    ///
    /// Tensors that share a storage, such as tied and expanded tensors, share one after the cast: the whole storage is
    /// cast, unless the tensor uses little of it.
    fn cast_torch(
        &self,
        torch: &Torch<'py>,
        tensor: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyAny>> {
        let target = torch.torch_dtype(self.dtype)?;
        let plain = tensor.call_method0("detach")?;
        if let Some(region) = self.region() {
            return Ok(region_view(&plain, region)?.call_method1("to", (target,))?);
        }
        let storage = plain.call_method0("untyped_storage")?;
        let itemsize: u64 = plain.call_method0("element_size")?.extract()?;
        let storage_bytes: u64 = storage.call_method0("nbytes")?.extract()?;
        let tensor_bytes = plain.call_method0("numel")?.extract::<u64>()?.saturating_mul(itemsize);
        // Chunks in one storage are cast one by one: no two of them share an element.
        let max_bytes =
            if self.part.is_some() { tensor_bytes } else { tensor_bytes.saturating_mul(2) };
        if !storage_bytes.is_multiple_of(itemsize) || storage_bytes > max_bytes {
            let cast = || Ok(plain.call_method1("to", (target,))?);
            return self.cast_cache.get_or_insert_with(&plain, Torch::memory_key(&plain)?, cast);
        }
        let offset = plain.call_method0("storage_offset")?;
        let key = format!(
            "{} {} {}",
            plain.getattr("device")?,
            storage.call_method0("data_ptr")?,
            plain.getattr("dtype")?
        );
        let cast = || {
            let flat = plain.call_method1("as_strided", ((storage_bytes / itemsize,), (1,), 0))?;
            Ok(flat.call_method1("to", (target,))?)
        };
        let flat = self.cast_cache.get_or_insert_with(&plain, key, cast)?;
        let (shape, strides) = (plain.getattr("shape")?, plain.call_method0("stride")?);
        Ok(flat.call_method1("as_strided", (shape, strides, offset))?)
    }
}

/// Dtype of a tensor or an array, and the number of elements in its storage.
struct StorageInfo {
    dtype: Dtype,
    elements: u64,
}

/// Returns `None` for objects that cannot be stored, and for arrays of other frameworks.
///
/// The number of elements in the storage of a numpy array is unknown: `u64::MAX`.
fn storage_info(object: &Bound<'_, PyAny>) -> Result<Option<StorageInfo>> {
    let py = object.py();
    if let Some(torch) = Torch::if_imported(py)?
        && torch.is_builtin_class(object)?
    {
        let Ok(object) = torch.resolve_storable(object) else { return Ok(None) };
        let dtype = torch.to_dtype(&object.getattr(intern!(py, "dtype"))?);
        let bytes = Torch::storage_bytes(&object)?;
        return Ok(dtype.map(|dtype| StorageInfo { dtype, elements: bytes / dtype.itemsize() }));
    }
    Ok(match Numpy::if_imported(py)? {
        Some(numpy) if numpy.is_array(object) => {
            let dtype = numpy.to_dtype(&object.getattr(intern!(py, "dtype"))?).ok();
            dtype.map(|dtype| StorageInfo { dtype, elements: u64::MAX })
        }
        _ => None,
    })
}

/// Returns a view of a box of a tensor or an array.
fn region_view<'py>(object: &Bound<'py, PyAny>, region: &Region) -> Result<Bound<'py, PyAny>> {
    Ok(object.get_item(box_index(object.py(), region.offsets(), region.shape())?)?)
}

/// Returns whether the dtype is a real floating-point type.
pub(crate) fn is_floating(dtype: Dtype) -> bool {
    dtype.class() == DtypeClass::Float
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
            Self::Store(Some(transfer)) => transfer.part.as_ref(),
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
                let tensor = torch.resolve_storable(tensor)?;
                if let Some(cast) = transfer.import_cast_torch(torch, &tensor, flags, devices)? {
                    return Ok(cast);
                }
                torch.import_resolved(&transfer.cast_torch(torch, &tensor)?, flags, devices)
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
                if let Some(cast) = transfer.import_cast_numpy(numpy, array, flags)? {
                    return Ok(cast);
                }
                let target = numpy.numpy_dtype(transfer.dtype)?;
                if let Some(region) = transfer.region() {
                    let cast = region_view(array, region)?.call_method1("astype", (target,))?;
                    return numpy.import_array(&cast, flags);
                }
                let cast = || Ok(array.call_method1("astype", (target,))?);
                numpy.import_array(
                    &transfer.cast_cache.get_or_insert_with(
                        array,
                        Numpy::memory_key(array)?,
                        cast,
                    )?,
                    flags,
                )
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
