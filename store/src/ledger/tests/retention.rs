//! Leases, pins and retention: how long a visible version stays.

use super::*;

#[test]
fn a_lease_holds_the_data_until_it_is_released_and_not_until_it_expires() {
    let mut ledger = Ledger::default();
    let id = ledger.put(alone(Some(1))).unwrap();
    ledger.settle();
    ledger.lease(1, Selector::Newest).unwrap();
    ledger.lease(2, Selector::Id(id)).unwrap();
    ledger.put(alone(Some(2))).unwrap();
    ledger.settle();
    assert_eq!((ledger.visible(), ledger.state.versions().count()), (vec![2], 2));
    let selector = Selector::Number(1);
    let refused = Refusal::NotFound { selector, newest: Some(2), coming: None };
    assert_eq!(ledger.lease(3, selector), Err(refused));
    ledger.lease(1, Selector::Newest).unwrap();

    ledger.now = MINUTE;
    ledger.expire();
    let lease = LeaseId(1);
    assert!(ledger.state.lease(lease).unwrap().expired);
    assert_eq!(ledger.lease(1, Selector::Newest), Err(Refusal::LeaseExpired { lease }));
    assert_eq!(ledger.give(Command::Reclaimed { id }), Err(Refusal::InUse { number: 1 }));

    ledger.give(Command::Release { lease }).unwrap();
    assert!(pending(&ledger.state).is_empty());
    ledger.give(Command::HolderGone { holder: "reader".to_owned() }).unwrap();
    assert_eq!(pending(&ledger.state), [Effect::Delete { id, epoch: 0, number: 1 }]);
}

#[test]
fn retention_keeps_the_newest_and_the_pinned() {
    let mut ledger = Ledger::keeping(2);
    let label = || "best".to_owned();
    for number in 1..=5 {
        ledger.put(alone(Some(number))).unwrap();
        ledger.settle();
        if number == 2 {
            let selector = Selector::Newest;
            ledger.give(Command::Pin { selector, label: label() }).unwrap();
        }
    }
    assert_eq!(ledger.visible(), [2, 4, 5]);
    let selector = Selector::Number(4);
    ledger.give(Command::Pin { selector, label: label() }).unwrap();
    assert_eq!(ledger.visible(), [4, 5]);

    let (keep, ttl) = (NonZeroU32::MIN, Some(Duration::from_mins(1)));
    ledger.give(Command::Retain { keep, ttl }).unwrap();
    ledger.now = MINUTE - 1;
    ledger.expire();
    assert_eq!(ledger.visible(), [4, 5]);
    ledger.now = MINUTE;
    ledger.expire();
    ledger.settle();
    assert_eq!(ledger.visible(), [4]);
    ledger.give(Command::Delete { selection: Selection::Number(4) }).unwrap();
    assert_eq!((ledger.visible(), pending(&ledger.state)), (vec![], vec![]));
    ledger.give(Command::Unpin { label: label() }).unwrap();
    assert_eq!(pending(&ledger.state).len(), 1);
}

#[test]
fn what_is_not_selected_is_not_deleted() {
    let mut ledger = Ledger::keeping(3);
    for number in 1..=3 {
        ledger.put(alone(Some(number))).unwrap();
        ledger.settle();
    }
    let oldest = ledger.state.visible().next().unwrap().id;
    for (selection, left) in [
        (Selection::Number(2), vec![1, 3]),
        (Selection::Id(oldest), vec![3]),
        (Selection::All, vec![]),
    ] {
        ledger.give(Command::Delete { selection }).unwrap();
        assert_eq!(ledger.visible(), left);
    }
}

#[test]
fn memories_are_bounded() {
    let mut ledger = Ledger::default();
    for number in 0..200 {
        let id = ledger.begin(alone(Some(number))).unwrap();
        ledger.give(Command::Abort { id, writer: 0 }).unwrap();
        ledger.settle();
    }
    let is_known = |id| ledger.state.outcome_of(VersionId(id)).is_some();
    let known: Vec<_> = (1..=200).filter(|id| is_known(*id)).collect();
    assert_eq!((known.len(), known[0]), (MAX_ENDED, 137));
    assert!(matches!(ledger.state.outcome_of(VersionId(200)), Some(Fate::Dropped(_))));
    for number in 0..64 {
        let id = ledger.begin(alone(Some(number))).unwrap();
        ledger.give(Command::Abort { id, writer: 0 }).unwrap();
    }
    let Ok(Outcome::Wait { on }) = ledger.begin_outcome(alone(None)) else { panic!() };
    assert_eq!(on.len(), MAX_DELETIONS);
}

#[test]
fn what_is_in_memory_does_not_retire_what_a_restart_would_find() {
    let mut ledger = Ledger::default();
    for number in 1..=6 {
        let durability = if number % 3 == 2 { Durability::Disk } else { Durability::Memory };
        ledger.put(Put { durability, ..alone(Some(number)) }).unwrap();
        ledger.settle();
        let expected = match number {
            1 => vec![1],
            2 => vec![2],
            5 => vec![5],
            3 | 4 => vec![2, number],
            _ => vec![5, 6],
        };
        assert_eq!(ledger.visible(), expected);
    }
    let restarted = ledger.state.durable();
    let numbers: Vec<u64> = restarted.visible().map(|version| version.number).collect();
    assert_eq!((numbers, restarted.highest()), (vec![5], Some(5)));
}

#[test]
fn a_restart_knows_what_is_on_disk_and_what_is_said_of_the_key() {
    let mut ledger = Ledger::keeping(2);
    let put = |call, durability| Put { writers: "0", durability, ..call_of("a", 0, call) };
    let on_disk = ledger.put(put(0, Durability::Disk)).unwrap();
    ledger.settle();
    ledger.put(put(1, Durability::Memory)).unwrap();
    ledger.settle();
    for (label, number) in [("disk", 1), ("memory", 2)] {
        let selector = Selector::Number(number);
        ledger.give(Command::Pin { selector, label: label.to_owned() }).unwrap();
    }
    ledger.lease(1, Selector::Number(1)).unwrap();
    ledger.begin(put(2, Durability::Disk)).unwrap();

    ledger.state = ledger.state.durable();
    let numbers: Vec<u64> = ledger.state.versions().map(|version| version.number).collect();
    assert_eq!((numbers, ledger.state.lease(LeaseId(1))), (vec![1], None));
    assert_eq!(ledger.state.pins().collect::<Vec<_>>(), [("disk", on_disk)]);
    assert_eq!(ledger.state.job(), Some(&job_id("a")));
    // The call that memory alone knew may come again, of other writers, and gets the number again.
    let again = ledger.begin_outcome(call_of("a", 0, 1)).unwrap();
    assert!(matches!(again, Outcome::Begun { number: 2, .. }), "{again:?}");
}

#[test]
fn a_call_means_the_same_after_a_restart_whether_its_version_was_deleted_before_or_not() {
    for (is_deleted, is_pinned) in [(true, false), (false, false), (false, true)] {
        let mut ledger = Ledger::keeping(1);
        let put =
            |call| Put { writers: "0", durability: Durability::Disk, ..call_of("a", 0, call) };
        let first = ledger.put(put(1)).unwrap();
        ledger.settle();
        if is_pinned {
            let (selector, label) = (Selector::Newest, "best".to_owned());
            ledger.give(Command::Pin { selector, label }).unwrap();
        }
        let second = ledger.put(put(2)).unwrap();
        ledger.prove(second).unwrap();
        if is_deleted {
            ledger.settle();
        }
        ledger.state = ledger.state.durable();
        ledger.settle();
        // Whoever connects again counts from the beginning.
        let again = ledger.begin_outcome(put(1)).unwrap();
        match again {
            Outcome::Retry { id, number: 1, .. } => assert_eq!((id, is_pinned), (first, true)),
            Outcome::Begun { number, .. } => assert_eq!((number, is_pinned), (3, false)),
            other => panic!("{is_deleted}, {is_pinned}: {other:?}"),
        }
    }
}

#[test]
fn what_is_kept_is_what_was_asked_for() {
    let mut ledger = Ledger::default();
    assert_eq!(ledger.state.retention(), (NonZeroU32::MIN, None));
    let (keep, ttl) = (NonZeroU32::new(3).unwrap(), Some(Duration::from_mins(2)));
    ledger.give(Command::Retain { keep, ttl }).unwrap();
    assert_eq!(ledger.state.retention(), (keep, ttl));
}

/// Such a step needs no record of its own.
#[test]
fn a_step_of_readers_alone_is_told_from_others() {
    let mut ledger = Ledger::default();
    ledger.put(alone(Some(1))).unwrap();
    ledger.settle();
    let before = ledger.state.clone();
    assert!(!before.differs_in_leases_alone(&before));
    ledger.lease(1, Selector::Newest).unwrap();
    assert!(before.differs_in_leases_alone(&ledger.state));
    assert!(ledger.state.differs_in_leases_alone(&before));
    ledger.give(Command::Pin { selector: Selector::Newest, label: "best".to_owned() }).unwrap();
    assert!(!before.differs_in_leases_alone(&ledger.state));
}
