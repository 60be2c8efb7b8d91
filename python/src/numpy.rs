//! Conversion between numpy arrays and tensors, without a copy.
#![expect(unsafe_code, reason = "the memory of arrays belongs to numpy")]

use std::cell::RefCell;
use std::io;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{Dtype, Tensor, TensorFlags, TensorMeta, TensorReference};

use crate::error::{BindingError, Result, require_listed};
use crate::foreign_memory::tensor_from_raw_parts;
use crate::memory::{Buffer, MemoryBlock};

/// The module numpy, with cached attributes.
pub(crate) struct Numpy<'py> {
    pub(crate) module: Bound<'py, PyModule>,
    array: Bound<'py, PyAny>,
    memmap: Bound<'py, PyAny>,
    scalar: Bound<'py, PyAny>,
    /// Dtypes of numpy that were converted, each with the dtype of the format.
    dtype_cache: RefCell<Vec<(Bound<'py, PyAny>, Dtype)>>,
}

/// Returns whether numpy has this dtype, under the name that torch has for it.
fn numpy_has(dtype: Dtype) -> bool {
    matches!(
        dtype,
        Dtype::Uint8
            | Dtype::Int8
            | Dtype::Uint16
            | Dtype::Int16
            | Dtype::Uint32
            | Dtype::Int32
            | Dtype::Uint64
            | Dtype::Int64
            | Dtype::Float16
            | Dtype::Float32
            | Dtype::Float64
            | Dtype::Complex64
            | Dtype::Complex128
            | Dtype::Bool
    )
}

/// Returns whether `ml_dtypes` has this dtype, under the name that torch has for it.
fn ml_dtypes_has(dtype: Dtype) -> bool {
    matches!(
        dtype,
        Dtype::Bfloat16
            | Dtype::Float8E5m2
            | Dtype::Float8E4m3fn
            | Dtype::Float8E5m2fnuz
            | Dtype::Float8E4m3fnuz
            | Dtype::Float8E8m0fnu
            | Dtype::Int2
            | Dtype::Int4
            | Dtype::Uint2
            | Dtype::Uint4
    )
}

impl<'py> Numpy<'py> {
    /// Returns numpy if this process has imported it. If it has not, no object is a numpy array.
    pub(crate) fn if_imported(py: Python<'py>) -> Result<Option<Self>> {
        let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
        let Some(module) = modules.get_item("numpy")? else { return Ok(None) };
        let Ok(module) = module.cast_into::<PyModule>() else { return Ok(None) };
        if !module.hasattr("ndarray")? || !module.hasattr("memmap")? {
            return Ok(None);
        }
        Self::from_module(module).map(Some)
    }

    pub(crate) fn import(py: Python<'py>) -> Result<Self> {
        Self::from_module(py.import("numpy")?)
    }

    fn from_module(module: Bound<'py, PyModule>) -> Result<Self> {
        Ok(Self {
            array: module.getattr("ndarray")?,
            memmap: module.getattr("memmap")?,
            scalar: module.getattr("generic")?,
            dtype_cache: RefCell::default(),
            module,
        })
    }

    /// Returns whether the class of the object is `ndarray` or `memmap`.
    pub(crate) fn is_array(&self, object: &Bound<'py, PyAny>) -> bool {
        let class = object.get_type();
        class.is(&self.array) || class.is(&self.memmap)
    }

    /// Returns whether the object is an `ndarray` or an instance of a subclass.
    pub(crate) fn is_any_array(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        Ok(object.is_instance(&self.array)?)
    }

    pub(crate) fn is_scalar(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        Ok(object.is_instance(&self.scalar)?)
    }

    /// Imports a numpy scalar as a tensor without dimensions.
    pub(crate) fn import_scalar(&self, scalar: &Bound<'py, PyAny>) -> Result<Tensor> {
        let array = self.module.call_method1("asarray", (scalar,))?;
        self.import_array(&array, TensorFlags::SCALAR)
    }

    /// Imports an array. The memory is shared, unless byte order or strides require a copy.
    pub(crate) fn import_array(
        &self,
        array: &Bound<'py, PyAny>,
        flags: TensorFlags,
    ) -> Result<Tensor> {
        let py = array.py();
        let mut array = array.clone();
        let dtype = array.getattr(intern!(py, "dtype"))?;
        if !dtype.getattr(intern!(py, "isnative"))?.is_truthy()? {
            let native = dtype.call_method1("newbyteorder", ("=",))?;
            array = array.call_method1("astype", (native,))?;
        }
        let dtype = self.to_dtype(&array.getattr(intern!(py, "dtype"))?)?;
        let itemsize = dtype.itemsize();
        let element_strides = |array: &Bound<'py, PyAny>| -> Result<Option<Vec<u64>>> {
            let strides: Vec<i64> = array.getattr(intern!(py, "strides"))?.extract()?;
            let to_elements =
                |stride: i64| u64::try_from(stride).ok().filter(|it| it.is_multiple_of(itemsize));
            let strides: Option<Vec<u64>> = strides.into_iter().map(to_elements).collect();
            Ok(strides.map(|strides| strides.into_iter().map(|it| it / itemsize).collect()))
        };
        let shape: Vec<u64> = array.getattr(intern!(py, "shape"))?.extract()?;
        let strides = if let Some(strides) = element_strides(&array)? {
            strides
        } else {
            // The format has no negative strides, nor strides that are no multiple of the element size.
            array = array.call_method1("copy", ("C",))?;
            element_strides(&array)?.expect("a copy is contiguous")
        };
        let meta = TensorMeta::new(dtype, &shape)?.with_strides(&strides)?.with_flags(flags);
        let interface = array.getattr(intern!(py, "__array_interface__"))?;
        let data = interface.get_item(intern!(py, "data"))?;
        let start: usize = data.get_item(0)?.extract()?;
        // SAFETY: an array keeps the bytes that its shape and strides span from its data pointer. numpy does not resize
        // an array that has another reference.
        unsafe { tensor_from_raw_parts(meta, start, array.unbind()) }
    }

    /// Rejects arrays that are read-only, or that could be filled only through a copy.
    pub(crate) fn check_fillable(array: &Bound<'py, PyAny>) -> Result<()> {
        let refuse = |text: &str| Err(BindingError::untyped_leaf(text, "give a copy of it").into());
        if !array.getattr("flags")?.getattr("writeable")?.is_truthy()? {
            return refuse("an array that is read-only cannot be filled");
        }
        let dtype = array.getattr("dtype")?;
        let itemsize: i64 = dtype.getattr("itemsize")?.extract()?;
        let strides: Vec<i64> = array.getattr("strides")?.extract()?;
        let is_plain = |stride: &i64| *stride >= 0 && *stride % itemsize.max(1) == 0;
        if !dtype.getattr("isnative")?.is_truthy()? || !strides.iter().all(is_plain) {
            return refuse(
                "an array that runs backwards, between elements or in foreign byte order cannot be filled",
            );
        }
        Ok(())
    }

    /// Returns a key of the memory of an array, and of its dtype, shape and strides.
    pub(crate) fn memory_key(array: &Bound<'py, PyAny>) -> Result<String> {
        let interface = array.getattr(intern!(array.py(), "__array_interface__"))?;
        Ok(format!("{interface} {}", array.getattr("dtype")?))
    }

    pub(crate) fn to_dtype(&self, dtype: &Bound<'py, PyAny>) -> Result<Dtype> {
        let mut cache = self.dtype_cache.borrow_mut();
        if let Some((_, format_dtype)) = cache.iter().find(|(numpy_dtype, _)| numpy_dtype.is(dtype))
        {
            return Ok(*format_dtype);
        }
        let name: String = dtype.getattr("name")?.extract()?;
        let found = Dtype::from_name(&name)
            .filter(|dtype| numpy_has(*dtype) || ml_dtypes_has(*dtype))
            .ok_or_else(|| {
                BindingError::untyped_leaf(
                    format!("the format has no numpy dtype {name}"),
                    "convert the array to a dtype that torch has as well",
                )
            })?;
        cache.push((dtype.clone(), found));
        Ok(found)
    }

    /// Returns the numpy dtype for a dtype of the format.
    pub(crate) fn numpy_dtype(&self, dtype: Dtype) -> Result<Bound<'py, PyAny>> {
        if let Some((numpy_dtype, _)) =
            self.dtype_cache.borrow().iter().find(|(_, format_dtype)| *format_dtype == dtype)
        {
            return Ok(numpy_dtype.clone());
        }
        require_listed(dtype)?;
        let numpy_dtype = if numpy_has(dtype) {
            self.module.call_method1("dtype", (dtype.name(),))?
        } else if ml_dtypes_has(dtype) {
            let module = self.module.py().import("ml_dtypes").map_err(|_| {
                BindingError::new("FeatureMissing", format!("numpy alone has no {dtype}"))
                    .advice("install ml_dtypes, or load it with torch")
            })?;
            self.module.call_method1("dtype", (module.getattr(dtype.name())?,))?
        } else {
            return Err(BindingError::new("FeatureMissing", format!("numpy has no {dtype}"))
                .advice("load it with torch")
                .into());
        };
        self.dtype_cache.borrow_mut().push((numpy_dtype.clone(), dtype));
        Ok(numpy_dtype)
    }

    /// Returns memory as a read-only array of bytes.
    pub(crate) fn bytes_array(&self, block: MemoryBlock) -> Result<Bound<'py, PyAny>> {
        let buffer = Bound::new(self.module.py(), Buffer::new(block))?;
        Ok(self.module.call_method1("asarray", (buffer,))?)
    }

    /// Creates an array over the bytes of a storage. `storage` is `None` if the array has no elements.
    pub(crate) fn make_array(
        &self,
        reference: &TensorReference,
        storage: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let meta = &reference.meta;
        let strides: Vec<i64> = meta
            .strides()
            .into_iter()
            .map(|stride| i64::try_from(stride).map_err(io::Error::other))
            .collect::<Result<_, _>>()?;
        let array =
            self.view(meta.dtype(), meta.shape(), &strides, reference.byte_offset, storage)?;
        if meta.flags().contains(TensorFlags::SCALAR) {
            return Ok(array.get_item(PyTuple::empty(array.py()))?);
        }
        Ok(array)
    }

    /// Creates an array whose element 0 is at byte `first` of the storage. `strides` are in elements.
    pub(crate) fn view(
        &self,
        dtype: Dtype,
        shape: &[u64],
        strides: &[i64],
        first: u64,
        storage: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let py = self.module.py();
        let options = PyDict::new(py);
        options.set_item(intern!(py, "shape"), PyTuple::new(py, shape)?)?;
        options.set_item(intern!(py, "dtype"), self.numpy_dtype(dtype)?)?;
        if let Some(storage) = storage {
            let itemsize = i64::try_from(dtype.itemsize()).map_err(io::Error::other)?;
            let strides = strides.iter().map(|stride| stride * itemsize);
            let strides = PyTuple::new(py, strides.collect::<Vec<_>>())?;
            options.set_item(intern!(py, "strides"), strides)?;
            options.set_item(intern!(py, "buffer"), storage)?;
            options.set_item(intern!(py, "offset"), first)?;
        }
        Ok(self.array.call((), Some(&options))?)
    }

    /// Applies a basic index to an array of this shape. Does not read any memory.
    ///
    /// Returns the shape, the strides, and the offset of element 0, all in elements.
    pub(crate) fn apply_index(
        &self,
        meta: &TensorMeta,
        index: &Bound<'py, PyTuple>,
    ) -> Result<(Vec<u64>, Vec<i64>, i64)> {
        let py = self.module.py();
        let byte = self.module.call_method1("empty", (1, "u1"))?;
        let strides = PyTuple::new(py, meta.strides())?;
        let shape = PyTuple::new(py, meta.shape())?;
        let tricks = py.import("numpy.lib.stride_tricks")?;
        let whole = tricks.call_method1("as_strided", (byte, shape, strides))?;
        let part = whole.get_item(index)?;
        let start = |array: &Bound<'py, PyAny>| -> PyResult<i64> {
            array.getattr("__array_interface__")?.get_item("data")?.get_item(0)?.extract()
        };
        let first = start(&part)?.wrapping_sub(start(&whole)?);
        Ok((part.getattr("shape")?.extract()?, part.getattr("strides")?.extract()?, first))
    }
}
