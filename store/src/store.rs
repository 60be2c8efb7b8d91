//! The store: state dicts by key, in immutable versions.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tssd_format::{Region, StateDict, Tensor};

use crate::controller::Controller;
use crate::disk;
use crate::environment::SystemEnvironment;
use crate::error::{Error, ErrorKind, Result};
use crate::get::{GetOptions, GetReport, PlanCache, Read, Target};
use crate::key::Key;
use crate::ledger::{
    Command, Contribution, Selection, Selector, Status, Timestamp, Version, VersionId, WriterSet,
};
use crate::meta::{DirectoryMeta, MemoryMeta};
use crate::put::{Calls, PutOptions, PutReport, put};
use crate::version::OpenVersion;
use crate::volume::{DirectoryVolume, MemoryVolume};

/// A store of state dicts: in this process's memory, or in a directory that several processes share.
///
/// Each put makes a version or contributes to one; a version becomes visible in one step, complete,
/// and never changes. Cloning a store is cheap, and the clone is the same store.
///
/// Calls that read and write run on threads that may wait; [`Store::get_state_dict_into`] copies
/// before it returns, so that no one touches the caller's memory later.
///
/// # Examples
///
/// ```
/// use tssd_format::{StateDict, Tensor};
/// use tssd_store::{GetOptions, Key, PutOptions, Store};
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let store = Store::memory();
/// let key = Key::new("policy")?;
/// let mut dict = StateDict::new();
/// dict.insert("weight", Tensor::from_slice(&[1.0_f32, 2.0], &[2])?);
/// let put = store.put_state_dict(&key, &dict, &PutOptions::default()).await?;
/// assert!(put.visible);
/// let (got, report) = store.get_state_dict(&key, &GetOptions::default()).await?;
/// assert_eq!((got, report.version), (dict, put.version));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    controller: Arc<Controller>,
    plans: PlanCache,
    /// The version of each key that was read last: its files, and which chunks are proven.
    opened: Mutex<BTreeMap<Key, Arc<OpenVersion>>>,
    calls: Calls,
}

/// How many keys' versions stay open between reads.
const MAX_OPENED: usize = 16;

/// A visible version.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct VersionInfo {
    /// Its number.
    pub number: u64,
    /// How often the key had been rewound when it opened.
    pub epoch: u32,
    /// Its identity.
    pub id: VersionId,
    /// Length of its archives together, in bytes.
    pub bytes: u64,
    /// Who wrote it.
    pub writers: WriterSet,
    /// When it became visible.
    pub since: Timestamp,
}

impl Store {
    /// A store in this process's memory. It ends with its last clone.
    pub fn memory() -> Self {
        let controller = Controller::new(
            Arc::new(MemoryMeta::default()),
            Arc::new(MemoryVolume::default()),
            Arc::new(SystemEnvironment),
        );
        Self::new(controller)
    }

    /// A store in a directory that is there. See [`Store::directory`], which makes one.
    ///
    /// # Errors
    ///
    /// `Unreachable` if there is no such directory, or it cannot be read.
    pub fn open_directory(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let is_folder = |root: &PathBuf| {
            if root.is_dir() { Ok(()) } else { Err(std::io::ErrorKind::NotADirectory.into()) }
        };
        let reached = path.canonicalize().and_then(|root| is_folder(&root).map(|()| root));
        reached.map(Self::at).map_err(|error| unreachable_at(path, &error))
    }

    /// A store in a directory, which is made if it is not there. Each version is a folder of ordinary
    /// `.tssd` files and a manifest; several processes may use the directory at once.
    ///
    /// # Errors
    ///
    /// `Unreachable` if the directory cannot be made or read.
    pub fn directory(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let reached = disk::make_folders(path).and_then(|()| path.canonicalize());
        reached.map(Self::at).map_err(|error| unreachable_at(path, &error))
    }

    fn at(root: PathBuf) -> Self {
        let controller = Controller::new(
            Arc::new(DirectoryMeta::new(root.clone())),
            Arc::new(DirectoryVolume::new(root)),
            Arc::new(SystemEnvironment),
        );
        Self::new(controller)
    }

    /// The store at an address: a directory that is there (`PATH` or `file:PATH`), or `memory:`, a
    /// new one.
    ///
    /// # Errors
    ///
    /// `Unreachable` if it cannot be reached; `Invalid` for another kind of address.
    pub fn connect(url: &str) -> Result<Self> {
        path_of(url)?.map_or_else(|| Ok(Self::memory()), Self::open_directory)
    }

    /// As [`Store::connect`], but makes the directory if it is not there.
    ///
    /// # Errors
    ///
    /// As [`Store::connect`].
    pub fn create(url: &str) -> Result<Self> {
        path_of(url)?.map_or_else(|| Ok(Self::memory()), Self::directory)
    }

    pub(crate) fn new(controller: Controller) -> Self {
        Self(Arc::new(Inner {
            controller: Arc::new(controller),
            plans: PlanCache::default(),
            opened: Mutex::default(),
            calls: Calls::default(),
        }))
    }

    /// Puts one writer's state dict: a version of its own, or its contribution to a version that
    /// becomes visible when all writers have put theirs.
    ///
    /// Returns when this writer's contribution is committed; the report says whether the version is
    /// visible, and else whose contributions are missing.
    ///
    /// # Errors
    ///
    /// `Invalid` for what cannot be stored, with its path; `Refused` for what the ledger does not
    /// allow, with the way out; `Rejected` if this was the last contribution and they do not fit
    /// together; `Busy` after the timeout; `Io` if the disk fails or is full. What was visible before
    /// stays so.
    pub async fn put_state_dict(
        &self,
        key: &Key,
        dict: &StateDict,
        options: &PutOptions,
    ) -> Result<PutReport> {
        let report = put(&self.0.controller, key, dict, options, &self.0.calls).await?;
        if report.visible {
            self.forget(key);
        }
        Ok(report)
    }

    /// Reads a state dict: whole, or with the slices that the options ask for. Leaves that lie in one
    /// piece are views of the store's memory; all bytes are proven against their checksums.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is no such version or leaf; `Corrupt` if bytes are damaged; `Invalid` if a
    /// slice does not fit its leaf.
    pub async fn get_state_dict(
        &self,
        key: &Key,
        options: &GetOptions,
    ) -> Result<(StateDict, GetReport)> {
        let version = self.version(key, options.version).await?;
        let (inner, options) = (self.0.clone(), options.clone());
        wait(move || {
            let mut read = Read::new(&version, &inner.plans);
            let dict = read.state_dict(&options)?;
            Ok((dict, read.report()))
        })
        .await
    }

    /// Reads into the caller's tensors, and allocates nothing of their size.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`]; `Invalid` also if a target overlaps itself or does not fit. All
    /// of that is found before a byte is written; if damage is found later,
    /// [`Error::is_target_modified`] says so.
    pub async fn get_state_dict_into(
        &self,
        key: &Key,
        targets: &mut [Target<'_>],
        options: &GetOptions,
    ) -> Result<GetReport> {
        if !options.slices.is_empty() {
            let text = "targets say themselves which slices they want; leave slices= empty";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let version = self.version(key, options.version).await?;
        let mut read = Read::new(&version, &self.0.plans);
        read.fill_targets(targets, options.writer)?;
        Ok(read.report())
    }

    /// Reads one tensor, whole.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`].
    pub async fn get(&self, key: &Key, fqn: &str, options: &GetOptions) -> Result<Tensor> {
        self.read_tensor(key, fqn, None, options).await
    }

    /// Reads one box of a tensor.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`].
    pub async fn get_slice(
        &self,
        key: &Key,
        fqn: &str,
        region: &Region,
        options: &GetOptions,
    ) -> Result<Tensor> {
        self.read_tensor(key, fqn, Some(region.clone()), options).await
    }

    async fn read_tensor(
        &self,
        key: &Key,
        fqn: &str,
        region: Option<Region>,
        options: &GetOptions,
    ) -> Result<Tensor> {
        let version = self.version(key, options.version).await?;
        let (inner, fqn, writer) = (self.0.clone(), fqn.to_owned(), options.writer);
        let read = move || Read::new(&version, &inner.plans).tensor(&fqn, region.as_ref(), writer);
        wait(read).await
    }

    /// The visible versions of a key, oldest first; none for a key that was never written.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        let state = self.0.controller.state(key).await?;
        Ok(state.visible().map(VersionInfo::of).collect())
    }

    /// The newest visible version of a key.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn head(&self, key: &Key) -> Result<Option<VersionInfo>> {
        let state = self.0.controller.state(key).await?;
        Ok(state.head().map(VersionInfo::of))
    }

    /// The keys that have a visible version, sorted; those that begin with `prefix`, if it is given.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if a ledger cannot be read.
    pub async fn keys(&self, prefix: Option<&str>) -> Result<Vec<Key>> {
        self.0.controller.keys(prefix.unwrap_or_default()).await
    }

    /// Whether a version of a key is visible; any version, if none is given.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn exists(&self, key: &Key, version: Option<u64>) -> Result<bool> {
        let state = self.0.controller.state(key).await?;
        Ok(state.version(selector(version)).is_some())
    }

    /// Deletes a version of a key, or all versions, open ones included; says how many there were.
    /// Readers that have one open keep it. Numbers are never used again.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn delete(&self, key: &Key, version: Option<u64>) -> Result<u64> {
        self.forget(key);
        let selection = version.map_or(Selection::All, Selection::Number);
        self.0.controller.delete(key, selection).await
    }

    /// How many of the newest versions of a key are kept from now on; 1 unless it is said.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn retain(&self, key: &Key, keep: NonZeroU32) -> Result<()> {
        let controller = &self.0.controller;
        controller.apply(key, Command::Retain { keep, ttl: None }).await?;
        controller.reclaim_owed(key).await
    }

    /// A version that is open already, or now.
    async fn version(&self, key: &Key, number: Option<u64>) -> Result<Arc<OpenVersion>> {
        let state = self.0.controller.state(key).await?;
        let wanted = state.version(selector(number)).map(|version| version.id);
        {
            let opened = self.opened();
            if let Some(version) = opened.get(key).filter(|opened| Some(opened.id) == wanted) {
                return Ok(version.clone());
            }
        }
        // What was replaced is let go before its successor is opened.
        self.forget(key);
        let version = Arc::new(self.0.controller.open(key, selector(number), state).await?);
        let mut opened = self.opened();
        if opened.len() >= MAX_OPENED {
            opened.pop_first();
        }
        opened.insert(key.clone(), version.clone());
        Ok(version)
    }

    /// Lets go of the version of a key that was read last.
    fn forget(&self, key: &Key) {
        self.opened().remove(key);
    }

    fn opened(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, Arc<OpenVersion>>> {
        self.0.opened.lock().expect("nobody panics while holding the open versions")
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}

impl VersionInfo {
    fn of(version: &Version) -> Self {
        let lens = version.contributions.values().map(|contribution| match contribution {
            Contribution::Committed { archive, .. } => archive.file_len,
            Contribution::Begun => 0,
        });
        let since = match version.status {
            Status::Visible { since, .. } => since,
            _ => Timestamp(0),
        };
        Self {
            number: version.number,
            epoch: version.epoch,
            id: version.id,
            bytes: lens.fold(0, u64::saturating_add),
            writers: version.writers.clone(),
            since,
        }
    }
}

/// The directory that an address names; none is memory.
fn path_of(url: &str) -> Result<Option<&Path>> {
    match url.split_once(':') {
        _ if url.is_empty() => {
            Err(Error::new(ErrorKind::Invalid, "the address of the store is empty"))
        }
        Some(("memory", "")) => Ok(None),
        Some(("file", path)) => Ok(Some(Path::new(path.strip_prefix("//").unwrap_or(path)))),
        Some((scheme @ ("unix" | "tls" | "s3" | "gs" | "az" | "http" | "https"), _)) => {
            Err(Error::new(
                ErrorKind::Invalid,
                format_args!("`{url}`: {scheme}: addresses cannot be reached yet; use a directory"),
            ))
        }
        _ => Ok(Some(Path::new(url))),
    }
}

fn unreachable_at(path: &Path, error: &std::io::Error) -> Error {
    let path = path.display();
    Error::new(ErrorKind::Unreachable, format_args!("no store at `{path}`: {error}"))
}

fn selector(version: Option<u64>) -> Selector {
    version.map_or(Selector::Newest, Selector::Number)
}

/// Runs something that takes long on a thread that may.
async fn wait<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::io("a thread of the store ended", std::io::Error::other(error)))?
}
