//! Tensors that are filled with versions as they come through a ring.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tssd_store::{GetOptions, Key, Receiver};

use super::connected::{Connected, seconds};
use super::into::{device_of, receive};
use super::report::receive_report;
use crate::error::Result;

/// Who receives what is put with `residency="ring"`: see `Store.receiver`.
#[pyclass(frozen, name = "Receiver", module = "tssd")]
pub(crate) struct Receiving {
    // Before the store's threads.
    receiver: Mutex<Option<Receiver>>,
    own: Arc<Connected>,
    key: Key,
    into: Py<PyAny>,
    options: GetOptions,
}

impl Receiving {
    pub(crate) fn new(
        own: Arc<Connected>,
        key: Key,
        into: &Bound<'_, PyAny>,
        options: GetOptions,
    ) -> Result<Self> {
        let py = into.py();
        let device = device_of(into)?;
        let receiver = own.run(py, None, own.store.receiver(&key, device.as_deref()));
        let receiver = receiver.map_err(|error| error.of_key(key.as_str(), None))?;
        let receiver = Mutex::new(Some(receiver));
        Ok(Self { receiver, own, key, into: into.clone().unbind(), options })
    }
}

/// For so long a version is waited for, unless something else is said.
const PATIENCE: Duration = Duration::from_mins(1);

#[pymethods]
impl Receiving {
    /// Fills the tensors with the next version, bucket by bucket, as it comes.
    ///
    /// Args:
    ///     timeout: for how many seconds it is waited for. None: 60.
    ///
    /// Returns:
    ///     A ReceiveReport.
    ///
    /// Raises:
    ///     TssdKeyError: none has come whole, or it does not have all that is wanted. What has come of it is in the
    ///         tensors; the next one that comes whole mends that.
    ///     TssdTypeError, TssdValueError: dtypes or shapes differ.
    #[pyo3(signature = (timeout=None))]
    fn receive<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> Result<Bound<'py, PyAny>> {
        let busy = |_| PyValueError::new_err("another thread receives with it");
        let mut receiver = self.receiver.try_lock().map_err(busy)?;
        let closed = || PyValueError::new_err("it is closed");
        let receiver = receiver.as_mut().ok_or_else(closed)?;
        let patience = timeout.map_or(Ok(PATIENCE), seconds)?;
        let into = self.into.bind(py);
        let received = receive(&self.own, receiver, into, (&self.options, patience));
        let (report, copied) = received.map_err(|error| error.of_key(self.key.as_str(), None))?;
        receive_report(py, &report, copied)
    }

    /// Puts wait for it no longer.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.receiver.lock().ok().and_then(|mut open| open.take())));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }
}
