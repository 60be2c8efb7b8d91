//! Faults of system calls.
//!
//! Every call of a store fails, transfers less than requested, or is the last one of its process.

mod process;
mod scenario;
mod short_io;
mod strace;
mod test_process;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Builder;
use tssd_tests::campaign::Campaign;
use tssd_tests::command::memory_tempdir;

use self::process::ProcessOutcome;
use self::scenario::{DAEMON_RECOVERY, RECOVERY, SCENARIOS, Scenario, State, Step};
use self::strace::{Call, Fault};
use crate::store_dir;
use crate::syscalls::test_process::{StepRunner, store_root};

/// Number of rounds in CI.
const ROUNDS: u64 = 1000;

/// Number of the version that is put after each round.
const NEXT_VERSION: u64 = 50;

/// State in which a process begins: the directory that it finds, and what may be visible in it.
struct StartState {
    scenario: Scenario,
    /// Contains the initial state `before`, and the working directories of the processes.
    folder: TempDir,
    states: BTreeSet<State>,
    /// Whether a daemon has run here. Only the next daemon completes what it has left incomplete.
    had_daemon: bool,
    /// Number of processes killed before.
    kills: u32,
}

/// One round: a process, and the fault that is injected into one of its calls.
#[derive(Clone)]
struct InjectionPoint {
    start: Arc<StartState>,
    call: Call,
    fault: Fault,
}

impl StartState {
    /// Prepares the state of a process after `scenario.before`, without faults.
    fn prepare(scenario: Scenario) -> Self {
        let folder = memory_tempdir();
        let place = folder.path().join("before");
        std::fs::create_dir_all(store_root(&place)).unwrap();
        block_on(async {
            let mut actor = StepRunner { work_dir: place, is_daemon: false, store: None };
            for step in scenario.setup {
                actor.run_step(*step).await.unwrap();
            }
        });
        let states = [State::default().apply(scenario.setup)].into();
        Self { scenario, folder, states, had_daemon: scenario.is_daemon, kills: 0 }
    }

    /// Copies the initial state to a new working directory.
    fn copy_to_work_dir(&self) -> WorkDir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let place = self.folder.path().join(number.to_string());
        store_dir::copy(&self.folder.path().join("before"), &place);
        std::fs::create_dir_all(place.join("run")).unwrap();
        WorkDir(place)
    }

    fn calls(&self) -> Vec<Call> {
        let calls = strace::record_calls(self.scenario, &self.copy_to_work_dir().0);
        check_sync_order(self.scenario, &calls);
        calls
    }

    /// Returns the states that may be visible after this number of acknowledged steps.
    ///
    /// One more step may have taken effect.
    fn allowed_states(&self, acknowledged: usize) -> BTreeSet<State> {
        let steps = self.scenario.steps;
        let ends = [acknowledged, steps.len().min(acknowledged + 1)];
        let after = |state: &State| ends.map(|end| state.apply(&steps[..end]));
        self.states.iter().flat_map(after).collect()
    }
}

/// Checks that a file is synced before it gets its name, and the directory of the name after.
///
/// Simulated disks check that the store requests this. This check covers the system calls.
fn check_sync_order(scenario: Scenario, calls: &[Call]) {
    const ORDERED: [&str; 6] = ["pwrite64", "fsync", "link", "linkat", "mkdir", "mkdirat"];
    let names: Vec<&str> =
        calls.iter().map(|call| call.name).filter(|name| ORDERED.contains(name)).collect();
    for (at, name) in names.iter().enumerate() {
        let (before, after) = (names[..at].last(), names.get(at + 1));
        let is_durable = match *name {
            "link" | "linkat" => [before, after] == [Some(&"fsync"); 2],
            "mkdir" | "mkdirat" => after == Some(&"fsync"),
            _ => true,
        };
        assert!(is_durable, "{}: {name} is call {at} of {names:?}", scenario.name);
    }
}

/// Working directory of a process. Removed on drop.
struct WorkDir(PathBuf);

impl Drop for WorkDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("strace"));
    }
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

impl InjectionPoint {
    fn all(start: &Arc<StartState>) -> Vec<Self> {
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

    /// Runs the process and checks the result.
    ///
    /// Returns whether the fault was injected, or `None` if the process did not reach the call. And
    /// the result of the check.
    fn run(&self) -> (Option<bool>, Result<bool, String>) {
        let place = self.start.copy_to_work_dir();
        let outcome = self.run_process(&place);
        let checked = self.check_recovery(&place.0, &outcome).map_err(|failure| {
            let (fault, call, scenario) = (self.fault, &self.call, self.start.scenario.name);
            format!("{failure}: {fault} at {call} in {scenario}: {outcome:?}")
        });
        (outcome.fault_injected, checked)
    }

    fn run_process(&self, place: &WorkDir) -> ProcessOutcome {
        let scenario = self.start.scenario;
        match self.fault {
            Fault::HalfBytes => short_io::run_with_short_call(scenario, &place.0, &self.call),
            fault => strace::inject(scenario, &place.0, &self.call, fault),
        }
    }

    /// Checks the store after the process has ended. Returns whether the next put was blocked.
    fn check_recovery(&self, place: &Path, outcome: &ProcessOutcome) -> Result<bool, String> {
        let (acknowledged, mut is_blocked) = self.check_output(outcome)?;
        let mut allowed = self.start.allowed_states(acknowledged);
        block_on(async {
            let mut actor =
                StepRunner { work_dir: place.to_owned(), is_daemon: false, store: None };
            let seen =
                numbers(&actor.read_all().await.map_err(|error| format!("read later: {error}"))?);
            if !allowed.iter().any(|state| state.versions == seen) {
                return Err(format!("{seen:?} is visible, not one of {allowed:?}"));
            }
            let next = Step::Put(NEXT_VERSION);
            match actor.run_step(next).await {
                Err(error) if self.is_blocked(&format!("{} {error}", error.kind().name())) => {
                    is_blocked = true;
                    let done = actor.run_step(Step::Delete(None)).await;
                    done.map_err(|error| format!("the next delete: {error}"))?;
                    let none = |state: &State| state.apply(&[Step::Delete(None)]);
                    allowed = allowed.iter().map(none).collect();
                    actor.run_step(next).await.map_err(|error| format!("the next put: {error}"))?;
                }
                done => done.map_err(|error| format!("the next put: {error}"))?,
            }
            let seen = actor.read_all().await.map_err(|error| format!("what was put: {error}"))?;
            if !allowed.iter().any(|state| state.apply(&[next]).versions == numbers(&seen)) {
                return Err(format!(
                    "{seen:?} is visible after the next put, and before {allowed:?}"
                ));
            }
            // Files that could not be removed from the directory of a version are removed with it.
            let last = Step::Retain(1);
            actor.run_step(last).await.map_err(|error| format!("the next retention: {error}"))?;
            let seen = actor.read_all().await.map_err(|error| format!("what is kept: {error}"))?;
            if self.start.had_daemon {
                actor.run_sweep().await.map_err(|error| format!("the next daemon: {error}"))?;
            }
            let problems = store_dir::foreign_files(&store_root(place), &[("model", seen)]);
            if problems.is_empty() {
                Ok(is_blocked)
            } else {
                Err(format!("left behind: {problems:?}"))
            }
        })
    }

    /// Checks the output of the process.
    ///
    /// Returns the number of acknowledged steps, and whether a step was blocked by killed writers.
    fn check_output(&self, outcome: &ProcessOutcome) -> Result<(usize, bool), String> {
        let (mut acknowledged, mut is_blocked) = (0, false);
        for line in outcome.stdout.lines() {
            match line.split_once(' ') {
                Some(("ack", _)) => acknowledged += 1,
                Some(("err" | "stuck", text)) if self.is_blocked(text) => is_blocked = true,
                Some(("err", text)) if !self.allows_error(text) => return Err(line.to_owned()),
                Some(("seen", text)) => {
                    let numbers = text.split(',').filter(|number| !number.is_empty());
                    let seen: Vec<u64> = numbers.map(|number| number.parse().unwrap()).collect();
                    let allowed = self.start.allowed_states(acknowledged);
                    if !allowed.iter().any(|state| state.versions == seen) {
                        return Err(format!("{seen:?} was visible, not one of {allowed:?}"));
                    }
                }
                Some(("stuck", _)) => return Err(line.to_owned()),
                _ => {}
            }
        }
        let is_killed = self.fault == Fault::Kill && outcome.is_killed();
        let is_whole = acknowledged == self.start.scenario.steps.len();
        let is_done = outcome.status.success() && (is_whole || is_blocked);
        if !(is_killed || is_done) || outcome.stderr.contains("panicked") {
            return Err("it ended otherwise".to_owned());
        }
        Ok((acknowledged, is_blocked))
    }

    /// Returns whether an error is due to two versions that killed writers have left open.
    fn is_blocked(&self, text: &str) -> bool {
        self.start.kills > 0 && text.starts_with("busy ") && text.contains("are still open")
    }

    /// Returns whether the fault may lead to an error of this kind.
    fn allows_error(&self, text: &str) -> bool {
        let kind = text.split(' ').next().unwrap_or_default();
        match self.fault {
            Fault::Kill | Fault::HalfBytes => false,
            // Opening a store reports a directory that cannot be read. A daemon reports a lost
            // client.
            Fault::Error(_) => matches!(kind, "io" | "unreachable"),
            // An empty file is corrupt.
            Fault::NoBytes => matches!(kind, "io" | "unreachable" | "corrupt"),
        }
    }
}

fn numbers(versions: &[(u64, u64)]) -> Vec<u64> {
    versions.iter().map(|(number, _)| *number).collect()
}

/// Kills the process of a state at each of these calls. Returns the states that are new.
fn states_after_kills(
    start: &Arc<StartState>,
    calls: &[Call],
    fingerprints: &mut BTreeSet<String>,
) -> Vec<Arc<StartState>> {
    let mut starts = Vec::new();
    for call in calls {
        let point = InjectionPoint { start: start.clone(), call: call.clone(), fault: Fault::Kill };
        let place = start.copy_to_work_dir();
        let outcome = point.run_process(&place);
        let acknowledged = outcome.stdout.lines().filter(|line| line.starts_with("ack ")).count();
        if !outcome.is_killed()
            || !fingerprints.insert(store_dir::fingerprint(&store_root(&place.0)))
        {
            continue;
        }
        for scenario in [RECOVERY, DAEMON_RECOVERY] {
            let folder = memory_tempdir();
            store_dir::copy(&place.0, &folder.path().join("before"));
            let states = start.allowed_states(acknowledged);
            let had_daemon = start.had_daemon || scenario.is_daemon;
            let kills = start.kills + 1;
            starts.push(Arc::new(StartState { scenario, folder, states, had_daemon, kills }));
        }
    }
    starts
}

/// Returns `count` of the elements, evenly spread.
fn sample<T: Clone>(elements: &[T], count: usize) -> Vec<T> {
    (0..count.min(elements.len()))
        .map(|index| elements[index * elements.len() / count.min(elements.len())].clone())
        .collect()
}

/// Reorders points, so that any prefix covers them evenly.
///
/// Half of a prefix are points of processes that begin without killed predecessors.
fn interleave(points: &[InjectionPoint]) -> Vec<InjectionPoint> {
    let mut placed: Vec<(u64, &InjectionPoint)> = Vec::new();
    let (unharmed, others): (Vec<&InjectionPoint>, Vec<&InjectionPoint>) =
        points.iter().partition(|point| point.start.kills == 0);
    for group in [unharmed, others] {
        let mut group: Vec<(u64, &InjectionPoint)> = (0..).zip(group).collect();
        // The fractional parts of multiples of the golden ratio are spread most evenly.
        group.sort_by_key(|(place, _)| place.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        placed.extend((0..).zip(group).map(|(place, (_, point))| (place, point)));
    }
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, point)| point.clone()).collect()
}

/// Counts of a campaign.
#[derive(Default)]
struct Counts {
    rounds: u64,
    /// Number of points covered and of all points, by scenario.
    covered: BTreeMap<&'static str, (u64, u64)>,
    starts: u64,
    /// Rounds in which the process did not reach the call.
    ///
    /// The number of calls depends on the scheduling of threads.
    not_reached: u64,
    /// Rounds in which the call was too small for half of it.
    too_small: u64,
    /// Rounds after which a put was blocked by killed writers.
    blocked: u64,
    failures: Vec<String>,
}

impl Counts {
    /// Runs the points on all cores, while `should_continue` returns true.
    fn run(&mut self, should_continue: impl Fn(u64) -> bool + Sync, points: &[InjectionPoint]) {
        for point in points {
            self.covered.entry(point.start.scenario.name).or_default().1 += 1;
        }
        let queue = Mutex::new((interleave(points).into_iter(), self));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let work = || loop {
            let point = {
                let mut queue = queue.lock().unwrap();
                if !should_continue(queue.1.rounds) {
                    break;
                }
                let Some(point) = queue.0.next() else { break };
                queue.1.rounds += 1;
                point
            };
            let (is_hit, checked) = point.run();
            let mut queue = queue.lock().unwrap();
            let counts = &mut *queue.1;
            match checked {
                Ok(is_blocked) => counts.blocked += u64::from(is_blocked),
                Err(failure) => counts.failures.push(failure),
            }
            let covered = counts.covered.entry(point.start.scenario.name).or_default();
            let outcome = match is_hit {
                Some(true) => &mut covered.0,
                Some(false) => &mut counts.too_small,
                None => &mut counts.not_reached,
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

impl Counts {
    fn assert_no_failure(&self) {
        assert!(self.failures.is_empty(), "{}", self.failures.join("\n"));
        assert!(
            self.not_reached * 50 <= self.rounds,
            "{} rounds did not reach their call",
            self.not_reached
        );
    }

    /// Returns the number of points covered, and of all points.
    fn points(&self) -> (u64, u64) {
        let all = self.covered.values();
        all.fold((0, 0), |(covered, total), each| (covered + each.0, total + each.1))
    }

    fn by_scenario(&self) -> BTreeMap<&'static str, String> {
        let all = self.covered.iter();
        all.map(|(name, (covered, total))| (*name, format!("{covered} of {total}"))).collect()
    }
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn store_survives_failure_or_kill_at_any_system_call() {
    let campaign = Campaign::start("system calls");
    let mut counts = Counts::default();
    let mut fingerprints = BTreeSet::new();
    let mut starts: Vec<Arc<StartState>> =
        SCENARIOS.iter().map(|each| Arc::new(StartState::prepare(*each))).collect();
    // States that some killed processes leave, and states that processes killed during recovery
    // leave.
    let modifying_calls = |start: &StartState| {
        start.calls().into_iter().filter(Call::modifies_disk).collect::<Vec<_>>()
    };
    let mut recoveries = Vec::new();
    for start in &starts {
        recoveries.extend(states_after_kills(
            start,
            &sample(&modifying_calls(start), 3),
            &mut fingerprints,
        ));
    }
    for start in sample(&recoveries, 6) {
        recoveries.extend(states_after_kills(
            &start,
            &sample(&modifying_calls(&start), 2),
            &mut fingerprints,
        ));
    }
    let mut new_states = [starts.clone(), recoveries].concat();
    starts = new_states.clone();
    while !new_states.is_empty() && campaign.should_continue(counts.rounds, ROUNDS) {
        counts.starts += new_states.len() as u64;
        let points: Vec<InjectionPoint> = new_states.iter().flat_map(InjectionPoint::all).collect();
        counts.run(|rounds| campaign.should_continue(rounds, ROUNDS), &points);
        new_states.clear();
        // If time remains, try all states until no new one is found.
        for start in &starts {
            if campaign.should_continue(counts.rounds, ROUNDS) {
                new_states.extend(states_after_kills(
                    start,
                    &modifying_calls(start),
                    &mut fingerprints,
                ));
            }
        }
        starts.clone_from(&new_states);
    }
    counts.assert_no_failure();
    let (covered, total) = counts.points();
    campaign.finish(json!({
        "rounds": counts.rounds, "points": total, "points covered": covered,
        "states found": counts.starts, "by scenario": counts.by_scenario(),
        "had to wait for the dead": counts.blocked, "wrong": counts.failures.len(),
    }));
}

/// All points of processes without killed predecessors, and of some with them.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn store_survives_short_reads_and_writes() {
    let campaign = Campaign::start("short reads and writes");
    let mut counts = Counts::default();
    let mut starts: Vec<Arc<StartState>> =
        SCENARIOS.iter().map(|each| Arc::new(StartState::prepare(*each))).collect();
    let mut fingerprints = BTreeSet::new();
    for start in starts.clone() {
        let calls: Vec<Call> = start.calls().into_iter().filter(Call::modifies_disk).collect();
        starts.extend(states_after_kills(&start, &sample(&calls, 3), &mut fingerprints));
    }
    counts.starts = starts.len() as u64;
    let points = starts.iter().flat_map(|start| {
        let calls = start.calls().into_iter().filter(short_io::can_be_short);
        calls.map(|call| InjectionPoint { start: start.clone(), call, fault: Fault::HalfBytes })
    });
    counts.run(|_| true, &points.collect::<Vec<_>>());
    counts.assert_no_failure();
    let (covered, total) = counts.points();
    assert_eq!(covered + counts.too_small + counts.not_reached, total);
    for scenario in SCENARIOS.iter().chain([&RECOVERY, &DAEMON_RECOVERY]) {
        let (covered, _) = counts.covered[scenario.name];
        assert!(covered > 0, "no call was short in {}", scenario.name);
    }
    campaign.finish(json!({
        "calls": total, "short": covered, "of one byte or none": counts.too_small,
        "not come to": counts.not_reached,
        "states found": counts.starts, "by scenario": counts.by_scenario(),
        "wrong": counts.failures.len(),
    }));
}
