//! What a daemon counts, for whoever watches it.

use std::collections::BTreeMap;

use super::elsewhere::Source;
use crate::control::Got;
use crate::error::ErrorKind;
use crate::io::sync::{Lock, MutexGuard};
use crate::route::Transport;

/// What is counted since the start.
#[derive(Default)]
pub(crate) struct Counters(Lock<Counts>);

#[derive(Clone, Default)]
pub(crate) struct Counts {
    pub(crate) connections: u64,
    pub(crate) turned_away: u64,
    pub(crate) puts: u64,
    pub(crate) bytes_put: u64,
    pub(crate) gets: u64,
    /// Bytes that were leased: those that this host has, and those that others have, by why they do.
    pub(crate) bytes_leased: BTreeMap<Option<Source>, u64>,
    pub(crate) published: u64,
    /// Bytes of archives that went out over connections.
    pub(crate) bytes_read: u64,
    /// What readers say that they have read.
    pub(crate) got: BTreeMap<Transport, Got>,
    /// Requests by what they ask for and what came of them.
    pub(crate) requests: BTreeMap<(&'static str, Option<ErrorKind>), u64>,
}

/// What a reader has read last of a key.
pub(crate) struct Reader {
    pub(crate) peer: u64,
    pub(crate) pid: u32,
    pub(crate) key: String,
    pub(crate) version: u64,
}

impl Counts {
    /// One more read.
    pub(crate) fn add(&mut self, got: Got) {
        let Got { transport, needed, transferred, verified } = got;
        let none = Got { transport, needed: 0, transferred: 0, verified: 0 };
        let all = self.got.entry(transport).or_insert(none);
        all.needed = all.needed.saturating_add(needed);
        all.transferred = all.transferred.saturating_add(transferred);
        all.verified = all.verified.saturating_add(verified);
    }
}

impl Counters {
    pub(crate) fn count(&self) -> MutexGuard<'_, Counts> {
        self.0.lock()
    }
}
