//! The values of a version, once its tensors are there.

use std::collections::BTreeMap;

use bytes::Bytes;
use indexmap::IndexMap;
use tssd_format::{
    ContentKind, Dict, Node, Shard, ShardSpec, Step, Storage, Tensor, TensorReference, Text, Value,
};

use super::way::Way;
use super::wishes::Wish;
use crate::plan::is_whole;

/// A tree whose tensors are all there.
pub(super) struct Tree<'a> {
    pub(super) views: BTreeMap<u32, Bytes>,
    pub(super) made: IndexMap<Wish<'a>, Tensor>,
    pub(super) slices: &'a BTreeMap<String, Vec<ShardSpec>>,
}

impl Tree<'_> {
    pub(super) fn value(&self, way: Way<'_>, node: &Node) -> tssd_format::Result<Value> {
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
            Node::Tensors(run) => self.tensors(way, run)?,
            Node::Container(container, children) => {
                let mut dict = Dict::new();
                let mut values = Vec::new();
                for (step, child) in children {
                    let value = self.value(Way::On(&way, step), child)?;
                    match step {
                        Step::Key(key) => drop(dict.insert(key.clone(), value)),
                        Step::Index(_) => values.push(value),
                    }
                }
                container.value(dict, values)
            }
        })
    }

    fn tensors(&self, way: Way<'_>, run: &[TensorReference]) -> tssd_format::Result<Value> {
        if !self.slices.is_empty()
            && let Some(places) = self.slices.get(&way.path().fqn())
        {
            let shard = |place: &ShardSpec| {
                Shard::new(self.made[&(run, Some(place))].clone(), place.clone())
            };
            return Ok(Value::Shards(
                places.iter().map(shard).collect::<tssd_format::Result<_>>()?,
            ));
        }
        let [first, ..] = run else { unreachable!("a leaf has a reference at least") };
        if !is_whole(run) {
            return Ok(Value::Tensor(self.made[&(run, None)].clone()));
        }
        let bytes = first.storage.map(|storage| self.views[&storage].clone());
        let storage = Storage::from(bytes.unwrap_or_default());
        Tensor::new(first.meta.clone(), storage, first.byte_offset).map(Value::Tensor)
    }
}
