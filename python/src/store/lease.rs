//! A version that stays there while it is read.

use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use tssd_format::{Dtype, Node, TensorSlice as Slice};
use tssd_store::{Key, Opened};

use super::connected::Connected;
use super::outline::outline;
use super::select::chosen;
use super::version::{Reading, Version};
use crate::error::{Refusal, Result};
use crate::index::Index;
use crate::slice::TensorSlice;

/// A version that is read tensor by tensor: see `Store.open`. It stays there as long as this is open, or a
/// tensor of it lives.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct OpenVersion {
    own: Arc<Connected>,
    key: Key,
    version: u64,
    opened: Mutex<Option<Arc<Opened>>>,
    names: Vec<String>,
}

impl OpenVersion {
    pub(super) fn new(
        py: Python<'_>,
        own: Arc<Connected>,
        key: Key,
        opened: Arc<Opened>,
        names: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        let chosen = names.map(|names| chosen(py, &opened, names)).transpose()?;
        let is_chosen = |place: usize| chosen.as_ref().is_none_or(|chosen| chosen[place]);
        let leaves = opened.leaves().iter().enumerate();
        let tensors = leaves
            .filter(|(place, (_, leaf))| matches!(leaf, Node::Tensors(_)) && is_chosen(*place));
        let names = tensors.map(|(_, (path, _))| path.fqn()).collect();
        let version = opened.version();
        Ok(Self { own, key, version, opened: Mutex::new(Some(opened)), names })
    }

    fn opened(&self) -> Result<Arc<Opened>> {
        let opened = self.opened.lock().expect("nothing panics that holds it").clone();
        Ok(opened.ok_or_else(|| PyValueError::new_err("the version is closed"))?)
    }

    /// The version, which must be one of this key.
    pub(super) fn of_key(&self, key: &Key) -> Result<Arc<Opened>> {
        if *key != self.key {
            let text =
                format!("the version that is open is one of key `{}`, not `{key}`", self.key);
            return Err(PyValueError::new_err(text).into());
        }
        self.opened()
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        slice: Option<&Slice>,
    ) -> Result<Bound<'py, PyAny>> {
        let read = || {
            let opened = self.opened()?;
            let (_, leaf) = opened.leaf(name)?;
            if !matches!(leaf, Node::Tensors(_)) {
                return Err(no_tensor(name).into());
            }
            let reading = Reading::default();
            Version::read_leaf(py, &self.own, &opened, name, slice, reading)?.object(py)
        };
        read().map_err(|error| error.of_key(self.key.as_str(), None))
    }
}

#[pymethods]
impl OpenVersion {
    /// The key.
    #[getter]
    fn key(&self) -> &str {
        self.key.as_str()
    }

    /// The number of the version, also once it is closed.
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    /// The fqns of the tensors, in the order of the state dict.
    fn keys(&self) -> Vec<String> {
        self.names.clone()
    }

    /// One tensor, or a part of it: a view, as `Store.get_state_dict` has them, where it can be one.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such tensor.
    #[pyo3(signature = (name, tensor_slice=None))]
    fn get_tensor<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        tensor_slice: Option<&Bound<'py, TensorSlice>>,
    ) -> Result<Bound<'py, PyAny>> {
        self.read(py, name, tensor_slice.map(|slice| &slice.get().0))
    }

    /// One tensor, to be read in parts: `get_slice(name)[0:2, 5]`.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such tensor.
    fn get_slice(slf: &Bound<'_, Self>, name: &str) -> Result<LeaseSlice> {
        let own = slf.get();
        let (_, leaf) = own.opened()?.leaf(name)?;
        let Node::Tensors(run) = leaf else {
            return Err(no_tensor(name).into());
        };
        let whole = run[0].place.as_ref().map(|place| place.slice().global_shape());
        let shape = whole.unwrap_or_else(|| run[0].meta.shape()).to_vec();
        let (of, dtype) = (slf.clone().unbind(), run[0].meta.dtype());
        Ok(LeaseSlice { of, name: name.to_owned(), shape, dtype })
    }

    /// The tensors, each with its fqn, one after the other as they are asked for.
    fn items(slf: Py<Self>) -> Items {
        Items { of: slf, next: Mutex::new(0) }
    }

    /// The state dict without the bytes of its tensors: whole tensors of torch's "meta" device, which have
    /// dtypes and shapes, and every other leaf as it is: all of it, whatever was given as `names`. Arrays of
    /// numpy are tensors, too; what was pickled is bytes; ties are not kept.
    fn to_meta<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let made = outline(py, &self.own, &*self.opened()?);
        made.map_err(|error| error.of_key(self.key.as_str(), None))
    }

    /// What was given as `metadata` when it was put; None if nothing was.
    fn metadata<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        crate::metadata::given(py, self.opened()?.attrs())
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let key = PyString::new(py, self.key.as_str()).repr()?.to_string();
        let state = if self.opened().is_ok() { "" } else { ", closed" };
        Ok(format!("OpenVersion({key}, version {}{state})", self.version))
    }

    fn __int__(&self) -> u64 {
        self.version
    }

    fn __index__(&self) -> u64 {
        self.version
    }

    fn __len__(&self) -> usize {
        self.names.len()
    }

    /// Nobody reads it any more.
    fn close(&self) {
        drop(self.opened.lock().expect("nothing panics that holds it").take());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        self.close();
    }
}

/// What `OpenVersion.items` gives.
#[pyclass(frozen, name = "_Items", module = "tssd")]
pub(crate) struct Items {
    of: Py<OpenVersion>,
    next: Mutex<usize>,
}

#[pymethods]
impl Items {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> Result<(String, Bound<'py, PyAny>)> {
        let of = self.of.bind(py).get();
        let place = {
            let mut next = self.next.lock().expect("nothing panics that holds it");
            *next += 1;
            *next - 1
        };
        let name = of.names.get(place).ok_or_else(|| PyStopIteration::new_err(()))?;
        Ok((name.clone(), of.read(py, name, None)?))
    }
}

/// A tensor of a version that is read in parts.
#[pyclass(frozen, name = "VersionSlice", module = "tssd")]
pub(crate) struct LeaseSlice {
    of: Py<OpenVersion>,
    name: String,
    shape: Vec<u64>,
    dtype: Dtype,
}

#[pymethods]
impl LeaseSlice {
    /// The shape of the whole tensor, in elements.
    fn get_shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    /// The dtype, as torch calls it: "bfloat16".
    fn get_dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Part of the tensor, by ints, slices and `...`. Only the box that it lies in is read.
    ///
    /// Raises:
    ///     IndexError: an index is out of range.
    ///     TypeError: an index is an array or a tensor.
    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let py = index.py();
        let (region, rest) = Index::of(index)?.region(&self.shape)?;
        let slice = Slice::new(region.offsets(), region.shape(), &self.shape)?;
        let part = self.of.bind(py).get().read(py, &self.name, Some(&slice))?;
        Ok(part.get_item(rest)?)
    }
}

fn no_tensor(name: &str) -> Refusal {
    Refusal::new("WrongType", format!("`{name}` is no tensor"))
        .advice("Store.get(key, fqn=...) gives any leaf")
}
