//! Random histories of a sequential store with delayed responses, and the same with one error.

use std::collections::BTreeSet;
use std::time::Instant;

use serde_json::json;
use tssd_tests::dice::Dice;
use tssd_tests::proof::Proof;

use super::checker::check;
use super::history::{Answer, Call, Operation, name_of};
use super::object::Custom;
use super::oracle::is_linearizable;
use super::toy::Toy;
use super::workload::Client;

/// Time between two calls.
const CALL_INTERVAL: u64 = 10;

/// Generates a history in which about `overlap` calls are in flight at any time.
fn random_history(
    rng: &mut Dice,
    custom: Custom,
    keep: usize,
    count: u64,
    overlap: u64,
) -> Vec<Operation> {
    let mut toy = Toy::new(keep, None);
    let mut seen = 0;
    // The pinned version, and the time from which its client may make further calls about it.
    let (mut pinned, mut pinned_since) = (None, 0);
    let mut operations = Vec::new();
    for put in 1..=count {
        let moment = (put + overlap) * CALL_INTERVAL;
        let writer = u32::try_from(rng.below(3)).unwrap();
        let client = Client {
            custom,
            keep,
            seen,
            put: u32::try_from(put).unwrap(),
            patience: 0,
            writer,
            pinned: pinned.filter(|_| pinned_since < moment),
        };
        let call = client.call(rng);
        let is_change = !matches!(call, Call::Newest | Call::Numbered(_) | Call::Wait(..));
        let answer = if is_change && rng.hits(10) {
            // Its outcome is unknown.
            if rng.hits(2) {
                toy.answer(call, false);
            }
            None
        } else if matches!(call, Call::Put(_)) && rng.hits(12) {
            toy.skip();
            Some(Answer::Failed)
        } else {
            toy.answer(call, false)
        };
        if let Some(Answer::Put(number) | Answer::Found(number, _)) = answer {
            seen = number;
        }
        let asked = moment - rng.below(overlap * CALL_INTERVAL + 1);
        let asked =
            if matches!(call, Call::Unpin(_)) { asked.max(pinned_since + 1) } else { asked };
        let latest = moment + rng.below(overlap * CALL_INTERVAL + 1);
        let answered = if answer.is_some() { latest } else { u64::MAX };
        match call {
            Call::Pin(number, label) if answer == Some(Answer::Done) => {
                (pinned, pinned_since) = (Some((number, label)), latest);
            }
            Call::Unpin(_) => pinned = None,
            _ => {}
        }
        operations.push(Operation { key: 0, asked, answered, call, answer });
    }
    operations
}

/// Changes one operation.
fn corrupt(rng: &mut Dice, operations: &mut [Operation]) {
    let index = usize::try_from(rng.below(operations.len() as u64)).unwrap();
    let other = usize::try_from(rng.below(operations.len() as u64)).unwrap();
    let other = operations[other].clone();
    let corrupted = &mut operations[index];
    let number = other.answer.and_then(|answer| match answer {
        Answer::Put(number) | Answer::Found(number, _) => Some(number),
        _ => None,
    });
    match (corrupted.call, &mut corrupted.answer) {
        (Call::Pin(..), Some(answer @ Answer::Done)) => *answer = Answer::Nothing,
        // The moments of a label have an order, so it stays.
        (Call::Pin(..) | Call::Unpin(_), _) => {}
        (Call::Part { number, .. }, Some(answer)) if rng.hits(2) => {
            *answer = if *answer == Answer::Waits { Answer::Put(number) } else { Answer::Waits };
        }
        _ if rng.hits(3) => {
            // Move the operation in time.
            (corrupted.asked, corrupted.answered) =
                (other.asked, corrupted.answered.max(other.asked));
        }
        (_, Some(answer @ Answer::Found(..))) if rng.hits(2) => *answer = Answer::Nothing,
        (Call::Newest, Some(answer)) => {
            *answer = other.answer.filter(is_read_response).unwrap_or(*answer)
        }
        (Call::Numbered(wanted), Some(answer)) => match other.answer {
            Some(Answer::Found(number, _)) if number == wanted => *answer = Answer::Nothing,
            Some(Answer::Found(_, put)) => *answer = Answer::Found(wanted, put),
            _ => {}
        },
        (Call::Put(_), Some(Answer::Put(own))) => *own = number.unwrap_or(*own + 1),
        (Call::Put(_), answer @ None) => *answer = Some(Answer::Failed),
        (Call::Delete(_), answer) => {
            let is_deleted = *answer == Some(Answer::Deleted);
            *answer = Some(if is_deleted { Answer::Nothing } else { Answer::Deleted });
            corrupted.answered = corrupted.answered.min(corrupted.asked + CALL_INTERVAL);
        }
        (Call::Wait(..), Some(answer)) => {
            *answer = other.answer.filter(is_read_response).unwrap_or(*answer);
        }
        _ => {}
    }
}

fn is_read_response(answer: &Answer) -> bool {
    matches!(answer, Answer::Found(..) | Answer::Nothing)
}

/// Returns whether there are puts that may be versions which no client has observed.
///
/// The fast checker accepts more histories with such puts.
fn has_unobserved(operations: &[Operation]) -> bool {
    let observed: BTreeSet<u32> = operations.iter().filter_map(|it| Some(it.seen()?.1)).collect();
    operations.iter().any(|operation| match operation.call {
        Call::Put(put) => operation.answer.is_none() && !observed.contains(&put),
        Call::Part { number, .. } => {
            operation.answer.is_none() && !observed.contains(&name_of(number))
        }
        Call::Pin(..) => operation.answer.is_none(),
        _ => false,
    })
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn checkers_accept_valid_histories_and_agree() {
    let campaign = Proof::begin("histories: two checkers");
    let (mut histories, mut rejected, mut unobserved) = (0, 0, 0);
    while campaign.goes_on(histories, 20_000) {
        let mut rng = Dice::new(histories);
        let keep = if rng.hits(2) { 1 } else { 3 };
        let custom = match rng.below(5) {
            0 => Custom::Pinned,
            1 => Custom::Together(2),
            2 => Custom::Together(3),
            _ => Custom::Alone,
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
    campaign.end(json!({
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
    let campaign = Proof::begin("histories: a million operations");
    let mut operations = random_history(&mut Dice::new(1), Custom::Alone, 1, 1_000_000, 16);
    let started = Instant::now();
    assert!(check(1, &operations).is_ok());
    let seconds = started.elapsed().as_secs_f64();
    // A read near the end finds the version of one near the begin.
    let is_found = |operation: &&Operation| {
        operation.call == Call::Newest && matches!(operation.answer, Some(Answer::Found(..)))
    };
    let early_response = operations.iter().find(is_found).unwrap().answer;
    operations.iter_mut().rfind(|operation| is_found(&&**operation)).unwrap().answer =
        early_response;
    assert!(check(1, &operations).is_err());
    campaign.end(json!({
        "operations": operations.len(),
        "stale reads found": 1,
        "seconds to check": seconds,
    }));
}
