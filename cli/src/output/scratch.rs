//! Room for what comes before an output file.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{directory_of, resolve};
use crate::failure::{Failure, Result};
use crate::input::is_stream;
use crate::interrupt::Unfinished;

/// A directory that goes away with the command, whatever ends it. It lies where there must be room
/// for the output anyway.
#[derive(Debug)]
pub(crate) struct Scratch {
    directory: TempDir,
    // Dropped after the directory, so that its path is known for as long as it exists.
    _unfinished: Unfinished,
}

impl Scratch {
    /// Makes a directory beside `target`; if that is stdout, where the system has temporary files.
    pub(crate) fn beside(target: &Path) -> Result<Self> {
        let failed = |error| Failure::io("write", target, error);
        let place = if is_stream(target) {
            std::env::temp_dir()
        } else {
            directory_of(&resolve(target).map_err(failed)?).to_owned()
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(".tssd-").suffix(".tmp");
        let (unfinished, directory) =
            Unfinished::make(|| builder.tempdir_in(&place)).map_err(failed)?;
        Ok(Self { directory, _unfinished: unfinished })
    }

    /// The path of a file in it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}
