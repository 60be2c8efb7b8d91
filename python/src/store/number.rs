//! Versions and writers, as arguments.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use crate::error::{Failure, Refusal};

/// The number of a version, or None.
pub(super) fn version(given: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if given.is_none() { Ok(None) } else { number(given).map(Some) }
}

/// The number of a version.
pub(super) fn number(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    given.extract().map_err(|error| refused(given, ("version", u64::MAX), &error))
}

/// The rank of a writer, or None.
pub(super) fn writer(given: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    given.extract().map_err(|error| refused(given, ("writer", u32::MAX.into()), &error))
}

fn refused(given: &Bound<'_, PyAny>, (what, most): (&str, u64), error: &PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(given.py()) {
        let text = format!("{what} is an int from 0 to {most}, not {given}");
        return Failure::from(Refusal::new("invalid", text)).into();
    }
    PyTypeError::new_err(format!("{what} is an int, not {given:?}"))
}
