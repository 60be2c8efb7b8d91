//! Numbers: how versions are named, retried and rewound.

use super::*;

#[test]
fn a_single_writer_needs_no_job_and_its_numbers_start_at_one() {
    let mut ledger = Ledger::keeping(9);
    for put in [None, None, Some(7), None] {
        ledger.put(alone(put)).unwrap();
        ledger.settle();
    }
    assert_eq!(ledger.visible(), [1, 2, 7, 8]);

    let mut ledger = Ledger::default();
    ledger.put(alone(Some(0))).unwrap();
    ledger.settle();
    assert_eq!((ledger.visible(), ledger.state.highest()), (vec![0], Some(0)));
}

#[test]
fn an_identical_retry_succeeds_and_another_content_is_refused() {
    let mut ledger = Ledger::default();
    let id = ledger.put(alone(Some(5))).unwrap();
    ledger.settle();
    assert_eq!(ledger.begin(alone(Some(5))), Ok(id));
    let missing = WriterSet::default();
    let success = Outcome::Committed { visible: true, missing };
    assert_eq!(ledger.commit(id, alone(None), 7), Ok(success));
    let (number, committed) = (5, Digest([7; 16]));
    let refusal = Refusal::ContributionDiffers { number, writer: 0, committed };
    assert_eq!(ledger.commit(id, alone(None), 8), Err(refusal));
    let refusal = Refusal::VersionNotNewer { number: 4, highest: 5 };
    assert_eq!(ledger.begin(alone(Some(4))), Err(refusal));
}

#[test]
fn contents_that_are_said_ahead_are_compared_at_once() {
    let mut ledger = Ledger::default();
    let open = ledger.put(step_of("a", 0, 5)).unwrap();
    let offers = |contents| Put { offers: Some(contents), ..step_of("a", 0, 5) };
    assert_eq!(ledger.begin(offers(7)), Ok(open));
    let (number, committed) = (5, Digest([7; 16]));
    let refusal = Refusal::ContributionDiffers { number, writer: 0, committed };
    assert_eq!(ledger.begin(offers(8)), Err(refusal));
    ledger.put(step_of("a", 1, 5)).unwrap();
    ledger.settle();
    assert_eq!(ledger.begin(offers(7)), Ok(open));
    let refusal = Refusal::VersionNotNewer { number: 5, highest: 5 };
    assert_eq!(ledger.begin(offers(8)), Err(refusal));
}

#[test]
fn what_was_visible_is_retried_while_it_has_data() {
    let mut ledger = Ledger::default();
    let retired = ledger.put(alone(Some(5))).unwrap();
    ledger.settle();
    ledger.lease(1, Selector::Newest).unwrap();
    ledger.put(alone(Some(6))).unwrap();
    ledger.settle();
    assert_eq!((ledger.visible(), ledger.begin(alone(Some(5)))), (vec![6], Ok(retired)));

    // One that a rewind has left visible is of an older epoch.
    let mut ledger = Ledger::keeping(3);
    let older = ledger.put(alone(Some(5))).unwrap();
    for number in [9, 7] {
        ledger.settle();
        ledger.put(Put { rewind: number == 7, ..alone(Some(number)) }).unwrap();
    }
    ledger.settle();
    assert_eq!((ledger.visible(), ledger.begin(alone(Some(5)))), (vec![5, 7], Ok(older)));
}

#[test]
fn only_the_rewind_of_a_job_is_retried_as_one() {
    let one_of = |job| Put { job, rewind: true, ..alone(Some(5)) };
    for (job, epoch_of_retry) in [(None, 2), (Some("a"), 1)] {
        let mut ledger = Ledger::default();
        ledger.put(Put { rewind: false, ..one_of(job) }).unwrap();
        ledger.settle();
        // The number is visible, and the same contents are there: a rewind is meant all the same.
        for epoch in [1, epoch_of_retry] {
            ledger.put(one_of(job)).unwrap();
            ledger.settle();
            assert_eq!((ledger.state.epoch(), ledger.visible()), (epoch, vec![5]), "{job:?}");
        }
    }
}

#[test]
fn an_implicit_number_is_above_those_that_are_open() {
    let mut ledger = Ledger::default();
    ledger.begin(alone(Some(7))).unwrap();
    let id = ledger.begin(alone(None)).unwrap();
    let open: Vec<_> = ledger.state.open().map(|version| (version.number, version.id)).collect();
    assert_eq!(open[1], (8, id));
}

#[test]
fn a_rewind_opens_an_epoch_and_takes_back_what_is_newer_when_it_becomes_visible() {
    let mut ledger = Ledger::keeping(3);
    for number in [10, 20, 30] {
        ledger.put(alone(Some(number))).unwrap();
        ledger.settle();
    }
    let rewind = Put { rewind: true, ..step_of("b", 0, 20) };
    ledger.put(rewind).unwrap();
    // Writer 0 goes on before writer 1 has come: its next step belongs to the new epoch.
    ledger.put(step_of("b", 0, 21)).unwrap();
    assert_eq!((ledger.visible(), ledger.state.highest()), (vec![10, 20, 30], Some(30)));
    ledger.put(Put { writer: 1, ..rewind }).unwrap();
    ledger.settle();
    assert_eq!((ledger.visible(), ledger.state.highest()), (vec![10, 20], Some(20)));
    ledger.put(step_of("b", 1, 21)).unwrap();
    ledger.settle();
    assert_eq!((ledger.visible(), ledger.state.epoch()), (vec![10, 20, 21], 1));
}

#[test]
fn a_rewind_below_an_open_rewind_has_an_epoch_of_its_own() {
    let mut ledger = Ledger::keeping(3);
    for number in [10, 20, 30] {
        ledger.put(alone(Some(number))).unwrap();
        ledger.settle();
    }
    for number in [20, 10] {
        ledger.put(Put { rewind: true, ..step_of("b", 0, number) }).unwrap();
    }
    let epochs: Vec<_> = ledger.state.open().map(|version| version.epoch).collect();
    assert_eq!(epochs, [1, 2]);
    for number in [20, 10] {
        ledger.put(Put { rewind: true, ..step_of("b", 1, number) }).unwrap();
        ledger.settle();
    }
    assert_eq!((ledger.visible(), ledger.state.highest()), (vec![10], Some(10)));
}

#[test]
fn what_a_rewind_took_back_is_not_retried() {
    let mut ledger = Ledger::keeping(3);
    for number in [10, 20, 30] {
        ledger.put(alone(Some(number))).unwrap();
        ledger.settle();
    }
    ledger.lease(1, Selector::Number(20)).unwrap();
    for number in [15, 25] {
        ledger.put(Put { rewind: number == 15, ..alone(Some(number)) }).unwrap();
        ledger.settle();
    }
    let refusal = Refusal::VersionNotNewer { number: 20, highest: 25 };
    assert_eq!(ledger.begin(alone(Some(20))), Err(refusal));
}

#[test]
fn a_rewind_to_a_number_above_the_highest_is_an_ordinary_put() {
    let mut ledger = Ledger::default();
    ledger.put(Put { rewind: true, ..alone(Some(5)) }).unwrap();
    ledger.settle();
    assert_eq!((ledger.state.epoch(), ledger.state.highest()), (0, Some(5)));
}

#[test]
fn the_highest_number_survives_deletion() {
    let mut ledger = Ledger::default();
    let visible = ledger.put(alone(Some(5))).unwrap();
    ledger.settle();
    let open = ledger.begin(alone(None)).unwrap();
    let delete = Command::Delete { selection: Selection::All };
    let ids = vec![visible, open];
    assert_eq!(ledger.give(delete.clone()), Ok(Outcome::Deleted { ids }));
    assert_eq!(ledger.give(delete), Ok(Outcome::Deleted { ids: Vec::new() }));
    ledger.settle();
    assert_eq!((ledger.state.versions().count(), ledger.state.highest()), (0, Some(5)));
    assert_eq!(ledger.reason(open), Reason::Deleted);
    assert_eq!(ledger.state.outcome_of(visible), Some(Fate::Visible));
    assert!(ledger.begin(alone(Some(5))).is_err());
}

#[test]
fn numbers_end_without_a_panic() {
    let mut ledger = Ledger::default();
    ledger.put(alone(Some(u64::MAX))).unwrap();
    ledger.settle();
    assert_eq!(ledger.put(alone(None)), Err(Refusal::NumbersExhausted));
    ledger.put(Put { rewind: true, ..alone(Some(0)) }).unwrap();
    ledger.settle();
    ledger.put(alone(None)).unwrap();
    ledger.settle();
    assert_eq!(ledger.visible(), [1]);
}
