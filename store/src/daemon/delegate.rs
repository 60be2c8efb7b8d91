//! A registry in another daemon: it decides, and archives stay here.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::elsewhere::{Keeper, Source};
use super::registry::{Grant, Registry};
use super::tiers::Tiers;
use crate::control::{Catalog, Place, Progress, Proposal, VersionInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, MutexGuard};
use crate::key::Key;
use crate::ledger::{Digest, Durability, LeaseId, Selection, Selector, VersionId};
use crate::net::client::{Answer, Owed, RemoteController, unexpected};
use crate::net::tls::{Endpoint, Identity};
use crate::net::wire::{Begin, Leased, Location, Reply, Request};
use crate::shm::PeerId;
use crate::status::HostStatus;

/// For how long a connection is tried.
const TIMEOUT: Duration = Duration::from_secs(10);

/// After a connection has failed, others hear so for this time.
const PAUSE: Duration = Duration::from_millis(500);

/// How often it is asked whether somebody still wants what he waits for.
const WAIT: Duration = Duration::from_millis(100);

/// A commit proves the version, which may take so long.
const PROOF: Duration = Duration::from_mins(10);

/// How many names go into a question.
const PART: usize = 16;

/// What another daemon decides.
pub(crate) struct Delegate {
    endpoint: Endpoint,
    identity: Identity,
    /// Where this daemon can be reached.
    own: Endpoint,
    tiers: Tiers,
    connection: tokio::sync::Mutex<Connection>,
    instance: AtomicU64,
    inner: Lock<Inner>,
}

/// The connection, once there was one, and when the last one failed.
#[derive(Default)]
struct Connection {
    open: Option<RemoteController>,
    failed: Option<(Instant, String)>,
}

/// What is owed to the other daemon.
#[derive(Default)]
struct Inner {
    /// Contributions by the beginning of their archives' names.
    contributions: BTreeMap<String, Begun>,
    leases: BTreeMap<LeaseId, Held>,
    /// Archives of contributions whose commit was not answered.
    undecided: BTreeMap<String, Vec<String>>,
}

/// A contribution, on the connection on which it began.
struct Begun {
    controller: RemoteController,
    contribution: u64,
    owed: Owed,
}

/// A lease, and what of it is noted to be elsewhere.
struct Held {
    owed: Owed,
    key: Key,
    id: VersionId,
    noted: Vec<String>,
}

impl Delegate {
    /// Connects to the daemon that decides.
    pub(crate) async fn connect(
        endpoint: Endpoint,
        identity: Identity,
        own: Endpoint,
        tiers: Tiers,
    ) -> Result<Self> {
        let delegate = Self {
            endpoint,
            identity,
            own,
            tiers,
            connection: tokio::sync::Mutex::default(),
            instance: AtomicU64::new(0),
            inner: Lock::default(),
        };
        delegate.controller().await?;
        Ok(delegate)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// The connection; a new one if it was lost.
    async fn controller(&self) -> Result<RemoteController> {
        let mut connection = self.connection.lock().await;
        if let Some(open) = connection.open.as_ref().filter(|open| open.is_open()) {
            return Ok(open.clone());
        }
        if let Some((since, text)) = &connection.failed
            && since.elapsed() < PAUSE
        {
            return Err(Error::new(ErrorKind::Unreachable, text));
        }
        match RemoteController::reach(&self.endpoint, &self.identity, TIMEOUT).await {
            Ok(new) => {
                connection.failed = None;
                self.resume(&new).await;
                // Not before: whoever goes on may be stopped, and then somebody else does.
                connection.open = Some(new.clone());
                Ok(new)
            }
            Err(error) => {
                connection.failed = Some((Instant::now(), error.to_string()));
                Err(error)
            }
        }
    }

    /// Goes on over a new connection. If the other daemon has been started anew, it knows nothing of what is
    /// kept here: it is forgotten.
    async fn resume(&self, new: &RemoteController) {
        let earlier = self.instance.swap(new.instance(), Ordering::Relaxed);
        if earlier != 0 && earlier != new.instance() {
            *self.inner() = Inner::default();
            self.tiers.replicas.clear();
            for name in self.tiers.pool.names("") {
                // Somebody may look at it still.
                self.tiers.pool.suspect(&name);
                self.tiers.pool.delete(&name);
            }
            return;
        }
        // What was leased on the connection before is nobody's any more.
        let held: Vec<(LeaseId, Key, VersionId)> = {
            let inner = self.inner();
            inner.leases.iter().map(|(lease, held)| (*lease, held.key.clone(), held.id)).collect()
        };
        for (lease, key, id) in held {
            let locate = Request::Locate {
                key: key.to_string(),
                selector: Selector::Id(id),
                devices: false,
            };
            if let Ok(Answer { owed, .. }) = new.ask(&locate, Duration::ZERO).await
                && let Some(held) = self.inner().leases.get_mut(&lease)
            {
                held.owed = owed;
            }
        }
        let undecided = self.inner().undecided.clone();
        for (stem, names) in undecided {
            for names in names.chunks(PART) {
                let missing = Request::Missing { blobs: names.to_vec() };
                let answer = new.ask(&missing, Duration::ZERO).await;
                let Ok(Answer { reply: Reply::Missing(missing), .. }) = answer else { return };
                for name in &missing {
                    self.tiers.pool.delete(name);
                }
            }
            self.inner().undecided.remove(&stem);
        }
    }

    fn take(&self, place: &Place) -> Option<Begun> {
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
        let (timeout, proposal) = (proposal.timeout, proposal.clone());
        let keeper = Some(self.own.to_string());
        let (writer, job, durability) =
            (proposal.writer, proposal.job.clone(), proposal.durability);
        let begin = Request::Begin(Begin { key: key.to_string(), proposal, keeper, digest: None });
        let controller = self.controller().await?;
        let unwanted = async {
            tokio::time::sleep(WAIT).await;
            while is_wanted() {
                tokio::time::sleep(WAIT).await;
            }
        };
        let Answer { reply, owed } = tokio::select! {
            answer = controller.ask(&begin, timeout) => answer?,
            // Then it is taken back there.
            () = unwanted => return Err(Error::new(ErrorKind::Busy, "nobody waits any more")),
        };
        let Reply::Begun(begun) = reply else { return Err(unexpected(&reply)) };
        let place = Place {
            key: key.clone(),
            id: begun.id,
            epoch: begun.epoch,
            number: begun.number,
            writer,
            job,
            durability,
            stem: begun.stem,
            is_copy: false,
        };
        let contribution = begun.contribution;
        let own = Begun { controller, contribution, owed };
        self.inner().contributions.insert(place.stem.clone(), own);
        Ok((place, begun.committed))
    }

    async fn commit(&self, place: &Place, digest: Digest, lens: &[u64]) -> Result<Progress> {
        let Begun { controller, contribution, mut owed } = self.take(place).ok_or_else(lost)?;
        let commit = Request::Commit { contribution, digest, lens: lens.to_vec() };
        let answer = controller.ask(&commit, PROOF).await;
        // Whatever came of it, it is decided.
        owed.settle();
        let answer = answer.inspect_err(|error| {
            if error.kind() == ErrorKind::Unreachable {
                let names = (0..lens.len()).map(|number| place.path(number)).collect();
                self.inner().undecided.insert(place.stem.clone(), names);
            }
        });
        match answer?.reply {
            Reply::Progress(progress) => Ok(progress),
            other => Err(unexpected(&other)),
        }
    }

    async fn reason(&self, place: &Place, error: Error) -> Error {
        let Some(Begun { controller, contribution, mut owed }) = self.take(place) else {
            return error;
        };
        owed.settle();
        match controller.ask(&Request::Withdraw { contribution }, Duration::ZERO).await {
            Err(reason) if error.refusal().is_none() && reason.refusal().is_some() => reason,
            _ => error,
        }
    }

    async fn withdraw(&self, place: &Place, count: usize) {
        // If it is owed still, it is said now.
        drop(self.take(place));
        if !self.inner().undecided.contains_key(&place.stem) {
            (0..count).for_each(|number| self.tiers.pool.delete(&place.path(number)));
        }
    }

    async fn lease(&self, _holder: PeerId, key: &Key, selector: Selector) -> Result<Grant> {
        let locate = Request::Locate { key: key.to_string(), selector, devices: false };
        let controller = self.controller().await?;
        let Answer { reply, owed } = controller.ask(&locate, Duration::ZERO).await?;
        let Reply::Leased(leased) = reply else { return Err(unexpected(&reply)) };
        let Leased { lease, id, number, epoch, manifest, archives, .. } = leased;
        let (manifest, at, len) = self.placed(manifest)?;
        let placed = archives.into_iter().map(|(file, place)| Ok((file, self.placed(place)?)));
        let placed: BTreeMap<String, (String, Endpoint, u64)> = placed.collect::<Result<_>>()?;
        let mut noted = Vec::new();
        for (name, at, len) in placed.values().filter(|(_, at, _)| *at != self.own) {
            let keeper = Keeper { endpoint: at.clone(), source: Source::Origin };
            self.tiers.elsewhere.note(name, &[keeper], *len);
            noted.push(name.clone());
        }
        let held = Held { owed, key: key.clone(), id, noted };
        self.inner().leases.insert(lease, held);
        let archives = placed.into_iter().map(|(file, (name, ..))| (file, name)).collect();
        let (missing, instance) = (Some((manifest, at, len)), controller.instance());
        // Another version may come to have the same number: its manifest is another one.
        let manifest = format!("manifest/{id}");
        let (stored, reached) = (false, None);
        Ok(Grant {
            lease,
            id,
            number,
            epoch,
            instance,
            manifest,
            stored,
            missing,
            archives,
            reached,
        })
    }

    async fn manifest(&self, _key: &Key, _id: VersionId) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    async fn release(&self, _key: &Key, lease: LeaseId) {
        let released = self.inner().leases.remove(&lease);
        for name in released.iter().flat_map(|held| &held.noted) {
            self.tiers.elsewhere.forget(name);
        }
    }

    async fn let_go(&self, _key: &Key, _name: &str) -> Result<bool> {
        // Whoever it was put to keeps it.
        Ok(true)
    }

    /// What lasts is put to the daemon that decides.
    async fn lasting(&self, _key: &Key) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    async fn holds_memory(&self) -> Result<bool> {
        Ok(self.tiers.pool.names("").iter().any(|name| !self.tiers.replicas.is_one(name)))
    }

    async fn leave(&self) {}

    async fn hosts(&self) -> Result<Vec<HostStatus>> {
        let host =
            |endpoint: &Endpoint, is_own| HostStatus { address: endpoint.to_string(), is_own };
        self.controller().await?;
        Ok(vec![host(&self.own, true), host(&self.endpoint, false)])
    }

    fn admit(&self, durability: Durability) -> Result<()> {
        if durability != Durability::Memory {
            let text = format_args!(
                "another daemon decides here, and keeps what must last: put it to that one, at {}",
                self.endpoint
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(())
    }

    fn instance(&self) -> u64 {
        self.instance.load(Ordering::Relaxed)
    }

    fn is_elsewhere(&self) -> bool {
        true
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
            // No other host has its memory.
            Location::Span(_) | Location::Hollow(_) => Err(lost()),
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
impl Catalog for Delegate {
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
}
