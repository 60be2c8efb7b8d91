//! Directory of the daemons that share their ledgers.
//!
//! A daemon is found by its session, and stores the archives that are put to it.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tssd_format::MANIFEST_NAME;

use super::replicas::{Replicas, blob_key};
use crate::control::{ReplicaLocator, ResolvedReplicas};
use crate::daemon::remote_blobs::{RemoteBlobIndex, ReplicaKind, ReplicaLocation};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::sync::Lock;
use crate::key::Key;
use crate::ledger::{ManifestReference, SessionId, Version};
use crate::metadata::{RECORD_VERSION, SharedLedgers};
use crate::net::tls::Endpoint;
use crate::shm::Pool;

/// Time for which the address of a daemon is cached.
const ADDRESS_TTL: Duration = Duration::from_secs(3);

/// Interval of the maintenance of keys that have blobs on this host.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(5);

/// Minimum pause between two rounds of maintenance.
const MIN_PAUSE: Duration = Duration::from_millis(500);

/// Maximum number of replicas that a read tries before the origin.
const MAX_REPLICAS: usize = 2;

/// The record of a session: where the other daemons reach its daemon. Spec: `spec/reshard.md`, R-078.
#[derive(Serialize, Deserialize)]
struct SessionRecord {
    record_version: u32,
    address: String,
}

/// Encodes the record of the session of the daemon at this address.
pub(crate) fn encode_session_record(address: &Endpoint) -> Vec<u8> {
    let address = address.to_string();
    let record = SessionRecord { record_version: RECORD_VERSION, address };
    serde_json::to_vec(&record).expect("a number and a string can be encoded")
}

/// Decodes the record of a session, and returns the address of its daemon.
///
/// # Errors
///
/// `Unsupported` if another release wrote the record.
pub(crate) fn decode_session_record(session: SessionId, record: &[u8]) -> Result<String> {
    let decoded: serde_json::Result<SessionRecord> = serde_json::from_slice(record);
    let supported = decoded.ok().filter(|record| record.record_version == RECORD_VERSION);
    supported.map(|record| record.address).ok_or_else(|| {
        let text = format_args!(
            "session `{session}`: another release of tssd runs its daemon; use one release for \
             all daemons that share ledgers"
        );
        Error::new(ErrorKind::Unsupported, text)
    })
}

/// Directory of the other daemons, by session.
pub(crate) struct PeerDirectory {
    ledgers: SharedLedgers,
    remote_blobs: Arc<RemoteBlobIndex>,
    /// The blobs of this host.
    pool: Arc<Pool>,
    /// Addresses that were looked up recently.
    addresses: Lock<BTreeMap<SessionId, (Endpoint, Instant)>>,
}

impl PeerDirectory {
    pub(crate) fn new(
        ledgers: SharedLedgers,
        remote_blobs: Arc<RemoteBlobIndex>,
        pool: Arc<Pool>,
    ) -> Self {
        Self { ledgers, remote_blobs, pool, addresses: Lock::default() }
    }

    /// Returns the address of the daemon of a session, or `None` if the session has ended.
    async fn address_of(&self, session: SessionId) -> Result<Option<Endpoint>> {
        let cached = {
            let mut addresses = self.addresses.lock();
            addresses.retain(|_, (_, since)| since.elapsed() < ADDRESS_TTL);
            addresses.get(&session).map(|(endpoint, _)| endpoint.clone())
        };
        if cached.is_some() {
            return Ok(cached);
        }
        let Some(record) = self.ledgers.session_record(session).await? else { return Ok(None) };
        let endpoint: Endpoint = decode_session_record(session, &record)?.parse()?;
        let mut addresses = self.addresses.lock();
        addresses.insert(session, (endpoint.clone(), Instant::now()));
        Ok(Some(endpoint))
    }
}

#[async_trait]
impl ReplicaLocator for PeerDirectory {
    fn is_multi_host(&self) -> bool {
        true
    }

    async fn hosts(&self) -> Result<Vec<(SessionId, String)>> {
        let records = self.ledgers.session_records().await?.into_iter();
        records.map(|(id, record)| Ok((id, decode_session_record(id, &record)?))).collect()
    }

    async fn resolve(
        &self,
        folder: &str,
        version: &Version,
        own: SessionId,
    ) -> Result<ResolvedReplicas> {
        let mut index_guard =
            RemoteIndexGuard { remote_blobs: self.remote_blobs.clone(), names: Vec::new() };
        let mut ended = Vec::new();
        for contribution in version.contributions.values() {
            let holders: Vec<SessionId> = contribution.replica_sessions().collect();
            let name = |file: &str| format!("{folder}/{file}");
            let mut names = contribution.archives().iter().map(|archive| name(&archive.name));
            if holders.contains(&own) && names.all(|name| self.pool.span(&name).is_some()) {
                continue;
            }
            let holders: Vec<_> = holders.into_iter().filter(|holder| *holder != own).collect();
            let mut locations = Vec::new();
            for (holder, source) in read_order(&holders, SystemEnvironment.random_id()) {
                match self.address_of(holder).await? {
                    Some(endpoint) => locations.push(ReplicaLocation { endpoint, kind: source }),
                    None => ended.push(holder),
                }
            }
            if locations.is_empty() {
                continue;
            }
            for archive in contribution.archives() {
                index_guard.add(name(&archive.name), &locations, archive.file_len);
            }
        }
        if let Some(ManifestReference { replica_session: Some(holder), file_len, .. }) =
            version.manifest()
            && *holder != own
            && let Some(endpoint) = self.address_of(*holder).await?
        {
            let location = ReplicaLocation { endpoint, kind: ReplicaKind::Origin };
            index_guard.add(format!("{folder}/{MANIFEST_NAME}"), &[location], *file_len);
        }
        ended.sort_unstable();
        ended.dedup();
        let held = Some(Arc::new(index_guard) as Arc<dyn Any + Send + Sync>);
        Ok(ResolvedReplicas { guard: held, ended_sessions: ended })
    }
}

/// References to entries of the index of remote blobs. They are removed on drop.
struct RemoteIndexGuard {
    remote_blobs: Arc<RemoteBlobIndex>,
    names: Vec<String>,
}

impl RemoteIndexGuard {
    fn add(&mut self, name: String, locations: &[ReplicaLocation], len: u64) {
        self.remote_blobs.add_reference(&name, locations, len);
        self.names.push(name);
    }
}

impl Drop for RemoteIndexGuard {
    fn drop(&mut self) {
        for name in &self.names {
            self.remote_blobs.remove_reference(name);
        }
    }
}

/// Returns the daemons from which to read an archive, in the order to try them.
///
/// `holders` begins with the origin, which is tried last. At most [`MAX_REPLICAS`] of the replicas come before it.
/// The random number `chance` selects them, so that readers are spread over all replicas.
fn read_order(holders: &[SessionId], chance: u128) -> Vec<(SessionId, ReplicaKind)> {
    let Some((origin, replicas)) = holders.split_first() else { return Vec::new() };
    let mut order = replicas.to_vec();
    if let Some(count) = u128::try_from(replicas.len()).ok().filter(|count| *count > 0) {
        order.rotate_left(usize::try_from(chance % count).unwrap_or_default());
    }
    order.truncate(MAX_REPLICAS);
    let replicas = order.into_iter().map(|replica| (replica, ReplicaKind::Replica));
    replicas.chain([(*origin, ReplicaKind::Origin)]).collect()
}

/// Maintains the keys that have blobs on this host, at each interval and after each new replica.
///
/// For each key it:
///
/// - records the replicas of this host in the ledger;
/// - records which sessions have ended;
/// - deletes blobs of versions that no ledger contains. The daemon that deleted such a version could not reach this
///   one.
pub(crate) async fn maintain(controller: LocalController, replicas: Arc<Replicas>) {
    loop {
        // Registered first, so that the next round includes replicas that are added meanwhile.
        let mut changed = std::pin::pin!(replicas.changed.notified());
        changed.as_mut().enable();
        let keys: BTreeSet<Key> =
            replicas.retained_names(None).iter().filter_map(|name| blob_key(name)).collect();
        for key in keys {
            let retained = || replicas.retained_names(Some(&key));
            let published =
                replicas.without_eviction(controller.publish_replicas(&key, &retained)).await;
            let maintained = controller.maintain(&key).await;
            if let Err(error) = published.and(maintained) {
                tracing::warn!(%key, %error, "not looked after");
            }
        }
        let _ = tokio::time::timeout(MAINTENANCE_INTERVAL, changed).await;
        // The pause lets several archives of a version be recorded in one step.
        tokio::time::sleep(MIN_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_try_replicas_evenly_before_origin() {
        let holders = |count: u128| (0..count).map(SessionId).collect::<Vec<_>>();
        assert_eq!(read_order(&holders(0), 7), []);
        assert_eq!(read_order(&holders(1), 7), [(SessionId(0), ReplicaKind::Origin)]);
        let mut first = BTreeMap::new();
        for chance in 0..400 {
            let order = read_order(&holders(5), chance);
            assert_eq!(order.len(), MAX_REPLICAS + 1);
            assert_eq!(order.last(), Some(&(SessionId(0), ReplicaKind::Origin)));
            let replicas: BTreeSet<_> = order[..MAX_REPLICAS].iter().copied().collect();
            assert!(replicas.len() == MAX_REPLICAS && !replicas.iter().any(|it| it.0.0 == 0));
            *first.entry(order[0].0).or_insert(0) += 1;
        }
        assert!(first.len() == 4 && first.values().all(|count| *count == 100), "{first:?}");
    }
}
