//! Processes that die, and machines that lose their power, at any moment.

mod dice;
mod faulty;
mod mortal;
mod promise;
mod states;
mod steps;
mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use self::dice::Dice;
use crate::io::environment::Environment;
use crate::ledger::Timestamp;

/// A clock that stands still unless it is told to go on.
#[derive(Clone, Debug, Default)]
struct Clock(Arc<AtomicU64>);

impl Clock {
    fn pass(&self, span: Duration) {
        let span = u64::try_from(span.as_millis()).unwrap();
        self.0.fetch_add(span, Ordering::SeqCst);
    }
}

/// What a process takes from the world: the clock, and numbers that no other process has.
struct Fake {
    clock: Clock,
    next: AtomicU64,
    process: u64,
}

impl Fake {
    fn new(clock: &Clock, process: u64) -> Self {
        Self { clock: clock.clone(), next: AtomicU64::new(1), process }
    }
}

impl Environment for Fake {
    fn now(&self) -> Timestamp {
        Timestamp(self.clock.0.load(Ordering::SeqCst))
    }

    fn random(&self) -> u128 {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        u128::from(self.process) << 64 | u128::from(number)
    }
}
