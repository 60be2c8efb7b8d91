//! Where a new version opens: in which epoch, with which number, and when.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::command::{Begin, Effect};
use super::identity::{JobId, VersionId};
use super::refusal::{Reason, Refusal};
use super::state::State;
use super::version::{Contribution, Ended, Status, Version};
use super::{MAX_DELETIONS, MAX_OPEN};

/// An epoch that versions may open in.
pub(super) struct Timeline {
    epoch: u32,
    /// What a new number must be above.
    highest: Option<u64>,
    /// Where the epoch begins, if readers have not reached it.
    rewinds: Option<u64>,
}

impl Timeline {
    /// Whether a number may open in the epoch.
    pub(super) fn is_newer(&self, number: u64) -> bool {
        self.highest.is_none_or(|highest| number > highest)
    }

    /// A copy has the place of what it is a copy of; nothing newer may be there.
    fn place_of_copy(&self, epoch: u32, number: u64) -> Result<Place, Refusal> {
        let is_same = epoch == self.epoch;
        if epoch > self.epoch || is_same && self.is_newer(number) {
            let rewinds = if is_same { self.rewinds } else { Some(number) };
            return Ok(Place { epoch, number, rewinds });
        }
        Err(Refusal::VersionNotNewer { number, highest: self.highest.unwrap_or_default() })
    }
}

/// Where a version opens.
pub(super) struct Place {
    pub(super) epoch: u32,
    pub(super) number: u64,
    rewinds: Option<u64>,
}

impl Place {
    pub(super) fn opened_by(self, begin: Begin) -> Version {
        let Self { epoch, number, rewinds } = self;
        let Begin { writer, writers, job, durability, session, id, now, .. } = begin;
        let call = begin.call.filter(|_| begin.number.is_none() && job.is_some());
        let contributions = BTreeMap::from([(writer, Contribution::Begun)]);
        let sessions = session.map(|session| (writer, session)).into_iter().collect();
        let (copy, status) = (begin.epoch.is_some(), Status::Open { since: now });
        Version {
            id,
            epoch,
            number,
            rewinds,
            job,
            call,
            writers,
            contributions,
            sessions,
            durability,
            stored: false,
            copy,
            status,
        }
    }
}

impl State {
    pub(super) fn place_of(&self, begin: &Begin) -> Result<Place, Refusal> {
        let timeline = self.timeline();
        if let (Some(epoch), Some(number)) = (begin.epoch, begin.number) {
            return timeline.place_of_copy(epoch, number);
        }
        let number = match begin.number {
            None => self.next_number(&timeline)?,
            Some(number) if timeline.is_newer(number) => number,
            Some(number) if begin.rewind => return self.place_of_rewind(number),
            Some(number) => return Err(self.not_newer(number, timeline.highest, begin)),
        };
        let Timeline { epoch, rewinds, .. } = timeline;
        Ok(Place { epoch, number, rewinds })
    }

    /// A rewind opens an epoch of its own, even if it has to be tried again.
    fn place_of_rewind(&self, number: u64) -> Result<Place, Refusal> {
        let newest = self.versions.last().map_or(self.epoch, |it| it.epoch.max(self.epoch));
        let epoch = newest.checked_add(1).ok_or(Refusal::NumbersExhausted)?;
        Ok(Place { epoch, number, rewinds: Some(number) })
    }

    fn not_newer(&self, number: u64, highest: Option<u64>, begin: &Begin) -> Refusal {
        let highest = highest.unwrap_or_default();
        let superseded = begin.job.as_ref().and_then(|job| self.superseded(number, job));
        superseded.unwrap_or(Refusal::VersionNotNewer { number, highest })
    }

    /// What a slow writer of a superseded version is told: more than that it is not newer.
    fn superseded(&self, number: u64, job: &JobId) -> Option<Refusal> {
        let dropped = self.versions().filter(|it| it.number == number);
        let mut dropped = dropped.filter(|it| it.job.as_ref() == Some(job) && it.is_superseded());
        let ended = self.ended.iter().filter(|it| it.number == number);
        let mut ended = ended.filter(|it| it.job.as_ref() == Some(job) && it.is_superseded());
        let dropped = dropped.next_back().and_then(|it| it.refuse_dropped().err());
        dropped.or_else(|| ended.next_back().map(Ended::refusal))
    }

    /// The lowest number above all that are or were visible or are open, and free.
    fn next_number(&self, timeline: &Timeline) -> Result<u64, Refusal> {
        let Timeline { epoch, highest, .. } = *timeline;
        let open = self.open().filter(|version| version.epoch == epoch);
        let mut number = open.map(|it| it.number).max().max(highest).unwrap_or(0);
        loop {
            number = number.checked_add(1).ok_or(Refusal::NumbersExhausted)?;
            if self.at((epoch, number)).is_none() {
                return Ok(number);
            }
        }
    }

    /// The epoch that a new version belongs to: the newest one that is open, so that the steps
    /// after a rewind may begin before that rewind is visible.
    pub(super) fn timeline(&self) -> Timeline {
        match self.open().next_back().filter(|version| version.epoch > self.epoch) {
            Some(Version { epoch, rewinds, .. }) => {
                let highest = rewinds.and_then(|number| number.checked_sub(1));
                Timeline { epoch: *epoch, highest, rewinds: *rewinds }
            }
            None => Timeline { epoch: self.epoch, highest: self.highest, rewinds: None },
        }
    }

    /// The versions that a new one has to wait for.
    pub(super) fn in_the_way(&self, place: &Place) -> Vec<VersionId> {
        if let Some(version) = self.at((place.epoch, place.number)) {
            return vec![version.id];
        }
        let ids = |versions: Vec<&Version>| versions.iter().map(|version| version.id).collect();
        let open: Vec<_> = self.open().collect();
        if open.len() >= MAX_OPEN {
            return ids(open);
        }
        let is_deletion = |it: &&Version| matches!(self.owed(it), Some(Effect::Delete { .. }));
        let deletions: Vec<_> = self.versions().filter(is_deletion).collect();
        if deletions.len() >= MAX_DELETIONS { ids(deletions) } else { Vec::new() }
    }

    fn at(&self, place: (u32, u64)) -> Option<&Version> {
        let index = self.versions.binary_search_by_key(&place, |version| version.place()).ok()?;
        self.versions.get(index).map(Arc::as_ref)
    }
}

impl Ended {
    fn is_superseded(&self) -> bool {
        matches!(self.reason, Some(Reason::Superseded { .. }))
    }
}

impl Version {
    fn is_superseded(&self) -> bool {
        matches!(self.status, Status::Dropped { reason: Reason::Superseded { .. } })
    }
}
