//! Who follows a key: every version of it that becomes visible is held for them until they have read it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::House;
use super::leases::Leased;
use crate::daemon::registry::Grant;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{LeaseId, Selector, VersionId};
use crate::net::wire::Unread;
use crate::shm::PeerId;

/// A connection follows so many keys at most.
pub(crate) const MAX_FOLLOWED: usize = 64;

/// So many versions wait for one follower at most: of what comes then, it is told that it has missed it.
pub(crate) const MAX_WAITING: usize = 1024;

/// Somebody who follows a key.
pub(crate) struct Follower {
    pub(crate) peer: PeerId,
    key: Key,
    /// What it has not asked for yet; an error in place of what could not be held.
    waiting: VecDeque<Result<Grant>>,
    /// What is held for it, and what it reads, until the memory of that is free again.
    held: BTreeMap<LeaseId, VersionId>,
    /// The place of the newest that it was told of: a put that is tried again tells nothing new.
    newest: Option<(u32, u64)>,
}

impl House {
    /// A peer follows a key from now on. Says by which number.
    pub(crate) fn follow(&self, peer: PeerId, key: &Key) -> Result<u64> {
        if self.registry.is_elsewhere() {
            let text = "who follows a key asks a daemon that decides alone: others decide with this one, or for it";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let number = self.number();
        let mut inner = self.inner();
        if inner.followers.values().filter(|follower| follower.peer == peer).count() >= MAX_FOLLOWED
        {
            let text = format_args!("a connection follows {MAX_FOLLOWED} keys at most");
            return Err(Error::new(ErrorKind::Refused, text));
        }
        let (key, waiting, held, newest) = (key.clone(), VecDeque::new(), BTreeMap::new(), None);
        inner.followers.insert(number, Follower { peer, key, waiting, held, newest });
        drop(inner);
        self.followed.notify_waiters();
        Ok(number)
    }

    /// It does so no longer: what it has not asked for is let go. What it reads stays until it hands that back.
    pub(crate) async fn unfollow(&self, peer: PeerId, number: u64) {
        let follower = {
            let mut inner = self.inner();
            let is_its = inner.followers.get(&number).is_some_and(|it| it.peer == peer);
            if is_its { inner.followers.remove(&number) } else { None }
        };
        let waiting = follower.into_iter().flat_map(|follower| follower.waiting);
        for grant in waiting.flatten() {
            self.release(peer, grant.lease).await;
        }
        self.followed.notify_waiters();
    }

    /// Holds up others who commit to a key that is followed, until this is dropped: each version is held for those
    /// who follow it before the next one is visible, which would be told first, or take its place.
    pub(crate) async fn turn(&self, key: &Key) -> Option<impl Drop> {
        let is_followed = self.inner().followers.values().any(|follower| follower.key == *key);
        if is_followed { Some(self.telling.lock().await) } else { None }
    }

    /// A version is visible: all who follow its key have it from here on.
    pub(crate) async fn tell_followers(&self, key: &Key, (id, place): (VersionId, (u32, u64))) {
        let followers: Vec<(u64, PeerId)> = {
            let mut inner = self.inner();
            let followers = inner.followers.iter_mut().filter(|(_, follower)| follower.key == *key);
            let untold = followers.filter(|(_, follower)| follower.newest < Some(place));
            let told = untold.map(|(number, follower)| {
                follower.newest = Some(place);
                (*number, follower.peer)
            });
            told.collect()
        };
        for (number, peer) in followers {
            let granted = self.registry.lease(peer, key, Selector::Id(id)).await;
            let granted = granted.map(|grant| self.hold(peer, key, grant));
            let unwanted = {
                let mut inner = self.inner();
                match inner.followers.get_mut(&number) {
                    Some(follower) if follower.waiting.len() < MAX_WAITING => {
                        follower.held.extend(granted.as_ref().ok().map(|grant| (grant.lease, id)));
                        follower.waiting.push_back(granted);
                        None
                    }
                    Some(follower) => {
                        if matches!(follower.waiting.back(), Some(Ok(_))) {
                            let text = format_args!(
                                "key `{key}`: more than {MAX_WAITING} versions wait to be read: some were missed"
                            );
                            let missed = Error::new(ErrorKind::Busy, text);
                            follower.waiting.push_back(Err(missed));
                        }
                        granted.ok()
                    }
                    None => granted.ok(),
                }
            };
            if let Some(grant) = unwanted {
                self.release(peer, grant.lease).await;
            }
        }
        self.followed.notify_waiters();
    }

    /// Nobody holds it by this lease any more.
    pub(crate) fn let_go_of(&self, lease: LeaseId) {
        let mut inner = self.inner();
        for follower in inner.followers.values_mut() {
            follower.held.remove(&lease);
        }
        drop(inner);
        self.followed.notify_waiters();
    }

    /// The next version that a follower has not read; none after so long, or if nobody asks any more.
    pub(crate) async fn next(
        &self,
        (peer, number): (PeerId, u64),
        patience: Duration,
        unasked: impl Future<Output = ()>,
    ) -> Result<Option<(Key, Leased)>> {
        let waiting = || {
            let mut inner = self.inner();
            let follower = inner.followers.get_mut(&number).filter(|it| it.peer == peer);
            let Some(follower) = follower else { return Some(Err(unknown(number))) };
            let granted = follower.waiting.pop_front()?;
            Some(granted.map(|grant| (grant, follower.key.clone())))
        };
        // What was taken is handed over, whatever comes.
        let next = tokio::select! {
            next = self.until(patience, waiting) => next,
            () = unasked => None,
        };
        let Some(next) = next else { return Ok(None) };
        let (grant, key) = next?;
        let leased = self.leased(peer, &key, grant).await?;
        Ok(Some((key, leased)))
    }

    /// Waits until not more than so many versions of a key are held for those who follow it; or for so long. Says how many
    /// there are.
    pub(crate) async fn unread(&self, key: &Key, at_most: u64, patience: Duration) -> Unread {
        let now = || {
            let inner = self.inner();
            let followers = inner.followers.values().filter(|follower| follower.key == *key);
            let (mut count, mut versions) = (0, BTreeSet::new());
            for follower in followers {
                count += 1;
                versions.extend(follower.held.values().copied());
            }
            let versions = u64::try_from(versions.len()).unwrap_or(u64::MAX);
            Unread { followers: count, versions }
        };
        let few = || Some(now()).filter(|unread| unread.versions <= at_most);
        self.until(patience, few).await.unwrap_or_else(now)
    }

    /// What is found, which is looked for again whenever something has come or was read; none after so long.
    async fn until<T>(&self, patience: Duration, mut find: impl FnMut() -> Option<T>) -> Option<T> {
        let found = async {
            loop {
                // What comes while it is looked for counts too.
                let mut told = std::pin::pin!(self.followed.notified());
                told.as_mut().enable();
                if let Some(found) = find() {
                    return found;
                }
                told.await;
            }
        };
        tokio::time::timeout(patience, found).await.ok()
    }
}

fn unknown(number: u64) -> Error {
    let text = format_args!("follower {number} is none of this connection's");
    Error::new(ErrorKind::Invalid, text)
}
