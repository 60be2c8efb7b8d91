//! Writers that die at every call: what a process has done to the files before it died is all that the
//! next one finds, and that must be enough.

use std::sync::Arc;
use std::time::Duration;

use tssd_format::{StateDict, Value};

use super::Clock;
use super::mortal::{Life, Mortal};
use super::world::{Users, contents, key, store, value_of};
use crate::testing::simulated_disk::SimulatedFiles;
use crate::{Durability, GetOptions, JobId, PutOptions, Store};

/// What outlives a process: files, and time.
#[derive(Default)]
struct World {
    files: SimulatedFiles,
    clock: Clock,
}

impl World {
    /// A process that dies after so many calls.
    async fn process(&self, number: u64, calls: i64) -> Store {
        let inner = Arc::new(self.files.clone());
        let files = Arc::new(Mortal { inner, life: Life::of(calls) });
        store(files, Users::Several, &self.clock, number).await.unwrap()
    }

    async fn immortal(&self, number: u64) -> Store {
        self.process(number, i64::MAX).await
    }

    /// The files in the folders of versions.
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

/// The value of the newest version, which is that value throughout.
async fn newest(store: &Store) -> i64 {
    let head = store.head(&key()).await.unwrap().unwrap();
    value_of(store, head.number).await.unwrap()
}

/// The second writer of the second version dies after so many calls. Says whether it completes.
async fn dies_after(calls: i64) -> bool {
    let world = World::default();
    let [first, second] = [world.immortal(1).await, world.immortal(2).await];
    for (writer, store) in (0..).zip([&first, &second]) {
        let dict = contents(1, Some(u64::from(writer)));
        store.put_state_dict(&key(), &dict, &as_writer(writer, "first", None)).await.unwrap();
    }
    // Its next process continues the same job: the number of its puts is its own to count.
    let of_first = as_writer(0, "first", Some(2));
    first.put_state_dict(&key(), &contents(2, Some(0)), &of_first).await.unwrap();
    drop(second);
    let (half, of_second) = (contents(2, Some(1)), as_writer(1, "first", Some(2)));
    let mortal = world.process(3, calls).await;
    let died = mortal.put_state_dict(&key(), &half, &of_second).await;
    let completed = died.as_ref().is_ok_and(|report| report.visible);

    // Whatever it left behind, a reader sees a whole version: the old one, or the new one.
    let reader = world.immortal(4).await;
    let seen = newest(&reader).await;
    assert!(seen == 1 || seen == 2, "after {calls} calls: {seen}");
    assert!(!completed || seen == 2, "what was acknowledged is there");

    // A reader that comes later completes a proof that is owed; what is visible never goes back.
    world.clock.pass(Duration::from_secs(5));
    assert!(newest(&reader).await >= seen);

    // The writer starts anew and puts again: the version completes, or it had.
    let again = world.immortal(5).await;
    let report = again.put_state_dict(&key(), &half, &of_second).await;
    assert!(report.as_ref().is_ok_and(|report| report.visible), "after {calls} calls: {report:?}");
    assert_eq!(newest(&reader).await, 2);

    // A new job goes on, and nothing is left of what was replaced.
    for writer in 0..2 {
        let dict = contents(3, Some(u64::from(writer)));
        again.put_state_dict(&key(), &dict, &as_writer(writer, "second", None)).await.unwrap();
    }
    assert_eq!(newest(&reader).await, 3);
    assert_eq!(reader.versions(&key()).await.unwrap().len(), 1);
    let archives = world.archives();
    let is_third = |name: &String| name.starts_with("0-3-");
    assert!(archives.len() == 3 && archives.iter().all(is_third), "after {calls}: {archives:?}");
    completed
}

/// The second writer dies after so many calls, and its next process has other contents: the version has
/// those of one of the two, and of the second if its put succeeds.
async fn comes_back_after(calls: i64) -> bool {
    let world = World::default();
    let options = |writer| as_writer(writer, "job", Some(2));
    let first = world.immortal(1).await;
    first.put_state_dict(&key(), &row(0, 0), &options(0)).await.unwrap();
    let mortal = world.process(2, calls).await;
    let died = mortal.put_state_dict(&key(), &row(1, 1), &options(1)).await;
    let again = world.immortal(3).await;
    let again = again.put_state_dict(&key(), &row(1, 2), &options(1)).await;
    world.clock.pass(Duration::from_secs(5));
    let reader = world.immortal(4).await;
    let (dict, _) = reader.get_state_dict(&key(), &GetOptions::default()).await.unwrap();
    let Value::Tensor(rows) = dict.leaf("rows").unwrap() else { panic!("a tensor") };
    let found = rows.view().as_slice::<i64>().unwrap()[32];
    let expected = if again.is_ok() { 2 } else { 1 };
    assert_eq!(found, expected, "after {calls} calls: {again:?}");
    let archives = world.archives();
    assert_eq!(archives.len(), 3, "two archives and the manifest: {archives:?}");
    died.is_ok()
}

/// A row of two, and nothing that the writers would have to agree on.
fn row(writer: u64, value: i64) -> StateDict {
    let mut dict = StateDict::new();
    let rows = contents(value, Some(writer)).leaf("rows").unwrap().clone();
    dict.insert("rows", rows);
    dict
}

#[tokio::test]
async fn a_writer_may_come_back_with_other_contents() {
    let mut calls = 0;
    while !comes_back_after(calls).await {
        calls += 1;
        assert!(calls < 1000, "a put takes fewer calls");
    }
}

#[tokio::test]
async fn a_writer_may_die_at_every_call() {
    let mut calls = 0;
    while !dies_after(calls).await {
        calls += 1;
        assert!(calls < 1000, "a put takes fewer calls");
    }
    assert!(calls > 15, "there were calls to die at: {calls}");
}
