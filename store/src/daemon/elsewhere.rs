//! Archives that other daemons keep, and connections to those daemons.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::net::{Endpoint, Identity};
use crate::remote::Lines;
use crate::volume::Far;

/// For how long a connection is tried.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How often a daemon is told that an archive is needed no more.
const TRIES: u32 = 3;

/// What is kept elsewhere, by its name.
pub(super) struct Elsewhere {
    identity: Identity,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    blobs: BTreeMap<String, Kept>,
    hosts: BTreeMap<Endpoint, Arc<Lines>>,
}

struct Kept {
    endpoint: Endpoint,
    len: u64,
    /// How many need to know.
    uses: u64,
}

impl Elsewhere {
    pub(super) fn new(identity: Identity) -> Self {
        Self { identity, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding what is elsewhere")
    }

    /// Somebody needs to know that a daemon keeps a blob of so many bytes.
    pub(super) fn note(&self, name: &str, endpoint: &Endpoint, len: u64) {
        let mut inner = self.inner();
        let kept = || Kept { endpoint: endpoint.clone(), len, uses: 0 };
        inner.blobs.entry(name.to_owned()).or_insert_with(kept).uses += 1;
    }

    /// Somebody needs to know no more.
    pub(super) fn forget(&self, name: &str) {
        let mut inner = self.inner();
        if let Some(kept) = inner.blobs.get_mut(name) {
            kept.uses -= 1;
            if kept.uses == 0 {
                inner.blobs.remove(name);
            }
        }
    }

    /// Nobody needs a blob that was noted once: whoever keeps it is told.
    pub(super) fn discard(&self, name: &str) {
        let Some(kept) = self.inner().blobs.remove(name) else { return };
        let (lines, name) = (self.host(&kept.endpoint), name.to_owned());
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        // A daemon that is gone has nothing to discard, and nobody waits for one that is slow.
        drop(runtime.spawn_blocking(move || {
            (0..TRIES).any(|_| lines.discard(&name).is_ok());
        }));
    }

    pub(super) fn place(&self, name: &str) -> Option<(Endpoint, u64)> {
        self.inner().blobs.get(name).map(|kept| (kept.endpoint.clone(), kept.len))
    }

    pub(super) fn open(&self, name: &str) -> Option<Far> {
        let (endpoint, len) = self.place(name)?;
        Some(Far { holder: self.host(&endpoint), blob: name.into(), len })
    }

    /// Connections to a daemon.
    pub(super) fn host(&self, endpoint: &Endpoint) -> Arc<Lines> {
        let lines = || {
            let (endpoint, identity) = (endpoint.clone(), self.identity.clone());
            Arc::new(Lines::new(Box::new(move || endpoint.dial(&identity, TIMEOUT))))
        };
        self.inner().hosts.entry(endpoint.clone()).or_insert_with(lines).clone()
    }
}
