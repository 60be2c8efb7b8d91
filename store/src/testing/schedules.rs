//! Scenarios for shuttle: a few tasks over the real pool, ledgers and controller.
//!
//! shuttle runs the tasks under many schedules, while observers check invariants. The package `store/schedules` compiles
//! and runs these scenarios; `tssd-store` itself does not contain them. Bugs are planted into the callers of the code
//! under test, or into the code that it calls.

#![expect(
    clippy::unwrap_used,
    reason = "these are tests, in a library because two packages share it"
)]

mod commit;
mod environment;
mod leases;
mod ledgers;
mod observer;
mod planted_bugs;
mod pool;
mod retention;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, Runner};

pub(crate) use environment::{TestEnvironment, archive, digest_of, value_of};
pub(crate) use observer::Observer;

/// A scenario: a set of tasks, and the invariants that they must preserve.
pub struct Scenario {
    /// Name in reports.
    pub name: &'static str,
    /// Share of all schedules, in percent.
    pub share: u64,
    /// Bugs that can be planted.
    pub bugs: &'static [Bug],
    /// Runs the tasks under one schedule.
    run: fn(Option<Bug>),
}

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A task that finds no free memory subscribes to the notification only afterwards.
    LateSubscription,
    /// A reader looks up the span of a blob before it holds the blob.
    LookupBeforeHold,
    /// A reader releases a blob, and continues to read it.
    EarlyHoldRelease,
    /// The loss of a reader is not reported to the pool, although the reader may still read its segments.
    UnreportedReaderLoss,
    /// A process is reported as exited while it still has segments mapped.
    EarlyExit,
    /// A writer uses the state that it read before it acquired the ledger.
    StaleLedgerState,
    /// A ledger is evicted while a task waits for its changes.
    EvictsWatchedLedger,
    /// A reader reads a version without a lease.
    NoLease,
    /// A reader releases its lease, and continues to read.
    EarlyLeaseRelease,
    /// Ledgers are advanced without mutual exclusion.
    NoLedgerLock,
    /// A blob gets its name before it is complete.
    NameBeforeWrite,
    /// Data is deleted according to an outdated state of the ledger.
    StaleDelete,
}

/// All scenarios.
pub const SCENARIOS: [Scenario; 5] = [
    Scenario {
        name: "pool",
        share: 35,
        bugs: &[
            Bug::LateSubscription,
            Bug::LookupBeforeHold,
            Bug::EarlyHoldRelease,
            Bug::UnreportedReaderLoss,
            Bug::EarlyExit,
        ],
        run: pool::run,
    },
    Scenario {
        name: "ledgers",
        share: 30,
        bugs: &[Bug::StaleLedgerState, Bug::EvictsWatchedLedger],
        run: ledgers::run,
    },
    Scenario {
        name: "leases",
        share: 3,
        bugs: &[Bug::NoLease, Bug::EarlyLeaseRelease, Bug::UnreportedReaderLoss],
        run: leases::run,
    },
    Scenario {
        name: "commit",
        share: 16,
        bugs: &[Bug::NoLedgerLock, Bug::NameBeforeWrite, Bug::StaleDelete],
        run: commit::run,
    },
    Scenario {
        name: "retention",
        share: 16,
        bugs: &[Bug::NoLedgerLock, Bug::NoLease],
        run: retention::run,
    },
];

/// Stack size of a task in bytes: 1 MiB.
const STACK_BYTES: usize = 1 << 20;

/// Bug depth of the PCT scheduler: the number of its priority changes per schedule.
const PCT_DEPTH: usize = 3;

impl Scenario {
    /// Runs this many schedules.
    ///
    /// Odd seeds choose at random among all runnable tasks (random scheduler). Even seeds run the task of the highest
    /// priority, and change priorities at a few moments (PCT scheduler).
    ///
    /// # Panics
    ///
    /// If an invariant is violated. shuttle prints the schedule.
    pub fn run_schedules(&self, seed: u64, schedules: u64) {
        let run = self.run;
        run_schedules(seed, schedules, FailurePersistence::Print, move || run(None));
    }

    /// Returns the number of schedules until a planted bug is found, or `None`.
    pub fn find_bug(&self, bug: Bug, seed: u64, schedules: u64) -> Option<u64> {
        let (run, started) = (self.run, Arc::new(AtomicU64::new(0)));
        let count = started.clone();
        let result = catch_unwind(AssertUnwindSafe(|| {
            run_schedules(seed, schedules, FailurePersistence::None, move || {
                count.fetch_add(1, Ordering::Relaxed);
                run(Some(bug));
            });
        }));
        result.is_err().then(|| started.load(Ordering::Relaxed))
    }
}

/// Runs this many schedules.
fn run_schedules(
    seed: u64,
    schedules: u64,
    failure_persistence: FailurePersistence,
    run: impl Fn() + Send + Sync + 'static,
) {
    let schedules = usize::try_from(schedules).unwrap();
    let mut config = Config::new();
    (config.stack_size, config.failure_persistence) = (STACK_BYTES, failure_persistence);
    if seed.is_multiple_of(2) {
        Runner::new(PctScheduler::new_from_seed(seed, PCT_DEPTH, schedules), config).run(run);
    } else {
        Runner::new(RandomScheduler::new_from_seed(seed, schedules), config).run(run);
    }
}

/// Returns a random number below `end`. A replayed schedule gives the same numbers.
pub(crate) fn random_below(end: u64) -> u64 {
    thread_rng().gen_range(0..end)
}

/// Returns true with probability 1/`times`.
pub(crate) fn one_in(times: u64) -> bool {
    random_below(times) == 0
}

/// Yields to other tasks 0 to 2 times.
pub(crate) async fn yield_randomly() {
    for _ in 0..random_below(3) {
        shuttle::future::yield_now().await;
    }
}
