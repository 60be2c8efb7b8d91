//! Commits: writers of two jobs, which try again, give up or are overtaken, and readers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shuttle::future::yield_now;

use super::planted::{Hasty, Torn};
use super::{Bug, Observer, World, archive, below, dawdle, digest_of, once_in, value_of};
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

struct Stage {
    controller: LocalController,
    volume: Arc<dyn Volume>,
    observer: Observer<Seen>,
    bug: Option<Bug>,
}

#[derive(Default)]
struct Seen {
    /// What each version is that somebody has seen or was told of.
    values: BTreeMap<(u32, u64), u64>,
    /// The number of each identity.
    numbers: BTreeMap<VersionId, (u32, u64)>,
    /// The highest version that was acknowledged.
    acknowledged: (u32, u64),
}

/// A job's version.
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
        let ledgers: Arc<dyn Ledgers> = match below(3) {
            0 => Arc::new(SharedLedgers::new(Arc::new(MemoryMeta::default()))),
            _ => Arc::new(OwnedLedgers::default()),
        };
        let ledgers: Arc<dyn Ledgers> = match bug {
            Some(Bug::TakesNoTurns) => Arc::new(Hasty(ledgers)),
            _ => ledgers,
        };
        let torn = Torn::default();
        let volume: Arc<dyn Volume> = match bug {
            Some(Bug::NamesBeforeItWrites) => Arc::new(torn.clone()),
            _ => Arc::new(MemoryVolume::default()),
        };
        let world = Arc::new(World::default());
        let controller = LocalController::new(ledgers, volume.clone(), world);
        let stage = Arc::new(Stage { controller, volume, observer: Observer::default(), bug });
        let mut tasks = Vec::new();
        for writer in [0, 1] {
            let tries = if once_in(3) { 2 } else { 1 };
            for _ in 0..tries {
                tasks.push(spawn(put(stage.clone(), writer, Job { value: 1, number: 1 })));
            }
        }
        if !once_in(3) {
            // A job that was started again: for the same number, or the next one.
            let job = Job { value: 2, number: 1 + below(2) };
            for writer in [0, 1] {
                tasks.push(spawn(put(stage.clone(), writer, job)));
            }
        }
        for _ in 0..=below(2) {
            tasks.push(spawn(get(stage.clone())));
        }
        if bug == Some(Bug::DeletesByMemory) {
            tasks.push(spawn(sweep(stage.clone())));
        }
        for task in tasks {
            task.await.unwrap();
        }
        stage.end().await;
        torn.end().await;
        stage.observer.end();
    });
}

/// A writer's part of a job's version, and perhaps once more.
async fn put(stage: Arc<Stage>, writer: u32, job: Job) {
    for _ in 0..=below(2) {
        match contribute(&stage, writer, job).await {
            Ok(()) => return,
            Err(error) => {
                let is_refused = !matches!(
                    error.kind(),
                    ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::Rejected | ErrorKind::Busy
                );
                stage.observer.must(is_refused, || format!("writer {writer}: {error}"));
            }
        }
    }
}

async fn contribute(stage: &Stage, writer: u32, job: Job) -> Result<(), Error> {
    let bytes = archive(writer, job.value);
    let len = u64::try_from(bytes.len()).unwrap();
    let proposal = Proposal {
        writer,
        writers: [0, 1].into_iter().collect(),
        writers_defaulted: false,
        job: Some(JobId(format!("job {}", job.value))),
        call: None,
        number: Some(job.number),
        rewind: false,
        durability: Durability::Memory,
        file_len: len,
        device: None,
        timeout: Duration::from_hours(1),
    };
    let mut begun = stage.controller.begin(&key(), proposal).await?;
    let place = (begun.epoch, begun.number);
    stage.note(begun.id, place);
    if begun.committed.is_none() {
        for part in &mut begun.contribution.parts(&[len]) {
            part.write(bytes)?;
        }
    }
    dawdle().await;
    match below(12) {
        // Its future is dropped.
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
    let says = progress.visible || progress.missing != WriterSet::default();
    stage.observer.must(says, || format!("writer {writer} hears nothing of {place:?}"));
    if progress.visible {
        stage.learn(place, job.value);
        let mut seen = stage.observer.seen();
        seen.acknowledged = seen.acknowledged.max(place);
    }
    Ok(())
}

/// A reader.
async fn get(stage: Arc<Stage>) {
    let mut last = (0, 0);
    for _ in 0..2 {
        dawdle().await;
        let floor = stage.observer.seen().acknowledged.max(last);
        match stage.controller.locate(&key(), Selector::Newest).await {
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
                        stage.observer.must(false, || format!("{mix:?} is a version"));
                        return;
                    }
                };
                let place = stage.observer.seen().numbers[&located.id];
                stage.learn(place, value);
                stage.observer.must(place >= floor, || format!("{place:?} after {floor:?}"));
                last = place;
            }
            Err(error) => {
                let is_missing = error.kind() == ErrorKind::NotFound && floor == (0, 0);
                stage.observer.must(is_missing, || format!("after {floor:?}: {error}"));
            }
        }
    }
}

/// Deletes what was to be deleted some time ago.
async fn sweep(stage: Arc<Stage>) {
    for _ in 0..3 {
        let state = stage.controller.state(&key()).await.unwrap();
        for _ in 0..3 {
            dawdle().await;
        }
        for effect in pending(&state) {
            let Effect::Delete { id, .. } = effect else { continue };
            let deleted = state.versions().find(|version| version.id == id);
            let folder = folder(&key(), deleted.expect("what is owed is of a version"));
            for name in stage.volume.list(&folder).unwrap() {
                stage.volume.delete(&format!("{folder}/{name}")).unwrap();
            }
        }
    }
}

impl Stage {
    /// An identity has one number.
    fn note(&self, id: VersionId, place: (u32, u64)) {
        let known = *self.observer.seen().numbers.entry(id).or_insert(place);
        self.observer.must(known == place, || format!("{id} is {known:?} and {place:?}"));
    }

    /// A number has one value.
    fn learn(&self, place: (u32, u64), value: u64) {
        let known = *self.observer.seen().values.entry(place).or_insert(value);
        self.observer.must(known == value, || format!("{place:?} is {known} and {value}"));
    }

    /// All have ended: nothing is owed, nothing is left but what the ledger has.
    async fn end(&self) {
        // Who was not waited for withdraws some time.
        while self.controller.users() > 1 {
            yield_now().await;
        }
        if self.bug.is_some() {
            return;
        }
        let state = self.controller.state(&key()).await.unwrap();
        let owed = pending(&state);
        self.observer.must(owed.is_empty(), || format!("{owed:?} are owed"));
        let head = state.head().map_or((0, 0), |head| (head.epoch, head.number));
        let acknowledged = self.observer.seen().acknowledged;
        self.observer.must(head >= acknowledged, || format!("{head:?} of {acknowledged:?}"));
        self.controller.delete(&key(), Selection::All).await.unwrap();
        let left = self.volume.list(&key().to_path()).unwrap();
        self.observer.must(left.is_empty(), || format!("{left:?} are left"));
    }
}
