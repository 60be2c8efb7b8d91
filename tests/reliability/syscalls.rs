//! Every system call of a store fails, or does half of what it could, or is the last one of its process.

mod child;
mod process;
mod scenario;
mod short;
mod strace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Builder;
use tssd_tests::command::quick_folder;
use tssd_tests::proof::Proof;

use self::child::{Actor, root};
use self::process::Ended;
use self::scenario::{DAEMON_RECOVERY, RECOVERY, SCENARIOS, Scenario, State, Step};
use self::strace::{Call, Fault};
use crate::folder;

/// How many rounds CI wants.
const ROUNDS: u64 = 1000;

/// The number of a version that is put after each round.
const NEXT: u64 = 50;

/// Where a process begins: the folder that it finds, and what may be visible in it.
struct Start {
    scenario: Scenario,
    /// In which its processes have their places.
    folder: TempDir,
    states: BTreeSet<State>,
    /// Whether a daemon has been there: what it has not completed, only the next one knows of.
    had_daemon: bool,
    /// How many processes were killed before.
    deaths: u32,
}

/// One round: a process, and what happens to which of its calls.
#[derive(Clone)]
struct Point {
    start: Arc<Start>,
    call: Call,
    fault: Fault,
}

impl Start {
    /// That of a process before which all was well.
    fn of(scenario: Scenario) -> Self {
        let folder = quick_folder();
        let place = folder.path().join("before");
        std::fs::create_dir_all(root(&place)).unwrap();
        wait(async {
            let mut actor = Actor { place, is_daemon: false, store: None };
            for step in scenario.before {
                actor.perform(*step).await.unwrap();
            }
        });
        let states = [State::default().after(scenario.before)].into();
        Self { scenario, folder, states, had_daemon: scenario.is_daemon, deaths: 0 }
    }

    /// A copy of what a process finds.
    fn place(&self) -> Place {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let place = self.folder.path().join(number.to_string());
        folder::copy(&self.folder.path().join("before"), &place);
        std::fs::create_dir_all(place.join("run")).unwrap();
        Place(place)
    }

    fn calls(&self) -> Vec<Call> {
        let calls = strace::calls(self.scenario, &self.place().0);
        prove_synced(self.scenario, &calls);
        calls
    }

    /// What may be visible once so many steps have returned, and no more than one more has begun.
    fn legal(&self, acknowledged: usize) -> BTreeSet<State> {
        let steps = self.scenario.steps;
        let ends = [acknowledged, steps.len().min(acknowledged + 1)];
        let after = |state: &State| ends.map(|end| state.after(&steps[..end]));
        self.states.iter().flat_map(after).collect()
    }
}

/// What gets a name was synced, and then so is the folder that has the name. Simulated disks prove that this is asked
/// for; this, that the system is told.
fn prove_synced(scenario: Scenario, calls: &[Call]) {
    const ORDERED: [&str; 6] = ["pwrite64", "fsync", "link", "linkat", "mkdir", "mkdirat"];
    let names: Vec<&str> =
        calls.iter().map(|call| call.name).filter(|name| ORDERED.contains(name)).collect();
    for (at, name) in names.iter().enumerate() {
        let (before, after) = (names[..at].last(), names.get(at + 1));
        let is_lasting = match *name {
            "link" | "linkat" => [before, after] == [Some(&"fsync"); 2],
            "mkdir" | "mkdirat" => after == Some(&"fsync"),
            _ => true,
        };
        assert!(is_lasting, "{}: {name} is call {at} of {names:?}", scenario.name);
    }
}

/// Where a process runs; it is gone with this.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("strace"));
    }
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

impl Point {
    fn all(start: &Arc<Start>) -> Vec<Self> {
        let point = |call: &Call, fault: &Fault| Self {
            start: start.clone(),
            call: call.clone(),
            fault: *fault,
        };
        let calls = start.calls();
        calls
            .iter()
            .flat_map(|call| call.faults().iter().map(move |fault| point(call, fault)))
            .collect()
    }

    /// Runs the process; says whether the fault has happened, if it has come to the call, and what has come of that.
    fn run(&self) -> (Option<bool>, Result<bool, String>) {
        let place = self.start.place();
        let ended = self.ended(&place);
        let checked = self.check(&place.0, &ended).map_err(|wrong| {
            let (fault, call, scenario) = (self.fault, &self.call, self.start.scenario.name);
            format!("{wrong}: {fault} at {call} in {scenario}: {ended:?}")
        });
        (ended.is_hit, checked)
    }

    fn ended(&self, place: &Place) -> Ended {
        let scenario = self.start.scenario;
        match self.fault {
            Fault::Half => short::run(scenario, &place.0, &self.call),
            fault => strace::inject(scenario, &place.0, &self.call, fault),
        }
    }

    /// Whether the next put has to wait; or what is wrong.
    fn check(&self, place: &Path, ended: &Ended) -> Result<bool, String> {
        let (acknowledged, mut is_blocked) = self.check_words(ended)?;
        let mut legal = self.start.legal(acknowledged);
        wait(async {
            let mut actor = Actor { place: place.to_owned(), is_daemon: false, store: None };
            let seen = numbers(&actor.get().await.map_err(|error| format!("read later: {error}"))?);
            if !legal.iter().any(|state| state.versions == seen) {
                return Err(format!("{seen:?} is visible, not one of {legal:?}"));
            }
            let next = Step::Put(NEXT);
            match actor.perform(next).await {
                Err(error) if self.is_blocked(&format!("{} {error}", error.kind().name())) => {
                    is_blocked = true;
                    let done = actor.perform(Step::Delete(None)).await;
                    done.map_err(|error| format!("the next delete: {error}"))?;
                    let none = |state: &State| state.after(&[Step::Delete(None)]);
                    legal = legal.iter().map(none).collect();
                    actor.perform(next).await.map_err(|error| format!("the next put: {error}"))?;
                }
                done => done.map_err(|error| format!("the next put: {error}"))?,
            }
            let seen = actor.get().await.map_err(|error| format!("what was put: {error}"))?;
            if !legal.iter().any(|state| state.after(&[next]).versions == numbers(&seen)) {
                return Err(format!(
                    "{seen:?} is visible after the next put, and before {legal:?}"
                ));
            }
            // What could not be removed from a version's folder goes with it.
            let last = Step::Retain(1);
            actor.perform(last).await.map_err(|error| format!("the next retention: {error}"))?;
            let seen = actor.get().await.map_err(|error| format!("what is kept: {error}"))?;
            if self.start.had_daemon {
                actor.sweep().await.map_err(|error| format!("the next daemon: {error}"))?;
            }
            let strange = folder::strangers(&root(place), &[("model", seen)]);
            if strange.is_empty() {
                Ok(is_blocked)
            } else {
                Err(format!("left behind: {strange:?}"))
            }
        })
    }

    /// What the process said, and how it ended: how many of its steps were done, and whether it had to wait.
    fn check_words(&self, ended: &Ended) -> Result<(usize, bool), String> {
        let (mut acknowledged, mut is_blocked) = (0, false);
        for line in ended.said.lines() {
            match line.split_once(' ') {
                Some(("ack", _)) => acknowledged += 1,
                Some(("err" | "stuck", said)) if self.is_blocked(said) => is_blocked = true,
                Some(("err", said)) if !self.may_fail_by(said) => return Err(line.to_owned()),
                Some(("seen", said)) => {
                    let numbers = said.split(',').filter(|number| !number.is_empty());
                    let seen: Vec<u64> = numbers.map(|number| number.parse().unwrap()).collect();
                    let legal = self.start.legal(acknowledged);
                    if !legal.iter().any(|state| state.versions == seen) {
                        return Err(format!("{seen:?} was visible, not one of {legal:?}"));
                    }
                }
                Some(("stuck", _)) => return Err(line.to_owned()),
                _ => {}
            }
        }
        let is_killed = self.fault == Fault::Kill && ended.is_killed();
        let is_whole = acknowledged == self.start.scenario.steps.len();
        let is_done = ended.status.success() && (is_whole || is_blocked);
        if !(is_killed || is_done) || ended.complaints.contains("panicked") {
            return Err("it ended otherwise".to_owned());
        }
        Ok((acknowledged, is_blocked))
    }

    /// Whether writers that were killed are in the way: two have a version open, for ten minutes at most.
    fn is_blocked(&self, said: &str) -> bool {
        self.start.deaths > 0 && said.starts_with("busy ") && said.contains("are still open")
    }

    /// Whether a call may say that this went wrong.
    fn may_fail_by(&self, said: &str) -> bool {
        let kind = said.split(' ').next().unwrap_or_default();
        match self.fault {
            Fault::Kill | Fault::Half => false,
            // Opening a store says so of a folder that cannot be read; and a daemon, of one who is lost.
            Fault::Error(_) => matches!(kind, "io" | "unreachable"),
            // A file that has no bytes is damaged.
            Fault::Nothing => matches!(kind, "io" | "unreachable" | "corrupt"),
        }
    }
}

fn numbers(versions: &[(u64, u64)]) -> Vec<u64> {
    versions.iter().map(|(number, _)| *number).collect()
}

/// What the processes of a start leave behind that are killed there; each once, and none that is known.
fn left_behind(
    start: &Arc<Start>,
    calls: &[Call],
    known: &mut BTreeSet<String>,
) -> Vec<Arc<Start>> {
    let mut starts = Vec::new();
    for call in calls {
        let point = Point { start: start.clone(), call: call.clone(), fault: Fault::Kill };
        let place = start.place();
        let ended = point.ended(&place);
        let acknowledged = ended.said.lines().filter(|line| line.starts_with("ack ")).count();
        if !ended.is_killed() || !known.insert(folder::print(&root(&place.0))) {
            continue;
        }
        for scenario in [RECOVERY, DAEMON_RECOVERY] {
            let folder = quick_folder();
            folder::copy(&place.0, &folder.path().join("before"));
            let states = start.legal(acknowledged);
            let had_daemon = start.had_daemon || scenario.is_daemon;
            let deaths = start.deaths + 1;
            starts.push(Arc::new(Start { scenario, folder, states, had_daemon, deaths }));
        }
    }
    starts
}

/// So many of them, evenly spread.
fn some<T: Clone>(of: &[T], count: usize) -> Vec<T> {
    (0..count.min(of.len()))
        .map(|index| of[index * of.len() / count.min(of.len())].clone())
        .collect()
}

/// The same in another order: of any beginning of it, half is spread evenly over the points of processes that
/// found all well, and half over those of others.
fn spread(of: &[Point]) -> Vec<Point> {
    let mut placed: Vec<(u64, &Point)> = Vec::new();
    let (well, others): (Vec<&Point>, Vec<&Point>) =
        of.iter().partition(|point| point.start.deaths == 0);
    for group in [well, others] {
        let mut group: Vec<(u64, &Point)> = (0..).zip(group).collect();
        // The fractions of multiples of the golden ratio lie as evenly as can be.
        group.sort_by_key(|(place, _)| place.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        placed.extend((0..).zip(group).map(|(place, (_, point))| (place, point)));
    }
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, point)| point.clone()).collect()
}

/// What has been done so far.
#[derive(Default)]
struct Figures {
    rounds: u64,
    /// By scenario: how many points are covered, of how many.
    covered: BTreeMap<&'static str, (u64, u64)>,
    starts: u64,
    /// Rounds in which the process did not come to the call: with its threads in another order, it makes fewer.
    missed: u64,
    /// Rounds in which the call was too small for half of it.
    whole: u64,
    /// Rounds after which a put had to wait for writers that were killed.
    blocked: u64,
    wrong: Vec<String>,
}

impl Figures {
    /// Runs the points, on all cores, as long as there is to be another round.
    fn run(&mut self, goes_on: impl Fn(u64) -> bool + Sync, points: &[Point]) {
        for point in points {
            self.covered.entry(point.start.scenario.name).or_default().1 += 1;
        }
        let queue = Mutex::new((spread(points).into_iter(), self));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let work = || loop {
            let point = {
                let mut queue = queue.lock().unwrap();
                if !goes_on(queue.1.rounds) {
                    break;
                }
                let Some(point) = queue.0.next() else { break };
                queue.1.rounds += 1;
                point
            };
            let (is_hit, checked) = point.run();
            let mut queue = queue.lock().unwrap();
            let figures = &mut *queue.1;
            match checked {
                Ok(is_blocked) => figures.blocked += u64::from(is_blocked),
                Err(wrong) => figures.wrong.push(wrong),
            }
            let covered = figures.covered.entry(point.start.scenario.name).or_default();
            let outcome = match is_hit {
                Some(true) => &mut covered.0,
                Some(false) => &mut figures.whole,
                None => &mut figures.missed,
            };
            *outcome += 1;
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
            for thread in threads {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        });
    }
}

impl Figures {
    fn expect_good(&self) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(self.missed * 50 <= self.rounds, "{} rounds did nothing", self.missed);
    }

    /// How many points are covered, of how many.
    fn points(&self) -> (u64, u64) {
        let all = self.covered.values();
        all.fold((0, 0), |(covered, of), each| (covered + each.0, of + each.1))
    }

    fn by_scenario(&self) -> BTreeMap<&'static str, String> {
        let all = self.covered.iter();
        all.map(|(name, (covered, of))| (*name, format!("{covered} of {of}"))).collect()
    }
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn any_system_call_may_fail_or_be_the_last_one() {
    let proof = Proof::begin("system calls");
    let mut figures = Figures::default();
    let mut known = BTreeSet::new();
    let mut starts: Vec<Arc<Start>> =
        SCENARIOS.iter().map(|each| Arc::new(Start::of(*each))).collect();
    // What some of them leave behind, and what some of those that find that leave behind.
    let changing =
        |start: &Start| start.calls().into_iter().filter(Call::changes).collect::<Vec<_>>();
    let mut recoveries = Vec::new();
    for start in &starts {
        recoveries.extend(left_behind(start, &some(&changing(start), 3), &mut known));
    }
    for start in some(&recoveries, 6) {
        recoveries.extend(left_behind(&start, &some(&changing(&start), 2), &mut known));
    }
    let mut fresh = [starts.clone(), recoveries].concat();
    starts = fresh.clone();
    while !fresh.is_empty() && proof.goes_on(figures.rounds, ROUNDS) {
        figures.starts += fresh.len() as u64;
        let points: Vec<Point> = fresh.iter().flat_map(Point::all).collect();
        figures.run(|rounds| proof.goes_on(rounds, ROUNDS), &points);
        fresh.clear();
        // Where there is time, all that can be left behind, until nothing is new.
        for start in &starts {
            if proof.goes_on(figures.rounds, ROUNDS) {
                fresh.extend(left_behind(start, &changing(start), &mut known));
            }
        }
        starts.clone_from(&fresh);
    }
    figures.expect_good();
    let (covered, of) = figures.points();
    proof.end(json!({
        "rounds": figures.rounds, "points": of, "points covered": covered,
        "states found": figures.starts, "by scenario": figures.by_scenario(),
        "had to wait for the dead": figures.blocked, "wrong": figures.wrong.len(),
    }));
}

/// All of them, of processes that find all well and of some that find what killed ones have left.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn any_read_or_write_may_be_short() {
    let proof = Proof::begin("short reads and writes");
    let mut figures = Figures::default();
    let mut starts: Vec<Arc<Start>> =
        SCENARIOS.iter().map(|each| Arc::new(Start::of(*each))).collect();
    let mut known = BTreeSet::new();
    for start in starts.clone() {
        let calls: Vec<Call> = start.calls().into_iter().filter(Call::changes).collect();
        starts.extend(left_behind(&start, &some(&calls, 3), &mut known));
    }
    figures.starts = starts.len() as u64;
    let points = starts.iter().flat_map(|start| {
        let calls = start.calls().into_iter().filter(short::may_be);
        calls.map(|call| Point { start: start.clone(), call, fault: Fault::Half })
    });
    figures.run(|_| true, &points.collect::<Vec<_>>());
    figures.expect_good();
    let (covered, of) = figures.points();
    assert_eq!(covered + figures.whole + figures.missed, of);
    for scenario in SCENARIOS.iter().chain([&RECOVERY, &DAEMON_RECOVERY]) {
        let (covered, _) = figures.covered[scenario.name];
        assert!(covered > 0, "nothing was short in {}", scenario.name);
    }
    proof.end(json!({
        "calls": of, "short": covered, "of one byte or none": figures.whole,
        "not come to": figures.missed,
        "states found": figures.starts, "by scenario": figures.by_scenario(),
        "wrong": figures.wrong.len(),
    }));
}
