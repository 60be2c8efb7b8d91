//! Orders of events: a few tasks over the real pool, ledgers and controller, in any order in which shuttle lets
//! them go on, under observers that know only what must hold.
//!
//! This is no part of tssd-store: `store/schedules` is, and runs it. Bugs are planted into whoever calls what is
//! tested, or into what that calls.

#![expect(
    clippy::unwrap_used,
    reason = "these are tests, in a library because two packages share it"
)]

mod commit;
mod leases;
mod ledgers;
mod observer;
mod planted;
mod pool;
mod retention;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, Runner};

pub(crate) use observer::Observer;
pub(crate) use world::{World, archive, digest_of, value_of};

/// What is looked at.
pub struct Subject {
    /// What it is called.
    pub name: &'static str,
    /// How much of all schedules are its own, in hundredths.
    pub share: u64,
    /// What is planted.
    pub bugs: &'static [Bug],
    /// One schedule.
    run: fn(Option<Bug>),
}

/// Something wrong that is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Who finds no room begins to listen for some only then.
    ListensLate,
    /// A reader looks where a blob is before it holds it.
    LooksBeforeItHolds,
    /// A reader lets a blob go and reads on.
    LetsGoTooSoon,
    /// Nobody says that a lost reader may still see what it read.
    LosesSilently,
    /// A process is taken for gone while it has its maps.
    ExitsTooSoon,
    /// A writer takes what it read before its turn for the ledger.
    ReadsBeforeItsTurn,
    /// A ledger is forgotten though somebody waits for it.
    ForgetsWhoWaits,
    /// A reader does not lease what it reads.
    LeasesNothing,
    /// A reader releases its lease and reads on.
    ReleasesTooSoon,
    /// Turns are not waited for.
    TakesNoTurns,
    /// A blob has its name before it is complete.
    NamesBeforeItWrites,
    /// Data is deleted by a ledger that was read before.
    DeletesByMemory,
}

/// All of them.
pub const SUBJECTS: [Subject; 5] = [
    Subject {
        name: "pool",
        share: 35,
        bugs: &[
            Bug::ListensLate,
            Bug::LooksBeforeItHolds,
            Bug::LetsGoTooSoon,
            Bug::LosesSilently,
            Bug::ExitsTooSoon,
        ],
        run: pool::run,
    },
    Subject {
        name: "ledgers",
        share: 30,
        bugs: &[Bug::ReadsBeforeItsTurn, Bug::ForgetsWhoWaits],
        run: ledgers::run,
    },
    Subject {
        name: "leases",
        share: 3,
        bugs: &[Bug::LeasesNothing, Bug::ReleasesTooSoon, Bug::LosesSilently],
        run: leases::run,
    },
    Subject {
        name: "commit",
        share: 16,
        bugs: &[Bug::TakesNoTurns, Bug::NamesBeforeItWrites, Bug::DeletesByMemory],
        run: commit::run,
    },
    Subject {
        name: "retention",
        share: 16,
        bugs: &[Bug::TakesNoTurns, Bug::LeasesNothing],
        run: retention::run,
    },
];

/// What a task of shuttle's has for its stack.
const STACK: usize = 1 << 20;

/// How many changes of priorities the other half of the schedules have.
const DEPTH: usize = 3;

impl Subject {
    /// Runs so many schedules. Odd seeds choose among all that can go on, even ones go on with the same until a few
    /// moments.
    ///
    /// # Panics
    ///
    /// If one breaks something; says which one.
    pub fn explore(&self, seed: u64, schedules: u64) {
        let run = self.run;
        schedule(seed, schedules, FailurePersistence::Print, move || run(None));
    }

    /// After how many schedules a planted bug is found, if it is.
    pub fn find(&self, bug: Bug, seed: u64, schedules: u64) -> Option<u64> {
        let (run, begun) = (self.run, Arc::new(AtomicU64::new(0)));
        let count = begun.clone();
        let explored = catch_unwind(AssertUnwindSafe(|| {
            schedule(seed, schedules, FailurePersistence::None, move || {
                count.fetch_add(1, Ordering::Relaxed);
                run(Some(bug));
            });
        }));
        explored.is_err().then(|| begun.load(Ordering::Relaxed))
    }
}

/// Runs so many schedules.
fn schedule(
    seed: u64,
    schedules: u64,
    failure_persistence: FailurePersistence,
    run: impl Fn() + Send + Sync + 'static,
) {
    let schedules = usize::try_from(schedules).unwrap();
    let mut config = Config::new();
    (config.stack_size, config.failure_persistence) = (STACK, failure_persistence);
    if seed.is_multiple_of(2) {
        Runner::new(PctScheduler::new_from_seed(seed, DEPTH, schedules), config).run(run);
    } else {
        Runner::new(RandomScheduler::new_from_seed(seed, schedules), config).run(run);
    }
}

/// A number below this one, which a schedule repeats.
pub(crate) fn below(end: u64) -> u64 {
    thread_rng().gen_range(0..end)
}

/// True once in so many times.
pub(crate) fn once_in(times: u64) -> bool {
    below(times) == 0
}

/// Lets others go on, a few times or not at all.
pub(crate) async fn dawdle() {
    for _ in 0..below(3) {
        shuttle::future::yield_now().await;
    }
}
