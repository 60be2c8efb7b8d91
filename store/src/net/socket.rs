//! Paths of the socket of a daemon, and of the files next to it.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

use crate::error::{Error, ErrorKind, Result};

/// Returns the path of the socket of the user's daemon with this name.
///
/// The socket is in a directory that only the user can access. The directory is created if it does
/// not exist.
///
/// # Errors
///
/// `Invalid` if the name is not valid; `Io` if the directory cannot be created, or other users can
/// access it.
pub(crate) fn socket_path(name: &str) -> Result<PathBuf> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(is_allowed)
    {
        let text = format_args!("`{name}` is no name of a store: letters, digits, `-`, `_`, `.`");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let directory = runtime_directory();
    ensure_private_directory(&directory).map_err(|error| Error::io_at(&directory, error))?;
    Ok(directory.join(format!("{name}.sock")))
}

fn runtime_directory() -> PathBuf {
    // The XDG Base Directory Specification requires that a relative path is ignored.
    let configured = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let configured = configured.filter(|path| path.is_absolute());
    configured.map_or_else(
        || {
            let uid = rustix::process::geteuid().as_raw();
            std::env::temp_dir().join(format!("tssd-{uid}"))
        },
        |directory| directory.join("tssd"),
    )
}

/// Creates the directory, or checks that this user owns it and no other user can access it.
fn ensure_private_directory(directory: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let text = "there is no folder for it: XDG_RUNTIME_DIR, if it is set, must name one that is there";
            return Err(io::Error::new(error.kind(), text));
        }
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let metadata = std::fs::symlink_metadata(directory)?;
    let is_owner = metadata.uid() == rustix::process::geteuid().as_raw();
    let others_mode = Mode::from_raw_mode(metadata.mode()) & (Mode::RWXG | Mode::RWXO);
    if metadata.is_dir() && is_owner && others_mode.is_empty() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "it must be a folder of this user that nobody else may enter (mode 0700)",
    ))
}

/// Returns the path of a file next to the socket: its name, a dot, and `extension`.
pub(crate) fn sibling_path(socket: &Path, extension: &str) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".");
    path.push(extension);
    path.into()
}
