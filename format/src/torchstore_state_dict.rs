//! A state dict as one value: a flattened state dict and a tensor blob.

use bytes::Bytes;

use crate::archive::Archive;
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::layout::Layout;
use crate::memory::zeroed;
use crate::options::Options;
use crate::reference::TensorReference;
use crate::state_dict::StateDict;
use crate::structure::Node;

/// An encoded state dict: a flattened state dict of references, and the tensor blob that they address.
///
/// It is an [`Archive`] in memory. Files, segments of shared memory and network peers receive exactly its bytes.
///
/// # Examples
///
/// ```
/// use tssd_format::{StateDict, Tensor, TorchStoreStateDict};
/// let mut dict = StateDict::new();
/// let tied = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// dict.insert("embed_tokens.weight", tied.clone());
/// dict.insert("lm_head.weight", tied);
///
/// let encoded = TorchStoreStateDict::from_state_dict(&dict)?;
/// let flattened = encoded.flattened_state_dict();
/// assert_eq!(flattened[0].1, flattened[1].1); // one storage, two names
/// assert_eq!(encoded.tensor_blob().len(), 16);
/// assert_eq!(encoded.to_state_dict()?, dict);
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TorchStoreStateDict {
    bytes: Bytes,
    archive: Archive,
}

/// A leaf of the flattened state dict.
#[derive(Clone, Debug, PartialEq)]
pub enum FlatLeaf {
    /// The references of a tensor: one for a plain tensor, else one for each slice.
    Tensor(Vec<TensorReference>),
    /// Any other leaf: its node.
    Object(Node),
}

impl TorchStoreStateDict {
    /// Encodes a state dict.
    ///
    /// # Errors
    ///
    /// As [`Layout::plan`].
    pub fn from_state_dict(dict: &StateDict) -> Result<Self> {
        Self::with_options(dict, &Options::new())
    }

    /// Encodes a state dict with these options.
    ///
    /// # Errors
    ///
    /// As [`Layout::plan`].
    pub fn with_options(dict: &StateDict, options: &Options) -> Result<Self> {
        let layout = Layout::plan(dict, options)?;
        let len = usize::try_from(layout.file_len());
        let mut bytes = zeroed(len.map_err(|_| Error::new(ErrorKind::TooLarge))?)?;
        layout.write_into(&mut bytes)?;
        Self::from_bytes(bytes)
    }

    /// Opens the bytes of an encoded archive.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`].
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Self> {
        let bytes = bytes.into();
        Ok(Self { archive: Archive::from_bytes(bytes.clone())?, bytes })
    }

    /// Returns the state dict. Tensors that are not compressed are views of the encoded bytes.
    ///
    /// # Errors
    ///
    /// As [`Archive::to_state_dict`].
    pub fn to_state_dict(&self) -> Result<StateDict> {
        self.archive.to_state_dict()
    }

    /// Returns the leaves with their paths, in insertion order.
    ///
    /// [`ObjectPath::fqn`] returns the dotted name of a path.
    pub fn flattened_state_dict(&self) -> Vec<(ObjectPath, FlatLeaf)> {
        let leaf = |node| match node {
            Node::Tensors(references) => FlatLeaf::Tensor(references),
            node => FlatLeaf::Object(node),
        };
        let leaves = self.archive.leaves();
        leaves.into_iter().map(|(path, node)| (path, leaf(node))).collect()
    }

    /// Returns the blob: all stored bytes between the head of the archive and its index.
    ///
    /// It ends with the last storage, without the padding before the index.
    pub fn tensor_blob(&self) -> Bytes {
        let end = usize::try_from(self.archive.index_range().start).expect("it is in memory");
        // The storages of a manifest are in other files.
        let last = self.archive.storage_count().checked_sub(1);
        let last = last.filter(|_| self.archive.shards().is_empty());
        let end = last.map_or(4096, |last| {
            let storage = self.archive.storage(last);
            usize::try_from(storage.stored_range().end).unwrap_or(end)
        });
        self.bytes.slice(4096..end)
    }

    /// Returns the encoded bytes.
    pub fn as_bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the archive.
    pub fn archive(&self) -> &Archive {
        &self.archive
    }

    /// Returns the exact encoded length of a state dict in bytes, without reading its tensors.
    ///
    /// # Errors
    ///
    /// As [`Layout::plan`].
    pub fn encoded_len(dict: &StateDict) -> Result<u64> {
        Ok(Layout::plan(dict, &Options::new())?.file_len())
    }
}
