//! Reading a version leaf by leaf, all of it under one lease.

use std::vec;

use bytes::Bytes;
use tssd_format::{Attrs, Node, ObjectPath, Region, Tensor, Value};

use crate::environment::{in_place, wait};
use crate::error::Result;
use crate::get::{GetOptions, GetReport, Read, Target, choose_writer};
use crate::ledger::VersionId;
use crate::store::Store;
use crate::version::OpenVersion;

/// A version that stays there while it is read: see [`Store::open`].
pub struct Opened {
    store: Store,
    version: OpenVersion,
    options: GetOptions,
    root: Node,
    leaves: vec::IntoIter<(ObjectPath, Node)>,
}

impl Opened {
    pub(crate) fn new(store: Store, version: OpenVersion, options: &GetOptions) -> Result<Self> {
        let mut root = version.root.clone();
        choose_writer(&ObjectPath::root(), &mut root, options.writer)?;
        let leaves = root.clone().into_leaves().into_iter();
        Ok(Self { store, version, options: options.clone(), root, leaves })
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
    pub fn structure(&self) -> &Node {
        &self.root
    }

    /// What the writers said of the state dict as a whole.
    pub fn attrs(&self) -> &Attrs {
        &self.version.attrs
    }

    /// What has been read of it so far: nothing yet. It says how the bytes come.
    pub fn report(&self) -> GetReport {
        Read::new(&self.version, &self.store, &self.options).report()
    }

    /// How many bytes a storage has.
    pub fn storage_len(&self, storage: u32) -> u64 {
        self.version.storage_len(storage)
    }

    /// Reads whole storages, proven unless [`GetOptions::unverified`] says otherwise, in their order.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`].
    pub async fn storages(&self, storages: &[u32]) -> Result<Vec<Bytes>> {
        let (store, version, options) =
            (self.store.clone(), self.version.clone(), self.options.clone());
        let storages = storages.to_vec();
        wait(move || Read::new(&version, &store, &options).storages(&storages)).await
    }

    /// Reads into the caller's tensors, as [`Store::get_state_dict_into`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn fill(&self, targets: &mut [Target<'_>]) -> Result<GetReport> {
        let mut fill = || {
            let mut read = Read::new(&self.version, &self.store, &self.options);
            read.fill_targets(targets, self.options.writer)?;
            Ok(read.report())
        };
        if self.version.holder().is_some() { in_place(fill) } else { fill() }
    }

    /// How many leaves are still to come.
    pub fn remaining(&self) -> usize {
        self.leaves.len()
    }

    /// The next leaf, in insertion order; read now. None after the last one.
    ///
    /// # Errors
    ///
    /// As [`Store::get_state_dict`].
    pub async fn next(&mut self) -> Result<Option<(ObjectPath, Value)>> {
        let Some((path, node)) = self.leaves.next() else { return Ok(None) };
        let (store, version, options) =
            (self.store.clone(), self.version.clone(), self.options.clone());
        wait(move || {
            let value = Read::new(&version, &store, &options).leaf(&path, &node, &options)?;
            Ok(Some((path, value)))
        })
        .await
    }

    /// A tensor of it, or one box of the tensor.
    ///
    /// # Errors
    ///
    /// As [`Store::get`].
    pub async fn tensor(&self, fqn: &str, region: Option<&Region>) -> Result<Tensor> {
        let (store, version, options) =
            (self.store.clone(), self.version.clone(), self.options.clone());
        let (fqn, region) = (fqn.to_owned(), region.cloned());
        wait(move || {
            let mut read = Read::new(&version, &store, &options);
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
