//! Tests of writers and jobs: the contributions that a version accepts.

use super::*;

#[test]
fn incomplete_begin_is_refused() {
    let declared = writers("0-1");
    let cases = [
        (
            Put { writer: 2, ..numbered_put("a", 0, 1) },
            Refusal::NotAWriter { writer: 2, writers: declared.clone() },
        ),
        (
            Put { job: None, ..numbered_put("a", 0, 1) },
            Refusal::JobRequired { writers: declared.clone() },
        ),
        (
            Put { number: None, ..numbered_put("a", 0, 1) },
            Refusal::SequenceRequired { writers: declared },
        ),
    ];
    for (put, refusal) in cases {
        assert_eq!(TestLedger::default().begin(put), Err(refusal));
    }
}

#[test]
fn version_refuses_other_jobs_writers_and_durabilities() {
    let mut ledger = TestLedger::default();
    ledger.begin(numbered_put("a", 0, 5)).unwrap();
    let (declared, expected) = (writers("0-2"), writers("0-1"));
    assert_eq!(
        ledger.begin(Put { writers: "0-2", ..numbered_put("a", 1, 5) }),
        Err(Refusal::WritersDisagree { declared, expected })
    );
    let (declared, expected) = (None, Some(job_id("a")));
    assert_eq!(
        ledger.begin(single_put(Some(5))),
        Err(Refusal::JobsDisagree { number: 5, declared, expected })
    );
    let refusal = ledger
        .begin(Put { durability: Durability::Object, ..numbered_put("a", 1, 5) })
        .unwrap_err();
    let (declared, expected) = (Durability::Object, Durability::Memory);
    assert_eq!(refusal, Refusal::DurabilityDisagrees { number: 5, declared, expected });
    let message = "version 5 is to be kept in memory, not in object";
    assert!(refusal.to_string().starts_with(message), "{refusal}");
}

#[test]
fn restarted_job_never_completes_version_of_old_job() {
    let mut ledger = TestLedger::default();
    let old = ledger.put(numbered_put("a", 0, 5)).unwrap();
    // Version 5 has data of the old job. The new job must begin again after this data is deleted.
    let begun = ledger.begin_outcome(numbered_put("b", 0, 5));
    assert_eq!(begun, Ok(Outcome::Wait { blocking: vec![old] }));
    let by = job_id("b");
    assert_eq!(ledger.drop_reason(old), Reason::Fenced { job: by.clone() });
    assert_eq!(ledger.begin(numbered_put("a", 1, 5)), Err(Refusal::Fenced { job: by.clone() }));
    assert_eq!(ledger.commit(old, numbered_put("a", 0, 5), 7), Err(Refusal::Fenced { job: by }));
    ledger.run_effects();
    for writer in [0, 1] {
        assert_ne!(ledger.put(numbered_put("b", writer, 5)).unwrap(), old);
    }
    ledger.run_effects();
    assert_eq!(ledger.visible_numbers(), [5]);
}

#[test]
fn refused_job_does_not_fence_others() {
    let mut ledger = TestLedger::default();
    for writer in [0, 1] {
        ledger.put(numbered_put("a", writer, 5)).unwrap();
    }
    ledger.run_effects();
    let refusal = Refusal::VersionNotNewer { number: 5, highest: 5, earlier: None };
    assert_eq!(ledger.put(numbered_put("b", 0, 5)), Err(refusal));
    assert_eq!(ledger.state.job(), Some(&job_id("a")));
    ledger.put(numbered_put("a", 0, 6)).unwrap();
}

#[test]
fn changed_writer_set_needs_new_job_or_explicit_writers() {
    let mut ledger = TestLedger::default();
    for writer in [0, 1] {
        ledger.put(numbered_put("a", writer, 5)).unwrap();
    }
    ledger.run_effects();
    let smaller = Put { writers: "0", ..numbered_put("a", 0, 6) };
    let (declared, expected) = (writers("0"), writers("0-1"));
    let refusal = Refusal::WritersDisagree { declared, expected };
    assert_eq!(ledger.begin(smaller), Err(refusal));
    ledger.begin(Put { defaulted: false, ..smaller }).unwrap();
    ledger.begin(Put { job: Some("b"), number: Some(7), ..smaller }).unwrap();
}

#[test]
fn failed_put_does_not_shift_later_calls() {
    let mut ledger = TestLedger::default();
    let first = ledger.put(implicit_put("a", 0, 1)).unwrap();
    assert_eq!(ledger.begin(implicit_put("a", 1, 1)), Ok(first));
    ledger.apply(Command::Abort { id: first, writer: 1 }).unwrap();
    assert_eq!(ledger.drop_reason(first), Reason::Aborted { writer: 1 });

    let second = ledger.put(implicit_put("a", 1, 2)).unwrap();
    let reason = Reason::Aborted { writer: 1 };
    let refusal = Refusal::Dropped { number: 1, reason };
    assert_eq!(ledger.begin(implicit_put("a", 0, 1)), Err(refusal.clone()));
    ledger.run_effects();
    assert_eq!(ledger.begin(implicit_put("a", 0, 1)), Err(refusal));
    assert_eq!(ledger.put(implicit_put("a", 0, 2)), Ok(second));
    ledger.run_effects();
    assert_eq!(ledger.state.head().unwrap().id, second);
}

#[test]
fn late_call_cannot_open_version() {
    let mut ledger = TestLedger::default();
    ledger.put(implicit_put("a", 0, 2)).unwrap();
    assert_eq!(
        ledger.put(implicit_put("a", 1, 1)),
        Err(Refusal::StaleSequence { sequence: 1, number: 1 })
    );
}

#[test]
fn failed_put_with_number_can_be_retried() {
    let mut ledger = TestLedger::default();
    let id = ledger.put(numbered_put("a", 0, 5)).unwrap();
    ledger.begin(numbered_put("a", 1, 5)).unwrap();
    ledger.apply(Command::Abort { id, writer: 1 }).unwrap();
    let late = ledger.commit(id, numbered_put("a", 1, 5), 7);
    assert_eq!(late, Err(Refusal::NotBegun { number: 5, writer: 1 }));
    assert_eq!(ledger.put(numbered_put("a", 1, 5)), Ok(id));

    let id = ledger.begin(numbered_put("a", 0, 6)).unwrap();
    ledger.apply(Command::Abort { id, writer: 0 }).unwrap();
    assert_eq!(ledger.drop_reason(id), Reason::Aborted { writer: 0 });
}

/// With an explicit number, a failed put can be retried. Without a job, no two puts have the same call.
#[test]
fn call_is_ignored_with_number_or_without_job() {
    let mut ledger = TestLedger::default();
    let numbered = |writer| Put { sequence: Some(1), ..numbered_put("a", writer, 5) };
    let id = ledger.put(numbered(0)).unwrap();
    ledger.begin(numbered(1)).unwrap();
    ledger.apply(Command::Abort { id, writer: 1 }).unwrap();
    assert_eq!(ledger.put(numbered(1)), Ok(id));
    ledger.run_effects();

    let jobless = Put { sequence: Some(1), ..single_put(None) };
    let id = ledger.begin(jobless).unwrap();
    ledger.last_id -= 1;
    assert_eq!(ledger.begin(jobless), Ok(id));
}

#[test]
fn oldest_fenced_job_is_forgotten_at_limit() {
    let mut ledger = TestLedger::default();
    let mut begin = |job: usize| {
        let job = job.to_string();
        ledger.begin_outcome(Put { job: Some(&job), ..single_put(None) })
    };
    for job in 0..=MAX_FENCED_JOBS {
        begin(job).unwrap();
    }
    let by = job_id(&MAX_FENCED_JOBS.to_string());
    assert_eq!(begin(0), Err(Refusal::Fenced { job: by }));
    begin(MAX_FENCED_JOBS + 1).unwrap();
    begin(0).unwrap();
    let by = job_id("0");
    assert_eq!(begin(2), Err(Refusal::Fenced { job: by }));
}

#[test]
fn repeated_begin_joins_the_same_version() {
    let mut ledger = TestLedger::default();
    let first = ledger.begin(single_put(None)).unwrap();
    ledger.last_id -= 1;
    assert_eq!(ledger.begin(single_put(None)), Ok(first));
    assert_eq!(ledger.state.open().count(), 1);
    ledger.last_id -= 1;
    assert_eq!(ledger.begin(single_put(Some(9))), Err(Refusal::IdTaken { id: first }));
}
