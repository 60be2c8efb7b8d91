//! Histories of a store that does one thing at a time, with answers that take long; and such with a mistake.

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

/// How far one call is from the next.
const STEP: u64 = 10;

/// A history in which so many calls are under way at the same time, more or less.
fn history(
    dice: &mut Dice,
    custom: Custom,
    keep: usize,
    count: u64,
    overlap: u64,
) -> Vec<Operation> {
    let mut toy = Toy::new(keep, None);
    let mut seen = 0;
    // What is pinned, and from when on whoever has done so may ask for more.
    let (mut pinned, mut since) = (None, 0);
    let mut operations = Vec::new();
    for put in 1..=count {
        let moment = (put + overlap) * STEP;
        let writer = u32::try_from(dice.below(3)).unwrap();
        let client = Client {
            custom,
            keep,
            seen,
            put: u32::try_from(put).unwrap(),
            patience: 0,
            writer,
            pinned: pinned.filter(|_| since < moment),
        };
        let call = client.call(dice);
        let is_change = !matches!(call, Call::Newest | Call::Numbered(_) | Call::Wait(..));
        let answer = if is_change && dice.hits(10) {
            // Nobody knows whether it was done.
            if dice.hits(2) {
                toy.answer(call, false);
            }
            None
        } else if matches!(call, Call::Put(_)) && dice.hits(12) {
            toy.skip();
            Some(Answer::Failed)
        } else {
            toy.answer(call, false)
        };
        if let Some(Answer::Put(number) | Answer::Found(number, _)) = answer {
            seen = number;
        }
        let asked = moment - dice.below(overlap * STEP + 1);
        let asked = if matches!(call, Call::Unpin(_)) { asked.max(since + 1) } else { asked };
        let latest = moment + dice.below(overlap * STEP + 1);
        let answered = if answer.is_some() { latest } else { u64::MAX };
        match call {
            Call::Pin(number, label) if answer == Some(Answer::Done) => {
                (pinned, since) = (Some((number, label)), latest);
            }
            Call::Unpin(_) => pinned = None,
            _ => {}
        }
        operations.push(Operation { key: 0, asked, answered, call, answer });
    }
    operations
}

/// Changes one thing.
fn spoil(dice: &mut Dice, operations: &mut [Operation]) {
    let index = usize::try_from(dice.below(operations.len() as u64)).unwrap();
    let other = usize::try_from(dice.below(operations.len() as u64)).unwrap();
    let other = operations[other].clone();
    let spoiled = &mut operations[index];
    let number = other.answer.and_then(|answer| match answer {
        Answer::Put(number) | Answer::Found(number, _) => Some(number),
        _ => None,
    });
    match (spoiled.call, &mut spoiled.answer) {
        (Call::Pin(..), Some(answer @ Answer::Done)) => *answer = Answer::Nothing,
        // The moments of a label have an order.
        (Call::Pin(..) | Call::Unpin(_), _) => {}
        (Call::Part { number, .. }, Some(answer)) if dice.hits(2) => {
            *answer = if *answer == Answer::Waits { Answer::Put(number) } else { Answer::Waits };
        }
        _ if dice.hits(3) => {
            // It was asked and answered at another time.
            (spoiled.asked, spoiled.answered) = (other.asked, spoiled.answered.max(other.asked));
        }
        (_, Some(answer @ Answer::Found(..))) if dice.hits(2) => *answer = Answer::Nothing,
        (Call::Newest, Some(answer)) => *answer = other.answer.filter(is_read).unwrap_or(*answer),
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
            spoiled.answered = spoiled.answered.min(spoiled.asked + STEP);
        }
        (Call::Wait(..), Some(answer)) => {
            *answer = other.answer.filter(is_read).unwrap_or(*answer);
        }
        _ => {}
    }
}

fn is_read(answer: &Answer) -> bool {
    matches!(answer, Answer::Found(..) | Answer::Nothing)
}

/// Whether there are puts that may be versions that nobody has seen: of these the fast checker knows less.
fn has_unseen(operations: &[Operation]) -> bool {
    let seen: BTreeSet<u32> = operations.iter().filter_map(|it| Some(it.seen()?.1)).collect();
    operations.iter().any(|operation| match operation.call {
        Call::Put(put) => operation.answer.is_none() && !seen.contains(&put),
        Call::Part { number, .. } => operation.answer.is_none() && !seen.contains(&name_of(number)),
        Call::Pin(..) => operation.answer.is_none(),
        _ => false,
    })
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn what_is_right_is_accepted_and_both_checkers_agree() {
    let proof = Proof::begin("histories: two checkers");
    let (mut histories, mut rejected, mut unseen) = (0, 0, 0);
    while proof.goes_on(histories, 20_000) {
        let mut dice = Dice::new(histories);
        let keep = if dice.hits(2) { 1 } else { 3 };
        let custom = match dice.below(5) {
            0 => Custom::Pinned,
            1 => Custom::Together(2),
            2 => Custom::Together(3),
            _ => Custom::Alone,
        };
        let (count, overlap) = (4 + dice.below(28), 1 + dice.below(5));
        let mut operations = history(&mut dice, custom, keep, count, overlap);
        assert!(check(keep, &operations).is_ok(), "seed {histories}: {operations:?}");
        assert!(is_linearizable(keep, &operations), "seed {histories}: {operations:?}");
        spoil(&mut dice, &mut operations);
        let (fast, slow) = (check(keep, &operations), is_linearizable(keep, &operations));
        assert!(fast.is_ok() || !slow, "seed {histories}: {fast:?}, {operations:?}");
        if has_unseen(&operations) {
            unseen += 1;
        } else {
            assert_eq!(fast.is_ok(), slow, "seed {histories}: {fast:?}, {operations:?}");
        }
        histories += 1;
        rejected += u64::from(!slow);
    }
    assert!(rejected > histories / 10 && unseen < histories * 3 / 4, "{rejected}, {unseen}");
    proof.end(json!({
        "histories": histories,
        "accepted": histories,
        "spoiled": histories,
        "rejected": rejected,
        "with unseen puts": unseen,
        "disagreements": 0,
    }));
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn a_million_operations_are_checked() {
    let proof = Proof::begin("histories: a million operations");
    let mut operations = history(&mut Dice::new(1), Custom::Alone, 1, 1_000_000, 16);
    let started = Instant::now();
    assert!(check(1, &operations).is_ok());
    let seconds = started.elapsed().as_secs_f64();
    // A read near the end finds what was there near the beginning.
    let found = |operation: &&Operation| {
        operation.call == Call::Newest && matches!(operation.answer, Some(Answer::Found(..)))
    };
    let early = operations.iter().find(found).unwrap().answer;
    operations.iter_mut().rfind(|operation| found(&&**operation)).unwrap().answer = early;
    assert!(check(1, &operations).is_err());
    proof.end(json!({
        "operations": operations.len(),
        "stale reads found": 1,
        "seconds to check": seconds,
    }));
}
