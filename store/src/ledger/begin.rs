//! Begin: finds the version that a contribution belongs to, or opens a new one.

use super::MAX_FENCED_JOBS;
use super::command::{Begin, Outcome};
use super::identity::{JobId, VersionId};
use super::refusal::{Reason, Refusal};
use super::runs::EarlierRuns;
use super::state::{Job, LastSequence, State};
use super::version::{Contribution, Version, VersionPosition};
use crate::ledger::numbering::NewPosition;

impl State {
    pub(super) fn begin(&mut self, mut begin: Begin) -> Result<Outcome, Refusal> {
        begin.refuse_incomplete()?;
        self.refuse_fenced(begin.job.as_ref())?;
        let earlier_runs = self.earlier_runs(&begin);
        if let EarlierRuns::Unchecked(runs) = earlier_runs {
            return Ok(Outcome::CheckRuns { runs });
        }
        if let Some(job) = &begin.job {
            self.fence_previous_job(job);
        }
        let replaces_ended_runs = matches!(earlier_runs, EarlierRuns::Ended);
        let id = match self.version_of_id(&begin)? {
            None if replaces_ended_runs => None,
            None => self.matching_version(&begin)?,
            id => id,
        };
        begin.rewind |= replaces_ended_runs;
        match id {
            Some(id) => self.join(id, &begin),
            None => self.open_version(begin, replaces_ended_runs),
        }
    }

    /// Refuses a job that a newer job has fenced.
    pub(super) fn refuse_fenced(&self, job: Option<&JobId>) -> Result<(), Refusal> {
        match &self.job {
            Some(newest) if job.is_some_and(|job| self.fenced_jobs.contains(job)) => {
                Err(Refusal::Fenced { job: newest.id.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Makes a new job the newest one, fences the previous one and drops its open versions.
    ///
    /// Does nothing if `newest` is already the newest job.
    fn fence_previous_job(&mut self, newest: &JobId) {
        if self.job() == Some(newest) {
            return;
        }
        let job = Job { id: newest.clone(), writers: None, last_sequence: None };
        let Some(older) = self.job.replace(job) else {
            return;
        };
        self.update_versions(
            |version| version.is_open() && version.job.as_ref() == Some(&older.id),
            |version| version.mark_dropped(Reason::Fenced { job: newest.clone() }),
        );
        self.fenced_jobs.push_back(older.id);
        if self.fenced_jobs.len() > MAX_FENCED_JOBS {
            self.fenced_jobs.pop_front();
        }
    }

    /// Returns the version that an earlier attempt of this begin has opened.
    fn version_of_id(&self, begin: &Begin) -> Result<Option<VersionId>, Refusal> {
        if let Some(ended) = self.tombstone(begin.id) {
            return Err(ended.refusal());
        }
        match self.version_by_id(begin.id) {
            Some(version) if version.may_be_opened_by(begin) => Ok(Some(version.id)),
            Some(_) => Err(Refusal::IdTaken { id: begin.id }),
            None => Ok(None),
        }
    }

    /// Returns the existing version that a contribution belongs to by its number or sequence number.
    fn matching_version(&self, begin: &Begin) -> Result<Option<VersionId>, Refusal> {
        match (begin.number, &begin.job, begin.sequence) {
            // A copy never joins a version with another id.
            _ if begin.epoch.is_some() => Ok(None),
            (Some(number), ..) => Ok(self.version_of_number(number, begin)),
            (None, Some(job), Some(sequence)) => self.version_of_sequence(job, sequence),
            (None, ..) => Ok(None),
        }
    }

    /// Returns the open version with this number, or the version whose contribution this begin repeats.
    fn version_of_number(&self, number: u64, begin: &Begin) -> Option<VersionId> {
        let open = self.open().find(|version| version.number == number);
        open.or_else(|| self.repeated_version(number, begin)).map(|version| version.id)
    }

    /// Returns the verified version whose contribution this begin repeats.
    ///
    /// A version that a rewind has retired does not count: its number is free in the new epoch.
    fn repeated_version(&self, number: u64, begin: &Begin) -> Option<&Version> {
        if self.timeline().is_newer(number) {
            return None;
        }
        let is_current = |version: &&Version| version.is_visible() || version.epoch == self.epoch;
        let mut current = self.versions().rev().filter(is_current);
        // A rewind to a visible number is intentional. It is a retry only if it repeats a rewind of the same job.
        let may_be_repeated = |version: &Version| {
            !begin.rewind || version.rewind_from.is_some() && version.job.is_some()
        };
        current.find(|version| may_be_repeated(version) && version.is_repeated_by(number, begin))
    }

    /// Returns the version that the put with this sequence number opened, open or not.
    ///
    /// A sequence number that is not above the last one that opened a version is refused: its put can no longer open
    /// one.
    fn version_of_sequence(
        &self,
        job: &JobId,
        sequence: u64,
    ) -> Result<Option<VersionId>, Refusal> {
        let is_match = |of: Option<&JobId>, to| of == Some(job) && to == Some(sequence);
        let mut versions = self.versions();
        if let Some(version) = versions.find(|it| is_match(it.job.as_ref(), it.sequence)) {
            return Ok(Some(version.id));
        }
        let mut ended = self.tombstones.iter();
        if let Some(ended) = ended.find(|it| is_match(it.job.as_ref(), it.sequence)) {
            return Err(ended.refusal());
        }
        match self.job.as_ref().and_then(|job| job.last_sequence) {
            Some(last) if sequence <= last.sequence => {
                Err(Refusal::StaleSequence { sequence, number: last.number })
            }
            _ => Ok(None),
        }
    }

    /// Adds a contribution to an existing version.
    fn join(&mut self, id: VersionId, begin: &Begin) -> Result<Outcome, Refusal> {
        let version = self.version_by_id_mut(id)?;
        version.refuse_dropped()?;
        version.refuse_other_job(begin.job.as_ref())?;
        version.refuse_other_writers(&begin.writers)?;
        version.refuse_other_durability(begin.durability)?;
        let Version { id, epoch, number, .. } = *version;
        let writer = begin.writer;
        let process = version.process.clone();
        let Some(digest) = version.digest_of(writer) else {
            version.contributions.insert(writer, Contribution::Begun);
            version.sessions.remove(&writer);
            version.sessions.extend(begin.session.map(|session| (writer, session)));
            return Ok(Outcome::Begun { id, epoch, number });
        };
        if begin.digest.is_some_and(|offered| offered != digest) {
            let committed = digest;
            return Err(Refusal::ContributionDiffers { number, writer, committed, process });
        }
        Ok(Outcome::Retry { id, epoch, number, digest })
    }

    /// Opens a version. The job of `begin`, if any, must be the newest job of the key.
    fn open_version(
        &mut self,
        begin: Begin,
        replaces_ended_runs: bool,
    ) -> Result<Outcome, Refusal> {
        self.refuse_changed_default(&begin)?;
        let mut position = self.position_of(&begin)?;
        position.replaces_ended_runs |= replaces_ended_runs;
        let on = self.blocking_versions(&position);
        if !on.is_empty() {
            return Ok(Outcome::Wait { blocking: on });
        }
        let NewPosition { epoch, number, .. } = position;
        let Begin { id, .. } = begin;
        self.record_opened(&begin, number);
        let opened = VersionPosition { epoch, number };
        let index = self.versions.partition_point(|version| version.position() < opened);
        self.versions.insert(index, position.into_version(begin).into());
        Ok(Outcome::Begun { id, epoch, number })
    }

    /// Refuses a default set of writers that differs from the writers of the job's previous version.
    ///
    /// Otherwise, a rank that holds no shard this time would be left out silently.
    fn refuse_changed_default(&self, begin: &Begin) -> Result<(), Refusal> {
        let job = self.job.as_ref().filter(|_| begin.job.is_some());
        match job.and_then(|job| job.writers.as_ref()) {
            Some(expected) if begin.writers_defaulted && *expected != begin.writers => {
                Err(Refusal::WritersDisagree {
                    declared: begin.writers.clone(),
                    expected: expected.clone(),
                })
            }
            _ => Ok(()),
        }
    }

    /// Records the writers of a version that opens, and the sequence number of the put if the version has an implicit
    /// number.
    fn record_opened(&mut self, begin: &Begin, number: u64) {
        let Some(job) = self.job.as_mut().filter(|_| begin.job.is_some()) else {
            return;
        };
        job.writers = Some(begin.writers.clone());
        if let (None, Some(sequence)) = (begin.number, begin.sequence) {
            job.last_sequence = Some(LastSequence { sequence, number });
        }
    }
}

impl Begin {
    fn refuse_incomplete(&self) -> Result<(), Refusal> {
        let Self { writer, writers, .. } = self;
        if !writers.contains(*writer) {
            return Err(Refusal::NotAWriter { writer: *writer, writers: writers.clone() });
        }
        if writers.len() > 1 && self.job.is_none() {
            return Err(Refusal::JobRequired { writers: writers.clone() });
        }
        if writers.len() > 1 && self.number.is_none() && self.sequence.is_none() {
            return Err(Refusal::SequenceRequired { writers: writers.clone() });
        }
        Ok(())
    }
}

impl Version {
    /// Whether an earlier attempt of this begin may have opened this version.
    fn may_be_opened_by(&self, begin: &Begin) -> bool {
        let is_named = match begin.number {
            Some(number) => number == self.number,
            None => self.sequence == begin.sequence.filter(|_| self.job.is_some()),
        };
        is_named && self.job == begin.job && self.writers == begin.writers
    }

    /// Whether a begin repeats a contribution to this verified version.
    ///
    /// If the begin has a digest, it is compared here; otherwise the commit compares it.
    fn is_repeated_by(&self, number: u64, begin: &Begin) -> bool {
        let committed = self.manifest().and(self.digest_of(begin.writer));
        self.number == number
            && self.job == begin.job
            && self.writers == begin.writers
            && committed.is_some_and(|digest| begin.digest.is_none_or(|it| it == digest))
    }
}
