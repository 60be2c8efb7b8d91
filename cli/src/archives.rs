//! Which archives a path names.

use std::io;
use std::path::{Path, PathBuf};

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{address, is_stream};

/// The file itself, or stdin; or all archives in and below a directory, in the order of their names.
pub(crate) fn archives_in(path: &Path) -> Result<Vec<PathBuf>> {
    if !is_directory(path)? {
        return Ok(vec![path.to_owned()]);
    }
    let Found { archives, unreadable } = Found::below(path);
    if let Some((_, failure)) = unreadable.into_iter().next() {
        return Err(failure);
    }
    if archives.is_empty() {
        return Err(none_in(path));
    }
    Ok(archives)
}

/// Whether a path is that of a directory; stdin is none.
pub(crate) fn is_directory(path: &Path) -> Result<bool> {
    if is_stream(path) || address(path).is_some() {
        return Ok(false);
    }
    let metadata = path.metadata().map_err(|error| Failure::io("read", path, error))?;
    Ok(metadata.is_dir())
}

/// There is nothing to look at.
pub(crate) fn none_in(directory: &Path) -> Failure {
    let message = format_args!("there is no .tssd file in {}", directory.display());
    Failure::new(Exit::NotFound, message).help("check the path")
}

/// What is in a directory and below it.
#[derive(Default)]
pub(crate) struct Found {
    /// The archives, in the order of their names.
    pub(crate) archives: Vec<PathBuf>,
    /// The directories of which not all is known, and why.
    pub(crate) unreadable: Vec<(PathBuf, Failure)>,
}

impl Found {
    pub(crate) fn below(directory: &Path) -> Self {
        let mut found = Self::default();
        found.collect(directory);
        found.archives.sort();
        found
    }

    fn collect(&mut self, directory: &Path) {
        if let Err(error) = self.collect_all(directory) {
            self.unreadable.push((directory.to_owned(), Failure::io("read", directory, error)));
        }
    }

    /// Links to directories are not followed: they may lead in circles.
    fn collect_all(&mut self, directory: &Path) -> io::Result<()> {
        for entry in directory.read_dir()? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                self.collect(&path);
            } else if path.extension().is_some_and(|extension| extension == "tssd") {
                self.archives.push(path);
            }
        }
        Ok(())
    }
}
