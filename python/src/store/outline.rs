//! The state dict of a version on torch's "meta" device, without tensor bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyString;
use tssd_format::{Attrs, ContentKind, Node, TensorFlags, TensorMeta, TensorReference, Value};
use tssd_store::VersionReader;
use tssd_store::plan::TensorLeaf;

use crate::builder::{ArchiveContents, Framework, ObjectBuilder, StorageSource};
use crate::error::Result;
use crate::memory::MemoryBlock;
use crate::store::connection::Connection;

/// A tree whose tensors have no storage.
struct Outline {
    root: Arc<Node>,
    attrs: Attrs,
    /// The bytes of leaves that are not tensors, by storage number.
    leaf_bytes: BTreeMap<u32, Bytes>,
}

/// Returns the state dict of a version, with tensors of torch's "meta" device.
pub(super) fn build_outline<'py>(
    py: Python<'py>,
    connection: &Connection,
    reader: &VersionReader,
) -> Result<Bound<'py, PyAny>> {
    let (mut root, mut storages) = (Node::clone(reader.structure()), Vec::new());
    strip(&mut root, &mut storages)?;
    let bytes = connection.block_on(py, None, reader.read_storages(&storages))?;
    let leaf_bytes = storages.into_iter().zip(bytes).collect();
    let outline = Outline { root: Arc::new(root), attrs: reader.attrs().clone(), leaf_bytes };
    ObjectBuilder::new(py, &outline, &outline, Framework::Torch)
        .on_device(Some(PyString::new(py, "meta").into_any()))?
        .build_state_dict()
}

/// Removes the storages of tensors, and collects the storages of all other leaves.
///
/// Each tensor becomes a whole tensor without a storage. A pickled leaf becomes a leaf of bytes.
fn strip(node: &mut Node, storages: &mut Vec<u32>) -> Result<()> {
    match node {
        Node::Container(_, children) => {
            children.iter_mut().try_for_each(|(_, child)| strip(child, storages))?;
        }
        Node::StoredLeaf(kind, storage) => {
            storages.push(*storage);
            if matches!(kind, ContentKind::Opaque(_)) {
                *kind = ContentKind::Bytes;
            }
        }
        Node::Leaf(Value::Opaque { bytes, .. }) => *node = Node::Leaf(Value::Bytes(bytes.clone())),
        Node::Tensors(run) => *node = outline_tensor(TensorLeaf::Run(run))?,
        Node::Distributed(tensor) => *node = outline_tensor(TensorLeaf::Distributed(tensor))?,
        Node::Leaf(_) => {}
    }
    Ok(())
}

/// Returns the whole tensor of a leaf, without a storage.
fn outline_tensor(leaf: TensorLeaf<'_>) -> Result<Node> {
    let flags = [TensorFlags::REQUIRES_GRAD, TensorFlags::PARAMETER]
        .into_iter()
        .filter(|flag| leaf.flags().contains(*flag))
        .fold(TensorFlags::default(), TensorFlags::union);
    let meta = match leaf {
        // One slice can be the whole tensor.
        TensorLeaf::Run([reference]) if reference.meta.shape() == leaf.global_shape() => {
            reference.meta.clone()
        }
        _ => TensorMeta::new(leaf.dtype(), leaf.global_shape())?,
    };
    let meta = meta.with_flags(flags);
    let reference = TensorReference { meta, storage: None, byte_offset: 0, shard_spec: None };
    Ok(Node::Tensors(vec![reference]))
}

impl ArchiveContents for Outline {
    fn structure(&self) -> Arc<Node> {
        self.root.clone()
    }

    fn attrs(&self) -> Attrs {
        self.attrs.clone()
    }

    fn storage_bytes(&self, storage: u32) -> Result<Bytes> {
        Ok(self.leaf_bytes[&storage].clone())
    }
}

impl StorageSource for Outline {
    fn block(&self, _storage: u32) -> Result<(MemoryBlock, u64)> {
        unreachable!("no tensor of an outline has a storage")
    }
}
