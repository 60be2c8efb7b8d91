//! The error type of this crate.
//!
//! A table in `tssd/_errors.py` maps each kind of error to its Python exception class and its advice.

use std::error::Error as _;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use tssd_format::{Dtype, Error, ErrorKind, ObjectPath, abridge};

/// Result of the fallible functions of this crate.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A rule of the format is violated, or the operating system reported an error.
    Format(Error),
    /// As [`Failure::Format`], in a file.
    FormatInFile(Error, PathBuf),
    /// An exception that Python raised.
    Python(PyErr),
    /// A request that this package rejects.
    Binding(Box<BindingError>),
    /// An error of a store, with the key and the version if they are known.
    Store(Box<tssd_store::Error>, Option<String>, Option<u64>),
}

/// A rejected request, in terms of Python.
#[derive(Debug)]
pub(crate) struct BindingError {
    kind: &'static str,
    message: String,
    advice: Option<String>,
    fqn: Option<String>,
    key: Option<String>,
    version: Option<u64>,
}

/// Abridges a message for a Python module: see [`tssd_format::abridge`].
#[pyfunction]
pub(crate) fn _abridge(message: String) -> String {
    abridge(message)
}

/// Abridges a name for a Python module: see [`tssd_format::abridge_name`].
#[pyfunction]
pub(crate) fn _abridge_name(name: &str) -> String {
    tssd_format::abridge_name(name).into_owned()
}

/// Creates a `ValueError`. Long names in its message are abridged.
pub(crate) fn value_error(message: impl Into<String>) -> PyErr {
    PyValueError::new_err(abridge(message))
}

/// Creates a `TypeError`. Long names in its message are abridged.
pub(crate) fn type_error(message: impl Into<String>) -> PyErr {
    PyTypeError::new_err(abridge(message))
}

/// Checks that this version of the package knows a dtype.
///
/// # Errors
///
/// `UnsupportedDtype` if only the file describes it.
pub(crate) fn require_listed(dtype: Dtype) -> Result<()> {
    let Dtype::Other(other) = dtype else { return Ok(()) };
    let text = format!("dtype {} (number {:#06x}) is unknown", other.name(), other.number());
    Err(BindingError::new("UnsupportedDtype", text).into())
}

impl BindingError {
    /// Creates the error for an object that is not a typed leaf: what it is, and what to do about it.
    pub(crate) fn untyped_leaf(message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new("UntypedLeaf", message).advice(advice)
    }

    pub(crate) fn new(kind: &'static str, message: impl Into<String>) -> Self {
        let (advice, fqn, key, version) = (None, None, None, None);
        Self { kind, message: abridge(message), advice, fqn, key, version }
    }

    pub(crate) fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(abridge(advice));
        self
    }

    pub(crate) fn with_path(self, path: &ObjectPath) -> Self {
        self.with_fqn(&path.fqn())
    }

    pub(crate) fn with_fqn(mut self, fqn: &str) -> Self {
        self.fqn.get_or_insert_with(|| fqn.to_owned());
        self
    }
}

impl Failure {
    /// Adds the path of the leaf, unless the error has one.
    pub(crate) fn with_path(self, path: &ObjectPath) -> Self {
        self.with_fqn(&path.fqn())
    }

    /// Adds the fqn of the leaf, unless the error has one.
    pub(crate) fn with_fqn(self, fqn: &str) -> Self {
        match self {
            Self::Format(error) => Self::Format(error.with_path(fqn)),
            Self::Binding(refusal) => Self::Binding(Box::new(refusal.with_fqn(fqn))),
            other => other,
        }
    }
}

impl Failure {
    /// Adds the fqn of the damaged leaf to a format error that has none.
    pub(crate) fn with_fqn_if_missing(self, leaf: impl FnOnce() -> String) -> Self {
        match self {
            Self::Format(error) if error.path().is_none() => Self::Format(error.with_path(leaf())),
            other => other,
        }
    }

    /// Adds the file to a format error.
    pub(crate) fn with_file(self, path: &Path) -> Self {
        match self {
            Self::Format(error) => Self::FormatInFile(error, path.to_owned()),
            other => other,
        }
    }
}

impl Failure {
    /// Returns whether a timeout expired.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Binding(refusal) if refusal.kind == "timeout")
    }

    /// Adds the key and the version to an error of a store or a rejected request.
    pub(crate) fn with_key(self, key: &str, version: Option<u64>) -> Self {
        match self {
            Self::Store(error, ..) => Self::Store(error, Some(key.to_owned()), version),
            Self::Binding(mut refusal) => {
                (refusal.key, refusal.version) = (Some(key.to_owned()), version);
                Self::Binding(refusal)
            }
            other => other,
        }
    }
}

impl From<tssd_store::Error> for Failure {
    fn from(error: tssd_store::Error) -> Self {
        Self::Store(Box::new(error), None, None)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Format(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Format(Error::io(error))
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<std::num::TryFromIntError> for Failure {
    fn from(error: std::num::TryFromIntError) -> Self {
        Self::Python(error.into())
    }
}

impl From<BindingError> for Failure {
    fn from(refusal: BindingError) -> Self {
        Self::Binding(Box::new(refusal))
    }
}

impl<'a, 'py> From<pyo3::CastError<'a, 'py>> for Failure {
    fn from(error: pyo3::CastError<'a, 'py>) -> Self {
        Self::Python(error.into())
    }
}

impl From<pyo3::CastIntoError<'_>> for Failure {
    fn from(error: pyo3::CastIntoError<'_>) -> Self {
        Self::Python(error.into())
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| match failure {
            Failure::Python(error) => error,
            Failure::Format(error) => format_error(py, &error, None),
            Failure::FormatInFile(error, path) => format_error(py, &error, Some(&path)),
            Failure::Binding(refusal) => {
                let BindingError { kind, message, advice, fqn, key, version } = *refusal;
                let args = ExceptionArgs {
                    fqn,
                    advice,
                    key,
                    version,
                    ..ExceptionArgs::new(kind, "", message)
                };
                new_exception(py, args)
            }
            Failure::Store(error, key, version) => store_error(py, &error, key, version),
        })
    }
}

fn format_error(py: Python<'_>, error: &Error, file: Option<&Path>) -> PyErr {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let (kind, fqn) = (error.kind(), error.path().map(ToOwned::to_owned));
    new_exception(
        py,
        ExceptionArgs {
            fqn,
            file: file.map(Into::into),
            system: source.and_then(SystemError::from_io),
            ..ExceptionArgs::new(kind.name(), kind.rule(), error.to_string())
        },
    )
}

fn store_error(
    py: Python<'_>,
    error: &tssd_store::Error,
    key: Option<String>,
    version: Option<u64>,
) -> PyErr {
    let (message, format) = (error.to_string(), error.format_error());
    let fqn = format.and_then(Error::path).map(ToOwned::to_owned);
    // An invalid state dict raises the same exception for a store as for a file.
    let args = match format.filter(|_| error.kind() == tssd_store::ErrorKind::Invalid) {
        Some(format) => ExceptionArgs::new(format.kind().name(), format.kind().rule(), message),
        None => ExceptionArgs::new(error.kind().name(), "", message),
    };
    let advice = error.help().map(ToOwned::to_owned);
    let system = error.io_error().and_then(SystemError::from_io);
    // The message names the file: only an error of the system needs it once more, as `filename`.
    let file = error.file().filter(|_| system.is_some()).map(Into::into);
    new_exception(py, ExceptionArgs { fqn, advice, file, system, key, version, ..args })
}

/// `errno` and `strerror` of an `OSError`.
struct SystemError {
    errno: i32,
    strerror: Option<String>,
}

impl SystemError {
    /// Returns none if the error has no `errno`.
    fn from_io(error: &io::Error) -> Option<Self> {
        let errno = tssd_store::errno(error)?;
        // Python has the text of a number.
        let strerror = error.raw_os_error().is_none().then(|| error.to_string());
        Some(Self { errno, strerror })
    }
}

/// Arguments of `_errors.new_exception`.
struct ExceptionArgs {
    kind: &'static str,
    rule: &'static str,
    message: String,
    fqn: Option<String>,
    advice: Option<String>,
    file: Option<OsString>,
    system: Option<SystemError>,
    key: Option<String>,
    version: Option<u64>,
}

impl ExceptionArgs {
    fn new(kind: &'static str, rule: &'static str, message: String) -> Self {
        let (fqn, advice, file, system, key, version) = (None, None, None, None, None, None);
        Self { kind, rule, message, fqn, advice, file, system, key, version }
    }
}

fn new_exception(py: Python<'_>, args: ExceptionArgs) -> PyErr {
    let ExceptionArgs { kind, rule, message, fqn, advice, file, system, key, version } = args;
    let (errno, strerror) =
        system.map_or((None, None), |system| (Some(system.errno), system.strerror));
    let arguments = (kind, rule, message, fqn, advice, file, errno, key, version, strerror);
    let call = || py.import("tssd._errors")?.getattr("new_exception")?.call1(arguments);
    call().map_or_else(|error| error, PyErr::from_value)
}

/// Returns all error kinds of the format: name, rule and message.
#[pyfunction(name = "_kinds")]
pub(crate) fn kinds() -> Vec<(&'static str, &'static str, &'static str)> {
    ErrorKind::ALL.iter().map(|kind| (kind.name(), kind.rule(), kind.message())).collect()
}
