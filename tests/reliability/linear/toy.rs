//! A store in a few lines, which does one thing at a time; and ways in which it does not.

use tssd_format::StateDict;
use tssd_tests::dice::Dice;

use super::contents::{dict, put_of};
use super::history::{Answer, Call};

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
}

pub(crate) const BUGS: [Bug; 17] = [
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
    dice: Dice,
}

const KEY: u8 = 0;

impl Toy {
    pub(crate) fn new(keep: usize, bug: Option<Bug>) -> Self {
        let (visible, gone) = (Vec::new(), Vec::new());
        Self { keep, bug, visible, highest: 0, gone, late: None, dice: Dice::new(7) }
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
        let mut keep = self.keep;
        if self.is_wrong(Bug::GoneTooEarly) {
            keep -= 1;
        }
        let surplus = self.visible.len().saturating_sub(keep);
        self.gone.extend(self.visible.drain(..surplus));
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
            return found(number, &torn);
        }
        if self.is_wrong(Bug::NeverPut) {
            return found(number, &dict(KEY, u32::MAX));
        }
        found(number, &stored)
    }

    fn numbered(&mut self, number: u64) -> Answer {
        let is_of = |version: &&Version| version.0 == number;
        let mut there = self.visible.iter().find(is_of).cloned();
        let is_late = self.is_wrong(Bug::GoneTooLate) || self.is_wrong(Bug::DeletedSeen);
        if there.is_none() && is_late {
            there = self.gone.iter().find(is_of).cloned();
        }
        there.map_or(Answer::Nothing, |(number, dict)| found(number, &dict))
    }

    /// It never waits: its clients have no patience.
    fn wait(&mut self, wanted: u64) -> Answer {
        if self.is_wrong(Bug::WaitTooEarly) {
            return self.newest(false);
        }
        match self.visible.last() {
            Some((number, dict)) if *number >= wanted => found(*number, dict),
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
}

fn found(number: u64, dict: &StateDict) -> Answer {
    put_of(KEY, dict).map_or(Answer::Torn(number), |put| Answer::Found(number, put))
}
