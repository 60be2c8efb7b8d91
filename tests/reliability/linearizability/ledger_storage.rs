//! Where ledgers are stored.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tssd_store::Durability;

use crate::linearizability::keys::is_on_disk;

/// Where the ledgers of all keys are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LedgerStorage {
    /// In the directory of a daemon.
    Daemon,
    /// In etcd. The daemons keep versions in memory.
    Etcd,
    /// In a directory that all clients share.
    Directory,
    /// In a bucket that all clients share.
    Bucket,
}

impl LedgerStorage {
    /// Returns the number of threads of a client. The server of the bucket is sequential.
    pub(crate) fn threads(self) -> u32 {
        if self == Self::Bucket { 1 } else { 4 }
    }

    /// Returns the time during which faults are injected before the histories are checked.
    ///
    /// The server of the bucket takes seconds to start.
    pub(crate) fn round_duration(self) -> Duration {
        Duration::from_secs(if self == Self::Bucket { 30 } else { 10 })
    }

    /// Returns the maximum time between two faults in milliseconds.
    ///
    /// Calls of a bucket are slow: with more faults, no version of three writers succeeds.
    pub(crate) fn max_fault_interval(self) -> u64 {
        if self == Self::Bucket { 1000 } else { 150 }
    }

    /// Returns the durability of the versions of a key.
    pub(crate) fn durability(self, key: u8) -> Durability {
        if is_on_disk(key) && self != Self::Etcd { Durability::Disk } else { Durability::Memory }
    }
}
