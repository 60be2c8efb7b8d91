//! A state dict as one value: flattened map and tensor blob.

use bytes::Bytes;

use crate::archive::Archive;
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::layout::Layout;
use crate::memory::zeroed;
use crate::options::Options;
use crate::state_dict::StateDict;
use crate::structure::{Node, TensorReference};

/// The encoded pair: a flattened state dict of references, and the tensor blob that they refer to.
///
/// It is an [`Archive`] in memory; its bytes are what a file, an arena segment or a network peer gets.
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

/// What a leaf of the flattened state dict is.
#[derive(Clone, Debug, PartialEq)]
pub enum FlatLeaf {
    /// The references of a tensor: one, or one for each slice.
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

    /// Encodes a state dict as the options say.
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

    /// Takes bytes that another writer encoded.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`].
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Self> {
        let bytes = bytes.into();
        Ok(Self { archive: Archive::from_bytes(bytes.clone())?, bytes })
    }

    /// The state dict. Its tensors are views of the encoded bytes.
    ///
    /// # Errors
    ///
    /// As [`Archive::to_state_dict`].
    pub fn to_state_dict(&self) -> Result<StateDict> {
        self.archive.to_state_dict()
    }

    /// The leaves by path, in insertion order; [`ObjectPath::fqn`] is the dotted name of each.
    pub fn flattened_state_dict(&self) -> Vec<(ObjectPath, FlatLeaf)> {
        let leaf = |node| match node {
            Node::Tensors(references) => FlatLeaf::Tensor(references),
            node => FlatLeaf::Object(node),
        };
        let leaves = self.archive.leaves();
        leaves.into_iter().map(|(path, node)| (path, leaf(node))).collect()
    }

    /// The stored bytes of all tensors: what lies between the head of the archive and its index.
    pub fn tensor_blob(&self) -> Bytes {
        let end = usize::try_from(self.archive.index_range().start).expect("it is in memory");
        // The storages of a manifest lie elsewhere.
        let own = self.archive.storage_count().checked_sub(1);
        let last = own.filter(|_| self.archive.shards().is_empty());
        let end = last.map_or(4096, |last| {
            let storage = self.archive.storage(last);
            usize::try_from(storage.stored_range().end).unwrap_or(end)
        });
        self.bytes.slice(4096..end)
    }

    /// The encoded bytes.
    pub fn as_bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The archive that they are.
    pub fn archive(&self) -> &Archive {
        &self.archive
    }

    /// The exact number of bytes that a state dict will take, found without touching its tensors.
    ///
    /// # Errors
    ///
    /// As [`Layout::plan`].
    pub fn encoded_len(dict: &StateDict) -> Result<u64> {
        Ok(Layout::plan(dict, &Options::new())?.file_len())
    }
}
