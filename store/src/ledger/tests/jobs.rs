//! Writers and jobs: whose contributions make a version.

use super::*;

#[test]
fn an_incomplete_begin_is_refused() {
    let declared = writers("0-1");
    let cases = [
        (
            Put { writer: 2, ..step_of("a", 0, 1) },
            Refusal::NotAWriter { writer: 2, writers: declared.clone() },
        ),
        (
            Put { job: None, ..step_of("a", 0, 1) },
            Refusal::JobRequired { writers: declared.clone() },
        ),
        (Put { number: None, ..step_of("a", 0, 1) }, Refusal::CallRequired { writers: declared }),
    ];
    for (put, refusal) in cases {
        assert_eq!(Ledger::default().begin(put), Err(refusal));
    }
}

#[test]
fn jobs_and_writer_sets_never_mix_in_one_version() {
    let mut ledger = Ledger::default();
    ledger.begin(step_of("a", 0, 5)).unwrap();
    let (declared, expected) = (writers("0-2"), writers("0-1"));
    assert_eq!(
        ledger.begin(Put { writers: "0-2", ..step_of("a", 1, 5) }),
        Err(Refusal::WritersDisagree { declared, expected })
    );
    let (declared, expected) = (None, Some(job_id("a")));
    assert_eq!(
        ledger.begin(alone(Some(5))),
        Err(Refusal::JobsDisagree { number: 5, declared, expected })
    );
    let refusal =
        ledger.begin(Put { durability: Durability::Object, ..step_of("a", 1, 5) }).unwrap_err();
    let (declared, expected) = (Durability::Object, Durability::Memory);
    assert_eq!(refusal, Refusal::DurabilityDisagrees { number: 5, declared, expected });
    let said = "version 5 is to be kept in memory, not in object";
    assert!(refusal.to_string().starts_with(said), "{refusal}");
}

#[test]
fn a_restarted_job_never_completes_an_old_half() {
    let mut ledger = Ledger::default();
    let old = ledger.put(step_of("a", 0, 5)).unwrap();
    // Version 5 has data of the old job: the new one begins again once that is deleted.
    let begun = ledger.begin_outcome(step_of("b", 0, 5));
    assert_eq!(begun, Ok(Outcome::Wait { on: vec![old] }));
    let by = job_id("b");
    assert_eq!(ledger.reason(old), Reason::Fenced { by: by.clone() });
    assert_eq!(ledger.begin(step_of("a", 1, 5)), Err(Refusal::Fenced { by: by.clone() }));
    assert_eq!(ledger.commit(old, step_of("a", 0, 5), 7), Err(Refusal::Fenced { by }));
    ledger.settle();
    for writer in [0, 1] {
        assert_ne!(ledger.put(step_of("b", writer, 5)).unwrap(), old);
    }
    ledger.settle();
    assert_eq!(ledger.visible(), [5]);
}

#[test]
fn a_refused_job_fences_nobody() {
    let mut ledger = Ledger::default();
    for writer in [0, 1] {
        ledger.put(step_of("a", writer, 5)).unwrap();
    }
    ledger.settle();
    let refusal = Refusal::VersionNotNewer { number: 5, highest: 5 };
    assert_eq!(ledger.put(step_of("b", 0, 5)), Err(refusal));
    assert_eq!(ledger.state.job(), Some(&job_id("a")));
    ledger.put(step_of("a", 0, 6)).unwrap();
}

#[test]
fn a_restart_with_another_writer_set_is_a_new_job_and_may_have_one() {
    let mut ledger = Ledger::default();
    for writer in [0, 1] {
        ledger.put(step_of("a", writer, 5)).unwrap();
    }
    ledger.settle();
    let smaller = Put { writers: "0", ..step_of("a", 0, 6) };
    let (declared, expected) = (writers("0"), writers("0-1"));
    let refusal = Refusal::WritersDisagree { declared, expected };
    assert_eq!(ledger.begin(smaller), Err(refusal));
    ledger.begin(Put { defaulted: false, ..smaller }).unwrap();
    ledger.begin(Put { job: Some("b"), number: Some(7), ..smaller }).unwrap();
}

#[test]
fn a_failed_put_never_shifts_later_steps_into_each_other() {
    let mut ledger = Ledger::default();
    let first = ledger.put(call_of("a", 0, 1)).unwrap();
    assert_eq!(ledger.begin(call_of("a", 1, 1)), Ok(first));
    ledger.give(Command::Abort { id: first, writer: 1 }).unwrap();
    assert_eq!(ledger.reason(first), Reason::Aborted { writer: 1 });

    let second = ledger.put(call_of("a", 1, 2)).unwrap();
    let reason = Reason::Aborted { writer: 1 };
    let refusal = Refusal::Dropped { number: 1, reason };
    assert_eq!(ledger.begin(call_of("a", 0, 1)), Err(refusal.clone()));
    ledger.settle();
    assert_eq!(ledger.begin(call_of("a", 0, 1)), Err(refusal));
    assert_eq!(ledger.put(call_of("a", 0, 2)), Ok(second));
    ledger.settle();
    assert_eq!(ledger.state.head().unwrap().id, second);
}

#[test]
fn a_call_that_never_opened_cannot_open_after_a_later_one() {
    let mut ledger = Ledger::default();
    ledger.put(call_of("a", 0, 2)).unwrap();
    assert_eq!(ledger.put(call_of("a", 1, 1)), Err(Refusal::LateCall { call: 1, number: 1 }));
}

#[test]
fn a_failed_put_with_a_number_may_be_tried_again() {
    let mut ledger = Ledger::default();
    let id = ledger.put(step_of("a", 0, 5)).unwrap();
    ledger.begin(step_of("a", 1, 5)).unwrap();
    ledger.give(Command::Abort { id, writer: 1 }).unwrap();
    let late = ledger.commit(id, step_of("a", 1, 5), 7);
    assert_eq!(late, Err(Refusal::NotBegun { number: 5, writer: 1 }));
    assert_eq!(ledger.put(step_of("a", 1, 5)), Ok(id));

    let id = ledger.begin(step_of("a", 0, 6)).unwrap();
    ledger.give(Command::Abort { id, writer: 0 }).unwrap();
    assert_eq!(ledger.reason(id), Reason::Aborted { writer: 0 });
}

/// With a number of the caller's, a failed put may be tried again; without a job, no call is the same.
#[test]
fn a_call_counts_for_a_job_that_gives_no_number() {
    let mut ledger = Ledger::default();
    let numbered = |writer| Put { call: Some(1), ..step_of("a", writer, 5) };
    let id = ledger.put(numbered(0)).unwrap();
    ledger.begin(numbered(1)).unwrap();
    ledger.give(Command::Abort { id, writer: 1 }).unwrap();
    assert_eq!(ledger.put(numbered(1)), Ok(id));
    ledger.settle();

    let jobless = Put { call: Some(1), ..alone(None) };
    let id = ledger.begin(jobless).unwrap();
    ledger.ids -= 1;
    assert_eq!(ledger.begin(jobless), Ok(id));
}

#[test]
fn the_oldest_of_too_many_fenced_jobs_is_forgotten() {
    let mut ledger = Ledger::default();
    let mut begin = |job: usize| {
        let job = job.to_string();
        ledger.begin_outcome(Put { job: Some(&job), ..alone(None) })
    };
    for job in 0..=MAX_FENCED {
        begin(job).unwrap();
    }
    let by = job_id(&MAX_FENCED.to_string());
    assert_eq!(begin(0), Err(Refusal::Fenced { by }));
    begin(MAX_FENCED + 1).unwrap();
    begin(0).unwrap();
    let by = job_id("0");
    assert_eq!(begin(2), Err(Refusal::Fenced { by }));
}

#[test]
fn a_begin_that_is_repeated_is_one_begin() {
    let mut ledger = Ledger::default();
    let first = ledger.begin(alone(None)).unwrap();
    ledger.ids -= 1;
    assert_eq!(ledger.begin(alone(None)), Ok(first));
    assert_eq!(ledger.state.open().count(), 1);
    ledger.ids -= 1;
    assert_eq!(ledger.begin(alone(Some(9))), Err(Refusal::IdTaken { id: first }));
}
