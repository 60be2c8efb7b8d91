//! The storages and tensors that leaves need.

use std::collections::{BTreeMap, BTreeSet};

use indexmap::IndexMap;
use tssd_format::{Node, ShardSpec, TensorReference, numel};

use crate::engine::lazy_path::LazyPath;
use crate::plan::TensorLeaf;

/// A tensor to assemble: a whole leaf, or one slice of it. Tied leaves share one.
pub(super) type TensorRequest<'a> = (TensorLeaf<'a>, Option<&'a ShardSpec>);

/// The storages to view, and the tensors to assemble.
#[derive(Default)]
pub(super) struct ReadSet<'a> {
    pub(super) viewed_storages: BTreeSet<u32>,
    /// The tensors to assemble, with the fqn of the first leaf of each.
    pub(super) tensor_requests: IndexMap<TensorRequest<'a>, String>,
    /// The tensors that are views. A tied tensor is listed for each of its leaves.
    viewed_tensors: Vec<&'a TensorReference>,
}

impl<'a> ReadSet<'a> {
    /// Adds the storages and tensors of a leaf.
    pub(super) fn add(
        &mut self,
        path: LazyPath<'_>,
        node: &'a Node,
        slices: &'a BTreeMap<String, Vec<ShardSpec>>,
    ) {
        if let Node::StoredLeaf(_, storage) = node {
            self.viewed_storages.insert(*storage);
        }
        let Some(leaf) = TensorLeaf::of(node) else { return };
        let fqn = || path.path().fqn();
        let places = if slices.is_empty() { None } else { slices.get(&fqn()) };
        match (places, leaf.whole()) {
            (Some(places), _) => places.iter().for_each(|place| {
                self.tensor_requests.entry((leaf, Some(place))).or_insert_with(fqn);
            }),
            (None, Some(whole)) => self.add_view(whole),
            (None, None) => drop(self.tensor_requests.entry((leaf, None)).or_insert_with(fqn)),
        }
    }

    fn add_view(&mut self, reference: &'a TensorReference) {
        // A tensor without storage has no bytes.
        let Some(storage) = reference.storage else { return };
        self.viewed_storages.insert(storage);
        self.viewed_tensors.push(reference);
    }

    /// Returns the bytes of all tensors. Tied tensors count once.
    pub(super) fn needed_bytes(&mut self) -> u64 {
        let place = |reference: &&TensorReference| (reference.storage, reference.byte_offset);
        self.viewed_tensors.sort_by_key(place);
        let mut bytes = 0_u64;
        for tied in self.viewed_tensors.chunk_by(|one, other| place(one) == place(other)) {
            for (at, reference) in tied.iter().enumerate() {
                if !tied[..at].contains(reference) {
                    bytes = bytes.saturating_add(reference.meta.nbytes());
                }
            }
        }
        let assembled = self.tensor_requests.keys().map(|(leaf, place)| {
            let shape = place.map_or(leaf.global_shape(), |place| place.slice().local_shape());
            numel(shape).saturating_mul(leaf.dtype().itemsize())
        });
        // A slice outside of its tensor may have any size. It is refused later.
        assembled.fold(bytes, u64::saturating_add)
    }
}
