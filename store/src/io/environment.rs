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

impl SystemEnvironment {
    /// Returns the name of this host, or an empty string if it has none.
    #[expect(clippy::unused_self, reason = "it is a property of the system, as the clock is")]
    pub(crate) fn host_name(&self) -> String {
        #[cfg(unix)]
        return rustix::system::uname().nodename().to_string_lossy().into_owned();
        #[cfg(not(unix))]
        return std::env::var("COMPUTERNAME").unwrap_or_default();
    }
}

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
