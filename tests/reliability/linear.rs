//! Linearizability: what processes see of a key has an order.
//!
//! Of one key, and of clients anywhere, all that is asked and answered is as if each call had been done at
//! one moment between its asking and its answer, one after the other, by a store that does this:
//!
//! - A **put** makes the state dict a version above all that were ever visible; then it is the newest. It
//!   displaces the oldest version if there are more than are kept. A put that is refused or overtaken is never
//!   seen.
//! - A **get** or **head** of the newest finds the highest number that is visible, and a get of a number finds
//!   that one or nothing. What is found is all of one put, under the one number that the put was told.
//! - A **wait** for a number finds the newest, when that number or a higher one is visible; it finds nothing
//!   when its time is over, and not before.
//! - A **delete** of a number takes it away, and says whether it was there. The number does not come back.
//! - A **part** of a version that several processes put together is there; the version is visible with the last one.
//!   Whoever is told to wait puts before that, and whoever is told that it is visible after it.
//! - A **pin** of a number holds it under a label if it is there: it is not displaced until the label is taken away.
//! - A put that **rewinds** makes a version of a lower number in a new epoch, which is above all versions of the
//!   epochs before. (Here one version of such a key is kept; it displaces all others.)
//!
//! What is put with `durability="disk"` has one such history, whoever is killed. What is put in memory has one
//! for each life of its daemon: it ends with it, and its numbers may come again. When a call is not answered,
//! because its client or the daemon was killed or the connection cut, it is done at one moment in that life of
//! the daemon, or never.
//!
//! Not part of this: calls of several keys, which have no common order; jobs that fence others; what a rewind
//! leaves of several versions that are kept; whether a part that waits is lost with its daemon; the delete of a
//! number that is still open, which may drop that put or come before it. A key of which several versions are kept
//! is not deleted from here: then the order of the changes would not be known, and `checker` needs it.
//!
//! # How it is proven
//!
//! Clients (`client`) are processes with several threads, at the socket and, through a `proxy`, at the TCP
//! address of `tssd serve`. Each thread writes down (`history`) what it asks and when. A `nemesis` kills, stops,
//! delays and cuts. `checker` then looks for an order; `random` and `planted` show that it finds one where
//! there is one, that it agrees with a checker that tries everything (`oracle`), and that stores with bugs
//! (`toy`) are found. `cuts` cuts a session after each of its bytes, at the address and at the socket.

mod checker;
mod client;
mod contents;
mod cuts;
mod history;
mod nemesis;
mod object;
mod oracle;
mod pins;
mod planted;
mod processes;
mod proxy;
mod random;
mod toy;
mod workload;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use tssd_tests::dice::Dice;
use tssd_tests::growth::Growth;
use tssd_tests::proof::Proof;

use self::checker::{Violation, check};
use self::history::{Answer, Call, Operation};
use self::nemesis::{Faults, Stage};
use self::object::{KEYS, objects};

/// How long clients are tormented before their history is checked.
const ROUND: Duration = Duration::from_secs(10);

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn what_processes_see_of_a_key_has_an_order() {
    let proof = Proof::begin("histories");
    let mut dice = Dice::new(0x5EED);
    let (mut checked, mut rounds, mut histories) = (0, 0, 0);
    let mut calls: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut all, mut growth) = (Vec::<Faults>::new(), Growth::default());
    while proof.goes_on(checked, 100_000) {
        let mut stage = Stage::new();
        // Every second daemon lives long enough to be seen growing.
        all.push(stage.torment(&mut dice, ROUND, rounds % 2 == 0, &mut growth));
        let (operations, ends) = stage.end();
        checked += operations.len() as u64;
        for operation in &operations {
            *calls.entry(name(operation)).or_default() += 1;
        }
        for key in 0..KEYS {
            let is_put =
                |it: &&Operation| it.key == key && matches!(it.answer, Some(Answer::Put(_)));
            let puts = operations.iter().filter(is_put).count();
            assert!(puts > 0, "nobody has put key {key}");
        }
        for (keep, object) in objects(operations, &ends) {
            if let Err(violation) = check(keep, &object) {
                let Violation { rule, operation } = &violation;
                let around = near(operation, &object);
                panic!("round {rounds}, lives end at {ends:?}: {rule}: {operation:?}\n{around}");
            }
            histories += 1;
        }
        rounds += 1;
    }
    let sum = |fault: fn(&Faults) -> u64| all.iter().map(fault).sum::<u64>();
    proof.end(json!({
        "operations": checked,
        "violations": 0,
        "calls": calls,
        "histories": histories,
        "rounds": rounds,
        "clients killed": sum(|faults| faults.clients_killed),
        "daemons killed": sum(|faults| faults.daemons_killed),
        "clients stopped": sum(|faults| faults.clients_stopped),
        "daemons stopped": sum(|faults| faults.daemons_stopped),
        "connections cut": sum(|faults| faults.connections_cut),
        "delays": sum(|faults| faults.delays),
        "daemon": growth.end(50),
    }));
}

/// What an operation is counted as.
fn name(operation: &Operation) -> &'static str {
    match (operation.call, operation.answer) {
        (Call::Put(_), None) => "puts of unknown outcome",
        (Call::Put(_), Some(Answer::Failed)) => "puts refused",
        (Call::Put(_), _) => "puts",
        (Call::Newest, _) => "reads of the newest",
        (Call::Numbered(_), _) => "reads of a number",
        (Call::Wait(..), _) => "waits",
        (Call::Delete(_), None) => "deletes of unknown outcome",
        (Call::Delete(_), _) => "deletes",
        (Call::Part { .. }, None) => "parts of unknown outcome",
        (Call::Part { .. }, Some(Answer::Failed)) => "parts refused",
        (Call::Part { .. }, _) => "parts",
        (Call::Pin(..), _) => "pins",
        (Call::Unpin(_), _) => "unpins",
    }
}

/// What happened around an operation, for whoever looks for the cause of a violation.
fn near(operation: &Operation, object: &[Operation]) -> String {
    let slack = 20_000_000;
    let is_near = |it: &&Operation| {
        it.asked < operation.answered.saturating_add(slack)
            && it.answered.saturating_add(slack) > operation.asked
    };
    let mut around: Vec<&Operation> = object.iter().filter(is_near).collect();
    around.sort_unstable_by_key(|it| it.asked);
    around.iter().map(|it| serde_json::to_string(it).unwrap() + "\n").collect()
}
