//! Scenario "commit": readers, and writers of two jobs that retry, withdraw or are overtaken.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shuttle::future::yield_now;

use super::{
    Bug, Observer, TestEnvironment, archive, digest_of, one_in, random_below, value_of,
    yield_randomly,
};
use crate::blob::Volume;
use crate::blob::backend::MemoryVolume;
use crate::control::layout::folder;
use crate::control::{Catalog, Controller, Proposal};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind};
use crate::io::sync::spawn;
use crate::key::Key;
use crate::ledger::{
    Durability, Effect, JobId, Selection, Selector, VersionId, WriterSet, pending,
};
use crate::metadata::backend::MemoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers};
use crate::testing::schedules::planted_bugs::{TornVolume, UnlockedLedgers};

/// State that the tasks share.
struct Fixture {
    controller: LocalController,
    volume: Arc<dyn Volume>,
    observer: Observer<Observed>,
    bug: Option<Bug>,
}

/// Results that the tasks have observed. Versions are identified by epoch and number.
#[derive(Default)]
struct Observed {
    /// Value of each version that was read or acknowledged.
    values: BTreeMap<(u32, u64), u64>,
    /// Epoch and number of each version identity.
    numbers: BTreeMap<VersionId, (u32, u64)>,
    /// The greatest acknowledged version.
    acknowledged: (u32, u64),
}

/// The version that a job puts.
#[derive(Clone, Copy)]
struct Job {
    value: u64,
    number: u64,
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

pub(super) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let ledgers: Arc<dyn Ledgers> = match random_below(3) {
            0 => Arc::new(SharedLedgers::new(Arc::new(MemoryMeta::default()))),
            _ => Arc::new(OwnedLedgers::default()),
        };
        let ledgers: Arc<dyn Ledgers> = match bug {
            Some(Bug::NoLedgerLock) => Arc::new(UnlockedLedgers(ledgers)),
            _ => ledgers,
        };
        let torn = TornVolume::default();
        let volume: Arc<dyn Volume> = match bug {
            Some(Bug::NameBeforeWrite) => Arc::new(torn.clone()),
            _ => Arc::new(MemoryVolume::default()),
        };
        let world = Arc::new(TestEnvironment::default());
        let controller = LocalController::new(ledgers, volume.clone(), world);
        let fixture = Arc::new(Fixture { controller, volume, observer: Observer::default(), bug });
        let mut tasks = Vec::new();
        for writer in [0, 1] {
            let tries = if one_in(3) { 2 } else { 1 };
            for _ in 0..tries {
                tasks.push(spawn(put(fixture.clone(), writer, Job { value: 1, number: 1 })));
            }
        }
        if !one_in(3) {
            // A restarted job, which puts the same version number or the next one.
            let job = Job { value: 2, number: 1 + random_below(2) };
            for writer in [0, 1] {
                tasks.push(spawn(put(fixture.clone(), writer, job)));
            }
        }
        for _ in 0..=random_below(2) {
            tasks.push(spawn(get(fixture.clone())));
        }
        if bug == Some(Bug::StaleDelete) {
            tasks.push(spawn(delete_by_stale_state(fixture.clone())));
        }
        for task in tasks {
            task.await.unwrap();
        }
        fixture.check_final_state().await;
        torn.finish_writes().await;
        fixture.observer.assert_no_violation();
    });
}

/// Puts a writer's part of a job's version, and retries at most once.
async fn put(fixture: Arc<Fixture>, writer: u32, job: Job) {
    for _ in 0..=random_below(2) {
        match contribute(&fixture, writer, job).await {
            Ok(()) => return,
            Err(error) => {
                let is_refused = !matches!(
                    error.kind(),
                    ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::Rejected | ErrorKind::Busy
                );
                fixture.observer.check(is_refused, || format!("writer {writer}: {error}"));
            }
        }
    }
}

/// Puts a writer's part of a job's version. May withdraw it, or drop its future.
async fn contribute(fixture: &Fixture, writer: u32, job: Job) -> Result<(), Error> {
    let bytes = archive(writer, job.value);
    let len = u64::try_from(bytes.len()).unwrap();
    let proposal = Proposal {
        writer,
        writers: [0, 1].into_iter().collect(),
        writers_defaulted: false,
        job: Some(JobId(format!("job {}", job.value))),
        sequence: None,
        number: Some(job.number),
        rewind: false,
        keeps_earlier_runs: false,
        process: None,
        durability: Durability::Memory,
        file_len: len,
        device: None,
        timeout: Duration::from_hours(1),
    };
    let mut begun = fixture.controller.begin(&key(), proposal).await?;
    let place = (begun.epoch, begun.number);
    fixture.check_number(begun.id, place);
    if begun.committed.is_none() {
        for part in &mut begun.contribution.parts(&[len]) {
            part.write(bytes)?;
        }
    }
    yield_randomly().await;
    match random_below(12) {
        // The future is dropped.
        0 => {
            drop(begun.contribution);
            return Ok(());
        }
        1 => {
            let withdrawn = Error::new(ErrorKind::Refused, "it is withdrawn");
            return Err(begun.contribution.withdraw(withdrawn).await);
        }
        _ => {}
    }
    let progress = begun.contribution.commit(digest_of(writer, job.value)).await?.progress;
    let has_progress = progress.visible || progress.missing != WriterSet::default();
    fixture.observer.check(has_progress, || format!("writer {writer} hears nothing of {place:?}"));
    if progress.visible {
        fixture.check_value(place, job.value);
        let mut observed = fixture.observer.observed();
        observed.acknowledged = observed.acknowledged.max(place);
    }
    Ok(())
}

/// Reads the newest version twice. Versions must be complete, and must not become older.
async fn get(fixture: Arc<Fixture>) {
    let mut last = (0, 0);
    for _ in 0..2 {
        yield_randomly().await;
        let floor = fixture.observer.observed().acknowledged.max(last);
        match fixture.controller.locate(&key(), Selector::Newest).await {
            Ok(located) => {
                let archives = located.archives.values();
                let values: Vec<_> =
                    archives.map(|each| value_of(each.blob().bytes().unwrap())).collect();
                let value = match values.as_slice() {
                    [Some((0, one)), Some((1, other))] | [Some((1, one)), Some((0, other))]
                        if one == other =>
                    {
                        *one
                    }
                    mix => {
                        fixture.observer.check(false, || format!("{mix:?} is a version"));
                        return;
                    }
                };
                let place = fixture.observer.observed().numbers[&located.id];
                fixture.check_value(place, value);
                fixture.observer.check(place >= floor, || format!("{place:?} after {floor:?}"));
                last = place;
            }
            Err(error) => {
                let is_missing = error.kind() == ErrorKind::NotFound && floor == (0, 0);
                fixture.observer.check(is_missing, || format!("after {floor:?}: {error}"));
            }
        }
    }
}

/// Deletes data according to an outdated state: [`Bug::StaleDelete`].
async fn delete_by_stale_state(fixture: Arc<Fixture>) {
    for _ in 0..3 {
        let state = fixture.controller.state(&key()).await.unwrap();
        for _ in 0..3 {
            yield_randomly().await;
        }
        for effect in pending(&state) {
            let Effect::Delete { id, .. } = effect else { continue };
            let deleted = state.versions().find(|version| version.id == id);
            let folder = folder(&key(), deleted.expect("what is owed is of a version"));
            for name in fixture.volume.list(&folder).unwrap() {
                fixture.volume.delete(&format!("{folder}/{name}")).unwrap();
            }
        }
    }
}

impl Fixture {
    /// Checks that a version identity always has the same epoch and number.
    fn check_number(&self, id: VersionId, place: (u32, u64)) {
        let known = *self.observer.observed().numbers.entry(id).or_insert(place);
        self.observer.check(known == place, || format!("{id} is {known:?} and {place:?}"));
    }

    /// Checks that a version always has the same value.
    fn check_value(&self, place: (u32, u64), value: u64) {
        let known = *self.observer.observed().values.entry(place).or_insert(value);
        self.observer.check(known == value, || format!("{place:?} is {known} and {value}"));
    }

    /// Checks the final state: no pending effects, and no data other than that of the ledger.
    async fn check_final_state(&self) {
        // A contribution whose future was dropped is withdrawn in the background.
        while self.controller.reference_count() > 1 {
            yield_now().await;
        }
        if self.bug.is_some() {
            return;
        }
        let state = self.controller.state(&key()).await.unwrap();
        let effects = pending(&state);
        self.observer.check(effects.is_empty(), || format!("{effects:?} are owed"));
        let head = state.head().map_or((0, 0), |head| (head.epoch, head.number));
        let acknowledged = self.observer.observed().acknowledged;
        self.observer.check(head >= acknowledged, || format!("{head:?} of {acknowledged:?}"));
        self.controller.delete(&key(), Selection::All).await.unwrap();
        let left = self.volume.list(&key().to_path()).unwrap();
        self.observer.check(left.is_empty(), || format!("{left:?} are left"));
    }
}
