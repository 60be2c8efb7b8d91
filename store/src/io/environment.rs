//! The clock and the random numbers of a store, which tests replace.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::ledger::Timestamp;

/// A clock and a source of random numbers.
pub(crate) trait Environment: Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Timestamp;

    /// Returns a random 128-bit number, which is unique in practice.
    fn random_id(&self) -> u128;
}

/// The clock and the randomness of the system.
pub(crate) struct SystemEnvironment;

impl Environment for SystemEnvironment {
    fn now(&self) -> Timestamp {
        let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(0).saturating_add(elapsed)
    }

    fn random_id(&self) -> u128 {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the system has randomness");
        u128::from_le_bytes(bytes)
    }
}
