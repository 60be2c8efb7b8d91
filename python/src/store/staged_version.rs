//! A version whose bytes are on this host, verified, and not yet in the caller's tensors.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use tssd_store::{GetOptions, GetReport, Key, VersionReader};

use super::report::{GetDetails, get_report};
use crate::error::Result;
use crate::store::connection::{Connection, Deadline, VersionRead};
use crate::store::fill::{Differences, FillOptions, StagedTargets};

/// A version whose bytes are in the memory of this host, verified, ready to be copied: see `Store.stage`.
///
/// The version is leased until this is closed. As a context manager, it closes when its block ends.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct StagedVersion {
    connection: Arc<Connection>,
    key: Key,
    report: GetReport,
    differences: Differences,
    /// Number of bytes in staging tensors.
    staged_bytes: u64,
    /// `None` once it is closed.
    staged: Mutex<Option<Staged>>,
}

struct Staged {
    /// Reads without verification.
    reader: VersionReader,
    targets: StagedTargets,
}

impl StagedVersion {
    pub(super) fn new(
        read: &VersionRead<'_>,
        connection: Arc<Connection>,
        key: Key,
        into: &Bound<'_, PyAny>,
        options: FillOptions<'_, '_>,
    ) -> Result<Self> {
        let (targets, report, differences) = StagedTargets::stage(read, into, options)?;
        let staged_bytes = targets.buffered_bytes();
        let unverified = GetOptions { unverified: true, ..read.reader.options().clone() };
        let reader = read.reader.with_options(&unverified)?;
        let staged = Mutex::new(Some(Staged { reader, targets }));
        Ok(Self { connection, key, report, differences, staged_bytes, staged })
    }
}

#[pymethods]
impl StagedVersion {
    /// The key.
    #[getter]
    fn key(&self) -> &str {
        self.key.as_str()
    }

    /// The version number. It stays available after `close`.
    #[getter]
    fn version(&self) -> u64 {
        self.report.version
    }

    /// The number of rewinds and rollbacks of the key before the version. It stays available after `close`.
    #[getter]
    fn epoch(&self) -> u32 {
        self.report.epoch
    }

    /// The identity of the version, 32 hex digits. It stays available after `close`.
    #[getter]
    fn id(&self) -> String {
        self.report.id.to_string()
    }

    /// The GetReport of the staging. `bytes_transferred` are the bytes in staging memory: those that the store does not have
    /// in the memory of this host, or only compressed.
    #[getter]
    fn report<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let details = GetDetails { staged: self.staged_bytes, ..GetDetails::default() };
        get_report(py, &self.report, &self.differences, details)
    }

    /// Copies the bytes to the tensors of `into`, from the memory of this host.
    ///
    /// If it fails, some tensors may have been written. It can be repeated, until this is closed.
    ///
    /// Args:
    ///     timeout: how many seconds it may take. None: without limit.
    ///
    /// Returns:
    ///     A CommitReport.
    #[pyo3(signature = (timeout=None))]
    fn commit<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> Result<Bound<'py, PyAny>> {
        let started = Instant::now();
        let busy = |_| PyValueError::new_err("another thread commits the version");
        let staged = self.staged.try_lock().map_err(busy)?;
        let Some(Staged { reader, targets }) = staged.as_ref() else {
            return Err(PyValueError::new_err("the staged version is closed").into());
        };
        let deadline = Deadline::new(timeout)?;
        let read = VersionRead { connection: &self.connection, reader, deadline: &deadline };
        let bytes = targets
            .commit(py, &read)
            .map_err(|error| error.with_key(self.key.as_str(), Some(self.report.version)))?;
        let class = py.import("tssd._reports")?.getattr("CommitReport")?;
        Ok(class.call1((self.report.version, bytes, started.elapsed().as_secs_f64()))?)
    }

    /// Releases the version, and the staging memory.
    fn close(&self) -> Result<()> {
        let busy = |_| PyValueError::new_err("another thread commits the version");
        drop(self.staged.try_lock().map_err(busy)?.take());
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let key = PyString::new(py, self.key.as_str()).repr()?.to_string();
        let is_open = self.staged.try_lock().map_or(true, |staged| staged.is_some());
        let state = if is_open { "" } else { ", closed" };
        Ok(format!("StagedVersion({key}, version {}{state})", self.report.version))
    }

    fn __int__(&self) -> u64 {
        self.report.version
    }

    fn __index__(&self) -> u64 {
        self.report.version
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) -> Result<()> {
        self.close()
    }
}
