//! Tests of version numbers, retries and rewinds.

use super::*;

#[test]
fn single_writer_needs_no_job_and_numbers_start_at_one() {
    let mut ledger = TestLedger::with_keep(9);
    for put in [None, None, Some(7), None] {
        ledger.put(single_put(put)).unwrap();
        ledger.run_effects();
    }
    assert_eq!(ledger.visible_numbers(), [1, 2, 7, 8]);

    let mut ledger = TestLedger::default();
    ledger.put(single_put(Some(0))).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.visible_numbers(), ledger.state.highest()), (vec![0], Some(0)));
}

#[test]
fn identical_retry_succeeds_and_other_contents_are_refused() {
    let mut ledger = TestLedger::default();
    let id = ledger.put(single_put(Some(5))).unwrap();
    ledger.run_effects();
    assert_eq!(ledger.begin(single_put(Some(5))), Ok(id));
    let missing = WriterSet::default();
    let success = Outcome::Committed { visible: true, missing };
    assert_eq!(ledger.commit(id, single_put(None), 7), Ok(success));
    let (number, committed) = (5, ArchiveDigest([7; 16]));
    let refusal = Refusal::ContributionDiffers { number, writer: 0, committed, process: None };
    assert_eq!(ledger.commit(id, single_put(None), 8), Err(refusal));
    let refusal = Refusal::VersionNotNewer { number: 4, highest: 5, earlier: None };
    assert_eq!(ledger.begin(single_put(Some(4))), Err(refusal));
}

#[test]
fn announced_digest_is_compared_at_begin() {
    let mut ledger = TestLedger::default();
    let open = ledger.put(numbered_put("a", 0, 5)).unwrap();
    let announce = |contents| Put { announced_contents: Some(contents), ..numbered_put("a", 0, 5) };
    assert_eq!(ledger.begin(announce(7)), Ok(open));
    let (number, committed) = (5, ArchiveDigest([7; 16]));
    let refusal = Refusal::ContributionDiffers { number, writer: 0, committed, process: None };
    assert_eq!(ledger.begin(announce(8)), Err(refusal));
    ledger.put(numbered_put("a", 1, 5)).unwrap();
    ledger.run_effects();
    assert_eq!(ledger.begin(announce(7)), Ok(open));
    let refusal = Refusal::VersionNotNewer { number: 5, highest: 5, earlier: None };
    assert_eq!(ledger.begin(announce(8)), Err(refusal));
}

#[test]
fn retry_matches_verified_version_while_it_has_data() {
    let mut ledger = TestLedger::default();
    let retired = ledger.put(single_put(Some(5))).unwrap();
    ledger.run_effects();
    ledger.lease(1, Selector::Newest).unwrap();
    ledger.put(single_put(Some(6))).unwrap();
    ledger.run_effects();
    assert_eq!(
        (ledger.visible_numbers(), ledger.begin(single_put(Some(5)))),
        (vec![6], Ok(retired))
    );

    // The version that the rewind left visible belongs to an older epoch.
    let mut ledger = TestLedger::with_keep(3);
    let older = ledger.put(single_put(Some(5))).unwrap();
    for number in [9, 7] {
        ledger.run_effects();
        ledger.put(Put { rewind: number == 7, ..single_put(Some(number)) }).unwrap();
    }
    ledger.run_effects();
    assert_eq!(
        (ledger.visible_numbers(), ledger.begin(single_put(Some(5)))),
        (vec![5, 7], Ok(older))
    );
}

#[test]
fn rewind_is_retried_only_with_a_job() {
    let rewind_put = |job| Put { job, rewind: true, ..single_put(Some(5)) };
    for (job, epoch_of_retry) in [(None, 2), (Some("a"), 1)] {
        let mut ledger = TestLedger::default();
        ledger.put(Put { rewind: false, ..rewind_put(job) }).unwrap();
        ledger.run_effects();
        // The number is visible with the same contents. Without a job, the put is a new rewind nevertheless.
        for epoch in [1, epoch_of_retry] {
            ledger.put(rewind_put(job)).unwrap();
            ledger.run_effects();
            assert_eq!(
                (ledger.state.epoch(), ledger.visible_numbers()),
                (epoch, vec![5]),
                "{job:?}"
            );
        }
    }
}

#[test]
fn implicit_number_is_above_open_numbers() {
    let mut ledger = TestLedger::default();
    ledger.begin(single_put(Some(7))).unwrap();
    let id = ledger.begin(single_put(None)).unwrap();
    let open: Vec<_> = ledger.state.open().map(|version| (version.number, version.id)).collect();
    assert_eq!(open[1], (8, id));
}

#[test]
fn visible_rewind_opens_epoch_and_retires_newer_versions() {
    let mut ledger = TestLedger::with_keep(3);
    for number in [10, 20, 30] {
        ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
    }
    let rewind = Put { rewind: true, ..numbered_put("b", 0, 20) };
    ledger.put(rewind).unwrap();
    // Writer 0 continues before writer 1 has begun. Its next version belongs to the new epoch.
    ledger.put(numbered_put("b", 0, 21)).unwrap();
    assert_eq!((ledger.visible_numbers(), ledger.state.highest()), (vec![10, 20, 30], Some(30)));
    ledger.put(Put { writer: 1, ..rewind }).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.visible_numbers(), ledger.state.highest()), (vec![10, 20], Some(20)));
    ledger.put(numbered_put("b", 1, 21)).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.visible_numbers(), ledger.state.epoch()), (vec![10, 20, 21], 1));
}

#[test]
fn rewind_below_open_rewind_opens_its_own_epoch() {
    let mut ledger = TestLedger::with_keep(3);
    for number in [10, 20, 30] {
        ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
    }
    for number in [20, 10] {
        ledger.put(Put { rewind: true, ..numbered_put("b", 0, number) }).unwrap();
    }
    let epochs: Vec<_> = ledger.state.open().map(|version| version.epoch).collect();
    assert_eq!(epochs, [1, 2]);
    for number in [20, 10] {
        ledger.put(Put { rewind: true, ..numbered_put("b", 1, number) }).unwrap();
        ledger.run_effects();
    }
    assert_eq!((ledger.visible_numbers(), ledger.state.highest()), (vec![10], Some(10)));
}

#[test]
fn rewound_version_is_not_retried() {
    let mut ledger = TestLedger::with_keep(3);
    for number in [10, 20, 30] {
        ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
    }
    ledger.lease(1, Selector::Number(20)).unwrap();
    for number in [15, 25] {
        ledger.put(Put { rewind: number == 15, ..single_put(Some(number)) }).unwrap();
        ledger.run_effects();
    }
    let refusal = Refusal::VersionNotNewer { number: 20, highest: 25, earlier: None };
    assert_eq!(ledger.begin(single_put(Some(20))), Err(refusal));
}

#[test]
fn rewind_above_highest_number_is_ordinary_put() {
    let mut ledger = TestLedger::default();
    ledger.put(Put { rewind: true, ..single_put(Some(5)) }).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.state.highest()), (0, Some(5)));
}

#[test]
fn highest_number_survives_deletion() {
    let mut ledger = TestLedger::default();
    let visible = ledger.put(single_put(Some(5))).unwrap();
    ledger.run_effects();
    let open = ledger.begin(single_put(None)).unwrap();
    let delete = Command::Delete { selection: Selection::All };
    let ids = vec![visible, open];
    assert_eq!(ledger.apply(delete.clone()), Ok(Outcome::Deleted { ids }));
    assert_eq!(ledger.apply(delete), Ok(Outcome::Deleted { ids: Vec::new() }));
    ledger.run_effects();
    assert_eq!((ledger.state.versions().count(), ledger.state.highest()), (0, Some(5)));
    assert_eq!(ledger.drop_reason(open), Reason::Deleted);
    assert_eq!(ledger.state.outcome_of(visible), Some(VersionOutcome::Visible));
    assert!(ledger.begin(single_put(Some(5))).is_err());
}

#[test]
fn exhausted_numbers_are_refused() {
    let mut ledger = TestLedger::default();
    ledger.put(single_put(Some(u64::MAX))).unwrap();
    ledger.run_effects();
    assert_eq!(ledger.put(single_put(None)), Err(Refusal::NumbersExhausted));
    ledger.put(Put { rewind: true, ..single_put(Some(0)) }).unwrap();
    ledger.run_effects();
    ledger.put(single_put(None)).unwrap();
    ledger.run_effects();
    assert_eq!(ledger.visible_numbers(), [1]);
}
