//! Leases of the connected peers.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::{DaemonState, Inner};
use crate::daemon::control_plane::LeasedVersion;
use crate::daemon::tiered::BlobLocation;
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::key::Key;
use crate::ledger::{LeaseId, Selector, VersionId};
use crate::shm::{PeerId, Span};

/// Maximum number of keys for which the last leased version of a peer is recorded.
const MAX_KEYS_PER_PEER: usize = 16;

/// A leased version and the locations of its blobs.
pub(crate) struct LocatedVersion {
    pub(crate) grant: LeasedVersion,
    pub(crate) manifest: Span,
    pub(crate) archives: BTreeMap<String, BlobLocation>,
}

/// A lease in the control plane that several local leases share. The last of them releases it.
pub(crate) struct SharedLease {
    pub(crate) key: Key,
    pub(crate) lease: LeaseId,
    /// Keeps the entries of the remote archives in the blob index.
    _replica_guard: Option<Arc<dyn Any + Send + Sync>>,
}

/// A lease that a peer holds.
pub(crate) struct HeldLease {
    pub(crate) peer: PeerId,
    pub(crate) key: Key,
    pub(crate) id: VersionId,
    pub(crate) number: u64,
    /// Names of the blobs in the volume that the lease holds.
    pub(crate) names: Vec<String>,
    /// The lease in the control plane. `None` if all blobs of the version are local copies.
    pub(crate) shared_lease: Option<Arc<SharedLease>>,
    pub(crate) since: Instant,
}

impl DaemonState {
    /// Leases a version for a peer and makes it readable.
    pub(crate) async fn lease(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
    ) -> Result<LocatedVersion> {
        let mut is_retry = false;
        loop {
            let grant = match self.lease_prefetched(peer, key, &selector, |_| false) {
                Some(grant) => grant,
                None => match self.control_plane.lease(peer, key, selector.clone()).await {
                    Ok(grant) => self.record_lease(peer, key, grant),
                    Err(error) => self.fallback_to_prefetched(peer, key, &selector, error).await?,
                },
            };
            match self.locate(peer, key, grant).await {
                // A local blob may have been evicted before the lease held it.
                Err(error) if !is_retry && error.kind() == ErrorKind::Corrupt => is_retry = true,
                leased => return leased,
            }
        }
    }

    /// Makes a version that a peer has leased readable. On failure the lease is released.
    pub(crate) async fn locate(
        &self,
        peer: PeerId,
        key: &Key,
        grant: LeasedVersion,
    ) -> Result<LocatedVersion> {
        match self.materialize(key, &grant).await {
            Ok((manifest, archives)) => {
                self.count_get(peer, key, grant.number, &archives);
                Ok(LocatedVersion { grant, manifest, archives })
            }
            Err(error) => {
                self.release(peer, grant.lease).await;
                Err(error)
            }
        }
    }

    /// Leases the prefetched version if the control plane cannot lease the version.
    ///
    /// This applies if the control plane is unreachable, or if it no longer has the version and the key was not
    /// rewound since. Otherwise the result is `error`.
    async fn fallback_to_prefetched(
        &self,
        peer: PeerId,
        key: &Key,
        selector: &Selector,
        error: Error,
    ) -> Result<LeasedVersion> {
        let epoch = match error.kind() {
            ErrorKind::NotFound => {
                let versions = self.control_plane.versions(key).await.unwrap_or_default();
                versions.iter().map(|version| version.epoch).max()
            }
            ErrorKind::Unreachable => None,
            _ => return Err(error),
        };
        let is_current = |grant: &LeasedVersion| epoch.is_none_or(|epoch| grant.epoch >= epoch);
        self.lease_prefetched(peer, key, selector, is_current).ok_or(error)
    }

    /// Records a lease of the control plane for a peer.
    pub(crate) fn record_lease(
        &self,
        peer: PeerId,
        key: &Key,
        grant: LeasedVersion,
    ) -> LeasedVersion {
        let (key, lease, replica_guard) = (key.clone(), grant.lease, grant.replica_guard.clone());
        let registered =
            Arc::new(SharedLease { key: key.clone(), lease, _replica_guard: replica_guard });
        self.insert_lease(&mut self.inner(), peer, &key, grant, Some(registered))
    }

    /// Records a lease and holds its blobs in the pool.
    fn insert_lease(
        &self,
        inner: &mut Inner,
        peer: PeerId,
        key: &Key,
        grant: LeasedVersion,
        registered: Option<Arc<SharedLease>>,
    ) -> LeasedVersion {
        let names: Vec<String> = grant.names().cloned().collect();
        self.pool.hold(&names);
        let (number, since) = (grant.number, Instant::now());
        let held = HeldLease {
            peer,
            key: key.clone(),
            id: grant.id,
            number,
            names,
            shared_lease: registered,
            since,
        };
        inner.leases.insert(grant.lease, held);
        grant
    }

    /// Leases the prefetched version of a key for a peer, if `selector` selects it.
    ///
    /// A selector by number selects it only if `accepts` returns true.
    fn lease_prefetched(
        &self,
        peer: PeerId,
        key: &Key,
        selector: &Selector,
        accepts: impl Fn(&LeasedVersion) -> bool,
    ) -> Option<LeasedVersion> {
        let mut inner = self.inner();
        let grant = inner.prefetched.get(key)?;
        let is_selected = match selector {
            Selector::Newest | Selector::Label(_) => false,
            Selector::Number(number) => grant.number == *number && accepts(grant),
            Selector::Id(id) => grant.id == *id,
        };
        if !is_selected || grant.instance != self.control_plane.instance() {
            return None;
        }
        let registered = inner.leases.get(&grant.lease)?.shared_lease.clone();
        let lease = LeaseId(SystemEnvironment.random_id());
        let grant = LeasedVersion { lease, ..grant.clone() };
        Some(self.insert_lease(&mut inner, peer, key, grant, registered))
    }

    /// Releases a lease of a peer. The peer no longer reads the version through it.
    pub(crate) async fn release(&self, peer: PeerId, lease: LeaseId) {
        let held = {
            let mut inner = self.inner();
            if inner.leases.get(&lease).is_none_or(|held| held.peer != peer) {
                return;
            }
            inner.leases.remove(&lease)
        };
        if let Some(held) = held {
            self.drop_lease(held).await;
            self.forget_lease(lease);
        }
    }

    /// Releases the blobs of a lease, and its lease in the control plane if it is the last.
    async fn drop_lease(&self, held: HeldLease) {
        self.pool.release(&held.names);
        if let Some(SharedLease { key, lease, .. }) = held.shared_lease.and_then(Arc::into_inner) {
            self.control_plane.release(&key, lease).await;
        }
    }

    /// Removes a peer that disconnected, with its leases and followers.
    ///
    /// If the peer maps memory of this host (`is_near`), the segments that it read are not recycled: the peer did not
    /// confirm that it no longer reads them.
    pub(crate) async fn remove_peer(&self, peer: PeerId, is_near: bool) {
        let lost: Vec<(LeaseId, HeldLease)> = {
            let mut inner = self.inner();
            inner.peers.remove(&peer);
            inner.followers.retain(|_, follower| follower.peer != peer);
            self.connected_count.send_replace(inner.peers.len());
            inner.leases.extract_if(.., |_, held| held.peer == peer).collect()
        };
        for name in lost.iter().flat_map(|(_, held)| &held.names).filter(|_| is_near) {
            self.pool.block_recycling(name);
        }
        for (_, held) in lost {
            self.drop_lease(held).await;
        }
        let ended = self.connected_runs.remove_peer(peer);
        if !ended.is_empty() {
            self.control_plane.runs_disconnected(ended).await;
        }
        self.followers_changed.notify_waiters();
    }

    fn count_get(
        &self,
        peer: PeerId,
        key: &Key,
        number: u64,
        archives: &BTreeMap<String, BlobLocation>,
    ) {
        {
            let mut inner = self.inner();
            if let Some(reader) = inner.peers.get_mut(&peer) {
                if reader.last_leased.len() >= MAX_KEYS_PER_PEER
                    && !reader.last_leased.contains_key(key)
                {
                    reader.last_leased.pop_first();
                }
                reader.last_leased.insert(key.clone(), number);
            }
        }
        let mut counts = self.counters.lock();
        counts.gets += 1;
        for place in archives.values() {
            let source = match place {
                BlobLocation::Local(_) | BlobLocation::Device(_) => None,
                BlobLocation::Remote(holder, _) => Some(holder.kind),
            };
            let leased = counts.leased_bytes.entry(source).or_default();
            *leased = leased.saturating_add(place.len());
        }
    }
}
