//! Writers that are killed at every file system call.
//!
//! The next process must recover from the files that are left.

use std::sync::Arc;
use std::time::Duration;

use tssd_format::{StateDict, Value};

use super::ManualClock;
use crate::testing::crash::killable_fs::{CallBudget, KillableFs};
use crate::testing::crash::simulation::{Access, contents, key, store, value_of};
use crate::testing::simulated_disk::SimulatedFiles;
use crate::{Durability, GetOptions, JobId, PutOptions, Store};

/// The state that survives a process: the files and the clock.
#[derive(Default)]
struct Machine {
    files: SimulatedFiles,
    clock: ManualClock,
}

impl Machine {
    /// Starts a process that is killed after this many file system calls.
    async fn start_killable(&self, number: u64, calls: i64) -> Store {
        let inner = Arc::new(self.files.clone());
        let files = Arc::new(KillableFs { inner, budget: CallBudget::new(calls) });
        store(files, Access::Shared, &self.clock, number).await.unwrap()
    }

    /// Starts a process that is not killed.
    async fn start(&self, number: u64) -> Store {
        self.start_killable(number, i64::MAX).await
    }

    /// Returns the names of the files in the folders of versions.
    fn archives(&self) -> Vec<String> {
        let folder = format!("/{}/", key().to_path());
        let paths = self.files.paths();
        let names = paths.iter().filter_map(|path| path.strip_prefix(&folder));
        names.filter(|name| !name.starts_with('.')).map(str::to_owned).collect()
    }
}

fn as_writer(writer: u32, job: &str, version: Option<u64>) -> PutOptions {
    PutOptions {
        writer: Some(writer),
        writers: Some((0..2).collect()),
        job: Some(JobId(job.to_owned())),
        version,
        durability: Durability::Disk,
        timeout: Duration::ZERO,
        ..PutOptions::default()
    }
}

/// Returns the value of the newest version, after checking that it is complete.
async fn newest(store: &Store) -> i64 {
    let head = store.head(&key()).await.unwrap().unwrap();
    value_of(store, head.number).await.unwrap()
}

/// Kills the second writer of the second version after this many calls.
///
/// Returns whether its put completes.
async fn put_completes_within(calls: i64) -> bool {
    let machine = Machine::default();
    let [first, second] = [machine.start(1).await, machine.start(2).await];
    for (writer, store) in (0..).zip([&first, &second]) {
        let dict = contents(1, Some(u64::from(writer)));
        store.put_state_dict(&key(), &dict, &as_writer(writer, "first", None)).await.unwrap();
    }
    // The next process of the second writer continues the same job. The caller numbers the puts, not the process.
    let of_first = as_writer(0, "first", Some(2));
    first.put_state_dict(&key(), &contents(2, Some(0)), &of_first).await.unwrap();
    drop(second);
    let (half, of_second) = (contents(2, Some(1)), as_writer(1, "first", Some(2)));
    let killed = machine.start_killable(3, calls).await;
    let put = killed.put_state_dict(&key(), &half, &of_second).await;
    let completed = put.as_ref().is_ok_and(|report| report.visible);

    // A reader sees a complete version: the first or the second one.
    let reader = machine.start(4).await;
    let seen = newest(&reader).await;
    assert!(seen == 1 || seen == 2, "after {calls} calls: {seen}");
    assert!(!completed || seen == 2, "what was acknowledged is there");

    // A later reader completes a pending verification. The visible version never becomes an older one.
    machine.clock.advance(Duration::from_secs(5));
    assert!(newest(&reader).await >= seen);

    // The writer restarts and retries the put. After that, the version is complete.
    let again = machine.start(5).await;
    let report = again.put_state_dict(&key(), &half, &of_second).await;
    assert!(report.as_ref().is_ok_and(|report| report.visible), "after {calls} calls: {report:?}");
    assert_eq!(newest(&reader).await, 2);

    // A new job puts the third version, and all files of replaced versions are deleted.
    for writer in 0..2 {
        let dict = contents(3, Some(u64::from(writer)));
        again.put_state_dict(&key(), &dict, &as_writer(writer, "second", None)).await.unwrap();
    }
    assert_eq!(newest(&reader).await, 3);
    assert_eq!(reader.versions(&key()).await.unwrap().len(), 1);
    let archives = machine.archives();
    let is_third = |name: &String| name.starts_with("0-3-");
    assert!(archives.len() == 3 && archives.iter().all(is_third), "after {calls}: {archives:?}");
    completed
}

/// Kills the second writer after this many calls. Its next process puts other contents.
///
/// The version has the contents of one of the two processes: those of the second one if its put succeeds. Returns
/// whether the put of the killed process completes.
async fn put_with_changed_retry_completes_within(calls: i64) -> bool {
    let machine = Machine::default();
    let options = |writer| as_writer(writer, "job", Some(2));
    let first = machine.start(1).await;
    first.put_state_dict(&key(), &row(0, 0), &options(0)).await.unwrap();
    let killed = machine.start_killable(2, calls).await;
    let put = killed.put_state_dict(&key(), &row(1, 1), &options(1)).await;
    let again = machine.start(3).await;
    let again = again.put_state_dict(&key(), &row(1, 2), &options(1)).await;
    machine.clock.advance(Duration::from_secs(5));
    let reader = machine.start(4).await;
    let (dict, _) = reader.get_state_dict(&key(), &GetOptions::default()).await.unwrap();
    let Value::Tensor(rows) = dict.leaf("rows").unwrap() else { panic!("a tensor") };
    let found = rows.view().as_slice::<i64>().unwrap()[32];
    let expected = if again.is_ok() { 2 } else { 1 };
    assert_eq!(found, expected, "after {calls} calls: {again:?}");
    let archives = machine.archives();
    assert_eq!(archives.len(), 3, "two archives and the manifest: {archives:?}");
    put.is_ok()
}

/// Returns one of two rows of a sharded tensor, without values that the writers would have to agree on.
fn row(writer: u64, value: i64) -> StateDict {
    let mut dict = StateDict::new();
    let rows = contents(value, Some(writer)).leaf("rows").unwrap().clone();
    dict.insert("rows", rows);
    dict
}

#[tokio::test]
async fn restarted_writer_may_put_other_contents() {
    let mut calls = 0;
    while !put_with_changed_retry_completes_within(calls).await {
        calls += 1;
        assert!(calls < 1000, "a put takes fewer calls");
    }
}

#[tokio::test]
async fn writer_killed_at_any_call_can_retry() {
    let mut calls = 0;
    while !put_completes_within(calls).await {
        calls += 1;
        assert!(calls < 1000, "a put takes fewer calls");
    }
    assert!(calls > 15, "there were calls to die at: {calls}");
}
