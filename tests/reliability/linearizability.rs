//! Linearizability of the history of each key.
//!
//! The calls of all clients to a key, and their responses, are as if a sequential store had
//! executed each call at one moment between its invocation and its response. That store does the
//! following:
//!
//! - A **put** makes the state dict a version above all that were ever visible. It is then the
//!   newest version, and displaces the oldest one if more versions exist than retention keeps. A
//!   put that is refused or overtaken is never observed.
//! - A **get** or **head** of the newest version finds the highest visible number. A get of a
//!   number finds that version or nothing. A get returns the contents of one put, under the number
//!   that the put has returned.
//! - A **wait** for a number finds the newest version once that number or a higher one is visible.
//!   It finds nothing when its timeout ends, and not before.
//! - A **delete** of a number removes the version, and returns whether it existed. The number is
//!   not used again.
//! - A **part** contributes to a version of several writers. The version is visible with its last
//!   part. A part whose response is that others are missing comes before that. A part whose
//!   response is that the version is visible comes after it.
//! - A **pin** of a number puts a label on the version, if it exists. The version is not displaced
//!   until the label is removed.
//! - A put that **rewinds** makes a version of a lower number in a new epoch. All its versions are
//!   above those of earlier epochs. (Here one version of such a key is kept, so it displaces all
//!   others.)
//!
//! Durable versions (`durability="disk"`) have one such history, across all kills. Versions in
//! memory have one history for each life of their daemon: the history ends with the daemon, and its
//! numbers may be used again. A call has no response if its client or the daemon is killed, or its
//! connection cut. It took effect at one moment in that life of the daemon, or never. Where daemons
//! or clients share ledgers in etcd, a directory or a bucket, each key has one history.
//!
//! The following is not checked:
//!
//! - Calls of several keys, which have no common order.
//! - Jobs that fence others.
//! - What a rewind leaves of several versions that are kept.
//! - Whether a part of an incomplete version is lost with its daemon.
//! - The delete of a number that is still open, which may abort that put or precede it.
//!
//! Clients do not delete versions of a key of which several are kept. The order of its changes
//! would be unknown, and `checker` needs it.
//!
//! # How the histories are made and checked
//!
//! Clients (`client`) are processes with several threads. They use the socket and, through a
//! `proxy`, the TCP address of `tssd serve`. Each thread logs its calls and their times
//! (`history`). A `nemesis` kills, stops, delays and disconnects processes; `shared` does so where
//! there is no daemon, or several.
//!
//! `checker` then looks for an order. `random` and `planted` test the checker: it finds an order
//! where one exists, it agrees with an exhaustive search (`oracle`), and it detects the bugs of
//! faulty stores (`toy`). `cuts` cuts a session after each of its bytes, at the address and at the
//! socket.

mod checker;
mod client;
mod clients;
mod contents;
mod cuts;
mod history;
mod keys;
mod ledger_storage;
mod nemesis;
mod oracle;
mod pins;
mod planted;
mod processes;
mod proxy;
mod random;
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
mod shared_ledger;
mod toy;
mod workload;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tssd_tests::campaign::Campaign;
use tssd_tests::resource_growth::ResourceGrowth;
use tssd_tests::rng::SeededRng;

use self::checker::{Violation, check};
use self::history::{Call, Operation, Response};
use self::nemesis::{DaemonSetup, FaultCounts};
use crate::linearizability::keys::{KEYS, split_histories};
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
use crate::linearizability::ledger_storage::LedgerStorage;
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
use crate::linearizability::shared_ledger::SharedSetup;

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn histories_at_a_daemon_are_linearizable() {
    let campaign = Campaign::start("histories");
    let (mut rng, mut checked, mut growth) =
        (SeededRng::new(0x5EED), CheckedHistories::default(), ResourceGrowth::default());
    while campaign.should_continue(checked.operations, 100_000) || checked.lacks_versions() {
        let mut setup = DaemonSetup::new();
        // Every second daemon is not killed, so that its resource usage can be measured over time.
        let faults = setup.inject_faults(&mut rng, checked.rounds % 2 == 0, &mut growth);
        let (operations, ends) = setup.finish();
        checked.add(operations, &ends, faults);
    }
    let mut figures = checked.figures();
    figures["daemon"] = growth.finish(50);
    campaign.finish(figures);
}

#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn check_shared(name: &'static str, home: LedgerStorage, wanted: u64) {
    let campaign = Campaign::start(name);
    let (mut rng, mut checked) = (SeededRng::new(0x5EED), CheckedHistories::default());
    while campaign.should_continue(checked.operations, wanted) || checked.lacks_versions() {
        let mut setup = SharedSetup::new(home);
        let faults = setup.inject_faults(&mut rng);
        let (operations, ends) = setup.finish();
        checked.add(operations, &ends, faults);
    }
    campaign.finish(checked.figures());
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn histories_over_etcd_are_linearizable() {
    check_shared("histories: etcd", LedgerStorage::Etcd, 5000);
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn histories_in_a_directory_are_linearizable() {
    check_shared("histories: directory", LedgerStorage::Directory, 10_000);
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
#[cfg(feature = "etcd")]
#[cfg(feature = "object")]
fn histories_in_a_bucket_are_linearizable() {
    check_shared("histories: bucket", LedgerStorage::Bucket, 1000);
}

/// Counts of histories that are linearizable.
#[derive(Default)]
struct CheckedHistories {
    operations: u64,
    histories: u64,
    rounds: u64,
    /// Keys with at least one visible version.
    visible_keys: BTreeSet<u8>,
    calls: BTreeMap<&'static str, u64>,
    faults: Vec<FaultCounts>,
}

impl CheckedHistories {
    /// Checks the histories of a round.
    fn add(&mut self, operations: Vec<Operation>, ends: &[u64], faults: FaultCounts) {
        self.operations += operations.len() as u64;
        for operation in &operations {
            *self.calls.entry(call_name(operation)).or_default() += 1;
        }
        let puts = operations.iter().filter(|it| matches!(it.response, Some(Response::Put(_))));
        self.visible_keys.extend(puts.map(|it| it.key));
        for (keep, object) in split_histories(operations, ends) {
            if let Err(violation) = check(keep, &object) {
                let Violation { rule, operation } = &violation;
                let (context, round) = (context(operation, &object), self.rounds);
                panic!("round {round}, lives end at {ends:?}: {rule}: {operation:?}\n{context}");
            }
            self.histories += 1;
        }
        self.rounds += 1;
        self.faults.push(faults);
    }

    /// Returns whether some key has no version yet.
    fn lacks_versions(&self) -> bool {
        self.visible_keys.len() < usize::from(KEYS) && self.rounds < 100
    }

    fn figures(&self) -> Value {
        assert!(
            self.visible_keys.iter().copied().eq(0..KEYS),
            "of {KEYS} keys only these have versions: {:?}",
            self.visible_keys
        );
        let sum = |fault: fn(&FaultCounts) -> u64| self.faults.iter().map(fault).sum::<u64>();
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

/// Returns the name under which an operation is counted.
fn call_name(operation: &Operation) -> &'static str {
    match (operation.call, operation.response) {
        (Call::Put(_), None) => "puts of unknown outcome",
        (Call::Put(_), Some(Response::Failed)) => "puts refused",
        (Call::Put(_), _) => "puts",
        (Call::GetNewest, _) => "reads of the newest",
        (Call::GetVersion(_), _) => "reads of a number",
        (Call::Wait(..), _) => "waits",
        (Call::Delete(_), None) => "deletes of unknown outcome",
        (Call::Delete(_), _) => "deletes",
        (Call::Part { .. }, None) => "parts of unknown outcome",
        (Call::Part { .. }, Some(Response::Failed)) => "parts refused",
        (Call::Part { .. }, _) => "parts",
        (Call::Pin(..), _) => "pins",
        (Call::Unpin(_), _) => "unpins",
    }
}

/// Returns the operations at about the same time, as the context of a violation.
fn context(operation: &Operation, object: &[Operation]) -> String {
    let slack = 20_000_000;
    let is_concurrent = |it: &&Operation| {
        it.invoked_at < operation.returned_at.saturating_add(slack)
            && it.returned_at.saturating_add(slack) > operation.invoked_at
    };
    let mut concurrent: Vec<&Operation> = object.iter().filter(is_concurrent).collect();
    concurrent.sort_unstable_by_key(|it| it.invoked_at);
    concurrent.iter().map(|it| serde_json::to_string(it).unwrap() + "\n").collect()
}
