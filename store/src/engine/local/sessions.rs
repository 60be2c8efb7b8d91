//! Processes that share ledgers: what others know this one by, who of them has ended, and what readers hold.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::{LocalController, folder};
use crate::control::Reached;
use crate::engine::local::lost;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{self, Lock, MutexGuard, sleep, timeout};
use crate::key::Key;
use crate::ledger::{
    ArchiveReference, Command, Contribution, LeaseId, Outcome, Selector, SessionId, State, Version,
    VersionId, WriterSet,
};
use crate::status::HostStatus;

/// With what pauses it is looked whether others see this process, and for how long until they see that it ends.
const SEEN_PAUSE: Duration = Duration::from_millis(50);
const LEAVING: Duration = Duration::from_secs(1);

/// For how long a manifest is waited for that says what is lost.
const PATIENCE: Duration = Duration::from_secs(2);

/// A process, and what others see of it as long as it lives.
pub(super) struct Session {
    id: SessionId,
    held: Lock<Box<dyn Any + Send>>,
}

impl LocalController {
    /// What others know this process by, if there are others.
    pub(super) async fn session(&self) -> Result<Option<SessionId>> {
        let begin = async || {
            let id = SessionId(self.random());
            let held = self.0.ledgers.session(id).await?;
            Ok::<_, Error>(held.map(|held| Session { id, held: Lock::new(held) }))
        };
        let session = self.0.session.get_or_try_init(begin).await?;
        Ok(session.as_ref().map(|session| session.id))
    }

    /// Begins the session: from now on others find this process.
    pub(crate) async fn enter(&self) -> Result<()> {
        self.session().await.map(drop)
    }

    /// Ends the session, and waits a moment until others can see that.
    pub(crate) async fn leave(&self) {
        let Some(Some(Session { id, held })) = self.0.session.get() else { return };
        *held.lock() = Box::new(());
        let seen = async {
            while let Ok(false) = self.0.ledgers.has_ended(*id).await {
                sleep(SEEN_PAUSE).await;
            }
        };
        let _ = timeout(LEAVING, seen).await;
    }

    /// Takes back what processes that have ended have begun, and what they hold.
    pub(crate) async fn end_sessions(&self, key: &Key) -> Result<()> {
        let state = self.0.ledgers.state(key).await?;
        let own = self.session().await?;
        let mut ended = Vec::new();
        // Who was stopped for a while has not ended, even if others could think so.
        for session in state.sessions().into_iter().filter(|session| Some(*session) != own) {
            if self.0.ledgers.has_ended(session).await? {
                ended.push(session);
            }
        }
        self.say_ended(key, ended).await
    }

    /// Takes back what these processes have begun of a key, and what they hold of it.
    pub(super) async fn say_ended(&self, key: &Key, ended: Vec<SessionId>) -> Result<()> {
        for session in ended {
            // Who is waited for need not know: then it is not said.
            let lost = timeout(PATIENCE, self.lost_with(key, session)).await;
            let slices = lost.ok().and_then(Result::ok).unwrap_or_default();
            self.apply(key, Command::SessionEnded { session, slices }).await?;
        }
        Ok(())
    }

    /// What is lost of the visible versions of a key with a process, as far as their manifests are to be had.
    async fn lost_with(
        &self,
        key: &Key,
        session: SessionId,
    ) -> Result<BTreeMap<VersionId, String>> {
        let state = self.0.ledgers.state(key).await?;
        let mut slices = BTreeMap::new();
        for version in state.visible().filter(|version| !version.stored) {
            let lost = version.contributions.values().filter(|it| it.keepers().eq([session]));
            let lost = lost.flat_map(Contribution::archives).map(|archive| archive.name.clone());
            let lost: BTreeSet<String> = lost.collect();
            let Some(manifest) = version.manifest().filter(|_| !lost.is_empty()) else { continue };
            if manifest.keeper == Some(session) {
                continue;
            }
            let _reached = self.reach(key, version).await?;
            let name = manifest.name.clone();
            let read = self.on_disk(move |volume| lost::slices(volume, &name, &lost));
            if let Ok(Some(said)) = read.await {
                slices.insert(version.id, said);
            }
        }
        Ok(slices)
    }

    /// Waits until others find this process, so that nobody takes what is put to it for lost: who was stopped, or cut
    /// off from where sessions are, may have been missed.
    pub(super) async fn be_found(&self, deadline: Option<Instant>) -> Result<()> {
        let Some(own) = self.keeper().await? else { return Ok(()) };
        while self.0.ledgers.has_ended(own).await? {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let text = "this daemon's session has ended, and it could not begin it again";
                return Err(Error::new(ErrorKind::Unreachable, text));
            }
            sleep(SEEN_PAUSE).await;
        }
        Ok(())
    }

    /// Whether others decide too, each of whom keeps what is put to it.
    pub(crate) fn are_many(&self) -> bool {
        self.0.keepers.are_many()
    }

    /// The daemons that decide too, and this one.
    pub(crate) async fn hosts(&self) -> Result<Vec<HostStatus>> {
        let own = self.keeper().await?;
        let all = self.0.keepers.all().await?.into_iter();
        Ok(all.map(|(id, address)| HostStatus { address, is_own: Some(id) == own }).collect())
    }

    /// The process that keeps what is put to this one, if it ends with that.
    pub(super) async fn keeper(&self) -> Result<Option<SessionId>> {
        if self.are_many() { self.session().await } else { Ok(None) }
    }

    /// Finds what others keep of a version.
    pub(super) async fn reach(&self, key: &Key, version: &Version) -> Result<Reached> {
        match self.keeper().await? {
            Some(own) => self.0.keepers.reach(&folder(key, version), version, own).await,
            None => Ok(Reached::default()),
        }
    }

    /// Takes a version for a reader, under a lease of its own: what the ledger says of it, and what others keep.
    pub(crate) async fn take(
        &self,
        key: &Key,
        selector: Selector,
        holder: String,
        ttl: Duration,
    ) -> Result<(LeaseId, Version, Reached)> {
        let holder = self.keeper().await?.map_or(holder, |own| own.to_string());
        loop {
            let (lease, now) = (LeaseId(self.random()), self.now());
            let holder = holder.clone();
            let command = Command::Lease { selector, lease, holder, ttl, now };
            let leased = self.apply(key, command).await?;
            let Outcome::Leased { id, .. } = leased else {
                unreachable!("a lease does not lead to {leased:?}")
            };
            let state = self.state(key).await?;
            // If it is not there any more, what kept it has ended meanwhile.
            let reached = match state.versions().find(|version| version.id == id) {
                Some(version) => {
                    self.reach(key, version).await.map(|reached| Some((version, reached)))
                }
                None => Ok(None),
            };
            let ended = match reached {
                Ok(Some((version, reached))) if reached.ended.is_empty() => {
                    return Ok((lease, version.clone(), reached));
                }
                Ok(reached) => Ok(reached.map_or_else(Vec::new, |(_, reached)| reached.ended)),
                Err(error) => Err(error),
            };
            self.apply(key, Command::Release { lease }).await?;
            // If others keep all of it too, it is still there.
            self.say_ended(key, ended?).await?;
        }
    }

    /// Releases a lease; one that cannot be now is released later. Where others decide too, that is not waited for.
    pub(crate) async fn release(&self, key: &Key, lease: LeaseId) {
        self.unreleased().push((key.clone(), lease));
        if self.are_many() {
            let controller = self.clone();
            drop(sync::spawn(async move { controller.release_owed().await }));
        } else {
            self.release_owed().await;
        }
    }

    async fn release_owed(&self) {
        let unreleased = std::mem::take(&mut *self.unreleased());
        for (key, lease) in unreleased {
            if self.apply(&key, Command::Release { lease }).await.is_err() {
                self.unreleased().push((key, lease));
                continue;
            }
            // What cannot be deleted now stays owed.
            let _ = self.reclaim_owed(&key).await;
        }
    }

    fn unreleased(&self) -> MutexGuard<'_, Vec<(Key, LeaseId)>> {
        self.0.unreleased.lock()
    }

    /// Says what of the visible versions of a key this process keeps because it was read here. What is here is looked at
    /// after the ledger: what the ledger knows to be put here is here.
    pub(crate) async fn say_kept(
        &self,
        key: &Key,
        here: &(dyn Fn() -> BTreeSet<String> + Sync),
    ) -> Result<()> {
        let Some(own) = self.keeper().await? else { return Ok(()) };
        let state = self.0.ledgers.state(key).await?;
        let names = here();
        for version in state.visible() {
            let folder = folder(key, version);
            let is_here = |it: &ArchiveReference| names.contains(&format!("{folder}/{}", it.name));
            let is_new = |contribution: &Contribution| {
                let mut keepers = contribution.keepers().peekable();
                // Others keep it, or it ends with nobody.
                keepers.peek().is_some() && keepers.all(|keeper| keeper != own)
            };
            let kept = version.contributions.iter().filter(|(_, contribution)| {
                is_new(contribution) && contribution.archives().iter().all(is_here)
            });
            let writers: WriterSet = kept.map(|(writer, _)| *writer).collect();
            if !writers.is_empty() {
                let keep = Command::Keep { id: version.id, writers, session: own };
                self.apply(key, keep).await?;
            }
            // What the ledger believes to be here, and is not.
            let gone = version.contributions.iter().filter(|(_, contribution)| {
                contribution.keepers().any(|keeper| keeper == own)
                    && contribution.keepers().any(|keeper| keeper != own)
                    && !contribution.archives().iter().all(is_here)
            });
            for (writer, _) in gone {
                let let_go = Command::LetGo { id: version.id, writer: *writer, session: own };
                self.apply(key, let_go).await?;
            }
        }
        Ok(())
    }

    /// Need not keep an archive any more, by its name in the volume; false if nobody else does.
    pub(crate) async fn let_go(&self, key: &Key, name: &str) -> Result<bool> {
        let Some(own) = self.keeper().await? else { return Ok(true) };
        // Who has ended keeps nothing.
        self.end_sessions(key).await?;
        let kept = |state: &State| {
            let versions = state.versions().filter(|version| {
                let folder = folder(key, version);
                name.strip_prefix(&folder).is_some_and(|file| file.starts_with('/'))
            });
            let mut contributions = versions.flat_map(|version| {
                version.contributions.iter().map(|(writer, it)| (version.id, *writer, it))
            });
            let kept = contributions.find(|(_, _, contribution)| {
                let mut archives = contribution.archives().iter();
                archives.any(|archive| name.ends_with(&format!("/{}", archive.name)))
            });
            let kept = kept.filter(|(.., it)| it.keepers().any(|keeper| keeper == own));
            kept.map(|(id, writer, _)| (id, writer))
        };
        if let Some((id, writer)) = kept(&*self.0.ledgers.state(key).await?) {
            self.apply(key, Command::LetGo { id, writer, session: own }).await?;
        }
        Ok(kept(&*self.0.ledgers.state(key).await?).is_none())
    }

    /// Says which processes have ended, carries out what is owed, and deletes what no ledger knows.
    pub(crate) async fn look_after(&self, key: &Key) -> Result<()> {
        self.release_owed().await;
        self.end_sessions(key).await?;
        // Proofs that are owed for long, too.
        self.state(key).await?;
        self.reclaim_owed(key).await?;
        self.clean(key).await
    }
}
