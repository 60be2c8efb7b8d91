//! Power cuts at every moment, which persist any part of the changes that were not synced.
//!
//! The store that is opened afterwards must have the expected state, and continue to work.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::ManualClock;
use crate::testing::crash::expected_state::{ExpectedState, Position};
use crate::testing::crash::faulty_protocol::{PROTOCOL_FAULTS, ProtocolFault};
use crate::testing::crash::rng::SeededRng;
use crate::testing::crash::simulation::{
    Access, Operation, Simulation, TraceEntry, key, put, store, visible_versions,
};
use crate::testing::simulated_disk::{Change, DiskState, DurablePart, Event, SimulatedFiles, Tree};

/// Checks the states that power cuts leave.
struct Explorer {
    users: Access,
    clock: ManualClock,
    dice: SeededRng,
    /// Digests of the pairs of tree and expected state that were checked.
    checked: BTreeSet<[u8; 32]>,
    /// Number of states, including those that were equal to an earlier one.
    states: u64,
    max_states_per_moment: u64,
    /// Number of the last simulated process.
    processes: u64,
}

/// Maximum number of states that are checked per moment, chosen at random.
///
/// Every planted fault is found with fewer. The long campaign uses [`LONG_MAX_STATES_PER_MOMENT`].
const MAX_STATES_PER_MOMENT: u64 = 64;
const LONG_MAX_STATES_PER_MOMENT: u64 = 512;

/// Environment variable: set for the long campaign.
const LONG: &str = "TSSD_RELIABILITY_LONG";

/// One of this many checks is followed by a second power cut while the store recovers and continues.
const SECOND_CUT_INTERVAL: u64 = 64;

impl Explorer {
    fn new(users: Access, clock: ManualClock, seed: u64) -> Self {
        let dice = SeededRng::new(seed);
        let is_long = std::env::var_os(LONG).is_some();
        let max_states_per_moment =
            if is_long { LONG_MAX_STATES_PER_MOMENT } else { MAX_STATES_PER_MOMENT };
        Self {
            users,
            clock,
            dice,
            checked: BTreeSet::new(),
            states: 0,
            max_states_per_moment,
            processes: 1 << 32,
        }
    }

    /// Cuts the power at every moment. Returns the first violation as an error.
    async fn explore(&mut self, start: Tree, entries: &[TraceEntry]) -> Result<(), String> {
        let mut aftermath = DiskState::new(start);
        let mut promise = ExpectedState::default();
        for (at, entry) in entries.iter().enumerate() {
            // After a change, only states that contain it are new. After a new expected state, all states are.
            let is_new: fn(&[DurablePart]) -> bool = match entry {
                TraceEntry::Event(event @ Event::Changed(_)) => {
                    aftermath.apply_event(event);
                    |extents| extents.last() != Some(&DurablePart::Nothing)
                }
                TraceEntry::Event(event @ Event::Synced(_)) => {
                    aftermath.apply_event(event);
                    continue;
                }
                TraceEntry::Promise(new) => {
                    promise = new.clone();
                    |_| true
                }
            };
            for extents in self.extents(&aftermath) {
                if is_new(&extents) {
                    self.states += 1;
                    let checked = self.check(aftermath.after_power_cut(&extents), &promise).await;
                    checked.map_err(|violation| {
                        let waiting = aftermath.pending().iter().zip(&extents);
                        let waiting: Vec<_> = waiting.collect();
                        format!("{violation}\nat moment {at}, of what was not synced: {waiting:#?}")
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Returns combinations of the durable parts of the pending changes: all, or a random sample.
    fn extents(&mut self, aftermath: &DiskState) -> Vec<Vec<DurablePart>> {
        let choices: Vec<&[DurablePart]> =
            aftermath.pending().iter().map(Change::possible_parts).collect();
        let len = |choice: &&[DurablePart]| u64::try_from(choice.len()).unwrap();
        let all = choices.iter().map(len).try_fold(1_u64, u64::checked_mul);
        let max = self.max_states_per_moment;
        let is_all = all.is_some_and(|all| all <= max);
        let count = all.map_or(max, |all| all.min(max));
        let mut combination = |mut number: u64| {
            let mut extent = |choice: &&[DurablePart]| {
                let len = len(choice);
                let index = if is_all { number % len } else { self.dice.below(len) };
                number /= len;
                choice[usize::try_from(index).unwrap()]
            };
            choices.iter().map(&mut extent).collect()
        };
        (0..count).map(&mut combination).collect()
    }

    /// Checks that a store over a tree has the expected state, and continues to work.
    async fn check(&mut self, tree: Tree, promise: &ExpectedState) -> Result<(), String> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(tree.digest().as_bytes()).update(format!("{promise:?}").as_bytes());
        if !self.checked.insert(*hasher.finalize().as_bytes()) {
            return Ok(());
        }
        let files = SimulatedFiles::with_tree(tree.clone());
        self.processes += 1;
        let opened = store(Arc::new(files.clone()), self.users, &self.clock, self.processes).await;
        let store = opened.map_err(|error| format!("it cannot be opened: {error}"))?;
        promise.check(&visible_versions(&store).await?)?;

        // A new put succeeds, and its version is newer than all acknowledged versions.
        let mut after = promise.clone();
        let value = after.next_value();
        let during = after.clone();
        let report = put(&store, value).await;
        let report = report.map_err(|error| format!("nothing can be put any more: {error}"))?;
        let place = (report.epoch, report.version);
        if promise.newest().is_some_and(|newest| place <= newest) {
            return Err(format!("version {place:?} is there once more"));
        }
        after.acknowledge(place, value);
        let found = visible_versions(&store).await?;
        after.check(&found)?;
        let pinned = store.pins(&key()).await.map_err(|error| error.to_string())?;
        let pinned: BTreeSet<u64> = pinned.into_values().collect();
        check_no_leftovers(&files, |place| {
            found.contains_key(&place) || pinned.contains(&place.1)
        })?;

        if self.dice.below(SECOND_CUT_INTERVAL) == 0 {
            let events = files.take_events().into_iter().map(TraceEntry::Event);
            let mut entries = vec![TraceEntry::Promise(during)];
            entries.extend(events);
            entries.push(TraceEntry::Promise(after));
            let at =
                usize::try_from(self.dice.below(u64::try_from(entries.len()).unwrap())).unwrap();
            Box::pin(self.cut_again(tree, &entries[..=at])).await?;
        }
        Ok(())
    }

    /// Cuts the power a second time, after the last of these moments.
    async fn cut_again(&mut self, start: Tree, entries: &[TraceEntry]) -> Result<(), String> {
        let mut aftermath = DiskState::new(start);
        let mut promise = ExpectedState::default();
        for entry in entries {
            match entry {
                TraceEntry::Event(event) => aftermath.apply_event(event),
                TraceEntry::Promise(new) => promise = new.clone(),
            }
        }
        let all = self.extents(&aftermath);
        let at = usize::try_from(self.dice.below(u64::try_from(all.len()).unwrap())).unwrap();
        self.states += 1;
        let checked = Box::pin(self.check(aftermath.after_power_cut(&all[at]), &promise)).await;
        checked.map_err(|violation| format!("{violation}\nafter a second power cut"))
    }
}

/// Checks that there are no files other than those of the ledger and of the retained versions.
fn check_no_leftovers(
    files: &SimulatedFiles,
    is_retained: impl Fn(Position) -> bool,
) -> Result<(), String> {
    let folder = format!("/{}", key().to_path());
    let mut records = 0;
    for path in files.paths() {
        let rest = path.strip_prefix(&folder).and_then(|rest| rest.strip_prefix('/'));
        let Some((folder, name)) = rest.and_then(|rest| rest.split_once('/')) else { continue };
        let is_expected = match folder {
            ".ledger" => {
                records += usize::from(has_extension(name, "json"));
                !name.starts_with(".tmp-")
            }
            version => {
                let mut parts = version.split('-');
                let epoch = parts.next().and_then(|epoch| epoch.parse().ok());
                let number = parts.next().and_then(|number| number.parse().ok());
                epoch.zip(number).is_some_and(&is_retained) && has_extension(name, "tssd")
            }
        };
        if !is_expected {
            return Err(format!("`{path}` is left behind"));
        }
    }
    if records > 2 { Err(format!("{records} records are left")) } else { Ok(()) }
}

/// Returns whether a file name has an extension.
fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| found == extension)
}

/// Counts of checked states.
#[derive(Default)]
struct Counts {
    states: u64,
    /// States that differ.
    trees: u64,
    runs: u64,
}

impl Counts {
    fn add(&mut self, run: &Self) {
        self.states += run.states;
        self.trees += run.trees;
        self.runs += run.runs;
    }
}

/// Runs a random sequence of 8 operations, and cuts the power at every moment of it.
async fn run(seed: u64, bug: Option<ProtocolFault>) -> (Counts, Result<(), String>) {
    let mut dice = SeededRng::new(seed);
    let users = if dice.below(2) == 0 { Access::Shared } else { Access::Exclusive };
    let acts: Vec<Operation> = (0..8).map(|_| Operation::random(&mut dice)).collect();
    let (counts, found) = cut_the_power(users, &acts, bug, seed).await;
    (counts, found.map_err(|violation| format!("seed {seed}, {users:?}, {acts:?}: {violation}")))
}

async fn cut_the_power(
    users: Access,
    acts: &[Operation],
    bug: Option<ProtocolFault>,
    seed: u64,
) -> (Counts, Result<(), String>) {
    let mut simulation = Simulation::new(users, bug).await;
    for act in acts {
        simulation.run(*act).await;
    }
    let mut explorer = Explorer::new(users, simulation.clock.clone(), seed);
    let found = explorer.explore(Tree::default(), &simulation.trace).await;
    let trees = u64::try_from(explorer.checked.len()).unwrap();
    (Counts { states: explorer.states, trees, runs: 1 }, found)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().start_paused(true).build().unwrap().block_on(future)
}

/// Returns the minimum number of states and the minimum duration, which `cargo xtask reliability` sets.
fn min_states_and_duration() -> (u64, Duration) {
    let number = |name: &str| std::env::var(name).map(|number| number.parse::<u64>().unwrap());
    // Other test runs check fewer states.
    let states = number("TSSD_CRASH_STATES").unwrap_or(5_000);
    (states, Duration::from_secs(number("TSSD_RELIABILITY_SECONDS").unwrap_or(0)))
}

#[test]
#[expect(clippy::print_stdout, reason = "cargo xtask reliability reads it")]
fn store_survives_power_cut_at_any_moment() {
    let (states, min_duration) = min_states_and_duration();
    let (started, seeds, counts) =
        (Instant::now(), AtomicU64::new(1), Mutex::new(Counts::default()));
    let explore = || {
        while counts.lock().unwrap().states < states || started.elapsed() < min_duration {
            let (run, found) = block_on(run(seeds.fetch_add(1, Ordering::Relaxed), None));
            counts.lock().unwrap().add(&run);
            if let Err(violation) = found {
                panic!("{violation}");
            }
        }
    };
    thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        (0..cores).for_each(|_| drop(scope.spawn(explore)));
    });
    let Counts { states, trees, runs } = counts.into_inner().unwrap();
    println!(
        "\nreliability {}",
        serde_json::json!({"power cuts": {
            "states": states, "different trees": trees, "runs": runs, "bad": 0,
            "seconds": started.elapsed().as_secs(),
        }})
    );
}

#[test]
#[expect(clippy::print_stdout, reason = "cargo xtask reliability reads it")]
fn planted_protocol_faults_are_found() {
    let mut found = BTreeMap::new();
    for bug in PROTOCOL_FAULTS {
        let violation = (1..100).find_map(|seed| block_on(run(seed, Some(bug))).1.err());
        let violation = violation.unwrap_or_else(|| panic!("{bug:?} is not found"));
        let line = violation.lines().next().unwrap_or_default().to_owned();
        found.insert(format!("{bug:?}"), line);
    }
    println!(
        "\nreliability {}",
        serde_json::json!({"power cuts: faults of the protocol": {"planted": PROTOCOL_FAULTS.len(), "found": found}})
    );
}

/// Fixed sequences, which do not depend on the random sequences of the campaign.
#[test]
fn publish_and_rewind_survive_power_cuts() {
    use Operation::{Publish, Put, Retain, Rewind};
    for users in [Access::Shared, Access::Exclusive] {
        for acts in [&[Put, Rewind(0), Put][..], &[Retain(2), Put, Publish, Rewind(1)]] {
            let (_, found) = block_on(cut_the_power(users, acts, None, 1));
            assert_eq!(found, Ok(()), "{users:?}, {acts:?}");
        }
    }
}

/// Sequences with which the campaign has found bugs.
#[test]
fn power_cut_bugs_stay_fixed() {
    use Operation::{Delete, KillAndRetryPut, KillDuringPut, Put, PutHalf, PutTogether, Retain};
    for (description, users, acts) in [
        (
            "a deleted version that is back, without the ledger, is swept",
            Access::Shared,
            vec![Put, Put, Delete(1), Put],
        ),
        (
            "so is the record of a key that has none, half written",
            Access::Exclusive,
            vec![PutHalf, Put],
        ),
        (
            "a visible archive has no second name that comes back",
            Access::Shared,
            vec![PutTogether, Put],
        ),
        (
            "a record that a killed process has linked is durable before what it retires is deleted",
            Access::Exclusive,
            vec![Retain(1), Put, KillDuringPut(8), Put, KillAndRetryPut(38), Put],
        ),
        (
            "so is one that a put finds made already",
            Access::Shared,
            vec![Put, KillAndRetryPut(36), KillAndRetryPut(37), KillAndRetryPut(38)],
        ),
    ] {
        let (_, found) = block_on(cut_the_power(users, &acts, None, 1));
        assert_eq!(found, Ok(()), "{description}");
    }
}
