//! Where ledgers are kept.

use serde::{Deserialize, Serialize};
use tssd_store::Durability;

use super::object::is_on_disk;

/// Where the ledgers of all keys are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Home {
    /// With a daemon that has a directory.
    Daemon,
    /// In etcd, for daemons that keep versions in memory.
    Etcd,
    /// In a directory that all clients share.
    Directory,
    /// In a bucket that all clients share.
    Bucket,
}

impl Home {
    /// How many threads a client has there: the server of the bucket does one thing after the other.
    pub(crate) fn threads(self) -> u32 {
        if self == Self::Bucket { 1 } else { 4 }
    }

    /// How durable the versions of a key are there.
    pub(crate) fn durability(self, key: u8) -> Durability {
        if is_on_disk(key) && self != Self::Etcd { Durability::Disk } else { Durability::Memory }
    }
}
