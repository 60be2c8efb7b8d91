//! A registry in another daemon: it decides, and archives stay here.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;

use super::registry::{Grant, Registry};
use super::tiers::Tiers;
use crate::arena::PeerId;
use crate::controller::{Begun, Controller, Located, Place, Progress, Proposal, VersionInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Digest, LeaseId, Selection, Selector, VersionId};
use crate::net::{Endpoint, Identity};
use crate::remote::{Answer, Owed, RemoteController, unexpected};
use crate::route::{Route, Transport};
use crate::status::DaemonStatus;
use crate::wire::{Begin, Leased, Location, Reply, Request};

/// For how long a connection is tried.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is asked whether somebody still wants what he waits for.
const WAIT: Duration = Duration::from_millis(100);

/// What another daemon decides.
pub(super) struct Delegate {
    endpoint: Endpoint,
    identity: Identity,
    /// Where this daemon can be reached.
    own: Endpoint,
    tiers: Tiers,
    /// The connection, once there was one.
    connection: tokio::sync::Mutex<Option<RemoteController>>,
    inner: Mutex<Inner>,
}

/// What is owed to the other daemon.
#[derive(Default)]
struct Inner {
    /// Contributions by the beginning of their archives' names, with their names on the connection.
    contributions: BTreeMap<String, (u64, Owed)>,
    /// With what of each is noted to be elsewhere.
    leases: BTreeMap<LeaseId, (Owed, Vec<String>)>,
}

impl Delegate {
    /// Connects to the daemon that decides.
    pub(super) async fn connect(
        endpoint: Endpoint,
        identity: Identity,
        own: Endpoint,
        tiers: Tiers,
    ) -> Result<Self> {
        let (connection, inner) = (tokio::sync::Mutex::default(), Mutex::default());
        let delegate = Self { endpoint, identity, own, tiers, connection, inner };
        delegate.controller().await?;
        Ok(delegate)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding what is owed")
    }

    /// The connection; a new one if it was lost. If the other daemon has been started anew, it knows nothing
    /// of what is kept here: it is forgotten.
    async fn controller(&self) -> Result<RemoteController> {
        let mut connection = self.connection.lock().await;
        if let Some(open) = connection.as_ref().filter(|open| open.is_open()) {
            return Ok(open.clone());
        }
        let new = RemoteController::reach(&self.endpoint, &self.identity, TIMEOUT).await?;
        let earlier = connection.replace(new.clone());
        if earlier.is_some_and(|earlier| earlier.instance() != new.instance()) {
            for name in self.tiers.pool.names("") {
                // Somebody may look at it still.
                self.tiers.pool.suspect(&name);
                self.tiers.pool.delete(&name);
            }
        }
        Ok(new)
    }

    async fn ask(&self, request: Request, patience: Duration) -> Result<Answer> {
        self.controller().await?.ask(&request, patience).await
    }

    fn take(&self, place: &Place) -> Option<(u64, Owed)> {
        self.inner().contributions.remove(&place.stem)
    }
}

#[async_trait]
impl Registry for Delegate {
    async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(Place, Option<Digest>)> {
        let keeper = Some(self.own.to_string());
        let begin = Begin { key: key.to_string(), proposal: proposal.clone(), keeper };
        let unwanted = async {
            while is_wanted() {
                tokio::time::sleep(WAIT).await;
            }
        };
        let Answer { reply, owed } = tokio::select! {
            answer = self.ask(Request::Begin(begin), proposal.timeout) => answer?,
            () = unwanted => return Err(Error::new(ErrorKind::Busy, "nobody waits any more")),
        };
        let Reply::Begun(begun) = reply else { return Err(unexpected(&reply)) };
        let place = Place {
            key: key.clone(),
            id: begun.id,
            epoch: begun.epoch,
            number: begun.number,
            writer: proposal.writer,
            job: proposal.job.clone(),
            durability: proposal.durability,
            stem: begun.stem,
        };
        self.inner().contributions.insert(place.stem.clone(), (begun.contribution, owed));
        Ok((place, begun.committed))
    }

    async fn commit(&self, place: &Place, digest: Digest, lens: &[u64]) -> Result<Progress> {
        let (contribution, mut owed) = self.take(place).ok_or_else(lost)?;
        let commit = Request::Commit { contribution, digest, lens: lens.to_vec() };
        let answer = self.ask(commit, Duration::ZERO).await;
        // Whatever came of it, it is decided.
        owed.settle();
        match answer?.reply {
            Reply::Progress(progress) => Ok(progress),
            other => Err(unexpected(&other)),
        }
    }

    async fn reason(&self, place: &Place, error: Error) -> Error {
        let Some((contribution, mut owed)) = self.take(place) else { return error };
        owed.settle();
        match self.ask(Request::Withdraw { contribution }, Duration::ZERO).await {
            Err(reason) if error.refusal().is_none() && reason.refusal().is_some() => reason,
            _ => error,
        }
    }

    async fn withdraw(&self, place: &Place, count: usize) {
        // If it is owed still, it is said now.
        drop(self.take(place));
        (0..count).for_each(|number| self.tiers.pool.delete(&place.path(number)));
    }

    async fn lease(&self, _holder: PeerId, key: &Key, selector: Selector) -> Result<Grant> {
        let locate = Request::Locate { key: key.to_string(), selector };
        let Answer { reply, owed } = self.ask(locate, Duration::ZERO).await?;
        let Reply::Leased(leased) = reply else { return Err(unexpected(&reply)) };
        let Leased { lease, id, number, manifest, archives, .. } = leased;
        let (manifest, at, len) = self.placed(manifest)?;
        let mut noted = Vec::new();
        let mut names = BTreeMap::new();
        for (file, location) in archives {
            let (name, at, len) = self.placed(location)?;
            if at != self.own {
                self.tiers.elsewhere.note(&name, &at, len);
                noted.push(name.clone());
            }
            names.insert(file, name);
        }
        self.inner().leases.insert(lease, (owed, noted));
        let missing = Some((at, len));
        Ok(Grant { lease, id, number, manifest, missing, archives: names })
    }

    async fn release(&self, _key: &Key, lease: LeaseId) {
        let released = self.inner().leases.remove(&lease);
        for name in released.iter().flat_map(|(_, noted)| noted) {
            self.tiers.elsewhere.forget(name);
        }
    }

    async fn holds_memory(&self) -> Result<bool> {
        Ok(!self.tiers.pool.names("").is_empty())
    }
}

impl Delegate {
    /// A blob's name, who has it, and how long it is.
    fn placed(&self, location: Location) -> Result<(String, Endpoint, u64)> {
        match location {
            Location::Blob { blob, len, at } => {
                let at = at.map_or_else(|| Ok(self.endpoint.clone()), |at| at.parse())?;
                Ok((blob, at, len))
            }
            Location::Span(_) => Err(lost()),
        }
    }
}

/// The connection on which something began is gone.
fn lost() -> Error {
    let text = "the controller's daemon was lost meanwhile: put again";
    Error::new(ErrorKind::Unreachable, text)
}

/// What does not touch archives is the other daemon's answer.
#[async_trait]
impl Controller for Delegate {
    async fn begin(&self, key: &Key, proposal: Proposal) -> Result<Begun> {
        self.controller().await?.begin(key, proposal).await
    }

    async fn locate(&self, key: &Key, selector: Selector) -> Result<Located> {
        self.controller().await?.locate(key, selector).await
    }

    async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        self.controller().await?.versions(key).await
    }

    async fn newer(
        &self,
        key: &Key,
        seen: Option<VersionId>,
        patience: Duration,
    ) -> Result<Option<VersionInfo>> {
        self.controller().await?.newer(key, seen, patience).await
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<Key>> {
        self.controller().await?.keys(prefix).await
    }

    async fn delete(&self, key: &Key, selection: Selection) -> Result<u64> {
        self.controller().await?.delete(key, selection).await
    }

    async fn retain(&self, key: &Key, keep: NonZeroU32, ttl: Option<Duration>) -> Result<()> {
        self.controller().await?.retain(key, keep, ttl).await
    }

    async fn pin(&self, key: &Key, selector: Selector, label: &str) -> Result<u64> {
        self.controller().await?.pin(key, selector, label).await
    }

    async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        self.controller().await?.unpin(key, label).await
    }

    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        self.controller().await?.pins(key).await
    }

    async fn prefetch(
        &self,
        key: &Key,
        selector: Selector,
        archives: Option<Vec<String>>,
    ) -> Result<(u64, VersionId, u64)> {
        self.controller().await?.prefetch(key, selector, archives).await
    }

    fn route(&self) -> Route {
        Route::new(Transport::Arena, "the daemon is of this host")
    }

    async fn status(&self) -> Result<DaemonStatus> {
        self.controller().await?.status().await
    }
}
