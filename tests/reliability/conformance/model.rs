//! What a store promises of a key, as the simplest program that keeps it: a list of versions, one step after the
//! other. No bytes, files, connections or time, and nothing of the store.

use std::collections::BTreeMap;

use super::fit::merged;
use super::version::Stage::{self, Ended, Open, Visible};
use super::version::{Place, Version};
use super::words::{Ask, End, Fault, Id, Job, Part, Progress, Writers};

/// All of one key.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Model {
    pub(crate) keep: usize,
    /// The epoch, and one above the highest number ever visible in it; and the same of what was durable.
    pub(crate) next: Place,
    lasting: Place,
    /// All jobs, as they came. Only the last one may go on.
    pub(crate) jobs: Vec<Job>,
    /// Of the last one: the writers of the version that it opened last, and its last call that opened one.
    writers: Option<Writers>,
    last_call: Option<u64>,
    /// Also those whose data is gone.
    pub(crate) versions: BTreeMap<Id, Version>,
    pub(crate) pins: BTreeMap<String, Id>,
    /// What readers hold, though it may be retired.
    pub(crate) leases: Vec<Id>,
    /// Places of dropped versions whose data is still to be deleted.
    owed: Vec<Place>,
}

impl Model {
    pub(crate) fn new() -> Self {
        Self { keep: 1, ..Self::default() }
    }

    /// The versions that have come so far, by place.
    pub(crate) fn all(&self, stage: &Stage) -> Vec<&Version> {
        let mut all: Vec<_> = self.versions.values().filter(|it| it.stage == *stage).collect();
        all.sort_by_key(|version| version.place);
        all
    }

    /// Its bytes are there, or why not. What has ended stays for its labels and readers.
    fn there(&self, version: &Version) -> Result<(), Fault> {
        let mut held = self.pins.values().chain(&self.leases);
        match &version.stage {
            Ended(fault) if held.all(|id| *id != version.id) => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    fn is_taken(&self, place: Place) -> bool {
        let mut versions = self.versions.values();
        self.owed.contains(&place) || versions.any(|it| it.place == place && self.there(it).is_ok())
    }

    /// Ends some versions. What was visible is retired.
    fn end(&mut self, is_meant: impl Fn(&Version) -> bool, why: &Fault) {
        let live = self.versions.values_mut().filter(|it| !matches!(it.stage, Ended(_)));
        for version in live.filter(|it| is_meant(it)) {
            version.stage = Ended(if version.stage == Open { why.clone() } else { Fault::Gone });
            self.owed.push(version.place);
        }
    }

    /// After every change, also of what is kept and held: of all versions the newest ones stay, and of those on disk
    /// as many; and what has a label. What is owed is deleted.
    pub(crate) fn settle(&mut self) {
        let visible = self.all(&Visible);
        let newest = visible.iter().rev().take(self.keep);
        let durable = visible.iter().rev().filter(|it| it.ask.durable).take(self.keep);
        let kept = newest.chain(durable).map(|it| &it.id).chain(self.pins.values());
        let kept: Vec<Id> = kept.copied().collect();
        self.end(|it| it.stage == Visible && !kept.contains(&it.id), &Fault::Gone);
        self.owed.clear();
    }

    /// The version that a reader gets: of a number, or the newest.
    pub(crate) fn find(&self, number: Option<u64>) -> Result<&Version, Fault> {
        let visible = self.all(&Visible);
        let found = visible.iter().rfind(|it| number.is_none_or(|number| it.number() == number));
        found.copied().ok_or_else(|| Fault::NotFound {
            newest: visible.last().map(|version| version.number()),
            coming: self.all(&Open).last().map(|version| (version.number(), version.missing())),
        })
    }

    /// A writer begins to contribute to a version, which has this id if it opens with it.
    pub(crate) fn begin(&mut self, ask: &Ask, id: Id) -> Result<Id, Fault> {
        Fault::NotAWriter.when(!ask.writers.contains(&ask.writer))?;
        Fault::JobRequired.when(ask.writers.len() > 1 && ask.job.is_none())?;
        let before = self.clone();
        let begun = self.take_part(ask, id);
        // What is refused changes nothing; who has to wait has taken the key over all the same.
        if !matches!(begun, Ok(_) | Err(Fault::Busy)) {
            *self = before;
        }
        begun
    }

    fn take_part(&mut self, ask: &Ask, id: Id) -> Result<Id, Fault> {
        self.take_over(ask.job)?;
        let Some(version) = self.meant(ask) else { return self.start(ask, id) };
        self.there(version)?;
        Fault::JobsDisagree.when(version.ask.job != ask.job)?;
        Fault::WritersDisagree.when(version.ask.writers != ask.writers)?;
        Fault::DurabilityDisagrees.when(version.ask.durable != ask.durable)?;
        let id = version.id;
        self.versions.get_mut(&id).expect("it was found").parts.entry(ask.writer).or_insert(None);
        Ok(id)
    }

    /// A job that is new ends the one before for good.
    fn take_over(&mut self, job: Option<Job>) -> Result<(), Fault> {
        self.refuse_fenced(job)?;
        let older = self.jobs.last().copied();
        if job.is_some() && job != older {
            self.jobs.extend(job);
            (self.writers, self.last_call) = (None, None);
            self.end(|it| it.stage == Open && it.ask.job.is_some(), &Fault::Fenced);
        }
        Ok(())
    }

    fn refuse_fenced(&self, job: Option<Job>) -> Result<(), Fault> {
        let mut older = self.jobs.iter().rev().skip(1);
        Fault::Fenced.when(older.any(|older| Some(*older) == job))
    }

    /// The version of its job's call, or of its number: an open one, or one that is complete and that this
    /// repeats.
    fn meant(&self, ask: &Ask) -> Option<&Version> {
        let is_meant = |it: &&Version| {
            let is_same = it.ask.job == ask.job && it.ask.writers == ask.writers;
            let is_current = it.stage == Visible || it.place.0 == self.next.0;
            let is_whole = !ask.rewind || it.rewinds.is_some() && it.ask.job.is_some();
            let is_repeated = is_same && is_current && is_whole && self.there(it).is_ok();
            match ask.number {
                None => ask.call.is_some() && (it.ask.job, it.ask.call) == (ask.job, ask.call),
                Some(number) if number != it.number() => false,
                Some(number) => it.stage == Open || number < self.line().1 && is_repeated,
            }
        };
        self.versions.values().filter(is_meant).max_by_key(|version| version.place)
    }

    /// The epoch that new versions are in, and the lowest number that they may have there: those of a rewind that
    /// is open, or those that readers have reached.
    fn line(&self) -> Place {
        let rewinds = self.all(&Open).into_iter().filter_map(|it| Some((it.place.0, it.rewinds?)));
        rewinds.fold(self.next, Place::max)
    }

    fn start(&mut self, ask: &Ask, id: Id) -> Result<Id, Fault> {
        // A call that has passed opens none.
        Fault::LateCall.when(ask.call.is_some() && ask.call <= self.last_call)?;
        let is_other = self.writers.as_ref().is_some_and(|writers| *writers != ask.writers);
        Fault::WritersDisagree.when(ask.job.is_some() && ask.found && is_other)?;
        let (place, rewinds) = self.place(ask)?;
        Fault::Busy.when(self.all(&Open).len() >= 2)?;
        // What is in the way is deleted first, if it can be.
        if self.is_taken(place) {
            self.owed.clear();
        }
        Fault::Busy.when(self.is_taken(place))?;
        if ask.job.is_some() {
            self.writers = Some(ask.writers.clone());
            self.last_call = ask.call.or(self.last_call);
        }
        let (ask, parts, stage) = (ask.clone(), BTreeMap::from([(ask.writer, None)]), Open);
        self.versions.insert(id, Version { id, place, rewinds, ask, parts, stage });
        Ok(id)
    }

    /// Where a version opens, and which number the key goes back to with it.
    fn place(&self, ask: &Ask) -> Result<(Place, Option<u64>), Fault> {
        let (epoch, lowest) = self.line();
        let rewinds = (epoch > self.next.0).then_some(lowest);
        let is_free = |number: &u64| {
            let place = (epoch, *number);
            !self.is_taken(place) && self.all(&Open).iter().all(|open| open.place < place)
        };
        let next = || (lowest.max(1)..=u64::MAX).find(is_free).expect("numbers do not end");
        let number = ask.number.unwrap_or_else(next);
        if number >= lowest {
            return Ok(((epoch, number), rewinds));
        }
        if ask.rewind {
            let there =
                self.versions.values().filter(|it| self.there(it).is_ok()).map(|it| it.place);
            let newest = there.chain(self.owed.iter().copied()).map(|(epoch, _)| epoch).max();
            return Ok(((newest.unwrap_or(0).max(epoch) + 1, number), Some(number)));
        }
        let is_own =
            |it: &&Version| ask.job.is_some() && it.ask.job == ask.job && it.number() == number;
        let superseded =
            self.versions.values().rev().filter(is_own).find_map(|it| match &it.stage {
                Ended(fault @ Fault::Dropped(End::Superseded { .. })) => Some(fault.clone()),
                _ => None,
            });
        Err(superseded.unwrap_or(Fault::NotNewer { highest: lowest - 1 }))
    }

    /// A contribution is complete. The last one of its version makes that visible, or ends it.
    pub(crate) fn commit(&mut self, id: Id, ask: &Ask, part: &Part) -> Result<Progress, Fault> {
        let committed = self.give(id, ask, part);
        if committed.is_err() {
            self.abort(id, ask.writer);
        }
        committed
    }

    fn give(&mut self, id: Id, ask: &Ask, part: &Part) -> Result<Progress, Fault> {
        self.refuse_fenced(ask.job)?;
        self.there(&self.versions[&id])?;
        let version = self.versions.get_mut(&id).expect("it has begun");
        match version.parts.get_mut(&ask.writer) {
            None => return Err(Fault::NotBegun),
            Some(Some(other)) if other != part => return Err(Fault::Differs),
            Some(given) => *given = Some(part.clone()),
        }
        let missing = version.missing();
        if version.stage == Open && missing.is_empty() {
            let is_whole = merged(&version.parts).is_some();
            version.stage = if is_whole { Visible } else { Ended(Fault::Dropped(End::Rejected)) };
            self.there(&self.versions[&id])?;
            self.reach(id);
        }
        Ok(Progress { visible: self.versions[&id].stage != Open, missing })
    }

    /// Readers see a new version: what is older and open ends, what it takes back is retired.
    fn reach(&mut self, id: Id) {
        let Version { place, rewinds, ask: Ask { durable, .. }, .. } = self.versions[&id];
        let (epoch, number) = place;
        let superseded = Fault::Dropped(End::Superseded { by: number });
        self.end(|it| it.stage == Open && it.place < place, &superseded);
        let is_back = |it: &Version| rewinds.is_some_and(|lowest| it.number() >= lowest);
        self.end(|it| it.place.0 < epoch && is_back(it), &Fault::Gone);
        self.next = (epoch, number + 1);
        if durable {
            self.lasting = self.next;
        }
        self.settle();
    }

    /// A contribution is taken back. A version that others cannot complete ends with it.
    pub(crate) fn abort(&mut self, id: Id, writer: u32) {
        let version = self.versions.get_mut(&id).expect("it has begun");
        if version.stage == Open && version.parts.get(&writer) == Some(&None) {
            version.parts.remove(&writer);
            if version.ask.call.is_some() || version.parts.is_empty() {
                version.stage = Ended(Fault::Dropped(End::Aborted));
            }
        }
        self.settle();
    }

    pub(crate) fn pin(&mut self, number: Option<u64>, label: &str) -> Result<u64, Fault> {
        let Version { id, place, .. } = *self.find(number)?;
        self.pins.insert(label.to_owned(), id);
        self.settle();
        Ok(place.1)
    }

    /// Deletes a number, or all; says how many there were.
    pub(crate) fn delete(&mut self, number: Option<u64>) -> usize {
        self.owed.clear();
        let is_meant = |it: &Version| number.is_none_or(|number| it.number() == number);
        self.end(is_meant, &Fault::Dropped(End::Deleted));
        let count = self.owed.len();
        self.settle();
        count
    }

    /// The process ends that holds what is in memory: what is durable is left, and the key's own story.
    pub(crate) fn crash(&mut self) {
        // Nobody reads any more.
        self.leases.clear();
        let Self { keep, lasting, .. } = *self;
        let (mut versions, mut pins) = (self.versions.clone(), self.pins.clone());
        versions.retain(|_, it| it.ask.durable && it.stage != Open && self.there(it).is_ok());
        pins.retain(|_, id| versions.contains_key(id));
        let jobs = std::mem::take(&mut self.jobs);
        *self = Self { keep, next: lasting, lasting, jobs, versions, pins, ..Self::default() };
    }
}
