//! The files of a store. All access to them goes through this module.
//!
//! A file of a store is written once and never changed. The disk writes it under a temporary name, syncs it, links it
//! to its final name if that is free, and syncs the folder. A reader therefore sees a complete file, also after a power
//! failure, and may map it.

mod files;
mod lock;
mod replacement;
mod system;
mod temporary;

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use files::{FileSystem, FolderId, LocalFileSystem, OutputFile};
pub(crate) use lock::FileLock;
pub use replacement::{Replacement, ReplacementFolder};

use self::files::{PositionedWriter, Progress};
use self::system::Access;
use crate::io::local_archive::LocalArchive;
use crate::io::sync::{Lock, MutexGuard};

/// The lock file of a directory that a daemon serves. It contains the socket of the daemon.
pub(crate) const DAEMON_LOCK: &str = ".daemon";

/// Prefix of temporary names. No key, version or archive has a name with this prefix.
pub(crate) const TEMPORARY_PREFIX: &str = ".tmp-";

/// Maximum number of folders that a process remembers as durable.
const MAX_DURABLE_FOLDERS: usize = 4096;

/// The files below a root. A file is durable once it has its name.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    files: Arc<dyn FileSystem>,
    root: PathBuf,
    /// The folders whose names this process has made durable.
    durable: Arc<Lock<BTreeMap<PathBuf, FolderId>>>,
}

impl Disk {
    /// The files of this machine below `root`.
    pub(crate) fn at(root: PathBuf) -> Self {
        Self::with_files(Arc::new(LocalFileSystem), root)
    }

    pub(crate) fn with_files(files: Arc<dyn FileSystem>, root: PathBuf) -> Self {
        Self { files, root, durable: Arc::default() }
    }

    /// Returns the root folder.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Creates a temporary file that will have the name `target`, and the folders above it.
    pub(crate) fn create_temporary(&self, target: &Path) -> io::Result<NewFile> {
        self.make_folders(parent(target)?)?;
        NewFile::create_beside(self.clone(), target)
    }

    /// Creates a file with these bytes, durably. Returns false if the name is taken.
    pub(crate) fn create(&self, target: &Path, bytes: &[u8]) -> io::Result<bool> {
        let file = self.create_temporary(target)?;
        file.at(0).write_all(bytes)?;
        file.link()
    }

    /// Reads a file. Returns none if it does not exist.
    pub(crate) fn read(&self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        self.reject_links(parent(path)?)?;
        optional(self.files.read(path))
    }

    /// Opens a file of the store as an archive. Returns none if it does not exist.
    pub(crate) fn open(&self, path: &Path) -> io::Result<Option<LocalArchive>> {
        self.reject_links(parent(path)?)?;
        optional(self.files.open(path))
    }

    /// Opens a file for a caller that passes it on, and returns its length in bytes.
    ///
    /// Returns none if the file does not exist.
    pub(crate) fn open_file(&self, path: &Path) -> io::Result<Option<(File, u64)>> {
        self.reject_links(parent(path)?)?;
        let Some(file) = optional(system::open(path, Access::Read))? else { return Ok(None) };
        let len = file.metadata()?.len();
        Ok(Some((file, len)))
    }

    /// Removes a file, if it exists.
    pub(crate) fn remove(&self, path: &Path) -> io::Result<()> {
        self.reject_links(parent(path)?)?;
        optional(self.files.remove(path)).map(drop)
    }

    /// Removes a folder, if it exists and contains only temporary files of killed processes.
    pub(crate) fn remove_folder(&self, path: &Path) -> io::Result<()> {
        for name in self.list(path)? {
            if name.starts_with(TEMPORARY_PREFIX) {
                self.remove(&path.join(name))?;
            }
        }
        self.durable().remove(path);
        match optional(self.files.remove_folder(path)) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            result => result.map(drop),
        }
    }

    /// Lists the names in a folder, sorted, including temporary ones. A missing folder has none.
    ///
    /// Names that are not UTF-8 are skipped: they do not belong to the store.
    pub(crate) fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.reject_links(path)?;
        let mut names = optional(self.files.list(path))?.unwrap_or_default();
        names.sort_unstable();
        Ok(names)
    }

    /// Syncs a folder, so that the names created in it are durable.
    ///
    /// The process that created them may have been killed before it synced the folder.
    pub(crate) fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        optional(self.files.sync_folder(folder)).map(drop)
    }

    /// Locks a file, exclusively or shared, and creates it if needed. Dropping the guard unlocks it.
    ///
    /// Returns none if another holder has a conflicting lock.
    pub(crate) fn lock(
        &self,
        path: &Path,
        is_shared: bool,
    ) -> io::Result<Option<Box<dyn Any + Send>>> {
        self.make_folders(parent(path)?)?;
        self.files.lock(path, is_shared)
    }

    /// Whether no process holds the lock of a file. An unlocked file is removed.
    pub(crate) fn remove_if_unlocked(&self, path: &Path) -> io::Result<bool> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !self.list(parent(path)?)?.iter().any(|entry| entry == name) {
            return Ok(true);
        }
        let lock = self.files.lock(path, false)?;
        let is_free = lock.is_some();
        if is_free {
            // Remove it while it is locked: afterwards another process may hold the lock.
            self.remove(path)?;
        }
        Ok(is_free)
    }

    /// Creates the root and the folders above it, durably.
    ///
    /// Only this function creates the root. If it disappears later, for example by an unmount, the store does not exist
    /// any more.
    pub(crate) fn make_root(&self) -> io::Result<()> {
        self.make_folder(&self.root)
    }

    /// Creates a folder below the root and the missing folders above it, durably.
    fn make_folders(&self, path: &Path) -> io::Result<()> {
        self.reject_links(path)?;
        if path != self.root {
            return self.make_folder(path);
        }
        if self.files.folder_id(&self.root).is_none() {
            let text = format!("the store's folder `{}` is gone", self.root.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        Ok(())
    }

    /// Creates a folder, durably.
    ///
    /// An existing folder below the root may have been created by a process that was killed before it synced. It is
    /// synced too, unless this process has synced it before. The root and the folders above it are not synced if they
    /// exist.
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        let found = self.files.folder_id(path);
        let is_below = path.starts_with(&self.root) && path != self.root;
        if found.is_some() && (!is_below || self.durable().get(path) == found.as_ref()) {
            return Ok(());
        }
        let above = parent(path)?;
        if is_below {
            self.make_folders(above)?;
        } else {
            self.make_folder(above)?;
        }
        let created = if found.is_none() { self.files.make_folder(path) } else { Ok(()) };
        let Some(folder) = self.files.folder_id(path) else {
            // `AlreadyExists` is no error as long as the folder exists, because another process may have created it.
            return Err(match created {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    io::ErrorKind::NotADirectory.into()
                }
                Err(error) => error,
                Ok(()) => io::ErrorKind::NotFound.into(),
            });
        };
        self.files.sync_folder(above)?;
        let mut durable = self.durable();
        if durable.len() >= MAX_DURABLE_FOLDERS {
            // A forgotten folder is synced once more, which costs only time.
            durable.clear();
        }
        durable.insert(path.to_owned(), folder);
        Ok(())
    }

    /// Rejects symbolic links below the root.
    ///
    /// They may lead to files outside the store, which must not be deleted.
    fn reject_links(&self, folder: &Path) -> io::Result<()> {
        let below = |path: &&Path| path.starts_with(&self.root) && **path != self.root;
        match folder.ancestors().take_while(below).find(|path| self.files.is_link(path)) {
            Some(link) => Err(system::link_error(link)),
            None => Ok(()),
        }
    }

    fn durable(&self) -> MutexGuard<'_, BTreeMap<PathBuf, FolderId>> {
        self.durable.lock()
    }
}

/// Size of write buffers, which combine smaller writes.
///
/// A system that caches files in large pages chooses their size by the length and the alignment of the writes. Larger
/// pages are mapped faster.
pub(crate) const BUFFER_BYTES: usize = 1 << 20;

/// A file being written. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct NewFile {
    disk: Disk,
    output: Box<dyn OutputFile>,
    temporary: PathBuf,
    is_removed: bool,
    target: PathBuf,
}

impl NewFile {
    /// Creates a temporary file next to `target`.
    fn create_beside(disk: Disk, target: &Path) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = parent(target)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{TEMPORARY_PREFIX}{}-{number}", std::process::id());
            let temporary = folder.join(name);
            match disk.files.create(&temporary) {
                Ok(output) => {
                    let target = target.to_owned();
                    let is_removed = false;
                    return Ok(Self { disk, output, temporary, is_removed, target });
                }
                // A killed process with the same ID left this file behind.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Preallocates `len` bytes.
    pub(crate) fn preallocate(&self, len: u64) {
        self.output.preallocate(len);
    }

    /// Returns a writer at an offset. Several writers may write at different offsets at once.
    pub(crate) fn at(&self, offset: u64) -> impl Write + Send + use<'_> {
        PositionedWriter { output: &*self.output, progress: Progress::new(offset, true) }
    }

    /// Gives the file its final name, durably.
    ///
    /// Returns false if the name is taken. The existing file is then durable.
    ///
    /// A failed sync is not retried: the system may have dropped the bytes.
    pub(crate) fn link(mut self) -> io::Result<bool> {
        self.output.sync()?;
        let is_free = match self.disk.files.link(&self.temporary, &self.target) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        // Remove it before the folder is synced: otherwise the temporary name could reappear after a power failure.
        self.remove();
        self.disk.sync_folder(parent(&self.target)?)?;
        Ok(is_free)
    }

    /// Removes the temporary name, whether the file has its final name or not.
    ///
    /// A name that cannot be removed stays until the folder is swept.
    fn remove(&mut self) {
        if !std::mem::replace(&mut self.is_removed, true) {
            let _ = self.disk.files.remove(&self.temporary);
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Locks a file exclusively and creates it and its folders if needed. Returns none if it is locked.
pub(crate) fn lock(path: &Path) -> io::Result<Option<FileLock>> {
    let folder = parent(path)?;
    Disk::at(folder.to_owned()).make_root()?;
    FileLock::try_exclusive(path)
}

/// Removes a file, if it exists.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    optional(fs::remove_file(path)).map(drop)
}

/// Reads a file. Returns none if it does not exist.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    optional(LocalFileSystem.read(path))
}

/// Returns the socket of the daemon that serves a directory, if one does.
pub(crate) fn daemon_socket(root: &Path) -> io::Result<Option<String>> {
    let lock_file = system::open(&root.join(DAEMON_LOCK), Access::Read);
    let Some(mut file) = optional(lock_file)? else { return Ok(None) };
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(fs::TryLockError::WouldBlock) => {
            let mut socket = String::new();
            file.read_to_string(&mut socket)?;
            Ok(Some(socket))
        }
        Err(fs::TryLockError::Error(error)) => Err(error),
    }
}

fn parent(path: &Path) -> io::Result<&Path> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Ok(Path::new(".")),
        Some(parent) => Ok(parent),
        None => Err(io::Error::new(io::ErrorKind::InvalidInput, "a path without a folder")),
    }
}

fn optional<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) => match error.kind() {
            // A path below a regular file does not exist either.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::simulated_disk::{Event, SimulatedFiles};

    #[test]
    fn links_are_allowed_above_the_root_and_rejected_below() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("real");
        fs::create_dir_all(real.join("root/there")).unwrap();
        let link = folder.path().join("link");
        symlink(&real, &link).unwrap();
        symlink(real.join("root"), real.join("there")).unwrap();
        for root in [link.join("root"), link.join("there")] {
            let disk = Disk::at(root.clone());
            let file = root.join("a/file");
            assert_eq!(disk.read(&file).unwrap(), None);
            assert!(disk.create(&file, b"what it is").unwrap());
            assert_eq!(disk.read(&file).unwrap().unwrap(), b"what it is");
            disk.remove(&file).unwrap();
            let below = root.join("below");
            symlink(real.join("root/there"), &below).unwrap();
            disk.create(&below.join("file"), b"").unwrap_err();
            fs::remove_file(below).unwrap();
        }
    }

    #[test]
    fn temporary_files_of_a_killed_process_with_the_same_id_are_skipped() {
        let files = SimulatedFiles::default();
        let disk = Disk::with_files(Arc::new(files.clone()), PathBuf::from("/"));
        let first = disk.create_temporary(Path::new("/file")).unwrap();
        let temporary = first.temporary.to_str().unwrap();
        let (prefix, number) = temporary.rsplit_once('-').unwrap();
        let number: u64 = number.parse().unwrap();
        // Other tests create files meanwhile.
        for next in 1..1000 {
            files.create(Path::new(&format!("{prefix}-{}", number + next))).unwrap();
        }
        assert!(disk.create(Path::new("/other"), b"what it is").unwrap());
        assert_eq!(disk.read(Path::new("/other")).unwrap().unwrap(), b"what it is");
    }

    #[test]
    fn names_and_folders_that_the_system_rejects_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::at(folder.path().canonicalize().unwrap());
        // The temporary name is short enough, the final one is not.
        let long = disk.root().join("long".repeat(100));
        disk.create(&long, b"").unwrap_err();
        assert_eq!(disk.list(disk.root()).unwrap(), [""; 0]);
        let (empty, full) = (disk.root().join("empty"), disk.root().join("full"));
        for folder in [&empty, &full] {
            fs::create_dir(folder).unwrap();
        }
        fs::write(full.join("notes"), b"").unwrap();
        for folder in [&empty, &full] {
            disk.remove_folder(folder).unwrap();
        }
        assert_eq!(disk.list(disk.root()).unwrap(), ["full"]);
        // No system removes a folder under this name.
        let error = disk.remove_folder(&full.join(".")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn each_process_syncs_a_folder_once() {
        let files = SimulatedFiles::default();
        let disk = || Disk::with_files(Arc::new(files.clone()), PathBuf::from("/"));
        let syncs = |disk: &Disk, path: &str| {
            files.take_events();
            assert!(disk.create(Path::new(path), b"").unwrap());
            let events = files.take_events();
            events.iter().filter(|event| matches!(event, Event::Synced(_))).count()
        };
        let (one, other) = (disk(), disk());
        // The file, its folder, and the folders that contain each new folder.
        assert_eq!(syncs(&one, "/a/b/file"), 4);
        for path in ["/a/b/next", "/a/next"] {
            assert_eq!(syncs(&one, path), 2, "{path}");
        }
        // The process that created the folders may have been killed before it synced them.
        assert_eq!(syncs(&other, "/a/b/other"), 4);
    }
}
