//! Search for archives in directories.

use std::io;
use std::path::{Path, PathBuf};

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{is_stream, object_url};

/// Returns the path itself if it is a file or stdin, else all archives in and below the directory.
///
/// The archives are sorted by path.
pub(crate) fn list_archives(path: &Path) -> Result<Vec<PathBuf>> {
    if !is_directory(path)? {
        return Ok(vec![path.to_owned()]);
    }
    let ArchiveListing { archives, unreadable } = ArchiveListing::scan(path);
    if let Some((_, failure)) = unreadable.into_iter().next() {
        return Err(failure);
    }
    if archives.is_empty() {
        return Err(no_archives_failure(path));
    }
    Ok(archives)
}

/// Returns whether a path is a directory. Stdin and objects in buckets are not directories.
pub(crate) fn is_directory(path: &Path) -> Result<bool> {
    if is_stream(path) || object_url(path).is_some() {
        return Ok(false);
    }
    let metadata = path.metadata().map_err(|error| Failure::io("read", path, error))?;
    Ok(metadata.is_dir())
}

/// Creates the failure for a directory without archives.
pub(crate) fn no_archives_failure(directory: &Path) -> Failure {
    let message = format_args!("there is no .tssd file in {}", directory.display());
    Failure::new(Exit::NotFound, message).help("check the path")
}

/// Archives in and below a directory.
#[derive(Default)]
pub(crate) struct ArchiveListing {
    /// The archives, sorted by path.
    pub(crate) archives: Vec<PathBuf>,
    /// Directories that could not be listed completely, with the reason.
    pub(crate) unreadable: Vec<(PathBuf, Failure)>,
}

impl ArchiveListing {
    pub(crate) fn scan(directory: &Path) -> Self {
        let mut found = Self::default();
        found.add_directory(directory);
        found.archives.sort();
        found
    }

    fn add_directory(&mut self, directory: &Path) {
        if let Err(error) = self.add_entries(directory) {
            self.unreadable.push((directory.to_owned(), Failure::io("read", directory, error)));
        }
    }

    /// Adds all archives. Links to directories are not followed, because they may form cycles.
    fn add_entries(&mut self, directory: &Path) -> io::Result<()> {
        for entry in directory.read_dir()? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                self.add_directory(&path);
            } else if path.extension().is_some_and(|extension| extension == "tssd") {
                self.archives.push(path);
            }
        }
        Ok(())
    }
}
