//! Python's garbage collector, at rest.

use pyo3::intern;
use pyo3::prelude::*;

use crate::error::Result;

/// While many objects are made that all stay, the collector would look at every object that there is, again
/// and again: a fifth of the time that views of 340 tensors take.
pub(crate) struct Pause<'py>(Option<Bound<'py, PyModule>>);

impl<'py> Pause<'py> {
    pub(crate) fn new(py: Python<'py>) -> Result<Self> {
        let gc = py.import(intern!(py, "gc"))?;
        if !gc.call_method0(intern!(py, "isenabled"))?.is_truthy()? {
            return Ok(Self(None));
        }
        gc.call_method0(intern!(py, "disable"))?;
        Ok(Self(Some(gc)))
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        if let Some(gc) = &self.0 {
            let enabled = gc.call_method0(intern!(gc.py(), "enable"));
            debug_assert!(enabled.is_ok(), "it can be enabled");
        }
    }
}
