//! A label that holds a version.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use tssd_store::Key;

use super::connected::Connected;
use crate::error::Result;

/// A version that a label holds: see `Store.pin`.
#[pyclass(frozen, name = "Pin", module = "tssd")]
pub(crate) struct Pinned {
    own: Arc<Connected>,
    key: Key,
    label: String,
    version: u64,
}

impl Pinned {
    pub(super) fn new(own: Arc<Connected>, key: Key, label: String, version: u64) -> Self {
        Self { own, key, label, version }
    }
}

#[pymethods]
impl Pinned {
    /// The number of the version.
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    /// The label.
    #[getter]
    fn label(&self) -> &str {
        &self.label
    }

    /// The label holds its version no longer.
    fn unpin(&self, py: Python<'_>) -> Result<()> {
        let unpinned = self.own.run(py, None, self.own.store.unpin(&self.key, &self.label));
        unpinned.map_err(|error| error.of_key(self.key.as_str(), Some(self.version)))
    }

    fn __int__(&self) -> u64 {
        self.version
    }

    fn __index__(&self) -> u64 {
        self.version
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> Result<()> {
        self.unpin(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Pin({}, version {})", PyString::new(py, &self.label).repr()?, self.version))
    }
}
