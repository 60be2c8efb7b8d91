//! The parts of a region that the devices of a mesh hold, as series of devices at regular distances.
//!
//! The computation does not enumerate the devices. Each tensor dimension depends only on the mesh dimensions that
//! divide it. In each tensor dimension, devices whose local tensors differ only in where they begin form a group. A mesh
//! dimension divides a group into a few groups, by arithmetic.

use std::cmp::Reverse;
use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};
use crate::held_indices::{Division, HeldIndices, HeldRun, MAX_PIECES, check_box_count, not_a_box};
use crate::mesh::{check_coordinates, device_count};
use crate::placement::{Placement, check_layout};
use crate::region::Region;
use crate::shape::row_major_strides;

/// A part of a region that a device of a mesh holds, and the devices that hold such a part at regular distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    /// Row-major index in the mesh of the first device.
    pub device: u64,
    /// Shape of the local tensor of each of these devices, in elements.
    pub local_shape: Box<[u64]>,
    /// Start of the part in the local tensor, in elements.
    pub local_offsets: Box<[u64]>,
    /// The part of the global tensor that the first device holds.
    pub region: Region,
    /// Repetitions, outermost first. If there are none, one device holds the part.
    pub repeats: Vec<PartRepeat>,
}

/// A repetition of a part on other devices.
///
/// Local shape, local offsets and shape of the part are the same on all these devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PartRepeat {
    /// Number of devices, at least 2.
    pub count: u64,
    /// Distance from one device to the next one in the row-major order of the mesh, at least 1.
    pub device_step: u64,
    /// The dimension of the global tensor in which the parts lie one after the other.
    pub dim: usize,
    /// Distance from the start of one part to the start of the next one in `dim`, in elements, at least 1.
    pub offset_step: u64,
}

/// Returns the parts of `wanted` that the devices of a mesh hold, without those of replicas.
///
/// These are the intersections of `wanted` with the [`Placement::local_regions`] of each device that holds the
/// [first replica](Placement::is_first_replica) of its shard, without empty intersections. Each of them occurs once, in
/// one of the parts or of their repetitions. The order is unspecified. Shapes and offsets are in elements.
///
/// The time and the number of parts depend on the number of runs that devices hold, and not on the size of the mesh.
///
/// # Errors
///
/// - [`ErrorKind::MeshMismatch`] if there is not one placement per mesh dimension, or the mesh has no device, or 2^64
///   or more.
/// - [`ErrorKind::OutsideGlobal`] if `wanted` does not have the rank of the tensor.
/// - [`ErrorKind::NotABox`] if a device has more than 65,536 regions, or a dimension more than 65,536 pieces, or if
///   there would be more than 65,536 parts.
/// - Those of [`Placement::local_regions`] for ranks and placements.
///
/// # Examples
///
/// ```
/// use tssd_format::{Placement, Region, held_parts};
/// // Rows 2 to 6 of 10 rows on 4 devices, which hold 3, 3, 3 and 1 rows.
/// let wanted = Region::new(&[2], &[5])?;
/// let parts = held_parts(&[10], &[4], &[Placement::Shard { dim: 0 }], &wanted)?;
/// let mut held: Vec<_> = parts.iter().flat_map(|part| part.each()).collect();
/// held.sort();
/// let held: Vec<_> = held.iter().map(|(device, region)| format!("{device}: {region}")).collect();
/// assert_eq!(held, ["0: [2:3]", "1: [3:6]", "2: [6:7]"]);
/// # Ok::<(), tssd_format::Error>(())
/// ```
pub fn held_parts(
    global_shape: &[u64],
    mesh_shape: &[u64],
    placements: &[Placement],
    wanted: &Region,
) -> Result<Vec<HeldPart>> {
    check_layout(global_shape, mesh_shape, placements)?;
    device_count(mesh_shape)?;
    if wanted.rank() != global_shape.len() {
        let error = Error::new(ErrorKind::OutsideGlobal);
        return Err(error.with_region(wanted.offsets(), wanted.shape()));
    }
    let dims = group_devices(global_shape, mesh_shape, placements)?;
    if global_shape.contains(&0) {
        return Ok(Vec::new());
    }
    let run_count = |group: &DeviceGroup| group.held.runs().len();
    check_box_count(dims.iter().map(|groups| groups.iter().map(run_count).max().unwrap_or(0)))?;
    let dims = dims.iter().enumerate();
    let parts = dims.map(|(dim, groups)| dim_parts(dim, groups, &wanted.range(dim)));
    cartesian_product(&parts.collect::<Result<Vec<_>>>()?)
}

/// Returns the shape of the local tensor of the device at `coordinates`, in elements.
///
/// This is the number of indices that the device holds in each dimension. It is computed without the regions.
///
/// # Errors
///
/// Those of [`Placement::local_regions`], without the limit of the number of boxes.
///
/// # Examples
///
/// ```
/// use tssd_format::{Placement, local_shape_of};
/// assert_eq!(local_shape_of(&[10, 8], &[4], &[3], &[Placement::Shard { dim: 0 }])?, [1, 8]);
/// # Ok::<(), tssd_format::Error>(())
/// ```
pub fn local_shape_of(
    global_shape: &[u64],
    mesh_shape: &[u64],
    coordinates: &[u64],
    placements: &[Placement],
) -> Result<Vec<u64>> {
    check_layout(global_shape, mesh_shape, placements)?;
    check_coordinates(mesh_shape, coordinates)?;
    let mut shape = global_shape.to_vec();
    for ((placement, &parts), &part) in placements.iter().zip(mesh_shape).zip(coordinates) {
        if let Some((dim, split_factor)) = placement.division(shape.len())? {
            shape[dim] = match Division::new(shape[dim], split_factor, parts)? {
                Some(division) => division.kept_len(part),
                None if part > 0 => 0,
                None => shape[dim],
            };
        }
    }
    Ok(shape)
}

impl HeldPart {
    /// Returns each device that holds such a part, by its row-major index in the mesh, and its part.
    pub fn each(&self) -> impl Iterator<Item = (u64, Region)> + '_ {
        let counts = self.repeats.iter().map(|repeat| repeat.count);
        (0..counts.fold(1, u64::saturating_mul)).map(|index| self.nth(index))
    }

    /// Returns the device and the part of a repetition. The last repeat varies fastest.
    fn nth(&self, mut index: u64) -> (u64, Region) {
        let (mut device, mut offsets) = (self.device, self.region.offsets().to_vec());
        for repeat in self.repeats.iter().rev() {
            let number = index % repeat.count;
            index /= repeat.count;
            device += number * repeat.device_step;
            offsets[repeat.dim] += number * repeat.offset_step;
        }
        let region = Region::new(&offsets, self.region.shape());
        (device, region.expect("all repetitions of the part lie in the global tensor"))
    }
}

/// Maximum number of runs and pieces of all groups of a tensor that the computation visits.
///
/// Bounds time and memory. Each of three groups of devices can have the [`MAX_PIECES`] of a dimension.
const MAX_VISITS: u64 = 4 * MAX_PIECES;

/// Number of visits that a group counts for in addition: it takes about the time of so many runs.
const VISITS_PER_GROUP: u64 = 8;

/// Devices that hold the same number of indices of a tensor dimension, in runs of the same lengths.
struct DeviceGroup {
    /// The first device.
    device: u64,
    /// The loops over the other devices, outermost first.
    loops: Vec<DeviceLoop>,
    /// The indices that the first device holds.
    held: HeldIndices,
    /// For each run, and in it for each loop: the distance from the run to that of the next device.
    ///
    /// An inner loop moves a run only within the indices that the run had before the loop, so it takes less than one
    /// step of each outer loop.
    offset_steps: Vec<u64>,
}

#[derive(Clone, Copy)]
struct DeviceLoop {
    count: u64,
    device_step: u64,
}

/// A mesh dimension that divides a tensor dimension.
struct Divider {
    split_factor: u64,
    /// Number of devices.
    parts: u64,
    /// Distance between two devices in the row-major order of the mesh.
    device_step: u64,
}

/// Returns the groups of devices of each tensor dimension. Devices that hold no index belong to no group.
fn group_devices(
    global_shape: &[u64],
    mesh_shape: &[u64],
    placements: &[Placement],
) -> Result<Vec<Vec<DeviceGroup>>> {
    let mut dims: Vec<_> = global_shape.iter().map(|&size| vec![DeviceGroup::all(size)]).collect();
    let mut visits_left = MAX_VISITS;
    let steps = row_major_strides(mesh_shape);
    for ((placement, &parts), &device_step) in placements.iter().zip(mesh_shape).zip(&steps) {
        if let Some((dim, split_factor)) = placement.division(dims.len())? {
            let divider = Divider { split_factor, parts, device_step };
            let mut divided = Vec::new();
            for group in std::mem::take(&mut dims[dim]) {
                group.divide(&divider, &mut divided, &mut visits_left)?;
            }
            dims[dim] = divided;
        }
    }
    Ok(dims)
}

impl DeviceGroup {
    /// Creates the group of one device that holds a whole dimension.
    fn all(size: u64) -> Self {
        let held = HeldIndices::all(size);
        Self { device: 0, loops: Vec::new(), held, offset_steps: Vec::new() }
    }

    /// Appends to `divided` the groups into which a mesh dimension divides this one.
    fn divide(
        self,
        divider: &Divider,
        divided: &mut Vec<Self>,
        visits_left: &mut u64,
    ) -> Result<()> {
        let (len, split_factor) = (self.held.len(), divider.split_factor);
        let Some(division) = Division::new(len, split_factor, divider.parts)? else {
            divided.push(self);
            return Ok(());
        };
        for range in similar_coordinates(&division, &self.held).windows(2) {
            take_visits(VISITS_PER_GROUP + division.piece_count, visits_left)?;
            let group = self.at_coordinates(&division, divider.device_step, range[0]..range[1]);
            let run_count = u64::try_from(group.held.runs().len()).unwrap_or(u64::MAX);
            take_visits(run_count.saturating_sub(division.piece_count), visits_left)?;
            divided.push(group);
        }
        Ok(())
    }

    /// Returns the devices of this group that have one of `coordinates` in a mesh dimension that divides the group.
    fn at_coordinates(
        &self,
        division: &Division,
        device_step: u64,
        coordinates: Range<u64>,
    ) -> Self {
        let count = coordinates.end - coordinates.start;
        let mut held = HeldIndices::none(self.held.size());
        let mut offset_steps = Vec::new();
        for piece in 0..division.piece_count {
            let step = (count > 1).then(|| division.chunk_len(piece));
            for (run, indices) in self.held.slice(division.chunk(piece, coordinates.start)) {
                held.push(indices);
                offset_steps.extend_from_slice(self.steps_of(run));
                offset_steps.extend(step);
            }
        }
        let mut loops = Vec::with_capacity(self.loops.len() + 1);
        loops.extend_from_slice(&self.loops);
        loops.extend((count > 1).then_some(DeviceLoop { count, device_step }));
        let device = self.device + coordinates.start * device_step;
        Self { device, loops, held, offset_steps }
    }

    /// Returns the distances of a run, one per loop.
    fn steps_of(&self, run: usize) -> &[u64] {
        &self.offset_steps[run * self.loops.len()..][..self.loops.len()]
    }

    /// Returns the range from the first index to the last index that a run has on any device.
    fn extent(&self, index: usize, run: &HeldRun) -> Range<u64> {
        let loops = self.loops.iter().zip(self.steps_of(index));
        let distance: u64 = loops.map(|(each, step)| (each.count - 1) * step).sum();
        run.start..run.start + distance + run.len
    }

    /// Returns a run of all devices as a part of the tensor dimension `dim`.
    fn part_of(&self, dim: usize, index: usize, run: &HeldRun) -> DimPart {
        let repeat = |(&DeviceLoop { count, device_step }, &offset_step)| PartRepeat {
            count,
            device_step,
            dim,
            offset_step,
        };
        DimPart {
            local_len: self.held.len(),
            local_offset: run.position,
            len: run.len,
            repeats: self.loops.iter().zip(self.steps_of(index)).map(repeat).collect(),
            device: self.device,
            start: run.start,
        }
    }
}

/// Returns the bounds of ranges of coordinates whose devices form one group: `bounds[i]..bounds[i + 1]`.
///
/// In such a range, each piece has chunks of the same length, and its chunks lie in the same run. A chunk that lies in
/// several runs has a range of its own. Coordinates that hold nothing are in no range.
fn similar_coordinates(division: &Division, held: &HeldIndices) -> Vec<u64> {
    let mut bounds = vec![0];
    let mut push_around = |offset: u64, chunk_len: u64| {
        bounds.extend([offset / chunk_len, offset.div_ceil(chunk_len)]);
    };
    for piece in [0, division.piece_count - 1] {
        let Range { start, end } = division.piece(piece);
        push_around(end - start, division.chunk_len(piece));
    }
    for run in held.runs().iter().skip(1) {
        let piece = division.piece_at(run.position);
        push_around(run.position - division.piece(piece).start, division.chunk_len(piece));
    }
    bounds.sort_unstable();
    bounds.dedup();
    bounds
}

fn take_visits(count: u64, visits_left: &mut u64) -> Result<()> {
    let too_many = || not_a_box(format!("more than {MAX_VISITS} runs on different devices"));
    *visits_left = visits_left.checked_sub(count).ok_or_else(too_many)?;
    Ok(())
}

/// A part of one tensor dimension.
///
/// The fields have the order by which parts are joined: those of a series differ only in the last two.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct DimPart {
    local_len: u64,
    local_offset: u64,
    len: u64,
    /// Repetitions, by descending device step.
    repeats: Vec<PartRepeat>,
    device: u64,
    start: u64,
}

/// Returns the parts of `wanted` that the groups of devices hold in a tensor dimension.
fn dim_parts(dim: usize, groups: &[DeviceGroup], wanted: &Range<u64>) -> Result<Vec<DimPart>> {
    let mut parts = Vec::new();
    for group in groups {
        for (index, run) in group.held.runs().iter().enumerate() {
            let extent = group.extent(index, run);
            if extent.start < wanted.end && wanted.start < extent.end {
                group.part_of(dim, index, run).push_overlap(wanted, &mut parts);
                check_part_count(Some(parts.len()))?;
            }
        }
    }
    Ok(join_parts(dim, parts))
}

impl DimPart {
    /// Appends to `parts` the indices of this part and its repetitions that are in `wanted`.
    fn push_overlap(self, wanted: &Range<u64>, parts: &mut Vec<Self>) {
        let Some(&PartRepeat { count, offset_step, .. }) = self.repeats.first() else {
            parts.extend(self.overlap(wanted));
            return;
        };
        let span = self.span_of_inner_repeats();
        let starts_before =
            |bound: u64| bound.saturating_sub(self.start).div_ceil(offset_step).min(count);
        let ends_by = |bound| if bound < span { 0 } else { starts_before(bound - span + 1) };
        let overlapping = ends_by(wanted.start)..starts_before(wanted.end);
        let whole = starts_before(wanted.start)..ends_by(wanted.end);
        // A repetition takes at most one step, so there is at most one partial repetition at each end of `wanted`.
        let first_partial = overlapping.start..whole.start.min(overlapping.end);
        let last_partial = whole.end.max(whole.start)..overlapping.end;
        for number in first_partial.chain(last_partial) {
            self.repetitions(number..number + 1).push_overlap(wanted, parts);
        }
        if whole.start < whole.end {
            parts.push(self.repetitions(whole));
        }
    }

    /// Returns the indices of this part, which has no repeats, that are in `wanted`; `None` if there are none.
    fn overlap(self, wanted: &Range<u64>) -> Option<Self> {
        let start = self.start.max(wanted.start);
        let end = (self.start + self.len).min(wanted.end);
        let local_offset = self.local_offset + (start - self.start);
        (start < end).then(|| Self { start, len: end - start, local_offset, ..self })
    }

    /// Returns the distance from the start of a repetition of the outermost repeat to its end.
    fn span_of_inner_repeats(&self) -> u64 {
        let inner = self.repeats.iter().skip(1);
        inner.map(|repeat| (repeat.count - 1) * repeat.offset_step).sum::<u64>() + self.len
    }

    /// Returns the part with some of the repetitions of its outermost repeat. `numbers` is not empty.
    fn repetitions(&self, numbers: Range<u64>) -> Self {
        let mut part = self.clone();
        part.device += numbers.start * part.repeats[0].device_step;
        part.start += numbers.start * part.repeats[0].offset_step;
        part.repeats[0].count = numbers.end - numbers.start;
        if part.repeats[0].count == 1 {
            part.repeats.remove(0);
        }
        part
    }

    /// Returns whether both parts have the same local tensor, the same place in it, and the same repeats.
    fn is_similar(&self, other: &Self) -> bool {
        (self.local_len, self.local_offset, self.len, &self.repeats)
            == (other.local_len, other.local_offset, other.len, &other.repeats)
    }
}

/// Joins similar parts at regular distances, as the repetitions of one part.
///
/// For example the devices of a mesh dimension that divides what a `_StridedShard` leaves hold one run each.
fn join_parts(dim: usize, mut parts: Vec<DimPart>) -> Vec<DimPart> {
    loop {
        let count = parts.len();
        if count < 2 {
            return parts;
        }
        parts.sort();
        let mut series: Vec<Series> = Vec::new();
        for part in parts {
            if !series.last_mut().is_some_and(|last| last.extend(&part)) {
                let repeat = PartRepeat { count: 1, device_step: 0, dim, offset_step: 0 };
                series.push(Series { first: part, repeat });
            }
        }
        parts = series.into_iter().map(Series::into_part).collect();
        if parts.len() == count {
            return parts;
        }
    }
}

/// Similar parts at regular distances.
struct Series {
    first: DimPart,
    repeat: PartRepeat,
}

impl Series {
    /// Appends `part` and returns true, if it continues the series.
    fn extend(&mut self, part: &DimPart) -> bool {
        let device_distance = part.device.checked_sub(self.first.device);
        let offset_distance = part.start.checked_sub(self.first.start);
        let (Some(device_distance), Some(offset_distance)) = (device_distance, offset_distance)
        else {
            return false;
        };
        let repeat = &mut self.repeat;
        if repeat.count == 1 {
            (repeat.device_step, repeat.offset_step) = (device_distance, offset_distance);
        }
        let next =
            [repeat.device_step, repeat.offset_step].map(|step| step.checked_mul(repeat.count));
        let continues =
            self.first.is_similar(part) && next == [Some(device_distance), Some(offset_distance)];
        repeat.count += u64::from(continues);
        continues
    }

    fn into_part(self) -> DimPart {
        let Self { first: mut part, repeat } = self;
        if repeat.count > 1 {
            let inner = |outer: &PartRepeat| outer.device_step > repeat.device_step;
            part.repeats.insert(part.repeats.partition_point(inner), repeat);
        }
        part
    }
}

/// Returns the products of the parts of all dimensions.
fn cartesian_product(dims: &[Vec<DimPart>]) -> Result<Vec<HeldPart>> {
    if dims.iter().any(Vec::is_empty) {
        return Ok(Vec::new());
    }
    let count = dims.iter().try_fold(1_usize, |count, parts| count.checked_mul(parts.len()));
    (0..check_part_count(count)?).map(|index| combine(dims, index)).collect()
}

/// Returns the product with the row-major `index`: of one part of each dimension.
fn combine(dims: &[Vec<DimPart>], mut index: usize) -> Result<HeldPart> {
    let mut chosen = Vec::with_capacity(dims.len());
    for parts in dims.iter().rev() {
        chosen.push(&parts[index % parts.len()]);
        index /= parts.len();
    }
    chosen.reverse();
    let per_dim =
        |get: fn(&DimPart) -> u64| chosen.iter().map(|part| get(part)).collect::<Vec<_>>();
    let mut repeats = Vec::with_capacity(chosen.iter().map(|part| part.repeats.len()).sum());
    repeats.extend(chosen.iter().flat_map(|part| &part.repeats).copied());
    repeats.sort_by_key(|repeat| Reverse(repeat.device_step));
    Ok(HeldPart {
        device: chosen.iter().map(|part| part.device).sum(),
        local_shape: per_dim(|part| part.local_len).into(),
        local_offsets: per_dim(|part| part.local_offset).into(),
        region: Region::new(&per_dim(|part| part.start), &per_dim(|part| part.len))?,
        repeats,
    })
}

fn check_part_count(count: Option<usize>) -> Result<usize> {
    let limit = usize::try_from(MAX_PIECES).unwrap_or(usize::MAX);
    let too_many = || not_a_box(format!("more than {MAX_PIECES} parts"));
    count.filter(|&count| count <= limit).ok_or_else(too_many)
}

#[cfg(test)]
mod tests;
