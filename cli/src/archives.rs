//! Which archives a path names.

use std::path::{Path, PathBuf};

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::is_stream;

/// The file itself, or stdin; or all archives in and below a directory, in the order of their names.
pub(crate) fn archives_in(path: &Path) -> Result<Vec<PathBuf>> {
    if is_stream(path) {
        return Ok(vec![path.to_owned()]);
    }
    let metadata = path.metadata().map_err(|error| Failure::io("read", path, error))?;
    if !metadata.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut archives = Vec::new();
    collect(path, &mut archives)?;
    archives.sort();
    if archives.is_empty() {
        let message = format_args!("there is no .tssd file in {}", path.display());
        return Err(Failure::new(Exit::NotFound, message).help("check the path"));
    }
    Ok(archives)
}

/// Links to directories are not followed: they may lead in circles.
fn collect(directory: &Path, archives: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |error| Failure::io("read", directory, error);
    for entry in directory.read_dir().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        if entry.file_type().map_err(failed)?.is_dir() {
            collect(&path, archives)?;
        } else if path.extension().is_some_and(|extension| extension == "tssd") {
            archives.push(path);
        }
    }
    Ok(())
}
