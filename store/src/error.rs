//! The errors of the store, classified by what the caller can do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tssd_format::abridge;

use crate::ledger::{Reason, Refusal};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the store. Its kind says what the caller can do; its text says what failed and why.
///
/// Long names in the text are abridged: see [`tssd_format::abridge`].
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    text: String,
    help: Option<String>,
    target_modified: bool,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    /// Whether the text contains that of the source.
    has_source_text: bool,
    file: Option<PathBuf>,
}

/// The kind of an [`Error`]: what the caller can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The key, version or leaf does not exist. Wait for it, or use another.
    NotFound,
    /// The request is invalid. Correct it.
    Invalid,
    /// The ledger does not allow the command. The text says what is allowed.
    Refused,
    /// The writers' contributions do not form one state dict, and the version was dropped. Correct the state dicts
    /// and put again in every writer.
    Rejected,
    /// A newer version became visible first, or the key was deleted meanwhile. Continue with the current version.
    Overtaken,
    /// Stored bytes are corrupt. Read another version, or put again.
    Corrupt,
    /// The operation conflicts with others. Retry later.
    Busy,
    /// The store cannot be reached.
    Unreachable,
    /// This machine lacks a requirement, such as a GPU. The text names it.
    Unsupported,
    /// The operating system failed to read or write.
    Io,
}

impl ErrorKind {
    /// Returns the name of the kind in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Invalid => "invalid",
            Self::Refused => "refused",
            Self::Rejected => "rejected",
            Self::Overtaken => "overtaken",
            Self::Corrupt => "corrupt",
            Self::Busy => "busy",
            Self::Unreachable => "unreachable",
            Self::Unsupported => "unsupported",
            Self::Io => "io",
        }
    }
}

impl Error {
    /// Creates an error. The text says what failed, on which object, and why.
    pub fn new(kind: ErrorKind, text: impl fmt::Display) -> Self {
        Self(Box::new(Inner {
            kind,
            text: abridge(text.to_string()),
            help: None,
            target_modified: false,
            source: None,
            has_source_text: false,
            file: None,
        }))
    }

    /// Creates an I/O error. The text names the operation or the object.
    ///
    /// If `source` wraps an error of the store, that error is returned unchanged.
    pub fn io(context: impl fmt::Display, source: io::Error) -> Self {
        let source = match source.downcast::<Self>() {
            Ok(error) => return error,
            Err(source) => source,
        };
        let mut error = Self::new(ErrorKind::Io, context);
        error.0.source = Some(Box::new(source));
        error
    }

    /// Creates an I/O error on a file or a folder.
    ///
    /// If `source` wraps an error of the store, that error is returned unchanged.
    pub fn io_at(file: impl AsRef<Path>, source: io::Error) -> Self {
        let file = file.as_ref();
        Self::io(file.display(), source).with_file(file)
    }

    /// Converts an error of the format crate in the object `name`.
    pub(crate) fn from_format(name: impl fmt::Display, source: tssd_format::Error) -> Self {
        use tssd_format::ErrorKind as Format;
        if let Some(own) = store_error(&source) {
            let error = Self::new(own.kind(), format_args!("{name}: {own}"));
            return error.with_system_error(own.errno(), own.file());
        }
        let kind = match source.kind() {
            Format::Io => ErrorKind::Io,
            Format::NotFound => ErrorKind::NotFound,
            kind if kind.rule().starts_with("F-") => ErrorKind::Corrupt,
            _ => ErrorKind::Invalid,
        };
        let mut error = Self::new(kind, name);
        error.0.source = Some(Box::new(source));
        error
    }

    /// Converts an error of the format crate in a file.
    pub(crate) fn from_file(file: &Path, source: tssd_format::Error) -> Self {
        Self::from_format(file.display(), source).with_file(file)
    }

    /// Converts an error of the format crate in the caller's state dict or request `name`.
    pub fn from_request(name: impl fmt::Display, source: tssd_format::Error) -> Self {
        let mut error = Self::from_format(name, source);
        if error.kind() == ErrorKind::Corrupt {
            error.0.kind = ErrorKind::Invalid;
        }
        error
    }

    /// Converts a refusal of the ledger of a key.
    pub(crate) fn from_refusal(key: impl fmt::Display, refusal: Refusal) -> Self {
        let kind = match &refusal {
            Refusal::NotFound { .. }
            | Refusal::DataDeleted { .. }
            | Refusal::Dropped { reason: Reason::Lost { .. }, .. } => ErrorKind::NotFound,
            Refusal::Dropped { reason: Reason::Rejected { .. }, .. } => ErrorKind::Rejected,
            Refusal::Dropped { reason: Reason::Superseded { .. } | Reason::Deleted, .. } => {
                ErrorKind::Overtaken
            }
            _ => ErrorKind::Refused,
        };
        let mut error = Self::new(kind, format_args!("key `{key}`"));
        error.0.source = Some(Box::new(refusal));
        error
    }

    /// Sets the source of the error.
    pub(crate) fn with_source(
        mut self,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// Sets the file or folder of an I/O error, unless the error has one.
    pub(crate) fn with_file(mut self, file: &Path) -> Self {
        self.0.file.get_or_insert_with(|| file.to_owned());
        self
    }

    /// Creates an error about the object at a URL. The text contains the texts of a chain of errors.
    ///
    /// If the system reported one of them, such as a refused connection, the error has its `errno`.
    #[cfg(any(feature = "etcd", feature = "object"))]
    pub(crate) fn at_url(
        kind: ErrorKind,
        url: &str,
        error: &(dyn std::error::Error + 'static),
    ) -> Self {
        let text = append_causes(error.to_string(), error.source());
        Self::new(kind, format_args!("`{url}`: {text}"))
            .with_system_error(system_errno(error), Some(Path::new(url)))
    }

    /// Sets the system error that the text already contains, and its file.
    pub(crate) fn with_system_error(mut self, errno: Option<i32>, file: Option<&Path>) -> Self {
        if let Some(errno) = errno {
            self.0.source = Some(Box::new(io::Error::from_raw_os_error(errno)));
            self.0.has_source_text = true;
        }
        self.0.file = file.map(Path::to_owned);
        self
    }

    /// Sets the help line, which says what to do.
    pub(crate) fn with_help(mut self, help: impl fmt::Display) -> Self {
        self.0.help = Some(abridge(help.to_string()));
        self
    }

    /// Returns the text of the error without its source.
    pub(crate) fn message(&self) -> &str {
        &self.0.text
    }

    /// Marks that a get wrote to the caller's memory before it failed.
    pub(crate) fn with_target_modified(mut self) -> Self {
        self.0.target_modified = true;
        self
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the text of the error and its source, without the help line.
    pub fn without_help(&self) -> impl fmt::Display + '_ {
        fmt::from_fn(|f| {
            f.write_str(&self.0.text)?;
            match self.0.source.as_ref().filter(|_| !self.0.has_source_text) {
                Some(source) => write!(f, ": {source}"),
                None => Ok(()),
            }
        })
    }

    /// Returns what to do, if it depends on more than the kind. It is also the last line of the error's text.
    pub fn help(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    /// Returns the refusal of the ledger, if it is the source.
    pub fn refusal(&self) -> Option<&Refusal> {
        self.0.source.as_ref()?.downcast_ref()
    }

    /// Returns the error of the format crate, if it is the source.
    pub fn format_error(&self) -> Option<&tssd_format::Error> {
        self.0.source.as_ref()?.downcast_ref()
    }

    /// Returns the error of the system that caused this one, if there is one.
    pub fn io_error(&self) -> Option<&io::Error> {
        std::error::Error::source(self).and_then(io_error)
    }

    /// Returns the `errno` of the system error that caused this one: see [`errno`].
    pub fn errno(&self) -> Option<i32> {
        self.io_error().and_then(errno)
    }

    /// Returns the file, the folder or the URL on which the system reported the error, if it is known.
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_deref()
    }

    /// Whether a get wrote to the caller's memory before it failed. Its targets then hold no complete version.
    pub fn is_target_modified(&self) -> bool {
        self.0.target_modified
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.without_help())?;
        match &self.0.help {
            Some(help) => write!(f, "\nhelp: {help}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        let source: &(dyn std::error::Error + 'static) = self.0.source.as_deref()?;
        Some(source)
    }
}

/// Returns the `errno` of a system error. An error without one gets that of its [`io::ErrorKind`], if it has one.
///
/// Only numbers that are the same on all systems are derived from a kind.
pub fn errno(error: &io::Error) -> Option<i32> {
    // On Windows, the number of the system is no `errno`.
    if let Some(errno) = error.raw_os_error().filter(|_| cfg!(unix)) {
        return Some(errno);
    }
    if let Some(inner) = error.get_ref().and_then(|inner| io_error(inner)) {
        return errno(inner);
    }
    match error.kind() {
        io::ErrorKind::NotFound => Some(2),
        io::ErrorKind::OutOfMemory => Some(12),
        io::ErrorKind::PermissionDenied => Some(13),
        io::ErrorKind::AlreadyExists => Some(17),
        io::ErrorKind::NotADirectory => Some(20),
        io::ErrorKind::IsADirectory => Some(21),
        io::ErrorKind::InvalidInput => Some(22),
        io::ErrorKind::StorageFull => Some(28),
        io::ErrorKind::ReadOnlyFilesystem => Some(30),
        _ => None,
    }
}

/// Returns the first error of the system in a chain of errors.
fn io_error<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e io::Error> {
    std::iter::successors(Some(error), |error| error.source())
        .find_map(|error| error.downcast_ref())
}

/// Returns the error of the store inside an error of the format crate, if reading from the store failed.
fn store_error(error: &tssd_format::Error) -> Option<&Error> {
    let source = std::error::Error::source(error)?.downcast_ref::<io::Error>()?;
    source.get_ref()?.downcast_ref()
}

/// Returns the `errno` of the first system error in a chain of errors.
#[cfg(any(feature = "etcd", feature = "object"))]
pub(crate) fn system_errno(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    io_error(error).and_then(errno)
}

/// Appends the texts of a chain of errors to a text. A text that is already contained is skipped.
#[cfg(any(feature = "etcd", feature = "object"))]
pub(crate) fn append_causes(mut text: String, mut cause: Option<&dyn std::error::Error>) -> String {
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
