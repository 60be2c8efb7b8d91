//! Input of the commands: files, shard sets, objects in buckets, and stdin (`-`).
//!
//! `document` opens them as state dicts.

use std::fs::File;
use std::io::{self, IsTerminal, Read, StdinLock};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tssd_format::{Archive, Blob, Error, ErrorKind, MANIFEST_NAME};
use tssd_store::ErrorKind as StoreErrorKind;

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Error of opening an input.
pub(crate) enum OpenError {
    /// The input cannot be read, or is refused.
    Failure(Failure),
    /// Defects of the input, at least one. `verify` reports all, and other commands the first one.
    Defects(Vec<Defect>),
}

/// A defect of a file.
pub(crate) struct Defect {
    pub(crate) path: PathBuf,
    pub(crate) error: Error,
}

impl Defect {
    /// Returns the message. It names the file if that is not the input itself, but a file in its directory.
    pub(crate) fn message(&self, input: &Path) -> String {
        match self.path.strip_prefix(input) {
            Ok(name) if name != Path::new("") => format!("{}: {}", name.display(), self.error),
            _ => self.error.to_string(),
        }
    }
}

impl OpenError {
    /// Creates an error from a format error on a file.
    pub(crate) fn defect(path: &Path, error: Error) -> Self {
        if error.kind() == ErrorKind::Io {
            return Self::Failure(Failure::format(path, &error));
        }
        Self::Defects(vec![Defect { path: path.to_owned(), error }])
    }
}

impl From<Failure> for OpenError {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Failure(failure) => failure,
            OpenError::Defects(defects) => {
                let Defect { path, error } = defects.first().expect("there is at least one");
                Self::format(path, error)
            }
        }
    }
}

/// Returns whether a path is `-`, which stands for stdin or stdout.
pub(crate) fn is_stream(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Returns an input path for messages: `<stdin>` instead of `-`.
pub(crate) fn display_input_path(path: &Path) -> &Path {
    if is_stream(path) { Path::new("<stdin>") } else { path }
}

/// Opens a regular file or an object in a bucket for reads at any offset.
///
/// Stdin is read to its end into memory, because the index of an archive is at the end.
pub(crate) fn open(path: &Path) -> Result<Arc<dyn Blob>> {
    if is_stream(path) {
        let mut bytes = Vec::new();
        let read = stdin()?.read_to_end(&mut bytes);
        read.map_err(|error| Failure::io("read", display_input_path(path), error))?;
        return Ok(Arc::new(Bytes::from(bytes)));
    }
    if let Some(url) = object_url(path) {
        return tssd_store::file::open_object(url).map_err(|error| {
            let (exit, help) = match error.kind() {
                StoreErrorKind::Invalid => return Failure::new(Exit::Usage, error),
                StoreErrorKind::NotFound => (Exit::NotFound, "check the address"),
                StoreErrorKind::Unreachable => {
                    (Exit::Unreachable, "check the address, and what the environment says of it")
                }
                _ => (Exit::Refused, "check what the environment says of keys and regions"),
            };
            Failure::new(exit, error).help(help)
        });
    }
    let io_failure = |error| Failure::io("read", path, error);
    // Check the type first: opening a pipe would block until a writer opens it.
    let metadata = path.metadata().map_err(io_failure)?;
    if metadata.is_dir() {
        return Err(Failure::new(Exit::Refused, format_args!("{} is a directory", path.display()))
            .help("name a file"));
    }
    if !metadata.is_file() {
        let message = format_args!("{} is no regular file", path.display());
        return Err(Failure::new(Exit::Refused, message)
            .help("name a file, or `-` and pipe the file into the command"));
    }
    Ok(Arc::new(File::open(path).map_err(io_failure)?))
}

/// Returns the URL of an object in a bucket, or `None` if the path is an ordinary path.
pub(crate) fn object_url(path: &Path) -> Option<&str> {
    path.to_str().filter(|url| tssd_store::file::is_object_url(url))
}

/// Returns whether a path is a directory. Stdin and objects in buckets are not directories.
pub(crate) fn is_directory(path: &Path) -> Result<bool> {
    if is_stream(path) || object_url(path).is_some() {
        return Ok(false);
    }
    let metadata = path.metadata().map_err(|error| Failure::io("read", path, error))?;
    Ok(metadata.is_dir())
}

/// Returns whether a directory is a checkpoint of torch.distributed.checkpoint.
pub(crate) fn is_torch_checkpoint(directory: &Path) -> bool {
    directory.join(".metadata").is_file()
}

/// Creates the failure for a directory without a file that the command reads. `lacking` completes "DIR has …".
pub(crate) fn directory_failure(directory: &Path, lacking: &str, help: &str) -> Failure {
    let path = directory.display();
    if is_torch_checkpoint(directory) {
        let message = format_args!("{path} is a directory of torch.distributed.checkpoint");
        return Failure::new(Exit::Refused, message)
            .help("`tssd convert DIR -o OUT.tssd` makes an archive of it");
    }
    Failure::new(Exit::NotFound, format_args!("{path} has {lacking}")).help(help)
}

/// Returns whether a path is a directory with a manifest.
pub(crate) fn is_shard_set(path: &Path) -> bool {
    !is_stream(path) && path.is_dir() && path.join(MANIFEST_NAME).symlink_metadata().is_ok()
}

/// Opens the shard set of a directory as one archive.
pub(crate) fn open_shard_set(directory: &Path) -> Result<Archive, OpenError> {
    tssd_format::open_shard_set(directory).map_err(|error| {
        // Name the file of the set that cannot be read, not the directory.
        let file = error.path().filter(|_| error.kind() == ErrorKind::Io).map(PathBuf::from);
        OpenError::defect(file.as_deref().unwrap_or(directory), error)
    })
}

/// Locks stdin.
///
/// # Errors
///
/// Fails if this process has locked stdin before, or if stdin is a terminal.
pub(crate) fn stdin() -> Result<StdinLock<'static>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Failure::new(Exit::Usage, "stdin is named twice")
            .help("it can be read once: name a file in one of the two places"));
    }
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::new(Exit::Usage, "stdin is a terminal")
            .help("pipe a file into the command, or name one in place of `-`"));
    }
    Ok(stdin.lock())
}
