//! What can go wrong in a store, sorted by what its caller can do about it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ledger::{Reason, Refusal};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the store: its kind says what can be done, its text says where and why.
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    text: String,
    target_modified: bool,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What can be done about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no such key, version or leaf: wait for it, or ask for another.
    NotFound,
    /// The request cannot be met as it is: mend it.
    Invalid,
    /// The ledger does not allow it; the text says what it does allow.
    Refused,
    /// The writers' contributions do not fit together, and the version was dropped: mend the state
    /// dicts and put again in every writer.
    Rejected,
    /// A newer version became visible first, or the key was deleted meanwhile: go on with what there is.
    Overtaken,
    /// Stored bytes are damaged: read another version, or put again.
    Corrupt,
    /// Others are in the way: try again later.
    Busy,
    /// The store cannot be reached.
    Unreachable,
    /// This machine lacks what it takes, such as a GPU: the text says what.
    Unsupported,
    /// The system failed to read or write.
    Io,
}

impl ErrorKind {
    /// What the protocol calls it.
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
    /// An error of a kind. The text says what failed, on which object, and why.
    pub fn new(kind: ErrorKind, text: impl fmt::Display) -> Self {
        Self(Box::new(Inner { kind, text: text.to_string(), target_modified: false, source: None }))
    }

    /// An I/O error. The text names the operation or the object. An error of the store inside `source` is returned as it is.
    pub fn io(doing: impl fmt::Display, source: std::io::Error) -> Self {
        let source = match source.downcast::<Self>() {
            Ok(error) => return error,
            Err(source) => source,
        };
        let mut error = Self::new(ErrorKind::Io, doing);
        error.0.source = Some(Box::new(source));
        error
    }

    /// An error of the format in something that has a name.
    pub(crate) fn format(name: impl fmt::Display, source: tssd_format::Error) -> Self {
        use tssd_format::ErrorKind as Format;
        if let Some(own) = of_store(&source) {
            return Self::new(own.kind(), format_args!("{name}: {own}"));
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

    /// An error of the format about the caller's state dict or request, which `name` names.
    pub fn request(name: impl fmt::Display, source: tssd_format::Error) -> Self {
        let mut error = Self::format(name, source);
        if error.kind() == ErrorKind::Corrupt {
            error.0.kind = ErrorKind::Invalid;
        }
        error
    }

    pub(crate) fn refused(key: impl fmt::Display, refusal: Refusal) -> Self {
        let kind = match &refusal {
            Refusal::NotFound { .. }
            | Refusal::Gone { .. }
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

    /// The same, because of something.
    pub(crate) fn because(
        mut self,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// Its own words, without those of what it is because of.
    pub(crate) fn text(&self) -> &str {
        &self.0.text
    }

    pub(crate) fn target_modified(mut self) -> Self {
        self.0.target_modified = true;
        self
    }

    /// What can be done about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What the ledger said, if it refused.
    pub fn refusal(&self) -> Option<&Refusal> {
        self.0.source.as_ref()?.downcast_ref()
    }

    /// What the format said, if it did.
    pub fn format_error(&self) -> Option<&tssd_format::Error> {
        self.0.source.as_ref()?.downcast_ref()
    }

    /// Whether a get has written to the caller's memory before it failed: its targets hold no whole
    /// version then.
    pub fn is_target_modified(&self) -> bool {
        self.0.target_modified
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)?;
        match &self.0.source {
            Some(source) => write!(f, ": {source}"),
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

/// What the store has said to the format, as the reason why bytes could not be read.
fn of_store(error: &tssd_format::Error) -> Option<&Error> {
    let source = std::error::Error::source(error)?.downcast_ref::<std::io::Error>()?;
    source.get_ref()?.downcast_ref()
}

/// An error of others, with what has led to it.
#[cfg(any(feature = "etcd", feature = "object"))]
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    because(error.to_string(), error.source())
}

/// What an error says, with what has led to it.
#[cfg(any(feature = "etcd", feature = "object"))]
pub(crate) fn because(mut text: String, mut cause: Option<&dyn std::error::Error>) -> String {
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
