//! What `tssd_store::schedules` is run for: no order of events breaks a promise, and every planted bug is found.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde_json::json;
use tssd_store_schedules::schedules::SUBJECTS;
use tssd_tests::proof::Campaign;

/// Names for how many schedules are wanted, at least.
const SCHEDULES: &str = "TSSD_SCHEDULES";

/// As many belong to one seed.
const BATCH: u64 = 100;

/// A planted bug is found before so many.
const PATIENCE: u64 = 20_000;

fn wanted() -> u64 {
    std::env::var(SCHEDULES).map_or(5_000, |text| text.parse().expect("it is a number"))
}

#[test]
fn no_order_of_events_breaks_a_promise() {
    let proof = Campaign::start("schedules");
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let by_subject = Mutex::new(BTreeMap::<&str, u64>::new());
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while proof.should_continue(done.load(Ordering::Relaxed), wanted()) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    // Each gets its share of every hundred pairs of batches, one after the other.
                    let mut place = seed / 2 * 37 % 100;
                    let subject = SUBJECTS.iter().find(|subject| {
                        let is_it = place < subject.share;
                        place = place.saturating_sub(subject.share);
                        is_it
                    });
                    let subject = subject.unwrap();
                    let explored = catch_unwind(|| subject.explore(seed, BATCH));
                    assert!(explored.is_ok(), "{}: explore({seed}, {BATCH})", subject.name);
                    *by_subject.lock().unwrap().entry(subject.name).or_default() += BATCH;
                    done.fetch_add(BATCH, Ordering::Relaxed);
                }
            });
        }
    });
    let (schedules, by_subject) = (done.into_inner(), by_subject.into_inner().unwrap());
    proof.finish(json!({ "schedules": schedules, "violations": 0, "by subject": by_subject }));
}

#[test]
fn planted_bugs_are_found() {
    let proof = Campaign::start("schedules: planted bugs");
    let (mut planted, mut found_after) = (0, BTreeMap::new());
    for subject in &SUBJECTS {
        for bug in subject.bugs {
            planted += 1;
            // In turns, as above: some need a scheduler that changes its mind rarely.
            let mut seeds = 0..PATIENCE / BATCH;
            let found =
                seeds.find_map(|seed| Some(seed * BATCH + subject.find(*bug, seed, BATCH)?));
            let after = found.unwrap_or_else(|| panic!("{}: {bug:?} is not found", subject.name));
            found_after.insert(format!("{}: {bug:?}", subject.name), after);
        }
    }
    proof.finish(json!({ "planted": planted, "found": found_after.len(), "after": found_after }));
}
