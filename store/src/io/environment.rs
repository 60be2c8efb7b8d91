//! What a store takes from the world: the time and random identities.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::ledger::Timestamp;

/// Time and chance, so that tests can bring their own.
pub(crate) trait Environment: Send + Sync {
    /// The moment.
    fn now(&self) -> Timestamp;

    /// A number that nobody else has.
    fn random(&self) -> u128;
}

/// The clock and the randomness of the system.
pub(crate) struct SystemEnvironment;

impl Environment for SystemEnvironment {
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(0).after(since)
    }

    fn random(&self) -> u128 {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the system has randomness");
        u128::from_le_bytes(bytes)
    }
}
