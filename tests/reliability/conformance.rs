//! Conformance of a store to its model.
//!
//! Both run the same random operations, and every outcome is compared. A sequence that finds a
//! difference is shrunk and printed with its seed. `TSSD_RELIABILITY_SEED` repeats the sequences of
//! a seed.

/// Backends: stores in memory, in directories, and behind daemons.
mod backend;
/// Conversion between model types and store types.
mod convert;
/// Runs a store and its model side by side.
mod harness;
/// Merge of the contributions of all writers, element by element.
mod merge;
/// Reference model of a store.
mod model;
/// Operations of a store and of its model, and random sequences of them.
mod operations;
/// Plain types of the model.
mod types;
/// One version in the model.
mod version;

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use serde_json::json;
use tssd_tests::campaign::Campaign;

use self::operations::{OPERATION_NAMES, Operation, sequences};
use crate::conformance::backend::{Backend, BackendKind};
use crate::conformance::harness::{Harness, PlantedBug, RunStats};

/// Number of sequences that CI runs, by kind of store.
const SEQUENCES_PER_KIND: [(BackendKind, u64); 5] = [
    (BackendKind::Memory, 2300),
    (BackendKind::Directory, 800),
    (BackendKind::Daemon, 100),
    (BackendKind::DurableDaemon, 100),
    (BackendKind::Process, 100),
];

/// Model errors that a run must produce at least once.
///
/// `NotBegun` is not among them. It occurs only if a writer commits a contribution that its own
/// retry has withdrawn, which a run may miss.
const EXPECTED_ERRORS: [&str; 20] = [
    "Busy",
    "ContributionDiffers",
    "Dropped Aborted",
    "Dropped Deleted",
    "Dropped Rejected",
    "Dropped Superseded",
    "DurabilityDisagrees",
    "Fenced",
    "Gone",
    "Invalid",
    "JobRequired",
    "JobsDisagree",
    "StaleSequence",
    "LeafNotFound",
    "Lost",
    "NotAWriter",
    "NotFound",
    "NotNewer",
    "WaitTimedOut",
    "WritersDisagree",
];

/// Returns a random seed and prints it.
#[expect(clippy::print_stdout, reason = "whoever plays it again needs it")]
fn random_seed(number: u64) -> u64 {
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), number);
    println!("{SEED}={seed}");
    seed
}

/// Number of sequences that share one seed and one daemon.
const BATCH_SEQUENCES: u32 = 25;

const SEED: &str = "TSSD_RELIABILITY_SEED";

/// A batch of sequences of one kind of store.
struct Batch {
    kind: BackendKind,
    seed: u64,
    deviation: Option<PlantedBug>,
}

impl Batch {
    fn run_batch(&self, count: u32, tally: &RefCell<RunStats>) -> Result<(), String> {
        // A planted bug need only be detected. Shrinking its sequence takes time.
        let max_shrink_iters = if self.deviation.is_some() { 0 } else { 2000 };
        let plain = Config::with_cases(count);
        let config = Config { failure_persistence: None, max_shrink_iters, ..plain };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(config, rng);
        let shared = RefCell::new(self.kind.is_shared().then(|| Backend::start(self.kind)));
        let outcome = runner.run(&sequences(self.kind == BackendKind::Process), |operations| {
            let home = shared.borrow_mut().take().unwrap_or_else(|| Backend::start(self.kind));
            let mut world = Harness::new(self.kind, home, self.deviation);
            let outcome = world.run(&operations, &mut tally.borrow_mut());
            let home = world.finish();
            if self.kind.is_shared() {
                *shared.borrow_mut() = Some(home);
            }
            tally.borrow_mut().sequences += 1;
            outcome.map_err(TestCaseError::fail)
        });
        outcome.map_err(|error| match error {
            TestError::Fail(reason, operations) => self.describe(&reason.to_string(), &operations),
            TestError::Abort(reason) => format!("given up: {reason}"),
        })
    }

    fn describe(&self, reason: &str, operations: &[Operation]) -> String {
        let (kind, seed) = (self.kind.name(), self.seed);
        let steps: Vec<String> = operations.iter().map(|each| format!("  {each:?}")).collect();
        format!("{reason}\nof {kind}, {SEED}={seed}, after\n{}", steps.join("\n"))
    }
}

/// Runs sequences of all kinds until their number and the time limit are reached.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn store_matches_model() {
    let proof = Campaign::start("model");
    let fixed_seed = std::env::var(SEED).ok().map(|seed| seed.parse().unwrap());
    let tally = RefCell::new(RunStats::default());
    let mut sequences_by_kind: BTreeMap<BackendKind, u64> = BTreeMap::new();
    let wanted: u64 = SEQUENCES_PER_KIND.iter().map(|(_, wanted)| wanted).sum();
    let (mut done, mut pass) = (0, 0);
    while proof.should_continue(done, wanted) {
        for (kind, wanted) in SEQUENCES_PER_KIND {
            // Each pass runs a hundredth of the sequences of each kind, in batches.
            let share = wanted.div_ceil(100);
            let mut left = share;
            while left > 0 {
                let count = left.min(BATCH_SEQUENCES.into());
                let number = pass * 1000 + left;
                let seed = fixed_seed
                    .unwrap_or_else(|| if pass < 100 { number } else { random_seed(number) });
                let batch = Batch { kind, seed, deviation: None };
                let count = u32::try_from(count).unwrap();
                batch.run_batch(count, &tally).unwrap_or_else(|difference| panic!("{difference}"));
                left -= u64::from(count);
                done += u64::from(count);
                *sequences_by_kind.entry(kind).or_default() += u64::from(count);
            }
        }
        pass += 1;
    }
    let tally = tally.into_inner();
    let sequences: BTreeMap<&str, u64> =
        sequences_by_kind.iter().map(|(kind, count)| (kind.name(), *count)).collect();
    for name in OPERATION_NAMES {
        assert!(tally.operations.contains_key(name), "operation `{name}` never occurred");
    }
    let missing: Vec<_> =
        EXPECTED_ERRORS.iter().filter(|name| !tally.errors.contains_key(**name)).collect();
    assert!(missing.is_empty(), "errors {missing:?} never occurred, only {:?}", tally.errors);
    proof.finish(json!({
        "sequences": done,
        "by kind": sequences,
        "operations": tally.operations.values().sum::<u64>(),
        "mismatches": 0,
        "by name": tally.operations,
        "errors": tally.errors,
        "not answered": tally.unanswered,
    }));
}

/// Each planted bug of the model is detected within `MAX_SEQUENCES` sequences.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn planted_model_bugs_are_detected() {
    const MAX_SEQUENCES: u64 = 400;
    let proof = Campaign::start("model: wrong rules");
    let mut found = BTreeMap::new();
    for (deviation, kind) in [
        (PlantedBug::ForgetsHighest, BackendKind::Memory),
        (PlantedBug::KeepsOneMore, BackendKind::Directory),
        (PlantedBug::SkipsFencing, BackendKind::Memory),
        (PlantedBug::IgnoresPins, BackendKind::Memory),
        (PlantedBug::KeepsSuperseded, BackendKind::Memory),
        (PlantedBug::CountsSuccesses, BackendKind::Directory),
        (PlantedBug::IgnoresRewinds, BackendKind::Memory),
        (PlantedBug::KeepsMemoryAfterCrash, BackendKind::Process),
        (PlantedBug::DropsUnanswered, BackendKind::Process),
        (PlantedBug::AssumesUnansweredDone, BackendKind::Process),
    ] {
        let tally = RefCell::new(RunStats::default());
        let mut seed = 0;
        loop {
            let batch = Batch { kind, seed, deviation: Some(deviation) };
            if batch.run_batch(5, &tally).is_err() {
                break;
            }
            seed += 1;
            assert!(tally.borrow().sequences < MAX_SEQUENCES, "{deviation:?} is not detected");
        }
        found.insert(format!("{deviation:?}"), tally.into_inner().sequences);
    }
    proof.finish(
        json!({ "planted": found.len(), "found": found.len(), "found after sequences": found }),
    );
}
