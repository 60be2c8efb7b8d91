//! What a store promises of a key, as the simplest program that keeps it: a list of versions, one step after the
//! other. No bytes, files, connections or time, and nothing of the store.

use std::collections::{BTreeMap, BTreeSet};

use super::fit::merged;
use super::version::{Stage, Version, gone};
use super::words::{Ask, End, Fault, Id, Job, Part, Progress, Writers};

/// The newest job.
#[derive(Clone, Debug)]
pub(crate) struct Newest {
    pub(crate) job: Job,
    /// The writers of the version that it opened last.
    pub(crate) writers: Option<Writers>,
    pub(crate) last_call: Option<u64>,
}

/// All of one key.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) keep: usize,
    pub(crate) epoch: u32,
    /// The highest number ever visible in the epoch, and the newest place of what was durable.
    pub(crate) highest: Option<u64>,
    pub(crate) lasting: Option<(u32, u64)>,
    pub(crate) newest: Option<Newest>,
    pub(crate) fenced: BTreeSet<Job>,
    /// By epoch and number, also those whose data is gone.
    pub(crate) versions: Vec<Version>,
    pub(crate) pins: BTreeMap<String, Id>,
}

impl Model {
    pub(crate) fn new() -> Self {
        let (versions, pins, fenced) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
        let (epoch, highest, lasting, newest) = (0, None, None, None);
        Self { keep: 1, epoch, highest, lasting, newest, fenced, versions, pins }
    }

    pub(crate) fn get(&self, id: Id) -> Option<&Version> {
        self.versions.iter().find(|version| version.id == id)
    }

    fn each(&mut self, is_meant: impl Fn(&Version) -> bool, change: impl Fn(&mut Version)) {
        self.versions.iter_mut().filter(|version| is_meant(version)).for_each(change);
    }

    pub(crate) fn visible(&self) -> Vec<&Version> {
        self.versions.iter().filter(|it| matches!(it.stage, Stage::Visible(_))).collect()
    }

    fn open(&self) -> Vec<&Version> {
        self.versions.iter().filter(|it| it.stage == Stage::Open).collect()
    }

    /// Whether its bytes are there: what is retired stays for its labels and readers.
    fn is_there(&self, version: &Version) -> bool {
        match version.stage {
            Stage::Open | Stage::Visible(_) => true,
            Stage::Retired => {
                version.readers > 0 || self.pins.values().any(|pinned| *pinned == version.id)
            }
            Stage::Dropped(_) => version.owed,
        }
    }

    fn is_taken(&self, epoch: u32, number: u64) -> bool {
        let mut versions = self.versions.iter();
        versions.any(|it| (it.epoch, it.number) == (epoch, number) && self.is_there(it))
    }

    /// The version that a reader gets: of a number, or the newest.
    pub(crate) fn find(&self, number: Option<u64>) -> Result<&Version, Fault> {
        let visible = self.visible();
        let found = match number {
            None => visible.last(),
            Some(number) => visible.iter().find(|version| version.number == number),
        };
        found.copied().ok_or_else(|| Fault::NotFound {
            newest: visible.last().map(|version| version.number),
            coming: self.open().last().map(|version| (version.number, version.missing())),
        })
    }

    /// A writer begins to contribute to a version, which has this id if it opens with it.
    pub(crate) fn begin(&mut self, ask: &Ask, id: Id) -> Result<Id, Fault> {
        if !ask.writers.contains(&ask.writer) {
            return Err(Fault::NotAWriter);
        }
        if ask.writers.len() > 1 && ask.job.is_none() {
            return Err(Fault::JobRequired);
        }
        let mut next = self.clone();
        let begun = next.take_part(ask, id);
        // What is refused changes nothing; who has to wait has taken the key over all the same.
        if matches!(begun, Ok(_) | Err(Fault::Busy)) {
            *self = next;
        }
        begun
    }

    fn take_part(&mut self, ask: &Ask, id: Id) -> Result<Id, Fault> {
        if let Some(job) = ask.job {
            self.take_over(job)?;
        }
        let meant = match (ask.number, ask.call) {
            (Some(number), _) => self.numbered(number, ask),
            (None, Some(call)) => self.called(ask.job, call)?,
            (None, None) => None,
        };
        let Some(meant) = meant else { return self.start(ask, id) };
        let version = self.versions.iter_mut().find(|version| version.id == meant);
        let version = version.expect("it was just found");
        if let Stage::Dropped(_) = version.stage {
            return Err(gone(version));
        }
        if version.job != ask.job {
            return Err(Fault::JobsDisagree);
        }
        if version.writers != ask.writers {
            return Err(Fault::WritersDisagree);
        }
        if version.durable != ask.durable {
            return Err(Fault::DurabilityDisagrees);
        }
        version.parts.entry(ask.writer).or_insert(None);
        Ok(meant)
    }

    /// A job that is new ends the one before for good.
    fn take_over(&mut self, job: Job) -> Result<(), Fault> {
        if self.fenced.contains(&job) {
            return Err(Fault::Fenced);
        }
        let older = self.newest.as_ref().map(|newest| newest.job);
        if older != Some(job) {
            self.newest = Some(Newest { job, writers: None, last_call: None });
            self.fenced.extend(older);
            let is_ended =
                |it: &Version| it.stage == Stage::Open && older.is_some() && it.job == older;
            self.each(is_ended, |it| (it.stage, it.owed) = (Stage::Dropped(End::Fenced), true));
        }
        Ok(())
    }

    /// The open version of a number, or the one that is complete and that this repeats.
    fn numbered(&self, number: u64, ask: &Ask) -> Option<Id> {
        if let Some(open) = self.open().iter().find(|version| version.number == number) {
            return Some(open.id);
        }
        let (_, floor, _) = self.timeline();
        let is_repeated = |it: &&Version| {
            let is_complete = matches!(it.stage, Stage::Visible(_) | Stage::Retired);
            let is_current = matches!(it.stage, Stage::Visible(_)) || it.epoch == self.epoch;
            let is_meant = !ask.rewind || it.rewinds.is_some() && it.job.is_some();
            let is_same = it.number == number && it.job == ask.job && it.writers == ask.writers;
            self.is_there(it) && is_complete && is_current && is_meant && is_same
        };
        let is_old = floor.is_some_and(|floor| number <= floor);
        let mut complete = self.versions.iter().rev().filter(|_| is_old);
        complete.find(is_repeated).map(|version| version.id)
    }

    /// The version of a job's call. A call that has passed opens none.
    fn called(&self, job: Option<Job>, call: u64) -> Result<Option<Id>, Fault> {
        let mut versions = self.versions.iter();
        match versions.find(|version| version.job == job && version.call == Some(call)) {
            Some(version) if self.is_there(version) => Ok(Some(version.id)),
            Some(version) => Err(gone(version)),
            None => match self.newest.as_ref().and_then(|newest| newest.last_call) {
                Some(last) if call <= last => Err(Fault::LateCall),
                _ => Ok(None),
            },
        }
    }

    /// The epoch that new versions are in, what their numbers must be above, and where it begins if readers
    /// have not reached it.
    fn timeline(&self) -> (u32, Option<u64>, Option<u64>) {
        match self.open().last() {
            Some(open) if open.epoch > self.epoch => {
                let floor = open.rewinds.and_then(|number| number.checked_sub(1));
                (open.epoch, floor, open.rewinds)
            }
            _ => (self.epoch, self.highest, None),
        }
    }

    /// Deletes what is owed.
    pub(crate) fn sweep(&mut self) {
        self.each(|_| true, |version| version.owed = false);
    }

    fn start(&mut self, ask: &Ask, id: Id) -> Result<Id, Fault> {
        let before = self.newest.as_ref().filter(|_| ask.job.is_some() && ask.found);
        let before = before.and_then(|newest| newest.writers.as_ref());
        if before.is_some_and(|writers| *writers != ask.writers) {
            return Err(Fault::WritersDisagree);
        }
        let (epoch, number, rewinds) = self.place(ask)?;
        if self.open().len() >= 2 {
            return Err(Fault::Busy);
        }
        if self.is_taken(epoch, number) {
            // What is in the way is deleted first, if it can be.
            self.sweep();
            if self.is_taken(epoch, number) {
                return Err(Fault::Busy);
            }
        }
        let call = ask.call.filter(|_| ask.number.is_none());
        if let Some(newest) = self.newest.as_mut().filter(|_| ask.job.is_some()) {
            newest.writers = Some(ask.writers.clone());
            newest.last_call = call.or(newest.last_call);
        }
        let (job, writers, durable) = (ask.job, ask.writers.clone(), ask.durable);
        let (parts, stage) = (BTreeMap::from([(ask.writer, None)]), Stage::Open);
        self.versions.push(Version {
            id,
            epoch,
            number,
            rewinds,
            job,
            call,
            writers,
            durable,
            parts,
            stage,
            readers: 0,
            owed: false,
        });
        self.versions.sort_by_key(|version| (version.epoch, version.number));
        Ok(id)
    }

    fn place(&self, ask: &Ask) -> Result<(u32, u64, Option<u64>), Fault> {
        let (epoch, floor, rewinds) = self.timeline();
        let Some(number) = ask.number else {
            let open = self.open().into_iter().filter(|version| version.epoch == epoch);
            let highest = open.map(|version| version.number).max().max(floor).unwrap_or(0);
            let next = (highest + 1..=u64::MAX).find(|number| !self.is_taken(epoch, *number));
            return Ok((epoch, next.expect("numbers do not end"), rewinds));
        };
        if floor.is_none_or(|floor| number > floor) {
            return Ok((epoch, number, rewinds));
        }
        if ask.rewind {
            let there = self.versions.iter().filter(|version| self.is_there(version));
            let newest = there.map(|version| version.epoch).max().max(Some(self.epoch));
            return Ok((newest.unwrap_or(0) + 1, number, Some(number)));
        }
        let mut own = self.versions.iter().rev();
        let superseded = own.find(|version| {
            let is_own = ask.job.is_some() && version.job == ask.job && version.number == number;
            is_own && matches!(version.stage, Stage::Dropped(End::Superseded { .. }))
        });
        Err(superseded.map_or(Fault::NotNewer { highest: floor.unwrap_or(0) }, gone))
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
        let mut version = self.get(id).expect("it has begun").clone();
        if ask.job.is_some_and(|job| self.fenced.contains(&job)) {
            return Err(Fault::Fenced);
        }
        if !self.is_there(&version) || version.owed {
            return Err(gone(&version));
        }
        match version.parts.get_mut(&ask.writer) {
            None => return Err(Fault::NotBegun),
            Some(Some(other)) if other != part => return Err(Fault::Differs),
            Some(given) => *given = Some(part.clone()),
        }
        let missing = version.missing();
        let is_last = missing.is_empty() && version.stage == Stage::Open;
        if is_last {
            self.sweep();
            version.stage = match merged(&version.parts) {
                Some(dict) => Stage::Visible(dict),
                None => Stage::Dropped(End::Rejected),
            };
        }
        self.each(|it| it.id == id, |it| *it = version.clone());
        match version.stage {
            Stage::Dropped(_) => Err(gone(&version)),
            Stage::Visible(_) if is_last => {
                self.reach(&version);
                Ok(Progress { visible: true, missing })
            }
            _ => Ok(Progress { visible: version.stage != Stage::Open, missing }),
        }
    }

    /// Readers see a new version: what is older and open ends, what it takes back is retired.
    fn reach(&mut self, version: &Version) {
        let Version { epoch, number, rewinds, .. } = *version;
        self.each(
            |it| (it.epoch, it.number) < (epoch, number),
            |it| it.end(End::Superseded { by: number }),
        );
        self.each(
            |it| it.epoch < epoch && rewinds.is_some_and(|from| it.number >= from),
            Version::retire,
        );
        (self.epoch, self.highest) = (epoch, Some(number));
        if version.durable {
            self.lasting = Some((epoch, number));
        }
        self.thin();
    }

    /// Of all versions the newest ones stay, and of those on disk as many; and what has a label.
    fn thin(&mut self) {
        let newest = |ids: Vec<Id>| ids.into_iter().rev().take(self.keep).collect::<Vec<_>>();
        let all = self.visible().iter().map(|version| version.id).collect();
        let durable = self.visible().iter().filter(|it| it.durable).map(|it| it.id).collect();
        let mut kept = [newest(all), newest(durable)].concat();
        kept.extend(self.pins.values());
        self.each(|version| !kept.contains(&version.id), Version::retire);
    }

    /// A contribution is taken back. A version that others cannot complete ends with it.
    pub(crate) fn abort(&mut self, id: Id, writer: u32) {
        self.sweep();
        let has_begun =
            |it: &Version| it.stage == Stage::Open && it.parts.get(&writer) == Some(&None);
        self.each(
            |it| it.id == id && has_begun(it),
            |it| {
                it.parts.remove(&writer);
                if it.call.is_some() || it.parts.is_empty() {
                    it.end(End::Aborted);
                }
            },
        );
    }

    pub(crate) fn retain(&mut self, keep: usize) {
        self.sweep();
        self.keep = keep;
        self.thin();
    }

    pub(crate) fn pin(&mut self, number: Option<u64>, label: &str) -> Result<u64, Fault> {
        let Version { id, number, .. } = *self.find(number)?;
        self.sweep();
        self.pins.insert(label.to_owned(), id);
        self.thin();
        Ok(number)
    }

    pub(crate) fn unpin(&mut self, label: &str) {
        self.sweep();
        self.pins.remove(label);
        self.thin();
    }

    /// Deletes a number, or all; says how many there were.
    pub(crate) fn delete(&mut self, number: Option<u64>) -> u64 {
        let is_meant = |it: &Version| {
            let is_live = matches!(it.stage, Stage::Open | Stage::Visible(_));
            is_live && number.is_none_or(|number| it.number == number)
        };
        let count = self.versions.iter().filter(|version| is_meant(version)).count();
        self.sweep();
        let delete = |version: &mut Version| {
            version.end(End::Deleted);
            version.retire();
        };
        self.each(is_meant, delete);
        u64::try_from(count).expect("few")
    }

    /// The process ends that holds what is in memory: what is durable is left, and the key's own story.
    pub(crate) fn crash(&mut self) {
        let is_left = |it: &Version| it.durable && it.stage != Stage::Open && self.is_there(it);
        let left: Vec<Version> = self.versions.iter().filter(|it| is_left(it)).cloned().collect();
        self.versions = left.into_iter().map(|it| Version { readers: 0, ..it }).collect();
        let there: Vec<Id> = self.versions.iter().map(|version| version.id).collect();
        self.pins.retain(|_, id| there.contains(id));
        self.epoch = self.lasting.map_or(0, |(epoch, _)| epoch);
        self.highest = self.lasting.map(|(_, number)| number);
        let newest = self.newest.as_ref().map(|newest| newest.job);
        self.newest = newest.map(|job| Newest { job, writers: None, last_call: None });
    }
}
