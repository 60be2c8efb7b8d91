//! Tests of rollbacks, and of labels that select versions.

use super::*;

/// Returns a ledger with versions 1 to 4, of which it keeps `keep`, and their ids.
fn ledger_of_four(keep: u32) -> (TestLedger, Vec<VersionId>) {
    let mut ledger = TestLedger::with_keep(keep);
    let put = |number| {
        let id = ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
        id
    };
    let ids = (1..=4).map(put).collect();
    (ledger, ids)
}

fn rollback(ledger: &mut TestLedger, selector: Selector) -> Result<Outcome, Refusal> {
    let now = Timestamp(ledger.now);
    ledger.apply(Command::Rollback { selector, position: None, now })
}

fn positions(ledger: &TestLedger) -> Vec<(u32, u64)> {
    ledger.state.visible().map(|version| (version.epoch, version.number)).collect()
}

#[test]
fn rollback_gives_old_version_next_number_in_new_epoch() {
    let (mut ledger, ids) = ledger_of_four(9);
    let before = ledger.state.version(&Selector::Id(ids[1])).unwrap().clone();
    assert_eq!(rollback(&mut ledger, Selector::Number(2)), Ok(Outcome::RolledBack { id: ids[1] }));
    assert_eq!(positions(&ledger), [(0, 1), (0, 3), (0, 4), (1, 5)]);
    let newest = ledger.state.head().unwrap();
    assert_eq!((newest.id, newest.stored_position()), (ids[1], before.position()));
    assert_eq!(newest.contributions, before.contributions);
    assert_eq!((ledger.state.epoch(), ledger.state.highest()), (1, Some(5)));
    // The old number selects nothing, and the next put follows.
    assert!(ledger.state.version(&Selector::Number(2)).is_none());
    ledger.put(single_put(None)).unwrap();
    ledger.run_effects();
    assert_eq!(positions(&ledger).last(), Some(&(1, 6)));
    // A second rollback to it keeps the place of its data.
    rollback(&mut ledger, Selector::Id(ids[1])).unwrap();
    let newest = ledger.state.head().unwrap();
    assert_eq!((newest.epoch, newest.number), (2, 7));
    assert_eq!(newest.stored_position(), before.position());
}

#[test]
fn rollback_to_newest_version_changes_nothing() {
    let (mut ledger, ids) = ledger_of_four(2);
    let before = ledger.state.clone();
    for selector in [Selector::Newest, Selector::Number(4), Selector::Id(ids[3])] {
        assert_eq!(rollback(&mut ledger, selector), Ok(Outcome::RolledBack { id: ids[3] }));
        assert_eq!(ledger.state, before);
    }
    let refusal =
        Refusal::NotFound { selector: Selector::Number(1), newest: Some(4), newest_open: None };
    assert_eq!(rollback(&mut ledger, Selector::Number(1)), Err(refusal));
}

#[test]
fn rollback_retires_and_drops_as_a_put_does() {
    let (mut ledger, ids) = ledger_of_four(2);
    let open = ledger.begin(single_put(Some(7))).unwrap();
    ledger.lease(1, Selector::Number(3)).unwrap();
    rollback(&mut ledger, Selector::Number(3)).unwrap();
    assert_eq!(positions(&ledger), [(0, 4), (1, 5)]);
    assert_eq!(ledger.drop_reason(open), Reason::Superseded { number: 5 });
    // Leases of the version stay valid, and no data of it is deleted.
    ledger.run_effects();
    assert!(ledger.state.is_held(ids[2]));
    ledger.put(single_put(None)).unwrap();
    ledger.put(single_put(None)).unwrap();
    ledger.run_effects();
    assert_eq!(positions(&ledger), [(1, 6), (1, 7)]);
    ledger.apply(Command::Release { lease: LeaseId(1) }).unwrap();
    assert!(pending(&ledger.state).contains(&Effect::Delete { id: ids[2], epoch: 1, number: 5 }));
}

#[test]
fn durable_version_is_newest_after_restart_too() {
    let mut ledger = TestLedger::with_keep(3);
    for number in 1..=3 {
        ledger.put(Put { durability: Durability::Disk, ..single_put(Some(number)) }).unwrap();
        ledger.run_effects();
    }
    rollback(&mut ledger, Selector::Number(1)).unwrap();
    ledger.state = ledger.state.durable_state();
    assert_eq!(positions(&ledger), [(0, 2), (0, 3), (1, 4)]);
    assert_eq!((ledger.state.epoch(), ledger.state.highest()), (1, Some(4)));
}

#[test]
fn version_is_not_rolled_back_to_while_it_is_uploaded() {
    let mut ledger = TestLedger::with_keep(3);
    let put = |number| Put { durability: Durability::Object, ..single_put(Some(number)) };
    let id = ledger.put(put(1)).unwrap();
    ledger.run_effects();
    let second = ledger.put(put(2)).unwrap();
    ledger.run_effects();
    // A bucket refuses a copy of an older epoch, so the upload of version 2 would fail.
    for (number, uploaded) in [(1, id), (2, second)] {
        let refusal = Refusal::UploadPending { number };
        assert_eq!(rollback(&mut ledger, Selector::Number(1)), Err(refusal));
        ledger.apply(Command::Uploaded { id: uploaded }).unwrap();
    }
    rollback(&mut ledger, Selector::Number(1)).unwrap();
    assert_eq!(positions(&ledger), [(0, 2), (1, 3)]);
}

#[test]
fn copy_gets_position_of_its_source() {
    let (mut ledger, ids) = ledger_of_four(9);
    let mut to = |epoch, number| {
        let (selector, position) = (Selector::Id(ids[0]), Some(VersionPosition { epoch, number }));
        ledger.apply(Command::Rollback { selector, position, now: Timestamp(0) })
    };
    let refusal = Refusal::VersionNotNewer { number: 4, highest: 4, earlier: None };
    assert_eq!(to(0, 4), Err(refusal));
    for _ in 0..2 {
        assert_eq!(to(3, 9), Ok(Outcome::RolledBack { id: ids[0] }));
    }
    assert_eq!(positions(&ledger), [(0, 2), (0, 3), (0, 4), (3, 9)]);
}

#[test]
fn label_selects_pinned_version_even_if_it_is_retired() {
    let mut ledger = TestLedger::with_keep(1);
    let pinned = ledger.put(single_put(Some(5))).unwrap();
    ledger.run_effects();
    let pin = Command::Pin { selector: Selector::Newest, label: label("good") };
    ledger.apply(pin).unwrap();
    ledger.put(Put { rewind: true, ..single_put(Some(3)) }).unwrap();
    ledger.run_effects();
    assert_eq!(ledger.visible_numbers(), [3]);
    let good = || Selector::Label(label("good"));
    assert_eq!(ledger.state.version(&good()).unwrap().id, pinned);
    ledger.lease(1, good()).unwrap();
    // A second label, and a rollback, find it too.
    ledger.apply(Command::Pin { selector: good(), label: label("best") }).unwrap();
    rollback(&mut ledger, Selector::Label(label("best"))).unwrap();
    ledger.run_effects();
    assert_eq!(positions(&ledger), [(2, 4)]);
    assert_eq!(ledger.state.head().unwrap().id, pinned);
    // A deletion by label leaves the label and the data.
    let delete = Command::Delete { selection: Selection::Label(label("good")) };
    assert_eq!(ledger.apply(delete), Ok(Outcome::Deleted { ids: vec![pinned] }));
    ledger.run_effects();
    assert_eq!(ledger.state.version(&good()).unwrap().id, pinned);
    for name in ["good", "best"] {
        ledger.apply(Command::Unpin { label: name.to_owned() }).unwrap();
    }
    let refusal = Refusal::NotFound { selector: good(), newest: None, newest_open: None };
    assert_eq!(ledger.lease(2, good()), Err(refusal));
    let delete = Command::Delete { selection: Selection::Label(label("none")) };
    assert_eq!(ledger.apply(delete), Ok(Outcome::Deleted { ids: Vec::new() }));
}

#[test]
fn labels_are_never_numbers() {
    for text in ["good", "v1", "1.5", "step 7", "é"] {
        assert_eq!(Label::new(text).unwrap().as_str(), text);
        let json = serde_json::to_string(&Selector::Label(label(text))).unwrap();
        assert_eq!(serde_json::from_str::<Selector>(&json).unwrap(), Selector::Label(label(text)));
    }
    let long = "x".repeat(MAX_LABEL_BYTES + 1);
    for text in ["", "17", "007", " ", " a", "a ", "a\nb", "\u{1b}[31m", &long] {
        assert_eq!(Label::new(text), Err(InvalidLabel), "{text:?}");
        let json = serde_json::json!({ "label": text }).to_string();
        assert!(serde_json::from_str::<Selector>(&json).is_err(), "{text:?}");
    }
}
