//! What all sessions of a daemon share: the controller, the arena, who is there and who reads what.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, watch};
use tssd_format::Blob;

use super::DaemonOptions;
use super::counters::{Counters, Reader};
use super::delegate::Delegate;
use super::elsewhere::Elsewhere;
use super::reading::Reading;
use super::registry::{Grant, Registry};
use super::tiers::{Place, Tiers};
use crate::arena::{Exhausted, PeerId, Pool, Span};
use crate::controller::LocalController;
use crate::environment::{Environment, SystemEnvironment, wait};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{LeaseId, Selector};
use crate::ledgers::OwnedLedgers;
use crate::meta::DirectoryMeta;
use crate::net::{Endpoint, Identity};
use crate::status::{DaemonStatus, LeaseStatus, PeerStatus};
use crate::volume::{DirectoryVolume, Holder, Volume};

/// How many kilobytes of copies of archives are on their way to other hosts at most, for all together.
pub(super) const COPIES: usize = 256 << 10;

/// Who holds what is fetched.
const FETCHER: PeerId = 0;

/// No manifest is longer.
const MAX_MANIFEST: usize = 4 << 30;

/// Of how many keys it is known what a reader got last.
const MAX_READ: usize = 16;

pub(super) struct House {
    pub(super) registry: Arc<dyn Registry>,
    pub(super) pool: Arc<Pool>,
    pub(super) tiers: Tiers,
    pub(super) counters: Counters,
    pub(super) reading: Reading,
    /// Whoever has it copies something small from elsewhere.
    copying: tokio::sync::Mutex<()>,
    /// Another one after each start.
    pub(super) instance: u64,
    /// How many kilobytes of copies may be on their way to other hosts.
    pub(super) copies: Arc<Semaphore>,
    inner: Mutex<Inner>,
    next: AtomicU64,
    started: Instant,
    closing: watch::Sender<bool>,
    /// How many are connected.
    present: watch::Sender<usize>,
}

#[derive(Default)]
struct Inner {
    peers: BTreeMap<PeerId, Peer>,
    leases: BTreeMap<LeaseId, Held>,
    /// How many leases hold a blob.
    uses: BTreeMap<String, u64>,
    /// Blobs that are deleted when nobody holds them any more.
    doomed: BTreeSet<String>,
    /// The versions that were fetched last, each under a lease.
    fetched: BTreeMap<Key, Grant>,
}

struct Peer {
    pid: u32,
    /// Where it is, if it is not of this host.
    address: Option<SocketAddr>,
    client: String,
    since: Instant,
    /// The number of the version that it got last, of each of a few keys.
    read: BTreeMap<Key, u64>,
}

/// A version that a peer has been given, and where its bytes are.
pub(super) struct Leased {
    pub(super) grant: Grant,
    pub(super) manifest: Span,
    pub(super) archives: BTreeMap<String, Place>,
}

/// A lease that a peer holds.
struct Held {
    peer: PeerId,
    key: Key,
    number: u64,
    /// What it holds, by its names in the volume.
    names: Vec<String>,
    /// Whether the registry holds it too.
    is_registered: bool,
    since: Instant,
}

impl House {
    /// With what the directory holds, if there is one; or with a controller, another daemon, which is told
    /// where this one is.
    pub(super) async fn open(
        options: &DaemonOptions,
        identity: Identity,
        controller: Option<(Endpoint, Endpoint)>,
    ) -> Result<Self> {
        let pool = Arc::new(Pool::new(options.memory_limit));
        let mut ledgers = OwnedLedgers::keeping(options.keep);
        let mut directory = None;
        if let Some(root) = &options.root {
            let root = root.canonicalize().map_err(|error| Error::io(root.display(), error))?;
            ledgers = ledgers.recover(Arc::new(DirectoryMeta::new(root.clone()))).await?;
            directory = Some(DirectoryVolume::new(root));
        }
        let tiers = Tiers::new(pool.clone(), directory, Elsewhere::new(identity.clone()));
        let registry: Arc<dyn Registry> = if let Some((controller, own)) = controller {
            Arc::new(Delegate::connect(controller, identity, own, tiers.clone()).await?)
        } else {
            let controller = LocalController::new(
                Arc::new(ledgers),
                Arc::new(tiers.clone()),
                Arc::new(SystemEnvironment),
            );
            controller.recover().await?;
            Arc::new(controller)
        };
        // One that all readers of JSON can hold.
        let instance = u64::try_from(SystemEnvironment.random() >> 76).unwrap_or_default();
        Ok(Self {
            registry,
            pool,
            tiers,
            counters: Counters::default(),
            reading: Reading::default(),
            copying: tokio::sync::Mutex::default(),
            instance,
            copies: Arc::new(Semaphore::new(COPIES)),
            inner: Mutex::default(),
            next: AtomicU64::new(1),
            started: Instant::now(),
            closing: watch::Sender::new(false),
            present: watch::Sender::new(0),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding the house")
    }

    /// A number that no other peer or contribution has.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sessions end.
    pub(super) fn close(&self) {
        self.closing.send_replace(true);
    }

    pub(super) fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Returns when sessions are to end.
    pub(super) async fn closed(&self) {
        // The sender is here: it does not go before.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }

    /// Returns when nobody has been connected for so long and nothing is held that would be lost;
    /// without a time, never.
    pub(super) async fn unneeded(&self, linger: Option<Duration>) {
        let Some(linger) = linger else { return std::future::pending().await };
        let mut present = self.present.subscribe();
        loop {
            // The sender is here: it does not go before.
            let _ = present.wait_for(|count| *count == 0).await;
            let came = present.wait_for(|count| *count > 0);
            if tokio::time::timeout(linger, came).await.is_err()
                && matches!(self.registry.holds_memory().await, Ok(false))
            {
                return;
            }
        }
    }

    pub(super) fn join(&self, peer: PeerId, origin: (u32, Option<SocketAddr>), client: String) {
        let (pid, address) = origin;
        let joined = Peer { pid, address, client, since: Instant::now(), read: BTreeMap::new() };
        let mut inner = self.inner();
        inner.peers.insert(peer, joined);
        self.present.send_replace(inner.peers.len());
        drop(inner);
        self.counters.count().connections += 1;
    }

    /// Gives a reader a version, with a lease.
    pub(super) async fn lease(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
    ) -> Result<Leased> {
        let fetched = self.inner().fetched(key, selector);
        let (grant, is_registered) = match fetched {
            Some(grant) => (grant, false),
            None => (self.registry.lease(peer, key, selector).await?, true),
        };
        let (number, names) = (grant.number, grant.names().cloned().collect());
        let held =
            Held { peer, key: key.clone(), number, names, is_registered, since: Instant::now() };
        {
            let mut inner = self.inner();
            inner.hold(&held.names);
            inner.leases.insert(grant.lease, held);
        }
        match self.place(key, &grant).await {
            Ok((manifest, archives)) => {
                self.count_get(peer, key, number, &archives);
                Ok(Leased { grant, manifest, archives })
            }
            Err(error) => {
                self.release(peer, grant.lease).await;
                Err(error)
            }
        }
    }

    /// Where the manifest and the archives of a version are that is held.
    async fn place(&self, key: &Key, grant: &Grant) -> Result<(Span, BTreeMap<String, Place>)> {
        let place = |name: &String| {
            self.tiers.place(name)?.ok_or_else(|| {
                let text = format_args!("key `{key}`: version {} lacks `{name}`", grant.number);
                Error::new(ErrorKind::Corrupt, text)
            })
        };
        self.copy_manifest(grant).await?;
        let Place::Here(manifest) = place(&grant.manifest)? else {
            return Err(Error::new(ErrorKind::Corrupt, "the manifest is elsewhere"));
        };
        let archives = grant.archives.iter();
        let archives = archives.map(|(file, name)| Ok((file.clone(), place(name)?)));
        Ok((manifest, archives.collect::<Result<_>>()?))
    }

    /// The manifest of a version that another daemon has is small: it is copied, and stays while somebody
    /// holds the version.
    async fn copy_manifest(&self, grant: &Grant) -> Result<()> {
        let Some((endpoint, len)) = grant.missing.clone() else { return Ok(()) };
        let name = grant.manifest.clone();
        let _copying = self.copying.lock().await;
        if self.pool.span(&name).is_some() {
            return Ok(());
        }
        let lines = self.tiers.elsewhere.host(&endpoint);
        let bytes = {
            let name = name.clone();
            wait(move || {
                let len = usize::try_from(len).ok().filter(|len| *len <= MAX_MANIFEST);
                let text = "a manifest is longer than can be";
                let mut bytes = vec![0; len.ok_or_else(|| Error::new(ErrorKind::Corrupt, text))?];
                let read = lines.read_exact_at(&name, &mut bytes, 0);
                read.map_err(|error| Error::io(&name, error)).map(|()| bytes)
            })
            .await?
        };
        let written = self.pool.write(&name, &bytes).map_err(|error| Error::io(&name, error))?;
        written.map_err(|exhausted| self.no_room(&exhausted))?;
        self.let_go(&name);
        Ok(())
    }

    fn count_get(&self, peer: PeerId, key: &Key, number: u64, archives: &BTreeMap<String, Place>) {
        {
            let mut inner = self.inner();
            if let Some(reader) = inner.peers.get_mut(&peer) {
                if reader.read.len() >= MAX_READ && !reader.read.contains_key(key) {
                    reader.read.pop_first();
                }
                reader.read.insert(key.clone(), number);
            }
        }
        let mut counts = self.counters.count();
        counts.gets += 1;
        counts.bytes_leased += archives.values().map(Place::len).sum::<u64>();
    }

    /// Nobody needs a blob any more, but for those who read it now.
    pub(super) fn let_go(&self, name: &str) {
        let is_free = {
            let mut inner = self.inner();
            let is_held = inner.uses.contains_key(name);
            if is_held {
                inner.doomed.insert(name.to_owned());
            }
            !is_held
        };
        if is_free {
            self.pool.delete(name);
        }
    }

    /// A reader hands a lease back: nothing sees the version through it any more.
    pub(super) async fn release(&self, peer: PeerId, lease: LeaseId) {
        let held = {
            let mut inner = self.inner();
            if inner.leases.get(&lease).is_none_or(|held| held.peer != peer) {
                return;
            }
            inner.leases.remove(&lease)
        };
        if let Some(held) = held {
            self.end(lease, &held).await;
        }
    }

    async fn end(&self, lease: LeaseId, held: &Held) {
        let free = self.inner().unhold(&held.names);
        for name in &free {
            self.pool.delete(name);
        }
        if held.is_registered {
            self.registry.release(&held.key, lease).await;
        }
    }

    /// A peer is lost. If it has this host's memory, what it read cannot be written again: nobody says
    /// that it is not seen any more.
    pub(super) async fn lose(&self, peer: PeerId, is_near: bool) {
        let lost: Vec<(LeaseId, Held)> = {
            let mut inner = self.inner();
            inner.peers.remove(&peer);
            self.present.send_replace(inner.peers.len());
            inner.leases.extract_if(.., |_, held| held.peer == peer).collect()
        };
        for name in lost.iter().flat_map(|(_, held)| &held.names).filter(|_| is_near) {
            self.pool.suspect(name);
        }
        for (lease, held) in &lost {
            self.end(*lease, held).await;
        }
    }

    /// A version that is on its way here: what of it is elsewhere, and has to be copied. It is held until it
    /// is [fetched](House::fetched).
    pub(super) async fn fetch(
        &self,
        key: &Key,
        selector: Selector,
        only: Option<&[String]>,
    ) -> Result<(Grant, Vec<(String, Endpoint, u64)>)> {
        let grant = self.registry.lease(FETCHER, key, selector).await?;
        let (number, names) = (grant.number, grant.names().cloned().collect());
        let (peer, is_registered) = (FETCHER, true);
        let held =
            Held { peer, key: key.clone(), number, names, is_registered, since: Instant::now() };
        {
            let mut inner = self.inner();
            inner.hold(&held.names);
            inner.leases.insert(grant.lease, held);
        }
        let placed = self.place(key, &grant).await;
        let (_, archives) = match placed {
            Ok(placed) => placed,
            Err(error) => {
                self.release(FETCHER, grant.lease).await;
                return Err(error);
            }
        };
        let wanted =
            archives.into_iter().filter(|(file, _)| only.is_none_or(|only| only.contains(file)));
        let far = wanted.filter_map(|(file, place)| match place {
            Place::Here(_) => None,
            Place::There(endpoint, len) => Some((grant.archives[&file].clone(), endpoint, len)),
        });
        let far = far.collect();
        Ok((grant, far))
    }

    /// A version is here, as far as it was wanted: it stays until another one of its key is. If all of it is
    /// a copy, whoever else has it need not keep it for us.
    pub(super) async fn fetched(&self, key: &Key, grant: Grant) {
        let lease = grant.lease;
        let mut is_copied = grant.missing.is_some();
        for name in grant.archives.values() {
            is_copied &= self.inner().doomed.contains(name);
        }
        let (earlier, released) = {
            let mut inner = self.inner();
            let earlier = inner.fetched.insert(key.clone(), grant);
            let released = inner.leases.get_mut(&lease).filter(|_| is_copied).map(|held| {
                held.is_registered = false;
            });
            (earlier, released.is_some())
        };
        if released {
            self.registry.release(key, lease).await;
        }
        if let Some(earlier) = earlier {
            self.release(FETCHER, earlier.lease).await;
        }
    }

    /// It did not come.
    pub(super) async fn give_up(&self, grant: &Grant) {
        self.release(FETCHER, grant.lease).await;
    }

    /// Something that others may read, by its name.
    pub(super) fn open_blob(&self, name: &str) -> Result<Arc<dyn Blob>> {
        self.tiers.open(name)?.ok_or_else(|| {
            let text = format_args!("`{name}` is not there (any more): locate its version again");
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Why there is no room, and who could make some.
    pub(super) fn no_room(&self, exhausted: &Exhausted) -> Error {
        let inner = self.inner();
        let holders: Vec<String> = inner.lease_statuses().map(|lease| lease.to_string()).collect();
        let holders = match holders.as_slice() {
            [] => "nobody reads: versions are being written or pinned".to_owned(),
            holders => format!("held by {}", holders.join(", ")),
        };
        let retired = match self.pool.status().retired {
            0 => String::new(),
            bytes => format!("; {bytes} of them were let go, and processes have them mapped still"),
        };
        Error::new(
            ErrorKind::Busy,
            format_args!(
                "no memory: {exhausted}{retired}; {holders}. Wait until they are done, keep fewer versions, \
                 or serve with a higher memory limit"
            ),
        )
    }

    /// What those who are connected got last.
    pub(super) fn readers(&self) -> Vec<Reader> {
        let inner = self.inner();
        let reader = |(&peer, joined): (&PeerId, &Peer)| {
            let pid = joined.pid;
            let read = joined.read.iter();
            let read = read.map(move |(key, &version)| Reader {
                peer,
                pid,
                key: key.to_string(),
                version,
            });
            read.collect::<Vec<_>>()
        };
        inner.peers.iter().flat_map(reader).collect()
    }

    pub(super) fn status(&self) -> DaemonStatus {
        let inner = self.inner();
        let peer = |peer: &Peer| PeerStatus {
            pid: peer.pid,
            address: peer.address.map(|address| address.to_string()),
            client: peer.client.clone(),
            age: peer.since.elapsed(),
        };
        DaemonStatus {
            pid: std::process::id(),
            daemon: concat!("tssd ", env!("CARGO_PKG_VERSION")).to_owned(),
            uptime: self.started.elapsed(),
            memory: self.pool.status(),
            peers: inner.peers.values().map(peer).collect(),
            leases: inner.lease_statuses().collect(),
        }
    }
}

impl Inner {
    fn hold(&mut self, names: &[String]) {
        for name in names {
            *self.uses.entry(name.clone()).or_default() += 1;
        }
    }

    /// Returns what is to be deleted now.
    fn unhold(&mut self, names: &[String]) -> Vec<String> {
        let mut free = Vec::new();
        for name in names {
            let Some(uses) = self.uses.get_mut(name) else { continue };
            *uses -= 1;
            if *uses == 0 {
                self.uses.remove(name);
                free.extend(self.doomed.take(name));
            }
        }
        free
    }

    /// A version that was fetched, if it is asked for by its name: under a lease of its own.
    fn fetched(&self, key: &Key, selector: Selector) -> Option<Grant> {
        let grant = self.fetched.get(key)?;
        let is_it = match selector {
            Selector::Newest => false,
            Selector::Number(number) => grant.number == number,
            Selector::Id(id) => grant.id == id,
        };
        let lease = LeaseId(SystemEnvironment.random());
        is_it.then(|| Grant { lease, ..grant.clone() })
    }

    fn lease_statuses(&self) -> impl Iterator<Item = LeaseStatus> {
        self.leases.values().map(|held| {
            let peer = self.peers.get(&held.peer);
            LeaseStatus {
                key: held.key.to_string(),
                version: held.number,
                pid: peer.map_or(0, |peer| peer.pid),
                address: peer.and_then(|peer| peer.address).map(|address| address.to_string()),
                age: held.since.elapsed(),
            }
        })
    }
}
