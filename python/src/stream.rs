//! Versions that are put, or got, tensor by tensor.

use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::Node;
use tssd_store::{Key, Opened, Publisher, PutOptions, Subscription};

use crate::error::{Refusal, Result};
use crate::object::{Framework, Maker};
use crate::slice::TensorSlice;
use crate::store::{Connected, Version, put_report, version_info};
use crate::value::take;

/// A version that is put tensor by tensor: see `Store.publish`.
#[pyclass(frozen, name = "Publisher", module = "tssd")]
pub(crate) struct Publishing {
    own: Arc<Connected>,
    key: Key,
    publisher: Mutex<Option<Publisher>>,
    report: Mutex<Option<Py<PyAny>>>,
    allow_pickle: bool,
}

impl Publishing {
    pub(crate) fn new(
        own: Arc<Connected>,
        key: Key,
        options: &PutOptions,
        bucket_bytes: u64,
        allow_pickle: bool,
    ) -> Result<Self> {
        let publisher = Mutex::new(Some(own.store.publish(&key, options, bucket_bytes)?));
        Ok(Self { own, key, publisher, report: Mutex::default(), allow_pickle })
    }

    /// After an error it is open no longer.
    fn ended(&self, publisher: &mut Option<Publisher>, done: Result<()>) -> Result<()> {
        done.inspect_err(|_| *publisher = None)
            .map_err(|error| error.of_key(self.key.as_str(), None))
    }

    fn publisher(&self) -> Result<MutexGuard<'_, Option<Publisher>>> {
        let busy = |_| PyValueError::new_err("another thread puts into it");
        Ok(self.publisher.try_lock().map_err(busy)?)
    }
}

fn open(publisher: &mut Option<Publisher>) -> Result<&mut Publisher> {
    let over = || PyValueError::new_err("it is finished, or has failed: publish another version");
    Ok(publisher.as_mut().ok_or_else(over)?)
}

#[pymethods]
impl Publishing {
    /// Puts one entry. It must rest until it is written: until `flush` returns, or the block ends.
    ///
    /// Args:
    ///     name: its fqn.
    ///     value: a tensor, or whatever else a state dict may have.
    ///
    /// Raises:
    ///     As `Store.put_state_dict`; then nothing is left of the version.
    fn put(&self, name: &str, value: &Bound<'_, PyAny>) -> Result<()> {
        let py = value.py();
        let dict = PyDict::new(py);
        dict.set_item(name, value)?;
        let taken = take(&dict, self.allow_pickle)?;
        let entry = taken.dict.entries().iter().next().map(|(_, value)| value.clone());
        let Some(value) = entry else { return Ok(()) };
        let mut publisher = self.publisher()?;
        let done = self.own.run(py, None, open(&mut publisher)?.add(name, value));
        self.ended(&mut publisher, done)
    }

    /// Writes what was put: it may be changed again once this returns.
    ///
    /// Raises:
    ///     As `put`.
    fn flush(&self, py: Python<'_>) -> Result<()> {
        let mut publisher = self.publisher()?;
        let done = self.own.run(py, None, open(&mut publisher)?.flush());
        self.ended(&mut publisher, done)
    }

    /// What has been put, once the block has ended: a PutReport.
    #[getter]
    fn report(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let report = self.report.lock().expect("nothing panics that holds it");
        report.as_ref().map(|report| report.clone_ref(py))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (error=None, *_rest))]
    fn __exit__(
        &self,
        py: Python<'_>,
        error: Option<&Bound<'_, PyAny>>,
        _rest: &Bound<'_, PyTuple>,
    ) -> Result<()> {
        let publisher = self.publisher()?.take();
        let Some(publisher) = publisher else { return Ok(()) };
        if error.is_some() {
            // It is withdrawn.
            let _inside = self.own.runtime.enter();
            drop(publisher);
            return Ok(());
        }
        let finished = self.own.run(py, None, publisher.finish());
        let finished = finished.map_err(|error| error.of_key(self.key.as_str(), None))?;
        let report = put_report(py, &finished)?.unbind();
        *self.report.lock().expect("nothing panics that holds it") = Some(report);
        Ok(())
    }
}

/// A version that is read tensor by tensor: see `Store.open`. It stays there as long as this does.
#[pyclass(frozen, name = "OpenVersion", module = "tssd")]
pub(crate) struct Reading {
    own: Arc<Connected>,
    key: Key,
    opened: Mutex<Option<Arc<Opened>>>,
    names: Vec<String>,
}

impl Reading {
    pub(crate) fn new(own: Arc<Connected>, key: Key, opened: Opened) -> Self {
        let leaves = opened.structure().clone().into_leaves();
        let tensors = leaves.into_iter().filter(|(_, leaf)| matches!(leaf, Node::Tensors(_)));
        let names = tensors.map(|(path, _)| path.fqn()).collect();
        Self { own, key, opened: Mutex::new(Some(Arc::new(opened))), names }
    }

    fn opened(&self) -> Result<Arc<Opened>> {
        let opened = self.opened.lock().expect("nothing panics that holds it").clone();
        Ok(opened.ok_or_else(|| PyValueError::new_err("the version is closed"))?)
    }
}

#[pymethods]
impl Reading {
    /// The number of the version.
    #[getter]
    fn version(&self) -> Result<u64> {
        Ok(self.opened()?.version())
    }

    /// The fqns of the tensors, in the order of the state dict.
    fn keys(&self) -> Vec<String> {
        self.names.clone()
    }

    /// One tensor, or a part of it, in memory of its own.
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
        let region = tensor_slice.map(|slice| slice.get().0.region());
        let opened = self.opened()?;
        let read = Version::read_leaf(py, &self.own, &opened, name, region.as_ref());
        let version = read.map_err(|error| error.of_key(self.key.as_str(), None))?;
        let mut maker = Maker::new(py, &version, &version, Framework::of(py, None)?);
        match version.root() {
            Node::Tensors(run) => maker.tensors(run),
            _ => Err(Refusal::new("not_found", format!("`{name}` is no tensor")).into()),
        }
    }

    /// The tensors, each with its fqn, one after the other as they are asked for.
    fn items(slf: Py<Self>) -> Items {
        Items { of: slf, next: Mutex::new(0) }
    }

    /// What was given as `metadata` when it was put; None if nothing was.
    fn metadata<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        crate::file::metadata(py, self.opened()?.attrs())
    }

    fn __int__(&self) -> Result<u64> {
        self.version()
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
    of: Py<Reading>,
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
        Ok((name.clone(), of.get_tensor(py, name, None)?))
    }
}

/// The versions of a key as they come: see `Store.subscribe`.
#[pyclass(frozen, name = "Subscription", module = "tssd")]
pub(crate) struct Subscribed {
    own: Arc<Connected>,
    subscription: Mutex<Option<Subscription>>,
}

impl Subscribed {
    pub(crate) fn new(own: Arc<Connected>, key: &Key) -> Self {
        let subscription = Mutex::new(Some(own.store.subscribe(key)));
        Self { own, subscription }
    }
}

#[pymethods]
impl Subscribed {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The newest version, as soon as it is another than the one before, as VersionInfo.
    fn __next__<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let busy = |_| PyValueError::new_err("another thread waits for it");
        let mut subscription = self.subscription.try_lock().map_err(busy)?;
        let open = subscription.as_mut().ok_or_else(|| PyStopIteration::new_err(()))?;
        version_info(py, &self.own.run(py, None, open.next())?)
    }

    /// It ends.
    fn close(&self) -> Result<()> {
        let busy = |_| PyValueError::new_err("another thread waits for it");
        *self.subscription.try_lock().map_err(busy)? = None;
        Ok(())
    }
}
