//! Reading a version leaf by leaf, all of it under one lease.

use std::vec;

use tssd_format::{Node, ObjectPath, Region, Tensor, Value};

use crate::environment::wait;
use crate::error::Result;
use crate::get::{GetOptions, Read, choose_writer};
use crate::ledger::VersionId;
use crate::store::Store;
use crate::version::OpenVersion;

/// A version that stays there while it is read: see [`Store::open`].
pub struct Opened {
    store: Store,
    version: OpenVersion,
    options: GetOptions,
    leaves: vec::IntoIter<(ObjectPath, Node)>,
}

impl Opened {
    pub(crate) fn new(store: Store, version: OpenVersion, options: &GetOptions) -> Result<Self> {
        let mut root = version.root.clone();
        choose_writer(&ObjectPath::root(), &mut root, options.writer)?;
        let leaves = root.into_leaves().into_iter();
        Ok(Self { store, version, options: options.clone(), leaves })
    }

    /// The number of the version.
    pub fn version(&self) -> u64 {
        self.version.number
    }

    /// Its identity.
    pub fn id(&self) -> VersionId {
        self.version.id
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
