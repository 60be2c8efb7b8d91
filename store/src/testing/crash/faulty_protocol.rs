//! Faulty durability protocols. The power cut tests must find each of them.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::io::disk::{FileSystem, FolderId, OutputFile};
use crate::io::local_archive::LocalArchive;
use crate::io::sync::Lock;

/// A fault of the durability protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProtocolFault {
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
    /// The parents of new folders are not synced.
    NoParentSync,
    /// A file is synced before it is written.
    SyncBeforeWrite,
    /// A file gets its name before it is synced.
    LinkBeforeSync,
}

pub(super) const PROTOCOL_FAULTS: [ProtocolFault; 9] = [
    ProtocolFault::NoFileSync,
    ProtocolFault::NoArchiveSync,
    ProtocolFault::NoManifestSync,
    ProtocolFault::NoRecordSync,
    ProtocolFault::NoFolderSync,
    ProtocolFault::NoRecordFolderSync,
    ProtocolFault::NoParentSync,
    ProtocolFault::SyncBeforeWrite,
    ProtocolFault::LinkBeforeSync,
];

/// Files that omit or misplace some of the syncs that the store requests.
#[derive(Debug)]
pub(super) struct FaultyFiles {
    inner: Arc<dyn FileSystem>,
    bug: ProtocolFault,
    /// Files whose sync is delayed, by temporary name.
    ///
    /// [`Self::link`] gives the final name, which decides about the sync.
    unsynced: Arc<Lock<BTreeMap<PathBuf, Arc<dyn OutputFile>>>>,
    /// Folders that contain a new folder, and were not synced since.
    with_new_folder: Lock<BTreeSet<PathBuf>>,
}

impl FaultyFiles {
    pub(super) fn new(inner: Arc<dyn FileSystem>, bug: ProtocolFault) -> Self {
        Self { inner, bug, unsynced: Arc::default(), with_new_folder: Lock::default() }
    }

    /// Returns whether the sync of a file with this final name is omitted.
    fn omits_sync(&self, name: &Path) -> bool {
        let has = |extension| name.extension().is_some_and(|found| found == extension);
        let is_manifest = name.ends_with("manifest.tssd");
        match self.bug {
            ProtocolFault::NoFileSync | ProtocolFault::SyncBeforeWrite => true,
            ProtocolFault::NoManifestSync => is_manifest,
            ProtocolFault::NoArchiveSync => has("tssd") && !is_manifest,
            ProtocolFault::NoRecordSync => has("json"),
            _ => false,
        }
    }
}

impl FileSystem for FaultyFiles {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        let output: Arc<dyn OutputFile> = self.inner.create(path)?.into();
        let (path, unsynced) = (path.to_owned(), self.unsynced.clone());
        Ok(Box::new(FaultyOutput { output, path, unsynced, bug: self.bug }))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        let unsynced = self.unsynced.lock().remove(path);
        let unsynced = unsynced.filter(|_| !self.omits_sync(name));
        let sync = || unsynced.map_or(Ok(()), |output| output.sync());
        if self.bug == ProtocolFault::LinkBeforeSync {
            self.inner.link(path, name)?;
            return sync();
        }
        sync()?;
        self.inner.link(path, name)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        let parent = path.parent().unwrap_or(path).to_owned();
        self.with_new_folder.lock().insert(parent);
        self.inner.make_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let has_new_folder = self.with_new_folder.lock().remove(path);
        let is_omitted = match self.bug {
            ProtocolFault::NoFolderSync => true,
            ProtocolFault::NoRecordFolderSync => path.ends_with(".ledger"),
            ProtocolFault::NoParentSync => has_new_folder,
            _ => false,
        };
        if is_omitted { Ok(()) } else { self.inner.sync_folder(path) }
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

    fn folder_id(&self, path: &Path) -> Option<FolderId> {
        self.inner.folder_id(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.inner.list(path)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.inner.read(path)
    }

    fn open(&self, path: &Path) -> io::Result<LocalArchive> {
        self.inner.open(path)
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        self.inner.lock(path, is_shared)
    }
}

#[derive(Debug)]
struct FaultyOutput {
    output: Arc<dyn OutputFile>,
    path: PathBuf,
    unsynced: Arc<Lock<BTreeMap<PathBuf, Arc<dyn OutputFile>>>>,
    bug: ProtocolFault,
}

impl OutputFile for FaultyOutput {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        if self.bug == ProtocolFault::SyncBeforeWrite {
            self.output.sync()?;
        }
        self.output.write_at(bytes, offset)
    }

    fn preallocate(&self, len: u64) {
        self.output.preallocate(len);
    }

    fn start_writeback(&self, range: Range<u64>) {
        self.output.start_writeback(range);
    }

    fn sync(&self) -> io::Result<()> {
        let mut unsynced = self.unsynced.lock();
        unsynced.insert(self.path.clone(), self.output.clone());
        Ok(())
    }
}
