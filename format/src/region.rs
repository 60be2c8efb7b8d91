//! Boxes in a global shape, and the check that a set of boxes tiles one.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::error::{Error, ErrorKind, RegionText, Result};

/// Maximum number of dimensions of a tensor or of a mesh.
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
    /// Creates the box that starts at `offsets` and has `shape`, both in elements.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::SliceMismatch`] if `offsets` and `shape` have different lengths.
    /// - [`ErrorKind::RankTooLarge`] if there are more than 64 dimensions.
    /// - [`ErrorKind::ShapeOverflow`] if an offset plus its size exceeds `u64::MAX`.
    pub fn new(offsets: &[u64], shape: &[u64]) -> Result<Self> {
        if offsets.len() != shape.len() {
            let note = format!("{} offsets, {} sizes", offsets.len(), shape.len());
            return Err(Error::new(ErrorKind::SliceMismatch).with_detail(note));
        }
        check_rank(shape)?;
        for (&offset, &size) in offsets.iter().zip(shape) {
            if offset.checked_add(size).is_none() {
                let note = format!("offset {offset}, size {size}");
                return Err(Error::new(ErrorKind::ShapeOverflow).with_detail(note));
            }
        }
        Ok(Self { offsets: offsets.into(), shape: shape.into() })
    }

    /// Creates the box of a whole tensor of `shape`, in elements.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()].into(), shape: shape.into() }
    }

    /// Returns the start of the box in each dimension, in elements.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Returns the size of the box in each dimension, in elements.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Returns the number of elements, or `u64::MAX` if there are more. A box of rank 0 has one element.
    pub fn numel(&self) -> u64 {
        self.shape.iter().fold(1, |product, &size| product.saturating_mul(size))
    }

    /// Returns whether the box has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Returns the elements that both boxes contain; `None` if there are none, or if the ranks differ.
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

    /// Returns whether `other` has the same rank and lies within the bounds of this box.
    ///
    /// An empty box has bounds too: `[4:4]` lies within `[0:4]`, but not within `[0:3]`.
    pub fn contains(&self, other: &Self) -> bool {
        self.rank() == other.rank()
            && (0..self.rank()).all(|dim| {
                let (outer, inner) = (self.range(dim), other.range(dim));
                outer.start <= inner.start && inner.end <= outer.end
            })
    }

    /// Returns the elements of this box that `other` does not contain, as disjoint, non-empty boxes.
    ///
    /// There are at most two boxes per dimension.
    pub fn subtract(&self, other: &Self) -> Vec<Self> {
        if self.is_empty() {
            return Vec::new();
        }
        let Some(shared) = self.intersect(other) else {
            return vec![self.clone()];
        };
        // Split off the parts before and after `other`, dimension by dimension.
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

    /// Returns the same box with offsets relative to the start of `outer`.
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

    /// Verifies that `boxes` tile this region: each of its elements is in exactly one box.
    ///
    /// Equal boxes are replicas of each other and count once. Empty boxes are ignored. The check takes O(n log n) time
    /// if repeated straight cuts through the region can separate the n boxes, as with shards, experts and grids, and
    /// O(n^2) time in the worst case. It takes O(n) memory.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::OutsideGlobal`] with a box that has another rank, or is not inside the region.
    /// - [`ErrorKind::Uncovered`] with a region that no box covers.
    /// - [`ErrorKind::Overlap`] with a region that is in two different boxes.
    /// - [`ErrorKind::ShapeOverflow`] if the region has 2^128 elements or more, and straight cuts do not separate the
    ///   boxes.
    ///
    /// If there are several errors, one is returned.
    pub fn verify_tiling<'a>(&self, boxes: impl IntoIterator<Item = &'a Self>) -> Result<()> {
        let mut boxes: Vec<_> = boxes.into_iter().filter(|part| !part.is_empty()).collect();
        if let Some(&outside) = boxes.iter().find(|part| !self.contains(part)) {
            let error = Error::new(ErrorKind::OutsideGlobal).with_detail(format!("not in {self}"));
            return Err(error.with_region(&outside.offsets, &outside.shape));
        }
        if self.is_empty() {
            return Ok(());
        }
        boxes.sort_unstable();
        boxes.dedup();
        verify_by_cuts(self, &mut boxes, MAX_CUTS)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.rank() == other.rank()
            && (0..self.rank()).all(|dim| {
                let (a, b) = (self.range(dim), other.range(dim));
                a.start.max(b.start) < a.end.min(b.end)
            })
    }

    /// Returns the range of the box in one dimension.
    pub(crate) fn range(&self, dim: usize) -> Range<u64> {
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

    /// Returns the number of elements of a cross-section: one index in each dimension before `dim`.
    ///
    /// Returns `None` if the number exceeds `u128::MAX`.
    fn checked_cross_section(&self, dim: usize) -> Option<u128> {
        self.shape[dim..].iter().try_fold(1_u128, |product, &size| product.checked_mul(size.into()))
    }

    /// Returns [`Self::checked_cross_section`] of a non-empty box whose volume fits into a `u128`.
    fn cross_section(&self, dim: usize) -> u128 {
        self.shape[dim..].iter().map(|&size| u128::from(size)).product()
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        RegionText { offsets: &self.offsets, shape: &self.shape }.fmt(f)
    }
}

/// Checks that there are at most 64 dimensions.
pub(crate) fn check_rank(shape: &[u64]) -> Result<()> {
    if shape.len() > MAX_RANK {
        return Err(
            Error::new(ErrorKind::RankTooLarge).with_detail(format!("rank {}", shape.len()))
        );
    }
    Ok(())
}

/// Maximum nesting depth of cuts.
///
/// A tiling by devices needs one level per dimension. The limit bounds the stack. It also bounds the cost of a
/// tiling in which each cut splits off only one box: otherwise the boxes would be sorted again for each box.
const MAX_CUTS: u32 = 64;

/// Verifies that distinct, non-empty `boxes` inside the non-empty `region` tile it, by straight cuts.
///
/// Cuts the region where a straight cut touches no box, and verifies each piece by itself. If boxes are sorted by
/// their start in one dimension, they form runs that overlap without a gap in that dimension. Between two runs is
/// either a cut or a hole.
fn verify_by_cuts(region: &Region, boxes: &mut [&Region], cuts_left: u32) -> Result<()> {
    if boxes.is_empty() {
        return Err(uncovered(region));
    }
    for dim in 0..region.rank() {
        boxes.sort_unstable_by_key(|part| part.offsets[dim]);
        let runs = group_into_runs(region, boxes, dim)?;
        if runs.len() > 1 && cuts_left > 0 {
            let mut rest = boxes;
            for (count, range) in runs {
                let (run, tail) = rest.split_at_mut(count);
                verify_by_cuts(&region.narrowed(dim, range), run, cuts_left - 1)?;
                rest = tail;
            }
            return Ok(());
        }
    }
    // A single box that leaves no hole in any dimension is the whole region.
    if boxes.len() == 1 { Ok(()) } else { verify_by_volume(region, boxes) }
}

/// Returns the runs that `boxes` form in `dim`: for each the number of boxes and the range.
///
/// `boxes` must be sorted by their start in `dim`. A hole between two runs, or at an end of the region, is an error.
fn group_into_runs(
    region: &Region,
    boxes: &[&Region],
    dim: usize,
) -> Result<Vec<(usize, Range<u64>)>> {
    let Range { start, end } = region.range(dim);
    let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
    let mut covered_end = start;
    for part in boxes {
        let range = part.range(dim);
        if covered_end < range.start {
            return Err(uncovered(&region.narrowed(dim, covered_end..range.start)));
        }
        match runs.last_mut() {
            Some((count, run)) if range.start < run.end => {
                *count += 1;
                run.end = run.end.max(range.end);
            }
            _ => runs.push((1, range.clone())),
        }
        covered_end = covered_end.max(range.end);
    }
    if covered_end < end {
        return Err(uncovered(&region.narrowed(dim, covered_end..end)));
    }
    Ok(runs)
}

/// Verifies by volume that `boxes` tile `region`.
///
/// For boxes that no straight cut separates, such as a pinwheel, or boxes that overlap. Disjoint boxes that together
/// are as large as the region leave no hole.
fn verify_by_volume(region: &Region, boxes: &mut [&Region]) -> Result<()> {
    check_disjoint(boxes)?;
    let volume =
        region.checked_cross_section(0).ok_or_else(|| Error::new(ErrorKind::ShapeOverflow))?;
    let covered: u128 = boxes.iter().map(|part| part.cross_section(0)).sum();
    if covered == volume { Ok(()) } else { Err(uncovered(&find_hole(region, boxes.to_vec()))) }
}

/// Checks that no two boxes overlap.
///
/// Compares all pairs that overlap in one dimension: the dimension with the fewest such pairs.
fn check_disjoint(boxes: &mut [&Region]) -> Result<()> {
    let rank = boxes.first().map_or(0, |part| part.rank());
    let overlap_count = |boxes: &[&Region], index: usize, dim: usize| {
        let end = boxes[index].range(dim).end;
        boxes[index + 1..].partition_point(|part| part.offsets[dim] < end)
    };
    let pair_count = |dim: &usize| -> usize {
        boxes.sort_unstable_by_key(|part| part.offsets[*dim]);
        (0..boxes.len()).map(|index| overlap_count(boxes, index, *dim)).sum()
    };
    let Some(dim) = (0..rank).min_by_key(pair_count) else {
        return Ok(());
    };
    boxes.sort_unstable_by_key(|part| part.offsets[dim]);
    for (index, part) in boxes.iter().enumerate() {
        for other in &boxes[index + 1..][..overlap_count(boxes, index, dim)] {
            if let Some(shared) = part.intersect(other) {
                let note = format!("{part} and {other}");
                return Err(Error::new(ErrorKind::Overlap)
                    .with_detail(note)
                    .with_region(&shared.offsets, &shared.shape));
            }
        }
    }
    Ok(())
}

/// Returns a hole that disjoint `boxes` leave in `region`, given that they do not fill its volume.
///
/// Narrows the region, dimension by dimension, to the first slab that the boxes do not fill.
fn find_hole(region: &Region, mut boxes: Vec<&Region>) -> Region {
    let mut hole = region.clone();
    for dim in 0..region.rank() {
        if boxes.is_empty() {
            break;
        }
        if let Some(slab) = first_underfilled_slab(&hole, &boxes, dim) {
            boxes.retain(|part| part.range(dim).contains(&slab.start));
            hole.narrow(dim, slab);
        }
    }
    hole
}

/// Returns the first range of `dim` in which the boxes do not fill the cross-section of the region.
fn first_underfilled_slab(region: &Region, boxes: &[&Region], dim: usize) -> Option<Range<u64>> {
    let Range { start, end } = region.range(dim);
    // Positions where the covered cross-section changes: the size that ends there, and the size that starts there.
    let mut changes = BTreeMap::from([(start, (0, 0)), (end, (0, 0))]);
    for part in boxes {
        let Range { start, end } = part.range(dim);
        changes.entry(start).or_default().1 += part.cross_section(dim + 1);
        changes.entry(end).or_default().0 += part.cross_section(dim + 1);
    }
    let full = region.cross_section(dim + 1);
    let mut covered: u128 = 0;
    let ends = changes.keys().skip(1);
    changes.iter().zip(ends).find_map(|((&from, (ending, starting)), &to)| {
        covered = covered - ending + starting;
        (covered < full).then_some(from..to)
    })
}

fn uncovered(region: &Region) -> Error {
    Error::new(ErrorKind::Uncovered).with_region(&region.offsets, &region.shape)
}
