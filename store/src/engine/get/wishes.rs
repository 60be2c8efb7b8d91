//! What leaves are made of, before any of it is there.

use std::collections::{BTreeMap, BTreeSet};

use indexmap::IndexMap;
use tssd_format::{Node, ShardSpec, TensorReference, numel};

use super::way::Way;
use crate::plan::{self, is_whole};

/// A tensor to be assembled: all of a leaf, or one slice of it. Leaves that are tied have one wish.
pub(super) type Wish<'a> = (&'a [TensorReference], Option<&'a ShardSpec>);

/// Storages that are seen, and tensors that are assembled.
#[derive(Default)]
pub(super) struct Wishes<'a> {
    pub(super) viewed: BTreeSet<u32>,
    /// With the fqn of the first leaf that has the wish.
    pub(super) assembled: IndexMap<Wish<'a>, String>,
    /// The tensors that are seen, tied ones as often as they are leaves.
    seen: Vec<&'a TensorReference>,
}

impl<'a> Wishes<'a> {
    /// Adds those of a leaf.
    pub(super) fn add(
        &mut self,
        way: Way<'_>,
        node: &'a Node,
        slices: &'a BTreeMap<String, Vec<ShardSpec>>,
    ) {
        match node {
            Node::StoredLeaf(_, storage) => drop(self.viewed.insert(*storage)),
            Node::Tensors(run) => {
                let fqn = || way.path().fqn();
                let places = if slices.is_empty() { None } else { slices.get(&fqn()) };
                match places {
                    Some(places) => places.iter().for_each(|place| {
                        self.assembled.entry((run, Some(place))).or_insert_with(fqn);
                    }),
                    None if is_whole(run) => self.see(&run[0]),
                    None => drop(self.assembled.entry((run, None)).or_insert_with(fqn)),
                }
            }
            Node::Leaf(_) | Node::Container(..) => {}
        }
    }

    fn see(&mut self, reference: &'a TensorReference) {
        // What has no storage has no bytes.
        let Some(storage) = reference.storage else { return };
        self.viewed.insert(storage);
        self.seen.push(reference);
    }

    /// How many bytes they have together: those of tied ones once.
    pub(super) fn needed(&mut self) -> u64 {
        let place = |reference: &&TensorReference| (reference.storage, reference.byte_offset);
        self.seen.sort_by_key(place);
        let mut seen = 0_u64;
        for of_place in self.seen.chunk_by(|one, other| place(one) == place(other)) {
            for (at, reference) in of_place.iter().enumerate() {
                if !of_place[..at].contains(reference) {
                    seen = seen.saturating_add(reference.meta.nbytes());
                }
            }
        }
        let assembled = self.assembled.keys().map(|(run, place)| {
            let itemsize = run[0].meta.dtype().itemsize();
            let elements = match place {
                Some(place) => numel(place.slice().local_shape()),
                None => numel(&plan::global_shape(&run[0])),
            };
            elements.saturating_mul(itemsize)
        });
        // Slices that are no part of their tensors may be of any size, and are refused later.
        assembled.fold(seen, u64::saturating_add)
    }
}
