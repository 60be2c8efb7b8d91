//! What a store asks of whoever decides and knows where bytes are: here, or behind a connection.

mod contributed;
mod keepers;
pub(crate) mod layout;
mod place;

use std::any::Any;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tssd_format::Blob;

use crate::blob::{Archived, Part};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    Digest, Durability, JobId, Selection, Selector, Status, Timestamp, Version, VersionId,
    WriterSet,
};
use crate::route::{Route, Transport};
use crate::status::DaemonStatus;

pub(crate) use contributed::Contributed;
pub(crate) use keepers::{Everyone, Keepers, Reached};
pub(crate) use place::Place;

/// Which versions keys have, and what holds them.
#[async_trait]
pub(crate) trait Catalog: Send + Sync {
    /// The visible versions of a key, oldest first.
    async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>>;

    /// The newest visible version as soon as it is not `seen`; none after `patience`.
    async fn newer(
        &self,
        key: &Key,
        seen: Option<VersionId>,
        patience: Duration,
    ) -> Result<Option<VersionInfo>>;

    /// The keys that have a visible version and begin with a prefix, sorted.
    async fn keys(&self, prefix: &str) -> Result<Vec<Key>>;

    /// Deletes versions; says how many.
    async fn delete(&self, key: &Key, selection: Selection) -> Result<u64>;

    /// How many of the newest versions of a key are kept from now on, and for how long.
    async fn retain(&self, key: &Key, keep: NonZeroU32, ttl: Option<Duration>) -> Result<()>;

    /// A label holds a version, which is returned; it holds what it held before no longer.
    async fn pin(&self, key: &Key, selector: Selector, label: &str) -> Result<u64>;

    /// A label holds its version no longer.
    async fn unpin(&self, key: &Key, label: &str) -> Result<()>;

    /// The labels of a key, each with the number of the version that it holds.
    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>>;
}

/// What a store asks.
#[async_trait]
pub(crate) trait Controller: Catalog {
    /// A writer starts to contribute to a version: waits for its turn, and makes room for the archive.
    async fn begin(&self, key: &Key, proposal: Proposal) -> Result<Begun>;

    /// A visible version, open for reading.
    async fn locate(&self, key: &Key, selector: Selector) -> Result<Located>;

    /// Copies a version into the memory of this host's daemon: those of its archives that are named, or all.
    /// Says its number, its identity, and how many bytes came.
    async fn prefetch(
        &self,
        key: &Key,
        selector: Selector,
        archives: Option<Vec<String>>,
    ) -> Result<(u64, VersionId, u64)>;

    /// From now on every version of a key that becomes visible is held until it has been read.
    async fn follow(&self, _key: &Key) -> Result<Box<dyn Following>> {
        Err(nobody_to_ask())
    }

    /// Waits until not more than so many versions of a key are held for those who follow it, for so long at most. Says how
    /// many follow it, and how many versions are held for them.
    async fn unread(&self, _key: &Key, _at_most: u64, _patience: Duration) -> Result<(u64, u64)> {
        Err(nobody_to_ask())
    }

    /// Puts of small archives in one request, if this controller is remote.
    fn inline_put(&self) -> Option<&dyn InlinePut> {
        None
    }

    /// How the bytes of what is put travel.
    fn route(&self) -> Route;

    /// Whether archives may stay in the memory of a GPU.
    fn takes_devices(&self) -> bool {
        false
    }

    /// What a read has come to: whoever counts such things is told.
    fn got(&self, _got: Got) {}

    /// Whether it can be asked: a connection that is lost does not come back.
    fn is_open(&self) -> bool {
        true
    }

    /// How the daemon is, if there is one.
    async fn status(&self) -> Result<DaemonStatus>;
}

/// Puts small archives in one request.
#[async_trait]
pub(crate) trait InlinePut: Send + Sync {
    /// Returns the most bytes of such an archive.
    fn max_bytes(&self) -> u64;

    /// As [`Controller::begin`], with the only archive of the contribution: nothing is left to write. If the request did
    /// not wait for other writers, the contribution is committed, and [`Contribution::commit`] only reports it.
    async fn put_inline(
        &self,
        key: &Key,
        proposal: Proposal,
        archive: Bytes,
        digest: Digest,
    ) -> Result<Begun>;
}

/// Every version of a key, one after the other. Dropped, it follows the key no longer.
#[async_trait]
pub(crate) trait Following: Send + Sync {
    /// The next one; none after so long.
    async fn next(&mut self, patience: Duration) -> Result<Option<Located>>;
}

fn nobody_to_ask() -> Error {
    let text =
        "versions are held for those who follow a key by a daemon of this host: connect to one";
    Error::new(ErrorKind::Unsupported, text)
}

/// What a read has come to, in bytes: of what was asked for, of what was copied or is seen, of what was
/// checksummed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Got {
    pub(crate) transport: Transport,
    pub(crate) needed: u64,
    pub(crate) transferred: u64,
    pub(crate) verified: u64,
}

/// What a writer says of its contribution before it makes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Proposal {
    pub(crate) writer: u32,
    pub(crate) writers: WriterSet,
    /// Whether the writers were found in the state dict, not said.
    #[serde(default)]
    pub(crate) writers_defaulted: bool,
    #[serde(default)]
    pub(crate) job: Option<JobId>,
    /// The how-manieth put of the job to the key by the writer it is.
    #[serde(default)]
    pub(crate) call: Option<u64>,
    #[serde(default)]
    pub(crate) number: Option<u64>,
    #[serde(default)]
    pub(crate) rewind: bool,
    #[serde(default)]
    pub(crate) durability: Durability,
    /// Length of the archive in bytes, or of the first.
    pub(crate) file_len: u64,
    /// The GPU whose memory it is to be in, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<OnDevice>,
    /// For how long others are waited for.
    pub(crate) timeout: Duration,
}

#[cfg(test)]
impl Proposal {
    /// That of one writer, of a version of this number, who waits for nobody.
    pub(crate) fn alone(number: u64, durability: Durability) -> Self {
        Self {
            writer: 0,
            writers: WriterSet::one(0),
            writers_defaulted: false,
            job: None,
            call: None,
            number: Some(number),
            rewind: false,
            durability,
            file_len: 1,
            device: None,
            timeout: Duration::ZERO,
        }
    }
}

/// An archive that is to be in the memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OnDevice {
    pub(crate) uuid: String,
    /// How many bytes of it: what is in front of its index.
    pub(crate) len: u64,
    /// How many bytes others like it may have there, in the same memory.
    #[serde(default)]
    pub(crate) room: u64,
}

/// A contribution that has begun.
pub(crate) struct Begun {
    pub(crate) id: VersionId,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// What this writer has committed to the version before, in an earlier try: the same is committed
    /// again without being written.
    pub(crate) committed: Option<Digest>,
    pub(crate) contribution: Box<dyn Contribution>,
}

/// Room for an archive, until it is committed. Dropped before that, it is withdrawn.
#[async_trait]
pub(crate) trait Contribution: Send {
    /// Whether what is written goes to memory of this host, and waits for nothing.
    fn is_in_memory(&self) -> bool {
        false
    }

    /// The parts of the archive, one for each of these lengths in bytes from its beginning on; each may
    /// be written on a thread of its own.
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>>;

    /// The archive is complete: makes room for another one of so many bytes, which becomes part of the
    /// contribution.
    async fn extend(&mut self, file_len: u64, device: Option<OnDevice>) -> Result<()>;

    /// The archive is complete, and the last. The digest is of all. Says how far the version has come.
    async fn commit(self: Box<Self>, digest: Digest) -> Result<Committed>;

    /// Takes it back, and says why the put failed: what has become of the version comes before what
    /// that has led to.
    async fn withdraw(self: Box<Self>, error: Error) -> Error;
}

/// A committed contribution.
pub(crate) struct Committed {
    pub(crate) progress: Progress,
    /// The upload of the contribution to a bucket, if it must be there.
    pub(crate) upload: Option<UploadFuture>,
}

/// Resolves to the progress of the version in a bucket, once a contribution is there. The upload does not depend on the
/// future being polled.
pub(crate) type UploadFuture = Pin<Box<dyn Future<Output = Result<Progress>> + Send>>;

/// How far a version has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Whether readers see it, or have seen it.
    pub(crate) visible: bool,
    /// The writers whose contributions it waits for.
    pub(crate) missing: WriterSet,
}

/// A visible version: its bytes, and what holds them.
#[derive(Clone)]
pub(crate) struct Located {
    pub(crate) id: VersionId,
    pub(crate) route: Route,
    pub(crate) manifest: Arc<dyn Blob>,
    /// The archives, by the names that the manifest gives them.
    pub(crate) archives: BTreeMap<String, Archived>,
    /// Dropped when the last view of these bytes is.
    pub(crate) lease: Arc<dyn Any + Send + Sync>,
}

/// A visible version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VersionInfo {
    /// Its number.
    pub number: u64,
    /// How often the key had been rewound when it opened.
    pub epoch: u32,
    /// Its identity.
    pub id: VersionId,
    /// Length of its archives together, in bytes.
    pub bytes: u64,
    /// Who wrote it.
    pub writers: WriterSet,
    /// When it became visible.
    pub since: Timestamp,
}

impl VersionInfo {
    pub(crate) fn of(version: &Version) -> Self {
        let archives =
            version.contributions.values().flat_map(crate::ledger::Contribution::archives);
        let lens = archives.map(|archive| archive.file_len);
        let since = match version.status {
            Status::Visible { since, .. } => since,
            _ => Timestamp(0),
        };
        Self {
            number: version.number,
            epoch: version.epoch,
            id: version.id,
            bytes: lens.fold(0, u64::saturating_add),
            writers: version.writers.clone(),
            since,
        }
    }
}
