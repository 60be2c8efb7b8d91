//! What systems do each in their own way with files and folders.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

use std::io::{self, ErrorKind};
use std::path::Path;

#[cfg(unix)]
pub(crate) use unix::{
    expect, identity, kept, list, names, open, remove, send, sync_folder, write_at,
};
#[cfg(windows)]
pub(crate) use windows::{
    expect, identity, kept, list, names, open, remove, send, sync_folder, write_at,
};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It is there, and is read.
    Read,
    /// It is locked, and made if it is not there.
    Lock,
}

fn irregular(path: &Path) -> io::Error {
    let text = format!("`{}` is no regular file", path.display());
    io::Error::new(ErrorKind::InvalidInput, text)
}

pub(crate) fn link_at(path: &Path) -> io::Error {
    let text = format!("`{}` is a link, and nothing of a store is reached by one", path.display());
    io::Error::new(ErrorKind::InvalidInput, text)
}
