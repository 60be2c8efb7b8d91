//! Process kills and power cuts at any moment, on simulated files.

mod expected_state;
mod faulty_protocol;
mod killable_fs;
mod killed_writers;
mod power_cuts;
mod rng;
mod simulation;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::io::environment::Environment;
use crate::ledger::Timestamp;
pub(crate) use crate::testing::crash::rng::SeededRng;

/// A clock that only advances when the test calls `pass`.
#[derive(Clone, Debug, Default)]
struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    fn advance(&self, span: Duration) {
        let span = u64::try_from(span.as_millis()).unwrap();
        self.0.fetch_add(span, Ordering::SeqCst);
    }
}

/// The environment of a simulated process: the shared clock, and random numbers unique to the process.
struct TestEnvironment {
    clock: ManualClock,
    /// Low 64 bits of the next random number. The high 64 bits are the process.
    next: AtomicU64,
    process: u64,
}

impl TestEnvironment {
    fn new(clock: &ManualClock, process: u64) -> Self {
        Self { clock: clock.clone(), next: AtomicU64::new(1), process }
    }
}

impl Environment for TestEnvironment {
    fn now(&self) -> Timestamp {
        Timestamp(self.clock.0.load(Ordering::SeqCst))
    }

    fn random_id(&self) -> u128 {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        u128::from(self.process) << 64 | u128::from(number)
    }
}
