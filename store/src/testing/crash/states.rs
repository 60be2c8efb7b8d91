//! Power cuts: at every moment, with any part of what was not synced. What a store finds afterwards must be
//! what it has promised, and it must go on from there.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::Clock;
use super::dice::Dice;
use super::faulty::{BUGS, Bug};
use super::promise::{Place, Promise};
use super::world::{Act, Moment, Users, World, key, put, store, visible};
use crate::testing::simulated_disk::{Aftermath, Change, Event, Extent, SimulatedFiles, Tree};

/// Looks at what power cuts leave.
struct Explorer {
    users: Users,
    clock: Clock,
    dice: Dice,
    seen: BTreeSet<[u8; 32]>,
    states: u64,
    states_of_a_moment: u64,
    processes: u64,
}

/// At most this many states of one moment are checked, chosen at random. Every planted fault is found with fewer; the
/// long campaign checks [`STATES_OF_A_MOMENT_LONG`].
const STATES_OF_A_MOMENT: u64 = 64;
const STATES_OF_A_MOMENT_LONG: u64 = 512;

/// Set for the long campaign.
const LONG: &str = "TSSD_RELIABILITY_LONG";

/// One of so many trees is left by a second power cut while the store went on after the first one.
const SECOND_CUTS: u64 = 64;

impl Explorer {
    fn new(users: Users, clock: Clock, seed: u64) -> Self {
        let dice = Dice::new(seed);
        let is_long = std::env::var_os(LONG).is_some();
        let states_of_a_moment = if is_long { STATES_OF_A_MOMENT_LONG } else { STATES_OF_A_MOMENT };
        Self {
            users,
            clock,
            dice,
            seen: BTreeSet::new(),
            states: 0,
            states_of_a_moment,
            processes: 1 << 32,
        }
    }

    /// Cuts the power at every moment. A finding is the first state that breaks a promise.
    async fn explore(&mut self, start: Tree, moments: &[Moment]) -> Result<(), String> {
        let mut aftermath = Aftermath::of(start);
        let mut promise = Promise::default();
        for (at, moment) in moments.iter().enumerate() {
            // What is new are states with the newest change, and all of them under a new promise.
            let is_new: fn(&[Extent]) -> bool = match moment {
                Moment::Event(event @ Event::Changed(_)) => {
                    aftermath.add(event);
                    |extents| extents.last() != Some(&Extent::Nothing)
                }
                Moment::Event(event @ Event::Synced(_)) => {
                    aftermath.add(event);
                    continue;
                }
                Moment::Promise(new) => {
                    promise = new.clone();
                    |_| true
                }
            };
            for extents in self.extents(&aftermath) {
                if is_new(&extents) {
                    self.states += 1;
                    let checked = self.check(aftermath.tree(&extents), &promise).await;
                    checked.map_err(|broken| {
                        let waiting = aftermath.waiting().iter().zip(&extents);
                        let waiting: Vec<_> = waiting.collect();
                        format!("{broken}\nat moment {at}, of what was not synced: {waiting:#?}")
                    })?;
                }
            }
        }
        Ok(())
    }

    /// How much may be durable of each change that waits: all combinations, or some.
    fn extents(&mut self, aftermath: &Aftermath) -> Vec<Vec<Extent>> {
        let choices: Vec<&[Extent]> = aftermath.waiting().iter().map(Change::extents).collect();
        let sides = |choice: &&[Extent]| u64::try_from(choice.len()).unwrap();
        let all = choices.iter().map(sides).try_fold(1_u64, u64::checked_mul);
        let most = self.states_of_a_moment;
        let is_all = all.is_some_and(|all| all <= most);
        let count = all.map_or(most, |all| all.min(most));
        let mut combination = |mut number: u64| {
            let mut extent = |choice: &&[Extent]| {
                let sides = sides(choice);
                let side = if is_all { number % sides } else { self.dice.roll(sides) };
                number /= sides;
                choice[usize::try_from(side).unwrap()]
            };
            choices.iter().map(&mut extent).collect()
        };
        (0..count).map(&mut combination).collect()
    }

    /// Proves that a tree keeps a promise, and that a store goes on from it.
    async fn check(&mut self, tree: Tree, promise: &Promise) -> Result<(), String> {
        let mut name = blake3::Hasher::new();
        name.update(tree.digest().as_bytes()).update(format!("{promise:?}").as_bytes());
        if !self.seen.insert(*name.finalize().as_bytes()) {
            return Ok(());
        }
        let files = SimulatedFiles::of(tree.clone());
        self.processes += 1;
        let opened = store(Arc::new(files.clone()), self.users, &self.clock, self.processes).await;
        let store = opened.map_err(|error| format!("it cannot be opened: {error}"))?;
        promise.expect(&visible(&store).await?)?;

        // It goes on: what is put now is the newest, and older than nothing that was acknowledged.
        let mut after = promise.clone();
        let value = after.try_next();
        let begun = after.clone();
        let report = put(&store, value).await;
        let report = report.map_err(|error| format!("nothing can be put any more: {error}"))?;
        let place = (report.epoch, report.version);
        if promise.newest().is_some_and(|newest| place <= newest) {
            return Err(format!("version {place:?} is there once more"));
        }
        after.acknowledge(place, value);
        let found = visible(&store).await?;
        after.expect(&found)?;
        let pinned = store.pins(&key()).await.map_err(|error| error.to_string())?;
        let pinned: BTreeSet<u64> = pinned.into_values().collect();
        only_what_is_held(&files, |place| found.contains_key(&place) || pinned.contains(&place.1))?;

        if self.dice.roll(SECOND_CUTS) == 0 {
            let events = files.take_events().into_iter().map(Moment::Event);
            let mut moments = vec![Moment::Promise(begun)];
            moments.extend(events);
            moments.push(Moment::Promise(after));
            let at =
                usize::try_from(self.dice.roll(u64::try_from(moments.len()).unwrap())).unwrap();
            Box::pin(self.cut_once_more(tree, &moments[..=at])).await?;
        }
        Ok(())
    }

    /// Cuts the power at the end.
    async fn cut_once_more(&mut self, start: Tree, moments: &[Moment]) -> Result<(), String> {
        let mut aftermath = Aftermath::of(start);
        let mut promise = Promise::default();
        for moment in moments {
            match moment {
                Moment::Event(event) => aftermath.add(event),
                Moment::Promise(new) => promise = new.clone(),
            }
        }
        let all = self.extents(&aftermath);
        let at = usize::try_from(self.dice.roll(u64::try_from(all.len()).unwrap())).unwrap();
        self.states += 1;
        let checked = Box::pin(self.check(aftermath.tree(&all[at]), &promise)).await;
        checked.map_err(|broken| format!("{broken}\nafter a second power cut"))
    }
}

/// Proves that nothing is left but what the ledger and these versions are made of.
fn only_what_is_held(
    files: &SimulatedFiles,
    is_held: impl Fn(Place) -> bool,
) -> Result<(), String> {
    let folder = format!("/{}", key().to_path());
    let mut records = 0;
    for path in files.paths() {
        let rest = path.strip_prefix(&folder).and_then(|rest| rest.strip_prefix('/'));
        let Some((folder, name)) = rest.and_then(|rest| rest.split_once('/')) else { continue };
        let is_ours = match folder {
            ".ledger" => {
                records += usize::from(is(name, "json"));
                !name.starts_with(".tmp-")
            }
            version => {
                let mut words = version.split('-');
                let epoch = words.next().and_then(|epoch| epoch.parse().ok());
                let number = words.next().and_then(|number| number.parse().ok());
                epoch.zip(number).is_some_and(&is_held) && is(name, "tssd")
            }
        };
        if !is_ours {
            return Err(format!("`{path}` is left behind"));
        }
    }
    if records > 2 { Err(format!("{records} records are left")) } else { Ok(()) }
}

/// Whether a file is of this kind.
fn is(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| found == extension)
}

/// How many states are looked at, and of how many trees they were.
#[derive(Default)]
struct Tally {
    states: u64,
    trees: u64,
    runs: u64,
}

impl Tally {
    fn add(&mut self, run: &Self) {
        self.states += run.states;
        self.trees += run.trees;
        self.runs += run.runs;
    }
}

/// One run of several acts by which the power is cut at every moment.
async fn run(seed: u64, bug: Option<Bug>) -> (Tally, Result<(), String>) {
    let mut dice = Dice::new(seed);
    let users = if dice.roll(2) == 0 { Users::Several } else { Users::One };
    let acts: Vec<Act> = (0..8).map(|_| Act::any(&mut dice)).collect();
    let (tally, found) = cut_the_power(users, &acts, bug, seed).await;
    (tally, found.map_err(|broken| format!("seed {seed}, {users:?}, {acts:?}: {broken}")))
}

async fn cut_the_power(
    users: Users,
    acts: &[Act],
    bug: Option<Bug>,
    seed: u64,
) -> (Tally, Result<(), String>) {
    let mut world = World::new(users, bug).await;
    for act in acts {
        world.play(*act).await;
    }
    let mut explorer = Explorer::new(users, world.clock.clone(), seed);
    let found = explorer.explore(Tree::default(), &world.moments).await;
    let trees = u64::try_from(explorer.seen.len()).unwrap();
    (Tally { states: explorer.states, trees, runs: 1 }, found)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().start_paused(true).build().unwrap().block_on(future)
}

/// How much `cargo xtask reliability` wants: so many states at least, for so many seconds at least.
fn wanted() -> (u64, Duration) {
    let number = |name: &str| std::env::var(name).map(|number| number.parse::<u64>().unwrap());
    // Some of them are looked at in each test run.
    let states = number("TSSD_CRASH_STATES").unwrap_or(20_000);
    (states, Duration::from_secs(number("TSSD_RELIABILITY_SECONDS").unwrap_or(0)))
}

#[test]
#[expect(clippy::print_stdout, reason = "cargo xtask reliability reads it")]
fn no_power_cut_breaks_a_promise() {
    let (states, lasts) = wanted();
    let (started, seeds, tally) = (Instant::now(), AtomicU64::new(1), Mutex::new(Tally::default()));
    let look = || {
        while tally.lock().unwrap().states < states || started.elapsed() < lasts {
            let (run, found) = block_on(run(seeds.fetch_add(1, Ordering::Relaxed), None));
            tally.lock().unwrap().add(&run);
            if let Err(broken) = found {
                panic!("{broken}");
            }
        }
    };
    thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        (0..cores).for_each(|_| drop(scope.spawn(look)));
    });
    let Tally { states, trees, runs } = tally.into_inner().unwrap();
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
fn every_fault_of_the_protocol_is_found() {
    let mut found = BTreeMap::new();
    for bug in BUGS {
        let broken = (1..100).find_map(|seed| block_on(run(seed, Some(bug))).1.err());
        let broken = broken.unwrap_or_else(|| panic!("{bug:?} is not found"));
        let line = broken.lines().next().unwrap_or_default().to_owned();
        found.insert(format!("{bug:?}"), line);
    }
    println!(
        "\nreliability {}",
        serde_json::json!({"power cuts: faults of the protocol": {"planted": BUGS.len(), "found": found}})
    );
}

/// Each of these moments is in every run, whatever chance brings.
#[test]
fn power_cuts_while_versions_are_published_and_taken_back() {
    use Act::{Publish, Put, Retain, Rewind};
    for users in [Users::Several, Users::One] {
        for acts in [&[Put, Rewind(0), Put][..], &[Retain(2), Put, Publish, Rewind(1)]] {
            let (_, found) = block_on(cut_the_power(users, acts, None, 1));
            assert_eq!(found, Ok(()), "{users:?}, {acts:?}");
        }
    }
}

/// What this test has found.
#[test]
fn what_was_found_stays_mended() {
    use Act::{Delete, Die, DieAndRetry, Put, PutHalf, PutTogether, Retain};
    for (what, users, acts) in [
        (
            "a deleted version that is back, without the ledger, is swept",
            Users::Several,
            vec![Put, Put, Delete(1), Put],
        ),
        ("so is the record of a key that has none, half written", Users::One, vec![PutHalf, Put]),
        (
            "a visible archive has no second name that comes back",
            Users::Several,
            vec![PutTogether, Put],
        ),
        (
            "a record that a killed process has linked is durable before what it retires is deleted",
            Users::One,
            vec![Retain(1), Put, Die(8), Put, DieAndRetry(38), Put],
        ),
        (
            "so is one that a put finds made already",
            Users::Several,
            vec![Put, DieAndRetry(36), DieAndRetry(37), DieAndRetry(38)],
        ),
    ] {
        let (_, found) = block_on(cut_the_power(users, &acts, None, 1));
        assert_eq!(found, Ok(()), "{what}");
    }
}
