//! Versions over ledgers and a volume: the ledger's commands, and the effects that they owe.
//!
//! A key's turn is kept from one step of its ledger to the next, and while data is deleted or
//! a manifest gets its name, so that all of these see one order. Whoever finds an effect owed by
//! a process that died carries it out.

mod attempt;
mod catalog;
mod folder;
mod lost;
mod owed;
mod proof;
mod sessions;
mod storing;
#[cfg(test)]
mod tests;
mod writing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use tssd_format::MANIFEST_NAME;

use self::attempt::Attempt;
use self::sessions::Session;
use crate::blob::Volume;
use crate::control::layout::{archives, folder};
use crate::control::{Begun, Controller, Located, Place, Proposal};
use crate::control::{Everyone, Keepers};
use crate::engine::local::folder::locate;
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

/// How often a read starts anew because the version it was about to open is deleted.
const OPEN_TRIES: u32 = 16;

/// How many keys' versions stay open between reads.
const MAX_OPENED: usize = 16;

#[derive(Clone)]
pub(crate) struct LocalController(Arc<Inner>);

struct Inner {
    ledgers: Arc<dyn Ledgers>,
    volume: Arc<dyn Volume>,
    keepers: Arc<dyn Keepers>,
    environment: Arc<dyn Environment>,
    opened: Lock<Opened>,
    /// What this process proves now: nobody takes that over.
    proving: Lock<BTreeSet<VersionId>>,
    /// The keys in whose folders nothing is left of others' versions.
    swept: Lock<BTreeSet<Key>>,
    session: OnceCell<Option<Session>>,
    /// The leases that could not be released yet.
    unreleased: Lock<Vec<(Key, LeaseId)>>,
}

#[derive(Default)]
struct Opened {
    /// The version of each key that was located last: whoever reads it again finds it mapped.
    located: BTreeMap<Key, Located>,
    /// How often something of a key was deleted: what was looked up before is not kept after that.
    deletions: BTreeMap<Key, u64>,
}

impl LocalController {
    pub(crate) fn new(
        ledgers: Arc<dyn Ledgers>,
        volume: Arc<dyn Volume>,
        environment: Arc<dyn Environment>,
    ) -> Self {
        Self::among(ledgers, volume, Arc::new(Everyone), environment)
    }

    /// One of several, each of which keeps what is put to it.
    pub(crate) fn among(
        ledgers: Arc<dyn Ledgers>,
        volume: Arc<dyn Volume>,
        keepers: Arc<dyn Keepers>,
        environment: Arc<dyn Environment>,
    ) -> Self {
        let (opened, proving, swept) = (Lock::default(), Lock::default(), Lock::default());
        let session = OnceCell::new();
        Self(Arc::new(Inner {
            ledgers,
            volume,
            keepers,
            environment,
            opened,
            proving,
            swept,
            session,
            unreleased: Lock::default(),
        }))
    }

    /// How many use it, those included who were not waited for.
    #[cfg(feature = "shuttle")]
    pub(crate) fn users(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.0.environment.now()
    }

    pub(crate) fn random(&self) -> u128 {
        self.0.environment.random()
    }

    /// Gives a command to the ledger of a key. Time passes first, so that what is too old is gone.
    pub(crate) async fn apply(&self, key: &Key, command: Command) -> Result<Outcome> {
        loop {
            let turn = self.0.ledgers.turn(key).await?;
            let expired = advance(key, turn.state(), Command::Expire { now: self.now() })?;
            let next = advance(key, &expired.state, command.clone())?;
            if save(turn, next.state).await? {
                return Ok(next.outcome);
            }
        }
    }

    /// The ledger of a key as it is now; one that was never written is empty.
    pub(crate) async fn state(&self, key: &Key) -> Result<Arc<State>> {
        let state = self.0.ledgers.state(key).await?;
        // Somebody who may not write, or cannot now, still reads what is visible.
        if self.owes_old_proof(&state) && self.settle(key).await.is_ok() {
            return self.0.ledgers.state(key).await;
        }
        Ok(state)
    }

    /// Runs something that waits for the volume on a thread that may wait.
    pub(crate) async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Volume) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let volume = self.0.volume.clone();
        run_blocking(move || work(&*volume)).await
    }

    /// The same with the folder of a version; right here if its files are few bytes of memory.
    async fn on_version<T: Send + 'static>(
        &self,
        key: &Key,
        version: &Version,
        work: impl FnOnce(&dyn Volume, &str) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (volume, folder) = (self.0.volume.clone(), folder(key, version));
        let is_brief = is_brief(&*volume, version, &folder);
        let work = move || work(&*volume, &folder);
        if is_brief { run_inline(work) } else { run_blocking(work).await }
    }

    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.0.opened.lock()
    }

    /// A version that is about to be deleted stays open for those who have it, and for nobody who may come.
    fn close(&self, key: &Key, id: VersionId) {
        let mut opened = self.opened();
        *opened.deletions.entry(key.clone()).or_default() += 1;
        if opened.located.get(key).is_some_and(|located| located.id == id) {
            opened.located.remove(key);
        }
    }
}

/// Whether a version is one archive at most, which nothing is compared with, of few bytes, and in memory.
fn is_brief(volume: &dyn Volume, version: &Version, folder: &str) -> bool {
    let mut archives = version.contributions.values().flat_map(Contribution::archives);
    let (first, others) = (archives.next(), archives.next());
    let mut names = first.map(|archive| archive.name.as_str()).into_iter().chain([MANIFEST_NAME]);
    others.is_none()
        && first.is_none_or(|archive| archive.file_len <= INLINE_MAX_BYTES)
        && names.all(|name| volume.is_in_memory(&format!("{folder}/{name}")))
}

#[async_trait]
impl Controller for LocalController {
    async fn begin(&self, key: &Key, mut proposal: Proposal) -> Result<Begun> {
        proposal.durability = self.0.volume.admit(proposal.durability)?;
        let (place, committed) = self.open(key, &proposal, || true).await?;
        let Place { id, epoch, number, .. } = place;
        let mut attempt = Box::new(Attempt::new(self.clone(), place, proposal.file_len));
        if committed.is_none() {
            attempt.reserve().await?;
        }
        Ok(Begun { id, epoch, number, committed, contribution: attempt })
    }

    async fn locate(&self, key: &Key, selector: Selector) -> Result<Located> {
        let mut failed = None;
        for _ in 0..OPEN_TRIES {
            let deletions = self.opened().deletions.get(key).copied();
            let state = self.state(key).await?;
            let found = state.found(selector);
            let version = found.map_err(|refusal| Error::refused(key, refusal))?;
            let (folder, names, id) = (folder(key, version), archives(version), version.id);
            {
                let mut opened = self.opened();
                if let Some(located) = opened.located.get(key).filter(|located| located.id == id) {
                    return Ok(located.clone());
                }
                // What was replaced is let go before its successor is opened.
                opened.located.remove(key);
            }
            if failed.replace(id) == Some(id) {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format_args!("key `{key}`: version {} lacks files", version.number),
                ));
            }
            let located = self.on_disk(move |volume| locate(volume, &folder, names, id)).await?;
            if let Some(located) = located {
                let mut opened = self.opened();
                if opened.deletions.get(key).copied() == deletions {
                    if opened.located.len() >= MAX_OPENED {
                        opened.located.pop_first();
                    }
                    opened.located.insert(key.clone(), located.clone());
                }
                return Ok(located);
            }
            // It was deleted between the look at the ledger and the opening: look again.
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
    ) -> Result<(u64, VersionId, u64)> {
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
    step(state, command).map_err(|refusal| Error::refused(key, refusal))
}
