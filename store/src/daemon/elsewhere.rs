//! Archives that other daemons keep, and connections to those daemons.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex as AsyncMutex, Semaphore};

use crate::environment::wait;
use crate::net::{Endpoint, Identity};
use crate::remote::Lines;
use crate::volume::Far;

/// For how long a connection is tried.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How many reads go on to one daemon at once.
const RELAYS: usize = 8;

/// How many names are told at once: as many as surely go into a request.
const PART: usize = 16;

/// How soon a daemon answers that is not to be passed over.
const ANSWER: Duration = Duration::from_secs(2);

/// For how long a daemon that did not answer is not asked again.
const DISBELIEF: Duration = Duration::from_secs(5);

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
    hosts: BTreeMap<Endpoint, Host>,
}

/// Another daemon.
struct Host {
    lines: Arc<Lines>,
    relays: Arc<Semaphore>,
    /// What it is told that nobody needs; the first one is in charge of that.
    unneeded: Arc<Mutex<Vec<String>>>,
    /// When it was asked last whether it is there, and whether it has answered.
    asked: Arc<AsyncMutex<Option<(Instant, bool)>>>,
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

    /// Nobody needs a blob any more: whoever keeps it is told.
    pub(super) fn discard(&self, name: &str) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (lines, unneeded) = {
            let mut inner = self.inner();
            let Some(kept) = inner.blobs.remove(name) else { return };
            let host = self.host_in(&mut inner, &kept.endpoint);
            let (lines, unneeded) = (host.lines.clone(), host.unneeded.clone());
            let mut names = names_of(&unneeded);
            names.push(name.to_owned());
            if names.len() > 1 {
                // Somebody is about to tell it already.
                return;
            }
            drop(names);
            (lines, unneeded)
        };
        // A daemon that is gone has nothing to discard, and nobody waits for one that is slow.
        drop(runtime.spawn_blocking(move || tell(&lines, &unneeded)));
    }

    /// The names of what is kept elsewhere that begin with a prefix.
    pub(super) fn names(&self, prefix: &str) -> Vec<String> {
        let inner = self.inner();
        let names = inner.blobs.range(prefix.to_owned()..).map(|(name, _)| name);
        names.take_while(|name| name.starts_with(prefix)).cloned().collect()
    }

    pub(super) fn place(&self, name: &str) -> Option<(Endpoint, u64)> {
        self.inner().blobs.get(name).map(|kept| (kept.endpoint.clone(), kept.len))
    }

    pub(super) fn open(&self, name: &str) -> Option<Far> {
        let (endpoint, len) = self.place(name)?;
        Some(Far { holder: self.host(&endpoint), blob: name.into(), len, tail: None })
    }

    /// Connections to a daemon.
    pub(super) fn host(&self, endpoint: &Endpoint) -> Arc<Lines> {
        self.host_in(&mut self.inner(), endpoint).lines.clone()
    }

    /// The same for bytes that go on to somebody else, with the right to use so many at once.
    pub(super) fn relay(&self, endpoint: &Endpoint) -> (Arc<Lines>, Arc<Semaphore>) {
        let mut inner = self.inner();
        let host = self.host_in(&mut inner, endpoint);
        (host.lines.clone(), host.relays.clone())
    }

    /// Whether a daemon answers: to be asked before those are kept waiting who may have its bytes from elsewhere too.
    pub(super) async fn answers(&self, endpoint: &Endpoint) -> bool {
        let (lines, asked) = {
            let mut inner = self.inner();
            let host = self.host_in(&mut inner, endpoint);
            (host.lines.clone(), host.asked.clone())
        };
        let now = Instant::now();
        let mut asked = asked.lock().await;
        // Somebody else may have asked meanwhile.
        match *asked {
            Some((since, true)) if since >= now => return true,
            Some((since, false)) if since.elapsed() < DISBELIEF => return false,
            _ => {}
        }
        let begun = Instant::now();
        // A request that says nothing.
        let answer = tokio::time::timeout(ANSWER, wait(move || lines.discard(&[]))).await;
        let has_answered = matches!(answer, Ok(Ok(())));
        *asked = Some((begun, has_answered));
        has_answered
    }

    fn host_in<'i>(&self, inner: &'i mut Inner, endpoint: &Endpoint) -> &'i Host {
        inner.hosts.entry(endpoint.clone()).or_insert_with(|| {
            let (endpoint, identity) = (endpoint.clone(), self.identity.clone());
            let lines = Lines::new(Box::new(move || endpoint.dial(&identity, TIMEOUT)));
            Host {
                lines: Arc::new(lines),
                relays: Arc::new(Semaphore::new(RELAYS)),
                unneeded: Arc::default(),
                asked: Arc::default(),
            }
        })
    }

    /// Whether daemons talk to each other by TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.identity.is_some()
    }
}

/// Tells a daemon what it need not keep, until there is nothing more to tell.
fn tell(lines: &Lines, unneeded: &Mutex<Vec<String>>) {
    loop {
        let names = names_of(unneeded).clone();
        for part in names.chunks(PART) {
            let is_told = (0..TRIES).any(|_| lines.discard(part).is_ok());
            if !is_told {
                tracing::warn!(count = names.len(), "a daemon could not be told what to discard");
                break;
            }
        }
        let mut rest = names_of(unneeded);
        rest.drain(..names.len());
        if rest.is_empty() {
            return;
        }
    }
}

fn names_of(unneeded: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    unneeded.lock().expect("nobody panics while holding what is not needed")
}
