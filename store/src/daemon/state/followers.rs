//! Followers of keys: each version that becomes visible is leased for them until they have read it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::DaemonState;
use super::leases::LocatedVersion;
use crate::control::VersionInfo;
use crate::daemon::control_plane::LeasedVersion;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{LeaseId, Selector, VersionId};
use crate::net::wire::UnreadCounts;
use crate::shm::PeerId;

/// Maximum number of keys that a connection follows.
pub(crate) const MAX_FOLLOWED_KEYS: usize = 64;

/// Maximum number of versions that are queued for a follower. It gets an error in place of later ones.
pub(crate) const MAX_QUEUED_VERSIONS: usize = 1024;

/// A subscription of a peer to the versions of a key.
pub(crate) struct Follower {
    pub(crate) peer: PeerId,
    key: Key,
    /// Leased versions that it has not requested yet, or errors for those that could not be leased.
    queue: VecDeque<Result<LeasedVersion>>,
    /// Versions that are queued or read, until their leases are released.
    leases: BTreeMap<LeaseId, VersionId>,
    /// Epoch and number of the last queued version. A retried put does not queue its version again.
    last_queued: Option<(u32, u64)>,
}

impl DaemonState {
    /// Subscribes a peer to a key, and returns the number of the follower.
    ///
    /// # Errors
    ///
    /// `Unsupported` if other daemons change the ledgers too; `Refused` if the peer has [`MAX_FOLLOWED_KEYS`] followers.
    pub(crate) fn follow(&self, peer: PeerId, key: &Key) -> Result<u64> {
        if self.control_plane.is_shared() {
            let text = "who follows a key asks a daemon that decides alone: others decide with this one, or for it";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let number = self.next_number();
        let mut inner = self.inner();
        if inner.followers.values().filter(|follower| follower.peer == peer).count()
            >= MAX_FOLLOWED_KEYS
        {
            let text = format_args!("a connection follows {MAX_FOLLOWED_KEYS} keys at most");
            return Err(Error::new(ErrorKind::Refused, text));
        }
        let (key, queue, leases, last_queued) =
            (key.clone(), VecDeque::new(), BTreeMap::new(), None);
        inner.followers.insert(number, Follower { peer, key, queue, leases, last_queued });
        drop(inner);
        self.followers_changed.notify_waiters();
        Ok(number)
    }

    /// Ends a subscription and releases the queued versions. Versions that the peer reads stay leased.
    pub(crate) async fn unfollow(&self, peer: PeerId, number: u64) {
        let follower = {
            let mut inner = self.inner();
            let is_own = inner.followers.get(&number).is_some_and(|it| it.peer == peer);
            if is_own { inner.followers.remove(&number) } else { None }
        };
        let queued = follower.into_iter().flat_map(|follower| follower.queue);
        for grant in queued.flatten() {
            self.release(peer, grant.lease).await;
        }
        self.followers_changed.notify_waiters();
    }

    /// Returns a guard that blocks other commits to followed keys, or `None` if `key` has no follower.
    ///
    /// It ensures that followers have leased a version before the next one is visible. Otherwise the next version
    /// could be queued first, or replace it.
    pub(crate) async fn lock_commits(&self, key: &Key) -> Option<impl Drop> {
        let is_followed = self.inner().followers.values().any(|follower| follower.key == *key);
        if is_followed { Some(self.commit_lock.lock().await) } else { None }
    }

    /// Leases a version that has become visible for each follower of its key, and queues it for them.
    pub(crate) async fn notify_followers(&self, key: &Key, id: VersionId, epoch: u32, number: u64) {
        let followers: Vec<(u64, PeerId)> = {
            let mut inner = self.inner();
            let followers = inner.followers.iter_mut().filter(|(_, follower)| follower.key == *key);
            let behind =
                followers.filter(|(_, follower)| follower.last_queued < Some((epoch, number)));
            let notified = behind.map(|(follower_number, follower)| {
                follower.last_queued = Some((epoch, number));
                (*follower_number, follower.peer)
            });
            notified.collect()
        };
        for (follower_number, peer) in followers {
            let granted = self.control_plane.lease(peer, key, Selector::Id(id)).await;
            let granted = granted.map(|grant| self.record_lease(peer, key, grant));
            let surplus = {
                let mut inner = self.inner();
                match inner.followers.get_mut(&follower_number) {
                    Some(follower) if follower.queue.len() < MAX_QUEUED_VERSIONS => {
                        follower
                            .leases
                            .extend(granted.as_ref().ok().map(|grant| (grant.lease, id)));
                        follower.queue.push_back(granted);
                        None
                    }
                    Some(follower) => {
                        if matches!(follower.queue.back(), Some(Ok(_))) {
                            let text = format_args!(
                                "key `{key}`: more than {MAX_QUEUED_VERSIONS} versions wait to be read: some were missed"
                            );
                            let missed = Error::new(ErrorKind::Busy, text);
                            follower.queue.push_back(Err(missed));
                        }
                        granted.ok()
                    }
                    None => granted.ok(),
                }
            };
            if let Some(grant) = surplus {
                self.release(peer, grant.lease).await;
            }
        }
        self.followers_changed.notify_waiters();
    }

    /// Makes a version the newest one. Followers get it as a version that becomes visible, and the bucket follows.
    ///
    /// # Errors
    ///
    /// If the bucket does not follow, the rollback is in effect, and the error says so.
    pub(crate) async fn rollback(&self, key: &Key, selector: Selector) -> Result<VersionInfo> {
        let commit_guard = self.lock_commits(key).await;
        let info = self.control_plane.rollback(key, selector).await?;
        self.notify_followers(key, info.id, info.epoch, info.number).await;
        drop(commit_guard);
        if let Some(grant) = self.inner().prefetched.get_mut(key).filter(|it| it.id == info.id) {
            (grant.epoch, grant.number) = (info.epoch, info.number);
        }
        let synced = self.with_bucket_sync(key, async { Ok(()) }).await;
        synced.map_err(|error| {
            let text = format_args!(
                "key `{key}`: the version is the newest one, with number {}, and the bucket does not have that yet: \
                 {error}",
                info.number
            );
            Error::new(error.kind(), text)
        })?;
        Ok(info)
    }

    /// Forgets a lease that was released.
    pub(crate) fn forget_lease(&self, lease: LeaseId) {
        let mut inner = self.inner();
        for follower in inner.followers.values_mut() {
            follower.leases.remove(&lease);
        }
        drop(inner);
        self.followers_changed.notify_waiters();
    }

    /// Waits for the next queued version of a follower.
    ///
    /// Returns `None` after `timeout`, or when `unasked` completes.
    pub(crate) async fn next_version(
        &self,
        peer: PeerId,
        number: u64,
        timeout: Duration,
        unasked: impl Future<Output = ()>,
    ) -> Result<Option<(Key, LocatedVersion)>> {
        let pop = || {
            let mut inner = self.inner();
            let follower = inner.followers.get_mut(&number).filter(|it| it.peer == peer);
            let Some(follower) = follower else { return Some(Err(unknown_follower(number))) };
            let granted = follower.queue.pop_front()?;
            Some(granted.map(|grant| (grant, follower.key.clone())))
        };
        // Cancellation affects only the wait: a version that `pop` has taken from the queue is always returned.
        let next = tokio::select! {
            next = self.wait_for(timeout, pop) => next,
            () = unasked => None,
        };
        let Some(next) = next else { return Ok(None) };
        let (grant, key) = next?;
        let leased = self.locate(peer, &key, grant).await?;
        Ok(Some((key, leased)))
    }

    /// Waits until at most `max_unread` versions of a key are leased for its followers, or for `timeout`.
    ///
    /// Returns the number of followers and of versions at that time.
    pub(crate) async fn wait_unread(
        &self,
        key: &Key,
        max_unread: u64,
        timeout: Duration,
    ) -> UnreadCounts {
        let count_unread = || {
            let inner = self.inner();
            let followers = inner.followers.values().filter(|follower| follower.key == *key);
            let (mut count, mut versions) = (0, BTreeSet::new());
            for follower in followers {
                count += 1;
                versions.extend(follower.leases.values().copied());
            }
            let versions = u64::try_from(versions.len()).unwrap_or(u64::MAX);
            UnreadCounts { followers: count, versions }
        };
        let at_most_unread = || Some(count_unread()).filter(|unread| unread.versions <= max_unread);
        self.wait_for(timeout, at_most_unread).await.unwrap_or_else(count_unread)
    }

    /// Calls `find` now and after each change of a follower, until it returns a value.
    ///
    /// Returns `None` after `timeout`.
    async fn wait_for<T>(
        &self,
        timeout: Duration,
        mut find: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let found = async {
            loop {
                // Registered before `find` runs, so that no change is missed.
                let mut changed = std::pin::pin!(self.followers_changed.notified());
                changed.as_mut().enable();
                if let Some(found) = find() {
                    return found;
                }
                changed.await;
            }
        };
        tokio::time::timeout(timeout, found).await.ok()
    }
}

fn unknown_follower(number: u64) -> Error {
    let text = format_args!("follower {number} is none of this connection's");
    Error::new(ErrorKind::Invalid, text)
}
