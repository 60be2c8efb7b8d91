//! The error type of the commands, and how it is printed.

use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::iter;
use std::path::Path;

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use serde_json::json;
use tssd_format::{ErrorKind, abridge};

use crate::exit::Exit;

/// Result of a command, with [`Failure`] as the default error.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// Error of a command: an exit code and a message, optionally with a rule, help and a cause.
///
/// The text is for people. Programs use the exit code.
#[derive(Debug)]
pub(crate) struct Failure(Box<Inner>);

#[derive(Debug)]
struct Inner {
    exit: Exit,
    message: String,
    code: Option<String>,
    help: Option<String>,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    /// Creates a failure from an exit code and a message, which names the operation and the object.
    pub(crate) fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Self(Box::new(Inner {
            exit,
            message: abridge(message.to_string()),
            code: None,
            help: None,
            source: None,
        }))
    }

    /// Creates a failure from an I/O error on a file. `action` completes the message "cannot …".
    pub(crate) fn io(action: &str, path: &Path, source: io::Error) -> Self {
        let (exit, help) = exit_and_help_of_io(source.kind());
        let mut failure = Self::new(exit, format_args!("cannot {action} {}", path.display()));
        failure.0.help = help.map(Into::into);
        failure.0.source = Some(source.into());
        failure
    }

    /// Creates a failure from a format error on a file that is read or written.
    pub(crate) fn format(path: &Path, error: &tssd_format::Error) -> Self {
        let io = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        if let (ErrorKind::Io, Some(io)) = (error.kind(), io) {
            return Self::io("read or write", path, copy_io_error(io));
        }
        let kind = error.kind();
        let (exit, help) = exit_and_help_of_format(kind);
        let mut failure = Self::new(exit, format_args!("{}: {error}", path.display()));
        failure.0.code = Some(Self::error_code(kind));
        failure.0.help = help.map(Into::into);
        failure
    }

    /// Returns the rule that an error kind breaks, followed by the name of the kind.
    pub(crate) fn error_code(kind: ErrorKind) -> String {
        format!("{} {}", kind.rule(), kind.name())
    }

    /// Sets the help line.
    #[must_use]
    pub(crate) fn help(mut self, help: impl fmt::Display) -> Self {
        self.0.help = Some(abridge(help.to_string()));
        self
    }

    /// Sets the broken rule, which text output prints in brackets.
    #[must_use]
    pub(crate) fn code(mut self, code: impl fmt::Display) -> Self {
        self.0.code = Some(code.to_string());
        self
    }

    /// Prints the failure to stderr: as JSON, or as text, in color on a terminal.
    pub(crate) fn print(&self, json: bool) {
        let mut stderr = AutoStream::auto(io::stderr());
        let text = if json { format!("{}\n", self.json()) } else { self.text() };
        // If stderr is closed, the exit code still reports the failure.
        let _ignored = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }

    /// Returns `error[CODE]: message: cause`, and the help on a second line.
    fn text(&self) -> String {
        const ERROR: Style = AnsiColor::Red.on_default().bold();
        const HELP: Style = AnsiColor::Cyan.on_default().bold();
        let code = self.0.code.as_ref().map(|code| format!("[{code}]")).unwrap_or_default();
        let mut parts = vec![format!("{ERROR}error{code}{ERROR:#}: {self}")];
        parts.extend(self.causes());
        let mut text = parts.join(": ");
        if let Some(help) = &self.0.help {
            text = format!("{text}\n{HELP}help{HELP:#}: {help}");
        }
        text + "\n"
    }

    fn json(&self) -> serde_json::Value {
        let mut object = json!({ "message": self.0.message, "severity": "error" });
        object["causes"] = self.causes().collect();
        if let Some(code) = &self.0.code {
            object["code"] = json!(code);
        }
        if let Some(help) = &self.0.help {
            object["help"] = json!(help);
        }
        object
    }

    /// Returns the messages of the causes, from the direct cause to the root cause.
    fn causes(&self) -> impl Iterator<Item = String> {
        iter::successors(self.source(), |cause| (*cause).source()).map(ToString::to_string)
    }

    /// Returns the exit code of the process.
    pub(crate) fn exit(&self) -> Exit {
        self.0.exit
    }
}

/// Copies an `io::Error`, which does not implement `Clone`.
fn copy_io_error(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(
        || io::Error::new(error.kind(), error.to_string()),
        io::Error::from_raw_os_error,
    )
}

fn exit_and_help_of_io(kind: io::ErrorKind) -> (Exit, Option<&'static str>) {
    match kind {
        io::ErrorKind::NotFound => (Exit::NotFound, Some("check the path")),
        io::ErrorKind::PermissionDenied => {
            (Exit::Refused, Some("check who owns the file and its directory, and their modes"))
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            (Exit::Refused, Some("make room and run the command again; the old file is untouched"))
        }
        _ => (Exit::Refused, None),
    }
}

fn exit_and_help_of_format(kind: ErrorKind) -> (Exit, Option<&'static str>) {
    match kind {
        ErrorKind::NotTssd => {
            (Exit::Mismatch, Some("`tssd pack` makes an archive of a safetensors file"))
        }
        ErrorKind::UnsupportedVersion | ErrorKind::UnknownIncompat | ErrorKind::IndexCodec => {
            (Exit::Refused, Some("the file was written by a newer tssd: read it with that one"))
        }
        ErrorKind::NotFound => (Exit::NotFound, Some("`tssd inspect` lists the leaves")),
        ErrorKind::UntypedLeaf => (
            Exit::Refused,
            Some("store its fields as typed leaves, or allow it with --allow-opaque"),
        ),
        ErrorKind::BlobElsewhere => (
            Exit::Refused,
            Some("this is a manifest: name its directory to read the archives beside it too"),
        ),
        ErrorKind::BaseMissing => (
            Exit::Refused,
            Some(
                "apply the delta: `tssd delta apply BASE DELTA -o OUT.tssd`; `diff` and `verify --deep` take --base",
            ),
        ),
        ErrorKind::WrongBase => (
            Exit::Refused,
            Some(
                "`tssd inspect` shows which content a delta needs, and `inspect --digest` which content a file has",
            ),
        ),
        ErrorKind::NotFoldable => (
            Exit::Refused,
            Some("make the deltas with --classes 1, or apply them one after the other"),
        ),
        ErrorKind::DeltaMismatch => {
            (Exit::Mismatch, Some("the base or the delta is damaged: take another copy of it"))
        }
        ErrorKind::NotSafetensors => (
            Exit::Mismatch,
            Some("the file is damaged, incomplete or of another format: take another copy of it"),
        ),
        ErrorKind::WeightMap => (
            Exit::Mismatch,
            Some("the directory is damaged, incomplete or of two models: take another copy of it"),
        ),
        ErrorKind::NotImportable => {
            (Exit::Refused, Some("rename or convert it in the safetensors file first"))
        }
        ErrorKind::NotExportable => (
            Exit::Refused,
            Some("safetensors holds named tensors and text: keep this state dict as .tssd"),
        ),
        ErrorKind::OtherFile => (
            Exit::Refused,
            Some("it is not as `tssd pack` writes it: keep this state dict as .tssd"),
        ),
        kind if kind.rule().starts_with("F-") => {
            (Exit::Mismatch, Some("the file is damaged or incomplete: take another copy of it"))
        }
        _ => (Exit::Refused, None),
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as _)
    }
}
