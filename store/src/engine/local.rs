//! Versions over ledgers and a volume: the commands of the ledger and their effects.
//!
//! The ledger of a key is locked for each step, and while data is deleted or a manifest gets its name, so that all
//! processes see one order. If a process dies with pending effects, another process runs them.

mod catalog;
mod contributions;
mod effects;
mod lost_leaves;
mod sessions;
#[cfg(test)]
mod tests;
mod uploads;
mod verification;
mod version_folder;
mod write_transaction;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use tssd_format::MANIFEST_NAME;

use self::sessions::Session;
use crate::blob::Volume;
use crate::control::layout::{archives, folder};
use crate::control::{
    ArchivePlacement, BeginResult, Controller, LocatedVersion, Peers, PrefetchedVersion, Proposal,
};
use crate::engine::local::version_folder::locate;
use crate::engine::local::write_transaction::WriteTransaction;
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::Environment;
use crate::io::exec::{INLINE_MAX_BYTES, run_blocking, run_inline};
use crate::io::sync::{Lock, MutexGuard, OnceCell};
use crate::key::Key;
use crate::ledger::{
    Command, Contribution, LeaseId, Outcome, Selector, State, Step, Timestamp, Version, VersionId,
    step,
};
use crate::metadata::{Ledgers, save};
use crate::route::Route;
use crate::status::DaemonStatus;

/// Maximum number of attempts to open a version. An attempt fails if the version is deleted meanwhile.
const MAX_OPEN_ATTEMPTS: u32 = 16;

/// Maximum number of keys whose last located version stays open between reads.
const MAX_LOCATED_KEYS: usize = 16;

#[derive(Clone)]
pub(crate) struct LocalController(Arc<Inner>);

struct Inner {
    ledgers: Arc<dyn Ledgers>,
    volume: Arc<dyn Volume>,
    peers: Peers,
    environment: Arc<dyn Environment>,
    located_cache: Lock<LocatedCache>,
    /// Versions that this process is verifying. No other task of the process takes them over.
    running_verifications: Lock<BTreeSet<VersionId>>,
    /// Keys whose folders this process has swept: no data of unknown versions is left there.
    swept_keys: Lock<BTreeSet<Key>>,
    session: OnceCell<Option<Session>>,
    /// Leases that are still to be released.
    pending_releases: Lock<Vec<(Key, LeaseId)>>,
}

/// Versions that stay open between reads.
#[derive(Default)]
struct LocatedCache {
    /// The version of each key that was located last. It is still mapped for the next read.
    located: BTreeMap<Key, LocatedVersion>,
    /// Number of deletions of each key. A version that was located before a deletion is not kept after it.
    deletions: BTreeMap<Key, u64>,
}

impl LocalController {
    pub(crate) fn new(
        ledgers: Arc<dyn Ledgers>,
        volume: Arc<dyn Volume>,
        environment: Arc<dyn Environment>,
    ) -> Self {
        Self::with_peers(ledgers, volume, Peers::default(), environment)
    }

    /// Creates a controller that knows other processes.
    pub(crate) fn with_peers(
        ledgers: Arc<dyn Ledgers>,
        volume: Arc<dyn Volume>,
        peers: Peers,
        environment: Arc<dyn Environment>,
    ) -> Self {
        Self(Arc::new(Inner {
            ledgers,
            volume,
            peers,
            environment,
            located_cache: Lock::default(),
            running_verifications: Lock::default(),
            swept_keys: Lock::default(),
            session: OnceCell::new(),
            pending_releases: Lock::default(),
        }))
    }

    /// Returns the number of references, including those of cancelled calls that are still running.
    #[cfg(feature = "shuttle")]
    pub(crate) fn reference_count(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.0.environment.now()
    }

    pub(crate) fn random(&self) -> u128 {
        self.0.environment.random_id()
    }

    /// Applies a command to the ledger of a key, after a [`Command::Expire`] for the current time.
    pub(crate) async fn apply(&self, key: &Key, command: Command) -> Result<Outcome> {
        loop {
            let guard = self.0.ledgers.lock(key).await?;
            let expired = advance(key, guard.state(), Command::Expire { now: self.now() })?;
            let next = advance(key, &expired.state, command.clone())?;
            if save(guard, next.state).await? {
                return Ok(next.outcome);
            }
        }
    }

    /// Returns the current state of the ledger of a key. A key that was never written has an empty one.
    ///
    /// An overdue verification is run first.
    pub(crate) async fn state(&self, key: &Key) -> Result<Arc<State>> {
        let state = self.0.ledgers.state(key).await?;
        // A process that cannot write still reads the visible versions.
        if self.has_overdue_verification(&state) && self.run_pending_effects(key).await.is_ok() {
            return self.0.ledgers.state(key).await;
        }
        Ok(state)
    }

    /// Runs work that may block on the volume, on a thread that may block.
    pub(crate) async fn run_on_volume<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Volume) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let volume = self.0.volume.clone();
        run_blocking(move || work(&*volume)).await
    }

    /// Runs work on the folder of a version. It runs inline if the files are small and in memory.
    async fn run_on_version_folder<T: Send + 'static>(
        &self,
        key: &Key,
        version: &Version,
        work: impl FnOnce(&dyn Volume, &str) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (volume, folder) = (self.0.volume.clone(), folder(key, version));
        let is_inline = fits_inline(&*volume, version, &folder);
        let work = move || work(&*volume, &folder);
        if is_inline { run_inline(work) } else { run_blocking(work).await }
    }

    fn located_cache(&self) -> MutexGuard<'_, LocatedCache> {
        self.0.located_cache.lock()
    }

    /// Removes a version that is about to be deleted from the cache. Readers that have it keep it open.
    fn evict_located(&self, key: &Key, id: VersionId) {
        let mut opened = self.located_cache();
        *opened.deletions.entry(key.clone()).or_default() += 1;
        if opened.located.get(key).is_some_and(|located| located.id == id) {
            opened.located.remove(key);
        }
    }
}

/// Returns whether work on a version runs inline: at most one archive, small and in memory.
///
/// A single archive is not compared with others.
fn fits_inline(volume: &dyn Volume, version: &Version, folder: &str) -> bool {
    let mut archives = version.contributions.values().flat_map(Contribution::archives);
    let (first, others) = (archives.next(), archives.next());
    let mut names = first.map(|archive| archive.name.as_str()).into_iter().chain([MANIFEST_NAME]);
    others.is_none()
        && first.is_none_or(|archive| archive.file_len <= INLINE_MAX_BYTES)
        && names.all(|name| volume.is_in_memory(&format!("{folder}/{name}")))
}

#[async_trait]
impl Controller for LocalController {
    async fn begin(&self, key: &Key, mut proposal: Proposal) -> Result<BeginResult> {
        proposal.durability = self.0.volume.admit(proposal.durability)?;
        let (place, committed) = self.open(key, &proposal, || true).await?;
        let ArchivePlacement { id, epoch, number, .. } = place;
        let mut attempt = Box::new(WriteTransaction::new(self.clone(), place, proposal.file_len));
        if committed.is_none() {
            attempt.reserve().await?;
        }
        Ok(BeginResult { id, epoch, number, committed, contribution: attempt })
    }

    async fn locate(&self, key: &Key, selector: Selector) -> Result<LocatedVersion> {
        let mut failed = None;
        for _ in 0..MAX_OPEN_ATTEMPTS {
            let deletions = self.located_cache().deletions.get(key).copied();
            let state = self.state(key).await?;
            let found = state.select(&selector);
            let version = found.map_err(|refusal| Error::from_refusal(key, refusal))?;
            let (folder, names) = (folder(key, version), archives(version));
            let (id, position) = (version.id, version.position());
            {
                let mut opened = self.located_cache();
                if let Some(located) = opened.located.get(key).filter(|located| located.id == id) {
                    return Ok(LocatedVersion { position, ..located.clone() });
                }
                // The replaced version is dropped before its successor is opened.
                opened.located.remove(key);
            }
            if failed.replace(id) == Some(id) {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format_args!("key `{key}`: version {} lacks files", version.number),
                ));
            }
            let located = self
                .run_on_volume(move |volume| locate(volume, &folder, names, id, position))
                .await?;
            if let Some(located) = located {
                let mut opened = self.located_cache();
                if opened.deletions.get(key).copied() == deletions {
                    if opened.located.len() >= MAX_LOCATED_KEYS {
                        opened.located.pop_first();
                    }
                    opened.located.insert(key.clone(), located.clone());
                }
                return Ok(located);
            }
            // The version was deleted after the ledger was read: read the ledger again.
        }
        Err(Error::new(
            ErrorKind::Busy,
            format_args!("key `{key}`: versions are deleted faster than they can be opened"),
        ))
    }

    async fn prefetch(
        &self,
        _key: &Key,
        _selector: Selector,
        _archives: Option<Vec<String>>,
    ) -> Result<PrefetchedVersion> {
        let text = "the store is this process's own or a directory: there is nothing to fetch";
        Err(Error::new(ErrorKind::Invalid, text))
    }

    fn route(&self) -> Route {
        self.0.volume.route()
    }

    async fn status(&self) -> Result<DaemonStatus> {
        let text = "the store is this process's own or a directory: there is no daemon to ask";
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

fn advance(key: &Key, state: &State, command: Command) -> Result<Step> {
    step(state, command).map_err(|refusal| Error::from_refusal(key, refusal))
}
