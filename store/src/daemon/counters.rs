//! Counters of a daemon, for the metrics.

use std::collections::BTreeMap;

use crate::control::ReadStats;
use crate::daemon::remote_blobs::ReplicaKind;
use crate::error::ErrorKind;
use crate::io::sync::{Lock, MutexGuard};
use crate::route::Transport;

/// Counters since the start of the daemon.
#[derive(Default)]
pub(crate) struct Counters(Lock<Counts>);

/// Values of the counters.
#[derive(Clone, Default)]
pub(crate) struct Counts {
    pub(crate) connections: u64,
    pub(crate) rejected_connections: u64,
    pub(crate) puts: u64,
    pub(crate) put_bytes: u64,
    pub(crate) gets: u64,
    /// Bytes of leased archives, by the kind of replica. `None` stands for archives on this host.
    pub(crate) leased_bytes: BTreeMap<Option<ReplicaKind>, u64>,
    pub(crate) published: u64,
    /// Bytes of archives that were sent over connections.
    pub(crate) sent_bytes: u64,
    /// Bytes that readers have reported, by transport.
    pub(crate) reads: BTreeMap<Transport, ReadStats>,
    /// Number of requests, by operation and kind of error.
    pub(crate) requests: BTreeMap<(&'static str, Option<ErrorKind>), u64>,
}

/// The version of a key that a connected reader leased last.
pub(crate) struct ReaderPosition {
    pub(crate) peer: u64,
    pub(crate) pid: u32,
    pub(crate) key: String,
    pub(crate) version: u64,
}

impl Counts {
    /// Adds the report of a read.
    pub(crate) fn add_read(&mut self, got: ReadStats) {
        let ReadStats { transport, needed, transferred, verified } = got;
        let zero = ReadStats { transport, needed: 0, transferred: 0, verified: 0 };
        let total = self.reads.entry(transport).or_insert(zero);
        total.needed = total.needed.saturating_add(needed);
        total.transferred = total.transferred.saturating_add(transferred);
        total.verified = total.verified.saturating_add(verified);
    }
}

impl Counters {
    /// Locks the values.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock()
    }
}
