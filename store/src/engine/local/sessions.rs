//! Sessions of processes that share ledgers: registration, ended sessions, replicas and leases.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::LocalController;
use crate::control::ResolvedReplicas;
use crate::control::layout::folder;
use crate::engine::local::lost_leaves;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{self, Lock, MutexGuard, sleep, timeout};
use crate::key::Key;
use crate::ledger::{
    ArchiveReference, Command, Contribution, LeaseId, Outcome, Selector, SessionId, State, Version,
    VersionId, WriterSet,
};
use crate::status::HostStatus;

/// Interval at which a process checks whether other processes see its session.
const SESSION_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a process waits until other processes see that its session has ended.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait for the manifest that lists the lost leaves.
const LOST_LEAVES_TIMEOUT: Duration = Duration::from_secs(2);

/// The session of this process. Other processes see it as long as `guard` is alive.
pub(super) struct Session {
    id: SessionId,
    guard: Lock<Box<dyn Any + Send>>,
}

impl LocalController {
    /// Returns the session of this process, if other processes share its ledgers.
    ///
    /// The first call begins the session.
    pub(super) async fn session(&self) -> Result<Option<SessionId>> {
        let begin = async || {
            let id = SessionId(self.random());
            let guard = self.0.ledgers.begin_session(id).await?;
            Ok::<_, Error>(guard.map(|guard| Session { id, guard: Lock::new(guard) }))
        };
        let session = self.0.session.get_or_try_init(begin).await?;
        Ok(session.as_ref().map(|session| session.id))
    }

    /// Begins the session: other processes find this process from now on.
    pub(crate) async fn begin_session(&self) -> Result<()> {
        self.session().await.map(drop)
    }

    /// Ends the session, and waits for a short time until other processes can see that.
    pub(crate) async fn end_session(&self) {
        let Some(Some(Session { id, guard })) = self.0.session.get() else { return };
        *guard.lock() = Box::new(());
        let ended = async {
            while let Ok(false) = self.0.ledgers.has_ended(*id).await {
                sleep(SESSION_POLL_INTERVAL).await;
            }
        };
        let _ = timeout(SESSION_END_TIMEOUT, ended).await;
    }

    /// Withdraws what ended processes have begun on a key, and releases what they hold of it.
    pub(crate) async fn detect_ended_sessions(&self, key: &Key) -> Result<()> {
        let state = self.0.ledgers.state(key).await?;
        let own = self.session().await?;
        let mut ended = Vec::new();
        // A process that was suspended has not ended, even if other processes conclude that.
        for session in state.sessions().into_iter().filter(|session| Some(*session) != own) {
            if self.0.ledgers.has_ended(session).await? {
                ended.push(session);
            }
        }
        self.mark_sessions_ended(key, ended).await
    }

    /// Marks sessions as ended in the ledger of a key.
    ///
    /// This withdraws what they have begun, and releases what they hold.
    pub(super) async fn mark_sessions_ended(&self, key: &Key, ended: Vec<SessionId>) -> Result<()> {
        for session in ended {
            // The list of lost leaves is optional: without it, the error does not name them.
            let lost = timeout(LOST_LEAVES_TIMEOUT, self.lost_leaves(key, session)).await;
            let slices = lost.ok().and_then(Result::ok).unwrap_or_default();
            self.apply(key, Command::SessionEnded { session, slices }).await?;
        }
        Ok(())
    }

    /// Lists the leaves of visible versions of a key that are lost with a session, by version.
    async fn lost_leaves(
        &self,
        key: &Key,
        session: SessionId,
    ) -> Result<BTreeMap<VersionId, String>> {
        let state = self.0.ledgers.state(key).await?;
        let mut slices = BTreeMap::new();
        for version in state.visible().filter(|version| !version.uploaded) {
            let lost =
                version.contributions.values().filter(|it| it.replica_sessions().eq([session]));
            let lost = lost.flat_map(Contribution::archives).map(|archive| archive.name.clone());
            let lost: BTreeSet<String> = lost.collect();
            let Some(manifest) = version.manifest().filter(|_| !lost.is_empty()) else { continue };
            if manifest.replica_session == Some(session) {
                continue;
            }
            let _reached = self.resolve_replicas(key, version).await?;
            let name = manifest.name.clone();
            let read = self
                .run_on_volume(move |volume| lost_leaves::list_lost_leaves(volume, &name, &lost));
            if let Ok(Some(leaves)) = read.await {
                slices.insert(version.id, leaves);
            }
        }
        Ok(slices)
    }

    /// Waits until other processes find this one.
    ///
    /// Otherwise they would consider what is put to it as lost. They may have missed the session because this process
    /// was suspended or disconnected.
    ///
    /// # Errors
    ///
    /// `Unreachable` after `deadline`.
    pub(super) async fn ensure_registered(&self, deadline: Option<Instant>) -> Result<()> {
        let Some(own) = self.replica_holder().await? else { return Ok(()) };
        while self.0.ledgers.has_ended(own).await? {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let text = "this daemon's session has ended, and it could not begin it again";
                return Err(Error::new(ErrorKind::Unreachable, text));
            }
            sleep(SESSION_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Returns whether several processes share the ledgers, each of which holds what is put to it.
    pub(crate) fn is_multi_host(&self) -> bool {
        self.0.peers.replica_locator.is_multi_host()
    }

    /// Returns all daemons that share the ledgers, this one included. Returns none on a single host.
    pub(crate) async fn hosts(&self) -> Result<Vec<HostStatus>> {
        let own = self.replica_holder().await?;
        let all = self.0.peers.replica_locator.hosts().await?.into_iter();
        Ok(all.map(|(id, address)| HostStatus { address, is_self: Some(id) == own }).collect())
    }

    /// Returns the session of this process, if what is put to it is lost with it.
    pub(super) async fn replica_holder(&self) -> Result<Option<SessionId>> {
        if self.is_multi_host() { self.session().await } else { Ok(None) }
    }

    /// Locates the archives of a version that other processes hold.
    pub(super) async fn resolve_replicas(
        &self,
        key: &Key,
        version: &Version,
    ) -> Result<ResolvedReplicas> {
        match self.replica_holder().await? {
            Some(own) => {
                self.0.peers.replica_locator.resolve(&folder(key, version), version, own).await
            }
            None => Ok(ResolvedReplicas::default()),
        }
    }

    /// Leases a version for a reader.
    ///
    /// Returns the lease, the version in the ledger, and the replicas in other processes.
    pub(crate) async fn lease_version(
        &self,
        key: &Key,
        selector: Selector,
        holder: String,
        ttl: Duration,
    ) -> Result<(LeaseId, Version, ResolvedReplicas)> {
        let holder = self.replica_holder().await?.map_or(holder, |own| own.to_string());
        loop {
            let (lease, now) = (LeaseId(self.random()), self.now());
            let holder = holder.clone();
            let selector = selector.clone();
            let command = Command::Lease { selector, lease, holder, ttl, now };
            let leased = self.apply(key, command).await?;
            let Outcome::Leased { id, .. } = leased else {
                unreachable!("a lease does not lead to {leased:?}")
            };
            let state = self.state(key).await?;
            // If the version is missing, the processes that held it have ended meanwhile.
            let resolved = match state.versions().find(|version| version.id == id) {
                Some(version) => self
                    .resolve_replicas(key, version)
                    .await
                    .map(|resolved| Some((version, resolved))),
                None => Ok(None),
            };
            let ended = match resolved {
                Ok(Some((version, resolved))) if resolved.ended_sessions.is_empty() => {
                    return Ok((lease, version.clone(), resolved));
                }
                Ok(resolved) => {
                    Ok(resolved.map_or_else(Vec::new, |(_, resolved)| resolved.ended_sessions))
                }
                Err(error) => Err(error),
            };
            self.apply(key, Command::Release { lease }).await?;
            // If other processes hold all archives too, the version remains.
            self.mark_sessions_ended(key, ended?).await?;
        }
    }

    /// Releases a lease. If that fails, it is retried with the next release.
    ///
    /// If several processes share the ledgers, the release runs in the background.
    pub(crate) async fn release(&self, key: &Key, lease: LeaseId) {
        self.pending_releases().push((key.clone(), lease));
        if self.is_multi_host() {
            let controller = self.clone();
            drop(sync::spawn(async move { controller.release_pending().await }));
        } else {
            self.release_pending().await;
        }
    }

    async fn release_pending(&self) {
        let pending = std::mem::take(&mut *self.pending_releases());
        for (key, lease) in pending {
            if self.apply(&key, Command::Release { lease }).await.is_err() {
                self.pending_releases().push((key, lease));
                continue;
            }
            // A deletion that fails stays pending.
            let _ = self.run_pending_deletions(&key).await;
        }
    }

    fn pending_releases(&self) -> MutexGuard<'_, Vec<(Key, LeaseId)>> {
        self.0.pending_releases.lock()
    }

    /// Records which archives of visible versions of a key this process holds after it has read them.
    ///
    /// `here` returns the archives that are here. It is called after the ledger was read, so that it contains all
    /// archives that the ledger lists as put here.
    pub(crate) async fn publish_replicas(
        &self,
        key: &Key,
        here: &(dyn Fn() -> BTreeSet<String> + Sync),
    ) -> Result<()> {
        let Some(own) = self.replica_holder().await? else { return Ok(()) };
        let state = self.0.ledgers.state(key).await?;
        let names = here();
        for version in state.visible() {
            let folder = folder(key, version);
            let is_here = |it: &ArchiveReference| names.contains(&format!("{folder}/{}", it.name));
            let is_new = |contribution: &Contribution| {
                let mut holders = contribution.replica_sessions().peekable();
                // Only other processes hold it. An archive without a holder is lost with no process.
                holders.peek().is_some() && holders.all(|holder| holder != own)
            };
            let held = version.contributions.iter().filter(|(_, contribution)| {
                is_new(contribution) && contribution.archives().iter().all(is_here)
            });
            let writers: WriterSet = held.map(|(writer, _)| *writer).collect();
            if !writers.is_empty() {
                let command = Command::PublishReplicas { id: version.id, writers, session: own };
                self.apply(key, command).await?;
            }
            // Archives that the ledger lists for this process and that are not here.
            let missing = version.contributions.iter().filter(|(_, contribution)| {
                contribution.replica_sessions().any(|holder| holder == own)
                    && contribution.replica_sessions().any(|holder| holder != own)
                    && !contribution.archives().iter().all(is_here)
            });
            for (writer, _) in missing {
                let command =
                    Command::ReleaseReplica { id: version.id, writer: *writer, session: own };
                self.apply(key, command).await?;
            }
        }
        Ok(())
    }

    /// Releases the replica of an archive, by its name in the volume.
    ///
    /// Returns false if this process must keep it, because no other process holds one.
    pub(crate) async fn release_replica(&self, key: &Key, name: &str) -> Result<bool> {
        let Some(own) = self.replica_holder().await? else { return Ok(true) };
        // Ended processes hold no replicas.
        self.detect_ended_sessions(key).await?;
        let find_replica = |state: &State| {
            let versions = state.versions().filter(|version| {
                let folder = folder(key, version);
                name.strip_prefix(&folder).is_some_and(|file| file.starts_with('/'))
            });
            let mut contributions = versions.flat_map(|version| {
                version.contributions.iter().map(|(writer, it)| (version.id, *writer, it))
            });
            let found = contributions.find(|(_, _, contribution)| {
                let mut archives = contribution.archives().iter();
                archives.any(|archive| name.ends_with(&format!("/{}", archive.name)))
            });
            let own_replica =
                found.filter(|(.., it)| it.replica_sessions().any(|holder| holder == own));
            own_replica.map(|(id, writer, _)| (id, writer))
        };
        if let Some((id, writer)) = find_replica(&*self.0.ledgers.state(key).await?) {
            self.apply(key, Command::ReleaseReplica { id, writer, session: own }).await?;
        }
        Ok(find_replica(&*self.0.ledgers.state(key).await?).is_none())
    }

    /// Maintains a key: marks ended sessions, runs pending effects, and deletes data that no ledger knows.
    pub(crate) async fn maintain(&self, key: &Key) -> Result<()> {
        self.release_pending().await;
        self.detect_ended_sessions(key).await?;
        // This takes over overdue verifications.
        self.state(key).await?;
        self.run_pending_deletions(key).await?;
        self.delete_unknown_versions(key).await
    }
}
