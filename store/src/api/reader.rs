//! Reads a version leaf by leaf, under one lease.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use tssd_format::{
    Attrs, Error as FormatError, ErrorKind as FormatKind, Node, ObjectPath, Region, Tensor, Value,
};

use crate::engine::context::Context;
use crate::engine::get::{GetOptions, GetReport, LeafPart, Read, Target, fill};
use crate::engine::version::{OpenVersion, ReadCounters};
use crate::error::{Error, ErrorKind, Result};
use crate::io::cow_map::CowBuffer;
use crate::io::exec::{block_in_place, run_blocking};
use crate::io::sync::Lock;
use crate::ledger::VersionId;

/// An open version.
///
/// It stays available while it is read: see [`Store::open`](crate::Store::open).
pub struct VersionReader {
    context: Arc<Context>,
    version: OpenVersion,
    options: GetOptions,
    root: Arc<Node>,
    leaves: OnceLock<Vec<(ObjectPath, Node)>>,
    opened_at: Instant,
    initial_tally: ReadCounters,
    /// Number of leaves that [`VersionReader::next`] has returned.
    next_leaf: usize,
    /// Index into `leaves` by fqn, or none if several leaves have the fqn.
    by_fqn: OnceLock<BTreeMap<String, Option<usize>>>,
}

impl VersionReader {
    pub(crate) fn new(
        context: Arc<Context>,
        version: OpenVersion,
        options: &GetOptions,
    ) -> Result<Self> {
        let root = version.tree(options.writer)?;
        let (leaves, by_fqn) = (OnceLock::new(), OnceLock::new());
        let (opened_at, initial_tally) = (Instant::now(), version.counters());
        Ok(Self {
            context,
            version,
            options: options.clone(),
            root,
            leaves,
            opened_at,
            initial_tally,
            next_leaf: 0,
            by_fqn,
        })
    }

    /// Returns the number of the version.
    pub fn version(&self) -> u64 {
        self.version.number
    }

    /// Returns the epoch of the version.
    pub fn epoch(&self) -> u32 {
        self.version.epoch
    }

    /// Returns the id of the version.
    pub fn id(&self) -> VersionId {
        self.version.id
    }

    /// Returns the tree of the version.
    ///
    /// Each leaf that is a tensor lists its slices, and each slice names the storage that contains
    /// it.
    pub fn structure(&self) -> &Arc<Node> {
        &self.root
    }

    /// Returns the leaves in insertion order.
    pub fn leaves(&self) -> &[(ObjectPath, Node)] {
        self.leaves.get_or_init(|| Node::clone(&self.root).into_leaves())
    }

    /// Returns the leaf with an fqn.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is none; `Invalid` if there are several.
    pub fn leaf(&self, fqn: &str) -> Result<(ObjectPath, Node)> {
        let by_fqn = self.by_fqn.get_or_init(|| {
            let mut by_fqn = BTreeMap::new();
            for (index, (path, _)) in self.leaves().iter().enumerate() {
                by_fqn.entry(path.fqn()).and_modify(|found| *found = None).or_insert(Some(index));
            }
            by_fqn
        });
        let kind = match by_fqn.get(fqn) {
            Some(Some(index)) => return Ok(self.leaves()[*index].clone()),
            Some(None) => FormatKind::AmbiguousFqn,
            None => FormatKind::NotFound,
        };
        let name = format_args!("version {}", self.version.number);
        Err(Error::from_format(name, FormatError::new(kind).with_path(fqn)))
    }

    /// Returns the same version under the same lease, with other options.
    ///
    /// `version` and `require` of the options have no effect.
    ///
    /// # Errors
    ///
    /// `Invalid` if each writer has its own leaves, and `writer` does not select a writer.
    pub fn with_options(&self, options: &GetOptions) -> Result<Self> {
        Self::new(self.context.clone(), self.version.clone(), options)
    }

    /// Returns the options.
    pub fn options(&self) -> &GetOptions {
        &self.options
    }

    /// Returns the attributes of the whole state dict.
    pub fn attrs(&self) -> &Attrs {
        &self.version.attrs
    }

    /// Returns a report of what was read since the version was opened.
    ///
    /// It has the identity of the version, its transport, the bytes that were received and
    /// verified, and the time. Bytes that were requested or copied are not counted: the caller
    /// knows what it has read.
    pub fn report(&self) -> GetReport {
        let ReadCounters { verified, received } = self.version.counters().since(self.initial_tally);
        GetReport {
            bytes_received: received,
            bytes_verified: verified,
            seconds: self.opened_at.elapsed().as_secs_f64(),
            ..Read::new(&self.version, self.context.get(), &self.options).report()
        }
    }

    /// Returns the length of a storage in bytes.
    pub fn storage_len(&self, storage: u32) -> u64 {
        self.version.storage_len(storage)
    }

    /// Reads whole storages, in the given order.
    ///
    /// Verifies them unless [`GetOptions::unverified`] is set.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`](crate::Store::get_state_dict).
    pub async fn read_storages(&self, storages: &[u32]) -> Result<Vec<Bytes>> {
        if storages.is_empty() {
            return Ok(Vec::new());
        }
        let (context, version, options) =
            (self.context.clone(), self.version.clone(), self.options.clone());
        let storages = storages.to_vec();
        run_blocking(move || Read::new(&version, context.get(), &options).storages(&storages)).await
    }

    /// Returns whole storages in private copy-on-write memory, verified as by [`VersionReader::read_storages`].
    ///
    /// The caller alone sees this memory and may write to it. Only pages that it writes take
    /// memory. The result is none for a storage that is not raw in this host's memory or files:
    /// read that with [`VersionReader::read_storages`].
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`](crate::Store::get_state_dict).
    pub async fn cow_buffers(&self, storages: &[u32]) -> Result<Vec<Option<CowBuffer>>> {
        if storages.is_empty() {
            return Ok(Vec::new());
        }
        let (context, version, options) =
            (self.context.clone(), self.version.clone(), self.options.clone());
        if options.unverified {
            // Reads no bytes, so it does not block.
            return Read::new(&version, context.get(), &options).cow_buffers(storages);
        }
        let storages = storages.to_vec();
        run_blocking(move || Read::new(&version, context.get(), &options).cow_buffers(&storages))
            .await
    }

    /// Reads into the caller's tensors, as
    /// [`Store::get_state_dict_into`](crate::Store::get_state_dict_into).
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict_into`](crate::Store::get_state_dict_into).
    pub fn read_into(&self, targets: &mut [Target<'_>]) -> Result<GetReport> {
        fill(&self.version, self.context.get(), targets, &self.options, None)
    }

    /// As [`VersionReader::read_into`], but can be cancelled.
    ///
    /// While bytes are received from another host, this thread calls `check_cancelled` repeatedly.
    /// After an error, the contents of the tensors are not verified.
    ///
    /// # Errors
    ///
    /// As [`VersionReader::read_into`]; the error of `check_cancelled`.
    pub fn read_into_cancellable<E: From<Error> + Send>(
        &self,
        targets: &mut [Target<'_>],
        check_cancelled: impl Fn() -> Result<(), E> + Sync,
    ) -> Result<GetReport, E> {
        let cancellation = Lock::new(None);
        let check_cancelled = || {
            check_cancelled().map_err(|error| {
                *cancellation.lock() = Some(error);
                Error::new(ErrorKind::Busy, "it does not go on")
            })
        };
        let filled =
            fill(&self.version, self.context.get(), targets, &self.options, Some(&check_cancelled));
        match cancellation.into_inner() {
            Some(error) => Err(error),
            None => Ok(filled?),
        }
    }

    /// Verifies the parts of leaves that are in the memory of this host, without a copy.
    ///
    /// A later read with [`GetOptions::unverified`] then copies verified bytes. Returns for each part whether all its bytes
    /// are in memory, uncompressed. Other parts are not read: read them into memory of your own.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is no such leaf; `Invalid` if a part is outside of its leaf; `Corrupt` if bytes are damaged.
    pub fn verify_in_memory(&self, parts: &[LeafPart]) -> Result<Vec<bool>> {
        let verify =
            || Read::new(&self.version, self.context.get(), &self.options).verify_in_memory(parts);
        if self.version.range_reader().is_some() { block_in_place(verify) } else { verify() }
    }

    /// Returns the number of leaves that [`VersionReader::next`] has not returned yet.
    pub fn remaining(&self) -> usize {
        self.leaves().len() - self.next_leaf
    }

    /// Reads the next leaf, in insertion order. Returns none after the last one.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`](crate::Store::get_state_dict).
    pub async fn next(&mut self) -> Result<Option<(ObjectPath, Value)>> {
        let Some((path, node)) = self.leaves().get(self.next_leaf).cloned() else {
            return Ok(None);
        };
        self.next_leaf += 1;
        let (context, version, options) =
            (self.context.clone(), self.version.clone(), self.options.clone());
        run_blocking(move || {
            let value =
                Read::new(&version, context.get(), &options).leaf(&path, &node, &options)?;
            Ok(Some((path, value)))
        })
        .await
    }

    /// Reads a tensor, or one box of it.
    ///
    /// # Errors
    ///
    /// As [`Store::get`](crate::Store::get).
    pub async fn tensor(&self, fqn: &str, region: Option<&Region>) -> Result<Tensor> {
        let (context, version, options) =
            (self.context.clone(), self.version.clone(), self.options.clone());
        let (fqn, region) = (fqn.to_owned(), region.cloned());
        run_blocking(move || {
            let mut read = Read::new(&version, context.get(), &options);
            read.tensor(&fqn, region.as_ref(), options.writer)
        })
        .await
    }
}

impl std::fmt::Debug for VersionReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("version", &self.version.number).finish_non_exhaustive()
    }
}
