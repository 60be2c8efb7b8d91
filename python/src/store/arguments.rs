//! Extraction of version numbers, writer ranks and transports from Python arguments.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use tssd_store::Transport;

use crate::error::{BindingError, Failure, Result, type_error};

/// Extracts a version number, or None.
pub(super) fn extract_optional_version(given: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if given.is_none() { Ok(None) } else { extract_version(given).map(Some) }
}

/// Extracts a version number.
pub(super) fn extract_version(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    given.extract().map_err(|error| argument_error(given, "version", u64::MAX, &error))
}

/// Extracts the rank of a writer, or None.
pub(super) fn extract_optional_writer(given: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    given.extract().map_err(|error| argument_error(given, "writer", u32::MAX.into(), &error))
}

/// Returns the error for an argument that is no int, or out of range.
fn argument_error(given: &Bound<'_, PyAny>, name: &str, max: u64, error: &PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(given.py()) {
        let text = format!("{name} is an int from 0 to {max}, not {given}");
        return Failure::from(BindingError::new("invalid", text)).into();
    }
    type_error(format!("{name} is an int, not {given:?}"))
}

/// Converts the value of `require_transport` to a transport.
///
/// # Errors
///
/// `TssdValueError` if there is no such transport.
pub(super) fn parse_transport(name: &str) -> Result<Transport> {
    name.parse::<Transport>().map_err(|_| {
        let choices =
            "\"arena\", \"cuda_ipc\", \"file\", \"memory\", \"object\", \"tcp\" or \"tls\"";
        invalid_choice("require_transport", choices, name).into()
    })
}

/// Returns the error for a value that is none of the `choices` of an argument.
pub(super) fn invalid_choice(argument: &str, choices: &str, value: &str) -> BindingError {
    BindingError::new("invalid", format!("{argument} is {choices}, not {value:?}"))
}
