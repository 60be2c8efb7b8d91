//! A version pinned under a label.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use tssd_store::Key;

use crate::error::Result;
use crate::store::connection::Connection;

/// A version that is pinned under a label: see `Store.pin`.
#[pyclass(frozen, name = "Pin", module = "tssd")]
pub(crate) struct PyPin {
    connection: Arc<Connection>,
    key: Key,
    label: String,
    version: u64,
}

impl PyPin {
    pub(super) fn new(connection: Arc<Connection>, key: Key, label: String, version: u64) -> Self {
        Self { connection, key, label, version }
    }
}

#[pymethods]
impl PyPin {
    /// The version number.
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    /// The label.
    #[getter]
    fn label(&self) -> &str {
        &self.label
    }

    /// Removes the label, so that it no longer pins its version.
    fn unpin(&self, py: Python<'_>) -> Result<()> {
        let result =
            self.connection.block_on(py, None, self.connection.store.unpin(&self.key, &self.label));
        result.map_err(|error| error.with_key(self.key.as_str(), Some(self.version)))
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
