//! Tests of leases, pins and retention: the lifetime of a visible version.

use super::*;

#[test]
fn lease_holds_data_until_release_even_after_expiry() {
    let mut ledger = TestLedger::default();
    let id = ledger.put(single_put(Some(1))).unwrap();
    ledger.run_effects();
    ledger.lease(1, Selector::Newest).unwrap();
    ledger.lease(2, Selector::Id(id)).unwrap();
    ledger.put(single_put(Some(2))).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.visible_numbers(), ledger.state.versions().count()), (vec![2], 2));
    let selector = Selector::Number(1);
    let refusal = Refusal::NotFound { selector, newest: Some(2), newest_open: None };
    assert_eq!(ledger.lease(3, Selector::Number(1)), Err(refusal));
    ledger.lease(1, Selector::Newest).unwrap();

    ledger.now = MINUTE;
    ledger.expire();
    let lease = LeaseId(1);
    assert!(ledger.state.lease(lease).unwrap().expired);
    assert_eq!(ledger.lease(1, Selector::Newest), Err(Refusal::LeaseExpired { lease }));
    assert_eq!(ledger.apply(Command::Reclaimed { id }), Err(Refusal::InUse { number: 1 }));

    ledger.apply(Command::Release { lease }).unwrap();
    assert!(pending(&ledger.state).is_empty());
    ledger.apply(Command::Release { lease: LeaseId(2) }).unwrap();
    assert_eq!(pending(&ledger.state), [Effect::Delete { id, epoch: 0, number: 1 }]);
}

#[test]
fn retention_keeps_newest_and_pinned_versions() {
    let mut ledger = TestLedger::with_keep(2);
    let label = || label("best");
    for number in 1..=5 {
        ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
        if number == 2 {
            let selector = Selector::Newest;
            ledger.apply(Command::Pin { selector, label: label() }).unwrap();
        }
    }
    assert_eq!(ledger.visible_numbers(), [2, 4, 5]);
    let selector = Selector::Number(4);
    ledger.apply(Command::Pin { selector, label: label() }).unwrap();
    assert_eq!(ledger.visible_numbers(), [4, 5]);

    let (keep, ttl) = (NonZeroU32::MIN, Some(Duration::from_mins(1)));
    ledger.apply(Command::Retain { keep, ttl }).unwrap();
    ledger.now = MINUTE - 1;
    ledger.expire();
    assert_eq!(ledger.visible_numbers(), [4, 5]);
    ledger.now = MINUTE;
    ledger.expire();
    ledger.run_effects();
    assert_eq!(ledger.visible_numbers(), [4]);
    ledger.apply(Command::Delete { selection: Selection::Number(4) }).unwrap();
    assert_eq!((ledger.visible_numbers(), pending(&ledger.state)), (vec![], vec![]));
    ledger.apply(Command::Unpin { label: label().into() }).unwrap();
    assert_eq!(pending(&ledger.state).len(), 1);
}

#[test]
fn delete_affects_only_selected_versions() {
    let mut ledger = TestLedger::with_keep(3);
    for number in 1..=3 {
        ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
    }
    let oldest = ledger.state.visible().next().unwrap().id;
    for (selection, left) in [
        (Selection::Number(2), vec![1, 3]),
        (Selection::Id(oldest), vec![3]),
        (Selection::All, vec![]),
    ] {
        ledger.apply(Command::Delete { selection }).unwrap();
        assert_eq!(ledger.visible_numbers(), left);
    }
}

#[test]
fn tombstones_and_pending_deletions_are_bounded() {
    let mut ledger = TestLedger::default();
    for number in 0..200 {
        let id = ledger.begin(single_put(Some(number))).unwrap();
        ledger.apply(Command::Abort { id, writer: 0 }).unwrap();
        ledger.run_effects();
    }
    let is_known = |id| ledger.state.outcome_of(VersionId(id)).is_some();
    let known: Vec<_> = (1..=200).filter(|id| is_known(*id)).collect();
    assert_eq!((known.len(), known[0]), (MAX_TOMBSTONES, 137));
    assert!(matches!(ledger.state.outcome_of(VersionId(200)), Some(VersionOutcome::Dropped(_))));
    for number in 0..64 {
        let id = ledger.begin(single_put(Some(number))).unwrap();
        ledger.apply(Command::Abort { id, writer: 0 }).unwrap();
    }
    let Ok(Outcome::Wait { blocking }) = ledger.begin_outcome(single_put(None)) else { panic!() };
    assert_eq!(blocking.len(), MAX_PENDING_DELETIONS);
}

#[test]
fn memory_versions_do_not_retire_disk_versions() {
    let mut ledger = TestLedger::default();
    for number in 1..=6 {
        let durability = if number % 3 == 2 { Durability::Disk } else { Durability::Memory };
        ledger.put(Put { durability, ..single_put(Some(number)) }).unwrap();
        ledger.run_effects();
        let expected = match number {
            1 => vec![1],
            2 => vec![2],
            5 => vec![5],
            3 | 4 => vec![2, number],
            _ => vec![5, 6],
        };
        assert_eq!(ledger.visible_numbers(), expected);
    }
    let restarted = ledger.state.durable_state();
    let numbers: Vec<u64> = restarted.visible().map(|version| version.number).collect();
    assert_eq!((numbers, restarted.highest()), (vec![5], Some(5)));
}

#[test]
fn restart_keeps_disk_versions_and_settings_of_key() {
    let mut ledger = TestLedger::with_keep(2);
    let put =
        |sequence, durability| Put { writers: "0", durability, ..implicit_put("a", 0, sequence) };
    let on_disk = ledger.put(put(0, Durability::Disk)).unwrap();
    ledger.run_effects();
    ledger.put(put(1, Durability::Memory)).unwrap();
    ledger.run_effects();
    for (label, number) in [("disk", 1), ("memory", 2)] {
        let selector = Selector::Number(number);
        ledger.apply(Command::Pin { selector, label: self::label(label) }).unwrap();
    }
    ledger.lease(1, Selector::Number(1)).unwrap();
    ledger.begin(put(2, Durability::Disk)).unwrap();

    ledger.state = ledger.state.durable_state();
    let numbers: Vec<u64> = ledger.state.versions().map(|version| version.number).collect();
    assert_eq!((numbers, ledger.state.lease(LeaseId(1))), (vec![1], None));
    assert_eq!(ledger.state.pins().collect::<Vec<_>>(), [("disk", on_disk)]);
    assert_eq!(ledger.state.job(), Some(&job_id("a")));
    // The call of the version in memory is forgotten. It may come again, with other writers, and gets the number again.
    let again = ledger.begin_outcome(implicit_put("a", 0, 1)).unwrap();
    assert!(matches!(again, Outcome::Begun { number: 2, .. }), "{again:?}");
}

#[test]
fn call_after_restart_does_not_depend_on_deletion_time() {
    for (is_deleted, is_pinned) in [(true, false), (false, false), (false, true)] {
        let mut ledger = TestLedger::with_keep(1);
        let put = |sequence| Put {
            writers: "0",
            durability: Durability::Disk,
            ..implicit_put("a", 0, sequence)
        };
        let first = ledger.put(put(1)).unwrap();
        ledger.run_effects();
        if is_pinned {
            let (selector, label) = (Selector::Newest, label("best"));
            ledger.apply(Command::Pin { selector, label }).unwrap();
        }
        let second = ledger.put(put(2)).unwrap();
        ledger.verify(second).unwrap();
        if is_deleted {
            ledger.run_effects();
        }
        ledger.state = ledger.state.durable_state();
        ledger.run_effects();
        // A client that connects again counts its calls from the beginning.
        let again = ledger.begin_outcome(put(1)).unwrap();
        match again {
            Outcome::Retry { id, number: 1, .. } => assert_eq!((id, is_pinned), (first, true)),
            Outcome::Begun { number, .. } => assert_eq!((number, is_pinned), (3, false)),
            other => panic!("{is_deleted}, {is_pinned}: {other:?}"),
        }
    }
}

#[test]
fn retain_sets_retention() {
    let mut ledger = TestLedger::default();
    assert_eq!(ledger.state.retention(), (NonZeroU32::MIN, None));
    let (keep, ttl) = (NonZeroU32::new(3).unwrap(), Some(Duration::from_mins(2)));
    ledger.apply(Command::Retain { keep, ttl }).unwrap();
    assert_eq!(ledger.state.retention(), (keep, ttl));
}

/// A step that changes only leases needs no record.
#[test]
fn lease_only_changes_are_detected() {
    let mut ledger = TestLedger::default();
    ledger.put(single_put(Some(1))).unwrap();
    ledger.run_effects();
    let before = ledger.state.clone();
    assert!(!before.differs_only_in_leases(&before));
    ledger.lease(1, Selector::Newest).unwrap();
    assert!(before.differs_only_in_leases(&ledger.state));
    assert!(ledger.state.differs_only_in_leases(&before));
    ledger.apply(Command::Pin { selector: Selector::Newest, label: label("best") }).unwrap();
    assert!(!before.differs_only_in_leases(&ledger.state));
}

/// A version whose archives are deltas needs those from which they are computed.
#[test]
fn bases_of_readable_versions_are_kept() {
    let mut ledger = TestLedger::with_keep(1);
    let put = |ledger: &mut TestLedger, number, base| {
        ledger.base = base;
        let id = ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
        id
    };
    let anchor = put(&mut ledger, 1, None);
    let second = put(&mut ledger, 2, Some(anchor));
    let third = put(&mut ledger, 3, Some(second));
    let ids = |ledger: &TestLedger| ledger.state.versions().map(|it| it.id).collect::<Vec<_>>();
    assert_eq!((ids(&ledger), ledger.visible_numbers()), (vec![anchor, second, third], vec![3]));
    // Their data is not deleted, and they cannot be read.
    let refusal = ledger.apply(Command::Reclaimed { id: anchor }).unwrap_err();
    assert_eq!(refusal, Refusal::InUse { number: 1 });
    assert!(matches!(ledger.lease(1, Selector::Id(second)), Err(Refusal::NotFound { .. })));
    // A lease holds all of them, and the next whole version replaces them.
    ledger.lease(2, Selector::Id(third)).unwrap();
    let whole = put(&mut ledger, 4, None);
    assert_eq!(ids(&ledger), [anchor, second, third, whole]);
    ledger.apply(Command::Release { lease: LeaseId(2) }).unwrap();
    assert_eq!(pending(&ledger.state).len(), 3);
    // A version that will be deleted is no base any more.
    let next = single_put(Some(5));
    let id = ledger.begin(next).unwrap();
    for base in [anchor, third, id, VersionId(u128::MAX)] {
        ledger.base = Some(base);
        let refusal = ledger.commit(id, next, 7).unwrap_err();
        assert_eq!(refusal, Refusal::BaseDeleted { base });
    }
    ledger.run_effects();
    assert_eq!(ids(&ledger), [whole, id]);
    ledger.base = Some(whole);
    ledger.commit(id, next, 7).unwrap();
    // A repeated commit succeeds, also if its base is deleted.
    ledger.base = Some(anchor);
    ledger.run_effects();
    ledger.commit(id, next, 7).unwrap();
    assert_eq!(ids(&ledger), [whole, id]);
}
