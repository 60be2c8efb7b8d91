//! What all sessions of a daemon share: the controller, the arena, who is there and who reads what.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::DaemonOptions;
use super::counters::{Counters, Reader};
use super::tiers::Tiers;
use crate::arena::{Exhausted, PeerId, Pool};
use crate::controller::{LocalController, archives, folder};
use crate::environment::SystemEnvironment;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Command, LeaseId, Outcome, Selector, VersionId};
use crate::ledgers::OwnedLedgers;
use crate::meta::DirectoryMeta;
use crate::status::{DaemonStatus, LeaseStatus, PeerStatus};
use crate::volume::DirectoryVolume;
use crate::wire::{Archives, Leased};

/// For how long a lease gives the right to new reads.
const LEASE: Duration = Duration::from_mins(10);

/// Of how many keys it is known what a reader got last.
const MAX_READ: usize = 16;

pub(super) struct House {
    pub(super) controller: LocalController,
    pub(super) pool: Arc<Pool>,
    pub(super) tiers: Tiers,
    pub(super) counters: Counters,
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
    client: String,
    since: Instant,
    /// The number of the version that it got last, of each of a few keys.
    read: BTreeMap<Key, u64>,
}

/// A lease that a peer holds.
struct Held {
    peer: PeerId,
    key: Key,
    version: VersionId,
    number: u64,
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
            controller,
            pool,
            tiers,
            counters: Counters::default(),
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
                && matches!(self.controller.holds_memory().await, Ok(false))
            {
                return;
            }
        }
    }

    pub(super) fn join(&self, peer: PeerId, pid: u32, client: String) {
        let joined = Peer { pid, client, since: Instant::now(), read: BTreeMap::new() };
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
        let lease = LeaseId(self.controller.random());
        let command = Command::Lease {
            selector,
            lease,
            holder: holder(peer),
            ttl: LEASE,
            now: self.controller.now(),
        };
        let leased = self.controller.apply(key, command).await?;
        let Outcome::Leased { id, number, manifest, .. } = leased else {
            unreachable!("a lease does not lead to {leased:?}")
        };
        let held = Held { peer, key: key.clone(), version: id, number, since: Instant::now() };
        {
            let mut inner = self.inner();
            inner.leases.insert(lease, held);
            if let Some(reader) = inner.peers.get_mut(&peer) {
                if reader.read.len() >= MAX_READ && !reader.read.contains_key(key) {
                    reader.read.pop_first();
                }
                reader.read.insert(key.clone(), number);
            }
        }
        let state = self.controller.state(key).await?;
        let span = |name: &str| {
            self.tiers.span(name)?.ok_or_else(|| {
                let text = format_args!("key `{key}`: version {number} lacks `{name}`");
                Error::new(ErrorKind::Corrupt, text)
            })
        };
        let version = state.versions().find(|version| version.id == id);
        let version = version.expect("the lease holds it");
        let folder = folder(key, version);
        let named = archives(version).into_iter().map(|name| {
            let span = span(&format!("{folder}/{name}"))?;
            Ok((name, span))
        });
        let archives = named.collect::<Result<Archives>>()?;
        let manifest = span(&manifest.name)?;
        let mut counts = self.counters.count();
        counts.gets += 1;
        counts.bytes_leased += archives.values().map(|span| span.len).sum::<u64>();
        drop(counts);
        Ok(Leased { lease, id, manifest, archives, segments: Vec::new() })
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
            self.settle(&key, Command::Release { lease }).await;
        }
    }

    /// A peer is lost. What it read cannot be written again: nobody says that it is not seen any more.
    pub(super) async fn lose(&self, peer: PeerId) {
        let lost: Vec<(Key, VersionId)> = {
            let mut inner = self.inner();
            inner.peers.remove(&peer);
            self.present.send_replace(inner.peers.len());
            let lost = inner.leases.extract_if(.., |_, held| held.peer == peer);
            lost.map(|(_, held)| (held.key, held.version)).collect()
        };
        for (key, version) in &lost {
            let Ok(state) = self.controller.state(key).await else { continue };
            let Some(version) = state.versions().find(|each| each.id == *version) else { continue };
            let folder = folder(key, version);
            for name in archives(version) {
                self.pool.suspect(&format!("{folder}/{name}"));
            }
            if let Some(manifest) = version.manifest() {
                self.pool.suspect(&manifest.name);
            }
        }
        for (key, _) in lost {
            self.settle(&key, Command::HolderGone { holder: holder(peer) }).await;
        }
    }

    /// Gives a command that cannot be refused, and carries out what is owed then.
    async fn settle(&self, key: &Key, command: Command) {
        // Both are in memory; what fails all the same stays owed.
        let _ = self.controller.apply(key, command).await;
        let _ = self.controller.reclaim_owed(key).await;
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
        self.leases.values().map(|held| LeaseStatus {
            key: held.key.to_string(),
            version: held.number,
            pid: self.peers.get(&held.peer).map_or(0, |peer| peer.pid),
            age: held.since.elapsed(),
        })
    }
}

/// How a peer is called in ledgers.
fn holder(peer: PeerId) -> String {
    peer.to_string()
}
