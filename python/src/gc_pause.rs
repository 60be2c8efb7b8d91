//! A pause of Python's garbage collector.

use pyo3::intern;
use pyo3::prelude::*;

use crate::error::Result;

/// Guard that disables the garbage collector until it is dropped, if the collector was enabled.
///
/// While many long-lived objects are created, the collector would scan all objects again and again. Its scans take a
/// fifth of the time to create views of 340 tensors.
pub(crate) struct GcPause<'py>(Option<Bound<'py, PyModule>>);

impl<'py> GcPause<'py> {
    pub(crate) fn new(py: Python<'py>) -> Result<Self> {
        let gc = py.import(intern!(py, "gc"))?;
        if !gc.call_method0(intern!(py, "isenabled"))?.is_truthy()? {
            return Ok(Self(None));
        }
        gc.call_method0(intern!(py, "disable"))?;
        Ok(Self(Some(gc)))
    }
}

impl Drop for GcPause<'_> {
    fn drop(&mut self) {
        if let Some(gc) = &self.0 {
            let result = gc.call_method0(intern!(gc.py(), "enable"));
            debug_assert!(result.is_ok(), "it can be enabled");
        }
    }
}
