//! Reading a version leaf by leaf, all of it under one lease.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use tssd_format::{
    Attrs, Error as FormatError, ErrorKind as FormatKind, Node, ObjectPath, Region, Tensor, Value,
};

use crate::engine::context::Context;
use crate::engine::get::{GetOptions, GetReport, Read, Target, fill};
use crate::engine::version::{OpenVersion, Tally};
use crate::error::{Error, ErrorKind, Result};
use crate::io::cow_map::Private;
use crate::io::exec::run_blocking;
use crate::io::sync::Lock;
use crate::ledger::VersionId;

/// A version that stays there while it is read: see [`Store::open`](crate::Store::open).
pub struct Opened {
    context: Arc<Context>,
    version: OpenVersion,
    options: GetOptions,
    root: Arc<Node>,
    leaves: OnceLock<Vec<(ObjectPath, Node)>>,
    started: Instant,
    before: Tally,
    /// How many of them were read by [`Opened::next`].
    read: usize,
    /// Where in `leaves` an fqn is; none for one that two have.
    by_fqn: OnceLock<BTreeMap<String, Option<usize>>>,
}

impl Opened {
    pub(crate) fn new(
        context: Arc<Context>,
        version: OpenVersion,
        options: &GetOptions,
    ) -> Result<Self> {
        let root = version.tree(options.writer)?;
        let (leaves, by_fqn) = (OnceLock::new(), OnceLock::new());
        let (started, before) = (Instant::now(), version.tally());
        Ok(Self {
            context,
            version,
            options: options.clone(),
            root,
            leaves,
            started,
            before,
            read: 0,
            by_fqn,
        })
    }

    /// The number of the version.
    pub fn version(&self) -> u64 {
        self.version.number
    }

    /// Its identity.
    pub fn id(&self) -> VersionId {
        self.version.id
    }

    /// Its tree: every leaf that is a tensor names the slices that it is made of, and each of those the storage
    /// that it lies in.
    pub fn structure(&self) -> &Arc<Node> {
        &self.root
    }

    /// Its leaves, in insertion order.
    pub fn leaves(&self) -> &[(ObjectPath, Node)] {
        self.leaves.get_or_init(|| Node::clone(&self.root).into_leaves())
    }

    /// The leaf with an fqn.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is none; `Invalid` if there are two.
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
        Err(Error::format(name, FormatError::new(kind).with_path(fqn)))
    }

    /// The same version, under the same lease, read otherwise: `version` and `require` of the options say
    /// nothing more.
    ///
    /// # Errors
    ///
    /// `Invalid` if writers hold leaves each their own, and `writer` does not say whose.
    pub fn with(&self, options: &GetOptions) -> Result<Self> {
        Self::new(self.context.clone(), self.version.clone(), options)
    }

    /// What the writers said of the state dict as a whole.
    pub fn attrs(&self) -> &Attrs {
        &self.version.attrs
    }

    /// What it is, how its bytes come, how many of them came and were checksummed since it was opened, and how long
    /// that is ago. How many were asked for and copied is known to who has read them.
    pub fn report(&self) -> GetReport {
        let Tally { verified, received } = self.version.tally().since(self.before);
        GetReport {
            bytes_received: received,
            bytes_verified: verified,
            seconds: self.started.elapsed().as_secs_f64(),
            ..Read::new(&self.version, self.context.get(), &self.options).report()
        }
    }

    /// How many bytes a storage has.
    pub fn storage_len(&self, storage: u32) -> u64 {
        self.version.storage_len(storage)
    }

    /// Reads whole storages, proven unless [`GetOptions::unverified`] says otherwise, in their order.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`](crate::Store::get_state_dict).
    pub async fn storages(&self, storages: &[u32]) -> Result<Vec<Bytes>> {
        if storages.is_empty() {
            return Ok(Vec::new());
        }
        let (context, version, options) =
            (self.context.clone(), self.version.clone(), self.options.clone());
        let storages = storages.to_vec();
        run_blocking(move || Read::new(&version, context.get(), &options).storages(&storages)).await
    }

    /// Whole storages, proven as [`Opened::storages`] proves them, in memory that the caller alone sees and may
    /// write to. It is copy-on-write: only what is written takes memory. None for a storage that is not in
    /// this host's memory or files as it is, raw: read that with [`Opened::storages`].
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`](crate::Store::get_state_dict).
    pub async fn private(&self, storages: &[u32]) -> Result<Vec<Option<Private>>> {
        if storages.is_empty() {
            return Ok(Vec::new());
        }
        let (context, version, options) =
            (self.context.clone(), self.version.clone(), self.options.clone());
        if options.unverified {
            // Nothing is looked at.
            return Read::new(&version, context.get(), &options).private(storages);
        }
        let storages = storages.to_vec();
        run_blocking(move || Read::new(&version, context.get(), &options).private(&storages)).await
    }

    /// Reads into the caller's tensors, as [`Store::get_state_dict_into`](crate::Store::get_state_dict_into).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn fill(&self, targets: &mut [Target<'_>]) -> Result<GetReport> {
        fill(&self.version, self.context.get(), targets, &self.options, None)
    }

    /// The same as long as it goes on: this thread asks now and then while bytes are on their way that are elsewhere. What
    /// the tensors hold after an error is not proven.
    ///
    /// # Errors
    ///
    /// As [`Opened::fill`], and the one that says that it does not go on.
    pub fn fill_while<E: From<Error> + Send>(
        &self,
        targets: &mut [Target<'_>],
        goes_on: impl Fn() -> Result<(), E> + Sync,
    ) -> Result<GetReport, E> {
        let stopped = Lock::new(None);
        let goes_on = || {
            goes_on().map_err(|error| {
                *stopped.lock() = Some(error);
                Error::new(ErrorKind::Busy, "it does not go on")
            })
        };
        let filled =
            fill(&self.version, self.context.get(), targets, &self.options, Some(&goes_on));
        match stopped.into_inner() {
            Some(error) => Err(error),
            None => Ok(filled?),
        }
    }

    /// How many leaves are still to come.
    pub fn remaining(&self) -> usize {
        self.leaves().len() - self.read
    }

    /// The next leaf, in insertion order; read now. None after the last one.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`](crate::Store::get_state_dict).
    pub async fn next(&mut self) -> Result<Option<(ObjectPath, Value)>> {
        let Some((path, node)) = self.leaves().get(self.read).cloned() else { return Ok(None) };
        self.read += 1;
        let (context, version, options) =
            (self.context.clone(), self.version.clone(), self.options.clone());
        run_blocking(move || {
            let value =
                Read::new(&version, context.get(), &options).leaf(&path, &node, &options)?;
            Ok(Some((path, value)))
        })
        .await
    }

    /// A tensor of it, or one box of the tensor.
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

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("version", &self.version.number).finish_non_exhaustive()
    }
}
