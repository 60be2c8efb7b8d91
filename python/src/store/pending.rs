//! A put that goes on by itself.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tssd_store::{Key, PendingPut, PutReport};

use super::connected::Connected;
use super::report::put_report;
use crate::device::Copies;
use crate::error::{Failure, Result};

/// A put that goes on by itself.
#[pyclass(frozen, name = "PendingPut", module = "tssd")]
pub(crate) struct Pending {
    own: Arc<Connected>,
    key: Key,
    waiting: Mutex<Option<PendingPut>>,
    done: Mutex<Option<PutReport>>,
    copies: Copies,
}

impl Pending {
    pub(super) fn new(own: Arc<Connected>, key: Key, pending: PendingPut, copies: Copies) -> Self {
        Self { own, key, waiting: Mutex::new(Some(pending)), done: Mutex::default(), copies }
    }

    /// What is known as soon as the contribution is committed.
    fn committed(&self, py: Python<'_>, timeout: Option<f64>) -> Result<PutReport> {
        let mut pending = self.locked()?;
        let Some(waiting) = pending.as_mut() else {
            drop(pending);
            return self.report(py, timeout);
        };
        let report = self.own.run(py, timeout, waiting.committed());
        if report.as_ref().is_err_and(|error| !error.is_timeout()) {
            *pending = None;
        }
        report.map_err(|error| error.of_key(self.key.as_str(), None))
    }

    fn locked(&self) -> Result<MutexGuard<'_, Option<PendingPut>>> {
        let lock = |_| PyValueError::new_err("another thread waits for it");
        Ok(self.waiting.try_lock().map_err(lock)?)
    }

    fn report(&self, py: Python<'_>, timeout: Option<f64>) -> Result<PutReport> {
        let mut pending = self.locked()?;
        if let Some(waiting) = pending.as_mut() {
            let report = self.own.run(py, timeout, waiting.done());
            // One who was late may ask again.
            if !report.as_ref().is_err_and(Failure::is_timeout) {
                *pending = None;
            }
            let report = report.map_err(|error| error.of_key(self.key.as_str(), None))?;
            *self.done.lock().expect("nothing panics that holds it") = Some(report);
        }
        let done = self.done.lock().expect("nothing panics that holds it").clone();
        Ok(done.ok_or_else(|| PyValueError::new_err("the put has failed"))?)
    }
}

/// Nobody waits for it: it goes on all the same, and the connection stays until it is done.
impl Drop for Pending {
    fn drop(&mut self) {
        let waiting = self.waiting.get_mut().ok().and_then(Option::take);
        if let Some(mut waiting) = waiting {
            let own = self.own.clone();
            self.own.runtime.spawn(async move {
                drop(waiting.done().await);
                drop(own);
            });
        }
    }
}

#[pymethods]
impl Pending {
    /// Waits until readers see the version: all its writers have put theirs. Gives its number.
    ///
    /// Raises:
    ///     As `result`.
    #[pyo3(signature = (timeout=None))]
    fn visible(&self, py: Python<'_>, timeout: Option<f64>) -> Result<u64> {
        let started = Instant::now();
        let report = self.committed(py, timeout)?;
        if !report.visible {
            let left = timeout.map(|timeout| (timeout - started.elapsed().as_secs_f64()).max(0.0));
            let forever = Duration::from_secs(u64::from(u32::MAX));
            let wait = self.own.store.wait_for_version(&self.key, report.version, forever);
            let seen = self.own.run(py, left, wait);
            seen.map_err(|error| error.of_key(self.key.as_str(), Some(report.version)))?;
        }
        Ok(report.version)
    }

    /// Waits until the contribution is committed, and in the bucket with durability="object", and gives its PutReport.
    ///
    /// Raises:
    ///     As `put_state_dict`; TssdTimeoutError after `timeout` seconds: then it can be asked again.
    #[pyo3(signature = (timeout=None))]
    fn result<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> Result<Bound<'py, PyAny>> {
        put_report(py, &self.report(py, timeout)?, self.copies.copied())
    }
}
