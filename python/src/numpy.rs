//! numpy's arrays to tensors and back, without a copy.
#![expect(unsafe_code, reason = "the memory of arrays belongs to numpy")]

use std::cell::RefCell;
use std::io;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{Dtype, Tensor, TensorFlags, TensorMeta, TensorReference};

use crate::error::{Refusal, Result};
use crate::memory::{Block, Buffer};
use crate::tensor::borrowed;

/// The module numpy, and what of it is needed again and again.
pub(crate) struct Numpy<'py> {
    pub(crate) module: Bound<'py, PyModule>,
    array: Bound<'py, PyAny>,
    memmap: Bound<'py, PyAny>,
    scalar: Bound<'py, PyAny>,
    /// Dtypes of numpy that were met, with ours.
    dtypes: RefCell<Vec<(Bound<'py, PyAny>, Dtype)>>,
}

/// What numpy and `ml_dtypes` have, under the names that torch has for them.
fn is_of_numpy(dtype: Dtype) -> bool {
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

fn is_of_ml_dtypes(dtype: Dtype) -> bool {
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
    /// numpy, if this process has imported it: else no object is one of its.
    pub(crate) fn imported(py: Python<'py>) -> Result<Option<Self>> {
        let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
        let Some(module) = modules.get_item("numpy")? else { return Ok(None) };
        let Ok(module) = module.cast_into::<PyModule>() else { return Ok(None) };
        if !module.hasattr("ndarray")? || !module.hasattr("memmap")? {
            return Ok(None);
        }
        Self::of(module).map(Some)
    }

    pub(crate) fn import(py: Python<'py>) -> Result<Self> {
        Self::of(py.import("numpy")?)
    }

    fn of(module: Bound<'py, PyModule>) -> Result<Self> {
        Ok(Self {
            array: module.getattr("ndarray")?,
            memmap: module.getattr("memmap")?,
            scalar: module.getattr("generic")?,
            dtypes: RefCell::default(),
            module,
        })
    }

    /// Whether it is an array of numpy's own class.
    pub(crate) fn is_array(&self, object: &Bound<'py, PyAny>) -> bool {
        let class = object.get_type();
        class.is(&self.array) || class.is(&self.memmap)
    }

    /// Whether it is an array of any class.
    pub(crate) fn is_any_array(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        Ok(object.is_instance(&self.array)?)
    }

    pub(crate) fn is_scalar(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        Ok(object.is_instance(&self.scalar)?)
    }

    /// A scalar as a tensor without dimensions.
    pub(crate) fn take_scalar(&self, scalar: &Bound<'py, PyAny>) -> Result<Tensor> {
        let array = self.module.call_method1("asarray", (scalar,))?;
        self.take(&array, TensorFlags::SCALAR)
    }

    /// An array, whose memory is shared.
    pub(crate) fn take(&self, array: &Bound<'py, PyAny>, flags: TensorFlags) -> Result<Tensor> {
        let py = array.py();
        let mut array = array.clone();
        let dtype = array.getattr(intern!(py, "dtype"))?;
        if !dtype.getattr(intern!(py, "isnative"))?.is_truthy()? {
            let native = dtype.call_method1("newbyteorder", ("=",))?;
            array = array.call_method1("astype", (native,))?;
        }
        let dtype = self.dtype_of(&array.getattr(intern!(py, "dtype"))?)?;
        let itemsize = dtype.itemsize();
        let in_elements = |array: &Bound<'py, PyAny>| -> Result<Option<Vec<u64>>> {
            let strides: Vec<i64> = array.getattr(intern!(py, "strides"))?.extract()?;
            let of_bytes =
                |stride: i64| u64::try_from(stride).ok().filter(|it| it.is_multiple_of(itemsize));
            let strides: Option<Vec<u64>> = strides.into_iter().map(of_bytes).collect();
            Ok(strides.map(|strides| strides.into_iter().map(|it| it / itemsize).collect()))
        };
        let shape: Vec<u64> = array.getattr(intern!(py, "shape"))?.extract()?;
        let strides = if let Some(strides) = in_elements(&array)? {
            strides
        } else {
            // Backwards, or between elements: the format has no such strides.
            array = array.call_method1("copy", ("C",))?;
            in_elements(&array)?.expect("a copy is contiguous")
        };
        let meta = TensorMeta::new(dtype, &shape)?.with_strides(&strides)?.with_flags(flags);
        let interface = array.getattr(intern!(py, "__array_interface__"))?;
        let data = interface.get_item(intern!(py, "data"))?;
        let start: usize = data.get_item(0)?.extract()?;
        // SAFETY: an array has the bytes that its shape and strides say, from its data on, and keeps
        // them; numpy does not resize an array that somebody else has a reference to.
        unsafe { borrowed(meta, start, array.unbind()) }
    }

    /// Refuses what must not be written to, or would be filled in a copy.
    pub(crate) fn prove_fillable(array: &Bound<'py, PyAny>) -> Result<()> {
        let refuse = |text: &str| Err(Refusal::leaf(text, "give a copy of it").into());
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

    /// Says which memory an array is, in which way.
    pub(crate) fn place_of(array: &Bound<'py, PyAny>) -> Result<String> {
        let interface = array.getattr(intern!(array.py(), "__array_interface__"))?;
        Ok(format!("{interface} {}", array.getattr("dtype")?))
    }

    pub(crate) fn dtype_of(&self, dtype: &Bound<'py, PyAny>) -> Result<Dtype> {
        let mut known = self.dtypes.borrow_mut();
        if let Some((_, ours)) = known.iter().find(|(theirs, _)| theirs.is(dtype)) {
            return Ok(*ours);
        }
        let name: String = dtype.getattr("name")?.extract()?;
        let found = Dtype::from_name(&name)
            .filter(|dtype| is_of_numpy(*dtype) || is_of_ml_dtypes(*dtype))
            .ok_or_else(|| {
                Refusal::leaf(
                    format!("the format has no numpy dtype {name}"),
                    "convert the array to a dtype that torch has as well",
                )
            })?;
        known.push((dtype.clone(), found));
        Ok(found)
    }

    /// What numpy calls a dtype.
    pub(crate) fn dtype(&self, dtype: Dtype) -> Result<Bound<'py, PyAny>> {
        if let Some((theirs, _)) = self.dtypes.borrow().iter().find(|(_, ours)| *ours == dtype) {
            return Ok(theirs.clone());
        }
        let theirs = if is_of_numpy(dtype) {
            self.module.call_method1("dtype", (dtype.name(),))?
        } else if is_of_ml_dtypes(dtype) {
            let module = self.module.py().import("ml_dtypes").map_err(|_| {
                Refusal::new("FeatureMissing", format!("numpy alone has no {dtype}"))
                    .advice("install ml_dtypes, or load it with torch")
            })?;
            self.module.call_method1("dtype", (module.getattr(dtype.name())?,))?
        } else {
            return Err(Refusal::new("FeatureMissing", format!("numpy has no {dtype}"))
                .advice("load it with torch")
                .into());
        };
        self.dtypes.borrow_mut().push((theirs.clone(), dtype));
        Ok(theirs)
    }

    /// Memory as a read-only array of bytes.
    pub(crate) fn bytes(&self, block: Block) -> Result<Bound<'py, PyAny>> {
        let buffer = Bound::new(self.module.py(), Buffer::new(block))?;
        Ok(self.module.call_method1("asarray", (buffer,))?)
    }

    /// An array of elements in memory; none if it has no elements.
    pub(crate) fn make(
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
        if meta.flags().contains(TensorFlags::SCALAR) && meta.shape().is_empty() {
            return Ok(array.get_item(PyTuple::empty(array.py()))?);
        }
        Ok(array)
    }

    /// An array whose element 0 is `first` bytes into memory, with strides in elements.
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
        options.set_item(intern!(py, "dtype"), self.dtype(dtype)?)?;
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

    /// What basic indexing makes of an array of this shape: shape and strides in elements, and where
    /// element 0 is. No memory is looked at.
    pub(crate) fn index(
        &self,
        meta: &TensorMeta,
        index: &Bound<'py, PyTuple>,
    ) -> Result<(Vec<u64>, Vec<i64>, i64)> {
        let py = self.module.py();
        let one = self.module.call_method1("empty", (1, "u1"))?;
        let strides = PyTuple::new(py, meta.strides())?;
        let shape = PyTuple::new(py, meta.shape())?;
        let tricks = py.import("numpy.lib.stride_tricks")?;
        let whole = tricks.call_method1("as_strided", (one, shape, strides))?;
        let part = whole.get_item(index)?;
        let start = |array: &Bound<'py, PyAny>| -> PyResult<i64> {
            array.getattr("__array_interface__")?.get_item("data")?.get_item(0)?.extract()
        };
        let first = start(&part)?.wrapping_sub(start(&whole)?);
        Ok((part.getattr("shape")?.extract()?, part.getattr("strides")?.extract()?, first))
    }
}
