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
//! the daemon, or never. Where ledgers are shared, in etcd, a directory or a bucket, each key has one history.
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
//! delays and cuts, as `shared` does where there is no daemon or several of them. `checker` then looks for an
//! order; `random` and `planted` show that it finds one where there is one, that it agrees with a checker that tries
//! everything (`oracle`), and that stores with bugs (`toy`) are found. `cuts` cuts a session after each of its bytes,
//! at the address and at the socket.

mod checker;
mod client;
mod clients;
mod contents;
mod cuts;
mod history;
mod home;
mod nemesis;
mod object;
mod oracle;
mod pins;
mod planted;
mod processes;
mod proxy;
mod random;
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
mod shared;
mod toy;
mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};
use tssd_tests::dice::Dice;
use tssd_tests::growth::Growth;
use tssd_tests::proof::Proof;

use self::checker::{Violation, check};
use self::history::{Answer, Call, Operation};
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
use self::home::Home;
use self::nemesis::{Faults, Stage};
use self::object::{KEYS, objects};
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
use self::shared::Commons;

/// How long clients are tormented before their history is checked.
const ROUND: Duration = Duration::from_secs(10);

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn what_processes_see_of_a_key_has_an_order() {
    let proof = Proof::begin("histories");
    let (mut dice, mut checked, mut growth) =
        (Dice::new(0x5EED), Checked::default(), Growth::default());
    while proof.goes_on(checked.operations, 100_000) || checked.lacks_puts() {
        let mut stage = Stage::new();
        // Every second daemon lives long enough to be seen growing.
        let faults = stage.torment(&mut dice, ROUND, checked.rounds % 2 == 0, &mut growth);
        let (operations, ends) = stage.end();
        checked.add(operations, &ends, faults);
    }
    let mut figures = checked.figures();
    figures["daemon"] = growth.end(50);
    proof.end(figures);
}

#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn prove_shared(name: &'static str, home: Home, wanted: u64) {
    let proof = Proof::begin(name);
    let (mut dice, mut checked) = (Dice::new(0x5EED), Checked::default());
    while proof.goes_on(checked.operations, wanted) || checked.lacks_puts() {
        let mut commons = Commons::new(home);
        let faults = commons.torment(&mut dice, ROUND);
        let (operations, ends) = commons.end();
        checked.add(operations, &ends, faults);
    }
    proof.end(checked.figures());
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn what_daemons_over_etcd_tell_of_a_key_has_an_order() {
    prove_shared("histories: etcd", Home::Etcd, 5000);
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn what_processes_see_in_a_directory_has_an_order() {
    prove_shared("histories: directory", Home::Directory, 10_000);
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn what_processes_see_in_a_bucket_has_an_order() {
    prove_shared("histories: bucket", Home::Bucket, 1000);
}

/// Histories that have an order.
#[derive(Default)]
struct Checked {
    operations: u64,
    histories: u64,
    rounds: u64,
    /// The keys of which versions have become visible.
    put: BTreeSet<u8>,
    calls: BTreeMap<&'static str, u64>,
    faults: Vec<Faults>,
}

impl Checked {
    /// Checks those of a round.
    fn add(&mut self, operations: Vec<Operation>, ends: &[u64], faults: Faults) {
        self.operations += operations.len() as u64;
        for operation in &operations {
            *self.calls.entry(name(operation)).or_default() += 1;
        }
        let puts = operations.iter().filter(|it| matches!(it.answer, Some(Answer::Put(_))));
        self.put.extend(puts.map(|it| it.key));
        for (keep, object) in objects(operations, ends) {
            if let Err(violation) = check(keep, &object) {
                let Violation { rule, operation } = &violation;
                let (around, round) = (near(operation, &object), self.rounds);
                panic!("round {round}, lives end at {ends:?}: {rule}: {operation:?}\n{around}");
            }
            self.histories += 1;
        }
        self.rounds += 1;
        self.faults.push(faults);
    }

    /// Whether nobody was quick enough yet to put some key.
    fn lacks_puts(&self) -> bool {
        self.put.len() < usize::from(KEYS) && self.rounds < 100
    }

    fn figures(&self) -> Value {
        assert!(self.put.iter().copied().eq(0..KEYS), "of {KEYS} keys were put {:?}", self.put);
        let sum = |fault: fn(&Faults) -> u64| self.faults.iter().map(fault).sum::<u64>();
        json!({
            "operations": self.operations,
            "violations": 0,
            "calls": self.calls,
            "histories": self.histories,
            "rounds": self.rounds,
            "clients killed": sum(|faults| faults.clients_killed),
            "daemons killed": sum(|faults| faults.daemons_killed),
            "servers killed": sum(|faults| faults.servers_killed),
            "clients stopped": sum(|faults| faults.clients_stopped),
            "daemons stopped": sum(|faults| faults.daemons_stopped),
            "connections cut": sum(|faults| faults.connections_cut),
            "delays": sum(|faults| faults.delays),
        })
    }
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
