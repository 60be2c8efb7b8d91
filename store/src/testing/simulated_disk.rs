//! A file system in memory that knows what a power cut leaves of it.
//!
//! What is done to a file or a folder waits until that is synced. A power cut makes durable any part of what
//! waits: some calls and not others, a write torn or its length alone. So the same calls lead to many trees,
//! each of which a real file system may show after it is mounted again (the abstract persistence model of
//! Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, at its weakest).

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;

use crate::io::disk::{Files, Folder, Output};
use crate::io::local_archive::Near;
use crate::io::sync::{Lock, MutexGuard};

/// What tells files and folders apart, whatever their names are.
type Inode = u64;

const ROOT: Inode = 0;

/// Storages are aligned within a blob: the blob must be too, for views to be.
const ALIGNMENT: usize = 64;

/// Files and folders at one moment.
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

/// One call that has changed something. All of them are about one file or one folder.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// A file is written.
    Write { file: Inode, offset: usize, bytes: Arc<[u8]> },
    /// A file is made longer.
    Extend { file: Inode, len: usize },
    /// A name is there.
    Enter { folder: Inode, name: String, inode: Inode, is_folder: bool },
    /// A name is gone.
    Leave { folder: Inode, name: String },
    /// A name is gone, and another one stands for what it stood for.
    Rename { folder: Inode, from: String, to: String },
}

/// How much of a change has become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Nothing,
    All,
    /// The first half of what is written.
    Torn,
    /// The length without the bytes.
    Zeros,
}

/// What has happened, in order.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// Something has changed.
    Changed(Change),
    /// What was done to a file or folder is durable.
    Synced(Inode),
}

impl Change {
    /// What must be synced for it to be durable.
    fn subject(&self) -> Inode {
        match self {
            Self::Write { file, .. } | Self::Extend { file, .. } => *file,
            Self::Enter { folder, .. }
            | Self::Leave { folder, .. }
            | Self::Rename { folder, .. } => *folder,
        }
    }

    /// What may become of it in a power cut.
    pub(crate) fn extents(&self) -> &'static [Extent] {
        match self {
            Self::Write { .. } => &[Extent::Nothing, Extent::All, Extent::Torn, Extent::Zeros],
            _ => &[Extent::Nothing, Extent::All],
        }
    }
}

impl Tree {
    /// Applies what of a change is durable. What it is about may be gone, or never have been there.
    pub(crate) fn apply(&mut self, change: &Change, extent: Extent) {
        if extent == Extent::Nothing {
            return;
        }
        match change {
            Change::Write { file, offset, bytes } => {
                let file = self.file(*file);
                let len = file.len().max(offset + bytes.len());
                file.resize(len, 0);
                let durable = match extent {
                    Extent::All => bytes.len(),
                    Extent::Torn => bytes.len() / 2,
                    Extent::Zeros | Extent::Nothing => 0,
                };
                file[*offset..offset + durable].copy_from_slice(&bytes[..durable]);
            }
            Change::Extend { file, len } => {
                let file = self.file(*file);
                file.resize(file.len().max(*len), 0);
            }
            Change::Enter { folder, name, inode, is_folder } => {
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
            Change::Leave { folder, name } => drop(self.names(*folder).remove(name)),
            Change::Rename { folder, from, to } => {
                let names = self.names(*folder);
                if let Some(inode) = names.remove(from) {
                    names.insert(to.clone(), inode);
                }
            }
        }
    }

    /// The bytes of a file, which has none if it is not there yet.
    fn file(&mut self, inode: Inode) -> &mut Vec<u8> {
        match self.0.entry(inode).or_insert_with(|| Node::File(Arc::default())) {
            Node::File(bytes) => Arc::make_mut(bytes),
            Node::Folder(_) => unreachable!("inode {inode} is a folder"),
        }
    }

    /// The names in a folder, which has none if it is not there yet.
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

    /// The folder that a path is in, and the name there.
    fn place(&self, path: &Path) -> io::Result<(Inode, String)> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        let folder = self.find(path.parent().unwrap_or(Path::new("/")))?;
        self.folder(folder)?;
        Ok((folder, name))
    }

    /// A name for what can be reached: equal trees have equal ones.
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

/// The file system, which all its clones are.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimulatedFiles(Arc<Lock<State>>);

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    next: Inode,
    events: Vec<Event>,
    locks: BTreeMap<PathBuf, Held>,
}

/// Who has locked a file.
#[derive(Debug)]
enum Held {
    Alone,
    Shared(usize),
}

impl SimulatedFiles {
    /// One that holds what a power cut has left.
    pub(crate) fn of(tree: Tree) -> Self {
        let next = tree.0.keys().next_back().copied().unwrap_or(ROOT);
        Self(Arc::new(Lock::new(State { tree, next, ..State::default() })))
    }

    /// Takes what has happened since this was asked last.
    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    /// Where all files are.
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
        self.tree.apply(&change, Extent::All);
        self.events.push(Event::Changed(change));
    }

    fn enter(&mut self, path: &Path, is_folder: bool) -> io::Result<Inode> {
        let (folder, name) = self.tree.place(path)?;
        if self.tree.folder(folder)?.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.next += 1;
        let inode = self.next;
        self.change(Change::Enter { folder, name, inode, is_folder });
        Ok(inode)
    }
}

impl Files for SimulatedFiles {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        let file = self.state().enter(path, false)?;
        Ok(Box::new(Open { files: self.clone(), file }))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        let mut state = self.state();
        let inode = state.tree.find(path)?;
        let (folder, name) = state.tree.place(name)?;
        if state.tree.folder(folder)?.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.change(Change::Enter { folder, name, inode, is_folder: false });
        Ok(())
    }

    fn rename(&self, path: &Path, name: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.tree.find(path)?;
        let ((folder, from), (other, to)) = (state.tree.place(path)?, state.tree.place(name)?);
        assert_eq!(folder, other, "nothing is moved from folder to folder");
        state.change(Change::Rename { folder, from, to });
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.tree.bytes(path)?;
        let (folder, name) = state.tree.place(path)?;
        state.change(Change::Leave { folder, name });
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
        let (folder, name) = state.tree.place(path)?;
        state.change(Change::Leave { folder, name });
        Ok(())
    }

    fn is_link(&self, _path: &Path) -> bool {
        false
    }

    fn folder(&self, path: &Path) -> Option<Folder> {
        let state = self.state();
        let inode = state.tree.find(path).ok()?;
        state.tree.folder(inode).ok()?;
        Some(Folder { device: 0, inode, created: SystemTime::UNIX_EPOCH })
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

    fn open(&self, path: &Path) -> io::Result<Near> {
        let bytes = self.read(path)?;
        let mut memory = vec![0; bytes.len() + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let range = start..start + bytes.len();
        memory[range.clone()].copy_from_slice(&bytes);
        Ok(Near::new(Bytes::from(memory).slice(range)))
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        let mut state = self.state();
        if state.tree.find(path).is_err() {
            state.enter(path, false)?;
        }
        match (state.locks.get_mut(path), is_shared) {
            (None, _) => {
                let held = if is_shared { Held::Shared(1) } else { Held::Alone };
                state.locks.insert(path.to_owned(), held);
            }
            (Some(Held::Shared(count)), true) => *count += 1,
            _ => return Ok(None),
        }
        drop(state);
        Ok(Some(Box::new(Locked { files: self.clone(), path: path.to_owned() })))
    }
}

struct Locked {
    files: SimulatedFiles,
    path: PathBuf,
}

impl Drop for Locked {
    fn drop(&mut self) {
        let mut state = self.files.state();
        match state.locks.get_mut(&self.path) {
            Some(Held::Shared(count)) if *count > 1 => *count -= 1,
            _ => drop(state.locks.remove(&self.path)),
        }
    }
}

#[derive(Debug)]
struct Open {
    files: SimulatedFiles,
    file: Inode,
}

impl Output for Open {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let file = self.file;
        self.files.state().change(Change::Write { file, offset, bytes: bytes.into() });
        Ok(bytes.len())
    }

    fn expect(&self, len: u64) {
        let len = usize::try_from(len).expect("files are small");
        self.files.state().change(Change::Extend { file: self.file, len });
    }

    /// What was written may be on the disk after a power cut, or not, whether it has set out or not.
    fn send(&self, _range: Range<u64>) {}

    fn sync(&self) -> io::Result<()> {
        self.files.state().events.push(Event::Synced(self.file));
        Ok(())
    }
}

/// What a power cut may leave: what is durable, and what waits.
#[derive(Clone, Debug, Default)]
pub(crate) struct Aftermath {
    durable: Tree,
    waiting: Vec<Change>,
}

impl Aftermath {
    pub(crate) fn of(durable: Tree) -> Self {
        Self { durable, waiting: Vec::new() }
    }

    /// Goes on by one event.
    pub(crate) fn add(&mut self, event: &Event) {
        match event {
            Event::Changed(change) => self.waiting.push(change.clone()),
            Event::Synced(inode) => {
                // What is done to one file or folder becomes durable in order.
                for change in self.waiting.extract_if(.., |change| change.subject() == *inode) {
                    self.durable.apply(&change, Extent::All);
                }
            }
        }
    }

    /// The changes that may be lost.
    pub(crate) fn waiting(&self) -> &[Change] {
        &self.waiting
    }

    /// The tree that is there if so much of each waiting change is durable.
    pub(crate) fn tree(&self, extents: &[Extent]) -> Tree {
        let mut tree = self.durable.clone();
        for (change, extent) in self.waiting.iter().zip(extents) {
            tree.apply(change, *extent);
        }
        tree
    }
}
