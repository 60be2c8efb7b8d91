//! References to tensors: their metadata, and where their bytes are.

use crate::shard::ShardSpec;
use crate::tensor::TensorMeta;

/// One tensor leaf, or one slice of one: its metadata and the location of its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorReference {
    /// Dtype, shape, strides and flags.
    pub meta: TensorMeta,
    /// The number of the storage; `None` if the tensor has no elements.
    pub storage: Option<u32>,
    /// Offset of element 0 in the raw bytes of the storage, in bytes.
    pub byte_offset: u64,
    /// The shard spec; `None` for a plain tensor.
    pub shard_spec: Option<ShardSpec>,
}
