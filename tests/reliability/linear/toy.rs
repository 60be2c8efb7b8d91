//! A store in a few lines, which does one thing at a time; and ways in which it does not.

use std::collections::{BTreeMap, BTreeSet};

use tssd_format::StateDict;
use tssd_tests::dice::Dice;

use super::contents::{dict, part, put_of};
use super::history::{Answer, Call, name_of};

/// What can be wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bug {
    /// Now and then the newest version is taken to be the one before.
    StaleRead,
    /// A put is acknowledged and forgotten.
    LostUpdate,
    /// A put gets a number below those that are there.
    NumbersGoBack,
    /// Two puts get one number.
    DuplicateNumber,
    /// What was put once becomes two versions, and nobody knows how the put went.
    DuplicateVersion,
    /// A put that has failed is seen.
    FailedSeen,
    /// Readers see a version of which half is another one.
    TornRead,
    /// One reader in two asks a copy that lags behind.
    NotMonotonic,
    /// A version that was deleted is found by its number.
    DeletedSeen,
    /// A version that was deleted is the newest again.
    DeletedNewest,
    /// One version is deleted twice.
    DeletedTwice,
    /// A put is acknowledged before it is visible: readers find an older one.
    LateVisible,
    /// A wait returns before its version is there.
    WaitTooEarly,
    /// A wait is given up before its time is over.
    WaitTooShort,
    /// A version is gone before as many newer ones have come as are kept.
    GoneTooEarly,
    /// A version can be read that newer ones have displaced.
    GoneTooLate,
    /// What is read was never put.
    NeverPut,
    /// One of several writers' part is that of another version.
    TornTogether,
    /// A version is visible before all its writers have put.
    VisibleTooEarly,
    /// A part is told to wait when its version is visible.
    WaitsForNobody,
    /// A label does not hold its version.
    PinLost,
    /// A label holds its version after it was taken away.
    PinStays,
}

pub(crate) const BUGS: [Bug; 22] = [
    Bug::StaleRead,
    Bug::LostUpdate,
    Bug::NumbersGoBack,
    Bug::DuplicateNumber,
    Bug::DuplicateVersion,
    Bug::FailedSeen,
    Bug::TornRead,
    Bug::NotMonotonic,
    Bug::DeletedSeen,
    Bug::DeletedNewest,
    Bug::DeletedTwice,
    Bug::LateVisible,
    Bug::WaitTooEarly,
    Bug::WaitTooShort,
    Bug::GoneTooEarly,
    Bug::GoneTooLate,
    Bug::NeverPut,
    Bug::TornTogether,
    Bug::VisibleTooEarly,
    Bug::WaitsForNobody,
    Bug::PinLost,
    Bug::PinStays,
];

type Version = (u64, StateDict);

/// A store of one key.
pub(crate) struct Toy {
    keep: usize,
    bug: Option<Bug>,
    visible: Vec<Version>,
    highest: u64,
    /// What has been visible and is not.
    gone: Vec<Version>,
    /// What is acknowledged and not visible yet.
    late: Option<Version>,
    /// Parts of versions that several writers put together: by number, who has put.
    parts: BTreeMap<u64, BTreeSet<u32>>,
    /// How many put a version together.
    of: u32,
    /// By label.
    pins: BTreeMap<u32, u64>,
    dice: Dice,
}

const KEY: u8 = 0;

impl Toy {
    pub(crate) fn new(keep: usize, bug: Option<Bug>) -> Self {
        let (visible, gone, late) = (Vec::new(), Vec::new(), None);
        let (parts, pins, dice) = (BTreeMap::new(), BTreeMap::new(), Dice::new(7));
        Self { keep, bug, visible, highest: 0, gone, late, parts, of: 1, pins, dice }
    }

    /// Whether this time it does it wrong in this way.
    fn is_wrong(&mut self, bug: Bug) -> bool {
        self.bug == Some(bug) && self.dice.hits(4)
    }

    /// A number is left out, as by a put that failed after it had begun.
    pub(crate) fn skip(&mut self) {
        self.highest += 1;
    }

    /// Does one thing for one of two clients.
    pub(crate) fn answer(&mut self, call: Call, is_odd: bool) -> Option<Answer> {
        match call {
            Call::Put(put) => self.put(put),
            Call::Newest => Some(self.newest(is_odd)),
            Call::Numbered(number) => Some(self.numbered(number)),
            Call::Wait(number, _) => Some(self.wait(number)),
            Call::Delete(number) => Some(self.delete(number)),
            Call::Part { number, writer, of } => Some(self.part(number, writer, of)),
            Call::Pin(number, label) => {
                let is_there = self.visible.iter().any(|version| version.0 == number);
                if is_there {
                    self.pins.insert(label, number);
                }
                Some(if is_there { Answer::Done } else { Answer::Nothing })
            }
            Call::Unpin(label) => {
                if !self.is_wrong(Bug::PinStays) {
                    self.pins.remove(&label);
                }
                self.thin();
                Some(Answer::Done)
            }
        }
    }

    fn put(&mut self, put: u32) -> Option<Answer> {
        if self.is_wrong(Bug::FailedSeen) {
            self.show(self.highest + 1, dict(KEY, put));
            return Some(Answer::Failed);
        }
        if self.is_wrong(Bug::DuplicateVersion) {
            self.show(self.highest + 1, dict(KEY, put));
            self.show(self.highest + 1, dict(KEY, put));
            return None;
        }
        let number = if self.is_wrong(Bug::DuplicateNumber) {
            self.highest.max(1)
        } else if self.is_wrong(Bug::NumbersGoBack) && self.highest > 8 {
            self.highest - 8
        } else {
            self.highest + 1
        };
        if self.is_wrong(Bug::LostUpdate) {
            self.highest = number;
            return Some(Answer::Put(number));
        }
        if let Some((number, dict)) = self.late.take() {
            self.show(number, dict);
        }
        if self.is_wrong(Bug::LateVisible) {
            self.highest = number;
            self.late = Some((number, dict(KEY, put)));
        } else {
            self.show(number, dict(KEY, put));
        }
        Some(Answer::Put(number))
    }

    fn show(&mut self, number: u64, dict: StateDict) {
        self.highest = self.highest.max(number);
        self.visible.push((number, dict));
        self.thin();
    }

    /// What is too old goes, unless a label holds it.
    fn thin(&mut self) {
        let mut keep = self.keep;
        if self.is_wrong(Bug::GoneTooEarly) {
            keep -= 1;
        }
        let surplus = self.visible.len().saturating_sub(keep);
        let old: Vec<Version> = self.visible.drain(..surplus).collect();
        let is_lost = self.is_wrong(Bug::PinLost);
        let is_held =
            |version: &Version| !is_lost && self.pins.values().any(|number| *number == version.0);
        let (held, gone): (Vec<_>, Vec<_>) = old.into_iter().partition(is_held);
        self.visible.splice(..0, held);
        self.gone.extend(gone);
    }

    /// A version is visible when all its parts are there.
    fn part(&mut self, number: u64, writer: u32, of: u32) -> Answer {
        self.of = of;
        let parts = self.parts.entry(number).or_default();
        let has_come = parts.len() == of as usize;
        if has_come && !self.is_wrong(Bug::WaitsForNobody) {
            return Answer::Put(number);
        }
        if number <= self.highest {
            return if has_come { Answer::Waits } else { Answer::Failed };
        }
        let is_early = self.is_wrong(Bug::VisibleTooEarly);
        let parts = self.parts.entry(number).or_default();
        parts.insert(writer);
        if is_early {
            parts.extend(0..of);
        }
        if parts.len() < of as usize {
            return Answer::Waits;
        }
        let is_torn = self.is_wrong(Bug::TornTogether);
        let mut whole = part(KEY, name_of(number), 0);
        for writer in 1..of {
            let number = if is_torn { number - 1 } else { number };
            for (name, value) in part(KEY, name_of(number), writer).leaves() {
                whole.insert(name.fqn(), value.clone());
            }
        }
        whole.insert("put", i64::from(name_of(number)));
        self.show(number, whole);
        Answer::Put(number)
    }

    fn newest(&mut self, is_odd: bool) -> Answer {
        let is_behind = self.is_wrong(Bug::StaleRead) || is_odd && self.is_wrong(Bug::NotMonotonic);
        let is_behind = is_behind || self.visible.is_empty() && self.is_wrong(Bug::DeletedNewest);
        let newest = if is_behind { self.gone.last() } else { self.visible.last() };
        let Some((number, stored)) = newest.cloned() else { return Answer::Nothing };
        if self.is_wrong(Bug::TornRead)
            && let Some((_, other)) = self.gone.last()
        {
            let mut torn = stored;
            torn.insert("layer.2", other.leaf("layer.2").unwrap().clone());
            return self.found(number, &torn);
        }
        if self.is_wrong(Bug::NeverPut) {
            return self.found(number, &dict(KEY, u32::MAX));
        }
        self.found(number, &stored)
    }

    fn numbered(&mut self, number: u64) -> Answer {
        let is_of = |version: &&Version| version.0 == number;
        let mut there = self.visible.iter().find(is_of).cloned();
        let is_late = self.is_wrong(Bug::GoneTooLate) || self.is_wrong(Bug::DeletedSeen);
        if there.is_none() && is_late {
            there = self.gone.iter().find(is_of).cloned();
        }
        there.map_or(Answer::Nothing, |(number, dict)| self.found(number, &dict))
    }

    /// It never waits: its clients have no patience.
    fn wait(&mut self, wanted: u64) -> Answer {
        if self.is_wrong(Bug::WaitTooEarly) {
            return self.newest(false);
        }
        match self.visible.last() {
            Some((number, dict)) if *number >= wanted => self.found(*number, dict),
            _ => Answer::Nothing,
        }
    }

    /// With which patience a client waits.
    pub(crate) fn patience(&mut self) -> u64 {
        if self.is_wrong(Bug::WaitTooShort) { 1_000_000_000 } else { 0 }
    }

    fn delete(&mut self, number: u64) -> Answer {
        if let Some(place) = self.visible.iter().position(|version| version.0 == number) {
            self.gone.push(self.visible.remove(place));
            return Answer::Deleted;
        }
        if self.is_wrong(Bug::DeletedTwice) { Answer::Deleted } else { Answer::Nothing }
    }

    fn found(&self, number: u64, dict: &StateDict) -> Answer {
        let put = put_of(KEY, self.of, dict);
        put.map_or(Answer::Torn(number), |put| Answer::Found(number, put))
    }
}
