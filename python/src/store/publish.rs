//! A version that is put tensor by tensor.

use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::Value;
use tssd_store::{Copied, Key, Publisher, PutOptions};

use super::connected::Connected;
use super::put::own_rank;
use super::report::put_report;
use crate::device::Copies;
use crate::error::{Failure, Result};
use crate::local::Transfer;
use crate::value::take;

/// A version that is put tensor by tensor: see `Store.publish`.
#[pyclass(frozen, name = "Publisher", module = "tssd")]
pub(crate) struct Publishing {
    own: Arc<Connected>,
    key: Key,
    publisher: Mutex<Option<Publisher>>,
    report: Mutex<Option<Py<PyAny>>>,
    taking: Taking,
    /// Those of each entry.
    copies: Mutex<Vec<Copies>>,
}

/// How values are taken over.
pub(crate) struct Taking {
    pub(super) allow_pickle: bool,
    /// The dtype that floating tensors are stored as, and the names of those that are not.
    pub(super) transfer: Option<(Py<PyAny>, Option<Py<PyAny>>)>,
}

impl Publishing {
    pub(crate) fn new(
        own: Arc<Connected>,
        key: Key,
        options: &PutOptions,
        bucket_bytes: u64,
        taking: Taking,
    ) -> Result<Self> {
        let publisher = Mutex::new(Some(own.store.publish(&key, options, bucket_bytes)?));
        let (report, copies) = (Mutex::default(), Mutex::default());
        Ok(Self { own, key, publisher, report, taking, copies })
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
        let transfer = self.taking.transfer.as_ref().map(|(dtype, keep)| {
            Transfer::new(dtype.bind(py), keep.as_ref().map(|keep| keep.bind(py)))
        });
        let taken = take(&dict, self.taking.allow_pickle, transfer.transpose()?)?;
        let entry = taken.dict.entries().iter().next().map(|(_, value)| value.clone());
        let Some(value) = entry else { return Ok(()) };
        let copies = taken.devices.copies().clone();
        self.copies.lock().expect("nothing panics that holds it").push(copies);
        let mut publisher = self.publisher()?;
        if matches!(value, Value::Shards(_)) {
            let (job, writer) = own_rank(py)?;
            let identified = open(&mut publisher)?.identify(job, writer).map_err(Failure::from);
            self.ended(&mut publisher, identified)?;
        }
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
        let mut copied = None;
        for copies in self.copies.lock().expect("nothing panics that holds it").iter() {
            if let Some(more) = copies.copied() {
                *copied.get_or_insert_with(Copied::default) += &more;
            }
        }
        let report = put_report(py, &finished, copied)?.unbind();
        *self.report.lock().expect("nothing panics that holds it") = Some(report);
        Ok(())
    }
}
