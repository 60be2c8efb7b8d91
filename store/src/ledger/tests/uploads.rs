//! Tests of versions that are uploaded to a bucket: retention, loss of replicas, copies, restore.

use super::*;

fn bucket_put(number: u64) -> Put<'static> {
    Put { durability: Durability::Object, ..single_put(Some(number)) }
}

impl TestLedger {
    fn mark_uploaded(&mut self, id: VersionId) {
        self.apply(Command::Uploaded { id }).unwrap();
    }
}

#[test]
fn pending_upload_is_kept_until_it_ends() {
    let mut ledger = TestLedger::with_keep(1);
    let ids = [1, 2, 3].map(|number| {
        let id = ledger.put(bucket_put(number)).unwrap();
        ledger.run_effects();
        id
    });
    ledger.put(single_put(Some(4))).unwrap();
    ledger.run_effects();
    assert_eq!(ledger.visible_numbers(), [1, 2, 3, 4]);
    assert_eq!(ledger.state.durable_state().versions().count(), 0);
    ledger.mark_uploaded(ids[0]);
    assert_eq!(ledger.visible_numbers(), [1, 2, 3, 4], "the newest that lasts");
    ledger.mark_uploaded(ids[1]);
    assert_eq!(ledger.visible_numbers(), [2, 3, 4]);
    // A restart finds the version, and its numbers continue from there.
    assert_eq!(ledger.state.durable_state().head().unwrap().id, ids[1]);
    assert_eq!(ledger.state.durable_state().highest(), Some(2));
    // A late report does not lower the highest durable number.
    ledger.mark_uploaded(ids[0]);
    assert_eq!(ledger.state.durable_state().highest(), Some(2));
    ledger.apply(Command::NotUploaded { id: ids[2] }).unwrap();
    assert_eq!(ledger.visible_numbers(), [2, 4]);
    // The upload of this version is complete, so the report changes nothing.
    ledger.apply(Command::NotUploaded { id: ids[1] }).unwrap();
    assert_eq!(ledger.visible_numbers(), [2, 4]);
}

#[test]
fn uploaded_version_outlives_its_replicas() {
    let mut ledger = TestLedger { replica_session: Some(SessionId(7)), ..TestLedger::with_keep(2) };
    let ids = [1, 2].map(|number| {
        let id = ledger.put(bucket_put(number)).unwrap();
        ledger.run_effects();
        id
    });
    ledger.mark_uploaded(ids[0]);
    ledger.end_session(7);
    assert_eq!(ledger.visible_numbers(), [1]);
    assert_eq!(
        ledger.drop_reason(ids[1]),
        Reason::Lost { writers: writers("0"), slices: String::new() }
    );
    assert_eq!(ledger.apply(Command::Uploaded { id: ids[1] }), {
        let reason = Reason::Lost { writers: writers("0"), slices: String::new() };
        Err(Refusal::Dropped { number: 2, reason })
    });
}

#[test]
fn upload_of_invisible_version_is_refused() {
    let mut ledger = TestLedger::default();
    let id = ledger.begin(bucket_put(1)).unwrap();
    let missing = writers("0");
    let refusal = Refusal::NotFullyCommitted { number: 1, missing };
    assert_eq!(ledger.apply(Command::Uploaded { id }), Err(refusal));
    let unknown = VersionId(99);
    let refusal = Refusal::UnknownVersion { id: unknown };
    assert_eq!(ledger.apply(Command::Uploaded { id: unknown }), Err(refusal));
    // The durability of this version is `Memory`, so the report changes nothing.
    let id = ledger.put(single_put(Some(2))).unwrap();
    ledger.run_effects();
    ledger.mark_uploaded(id);
    assert_eq!(ledger.state.durable_state().versions().count(), 0);
}

#[test]
fn copy_has_epoch_and_number_of_its_source() {
    let mut ledger = TestLedger::with_keep(3);
    let copy = |number, epoch| Put { epoch: Some(epoch), ..single_put(Some(number)) };
    for (number, epoch) in [(4, 0), (7, 0), (8, 2)] {
        ledger.put(copy(number, epoch)).unwrap();
        ledger.run_effects();
    }
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (2, vec![4, 7, 8]));
    // Meanwhile, the key was rewound in the source store.
    ledger.put(copy(5, 3)).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (3, vec![4, 5]));
    for (number, epoch) in [(5, 3), (9, 2)] {
        let refusal = Refusal::VersionNotNewer { number, highest: 5, earlier: None };
        assert_eq!(ledger.begin(copy(number, epoch)), Err(refusal));
    }
    // A copy waits for another open version with its number and does not join it.
    let other = ledger.begin(Put { writer: 1, writers: "1", ..single_put(Some(6)) }).unwrap();
    assert_eq!(ledger.begin_outcome(copy(6, 3)), Ok(Outcome::Wait { blocking: vec![other] }));
    // A copy has no time limit.
    let id = ledger.begin(copy(9, 3)).unwrap();
    ledger.now = 10 * MINUTE;
    ledger.expire();
    let open: Vec<VersionId> = ledger.state.open().map(|version| version.id).collect();
    assert_eq!((open, ledger.visible_numbers()), (vec![id], vec![4, 5]));
}

#[test]
fn restored_state_has_visible_versions_of_bucket() {
    let mut ledger = TestLedger { replica_session: Some(SessionId(7)), ..TestLedger::with_keep(2) };
    for number in 1..=3 {
        ledger.put(single_put(Some(number))).unwrap();
        ledger.run_effects();
    }
    ledger.apply(Command::Pin { selector: Selector::Newest, label: label("best") }).unwrap();
    ledger.begin(Put { session: Some(8), ..single_put(Some(4)) }).unwrap();
    let restored = ledger.state.restored_state();
    assert_eq!(restored.highest(), Some(3));
    assert_eq!(restored.open().count(), 0);
    assert_eq!(restored.retention(), ledger.state.retention());
    assert_eq!(restored.pins().count(), 1);
    let numbers: Vec<u64> = restored.visible().map(|version| version.number).collect();
    assert_eq!(numbers, [2, 3]);
    assert!(restored.versions().all(|version| version.uploaded && version.is_durable()));
    assert_eq!(restored.durable_state(), restored);
}
