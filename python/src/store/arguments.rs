//! Extraction of version numbers and writer ranks from Python arguments.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use crate::error::{BindingError, Failure};

/// Extracts a version number, or None.
pub(super) fn extract_optional_version(given: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if given.is_none() { Ok(None) } else { extract_version(given).map(Some) }
}

/// Extracts a version number.
pub(super) fn extract_version(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    given.extract().map_err(|error| argument_error(given, ("version", u64::MAX), &error))
}

/// Extracts the rank of a writer, or None.
pub(super) fn extract_optional_writer(given: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    given.extract().map_err(|error| argument_error(given, ("writer", u32::MAX.into()), &error))
}

/// Returns the error for an argument that is no int, or out of range.
fn argument_error(given: &Bound<'_, PyAny>, (what, most): (&str, u64), error: &PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(given.py()) {
        let text = format!("{what} is an int from 0 to {most}, not {given}");
        return Failure::from(BindingError::new("invalid", text)).into();
    }
    PyTypeError::new_err(format!("{what} is an int, not {given:?}"))
}
