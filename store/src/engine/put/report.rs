use std::ops::AddAssign;

use crate::ledger::{ArchiveDigest, VersionId, WriterSet};
use crate::route::Transport;

/// The result of a put.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PutReport {
    /// The number of the version.
    pub version: u64,
    /// The epoch of the version: the number of rewinds of the key before it.
    pub epoch: u32,
    /// The identity of the version.
    pub id: VersionId,
    /// Digest of the contribution. Equal digests mean equal contents.
    pub digest: ArchiveDigest,
    /// Whether the version is visible to readers.
    pub visible: bool,
    /// The writers whose contributions are missing.
    pub missing: WriterSet,
    /// Whether the whole version is in the bucket.
    ///
    /// It is false unless [`Durability::Object`](crate::Durability::Object) was requested.
    pub stored: bool,
    /// Bytes that this put has stored.
    pub bytes: u64,
    /// The transport of the bytes.
    pub transport: Transport,
    /// Why this transport was used.
    pub transport_reason: String,
    /// The time of each phase.
    pub phases: PutPhases,
    /// The time of the put, in seconds.
    pub seconds: f64,
}

/// The time of each phase of a put, in seconds.
///
/// A [`Publisher`](crate::Publisher) adds the times of its archives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PutPhases {
    /// Computing the layout of the archive.
    pub arrange: f64,
    /// Beginning the contribution, which may wait for other writers and for memory.
    ///
    /// A small archive is written before. It is sent in the same request, and may be committed by it.
    pub begin: f64,
    /// Copying and checksumming.
    pub write: f64,
    /// Committing the contribution, unless the request that began it has done so.
    pub commit: f64,
    /// Waiting until the contribution is in the bucket, if it must be there.
    pub store: f64,
}

impl AddAssign for PutPhases {
    fn add_assign(&mut self, other: Self) {
        self.arrange += other.arrange;
        self.begin += other.begin;
        self.write += other.write;
        self.commit += other.commit;
        self.store += other.store;
    }
}
