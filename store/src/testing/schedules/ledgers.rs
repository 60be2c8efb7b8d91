//! Scenario "ledgers": tasks acquire ledgers, advance them or not, watch them, and cancel their waits.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::{Bug, Observer, one_in, random_below, yield_randomly};
use crate::io::sync::{select, spawn};
use crate::key::Key;
use crate::ledger::State;
use crate::metadata::backend::MemoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers, save};

/// A timeout that shuttle's clock never reaches.
const FOREVER: Duration = Duration::from_hours(24 * 800);

/// State that the tasks share.
struct Fixture {
    ledgers: Arc<dyn Ledgers>,
    /// The same ledgers, if this process owns them.
    owned: Option<OwnedLedgers>,
    observer: Observer<Steps>,
    bug: Option<Bug>,
}

/// Number of steps by which the ledger was advanced.
#[derive(Default)]
struct Steps {
    /// Steps that have begun.
    begun: u32,
    /// Steps that are complete.
    done: u32,
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Returns a key that is never written.
fn unwritten_key() -> Key {
    Key::new("nothing").unwrap()
}

/// Returns the number of steps of a ledger. Its `keep`, which is 1 initially, serves as the counter.
fn step_count(state: &State) -> u32 {
    (1..100).find(|keep| *state == state_with_keep(*keep)).unwrap() - 1
}

fn state_with_keep(keep: u32) -> State {
    State::with_keep(NonZeroU32::new(keep).unwrap())
}

pub(super) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let meta = Arc::new(MemoryMeta::default());
        let kind = if bug.is_some() { 0 } else { random_below(4) };
        let owned = match kind {
            0 | 1 => Some(OwnedLedgers::default()),
            2 => Some(OwnedLedgers::default().recover(meta.clone()).await.unwrap()),
            _ => None,
        };
        let ledgers: Arc<dyn Ledgers> = match &owned {
            Some(owned) => Arc::new(owned.clone()),
            None => Arc::new(SharedLedgers::new(meta.clone())),
        };
        let fixture = Arc::new(Fixture { ledgers, owned, observer: Observer::default(), bug });
        let writers: Vec<u32> =
            (0..2).map(|_| u32::try_from(random_below(2)).unwrap() + 1).collect();
        let all = writers.iter().sum();
        let mut tasks =
            vec![spawn(watch(fixture.clone(), all)), spawn(watch_briefly(fixture.clone()))];
        for times in writers {
            tasks.push(spawn(advance(fixture.clone(), times)));
        }
        tasks.push(spawn(acquire_idle(fixture.clone())));
        for task in tasks {
            task.await.unwrap();
        }
        fixture.check_final_state(all).await;
        if kind == 2 {
            let recovered = OwnedLedgers::default().recover(meta).await.unwrap();
            let count = step_count(&recovered.state(&key()).await.unwrap());
            fixture.observer.check(count == all, || format!("{count} of {all} steps are durable"));
        }
        fixture.observer.assert_no_violation();
    });
}

/// Advances the ledger this many times.
async fn advance(fixture: Arc<Fixture>, times: u32) {
    for _ in 0..times {
        let before = fixture.ledgers.state(&key()).await.unwrap();
        yield_randomly().await;
        let guard = fixture.ledgers.lock(&key()).await.unwrap();
        let count = match fixture.bug {
            Some(Bug::StaleLedgerState) => step_count(&before),
            _ => step_count(guard.state()),
        };
        {
            let mut seen = fixture.observer.observed();
            let (begun, done) = (seen.begun, seen.done);
            let is_alone = begun == done && (fixture.bug.is_some() || count == done);
            fixture.observer.check(is_alone, || format!("a turn at {count} of {done}, {begun}"));
            seen.begun += 1;
        }
        yield_randomly().await;
        let next = state_with_keep(count + 2);
        let saving = {
            // The next task may acquire the ledger before this task learns that its save has ended.
            fixture.observer.observed().done += 1;
            save(guard, next)
        };
        assert!(saving.await.unwrap());
        fixture.check_count(count + 1).await;
    }
}

/// Acquires ledgers without advancing them, or cancels the wait for a ledger.
async fn acquire_idle(fixture: Arc<Fixture>) {
    for key in [key(), unwritten_key(), key()] {
        if one_in(2) {
            select! {
                guard = fixture.ledgers.lock(&key) => drop(guard),
                () = yield_randomly() => {}
            }
        } else {
            let guard = fixture.ledgers.lock(&key).await.unwrap();
            yield_randomly().await;
            drop(guard);
        }
    }
}

/// Waits until the ledger has made all steps.
async fn watch(fixture: Arc<Fixture>, all: u32) {
    loop {
        let state = fixture.ledgers.state(&key()).await.unwrap();
        if step_count(&state) == all {
            return;
        }
        fixture.ledgers.changed(&key(), &state, FOREVER).await;
    }
}

/// Waits for changes with a short timeout, or cancels the wait. Also for a key that is never written.
async fn watch_briefly(fixture: Arc<Fixture>) {
    for key in [unwritten_key(), key(), unwritten_key()] {
        let state = fixture.ledgers.state(&key).await.unwrap();
        // Shared ledgers poll, so their waits end by timeout.
        let has_timeout = fixture.owned.is_none() || one_in(2);
        let timeout = if has_timeout { Duration::from_millis(2) } else { FOREVER };
        select! {
            () = fixture.ledgers.changed(&key, &state, timeout) => {}
            () = yield_randomly(), if !has_timeout => {}
        }
        if fixture.bug == Some(Bug::EvictsWatchedLedger) {
            fixture.owned.as_ref().unwrap().remove_slot(&key);
        }
    }
}

impl Fixture {
    /// Checks that the ledger has at least `min` steps, and at most those that have begun.
    async fn check_count(&self, min: u32) {
        let count = step_count(&self.ledgers.state(&key()).await.unwrap());
        let begun = self.observer.observed().begun;
        let is_valid = (min..=begun).contains(&count) || self.bug.is_some();
        self.observer.check(is_valid, || format!("{count} is there, of {min} to {begun}"));
    }

    /// Checks the final state: all steps are made, and only the written key has a ledger.
    async fn check_final_state(&self, all: u32) {
        let count = step_count(&self.ledgers.state(&key()).await.unwrap());
        self.observer.check(count == all, || format!("{count} of {all} steps are there"));
        let keys = self.ledgers.keys().await.unwrap();
        self.observer.check(keys == [key()], || format!("{keys:?} are kept"));
    }
}
