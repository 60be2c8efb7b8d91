//! Where the daemon of a store listens, by the store's name, and what lies beside its socket.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

use crate::error::{Error, ErrorKind, Result};

/// The socket of the daemon of a store, by the store's name: in a folder that belongs to the user.
///
/// # Errors
///
/// `Invalid` for a name that is none; `Io` if the folder is not the user's alone.
pub(crate) fn socket_of(name: &str) -> Result<PathBuf> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(is_plain) {
        let text = format_args!("`{name}` is no name of a store: letters, digits, `-`, `_`, `.`");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let folder = runtime_folder();
    prepare(&folder).map_err(|error| Error::io(folder.display(), error))?;
    Ok(folder.join(format!("{name}.sock")))
}

fn runtime_folder() -> PathBuf {
    // What is not absolute is to be ignored, says the standard.
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let own = own.filter(|folder| folder.is_absolute());
    own.map_or_else(
        || {
            let uid = rustix::process::geteuid().as_raw();
            std::env::temp_dir().join(format!("tssd-{uid}"))
        },
        |folder| folder.join("tssd"),
    )
}

/// Makes the folder, or proves that it is ours and nobody else's.
fn prepare(folder: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let text = "there is no folder for it: XDG_RUNTIME_DIR, if it is set, must name one that is there";
            return Err(io::Error::new(error.kind(), text));
        }
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let metadata = std::fs::symlink_metadata(folder)?;
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    let of_others = Mode::from_raw_mode(metadata.mode()) & (Mode::RWXG | Mode::RWXO);
    if metadata.is_dir() && is_own && of_others.is_empty() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "it must be a folder of this user that nobody else may enter (mode 0700)",
    ))
}

/// The file beside a socket that has its name and one more extension.
pub(crate) fn beside(socket: &Path, extension: &str) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".");
    path.push(extension);
    path.into()
}
