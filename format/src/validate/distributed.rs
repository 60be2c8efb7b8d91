//! Validation of distributed leaves. Spec: section 7, F-068.

use std::collections::{BTreeMap, BTreeSet};

use super::Validator;
use crate::convert::index_to_usize;
use crate::distributed::parse_distribution;
use crate::error::{Error, ErrorKind, Result};
use crate::held_indices::MAX_PIECES;
use crate::record::{self, NONE};
use crate::table_views::path_of;

/// Dtype, slice and chunks of a group, which all its leaves have.
type GroupFields = (u16, u32, u64);

impl Validator<'_> {
    pub(super) fn validate_distributed(&self) -> Result<()> {
        if self.distributed.is_empty() {
            return Ok(());
        }
        let failed = |note: &str| Error::new(ErrorKind::DistributedLeaf).with_detail(note);
        let writers = SingleWriters::new(self.views.shards);
        // Thousands of leaves have one mesh.
        let mut meshes = BTreeSet::new();
        let mut groups: BTreeMap<u32, GroupFields> = BTreeMap::new();
        for (node, tensor) in &self.distributed {
            let at = |error: Error| error.with_path(path_of(self.views, *node));
            let tensor = &self.views.tensors[index_to_usize(*tensor)];
            let distribution = self.views.nodes[*node].b.to_native();
            let Some((group, _)) = parse_distribution(distribution) else {
                return Err(at(failed("the distribution")));
            };
            let slice = self.distributed_slice(*node, tensor).map_err(|note| at(failed(note)))?;
            if meshes.insert(slice.mesh.to_native()) && !writers.contain_all(self.ranks(slice)) {
                return Err(at(failed("a rank of the mesh is not the writer of one shard")));
            }
            let fields = (tensor.dtype.to_native(), tensor.slice.to_native(), distribution);
            if *groups.entry(group).or_insert(fields) != fields {
                return Err(at(failed("leaves of one group differ")));
            }
        }
        if groups.keys().copied().ne((0..).take(groups.len())) {
            return Err(failed("the groups have a gap"));
        }
        Ok(())
    }

    /// Returns the slice of a distributed leaf, or what is wrong with the leaf.
    fn distributed_slice(
        &self,
        node: usize,
        tensor: &record::Tensor,
    ) -> Result<&record::Slice, &'static str> {
        if self.views.shards.is_empty() {
            return Err("the file has no shards");
        }
        if self.divergent.iter().any(|range| range.contains(&node)) {
            return Err("it is inside a divergent node");
        }
        if tensor.slice == NONE {
            return Err("it has no slice");
        }
        let slice = &self.views.slices[index_to_usize(tensor.slice.to_native())];
        if [slice.mesh, slice.ranks, slice.placements].contains(&NONE.into()) {
            return Err("its slice has no mesh, ranks or placements");
        }
        if !self.has_few_pieces(slice) {
            return Err("the split factors of its placements are too large");
        }
        if slice.coordinates != NONE {
            return Err("its slice has coordinates");
        }
        if tensor.strides != NONE {
            return Err("its tensor has strides");
        }
        let rank = usize::from(slice.rank);
        let vector = |start: rend::u32_le| self.views.validated_dims(start.to_native(), rank);
        let shape = vector(tensor.shape);
        if shape.contains(&0) {
            return Err("its tensor has no elements");
        }
        if vector(slice.offsets).iter().any(|offset| *offset != 0) {
            return Err("its slice has offsets");
        }
        if shape != vector(slice.global_shape) {
            return Err("its shape is not the global shape");
        }
        Ok(slice)
    }

    /// Whether the split factors are so small that each device has few regions.
    fn has_few_pieces(&self, slice: &record::Slice) -> bool {
        let first = index_to_usize(slice.placements.to_native());
        let placements = &self.views.placements[first..first + usize::from(slice.mesh_rank)];
        let factors = placements.iter().map(|placement| placement.split_factor.to_native().max(1));
        factors.fold(1_u64, u64::saturating_mul) <= MAX_PIECES
    }

    /// Returns the ranks of the mesh of a slice.
    fn ranks(&self, slice: &record::Slice) -> &[u64] {
        let mesh_rank = usize::from(slice.mesh_rank);
        let shape = self.views.validated_dims(slice.mesh.to_native(), mesh_rank);
        let count =
            usize::try_from(shape.iter().product::<u64>()).expect("proven to be below 2^32");
        self.views.validated_dims(slice.ranks.to_native(), count)
    }
}

/// The writers of exactly one shard.
struct SingleWriters(BTreeSet<u64>);

impl SingleWriters {
    fn new(shards: &[record::Shard]) -> Self {
        let mut writers = BTreeSet::new();
        let mut repeated = BTreeSet::new();
        for shard in shards {
            let writer = u64::from(shard.writer.to_native());
            if !writers.insert(writer) {
                repeated.insert(writer);
            }
        }
        Self(&writers - &repeated)
    }

    fn contain_all(&self, ranks: &[u64]) -> bool {
        ranks.iter().all(|rank| self.0.contains(rank))
    }
}
