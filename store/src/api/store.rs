//! The store: state dicts by key, in immutable versions.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tssd_format::{Region, ShardSpec, StateDict, Tensor};

use super::follower::Follower;
use super::publisher::Publisher;
use super::reader::Opened;
use super::subscription::{POLL_TIMEOUT, Subscription};
use crate::control::{Controller, VersionInfo};
use crate::engine::context::Context;
use crate::engine::get::{GetOptions, GetReport, Read, Target, fill};
use crate::engine::put::{PendingPut, PutOptions, PutReport};
use crate::engine::ring::{self, Receiver};
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::key::Key;
use crate::ledger::{Selection, Selector, VersionId};
use crate::status::DaemonStatus;

/// A store of state dicts: in this process's memory, or in a directory that several processes share.
///
/// Each put makes a version or contributes to one; a version becomes visible in one step, complete,
/// and never changes. Cloning a store is cheap, and the clone is the same store.
///
/// Calls that read and write run on threads that may wait; [`Store::get_state_dict_into`] copies
/// before it returns, so that no one touches the caller's memory later.
///
/// # Panics
///
/// Its calls panic outside a tokio runtime with time and I/O enabled. [`crate::api::blocking::Store`] brings
/// one.
///
/// # Examples
///
/// ```
/// use tssd_format::{StateDict, Tensor};
/// use tssd_store::{GetOptions, Key, PutOptions, Store};
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
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
pub struct Store(pub(super) Arc<Context>);

impl Store {
    pub(crate) fn new(controller: impl Controller + 'static) -> Self {
        Self(Arc::new(Context::new(controller)))
    }

    /// Puts one writer's state dict: a version of its own, or its contribution to a version that
    /// becomes visible when all writers have put theirs.
    ///
    /// Returns when this writer's contribution is committed; the report says whether the version is
    /// visible, and else whose contributions are missing. What is to be in a daemon's bucket is visible before it is
    /// there; this returns when the contribution is.
    ///
    /// # Errors
    ///
    /// `Invalid` for what cannot be stored, with its path; `Refused` for what the ledger does not
    /// allow, with the way out; `Rejected` if this was the last contribution and they do not fit
    /// together; `Busy` after the timeout; `Io` if the disk fails or is full; `NotFound` if a host that kept another
    /// writer's contribution, or an earlier attempt of this one, has ended before the answer: put again in every
    /// writer. What was visible before stays so. A version that is visible and cannot be brought to the bucket stays so
    /// in memory; one that is late is brought there all the same.
    pub async fn put_state_dict(
        &self,
        key: &Key,
        dict: &StateDict,
        options: &PutOptions,
    ) -> Result<PutReport> {
        match options.residency.ring() {
            Some(ring) => Box::pin(ring::put(&self.0, key, dict, options, ring)).await,
            None => self.0.put(key, dict, options).await,
        }
    }

    /// As [`Store::put_state_dict`], but returns as soon as the state dict's memory is read no more, such as
    /// before a durable version is on disk. The put goes on by itself, whether or not it is waited for.
    ///
    /// # Errors
    ///
    /// Those of [`Store::put_state_dict`] that are found until then; [`PendingPut::wait`] gives the others.
    pub async fn put_state_dict_later(
        &self,
        key: &Key,
        dict: &StateDict,
        options: &PutOptions,
    ) -> Result<PendingPut> {
        if options.residency.ring().is_some() {
            // Its readers read the state dict's memory, or may still wait for room in the buckets.
            return Ok(PendingPut::ended(self.put_state_dict(key, dict, options).await?));
        }
        self.0.put_later(key, dict, options).await
    }

    /// Puts a state dict entry by entry, in archives of about `bucket_bytes` bytes: no more of it is held
    /// back than that. The version is visible in one step, at the end.
    ///
    /// # Errors
    ///
    /// `Invalid` for buckets of no bytes, and as [`Store::put_state_dict`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::Tensor;
    /// use tssd_store::{GetOptions, Key, PutOptions, Store};
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// let (store, key) = (Store::memory(), Key::new("policy")?);
    /// let mut publisher = store.publish(&key, &PutOptions::default(), 64 << 20)?;
    /// for layer in 0..4_u8 {
    ///     publisher.add(format!("layers.{layer}"), Tensor::from_slice(&[layer; 3], &[3])?).await?;
    /// }
    /// publisher.finish().await?;
    /// let mut opened = store.open(&key, &GetOptions::default()).await?;
    /// let mut names = Vec::new();
    /// while let Some((path, _)) = opened.next().await? {
    ///     names.push(path.fqn());
    /// }
    /// assert_eq!(names, ["layers.0", "layers.1", "layers.2", "layers.3"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn publish(&self, key: &Key, options: &PutOptions, bucket_bytes: u64) -> Result<Publisher> {
        Publisher::new(&self.0, key, options, bucket_bytes)
    }

    /// Opens a version to read it leaf by leaf. It stays there, whatever is put meanwhile, as long as
    /// this or something that was read of it does.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`].
    pub async fn open(&self, key: &Key, options: &GetOptions) -> Result<Opened> {
        let version = self.0.open(key, options).await?;
        Opened::new(self.0.clone(), version, options)
    }

    /// Copies a version into the memory of this host's daemon, while its reader still does something else: the
    /// get that follows, of the number that is returned, is local. Of the version, what is copied are the
    /// archives that hold the leaves that are wanted, or the parts of them; all, if none is named. It stays
    /// there until another version of the key is copied.
    ///
    /// # Errors
    ///
    /// `Invalid` if the store is not a daemon's of this host; `Unreachable` if a daemon that has the bytes is
    /// lost; `Busy` if there is no memory; else as [`Store::get_state_dict`].
    pub async fn prefetch(
        &self,
        key: &Key,
        wanted: &[(String, Option<ShardSpec>)],
        options: &GetOptions,
    ) -> Result<PrefetchReport> {
        let started = Instant::now();
        // What is looked at stays there until it is copied.
        let mut looked_at = None;
        let (selector, archives) = if wanted.is_empty() {
            (selector(options.version), None)
        } else {
            let version = &*looked_at.insert(self.0.open(key, options).await?);
            let mut read = Read::new(version, self.0.get(), options);
            let archives = read.archives_of(wanted, options.writer)?;
            (Selector::Id(version.id), Some(archives.into_iter().collect()))
        };
        let (version, id, bytes) = self.0.controller().prefetch(key, selector, archives).await?;
        let seconds = started.elapsed().as_secs_f64();
        Ok(PrefetchReport { version, id, bytes, seconds })
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
        let version = self.0.open(key, options).await?;
        let (context, options) = (self.0.clone(), options.clone());
        run_blocking(move || {
            let mut read = Read::new(&version, context.get(), &options);
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
        let version = self.0.open(key, options).await?;
        fill(&version, self.0.get(), targets, options, None)
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
        let version = self.0.open(key, options).await?;
        let (context, fqn, options) = (self.0.clone(), fqn.to_owned(), options.clone());
        let read = move || {
            let mut read = Read::new(&version, context.get(), &options);
            read.tensor(&fqn, region.as_ref(), options.writer)
        };
        run_blocking(read).await
    }

    /// The visible versions of a key, oldest first; none for a key that was never written.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        self.0.controller().versions(key).await
    }

    /// The newest visible version of a key.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn head(&self, key: &Key) -> Result<Option<VersionInfo>> {
        Ok(self.versions(key).await?.pop())
    }

    /// The keys that have a visible version, sorted; those that begin with `prefix`, if it is given.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if a ledger cannot be read.
    pub async fn keys(&self, prefix: Option<&str>) -> Result<Vec<Key>> {
        self.0.controller().keys(prefix.unwrap_or_default()).await
    }

    /// Whether a version of a key is visible; any version, if none is given.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn exists(&self, key: &Key, version: Option<u64>) -> Result<bool> {
        let versions = self.versions(key).await?;
        Ok(versions.iter().any(|each| version.is_none_or(|number| each.number == number)))
    }

    /// Deletes a version of a key, or all versions, open ones included; says how many there were.
    /// Readers that have one open keep it. Numbers are not used again, but where the ledger ended with what it was about:
    /// versions in the memory of a daemon that has ended.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn delete(&self, key: &Key, version: Option<u64>) -> Result<u64> {
        let selection = version.map_or(Selection::All, Selection::Number);
        self.0.controller().delete(key, selection).await
    }

    /// How many of the newest versions of a key are kept from now on; 1 unless it is said.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn retain(&self, key: &Key, keep: NonZeroU32) -> Result<()> {
        self.0.controller().retain(key, keep, None).await
    }

    /// Counts a put that this writer does not make. The n-th puts of all writers of a job contribute to one version, unless
    /// they have a number. Without this call, the next put of this writer would contribute to the skipped version.
    pub fn skip_put(&self, key: &Key, options: &PutOptions) {
        // Options without a sequence number need no count.
        let _ = self.0.put_sequences().next(key, options);
    }

    /// Waits until a version is visible whose number is `version` or higher, and returns the newest.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is none after `timeout`; else as [`Store::versions`].
    pub async fn wait_for_version(
        &self,
        key: &Key,
        version: u64,
        timeout: Duration,
    ) -> Result<VersionInfo> {
        let deadline = Instant::now().checked_add(timeout);
        let mut seen: Option<VersionInfo> = None;
        loop {
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            let id = seen.as_ref().map(|info| info.id);
            match self.0.controller().newer(key, id, left.min(POLL_TIMEOUT)).await? {
                Some(info) if info.number >= version => return Ok(info),
                Some(info) => seen = Some(info),
                None if left > POLL_TIMEOUT => {}
                None => {
                    let newest = match seen {
                        Some(info) => format!("the newest is {}", info.number),
                        None => "there is none".to_owned(),
                    };
                    return Err(Error::new(
                        ErrorKind::NotFound,
                        format_args!(
                            "key `{key}`: version {version} has not come for {timeout:?}; {newest}"
                        ),
                    ));
                }
            }
        }
    }

    /// The versions of a key as they become visible, from the newest one on.
    pub fn subscribe(&self, key: &Key) -> Subscription {
        Subscription::new(&self.0, key)
    }

    /// Every version of a key that becomes visible from now on, each held until it has been read: none is missed, as
    /// [`Store::subscribe`] may. What is not read stays in the memory of the daemon.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the store has no daemon, or one that does not decide alone; `Refused` for more than 64 keys.
    pub async fn follow(&self, key: &Key) -> Result<Follower> {
        Follower::new(&self.0, key).await
    }

    /// Receives what is put to a key with [`Residency::Ring`](crate::Residency::Ring) from now on: from a GPU, given by its UUID
    /// (`Device::uuid`), or, without one, from the host's memory. Such puts wait for this reader as
    /// long as the receiver is there.
    ///
    /// # Errors
    ///
    /// As [`Store::follow`].
    pub async fn receiver(&self, key: &Key, device: Option<&str>) -> Result<Receiver> {
        Receiver::new(&self.0, key, device).await
    }

    /// Lets a label hold a version, the newest if none is given, whose number is returned: it stays
    /// whatever is kept. What the label held before, it holds no longer.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is no such version; `Io` if the store cannot be written.
    pub async fn pin(&self, key: &Key, version: Option<u64>, label: &str) -> Result<u64> {
        self.0.controller().pin(key, selector(version), label).await
    }

    /// Lets a label hold its version no longer.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        self.0.controller().unpin(key, label).await
    }

    /// The labels of a key, each with the number of the version that it holds.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        self.0.controller().pins(key).await
    }

    /// Whether the daemon can be asked still; true where there is none. A connection that is lost does not come back:
    /// connect again, which finds the daemon that was started since.
    pub fn is_connected(&self) -> bool {
        self.0.controller().is_open()
    }

    /// How the daemon of the store is.
    ///
    /// # Errors
    ///
    /// `Invalid` if the store has none.
    pub async fn status(&self) -> Result<DaemonStatus> {
        self.0.controller().status().await
    }
}

/// What a prefetch has done.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrefetchReport {
    /// The number of the version.
    pub version: u64,
    /// Its identity.
    pub id: VersionId,
    /// How many bytes came from other hosts: those of whole archives.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}

fn selector(version: Option<u64>) -> Selector {
    version.map_or(Selector::Newest, Selector::Number)
}
