//! Extraction of version numbers, writer ranks and transports from Python arguments.

use std::time::Duration;

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use tssd_store::ledger::Timestamp;
use tssd_store::{Label, SeenVersion, Selector, Transport, VersionPosition};

use crate::error::{BindingError, Failure, Result, type_error};

/// Extracts a version number, or None.
pub(super) fn extract_optional_version(given: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if given.is_none() { Ok(None) } else { extract_version(given).map(Some) }
}

/// Extracts a version number.
pub(super) fn extract_version(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    given.extract().map_err(|error| argument_error(given, "version", u64::MAX, &error))
}

/// Extracts a version: its number, or a label. None: the newest.
pub(super) fn extract_selector(given: &Bound<'_, PyAny>, name: &str) -> PyResult<Selector> {
    if given.is_none() {
        return Ok(Selector::Newest);
    }
    let Ok(label) = given.extract::<&str>() else {
        let number = given.extract().map(Selector::Number);
        return number.map_err(|error| match given.hasattr("__index__") {
            Ok(true) => argument_error(given, name, u64::MAX, &error),
            _ => type_error(format!("{name} is an int or a label, not {given:?}")),
        });
    };
    let label = Label::new(label).map_err(|error| {
        let text = format!("{name} is an int or a label, not {label:?}: {error}");
        PyErr::from(Failure::from(BindingError::new("invalid", text)))
    })?;
    Ok(Selector::Label(label))
}

/// Extracts the argument `version`, as [`extract_selector`] does. Without it, the newest.
pub(super) fn extract_optional_selector(given: Option<&Bound<'_, PyAny>>) -> PyResult<Selector> {
    given.map_or(Ok(Selector::Newest), |given| extract_selector(given, "version"))
}

/// Returns the number that a selector selects by, for errors.
pub(super) fn selected_number(selector: &Selector) -> Option<u64> {
    match selector {
        Selector::Number(number) => Some(*number),
        _ => None,
    }
}

/// The value of `after`: what a version must follow.
pub(super) enum After {
    /// The newest version at the time of the call.
    Now,
    /// A version that the caller has seen.
    Seen(SeenVersion),
}

/// Extracts `after`, or None.
pub(super) fn extract_after(given: &Bound<'_, PyAny>) -> Result<Option<After>> {
    if given.is_none() {
        return Ok(None);
    }
    if let Ok(name) = given.extract::<&str>() {
        return match name {
            "now" => Ok(Some(After::Now)),
            _ => Err(invalid_choice("after", "\"now\" or a version", name).into()),
        };
    }
    let pair = given.extract::<(u32, u64)>().or_else(|_| -> PyResult<_> {
        Ok((given.getattr("epoch")?.extract()?, given.getattr("version")?.extract()?))
    });
    let (epoch, number) = pair.map_err(|_| {
        let text = "after is \"now\", an OpenVersion, a VersionInfo, a PutReport, or a pair of epoch and number";
        type_error(format!("{text}, not {given:?}"))
    })?;
    // Unix time in seconds, if the object has it. The nearest millisecond is that of the version.
    let seconds = given.getattr("since").and_then(|since| since.extract::<f64>()).ok();
    let since = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds + 0.0005).ok());
    let since = since.map(|since| Timestamp(0).saturating_add(since));
    Ok(Some(After::Seen(SeenVersion { position: VersionPosition { epoch, number }, since })))
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
