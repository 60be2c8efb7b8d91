//! Search for archives and models in directories.

use std::io;
use std::path::{Path, PathBuf};

use tssd_format::safetensors::{FILE_NAME, INDEX_NAME};

use crate::failure::{Failure, Result};
use crate::input::{directory_failure, is_directory};
use crate::model::is_model_directory;

/// Returns the path itself if it is a file or stdin, else the model of the directory and all archives in and below it.
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

/// Creates the failure for a directory without archives and without a model.
pub(crate) fn no_archives_failure(directory: &Path) -> Failure {
    let help = format!("check the path: a model is {INDEX_NAME} with its files, or {FILE_NAME}");
    directory_failure(directory, "no .tssd file and no model", &help)
}

/// Archives in and below a directory, and the directory itself if it has a model.
#[derive(Default)]
pub(crate) struct ArchiveListing {
    /// The archives, sorted by path. The directory comes first.
    pub(crate) archives: Vec<PathBuf>,
    /// Directories that could not be listed completely, with the reason.
    pub(crate) unreadable: Vec<(PathBuf, Failure)>,
}

impl ArchiveListing {
    pub(crate) fn scan(directory: &Path) -> Self {
        let mut found = Self::default();
        if is_model_directory(directory) {
            found.archives.push(directory.to_owned());
        }
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
