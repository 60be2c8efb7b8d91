//! One writer's contribution on its way to the bucket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Mirror;
use crate::control::{Contributed, Place, Progress};
use crate::daemon::tiers::write;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::backoff;
use crate::io::sync::{Lock, watch};
use crate::ledger::{Version, VersionId, WriterSet};
use crate::net::wire::Failure;
use crate::shm::Pool;
use crate::status::UploadStatus;

/// For how long others are waited for that are in the way in the bucket.
const WAIT: Duration = Duration::from_mins(1);

/// How often it is looked whether another process has brought a contribution there.
const LOOK: Duration = Duration::from_millis(200);

/// What becomes of an upload, once it has ended.
pub(crate) type Storing = watch::Receiver<Option<Result<Progress, Failure>>>;

pub(crate) struct Upload {
    contributed: Contributed,
    pool: Arc<Pool>,
    /// The names of its archives, held until it ends.
    names: Vec<String>,
    since: Instant,
    /// How many bytes have gone in this try.
    sent: Arc<AtomicU64>,
    /// How many tries have failed, and why the last one.
    failed: Lock<(u32, String)>,
    outcome: watch::Sender<Option<Result<Progress, Failure>>>,
}

impl Upload {
    pub(crate) fn new(contributed: Contributed, pool: Arc<Pool>) -> Self {
        let names = contributed.names();
        pool.hold(&names);
        Self {
            contributed,
            pool,
            names,
            since: Instant::now(),
            sent: Arc::default(),
            failed: Lock::default(),
            outcome: watch::channel(None).0,
        }
    }

    pub(crate) fn storing(&self) -> Storing {
        self.outcome.subscribe()
    }

    pub(crate) fn is_of(&self, place: &Place) -> bool {
        let own = &self.contributed.place;
        (own.id, own.writer) == (place.id, place.writer)
    }

    pub(crate) fn id(&self) -> VersionId {
        self.contributed.place.id
    }

    /// In the order of the versions of its key.
    pub(crate) fn place(&self) -> (u32, u64) {
        (self.contributed.place.epoch, self.contributed.place.number)
    }

    pub(crate) fn number(&self) -> u64 {
        self.contributed.place.number
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.contributed.lens.iter().copied().fold(0, u64::saturating_add)
    }

    pub(crate) fn status(&self) -> UploadStatus {
        let (tries, error) = self.failed.lock().clone();
        UploadStatus {
            key: self.contributed.place.key.to_string(),
            version: self.number(),
            writer: self.contributed.place.writer,
            bytes: self.bytes(),
            sent: self.sent.load(Ordering::Relaxed),
            failures: tries,
            error: Some(error).filter(|error| !error.is_empty()),
            age: self.since.elapsed(),
        }
    }

    /// Tells whoever waits.
    pub(crate) fn end(&self, stored: Result<Progress>) {
        self.outcome.send_replace(Some(stored.map_err(Failure::from)));
    }

    /// Brings it to the bucket, however often that fails on its way.
    pub(crate) async fn run(&self, mirror: &Mirror) -> Result<Progress> {
        let mut tries = 0;
        loop {
            let error = match self.try_once(mirror).await {
                Ok(progress) => return Ok(progress),
                Err(error) => error,
            };
            if is_final(&error) {
                return Err(error);
            }
            tries += 1;
            mirror.count().failures += 1;
            let Place { key, number, .. } = &self.contributed.place;
            tracing::warn!(%key, version = number, tries, %error, "it is tried again");
            *self.failed.lock() = (tries, error.to_string());
            backoff(tries).await;
        }
    }

    /// The version as its own ledger has it, as long as it is wanted.
    async fn wanted(&self, mirror: &Mirror) -> Result<Version> {
        let Place { key, id, number, .. } = &self.contributed.place;
        let state = mirror.own.state(key).await?;
        let version = state.versions().find(|version| version.id == *id);
        let wanted = version.filter(|version| version.is_open() || version.is_visible());
        wanted.cloned().ok_or_else(|| {
            let text = format_args!("key `{key}`: version {number} was deleted, or is lost");
            Error::new(ErrorKind::Overtaken, text)
        })
    }

    /// Waits until another process has brought the contribution there, which keeps it: an earlier try was made there.
    async fn is_brought(&self, mirror: &Mirror) -> Result<Progress> {
        loop {
            let version = self.wanted(mirror).await?;
            if version.stored || !version.is_to_be_stored() {
                let (visible, missing) = (version.stored, version.missing());
                return Ok(Progress { visible, missing });
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn try_once(&self, mirror: &Mirror) -> Result<Progress> {
        let Contributed { place, writers, digest, lens } = &self.contributed;
        let version = self.wanted(mirror).await?;
        if version.stored {
            return Ok(Progress { visible: true, missing: WriterSet::default() });
        }
        if self.names.iter().any(|name| mirror.pool.span(name).is_none()) {
            return self.is_brought(mirror).await;
        }
        let _turn = mirror
            .turns
            .acquire()
            .await
            .map_err(|error| Error::io("the daemon ends", std::io::Error::other(error)))?;
        // What retention is to keep there is said before anything is added.
        mirror.sync(&place.key).await?;
        let (copy, committed) = mirror.bucket.open_copy(place, writers.clone(), WAIT).await?;
        if committed.is_none() {
            self.sent.store(0, Ordering::Relaxed);
            for number in 0..lens.len() {
                self.send(mirror, number, copy.path(number)).await?;
            }
        }
        self.wanted(mirror).await?;
        let progress = mirror.bucket.commit(&copy, *digest, lens).await?;
        if progress.visible {
            let stored = mirror.own.stored(&place.key, place.id).await;
            // What it replaces there goes now, and if it was deleted meanwhile it goes itself.
            let synced = mirror.sync(&place.key).await;
            self.wanted(mirror).await?;
            stored?;
            if let Err(error) = synced {
                // The next one says it again.
                tracing::warn!(key = %place.key, %error, "the bucket has not heard what is kept");
            }
        }
        Ok(progress)
    }

    /// Copies one archive.
    async fn send(&self, mirror: &Mirror, number: usize, to: String) -> Result<()> {
        let name = self.names[number].clone();
        let gone = || Error::new(ErrorKind::Corrupt, format_args!("`{name}` is gone"));
        let blob = self.pool.open(&name).map_err(|error| Error::io(&name, error))?;
        let bytes = blob.ok_or_else(gone)?.blob.bytes().cloned().ok_or_else(gone)?;
        let (pace, sent) = (mirror.pace.clone(), self.sent.clone());
        let before = move |bytes: u64| {
            pace.wait(bytes);
            sent.fetch_add(bytes, Ordering::Relaxed);
        };
        mirror.bucket.on_disk(move |volume| write(volume, &to, &bytes, &before)).await
    }
}

/// Whether it will be no other the next time: the ledger says so, or the archives themselves.
fn is_final(error: &Error) -> bool {
    let kinds = [ErrorKind::Corrupt, ErrorKind::Invalid, ErrorKind::Rejected, ErrorKind::Overtaken];
    error.refusal().is_some() || kinds.contains(&error.kind())
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.pool.let_go(&self.names);
    }
}
