//! Replicates versions from memory to a bucket, and restores them from there.
//!
//! The bucket is a complete store with its own ledger, so the uploaded versions can be read without the daemon. A
//! copy has the id, the epoch, the number and the bytes of the original version.

mod chains;
#[cfg(test)]
#[cfg(feature = "object")]
mod fault_tests;
mod reconcile;
mod upload;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

pub use self::chains::BucketDeltas;
use self::chains::{EncodedContribution, UploadChains};
use self::upload::Upload;
pub(crate) use self::upload::UploadReceiver;
use crate::blob::{OpenArchive, Volume};
use crate::control::{ArchivePlacement, CommittedContribution};
use crate::daemon::bucket_sync::reconcile::reconcile;
use crate::daemon::rate_limiter::RateLimiter;
use crate::daemon::remote_blobs::BucketSource;
use crate::daemon::replicas::{MIN_SHARED_BYTES, Replicas};
use crate::engine::address::open_shared_store;
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::SystemEnvironment;
use crate::io::exec::{backoff, run_blocking};
use crate::io::sync::{AsyncMutex, Lock, MutexGuard, boxed, watch};
use crate::key::Key;
use crate::ledger::{Refusal, Selector, VersionId};
use crate::metadata::Ledgers;
use crate::net::tls::Endpoint;
use crate::net::wire::Failure;
use crate::shm::{BlobWriter, Pool};
use crate::status::UploadStatus;

/// Maximum number of versions of a key that are uploaded or queued. A put of another version waits.
const MAX_PENDING_VERSIONS: usize = 2;

/// Number of tries to record in the ledger that a version is not stored.
const NOT_STORED_TRIES: u32 = 10;

/// Maximum number of concurrent uploads.
const MAX_UPLOADS: usize = 4;

/// Time to wait for the memory of a version that is restored.
const MEMORY_TIMEOUT: Duration = Duration::from_mins(1);

/// Maximum number of archives of a version that are restored together with other daemons at the same time.
const MAX_RESTORES: usize = 4;

/// Number of daemons that list those that restore a blob.
///
/// A daemon that is started later may become one of them. The other one still knows all.
const REGISTRIES: usize = 2;

/// Time to wait for the list of daemons. Without it, a blob is restored alone.
const HOSTS_TIMEOUT: Duration = Duration::from_secs(2);

/// Number of tries to restore blobs while other tasks restore blobs of the same version.
const RESTORE_TRIES: u32 = 3;

/// Time for which a request to the bucket is retried. After that the whole upload is retried.
const REQUEST_RETRY_TIMEOUT: Duration = Duration::from_secs(20);

/// The bucket of a daemon.
pub(crate) struct Bucket {
    pub(crate) ledgers: Arc<dyn Ledgers>,
    pub(crate) volume: Arc<dyn Volume>,
    /// The address of the bucket, for messages.
    pub(crate) url: String,
}

impl Bucket {
    /// Opens the bucket at the address of a store in a bucket, or at `file:DIR`.
    ///
    /// # Errors
    ///
    /// `Invalid` if `url` is not such an address; `Unreachable` if there is no bucket.
    pub(crate) fn open(url: &str) -> Result<Self> {
        let (ledgers, volume) = open_shared_store(url, REQUEST_RETRY_TIMEOUT)?;
        Ok(Self { ledgers, volume, url: url.to_owned() })
    }

    /// Returns a controller of the store in the bucket.
    pub(crate) fn controller(&self) -> LocalController {
        let (ledgers, volume) = (self.ledgers.clone(), self.volume.clone());
        LocalController::new(ledgers, volume, Arc::new(SystemEnvironment))
    }
}

/// Replicates versions of a daemon to a bucket, and restores them from there.
pub(crate) struct BucketReplicator {
    bucket: LocalController,
    /// The address of the bucket, for messages.
    bucket_url: String,
    /// The controller of the original versions.
    local: LocalController,
    pool: Arc<Pool>,
    /// Evicted if a restore needs memory.
    replicas: Arc<Replicas>,
    rate_limiter: Arc<RateLimiter>,
    /// The contributions that were uploaded last.
    chains: Arc<UploadChains>,
    /// Uploads of each key. The first of a queue is running.
    queues: Lock<BTreeMap<Key, VecDeque<Arc<Upload>>>>,
    /// Permits for concurrent uploads: each upload has its own threads and parts.
    upload_permits: Semaphore,
    /// Serializes the synchronization of ledgers with the bucket.
    sync_lock: AsyncMutex<()>,
    /// Keys whose last synchronization has not completed.
    unsynced: Lock<BTreeSet<Key>>,
    /// Changes when an upload has ended. The value is the number of ended uploads.
    ended: watch::Sender<u64>,
    /// Restores in progress.
    restoring: Lock<BTreeMap<VersionId, RestoreReceiver>>,
    counts: Lock<ReplicatorCounts>,
}

/// How versions are uploaded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UploadOptions {
    /// Maximum rate, for all uploads together.
    pub(crate) bytes_per_second: Option<u64>,
    pub(crate) deltas: BucketDeltas,
}

/// Receives the result of a restore.
type RestoreReceiver = watch::Receiver<Option<Result<(), Failure>>>;

/// Reason to restore a blob from the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RestoreReason {
    /// No daemon has the blob.
    NoReplica,
    /// The daemons that have the blob did not answer.
    Unreachable,
}

impl RestoreReason {
    pub(crate) const ALL: [Self; 2] = [Self::NoReplica, Self::Unreachable];
}

impl fmt::Display for RestoreReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoReplica => "no_replica",
            Self::Unreachable => "unreachable",
        })
    }
}

/// Counters since the start of the daemon.
#[derive(Clone, Default)]
pub(crate) struct ReplicatorCounts {
    pub(crate) uploads: u64,
    pub(crate) uploaded_bytes: u64,
    /// Failed tries of uploads.
    pub(crate) failures: u64,
    /// Uploads that were given up.
    pub(crate) given_up: u64,
    pub(crate) restored_bytes: BTreeMap<RestoreReason, u64>,
}

impl BucketReplicator {
    /// Creates a replicator from the versions of `own` to a bucket.
    pub(crate) fn new(
        bucket: LocalController,
        shown: String,
        own: LocalController,
        replicas: Arc<Replicas>,
        options: UploadOptions,
    ) -> Arc<Self> {
        let UploadOptions { bytes_per_second, deltas } = options;
        Arc::new(Self {
            bucket,
            bucket_url: shown,
            local: own,
            pool: replicas.pool().clone(),
            chains: Arc::new(UploadChains::new(replicas.clone(), deltas)),
            replicas,
            rate_limiter: Arc::new(RateLimiter::new(bytes_per_second)),
            queues: Lock::default(),
            upload_permits: Semaphore::new(MAX_UPLOADS),
            sync_lock: AsyncMutex::default(),
            unsynced: Lock::default(),
            ended: watch::channel(0).0,
            restoring: Lock::default(),
            counts: Lock::default(),
        })
    }

    fn queues(&self) -> MutexGuard<'_, BTreeMap<Key, VecDeque<Arc<Upload>>>> {
        self.queues.lock()
    }

    fn lock_counts(&self) -> MutexGuard<'_, ReplicatorCounts> {
        self.counts.lock()
    }

    pub(crate) fn counts(&self) -> ReplicatorCounts {
        self.lock_counts().clone()
    }

    /// Returns the status of all running and queued uploads.
    pub(crate) fn uploads(&self) -> Vec<UploadStatus> {
        self.queues().values().flatten().map(|upload| upload.status()).collect()
    }

    /// Waits until another version of a key may be put.
    ///
    /// # Errors
    ///
    /// `Busy` at the deadline, or if `is_wanted` returns false.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        key: &Key,
        deadline: Instant,
        is_wanted: impl Fn() -> bool,
    ) -> Result<()> {
        if self.chains.is_enabled() {
            // The version that the put replaces is the base of its upload.
            self.replicas.retain_base(key);
        }
        self.enqueue_unstored(key).await?;
        let mut ended = self.ended.subscribe();
        loop {
            // One upload of each version.
            let mut pending: Vec<Arc<Upload>> = Vec::new();
            for upload in self.queues().get(key).into_iter().flatten() {
                if pending.iter().all(|other| other.id() != upload.id()) {
                    pending.push(upload.clone());
                }
            }
            if pending.len() < MAX_PENDING_VERSIONS {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !is_wanted() {
                let pending: Vec<String> =
                    pending.iter().map(|upload| upload.status().to_string()).collect();
                let text = format_args!(
                    "`{}` is behind: {}. Wait, or put versions in memory meanwhile",
                    self.bucket_url,
                    pending.join("; ")
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
            let wait = left.min(Duration::from_millis(100));
            // After a timeout the condition is checked again too.
            let _ = tokio::time::timeout(wait, ended.changed()).await;
        }
    }

    /// Encodes the archives of a contribution as deltas. Returns `None` if they must be uploaded whole.
    async fn encode(
        &self,
        contributed: &Arc<CommittedContribution>,
    ) -> Result<Option<EncodedContribution>> {
        let (chains, contributed) = (self.chains.clone(), contributed.clone());
        run_blocking(move || chains.encode(&contributed)).await
    }

    /// Enqueues the committed contributions of a key that are not queued.
    ///
    /// Their clients did not receive the reply to the commit.
    async fn enqueue_unstored(self: &Arc<Self>, key: &Key) -> Result<()> {
        for contributed in self.local.pending_uploads(key).await? {
            let names = contributed.paths();
            if !names.is_empty() && names.iter().all(|name| self.pool.span(name).is_some()) {
                drop(self.enqueue(contributed));
            }
        }
        Ok(())
    }

    /// Enqueues the upload of a committed contribution, and returns the receiver of its result.
    ///
    /// The upload does not depend on the receiver. If the contribution is queued already, the call adds nothing.
    pub(crate) fn enqueue(self: &Arc<Self>, contributed: CommittedContribution) -> UploadReceiver {
        let mut queues = self.queues();
        let key = contributed.placement.key.clone();
        let queue = queues.entry(key.clone()).or_default();
        if let Some(queued) =
            queue.iter().find(|upload| upload.is_upload_of(&contributed.placement))
        {
            return queued.subscribe();
        }
        let upload = Arc::new(Upload::new(contributed, self.pool.clone()));
        // In the order of the versions, after the running upload, which may wait for the versions before its own.
        let before =
            queue.iter().skip(1).take_while(|other| other.order() <= upload.order()).count();
        queue.insert(queue.len().min(1 + before), upload.clone());
        if queue.len() == 1 {
            drop(tokio::spawn(boxed(self.clone().run_queue(key))));
        }
        upload.subscribe()
    }

    /// Runs the uploads of a key one after the other.
    ///
    /// The versions become visible in the bucket in the same order as here.
    async fn run_queue(self: Arc<Self>, key: Key) {
        loop {
            let next = self.queues().get(&key).and_then(|queue| queue.front().cloned());
            let Some(next) = next else { return };
            let stored = next.run(&self).await;
            {
                let mut counts = self.lock_counts();
                match &stored {
                    Ok(_) => {
                        counts.uploads += 1;
                        counts.uploaded_bytes += next.bytes();
                    }
                    Err(_) => counts.given_up += 1,
                }
            }
            if let Err(error) = &stored {
                tracing::error!(%key, version = next.number(), %error, "not stored");
                self.mark_not_stored(&key, next.id()).await;
            }
            next.finish(stored);
            let is_last = {
                let mut queues = self.queues();
                let queue = queues.get_mut(&key).map(|queue| {
                    queue.pop_front();
                    queue.is_empty()
                });
                // The next upload of the key starts a new task.
                queue.is_none_or(|is_empty| is_empty && queues.remove(&key).is_some())
            };
            self.ended.send_modify(|count| *count += 1);
            if is_last {
                return;
            }
        }
    }

    /// Records that a version will not be in the bucket. Then it is retained as a version in memory.
    async fn mark_not_stored(&self, key: &Key, id: VersionId) {
        for tries in 1..NOT_STORED_TRIES {
            match self.local.mark_not_stored(key, id).await {
                Err(error) if error.kind() == ErrorKind::Unreachable => backoff(tries).await,
                _ => return,
            }
        }
    }

    /// Returns the committed contribution of a writer to a version.
    ///
    /// Its archives have other names than those of `place` if an earlier try committed it.
    pub(crate) async fn find_committed(
        &self,
        place: &ArchivePlacement,
    ) -> Result<Option<CommittedContribution>> {
        let mut all = self.local.pending_uploads(&place.key).await?.into_iter();
        Ok(all.find(|it| (it.placement.id, it.placement.writer) == (place.id, place.writer)))
    }

    /// Waits until no upload is running or queued.
    pub(crate) async fn wait_idle(&self) {
        let mut ended = self.ended.subscribe();
        while !self.queues().is_empty() {
            // `self` owns the sender, so the channel stays open.
            let _ = ended.changed().await;
        }
    }

    /// Whether a version of a key is in the bucket, or may be.
    pub(crate) async fn has_versions(&self, key: &Key) -> Result<bool> {
        if self.unsynced().contains(key) || self.queues().contains_key(key) {
            return Ok(true);
        }
        let state = self.local.state(key).await?;
        Ok(state.versions().any(|version| version.uploaded || version.is_upload_pending()))
    }

    fn unsynced(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.unsynced.lock()
    }

    /// Applies the retention, the pins and the deletions of a key to the bucket.
    pub(crate) async fn sync(&self, key: &Key) -> Result<()> {
        let _guard = self.sync_lock.lock().await;
        self.unsynced().insert(key.clone());
        self.reconcile_key(key).await?;
        self.unsynced().remove(key);
        Ok(())
    }

    async fn reconcile_key(&self, key: &Key) -> Result<()> {
        // The bucket is read first: a version that is open there was already in the ledger here.
        let remote = self.bucket.state(key).await?;
        let own = self.local.state(key).await?;
        for command in reconcile(&own, &remote) {
            match self.bucket.apply(key, command).await {
                // The version is no longer in the bucket.
                Err(error) if matches!(error.refusal(), Some(Refusal::NotFound { .. })) => {}
                done => drop(done?),
            }
        }
        self.bucket.run_pending_deletions(key).await
    }

    /// Restores blobs of a leased version into memory.
    pub(crate) async fn restore(
        self: &Arc<Self>,
        key: &Key,
        id: VersionId,
        mut names: Vec<(String, RestoreReason)>,
    ) -> Result<()> {
        // Another task may be restoring other blobs of the same version. Then these are left for the next try.
        for _ in 0..RESTORE_TRIES {
            names.retain(|(name, _)| self.pool.span(name).is_none());
            if names.is_empty() {
                break;
            }
            self.restore_once(key, id, names.clone()).await?;
        }
        Ok(())
    }

    /// Restores blobs of a version, or waits for the restore of that version that is in progress.
    async fn restore_once(
        self: &Arc<Self>,
        key: &Key,
        id: VersionId,
        names: Vec<(String, RestoreReason)>,
    ) -> Result<()> {
        let mut restored = {
            let mut restoring = self.restoring();
            let begin = || {
                let (done, restored) = watch::channel(None);
                let (replicator, key) = (self.clone(), key.clone());
                tokio::spawn(boxed(async move {
                    let outcome =
                        replicator.copy_to_memory(&key, id, names).await.map_err(Failure::from);
                    replicator.restoring().remove(&id);
                    done.send_replace(Some(outcome));
                }));
                restored
            };
            restoring.entry(id).or_insert_with(begin).clone()
        };
        let done = restored.wait_for(Option::is_some).await;
        let done = done.map_err(|error| {
            Error::io("what came from the bucket", std::io::Error::other(error))
        })?;
        match &*done {
            Some(Err(failure)) => Err(failure.clone().into()),
            _ => Ok(()),
        }
    }

    fn restoring(&self) -> MutexGuard<'_, BTreeMap<VersionId, RestoreReceiver>> {
        self.restoring.lock()
    }

    /// Returns the error for a version whose archives are missing in the bucket.
    async fn missing_error(&self, key: &Key, id: VersionId) -> Result<Error> {
        let shown = &self.bucket_url;
        let remote = self.bucket.state(key).await?;
        if remote.version(&Selector::Id(id)).is_some() {
            let text = format_args!("`{shown}` lacks archives of version {id} of `{key}`");
            return Ok(Error::new(ErrorKind::Corrupt, text));
        }
        let text = format_args!(
            "`{key}`: the version was replaced in `{shown}` while it came from there: read the newest, or keep \
             more of them"
        );
        Ok(Error::new(ErrorKind::Overtaken, text))
    }

    /// Copies blobs from the bucket into memory.
    async fn copy_to_memory(
        &self,
        key: &Key,
        id: VersionId,
        names: Vec<(String, RestoreReason)>,
    ) -> Result<()> {
        let opened = {
            let names: Vec<String> = names.iter().map(|(name, _)| name.clone()).collect();
            self.bucket.run_on_volume(move |volume| volume.open_all(&names)).await?
        };
        let Some(opened) = opened else { return Err(self.missing_error(key, id).await?) };
        // An earlier restore may have copied some of them.
        let missing = names.into_iter().zip(opened);
        let missing = missing.filter(|((name, _), _)| self.pool.span(name).is_none());
        let missing: Vec<_> = missing.collect();
        // Memory for all blobs is allocated first: two restores that hold part of their memory could deadlock.
        let (deadline, mut allocated) = (tokio::time::Instant::now() + MEMORY_TIMEOUT, Vec::new());
        let hosts = self.restoring_hosts().await;
        for ((name, reason), archived) in missing {
            let failed =
                |error| Error::io(format_args!("`{name}` of `{}`", self.bucket_url), error);
            let len = archived.blob().size().map_err(failed)?;
            let is_shared = hosts.len() > 1 && len >= MIN_SHARED_BYTES;
            let timeout = tokio::time::sleep_until(deadline);
            let write = |pool: &Arc<Pool>| {
                if is_shared {
                    return Ok(self.replicas.allocate(&name, len)?.map(|()| None));
                }
                Ok(pool.begin_blob(len)?.map(Some))
            };
            let writing = self.replicas.with_memory(&self.local, timeout, write).await;
            let writing = writing.map_err(failed)?.map_err(|exhausted| {
                let text = format_args!(
                    "no memory for a version of `{key}` that comes back from `{}`: {exhausted}; wait until others \
                     are done, or serve with a higher memory limit",
                    self.bucket_url
                );
                Error::new(ErrorKind::Busy, text)
            })?;
            allocated.push((name, reason, archived, writing, len));
        }
        let (mut restores, permits) = (JoinSet::new(), Arc::new(Semaphore::new(MAX_RESTORES)));
        let (mut outcome, since) = (Ok(()), Instant::now());
        for (name, reason, archived, writing, len) in allocated {
            let Some(writing) = writing else {
                let source = Arc::new(self.bucket_source(&name, &archived, &hosts, since).await);
                let (replicas, permits) = (self.replicas.clone(), permits.clone());
                restores.spawn(boxed(async move {
                    let _permit = permits.acquire_owned().await;
                    replicas.restore(&name, len, source).await.map(|bytes| (reason, bytes))
                }));
                continue;
            };
            outcome = self.copy_blob(name, archived, writing).await;
            if outcome.is_err() {
                break;
            }
            self.count_restored(reason, len);
        }
        // All of them, also after an error: each has its bucket recorded until it ends.
        while let Some(restored) = restores.join_next().await {
            let failed = |error| Error::io(&self.bucket_url, std::io::Error::other(error));
            match restored.map_err(failed).and_then(|restored| restored) {
                Ok((reason, bytes)) => self.count_restored(reason, bytes),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    fn count_restored(&self, reason: RestoreReason, bytes: u64) {
        *self.lock_counts().restored_bytes.entry(reason).or_default() += bytes;
    }

    /// Copies a blob from the bucket into memory of the pool.
    async fn copy_blob(
        &self,
        name: String,
        archived: OpenArchive,
        mut writing: BlobWriter,
    ) -> Result<()> {
        let pool = self.pool.clone();
        self.bucket
            .run_on_volume(move |_| {
                let failed = |error| Error::io(&name, error);
                archived.blob().read_exact_at(writing.bytes_mut(), 0).map_err(failed)?;
                match writing.publish(&name) {
                    // The deletion takes effect with the last lease of the version.
                    Ok(()) => pool.delete(&name),
                    // The blob was copied from another daemon meanwhile.
                    Err(_) if pool.span(&name).is_some() => {}
                    Err(error) => return Err(failed(error)),
                }
                Ok(())
            })
            .await
    }

    /// Returns the addresses of the daemons that have the same bucket. Fewer than two: blobs are restored alone.
    async fn restoring_hosts(&self) -> Vec<Endpoint> {
        let hosts = tokio::time::timeout(HOSTS_TIMEOUT, self.local.hosts()).await;
        let hosts = hosts.ok().and_then(Result::ok).unwrap_or_default();
        hosts.iter().filter_map(|host| host.address.parse().ok()).collect()
    }

    /// Returns the source of a blob that this daemon restores together with other daemons.
    ///
    /// A host that has answered at or after `since` is not probed again.
    async fn bucket_source(
        &self,
        name: &str,
        archived: &OpenArchive,
        hosts: &[Endpoint],
        since: Instant,
    ) -> BucketSource {
        // All daemons find the same ones first.
        let hash =
            |host: &&Endpoint| *blake3::hash(format!("{name}\0{host}").as_bytes()).as_bytes();
        let mut hosts: Vec<&Endpoint> = hosts.iter().collect();
        hosts.sort_by_cached_key(hash);
        let remote_blobs = self.replicas.remote_blobs();
        let mut registries = Vec::new();
        for host in hosts {
            if remote_blobs.own() == Some(host) || remote_blobs.is_reachable(host, since).await {
                registries.push(host.clone());
            }
            if registries.len() == REGISTRIES {
                break;
            }
        }
        BucketSource::new(archived.to_blob(), registries)
    }
}
