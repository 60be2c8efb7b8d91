//! Numbering: the epoch and the number of a new version, and the versions that it must wait for.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::command::{Begin, Effect};
use super::identity::{JobId, VersionId};
use super::refusal::{Reason, Refusal};
use super::state::State;
use super::version::{Contribution, Status, Tombstone, Version, VersionPosition};
use super::{MAX_OPEN, MAX_PENDING_DELETIONS};

/// An epoch in which versions may open.
pub(super) struct Timeline {
    epoch: u32,
    /// A new number must be above this one.
    highest: Option<u64>,
    /// The number at which the epoch begins, if none of its versions is visible yet.
    rewind_from: Option<u64>,
    replaces_ended_runs: bool,
}

impl Timeline {
    /// Whether a version with this number may open in the epoch.
    pub(super) fn is_newer(&self, number: u64) -> bool {
        self.highest.is_none_or(|highest| number > highest)
    }

    /// Returns the epoch and number of a copy, which are those of its source. No visible version may be newer.
    fn position_of_copy(&self, epoch: u32, number: u64) -> Result<NewPosition, Refusal> {
        let is_same = epoch == self.epoch;
        if epoch > self.epoch || is_same && self.is_newer(number) {
            let rewinds = if is_same { self.rewind_from } else { Some(number) };
            let replaces_ended_runs = is_same && self.replaces_ended_runs;
            return Ok(NewPosition { epoch, number, rewind_from: rewinds, replaces_ended_runs });
        }
        let highest = self.highest.unwrap_or_default();
        Err(Refusal::VersionNotNewer { number, highest, earlier: None })
    }
}

/// Epoch and number at which a version opens.
pub(super) struct NewPosition {
    pub(super) epoch: u32,
    pub(super) number: u64,
    rewind_from: Option<u64>,
    pub(super) replaces_ended_runs: bool,
}

impl NewPosition {
    pub(super) fn into_version(self, begin: Begin) -> Version {
        let Self { epoch, number, rewind_from, replaces_ended_runs } = self;
        let Begin { writer, writers, job, durability, session, id, process, now, .. } = begin;
        let sequence = begin.sequence.filter(|_| begin.number.is_none() && job.is_some());
        let contributions = BTreeMap::from([(writer, Contribution::Begun)]);
        let sessions = session.map(|session| (writer, session)).into_iter().collect();
        let (copy, status) = (begin.epoch.is_some(), Status::Open { since: now });
        Version {
            id,
            epoch,
            number,
            stored_at: None,
            rewind_from,
            replaces_ended_runs,
            job,
            sequence,
            writers,
            contributions,
            sessions,
            durability,
            uploaded: false,
            process,
            is_copy: copy,
            status,
        }
    }
}

impl State {
    /// Returns the epoch and number at which the version of `begin` opens.
    pub(super) fn position_of(&self, begin: &Begin) -> Result<NewPosition, Refusal> {
        let timeline = self.timeline();
        if let (Some(epoch), Some(number)) = (begin.epoch, begin.number) {
            return timeline.position_of_copy(epoch, number);
        }
        let number = match begin.number {
            None => self.next_number(&timeline)?,
            Some(number) if timeline.is_newer(number) => number,
            Some(number) if begin.rewind => return self.position_of_rewind(number),
            Some(number) => return Err(self.not_newer_refusal(number, timeline.highest, begin)),
        };
        let Timeline { epoch, rewind_from, replaces_ended_runs, .. } = timeline;
        Ok(NewPosition { epoch, number, rewind_from, replaces_ended_runs })
    }

    /// Returns the position of a rewind. Every rewind opens a new epoch, also one that is retried.
    fn position_of_rewind(&self, number: u64) -> Result<NewPosition, Refusal> {
        let (epoch, rewind_from) = (self.next_epoch()?, Some(number));
        Ok(NewPosition { epoch, number, rewind_from, replaces_ended_runs: false })
    }

    /// Returns the epoch after all that are visible or open.
    pub(super) fn next_epoch(&self) -> Result<u32, Refusal> {
        let newest = self.versions.last().map_or(self.epoch, |it| it.epoch.max(self.epoch));
        newest.checked_add(1).ok_or(Refusal::NumbersExhausted)
    }

    /// Returns the refusal of a number that is not above the highest one.
    fn not_newer_refusal(&self, number: u64, highest: Option<u64>, begin: &Begin) -> Refusal {
        let highest = highest.unwrap_or_default();
        let superseded = begin.job.as_ref().and_then(|job| self.superseded_refusal(number, job));
        superseded.unwrap_or_else(|| {
            let earlier = self.earlier_run(number, begin);
            Refusal::VersionNotNewer { number, highest, earlier }
        })
    }

    /// Returns the refusal for a slow writer of a superseded version. It says more than `VersionNotNewer`.
    fn superseded_refusal(&self, number: u64, job: &JobId) -> Option<Refusal> {
        let dropped = self.versions().filter(|it| it.number == number);
        let mut dropped = dropped.filter(|it| it.job.as_ref() == Some(job) && it.is_superseded());
        let ended = self.tombstones.iter().filter(|it| it.number == number);
        let mut ended = ended.filter(|it| it.job.as_ref() == Some(job) && it.is_superseded());
        let dropped = dropped.next_back().and_then(|it| it.refuse_dropped().err());
        dropped.or_else(|| ended.next_back().map(Tombstone::refusal))
    }

    /// Returns the lowest free number above all numbers of the epoch that are open or ever became visible.
    fn next_number(&self, timeline: &Timeline) -> Result<u64, Refusal> {
        let Timeline { epoch, highest, .. } = *timeline;
        let open = self.open().filter(|version| version.epoch == epoch);
        let mut number = open.map(|it| it.number).max().max(highest).unwrap_or(0);
        loop {
            number = number.checked_add(1).ok_or(Refusal::NumbersExhausted)?;
            if self.version_at(epoch, number).is_none() {
                return Ok(number);
            }
        }
    }

    /// Returns the epoch of a new version: the newest epoch with an open version, else the visible epoch.
    ///
    /// So the versions after a rewind may begin before the rewind is visible.
    pub(super) fn timeline(&self) -> Timeline {
        match self.open().next_back().filter(|version| version.epoch > self.epoch) {
            Some(Version { epoch, rewind_from, replaces_ended_runs, .. }) => Timeline {
                epoch: *epoch,
                highest: rewind_from.and_then(|number| number.checked_sub(1)),
                rewind_from: *rewind_from,
                replaces_ended_runs: *replaces_ended_runs,
            },
            None => Timeline {
                epoch: self.epoch,
                highest: self.highest,
                rewind_from: None,
                replaces_ended_runs: false,
            },
        }
    }

    /// Returns the versions that block a new version: it must wait until they have become visible or are deleted.
    pub(super) fn blocking_versions(&self, position: &NewPosition) -> Vec<VersionId> {
        if let Some(version) = self.version_at(position.epoch, position.number) {
            return vec![version.id];
        }
        let ids = |versions: Vec<&Version>| versions.iter().map(|version| version.id).collect();
        let open: Vec<_> = self.open().collect();
        if open.len() >= MAX_OPEN {
            return ids(open);
        }
        let deletions = self.pending_effects().into_iter().filter_map(|effect| match effect {
            Effect::Delete { id, .. } => Some(id),
            Effect::Verify { .. } => None,
        });
        let deletions: Vec<VersionId> = deletions.collect();
        if deletions.len() >= MAX_PENDING_DELETIONS { deletions } else { Vec::new() }
    }

    fn version_at(&self, epoch: u32, number: u64) -> Option<&Version> {
        let index = self
            .versions
            .binary_search_by_key(&VersionPosition { epoch, number }, |version| version.position())
            .ok()?;
        self.versions.get(index).map(Arc::as_ref)
    }
}

impl Tombstone {
    fn is_superseded(&self) -> bool {
        matches!(self.reason, Some(Reason::Superseded { .. }))
    }
}

impl Version {
    fn is_superseded(&self) -> bool {
        matches!(self.status, Status::Dropped { reason: Reason::Superseded { .. } })
    }
}
