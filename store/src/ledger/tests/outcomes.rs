//! Tests of the outcomes of an open version: visible, superseded, rejected, abandoned, lost.

use super::*;

#[test]
fn version_becomes_visible_after_all_commits_and_verification() {
    let mut ledger = TestLedger::default();
    let id = ledger.begin(numbered_put("a", 0, 5)).unwrap();
    assert_eq!(ledger.begin(numbered_put("a", 1, 5)), Ok(id));
    let missing = writers("1");
    assert_eq!(
        ledger.commit(id, numbered_put("a", 0, 5), 1),
        Ok(Outcome::Committed { visible: false, missing: missing.clone() })
    );
    assert_eq!(ledger.verify(id), Err(Refusal::NotFullyCommitted { number: 5, missing }));
    ledger.commit(id, numbered_put("a", 1, 5), 2).unwrap();
    assert_eq!(pending(&ledger.state), [Effect::Verify { id }]);
    assert!(ledger.state.head().is_none());
    ledger.verify(id).unwrap();
    assert_eq!(ledger.state.head().unwrap().id, id);
    // A reference to the same manifest that another session holds is accepted.
    let (name, digest, replica_session) =
        (format!("{id}"), ArchiveDigest([1; 16]), Some(SessionId(3)));
    let manifest = ManifestReference { name, digest, file_len: 1, replica_session };
    let again = Command::Verified { id, manifest, now: Timestamp(0) };
    assert_eq!(ledger.apply(again), Ok(Outcome::Done));
    let other = ManifestReference {
        name: "other".to_owned(),
        digest: ArchiveDigest([2; 16]),
        file_len: 1,
        replica_session: None,
    };
    let again = Command::Verified { id, manifest: other, now: Timestamp(0) };
    assert_eq!(ledger.apply(again), Err(Refusal::ManifestDiffers { number: 5 }));
}

#[test]
fn visible_version_supersedes_older_open_versions() {
    let mut ledger = TestLedger::default();
    let slow = ledger.put(numbered_put("a", 0, 5)).unwrap();
    for writer in [0, 1] {
        ledger.put(numbered_put("a", writer, 6)).unwrap();
    }
    ledger.run_effects();
    assert_eq!(ledger.drop_reason(slow), Reason::Superseded { number: 6 });
    let refusal = Refusal::Dropped { number: 5, reason: Reason::Superseded { number: 6 } };
    assert_eq!(ledger.begin(numbered_put("a", 1, 5)), Err(refusal));
}

/// The refusal is the same before and after the data of the version is deleted.
#[test]
fn superseded_reason_is_reported_only_to_writers_of_that_version() {
    let mut ledger = TestLedger::default();
    let aborted = ledger.begin(numbered_put("a", 0, 4)).unwrap();
    ledger.apply(Command::Abort { id: aborted, writer: 0 }).unwrap();
    let slow = ledger.put(numbered_put("a", 0, 5)).unwrap();
    for writer in [0, 1] {
        ledger.put(numbered_put("a", writer, 6)).unwrap();
    }
    let newest = ledger.state.open().next_back().unwrap().id;
    ledger.verify(newest).unwrap();
    for deleted in [false, true] {
        if deleted {
            ledger.run_effects();
        }
        assert_eq!(ledger.state.versions().any(|version| version.id == slow), !deleted);
        let superseded = Refusal::Dropped { number: 5, reason: Reason::Superseded { number: 6 } };
        assert_eq!(ledger.begin(numbered_put("a", 1, 5)), Err(superseded));
        for (job, number) in [("a", 3), ("a", 4), ("b", 5)] {
            let refusal = Refusal::VersionNotNewer { number, highest: 6, earlier: None };
            assert_eq!(ledger.begin(numbered_put(job, 1, number)), Err(refusal), "{job} {number}");
        }
    }
}

#[test]
fn third_open_version_waits() {
    let mut ledger = TestLedger::default();
    let on: Vec<_> =
        (5..7).map(|number| ledger.put(numbered_put("a", 0, number)).unwrap()).collect();
    let before = ledger.state.clone();
    assert_eq!(ledger.begin_outcome(numbered_put("a", 0, 7)), Ok(Outcome::Wait { blocking: on }));
    assert_eq!(ledger.state, before);
    ledger.put(numbered_put("a", 1, 5)).unwrap();
    ledger.run_effects();
    ledger.begin(numbered_put("a", 0, 7)).unwrap();
}

#[test]
fn rejected_version_is_dropped_with_reason() {
    let mut ledger = TestLedger::default();
    for writer in [0, 1] {
        ledger.put(numbered_put("a", writer, 5)).unwrap();
    }
    let Some(&Effect::Verify { id }) = pending(&ledger.state).first() else { panic!() };
    let reason = "hole in `w` at [0:2]: writers 0-1".to_owned();
    ledger.apply(Command::Rejected { id, reason: reason.clone() }).unwrap();
    ledger.run_effects();
    let reason = Reason::Rejected { reason };
    assert_eq!(ledger.drop_reason(id), reason);
    let refusal = Refusal::Dropped { number: 5, reason };
    assert_eq!(ledger.commit(id, numbered_put("a", 0, 5), 7), Err(refusal));
    ledger.put(numbered_put("a", 0, 5)).unwrap();
}

#[test]
fn open_version_is_abandoned_after_ten_minutes() {
    let mut ledger = TestLedger::default();
    let half = ledger.put(numbered_put("a", 0, 5)).unwrap();
    let full = ledger.begin(single_put(None)).unwrap();
    ledger.now = 9 * MINUTE;
    ledger.commit(full, single_put(None), 7).unwrap();
    ledger.now = 10 * MINUTE;
    ledger.expire();
    assert_eq!(ledger.drop_reason(half), Reason::Abandoned { missing: writers("1") });
    ledger.now = 19 * MINUTE;
    ledger.expire();
    assert_eq!(ledger.drop_reason(full), Reason::Abandoned { missing: WriterSet::default() });
}

#[test]
fn ended_session_aborts_its_uncommitted_contributions() {
    let mut ledger = TestLedger::default();
    let of = |session, put| Put { session: Some(session), ..put };
    let single = ledger.begin(of(1, single_put(None))).unwrap();
    ledger.end_session(2);
    assert!(ledger.state.open().any(|version| version.id == single));
    ledger.end_session(1);
    assert_eq!(ledger.drop_reason(single), Reason::Aborted { writer: 0 });
    // A committed contribution stays. A begin from another session replaces the session of the writer.
    let half = ledger.put(of(3, numbered_put("a", 0, 5))).unwrap();
    assert_eq!(ledger.begin(of(4, numbered_put("a", 1, 5))), Ok(half));
    ledger.end_session(3);
    ledger.end_session(4);
    assert_eq!(ledger.begin(of(5, numbered_put("a", 1, 5))), Ok(half));
    ledger.end_session(4);
    let committed = Outcome::Committed { visible: false, missing: WriterSet::default() };
    assert_eq!(ledger.commit(half, numbered_put("a", 1, 5), 2), Ok(committed));
}

#[test]
fn refusal_states_error_and_remedy() {
    let mut ledger = TestLedger::default();
    let id = ledger.put(numbered_put("a", 0, 5)).unwrap();
    ledger.now = 10 * MINUTE;
    ledger.expire();
    let refusal = ledger.commit(id, numbered_put("a", 0, 5), 7).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "version 5 was abandoned: writers 1 did not commit in time; put again in every writer"
    );
}

#[test]
fn refusals_name_their_subject() {
    let another = Refusal::JobsDisagree { number: 5, declared: None, expected: Some(job_id("a")) };
    let abandoned = |missing| {
        let reason = Reason::Abandoned { missing: writers(missing) };
        Refusal::Dropped { number: 5, reason }
    };
    let unknown = |selector, newest| Refusal::NotFound { selector, newest, newest_open: None };
    let waiting = |missing| {
        let coming = Some(PendingVersion { number: 3, missing: writers(missing) });
        Refusal::NotFound { selector: Selector::Newest, newest: None, newest_open: coming }
    };
    for (refusal, text) in [
        (Refusal::Fenced { job: job_id("b") }, "job b has taken over the key"),
        (another, "version 5 takes contributions of job a, not of no job"),
        (unknown(Selector::Number(3), Some(5)), "no visible version is number 3: the newest is 5"),
        (unknown(Selector::Newest, None), "no version is visible"),
        (
            waiting("1-2"),
            "no version is visible, and version 3 is only partially committed: it waits for writers 1-2",
        ),
        (waiting(""), "no version is visible"),
        (abandoned("1-2"), "version 5 was abandoned: writers 1-2 did not commit in time"),
        (abandoned(""), "version 5 was abandoned: no process verified it in time"),
    ] {
        let message = refusal.to_string();
        assert_eq!(message.split("; ").next(), Some(text), "{message}");
    }
}

#[test]
fn version_is_lost_with_last_replica() {
    let mut ledger = TestLedger::default();
    let commit_from = |ledger: &mut TestLedger, id, put: Put<'_>, session: u128| {
        ledger.replica_session = Some(SessionId(session));
        ledger.commit(id, put, 7).unwrap();
        ledger.replica_session = None;
    };
    let id = ledger.begin(numbered_put("a", 0, 5)).unwrap();
    ledger.begin(numbered_put("a", 1, 5)).unwrap();
    commit_from(&mut ledger, id, numbered_put("a", 0, 5), 1);
    commit_from(&mut ledger, id, numbered_put("a", 1, 5), 2);
    ledger.verify(id).unwrap();
    ledger.apply(Command::Pin { selector: Selector::Newest, label: label("best") }).unwrap();
    // Session 3 holds another replica.
    let add_replica = Command::PublishReplicas { id, writers: writers("1"), session: SessionId(3) };
    let release = |session| Command::ReleaseReplica { id, writer: 1, session: SessionId(session) };
    ledger.apply(add_replica.clone()).unwrap();
    // It may release its replica while another session has one, and add it again.
    ledger.apply(release(3)).unwrap();
    ledger.apply(add_replica).unwrap();
    ledger.end_session(2);
    assert!(ledger.state.head().is_some());
    // Session 3 now has the last replica: the release changes nothing.
    ledger.apply(release(3)).unwrap();
    assert!(ledger.state.head().is_some());
    ledger.end_session(3);
    let reason = Reason::Lost { writers: writers("1"), slices: String::new() };
    assert_eq!(ledger.drop_reason(id), reason);
    assert_eq!(pending(&ledger.state), [Effect::Delete { id, epoch: 0, number: 5 }]);
    let lost = Refusal::Dropped { number: 5, reason };
    for selector in [Selector::Newest, Selector::Number(5), Selector::Id(id)] {
        assert_eq!(ledger.state.select(&selector).err().as_ref(), Some(&lost));
    }
    ledger.run_effects();
    assert_eq!(ledger.state.select(&Selector::Number(5)).err(), Some(lost));
}

#[test]
fn abandon_drops_only_the_named_version() {
    let mut ledger = TestLedger::default();
    let [abandoned, other] =
        [5, 6].map(|number| ledger.begin(numbered_put("a", 0, number)).unwrap());
    ledger.apply(Command::Abandon { id: abandoned }).unwrap();
    assert_eq!(ledger.drop_reason(abandoned), Reason::Abandoned { missing: writers("0-1") });
    let open: Vec<VersionId> = ledger.state.open().map(|version| version.id).collect();
    assert_eq!(open, [other]);
}

#[test]
fn sessions_include_writers_replicas_and_readers() {
    let mut ledger = TestLedger { replica_session: Some(SessionId(1)), ..TestLedger::default() };
    let sessions = |ledger: &TestLedger| Vec::from_iter(ledger.state.sessions());
    ledger.put(single_put(Some(1))).unwrap();
    ledger.run_effects();
    assert_eq!(sessions(&ledger), [SessionId(1)]);
    ledger.begin(Put { session: Some(2), ..single_put(Some(2)) }).unwrap();
    assert_eq!(sessions(&ledger), [1, 2].map(SessionId));
    for (lease, holder) in [(1, SessionId(3).to_string()), (2, "somebody".to_owned())] {
        let (selector, ttl) = (Selector::Newest, Duration::from_mins(1));
        let (lease, now) = (LeaseId(lease), Timestamp(0));
        ledger.apply(Command::Lease { selector, lease, holder, ttl, now }).unwrap();
    }
    assert_eq!(sessions(&ledger), [1, 2, 3].map(SessionId));
    ledger.end_session(2);
    assert_eq!(sessions(&ledger), [1, 3].map(SessionId));
}
