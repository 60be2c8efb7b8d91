//! Protocols with a fault, each of which a check for crashes must find.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::io::disk::{Files, Folder, Output};
use crate::io::local_archive::Near;
use crate::io::sync::Lock;

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    /// No file is synced.
    NoFileSync,
    /// Archives are not synced.
    NoArchiveSync,
    /// Manifests are not synced.
    NoManifestSync,
    /// Records are not synced.
    NoRecordSync,
    /// No folder is synced.
    NoFolderSync,
    /// The folder of records is not synced.
    NoRecordFolderSync,
    /// New folders are not synced into the folder above.
    NoParentSync,
    /// A file is synced before it is written.
    SyncBeforeWrite,
    /// A file gets its name before it is synced.
    LinkBeforeSync,
}

pub(super) const BUGS: [Bug; 9] = [
    Bug::NoFileSync,
    Bug::NoArchiveSync,
    Bug::NoManifestSync,
    Bug::NoRecordSync,
    Bug::NoFolderSync,
    Bug::NoRecordFolderSync,
    Bug::NoParentSync,
    Bug::SyncBeforeWrite,
    Bug::LinkBeforeSync,
];

/// Files of a process that does something wrong.
#[derive(Debug)]
pub(super) struct Faulty {
    inner: Arc<dyn Files>,
    bug: Bug,
    /// Files that are to be synced, by their temporary names: what they are is known by the next one.
    unsynced: Arc<Lock<BTreeMap<PathBuf, Arc<dyn Output>>>>,
    /// Folders in which a folder is new.
    extended: Lock<BTreeSet<PathBuf>>,
}

impl Faulty {
    pub(super) fn new(inner: Arc<dyn Files>, bug: Bug) -> Self {
        Self { inner, bug, unsynced: Arc::default(), extended: Lock::default() }
    }

    /// Whether a file that is to have this name is not synced.
    fn forgets(&self, name: &Path) -> bool {
        let is = |extension| name.extension().is_some_and(|found| found == extension);
        let is_manifest = name.ends_with("manifest.tssd");
        match self.bug {
            Bug::NoFileSync | Bug::SyncBeforeWrite => true,
            Bug::NoManifestSync => is_manifest,
            Bug::NoArchiveSync => is("tssd") && !is_manifest,
            Bug::NoRecordSync => is("json"),
            _ => false,
        }
    }
}

impl Files for Faulty {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        let output: Arc<dyn Output> = self.inner.create(path)?.into();
        let (path, unsynced) = (path.to_owned(), self.unsynced.clone());
        Ok(Box::new(FaultyOutput { output, path, unsynced, bug: self.bug }))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        let unsynced = self.unsynced.lock().remove(path);
        let unsynced = unsynced.filter(|_| !self.forgets(name));
        let sync = || unsynced.map_or(Ok(()), |output| output.sync());
        if self.bug == Bug::LinkBeforeSync {
            self.inner.link(path, name)?;
            return sync();
        }
        sync()?;
        self.inner.link(path, name)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        let above = path.parent().unwrap_or(path).to_owned();
        self.extended.lock().insert(above);
        self.inner.make_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let is_extended = self.extended.lock().remove(path);
        let is_forgotten = match self.bug {
            Bug::NoFolderSync => true,
            Bug::NoRecordFolderSync => path.ends_with(".ledger"),
            Bug::NoParentSync => is_extended,
            _ => false,
        };
        if is_forgotten { Ok(()) } else { self.inner.sync_folder(path) }
    }

    fn rename(&self, path: &Path, name: &Path) -> io::Result<()> {
        self.inner.rename(path, name)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.inner.remove_folder(path)
    }

    fn is_link(&self, path: &Path) -> bool {
        self.inner.is_link(path)
    }

    fn folder(&self, path: &Path) -> Option<Folder> {
        self.inner.folder(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.inner.list(path)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.inner.read(path)
    }

    fn open(&self, path: &Path) -> io::Result<Near> {
        self.inner.open(path)
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        self.inner.lock(path, is_shared)
    }
}

#[derive(Debug)]
struct FaultyOutput {
    output: Arc<dyn Output>,
    path: PathBuf,
    unsynced: Arc<Lock<BTreeMap<PathBuf, Arc<dyn Output>>>>,
    bug: Bug,
}

impl Output for FaultyOutput {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        if self.bug == Bug::SyncBeforeWrite {
            self.output.sync()?;
        }
        self.output.write_at(bytes, offset)
    }

    fn expect(&self, len: u64) {
        self.output.expect(len);
    }

    fn send(&self, range: Range<u64>) {
        self.output.send(range);
    }

    fn sync(&self) -> io::Result<()> {
        let mut unsynced = self.unsynced.lock();
        unsynced.insert(self.path.clone(), self.output.clone());
        Ok(())
    }
}
