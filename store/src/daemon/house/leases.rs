//! Who holds which versions, and who is there.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::{House, Inner};
use crate::daemon::registry::Grant;
use crate::daemon::tiers::Place;
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::key::Key;
use crate::ledger::{LeaseId, Selector, VersionId};
use crate::shm::{PeerId, Span};

/// Of how many keys it is known what a reader got last.
const MAX_READ: usize = 16;

/// A version that a peer has been given, and where its bytes are.
pub(crate) struct Leased {
    pub(crate) grant: Grant,
    pub(crate) manifest: Span,
    pub(crate) archives: BTreeMap<String, Place>,
}

/// A lease of the registry: whoever lets go of it last hands it back.
pub(crate) struct Registered {
    pub(crate) key: Key,
    pub(crate) lease: LeaseId,
    /// What others keep of the version.
    _reached: Option<Arc<dyn Any + Send + Sync>>,
}

/// A lease that a peer holds.
pub(crate) struct Held {
    pub(crate) peer: PeerId,
    pub(crate) key: Key,
    pub(crate) id: VersionId,
    pub(crate) number: u64,
    /// What it holds, by its names in the volume.
    pub(crate) names: Vec<String>,
    /// The registry's lease, if it has one: that of a version that was fetched is shared.
    pub(crate) registered: Option<Arc<Registered>>,
    pub(crate) since: Instant,
}

impl House {
    /// Gives a reader a version, with a lease.
    pub(crate) async fn lease(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
    ) -> Result<Leased> {
        let mut is_again = false;
        loop {
            let grant = match self.hold_fetched(peer, key, selector, |_| false) {
                Some(grant) => grant,
                None => match self.registry.lease(peer, key, selector).await {
                    Ok(grant) => self.hold(peer, key, grant),
                    Err(error) => self.instead(peer, key, selector, error).await?,
                },
            };
            match self.leased(peer, key, grant).await {
                // What was here may have been let go of before it was held.
                Err(error) if !is_again && error.kind() == ErrorKind::Corrupt => is_again = true,
                leased => return leased,
            }
        }
    }

    /// What a peer holds, and where it is.
    pub(crate) async fn leased(&self, peer: PeerId, key: &Key, grant: Grant) -> Result<Leased> {
        match self.place(key, &grant).await {
            Ok((manifest, archives)) => {
                self.count_get(peer, key, grant.number, &archives);
                Ok(Leased { grant, manifest, archives })
            }
            Err(error) => {
                self.release(peer, grant.lease).await;
                Err(error)
            }
        }
    }

    /// What was fetched, if whoever decides no longer has it and it was not rewound since.
    async fn instead(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
        error: Error,
    ) -> Result<Grant> {
        let epoch = match error.kind() {
            ErrorKind::NotFound => {
                let versions = self.registry.versions(key).await.unwrap_or_default();
                versions.iter().map(|version| version.epoch).max()
            }
            ErrorKind::Unreachable => None,
            _ => return Err(error),
        };
        let is_current = |grant: &Grant| epoch.is_none_or(|epoch| grant.epoch >= epoch);
        self.hold_fetched(peer, key, selector, is_current).ok_or(error)
    }

    /// A peer holds what it was granted.
    pub(crate) fn hold(&self, peer: PeerId, key: &Key, grant: Grant) -> Grant {
        let (key, lease, reached) = (key.clone(), grant.lease, grant.reached.clone());
        let registered = Arc::new(Registered { key: key.clone(), lease, _reached: reached });
        self.hold_under(&mut self.inner(), peer, &key, grant, Some(registered))
    }

    fn hold_under(
        &self,
        inner: &mut Inner,
        peer: PeerId,
        key: &Key,
        grant: Grant,
        registered: Option<Arc<Registered>>,
    ) -> Grant {
        let names: Vec<String> = grant.names().cloned().collect();
        self.pool.hold(&names);
        let (number, since) = (grant.number, Instant::now());
        let held = Held { peer, key: key.clone(), id: grant.id, number, names, registered, since };
        inner.leases.insert(grant.lease, held);
        grant
    }

    /// A peer holds a version that was fetched, if it is the one that it asks for: by its identity, or, if
    /// that is good enough, by its number.
    fn hold_fetched(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
        is_good: impl Fn(&Grant) -> bool,
    ) -> Option<Grant> {
        let mut inner = self.inner();
        let grant = inner.fetched.get(key)?;
        let is_it = match selector {
            Selector::Newest => false,
            Selector::Number(number) => grant.number == number && is_good(grant),
            Selector::Id(id) => grant.id == id,
        };
        if !is_it || grant.instance != self.registry.instance() {
            return None;
        }
        let registered = inner.leases.get(&grant.lease)?.registered.clone();
        let lease = LeaseId(SystemEnvironment.random());
        let grant = Grant { lease, ..grant.clone() };
        Some(self.hold_under(&mut inner, peer, key, grant, registered))
    }

    /// A reader hands a lease back: nothing sees the version through it any more.
    pub(crate) async fn release(&self, peer: PeerId, lease: LeaseId) {
        let held = {
            let mut inner = self.inner();
            if inner.leases.get(&lease).is_none_or(|held| held.peer != peer) {
                return;
            }
            inner.leases.remove(&lease)
        };
        if let Some(held) = held {
            self.end(held).await;
            self.let_go_of(lease);
        }
    }

    async fn end(&self, held: Held) {
        self.pool.let_go(&held.names);
        if let Some(Registered { key, lease, .. }) = held.registered.and_then(Arc::into_inner) {
            self.registry.release(&key, lease).await;
        }
    }

    /// A peer is lost. If it has this host's memory, what it read cannot be written again: nobody says
    /// that it is not seen any more.
    pub(crate) async fn lose(&self, peer: PeerId, is_near: bool) {
        let lost: Vec<(LeaseId, Held)> = {
            let mut inner = self.inner();
            inner.peers.remove(&peer);
            inner.followers.retain(|_, follower| follower.peer != peer);
            self.present.send_replace(inner.peers.len());
            inner.leases.extract_if(.., |_, held| held.peer == peer).collect()
        };
        for name in lost.iter().flat_map(|(_, held)| &held.names).filter(|_| is_near) {
            self.pool.suspect(name);
        }
        for (_, held) in lost {
            self.end(held).await;
        }
        self.followed.notify_waiters();
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
        for place in archives.values() {
            let source = match place {
                Place::Here(_) | Place::Hollow(_) => None,
                Place::There(keeper, _) => Some(keeper.source),
            };
            let leased = counts.bytes_leased.entry(source).or_default();
            *leased = leased.saturating_add(place.len());
        }
    }
}
