//! The operations of writers: begin or join a version, commit to it, or withdraw.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::LocalController;
use crate::blob::Volume;
use crate::control::{ArchivePlacement, Progress, Proposal};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::sleep;
use crate::key::Key;
use crate::ledger::{
    ArchiveDigest, ArchiveReference, Begin, Command, Commit, Durability, Outcome, Reason, Refusal,
    RunId, RunStatus, Version, VersionId, VersionOutcome, WriterSet,
};

/// Interval at which a waiting writer checks the versions that block it.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Interval at which a daemon that does not answer is asked again whether a run is connected.
const RUN_POLL_INTERVAL: Duration = Duration::from_millis(500);

impl LocalController {
    /// Opens a version for a writer, or joins an open one.
    ///
    /// Waits for versions that block it as long as `is_wanted` returns true. Returns also the digest that the writer
    /// has already committed to the version.
    pub(crate) async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: impl Fn() -> bool + Sync,
    ) -> Result<(ArchivePlacement, Option<ArchiveDigest>)> {
        let place = ArchivePlacement {
            key: key.clone(),
            id: VersionId(self.random()),
            epoch: 0,
            number: 0,
            writer: proposal.writer,
            job: proposal.job.clone(),
            process: proposal.process.clone(),
            durability: proposal.durability,
            stem: format!("{}-{:032x}", proposal.writer, self.random()),
            is_copy: false,
        };
        let begin = Begin {
            writer: proposal.writer,
            writers: proposal.writers.clone(),
            writers_defaulted: proposal.writers_defaulted,
            job: proposal.job.clone(),
            sequence: proposal.sequence,
            number: proposal.number,
            rewind: proposal.rewind,
            durability: proposal.durability,
            digest: None,
            session: self.session().await?,
            id: place.id,
            epoch: None,
            keeps_earlier_runs: proposal.keeps_earlier_runs,
            process: place.process.clone(),
            run_statuses: BTreeMap::new(),
            now: self.now(),
        };
        self.open_at(place, begin, proposal.timeout, is_wanted).await
    }

    /// As [`LocalController::open`], for a copy of a contribution of another store, at the same placement.
    pub(crate) async fn open_copy(
        &self,
        of: &ArchivePlacement,
        writers: WriterSet,
        timeout: Duration,
    ) -> Result<(ArchivePlacement, Option<ArchiveDigest>)> {
        let place = ArchivePlacement { durability: Durability::Disk, is_copy: true, ..of.clone() };
        let begin = Begin {
            writer: place.writer,
            writers,
            writers_defaulted: false,
            job: place.job.clone(),
            sequence: None,
            number: Some(place.number),
            rewind: false,
            durability: place.durability,
            digest: None,
            session: self.session().await?,
            id: place.id,
            epoch: Some(place.epoch),
            keeps_earlier_runs: false,
            process: place.process.clone(),
            run_statuses: BTreeMap::new(),
            now: self.now(),
        };
        self.open_at(place, begin, timeout, || true).await
    }

    /// Opens the version of a placement, or joins the version that is found instead.
    async fn open_at(
        &self,
        place: ArchivePlacement,
        mut begin: Begin,
        timeout: Duration,
        is_wanted: impl Fn() -> bool + Sync,
    ) -> Result<(ArchivePlacement, Option<ArchiveDigest>)> {
        let key = &place.key;
        // A timeout beyond the range of `Instant` is no deadline.
        let deadline = Instant::now().checked_add(timeout);
        self.ensure_registered(deadline).await?;
        if begin.session.is_some() {
            // A process that alone advances the ledgers has swept when it began. A failure does not affect the put.
            let _ = self.sweep(key).await;
        }
        let mut is_cleared = false;
        loop {
            begin.now = self.now();
            let blocking = match self.apply(key, Command::Begin(begin.clone())).await? {
                Outcome::Begun { id, epoch, number } => {
                    return Ok((ArchivePlacement { id, epoch, number, ..place }, None));
                }
                Outcome::Retry { id, epoch, number, digest } => {
                    return Ok((ArchivePlacement { id, epoch, number, ..place }, Some(digest)));
                }
                Outcome::CheckRuns { runs } => {
                    let is_over = || is_past(deadline) || !is_wanted();
                    // Answers are kept: with the ledger, the runs in question may change.
                    begin.run_statuses.extend(self.run_statuses(runs, is_over).await?);
                    continue;
                }
                Outcome::Wait { blocking } => blocking,
                other => unreachable!("begin does not lead to {other:?}"),
            };
            // A process may connect while the put waits.
            begin.run_statuses.clear();
            let now = Instant::now();
            let is_late = is_past(deadline) || !is_wanted();
            // A put without time to wait still succeeds if only ended processes block it.
            if is_late && is_cleared {
                let blocking: Vec<String> = blocking.iter().map(ToString::to_string).collect();
                return Err(Error::new(
                    ErrorKind::Busy,
                    format_args!(
                        "key `{key}`: versions {} are still open after {:?}",
                        blocking.join(", "),
                        timeout
                    ),
                ));
            }
            // Pending deletions, ended processes and overdue verifications block too.
            self.detect_ended_sessions(key).await?;
            let seen = self.state(key).await?;
            self.run_pending_deletions(key).await?;
            is_cleared = true;
            let left =
                deadline.map_or(POLL_INTERVAL, |deadline| deadline.saturating_duration_since(now));
            if !is_late {
                self.0.ledgers.changed(key, &seen, left.min(POLL_INTERVAL)).await;
            }
        }
    }

    /// Returns whether processes of these runs are connected.
    ///
    /// A daemon that does not answer is asked again until `is_over`: it may have ended, which is known later.
    async fn run_statuses(
        &self,
        runs: BTreeSet<RunId>,
        is_over: impl Fn() -> bool,
    ) -> Result<BTreeMap<RunId, RunStatus>> {
        let mut statuses = BTreeMap::new();
        for run in runs {
            let status = loop {
                match self.0.peers.runs.status(&run).await {
                    Err(error) if error.kind() == ErrorKind::Unreachable && !is_over() => {
                        sleep(RUN_POLL_INTERVAL).await;
                    }
                    status => break status?,
                }
            };
            if status == RunStatus::Disconnected {
                tracing::info!(%run, "no process of an earlier run is connected");
            }
            statuses.insert(run, status);
        }
        Ok(statuses)
    }

    /// Commits the contribution, whose archives have these lengths in bytes.
    ///
    /// If it was the last contribution, the version is verified.
    pub(crate) async fn commit(
        &self,
        place: &ArchivePlacement,
        digest: ArchiveDigest,
        lens: &[u64],
    ) -> Result<Progress> {
        self.commit_stored(place, digest, lens, None).await
    }

    /// As [`LocalController::commit`], for archives that are stored as deltas of those of a version.
    pub(crate) async fn commit_stored(
        &self,
        place: &ArchivePlacement,
        digest: ArchiveDigest,
        lens: &[u64],
        base: Option<VersionId>,
    ) -> Result<Progress> {
        let ArchivePlacement { key, id, writer, job, .. } = place;
        let archive = |(number, len): (usize, &u64)| ArchiveReference {
            name: place.file_name(number),
            file_len: *len,
        };
        let archives: Vec<_> = lens.iter().enumerate().map(archive).collect();
        let replica_session = self.replica_holder().await?;
        let commit = || Commit {
            id: *id,
            writer: *writer,
            job: job.clone(),
            digest,
            archives: archives.clone(),
            replica_session,
            base,
            now: self.now(),
        };
        let to_progress = |outcome| match outcome {
            Outcome::Committed { visible, missing } => Progress { visible, missing },
            other => unreachable!("commit does not lead to {other:?}"),
        };
        let is_decided = |progress: &Progress| progress.visible || !progress.missing.is_empty();
        let progress = to_progress(self.apply(key, Command::Commit(commit())).await?);
        if is_decided(&progress) {
            return Ok(progress);
        }
        loop {
            let verified = self.verify_version(key, *id).await;
            if let Err(error) = verified {
                if place.is_copy {
                    // The contribution is unchanged, and the caller retries.
                    return Err(error);
                }
                // No writer is left to complete the version: if it cannot be verified now, it is rejected.
                let reason = error.to_string();
                let _ = self.apply(key, Command::Rejected { id: *id, reason }).await;
                return Err(error);
            }
            // Deletions that fail now stay pending.
            let _ = self.run_pending_deletions(key).await;
            if let Ok(true) = verified {
                return Ok(Progress { visible: true, missing: WriterSet::default() });
            }
            let seen = self.0.ledgers.state(key).await?;
            // The repeated commit returns the result of the verification: visible, or the reason of the rejection.
            match self.apply(key, Command::Commit(commit())).await {
                Ok(outcome) => {
                    let progress = to_progress(outcome);
                    if is_decided(&progress) {
                        return Ok(progress);
                    }
                }
                // A newer version has replaced it already.
                Err(error) if matches!(error.refusal(), Some(Refusal::DataDeleted { .. })) => {
                    return Ok(Progress { visible: true, missing: WriterSet::default() });
                }
                Err(error) => return Err(error),
            }
            // Another attempt of the same put is verifying the version in this process, or has just stopped.
            self.0.ledgers.changed(key, &seen, POLL_INTERVAL).await;
        }
    }

    /// Returns the reason why a put failed.
    ///
    /// If the version was dropped, the reason of the drop replaces an `error` that it has caused.
    pub(crate) async fn failure_cause(&self, place: &ArchivePlacement, error: Error) -> Error {
        let state = self.state(&place.key).await;
        match state.ok().and_then(|state| state.outcome_of(place.id)) {
            // The result of a request to an unreachable ledger is unknown.
            _ if error.kind() == ErrorKind::Unreachable => error,
            // The version was dropped because of this error.
            Some(VersionOutcome::Dropped(Reason::Rejected { reason }))
                if is_recorded_as(&error, &reason) =>
            {
                error
            }
            Some(VersionOutcome::Dropped(reason)) if error.refusal().is_none() => {
                Error::from_refusal(&place.key, Refusal::Dropped { number: place.number, reason })
            }
            _ => error,
        }
    }

    /// Returns whether the ledger can answer a commit without any archive.
    ///
    /// That is so if the writer has committed in another attempt, or if the version has ended.
    pub(crate) async fn is_decided(&self, place: &ArchivePlacement) -> bool {
        let Ok(state) = self.state(&place.key).await else { return false };
        let is_pending =
            matches!(state.outcome_of(place.id), None | Some(VersionOutcome::Pending { .. }));
        let version = state.versions().find(|version| version.id == place.id);
        !is_pending || version.is_some_and(|version| version.digest_of(place.writer).is_some())
    }

    /// Withdraws what is not committed, up to `count` archives.
    ///
    /// The put has failed already. If the withdrawal fails too, the version is abandoned when it is too old.
    pub(crate) async fn withdraw(&self, place: &ArchivePlacement, count: usize) {
        let abort = Command::Abort { id: place.id, writer: place.writer };
        let aborted = self.apply(&place.key, abort).await;
        if aborted.is_err_and(|error| error.kind() == ErrorKind::Unreachable) {
            // An earlier request may still be executed. Then the version needs its archives.
            return;
        }
        let state = self.state(&place.key).await;
        let is_committed =
            |version: &Version| version.id == place.id && version.digest_of(place.writer).is_some();
        if state.is_ok_and(|state| !state.versions().any(is_committed)) {
            let paths: Vec<String> = (0..count).map(|number| place.path(number)).collect();
            let delete =
                move |volume: &dyn Volume| paths.iter().try_for_each(|path| volume.delete(path));
            let _ = self.run_on_volume(delete).await;
            let _ = self.remove_unknown_folder(place).await;
        }
        let _ = self.run_pending_deletions(&place.key).await;
    }

    /// Removes the folder of a placement, unless the ledger knows the version.
    async fn remove_unknown_folder(&self, place: &ArchivePlacement) -> Result<()> {
        let state = self.0.ledgers.state(&place.key).await?;
        if state.versions().any(|version| version.id == place.id) {
            return Ok(());
        }
        let folder = place.folder();
        self.run_on_volume(move |volume| volume.remove_folder(&folder)).await
    }
}

fn is_past(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// Returns whether `reason` is this error in the ledger, which keeps only the beginning of the text.
fn is_recorded_as(error: &Error, reason: &str) -> bool {
    error.to_string().starts_with(reason)
}
