//! Builds the values of a version from its storages and tensors.

use std::collections::BTreeMap;

use bytes::Bytes;
use indexmap::IndexMap;
use tssd_format::{ContentKind, Dict, Node, Shard, ShardSpec, Step, Storage, Tensor, Text, Value};

use crate::engine::get::read_set::TensorRequest;
use crate::engine::lazy_path::LazyPath;
use crate::plan::TensorLeaf;

/// The storages and tensors of the values of a tree.
pub(super) struct ValueBuilder<'a> {
    pub(super) views: BTreeMap<u32, Bytes>,
    pub(super) assembled: IndexMap<TensorRequest<'a>, Tensor>,
    pub(super) slices: &'a BTreeMap<String, Vec<ShardSpec>>,
}

impl ValueBuilder<'_> {
    pub(super) fn value(&self, path: LazyPath<'_>, node: &Node) -> tssd_format::Result<Value> {
        Ok(match node {
            Node::Leaf(value) => value.clone(),
            Node::StoredLeaf(kind, storage) => {
                let bytes = self.views[storage].clone();
                match kind {
                    ContentKind::Str => Value::Str(Text::from_generalized_utf8(bytes)?),
                    ContentKind::Bytes => Value::Bytes(bytes),
                    ContentKind::Opaque(media) => Value::Opaque { media: media.clone(), bytes },
                }
            }
            Node::Tensors(run) => self.tensor(path, TensorLeaf::Run(run))?,
            Node::Distributed(tensor) => self.tensor(path, TensorLeaf::Distributed(tensor))?,
            Node::Container(container, children) => {
                let mut dict = Dict::new();
                let mut values = Vec::new();
                for (step, child) in children {
                    let value = self.value(LazyPath::Child(&path, step), child)?;
                    match step {
                        Step::Key(key) => drop(dict.insert(key.clone(), value)),
                        Step::Index(_) => values.push(value),
                    }
                }
                container.value(dict, values)
            }
        })
    }

    fn tensor(&self, path: LazyPath<'_>, leaf: TensorLeaf<'_>) -> tssd_format::Result<Value> {
        if !self.slices.is_empty()
            && let Some(places) = self.slices.get(&path.path().fqn())
        {
            let shard = |place: &ShardSpec| {
                Shard::new(self.assembled[&(leaf, Some(place))].clone(), place.clone())
            };
            return Ok(Value::Shards(
                places.iter().map(shard).collect::<tssd_format::Result<_>>()?,
            ));
        }
        let Some(whole) = leaf.whole() else {
            return Ok(Value::Tensor(self.assembled[&(leaf, None)].clone()));
        };
        let bytes = whole.storage.map(|storage| self.views[&storage].clone());
        let storage = Storage::from(bytes.unwrap_or_default());
        Tensor::new(whole.meta.clone(), storage, whole.byte_offset).map(Value::Tensor)
    }
}
