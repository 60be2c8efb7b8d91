//! The one door to files.
//!
//! A file of a store is created once, complete, and never changed: it is written under a temporary
//! name, synced, linked to its own name if that is free, and the folder is synced. So whoever sees a
//! file sees all of it, after a power cut too, and may map it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tssd_format::{Blob, Map};

use crate::private::PrivateMaps;

/// The lock of a directory that a daemon serves, which says where the daemon listens.
pub(crate) const CLAIM: &str = ".daemon";

/// Temporary names begin so; no key, version or archive does.
const TEMPORARY: &str = ".tmp-";

/// A file that is being written. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct NewFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
}

impl NewFile {
    /// Starts a file that will have this name, making its folders.
    pub(crate) fn create(target: &Path) -> io::Result<Self> {
        make_folders(parent(target)?)?;
        Self::beside(target, TEMPORARY)
    }

    /// Says how long it will be: a system that knows finds room at once, a third faster than bit by bit.
    #[cfg(target_os = "linux")]
    pub(crate) fn expect(&self, len: u64) {
        let flags = rustix::fs::FallocateFlags::empty();
        // Where there is no room, or no such call, writing says so or does without.
        let _found = rustix::fs::fallocate(&self.file, flags, 0, len);
    }

    /// Elsewhere nobody asks.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn expect(&self, _len: u64) {}

    /// Starts a file that will have this name, under one that begins otherwise.
    fn beside(target: &Path, prefix: &str) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = parent(target)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{prefix}{}-{number}", std::process::id());
            let temporary = folder.join(name);
            match File::options().write(true).create_new(true).open(&temporary) {
                Ok(file) => return Ok(Self { file, temporary, target: target.to_owned() }),
                // Left behind by a process of the same id that was killed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// A writer at a place of the file; several may write different places at once.
    pub(crate) fn at(&self, offset: u64) -> impl Write + Send + use<'_> {
        At { file: &self.file, offset }
    }

    /// Gives the file its name, durably, unless the name is taken: then it says so by false.
    ///
    /// A failed sync is never tried again: the system may have thrown the bytes away.
    pub(crate) fn link(self) -> io::Result<bool> {
        self.file.sync_all()?;
        match fs::hard_link(&self.temporary, &self.target) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(error),
        }
        sync_folder(parent(&self.target)?)?;
        Ok(true)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Whether it has another name by now or not: this one goes. What cannot be removed is swept
        // with the folder.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// A file of a user's own that appears under its name once it is complete. Until then it has a temporary
/// name beside it; whatever had the name before is there until then, and stays if this is dropped.
#[derive(Debug)]
pub struct Replacement(NewFile);

impl Replacement {
    /// Begins the file that will be at `target`. A link stays a link: what it points to is replaced. The
    /// file gets the permissions of the one that it replaces.
    ///
    /// # Errors
    ///
    /// Whatever the system says; `InvalidInput` if what is there is no regular file.
    pub fn create(target: &Path) -> io::Result<Self> {
        let target = match target.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => target.to_owned(),
            resolved => resolved?,
        };
        let old = optional(target.metadata())?;
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        let new = NewFile::beside(&target, ".tssd-")?;
        if let Some(old) = old {
            new.file.set_permissions(old.permissions())?;
        }
        Ok(Self(new))
    }

    /// Says how long the file will be, for the system to find room for it at once.
    pub fn expect(&self, len: u64) {
        self.0.expect(len);
    }

    /// A writer at a place of the file; several may write different places at once.
    pub fn at(&self, offset: u64) -> impl Write + Send + use<'_> {
        self.0.at(offset)
    }

    /// Lets the file appear. If it is to be durable it is on the disk then, whatever happens.
    ///
    /// # Errors
    ///
    /// Whatever the system says.
    pub fn commit(self, durable: bool) -> io::Result<()> {
        let NewFile { file, temporary, target } = &self.0;
        if durable {
            file.sync_all()?;
        }
        fs::rename(temporary, target)?;
        if durable { sync_folder(parent(target)?) } else { Ok(()) }
    }
}

/// Its temporary path.
impl AsRef<Path> for Replacement {
    fn as_ref(&self) -> &Path {
        &self.0.temporary
    }
}

/// One byte after the other.
impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Write for At<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write_at(bytes, self.offset)?;
        self.offset += u64::try_from(written).map_err(io::Error::other)?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Creates a file with these bytes, durably; false if there is one of this name.
pub(crate) fn create(target: &Path, bytes: &[u8]) -> io::Result<bool> {
    let file = NewFile::create(target)?;
    file.at(0).write_all(bytes)?;
    file.link()
}

/// The bytes of a file; none if there is no such file.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    optional(fs::read(path))
}

/// A file to read, and its length; none if there is no such file.
pub(crate) fn open(path: &Path) -> io::Result<Option<(File, u64)>> {
    let Some(file) = optional(File::open(path))? else { return Ok(None) };
    let len = file.metadata()?.len();
    Ok(Some((file, len)))
}

/// A file as a map; none if there is no such file.
#[expect(unsafe_code, reason = "files of a store are created once and never changed")]
pub(crate) fn map(path: &Path) -> io::Result<Option<(Map, Arc<PrivateMaps>)>> {
    let Some(file) = optional(File::open(path))? else { return Ok(None) };
    // SAFETY: a file of a store gets its name when it is complete (`NewFile::link`) and is never
    // opened for writing again; deleting it removes the name and leaves the map as it is. Whoever
    // else may write in the folder is trusted as the owner of the store.
    let map = unsafe { tssd_format::map_file(&file)? };
    let len = usize::try_from(map.size()?).map_err(io::Error::other)?;
    Ok(Some((map, PrivateMaps::new(file, len))))
}

/// Removes a file, if it is there.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    optional(fs::remove_file(path)).map(drop)
}

/// Removes a folder if it is there and has nothing in it but what killed processes left behind.
pub(crate) fn remove_folder(path: &Path) -> io::Result<()> {
    for name in list(path)? {
        if name.starts_with(TEMPORARY) {
            remove(&path.join(name))?;
        }
    }
    match optional(fs::remove_dir(path)) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        done => done.map(drop),
    }
}

/// The names in a folder, temporary ones included; none if there is no such folder.
pub(crate) fn list(path: &Path) -> io::Result<Vec<String>> {
    let Some(entries) = optional(fs::read_dir(path))? else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in entries {
        // A name that is not UTF-8 is not ours.
        names.extend(entry?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

/// Holds off everyone else who locks the same file, in this process and others, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Takes the lock; none if somebody else holds it.
    pub(crate) fn take(path: &Path) -> io::Result<Option<Self>> {
        make_folders(parent(path)?)?;
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Lock {
    /// Shares a lock with others who share it; none if somebody holds it alone.
    pub(crate) fn share(path: &Path) -> io::Result<Option<Self>> {
        make_folders(parent(path)?)?;
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        match file.try_lock_shared() {
            Ok(()) => Ok(Some(Self(file))),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(error),
        }
    }

    /// Says something in the locked file, for those who find it locked.
    pub(crate) fn write(&self, text: &str) -> io::Result<()> {
        self.0.set_len(0)?;
        self.0.write_all_at(text.as_bytes(), 0)
    }
}

/// Where the daemon listens that serves a directory, if one does.
pub(crate) fn claimed_by(root: &Path) -> io::Result<Option<String>> {
    let Some(file) = optional(File::open(root.join(CLAIM)))? else { return Ok(None) };
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(fs::TryLockError::WouldBlock) => fs::read_to_string(root.join(CLAIM)).map(Some),
        Err(fs::TryLockError::Error(error)) => Err(error),
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file is not enough: a child that was forked meanwhile has it open too.
        let _ = self.0.unlock();
    }
}

/// Makes a folder and those above it, durably.
pub(crate) fn make_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = parent(path)?;
    make_folders(above)?;
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => sync_folder(above),
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
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
            // What lies below a file is not there either.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
            _ => Err(error),
        },
    }
}
