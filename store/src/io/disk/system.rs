//! Operations on files and folders that differ between systems.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

use std::io::{self, ErrorKind};
use std::path::Path;

#[cfg(unix)]
pub(crate) use unix::{
    boot_id, copy_attributes, create_unnamed, defer_removal, exchange, identity, is_a_directory,
    link_count, link_unnamed, list, open, open_folder, open_own, preallocate, remove,
    start_writeback, sync_folder, write_at,
};
#[cfg(windows)]
pub(crate) use windows::{
    boot_id, copy_attributes, create_unnamed, defer_removal, exchange, identity, is_a_directory,
    link_count, link_unnamed, list, open, open_folder, open_own, preallocate, remove,
    start_writeback, sync_folder, write_at,
};

/// The purpose of an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// To read an existing file.
    Read,
    /// To lock the file. It is created if needed.
    Lock,
}

fn not_a_regular_file(path: &Path) -> io::Error {
    let text = format!("`{}` is no regular file", path.display());
    io::Error::new(ErrorKind::InvalidInput, text)
}

pub(crate) fn link_error(path: &Path) -> io::Error {
    let text = format!("`{}` is a link, and nothing of a store is reached by one", path.display());
    io::Error::new(ErrorKind::InvalidInput, text)
}
