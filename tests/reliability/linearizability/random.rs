//! Random histories of a sequential store with delayed responses, and the same with one error.

use std::collections::BTreeSet;
use std::time::Instant;

use serde_json::json;
use tssd_tests::campaign::Campaign;
use tssd_tests::rng::SeededRng;

use super::checker::check;
use super::history::{Call, Operation, Response, shared_put_id};
use super::oracle::is_linearizable;
use super::toy::ToyStore;
use super::workload::ClientState;
use crate::linearizability::keys::KeyUsage;

/// Time between two calls.
const CALL_INTERVAL: u64 = 10;

/// Generates a history in which about `overlap` calls are in flight at any time.
fn random_history(
    rng: &mut SeededRng,
    custom: KeyUsage,
    keep: usize,
    count: u64,
    overlap: u64,
) -> Vec<Operation> {
    let mut toy = ToyStore::new(keep, None);
    let mut seen = 0;
    // The pinned version, and the time from which its client may make further calls about it.
    let (mut pinned, mut pinned_since) = (None, 0);
    let mut operations = Vec::new();
    for put in 1..=count {
        let moment = (put + overlap) * CALL_INTERVAL;
        let writer = u32::try_from(rng.below(3)).unwrap();
        let client = ClientState {
            usage: custom,
            keep,
            observed: seen,
            put: u32::try_from(put).unwrap(),
            wait_timeout: 0,
            writer,
            pinned: pinned.filter(|_| pinned_since < moment),
        };
        let call = client.next_call(rng);
        let is_change = !matches!(call, Call::GetNewest | Call::GetVersion(_) | Call::Wait(..));
        let answer = if is_change && rng.one_in(10) {
            // Its outcome is unknown.
            if rng.one_in(2) {
                toy.execute(call, false);
            }
            None
        } else if matches!(call, Call::Put(_)) && rng.one_in(12) {
            toy.skip_number();
            Some(Response::Failed)
        } else {
            toy.execute(call, false)
        };
        if let Some(Response::Put(number) | Response::Found(number, _)) = answer {
            seen = number;
        }
        let asked = moment - rng.below(overlap * CALL_INTERVAL + 1);
        let asked =
            if matches!(call, Call::Unpin(_)) { asked.max(pinned_since + 1) } else { asked };
        let latest = moment + rng.below(overlap * CALL_INTERVAL + 1);
        let answered = if answer.is_some() { latest } else { u64::MAX };
        match call {
            Call::Pin(number, label) if answer == Some(Response::Done) => {
                (pinned, pinned_since) = (Some((number, label)), latest);
            }
            Call::Unpin(_) => pinned = None,
            _ => {}
        }
        operations.push(Operation {
            key: 0,
            invoked_at: asked,
            returned_at: answered,
            call,
            response: answer,
        });
    }
    operations
}

/// Changes one operation.
fn corrupt(rng: &mut SeededRng, operations: &mut [Operation]) {
    let index = usize::try_from(rng.below(operations.len() as u64)).unwrap();
    let other = usize::try_from(rng.below(operations.len() as u64)).unwrap();
    let other = operations[other].clone();
    let corrupted = &mut operations[index];
    let number = other.response.and_then(|answer| match answer {
        Response::Put(number) | Response::Found(number, _) => Some(number),
        _ => None,
    });
    match (corrupted.call, &mut corrupted.response) {
        (Call::Pin(..), Some(answer @ Response::Done)) => *answer = Response::NotFound,
        // The moments of a label have an order, so it stays.
        (Call::Pin(..) | Call::Unpin(_), _) => {}
        (Call::Part { number, .. }, Some(answer)) if rng.one_in(2) => {
            *answer = if *answer == Response::PartsMissing {
                Response::Put(number)
            } else {
                Response::PartsMissing
            };
        }
        _ if rng.one_in(3) => {
            // Move the operation in time.
            (corrupted.invoked_at, corrupted.returned_at) =
                (other.invoked_at, corrupted.returned_at.max(other.invoked_at));
        }
        (_, Some(answer @ Response::Found(..))) if rng.one_in(2) => *answer = Response::NotFound,
        (Call::GetNewest | Call::Wait(..), Some(answer)) => {
            *answer = other.response.filter(is_read_response).unwrap_or(*answer);
        }
        (Call::GetVersion(wanted), Some(answer)) => match other.response {
            Some(Response::Found(number, _)) if number == wanted => *answer = Response::NotFound,
            Some(Response::Found(_, put)) => *answer = Response::Found(wanted, put),
            _ => {}
        },
        (Call::Put(_), Some(Response::Put(own))) => *own = number.unwrap_or(*own + 1),
        (Call::Put(_), answer @ None) => *answer = Some(Response::Failed),
        (Call::Delete(_), answer) => {
            let is_deleted = *answer == Some(Response::Deleted);
            *answer = Some(if is_deleted { Response::NotFound } else { Response::Deleted });
            corrupted.returned_at = corrupted.returned_at.min(corrupted.invoked_at + CALL_INTERVAL);
        }
        _ => {}
    }
}

fn is_read_response(answer: &Response) -> bool {
    matches!(answer, Response::Found(..) | Response::NotFound)
}

/// Returns whether there are puts that may be versions which no client has observed.
///
/// The fast checker accepts more histories with such puts.
fn has_unobserved(operations: &[Operation]) -> bool {
    let observed: BTreeSet<u32> =
        operations.iter().filter_map(|it| Some(it.observed_version()?.1)).collect();
    operations.iter().any(|operation| match operation.call {
        Call::Put(put) => operation.response.is_none() && !observed.contains(&put),
        Call::Part { number, .. } => {
            operation.response.is_none() && !observed.contains(&shared_put_id(number))
        }
        Call::Pin(..) => operation.response.is_none(),
        _ => false,
    })
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn checkers_accept_valid_histories_and_agree() {
    let campaign = Campaign::start("histories: two checkers");
    let (mut histories, mut rejected, mut unobserved) = (0, 0, 0);
    while campaign.should_continue(histories, 20_000) {
        let mut rng = SeededRng::new(histories);
        let keep = if rng.one_in(2) { 1 } else { 3 };
        let custom = match rng.below(5) {
            0 => KeyUsage::Pinned,
            1 => KeyUsage::MultiWriter(2),
            2 => KeyUsage::MultiWriter(3),
            _ => KeyUsage::Plain,
        };
        let (count, overlap) = (4 + rng.below(28), 1 + rng.below(5));
        let mut operations = random_history(&mut rng, custom, keep, count, overlap);
        assert!(check(keep, &operations).is_ok(), "seed {histories}: {operations:?}");
        assert!(is_linearizable(keep, &operations), "seed {histories}: {operations:?}");
        corrupt(&mut rng, &mut operations);
        let (fast, slow) = (check(keep, &operations), is_linearizable(keep, &operations));
        assert!(fast.is_ok() || !slow, "seed {histories}: {fast:?}, {operations:?}");
        if has_unobserved(&operations) {
            unobserved += 1;
        } else {
            assert_eq!(fast.is_ok(), slow, "seed {histories}: {fast:?}, {operations:?}");
        }
        histories += 1;
        rejected += u64::from(!slow);
    }
    assert!(
        rejected > histories / 10 && unobserved < histories * 3 / 4,
        "{rejected}, {unobserved}"
    );
    campaign.finish(json!({
        "histories": histories,
        "accepted": histories,
        "spoiled": histories,
        "rejected": rejected,
        "with unseen puts": unobserved,
        "disagreements": 0,
    }));
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn checker_handles_a_million_operations() {
    let campaign = Campaign::start("histories: a million operations");
    let mut operations = random_history(&mut SeededRng::new(1), KeyUsage::Plain, 1, 1_000_000, 16);
    let started = Instant::now();
    assert!(check(1, &operations).is_ok());
    let seconds = started.elapsed().as_secs_f64();
    // A read near the end finds the version of one near the begin.
    let is_found = |operation: &&Operation| {
        operation.call == Call::GetNewest && matches!(operation.response, Some(Response::Found(..)))
    };
    let early_response = operations.iter().find(is_found).unwrap().response;
    operations.iter_mut().rfind(|operation| is_found(&&**operation)).unwrap().response =
        early_response;
    assert!(check(1, &operations).is_err());
    campaign.finish(json!({
        "operations": operations.len(),
        "stale reads found": 1,
        "seconds to check": seconds,
    }));
}
