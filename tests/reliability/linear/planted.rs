//! Stores that are wrong are found.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread;

use serde_json::json;
use tssd_tests::dice::Dice;
use tssd_tests::proof::Proof;

use super::checker::{Violation, check};
use super::history::{Answer, Operation, Recorder, read};
use super::toy::{BUGS, Bug, Toy};
use super::workload::call;

const THREADS: u32 = 4;
const OPERATIONS: u32 = 200;

/// What several threads ask of one toy.
fn history(keep: usize, bug: Option<Bug>, seed: u64) -> Vec<Operation> {
    let toy = Mutex::new(Toy::new(keep, bug));
    let client = |thread: u32| {
        let mut recorder = Recorder(Vec::new());
        let mut dice = Dice::new(seed << 8 | u64::from(thread));
        let mut seen = 0;
        for count in 0..OPERATIONS {
            let patience = toy.lock().unwrap().patience();
            let call = call(&mut dice, keep, seen, thread << 16 | count, patience);
            let is_odd = thread % 2 == 1;
            let answer = recorder.record(0, call, || toy.lock().unwrap().answer(call, is_odd));
            if let Some(Answer::Put(number) | Answer::Found(number, _)) = answer {
                seen = seen.max(number);
            }
            // Whoever is fast lets the others ask in between.
            thread::yield_now();
        }
        read(std::str::from_utf8(&recorder.0).unwrap())
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..THREADS).map(|each| scope.spawn(move || client(each))).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    })
}

fn checked(bug: Option<Bug>, seed: u64) -> Result<(), Violation> {
    [1, 3].into_iter().try_for_each(|keep| check(keep, &history(keep, bug, seed)))
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn planted_bugs_are_found_every_time() {
    let proof = Proof::begin("histories: planted bugs");
    let mut rounds = 0;
    let mut rules = BTreeSet::new();
    while proof.goes_on(rounds, 5) {
        assert!(checked(None, rounds).is_ok(), "round {rounds}");
        for bug in BUGS {
            let Err(violation) = checked(Some(bug), rounds) else {
                panic!("round {rounds}: {bug:?} is not found");
            };
            rules.insert(violation.rule);
        }
        rounds += 1;
    }
    let bugs = BUGS.len();
    proof.end(json!({ "planted": bugs, "found": bugs, "rounds": rounds, "rules": rules.len() }));
}
