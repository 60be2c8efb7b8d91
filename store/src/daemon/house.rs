//! What all sessions of a daemon share: the controller, the arena, who is there and who reads what.

mod coming;
mod following;
mod leases;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tssd_format::Blob;

use self::following::Follower;
#[cfg(test)]
pub(crate) use self::following::{MAX_FOLLOWED, MAX_WAITING};
pub(crate) use self::leases::Held;
pub(crate) use self::leases::Leased;
use super::DaemonOptions;
use super::counters::{Counters, Reader};
use super::delegate::Delegate;
use super::elsewhere::Elsewhere;
use super::hosts::{self, Hosts};
use super::lost::Lost;
use super::mirror::{Bucket, Mirror};
use super::reading::Reading;
use super::registry::{Grant, Registry};
use super::replicas;
use super::tiers::Tiers;
use crate::blob::Volume;
use crate::blob::backend::DirectoryVolume;
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::Disk;
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::sync::boxed;
use crate::io::sync::{AsyncMutex, Lock, MutexGuard, Notify, watch};
use crate::key::Key;
use crate::ledger::{Durability, LeaseId};
use crate::metadata::backend::{self, DirectoryMeta};
use crate::metadata::{OwnedLedgers, SharedLedgers};
use crate::net::tls::{Endpoint, Identity};
use crate::shm::{Exhausted, PeerId, Pool};
use crate::status::{DaemonStatus, HostStatus, LeaseStatus, PeerStatus};

/// How many kilobytes of copies of archives are on their way to other hosts at most, for all together.
pub(crate) const COPIES: usize = 256 << 10;

/// For how long it is waited until other hosts are found, whatever becomes of etcd: the rest of a status is here.
const HOSTS_PATIENCE: Duration = Duration::from_secs(2);

pub(crate) struct House {
    pub(crate) registry: Arc<dyn Registry>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) tiers: Tiers,
    /// The bucket that versions are copied to, if there is one.
    pub(crate) mirror: Option<Arc<Mirror>>,
    pub(crate) counters: Counters,
    pub(crate) reading: Reading,
    pub(crate) lost: Arc<Lost>,
    /// Whoever has it copies something small from elsewhere.
    copying: AsyncMutex<()>,
    /// Another one after each start.
    pub(crate) instance: u64,
    /// How many kilobytes of copies may be on their way to other hosts.
    pub(crate) copies: Arc<Semaphore>,
    inner: Lock<Inner>,
    /// Whoever has it makes a version visible that somebody follows the key of.
    telling: AsyncMutex<()>,
    /// Rung whenever something comes for those who follow keys, or they have read it.
    followed: Notify,
    next: AtomicU64,
    started: Instant,
    ending: watch::Sender<Ending>,
    /// Whatever is to be done before the daemon ends has a receiver.
    undecided: watch::Sender<()>,
    /// How many are connected.
    present: watch::Sender<usize>,
    /// What goes on by itself, and ends with this.
    _upkeep: JoinSet<()>,
}

#[derive(Default)]
struct Inner {
    peers: BTreeMap<PeerId, Peer>,
    leases: BTreeMap<LeaseId, Held>,
    /// The versions that were fetched last, each under a lease.
    fetched: BTreeMap<Key, Grant>,
    followers: BTreeMap<u64, Follower>,
}

/// How far the daemon has ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Ending {
    Not,
    /// What has begun ends; nothing begins.
    Draining,
    /// Sessions end.
    Closed,
}

/// A contribution that has begun: the daemon does not end before it is decided, unless that takes too long.
pub(crate) type Undecided = watch::Receiver<()>;

struct Peer {
    pid: u32,
    /// Where it is, if it is not of this host.
    address: Option<SocketAddr>,
    client: String,
    since: Instant,
    /// The number of the version that it got last, of each of a few keys.
    read: BTreeMap<Key, u64>,
}

impl House {
    /// With what the directory and the bucket hold, if there are any; or with a controller, another daemon, or ledgers
    /// that others have too, who are told where this one is.
    pub(crate) async fn open(
        options: &DaemonOptions,
        identity: Identity,
        own: Option<Endpoint>,
        bucket: Option<Bucket>,
    ) -> Result<Self> {
        let pool = Arc::new(Pool::new(options.memory_limit));
        let mut ledgers = OwnedLedgers::keeping(options.keep);
        let mut directory = None;
        if let Some(root) = &options.root {
            let root = root.canonicalize().map_err(|error| Error::io(root.display(), error))?;
            let disk = Disk::at(root);
            ledgers = ledgers.recover(Arc::new(DirectoryMeta::new(disk.clone()))).await?;
            directory = Some(DirectoryVolume::new(disk));
        }
        let tiers = Tiers::new(pool, directory, Elsewhere::new(identity.clone()));
        let mut upkeep = JoinSet::new();
        let environment = || Arc::new(SystemEnvironment);
        let mirror = |own: &LocalController, bucket: Option<Bucket>| {
            let (store, shown) = bucket.map(|bucket| (bucket.store(), bucket.shown))?;
            let (own, replicas) = (own.clone(), tiers.replicas.clone());
            Some(Mirror::new(store, shown, own, replicas, options.bucket_rate))
        };
        let (registry, mirror): (Arc<dyn Registry>, _) =
            match (&options.controller, &options.meta, own) {
                (Some(controller), _, Some(own)) => {
                    let controller = controller.parse()?;
                    let delegate =
                        Delegate::connect(controller, identity, own, tiers.clone()).await?;
                    (Arc::new(delegate), None)
                }
                (None, Some(url), Some(own)) => {
                    let record = own.to_string().into_bytes();
                    let meta = backend::open(url).await?;
                    let mut ledgers = SharedLedgers::of_host(meta, record, options.keep);
                    if let Some(bucket) = &bucket {
                        ledgers = ledgers.restore(bucket.ledgers.clone());
                    }
                    let hosts =
                        Hosts::new(ledgers.clone(), tiers.elsewhere.clone(), tiers.pool.clone());
                    let controller = LocalController::among(
                        Arc::new(ledgers),
                        Arc::new(tiers.clone()),
                        Arc::new(hosts),
                        environment(),
                    );
                    controller.enter().await?;
                    upkeep.spawn(boxed(hosts::look_after(
                        controller.clone(),
                        tiers.replicas.clone(),
                    )));
                    let mirror = mirror(&controller, bucket);
                    (Arc::new(controller), mirror)
                }
                _ => {
                    if let Some(bucket) = &bucket {
                        // Nobody else writes there: what is open was begun by a daemon that has ended.
                        bucket.store().abandon_all_open().await?;
                        ledgers = ledgers.restore(bucket.ledgers.clone()).await?;
                    }
                    let controller = LocalController::new(
                        Arc::new(ledgers),
                        Arc::new(tiers.clone()),
                        environment(),
                    );
                    controller.recover().await?;
                    let mirror = mirror(&controller, bucket);
                    (Arc::new(controller), mirror)
                }
            };
        upkeep.spawn(boxed(replicas::look_after(tiers.replicas.clone(), registry.clone())));
        Ok(Self { mirror, _upkeep: upkeep, ..Self::new(registry, tiers) })
    }

    /// With what is in these tiers, and whoever decides about that.
    pub(crate) fn new(registry: Arc<dyn Registry>, tiers: Tiers) -> Self {
        // One that all readers of JSON can hold.
        let instance = u64::try_from(SystemEnvironment.random() >> 76).unwrap_or_default();
        Self {
            registry,
            pool: tiers.pool.clone(),
            tiers,
            mirror: None,
            counters: Counters::default(),
            reading: Reading::default(),
            lost: Arc::default(),
            copying: AsyncMutex::default(),
            instance,
            copies: Arc::new(Semaphore::new(COPIES)),
            inner: Lock::default(),
            telling: AsyncMutex::default(),
            followed: Notify::new(),
            next: AtomicU64::new(1),
            started: Instant::now(),
            ending: watch::channel(Ending::Not).0,
            undecided: watch::channel(()).0,
            present: watch::channel(0).0,
            _upkeep: JoinSet::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// A number that no other peer or contribution has.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// A contribution begins, unless the daemon ends.
    pub(crate) fn undecided(&self) -> Result<Undecided> {
        // First it is waited for, then it is asked.
        let undecided = self.undecided.subscribe();
        if self.is_ending() {
            return Err(Error::new(
                ErrorKind::Unreachable,
                "the daemon is ending: put when it is there again",
            ));
        }
        Ok(undecided)
    }

    /// Whether somebody may wait for what [`Self::drain`] waits for.
    pub(crate) fn is_busy(&self) -> bool {
        self.mirror.is_some() || self.undecided.receiver_count() > 0
    }

    /// Nothing begins any more. Returns when what has begun is decided, and what is to be in the bucket is there.
    pub(crate) async fn drain(&self) {
        self.ending.send_replace(Ending::Draining);
        self.undecided.closed().await;
        if let Some(mirror) = &self.mirror {
            mirror.idle().await;
        }
    }

    /// Sessions end.
    pub(crate) fn close(&self) {
        self.ending.send_replace(Ending::Closed);
    }

    pub(crate) fn is_ending(&self) -> bool {
        *self.ending.borrow() != Ending::Not
    }

    /// The daemons that decide with this one, or for it; or why they are not found.
    pub(crate) async fn hosts(&self) -> Result<Vec<HostStatus>, String> {
        let hosts = tokio::time::timeout(HOSTS_PATIENCE, self.registry.hosts()).await;
        let hosts = hosts.map_err(|_| "no answer within two seconds".to_owned())?;
        hosts.map_err(|error| error.to_string())
    }

    /// Whether it can be put to and read from; or why not.
    pub(crate) async fn ready(&self) -> Result<(), String> {
        if self.is_ending() {
            return Err("it is ending".to_owned());
        }
        let error = |error| format!("whoever decides is not reached: {error}");
        self.hosts().await.map(drop).map_err(error)
    }

    /// Returns when sessions are to end.
    pub(crate) async fn closed(&self) {
        // The sender is here: it does not go before.
        let _ = self.ending.subscribe().wait_for(|ending| *ending == Ending::Closed).await;
    }

    /// Returns when nobody has been connected for so long and nothing is held that would be lost;
    /// without a time, never.
    pub(crate) async fn unneeded(&self, linger: Option<Duration>) {
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

    pub(crate) fn join(&self, peer: PeerId, origin: (u32, Option<SocketAddr>), client: String) {
        let (pid, address) = origin;
        let joined = Peer { pid, address, client, since: Instant::now(), read: BTreeMap::new() };
        let mut inner = self.inner();
        inner.peers.insert(peer, joined);
        self.present.send_replace(inner.peers.len());
        drop(inner);
        self.counters.count().connections += 1;
    }

    /// Proves that what is to be so durable can be.
    pub(crate) fn check(&self, durability: Durability) -> Result<()> {
        self.registry.admit(durability)?;
        if durability == Durability::Object && self.mirror.is_none() {
            let text =
                "this daemon has no bucket: what must outlast its host needs serve --bucket URL";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        self.tiers.admit(durability).map(drop)
    }

    /// Does something with a key that may change what is kept of it, here and in the bucket.
    pub(crate) async fn change<T>(
        &self,
        key: &Key,
        change: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let Some(mirror) = &self.mirror else { return change.await };
        let was_there = mirror.has(key).await?;
        let changed = change.await?;
        self.let_go_of_replaced(key).await;
        if was_there {
            mirror.sync(key).await?;
        }
        Ok(changed)
    }

    /// What another daemon let this one keep, nobody needs any more.
    pub(crate) fn discard(&self, names: &[String]) -> Result<()> {
        if !self.registry.is_elsewhere() {
            let text = "this daemon keeps nothing for others: it decides itself";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        for name in names {
            self.pool.delete(name);
        }
        Ok(())
    }

    /// Something that others may read, by its name.
    pub(crate) fn open_blob(&self, name: &str) -> Result<Arc<dyn Blob>> {
        // What was leased is there: a file of the directory too.
        let blob = self.pool.open(name).map_err(|error| Error::io(name, error))?;
        blob.map(|near| near.blob).ok_or_else(|| {
            let text = format_args!("`{name}` is not there (any more): locate its version again");
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Why there is no room, and who could make some.
    pub(crate) fn no_room(&self, exhausted: &Exhausted) -> Error {
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
    pub(crate) fn readers(&self) -> Vec<Reader> {
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

    pub(crate) fn status(&self) -> DaemonStatus {
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
            uploads: self.mirror.iter().flat_map(|mirror| mirror.uploads()).collect(),
            hosts: Vec::new(),
            hosts_error: None,
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
                // What nobody who is connected holds, the daemon holds itself, such as what it has fetched.
                pid: peer.map_or_else(std::process::id, |peer| peer.pid),
                address: peer.and_then(|peer| peer.address).map(|address| address.to_string()),
                age: held.since.elapsed(),
            }
        })
    }
}
