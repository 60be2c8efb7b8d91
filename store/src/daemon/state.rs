//! State that all sessions of a daemon share.
//!
//! It consists of the control plane, the memory pool, the connected peers and their leases.

mod followers;
mod leases;
mod materialize;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tssd_format::Blob;

pub(crate) use self::leases::HeldLease;
pub(crate) use self::leases::LocatedVersion;
use super::DaemonOptions;
use super::counters::{Counters, ReaderPosition};
use super::replicas;
use crate::blob::Volume;
use crate::blob::backend::DirectoryVolume;
use crate::control::Peers;
use crate::daemon::bucket_sync::{Bucket, BucketReplicator, UploadOptions};
use crate::daemon::chunk_verifier::ChunkVerifier;
use crate::daemon::connected_runs::{ConnectedRuns, SharedRuns};
use crate::daemon::control_plane::{ControlPlane, LeasedVersion};
use crate::daemon::fetchers::Fetchers;
use crate::daemon::peers::{self, PeerDirectory};
use crate::daemon::process_watcher::ProcessWatcher;
use crate::daemon::proxy::ControllerProxy;
use crate::daemon::remote_blobs::RemoteBlobIndex;
use crate::daemon::state::followers::Follower;
#[cfg(test)]
pub(crate) use crate::daemon::state::followers::{MAX_FOLLOWED_KEYS, MAX_QUEUED_VERSIONS};
use crate::daemon::tiered::TieredVolume;
use crate::daemon::uplink::Uplink;
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
use crate::shm::{PeerId, Pool, PoolExhausted};
use crate::status::{DaemonStatus, HostStatus, LeaseStatus, MemoryStatus, PeerStatus};

/// Program and version of this daemon, for people.
pub(super) const DAEMON_NAME: &str = concat!("tssd ", env!("CARGO_PKG_VERSION"));

/// Maximum size in KiB of copies of archives that wait to be sent, for all sessions together.
pub(crate) const MAX_COPIED_KIB: usize = 256 << 10;

/// Timeout of the list of peers. A slow etcd must not delay the rest of a status, which is local.
const PEERS_TIMEOUT: Duration = Duration::from_secs(2);

/// State that all sessions of a daemon share.
pub(crate) struct DaemonState {
    pub(crate) control_plane: Arc<dyn ControlPlane>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) volume: TieredVolume,
    /// The runs whose processes put through the connections of this daemon.
    pub(crate) connected_runs: Arc<ConnectedRuns>,
    /// Copies versions to and from the bucket, if there is one.
    pub(crate) replicator: Option<Arc<BucketReplicator>>,
    pub(crate) counters: Counters,
    pub(crate) chunk_verifier: ChunkVerifier,
    /// The daemons that fetch blobs of this one.
    pub(crate) fetchers: Fetchers,
    /// The limits of what this daemon sends to other hosts, if there are some.
    pub(crate) uplink: Option<Arc<Uplink>>,
    pub(crate) process_watcher: Arc<ProcessWatcher>,
    /// Serializes copies of manifests from other daemons.
    manifest_copy_lock: AsyncMutex<()>,
    /// Random identity of this run of the daemon. It differs after each start.
    pub(crate) instance: u64,
    /// Credit for copies of archives that wait to be sent, in KiB. See [`MAX_COPIED_KIB`].
    pub(crate) copy_credit: Arc<Semaphore>,
    inner: Lock<Inner>,
    /// Serializes commits to keys that have followers.
    commit_lock: AsyncMutex<()>,
    /// Notified when a version is queued for a follower, and when a follower releases one.
    followers_changed: Notify,
    next_number: AtomicU64,
    started: Instant,
    phase: watch::Sender<Phase>,
    /// Each open contribution has a receiver of this channel.
    commit_guards: watch::Sender<()>,
    /// Number of connected peers.
    connected_count: watch::Sender<usize>,
    /// Background tasks. They are aborted when the state is dropped.
    _background: JoinSet<()>,
}

#[derive(Default)]
struct Inner {
    peers: BTreeMap<PeerId, Peer>,
    leases: BTreeMap<LeaseId, HeldLease>,
    /// The newest prefetched version of each key, with its lease.
    prefetched: BTreeMap<Key, LeasedVersion>,
    followers: BTreeMap<u64, Follower>,
}

/// Phase of the life of a daemon.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Phase {
    Running,
    /// Open contributions and uploads complete. New contributions are rejected.
    Draining,
    /// Sessions end.
    Closed,
}

/// A guard that an open contribution holds until it is committed or withdrawn.
///
/// [`DaemonState::drain`] waits until no guard exists.
pub(crate) type CommitGuard = watch::Receiver<()>;

/// A connected client or daemon.
struct Peer {
    pid: u32,
    /// Its address, if it is on another host.
    address: Option<SocketAddr>,
    client: String,
    since: Instant,
    /// Numbers of the versions that the peer leased last, for a limited number of keys.
    last_leased: BTreeMap<Key, u64>,
}

impl DaemonState {
    /// Opens the storage and the control plane that the options name.
    ///
    /// The control plane is one of:
    ///
    /// - a proxy for the controller in another daemon;
    /// - a local controller on shared ledgers, which registers the address of this daemon there;
    /// - a local controller on local ledgers, which recovers the versions in the directory and the bucket.
    ///
    /// `own` is the address at which other daemons reach this one. The first two need it.
    pub(crate) async fn open(
        options: &DaemonOptions,
        identity: Identity,
        own: Option<Endpoint>,
        bucket: Option<Bucket>,
    ) -> Result<Self> {
        let pool = Arc::new(Pool::new(options.memory_limit));
        let mut ledgers = OwnedLedgers::with_keep(options.keep);
        let mut directory = None;
        if let Some(root) = &options.root {
            let root = root.canonicalize().map_err(|error| Error::io_at(root, error))?;
            let disk = Disk::at(root);
            ledgers = ledgers.recover(Arc::new(DirectoryMeta::new(disk.clone()))).await?;
            directory = Some(DirectoryVolume::new(disk));
        }
        let remote_blobs = RemoteBlobIndex::new(identity.clone(), own.clone())
            .with_min_fetch_rate(options.min_fetch_rate);
        let tiers = TieredVolume::new(pool, directory, remote_blobs, options.deltas);
        let mut background = JoinSet::new();
        let connected_runs = Arc::new(ConnectedRuns::default());
        let environment = || Arc::new(SystemEnvironment);
        let new_replicator = |own: &LocalController, bucket: Option<Bucket>| {
            let (store, shown) = bucket.map(|bucket| (bucket.controller(), bucket.url))?;
            let (own, replicas) = (own.clone(), tiers.replicas.clone());
            let upload = UploadOptions {
                bytes_per_second: options.bucket_rate,
                deltas: options.bucket_deltas,
            };
            Some(BucketReplicator::new(store, shown, own, replicas, upload))
        };
        let (control_plane, replicator): (Arc<dyn ControlPlane>, _) =
            match (&options.controller, &options.meta, own) {
                (Some(controller), _, Some(own)) => {
                    let controller = controller.parse()?;
                    let proxy = ControllerProxy::connect(
                        controller,
                        identity,
                        own,
                        tiers.clone(),
                        connected_runs.clone(),
                    )
                    .await?;
                    let proxy = Arc::new(proxy);
                    let reconnecting = proxy.clone();
                    background.spawn(boxed(async move { reconnecting.keep_runs_known().await }));
                    (proxy, None)
                }
                (None, Some(url), Some(own)) => {
                    let record = peers::encode_session_record(&own);
                    let meta = backend::open(url).await?;
                    let mut ledgers = SharedLedgers::for_host(meta, record, options.keep);
                    if let Some(bucket) = &bucket {
                        ledgers = ledgers.restore(bucket.ledgers.clone());
                    }
                    let hosts = PeerDirectory::new(
                        ledgers.clone(),
                        tiers.remote_blobs.clone(),
                        tiers.pool.clone(),
                    );
                    let runs = SharedRuns {
                        own: connected_runs.clone(),
                        own_address: own,
                        ledgers: ledgers.clone(),
                        remote_blobs: tiers.remote_blobs.clone(),
                    };
                    let controller = LocalController::with_peers(
                        Arc::new(ledgers),
                        Arc::new(tiers.clone()),
                        Peers { replica_locator: Arc::new(hosts), runs: Arc::new(runs) },
                        environment(),
                    );
                    controller.begin_session().await?;
                    background
                        .spawn(boxed(peers::maintain(controller.clone(), tiers.replicas.clone())));
                    let replicator = new_replicator(&controller, bucket);
                    (Arc::new(controller), replicator)
                }
                _ => {
                    if let Some(bucket) = &bucket {
                        // No other process writes to the bucket, so open versions belong to a daemon that has ended.
                        bucket.controller().abandon_all_open().await?;
                        ledgers = ledgers.restore(bucket.ledgers.clone()).await?;
                    }
                    let peers = Peers { runs: connected_runs.clone(), ..Peers::default() };
                    let controller = LocalController::with_peers(
                        Arc::new(ledgers),
                        Arc::new(tiers.clone()),
                        peers,
                        environment(),
                    );
                    controller.recover().await?;
                    let replicator = new_replicator(&controller, bucket);
                    (Arc::new(controller), replicator)
                }
            };
        background.spawn(boxed(replicas::maintain(tiers.replicas.clone(), control_plane.clone())));
        let state = Self::new(control_plane, tiers);
        let uplink = Uplink::limited(options.send_rate, options.send_hosts);
        Ok(Self { uplink, connected_runs, replicator, _background: background, ..state })
    }

    /// Creates the state of a daemon with a volume and the control plane of its versions.
    pub(crate) fn new(control_plane: Arc<dyn ControlPlane>, tiers: TieredVolume) -> Self {
        // 52 bits: a JSON parser that uses doubles represents the number exactly.
        let instance = u64::try_from(SystemEnvironment.random_id() >> 76).unwrap_or_default();
        Self {
            control_plane,
            pool: tiers.pool.clone(),
            volume: tiers,
            connected_runs: Arc::default(),
            replicator: None,
            counters: Counters::default(),
            chunk_verifier: ChunkVerifier::default(),
            fetchers: Fetchers::default(),
            uplink: None,
            process_watcher: Arc::default(),
            manifest_copy_lock: AsyncMutex::default(),
            instance,
            copy_credit: Arc::new(Semaphore::new(MAX_COPIED_KIB)),
            inner: Lock::default(),
            commit_lock: AsyncMutex::default(),
            followers_changed: Notify::new(),
            next_number: AtomicU64::new(1),
            started: Instant::now(),
            phase: watch::channel(Phase::Running).0,
            commit_guards: watch::channel(()).0,
            connected_count: watch::channel(0).0,
            _background: JoinSet::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Returns a number that no other peer, contribution or follower has.
    pub(crate) fn next_number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a guard for a new contribution.
    ///
    /// # Errors
    ///
    /// `Unreachable` if the daemon is shutting down.
    pub(crate) fn commit_guard(&self) -> Result<CommitGuard> {
        // The receiver must exist before the phase is read: otherwise `drain` could miss this contribution.
        let guard = self.commit_guards.subscribe();
        if self.is_shutting_down() {
            return Err(Error::new(
                ErrorKind::Unreachable,
                "the daemon is ending: put when it is there again",
            ));
        }
        Ok(guard)
    }

    /// Whether clients may wait for a commit or an upload that [`Self::drain`] completes.
    pub(crate) fn is_busy(&self) -> bool {
        self.replicator.is_some() || self.commit_guards.receiver_count() > 0
    }

    /// Rejects new contributions and waits until the open ones and all uploads are complete.
    pub(crate) async fn drain(&self) {
        self.phase.send_replace(Phase::Draining);
        self.commit_guards.closed().await;
        if let Some(replicator) = &self.replicator {
            replicator.wait_idle().await;
        }
    }

    /// Ends all sessions.
    pub(crate) fn close(&self) {
        self.phase.send_replace(Phase::Closed);
    }

    pub(crate) fn is_shutting_down(&self) -> bool {
        *self.phase.borrow() != Phase::Running
    }

    /// Returns the daemons that share the ledgers, this one included, or this daemon and its controller.
    ///
    /// The list is empty if this daemon has its own ledgers. The error says why the list is not available.
    pub(crate) async fn peers(&self) -> Result<Vec<HostStatus>, String> {
        let hosts = tokio::time::timeout(PEERS_TIMEOUT, self.control_plane.peers()).await;
        let hosts = hosts.map_err(|_| "no answer within two seconds".to_owned())?;
        hosts.map_err(|error| error.to_string())
    }

    /// Checks that the daemon can serve puts and gets. The error says why it cannot.
    pub(crate) async fn check_ready(&self) -> Result<(), String> {
        if self.is_shutting_down() {
            return Err("it is ending".to_owned());
        }
        let error = |error| format!("whoever decides is not reached: {error}");
        self.peers().await.map(drop).map_err(error)
    }

    /// Waits until [`Self::close`] is called.
    pub(crate) async fn closed(&self) {
        // `self` owns the sender, so the channel stays open.
        let _ = self.phase.subscribe().wait_for(|phase| *phase == Phase::Closed).await;
    }

    /// Waits until no peer has been connected for `linger` and no version would be lost by an exit.
    ///
    /// Without a duration it waits forever.
    pub(crate) async fn wait_until_idle(&self, linger: Option<Duration>) {
        let Some(linger) = linger else { return std::future::pending().await };
        let mut connected_count = self.connected_count.subscribe();
        loop {
            // `self` owns the sender, so the channel stays open.
            let _ = connected_count.wait_for(|count| *count == 0).await;
            let connected = connected_count.wait_for(|count| *count > 0);
            if tokio::time::timeout(linger, connected).await.is_err()
                && matches!(self.control_plane.has_volatile_versions().await, Ok(false))
            {
                return;
            }
        }
    }

    /// Registers a connected peer.
    pub(crate) fn add_peer(
        &self,
        peer: PeerId,
        pid: u32,
        address: Option<SocketAddr>,
        client: String,
    ) {
        let connected =
            Peer { pid, address, client, since: Instant::now(), last_leased: BTreeMap::new() };
        let mut inner = self.inner();
        inner.peers.insert(peer, connected);
        self.connected_count.send_replace(inner.peers.len());
        drop(inner);
        self.counters.lock().connections += 1;
    }

    /// Checks that this daemon can provide a durability.
    ///
    /// # Errors
    ///
    /// `Invalid` if it cannot.
    pub(crate) fn check_durability(&self, durability: Durability) -> Result<()> {
        self.control_plane.check_durability(durability)?;
        if durability == Durability::Object && self.replicator.is_none() {
            let text =
                "this daemon has no bucket: what must outlast its host needs serve --bucket URL";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        self.volume.admit(durability).map(drop)
    }

    /// Runs an operation that may change which versions of a key are kept, here and in the bucket.
    pub(crate) async fn with_bucket_sync<T>(
        &self,
        key: &Key,
        change: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let Some(replicator) = &self.replicator else { return change.await };
        let was_there = replicator.has_versions(key).await?;
        let changed = change.await?;
        self.release_replaced(key).await;
        if was_there {
            replicator.sync(key).await?;
        }
        Ok(changed)
    }

    /// Deletes blobs that this daemon stores for the controller in another daemon.
    ///
    /// # Errors
    ///
    /// `Refused` if this daemon has its own ledgers.
    pub(crate) fn discard(&self, names: &[String]) -> Result<()> {
        if !self.control_plane.is_shared() {
            let text = "this daemon keeps nothing for others: it decides itself";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        for name in names {
            self.pool.delete(name);
        }
        Ok(())
    }

    /// Opens a blob in memory for a remote reader.
    ///
    /// # Errors
    ///
    /// `NotFound` if it is not in memory; `Io` if it cannot be mapped.
    pub(crate) fn open_blob(&self, name: &str) -> Result<Arc<dyn Blob>> {
        // A leased blob is in the pool: the pool also has segments for files of the directory.
        let blob = self.pool.open(name).map_err(|error| Error::io(name, error))?;
        blob.map(|archive| archive.blob).ok_or_else(|| {
            let text = format_args!("`{name}` is not there (any more): locate its version again");
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Returns the error for exhausted memory, with the leases that hold memory.
    pub(crate) fn out_of_memory(&self, exhausted: &PoolExhausted) -> Error {
        let inner = self.inner();
        let holders: Vec<String> = inner.lease_statuses().map(|lease| lease.to_string()).collect();
        let holders = match holders.as_slice() {
            [] => "nobody reads: versions are being written or pinned".to_owned(),
            holders => format!("held by {}", holders.join(", ")),
        };
        let retired = match self.pool.status().retired_bytes {
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

    /// Returns the versions that connected peers leased last.
    pub(crate) fn readers(&self) -> Vec<ReaderPosition> {
        let inner = self.inner();
        let reader = |(&peer, info): (&PeerId, &Peer)| {
            let pid = info.pid;
            let read = info.last_leased.iter();
            let read = read.map(move |(key, &version)| ReaderPosition {
                peer,
                pid,
                key: key.to_string(),
                version,
            });
            read.collect::<Vec<_>>()
        };
        inner.peers.iter().flat_map(reader).collect()
    }

    /// Returns the status of this daemon, without its peers.
    pub(crate) fn status(&self) -> DaemonStatus {
        let now = Instant::now();
        let replicas = self.volume.replicas.statuses(now);
        let fetched = self.volume.remote_blobs.stats();
        let fetched = fetched.read_bytes.values().sum::<u64>() + fetched.fetcher_bytes;
        let counts = self.counters.lock().clone();
        let inner = self.inner();
        let peer = |peer: &Peer| PeerStatus {
            pid: peer.pid,
            address: peer.address.map(|address| address.to_string()),
            client: peer.client.clone(),
            age: peer.since.elapsed(),
        };
        DaemonStatus {
            pid: std::process::id(),
            daemon: DAEMON_NAME.to_owned(),
            uptime: self.started.elapsed(),
            memory: MemoryStatus {
                delta_bytes: self.volume.replicas.delta_bytes(),
                ..self.pool.status()
            },
            peers: inner.peers.values().map(peer).collect(),
            leases: inner.lease_statuses().collect(),
            uploads: self.replicator.iter().flat_map(|replicator| replicator.uploads()).collect(),
            replicas,
            fetchers: self.fetchers.statuses(now),
            cpu_time: cpu_time(),
            moved_bytes_total: counts.put_bytes + counts.sent_bytes + fetched,
            hosts: Vec::new(),
            hosts_error: None,
        }
    }
}

/// Returns the CPU time of this process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

impl Inner {
    fn lease_statuses(&self) -> impl Iterator<Item = LeaseStatus> {
        self.leases.values().map(|held| {
            let peer = self.peers.get(&held.peer);
            LeaseStatus {
                key: held.key.to_string(),
                version: held.number,
                // The daemon itself holds leases without a connected peer, such as those of prefetched versions.
                pid: peer.map_or_else(std::process::id, |peer| peer.pid),
                address: peer.and_then(|peer| peer.address).map(|address| address.to_string()),
                age: held.since.elapsed(),
            }
        })
    }
}
