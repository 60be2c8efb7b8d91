//! The store does what its model does: random operations are played against both, and all answers compared.
//!
//! A sequence that finds a difference is shrunk, and printed with its seed. `TSSD_RELIABILITY_SEED` plays the
//! sequences of a seed again.

/// Whether the parts of all writers fit together, element by element.
mod fit;
/// Stores in memory, in directories, at daemons.
mod home;
/// Between the words of the model and those of the store.
mod interpreter;
/// What a store promises, as the simplest program that keeps it.
mod model;
/// What is asked of a store and of its model.
mod operations;
/// One version of the model.
mod version;
/// What writers and readers say, in the words of the model.
mod words;
/// A store and its model side by side.
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use serde_json::json;
use tssd_tests::proof::Proof;

use self::home::{Home, Kind};
use self::operations::{NAMES, Operation, sequences};
use self::world::{Deviation, Tally, World};

/// How many sequences CI plays of each kind of store.
const WANTED: [(Kind, u64); 5] = [
    (Kind::Memory, 6800),
    (Kind::Directory, 2500),
    (Kind::Daemon, 200),
    (Kind::LastingDaemon, 200),
    (Kind::Process, 300),
];

/// Errors that must have occurred, in the model's words. (To commit what another try of the same writer has taken
/// back, `NotBegun`, needs luck.)
const FAULTS: [&str; 20] = [
    "Busy",
    "Differs",
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
    "LateCall",
    "Lost",
    "NoLeaf",
    "NotAWriter",
    "NotCome",
    "NotFound",
    "NotNewer",
    "WritersDisagree",
];

/// A seed that nobody has had before.
#[expect(clippy::print_stdout, reason = "whoever plays it again needs it")]
fn fresh(number: u64) -> u64 {
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), number);
    println!("{SEED}={seed}");
    seed
}

/// How many sequences have one seed, and one daemon.
const BATCH: u32 = 25;

const SEED: &str = "TSSD_RELIABILITY_SEED";

/// A batch of sequences: what went wrong, if something did.
struct Batch {
    kind: Kind,
    seed: u64,
    deviation: Option<Deviation>,
}

impl Batch {
    fn play(&self, count: u32, tally: &RefCell<Tally>) -> Result<(), String> {
        // What was planted is found, not explained.
        let max_shrink_iters = if self.deviation.is_some() { 0 } else { 2000 };
        let plain = Config::with_cases(count);
        let config = Config { failure_persistence: None, max_shrink_iters, ..plain };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(config, rng);
        let shared = RefCell::new(self.kind.is_shared().then(|| Home::of(self.kind)));
        let played = runner.run(&sequences(self.kind == Kind::Process), |operations| {
            let home = shared.borrow_mut().take().unwrap_or_else(|| Home::of(self.kind));
            let mut world = World::new(self.kind, home, self.deviation);
            let played = world.play(&operations, &mut tally.borrow_mut());
            let home = world.end();
            if self.kind.is_shared() {
                *shared.borrow_mut() = Some(home);
            }
            tally.borrow_mut().sequences += 1;
            played.map_err(TestCaseError::fail)
        });
        played.map_err(|error| match error {
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

/// Plays sequences of all kinds, as many as are wanted or as long as is wanted.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn the_store_does_what_its_model_does() {
    let proof = Proof::begin("model");
    let said = std::env::var(SEED).ok().map(|seed| seed.parse().unwrap());
    let tally = RefCell::new(Tally::default());
    let mut played: BTreeMap<Kind, u64> = BTreeMap::new();
    let wanted: u64 = WANTED.iter().map(|(_, wanted)| wanted).sum();
    let (mut done, mut turn) = (0, 0);
    while proof.goes_on(done, wanted) {
        for (kind, wanted) in WANTED {
            // Each kind has its share of every turn: a hundredth of what is wanted, in batches.
            let share = wanted.div_ceil(100);
            let mut left = share;
            while left > 0 {
                let count = left.min(BATCH.into());
                let number = turn * 1000 + left;
                let seed = said.unwrap_or_else(|| if turn < 100 { number } else { fresh(number) });
                let batch = Batch { kind, seed, deviation: None };
                let count = u32::try_from(count).unwrap();
                batch.play(count, &tally).unwrap_or_else(|difference| panic!("{difference}"));
                left -= u64::from(count);
                done += u64::from(count);
                *played.entry(kind).or_default() += u64::from(count);
            }
        }
        turn += 1;
    }
    let tally = tally.into_inner();
    let sequences: BTreeMap<&str, u64> =
        played.iter().map(|(kind, count)| (kind.name(), *count)).collect();
    for name in NAMES {
        assert!(tally.operations.contains_key(name), "nobody asked to {name}");
    }
    let untold: Vec<_> = FAULTS.iter().filter(|name| !tally.faults.contains_key(**name)).collect();
    assert!(untold.is_empty(), "nobody was told {untold:?}, only {:?}", tally.faults);
    proof.end(json!({
        "sequences": done,
        "by kind": sequences,
        "operations": tally.operations.values().sum::<u64>(),
        "mismatches": 0,
        "by name": tally.operations,
        "errors": tally.faults,
        "not answered": tally.unanswered,
    }));
}

/// What is wrong with the model is found, each in a few hundred sequences at most.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn a_model_that_is_wrong_is_found_out() {
    const MOST: u64 = 400;
    let proof = Proof::begin("model: wrong rules");
    let mut found = BTreeMap::new();
    for (deviation, kind) in [
        (Deviation::ForgetsHighest, Kind::Memory),
        (Deviation::KeepsOneMore, Kind::Directory),
        (Deviation::FencesNobody, Kind::Memory),
        (Deviation::PinsNothing, Kind::Memory),
        (Deviation::SupersedesNothing, Kind::Memory),
        (Deviation::CountsSuccesses, Kind::Directory),
        (Deviation::RewindsNothing, Kind::Memory),
        (Deviation::RemembersAll, Kind::Process),
        (Deviation::ForgetsUnanswered, Kind::Process),
        (Deviation::BelievesUnanswered, Kind::Process),
    ] {
        let tally = RefCell::new(Tally::default());
        let mut seed = 0;
        loop {
            let batch = Batch { kind, seed, deviation: Some(deviation) };
            if batch.play(5, &tally).is_err() {
                break;
            }
            seed += 1;
            assert!(tally.borrow().sequences < MOST, "{deviation:?} is not found");
        }
        found.insert(format!("{deviation:?}"), tally.into_inner().sequences);
    }
    proof.end(
        json!({ "planted": found.len(), "found": found.len(), "found after sequences": found }),
    );
}
