//! Ledgers of keys: tasks that take turns and advance them, or not, that watch them, and that stop waiting.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::{Bug, Observer, below, dawdle, once_in};
use crate::io::sync::{select, spawn};
use crate::key::Key;
use crate::ledger::State;
use crate::metadata::backend::MemoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers, save};

/// For ever, as shuttle's clock sees it.
const FOREVER: Duration = Duration::from_hours(24 * 800);

struct Stage {
    ledgers: Arc<dyn Ledgers>,
    /// The same, if it is this process alone that has them.
    owned: Option<OwnedLedgers>,
    observer: Observer<Seen>,
    bug: Option<Bug>,
}

/// How far the ledger of the key came: it counts how often it was advanced.
#[derive(Default)]
struct Seen {
    begun: u32,
    done: u32,
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Nobody ever writes this one.
fn unwritten() -> Key {
    Key::new("nothing").unwrap()
}

fn counted(state: &State) -> u32 {
    // What a key keeps is one to begin with, and nothing else looks at it here.
    (1..100).find(|keep| *state == counting(*keep)).unwrap() - 1
}

fn counting(keep: u32) -> State {
    State::keeping(NonZeroU32::new(keep).unwrap())
}

pub(super) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let meta = Arc::new(MemoryMeta::default());
        let kind = if bug.is_some() { 0 } else { below(4) };
        let owned = match kind {
            0 | 1 => Some(OwnedLedgers::default()),
            2 => Some(OwnedLedgers::default().recover(meta.clone()).await.unwrap()),
            _ => None,
        };
        let ledgers: Arc<dyn Ledgers> = match &owned {
            Some(owned) => Arc::new(owned.clone()),
            None => Arc::new(SharedLedgers::new(meta.clone())),
        };
        let stage = Arc::new(Stage { ledgers, owned, observer: Observer::default(), bug });
        let writers: Vec<u32> = (0..2).map(|_| u32::try_from(below(2)).unwrap() + 1).collect();
        let all = writers.iter().sum();
        let mut tasks = vec![spawn(watch(stage.clone(), all)), spawn(glance(stage.clone()))];
        for times in writers {
            tasks.push(spawn(advance(stage.clone(), times)));
        }
        tasks.push(spawn(hesitate(stage.clone())));
        for task in tasks {
            task.await.unwrap();
        }
        stage.end(all).await;
        if kind == 2 {
            let recovered = OwnedLedgers::default().recover(meta).await.unwrap();
            let count = counted(&recovered.state(&key()).await.unwrap());
            stage.observer.must(count == all, || format!("{count} of {all} steps are durable"));
        }
        stage.observer.end();
    });
}

/// Advances the ledger.
async fn advance(stage: Arc<Stage>, times: u32) {
    for _ in 0..times {
        let before = stage.ledgers.state(&key()).await.unwrap();
        dawdle().await;
        let turn = stage.ledgers.turn(&key()).await.unwrap();
        let count = match stage.bug {
            Some(Bug::ReadsBeforeItsTurn) => counted(&before),
            _ => counted(turn.state()),
        };
        {
            let mut seen = stage.observer.seen();
            let (begun, done) = (seen.begun, seen.done);
            let is_alone = begun == done && (stage.bug.is_some() || count == done);
            stage.observer.must(is_alone, || format!("a turn at {count} of {done}, {begun}"));
            seen.begun += 1;
        }
        dawdle().await;
        let next = counting(count + 2);
        let saving = {
            // Whoever has the next turn may have it before this hears of its end.
            stage.observer.seen().done += 1;
            save(turn, next)
        };
        assert!(saving.await.unwrap());
        stage.look(count + 1).await;
    }
}

/// Takes turns and does nothing with them, or does not wait until it has one.
async fn hesitate(stage: Arc<Stage>) {
    for key in [key(), unwritten(), key()] {
        if once_in(2) {
            select! {
                turn = stage.ledgers.turn(&key) => drop(turn),
                () = dawdle() => {}
            }
        } else {
            let turn = stage.ledgers.turn(&key).await.unwrap();
            dawdle().await;
            drop(turn);
        }
    }
}

/// Waits until the ledger is as far as it will come.
async fn watch(stage: Arc<Stage>, all: u32) {
    loop {
        let state = stage.ledgers.state(&key()).await.unwrap();
        if counted(&state) == all {
            return;
        }
        stage.ledgers.changed(&key(), &state, FOREVER).await;
    }
}

/// Waits a while for changes, or until it does not care any more, of a key that nobody writes too.
async fn glance(stage: Arc<Stage>) {
    for key in [unwritten(), key(), unwritten()] {
        let state = stage.ledgers.state(&key).await.unwrap();
        // Who looks again and again does not wait.
        let is_over = stage.owned.is_none() || once_in(2);
        let patience = if is_over { Duration::from_millis(2) } else { FOREVER };
        select! {
            () = stage.ledgers.changed(&key, &state, patience) => {}
            () = dawdle(), if !is_over => {}
        }
        if stage.bug == Some(Bug::ForgetsWhoWaits) {
            stage.owned.as_ref().unwrap().forget(&key);
        }
    }
}

impl Stage {
    /// What is there is no older than what was done, and no newer than what was begun.
    async fn look(&self, least: u32) {
        let count = counted(&self.ledgers.state(&key()).await.unwrap());
        let begun = self.observer.seen().begun;
        let is_between = (least..=begun).contains(&count) || self.bug.is_some();
        self.observer.must(is_between, || format!("{count} is there, of {least} to {begun}"));
    }

    async fn end(&self, all: u32) {
        let count = counted(&self.ledgers.state(&key()).await.unwrap());
        self.observer.must(count == all, || format!("{count} of {all} steps are there"));
        let keys = self.ledgers.keys().await.unwrap();
        self.observer.must(keys == [key()], || format!("{keys:?} are kept"));
    }
}
