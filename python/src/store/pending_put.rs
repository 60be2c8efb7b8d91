//! A put that continues in the background.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tssd_store::{Key, PendingPut, PutReport};

use super::report::put_report;
use crate::device::SharedCopyStats;
use crate::error::{Failure, Result};
use crate::store::connection::Connection;

/// A put that continues in the background: see `wait=False` of `Store.put_state_dict`.
#[pyclass(frozen, name = "PendingPut", module = "tssd")]
pub(crate) struct PyPendingPut {
    connection: Arc<Connection>,
    key: Key,
    /// The put; `None` once it has ended.
    put: Mutex<Option<PendingPut>>,
    /// The report; `None` until the put has succeeded.
    report: Mutex<Option<PutReport>>,
    details: ImportDetails,
}

/// What the report says about the import of the state dict.
pub(super) struct ImportDetails {
    /// The copies from devices.
    pub(super) copies: SharedCopyStats,
    /// The values that are stored as an object of their base class: their fqns and their classes.
    pub(super) stored_as_base: Vec<(String, String)>,
}

impl PyPendingPut {
    pub(super) fn new(
        connection: Arc<Connection>,
        key: Key,
        put: PendingPut,
        details: ImportDetails,
    ) -> Self {
        Self { connection, key, put: Mutex::new(Some(put)), report: Mutex::default(), details }
    }

    /// Waits until the contribution is committed, and returns the report so far.
    fn wait_committed(&self, py: Python<'_>, timeout: Option<f64>) -> Result<PutReport> {
        let mut guard = self.lock_put()?;
        let Some(put) = guard.as_mut() else {
            drop(guard);
            return self.wait_done(py, timeout);
        };
        let report = self.connection.block_on(py, timeout, put.committed());
        if report.as_ref().is_err_and(|error| !error.is_timeout()) {
            *guard = None;
        }
        report.map_err(|error| error.with_key(self.key.as_str(), None))
    }

    /// Locks the put. An error if another thread waits for it.
    fn lock_put(&self) -> Result<MutexGuard<'_, Option<PendingPut>>> {
        let busy = |_| PyValueError::new_err("another thread waits for it");
        Ok(self.put.try_lock().map_err(busy)?)
    }

    /// Waits until the put is done, and returns its report.
    fn wait_done(&self, py: Python<'_>, timeout: Option<f64>) -> Result<PutReport> {
        let mut guard = self.lock_put()?;
        if let Some(put) = guard.as_mut() {
            let report = self.connection.block_on(py, timeout, put.done());
            // After a timeout the caller may wait again.
            if !report.as_ref().is_err_and(Failure::is_timeout) {
                *guard = None;
            }
            let report = report.map_err(|error| error.with_key(self.key.as_str(), None))?;
            *self.report.lock().expect("nothing panics that holds it") = Some(report);
        }
        let report = self.report.lock().expect("nothing panics that holds it").clone();
        Ok(report.ok_or_else(|| PyValueError::new_err("the put has failed"))?)
    }
}

/// The put continues, and retains the connection until it is done.
impl Drop for PyPendingPut {
    fn drop(&mut self) {
        let put = self.put.get_mut().ok().and_then(Option::take);
        if let Some(mut put) = put {
            let connection = self.connection.clone();
            self.connection.runtime.spawn(async move {
                drop(put.done().await);
                drop(connection);
            });
        }
    }
}

#[pymethods]
impl PyPendingPut {
    /// Waits until the version is visible, when all its writers have committed. Returns its number.
    ///
    /// Raises:
    ///     As `result`.
    #[pyo3(signature = (timeout=None))]
    fn wait_visible(&self, py: Python<'_>, timeout: Option<f64>) -> Result<u64> {
        let started = Instant::now();
        let report = self.wait_committed(py, timeout)?;
        if !report.visible {
            let remaining =
                timeout.map(|timeout| (timeout - started.elapsed().as_secs_f64()).max(0.0));
            let forever = Duration::from_secs(u64::from(u32::MAX));
            let wait = self.connection.store.wait_for_version(&self.key, report.version, forever);
            let result = self.connection.block_on(py, remaining, wait);
            result.map_err(|error| error.with_key(self.key.as_str(), Some(report.version)))?;
        }
        Ok(report.version)
    }

    /// Waits until the contribution is committed, and returns its PutReport.
    ///
    /// With durability="object" it also waits until the contribution is in the bucket.
    ///
    /// Raises:
    ///     As `put_state_dict`; TssdTimeoutError after `timeout` seconds: the call can then be repeated.
    #[pyo3(signature = (timeout=None))]
    fn result<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> Result<Bound<'py, PyAny>> {
        let report = self.wait_done(py, timeout)?;
        put_report(py, &report, self.details.copies.snapshot(), &self.details.stored_as_base)
    }
}
