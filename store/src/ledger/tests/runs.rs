//! Tests of runs: when a put takes the numbers of an earlier run again.

use super::*;

/// Returns a put of a process of a run.
fn run_put(run: &str, number: u64) -> Put<'_> {
    Put { run: Some(run), ..single_put(Some(number)) }
}

/// Returns a ledger with versions 1 to 3 of run "a".
fn ledger_of_earlier_run(keep: u32, durability: Durability) -> TestLedger {
    let mut ledger = TestLedger::with_keep(keep);
    for number in 1..=3 {
        let id = ledger.put(Put { durability, ..run_put("a", number) }).unwrap();
        ledger.run_effects();
        if durability == Durability::Object {
            ledger.apply(Command::Uploaded { id }).unwrap();
            ledger.run_effects();
        }
    }
    ledger
}

fn set_status(ledger: &mut TestLedger, run: &str, status: RunStatus) {
    ledger.run_statuses.insert(RunId(run.to_owned()), status);
}

fn not_newer(number: u64, highest: u64, version: u64, obstacle: Obstacle) -> Refusal {
    let earlier = Some(EarlierRun { process: run_process("a"), version, obstacle });
    Refusal::VersionNotNewer { number, highest, earlier }
}

#[test]
fn later_run_opens_epoch_when_earlier_run_has_disconnected() {
    let mut ledger = ledger_of_earlier_run(2, Durability::Memory);
    let before = ledger.state.clone();
    let runs = [RunId("a".to_owned())].into();
    assert_eq!(ledger.begin_outcome(run_put("b", 1)), Ok(Outcome::CheckRuns { runs }));
    assert_eq!(ledger.state, before);
    set_status(&mut ledger, "a", RunStatus::Disconnected);
    ledger.put(run_put("b", 1)).unwrap();
    assert_eq!(ledger.visible_numbers(), [2, 3]);
    // The next put of the run may begin before the first one is visible.
    ledger.put(run_put("b", 2)).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (1, vec![1, 2]));
    // Within the run, a number is used once.
    ledger.put(run_put("b", 3)).unwrap();
    ledger.run_effects();
    let refusal = Refusal::VersionNotNewer { number: 1, highest: 3, earlier: None };
    assert_eq!(ledger.begin(run_put("b", 1)), Err(refusal));
}

#[test]
fn same_number_of_later_run_is_new_version() {
    let mut ledger = ledger_of_earlier_run(1, Durability::Memory);
    set_status(&mut ledger, "a", RunStatus::Disconnected);
    let earlier = ledger.state.head().unwrap().id;
    // The contents are equal, and yet a reader that waits for the run gets a version of it.
    let id = ledger.put(run_put("b", 3)).unwrap();
    ledger.run_effects();
    assert_ne!(id, earlier);
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (1, vec![3]));
    assert_eq!(ledger.begin(run_put("b", 3)), Ok(id));
}

#[test]
fn numbers_of_connected_run_are_refused() {
    for (status, obstacle) in [
        (RunStatus::Connected(run_process("a")), Obstacle::Connected),
        (RunStatus::Unknown, Obstacle::Durable),
    ] {
        let mut ledger = ledger_of_earlier_run(1, Durability::Memory);
        set_status(&mut ledger, "a", status);
        let refusal = not_newer(1, 3, 3, obstacle);
        assert_eq!(ledger.begin(run_put("b", 1)), Err(refusal));
        // The same contents of the same number are a retry, as within one run.
        ledger.put(run_put("b", 3)).unwrap();
        assert_eq!(ledger.state.epoch(), 0);
    }
}

#[test]
fn all_runs_of_newer_versions_count() {
    let mut ledger = ledger_of_earlier_run(2, Durability::Memory);
    ledger.put(run_put("b", 4)).unwrap();
    ledger.run_effects();
    set_status(&mut ledger, "b", RunStatus::Disconnected);
    set_status(&mut ledger, "a", RunStatus::Connected(run_process("a")));
    let refusal = not_newer(2, 4, 4, Obstacle::Connected);
    assert_eq!(ledger.begin(run_put("c", 2)), Err(refusal));
    // Run "a" has put nothing that version 4 would retire.
    ledger.put(run_put("c", 4)).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (1, vec![3, 4]));
}

#[test]
fn run_of_highest_number_counts_after_its_deletion() {
    let mut ledger = ledger_of_earlier_run(1, Durability::Memory);
    ledger.apply(Command::Delete { selection: Selection::All }).unwrap();
    ledger.run_effects();
    let runs = [RunId("a".to_owned())].into();
    assert_eq!(ledger.begin_outcome(run_put("b", 1)), Ok(Outcome::CheckRuns { runs }));
    set_status(&mut ledger, "a", RunStatus::Disconnected);
    ledger.put(run_put("b", 1)).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (1, vec![1]));
}

#[test]
fn durable_and_pinned_versions_are_not_replaced() {
    for (durability, pin, obstacle) in [
        (Durability::Disk, false, Obstacle::Durable),
        (Durability::Object, false, Obstacle::Durable),
        (Durability::Memory, true, Obstacle::Pinned),
    ] {
        let mut ledger = ledger_of_earlier_run(1, durability);
        if pin {
            let label = label("good");
            ledger.apply(Command::Pin { selector: Selector::Newest, label }).unwrap();
        }
        set_status(&mut ledger, "a", RunStatus::Disconnected);
        let refusal = not_newer(1, 3, 3, obstacle);
        assert_eq!(ledger.begin(run_put("b", 1)), Err(refusal), "{obstacle:?}");
        // Other contents under the same number are refused at the commit, which names the run.
        let put = Put { durability, ..run_put("b", 3) };
        let id = ledger.begin(put).unwrap();
        let (number, committed) = (3, ArchiveDigest([7; 16]));
        let process = Some(run_process("a"));
        let refusal = Refusal::ContributionDiffers { number, writer: 0, committed, process };
        assert_eq!(ledger.commit(id, put, 8), Err(refusal));
    }
}

#[test]
fn version_that_is_pinned_meanwhile_stays_visible() {
    let mut ledger = ledger_of_earlier_run(3, Durability::Memory);
    set_status(&mut ledger, "a", RunStatus::Disconnected);
    let id = ledger.begin(run_put("b", 1)).unwrap();
    let label = label("good");
    ledger.apply(Command::Pin { selector: Selector::Number(3), label }).unwrap();
    ledger.commit(id, run_put("b", 1), 7).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (1, vec![3, 1]));
}

#[test]
fn later_job_opens_epoch_and_its_writers_join() {
    let job_put = |job, writer| Put { run: Some(job), ..numbered_put(job, writer, 1) };
    let mut ledger = TestLedger::with_keep(3);
    for writer in [0, 1] {
        ledger.put(job_put("a", writer)).unwrap();
    }
    ledger.run_effects();
    // An open version of the earlier job, which writer 1 never completes.
    ledger.put(Put { number: Some(2), ..job_put("a", 0) }).unwrap();
    let before = ledger.state.clone();
    assert!(matches!(ledger.begin_outcome(job_put("b", 0)), Ok(Outcome::CheckRuns { .. })));
    assert_eq!(ledger.state, before, "a put that may be refused fences no job");
    set_status(&mut ledger, "a", RunStatus::Disconnected);
    let first = ledger.put(job_put("b", 0)).unwrap();
    assert_eq!(ledger.put(job_put("b", 1)), Ok(first));
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (1, vec![1]));
}

#[test]
fn put_without_number_or_process_asks_for_no_run() {
    let mut ledger = ledger_of_earlier_run(1, Durability::Memory);
    let refusal = Refusal::VersionNotNewer { number: 1, highest: 3, earlier: None };
    assert_eq!(ledger.begin(single_put(Some(1))), Err(refusal));
    ledger.put(Put { number: None, ..run_put("b", 0) }).unwrap();
    ledger.put(Put { rewind: true, ..run_put("b", 1) }).unwrap();
    ledger.run_effects();
    assert_eq!((ledger.state.epoch(), ledger.visible_numbers()), (1, vec![1]));
}

/// The durable state is written to disk whenever it changes.
#[test]
fn put_in_memory_does_not_change_durable_state() {
    let mut ledger = ledger_of_earlier_run(2, Durability::Disk);
    let before = ledger.state.durable_state();
    ledger.put(run_put("b", 4)).unwrap();
    ledger.run_effects();
    assert_eq!(ledger.state.durable_state(), before);
}

#[test]
fn refusals_name_run_process_and_remedy() {
    let text = |obstacle| not_newer(1, 3, 3, obstacle).to_string();
    assert_eq!(
        text(Obstacle::Connected),
        "version 1 is not newer than 3: run a (process 812 on host gpu-7) has put version 3 and is still \
         connected; end that process, use a higher number or none, or rewind"
    );
    assert_eq!(
        text(Obstacle::Durable),
        "version 1 is not newer than 3: run a (process 812 on host gpu-7) has put version 3, which is durable; \
         use a higher number or none, or rewind, which retires the newer versions"
    );
}
