//! Cached replicas of archives of other daemons that clients of this host read.
//!
//! Each byte is read from the other daemon once. A replica stays until its version is deleted or the memory is
//! needed.

mod bases;
mod partial;
mod progress;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tssd_format::Archive;

use crate::control::layout::{folder_of, version_number};
use crate::daemon::control_plane::ControlPlane;
use crate::daemon::delta_base::{DeltaBase, retain_versions};
use crate::daemon::read_encoder::ReadEncoder;
use crate::daemon::remote_blobs::{BucketSource, ReadEncodings, RemoteBlobIndex};
pub(crate) use crate::daemon::replicas::partial::MIN_SHARED_BYTES;
use crate::daemon::replicas::partial::{PartialReplica, ReplicaBuffer, Waiting};
use crate::daemon::replicas::progress::FetchProgress;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::parallel;
use crate::io::sync::{Lock, MutexGuard, boxed};
use crate::key::Key;
use crate::net::client::Announcement;
use crate::net::wire::{MAX_INLINE_BYTES, Range, ReadChecksum};
use crate::shm::{Evictor, Pool, PoolExhausted, Retain};
use crate::status::{MAX_STATUSES, ReplicaStatus};

/// Minimum length in bytes of the runs of a strided read that are cached.
///
/// The records of shorter runs take more memory than the runs.
const MIN_CACHED_RUN: u64 = 256;

/// Interval at which replicas of versions that are no longer visible are removed.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum time that a read waits for the list of visible versions.
const VERSIONS_TIMEOUT: Duration = Duration::from_secs(1);

/// Time after a failed allocation of a replica in which it is not tried again.
const ALLOCATION_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Cached replicas of archives of other daemons.
pub(crate) struct Replicas {
    pool: Arc<Pool>,
    remote_blobs: Arc<RemoteBlobIndex>,
    encoder: Arc<ReadEncoder>,
    /// Whether archives come as differences from earlier ones.
    deltas: bool,
    inner: Lock<Inner>,
    /// Excludes evictions while the replicas of this host are recorded in a ledger.
    eviction_lock: AsyncMutex<()>,
    /// Notified when a replica is complete, or is removed.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct Inner {
    /// Replicas that are incomplete, by name.
    partial: BTreeMap<String, Arc<PartialReplica>>,
    /// Incomplete replicas of versions that are no longer visible. Later versions come as differences from them.
    replaced: BTreeMap<String, Arc<PartialReplica>>,
    /// Complete replicas, which are in the pool.
    complete: BTreeMap<String, CompleteReplica>,
    /// Archives for which there was no memory, and the time of the attempt.
    allocation_failures: BTreeMap<String, Instant>,
    next_number: u64,
}

/// A replica that is in the pool.
struct CompleteReplica {
    /// Gives the order of completion.
    number: u64,
    len: u64,
    progress: Arc<FetchProgress>,
    /// The archive from which it came as differences, as long as other daemons may ask for the same.
    base: Option<Arc<dyn DeltaBase>>,
}

/// Progress of the fetches of the archives of a version.
struct VersionProgress {
    /// Size of the archives.
    bytes: u64,
    present_bytes: u64,
    senders: BTreeMap<String, u64>,
    /// From the begin of the first fetch to the end of the last one.
    span: ops::Range<Instant>,
    /// Number of the version from which they came as differences.
    base: Option<u64>,
    /// Bytes per second of the fetches that run, if one does.
    rate: Option<u64>,
    is_slow: bool,
}

impl VersionProgress {
    fn new(span: ops::Range<Instant>) -> Self {
        let (senders, rate) = (BTreeMap::new(), None);
        Self { bytes: 0, present_bytes: 0, senders, span, base: None, rate, is_slow: false }
    }

    fn status(self, key: &Key, version: u64) -> ReplicaStatus {
        let Self { bytes, present_bytes, senders, span, base, rate, is_slow } = self;
        let duration = span.end.saturating_duration_since(span.start);
        let mean = || progress::rate(senders.values().sum(), duration);
        let bytes_per_second = rate.unwrap_or_else(mean);
        let key = key.to_string();
        ReplicaStatus {
            key,
            version,
            bytes,
            present_bytes,
            senders,
            base,
            bytes_per_second,
            is_slow,
            duration,
        }
    }
}

impl Inner {
    /// Removes an incomplete replica that is not being completed. Returns whether there was one.
    fn drop_partial(&mut self, may_evict: impl Fn(&String) -> bool) -> bool {
        let mut partial = self.partial.iter().filter(|(_, replica)| !replica.is_rest_requested());
        let name = partial.find(|(name, _)| may_evict(name)).map(|(name, _)| name.clone());
        let removed = name.and_then(|name| self.partial.remove(&name));
        removed.inspect(|replica| replica.evict()).is_some()
    }
}

impl Replicas {
    /// Creates the cache. If `deltas` is true, archives come as differences from earlier ones.
    pub(crate) fn new(pool: Arc<Pool>, remote_blobs: Arc<RemoteBlobIndex>, deltas: bool) -> Self {
        let (inner, eviction_lock) = (Lock::default(), AsyncMutex::default());
        let encoder = Arc::new(ReadEncoder::new(pool.clone()));
        let changed = Notify::new();
        Self { pool, remote_blobs, encoder, deltas, inner, eviction_lock, changed }
    }

    /// Returns the encoder of the bytes that other daemons read. `None` if they go as they are.
    pub(crate) fn encoder(&self) -> Option<&Arc<ReadEncoder>> {
        Some(&self.encoder).filter(|_| self.deltas)
    }

    /// Returns the bytes of memory of the differences between earlier versions.
    pub(crate) fn delta_bytes(&self) -> u64 {
        self.encoder.history().bytes()
    }

    /// Returns the pool that contains the complete replicas.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Returns the index of the blobs of other daemons.
    pub(crate) fn remote_blobs(&self) -> &RemoteBlobIndex {
        &self.remote_blobs
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Reads ranges of an archive of other daemons, through the cache.
    ///
    /// If `verify` is true, the sender verifies the chunks that contain the ranges, and the result has the checksum of
    /// the data. If `waits_for_shared_fetch` is false, bytes that are fetched from other fetchers are fetched from a
    /// holder too.
    /// Returns `None` if the archive is in the pool.
    ///
    /// # Errors
    ///
    /// As [`RemoteBlobIndex::read`].
    pub(crate) async fn read(
        self: &Arc<Self>,
        name: &str,
        ranges: &[Range],
        verify: bool,
        waits_for_shared_fetch: bool,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        let replica = if ranges.iter().any(is_fine_grained) { None } else { self.partial(name) };
        let waiting = if waits_for_shared_fetch { Waiting::All } else { Waiting::Holders };
        if let Some(replica) = replica {
            let read = replica.read(&self.remote_blobs, ranges, verify, waiting).await?;
            if let Some(read) = read {
                if replica.claim_rest() {
                    let replicas = self.clone();
                    drop(tokio::spawn(boxed(async move {
                        if let Err(error) = replicas.fetch_rest(&replica).await {
                            tracing::debug!(name = replica.name, %error, "its rest did not come");
                        }
                    })));
                }
                return Ok(Some(read));
            }
            self.wait_until_published(&replica).await;
            if self.pool.span(name).is_some() {
                return Ok(None);
            }
        }
        // This read is not cached.
        let encodings = ReadEncodings::default();
        let read = self.remote_blobs.read(name, ranges, verify, &encodings).await?;
        Ok(Some((read.data, read.checksum)))
    }

    /// Reads ranges of an archive of which they are here. Returns `None` if they are not, or if the archive is complete.
    ///
    /// # Errors
    ///
    /// `Invalid` if a range is outside of the archive.
    pub(crate) async fn read_fetched(
        &self,
        name: &str,
        ranges: &[Range],
        verify: bool,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        let Some(replica) = self.partial(name) else { return Ok(None) };
        if replica.is_taken() {
            // It is verified and goes to the pool.
            self.wait_until_published(&replica).await;
            return Ok(None);
        }
        if ranges.iter().any(is_fine_grained) {
            return Ok(None);
        }
        replica.read_present(ranges, verify).await
    }

    /// Returns a bit for each piece of an archive: whether all that readers want of it is here. Empty if none is.
    pub(crate) fn present_pieces(&self, name: &str) -> Vec<u8> {
        self.partial(name).map_or_else(Vec::new, |replica| replica.present_pieces())
    }

    /// Has ranges of an archive fetched that readers of this host will read, if it has memory allocated.
    pub(crate) fn request_ranges(&self, name: &str, ranges: &[Range]) {
        let cached: Vec<Range> =
            ranges.iter().filter(|range| !is_fine_grained(range)).cloned().collect();
        if let Some(replica) = self.partial(name) {
            replica.request_ranges(&self.remote_blobs, &cached);
        }
    }

    /// Restores an archive of `len` bytes from the bucket, together with the other daemons that do. It has memory
    /// allocated.
    ///
    /// Returns the number of bytes that this daemon has read from the bucket.
    ///
    /// # Errors
    ///
    /// As [`Replicas::complete`].
    pub(crate) async fn restore(
        self: &Arc<Self>,
        name: &str,
        len: u64,
        source: Arc<BucketSource>,
    ) -> Result<u64> {
        self.remote_blobs.add_bucket(name, source.clone(), len);
        let completed = self.complete(name).await;
        self.remote_blobs.remove_bucket(name);
        completed.map(|()| source.read_bytes())
    }

    /// Returns the versions of which this daemon has replicas, or fetches them, in the order in which the fetches began.
    ///
    /// The last [`MAX_STATUSES`] are returned.
    pub(crate) fn statuses(&self, now: Instant) -> Vec<ReplicaStatus> {
        let floor = self.remote_blobs.min_fetch_rate();
        let mut versions: BTreeMap<(Key, u64), VersionProgress> = BTreeMap::new();
        let inner = self.inner();
        let partial = inner.partial.iter().map(|(name, replica)| {
            (name, replica.len(), replica.present_bytes(), &replica.progress)
        });
        let complete = inner.complete.iter();
        let complete =
            complete.map(|(name, replica)| (name, replica.len, replica.len, &replica.progress));
        for (name, len, present_bytes, progress) in partial.chain(complete) {
            let Some(version) = blob_key(name).zip(blob_version(name)) else { continue };
            let (started, ended) = progress.span(now);
            let new = || VersionProgress::new(started..ended);
            let sum = versions.entry(version).or_insert_with(new);
            sum.bytes += len;
            sum.present_bytes += present_bytes;
            for (sender, bytes) in progress.senders() {
                *sum.senders.entry(sender).or_default() += bytes;
            }
            sum.span = sum.span.start.min(started)..sum.span.end.max(ended);
            if let Some(rate) = progress.rate(now) {
                *sum.rate.get_or_insert(0) += rate;
            }
            sum.base = sum.base.max(progress.base());
            sum.is_slow |= floor.is_some_and(|floor| progress.is_below(floor, now));
        }
        drop(inner);
        let mut versions: Vec<_> = versions.into_iter().collect();
        versions.sort_by_key(|(_, version)| version.span.start);
        versions.drain(..versions.len().saturating_sub(MAX_STATUSES));
        let status =
            |((key, number), version): ((Key, u64), VersionProgress)| version.status(&key, number);
        versions.into_iter().map(status).collect()
    }

    /// Returns how many bytes were received for an archive, and the version from which they came as differences.
    pub(crate) fn fetched(&self, name: &str) -> Option<(u64, Option<u64>)> {
        let inner = self.inner();
        let complete = inner.complete.get(name).map(|replica| &replica.progress);
        let progress = complete.or_else(|| Some(&inner.partial.get(name)?.progress))?;
        Some((progress.senders().values().sum(), progress.base()))
    }

    fn partial(&self, name: &str) -> Option<Arc<PartialReplica>> {
        self.inner().partial.get(name).cloned()
    }

    /// Whether an archive is in the pool, or has memory allocated.
    fn is_allocated(&self, name: &str) -> bool {
        self.inner().partial.contains_key(name) || self.pool.span(name).is_some()
    }

    /// Allocates memory for a replica of `len` bytes, unless it has memory already or is in the pool.
    pub(crate) fn allocate(
        &self,
        name: &str,
        len: u64,
    ) -> io::Result<std::result::Result<(), PoolExhausted>> {
        let mut inner = self.inner();
        if inner.partial.contains_key(name) || self.pool.span(name).is_some() {
            return Ok(Ok(()));
        }
        let small = usize::try_from(len).ok().filter(|_| len <= MAX_INLINE_BYTES.into());
        let memory = match small {
            Some(len) => ReplicaBuffer::Heap(vec![0; len]),
            None => match self.pool.begin_sparse_blob(len)? {
                Ok(writing) => ReplicaBuffer::Segment(writing),
                Err(exhausted) => return Ok(Err(exhausted)),
            },
        };
        let base = if self.deltas { self.find_base(&inner, name, len) } else { None };
        let encodings = ReadEncodings { base, planes: self.deltas, base_only: false };
        let name = name.to_owned();
        let encoder = self.encoder.clone();
        let replica = PartialReplica::new(name.clone(), len, memory, encodings, encoder);
        let replica = Arc::new(replica);
        inner.partial.insert(name, replica);
        Ok(Ok(()))
    }

    /// Reads the missing bytes of a replica that [`Replicas::allocate`] has allocated, and verifies it.
    ///
    /// # Errors
    ///
    /// As [`RemoteBlobIndex::read`]; `Corrupt` if the archive is damaged; `Busy` if there is no memory for it, or if it was
    /// deleted meanwhile.
    pub(crate) async fn complete(self: &Arc<Self>, name: &str) -> Result<()> {
        match self.partial(name) {
            Some(replica) => {
                // An incomplete replica is not evicted once its rest is requested.
                replica.request_rest();
                self.fetch_rest(&replica).await
            }
            None if self.pool.span(name).is_some() => Ok(()),
            None => Err(Self::incomplete_error(name)),
        }
    }

    fn incomplete_error(name: &str) -> Error {
        let text = format_args!("`{name}` did not come whole; get it again");
        Error::new(ErrorKind::Corrupt, text)
    }

    /// Reads the missing bytes of a replica, verifies it and publishes it in the pool.
    async fn fetch_rest(self: &Arc<Self>, replica: &Arc<PartialReplica>) -> Result<()> {
        let complete = replica.complete(&self.remote_blobs).await;
        complete.inspect_err(|_| replica.cancel_rest())?;
        if let Some(memory) = replica.take_buffer() {
            // Once the archive is here, its registries may be forgotten.
            let registries = self.remote_blobs.registries(&replica.name);
            let is_restored = self.remote_blobs.bucket(&replica.name).is_some();
            let (replicas, name) = (self.clone(), replica.name.clone());
            let published = run_blocking(move || replicas.publish(&name, memory)).await;
            let number = self.next_number();
            let mut inner = self.inner();
            if inner.partial.get(&replica.name).is_some_and(|it| Arc::ptr_eq(it, replica)) {
                inner.partial.remove(&replica.name);
            }
            match published {
                // The deletion takes effect with the last lease of the version.
                Ok(true) if is_restored => self.pool.delete(&replica.name),
                Ok(true) => {
                    let (len, progress) = (replica.len(), replica.progress.clone());
                    progress.end(Instant::now());
                    let base = replica.take_base();
                    let complete = CompleteReplica { number, len, progress, base };
                    inner.complete.insert(replica.name.clone(), complete);
                    // It is an evict candidate now.
                    self.pool.freed.notify_waiters();
                }
                _ => {}
            }
            drop(inner);
            for registry in registries.into_iter().filter(|_| published.is_ok()) {
                let (remote_blobs, name) = (self.remote_blobs.clone(), replica.name.clone());
                let (parts, present_bytes) = (Arc::default(), replica.len());
                let announcement =
                    Announcement { parts, is_complete: true, present_bytes, known: 0 };
                drop(tokio::spawn(boxed(async move {
                    // Daemons that come later then fetch it from here too.
                    let _ = remote_blobs.announce(&registry, &name, announcement).await;
                })));
            }
            self.changed.notify_waiters();
            return published.map(drop);
        }
        self.wait_until_published(replica).await;
        if self.pool.span(&replica.name).is_some() {
            return Ok(());
        }
        Err(Self::incomplete_error(&replica.name))
    }

    /// Waits until a replica with all bytes is published or removed.
    async fn wait_until_published(&self, replica: &Arc<PartialReplica>) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.partial(&replica.name).is_none_or(|it| !Arc::ptr_eq(&it, replica)) {
                return;
            }
            changed.await;
        }
    }

    /// Verifies an archive and publishes it under its name. Returns false if the pool has another one.
    fn publish(&self, name: &str, memory: ReplicaBuffer) -> Result<bool> {
        let failed = |error| Error::io(name, error);
        // Until it is verified, the archive has a name that belongs to no key.
        let unverified = format!("fetch/{}", self.next_number());
        match memory {
            ReplicaBuffer::Heap(bytes) => {
                let written = self.pool.write(&unverified, &bytes).map_err(failed)?;
                written.map_err(|exhausted| Error::new(ErrorKind::Busy, exhausted))?;
            }
            ReplicaBuffer::Segment(writing) => writing.publish(&unverified).map_err(failed)?,
        }
        let verified = self.verify(&unverified, name);
        let is_published = verified.is_ok() && self.pool.rename(&unverified, name);
        if !is_published {
            self.pool.delete(&unverified);
        }
        verified?;
        if self.pool.span(name).is_none() {
            let text = format_args!("`{name}` was deleted meanwhile");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        // The archive may have been restored from the bucket meanwhile. It is the same, and it is not a replica.
        Ok(is_published)
    }

    /// Returns a unique number.
    fn next_number(&self) -> u64 {
        let mut inner = self.inner();
        inner.next_number += 1;
        inner.next_number
    }

    /// Verifies the blob `blob`, which is the archive `name`.
    fn verify(&self, blob: &str, name: &str) -> Result<()> {
        let failed = |error| Error::from_format(name, error);
        let opened = self.pool.open(blob).map_err(|error| Error::io(name, error))?;
        let opened = opened.ok_or_else(|| {
            Error::new(ErrorKind::Busy, format_args!("`{name}` was deleted meanwhile"))
        })?;
        let archive = Archive::from_blob(opened.blob).map_err(failed)?;
        parallel::map(archive.verify_jobs(), |job| job.run()).map(drop).map_err(failed)
    }

    /// Whether a blob in the pool is a cached replica.
    pub(crate) fn is_replica(&self, name: &str) -> bool {
        self.inner().complete.contains_key(name)
    }

    /// Returns the names of the blobs in the pool that are not pending deletion, for one key or for all.
    pub(crate) fn retained_names(&self, key: Option<&Key>) -> BTreeSet<String> {
        let prefix = key.map_or_else(String::new, |key| format!("{}/", key.to_path()));
        let mut names = self.pool.names(&prefix);
        names.retain(|name| !self.pool.is_pending_delete(name));
        names.into_iter().collect()
    }

    /// Runs a future that records the replicas of this host. No replica is evicted meanwhile.
    pub(crate) async fn without_eviction<T>(&self, work: impl Future<Output = T>) -> T {
        let _guard = self.eviction_lock.lock().await;
        work.await
    }

    /// Evicts a replica. Returns whether there was one to evict.
    ///
    /// The candidates, in this order:
    ///
    /// 1. an archive of a deleted version that is retained to make deltas;
    /// 2. an incomplete replica without a reader;
    /// 3. the oldest complete replica without a reader;
    /// 4. if `must` is true, an incomplete replica with readers. They read the rest without the cache.
    pub(crate) async fn evict_one(&self, must: bool, control_plane: &dyn ControlPlane) -> bool {
        // No eviction while the replicas are recorded in a ledger.
        let _guard = self.eviction_lock.lock().await;
        if self.pool.free_one_retained()
            || self.evict_base()
            || self.inner().replaced.pop_first().is_some()
        {
            return true;
        }
        loop {
            let (name, key) = {
                let mut inner = self.inner();
                let is_idle = |name: &String| !self.pool.is_held(name);
                if inner.drop_partial(is_idle) {
                    return true;
                }
                let oldest = inner.complete.iter().filter(|(name, _)| is_idle(name));
                let Some((name, _)) = oldest.min_by_key(|(_, replica)| replica.number) else {
                    return must && inner.drop_partial(|_| true);
                };
                (name.clone(), blob_key(name))
            };
            let may_evict = match key {
                Some(key) => control_plane.release_replica(&key, &name).await,
                None => Ok(true),
            };
            match may_evict {
                Ok(may_evict) => {
                    // If no other daemon stores the archive, this copy is no longer a replica and must stay.
                    self.inner().complete.remove(&name);
                    if may_evict {
                        self.pool.delete(&name);
                        return true;
                    }
                }
                Err(error) => {
                    tracing::warn!(name, %error, "it is kept, because nobody can be asked");
                    return false;
                }
            }
        }
    }

    /// Evicts the memory of a durable archive without a reader. Returns whether there was one.
    ///
    /// The archive is in the directory or in the bucket too. Later reads use that copy.
    async fn evict_durable(&self, control_plane: &dyn ControlPlane) -> bool {
        let _guard = self.eviction_lock.lock().await;
        let keys: BTreeSet<Key> =
            self.pool.names("").iter().filter_map(|name| blob_key(name)).collect();
        for key in keys {
            let Ok(durable) = control_plane.durable_archives(&key).await else { continue };
            let idle = durable
                .into_iter()
                .find(|name| self.pool.is_evictable(name) && !self.is_replica(name));
            if let Some(name) = idle {
                self.pool.delete(&name);
                return true;
            }
        }
        false
    }

    /// As [`Pool::with_memory`], but evicts replicas and durable archives before it waits.
    pub(crate) async fn with_memory<T>(
        &self,
        control_plane: &dyn ControlPlane,
        cancelled: impl Future<Output = ()>,
        work: impl FnMut(&Arc<Pool>) -> io::Result<std::result::Result<T, PoolExhausted>>,
    ) -> io::Result<std::result::Result<T, PoolExhausted>> {
        let evictor = ReplicaEvictor { replicas: self, control_plane };
        self.pool.with_memory(cancelled, &evictor, work).await
    }

    /// Prepares to cache an archive: allocates memory for a replica if there is enough.
    ///
    /// Without memory, reads of the archive are not cached.
    pub(crate) async fn prepare(&self, name: &str, len: u64, control_plane: &dyn ControlPlane) {
        if self.is_allocated(name) || self.allocation_failed_recently(name) {
            return;
        }
        if self.deltas {
            retain_versions(&self.pool, name, Retain::Last);
        }
        if let Some(key) = blob_key(name)
            && self.is_first_of_its_version(name)
        {
            // Replicas of the versions that this one replaces are removed first, so that their memory is reused.
            let _ =
                tokio::time::timeout(VERSIONS_TIMEOUT, self.remove_replaced(&key, control_plane))
                    .await;
        }
        let allocated = loop {
            match self.allocate(name, len) {
                Ok(Err(exhausted))
                    if exhausted.wanted <= exhausted.limit
                        && self.evict_one(false, control_plane).await => {}
                allocated => break allocated,
            }
        };
        let why = match allocated {
            Ok(Ok(())) => return,
            Ok(Err(exhausted)) => exhausted.to_string(),
            Err(error) => error.to_string(),
        };
        tracing::debug!(name, why, "what is read of it is not kept");
        self.inner().allocation_failures.insert(name.to_owned(), Instant::now());
    }

    /// Whether there was no memory for an archive a moment ago.
    fn allocation_failed_recently(&self, name: &str) -> bool {
        let mut inner = self.inner();
        inner.allocation_failures.retain(|_, since| since.elapsed() < ALLOCATION_RETRY_DELAY);
        inner.allocation_failures.contains_key(name)
    }

    /// Forgets all replicas. Used when the control plane has restarted and does not know them.
    pub(crate) fn clear(&self) {
        let before = std::mem::take(&mut *self.inner());
        before.partial.values().for_each(|replica| replica.evict());
        self.changed.notify_waiters();
    }

    /// Returns the names of all replicas, incomplete ones included.
    fn names(&self) -> Vec<String> {
        let inner = self.inner();
        inner.partial.keys().chain(inner.complete.keys()).cloned().collect()
    }

    /// Whether there is no replica yet of the version that contains an archive.
    fn is_first_of_its_version(&self, name: &str) -> bool {
        self.names().iter().all(|other| version_folder(other) != version_folder(name))
    }

    /// Removes the replicas of versions of a key that are no longer visible.
    async fn remove_replaced(&self, key: &Key, control_plane: &dyn ControlPlane) {
        let names = self.names().into_iter().filter(|name| blob_key(name).as_ref() == Some(key));
        let names: Vec<String> = names.collect();
        if names.is_empty() {
            return;
        }
        // Without an answer, the versions may still be visible.
        let Ok(versions) = control_plane.versions(key).await else { return };
        let visible = versions.iter().map(|it| folder_of(key, it.stored_position(), it.id));
        let visible: BTreeSet<String> = visible.collect();
        for name in names {
            if version_folder(&name).is_some_and(|folder| !visible.contains(folder)) {
                self.remove_replica(&name);
            }
        }
    }

    /// Removes a replica. Its memory is freed when it has no reader.
    fn remove_replica(&self, name: &str) {
        let mut inner = self.inner();
        if !self.pool.is_held(name)
            && let Some(replica) = inner.partial.remove(name)
        {
            replica.evict();
            if self.deltas {
                inner.keep_as_base(replica);
            }
        }
        let was_complete = inner.complete.remove(name).is_some();
        drop(inner);
        if was_complete {
            self.pool.delete(name);
        }
        self.changed.notify_waiters();
    }
}

/// Evicts replicas, with the consent of the control plane, and memory of durable archives.
struct ReplicaEvictor<'a> {
    replicas: &'a Replicas,
    control_plane: &'a dyn ControlPlane,
}

#[async_trait]
impl Evictor for ReplicaEvictor<'_> {
    async fn evict_one(&self) -> bool {
        let Self { replicas, control_plane } = *self;
        replicas.evict_one(false, control_plane).await
            || replicas.evict_durable(control_plane).await
            || replicas.evict_one(true, control_plane).await
    }
}

/// Removes replicas of versions that are no longer visible at each interval, and derives deltas when they can be.
pub(crate) async fn maintain(replicas: Arc<Replicas>, control_plane: Arc<dyn ControlPlane>) {
    let mut interval = tokio::time::interval(MAINTENANCE_INTERVAL);
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            () = replicas.pool.wait_for_retained() => {
                replicas.derive_deltas().await;
                continue;
            }
        }
        let keys: BTreeSet<Key> =
            replicas.names().iter().filter_map(|name| blob_key(name)).collect();
        for key in keys {
            replicas.remove_replaced(&key, &*control_plane).await;
        }
        replicas.maintain_bases(&*control_plane).await;
        replicas.derive_deltas().await;
    }
}

/// Returns whether the runs of a range are too short to be cached.
fn is_fine_grained(range: &Range) -> bool {
    !range.2.is_empty() && range.1 < MIN_CACHED_RUN
}

/// Returns the folder of the version that contains an archive.
fn version_folder(name: &str) -> Option<&str> {
    name.rsplit_once('/').map(|(folder, _)| folder)
}

/// Returns the number of the version of an archive or manifest, from its name in the volume.
pub(crate) fn blob_version(name: &str) -> Option<u64> {
    version_number(version_folder(name)?)
}

/// Returns the key of an archive or manifest, from its name in the volume.
pub(crate) fn blob_key(name: &str) -> Option<Key> {
    let (key, _) = version_folder(name)?.rsplit_once('/')?;
    Key::from_path(key)
}
