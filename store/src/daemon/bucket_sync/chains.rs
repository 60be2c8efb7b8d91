//! Archives that are uploaded as deltas of those that were uploaded before.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use bytes::Bytes;

use crate::control::CommittedContribution;
use crate::convert::{to_u64, to_usize};
use crate::daemon::delta_base::HeldArchive;
use crate::daemon::read_encoder::ReadEncoder;
use crate::daemon::replicas::Replicas;
use crate::delta::stored::{MAX_BASES, StoredDelta};
use crate::error::{Error, Result};
use crate::io::sync::Lock;
use crate::key::Key;
use crate::ledger::VersionId;
use crate::net::wire::Range;
use crate::shm::Pool;

/// Smallest archive that is uploaded as a delta (256 KiB). The pool does not retain smaller ones.
const MIN_DELTA_BYTES: u64 = 256 << 10;

/// Maximum number of contributions that are remembered.
const MAX_CHAINS: usize = 4096;

/// Which versions a daemon uploads to its bucket whole: by default, all. The others are uploaded as deltas of the version
/// before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketDeltas {
    /// At least one version in this many is uploaded whole. If it is 1, all are.
    pub anchor_interval: NonZeroU32,
    /// Maximum size of the deltas since the last whole version together, in percent of a version.
    pub max_percent: u32,
}

impl Default for BucketDeltas {
    fn default() -> Self {
        Self { anchor_interval: NonZeroU32::MIN, max_percent: 25 }
    }
}

/// The contributions that were uploaded last.
pub(super) struct UploadChains {
    pool: Arc<Pool>,
    replicas: Arc<Replicas>,
    /// `None` if all versions are uploaded whole.
    encoder: Option<Arc<ReadEncoder>>,
    policy: BucketDeltas,
    /// By key and writer.
    chains: Lock<BTreeMap<(Key, u32), Chain>>,
}

/// A contribution in the bucket.
#[derive(Clone)]
struct Chain {
    version: VersionId,
    archives: Vec<ChainArchive>,
}

/// An archive in the bucket.
#[derive(Clone)]
struct ChainArchive {
    len: u64,
    /// Its name, and those from which it is computed, the nearest first.
    names: Vec<String>,
    /// Bytes of it and its bases, without the whole one.
    delta_bytes: u64,
}

/// The archives of a contribution as deltas.
pub(super) struct EncodedContribution {
    /// The version of the bases.
    pub(super) base: VersionId,
    /// The bytes to store.
    pub(super) archives: Vec<Bytes>,
}

impl EncodedContribution {
    /// Returns the number of bytes to store.
    pub(super) fn bytes(&self) -> u64 {
        self.archives.iter().map(|archive| to_u64(archive.len())).sum()
    }
}

impl UploadChains {
    pub(super) fn new(replicas: Arc<Replicas>, policy: BucketDeltas) -> Self {
        let (pool, encoder) = (replicas.pool().clone(), replicas.encoder().cloned());
        let encoder = encoder.filter(|_| policy.anchor_interval.get() > 1);
        Self { pool, replicas, encoder, policy, chains: Lock::default() }
    }

    /// Whether versions are uploaded as deltas.
    pub(super) fn is_enabled(&self) -> bool {
        self.encoder.is_some()
    }

    /// Encodes the archives of a contribution as deltas. Returns `None` if they must be uploaded whole.
    ///
    /// # Errors
    ///
    /// `Io` without memory; `Corrupt` if an archive is damaged.
    pub(super) fn encode(
        &self,
        contributed: &CommittedContribution,
    ) -> Result<Option<EncodedContribution>> {
        let Some(encoder) = &self.encoder else { return Ok(None) };
        let chain = self.chains.lock().get(&key_of(contributed)).cloned();
        let Some(chain) = chain.filter(|it| it.archives.len() == contributed.lens.len()) else {
            return Ok(None);
        };
        let mut archives = Vec::with_capacity(chain.archives.len());
        let paths = contributed.paths();
        // The daemon of the put encodes its archives. Another one may only store them whole.
        if paths.iter().any(|name| self.replicas.is_replica(name)) {
            return Ok(None);
        }
        for ((name, len), base) in paths.iter().zip(&contributed.lens).zip(&chain.archives) {
            let limit = u128::from(*len) * u128::from(self.policy.max_percent) / 100;
            let limit = u64::try_from(limit).unwrap_or(u64::MAX).saturating_sub(base.delta_bytes);
            let count = to_u64(base.names.len());
            let max_count = u64::from(self.policy.anchor_interval.get()).min(to_u64(MAX_BASES));
            let is_short = count < max_count;
            if base.len != *len || *len < MIN_DELTA_BYTES || !is_short {
                return Ok(None);
            }
            let Some(encoded) = self.encode_archive(encoder, name, base, limit)? else {
                return Ok(None);
            };
            archives.push(encoded.into());
        }
        Ok(Some(EncodedContribution { base: chain.version, archives }))
    }

    fn encode_archive(
        &self,
        encoder: &ReadEncoder,
        name: &str,
        base: &ChainArchive,
        max_len: u64,
    ) -> Result<Option<Vec<u8>>> {
        let Some(base_name) = base.names.first() else { return Ok(None) };
        let opened = self.pool.open(name).map_err(|error| Error::io(name, error))?;
        let Some(raw) = opened.and_then(|archive| archive.blob.bytes().cloned()) else {
            return Ok(None);
        };
        let Some(layout) = encoder.layout(name)? else { return Ok(None) };
        let held = HeldArchive::open(&self.pool, base_name);
        let read_base = |range: std::ops::Range<u64>| {
            let ranges = [Range::contiguous(range.start, range.end - range.start)];
            let raw = &raw[to_usize(range.start)..to_usize(range.end)];
            encoder.read_base(name, base_name, held.as_ref(), &ranges, raw)
        };
        StoredDelta::encode(&layout, &raw, read_base, &base.names, max_len)
    }

    /// Records that a contribution is in the bucket: whole, or as deltas.
    pub(super) fn record(
        &self,
        contributed: &CommittedContribution,
        encoded: Option<&EncodedContribution>,
    ) {
        let mut chains = self.chains.lock();
        let key = key_of(contributed);
        let bases = chains
            .remove(&key)
            .filter(|chain| encoded.is_some_and(|encoded| encoded.base == chain.version));
        if encoded.is_some() != bases.is_some() {
            return;
        }
        if chains.len() >= MAX_CHAINS {
            chains.clear();
        }
        let mut archives = Vec::new();
        for (number, (name, len)) in
            contributed.paths().into_iter().zip(&contributed.lens).enumerate()
        {
            let base = bases.as_ref().map(|chain| &chain.archives[number]);
            let mut names = vec![name];
            names.extend(base.iter().flat_map(|base| base.names.iter().cloned()));
            let stored = encoded.map_or(0, |encoded| to_u64(encoded.archives[number].len()));
            let delta_bytes = stored + base.map_or(0, |base| base.delta_bytes);
            archives.push(ChainArchive { len: *len, names, delta_bytes });
        }
        chains.insert(key, Chain { version: contributed.placement.id, archives });
    }

    /// Forgets what is recorded of the writer of a contribution, unless it is this contribution.
    pub(super) fn forget_other_versions(&self, contributed: &CommittedContribution) {
        let id = contributed.placement.id;
        self.chains.lock().retain(|key, chain| *key != key_of(contributed) || chain.version == id);
    }

    /// Forgets a contribution: the next one is uploaded whole.
    pub(super) fn forget(&self, contributed: &CommittedContribution) {
        self.chains.lock().remove(&key_of(contributed));
    }
}

fn key_of(contributed: &CommittedContribution) -> (Key, u32) {
    (contributed.placement.key.clone(), contributed.placement.writer)
}
