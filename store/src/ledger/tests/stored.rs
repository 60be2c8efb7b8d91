//! Versions that go on to a bucket: until when they are kept, what outlasts whom, what a copy is.

use super::*;

fn object(number: u64) -> Put<'static> {
    Put { durability: Durability::Object, ..alone(Some(number)) }
}

impl Ledger {
    fn stored(&mut self, id: VersionId) {
        self.give(Command::Stored { id }).unwrap();
    }
}

#[test]
fn what_is_on_its_way_stays_until_it_is_there_or_never_will_be() {
    let mut ledger = Ledger::keeping(1);
    let ids = [1, 2, 3].map(|number| {
        let id = ledger.put(object(number)).unwrap();
        ledger.settle();
        id
    });
    ledger.put(alone(Some(4))).unwrap();
    ledger.settle();
    assert_eq!(ledger.visible(), [1, 2, 3, 4]);
    assert_eq!(ledger.state.durable().versions().count(), 0);
    ledger.stored(ids[0]);
    assert_eq!(ledger.visible(), [1, 2, 3, 4], "the newest that lasts");
    ledger.stored(ids[1]);
    assert_eq!(ledger.visible(), [2, 3, 4]);
    // A restart finds it, and the numbers go on from there.
    assert_eq!(ledger.state.durable().head().unwrap().id, ids[1]);
    assert_eq!(ledger.state.durable().highest(), Some(2));
    // Late is as good.
    ledger.stored(ids[0]);
    assert_eq!(ledger.state.durable().highest(), Some(2));
    ledger.give(Command::NotStored { id: ids[2] }).unwrap();
    assert_eq!(ledger.visible(), [2, 4]);
    // What is there is there.
    ledger.give(Command::NotStored { id: ids[1] }).unwrap();
    assert_eq!(ledger.visible(), [2, 4]);
}

#[test]
fn what_is_in_the_bucket_outlasts_who_kept_it() {
    let mut ledger = Ledger { keeper: Some(SessionId(7)), ..Ledger::keeping(2) };
    let ids = [1, 2].map(|number| {
        let id = ledger.put(object(number)).unwrap();
        ledger.settle();
        id
    });
    ledger.stored(ids[0]);
    ledger.end(7);
    assert_eq!(ledger.visible(), [1]);
    assert_eq!(
        ledger.reason(ids[1]),
        Reason::Lost { writers: writers("0"), slices: String::new() }
    );
    assert_eq!(ledger.give(Command::Stored { id: ids[1] }), {
        let reason = Reason::Lost { writers: writers("0"), slices: String::new() };
        Err(Refusal::Dropped { number: 2, reason })
    });
}

#[test]
fn only_what_was_visible_is_stored() {
    let mut ledger = Ledger::default();
    let id = ledger.begin(object(1)).unwrap();
    let missing = writers("0");
    let refusal = Refusal::NotProving { number: 1, missing };
    assert_eq!(ledger.give(Command::Stored { id }), Err(refusal));
    let unknown = VersionId(99);
    let refusal = Refusal::Unknown { id: unknown };
    assert_eq!(ledger.give(Command::Stored { id: unknown }), Err(refusal));
    // To be in memory was all that was asked for.
    let id = ledger.put(alone(Some(2))).unwrap();
    ledger.settle();
    ledger.stored(id);
    assert_eq!(ledger.state.durable().versions().count(), 0);
}

#[test]
fn a_copy_has_the_place_of_what_it_is_a_copy_of() {
    let mut ledger = Ledger::keeping(3);
    let copy = |number, epoch| Put { epoch: Some(epoch), ..alone(Some(number)) };
    for (number, epoch) in [(4, 0), (7, 0), (8, 2)] {
        ledger.put(copy(number, epoch)).unwrap();
        ledger.settle();
    }
    assert_eq!((ledger.state.epoch(), ledger.visible()), (2, vec![4, 7, 8]));
    // The key was rewound there meanwhile.
    ledger.put(copy(5, 3)).unwrap();
    ledger.settle();
    assert_eq!((ledger.state.epoch(), ledger.visible()), (3, vec![4, 5]));
    for (number, epoch) in [(5, 3), (9, 2)] {
        let refusal = Refusal::VersionNotNewer { number, highest: 5 };
        assert_eq!(ledger.begin(copy(number, epoch)), Err(refusal));
    }
    // Another version that is open with its number is none of its own.
    let other = ledger.begin(Put { writer: 1, writers: "1", ..alone(Some(6)) }).unwrap();
    assert_eq!(ledger.begin_outcome(copy(6, 3)), Ok(Outcome::Wait { on: vec![other] }));
    // A copy takes the time that it takes.
    let id = ledger.begin(copy(9, 3)).unwrap();
    ledger.now = 10 * MINUTE;
    ledger.expire();
    let open: Vec<VersionId> = ledger.state.open().map(|version| version.id).collect();
    assert_eq!((open, ledger.visible()), (vec![id], vec![4, 5]));
}

#[test]
fn who_has_nothing_but_the_bucket_finds_what_is_visible_there() {
    let mut ledger = Ledger { keeper: Some(SessionId(7)), ..Ledger::keeping(2) };
    for number in 1..=3 {
        ledger.put(alone(Some(number))).unwrap();
        ledger.settle();
    }
    ledger.give(Command::Pin { selector: Selector::Newest, label: "best".to_owned() }).unwrap();
    ledger.begin(Put { session: Some(8), ..alone(Some(4)) }).unwrap();
    let restored = ledger.state.restored();
    assert_eq!(restored.highest(), Some(3));
    assert_eq!(restored.open().count(), 0);
    assert_eq!(restored.retention(), ledger.state.retention());
    assert_eq!(restored.pins().count(), 1);
    let numbers: Vec<u64> = restored.visible().map(|version| version.number).collect();
    assert_eq!(numbers, [2, 3]);
    assert!(restored.versions().all(|version| version.stored && version.is_durable()));
    assert_eq!(restored.durable(), restored);
}
