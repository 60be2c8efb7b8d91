//! The rule by which a put casts floating tensors.
#![expect(unsafe_code, reason = "the memory of tensors belongs to torch")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tssd_format::{Cast, Dtype, DtypeClass, Region, Storage, Tensor, TensorFlags, TensorMeta};
use tssd_store::pieces;

use crate::device::DeviceRegions;
use crate::error::{BindingError, Result};
use crate::foreign_memory::CopyCache;
use crate::numpy::Numpy;
use crate::slice::{LocalTensors, box_index};
use crate::torch::Torch;

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

    /// Returns the part of each object that is imported; `None`: all of it.
    pub(crate) fn part(&self) -> Option<&ObjectPart> {
        self.part.as_ref()
    }

    fn region(&self) -> Option<&Region> {
        self.part.as_ref()?.region.as_ref()
    }

    /// Returns whether a tensor is cast.
    pub(crate) fn should_cast(
        &self,
        dtype: Option<Dtype>,
        fqn: impl FnOnce() -> String,
    ) -> Result<bool> {
        // The scale of a dtype with fewer than 16 bits is stored elsewhere.
        let is_wide = dtype.is_some_and(|dtype| is_floating(dtype) && dtype.itemsize() >= 2);
        Ok(is_wide && dtype != Some(self.dtype) && self.keep_matcher.call1((fqn(),))?.is_none())
    }

    /// Imports a torch tensor with elements of the target dtype.
    ///
    /// They are cast when they are written, where there is such a cast, and else now.
    pub(crate) fn import_torch(
        &self,
        torch: &Torch<'py>,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &DeviceRegions,
    ) -> Result<Tensor> {
        let tensor = torch.resolve_storable(tensor)?;
        if let Some(tensor) = self.import_lazy_torch(torch, &tensor, flags, devices)? {
            return Ok(tensor);
        }
        torch.import_resolved(&self.cast_torch(torch, &tensor)?, flags, devices)
    }

    /// Imports an array of numpy with elements of the target dtype, as [`import_torch`](Self::import_torch) does.
    pub(crate) fn import_numpy(
        &self,
        numpy: &Numpy<'py>,
        array: &Bound<'py, PyAny>,
        flags: TensorFlags,
    ) -> Result<Tensor> {
        match self.import_lazy_numpy(numpy, array, flags)? {
            Some(tensor) => Ok(tensor),
            None => numpy.import_array(&self.cast_numpy(numpy, array)?, flags),
        }
    }

    /// Imports a torch tensor in host memory so that it is cast when it is written. `None`: there is no such cast.
    fn import_lazy_torch(
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
        if has_large_gaps(source.meta()) {
            return Ok(None);
        }
        if source.meta().numel() == 0 {
            return Ok(Some(Tensor::new(self.cast_meta(source.meta())?, Storage::default(), 0)?));
        }
        let offset: u64 = view.call_method0(intern!(py, "storage_offset"))?.extract()?;
        // SAFETY: `is_cpu` was checked.
        let memory = unsafe { Torch::storage_memory(&view)? };
        let storage = self.cast_storage(cast, source.meta().dtype(), memory);
        let offset = offset * self.dtype.itemsize();
        Ok(Some(Tensor::new(self.cast_meta(source.meta())?, storage, offset)?))
    }

    /// Imports an array of numpy so that it is cast when it is written. `None`: there is no such cast.
    fn import_lazy_numpy(
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
        if has_large_gaps(source.meta()) {
            return Ok(None);
        }
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

    /// Casts an array of numpy to the target dtype. Equal views of one array share a cast.
    fn cast_numpy(
        &self,
        numpy: &Numpy<'py>,
        array: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyAny>> {
        let target = numpy.numpy_dtype(self.dtype)?;
        if let Some(region) = self.region() {
            return Ok(region_view(array, region)?.call_method1("astype", (target,))?);
        }
        let cast = || Ok(array.call_method1("astype", (target,))?);
        self.cast_cache.get_or_insert_with(array, Numpy::memory_key(array)?, cast)
    }
}

/// Returns whether the elements of a tensor lie so far apart that a cast copy of them takes less than half as much.
fn has_large_gaps(meta: &TensorMeta) -> bool {
    meta.span_bytes() > meta.nbytes().saturating_mul(2)
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
