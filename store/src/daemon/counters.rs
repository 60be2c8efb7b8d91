//! What a daemon counts, for whoever watches it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use super::elsewhere::Source;
use crate::controller::Got;
use crate::error::ErrorKind;
use crate::route::Transport;

/// What is counted since the start.
#[derive(Default)]
pub(super) struct Counters(Mutex<Counts>);

#[derive(Clone, Default)]
pub(super) struct Counts {
    pub(super) connections: u64,
    pub(super) turned_away: u64,
    pub(super) puts: u64,
    pub(super) bytes_put: u64,
    pub(super) gets: u64,
    /// Bytes that were leased: those that this host has, and those that others have, by why they do.
    pub(super) bytes_leased: BTreeMap<Option<Source>, u64>,
    pub(super) published: u64,
    /// Bytes of archives that went out over connections.
    pub(super) bytes_read: u64,
    /// What readers say that they have read.
    pub(super) got: BTreeMap<Transport, Got>,
    /// Requests by what they ask for and what came of them.
    pub(super) requests: BTreeMap<(&'static str, Option<ErrorKind>), u64>,
}

/// What a reader has read last of a key.
pub(super) struct Reader {
    pub(super) peer: u64,
    pub(super) pid: u32,
    pub(super) key: String,
    pub(super) version: u64,
}

impl Counts {
    /// One more read.
    pub(super) fn add(&mut self, got: Got) {
        let Got { transport, needed, transferred, verified } = got;
        let none = Got { transport, needed: 0, transferred: 0, verified: 0 };
        let all = self.got.entry(transport).or_insert(none);
        all.needed = all.needed.saturating_add(needed);
        all.transferred = all.transferred.saturating_add(transferred);
        all.verified = all.verified.saturating_add(verified);
    }
}

impl Counters {
    pub(super) fn count(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().expect("nobody panics while counting")
    }
}
