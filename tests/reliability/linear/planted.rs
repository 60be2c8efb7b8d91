//! Stores that are wrong are found.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread;

use serde_json::json;
use tssd_tests::dice::Dice;
use tssd_tests::proof::Proof;

use super::checker::{Violation, check};
use super::history::{Answer, Operation, Recorder, read};
use super::object::Custom;
use super::toy::{BUGS, Bug, Toy};
use super::workload::Client;

const THREADS: u32 = 4;
const OPERATIONS: u32 = 200;

/// So many of them are made at most, for one to show a bug.
const HISTORIES: u64 = 8;

/// What several threads ask of one toy.
fn history(custom: Custom, keep: usize, bug: Option<Bug>, seed: u64) -> Vec<Operation> {
    let toy = Mutex::new(Toy::new(keep, bug));
    let client = |thread: u32| {
        let mut recorder = Recorder(Vec::new());
        let mut dice = Dice::new(seed << 8 | u64::from(thread));
        let (mut seen, mut pinned) = (0, None);
        for count in 0..OPERATIONS {
            let patience = toy.lock().unwrap().patience();
            let put = (thread + 1) << 16 | count;
            let client = Client { custom, keep, seen, put, patience, writer: thread, pinned };
            let call = client.call(&mut dice);
            let is_odd = thread % 2 == 1;
            let answer = recorder.record(0, call, || toy.lock().unwrap().answer(call, is_odd));
            if let Some(Answer::Put(number) | Answer::Found(number, _)) = answer {
                seen = seen.max(number);
            }
            pinned = client.pinned_after(call, answer);
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
    let all = [Custom::Alone, Custom::Together(2), Custom::Together(3), Custom::Pinned];
    let mut kinds = all.into_iter().flat_map(|custom| [(custom, 1), (custom, 3)]);
    kinds.try_for_each(|(custom, keep)| check(keep, &history(custom, keep, bug, seed)))
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
            // Which calls overlap is for the system to say: some histories have none that shows it.
            let mut seeds = (0..HISTORIES).map(|more| rounds * HISTORIES + more);
            let Some(violation) = seeds.find_map(|seed| checked(Some(bug), seed).err()) else {
                panic!("round {rounds}: {bug:?} is not found");
            };
            rules.insert(violation.rule);
        }
        rounds += 1;
    }
    let bugs = BUGS.len();
    proof.end(json!({ "planted": bugs, "found": bugs, "rounds": rounds, "rules": rules.len() }));
}
