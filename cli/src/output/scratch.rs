//! Scratch directories for intermediate files.

use std::path::{Path, PathBuf};

use tssd_store::ReplacementFolder;

use super::{parent_directory, resolve};
use crate::failure::{Failure, Result};
use crate::input::is_stream;
use crate::interrupt::CleanupGuard;

/// A directory that is removed when the command ends, also after an error or an interrupt.
///
/// It is on the file system of the output, which needs the free space anyway.
#[derive(Debug)]
pub(crate) struct Scratch {
    directory: ReplacementFolder,
    // Dropped after the directory, so that the path is registered for as long as the directory exists.
    _cleanup: CleanupGuard,
}

impl Scratch {
    /// Creates a directory next to `target`, or in the temporary directory of the system for stdout.
    pub(crate) fn create_for(target: &Path) -> Result<Self> {
        let io_failure = |error| Failure::io("write", target, error);
        let parent = if is_stream(target) {
            std::env::temp_dir()
        } else {
            parent_directory(&resolve(target).map_err(io_failure)?).to_owned()
        };
        let create = || ReplacementFolder::create_in(&parent);
        let (cleanup, directory) = CleanupGuard::create(create).map_err(io_failure)?;
        // The directory may be in a folder of all users.
        #[cfg(unix)]
        std::fs::set_permissions(
            directory.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o700),
        )
        .map_err(io_failure)?;
        Ok(Self { directory, _cleanup: cleanup })
    }

    /// Returns the path of a file in the directory.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}
