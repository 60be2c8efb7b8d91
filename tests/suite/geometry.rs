//! Regions, meshes and placements against naive oracles that list every single index.

#![allow(clippy::unwrap_used, reason = "the helpers of a test fail it by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use tssd_format::{DeviceMesh, ErrorKind, Placement, Region, ShardPlace, TensorSlice};

type Cell = Vec<u64>;

#[test]
fn a_region_displays_as_python_slices() {
    assert_eq!(region(&[0, 8], &[4, 8]).to_string(), "[0:4, 8:16]");
    assert_eq!(Region::whole(&[]).to_string(), "[]");
}

#[test]
fn a_region_of_rank_0_has_one_element() {
    let scalar = Region::whole(&[]);
    assert_eq!(scalar.numel(), 1);
    assert!(!scalar.is_empty());
    assert_eq!(scalar.intersect(&scalar), Some(scalar.clone()));
    assert_eq!(scalar.subtract(&scalar), []);
    assert!(scalar.prove_tiled([&scalar, &scalar]).is_ok());
    assert_eq!(prove_error(&scalar, &[]), ErrorKind::Uncovered);
}

#[test]
fn a_region_refuses_what_does_not_fit() {
    let kind = |offsets: &[u64], shape: &[u64]| Region::new(offsets, shape).unwrap_err().kind();
    assert_eq!(kind(&[0], &[1, 2]), ErrorKind::SliceMismatch);
    assert_eq!(kind(&[0; 65], &[1; 65]), ErrorKind::RankTooLarge);
    assert_eq!(kind(&[1], &[u64::MAX]), ErrorKind::ShapeOverflow);
    assert!(Region::new(&[0; 64], &[u64::MAX; 64]).is_ok());
}

#[test]
fn a_box_outside_is_refused() {
    let whole = Region::whole(&[4]);
    assert_eq!(prove_error(&whole, &[region(&[2], &[3])]), ErrorKind::OutsideGlobal);
    assert_eq!(prove_error(&whole, &[region(&[0, 0], &[4, 1])]), ErrorKind::OutsideGlobal);
    assert!(whole.prove_tiled(&[region(&[0], &[4]), region(&[9], &[0])]).is_ok());
}

#[test]
fn thousands_of_boxes_are_proved_and_their_hole_is_named() {
    let (rows, columns) = (5000, 64);
    let fsdp = grid(&[rows * 3, columns], &[rows, 1]);
    let experts = grid(&[8, columns, rows], &[8, 1, 625]);
    let tensor_parallel = grid(&[columns, rows * 3], &[1, rows]);
    let square = grid(&[700, 700], &[70, 70]);
    for (whole, mut boxes) in [fsdp, experts, tensor_parallel, square] {
        whole.prove_tiled(boxes.iter().chain(&boxes)).unwrap();
        let missing = boxes.remove(boxes.len() / 3);
        let error = whole.prove_tiled(&boxes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Uncovered);
        assert_eq!(error.region(), Some(&missing));
    }
}

#[test]
fn straight_cuts_prove_what_has_no_countable_volume() {
    let half = u64::MAX / 2;
    let left = region(&[0, 0, 0], &[half, u64::MAX, u64::MAX]);
    let right = region(&[half, 0, 0], &[half + 1, u64::MAX, u64::MAX]);
    let whole = Region::whole(&[u64::MAX; 3]);
    whole.prove_tiled([&left, &right]).unwrap();
    let wheel = pinwheel(&[u64::MAX; 3], [1, 1], [2, 2]);
    assert_eq!(prove_error(&whole, &wheel), ErrorKind::ShapeOverflow);
}

/// Each cut splits off one box, far more often than cuts may lie around each other.
#[test]
fn a_spiral_is_proved() {
    let (mut boxes, mut rest) = (Vec::new(), Region::whole(&[600, 600]));
    for turn in 0..1000 {
        let (dim, at_end) = (turn % 2, turn % 4 < 2);
        let (mut offsets, mut shape) = (rest.offsets().to_vec(), rest.shape().to_vec());
        offsets[dim] += if at_end { shape[dim] - 1 } else { 0 };
        shape[dim] = 1;
        boxes.push(region(&offsets, &shape));
        rest = rest.subtract(&boxes[turn]).remove(0);
    }
    let whole = Region::whole(&[600, 600]);
    assert_eq!(whole.prove_tiled(&boxes).unwrap_err().region(), Some(&rest));
    boxes.push(rest);
    whole.prove_tiled(&boxes).unwrap();
}

#[test]
fn the_hole_in_the_middle_of_a_pinwheel_is_named() {
    let mut boxes = pinwheel(&[5, 5], [1, 2], [3, 4]);
    let whole = Region::whole(&[5, 5]);
    whole.prove_tiled(&boxes).unwrap();
    let middle = boxes.pop().unwrap();
    assert_eq!(whole.prove_tiled(&boxes).unwrap_err().region(), Some(&middle));
}

#[test]
fn a_mesh_knows_where_its_ranks_stand() {
    let mesh = DeviceMesh::new(&[2, 3], &[10, 11, 12, 20, 21, 22]).unwrap();
    assert_eq!(mesh.coordinates_of(21), Some(vec![1, 1]));
    assert_eq!(mesh.coordinates_of(0), None);
    assert_eq!(mesh.rank_at(&[1, 1]), Some(21));
    assert_eq!(mesh.rank_at(&[1, 3]), None);
    assert_eq!(mesh.rank_at(&[1]), None);
    let named = mesh.clone().with_dim_names(vec!["dp".into(), "tp".into()]).unwrap();
    assert_eq!(named.dim_names().map(<[_]>::len), Some(2));
    assert_eq!(DeviceMesh::from_shape(&[]).unwrap().rank_at(&[]), Some(0));
    for refused in [
        DeviceMesh::new(&[2], &[0]),
        DeviceMesh::new(&[2], &[7, 7]),
        DeviceMesh::new(&[0], &[]),
        DeviceMesh::from_shape(&[1 << 40]),
        mesh.clone().with_dim_names(vec!["dp".into()]),
        mesh.with_dim_names(vec!["dp".into(), "dp".into()]),
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::MeshMismatch);
    }
}

#[test]
fn placements_display_as_torch_spells_them() {
    let spelled = |placement: Placement| placement.to_string();
    assert_eq!(spelled(Placement::Replicate), "Replicate()");
    assert_eq!(spelled(Placement::Shard { dim: 0 }), "Shard(dim=0)");
    assert_eq!(spelled(strided(0, 2)), "_StridedShard(dim=0, sf=2)");
    assert_eq!(spelled(Placement::Partial { reduce_op: "sum".into() }), "Partial(sum)");
}

#[test]
fn placements_that_do_not_fit_are_refused() {
    let kind = |coordinates: &[u64], placements: &[Placement]| {
        let mesh_shape = vec![2; placements.len().min(2)];
        let regions = Placement::local_regions(&[8], &mesh_shape, coordinates, placements);
        regions.unwrap_err().kind()
    };
    let shard = Placement::Shard { dim: 0 };
    let partial = Placement::Partial { reduce_op: "sum".into() };
    assert_eq!(kind(&[0], &[partial]), ErrorKind::PartialPlacement);
    assert_eq!(kind(&[0], &[Placement::Shard { dim: 1 }]), ErrorKind::UnknownPlacement);
    assert_eq!(kind(&[0], &[strided(0, 0)]), ErrorKind::UnknownPlacement);
    assert_eq!(kind(&[2], std::slice::from_ref(&shard)), ErrorKind::MeshMismatch);
    assert_eq!(kind(&[], std::slice::from_ref(&shard)), ErrorKind::MeshMismatch);
    assert_eq!(kind(&[0, 0], &[shard.clone(), shard.clone(), shard]), ErrorKind::MeshMismatch);
}

#[test]
fn a_strided_shard_alone_is_no_box() {
    let halves = [strided(0, 2)];
    let error = Placement::local_region(&[8, 4], &[2], &[1], &halves).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotABox);
    let mesh = DeviceMesh::from_shape(&[2]).unwrap();
    let slices = TensorSlice::from_placements(&[8, 4], &mesh, 1, &halves).unwrap();
    let regions: Vec<_> = slices.iter().map(TensorSlice::region).collect();
    assert_eq!(regions, [region(&[2, 0], &[2, 4]), region(&[6, 0], &[2, 4])]);
    assert_eq!(slices[0].coordinates(), Some(&[1][..]));
    assert_eq!(slices[0].mesh_shape(), [2]);
    // What makes it one box is the tensor parallel dimension that it was made for.
    let both = [strided(0, 2), Placement::Shard { dim: 0 }];
    let joined = Placement::local_region(&[8, 4], &[2, 2], &[1, 0], &both).unwrap();
    assert_eq!(joined, region(&[2, 0], &[2, 4]));
}

#[test]
fn a_split_factor_takes_no_memory() {
    let regions =
        |parts, factor| Placement::local_regions(&[1 << 40], &[parts], &[0], &[strided(0, factor)]);
    assert_eq!(regions(2, u64::MAX).unwrap(), [Region::whole(&[1 << 40])]);
    assert_eq!(regions(1, 1 << 30).unwrap(), [Region::whole(&[1 << 40])]);
    assert_eq!(regions(2, 1 << 30).unwrap_err().kind(), ErrorKind::NotABox);
    let grid = Placement::local_regions(
        &[1 << 40; 2],
        &[2; 2],
        &[0; 2],
        &[strided(0, 1000), strided(1, 1000)],
    );
    assert_eq!(grid.unwrap_err().kind(), ErrorKind::NotABox);
}

#[test]
fn a_mesh_larger_than_the_tensor_leaves_ranks_empty() {
    let last = |size: u64, parts: u64| {
        let shard = [Placement::Shard { dim: 0 }];
        Placement::local_region(&[size], &[parts], &[parts - 1], &shard).unwrap()
    };
    assert_eq!(last(3, 4), region(&[3], &[0]));
    assert_eq!(last(3, u64::MAX), region(&[3], &[0]));
    assert_eq!(last(u64::MAX, (1 << 63) + 1), region(&[u64::MAX], &[0]));
}

#[test]
fn the_first_replica_is_at_0_of_each_replicating_dimension() {
    let placements = [Placement::Replicate, Placement::Shard { dim: 0 }];
    assert!(Placement::is_first_replica(&[0, 3], &placements));
    assert!(!Placement::is_first_replica(&[1, 0], &placements));
}

#[test]
fn a_slice_lies_in_its_global_shape() {
    let kind = |offsets: &[u64], local: &[u64], global: &[u64]| {
        TensorSlice::new(offsets, local, global).unwrap_err().kind()
    };
    assert_eq!(kind(&[2], &[3], &[4]), ErrorKind::OutsideGlobal);
    assert_eq!(kind(&[2], &[3, 1], &[4]), ErrorKind::SliceMismatch);
    assert_eq!(kind(&[2], &[1], &[4, 4]), ErrorKind::SliceMismatch);
    assert_eq!(kind(&[2], &[u64::MAX], &[4]), ErrorKind::ShapeOverflow);
    let slice = TensorSlice::new(&[4], &[0], &[4]).unwrap();
    assert_eq!(slice.clone().on_mesh(&[2], None).unwrap().coordinates(), None);
    assert_eq!(slice.on_mesh(&[2], Some(&[2])).unwrap_err().kind(), ErrorKind::MeshMismatch);
}

#[test]
fn a_part_of_a_shard_lies_in_it_and_stands_where_it_stands() {
    let slice = TensorSlice::new(&[4, 1], &[4, 3], &[8, 5]).unwrap();
    let slice = slice.on_mesh(&[2, 2], Some(&[1, 0])).unwrap();
    let mesh = DeviceMesh::from_shape(&[2, 2]).unwrap();
    let placements = [Placement::Shard { dim: 0 }, Placement::Replicate];
    let whole = ShardPlace::new(slice).on_mesh(mesh.clone()).unwrap().placed(placements).unwrap();
    let part = whole.part(&region(&[1, 2], &[3, 1])).unwrap();
    assert_eq!(part.slice().region(), region(&[5, 3], &[3, 1]));
    assert_eq!(part.slice().global_shape(), [8, 5]);
    assert_eq!(part.slice().coordinates(), Some(&[1, 0][..]));
    assert_eq!((part.mesh(), part.placements()), (Some(&mesh), whole.placements()));
    assert_eq!(whole.part(&region(&[0, 0], &[4, 3])).unwrap(), whole);
    let kind =
        |offsets: &[u64], shape: &[u64]| whole.part(&region(offsets, shape)).unwrap_err().kind();
    assert_eq!(kind(&[2, 0], &[3, 3]), ErrorKind::OutsideGlobal);
    assert_eq!(kind(&[0, u64::MAX - 1], &[1, 1]), ErrorKind::OutsideGlobal);
    assert_eq!(kind(&[0], &[4]), ErrorKind::SliceMismatch);
    assert_eq!(whole.part(&region(&[0, 0], &[0, 0])).unwrap().slice().offsets(), [4, 1]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn regions_are_index_sets(
        (a, b) in (0..4_usize).prop_flat_map(|rank| (boxes(rank), boxes(rank))),
    ) {
        let (in_a, in_b) = (cells(&a), cells(&b));
        prop_assert_eq!(a.numel(), in_a.len() as u64);
        prop_assert_eq!(a.is_empty(), in_a.is_empty());
        let shared: BTreeSet<_> = in_a.intersection(&in_b).cloned().collect();
        prop_assert_eq!(a.intersect(&b).map(|both| cells(&both)).unwrap_or_default(), shared);
        if !b.is_empty() {
            prop_assert_eq!(a.contains(&b), in_a.is_superset(&in_b));
        }
        let parts = a.subtract(&b);
        let rest: BTreeSet<_> = in_a.difference(&in_b).cloned().collect();
        prop_assert_eq!(parts.iter().map(Region::numel).sum::<u64>(), rest.len() as u64);
        prop_assert_eq!(parts.iter().flat_map(cells).collect::<BTreeSet<_>>(), rest);
        prop_assert!(parts.iter().all(|part| !part.is_empty()));
        if a.contains(&b) {
            let moved = |cell: Cell| cell.iter().zip(a.offsets()).map(|(at, by)| at - by).collect();
            let inner: BTreeSet<Cell> = in_b.into_iter().map(moved).collect();
            prop_assert_eq!(cells(&b.relative_to(&a)), inner);
        }
    }

    #[test]
    fn a_random_set_of_boxes_is_judged_exactly(
        (whole, parts) in (0..4_usize).prop_flat_map(|rank| (boxes(rank), vec(boxes(rank), 0..6))),
    ) {
        let parts: Vec<_> = parts.iter().filter_map(|part| part.intersect(&whole)).collect();
        judge(&whole, &parts)?;
    }

    #[test]
    fn a_tiling_is_accepted_and_a_spoiled_one_is_judged_exactly(
        (whole, parts, extra) in tilings(),
        spoiled in any::<prop::sample::Index>(),
    ) {
        prop_assert!(whole.prove_tiled(&parts).is_ok());
        prop_assert!(whole.prove_tiled(parts.iter().chain(&parts)).is_ok());
        let mut spoiled_parts = parts.clone();
        spoiled_parts.remove(spoiled.index(parts.len()));
        judge(&whole, &spoiled_parts)?;
        spoiled_parts.extend(extra.intersect(&whole));
        judge(&whole, &spoiled_parts)?;
    }

    #[test]
    fn local_regions_are_what_torch_splits_off((global, mesh, placements) in layouts()) {
        let mut holders: BTreeMap<Cell, usize> = BTreeMap::new();
        let mut replicas: usize = 1;
        for (&size, placement) in mesh.shape().iter().zip(&placements) {
            replicas *= if *placement == Placement::Replicate { int(size) } else { 1 };
        }
        let mut first_replicas = Vec::new();
        for &rank in mesh.ranks() {
            let at = mesh.coordinates_of(rank).unwrap();
            prop_assert_eq!(mesh.rank_at(&at), Some(rank));
            let regions =
                Placement::local_regions(&global, mesh.shape(), &at, &placements).unwrap();
            let expected = split_like_torch(&global, mesh.shape(), &at, &placements);
            prop_assert_eq!(stored_order(&regions), product(&expected));
            let sizes: Vec<u64> = expected.iter().map(|dim| dim.len() as u64).collect();
            if let [only] = &regions[..] {
                prop_assert_eq!(only.shape(), &sizes[..]);
            }
            for (dim, (&size, &all)) in sizes.iter().zip(&global).enumerate() {
                if size == 0 {
                    prop_assert_eq!(regions[0].offsets()[dim], all);
                }
            }
            for cell in regions.iter().flat_map(cells) {
                *holders.entry(cell).or_default() += 1;
            }
            if Placement::is_first_replica(&at, &placements) {
                first_replicas.extend(regions);
            }
        }
        prop_assert!(holders.values().all(|&count| count == replicas));
        prop_assert!(Region::whole(&global).prove_tiled(&first_replicas).is_ok());
    }

    #[test]
    fn nothing_panics(
        numbers in vec(prop_oneof![0..4_u64, any::<u64>(), u64::MAX - 2..=u64::MAX], 12),
        rank in 0..4_usize,
        dim in 0..4_u32,
    ) {
        let slice = |index: usize| &numbers[index * 3..][..rank.min(3)];
        let region = |index: usize| Region::new(slice(index), slice(index + 1)).ok();
        let regions: Vec<_> = (0..3).filter_map(region).collect();
        for (whole, other) in regions.iter().zip(regions.iter().rev()) {
            let parts = whole.subtract(other);
            drop(whole.prove_tiled(parts.iter().chain(whole.intersect(other).as_ref())));
            drop(Region::whole(slice(0)).prove_tiled(&regions));
            let _ = (whole.numel(), whole.contains(other), whole.to_string());
        }
        let placements = [strided(dim, numbers[0]), Placement::Shard { dim }, strided(dim, 2)];
        let placements = &placements[..rank.min(3)];
        drop(Placement::local_regions(slice(0), slice(1), slice(2), placements));
        drop(DeviceMesh::new(slice(0), &[0]));
        let slice = TensorSlice::new(slice(0), slice(1), slice(2));
        drop(slice.map(|part| part.on_mesh(&numbers, Some(&numbers[1..]))));
    }
}

/// Compares the verdict with how many distinct boxes have each cell.
fn judge(whole: &Region, parts: &[Region]) -> Result<(), TestCaseError> {
    let distinct: BTreeSet<_> = parts.iter().collect();
    let mut counts: BTreeMap<Cell, usize> =
        cells(whole).into_iter().map(|cell| (cell, 0)).collect();
    for cell in distinct.into_iter().flat_map(cells) {
        *counts.get_mut(&cell).unwrap() += 1;
    }
    let Err(error) = whole.prove_tiled(parts) else {
        prop_assert!(counts.values().all(|&count| count == 1));
        return Ok(());
    };
    let witness = error.region().unwrap();
    let uncovered = error.kind() == ErrorKind::Uncovered;
    prop_assert!(uncovered || error.kind() == ErrorKind::Overlap);
    prop_assert!(!witness.is_empty());
    let right = |count: usize| if uncovered { count == 0 } else { count > 1 };
    prop_assert!(cells(witness).iter().all(|cell| right(counts[cell])));
    Ok(())
}

/// The indices per dimension, following torch literally: `torch.chunk`, and for `_StridedShard`
/// chunks of chunks.
fn split_like_torch(
    global: &[u64],
    mesh_shape: &[u64],
    at: &[u64],
    placements: &[Placement],
) -> Vec<Vec<u64>> {
    let mut held: Vec<Vec<u64>> = global.iter().map(|&size| (0..size).collect()).collect();
    for ((placement, &parts), &part) in placements.iter().zip(mesh_shape).zip(at) {
        let (dim, factor) = match placement {
            Placement::Shard { dim } => (int((*dim).into()), 1),
            Placement::StridedShard { dim, split_factor } => (int((*dim).into()), *split_factor),
            _ => continue,
        };
        let pieces = torch_chunk(&held[dim], factor);
        held[dim] = pieces
            .iter()
            .flat_map(|piece| torch_chunk(piece, parts).swap_remove(int(part)))
            .collect();
    }
    held
}

fn torch_chunk(values: &[u64], count: u64) -> Vec<Vec<u64>> {
    let size = values.len().div_ceil(int(count)).max(1);
    let mut chunks: Vec<_> = values.chunks(size).map(<[u64]>::to_vec).collect();
    chunks.resize(int(count), Vec::new());
    chunks
}

/// The cells in the order in which a local tensor made of `regions` stores them.
fn stored_order(regions: &[Region]) -> Vec<Cell> {
    let rank = regions[0].rank();
    let dims: Vec<Vec<u64>> = (0..rank)
        .map(|dim| {
            let mut runs: Vec<_> = regions.iter().map(|part| range(part, dim)).collect();
            // The regions are a product in row-major order: the runs of a dimension repeat.
            let mut seen = BTreeSet::new();
            runs.retain(|run| seen.insert((run.start, run.end)));
            assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
            runs.into_iter().flatten().collect()
        })
        .collect();
    let product_of_runs: Vec<_> = regions.iter().map(|part| part.offsets().to_vec()).collect();
    assert!(product_of_runs.is_sorted());
    product(&dims)
}

/// All combinations of one value per dimension, the last running fastest.
fn product(dims: &[Vec<u64>]) -> Vec<Cell> {
    dims.iter().fold(vec![vec![]], |cells, dim| {
        let extend = |cell: Cell| dim.iter().map(move |&at| [&cell[..], &[at]].concat());
        cells.into_iter().flat_map(extend).collect()
    })
}

fn cells(region: &Region) -> BTreeSet<Cell> {
    let dims: Vec<Vec<u64>> = (0..region.rank()).map(|dim| range(region, dim).collect()).collect();
    product(&dims).into_iter().collect()
}

fn range(region: &Region, dim: usize) -> std::ops::Range<u64> {
    region.offsets()[dim]..region.offsets()[dim] + region.shape()[dim]
}

fn region(offsets: &[u64], shape: &[u64]) -> Region {
    Region::new(offsets, shape).unwrap()
}

fn strided(dim: u32, split_factor: u64) -> Placement {
    Placement::StridedShard { dim, split_factor }
}

fn int(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

fn prove_error(whole: &Region, parts: &[Region]) -> ErrorKind {
    whole.prove_tiled(parts).unwrap_err().kind()
}

/// `shape` cut into boxes of the shape `step`, which divides it.
fn grid(shape: &[u64], step: &[u64]) -> (Region, Vec<Region>) {
    let starts = |(&size, &step): (&u64, &u64)| (0..size).step_by(int(step)).collect();
    let starts: Vec<Vec<u64>> = shape.iter().zip(step).map(starts).collect();
    let boxes = product(&starts).iter().map(|offsets| region(offsets, step)).collect();
    (Region::whole(shape), boxes)
}

/// Four boxes around a fifth, the last, which no straight cut separates.
fn pinwheel(shape: &[u64], low: [u64; 2], high: [u64; 2]) -> Vec<Region> {
    let part = |[top, bottom]: [u64; 2], [left, right]: [u64; 2]| {
        let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
        (offsets[0], offsets[1]) = (top, left);
        (sizes[0], sizes[1]) = (bottom - top, right - left);
        region(&offsets, &sizes)
    };
    vec![
        part([0, high[0]], [0, low[1]]),
        part([high[0], shape[0]], [0, high[1]]),
        part([low[0], shape[0]], [high[1], shape[1]]),
        part([0, low[0]], [low[1], shape[1]]),
        part([low[0], high[0]], [low[1], high[1]]),
    ]
}

fn boxes(rank: usize) -> impl Strategy<Value = Region> {
    (vec(0..5_u64, rank), vec(0..6_u64, rank)).prop_map(|(offsets, shape)| region(&offsets, &shape))
}

/// A region, boxes that tile it, and one more box: random cuts of the whole or of a pinwheel.
fn tilings() -> impl Strategy<Value = (Region, Vec<Region>, Region)> {
    let cuts = vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1..6_u64), 0..12);
    let shapes = (1..4_usize).prop_flat_map(|rank| (vec(3..8_u64, rank), boxes(rank)));
    (shapes, cuts, any::<bool>()).prop_map(|((shape, extra), cuts, wheel)| {
        let whole = Region::whole(&shape);
        let mut parts = vec![whole.clone()];
        if wheel && shape.len() > 1 {
            parts = pinwheel(&shape, [1, 1], [shape[0] - 1, shape[1] - 1]);
        }
        for (part, dim, at) in cuts {
            let (part, dim) = (parts.swap_remove(part.index(parts.len())), dim.index(shape.len()));
            let mut shape = part.shape().to_vec();
            shape[dim] = at.min(shape[dim]);
            let first = region(part.offsets(), &shape);
            parts.extend(part.subtract(&first));
            parts.push(first);
        }
        (whole, parts, extra)
    })
}

/// A global shape, a mesh of up to three dimensions, and a placement for each of these.
fn layouts() -> impl Strategy<Value = (Vec<u64>, DeviceMesh, Vec<Placement>)> {
    (0..4_u32).prop_flat_map(|rank| {
        let placement = if rank == 0 {
            Just(Placement::Replicate).boxed()
        } else {
            prop_oneof![
                1 => Just(Placement::Replicate),
                3 => (0..rank).prop_map(|dim| Placement::Shard { dim }),
                3 => (0..rank, 1..6_u64).prop_map(|(dim, factor)| strided(dim, factor)),
            ]
            .boxed()
        };
        let sizes = prop_oneof![9 => 1..13_u64, 1 => Just(0)];
        let mesh = vec((1..4_u64, placement), 0..4);
        (vec(sizes, int(rank.into())), mesh).prop_map(|(global, dims)| {
            let (mesh_shape, placements): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
            (global, DeviceMesh::from_shape(&mesh_shape).unwrap(), placements)
        })
    })
}

#[test]
#[ignore = "writes cases for tests/torch/geometry.py"]
fn write_torch_cases() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let path = std::env::var_os("TSSD_TORCH_CASES").expect("TSSD_TORCH_CASES names the file");
    let mut cases = Vec::new();
    let one = [Placement::Replicate, Placement::Shard { dim: 0 }, strided(0, 1), strided(0, 2)];
    let one = [&one[..], &[strided(0, 3), strided(0, 5)]].concat();
    for size in 0..12 {
        for first in &one {
            for devices in 1..5 {
                let mesh = DeviceMesh::from_shape(&[devices]).unwrap();
                cases.extend(torch_cases(&[size], &mesh, std::slice::from_ref(first)));
            }
            for second in &one {
                for mesh_shape in [[2, 2], [2, 3], [3, 2]] {
                    let mesh = DeviceMesh::from_shape(&mesh_shape).unwrap();
                    cases.extend(torch_cases(&[size], &mesh, &[first.clone(), second.clone()]));
                }
            }
        }
    }
    let mut runner = TestRunner::deterministic();
    for _ in 0..600 {
        let (global, mesh, placements) = layouts().new_tree(&mut runner).unwrap().current();
        cases.extend(torch_cases(&global, &mesh, &placements));
    }
    std::fs::write(path, serde_json::to_vec(&cases).unwrap()).unwrap();
}

/// One case per rank of the mesh, with our answer.
fn torch_cases(global: &[u64], mesh: &DeviceMesh, placements: &[Placement]) -> Vec<Value> {
    let spelled: Vec<Value> = placements
        .iter()
        .map(|placement| match placement {
            Placement::Shard { dim } => json!(["S", dim]),
            Placement::StridedShard { dim, split_factor } => json!(["SS", dim, split_factor]),
            _ => json!(["R"]),
        })
        .collect();
    let case = |rank: &u32| {
        let at = mesh.coordinates_of(*rank).unwrap();
        let regions = Placement::local_regions(global, mesh.shape(), &at, placements).unwrap();
        let regions: Vec<_> = regions.iter().map(|part| (part.offsets(), part.shape())).collect();
        json!({
            "global_shape": global,
            "mesh_shape": mesh.shape(),
            "coordinates": at,
            "placements": spelled,
            "regions": regions,
        })
    };
    mesh.ranks().iter().map(case).collect()
}
