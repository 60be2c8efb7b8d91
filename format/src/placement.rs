//! Placements: how a mesh dimension divides a global tensor, and which part of it a rank holds.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};
use crate::mesh::check_coordinates;
use crate::region::{Region, check_rank};

/// How one dimension of a device mesh divides a tensor.
///
/// Displayed as torch's `repr` spells it, such as `Shard(dim=0)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Each rank holds all of the tensor.
    Replicate,
    /// Each rank holds one chunk of a tensor dimension, by the rule of `torch.chunk`: chunks are as
    /// large as the first, except for the last ones, which may be smaller or empty.
    Shard {
        /// The tensor dimension, counted from the first.
        dim: u32,
    },
    /// Each rank holds one chunk of each of several pieces of a tensor dimension: torch's
    /// `_StridedShard`, which FSDP over tensor parallelism uses to shard from right to left.
    StridedShard {
        /// The tensor dimension, counted from the first.
        dim: u32,
        /// The number of pieces, at least 1.
        split_factor: u64,
    },
    /// Each rank holds a term of the tensor, still to be reduced. It has no region.
    Partial {
        /// The name of the reduction, such as `sum`.
        reduce_op: String,
    },
}

impl Placement {
    /// The boxes of the global tensor that the rank at `coordinates` holds, in the order in which
    /// its local tensor stores them: where a dimension has several runs of indices, the boxes are
    /// their product, with the last dimension running fastest.
    ///
    /// There is one box for any combination of placements, unless a `_StridedShard` leaves pieces
    /// that do not join up. A rank that holds nothing has one empty box, which starts, as in torch,
    /// at the end of the dimension in which it is empty. Shapes and offsets are in elements.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::MeshMismatch`] if there is not one coordinate and one placement per mesh
    ///   dimension, or a coordinate is outside.
    /// - [`ErrorKind::PartialPlacement`] if a placement is `Partial`.
    /// - [`ErrorKind::UnknownPlacement`] if the tensor does not have the dimension that a placement
    ///   names, or a split factor is 0.
    /// - [`ErrorKind::RankTooLarge`] if the tensor or the mesh has more than 64 dimensions.
    /// - [`ErrorKind::NotABox`] if the pieces would be more than 65,536.
    pub fn local_regions(
        global_shape: &[u64],
        mesh_shape: &[u64],
        coordinates: &[u64],
        placements: &[Self],
    ) -> Result<Vec<Region>> {
        check_rank(global_shape)?;
        check_rank(mesh_shape)?;
        check_coordinates(mesh_shape, coordinates)?;
        if placements.len() != mesh_shape.len() {
            let (dims, count) = (mesh_shape.len(), placements.len());
            let note = format!("{dims} mesh dimensions, {count} placements");
            return Err(Error::new(ErrorKind::MeshMismatch).note(note));
        }
        let mut held: Vec<Held> = global_shape.iter().map(|&size| Held::all(size)).collect();
        for ((placement, &parts), &part) in placements.iter().zip(mesh_shape).zip(coordinates) {
            if let Some((dim, split_factor)) = placement.division(held.len())? {
                held[dim].split(split_factor, parts, part)?;
            }
        }
        product(&held)
    }

    /// The tensor dimension that the placement divides, and into how many pieces it cuts it first;
    /// `None` if it replicates.
    ///
    /// # Errors
    ///
    /// `PartialPlacement`, and `UnknownPlacement` for a tensor of this rank.
    pub(crate) fn division(&self, rank: usize) -> Result<Option<(usize, u64)>> {
        let (dim, split_factor) = match *self {
            Self::Replicate => return Ok(None),
            Self::Shard { dim } => (dim, 1),
            Self::StridedShard { dim, split_factor } => (dim, split_factor),
            Self::Partial { .. } => {
                return Err(Error::new(ErrorKind::PartialPlacement).note(self));
            }
        };
        usize::try_from(dim)
            .ok()
            .filter(|dim| *dim < rank && split_factor > 0)
            .map(|dim| Some((dim, split_factor)))
            .ok_or_else(|| Error::new(ErrorKind::UnknownPlacement).note(self))
    }

    /// The one box of the global tensor that the rank at `coordinates` holds.
    ///
    /// # Errors
    ///
    /// Those of [`Self::local_regions`], and [`ErrorKind::NotABox`] if there are several boxes.
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

    /// True if the rank at `coordinates` holds the first of the replicas of its shard: its
    /// coordinate is 0 in each mesh dimension that replicates.
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

/// The most boxes of one rank, and the most pieces of one dimension. Split factors are counts of
/// devices; the limit keeps one that is not from taking memory without bound.
const MAX_PIECES: u64 = 1 << 16;

/// The indices of one tensor dimension that a rank holds, as runs that are increasing, not empty
/// and not adjacent.
struct Held {
    size: u64,
    runs: Vec<Range<u64>>,
}

impl Held {
    fn all(size: u64) -> Self {
        let runs = std::iter::once(0..size).filter(|run| !run.is_empty());
        Self { size, runs: runs.collect() }
    }

    /// The number of indices.
    fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Cuts the indices into `split_factor` pieces and keeps chunk `part` of `parts` of each, with
    /// the pieces and the chunks cut by the rule of `torch.chunk`. With one piece this is `Shard`.
    fn split(&mut self, split_factor: u64, parts: u64, part: u64) -> Result<()> {
        let len = self.len();
        let piece = len.div_ceil(split_factor);
        // The first chunk of each piece is all of it: there is one part, or pieces of one index.
        // Otherwise no chunk joins up with that of the next piece.
        if piece.div_ceil(parts) == piece {
            if part > 0 {
                self.runs.clear();
            }
            return Ok(());
        }
        let pieces = len.div_ceil(piece);
        if pieces > MAX_PIECES {
            return Err(not_a_box(format!("a dimension of {len} in {pieces} pieces")));
        }
        let chunks = (0..pieces).map(|index| {
            let start = index * piece;
            let piece = piece.min(len - start);
            let chunk = piece.div_ceil(parts);
            let from = chunk.saturating_mul(part).min(piece);
            let to = from.saturating_add(chunk).min(piece);
            start + from..start + to
        });
        self.keep(chunks);
        Ok(())
    }

    /// Keeps the indices at `positions`: increasing ranges below `self.len()` that do not touch.
    fn keep(&mut self, positions: impl Iterator<Item = Range<u64>>) {
        let runs = std::mem::take(&mut self.runs);
        let mut runs = runs.into_iter();
        // A run, the position of its first index, and the position behind its last.
        let (mut run, mut first, mut behind) = (0..0, 0, 0);
        for Range { start, end } in positions {
            loop {
                let shared = start.max(first)..end.min(behind);
                if !shared.is_empty() {
                    self.runs
                        .push(run.start + (shared.start - first)..run.start + (shared.end - first));
                }
                if end <= behind {
                    break;
                }
                let Some(next) = runs.next() else { return };
                (first, run) = (behind, next);
                behind += run.end - run.start;
            }
        }
    }
}

/// The boxes that the held indices of all dimensions span.
fn product(dims: &[Held]) -> Result<Vec<Region>> {
    if dims.iter().any(|dim| dim.runs.is_empty()) {
        // Nothing is held: one empty box, whose other sides are as long as the local tensor's.
        let start = |dim: &Held| dim.runs.first().map_or(dim.size, |run| run.start);
        let offsets: Vec<u64> = dims.iter().map(start).collect();
        let shape: Vec<u64> = dims.iter().map(Held::len).collect();
        return Ok(vec![Region::new(&offsets, &shape)?]);
    }
    let count = dims.iter().try_fold(1_u64, |count, dim| {
        let runs = u64::try_from(dim.runs.len()).ok()?;
        count.checked_mul(runs).filter(|&count| count <= MAX_PIECES)
    });
    if count.is_none() {
        return Err(not_a_box(format!("more than {MAX_PIECES} boxes")));
    }
    let mut boxes = vec![(Vec::new(), Vec::new())];
    for dim in dims {
        boxes = boxes
            .into_iter()
            .flat_map(|(offsets, shape)| {
                dim.runs.iter().map(move |run| {
                    let size = run.end - run.start;
                    ([&offsets[..], &[run.start]].concat(), [&shape[..], &[size]].concat())
                })
            })
            .collect();
    }
    boxes.iter().map(|(offsets, shape)| Region::new(offsets, shape)).collect()
}

fn not_a_box(note: String) -> Error {
    Error::new(ErrorKind::NotABox).note(note)
}
