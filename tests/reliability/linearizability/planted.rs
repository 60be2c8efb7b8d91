//! The checker detects the bugs of faulty stores.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread;

use serde_json::json;
use tssd_tests::campaign::Campaign;
use tssd_tests::rng::SeededRng;

use super::checker::{Violation, check};
use super::history::{Operation, Recorder, Response, parse_log};
use super::toy::{BUGS, Bug, ToyStore};
use super::workload::ClientState;
use crate::linearizability::keys::KeyUsage;

const THREADS: u32 = 4;
const OPERATIONS: u32 = 200;

/// Maximum number of histories that a bug may need to be detected.
const MAX_HISTORIES: u64 = 8;

/// Records the history of several threads that use one toy store.
fn record_history(custom: KeyUsage, keep: usize, bug: Option<Bug>, seed: u64) -> Vec<Operation> {
    let toy = Mutex::new(ToyStore::new(keep, bug));
    let client = |thread: u32| {
        let mut recorder = Recorder(Vec::new());
        let mut rng = SeededRng::new(seed << 8 | u64::from(thread));
        let (mut seen, mut pinned) = (0, None);
        for count in 0..OPERATIONS {
            let wait_timeout = toy.lock().unwrap().wait_timeout();
            let put = (thread + 1) << 16 | count;
            let client = ClientState {
                usage: custom,
                keep,
                observed: seen,
                put,
                wait_timeout,
                writer: thread,
                pinned,
            };
            let call = client.next_call(&mut rng);
            let is_odd = thread % 2 == 1;
            let answer = recorder.record(0, call, || toy.lock().unwrap().execute(call, is_odd));
            if let Some(Response::Put(number) | Response::Found(number, _)) = answer {
                seen = seen.max(number);
            }
            pinned = client.pinned_after(call, answer);
            // Otherwise a fast thread would finish before the others begin.
            thread::yield_now();
        }
        parse_log(std::str::from_utf8(&recorder.0).unwrap())
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..THREADS).map(|each| scope.spawn(move || client(each))).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    })
}

fn check_all_usages(bug: Option<Bug>, seed: u64) -> Result<(), Violation> {
    let usages =
        [KeyUsage::Plain, KeyUsage::MultiWriter(2), KeyUsage::MultiWriter(3), KeyUsage::Pinned];
    let mut kinds = usages.into_iter().flat_map(|custom| [(custom, 1), (custom, 3)]);
    kinds.try_for_each(|(custom, keep)| check(keep, &record_history(custom, keep, bug, seed)))
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn checker_detects_every_planted_bug() {
    let campaign = Campaign::start("histories: planted bugs");
    let mut rounds = 0;
    let mut rules = BTreeSet::new();
    while campaign.should_continue(rounds, 5) {
        assert!(check_all_usages(None, rounds).is_ok(), "round {rounds}");
        for bug in BUGS {
            // The scheduler decides which calls overlap, so a history may not show the bug.
            let mut seeds = (0..MAX_HISTORIES).map(|index| rounds * MAX_HISTORIES + index);
            let Some(violation) = seeds.find_map(|seed| check_all_usages(Some(bug), seed).err())
            else {
                panic!("round {rounds}: {bug:?} is not found");
            };
            rules.insert(violation.rule);
        }
        rounds += 1;
    }
    let bugs = BUGS.len();
    campaign
        .finish(json!({ "planted": bugs, "found": bugs, "rounds": rounds, "rules": rules.len() }));
}
