//! Shard sets in a directory: a manifest and the archives that it names. Spec: F-083.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::archive::Archive;
use crate::blob::Blob;
use crate::error::{Error, ErrorKind, Result};
use crate::expand::expand_manifest;
use crate::frame::{FRAME_LEN, parse_trailer};
use crate::shard_file::ShardFile;

/// The file name of a manifest in its directory.
pub const MANIFEST_NAME: &str = "manifest.tssd";

/// Opens the shard set of a directory as one archive: `manifest.tssd` and the archives that it names.
///
/// Does not follow symbolic links, so no file outside the directory is read. If `manifest.tssd` names
/// no archives, it is opened as an ordinary archive.
///
/// # Errors
///
/// - `Io` if the manifest is missing or no regular file, or if a file cannot be read.
/// - `ShardMismatch` (F-083) if an archive is missing, is no regular file, or is not the one that the
///   manifest names.
/// - The other errors of [`Archive::from_shard_set`].
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
    let directory =
        Directory::open(path).map_err(|error| Error::io(error).with_path(path.display()))?;
    let at = |error: Error, name: &str| error.with_path(path.join(name).display());
    let manifest = directory.open_file(MANIFEST_NAME);
    let manifest = manifest.map_err(|error| at(Error::io(error), MANIFEST_NAME))?;
    let set = Archive::from_shard_set(Arc::new(manifest), |shard| -> Result<Arc<dyn Blob>> {
        match directory.open_file(&shard.name) {
            Ok(file) => Ok(Arc::new(file)),
            Err(error) if is_system_error(&error) => Err(at(Error::io(error), &shard.name)),
            Err(error) => {
                Err(at(Error::new(ErrorKind::ShardMismatch).with_detail(error), &shard.name))
            }
        }
    });
    set.map_err(|error: Error| error.with_path(path.join(MANIFEST_NAME).display()))
}

impl Archive {
    /// Opens a shard set: a manifest and the archives that it names, read as one archive.
    ///
    /// `open` opens one of these archives. It must look in the directory of the manifest, and must not
    /// follow links; [`open_shard_set`] does so. Each opened archive is then
    /// checked against its record in the manifest.
    ///
    /// A file without shards is opened as by [`Archive::from_blob`]. The index of the result has a tensor leaf in the place
    /// of each distributed leaf, so the memory grows with the number of shards of all leaves.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `ShardMismatch` (F-083); `DistributedMismatch` (F-084); the errors of `open`.
    pub fn from_shard_set<E: From<Error>>(
        manifest: Arc<dyn Blob>,
        mut open: impl FnMut(&ShardFile) -> Result<Arc<dyn Blob>, E>,
    ) -> Result<Self, E> {
        let mut archive = Self::from_blob(manifest)?;
        let shards = archive.shards();
        if shards.is_empty() {
            return Ok(archive);
        }
        let mut blobs = Vec::with_capacity(shards.len());
        for shard in &shards {
            let blob = open(shard)?;
            shard.verify(&blob).map_err(|error| error.with_path(&shard.name))?;
            blobs.push(blob);
        }
        if archive.has_distributed_leaves() {
            archive = archive.expand(&shards, &blobs)?;
        }
        Ok(archive.with_blobs(blobs))
    }

    /// Replaces the distributed leaves by the tensor leaves that they mean.
    fn expand(&self, shards: &[ShardFile], blobs: &[Arc<dyn Blob>]) -> Result<Self> {
        let mut archives = Vec::with_capacity(blobs.len());
        for (shard, blob) in shards.iter().zip(blobs) {
            let archive = Self::from_blob(blob.clone());
            archives.push(archive.map_err(|error| error.with_path(&shard.name))?);
        }
        let expanded = Self::from_bytes(expand_manifest(self, &archives)?)?;
        Ok(self.with_index_of(expanded))
    }
}

impl ShardFile {
    /// Verifies that a blob is the archive that the manifest names.
    ///
    /// # Errors
    ///
    /// - `ShardMismatch` (F-083).
    /// - The errors of [`Archive::from_blob`], if the manifest records a content digest.
    /// - The kind of the rule that its trailer breaks.
    /// - `Io` if the blob cannot be read.
    pub fn verify(&self, blob: &Arc<dyn Blob>) -> Result<()> {
        self.verify_len(&**blob)?;
        if self.digest.is_some() {
            let archive = Archive::from_blob(blob.clone())?;
            if archive.content_digest() != self.digest {
                return Err(
                    Error::new(ErrorKind::ShardMismatch).with_detail("another content digest")
                );
            }
        }
        self.verify_trailer(&**blob)
    }

    /// Verifies the length and the trailer of an archive, without the content digest.
    ///
    /// # Errors
    ///
    /// - `ShardMismatch` (F-083).
    /// - The kind of the rule that its trailer breaks.
    /// - `Io` if the blob cannot be read.
    pub fn verify_trailer(&self, blob: &dyn Blob) -> Result<()> {
        self.verify_len(blob)?;
        let mut trailer = [0; FRAME_LEN];
        blob.read_exact_at(&mut trailer, self.file_len - 64)?;
        let location = parse_trailer(&trailer, self.file_len)?;
        if (location.index_off, location.index_crc32) != (self.index_off, self.index_crc32) {
            return Err(Error::new(ErrorKind::ShardMismatch).with_detail("another index"));
        }
        Ok(())
    }

    fn verify_len(&self, blob: &dyn Blob) -> Result<()> {
        let (len, recorded) = (blob.size()?, self.file_len);
        if len == recorded {
            return Ok(());
        }
        Err(Error::new(ErrorKind::ShardMismatch)
            .with_detail(format_args!("{len} bytes, the manifest says {recorded}")))
    }
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

    /// Opens a regular file of this directory, even if the path of the directory has changed.
    fn open_file(&self, name: &str) -> io::Result<File> {
        use rustix::fs::{Mode, OFlags};
        // Without `NONBLOCK`, opening a FIFO blocks until a writer opens it.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        require_regular(File::from(rustix::fs::openat(&self.0, name, flags, Mode::empty())?))
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
        require_regular(File::open(path)?)
    }
}

/// Returns true if opening failed for a reason of the system, such as missing permissions.
///
/// Returns false if the file is missing or of another kind, such as a symbolic link or a directory.
/// Only these cases break F-083.
fn is_system_error(error: &io::Error) -> bool {
    // In this order: a symbolic link, a socket or FIFO, a device without a driver.
    #[cfg(unix)]
    let is_special = [rustix::io::Errno::LOOP, rustix::io::Errno::NXIO, rustix::io::Errno::NODEV]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()));
    #[cfg(not(unix))]
    let is_special = false;
    !is_special && !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput)
}

fn require_regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"))
}
