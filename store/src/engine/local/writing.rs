//! What writers do: a version is begun or joined, and what was written is committed or withdrawn.

use std::time::{Duration, Instant};

use super::LocalController;
use crate::blob::Volume;
use crate::control::{Place, Progress, Proposal};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    ArchiveReference, Begin, Command, Commit, Digest, Durability, Fate, Outcome, Reason, Refusal,
    Version, VersionId, WriterSet,
};

/// How often others that are in the way are looked at.
const WAIT: Duration = Duration::from_millis(100);

impl LocalController {
    /// Opens a version for a writer, or joins one; waits for others that are in the way, as long as it
    /// is wanted. Returns also what the writer has committed to it before.
    pub(crate) async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: impl Fn() -> bool + Sync,
    ) -> Result<(Place, Option<Digest>)> {
        let place = Place {
            key: key.clone(),
            id: VersionId(self.random()),
            epoch: 0,
            number: 0,
            writer: proposal.writer,
            job: proposal.job.clone(),
            durability: proposal.durability,
            stem: format!("{}-{:032x}", proposal.writer, self.random()),
            is_copy: false,
        };
        let begin = Begin {
            writer: proposal.writer,
            writers: proposal.writers.clone(),
            writers_defaulted: proposal.writers_defaulted,
            job: proposal.job.clone(),
            call: proposal.call,
            number: proposal.number,
            rewind: proposal.rewind,
            durability: proposal.durability,
            digest: None,
            session: self.session().await?,
            id: place.id,
            epoch: None,
            now: self.now(),
        };
        self.open_at(place, begin, proposal.timeout, is_wanted).await
    }

    /// The same for a copy of what a writer has committed elsewhere, at that place.
    pub(crate) async fn open_copy(
        &self,
        of: &Place,
        writers: WriterSet,
        timeout: Duration,
    ) -> Result<(Place, Option<Digest>)> {
        let place = Place { durability: Durability::Disk, is_copy: true, ..of.clone() };
        let begin = Begin {
            writer: place.writer,
            writers,
            writers_defaulted: false,
            job: place.job.clone(),
            call: None,
            number: Some(place.number),
            rewind: false,
            durability: place.durability,
            digest: None,
            session: self.session().await?,
            id: place.id,
            epoch: Some(place.epoch),
            now: self.now(),
        };
        self.open_at(place, begin, timeout, || true).await
    }

    /// Opens the version of a place, or the one that is found there instead.
    async fn open_at(
        &self,
        place: Place,
        begin: Begin,
        timeout: Duration,
        is_wanted: impl Fn() -> bool + Sync,
    ) -> Result<(Place, Option<Digest>)> {
        let key = &place.key;
        // A timeout beyond all time is none.
        let deadline = Instant::now().checked_add(timeout);
        self.be_found(deadline).await?;
        if begin.session.is_some() {
            // Who has the ledgers alone has looked when it began. What cannot be deleted hinders nobody.
            let _ = self.sweep(key).await;
        }
        let mut is_cleared = false;
        loop {
            let begin = Begin { now: self.now(), ..begin.clone() };
            let on = match self.apply(key, Command::Begin(begin)).await? {
                Outcome::Begun { id, epoch, number } => {
                    return Ok((Place { id, epoch, number, ..place }, None));
                }
                Outcome::Retry { id, epoch, number, digest } => {
                    return Ok((Place { id, epoch, number, ..place }, Some(digest)));
                }
                Outcome::Wait { on } => on,
                other => unreachable!("begin does not lead to {other:?}"),
            };
            let now = Instant::now();
            let is_late = deadline.is_some_and(|deadline| now >= deadline) || !is_wanted();
            // Who has no time to wait need not, if nobody who lives is in the way.
            if is_late && is_cleared {
                let on: Vec<String> = on.iter().map(ToString::to_string).collect();
                return Err(Error::new(
                    ErrorKind::Busy,
                    format_args!(
                        "key `{key}`: versions {} are still open after {:?}",
                        on.join(", "),
                        timeout
                    ),
                ));
            }
            // Deletions that are owed, and who has died on his way or at a proof, are in the way too.
            self.end_sessions(key).await?;
            let seen = self.state(key).await?;
            self.reclaim_owed(key).await?;
            is_cleared = true;
            let left = deadline.map_or(WAIT, |deadline| deadline.saturating_duration_since(now));
            if !is_late {
                self.0.ledgers.changed(key, &seen, left.min(WAIT)).await;
            }
        }
    }

    /// Commits the contribution, whose archives have these lengths in bytes, and proves the version if it
    /// was the last one.
    pub(crate) async fn commit(
        &self,
        place: &Place,
        digest: Digest,
        lens: &[u64],
    ) -> Result<Progress> {
        let Place { key, id, writer, job, .. } = place;
        let archive = |(number, len): (usize, &u64)| ArchiveReference {
            name: place.file(number),
            file_len: *len,
            bytes: *len,
        };
        let archives: Vec<_> = lens.iter().enumerate().map(archive).collect();
        let keeper = self.keeper().await?;
        let commit = || Commit {
            id: *id,
            writer: *writer,
            job: job.clone(),
            digest,
            archives: archives.clone(),
            keeper,
            now: self.now(),
        };
        let committed = |outcome| match outcome {
            Outcome::Committed { visible, missing } => Progress { visible, missing },
            other => unreachable!("commit does not lead to {other:?}"),
        };
        let is_decided = |progress: &Progress| progress.visible || !progress.missing.is_empty();
        let progress = committed(self.apply(key, Command::Commit(commit())).await?);
        if is_decided(&progress) {
            return Ok(progress);
        }
        loop {
            let proven = self.prove(key, *id).await;
            if let Err(error) = proven {
                if place.is_copy {
                    // It is what it was, and is tried again.
                    return Err(error);
                }
                // Nobody is left to complete it: a version that cannot be proven now is no version.
                let reason = error.to_string();
                let _ = self.apply(key, Command::Rejected { id: *id, reason }).await;
                return Err(error);
            }
            // What is owed beyond the version itself stays owed if it cannot be done now.
            let _ = self.reclaim_owed(key).await;
            if let Ok(true) = proven {
                return Ok(Progress { visible: true, missing: WriterSet::default() });
            }
            let seen = self.0.ledgers.state(key).await?;
            // The same commit again tells how the proof went: visible, or the reason why not.
            match self.apply(key, Command::Commit(commit())).await {
                Ok(outcome) => {
                    let progress = committed(outcome);
                    if is_decided(&progress) {
                        return Ok(progress);
                    }
                }
                // A newer version has replaced it already.
                Err(error) if matches!(error.refusal(), Some(Refusal::Gone { .. })) => {
                    return Ok(Progress { visible: true, missing: WriterSet::default() });
                }
                Err(error) => return Err(error),
            }
            // Another try of the same put proves it, in this process, or has just stopped to.
            self.0.ledgers.changed(key, &seen, WAIT).await;
        }
    }

    /// Why a put failed: what has become of the version comes before what that has led to.
    pub(crate) async fn reason(&self, place: &Place, error: Error) -> Error {
        let state = self.state(&place.key).await;
        match state.ok().and_then(|state| state.outcome_of(place.id)) {
            // Who could not be reached has not been heard.
            _ if error.kind() == ErrorKind::Unreachable => error,
            // It is what the version was dropped for.
            Some(Fate::Dropped(Reason::Rejected { reason })) if begins(&error, &reason) => error,
            Some(Fate::Dropped(reason)) if error.refusal().is_none() => {
                Error::refused(&place.key, Refusal::Dropped { number: place.number, reason })
            }
            _ => error,
        }
    }

    /// Whether the ledger needs no archive to answer a commit: the writer has committed in another try, or the
    /// version has ended.
    pub(crate) async fn is_decided(&self, place: &Place) -> bool {
        let Ok(state) = self.state(&place.key).await else { return false };
        let is_pending = matches!(state.outcome_of(place.id), None | Some(Fate::Pending { .. }));
        let version = state.versions().find(|version| version.id == place.id);
        !is_pending || version.is_some_and(|version| version.digest_of(place.writer).is_some())
    }

    /// Takes back what is not committed, up to so many archives. The put has failed already; if this fails
    /// too, the version ends by its age.
    pub(crate) async fn withdraw(&self, place: &Place, count: usize) {
        let abort = Command::Abort { id: place.id, writer: place.writer };
        let aborted = self.apply(&place.key, abort).await;
        if aborted.is_err_and(|error| error.kind() == ErrorKind::Unreachable) {
            // What was asked before may still be done: then the version needs its archives.
            return;
        }
        let state = self.state(&place.key).await;
        let is_committed =
            |version: &Version| version.id == place.id && version.digest_of(place.writer).is_some();
        if state.is_ok_and(|state| !state.versions().any(is_committed)) {
            let paths: Vec<String> = (0..count).map(|number| place.path(number)).collect();
            let delete =
                move |volume: &dyn Volume| paths.iter().try_for_each(|path| volume.delete(path));
            let _ = self.on_disk(delete).await;
            let _ = self.remove_unowned(place).await;
        }
        let _ = self.reclaim_owed(&place.key).await;
    }

    /// Removes the folder of a place unless its version is still there.
    async fn remove_unowned(&self, place: &Place) -> Result<()> {
        let state = self.0.ledgers.state(&place.key).await?;
        if state.versions().any(|version| version.id == place.id) {
            return Ok(());
        }
        let unowned = place.folder();
        self.on_disk(move |volume| volume.remove_folder(&unowned)).await
    }
}

/// Whether a reason is what the ledger keeps of this error, which is no more than its beginning.
fn begins(error: &Error, reason: &str) -> bool {
    error.to_string().starts_with(reason)
}
