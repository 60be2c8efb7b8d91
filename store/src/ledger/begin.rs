//! Begin: which version a contribution belongs to, and whether one may open for it.

use super::MAX_FENCED;
use super::command::{Begin, Outcome};
use super::identity::{JobId, VersionId};
use super::place::Place;
use super::refusal::{Reason, Refusal};
use super::state::{Job, State};
use super::version::{Contribution, Version};

impl State {
    pub(super) fn begin(&mut self, begin: Begin) -> Result<Outcome, Refusal> {
        begin.refuse_incomplete()?;
        self.refuse_fenced(begin.job.as_ref())?;
        if let Some(job) = &begin.job {
            self.fence_older(job);
        }
        match self.matching(&begin)? {
            Some(id) => self.join(id, &begin),
            None => self.open_version(begin),
        }
    }

    /// Refuses a job that a newer one has fenced.
    pub(super) fn refuse_fenced(&self, job: Option<&JobId>) -> Result<(), Refusal> {
        match &self.job {
            Some(newest) if job.is_some_and(|job| self.fenced.contains(job)) => {
                Err(Refusal::Fenced { by: newest.id.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Makes a job that never contributed before the newest one.
    fn fence_older(&mut self, newest: &JobId) {
        if self.job() == Some(newest) {
            return;
        }
        let job = Job { id: newest.clone(), writers: None, last_call: None };
        let Some(older) = self.job.replace(job) else {
            return;
        };
        self.change(
            |version| version.is_open() && version.job.as_ref() == Some(&older.id),
            |version| version.drop_because(Reason::Fenced { by: newest.clone() }),
        );
        self.fenced.push_back(older.id);
        if self.fenced.len() > MAX_FENCED {
            self.fenced.pop_front();
        }
    }

    /// The version that a contribution belongs to, if it is there.
    fn matching(&self, begin: &Begin) -> Result<Option<VersionId>, Refusal> {
        if let Some(ended) = self.ended(begin.id) {
            return Err(ended.refusal());
        }
        if let Some(version) = self.known(begin.id) {
            return if version.answers(begin) {
                Ok(Some(version.id))
            } else {
                Err(Refusal::IdTaken { id: begin.id })
            };
        }
        match (begin.number, &begin.job, begin.call) {
            // A copy is of its own version alone.
            _ if begin.epoch.is_some() => Ok(None),
            (Some(number), ..) => Ok(self.matching_number(number, begin)),
            (None, Some(job), Some(call)) => self.matching_call(job, call),
            (None, ..) => Ok(None),
        }
    }

    /// An open version of that number, or one that this begin repeats identically.
    fn matching_number(&self, number: u64, begin: &Begin) -> Option<VersionId> {
        let open = self.open().find(|version| version.number == number);
        open.or_else(|| self.identical(number, begin)).map(|version| version.id)
    }

    /// The proved version that a begin repeats. One that a rewind took back is not meant: its
    /// number is free for the new epoch.
    fn identical(&self, number: u64, begin: &Begin) -> Option<&Version> {
        if self.timeline().is_newer(number) {
            return None;
        }
        let stands = |version: &&Version| version.is_visible() || version.epoch == self.epoch;
        let mut standing = self.versions().rev().filter(stands);
        // A rewind to a number that is visible is meant; only the same job's rewind is a retry of it.
        let is_meant =
            |version: &Version| !begin.rewind || version.rewinds.is_some() && version.job.is_some();
        standing.find(|version| is_meant(version) && version.is_repeated_by(number, begin))
    }

    /// The version of that call, open or not; a call that has passed never opens one again.
    fn matching_call(&self, job: &JobId, call: u64) -> Result<Option<VersionId>, Refusal> {
        let is_match = |of: Option<&JobId>, to| of == Some(job) && to == Some(call);
        let mut versions = self.versions();
        if let Some(version) = versions.find(|it| is_match(it.job.as_ref(), it.call)) {
            return Ok(Some(version.id));
        }
        let mut ended = self.ended.iter();
        if let Some(ended) = ended.find(|it| is_match(it.job.as_ref(), it.call)) {
            return Err(ended.refusal());
        }
        match self.job.as_ref().and_then(|job| job.last_call) {
            Some((last, number)) if call <= last => Err(Refusal::LateCall { call, number }),
            _ => Ok(None),
        }
    }

    /// Adds a contribution to a version that is there.
    fn join(&mut self, id: VersionId, begin: &Begin) -> Result<Outcome, Refusal> {
        let version = self.named(id)?;
        version.refuse_dropped()?;
        version.refuse_other_job(begin.job.as_ref())?;
        version.refuse_other_writers(&begin.writers)?;
        version.refuse_other_durability(begin.durability)?;
        let Version { id, epoch, number, .. } = *version;
        let writer = begin.writer;
        let Some(digest) = version.digest_of(writer) else {
            version.contributions.insert(writer, Contribution::Begun);
            version.sessions.remove(&writer);
            version.sessions.extend(begin.session.map(|session| (writer, session)));
            return Ok(Outcome::Begun { id, epoch, number });
        };
        if begin.digest.is_some_and(|offered| offered != digest) {
            return Err(Refusal::ContributionDiffers { number, writer, committed: digest });
        }
        Ok(Outcome::Retry { id, epoch, number, digest })
    }

    /// Opens a version; the job that begins it, if any, is the newest one by now.
    fn open_version(&mut self, begin: Begin) -> Result<Outcome, Refusal> {
        self.refuse_changed_default(&begin)?;
        let place = self.place_of(&begin)?;
        let on = self.in_the_way(&place);
        if !on.is_empty() {
            return Ok(Outcome::Wait { on });
        }
        let Place { epoch, number, .. } = place;
        let Begin { id, .. } = begin;
        self.remember_opened(&begin, number);
        let index = self.versions.partition_point(|version| version.place() < (epoch, number));
        self.versions.insert(index, place.opened_by(begin).into());
        Ok(Outcome::Begun { id, epoch, number })
    }

    /// A set of writers that nobody said must be that of the job's previous version: a rank that
    /// holds no shard this time would else be left out unnoticed.
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

    fn remember_opened(&mut self, begin: &Begin, number: u64) {
        let Some(job) = self.job.as_mut().filter(|_| begin.job.is_some()) else {
            return;
        };
        job.writers = Some(begin.writers.clone());
        if let (None, Some(call)) = (begin.number, begin.call) {
            job.last_call = Some((call, number));
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
        if writers.len() > 1 && self.number.is_none() && self.call.is_none() {
            return Err(Refusal::CallRequired { writers: writers.clone() });
        }
        Ok(())
    }
}

impl Version {
    /// Whether it may be the version that an earlier try of a begin opened.
    fn answers(&self, begin: &Begin) -> bool {
        let is_named = match begin.number {
            Some(number) => number == self.number,
            None => self.call == begin.call.filter(|_| self.job.is_some()),
        };
        is_named && self.job == begin.job && self.writers == begin.writers
    }

    /// Whether a begin is the identical retry of a contribution to this proved version. The digest
    /// counts if it is known already; else the commit will compare it.
    fn is_repeated_by(&self, number: u64, begin: &Begin) -> bool {
        let committed = self.manifest().and(self.digest_of(begin.writer));
        self.number == number
            && self.job == begin.job
            && self.writers == begin.writers
            && committed.is_some_and(|digest| begin.digest.is_none_or(|it| it == digest))
    }
}
