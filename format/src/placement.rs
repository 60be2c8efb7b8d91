//! Placements: how a mesh dimension divides a global tensor, and which part of it a rank holds.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::held_indices::{HeldIndices, check_box_count, not_a_box};
use crate::mesh::check_coordinates;
use crate::region::{Region, check_rank};

/// How one dimension of a device mesh divides a tensor.
///
/// Displayed like torch's `repr`, for example `Shard(dim=0)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Each rank holds the whole tensor.
    Replicate,
    /// Each rank holds one chunk of a tensor dimension, as `torch.chunk` divides it.
    ///
    /// All chunks have the size of the first one, except the last ones, which may be smaller or empty.
    Shard {
        /// The tensor dimension, counted from 0.
        dim: u32,
    },
    /// Each rank holds one chunk of each of several pieces of a tensor dimension.
    ///
    /// This is torch's `_StridedShard`. FSDP over tensor parallelism uses it to shard from right to left.
    StridedShard {
        /// The tensor dimension, counted from 0.
        dim: u32,
        /// The number of pieces, at least 1.
        split_factor: u64,
    },
    /// Each rank holds a term of the tensor, which must still be reduced. It has no region.
    Partial {
        /// The name of the reduction, for example `sum`.
        reduce_op: String,
    },
}

impl Placement {
    /// Returns the boxes of the global tensor that the rank at `coordinates` holds.
    ///
    /// The order is that in which the local tensor stores them. If a dimension has several runs of indices, the boxes
    /// are the product of the runs of all dimensions, in row-major order.
    ///
    /// There is one box for any combination of placements, unless a `_StridedShard` leaves pieces that are not
    /// adjacent. A rank that holds no elements has one empty box. As in torch, it starts at the end of the dimension in
    /// which it is empty. Shapes and offsets are in elements.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::MeshMismatch`] if there is not one coordinate and one placement per mesh
    ///   dimension, or a coordinate is outside.
    /// - [`ErrorKind::PartialPlacement`] if a placement is `Partial`.
    /// - [`ErrorKind::UnknownPlacement`] if the tensor does not have the dimension that a placement
    ///   names, or a split factor is 0.
    /// - [`ErrorKind::RankTooLarge`] if the tensor or the mesh has more than 64 dimensions.
    /// - [`ErrorKind::NotABox`] if there would be more than 65,536 pieces in a dimension, or boxes.
    pub fn local_regions(
        global_shape: &[u64],
        mesh_shape: &[u64],
        coordinates: &[u64],
        placements: &[Self],
    ) -> Result<Vec<Region>> {
        check_layout(global_shape, mesh_shape, placements)?;
        check_coordinates(mesh_shape, coordinates)?;
        let mut held: Vec<HeldIndices> =
            global_shape.iter().map(|&size| HeldIndices::all(size)).collect();
        for ((placement, &parts), &part) in placements.iter().zip(mesh_shape).zip(coordinates) {
            if let Some((dim, split_factor)) = placement.division(held.len())? {
                held[dim].split(split_factor, parts, part)?;
            }
        }
        cartesian_product(&held)
    }

    /// Returns the tensor dimension that the placement divides, and the split factor (1 for `Shard`).
    ///
    /// Returns `None` for [`Placement::Replicate`].
    ///
    /// # Errors
    ///
    /// `PartialPlacement` for [`Placement::Partial`]; `UnknownPlacement` if a tensor of this rank does not have the
    /// dimension, or if the split factor is 0.
    pub(crate) fn division(&self, rank: usize) -> Result<Option<(usize, u64)>> {
        let (dim, split_factor) = match *self {
            Self::Replicate => return Ok(None),
            Self::Shard { dim } => (dim, 1),
            Self::StridedShard { dim, split_factor } => (dim, split_factor),
            Self::Partial { .. } => {
                return Err(Error::new(ErrorKind::PartialPlacement).with_detail(self));
            }
        };
        usize::try_from(dim)
            .ok()
            .filter(|dim| *dim < rank && split_factor > 0)
            .map(|dim| Some((dim, split_factor)))
            .ok_or_else(|| Error::new(ErrorKind::UnknownPlacement).with_detail(self))
    }

    /// Returns the only box of the global tensor that the rank at `coordinates` holds.
    ///
    /// # Errors
    ///
    /// As [`Self::local_regions`], and [`ErrorKind::NotABox`] if there are several boxes.
    pub fn local_region(
        global_shape: &[u64],
        mesh_shape: &[u64],
        coordinates: &[u64],
        placements: &[Self],
    ) -> Result<Region> {
        let boxes = Self::local_regions(global_shape, mesh_shape, coordinates, placements)?;
        <[Region; 1]>::try_from(boxes)
            .map(|[only]| only)
            .map_err(|boxes| not_a_box(format!("{} boxes", boxes.len())))
    }

    /// Returns whether the rank at `coordinates` holds the first replica of its shard.
    ///
    /// This is the rank whose coordinate is 0 in each mesh dimension that replicates.
    pub fn is_first_replica(coordinates: &[u64], placements: &[Self]) -> bool {
        let mut dims = coordinates.iter().zip(placements);
        dims.all(|(&coordinate, placement)| coordinate == 0 || *placement != Self::Replicate)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("Replicate()"),
            Self::Shard { dim } => write!(f, "Shard(dim={dim})"),
            Self::StridedShard { dim, split_factor } => {
                write!(f, "_StridedShard(dim={dim}, sf={split_factor})")
            }
            Self::Partial { reduce_op } => write!(f, "Partial({reduce_op})"),
        }
    }
}

/// Checks the ranks of tensor and mesh, and that there is one placement per mesh dimension.
pub(crate) fn check_layout(
    global_shape: &[u64],
    mesh_shape: &[u64],
    placements: &[Placement],
) -> Result<()> {
    check_rank(global_shape)?;
    check_rank(mesh_shape)?;
    if placements.len() != mesh_shape.len() {
        let (dims, count) = (mesh_shape.len(), placements.len());
        let note = format!("{dims} mesh dimensions, {count} placements");
        return Err(Error::new(ErrorKind::MeshMismatch).with_detail(note));
    }
    Ok(())
}

/// Returns the boxes that the runs of all dimensions span.
fn cartesian_product(dims: &[HeldIndices]) -> Result<Vec<Region>> {
    if dims.iter().any(|dim| dim.runs().is_empty()) {
        // The rank holds no elements: one empty box, whose other sides have the lengths of the local tensor.
        let start = |dim: &HeldIndices| dim.runs().first().map_or(dim.size(), |run| run.start);
        let offsets: Vec<u64> = dims.iter().map(start).collect();
        let shape: Vec<u64> = dims.iter().map(HeldIndices::len).collect();
        return Ok(vec![Region::new(&offsets, &shape)?]);
    }
    check_box_count(dims.iter().map(|dim| dim.runs().len()))?;
    let mut boxes = vec![(Vec::new(), Vec::new())];
    for dim in dims {
        boxes = boxes
            .into_iter()
            .flat_map(|(offsets, shape)| {
                dim.runs().iter().map(move |run| {
                    ([&offsets[..], &[run.start]].concat(), [&shape[..], &[run.len]].concat())
                })
            })
            .collect();
    }
    boxes.iter().map(|(offsets, shape)| Region::new(offsets, shape)).collect()
}
