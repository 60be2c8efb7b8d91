//! One error for everything that this crate does. Which class of Python it becomes, and what advice goes
//! with it, is a table in `tssd/_errors.py`, by kind.

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use tssd_format::{Error, ErrorKind, ObjectPath};

/// The result of everything here that can fail.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A rule of the format is broken, or the system failed.
    Format(Error),
    /// The same in a file.
    InFile(Error, PathBuf),
    /// What Python raised.
    Python(PyErr),
    /// Something that this package refuses.
    Refused(Box<Refusal>),
    /// What a store says of a key.
    Store(Box<tssd_store::Error>, Option<String>, Option<u64>),
}

/// Why something is refused, in terms of Python.
#[derive(Debug)]
pub(crate) struct Refusal {
    kind: &'static str,
    message: String,
    advice: Option<String>,
    fqn: Option<String>,
    key: Option<String>,
    version: Option<u64>,
}

impl Refusal {
    /// An object that is no typed leaf: what it is, and what to do about it.
    pub(crate) fn leaf(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new("UntypedLeaf", what).advice(advice)
    }

    pub(crate) fn new(kind: &'static str, message: impl Into<String>) -> Self {
        let (advice, fqn, key, version) = (None, None, None, None);
        Self { kind, message: message.into(), advice, fqn, key, version }
    }

    pub(crate) fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    pub(crate) fn at(self, path: &ObjectPath) -> Self {
        self.of(&path.fqn())
    }

    pub(crate) fn of(mut self, fqn: &str) -> Self {
        self.fqn.get_or_insert_with(|| fqn.to_owned());
        self
    }
}

impl Failure {
    /// The same with the path of the leaf, if it has none.
    pub(crate) fn at(self, path: &ObjectPath) -> Self {
        self.of(&path.fqn())
    }

    /// The same with the fqn of the leaf.
    pub(crate) fn of(self, fqn: &str) -> Self {
        match self {
            Self::Format(error) => Self::Format(error.at(fqn)),
            Self::Refused(refusal) => Self::Refused(Box::new(refusal.of(fqn))),
            other => other,
        }
    }
}

impl Failure {
    /// The same with the leaf that is hurt.
    pub(crate) fn at_leaf(self, leaf: impl FnOnce() -> String) -> Self {
        match self {
            Self::Format(error) if error.path().is_none() => Self::Format(error.at(leaf())),
            other => other,
        }
    }

    /// The same with the file that it is about.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Format(error) => Self::InFile(error, path.to_owned()),
            other => other,
        }
    }
}

impl Failure {
    /// Whether something has not happened in time.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.kind == "timeout")
    }

    /// The same with the key that it is about, and the version.
    pub(crate) fn of_key(self, key: &str, version: Option<u64>) -> Self {
        match self {
            Self::Store(error, ..) => Self::Store(error, Some(key.to_owned()), version),
            Self::Refused(mut refusal) => {
                (refusal.key, refusal.version) = (Some(key.to_owned()), version);
                Self::Refused(refusal)
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

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Box::new(refusal))
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
            Failure::Format(error) => of_format(py, &error, None),
            Failure::InFile(error, path) => of_format(py, &error, Some(&path)),
            Failure::Refused(refusal) => {
                let Refusal { kind, message, advice, fqn, key, version } = *refusal;
                let parts = Parts { fqn, advice, key, version, ..Parts::new(kind, "", message) };
                make(py, parts)
            }
            Failure::Store(error, key, version) => of_store(py, &error, key, version),
        })
    }
}

fn of_format(py: Python<'_>, error: &Error, file: Option<&Path>) -> PyErr {
    let errno = error
        .source()
        .and_then(|source| source.downcast_ref::<io::Error>())
        .and_then(io::Error::raw_os_error);
    let file = file.map(|file| file.display().to_string());
    let (kind, fqn) = (error.kind(), error.path().map(ToOwned::to_owned));
    make(py, Parts { fqn, file, errno, ..Parts::new(kind.name(), kind.rule(), error.to_string()) })
}

fn of_store(
    py: Python<'_>,
    error: &tssd_store::Error,
    key: Option<String>,
    version: Option<u64>,
) -> PyErr {
    let (message, format) = (error.to_string(), error.format_error());
    let fqn = format.and_then(Error::path).map(ToOwned::to_owned);
    // What is wrong with a state dict is so whether it goes to a store or a file.
    let parts = match format.filter(|_| error.kind() == tssd_store::ErrorKind::Invalid) {
        Some(format) => Parts::new(format.kind().name(), format.kind().rule(), message),
        None => Parts::new(error.kind().name(), "", message),
    };
    make(py, Parts { fqn, key, version, ..parts })
}

/// The arguments of `_errors.make`.
struct Parts {
    kind: &'static str,
    rule: &'static str,
    message: String,
    fqn: Option<String>,
    advice: Option<String>,
    file: Option<String>,
    errno: Option<i32>,
    key: Option<String>,
    version: Option<u64>,
}

impl Parts {
    fn new(kind: &'static str, rule: &'static str, message: String) -> Self {
        let (fqn, advice, file, errno, key, version) = (None, None, None, None, None, None);
        Self { kind, rule, message, fqn, advice, file, errno, key, version }
    }
}

fn make(py: Python<'_>, parts: Parts) -> PyErr {
    let Parts { kind, rule, message, fqn, advice, file, errno, key, version } = parts;
    let arguments = (kind, rule, message, fqn, advice, file, errno, key, version);
    let make = || py.import("tssd._errors")?.getattr("make")?.call1(arguments);
    make().map_or_else(|error| error, PyErr::from_value)
}

/// All kinds of the format: name, rule, and what is wrong.
#[pyfunction(name = "_kinds")]
pub(crate) fn kinds() -> Vec<(&'static str, &'static str, &'static str)> {
    ErrorKind::ALL.iter().map(|kind| (kind.name(), kind.rule(), kind.message())).collect()
}
