//! Shard sets in a directory: a manifest and the archives that it names. Spec: F-083.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::archive::Archive;
use crate::blob::Blob;
use crate::error::{Error, ErrorKind, Result};

/// The name of a manifest in its directory.
pub const MANIFEST: &str = "manifest.tssd";

/// Opens the shard set of a directory, to be read as one archive: `manifest.tssd`, and the archives
/// that it names beside it. Links are not followed, so nothing outside of the directory is read. (If
/// `manifest.tssd` names none, it is an archive like any other.)
///
/// # Errors
///
/// As [`Archive::from_shard_set`]; `Io` if a file is not there, or is no regular file.
///
/// # Examples
///
/// ```no_run
/// let archive = tssd_format::open_shard_set("checkpoints/step-1000")?;
/// archive.verify()?;
/// println!("{} archives, {} storages", archive.shards().len(), archive.storage_count());
/// # Ok::<(), tssd_format::Error>(())
/// ```
pub fn open_shard_set(directory: impl AsRef<Path>) -> Result<Archive> {
    let path = directory.as_ref();
    let directory = Directory::open(path).map_err(|error| Error::io(error).at(path.display()))?;
    let at = |error: Error, name: &str| error.at(path.join(name).display());
    let manifest = directory.open_file(MANIFEST);
    let manifest = manifest.map_err(|error| at(Error::io(error), MANIFEST))?;
    let set = Archive::from_shard_set(Arc::new(manifest), |shard| -> Result<Arc<dyn Blob>> {
        match directory.open_file(&shard.name) {
            Ok(file) => Ok(Arc::new(file)),
            Err(error) if is_of_the_system(&error) => Err(at(Error::io(error), &shard.name)),
            Err(error) => Err(at(Error::new(ErrorKind::ShardMismatch).note(error), &shard.name)),
        }
    });
    set.map_err(|error: Error| error.at(path.join(MANIFEST).display()))
}

#[cfg(unix)]
struct Directory(std::os::fd::OwnedFd);

#[cfg(unix)]
impl Directory {
    fn open(path: &Path) -> io::Result<Self> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open(path, flags, Mode::empty())?))
    }

    /// Opens a regular file of this directory, whatever its path is by now.
    fn open_file(&self, name: &str) -> io::Result<File> {
        use rustix::fs::{Mode, OFlags};
        // A pipe would be waited for.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        regular(File::from(rustix::fs::openat(&self.0, name, flags, Mode::empty())?))
    }
}

#[cfg(not(unix))]
struct Directory(std::path::PathBuf);

#[cfg(not(unix))]
impl Directory {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(path.to_owned()))
    }

    fn open_file(&self, name: &str) -> io::Result<File> {
        let path = self.0.join(name);
        if path.symlink_metadata()?.is_symlink() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a link"));
        }
        regular(File::open(path)?)
    }
}

/// Whether the file may be what it should be, and only cannot be read; else it is not there, a link, a
/// directory.
fn is_of_the_system(error: &io::Error) -> bool {
    // A link, a socket, a device without a driver.
    #[cfg(unix)]
    let is_special = [rustix::io::Errno::LOOP, rustix::io::Errno::NXIO, rustix::io::Errno::NODEV]
        .iter()
        .any(|special| error.raw_os_error() == Some(special.raw_os_error()));
    #[cfg(not(unix))]
    let is_special = false;
    !is_special && !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput)
}

fn regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"))
}
