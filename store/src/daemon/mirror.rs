//! What outlasts the host: versions are copied from memory to a bucket, and from there back.
//!
//! The bucket is a store of its own, with its own ledger: whoever has nothing else finds in it what a daemon has
//! stored. A copy has the identity, the place and the bytes of the version that it is of.

mod difference;
#[cfg(test)]
#[cfg(feature = "object")]
mod faults;
mod pace;
mod upload;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use self::difference::differences;
use self::pace::Pace;
pub(crate) use self::upload::Storing;
use self::upload::Upload;
use crate::blob::Volume;
use crate::control::{Contributed, Place};
use crate::daemon::replicas::Replicas;
use crate::engine::address::at_bucket;
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::SystemEnvironment;
use crate::io::exec::backoff;
use crate::io::sync::{AsyncMutex, Lock, MutexGuard, boxed, watch};
use crate::key::Key;
use crate::ledger::{Refusal, Selector, VersionId};
use crate::metadata::Ledgers;
use crate::net::wire::Failure;
use crate::shm::Pool;
use crate::status::UploadStatus;

/// So many versions of a key are on their way to the bucket at most: a put that would add another one waits.
const MAX_UNDER_WAY: usize = 2;

/// How often it is tried to say in the ledger that a version is not stored.
const FORGO_TRIES: u32 = 10;

/// How many contributions are uploaded at once.
const UPLOADS: usize = 4;

/// For how long memory is waited for into which a version is to come back.
const ROOM: Duration = Duration::from_mins(1);

/// How often blobs are asked for while others bring back some of the same version.
const RESTORE_TRIES: u32 = 3;

/// With which pauses a request to the bucket is tried again, before the whole upload is.
const PATIENCE: Duration = Duration::from_secs(20);

/// The bucket of a daemon.
pub(crate) struct Bucket {
    pub(crate) ledgers: Arc<dyn Ledgers>,
    pub(crate) volume: Arc<dyn Volume>,
    /// Its address.
    pub(crate) shown: String,
}

impl Bucket {
    /// The one at an address: as that of a store, or `file:DIR`.
    pub(crate) fn open(url: &str) -> Result<Self> {
        let (ledgers, volume) = at_bucket(url, PATIENCE)?;
        Ok(Self { ledgers, volume, shown: url.to_owned() })
    }

    /// Its store.
    pub(crate) fn store(&self) -> LocalController {
        let (ledgers, volume) = (self.ledgers.clone(), self.volume.clone());
        LocalController::new(ledgers, volume, Arc::new(SystemEnvironment))
    }
}

/// Copies versions to a bucket.
pub(crate) struct Mirror {
    bucket: LocalController,
    shown: String,
    /// Whose versions they are.
    own: LocalController,
    pool: Arc<Pool>,
    /// What goes if there is no memory.
    replicas: Arc<Replicas>,
    pace: Arc<Pace>,
    lines: Lock<BTreeMap<Key, VecDeque<Arc<Upload>>>>,
    /// The right to upload: each upload has threads and parts of its own.
    turns: Semaphore,
    /// Whoever has it compares a ledger with that of the bucket.
    syncing: AsyncMutex<()>,
    /// The keys of which the bucket has not heard all.
    behind: Lock<BTreeSet<Key>>,
    /// Changes whenever an upload has ended.
    ended: watch::Sender<u64>,
    /// The versions that come back from there.
    restoring: Lock<BTreeMap<VersionId, Restoring>>,
    counts: Lock<MirrorCounts>,
}

/// What becomes of a version that comes back, once it is there.
type Restoring = watch::Receiver<Option<Result<(), Failure>>>;

/// Why something comes back from the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// Nobody else has it.
    Alone,
    /// Whoever has it did not answer.
    Unanswered,
}

impl Why {
    pub(crate) const ALL: [Self; 2] = [Self::Alone, Self::Unanswered];
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alone => "alone",
            Self::Unanswered => "unanswered",
        })
    }
}

/// What is counted since the start.
#[derive(Clone, Default)]
pub(crate) struct MirrorCounts {
    pub(crate) uploads: u64,
    pub(crate) uploaded_bytes: u64,
    /// Tries that have failed.
    pub(crate) failures: u64,
    pub(crate) given_up: u64,
    pub(crate) restored_bytes: BTreeMap<Why, u64>,
}

impl Mirror {
    /// From a daemon's versions to a bucket, with so many bytes in a second at most.
    pub(crate) fn new(
        bucket: LocalController,
        shown: String,
        own: LocalController,
        replicas: Arc<Replicas>,
        bytes_per_second: Option<u64>,
    ) -> Arc<Self> {
        Arc::new(Self {
            bucket,
            shown,
            own,
            pool: replicas.pool().clone(),
            replicas,
            pace: Arc::new(Pace::new(bytes_per_second)),
            lines: Lock::default(),
            turns: Semaphore::new(UPLOADS),
            syncing: AsyncMutex::default(),
            behind: Lock::default(),
            ended: watch::channel(0).0,
            restoring: Lock::default(),
            counts: Lock::default(),
        })
    }

    fn lines(&self) -> MutexGuard<'_, BTreeMap<Key, VecDeque<Arc<Upload>>>> {
        self.lines.lock()
    }

    fn count(&self) -> MutexGuard<'_, MirrorCounts> {
        self.counts.lock()
    }

    pub(crate) fn counts(&self) -> MirrorCounts {
        self.count().clone()
    }

    /// What is under way.
    pub(crate) fn uploads(&self) -> Vec<UploadStatus> {
        self.lines().values().flatten().map(|upload| upload.status()).collect()
    }

    /// Waits until another version of a key may come, as long as it is wanted.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        key: &Key,
        deadline: Instant,
        is_wanted: impl Fn() -> bool,
    ) -> Result<()> {
        self.take_up(key).await?;
        let mut ended = self.ended.subscribe();
        loop {
            // The first writer's of each version.
            let mut under_way: Vec<Arc<Upload>> = Vec::new();
            for upload in self.lines().get(key).into_iter().flatten() {
                if under_way.iter().all(|other| other.id() != upload.id()) {
                    under_way.push(upload.clone());
                }
            }
            if under_way.len() < MAX_UNDER_WAY {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !is_wanted() {
                let under_way: Vec<String> =
                    under_way.iter().map(|upload| upload.status().to_string()).collect();
                let text = format_args!(
                    "`{}` is behind: {}. Wait, or put versions in memory meanwhile",
                    self.shown,
                    under_way.join("; ")
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
            let turn = left.min(Duration::from_millis(100));
            // That the time is over is an answer too.
            let _ = tokio::time::timeout(turn, ended.changed()).await;
        }
    }

    /// Takes up what was committed and is not on its way: whoever has committed it did not hear so.
    async fn take_up(self: &Arc<Self>, key: &Key) -> Result<()> {
        for contributed in self.own.to_be_stored(key).await? {
            let names = contributed.names();
            if !names.is_empty() && names.iter().all(|name| self.pool.span(name).is_some()) {
                drop(self.store(contributed));
            }
        }
        Ok(())
    }

    /// Brings a contribution that was committed to the bucket, in its turn, whether or not it is waited for. The same
    /// once more is the same.
    pub(crate) fn store(self: &Arc<Self>, contributed: Contributed) -> Storing {
        let mut lines = self.lines();
        let key = contributed.place.key.clone();
        let line = lines.entry(key.clone()).or_default();
        if let Some(known) = line.iter().find(|upload| upload.is_of(&contributed.place)) {
            return known.storing();
        }
        let upload = Arc::new(Upload::new(contributed, self.pool.clone()));
        // In the order of the versions, after the one that is under way: it may wait for those before it.
        let after = line.iter().skip(1).take_while(|other| other.place() <= upload.place()).count();
        line.insert(line.len().min(1 + after), upload.clone());
        if line.len() == 1 {
            drop(tokio::spawn(boxed(self.clone().run(key))));
        }
        upload.storing()
    }

    /// Carries out the uploads of a key, one after the other: what is visible there has the order that it has here.
    async fn run(self: Arc<Self>, key: Key) {
        loop {
            let next = self.lines().get(&key).and_then(|line| line.front().cloned());
            let Some(next) = next else { return };
            let stored = next.run(&self).await;
            {
                let mut counts = self.count();
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
                self.forgo(&key, next.id()).await;
            }
            next.end(stored);
            let is_last = {
                let mut lines = self.lines();
                let line = lines.get_mut(&key).map(|line| {
                    line.pop_front();
                    line.is_empty()
                });
                // Who comes later begins anew.
                line.is_none_or(|is_empty| is_empty && lines.remove(&key).is_some())
            };
            self.ended.send_modify(|count| *count += 1);
            if is_last {
                return;
            }
        }
    }

    /// A version that is not brought to the bucket is kept no longer than others that are in memory.
    async fn forgo(&self, key: &Key, id: VersionId) {
        for tries in 1..FORGO_TRIES {
            match self.own.not_stored(key, id).await {
                Err(error) if error.kind() == ErrorKind::Unreachable => backoff(tries).await,
                _ => return,
            }
        }
    }

    /// What is committed at a place: an earlier try has other names than this one.
    pub(crate) async fn committed(&self, place: &Place) -> Result<Option<Contributed>> {
        let mut all = self.own.to_be_stored(&place.key).await?.into_iter();
        Ok(all.find(|it| (it.place.id, it.place.writer) == (place.id, place.writer)))
    }

    /// Returns when nothing is under way.
    pub(crate) async fn idle(&self) {
        let mut ended = self.ended.subscribe();
        while !self.lines().is_empty() {
            // The sender is here: it does not go before.
            let _ = ended.changed().await;
        }
    }

    /// Whether something of a key is in the bucket, or on its way.
    pub(crate) async fn has(&self, key: &Key) -> Result<bool> {
        if self.behind().contains(key) || self.lines().contains_key(key) {
            return Ok(true);
        }
        let state = self.own.state(key).await?;
        Ok(state.versions().any(|version| version.stored || version.is_to_be_stored()))
    }

    fn behind(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.behind.lock()
    }

    /// Lets the bucket keep, and forget, what is kept and forgotten here.
    pub(crate) async fn sync(&self, key: &Key) -> Result<()> {
        let _syncing = self.syncing.lock().await;
        self.behind().insert(key.clone());
        self.compare(key).await?;
        self.behind().remove(key);
        Ok(())
    }

    async fn compare(&self, key: &Key) -> Result<()> {
        // What is begun there was known here before.
        let there = self.bucket.state(key).await?;
        let own = self.own.state(key).await?;
        for command in differences(&own, &there) {
            match self.bucket.apply(key, command).await {
                // It is there no more.
                Err(error) if matches!(error.refusal(), Some(Refusal::NotFound { .. })) => {}
                done => drop(done?),
            }
        }
        self.bucket.reclaim_owed(key).await
    }

    /// Brings blobs of a version that somebody holds back into memory.
    pub(crate) async fn restore(
        self: &Arc<Self>,
        key: &Key,
        id: VersionId,
        mut names: Vec<(String, Why)>,
    ) -> Result<()> {
        // Whoever brings others of the same version back does not bring these.
        for _ in 0..RESTORE_TRIES {
            names.retain(|(name, _)| self.pool.span(name).is_none());
            if names.is_empty() {
                break;
            }
            self.restore_once(key, id, names.clone()).await?;
        }
        Ok(())
    }

    /// The same, unless somebody brings some of the version back: then that is waited for.
    async fn restore_once(
        self: &Arc<Self>,
        key: &Key,
        id: VersionId,
        names: Vec<(String, Why)>,
    ) -> Result<()> {
        let mut restored = {
            let mut restoring = self.restoring();
            let begin = || {
                let (done, restored) = watch::channel(None);
                let (mirror, key) = (self.clone(), key.clone());
                tokio::spawn(boxed(async move {
                    let outcome = mirror.bring_back(&key, id, names).await.map_err(Failure::from);
                    mirror.restoring().remove(&id);
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

    fn restoring(&self) -> MutexGuard<'_, BTreeMap<VersionId, Restoring>> {
        self.restoring.lock()
    }

    /// Why something is not there any more.
    async fn gone(&self, key: &Key, id: VersionId) -> Result<Error> {
        let shown = &self.shown;
        let there = self.bucket.state(key).await?;
        if there.version(Selector::Id(id)).is_some() {
            let text = format_args!("`{shown}` lacks archives of version {id} of `{key}`");
            return Ok(Error::new(ErrorKind::Corrupt, text));
        }
        let text = format_args!(
            "`{key}`: the version was replaced in `{shown}` while it came from there: read the newest, or keep \
             more of them"
        );
        Ok(Error::new(ErrorKind::Overtaken, text))
    }

    /// Copies blobs into memory.
    async fn bring_back(&self, key: &Key, id: VersionId, names: Vec<(String, Why)>) -> Result<()> {
        let opened = {
            let names: Vec<String> = names.iter().map(|(name, _)| name.clone()).collect();
            self.bucket.on_disk(move |volume| volume.open_all(&names)).await?
        };
        let Some(opened) = opened else { return Err(self.gone(key, id).await?) };
        // Who came before may have brought some of them.
        let missing = names.into_iter().zip(opened);
        let missing = missing.filter(|((name, _), _)| self.pool.span(name).is_none());
        let missing: Vec<_> = missing.collect();
        // Room for all, before anything comes: two that wait for each other would wait for ever.
        let (deadline, mut room) = (tokio::time::Instant::now() + ROOM, Vec::new());
        for ((name, why), archived) in missing {
            let failed = |error| Error::io(format_args!("`{name}` of `{}`", self.shown), error);
            let len = archived.blob().size().map_err(failed)?;
            let late = tokio::time::sleep_until(deadline);
            let write = |pool: &Arc<Pool>| pool.write_own(len);
            let writing = self.replicas.in_memory(&self.own, late, write).await;
            let writing = writing.map_err(failed)?.map_err(|exhausted| {
                let text = format_args!(
                    "no memory for a version of `{key}` that comes back from `{}`: {exhausted}; wait until others \
                     are done, or serve with a higher memory limit",
                    self.shown
                );
                Error::new(ErrorKind::Busy, text)
            })?;
            room.push((name, why, archived, writing, len));
        }
        for (name, why, archived, mut writing, len) in room {
            let pool = self.pool.clone();
            self.bucket
                .on_disk(move |_| {
                    let failed = |error| Error::io(&name, error);
                    archived.blob().read_exact_at(writing.bytes_mut(), 0).map_err(failed)?;
                    match writing.publish(&name) {
                        // It is there as long as somebody holds the version.
                        Ok(()) => pool.delete(&name),
                        // It has come from another host meanwhile.
                        Err(_) if pool.span(&name).is_some() => {}
                        Err(error) => return Err(failed(error)),
                    }
                    Ok(())
                })
                .await?;
            *self.count().restored_bytes.entry(why).or_default() += len;
        }
        Ok(())
    }
}
