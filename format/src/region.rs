//! Boxes in a global shape, and the proof that a set of boxes tiles one.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};

/// The largest number of dimensions of a tensor or of a mesh.
pub(crate) const MAX_RANK: usize = 64;

/// A box in a global shape: per dimension the half-open range `offset..offset + size`, in elements.
///
/// The ends of all ranges fit into a `u64`. Regions are ordered by their offsets, then by their
/// shapes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region {
    offsets: Box<[u64]>,
    shape: Box<[u64]>,
}

impl Region {
    /// The box that starts at `offsets` and has `shape`, both in elements.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::SliceMismatch`] if `offsets` and `shape` have different lengths.
    /// - [`ErrorKind::RankTooLarge`] if there are more than 64 dimensions.
    /// - [`ErrorKind::ShapeOverflow`] if an offset plus its size exceeds `u64::MAX`.
    pub fn new(offsets: &[u64], shape: &[u64]) -> Result<Self> {
        if offsets.len() != shape.len() {
            let note = format!("{} offsets, {} sizes", offsets.len(), shape.len());
            return Err(Error::new(ErrorKind::SliceMismatch).note(note));
        }
        check_rank(shape)?;
        for (&offset, &size) in offsets.iter().zip(shape) {
            if offset.checked_add(size).is_none() {
                let note = format!("offset {offset}, size {size}");
                return Err(Error::new(ErrorKind::ShapeOverflow).note(note));
            }
        }
        Ok(Self { offsets: offsets.into(), shape: shape.into() })
    }

    /// All of a tensor of `shape`, in elements.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()].into(), shape: shape.into() }
    }

    /// Where the box starts in each dimension, in elements.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// The size of the box in each dimension, in elements.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The number of elements, `u64::MAX` if there are more. A box of rank 0 has one.
    pub fn numel(&self) -> u64 {
        self.shape.iter().fold(1, |product, &size| product.saturating_mul(size))
    }

    /// True if the box has no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The elements that both boxes have; `None` if they share none or differ in rank.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        if !self.overlaps(other) {
            return None;
        }
        let mut shared = self.clone();
        for dim in 0..self.rank() {
            let (a, b) = (self.range(dim), other.range(dim));
            shared.narrow(dim, a.start.max(b.start)..a.end.min(b.end));
        }
        Some(shared)
    }

    /// True if `other` has the same rank and lies within the bounds of this box. An empty box has
    /// bounds too: `[4:4]` lies within `[0:4]` and not within `[0:3]`.
    pub fn contains(&self, other: &Self) -> bool {
        self.rank() == other.rank()
            && (0..self.rank()).all(|dim| {
                let (outer, inner) = (self.range(dim), other.range(dim));
                outer.start <= inner.start && inner.end <= outer.end
            })
    }

    /// The elements of this box that `other` does not have, as disjoint boxes: at most two per
    /// dimension, and none that is empty.
    pub fn subtract(&self, other: &Self) -> Vec<Self> {
        if self.is_empty() {
            return Vec::new();
        }
        let Some(shared) = self.intersect(other) else {
            return vec![self.clone()];
        };
        // Cut off what lies before and behind `other`, one dimension after the other.
        let mut parts = Vec::new();
        let mut rest = self.clone();
        for dim in 0..self.rank() {
            let (outer, inner) = (rest.range(dim), shared.range(dim));
            for side in [outer.start..inner.start, inner.end..outer.end] {
                if !side.is_empty() {
                    parts.push(rest.narrowed(dim, side));
                }
            }
            rest.narrow(dim, inner);
        }
        parts
    }

    /// The same box with its offsets counted from the start of `outer`.
    ///
    /// # Panics
    ///
    /// If `outer` does not [contain](Self::contains) the box.
    #[must_use]
    pub fn relative_to(&self, outer: &Self) -> Self {
        assert!(outer.contains(self), "{self} does not lie in {outer}");
        let offsets = self.offsets.iter().zip(&outer.offsets).map(|(own, outer)| own - outer);
        Self { offsets: offsets.collect(), shape: self.shape.clone() }
    }

    /// Proves that `boxes` tile this region: that each of its elements lies in exactly one box.
    ///
    /// Equal boxes are replicas of each other and count once; empty boxes count for nothing. Takes
    /// O(n log n) for n boxes that repeated straight cuts through the region can produce, such as
    /// shards, experts and grids, and O(n^2) in the worst case; the memory is always O(n).
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::OutsideGlobal`] with the box, if one has another rank or leaves the region.
    /// - [`ErrorKind::Uncovered`] with a region that no box touches.
    /// - [`ErrorKind::Overlap`] with a region that two different boxes have.
    /// - [`ErrorKind::ShapeOverflow`] if the region has 2^128 elements or more and straight cuts do
    ///   not decide.
    ///
    /// Of several holes and overlaps one is named.
    pub fn prove_tiled<'a>(&self, boxes: impl IntoIterator<Item = &'a Self>) -> Result<()> {
        let mut boxes: Vec<_> = boxes.into_iter().filter(|part| !part.is_empty()).collect();
        if let Some(&outside) = boxes.iter().find(|part| !self.contains(part)) {
            let error = Error::new(ErrorKind::OutsideGlobal).note(format!("not in {self}"));
            return Err(error.in_region(outside.clone()));
        }
        if self.is_empty() {
            return Ok(());
        }
        boxes.sort_unstable();
        boxes.dedup();
        prove_by_cuts(self, &mut boxes, MAX_CUTS)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.rank() == other.rank()
            && (0..self.rank()).all(|dim| {
                let (a, b) = (self.range(dim), other.range(dim));
                a.start.max(b.start) < a.end.min(b.end)
            })
    }

    /// Where the box lies in one dimension.
    fn range(&self, dim: usize) -> Range<u64> {
        self.offsets[dim]..self.offsets[dim] + self.shape[dim]
    }

    fn narrow(&mut self, dim: usize, range: Range<u64>) {
        self.offsets[dim] = range.start;
        self.shape[dim] = range.end - range.start;
    }

    fn narrowed(&self, dim: usize, range: Range<u64>) -> Self {
        let mut narrowed = self.clone();
        narrowed.narrow(dim, range);
        narrowed
    }

    /// The number of elements that share one index in all dimensions before `dim`; `None` if it
    /// exceeds `u128::MAX`.
    fn checked_section(&self, dim: usize) -> Option<u128> {
        self.shape[dim..].iter().try_fold(1_u128, |product, &size| product.checked_mul(size.into()))
    }

    /// [`Self::checked_section`] of a box that has no empty side and a volume that is known to fit.
    fn section(&self, dim: usize) -> u128 {
        self.shape[dim..].iter().map(|&size| u128::from(size)).product()
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for dim in 0..self.rank() {
            let Range { start, end } = self.range(dim);
            let separator = if dim == 0 { "" } else { ", " };
            write!(f, "{separator}{start}:{end}")?;
        }
        f.write_str("]")
    }
}

/// Refuses more than 64 dimensions.
pub(crate) fn check_rank(shape: &[u64]) -> Result<()> {
    if shape.len() > MAX_RANK {
        return Err(Error::new(ErrorKind::RankTooLarge).note(format!("rank {}", shape.len())));
    }
    Ok(())
}

/// How many cuts may lie around each other. Every tiling that devices produce needs one per
/// dimension; the limit bounds the stack and keeps a tiling whose cuts each split off one box from
/// costing a sort per box.
const MAX_CUTS: u32 = 64;

/// Proves that distinct, non-empty `boxes` inside the non-empty `region` tile it, by cutting it
/// wherever a straight cut touches no box and proving each piece by itself.
///
/// Sorted by where they start in one dimension, boxes fall into runs that overlap without a break
/// in that dimension. Between two runs is either a cut or a hole.
fn prove_by_cuts(region: &Region, boxes: &mut [&Region], cuts_left: u32) -> Result<()> {
    if boxes.is_empty() {
        return Err(uncovered(region.clone()));
    }
    for dim in 0..region.rank() {
        boxes.sort_unstable_by_key(|part| part.offsets[dim]);
        let runs = unbroken_runs(region, boxes, dim)?;
        if runs.len() > 1 && cuts_left > 0 {
            let mut rest = boxes;
            for (count, range) in runs {
                let (run, behind) = rest.split_at_mut(count);
                prove_by_cuts(&region.narrowed(dim, range), run, cuts_left - 1)?;
                rest = behind;
            }
            return Ok(());
        }
    }
    // A single box that leaves no hole in any dimension is the region.
    if boxes.len() == 1 { Ok(()) } else { prove_by_volume(region, boxes) }
}

/// The runs of `boxes`, sorted by where they start in `dim`: how many boxes, and where they lie.
/// A hole between two runs, or at one end of the region, is an error.
fn unbroken_runs(
    region: &Region,
    boxes: &[&Region],
    dim: usize,
) -> Result<Vec<(usize, Range<u64>)>> {
    let Range { start, end } = region.range(dim);
    let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
    let mut reached = start;
    for part in boxes {
        let range = part.range(dim);
        if reached < range.start {
            return Err(uncovered(region.narrowed(dim, reached..range.start)));
        }
        match runs.last_mut() {
            Some((count, run)) if range.start < run.end => {
                *count += 1;
                run.end = run.end.max(range.end);
            }
            _ => runs.push((1, range.clone())),
        }
        reached = reached.max(range.end);
    }
    if reached < end {
        return Err(uncovered(region.narrowed(dim, reached..end)));
    }
    Ok(runs)
}

/// Proves the same where no straight cut helps (a pinwheel, or boxes that overlap): boxes that are
/// disjoint and together as large as the region leave no hole.
fn prove_by_volume(region: &Region, boxes: &mut [&Region]) -> Result<()> {
    refuse_overlap(boxes)?;
    let volume = region.checked_section(0).ok_or_else(|| Error::new(ErrorKind::ShapeOverflow))?;
    let covered: u128 = boxes.iter().map(|part| part.section(0)).sum();
    if covered == volume { Ok(()) } else { Err(uncovered(find_hole(region, boxes.to_vec()))) }
}

/// Compares all pairs that overlap in one dimension: in the one where these are fewest.
fn refuse_overlap(boxes: &mut [&Region]) -> Result<()> {
    let rank = boxes.first().map_or(0, |part| part.rank());
    let behind = |boxes: &[&Region], index: usize, dim: usize| {
        let end = boxes[index].range(dim).end;
        boxes[index + 1..].partition_point(|part| part.offsets[dim] < end)
    };
    let pairs = |dim: &usize| -> usize {
        boxes.sort_unstable_by_key(|part| part.offsets[*dim]);
        (0..boxes.len()).map(|index| behind(boxes, index, *dim)).sum()
    };
    let Some(dim) = (0..rank).min_by_key(pairs) else {
        return Ok(());
    };
    boxes.sort_unstable_by_key(|part| part.offsets[dim]);
    for (index, part) in boxes.iter().enumerate() {
        for other in &boxes[index + 1..][..behind(boxes, index, dim)] {
            if let Some(shared) = part.intersect(other) {
                let note = format!("{part} and {other}");
                return Err(Error::new(ErrorKind::Overlap).note(note).in_region(shared));
            }
        }
    }
    Ok(())
}

/// A hole that disjoint `boxes` leave in `region`, whose volume they do not fill: dimension by
/// dimension, narrows the region to the first slab that the boxes do not fill.
fn find_hole(region: &Region, mut boxes: Vec<&Region>) -> Region {
    let mut hole = region.clone();
    for dim in 0..region.rank() {
        if boxes.is_empty() {
            break;
        }
        if let Some(slab) = first_thin_slab(&hole, &boxes, dim) {
            boxes.retain(|part| part.range(dim).contains(&slab.start));
            hole.narrow(dim, slab);
        }
    }
    hole
}

/// The first range of `dim` in which the cross-sections of `boxes` do not add up to the region's.
fn first_thin_slab(region: &Region, boxes: &[&Region], dim: usize) -> Option<Range<u64>> {
    let Range { start, end } = region.range(dim);
    // Where the covered cross-section changes: what ends there, and what starts.
    let mut changes = BTreeMap::from([(start, (0, 0)), (end, (0, 0))]);
    for part in boxes {
        let Range { start, end } = part.range(dim);
        changes.entry(start).or_default().1 += part.section(dim + 1);
        changes.entry(end).or_default().0 += part.section(dim + 1);
    }
    let full = region.section(dim + 1);
    let mut covered: u128 = 0;
    let ends = changes.keys().skip(1);
    changes.iter().zip(ends).find_map(|((&from, (ending, starting)), &to)| {
        covered = covered - ending + starting;
        (covered < full).then_some(from..to)
    })
}

fn uncovered(region: Region) -> Error {
    Error::new(ErrorKind::Uncovered).in_region(region)
}
