//! What all sessions of a daemon share: the controller, the arena, who is there and who reads what.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, watch};
use tssd_format::Blob;

use super::DaemonOptions;
use super::counters::{Counters, Reader};
use super::reading::Reading;
use super::registry::{Grant, Registry};
use super::tiers::Tiers;
use crate::arena::{Exhausted, PeerId, Pool, Span};
use crate::controller::LocalController;
use crate::environment::SystemEnvironment;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{LeaseId, Selector};
use crate::ledgers::OwnedLedgers;
use crate::meta::DirectoryMeta;
use crate::status::{DaemonStatus, LeaseStatus, PeerStatus};
use crate::volume::{DirectoryVolume, Volume};

/// How many kilobytes of copies of archives are on their way to other hosts at most, for all together.
const COPIES: usize = 256 << 10;

/// Of how many keys it is known what a reader got last.
const MAX_READ: usize = 16;

pub(super) struct House {
    pub(super) registry: Arc<dyn Registry>,
    pub(super) pool: Arc<Pool>,
    pub(super) tiers: Tiers,
    pub(super) counters: Counters,
    pub(super) reading: Reading,
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
    pub(super) archives: BTreeMap<String, Span>,
}

/// A lease that a peer holds.
struct Held {
    peer: PeerId,
    key: Key,
    number: u64,
    /// What it holds, by its names in the volume.
    names: Vec<String>,
    since: Instant,
}

impl House {
    /// With what the directory holds, if there is one.
    pub(super) async fn open(options: &DaemonOptions) -> Result<Self> {
        let pool = Arc::new(Pool::new(options.memory_limit));
        let mut ledgers = OwnedLedgers::keeping(options.keep);
        let mut directory = None;
        if let Some(root) = &options.root {
            let root = root.canonicalize().map_err(|error| Error::io(root.display(), error))?;
            ledgers = ledgers.recover(Arc::new(DirectoryMeta::new(root.clone()))).await?;
            directory = Some(DirectoryVolume::new(root));
        }
        let tiers = Tiers::new(pool.clone(), directory);
        let controller = LocalController::new(
            Arc::new(ledgers),
            Arc::new(tiers.clone()),
            Arc::new(SystemEnvironment),
        );
        controller.recover().await?;
        Ok(Self {
            registry: Arc::new(controller),
            pool,
            tiers,
            counters: Counters::default(),
            reading: Reading::default(),
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
        let grant = self.registry.lease(peer, key, selector).await?;
        let place = |name: &String| {
            self.tiers.span(name)?.ok_or_else(|| {
                let text = format_args!("key `{key}`: version {} lacks `{name}`", grant.number);
                Error::new(ErrorKind::Corrupt, text)
            })
        };
        let placed = grant.archives.iter().map(|(file, name)| Ok((file.clone(), place(name)?)));
        let placed: Result<BTreeMap<_, _>> = placed.collect();
        let (manifest, archives) = match place(&grant.manifest).and_then(|it| Ok((it, placed?))) {
            Ok(placed) => placed,
            Err(error) => {
                self.registry.release(key, grant.lease).await;
                return Err(error);
            }
        };
        let number = grant.number;
        let names = grant.names().cloned().collect();
        let held = Held { peer, key: key.clone(), number, names, since: Instant::now() };
        {
            let mut inner = self.inner();
            inner.leases.insert(grant.lease, held);
            if let Some(reader) = inner.peers.get_mut(&peer) {
                if reader.read.len() >= MAX_READ && !reader.read.contains_key(key) {
                    reader.read.pop_first();
                }
                reader.read.insert(key.clone(), number);
            }
        }
        let mut counts = self.counters.count();
        counts.gets += 1;
        counts.bytes_leased += archives.values().map(|span: &Span| span.len).sum::<u64>();
        drop(counts);
        Ok(Leased { grant, manifest, archives })
    }

    /// A reader hands a lease back: nothing sees the version through it any more.
    pub(super) async fn release(&self, peer: PeerId, lease: LeaseId) {
        let key = {
            let mut inner = self.inner();
            if inner.leases.get(&lease).is_none_or(|held| held.peer != peer) {
                return;
            }
            inner.leases.remove(&lease).map(|held| held.key)
        };
        if let Some(key) = key {
            self.registry.release(&key, lease).await;
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
        for (lease, held) in lost {
            self.registry.release(&held.key, lease).await;
        }
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
