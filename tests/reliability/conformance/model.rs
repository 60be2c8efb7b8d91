//! Reference model of one key of a store: a list of versions, changed one step at a time.
//!
//! It is the simplest program that keeps the guarantees. It has no bytes, files, connections or
//! time, and uses no code of the store.

use std::collections::BTreeMap;

use super::version::Stage::{self, Ended, Open, Visible};
use super::version::{Position, Version};
use crate::conformance::merge::merge;
use crate::conformance::types::{
    Contribution, DropReason, Id, Job, ModelError, Progress, PutRequest, Writers,
};

/// State of one key.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Model {
    pub(crate) keep: usize,
    /// Epoch of new versions, and one above the highest number that was visible in it.
    ///
    /// `durable_next` is the same for durable versions.
    pub(crate) next_position: Position,
    durable_next: Position,
    /// All jobs in order of arrival. Only the last one is not fenced.
    pub(crate) jobs: Vec<Job>,
    /// Writers of the version that the last job opened last, and the last call that opened a version.
    writers: Option<Writers>,
    last_sequence: Option<u64>,
    /// All versions, including those whose data is deleted.
    pub(crate) versions: BTreeMap<Id, Version>,
    pub(crate) pins: BTreeMap<String, Id>,
    /// Versions that readers have open. They may be retired.
    pub(crate) leases: Vec<Id>,
    /// Positions of ended versions whose data is pending deletion.
    pending_delete: Vec<Position>,
}

impl Model {
    pub(crate) fn new() -> Self {
        Self { keep: 1, ..Self::default() }
    }

    /// Returns the versions of a stage, by position.
    pub(crate) fn in_stage(&self, stage: &Stage) -> Vec<&Version> {
        let mut all: Vec<_> = self.versions.values().filter(|it| it.stage == *stage).collect();
        all.sort_by_key(|version| version.position);
        all
    }

    /// Checks that the data of a version exists.
    ///
    /// An ended version keeps its data while a label or a lease refers to it.
    fn check_data(&self, version: &Version) -> Result<(), ModelError> {
        let mut references = self.pins.values().chain(&self.leases);
        match &version.stage {
            Ended(fault) if references.all(|id| *id != version.id) => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    fn is_occupied(&self, place: Position) -> bool {
        let mut versions = self.versions.values();
        self.pending_delete.contains(&place)
            || versions.any(|it| it.position == place && self.check_data(it).is_ok())
    }

    /// Ends the selected versions. Visible ones are retired, open ones fail with `reason`.
    fn end_versions(&mut self, is_selected: impl Fn(&Version) -> bool, reason: &ModelError) {
        let active = self.versions.values_mut().filter(|it| !matches!(it.stage, Ended(_)));
        for version in active.filter(|it| is_selected(it)) {
            version.stage =
                Ended(if version.stage == Open { reason.clone() } else { ModelError::Gone });
            self.pending_delete.push(version.position);
        }
    }

    /// Applies retention. Called after every change, also of `keep`, labels and leases.
    ///
    /// Keeps the `keep` newest visible versions, the `keep` newest durable ones, and labelled
    /// versions. Then deletes the data that is pending deletion.
    pub(crate) fn apply_retention(&mut self) {
        let visible = self.in_stage(&Visible);
        let newest = visible.iter().rev().take(self.keep);
        let durable = visible.iter().rev().filter(|it| it.request.durable).take(self.keep);
        let kept = newest.chain(durable).map(|it| &it.id).chain(self.pins.values());
        let kept: Vec<Id> = kept.copied().collect();
        self.end_versions(|it| it.stage == Visible && !kept.contains(&it.id), &ModelError::Gone);
        self.pending_delete.clear();
    }

    /// Returns the visible version of a number, or the newest one.
    pub(crate) fn find(&self, number: Option<u64>) -> Result<&Version, ModelError> {
        let visible = self.in_stage(&Visible);
        let found = visible.iter().rfind(|it| number.is_none_or(|number| it.number() == number));
        found.copied().ok_or_else(|| ModelError::NotFound {
            newest: visible.last().map(|version| version.number()),
            open: self.in_stage(&Open).last().map(|version| (version.number(), version.missing())),
        })
    }

    /// Begins the contribution of one writer. If it opens a version, the version gets this id.
    pub(crate) fn begin(&mut self, ask: &PutRequest, id: Id) -> Result<Id, ModelError> {
        ModelError::NotAWriter.err_if(!ask.writers.contains(&ask.writer))?;
        ModelError::JobRequired.err_if(ask.writers.len() > 1 && ask.job.is_none())?;
        let before = self.clone();
        let begun = self.join_or_open(ask, id);
        // A refused request changes nothing. But a request that must wait has fenced older jobs.
        if !matches!(begun, Ok(_) | Err(ModelError::Busy)) {
            *self = before;
        }
        begun
    }

    fn join_or_open(&mut self, ask: &PutRequest, id: Id) -> Result<Id, ModelError> {
        self.fence_older_jobs(ask.job)?;
        let Some(version) = self.find_target(ask) else { return self.open_version(ask, id) };
        self.check_data(version)?;
        ModelError::JobsDisagree.err_if(version.request.job != ask.job)?;
        ModelError::WritersDisagree.err_if(version.request.writers != ask.writers)?;
        ModelError::DurabilityDisagrees.err_if(version.request.durable != ask.durable)?;
        let id = version.id;
        self.versions
            .get_mut(&id)
            .expect("it was found")
            .contributions
            .entry(ask.writer)
            .or_insert(None);
        Ok(id)
    }

    /// Fences the job before, if this job is new.
    fn fence_older_jobs(&mut self, job: Option<Job>) -> Result<(), ModelError> {
        self.check_not_fenced(job)?;
        let older = self.jobs.last().copied();
        if job.is_some() && job != older {
            self.jobs.extend(job);
            (self.writers, self.last_sequence) = (None, None);
            self.end_versions(
                |it| it.stage == Open && it.request.job.is_some(),
                &ModelError::Fenced,
            );
        }
        Ok(())
    }

    fn check_not_fenced(&self, job: Option<Job>) -> Result<(), ModelError> {
        let mut older = self.jobs.iter().rev().skip(1);
        ModelError::Fenced.err_if(older.any(|older| Some(*older) == job))
    }

    /// Returns the version that a request belongs to, if it exists.
    ///
    /// That is the version of the same call of the job, or of the same number. In the second case
    /// the version is open, or it is complete and this request repeats it.
    fn find_target(&self, ask: &PutRequest) -> Option<&Version> {
        let is_match = |it: &&Version| {
            let is_same = it.request.job == ask.job && it.request.writers == ask.writers;
            let is_current = it.stage == Visible || it.position.0 == self.next_position.0;
            let is_whole = !ask.rewind || it.rewind_to.is_some() && it.request.job.is_some();
            let is_repeated = is_same && is_current && is_whole && self.check_data(it).is_ok();
            match ask.number {
                None => {
                    ask.sequence.is_some()
                        && (it.request.job, it.request.sequence) == (ask.job, ask.sequence)
                }
                Some(number) if number != it.number() => false,
                Some(number) => it.stage == Open || number < self.lower_bound().1 && is_repeated,
            }
        };
        self.versions.values().filter(is_match).max_by_key(|version| version.position)
    }

    /// Returns the epoch of new versions and the lowest number that they may have in it.
    ///
    /// They come from an open rewind, else from the newest version that was visible.
    fn lower_bound(&self) -> Position {
        let rewinds =
            self.in_stage(&Open).into_iter().filter_map(|it| Some((it.position.0, it.rewind_to?)));
        rewinds.fold(self.next_position, Position::max)
    }

    fn open_version(&mut self, ask: &PutRequest, id: Id) -> Result<Id, ModelError> {
        // A late call opens no version.
        ModelError::StaleSequence
            .err_if(ask.sequence.is_some() && ask.sequence <= self.last_sequence)?;
        let is_other = self.writers.as_ref().is_some_and(|writers| *writers != ask.writers);
        ModelError::WritersDisagree.err_if(ask.job.is_some() && ask.infers_writers && is_other)?;
        let (place, rewinds) = self.choose_position(ask)?;
        ModelError::Busy.err_if(self.in_stage(&Open).len() >= 2)?;
        // Data that is pending deletion at this position is deleted first.
        if self.is_occupied(place) {
            self.pending_delete.clear();
        }
        ModelError::Busy.err_if(self.is_occupied(place))?;
        if ask.job.is_some() {
            self.writers = Some(ask.writers.clone());
            self.last_sequence = ask.sequence.or(self.last_sequence);
        }
        let (ask, parts, stage) = (ask.clone(), BTreeMap::from([(ask.writer, None)]), Open);
        self.versions.insert(
            id,
            Version {
                id,
                position: place,
                rewind_to: rewinds,
                request: ask,
                contributions: parts,
                stage,
            },
        );
        Ok(id)
    }

    /// Chooses the position of a new version. Also returns the number that the key rewinds to, if any.
    fn choose_position(&self, ask: &PutRequest) -> Result<(Position, Option<u64>), ModelError> {
        let (epoch, lowest) = self.lower_bound();
        let rewinds = (epoch > self.next_position.0).then_some(lowest);
        let is_free = |number: &u64| {
            let place = (epoch, *number);
            !self.is_occupied(place)
                && self.in_stage(&Open).iter().all(|open| open.position < place)
        };
        let next = || (lowest.max(1)..=u64::MAX).find(is_free).expect("numbers do not end");
        let number = ask.number.unwrap_or_else(next);
        if number >= lowest {
            return Ok(((epoch, number), rewinds));
        }
        if ask.rewind {
            let positions = self
                .versions
                .values()
                .filter(|it| self.check_data(it).is_ok())
                .map(|it| it.position);
            let newest =
                positions.chain(self.pending_delete.iter().copied()).map(|(epoch, _)| epoch).max();
            return Ok(((newest.unwrap_or(0).max(epoch) + 1, number), Some(number)));
        }
        let is_own =
            |it: &&Version| ask.job.is_some() && it.request.job == ask.job && it.number() == number;
        let superseded =
            self.versions.values().rev().filter(is_own).find_map(|it| match &it.stage {
                Ended(fault @ ModelError::Dropped(DropReason::Superseded { .. })) => {
                    Some(fault.clone())
                }
                _ => None,
            });
        Err(superseded.unwrap_or(ModelError::NotNewer { highest: lowest - 1 }))
    }

    /// Completes a contribution. The last one of a version makes the version visible, or rejects it.
    pub(crate) fn commit(
        &mut self,
        id: Id,
        ask: &PutRequest,
        part: &Contribution,
    ) -> Result<Progress, ModelError> {
        let committed = self.add_part(id, ask, part);
        if committed.is_err() {
            self.abort(id, ask.writer);
        }
        committed
    }

    fn add_part(
        &mut self,
        id: Id,
        ask: &PutRequest,
        part: &Contribution,
    ) -> Result<Progress, ModelError> {
        self.check_not_fenced(ask.job)?;
        self.check_data(&self.versions[&id])?;
        let version = self.versions.get_mut(&id).expect("it has begun");
        match version.contributions.get_mut(&ask.writer) {
            None => return Err(ModelError::NotBegun),
            Some(Some(other)) if other != part => return Err(ModelError::ContributionDiffers),
            Some(slot) => *slot = Some(part.clone()),
        }
        let missing = version.missing();
        if version.stage == Open && missing.is_empty() {
            let is_whole = merge(&version.contributions).is_some();
            version.stage =
                if is_whole { Visible } else { Ended(ModelError::Dropped(DropReason::Rejected)) };
            self.check_data(&self.versions[&id])?;
            self.make_visible(id);
        }
        Ok(Progress { visible: self.versions[&id].stage != Open, missing })
    }

    /// Makes a version visible: supersedes older open versions, and retires those that it rewinds.
    fn make_visible(&mut self, id: Id) {
        let Version { position, rewind_to, request: PutRequest { durable, .. }, .. } =
            self.versions[&id];
        let (epoch, number) = position;
        let superseded = ModelError::Dropped(DropReason::Superseded { by: number });
        self.end_versions(|it| it.stage == Open && it.position < position, &superseded);
        let is_rewound = |it: &Version| rewind_to.is_some_and(|lowest| it.number() >= lowest);
        self.end_versions(|it| it.position.0 < epoch && is_rewound(it), &ModelError::Gone);
        self.next_position = (epoch, number + 1);
        if durable {
            self.durable_next = self.next_position;
        }
        self.apply_retention();
    }

    /// Withdraws a contribution. If the other writers cannot complete the version, the version ends.
    pub(crate) fn abort(&mut self, id: Id, writer: u32) {
        let version = self.versions.get_mut(&id).expect("it has begun");
        if version.stage == Open && version.contributions.get(&writer) == Some(&None) {
            version.contributions.remove(&writer);
            if version.request.sequence.is_some() || version.contributions.is_empty() {
                version.stage = Ended(ModelError::Dropped(DropReason::Aborted));
            }
        }
        self.apply_retention();
    }

    pub(crate) fn pin(&mut self, number: Option<u64>, label: &str) -> Result<u64, ModelError> {
        let Version { id, position, .. } = *self.find(number)?;
        self.pins.insert(label.to_owned(), id);
        self.apply_retention();
        Ok(position.1)
    }

    /// Deletes the version of a number, or all versions. Returns how many were deleted.
    pub(crate) fn delete(&mut self, number: Option<u64>) -> usize {
        self.pending_delete.clear();
        let is_selected = |it: &Version| number.is_none_or(|number| it.number() == number);
        self.end_versions(is_selected, &ModelError::Dropped(DropReason::Deleted));
        let count = self.pending_delete.len();
        self.apply_retention();
        count
    }

    /// Simulates the end of the process that holds the data in memory.
    ///
    /// Durable versions and the history of the key remain.
    pub(crate) fn crash(&mut self) {
        // The readers end with the process.
        self.leases.clear();
        let Self { keep, durable_next, .. } = *self;
        let (mut versions, mut pins) = (self.versions.clone(), self.pins.clone());
        versions
            .retain(|_, it| it.request.durable && it.stage != Open && self.check_data(it).is_ok());
        pins.retain(|_, id| versions.contains_key(id));
        let jobs = std::mem::take(&mut self.jobs);
        *self = Self {
            keep,
            next_position: durable_next,
            durable_next,
            jobs,
            versions,
            pins,
            ..Self::default()
        };
    }
}
