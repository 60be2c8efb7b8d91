//! How an open version ends: visible, superseded, rejected, abandoned.

use super::*;

#[test]
fn a_version_is_visible_when_all_have_committed_and_the_proof_has_come() {
    let mut ledger = Ledger::default();
    let id = ledger.begin(step_of("a", 0, 5)).unwrap();
    assert_eq!(ledger.begin(step_of("a", 1, 5)), Ok(id));
    let missing = writers("1");
    assert_eq!(
        ledger.commit(id, step_of("a", 0, 5), 1),
        Ok(Outcome::Committed { visible: false, missing: missing.clone() })
    );
    assert_eq!(ledger.prove(id), Err(Refusal::NotProving { number: 5, missing }));
    ledger.commit(id, step_of("a", 1, 5), 2).unwrap();
    assert_eq!(pending(&ledger.state), [Effect::Prove { id }]);
    assert!(ledger.state.head().is_none());
    ledger.prove(id).unwrap();
    assert_eq!(ledger.state.head().unwrap().id, id);
    // The same one again, whoever keeps it.
    let (name, digest, keeper) = (format!("{id}"), Digest([1; 16]), Some(SessionId(3)));
    let manifest = ManifestReference { name, digest, file_len: 1, keeper };
    let again = Command::Proved { id, manifest, now: Timestamp(0) };
    assert_eq!(ledger.give(again), Ok(Outcome::Done));
    let other = ManifestReference {
        name: "other".to_owned(),
        digest: Digest([2; 16]),
        file_len: 1,
        keeper: None,
    };
    let again = Command::Proved { id, manifest: other, now: Timestamp(0) };
    assert_eq!(ledger.give(again), Err(Refusal::ManifestDiffers { number: 5 }));
}

#[test]
fn a_version_that_becomes_visible_supersedes_older_open_ones() {
    let mut ledger = Ledger::default();
    let slow = ledger.put(step_of("a", 0, 5)).unwrap();
    for writer in [0, 1] {
        ledger.put(step_of("a", writer, 6)).unwrap();
    }
    ledger.settle();
    assert_eq!(ledger.reason(slow), Reason::Superseded { by: 6 });
    let refusal = Refusal::Dropped { number: 5, reason: Reason::Superseded { by: 6 } };
    assert_eq!(ledger.begin(step_of("a", 1, 5)), Err(refusal));
}

/// Before its data is deleted and after.
#[test]
fn a_slow_writer_learns_what_superseded_its_version_and_nobody_else_does() {
    let mut ledger = Ledger::default();
    let aborted = ledger.begin(step_of("a", 0, 4)).unwrap();
    ledger.give(Command::Abort { id: aborted, writer: 0 }).unwrap();
    let slow = ledger.put(step_of("a", 0, 5)).unwrap();
    for writer in [0, 1] {
        ledger.put(step_of("a", writer, 6)).unwrap();
    }
    let newest = ledger.state.open().next_back().unwrap().id;
    ledger.prove(newest).unwrap();
    for deleted in [false, true] {
        if deleted {
            ledger.settle();
        }
        assert_eq!(ledger.state.versions().any(|version| version.id == slow), !deleted);
        let superseded = Refusal::Dropped { number: 5, reason: Reason::Superseded { by: 6 } };
        assert_eq!(ledger.begin(step_of("a", 1, 5)), Err(superseded));
        for (job, number) in [("a", 3), ("a", 4), ("b", 5)] {
            let refusal = Refusal::VersionNotNewer { number, highest: 6 };
            assert_eq!(ledger.begin(step_of(job, 1, number)), Err(refusal), "{job} {number}");
        }
    }
}

#[test]
fn a_third_put_waits() {
    let mut ledger = Ledger::default();
    let on: Vec<_> = (5..7).map(|number| ledger.put(step_of("a", 0, number)).unwrap()).collect();
    let before = ledger.state.clone();
    assert_eq!(ledger.begin_outcome(step_of("a", 0, 7)), Ok(Outcome::Wait { on }));
    assert_eq!(ledger.state, before);
    ledger.put(step_of("a", 1, 5)).unwrap();
    ledger.settle();
    ledger.begin(step_of("a", 0, 7)).unwrap();
}

#[test]
fn a_rejected_version_is_dropped_and_everyone_learns_why() {
    let mut ledger = Ledger::default();
    for writer in [0, 1] {
        ledger.put(step_of("a", writer, 5)).unwrap();
    }
    let Some(&Effect::Prove { id }) = pending(&ledger.state).first() else { panic!() };
    let reason = "hole in `w` at [0:2]: writers 0-1".to_owned();
    ledger.give(Command::Rejected { id, reason: reason.clone() }).unwrap();
    ledger.settle();
    let reason = Reason::Rejected { reason };
    assert_eq!(ledger.reason(id), reason);
    let refusal = Refusal::Dropped { number: 5, reason };
    assert_eq!(ledger.commit(id, step_of("a", 0, 5), 7), Err(refusal));
    ledger.put(step_of("a", 0, 5)).unwrap();
}

#[test]
fn an_open_version_is_abandoned_after_ten_minutes() {
    let mut ledger = Ledger::default();
    let half = ledger.put(step_of("a", 0, 5)).unwrap();
    let full = ledger.begin(alone(None)).unwrap();
    ledger.now = 9 * MINUTE;
    ledger.commit(full, alone(None), 7).unwrap();
    ledger.now = 10 * MINUTE;
    ledger.expire();
    assert_eq!(ledger.reason(half), Reason::Abandoned { missing: writers("1") });
    ledger.now = 19 * MINUTE;
    ledger.expire();
    assert_eq!(ledger.reason(full), Reason::Abandoned { missing: WriterSet::default() });
}

#[test]
fn what_a_process_has_begun_ends_with_it() {
    let mut ledger = Ledger::default();
    let of = |session, put| Put { session: Some(session), ..put };
    let alone = ledger.begin(of(1, alone(None))).unwrap();
    ledger.end(2);
    assert!(ledger.state.open().any(|version| version.id == alone));
    ledger.end(1);
    assert_eq!(ledger.reason(alone), Reason::Aborted { writer: 0 });
    // What is committed stays, and who begins anew has another process.
    let half = ledger.put(of(3, step_of("a", 0, 5))).unwrap();
    assert_eq!(ledger.begin(of(4, step_of("a", 1, 5))), Ok(half));
    ledger.end(3);
    ledger.end(4);
    assert_eq!(ledger.begin(of(5, step_of("a", 1, 5))), Ok(half));
    ledger.end(4);
    let committed = Outcome::Committed { visible: false, missing: WriterSet::default() };
    assert_eq!(ledger.commit(half, step_of("a", 1, 5), 2), Ok(committed));
}

#[test]
fn a_refusal_says_what_is_wrong_and_what_to_do() {
    let mut ledger = Ledger::default();
    let id = ledger.put(step_of("a", 0, 5)).unwrap();
    ledger.now = 10 * MINUTE;
    ledger.expire();
    let refusal = ledger.commit(id, step_of("a", 0, 5), 7).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "version 5 was abandoned: writers 1 did not commit in time; put again in every writer"
    );
}

#[test]
fn a_refusal_names_what_it_is_about() {
    let another = Refusal::JobsDisagree { number: 5, declared: None, expected: Some(job_id("a")) };
    let abandoned = |missing| {
        let reason = Reason::Abandoned { missing: writers(missing) };
        Refusal::Dropped { number: 5, reason }
    };
    let unknown = |selector, newest| Refusal::NotFound { selector, newest, coming: None };
    let coming = |missing| {
        let coming = Some((3, writers(missing)));
        Refusal::NotFound { selector: Selector::Newest, newest: None, coming }
    };
    for (refusal, text) in [
        (Refusal::Fenced { by: job_id("b") }, "job b has taken over the key"),
        (another, "version 5 takes contributions of job a, not of no job"),
        (unknown(Selector::Number(3), Some(5)), "no visible version is number 3: the newest is 5"),
        (unknown(Selector::Newest, None), "no version is visible"),
        (coming("1-2"), "no version is visible, and version 3 waits for writers 1-2"),
        (coming(""), "no version is visible"),
        (abandoned("1-2"), "version 5 was abandoned: writers 1-2 did not commit in time"),
        (abandoned(""), "version 5 was abandoned: nobody proved it in time"),
    ] {
        let said = refusal.to_string();
        assert_eq!(said.split("; ").next(), Some(text), "{said}");
    }
}

#[test]
fn what_a_process_kept_alone_is_lost_with_it() {
    let mut ledger = Ledger::default();
    let kept_by = |ledger: &mut Ledger, id, put: Put<'_>, keeper: u128| {
        ledger.keeper = Some(SessionId(keeper));
        ledger.commit(id, put, 7).unwrap();
        ledger.keeper = None;
    };
    let id = ledger.begin(step_of("a", 0, 5)).unwrap();
    ledger.begin(step_of("a", 1, 5)).unwrap();
    kept_by(&mut ledger, id, step_of("a", 0, 5), 1);
    kept_by(&mut ledger, id, step_of("a", 1, 5), 2);
    ledger.prove(id).unwrap();
    ledger.give(Command::Pin { selector: Selector::Newest, label: "best".to_owned() }).unwrap();
    // Somebody else keeps it too.
    let keep = Command::Keep { id, writers: writers("1"), session: SessionId(3) };
    let let_go = |session| Command::LetGo { id, writer: 1, session: SessionId(session) };
    ledger.give(keep.clone()).unwrap();
    // Who keeps it only because it was read may let go of it, and keep it again.
    ledger.give(let_go(3)).unwrap();
    ledger.give(keep).unwrap();
    ledger.end(2);
    assert!(ledger.state.head().is_some());
    // Now nobody else keeps it.
    ledger.give(let_go(3)).unwrap();
    assert!(ledger.state.head().is_some());
    ledger.end(3);
    let reason = Reason::Lost { writers: writers("1"), slices: String::new() };
    assert_eq!(ledger.reason(id), reason);
    assert_eq!(pending(&ledger.state), [Effect::Delete { id, epoch: 0, number: 5 }]);
    let lost = Refusal::Dropped { number: 5, reason };
    for selector in [Selector::Newest, Selector::Number(5), Selector::Id(id)] {
        assert_eq!(ledger.state.found(selector).err().as_ref(), Some(&lost));
    }
    ledger.settle();
    assert_eq!(ledger.state.found(Selector::Number(5)).err(), Some(lost));
}

#[test]
fn what_is_abandoned_by_name_is_that_and_nothing_else() {
    let mut ledger = Ledger::default();
    let [given_up, other] = [5, 6].map(|number| ledger.begin(step_of("a", 0, number)).unwrap());
    ledger.give(Command::Abandon { id: given_up }).unwrap();
    assert_eq!(ledger.reason(given_up), Reason::Abandoned { missing: writers("0-1") });
    let open: Vec<VersionId> = ledger.state.open().map(|version| version.id).collect();
    assert_eq!(open, [other]);
}

/// Those that have begun something, that keep something, and that read something.
#[test]
fn a_ledger_knows_the_processes_that_matter_to_it() {
    let mut ledger = Ledger { keeper: Some(SessionId(1)), ..Ledger::default() };
    let sessions = |ledger: &Ledger| Vec::from_iter(ledger.state.sessions());
    ledger.put(alone(Some(1))).unwrap();
    ledger.settle();
    assert_eq!(sessions(&ledger), [SessionId(1)]);
    ledger.begin(Put { session: Some(2), ..alone(Some(2)) }).unwrap();
    assert_eq!(sessions(&ledger), [1, 2].map(SessionId));
    for (lease, holder) in [(1, SessionId(3).to_string()), (2, "somebody".to_owned())] {
        let (selector, ttl) = (Selector::Newest, Duration::from_mins(1));
        let (lease, now) = (LeaseId(lease), Timestamp(0));
        ledger.give(Command::Lease { selector, lease, holder, ttl, now }).unwrap();
    }
    assert_eq!(sessions(&ledger), [1, 2, 3].map(SessionId));
    ledger.end(2);
    assert_eq!(sessions(&ledger), [1, 3].map(SessionId));
}
