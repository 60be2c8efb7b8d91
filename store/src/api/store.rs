//! The store: state dicts in immutable versions, by key.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use tssd_format::{Region, StateDict, Tensor};

use super::follower::Follower;
use super::publisher::Publisher;
use super::reader::VersionReader;
use super::subscription::Subscription;
use crate::control::{Controller, PrefetchedVersion, VersionInfo};
use crate::engine::context::Context;
use crate::engine::get::{GetOptions, GetReport, LeafPart, Read, Target, fill};
use crate::engine::put::{PendingPut, PutOptions, PutReport};
use crate::engine::ring::{self, Receiver};
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::key::Key;
use crate::ledger::{Label, Selection, Selector, VersionId};
use crate::status::DaemonStatus;

/// A store of state dicts: in this process's memory, in a directory or bucket, or in a daemon.
///
/// Each put makes a version or contributes to one. A version becomes visible in one step, complete,
/// and never changes. A clone is cheap and is the same store.
///
/// Reads and writes run on threads that may block. [`Store::get_state_dict_into`] copies before it
/// returns, so that the caller's memory is not accessed later.
///
/// # Panics
///
/// Its methods panic outside a tokio runtime with time and I/O enabled.
/// [`crate::api::blocking::Store`] has a runtime of its own.
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

    /// Puts the state dict of one writer: a version of its own, or its contribution to a version.
    ///
    /// A version of several writers becomes visible when all of them have put their contributions.
    /// This call returns when the contribution of this writer is committed. The report says whether
    /// the version is visible, and otherwise which contributions are missing.
    ///
    /// With [`Durability::Object`](crate::Durability::Object), the version may be visible before it
    /// is in the bucket. This call returns when the contribution is in the bucket.
    ///
    /// # Errors
    ///
    /// - `Invalid` for a value that cannot be stored, with its path.
    /// - `Refused` if the ledger does not allow the put, with the remedy.
    /// - `Rejected` if this was the last contribution and the contributions do not fit together.
    /// - `Busy` after the timeout.
    /// - `Io` if the disk fails or is full.
    /// - `NotFound` if a host that stored another writer's contribution, or an earlier attempt of
    ///   this one, ended before the response. Put again in every writer.
    ///
    /// Versions that were visible before stay visible. If a visible version cannot be uploaded to
    /// the bucket, it stays visible in memory. An upload that exceeds the timeout continues.
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

    /// As [`Store::put_state_dict`], but returns as soon as the memory of the state dict is no
    /// longer read.
    ///
    /// That may be before a durable version is on disk. The put continues in the background,
    /// whether or not the caller waits for it.
    ///
    /// # Errors
    ///
    /// Those errors of [`Store::put_state_dict`] that are found until then. [`PendingPut::wait`]
    /// returns the others.
    pub async fn put_state_dict_later(
        &self,
        key: &Key,
        dict: &StateDict,
        options: &PutOptions,
    ) -> Result<PendingPut> {
        if options.residency.ring().is_some() {
            // The readers read the state dict's memory, or the put may still wait for free buckets.
            return Ok(PendingPut::from_report(self.put_state_dict(key, dict, options).await?));
        }
        self.0.put_later(key, dict, options).await
    }

    /// Puts a state dict entry by entry, in archives of about `bucket_bytes` bytes.
    ///
    /// No more than that is held back. The version becomes visible in one step, at the end.
    ///
    /// # Errors
    ///
    /// `Invalid` if `bucket_bytes` is 0; as [`Store::put_state_dict`].
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

    /// Opens a version to read it leaf by leaf.
    ///
    /// The version stays available as long as the returned value, or a value that was read from it,
    /// exists. Later puts do not affect it.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`].
    pub async fn open(&self, key: &Key, options: &GetOptions) -> Result<VersionReader> {
        let version = self.0.open(key, options).await?;
        VersionReader::new(self.0.clone(), version, options)
    }

    /// Copies a version into the memory of this host's daemon, while the reader does other work.
    ///
    /// A following get of the returned version number is local. `wanted` names leaves, or parts of
    /// them: only the archives that contain these are copied. If it is empty, all are. The copy
    /// stays until another version of the key is prefetched.
    ///
    /// # Errors
    ///
    /// - `Invalid` if the store is not in a daemon of this host.
    /// - `Unreachable` if a daemon that has the bytes is lost.
    /// - `Busy` if there is not enough memory.
    /// - As [`Store::get_state_dict`].
    pub async fn prefetch(
        &self,
        key: &Key,
        wanted: &[LeafPart],
        options: &GetOptions,
    ) -> Result<PrefetchReport> {
        let started = Instant::now();
        // Its lease keeps the version available until it is copied.
        let mut opened = None;
        let (selector, archives) = if wanted.is_empty() {
            (options.version.clone(), None)
        } else {
            let version = &*opened.insert(self.0.open(key, options).await?);
            let mut read = Read::new(version, self.0.get(), options);
            let archives = read.archives_of(wanted)?;
            (Selector::Id(version.id), Some(archives.into_iter().collect()))
        };
        let PrefetchedVersion { number: version, id, size, bytes, base } =
            self.0.controller().prefetch(key, selector, archives).await?;
        let seconds = started.elapsed().as_secs_f64();
        Ok(PrefetchReport { version, id, bytes, size, base, seconds })
    }

    /// Reads a state dict: whole, or with the slices that the options select.
    ///
    /// Leaves that are contiguous in the store are views of its memory. All bytes are verified
    /// against their checksums.
    ///
    /// # Errors
    ///
    /// `NotFound` if the version or leaf does not exist; `Corrupt` if bytes are damaged; `Invalid`
    /// if a slice does not fit its leaf.
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

    /// Reads into the caller's tensors, and allocates no memory of their size.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`]; `Invalid` also if a target overlaps itself or does not fit.
    /// All of these are found before a byte is written. If damage is found later,
    /// [`Error::is_target_modified`] is true.
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

    /// Reads a whole tensor.
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

    /// Returns the visible versions of a key, oldest first. A key that was never written has none.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        self.0.controller().versions(key).await
    }

    /// Returns the newest visible version of a key.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn head(&self, key: &Key) -> Result<Option<VersionInfo>> {
        Ok(self.versions(key).await?.pop())
    }

    /// Returns the keys that have a visible version, sorted.
    ///
    /// With `prefix`, only those that begin with it.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if a ledger cannot be read.
    pub async fn keys(&self, prefix: Option<&str>) -> Result<Vec<Key>> {
        self.0.controller().keys(prefix.unwrap_or_default()).await
    }

    /// Returns whether a version of a key is visible, or pinned by a label that selects it.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn exists(&self, key: &Key, version: impl Into<Selector>) -> Result<bool> {
        Ok(match version.into() {
            Selector::Newest => !self.versions(key).await?.is_empty(),
            Selector::Number(number) => {
                self.versions(key).await?.iter().any(|each| each.number == number)
            }
            Selector::Id(id) => self.versions(key).await?.iter().any(|each| each.id == id),
            Selector::Label(label) => self.pins(key).await?.contains_key(label.as_str()),
        })
    }

    /// Deletes one version of a key, or all, and returns how many were deleted.
    ///
    /// `None` selects all. A pinned version is no longer visible, but its label still selects it.
    ///
    /// Versions that are not visible yet are deleted too. Readers keep the versions that they have
    /// open. Numbers are not reused, unless the ledger is lost with its versions, as in the memory
    /// of a daemon that has ended.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn delete(&self, key: &Key, versions: impl Into<Selection>) -> Result<u64> {
        self.0.controller().delete(key, versions.into()).await
    }

    /// Sets how many of the newest versions of a key are retained. The default is 1.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn retain(&self, key: &Key, keep: NonZeroU32) -> Result<()> {
        self.0.controller().retain(key, keep, None).await
    }

    /// Counts a put that this writer does not make.
    ///
    /// The n-th puts of all writers of a job contribute to one version, unless they have a number.
    /// Without this call, the next put of this writer would contribute to the skipped version.
    pub fn skip_put(&self, key: &Key, options: &PutOptions) {
        // Options without a sequence number need no count.
        let _ = self.0.writer_process().next_sequence(key, options);
    }

    /// Subscribes to the versions of a key, from the newest one on.
    pub fn subscribe(&self, key: &Key) -> Subscription {
        Subscription::new(&self.0, key)
    }

    /// Follows a key: every version that becomes visible from now on is held until it is read.
    ///
    /// No version is skipped, unlike with [`Store::subscribe`]. Versions that are not read stay in
    /// the memory of the daemon.
    ///
    /// # Errors
    ///
    /// `Unsupported` without a daemon, or if the daemon is not the only controller; `Refused` for
    /// more than 64 keys.
    pub async fn follow(&self, key: &Key) -> Result<Follower> {
        Follower::new(&self.0, key).await
    }

    /// Receives what is put to a key with [`Residency::Ring`](crate::Residency::Ring) from now on.
    ///
    /// It receives from the GPU with the UUID `device` (`Device::uuid`), or from host memory if
    /// that is none. Such puts wait for this reader as long as the receiver exists.
    ///
    /// # Errors
    ///
    /// As [`Store::follow`].
    pub async fn receiver(&self, key: &Key, device: Option<&str>) -> Result<Receiver> {
        Receiver::new(&self.0, key, device).await
    }

    /// Pins a version with a label: the newest if none is given. Returns its number.
    ///
    /// Retention keeps a pinned version. A label pins one version: the version that it pinned
    /// before is released. A label is accepted wherever a version is selected.
    ///
    /// # Errors
    ///
    /// `NotFound` if the version does not exist; `Invalid` if the text is no [`Label`]; `Io` if the
    /// store cannot be written.
    pub async fn pin(&self, key: &Key, version: impl Into<Selector>, label: &str) -> Result<u64> {
        let label = Label::new(label).map_err(|error| {
            Error::new(ErrorKind::Invalid, format_args!("label `{label}`: {error}"))
        })?;
        self.0.controller().pin(key, version.into(), &label).await
    }

    /// Makes an old version the newest one: it gets the next number, in a new epoch.
    ///
    /// No bytes move. The version no longer has its old number. Waiters, subscribers and followers
    /// get it as a new version. Retention applies as after a put, and versions that are open are
    /// dropped. If the version is the newest one already, nothing changes.
    ///
    /// # Errors
    ///
    /// `NotFound` if the version does not exist; `Refused` while it is being uploaded to a bucket;
    /// `Io` if the store cannot be written.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::num::NonZeroU32;
    ///
    /// use tssd_format::{StateDict, Value};
    /// use tssd_store::{GetOptions, Key, PutOptions, Store};
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// let (store, key) = (Store::memory(), Key::new("policy")?);
    /// store.retain(&key, NonZeroU32::new(3).unwrap()).await?;
    /// for step in 1..=3_i64 {
    ///     let mut dict = StateDict::new();
    ///     dict.insert("step", step);
    ///     store.put_state_dict(&key, &dict, &PutOptions::default()).await?;
    /// }
    /// let newest = store.rollback(&key, 1).await?;
    /// assert_eq!((newest.epoch, newest.number), (1, 4));
    /// let (dict, report) = store.get_state_dict(&key, &GetOptions::default()).await?;
    /// assert_eq!((dict.entries().get("step"), report.version), (Some(&Value::from(1_i64)), 4));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn rollback(&self, key: &Key, to: impl Into<Selector>) -> Result<VersionInfo> {
        self.0.controller().rollback(key, to.into()).await
    }

    /// Removes a label, and with it the pin of its version.
    ///
    /// # Errors
    ///
    /// `Io` if the store cannot be written.
    pub async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        self.0.controller().unpin(key, label).await
    }

    /// Returns the labels of a key, each with the number of the version that it pins.
    ///
    /// # Errors
    ///
    /// `Io` or `Corrupt` if the ledger cannot be read.
    pub async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        self.0.controller().pins(key).await
    }

    /// Returns whether the connection to the daemon is open; true without a daemon.
    ///
    /// A lost connection is not restored. Connect again to reach a daemon that was started since.
    pub fn is_connected(&self) -> bool {
        self.0.controller().is_open()
    }

    /// Returns the status of the daemon.
    ///
    /// # Errors
    ///
    /// `Invalid` if the store has no daemon.
    pub async fn status(&self) -> Result<DaemonStatus> {
        self.0.controller().status().await
    }
}

/// The result of a prefetch.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrefetchReport {
    /// The number of the version.
    pub version: u64,
    /// The id of the version.
    pub id: VersionId,
    /// Bytes received from other hosts, encoded as they came.
    pub bytes: u64,
    /// Size in bytes of the archives that were not on this host.
    pub size: u64,
    /// Number of the version from which they came as differences. `None` if they came whole.
    pub base: Option<u64>,
    /// Duration in seconds.
    pub seconds: f64,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}
