//! Campaign over the scenarios of `tssd_store_schedules::schedules`.
//!
//! The invariants hold under every schedule that shuttle tries, and every planted bug is found.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde_json::json;
use tssd_store_schedules::schedules::SCENARIOS;
use tssd_tests::campaign::Campaign;

/// Environment variable: minimum number of schedules.
const SCHEDULES_VARIABLE: &str = "TSSD_SCHEDULES";

/// Schedules per seed.
const BATCH: u64 = 100;

/// Maximum number of schedules until a planted bug is found.
const MAX_SCHEDULES_PER_BUG: u64 = 20_000;

fn min_schedules() -> u64 {
    std::env::var(SCHEDULES_VARIABLE).map_or(5_000, |text| text.parse().expect("it is a number"))
}

#[test]
fn schedules_preserve_invariants() {
    let proof = Campaign::start("schedules");
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let by_scenario = Mutex::new(BTreeMap::<&str, u64>::new());
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while proof.should_continue(done.load(Ordering::Relaxed), min_schedules()) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    // Seeds 2n and 2n + 1 run the same scenario. Of 100 such pairs, each scenario gets its share. 37
                    // and 100 are coprime, so that the scenarios alternate.
                    let mut slot = seed / 2 * 37 % 100;
                    let scenario = SCENARIOS.iter().find(|scenario| {
                        let is_in_share = slot < scenario.share;
                        slot = slot.saturating_sub(scenario.share);
                        is_in_share
                    });
                    let scenario = scenario.unwrap();
                    let explored = catch_unwind(|| scenario.run_schedules(seed, BATCH));
                    assert!(explored.is_ok(), "{}: run_schedules({seed}, {BATCH})", scenario.name);
                    *by_scenario.lock().unwrap().entry(scenario.name).or_default() += BATCH;
                    done.fetch_add(BATCH, Ordering::Relaxed);
                }
            });
        }
    });
    let (schedules, by_scenario) = (done.into_inner(), by_scenario.into_inner().unwrap());
    proof.finish(json!({ "schedules": schedules, "violations": 0, "by scenario": by_scenario }));
}

#[test]
fn planted_bugs_are_found() {
    let proof = Campaign::start("schedules: planted bugs");
    let (mut planted, mut found_after) = (0, BTreeMap::new());
    for scenario in &SCENARIOS {
        for bug in scenario.bugs {
            planted += 1;
            // Odd seeds use the random scheduler, even seeds the PCT scheduler. Some bugs need the latter, which
            // switches between tasks rarely.
            let mut seeds = 0..MAX_SCHEDULES_PER_BUG / BATCH;
            let found =
                seeds.find_map(|seed| Some(seed * BATCH + scenario.find_bug(*bug, seed, BATCH)?));
            let after = found.unwrap_or_else(|| panic!("{}: {bug:?} is not found", scenario.name));
            found_after.insert(format!("{}: {bug:?}", scenario.name), after);
        }
    }
    proof.finish(json!({ "planted": planted, "found": found_after.len(), "after": found_after }));
}
