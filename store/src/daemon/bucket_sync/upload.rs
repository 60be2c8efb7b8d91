//! The upload of one contribution to the bucket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{BucketReplicator, EncodedContribution};
use crate::blob::Volume;
use crate::control::{ArchivePlacement, CommittedContribution, Progress};
use crate::daemon::tiered::write_durable;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::backoff;
use crate::io::sync::{Lock, watch};
use crate::ledger::{Refusal, Version, VersionId, WriterSet};
use crate::net::wire::Failure;
use crate::shm::Pool;
use crate::status::UploadStatus;

/// Time to wait for conflicting versions in the bucket.
const OPEN_TIMEOUT: Duration = Duration::from_mins(1);

/// Interval at which an upload by another process is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Receives the result of an upload.
pub(crate) type UploadReceiver = watch::Receiver<Option<Result<Progress, Failure>>>;

/// The upload of one contribution to the bucket.
pub(crate) struct Upload {
    contributed: Arc<CommittedContribution>,
    pool: Arc<Pool>,
    /// Names of its archives, held in the pool until the drop.
    names: Vec<String>,
    since: Instant,
    /// Bytes sent in the current try, and bytes to send.
    sent: Arc<AtomicU64>,
    total: AtomicU64,
    /// Number of failed tries, and the last error.
    failed: Lock<(u32, String)>,
    outcome: watch::Sender<Option<Result<Progress, Failure>>>,
}

impl Upload {
    /// Creates an upload and holds its archives in the pool.
    pub(crate) fn new(contributed: CommittedContribution, pool: Arc<Pool>) -> Self {
        let names = contributed.paths();
        pool.hold(&names);
        let total = contributed.lens.iter().copied().fold(0, u64::saturating_add);
        Self {
            contributed: Arc::new(contributed),
            pool,
            names,
            since: Instant::now(),
            sent: Arc::default(),
            total: AtomicU64::new(total),
            failed: Lock::default(),
            outcome: watch::channel(None).0,
        }
    }

    /// Returns a receiver of the result.
    pub(crate) fn subscribe(&self) -> UploadReceiver {
        self.outcome.subscribe()
    }

    /// Whether this is the upload of the contribution at a placement.
    pub(crate) fn is_upload_of(&self, place: &ArchivePlacement) -> bool {
        let own = &self.contributed.placement;
        (own.id, own.writer) == (place.id, place.writer)
    }

    pub(crate) fn id(&self) -> VersionId {
        self.contributed.placement.id
    }

    /// Returns epoch and number, which order the versions of a key.
    pub(crate) fn order(&self) -> (u32, u64) {
        (self.contributed.placement.epoch, self.contributed.placement.number)
    }

    pub(crate) fn number(&self) -> u64 {
        self.contributed.placement.number
    }

    /// Returns the number of bytes to send: those of all archives, unless they are sent as deltas.
    pub(crate) fn bytes(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    pub(crate) fn status(&self) -> UploadStatus {
        let (tries, error) = self.failed.lock().clone();
        UploadStatus {
            key: self.contributed.placement.key.to_string(),
            version: self.number(),
            writer: self.contributed.placement.writer,
            bytes: self.bytes(),
            sent: self.sent.load(Ordering::Relaxed),
            failures: tries,
            error: Some(error).filter(|error| !error.is_empty()),
            age: self.since.elapsed(),
        }
    }

    /// Sends the result to all receivers.
    pub(crate) fn finish(&self, stored: Result<Progress>) {
        self.outcome.send_replace(Some(stored.map_err(Failure::from)));
    }

    /// Uploads the contribution. Retries until it succeeds or fails with a final error.
    pub(crate) async fn run(&self, replicator: &BucketReplicator) -> Result<Progress> {
        let mut tries = 0;
        loop {
            let error = match self.try_once(replicator).await {
                Ok(progress) => return Ok(progress),
                Err(error) => error,
            };
            if is_final(&error) {
                return Err(error);
            }
            tries += 1;
            replicator.lock_counts().failures += 1;
            let ArchivePlacement { key, number, .. } = &self.contributed.placement;
            tracing::warn!(%key, version = number, tries, %error, "it is tried again");
            *self.failed.lock() = (tries, error.to_string());
            backoff(tries).await;
        }
    }

    /// Returns the version from the ledger of the daemon.
    ///
    /// # Errors
    ///
    /// `Overtaken` if the version was deleted or lost.
    async fn wanted_version(&self, replicator: &BucketReplicator) -> Result<Version> {
        let ArchivePlacement { key, id, number, .. } = &self.contributed.placement;
        let state = replicator.local.state(key).await?;
        let version = state.versions().find(|version| version.id == *id);
        let wanted = version.filter(|version| version.is_open() || version.is_visible());
        wanted.cloned().ok_or_else(|| {
            let text = format_args!("key `{key}`: version {number} was deleted, or is lost");
            Error::new(ErrorKind::Overtaken, text)
        })
    }

    /// Waits until another daemon has uploaded the contribution.
    ///
    /// That daemon has the archives from an earlier try of the put.
    async fn wait_for_other_upload(&self, replicator: &BucketReplicator) -> Result<Progress> {
        loop {
            let version = self.wanted_version(replicator).await?;
            if version.uploaded || !version.is_upload_pending() {
                let (visible, missing) = (version.uploaded, version.missing());
                return Ok(Progress { visible, missing });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Runs one try of the upload.
    async fn try_once(&self, replicator: &BucketReplicator) -> Result<Progress> {
        let CommittedContribution { placement, writers, digest, lens } = &*self.contributed;
        let version = self.wanted_version(replicator).await?;
        if version.uploaded {
            return Ok(Progress { visible: true, missing: WriterSet::default() });
        }
        if self.names.iter().any(|name| replicator.pool.span(name).is_none()) {
            return self.wait_for_other_upload(replicator).await;
        }
        let _permit = replicator
            .upload_permits
            .acquire()
            .await
            .map_err(|error| Error::io("the daemon ends", std::io::Error::other(error)))?;
        // The bucket must have the current retention before a version is added.
        replicator.sync(&placement.key).await?;
        let (copy, committed) =
            replicator.bucket.open_copy(placement, writers.clone(), OPEN_TIMEOUT).await?;
        let (mut encoded, is_committed) = (None, committed.is_some());
        if !is_committed {
            encoded = replicator.encode(&self.contributed).await?;
            self.sent.store(0, Ordering::Relaxed);
            let raw_bytes = lens.iter().copied().fold(0, u64::saturating_add);
            let bytes = encoded.as_ref().map_or(raw_bytes, EncodedContribution::bytes);
            self.total.store(bytes, Ordering::Relaxed);
            for number in 0..lens.len() {
                let to = copy.path(number);
                let Some(encoded) = &encoded else {
                    self.copy_archive(replicator, number, to).await?;
                    continue;
                };
                let bytes = encoded.archives[number].clone();
                self.write(replicator, to, bytes).await.inspect_err(|error| {
                    if error.kind() == ErrorKind::Busy {
                        // The next try uploads the archives whole.
                        replicator.chains.forget(&self.contributed);
                    }
                })?;
            }
        }
        self.wanted_version(replicator).await?;
        let base = encoded.as_ref().map(|encoded| encoded.base);
        let committed = replicator.bucket.commit_stored(&copy, *digest, lens, base).await;
        if base.is_some() && committed.is_err() {
            replicator.chains.forget(&self.contributed);
        }
        if let Err(error) = &committed
            && matches!(error.refusal(), Some(Refusal::BaseDeleted { .. }))
        {
            // The next try uploads the archives whole.
            return Err(Error::new(ErrorKind::Busy, error));
        }
        let progress = committed?;
        if is_committed {
            // How an earlier try, or another daemon, has stored the archives is known only if it is recorded.
            replicator.chains.forget_other_versions(&self.contributed);
        } else {
            replicator.chains.record(&self.contributed, encoded.as_ref());
        }
        if progress.visible {
            let stored = replicator.local.mark_stored(&placement.key, placement.id).await;
            // Removes the versions that it replaces in the bucket, and the version itself if it was deleted
            // meanwhile.
            let synced = replicator.sync(&placement.key).await;
            self.wanted_version(replicator).await?;
            stored?;
            if let Err(error) = synced {
                // The next upload synchronizes again.
                tracing::warn!(key = %placement.key, %error, "the bucket has not heard what is kept");
            }
        }
        Ok(progress)
    }

    /// Copies one archive to the bucket as it is.
    ///
    /// A try that was not committed may have stored it as a delta. Only whole archives replace what is there: they can be read
    /// with each base that the ledger may record.
    async fn copy_archive(
        &self,
        replicator: &BucketReplicator,
        number: usize,
        to: String,
    ) -> Result<()> {
        let name = self.names[number].clone();
        let missing = || Error::new(ErrorKind::Corrupt, format_args!("`{name}` is not in memory"));
        let blob = self.pool.open(&name).map_err(|error| Error::io(&name, error))?;
        let bytes = blob.ok_or_else(missing)?.blob.bytes().cloned().ok_or_else(missing)?;
        let sent = self.sent.load(Ordering::Relaxed);
        match self.write(replicator, to.clone(), bytes.clone()).await {
            Err(error) if error.kind() == ErrorKind::Busy => {
                let ArchivePlacement { key, id, writer, .. } = &self.contributed.placement;
                let state = replicator.bucket.state(key).await?;
                let version = state.versions().find(|version| version.id == *id);
                if version.is_some_and(|version| version.digest_of(*writer).is_some()) {
                    return Err(error);
                }
                self.sent.store(sent, Ordering::Relaxed);
                let name = to.clone();
                replicator.bucket.run_on_volume(move |volume| volume.delete(&name)).await?;
                self.write(replicator, to, bytes).await
            }
            written => written,
        }
    }

    /// Writes bytes to the bucket.
    ///
    /// # Errors
    ///
    /// `Busy` if other bytes have the name.
    async fn write(&self, replicator: &BucketReplicator, to: String, bytes: Bytes) -> Result<()> {
        let (rate_limiter, sent) = (replicator.rate_limiter.clone(), self.sent.clone());
        let before = move |bytes: u64| {
            rate_limiter.wait(bytes);
            sent.fetch_add(bytes, Ordering::Relaxed);
        };
        let write = move |volume: &dyn Volume| write_durable(volume, &to, &bytes, &before);
        replicator.bucket.run_on_volume(write).await
    }
}

/// Whether a retry cannot succeed, because of the state of the ledger or the content of the archives.
fn is_final(error: &Error) -> bool {
    let kinds = [ErrorKind::Corrupt, ErrorKind::Invalid, ErrorKind::Rejected, ErrorKind::Overtaken];
    error.refusal().is_some() || kinds.contains(&error.kind())
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.pool.release(&self.names);
    }
}
