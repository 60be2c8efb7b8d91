//! Archives that other daemons keep, and connections to those daemons.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tssd_format::checksum;

use crate::blob::Far;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, MutexGuard};
use crate::net::client::Lines;
use crate::net::tls::{Endpoint, Identity};
use crate::net::wire::{Range, Sum};

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
pub(crate) struct Elsewhere {
    identity: Identity,
    inner: Lock<Inner>,
}

#[derive(Default)]
struct Inner {
    blobs: BTreeMap<String, Kept>,
    hosts: BTreeMap<Endpoint, Host>,
    traffic: Traffic,
}

/// What has come from other daemons.
#[derive(Clone, Default)]
pub(crate) struct Traffic {
    /// How many bytes, by what those who sent them are.
    pub(crate) pulled: BTreeMap<Source, u64>,
    /// How often somebody was passed over, because it does not answer or does not have it.
    pub(crate) passed_over: u64,
}

/// Why a daemon keeps something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// It was put there.
    Origin,
    /// It was read there.
    Replica,
}

impl Source {
    pub(crate) const ALL: [Self; 2] = [Self::Origin, Self::Replica];
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Origin => "origin",
            Self::Replica => "replica",
        })
    }
}

/// Another daemon that keeps a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keeper {
    pub(crate) endpoint: Endpoint,
    pub(crate) source: Source,
}

/// Another daemon.
struct Host {
    lines: Arc<Lines>,
    relays: Arc<Semaphore>,
    /// What it is told that nobody needs; the first one is in charge of that.
    unneeded: Arc<Lock<Vec<String>>>,
    /// When it was asked last whether it is there, and whether it has answered.
    asked: Arc<AsyncMutex<Option<(Instant, bool)>>>,
}

struct Kept {
    /// One at least, in the order in which they are asked.
    keepers: Vec<Keeper>,
    len: u64,
    /// How many need to know.
    uses: u64,
}

impl Elsewhere {
    pub(crate) fn new(identity: Identity) -> Self {
        Self { identity, inner: Lock::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Somebody needs to know that daemons, one at least, keep a blob of so many bytes; the first is asked first.
    pub(crate) fn note(&self, name: &str, keepers: &[Keeper], len: u64) {
        let mut inner = self.inner();
        let kept = || Kept { keepers: Vec::new(), len, uses: 0 };
        let kept = inner.blobs.entry(name.to_owned()).or_insert_with(kept);
        kept.keepers = keepers.to_vec();
        kept.uses += 1;
    }

    /// Somebody needs to know no more.
    pub(crate) fn forget(&self, name: &str) {
        let mut inner = self.inner();
        if let Some(kept) = inner.blobs.get_mut(name) {
            kept.uses -= 1;
            if kept.uses == 0 {
                inner.blobs.remove(name);
            }
        }
    }

    /// Nobody needs a blob any more: whoever keeps it is told.
    pub(crate) fn discard(&self, name: &str) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let mut inner = self.inner();
        let Some(kept) = inner.blobs.remove(name) else { return };
        for keeper in kept.keepers {
            let host = self.host_in(&mut inner, &keeper.endpoint);
            let (lines, unneeded) = (host.lines.clone(), host.unneeded.clone());
            let is_first = {
                let mut names = names_of(&unneeded);
                names.push(name.to_owned());
                names.len() == 1
            };
            // Else somebody is about to tell it already. A daemon that is gone has nothing to discard, and nobody
            // waits for one that is slow.
            if is_first {
                drop(runtime.spawn_blocking(move || tell(&lines, &unneeded)));
            }
        }
    }

    /// The names of what is kept elsewhere that begin with a prefix.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let inner = self.inner();
        let names = inner.blobs.range(prefix.to_owned()..).map(|(name, _)| name);
        names.take_while(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Who is asked first for a blob, and how many bytes that has.
    pub(crate) fn place(&self, name: &str) -> Option<(Keeper, u64)> {
        let inner = self.inner();
        let kept = inner.blobs.get(name)?;
        Some((kept.keepers.first()?.clone(), kept.len))
    }

    pub(crate) fn open(&self, name: &str) -> Option<Far> {
        let (keeper, len) = self.place(name)?;
        Some(Far { holder: self.host(&keeper.endpoint), blob: name.into(), len, tail: None })
    }

    /// What has come from other daemons so far.
    pub(crate) fn traffic(&self) -> Traffic {
        self.inner().traffic.clone()
    }

    /// Connections to a daemon.
    pub(crate) fn host(&self, endpoint: &Endpoint) -> Arc<Lines> {
        self.host_in(&mut self.inner(), endpoint).lines.clone()
    }

    /// Bytes of a blob, from the first daemon that gives them, with their checksum if they are to be proven.
    ///
    /// # Errors
    ///
    /// Those of the last daemon; `Unreachable` if any of them is; `Corrupt` if what comes is damaged.
    pub(crate) async fn read(
        &self,
        name: &str,
        ranges: &[Range],
        prove: bool,
    ) -> Result<(Bytes, Sum)> {
        let keepers = self.inner().blobs.get(name).map(|kept| kept.keepers.clone());
        let mut failed: Option<Error> = None;
        for keeper in keepers.unwrap_or_default() {
            let (lines, relays) = {
                let mut inner = self.inner();
                let host = self.host_in(&mut inner, &keeper.endpoint);
                (host.lines.clone(), host.relays.clone())
            };
            // Each has a connection and a thread.
            let relay = relays.acquire_owned().await;
            let _relay = relay.map_err(|error| Error::io(name, std::io::Error::other(error)))?;
            let (blob, ranges) = (name.to_owned(), ranges.to_vec());
            match run_blocking(move || read(&lines, &blob, ranges, prove)).await {
                Ok((data, sum)) => {
                    let bytes = u64::try_from(data.len()).unwrap_or(u64::MAX);
                    *self.inner().traffic.pulled.entry(keeper.source).or_default() += bytes;
                    return Ok((data, sum));
                }
                // Whoever has it only because it was read there may have it no more, or damaged.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::NotFound)
                        || keeper.source == Source::Replica =>
                {
                    self.pass_over(name, &keeper);
                    let is_worse = |failed: &Error| failed.kind() == ErrorKind::Unreachable;
                    failed = failed.filter(is_worse).or(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        Err(failed.unwrap_or_else(|| {
            let text = format_args!("`{name}` is not there (any more): locate its version again");
            Error::new(ErrorKind::NotFound, text)
        }))
    }

    /// Others are asked for a blob before this one, if there are any.
    fn pass_over(&self, name: &str, keeper: &Keeper) {
        let mut inner = self.inner();
        let Some(kept) = inner.blobs.get_mut(name) else { return };
        if kept.keepers.len() > 1 && kept.keepers.first() == Some(keeper) {
            kept.keepers.rotate_left(1);
            inner.traffic.passed_over += 1;
        }
    }

    /// Whether more than one daemon keeps a blob.
    pub(crate) fn are_several(&self, name: &str) -> bool {
        self.inner().blobs.get(name).is_some_and(|kept| kept.keepers.len() > 1)
    }

    /// Lets one who has answered since a moment be the first to be asked for a blob; says whether there is one.
    pub(crate) async fn prefer_who_answers(&self, name: &str, since: Instant) -> bool {
        let keepers = self.inner().blobs.get(name).map(|kept| kept.keepers.clone());
        for keeper in keepers.unwrap_or_default() {
            if self.answers(&keeper.endpoint, since).await {
                return true;
            }
            self.pass_over(name, &keeper);
        }
        false
    }

    /// Whether a daemon has answered since a moment.
    pub(crate) async fn answers(&self, endpoint: &Endpoint, since: Instant) -> bool {
        let (lines, asked) = {
            let mut inner = self.inner();
            let host = self.host_in(&mut inner, endpoint);
            (host.lines.clone(), host.asked.clone())
        };
        let mut asked = asked.lock().await;
        // Somebody else may have asked meanwhile.
        match *asked {
            Some((begun, true)) if begun >= since => return true,
            Some((begun, false)) if begun.elapsed() < DISBELIEF => return false,
            _ => {}
        }
        let begun = Instant::now();
        // A request that says nothing.
        let answer = tokio::time::timeout(ANSWER, run_blocking(move || lines.discard(&[]))).await;
        let has_answered = matches!(answer, Ok(Ok(())));
        *asked = Some((begun, has_answered));
        has_answered
    }

    fn host_in<'i>(&self, inner: &'i mut Inner, endpoint: &Endpoint) -> &'i Host {
        inner.hosts.entry(endpoint.clone()).or_insert_with(|| {
            let (endpoint, identity) = (endpoint.clone(), self.identity.clone());
            let lines = Lines::new(Arc::new(move || endpoint.dial(&identity, TIMEOUT)));
            Host {
                lines: Arc::new(lines),
                relays: Arc::new(Semaphore::new(RELAYS)),
                unneeded: Arc::default(),
                asked: Arc::default(),
            }
        })
    }

    /// Whether daemons talk to each other by TLS.
    pub(crate) fn is_tls(&self) -> bool {
        self.identity.is_some()
    }
}

/// As many bytes as were asked for, with their checksum if they are to be proven.
fn read(lines: &Lines, blob: &str, ranges: Vec<Range>, prove: bool) -> Result<(Bytes, Sum)> {
    let bytes =
        ranges.iter().try_fold(0_u64, |all, range| all.checked_add(range.bytes_in(u64::MAX)?));
    let (data, sum) = lines.relay(blob, ranges, prove)?;
    let is_whole = u64::try_from(data.len()).ok() == bytes;
    if is_whole && (!prove || sum.crc32 == Some(checksum(&data))) {
        return Ok((data, sum));
    }
    let text = format_args!("bytes of `{blob}` came damaged; get them again");
    Err(Error::new(ErrorKind::Corrupt, text))
}

/// Tells a daemon what it need not keep, until there is nothing more to tell.
fn tell(lines: &Lines, unneeded: &Lock<Vec<String>>) {
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

fn names_of(unneeded: &Lock<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    unneeded.lock()
}
