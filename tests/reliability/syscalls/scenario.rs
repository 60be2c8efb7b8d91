//! Scenarios: the steps of a process, and a simple model of the versions that are visible after them.

use std::num::NonZeroU32;

/// A call of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Opens the store. Or starts a daemon and connects to it.
    Open,
    Put(u64),
    /// Puts by two writers of one job, one after the other.
    PutByTwoWriters(u64),
    /// A put in buckets of one tensor.
    Publish(u64),
    /// Reads all visible versions: whole, into memory, and as slices.
    Get,
    Delete(Option<u64>),
    Retain(u32),
}

/// A process: the steps that prepare its store, and its own steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) setup: &'static [Step],
    pub(crate) steps: &'static [Step],
    /// Whether the process is a daemon with a client in it.
    pub(crate) is_daemon: bool,
}

/// Steps of the next process after one that was killed.
pub(crate) const RECOVERY: Scenario =
    Scenario { name: "recovery", setup: &[], steps: RECOVER, is_daemon: false };

/// The same in a daemon.
pub(crate) const DAEMON_RECOVERY: Scenario =
    Scenario { name: "recovery by a daemon", setup: &[], steps: RECOVER, is_daemon: true };

const RECOVER: &[Step] = &[Step::Open, Step::Get, Step::Put(9)];

const THREE: &[Step] = &[Step::Retain(3), Step::Put(1), Step::PutByTwoWriters(2), Step::Put(3)];

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "first put",
        setup: &[],
        steps: &[Step::Open, Step::Put(1)],
        is_daemon: false,
    },
    Scenario {
        name: "put over an older version",
        setup: &[Step::Put(1)],
        steps: &[Step::Open, Step::Put(2)],
        is_daemon: false,
    },
    Scenario {
        name: "publish",
        setup: &[Step::Put(1)],
        steps: &[Step::Open, Step::Publish(2)],
        is_daemon: false,
    },
    Scenario {
        name: "commit of two writers",
        setup: &[Step::PutByTwoWriters(1)],
        steps: &[Step::Open, Step::PutByTwoWriters(2)],
        is_daemon: false,
    },
    Scenario { name: "get", setup: THREE, steps: &[Step::Open, Step::Get], is_daemon: false },
    Scenario {
        name: "delete",
        setup: THREE,
        steps: &[Step::Open, Step::Delete(Some(2)), Step::Delete(None)],
        is_daemon: false,
    },
    Scenario {
        name: "retention",
        setup: THREE,
        steps: &[Step::Open, Step::Retain(1)],
        is_daemon: false,
    },
    Scenario {
        name: "put in a daemon",
        setup: &[Step::Put(1)],
        steps: &[Step::Open, Step::Put(2), Step::Get],
        is_daemon: true,
    },
    Scenario {
        name: "publish and delete in a daemon",
        setup: THREE,
        steps: &[Step::Open, Step::Publish(4), Step::Delete(None)],
        is_daemon: true,
    },
];

impl Scenario {
    pub(crate) fn by_name(name: &str) -> Self {
        let all = SCENARIOS.iter().chain([&RECOVERY, &DAEMON_RECOVERY]);
        *all.into_iter().find(|scenario| scenario.name == name).unwrap()
    }
}

/// Versions that are visible of a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct State {
    keep: usize,
    pub(crate) versions: Vec<u64>,
}

impl Default for State {
    fn default() -> Self {
        Self { keep: 1, versions: Vec::new() }
    }
}

impl State {
    pub(crate) fn apply(&self, steps: &[Step]) -> Self {
        steps.iter().fold(self.clone(), |state, step| state.apply_step(*step))
    }

    fn apply_step(mut self, step: Step) -> Self {
        match step {
            Step::Open | Step::Get => {}
            Step::Put(number) | Step::PutByTwoWriters(number) | Step::Publish(number) => {
                // Repeating a put changes nothing.
                if !self.versions.contains(&number) {
                    self.versions.push(number);
                }
            }
            Step::Delete(None) => self.versions.clear(),
            Step::Delete(Some(number)) => self.versions.retain(|each| *each != number),
            Step::Retain(keep) => self.keep = keep as usize,
        }
        let surplus = self.versions.len().saturating_sub(self.keep);
        self.versions.drain(..surplus);
        self
    }
}

pub(crate) fn keep(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}
