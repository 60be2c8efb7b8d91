//! The one door to files.
//!
//! A file of a store is created once, complete, and never changed: it is written under a temporary
//! name, synced, linked to its own name if that is free, and the folder is synced. So whoever sees a
//! file sees all of it, after a power cut too, and may map it.

mod files;
mod lock;
mod system;

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use files::{Files, Folder, Output, SystemFiles};
pub(crate) use lock::FileLock;

use self::system::Access;
use crate::io::local_archive::Near;
use crate::io::sync::{Lock, MutexGuard};

/// The lock of a directory that a daemon serves, which says where the daemon listens.
pub(crate) const CLAIM: &str = ".daemon";

/// Temporary names begin so; no key, version or archive does.
pub(crate) const TEMPORARY: &str = ".tmp-";

/// How many folders a process knows to be durable, at most.
const MAX_DURABLE: usize = 4096;

/// The files below a root, which are durable once they are there.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    files: Arc<dyn Files>,
    root: PathBuf,
    /// The folders whose names this process has made durable.
    durable: Arc<Lock<BTreeMap<PathBuf, Folder>>>,
}

impl Disk {
    /// Those of this machine.
    pub(crate) fn at(root: PathBuf) -> Self {
        Self::of(Arc::new(SystemFiles), root)
    }

    pub(crate) fn of(files: Arc<dyn Files>, root: PathBuf) -> Self {
        Self { files, root, durable: Arc::default() }
    }

    /// The folder that all is in.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Starts a file that will have this name, making its folders.
    pub(crate) fn begin(&self, target: &Path) -> io::Result<NewFile> {
        self.make_folders(parent(target)?)?;
        NewFile::beside(self.clone(), target, TEMPORARY, true)
    }

    /// Creates a file with these bytes, durably; false if there is one of this name.
    pub(crate) fn create(&self, target: &Path, bytes: &[u8]) -> io::Result<bool> {
        let file = self.begin(target)?;
        file.at(0).write_all(bytes)?;
        file.link()
    }

    /// The bytes of a file; none if there is no such file.
    pub(crate) fn read(&self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        self.inside(parent(path)?)?;
        optional(self.files.read(path))
    }

    /// A file of a store; none if there is no such file.
    pub(crate) fn open(&self, path: &Path) -> io::Result<Option<Near>> {
        self.inside(parent(path)?)?;
        optional(self.files.open(path))
    }

    /// A file of a store to give away, and its length; none if there is no such file.
    pub(crate) fn lend(&self, path: &Path) -> io::Result<Option<(File, u64)>> {
        self.inside(parent(path)?)?;
        let Some(file) = optional(system::open(path, Access::Read))? else { return Ok(None) };
        let len = file.metadata()?.len();
        Ok(Some((file, len)))
    }

    /// Removes a file, if it is there.
    pub(crate) fn remove(&self, path: &Path) -> io::Result<()> {
        self.inside(parent(path)?)?;
        optional(self.files.remove(path)).map(drop)
    }

    /// Removes a folder if it is there and has nothing in it but what killed processes left behind.
    pub(crate) fn remove_folder(&self, path: &Path) -> io::Result<()> {
        for name in self.list(path)? {
            if name.starts_with(TEMPORARY) {
                self.remove(&path.join(name))?;
            }
        }
        self.durable().remove(path);
        match optional(self.files.remove_folder(path)) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            done => done.map(drop),
        }
    }

    /// The names in a folder, sorted, temporary ones included; none if there is no such folder. A name that
    /// is not UTF-8 is not ours.
    pub(crate) fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.inside(path)?;
        let mut names = optional(self.files.list(path))?.unwrap_or_default();
        names.sort_unstable();
        Ok(names)
    }

    /// Makes what has been created in a folder durable, whoever has created it: he may have been killed
    /// before it was.
    pub(crate) fn settle(&self, folder: &Path) -> io::Result<()> {
        optional(self.files.sync_folder(folder)).map(drop)
    }

    /// Locks a file, which is made if it is not there, alone or with others who share it; none if
    /// somebody has locked it otherwise. Dropping the lock lets go.
    pub(crate) fn lock(
        &self,
        path: &Path,
        is_shared: bool,
    ) -> io::Result<Option<Box<dyn Any + Send>>> {
        self.make_folders(parent(path)?)?;
        self.files.lock(path, is_shared)
    }

    /// Whether nobody has locked a file, or whoever had has ended; then the file is removed.
    pub(crate) fn is_free(&self, path: &Path) -> io::Result<bool> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !self.list(parent(path)?)?.iter().any(|there| there == name) {
            return Ok(true);
        }
        let lock = self.files.lock(path, false)?;
        let is_free = lock.is_some();
        if is_free {
            // As long as it is locked: nobody else has it after that.
            self.remove(path)?;
        }
        Ok(is_free)
    }

    /// Makes the root, and what is above it, durably. It is made here only: if it is gone later, so is the store, such
    /// as with what was mounted there.
    pub(crate) fn make_root(&self) -> io::Result<()> {
        self.make_folder(&self.root)
    }

    /// Makes a folder of the store and those above it up to the root, durably.
    fn make_folders(&self, path: &Path) -> io::Result<()> {
        self.inside(path)?;
        if path != self.root {
            return self.make_folder(path);
        }
        if self.files.folder(&self.root).is_none() {
            let text = format!("the store's folder `{}` is gone", self.root.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        Ok(())
    }

    /// One that is there may have been made by a process that was killed before it was durable. So it is
    /// synced all the same, unless it is the one that was synced before; but the root, and what is above it,
    /// are what they are.
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        let found = self.files.folder(path);
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
        let made = if found.is_none() { self.files.make_folder(path) } else { Ok(()) };
        let Some(folder) = self.files.folder(path) else {
            // That it is there already says no more than that somebody else has made it, if he has.
            return Err(made.err().unwrap_or_else(|| io::ErrorKind::NotFound.into()));
        };
        self.files.sync_folder(above)?;
        let mut durable = self.durable();
        if durable.len() >= MAX_DURABLE {
            // To sync a folder once more costs time, no more.
            durable.clear();
        }
        durable.insert(path.to_owned(), folder);
        Ok(())
    }

    /// Nothing is reached by a link below the root: it may lead out of the store, to what is not to be deleted.
    fn inside(&self, folder: &Path) -> io::Result<()> {
        let below = |path: &&Path| path.starts_with(&self.root) && **path != self.root;
        match folder.ancestors().take_while(below).find(|path| self.files.is_link(path)) {
            Some(link) => Err(system::link_at(link)),
            None => Ok(()),
        }
    }

    fn durable(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Folder>> {
        self.durable.lock()
    }
}

/// Smaller writes are gathered. A system that keeps files in large pages makes them as large as the writes
/// and their places in the file allow, and maps them the faster.
pub(crate) const BUFFER_BYTES: usize = 1 << 20;

/// What is to be durable sets out for the disk by so many bytes, while the next ones are written. By itself it would stay
/// until it is synced, and the disk would have nothing to do until then.
const SEND_BYTES: u64 = 4 << 20;

/// A file that is being written. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct NewFile {
    disk: Disk,
    output: Box<dyn Output>,
    is_durable: bool,
    temporary: PathBuf,
    is_removed: bool,
    target: PathBuf,
}

impl NewFile {
    /// Starts a file that will have this name, under one that begins otherwise.
    fn beside(disk: Disk, target: &Path, prefix: &str, is_durable: bool) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = parent(target)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{prefix}{}-{number}", std::process::id());
            let temporary = folder.join(name);
            match disk.files.create(&temporary) {
                Ok(output) => {
                    let target = target.to_owned();
                    let is_removed = false;
                    return Ok(Self { disk, output, is_durable, temporary, is_removed, target });
                }
                // Left behind by a process of the same id that was killed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Says how long it will be: a system that knows finds room at once.
    pub(crate) fn expect(&self, len: u64) {
        self.output.expect(len);
    }

    /// A writer at a place of the file; several may write different places at once.
    pub(crate) fn at(&self, offset: u64) -> impl Write + Send + use<'_> {
        At { output: &*self.output, progress: self.progress(offset) }
    }

    fn progress(&self, at: u64) -> Progress {
        Progress { at, waiting: self.is_durable.then_some(at) }
    }

    /// Gives the file its name, durably, unless the name is taken: then it says so by false, and what has the
    /// name is durable.
    ///
    /// A failed sync is never tried again: the system may have thrown the bytes away.
    pub(crate) fn link(mut self) -> io::Result<bool> {
        self.output.sync()?;
        let is_free = match self.disk.files.link(&self.temporary, &self.target) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        // Before the folder is synced: else a power cut might bring it back.
        self.remove();
        self.disk.settle(parent(&self.target)?)?;
        Ok(is_free)
    }

    /// The temporary name goes, whether the file has another one by now or not. What cannot be removed is swept
    /// with the folder.
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

/// A file of a user's own that appears under its name once it is complete. Until then it has a temporary
/// name beside it; whatever had the name before is there until then, and stays if this is dropped.
#[derive(Debug)]
pub struct Replacement {
    new: NewFile,
    progress: Progress,
}

impl Replacement {
    /// Begins the file that will be at `target`, and on the disk then if it is to be durable. A link stays a link:
    /// what it points to is replaced. The file gets the permissions of the one that it replaces.
    ///
    /// # Errors
    ///
    /// Whatever the system says; `InvalidInput` if what is there is no regular file.
    pub fn create(target: &Path, is_durable: bool) -> io::Result<Self> {
        let target = match target.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => target.to_owned(),
            resolved => resolved?,
        };
        let old = optional(target.metadata())?;
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        let disk = Disk::at(parent(&target)?.to_owned());
        let new = Self::on(disk, &target, is_durable)?;
        if let Some(old) = old {
            fs::set_permissions(&new.new.temporary, old.permissions())?;
        }
        Ok(new)
    }

    pub(crate) fn on(disk: Disk, target: &Path, is_durable: bool) -> io::Result<Self> {
        let new = NewFile::beside(disk, target, ".tssd-", is_durable)?;
        Ok(Self { progress: new.progress(0), new })
    }

    /// Says how long the file will be, for the system to find room for it at once.
    pub fn expect(&self, len: u64) {
        self.new.expect(len);
    }

    /// A writer at a place of the file; several may write different places at once.
    pub fn at(&self, offset: u64) -> impl Write + Send + use<'_> {
        self.new.at(offset)
    }

    /// Lets the file appear. If it is to be durable it is on the disk then, whatever happens.
    ///
    /// # Errors
    ///
    /// Whatever the system says.
    pub fn commit(mut self) -> io::Result<()> {
        let new = &mut self.new;
        if new.is_durable {
            new.output.sync()?;
        }
        new.disk.files.rename(&new.temporary, &new.target)?;
        new.is_removed = true;
        if new.is_durable { new.disk.files.sync_folder(parent(&new.target)?) } else { Ok(()) }
    }
}

/// Its temporary path.
impl AsRef<Path> for Replacement {
    fn as_ref(&self) -> &Path {
        &self.new.temporary
    }
}

/// One byte after the other.
impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.progress.write(&*self.new.output, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How far whoever writes one byte after the other has come.
#[derive(Debug)]
struct Progress {
    at: u64,
    /// What is written from here on has not set out for the disk yet; none if it need not get there.
    waiting: Option<u64>,
}

impl Progress {
    fn write(&mut self, output: &dyn Output, bytes: &[u8]) -> io::Result<usize> {
        let written = output.write_at(bytes, self.at)?;
        self.at += u64::try_from(written).map_err(io::Error::other)?;
        if let Some(start) = &mut self.waiting
            && self.at - *start >= SEND_BYTES
        {
            output.send(*start..self.at);
            *start = self.at;
        }
        Ok(written)
    }
}

struct At<'a> {
    output: &'a dyn Output,
    progress: Progress,
}

impl Write for At<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.progress.write(self.output, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Takes the lock of a file, which is made if it is not there, with its folders; none if somebody else holds
/// it.
pub(crate) fn lock(path: &Path) -> io::Result<Option<FileLock>> {
    let folder = parent(path)?;
    Disk::at(folder.to_owned()).make_root()?;
    FileLock::take(path)
}

/// Removes a file, if it is there.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    optional(fs::remove_file(path)).map(drop)
}

/// The bytes of a file; none if there is no such file.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    optional(SystemFiles.read(path))
}

/// Where the daemon listens that serves a directory, if one does.
pub(crate) fn claimed_by(root: &Path) -> io::Result<Option<String>> {
    let claim = system::open(&root.join(CLAIM), Access::Read);
    let Some(mut file) = optional(claim)? else { return Ok(None) };
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
            // What lies below a file is not there either.
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
    fn the_root_may_be_behind_a_link_and_nothing_below_it() {
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
    fn what_a_killed_process_of_the_same_id_has_left_is_in_nobodys_way() {
        let files = SimulatedFiles::default();
        let disk = Disk::of(Arc::new(files.clone()), PathBuf::from("/"));
        let begun = disk.begin(Path::new("/file")).unwrap();
        let own = begun.temporary.to_str().unwrap();
        let (prefix, number) = own.rsplit_once('-').unwrap();
        let number: u64 = number.parse().unwrap();
        // Other tests begin files meanwhile.
        for next in 1..1000 {
            files.create(Path::new(&format!("{prefix}-{}", number + next))).unwrap();
        }
        assert!(disk.create(Path::new("/other"), b"what it is").unwrap());
        assert_eq!(disk.read(Path::new("/other")).unwrap().unwrap(), b"what it is");
    }

    #[test]
    fn what_cannot_be_named_or_removed_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::at(folder.path().canonicalize().unwrap());
        // Its temporary name is a short one.
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
    fn a_folder_is_made_durable_once_by_each_process() {
        let files = SimulatedFiles::default();
        let disk = || Disk::of(Arc::new(files.clone()), PathBuf::from("/"));
        let syncs = |disk: &Disk, path: &str| {
            files.take_events();
            assert!(disk.create(Path::new(path), b"").unwrap());
            let events = files.take_events();
            events.iter().filter(|event| matches!(event, Event::Synced(_))).count()
        };
        let (one, other) = (disk(), disk());
        // The file and its folder, and those that each folder is in.
        assert_eq!(syncs(&one, "/a/b/file"), 4);
        for path in ["/a/b/next", "/a/next"] {
            assert_eq!(syncs(&one, path), 2, "{path}");
        }
        // Who has made them may have been killed before they were durable.
        assert_eq!(syncs(&other, "/a/b/other"), 4);
    }
}
