//! An open version, leased while it is read.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyList, PyString, PyTuple};
use tssd_format::{Dtype, TensorFlags, TensorSlice as Slice};
use tssd_store::plan::TensorLeaf;
use tssd_store::{Key, VersionId, VersionReader};

use super::outline::build_outline;
use super::select::match_names;
use crate::builder::Framework;
use crate::error::{BindingError, Failure, Result};
use crate::index::BasicIndex;
use crate::slice::TensorSlice;
use crate::store::connection::{Connection, Deadline, VersionRead};
use crate::store::loaded_tree::LoadedTree;

/// An open version, which is read tensor by tensor: see `Store.open`. It is a `Mapping` from fqns to tensors.
///
/// Later puts do not remove the version while this is open, or while a tensor of it is alive.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct OpenVersion {
    connection: Arc<Connection>,
    key: Key,
    version: u64,
    epoch: u32,
    id: VersionId,
    /// `None` once the version is closed.
    reader: Mutex<Option<Arc<VersionReader>>>,
    /// The fqns of the selected tensors, in the order of the state dict.
    names: Vec<String>,
    name_set: BTreeSet<String>,
}

impl OpenVersion {
    pub(super) fn new(
        py: Python<'_>,
        connection: Arc<Connection>,
        key: Key,
        reader: Arc<VersionReader>,
        names: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        let selection = names.map(|names| match_names(py, &reader, names)).transpose()?;
        let is_selected = |index: usize| selection.as_ref().is_none_or(|flags| flags[index]);
        let leaves = reader.leaves().iter().enumerate();
        let tensors = leaves
            .filter(|(index, (_, node))| TensorLeaf::of(node).is_some() && is_selected(*index));
        let names: Vec<String> = tensors.map(|(_, (path, _))| path.fqn()).collect();
        let name_set = names.iter().cloned().collect();
        let (version, epoch, id) = (reader.version(), reader.epoch(), reader.id());
        let reader = Mutex::new(Some(reader));
        Ok(Self { connection, key, version, epoch, id, reader, names, name_set })
    }

    /// Returns the reader of the version. An error once the version is closed.
    fn reader(&self) -> Result<Arc<VersionReader>> {
        let reader = self.reader.lock().expect("nothing panics that holds it").clone();
        Ok(reader.ok_or_else(|| PyValueError::new_err("the version is closed"))?)
    }

    /// Returns the reader of the version. An error if the version is not one of `key`, or is closed.
    pub(super) fn reader_for_key(&self, key: &Key) -> Result<Arc<VersionReader>> {
        if *key != self.key {
            let text =
                format!("the version that is open is one of key `{}`, not `{key}`", self.key);
            return Err(PyValueError::new_err(text).into());
        }
        self.reader()
    }

    /// Reads a tensor, or a slice of it.
    fn read<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        slice: Option<&Slice>,
    ) -> Result<Bound<'py, PyAny>> {
        let read = || {
            let reader = self.reader()?;
            let (_, leaf) = reader.leaf(name)?;
            if TensorLeaf::of(&leaf).is_none() {
                return Err(not_a_tensor(name).into());
            }
            let deadline = Deadline::new(None)?;
            let read =
                VersionRead { connection: &self.connection, reader: &reader, deadline: &deadline };
            LoadedTree::read_leaf(py, &read, name, slice)?.to_object(py)
        };
        read().map_err(|error| error.with_key(self.key.as_str(), None))
    }
}

#[pymethods]
impl OpenVersion {
    /// The key.
    #[getter]
    fn key(&self) -> &str {
        self.key.as_str()
    }

    /// The version number. It stays available after `close`.
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    /// The number of rewinds and rollbacks of the key before the version. It stays available after `close`.
    #[getter]
    fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The identity of the version, 32 hex digits. It stays available after `close`.
    #[getter]
    fn id(&self) -> String {
        self.id.to_string()
    }

    /// Returns the fqns of the tensors, in the order of the state dict.
    fn keys(&self) -> Vec<String> {
        self.names.clone()
    }

    /// Reads one tensor, or a part of it: as a view if possible, like `Store.get_state_dict`.
    ///
    /// Raises:
    ///     TssdKeyError: the tensor does not exist.
    #[pyo3(signature = (name, tensor_slice=None))]
    fn get_tensor<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        tensor_slice: Option<&Bound<'py, TensorSlice>>,
    ) -> Result<Bound<'py, PyAny>> {
        self.read(py, name, tensor_slice.map(|slice| &slice.get().0))
    }

    /// Returns a handle that reads parts of one tensor: `get_slice(name)[0:2, 5]`.
    ///
    /// Raises:
    ///     TssdKeyError: the tensor does not exist.
    fn get_slice(slf: &Bound<'_, Self>, name: &str) -> Result<VersionSlice> {
        let this = slf.get();
        let (_, node) = this.reader()?.leaf(name)?;
        let leaf = TensorLeaf::of(&node).ok_or_else(|| not_a_tensor(name))?;
        let (version, dtype, flags) = (slf.clone().unbind(), leaf.dtype(), leaf.flags());
        let shape = leaf.global_shape().to_vec();
        Ok(VersionSlice { version, name: name.to_owned(), shape, dtype, flags })
    }

    /// Iterates over the tensors, each with its fqn. Each tensor is read when the iterator reaches it.
    fn items(slf: Py<Self>) -> VersionItems {
        VersionItems { version: slf, next_index: Mutex::new(0) }
    }

    /// Returns the whole state dict, without the bytes of its tensors.
    ///
    /// Its tensors are whole tensors on torch's "meta" device, with dtypes and shapes. All other leaves are complete.
    /// `names` of `Store.open` has no effect. Arrays of numpy become tensors too, and pickled leaves become bytes.
    /// Ties between tensors are lost.
    fn to_meta<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let dict = build_outline(py, &self.connection, &*self.reader()?);
        dict.map_err(|error| error.with_key(self.key.as_str(), None))
    }

    /// Returns the `metadata` of the put. None if there was none.
    fn metadata<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        crate::metadata::from_attrs(py, self.reader()?.attrs())
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let key = PyString::new(py, self.key.as_str()).repr()?.to_string();
        let state = if self.reader().is_ok() { "" } else { ", closed" };
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

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        name.extract::<String>().is_ok_and(|name| self.name_set.contains(&name))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyIterator>> {
        Ok(PyList::new(py, &self.names)?.try_iter()?)
    }

    /// Reads one tensor. A `KeyError` if it does not exist, or was not selected.
    fn __getitem__<'py>(&self, name: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        if !self.__contains__(name) {
            let text = format!("`{}` is not the fqn of a selected tensor", name.str()?);
            let error = Failure::from(BindingError::new("not_found", text));
            return Err(error.with_key(self.key.as_str(), Some(self.version)));
        }
        self.read(name.py(), &name.extract::<String>()?, None)
    }

    /// Reads one tensor. `default` if it does not exist, or was not selected.
    #[pyo3(signature = (name, default=None))]
    fn get<'py>(
        &self,
        name: &Bound<'py, PyAny>,
        default: Option<Bound<'py, PyAny>>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        if self.__contains__(name) { self.__getitem__(name).map(Some) } else { Ok(default) }
    }

    /// Returns a view of the tensors. Each tensor is read when an iterator over the view reaches it.
    fn values<'py>(slf: &Bound<'py, Self>) -> Result<Bound<'py, PyAny>> {
        Ok(slf.py().import("collections.abc")?.call_method1("ValuesView", (slf,))?)
    }

    /// Closes the version. Tensors that were read stay valid.
    fn close(&self) {
        drop(self.reader.lock().expect("nothing panics that holds it").take());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        self.close();
    }
}

/// The iterator that `OpenVersion.items` returns.
#[pyclass(frozen, name = "_Items", module = "tssd")]
pub(crate) struct VersionItems {
    version: Py<OpenVersion>,
    next_index: Mutex<usize>,
}

#[pymethods]
impl VersionItems {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> Result<(String, Bound<'py, PyAny>)> {
        let version = self.version.bind(py).get();
        let index = {
            let mut next = self.next_index.lock().expect("nothing panics that holds it");
            *next += 1;
            *next - 1
        };
        let name = version.names.get(index).ok_or_else(|| PyStopIteration::new_err(()))?;
        Ok((name.clone(), version.read(py, name, None)?))
    }
}

/// A tensor of an open version, which is read in parts.
#[pyclass(frozen, name = "VersionSlice", module = "tssd")]
pub(crate) struct VersionSlice {
    version: Py<OpenVersion>,
    name: String,
    shape: Vec<u64>,
    dtype: Dtype,
    flags: TensorFlags,
}

#[pymethods]
impl VersionSlice {
    /// Returns the shape of the whole tensor, in elements.
    fn get_shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    /// Returns the dtype by its name in torch, such as "bfloat16".
    fn get_dtype(&self) -> String {
        self.dtype.to_string()
    }

    /// The shape of the whole tensor, in elements.
    #[getter(shape)]
    fn shape_tuple<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyTuple>> {
        Ok(PyTuple::new(py, &self.shape)?)
    }

    /// The dtype of what is read, as torch or numpy has it.
    #[getter(dtype)]
    fn dtype_object<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let is_array = [TensorFlags::NDARRAY, TensorFlags::SCALAR]
            .into_iter()
            .any(|flag| self.flags.contains(flag));
        let framework = if is_array { Framework::Numpy } else { Framework::parse(py, None)? };
        framework.py_dtype(py, self.dtype)
    }

    /// Reads a part of the tensor. An index is all that numpy or torch takes for the whole tensor.
    ///
    /// Only the smallest box that contains the part is read. A mask reads all of its dimensions.
    ///
    /// Raises:
    ///     IndexError: an index is out of range.
    ///     TypeError: a part of the index is no index.
    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let py = index.py();
        let (basic, rest) = BasicIndex::split(index, &self.shape)?;
        let (region, relative) = basic.bounding_region(&self.shape)?;
        let slice = Slice::new(region.offsets(), region.shape(), &self.shape)?;
        let read = self.version.bind(py).get().read(py, &self.name, Some(&slice))?;
        let part = read.get_item(relative)?;
        Ok(match rest {
            Some(rest) => part.get_item(rest)?,
            None => part,
        })
    }
}

fn not_a_tensor(name: &str) -> BindingError {
    BindingError::new("WrongType", format!("`{name}` is no tensor"))
        .advice("Store.get(key, fqn=...) gives any leaf")
}
