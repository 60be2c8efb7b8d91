//! A file system in memory that computes the states that a power cut may leave.
//!
//! A change of a file or folder is pending until the file or folder is synced. At a power cut, any subset of the
//! pending changes becomes durable, and a write may be torn or extend the file without its bytes. So the same calls
//! lead to many trees, each of which a real file system may show after a remount. This is the weakest form of the
//! abstract persistence model of Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;

use crate::io::disk::{FileSystem, FolderId, OutputFile};
use crate::io::local_archive::LocalArchive;
use crate::io::sync::{Lock, MutexGuard};

/// Identity of a file or folder, independent of its names.
type Inode = u64;

const ROOT: Inode = 0;

/// Alignment of blobs in bytes.
///
/// Storages are aligned within a blob, so views are aligned only if the blob is.
const ALIGNMENT: usize = 64;

/// The files and folders at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Tree(BTreeMap<Inode, Node>);

#[derive(Clone, Debug, PartialEq)]
enum Node {
    File(Arc<Vec<u8>>),
    Folder(Arc<BTreeMap<String, Inode>>),
}

impl Default for Tree {
    fn default() -> Self {
        Self([(ROOT, Node::Folder(Arc::default()))].into())
    }
}

/// A change by one call. Each change concerns one file or one folder.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// Bytes are written to a file.
    Write { file: Inode, offset: usize, bytes: Arc<[u8]> },
    /// A file is extended with zeros.
    Extend { file: Inode, len: usize },
    /// A name is added to a folder.
    AddName { folder: Inode, name: String, inode: Inode, is_folder: bool },
    /// A name is removed from a folder.
    RemoveName { folder: Inode, name: String },
}

/// The part of a change that has become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DurablePart {
    Nothing,
    All,
    /// The first half of the bytes.
    Torn,
    /// The length of the file, without the bytes.
    Zeros,
}

/// An event of the file system, in the order of the calls.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A file or folder was changed.
    Changed(Change),
    /// A file or folder was synced: its changes are durable.
    Synced(Inode),
}

impl Change {
    /// Returns the file or folder that must be synced to make the change durable.
    fn inode(&self) -> Inode {
        match self {
            Self::Write { file, .. } | Self::Extend { file, .. } => *file,
            Self::AddName { folder, .. } | Self::RemoveName { folder, .. } => *folder,
        }
    }

    /// Returns the parts of the change that a power cut may make durable.
    pub(crate) fn possible_parts(&self) -> &'static [DurablePart] {
        match self {
            Self::Write { .. } => {
                &[DurablePart::Nothing, DurablePart::All, DurablePart::Torn, DurablePart::Zeros]
            }
            _ => &[DurablePart::Nothing, DurablePart::All],
        }
    }
}

impl Tree {
    /// Applies the durable part of a change.
    ///
    /// Its file or folder need not exist: it may be deleted, or its creation lost.
    pub(crate) fn apply(&mut self, change: &Change, extent: DurablePart) {
        if extent == DurablePart::Nothing {
            return;
        }
        match change {
            Change::Write { file, offset, bytes } => {
                let file = self.file(*file);
                let len = file.len().max(offset + bytes.len());
                file.resize(len, 0);
                let durable = match extent {
                    DurablePart::All => bytes.len(),
                    DurablePart::Torn => bytes.len() / 2,
                    DurablePart::Zeros | DurablePart::Nothing => 0,
                };
                file[*offset..offset + durable].copy_from_slice(&bytes[..durable]);
            }
            Change::Extend { file, len } => {
                let file = self.file(*file);
                file.resize(file.len().max(*len), 0);
            }
            Change::AddName { folder, name, inode, is_folder } => {
                self.names(*folder).insert(name.clone(), *inode);
                let node = || {
                    if *is_folder {
                        Node::Folder(Arc::default())
                    } else {
                        Node::File(Arc::default())
                    }
                };
                self.0.entry(*inode).or_insert_with(node);
            }
            Change::RemoveName { folder, name } => drop(self.names(*folder).remove(name)),
        }
    }

    /// Returns the bytes of a file. Creates an empty file if there is none.
    fn file(&mut self, inode: Inode) -> &mut Vec<u8> {
        match self.0.entry(inode).or_insert_with(|| Node::File(Arc::default())) {
            Node::File(bytes) => Arc::make_mut(bytes),
            Node::Folder(_) => unreachable!("inode {inode} is a folder"),
        }
    }

    /// Returns the names in a folder. Creates an empty folder if there is none.
    fn names(&mut self, inode: Inode) -> &mut BTreeMap<String, Inode> {
        match self.0.entry(inode).or_insert_with(|| Node::Folder(Arc::default())) {
            Node::Folder(names) => Arc::make_mut(names),
            Node::File(_) => unreachable!("inode {inode} is a file"),
        }
    }

    fn find(&self, path: &Path) -> io::Result<Inode> {
        let mut inode = ROOT;
        for part in path.components() {
            let Component::Normal(name) = part else { continue };
            let Some(Node::Folder(names)) = self.0.get(&inode) else {
                return Err(io::ErrorKind::NotADirectory.into());
            };
            let name = name.to_str().ok_or(io::ErrorKind::InvalidInput)?;
            inode = *names.get(name).ok_or(io::ErrorKind::NotFound)?;
        }
        Ok(inode)
    }

    fn folder(&self, inode: Inode) -> io::Result<&BTreeMap<String, Inode>> {
        match self.0.get(&inode) {
            Some(Node::Folder(names)) => Ok(names),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn bytes(&self, path: &Path) -> io::Result<&Arc<Vec<u8>>> {
        match self.0.get(&self.find(path)?) {
            Some(Node::File(bytes)) => Ok(bytes),
            _ => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    /// Returns the parent folder of a path, and the name in it.
    fn parent_and_name(&self, path: &Path) -> io::Result<(Inode, String)> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        let folder = self.find(path.parent().unwrap_or(Path::new("/")))?;
        self.folder(folder)?;
        Ok((folder, name))
    }

    /// Returns a digest of the reachable files and folders.
    pub(crate) fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        self.add_to(&mut hasher, ROOT);
        hasher.finalize()
    }

    fn add_to(&self, hasher: &mut blake3::Hasher, inode: Inode) {
        match self.0.get(&inode) {
            Some(Node::Folder(names)) => {
                for (name, inode) in &**names {
                    hasher.update(name.as_bytes()).update(b"{");
                    self.add_to(hasher, *inode);
                }
                hasher.update(b"}");
            }
            Some(Node::File(bytes)) => {
                let len = u64::try_from(bytes.len()).expect("files are small");
                hasher.update(&len.to_le_bytes()).update(bytes);
            }
            None => unreachable!("a name stands for something"),
        }
    }
}

/// A file system in memory. Clones share the same files.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimulatedFiles(Arc<Lock<State>>);

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    next: Inode,
    events: Vec<Event>,
    locks: BTreeMap<PathBuf, LockMode>,
}

/// How a file is locked.
#[derive(Debug)]
enum LockMode {
    Exclusive,
    /// Shared by this many holders.
    Shared(usize),
}

impl SimulatedFiles {
    /// Creates a file system with the files that a power cut has left.
    pub(crate) fn with_tree(tree: Tree) -> Self {
        let next = tree.0.keys().next_back().copied().unwrap_or(ROOT);
        Self(Arc::new(Lock::new(State { tree, next, ..State::default() })))
    }

    /// Returns the events since the last call.
    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    /// Returns the paths of all files.
    pub(crate) fn paths(&self) -> BTreeSet<String> {
        let state = self.state();
        let mut paths = BTreeSet::new();
        let mut folders = vec![(String::new(), ROOT)];
        while let Some((path, inode)) = folders.pop() {
            match &state.tree.0[&inode] {
                Node::File(_) => drop(paths.insert(path)),
                Node::Folder(names) => folders
                    .extend(names.iter().map(|(name, inode)| (format!("{path}/{name}"), *inode))),
            }
        }
        paths
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl State {
    fn change(&mut self, change: Change) {
        self.tree.apply(&change, DurablePart::All);
        self.events.push(Event::Changed(change));
    }

    fn enter(&mut self, path: &Path, is_folder: bool) -> io::Result<Inode> {
        let (folder, name) = self.tree.parent_and_name(path)?;
        if self.tree.folder(folder)?.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.next += 1;
        let inode = self.next;
        self.change(Change::AddName { folder, name, inode, is_folder });
        Ok(inode)
    }
}

impl FileSystem for SimulatedFiles {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        let file = self.state().enter(path, false)?;
        Ok(Box::new(OpenFile { files: self.clone(), file }))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        let mut state = self.state();
        let inode = state.tree.find(path)?;
        let (folder, name) = state.tree.parent_and_name(name)?;
        if state.tree.folder(folder)?.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.change(Change::AddName { folder, name, inode, is_folder: false });
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.tree.bytes(path)?;
        let (folder, name) = state.tree.parent_and_name(path)?;
        state.change(Change::RemoveName { folder, name });
        Ok(())
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.state().enter(path, true).map(drop)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let inode = state.tree.find(path)?;
        if !state.tree.folder(inode)?.is_empty() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        let (folder, name) = state.tree.parent_and_name(path)?;
        state.change(Change::RemoveName { folder, name });
        Ok(())
    }

    fn is_link(&self, _path: &Path) -> bool {
        false
    }

    fn folder_id(&self, path: &Path) -> Option<FolderId> {
        let state = self.state();
        let inode = state.tree.find(path).ok()?;
        state.tree.folder(inode).ok()?;
        Some(FolderId { device: 0, inode, created: SystemTime::UNIX_EPOCH })
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let state = self.state();
        Ok(state.tree.folder(state.tree.find(path)?)?.keys().cloned().collect())
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let inode = state.tree.find(path)?;
        state.tree.folder(inode)?;
        state.events.push(Event::Synced(inode));
        Ok(())
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        Ok(self.state().tree.bytes(path)?.to_vec())
    }

    fn open(&self, path: &Path) -> io::Result<LocalArchive> {
        let bytes = self.read(path)?;
        let mut memory = vec![0; bytes.len() + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let range = start..start + bytes.len();
        memory[range.clone()].copy_from_slice(&bytes);
        Ok(LocalArchive::new(Bytes::from(memory).slice(range)))
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        let mut state = self.state();
        if state.tree.find(path).is_err() {
            state.enter(path, false)?;
        }
        match (state.locks.get_mut(path), is_shared) {
            (None, _) => {
                let mode = if is_shared { LockMode::Shared(1) } else { LockMode::Exclusive };
                state.locks.insert(path.to_owned(), mode);
            }
            (Some(LockMode::Shared(count)), true) => *count += 1,
            _ => return Ok(None),
        }
        drop(state);
        Ok(Some(Box::new(LockGuard { files: self.clone(), path: path.to_owned() })))
    }
}

struct LockGuard {
    files: SimulatedFiles,
    path: PathBuf,
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let mut state = self.files.state();
        match state.locks.get_mut(&self.path) {
            Some(LockMode::Shared(count)) if *count > 1 => *count -= 1,
            _ => drop(state.locks.remove(&self.path)),
        }
    }
}

#[derive(Debug)]
struct OpenFile {
    files: SimulatedFiles,
    file: Inode,
}

impl OutputFile for OpenFile {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let file = self.file;
        self.files.state().change(Change::Write { file, offset, bytes: bytes.into() });
        Ok(bytes.len())
    }

    fn preallocate(&self, len: u64) {
        let len = usize::try_from(len).expect("files are small");
        self.files.state().change(Change::Extend { file: self.file, len });
    }

    /// Does nothing. Unsynced bytes may be durable after a power cut or not, with or without writeback.
    fn start_writeback(&self, _range: Range<u64>) {}

    fn sync(&self) -> io::Result<()> {
        self.files.state().events.push(Event::Synced(self.file));
        Ok(())
    }
}

/// The durable state of a disk, and its pending changes.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskState {
    durable: Tree,
    pending: Vec<Change>,
}

impl DiskState {
    pub(crate) fn new(durable: Tree) -> Self {
        Self { durable, pending: Vec::new() }
    }

    /// Applies one event.
    pub(crate) fn apply_event(&mut self, event: &Event) {
        match event {
            Event::Changed(change) => self.pending.push(change.clone()),
            Event::Synced(inode) => {
                // Changes of one file or folder become durable in order.
                for change in self.pending.extract_if(.., |change| change.inode() == *inode) {
                    self.durable.apply(&change, DurablePart::All);
                }
            }
        }
    }

    /// Returns the changes that a power cut may lose.
    pub(crate) fn pending(&self) -> &[Change] {
        &self.pending
    }

    /// Returns the tree after a power cut that makes these parts of the pending changes durable.
    pub(crate) fn after_power_cut(&self, extents: &[DurablePart]) -> Tree {
        let mut tree = self.durable.clone();
        for (change, extent) in self.pending.iter().zip(extents) {
            tree.apply(change, *extent);
        }
        tree
    }
}
