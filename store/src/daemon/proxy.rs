//! A proxy for the control plane in another daemon. Archives stay on this host.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;

use crate::control::{ArchivePlacement, Catalog, KnownVersion, Progress, Proposal, VersionInfo};
use crate::daemon::connected_runs::{ConnectedRuns, RECONNECT_INTERVAL};
use crate::daemon::control_plane::{ControlPlane, LeasedVersion};
use crate::daemon::remote_blobs::{ReplicaKind, ReplicaLocation};
use crate::daemon::tiered::TieredVolume;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, MutexGuard};
use crate::key::Key;
use crate::ledger::{
    ArchiveDigest, Durability, Label, LeaseId, RunId, Selection, Selector, VersionId,
};
use crate::net::client::{ReleaseOnDrop, RemoteController, Response, unexpected_reply};
use crate::net::tls::{Endpoint, Identity};
use crate::net::wire::{Begin, LeaseReply, Location, Notice, Reply, Request};
use crate::shm::PeerId;
use crate::status::HostStatus;

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time after a failed connection attempt in which calls fail without another attempt.
const RECONNECT_DELAY: Duration = Duration::from_millis(500);

/// Interval at which a pending `open` checks that it is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Timeout of a commit, which verifies the version.
const COMMIT_TIMEOUT: Duration = Duration::from_mins(10);

/// Maximum number of names in a request.
const NAMES_PER_REQUEST: usize = 16;

/// A proxy for the control plane in another daemon.
pub(crate) struct ControllerProxy {
    endpoint: Endpoint,
    identity: Identity,
    /// The address of this daemon.
    own: Endpoint,
    tiers: TieredVolume,
    /// The runs whose processes are connected to this daemon.
    connected_runs: Arc<ConnectedRuns>,
    connection: tokio::sync::Mutex<Connection>,
    /// The instance of the other daemon, or 0 before the first connection.
    instance: AtomicU64,
    inner: Lock<Inner>,
}

/// The connection to the other daemon, and the time and error of the last failed attempt.
#[derive(Default)]
struct Connection {
    open: Option<RemoteController>,
    failed: Option<(Instant, String)>,
}

/// State that depends on the other daemon.
#[derive(Default)]
struct Inner {
    /// Open contributions, by the common prefix of the names of their archives.
    contributions: BTreeMap<String, OpenContribution>,
    leases: BTreeMap<LeaseId, HeldLease>,
    /// Archives of contributions whose commit got no reply, by the same prefix.
    unconfirmed: BTreeMap<String, Vec<String>>,
}

/// An open contribution and the connection that opened it.
struct OpenContribution {
    controller: RemoteController,
    contribution: u64,
    /// Withdraws the contribution on drop.
    guard: ReleaseOnDrop,
}

/// A lease, and its entries in the index of remote blobs.
struct HeldLease {
    /// Releases the lease on drop.
    guard: ReleaseOnDrop,
    key: Key,
    id: VersionId,
    remote_names: Vec<String>,
}

impl ControllerProxy {
    /// Connects to the daemon with the control plane.
    pub(crate) async fn connect(
        endpoint: Endpoint,
        identity: Identity,
        own: Endpoint,
        tiers: TieredVolume,
        connected_runs: Arc<ConnectedRuns>,
    ) -> Result<Self> {
        let proxy = Self {
            endpoint,
            identity,
            own,
            tiers,
            connected_runs,
            connection: tokio::sync::Mutex::default(),
            instance: AtomicU64::new(0),
            inner: Lock::default(),
        };
        proxy.controller().await?;
        Ok(proxy)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Returns the connection. Opens a new one if it was lost.
    ///
    /// # Errors
    ///
    /// `Unreachable` if the other daemon cannot be reached.
    async fn controller(&self) -> Result<RemoteController> {
        let mut connection = self.connection.lock().await;
        if let Some(open) = connection.open.as_ref().filter(|open| open.is_open()) {
            return Ok(open.clone());
        }
        if let Some((since, text)) = &connection.failed
            && since.elapsed() < RECONNECT_DELAY
        {
            return Err(Error::new(ErrorKind::Unreachable, text));
        }
        match RemoteController::connect_remote(&self.endpoint, &self.identity, CONNECT_TIMEOUT)
            .await
        {
            Ok(new) => {
                connection.failed = None;
                self.resume(&new).await;
                // Set last: this future may be dropped during `resume`. Then the next caller resumes.
                connection.open = Some(new.clone());
                Ok(new)
            }
            Err(error) => {
                connection.failed = Some((Instant::now(), error.to_string()));
                Err(error)
            }
        }
    }

    /// Connects again when the connection is lost, so that the other daemon knows the connected runs. Never returns.
    pub(crate) async fn keep_runs_known(&self) {
        loop {
            tokio::time::sleep(RECONNECT_INTERVAL).await;
            if !self.connected_runs.is_empty() {
                // A new connection names the runs. An attempt that fails is repeated.
                let _ = self.controller().await;
            }
        }
    }

    /// Restores leases on a new connection and deletes archives of commits that did not succeed.
    ///
    /// If the other daemon has restarted, it does not know the archives of this host, so all of them are deleted.
    async fn resume(&self, new: &RemoteController) {
        for processes in self.connected_runs.processes().chunks(NAMES_PER_REQUEST) {
            new.notify(&Notice::RunsConnected { processes: processes.to_vec() });
        }
        let earlier = self.instance.swap(new.instance(), Ordering::Relaxed);
        if earlier != 0 && earlier != new.instance() {
            *self.inner() = Inner::default();
            self.tiers.replicas.clear();
            for name in self.tiers.pool.names("") {
                // A reader may still have it mapped.
                self.tiers.pool.block_recycling(&name);
                self.tiers.pool.delete(&name);
            }
            return;
        }
        // The other daemon released the leases of the previous connection when that ended.
        let held: Vec<(LeaseId, Key, VersionId)> = {
            let inner = self.inner();
            inner.leases.iter().map(|(lease, held)| (*lease, held.key.clone(), held.id)).collect()
        };
        for (lease, key, id) in held {
            let locate = Request::Locate {
                key: key.to_string(),
                selector: Selector::Id(id),
                supports_devices: false,
            };
            if let Ok(Response { release, .. }) = new.send_request(&locate, Duration::ZERO).await
                && let Some(held) = self.inner().leases.get_mut(&lease)
            {
                held.guard = release;
            }
        }
        let unconfirmed = self.inner().unconfirmed.clone();
        for (stem, names) in unconfirmed {
            for part in names.chunks(NAMES_PER_REQUEST) {
                let missing = Request::FindUnknownBlobs { blobs: part.to_vec() };
                let answer = new.send_request(&missing, Duration::ZERO).await;
                let Ok(Response { reply: Reply::UnknownBlobs(missing), .. }) = answer else {
                    return;
                };
                for name in &missing {
                    self.tiers.pool.delete(name);
                }
            }
            self.inner().unconfirmed.remove(&stem);
        }
    }

    /// Removes an open contribution.
    fn take(&self, place: &ArchivePlacement) -> Option<OpenContribution> {
        self.inner().contributions.remove(&place.stem)
    }
}

#[async_trait]
impl ControlPlane for ControllerProxy {
    async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(ArchivePlacement, Option<ArchiveDigest>)> {
        let (timeout, proposal) = (proposal.timeout, proposal.clone());
        let replica_address = Some(self.own.to_string());
        let (writer, durability) = (proposal.writer, proposal.durability);
        let (job, process) = (proposal.job.clone(), proposal.process.clone());
        let begin =
            Request::Begin(Begin { key: key.to_string(), proposal, replica_address, digest: None });
        let controller = self.controller().await?;
        let unwanted = async {
            tokio::time::sleep(POLL_INTERVAL).await;
            while is_wanted() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let Response { reply, release } = tokio::select! {
            answer = controller.send_request(&begin, timeout) => answer?,
            // The dropped request cancels the contribution there.
            () = unwanted => return Err(Error::new(ErrorKind::Busy, "nobody waits any more")),
        };
        let Reply::Begun(begun) = reply else { return Err(unexpected_reply(&reply)) };
        let place = ArchivePlacement {
            key: key.clone(),
            id: begun.id,
            epoch: begun.epoch,
            number: begun.number,
            writer,
            job,
            process,
            durability,
            stem: begun.stem,
            is_copy: false,
        };
        let contribution = begun.contribution;
        let open = OpenContribution { controller, contribution, guard: release };
        self.inner().contributions.insert(place.stem.clone(), open);
        Ok((place, begun.committed_digest))
    }

    async fn commit(
        &self,
        place: &ArchivePlacement,
        digest: ArchiveDigest,
        lens: &[u64],
    ) -> Result<Progress> {
        let OpenContribution { controller, contribution, mut guard } =
            self.take(place).ok_or_else(connection_lost)?;
        let commit = Request::Commit { contribution, digest, lens: lens.to_vec() };
        let answer = controller.send_request(&commit, COMMIT_TIMEOUT).await;
        // A commit ends the contribution, also if it fails: it must not be withdrawn.
        guard.disarm();
        let answer = answer.inspect_err(|error| {
            if error.kind() == ErrorKind::Unreachable {
                let names = (0..lens.len()).map(|number| place.path(number)).collect();
                self.inner().unconfirmed.insert(place.stem.clone(), names);
            }
        });
        match answer?.reply {
            Reply::Progress(progress) => Ok(progress),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn failure_cause(&self, place: &ArchivePlacement, error: Error) -> Error {
        let Some(OpenContribution { controller, contribution, mut guard }) = self.take(place)
        else {
            return error;
        };
        guard.disarm();
        match controller.send_request(&Request::Withdraw { contribution }, Duration::ZERO).await {
            Err(reason) if error.refusal().is_none() && reason.refusal().is_some() => reason,
            _ => error,
        }
    }

    async fn withdraw(&self, place: &ArchivePlacement, count: usize) {
        // The guard withdraws the contribution if it is still open.
        drop(self.take(place));
        if !self.inner().unconfirmed.contains_key(&place.stem) {
            (0..count).for_each(|number| self.tiers.pool.delete(&place.path(number)));
        }
    }

    async fn lease(&self, _holder: PeerId, key: &Key, selector: Selector) -> Result<LeasedVersion> {
        let locate = Request::Locate { key: key.to_string(), selector, supports_devices: false };
        let controller = self.controller().await?;
        let Response { reply, release } = controller.send_request(&locate, Duration::ZERO).await?;
        let Reply::Leased(leased) = reply else { return Err(unexpected_reply(&reply)) };
        let LeaseReply { lease, id, number, epoch, manifest, archives, .. } = leased;
        let (manifest, at, len) = self.locate(manifest)?;
        let located = archives.into_iter().map(|(file, place)| Ok((file, self.locate(place)?)));
        let located: BTreeMap<String, (String, Endpoint, u64)> = located.collect::<Result<_>>()?;
        let mut remote_names = Vec::new();
        for (name, at, len) in located.values().filter(|(_, at, _)| *at != self.own) {
            let location = ReplicaLocation { endpoint: at.clone(), kind: ReplicaKind::Origin };
            self.tiers.remote_blobs.add_reference(name, &[location], *len);
            remote_names.push(name.clone());
        }
        let held = HeldLease { guard: release, key: key.clone(), id, remote_names };
        self.inner().leases.insert(lease, held);
        let archives = located.into_iter().map(|(file, (name, ..))| (file, name)).collect();
        let (missing, instance) = (Some((manifest, at, len)), controller.instance());
        // The name contains the id: a later version may have the same number and another manifest.
        let manifest = format!("manifest/{id}");
        let (stored, replica_guard) = (false, None);
        Ok(LeasedVersion {
            lease,
            id,
            number,
            epoch,
            instance,
            manifest,
            is_in_bucket: stored,
            remote_manifest: missing,
            archives,
            replica_guard,
        })
    }

    async fn rebuild_manifest(&self, _key: &Key, _id: VersionId) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    async fn release(&self, _key: &Key, lease: LeaseId) {
        let released = self.inner().leases.remove(&lease);
        for name in released.iter().flat_map(|held| &held.remote_names) {
            self.tiers.remote_blobs.remove_reference(name);
        }
    }

    async fn release_replica(&self, _key: &Key, _name: &str) -> Result<bool> {
        // The daemon that received the put stores the original.
        Ok(true)
    }

    /// Durable versions are stored by the other daemon, so there are none here.
    async fn durable_archives(&self, _key: &Key) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    async fn has_volatile_versions(&self) -> Result<bool> {
        Ok(self.tiers.pool.names("").iter().any(|name| !self.tiers.replicas.is_replica(name)))
    }

    async fn runs_disconnected(&self, runs: Vec<RunId>) {
        // A connection that is lost has ended its runs there.
        if let Some(open) = &self.connection.lock().await.open {
            for runs in runs.chunks(NAMES_PER_REQUEST) {
                open.notify(&Notice::RunsDisconnected { runs: runs.to_vec() });
            }
        }
    }

    async fn end_session(&self) {}

    async fn peers(&self) -> Result<Vec<HostStatus>> {
        let host = |endpoint: &Endpoint, is_own| HostStatus {
            address: endpoint.to_string(),
            is_self: is_own,
        };
        self.controller().await?;
        Ok(vec![host(&self.own, true), host(&self.endpoint, false)])
    }

    fn check_durability(&self, durability: Durability) -> Result<()> {
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

    fn is_shared(&self) -> bool {
        true
    }
}

impl ControllerProxy {
    /// Returns the name of a blob, the daemon that stores it, and its length in bytes.
    fn locate(&self, location: Location) -> Result<(String, Endpoint, u64)> {
        match location {
            Location::Blob { blob, len, address } => {
                let endpoint = match address {
                    Some(address) => address.parse()?,
                    None => self.endpoint.clone(),
                };
                Ok((blob, endpoint, len))
            }
            // Only a daemon of the same host sends these.
            Location::Span(_) | Location::Device(_) => Err(connection_lost()),
        }
    }
}

/// Returns the error for a contribution whose connection was lost.
fn connection_lost() -> Error {
    let text = "the controller's daemon was lost meanwhile: put again";
    Error::new(ErrorKind::Unreachable, text)
}

/// Forwards all calls to the other daemon: they do not touch archives.
#[async_trait]
impl Catalog for ControllerProxy {
    async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        self.controller().await?.versions(key).await
    }

    async fn wait_for_newer(
        &self,
        key: &Key,
        seen: Option<KnownVersion>,
        timeout: Duration,
    ) -> Result<Option<VersionInfo>> {
        self.controller().await?.wait_for_newer(key, seen, timeout).await
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

    async fn pin(&self, key: &Key, selector: Selector, label: &Label) -> Result<u64> {
        self.controller().await?.pin(key, selector, label).await
    }

    async fn rollback(&self, key: &Key, selector: Selector) -> Result<VersionInfo> {
        self.controller().await?.rollback(key, selector).await
    }

    async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        self.controller().await?.unpin(key, label).await
    }

    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        self.controller().await?.pins(key).await
    }
}
