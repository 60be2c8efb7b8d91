//! What a version holds, without the bytes of its tensors.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyString;
use tssd_format::{
    Attrs, Node, ShardPlace, Stored, TensorFlags, TensorMeta, TensorReference, Value,
};
use tssd_store::Opened;

use super::connected::Connected;
use crate::error::Result;
use crate::memory::Block;
use crate::object::{Contents, Framework, Maker, Source};

/// A tree whose tensors have no bytes.
struct Outline {
    root: Arc<Node>,
    attrs: Attrs,
    stored: BTreeMap<u32, Bytes>,
}

/// The state dict with tensors of torch's meta device.
pub(super) fn outline<'py>(
    py: Python<'py>,
    own: &Connected,
    opened: &Opened,
) -> Result<Bound<'py, PyAny>> {
    let (mut root, mut stored) = (Node::clone(opened.structure()), Vec::new());
    strip(&mut root, &mut stored)?;
    let bytes = own.run(py, None, opened.storages(&stored))?;
    let stored = stored.into_iter().zip(bytes).collect();
    let outline = Outline { root: Arc::new(root), attrs: opened.attrs().clone(), stored };
    Maker::new(py, &outline, &outline, Framework::Torch)
        .on_device(Some(PyString::new(py, "meta").into_any()))?
        .state_dict()
}

/// Makes every tensor a whole one without a storage, shows pickles as bytes, and finds the storages of
/// other leaves.
fn strip(node: &mut Node, stored: &mut Vec<u32>) -> Result<()> {
    match node {
        Node::Container(_, children) => {
            children.iter_mut().try_for_each(|(_, child)| strip(child, stored))?;
        }
        Node::Stored(kind, storage) => {
            stored.push(*storage);
            if matches!(kind, Stored::Opaque(_)) {
                *kind = Stored::Bytes;
            }
        }
        Node::Leaf(Value::Opaque { bytes, .. }) => *node = Node::Leaf(Value::Bytes(bytes.clone())),
        Node::Tensors(run) => {
            let first = &run[0].meta;
            let flags = [TensorFlags::REQUIRES_GRAD, TensorFlags::PARAMETER]
                .into_iter()
                .filter(|flag| first.flags().contains(*flag))
                .fold(TensorFlags::default(), TensorFlags::union);
            let meta = match run[0].place.as_ref().map(ShardPlace::slice) {
                Some(slice) => TensorMeta::new(first.dtype(), slice.global_shape())?,
                None => first.clone(),
            };
            let meta = meta.with_flags(flags);
            *run = vec![TensorReference { meta, storage: None, byte_offset: 0, place: None }];
        }
        Node::Leaf(_) => {}
    }
    Ok(())
}

impl Contents for Outline {
    fn structure(&self) -> Arc<Node> {
        self.root.clone()
    }

    fn attrs(&self) -> Attrs {
        self.attrs.clone()
    }

    fn stored(&self, storage: u32) -> Result<Bytes> {
        Ok(self.stored[&storage].clone())
    }
}

impl Source for Outline {
    fn block(&self, _storage: u32) -> Result<(Block, u64)> {
        unreachable!("no tensor of an outline has a storage")
    }
}
