//! A receiver that fills tensors with the versions of a ring.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tssd_store::{GetOptions, Key, Receiver};

use super::report::receive_report;
use crate::error::Result;
use crate::store::connection::{Connection, parse_seconds};
use crate::store::fill::{common_device, receive};

/// A receiver of versions that are put with `residency="ring"` or "in_place": see `Store.receiver`.
#[pyclass(frozen, name = "Receiver", module = "tssd")]
pub(crate) struct PyReceiver {
    // Declared before `connection`, so that it is dropped while the runtime still runs.
    receiver: Mutex<Option<Receiver>>,
    connection: Arc<Connection>,
    key: Key,
    into: Py<PyAny>,
    options: GetOptions,
}

impl PyReceiver {
    pub(crate) fn new(
        connection: Arc<Connection>,
        key: Key,
        into: &Bound<'_, PyAny>,
        options: GetOptions,
    ) -> Result<Self> {
        let py = into.py();
        let device = common_device(into)?;
        let receiver =
            connection.block_on(py, None, connection.store.receiver(&key, device.as_deref()));
        let receiver = receiver.map_err(|error| error.with_key(key.as_str(), None))?;
        let receiver = Mutex::new(Some(receiver));
        Ok(Self { receiver, connection, key, into: into.clone().unbind(), options })
    }
}

/// How long `receive` waits for a version if no timeout is given.
const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);

#[pymethods]
impl PyReceiver {
    /// Fills the tensors with the next version, bucket by bucket, as it arrives.
    ///
    /// Args:
    ///     timeout: how many seconds to wait for the version. None: 60.
    ///
    /// Returns:
    ///     A ReceiveReport.
    ///
    /// Raises:
    ///     TssdKeyError: no complete version arrived, or the version lacks a requested tensor. The tensors then hold
    ///         the part that arrived; the next complete version overwrites it.
    ///     TssdTypeError, TssdValueError: dtypes or shapes differ.
    #[pyo3(signature = (timeout=None))]
    fn receive<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> Result<Bound<'py, PyAny>> {
        let busy = |_| PyValueError::new_err("another thread receives with it");
        let mut receiver = self.receiver.try_lock().map_err(busy)?;
        let closed = || PyValueError::new_err("it is closed");
        let receiver = receiver.as_mut().ok_or_else(closed)?;
        let timeout = timeout.map_or(Ok(DEFAULT_TIMEOUT), parse_seconds)?;
        let into = self.into.bind(py);
        let result = receive(&self.connection, receiver, into, &self.options, timeout);
        let (report, copied) = result.map_err(|error| error.with_key(self.key.as_str(), None))?;
        receive_report(py, &report, copied)
    }

    /// Closes the receiver. Puts no longer wait for it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.receiver.lock().ok().and_then(|mut receiver| receiver.take())));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }
}
