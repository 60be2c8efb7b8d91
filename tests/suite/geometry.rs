//! Regions, meshes and placements, compared with naive oracles that enumerate every index.

#![allow(clippy::unwrap_used, reason = "the helpers of a test fail it by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use tssd_format::{DeviceMesh, ErrorKind, Placement, Region, ShardSpec, TensorSlice};

type Cell = Vec<u64>;

/// The region that an error names.
fn error_region(error: &tssd_format::Error) -> Option<Region> {
    error.region().map(|(offsets, shape)| Region::new(offsets, shape).unwrap())
}

#[test]
fn region_displays_as_python_slices() {
    assert_eq!(region(&[0, 8], &[4, 8]).to_string(), "[0:4, 8:16]");
    assert_eq!(Region::whole(&[]).to_string(), "[]");
}

#[test]
fn region_of_rank_0_has_one_element() {
    let scalar = Region::whole(&[]);
    assert_eq!(scalar.numel(), 1);
    assert!(!scalar.is_empty());
    assert_eq!(scalar.intersect(&scalar), Some(scalar.clone()));
    assert_eq!(scalar.subtract(&scalar), []);
    assert!(scalar.verify_tiling([&scalar, &scalar]).is_ok());
    assert_eq!(tiling_error(&scalar, &[]), ErrorKind::Uncovered);
}

#[test]
fn region_rejects_mismatched_or_overflowing_shapes() {
    let kind = |offsets: &[u64], shape: &[u64]| Region::new(offsets, shape).unwrap_err().kind();
    assert_eq!(kind(&[0], &[1, 2]), ErrorKind::SliceMismatch);
    assert_eq!(kind(&[0; 65], &[1; 65]), ErrorKind::RankTooLarge);
    assert_eq!(kind(&[1], &[u64::MAX]), ErrorKind::ShapeOverflow);
    assert!(Region::new(&[0; 64], &[u64::MAX; 64]).is_ok());
}

#[test]
fn tiling_check_rejects_regions_outside_the_whole() {
    let whole = Region::whole(&[4]);
    assert_eq!(tiling_error(&whole, &[region(&[2], &[3])]), ErrorKind::OutsideGlobal);
    assert_eq!(tiling_error(&whole, &[region(&[0, 0], &[4, 1])]), ErrorKind::OutsideGlobal);
    assert!(whole.verify_tiling(&[region(&[0], &[4]), region(&[9], &[0])]).is_ok());
}

#[test]
fn tiling_check_verifies_thousands_of_regions_and_reports_gap() {
    let (rows, columns) = (5000, 64);
    let fsdp = grid(&[rows * 3, columns], &[rows, 1]);
    let experts = grid(&[8, columns, rows], &[8, 1, 625]);
    let tensor_parallel = grid(&[columns, rows * 3], &[1, rows]);
    let square = grid(&[700, 700], &[70, 70]);
    for (whole, mut regions) in [fsdp, experts, tensor_parallel, square] {
        whole.verify_tiling(regions.iter().chain(&regions)).unwrap();
        let missing = regions.remove(regions.len() / 3);
        let error = whole.verify_tiling(&regions).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Uncovered);
        assert_eq!(error_region(&error), Some(missing));
    }
}

#[test]
fn tiling_check_verifies_straight_cuts_of_volume_above_u64() {
    let half = u64::MAX / 2;
    let left = region(&[0, 0, 0], &[half, u64::MAX, u64::MAX]);
    let right = region(&[half, 0, 0], &[half + 1, u64::MAX, u64::MAX]);
    let whole = Region::whole(&[u64::MAX; 3]);
    whole.verify_tiling([&left, &right]).unwrap();
    let pinwheel = pinwheel(&[u64::MAX; 3], [1, 1], [2, 2]);
    assert_eq!(tiling_error(&whole, &pinwheel), ErrorKind::ShapeOverflow);
}

/// Each cut splits off one region. There are far more cuts than the tiling check nests.
#[test]
fn tiling_check_verifies_spiral() {
    let (mut regions, mut rest) = (Vec::new(), Region::whole(&[600, 600]));
    for turn in 0..1000 {
        let (dim, at_end) = (turn % 2, turn % 4 < 2);
        let (mut offsets, mut shape) = (rest.offsets().to_vec(), rest.shape().to_vec());
        offsets[dim] += if at_end { shape[dim] - 1 } else { 0 };
        shape[dim] = 1;
        regions.push(region(&offsets, &shape));
        rest = rest.subtract(&regions[turn]).remove(0);
    }
    let whole = Region::whole(&[600, 600]);
    assert_eq!(error_region(&whole.verify_tiling(&regions).unwrap_err()).as_ref(), Some(&rest));
    regions.push(rest);
    whole.verify_tiling(&regions).unwrap();
}

#[test]
fn tiling_check_reports_gap_in_middle_of_pinwheel() {
    let mut regions = pinwheel(&[5, 5], [1, 2], [3, 4]);
    let whole = Region::whole(&[5, 5]);
    whole.verify_tiling(&regions).unwrap();
    let middle = regions.pop().unwrap();
    assert_eq!(error_region(&whole.verify_tiling(&regions).unwrap_err()).as_ref(), Some(&middle));
}

#[test]
fn mesh_maps_ranks_to_coordinates() {
    let mesh = DeviceMesh::new(&[2, 3], &[10, 11, 12, 20, 21, 22]).unwrap();
    assert_eq!(mesh.coordinates_of(21), Some(vec![1, 1]));
    assert_eq!(mesh.coordinates_of(0), None);
    assert_eq!(mesh.rank_at(&[1, 1]), Some(21));
    assert_eq!(mesh.rank_at(&[1, 3]), None);
    assert_eq!(mesh.rank_at(&[1]), None);
    let named = mesh.clone().with_dim_names(vec!["dp".into(), "tp".into()]).unwrap();
    assert_eq!(named.dim_names().map(<[_]>::len), Some(2));
    assert_eq!(DeviceMesh::from_shape(&[]).unwrap().rank_at(&[]), Some(0));
    for invalid in [
        DeviceMesh::new(&[2], &[0]),
        DeviceMesh::new(&[2], &[7, 7]),
        DeviceMesh::new(&[0], &[]),
        DeviceMesh::from_shape(&[1 << 40]),
        mesh.clone().with_dim_names(vec!["dp".into()]),
        mesh.with_dim_names(vec!["dp".into(), "dp".into()]),
    ] {
        assert_eq!(invalid.unwrap_err().kind(), ErrorKind::MeshMismatch);
    }
}

#[test]
fn placements_display_like_torch() {
    let display = |placement: Placement| placement.to_string();
    assert_eq!(display(Placement::Replicate), "Replicate()");
    assert_eq!(display(Placement::Shard { dim: 0 }), "Shard(dim=0)");
    assert_eq!(display(strided(0, 2)), "_StridedShard(dim=0, sf=2)");
    assert_eq!(display(Placement::Partial { reduce_op: "sum".into() }), "Partial(sum)");
}

#[test]
fn invalid_placements_are_refused() {
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
fn strided_shard_alone_is_not_one_region() {
    let halves = [strided(0, 2)];
    let error = Placement::local_region(&[8, 4], &[2], &[1], &halves).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotABox);
    let mesh = DeviceMesh::from_shape(&[2]).unwrap();
    let slices = TensorSlice::from_placements(&[8, 4], &mesh, 1, &halves).unwrap();
    let regions: Vec<_> = slices.iter().map(TensorSlice::region).collect();
    assert_eq!(regions, [&region(&[2, 0], &[2, 4]), &region(&[6, 0], &[2, 4])]);
    assert_eq!(slices[0].coordinates(), Some(&[1][..]));
    assert_eq!(slices[0].mesh_shape(), [2]);
    // Together with the tensor parallel dimension that it belongs to, the local part is one region.
    let placements = [strided(0, 2), Placement::Shard { dim: 0 }];
    let joined = Placement::local_region(&[8, 4], &[2, 2], &[1, 0], &placements).unwrap();
    assert_eq!(joined, region(&[2, 0], &[2, 4]));
}

#[test]
fn huge_split_factor_allocates_no_memory() {
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
fn mesh_larger_than_tensor_leaves_ranks_empty() {
    let last = |size: u64, parts: u64| {
        let shard = [Placement::Shard { dim: 0 }];
        Placement::local_region(&[size], &[parts], &[parts - 1], &shard).unwrap()
    };
    assert_eq!(last(3, 4), region(&[3], &[0]));
    assert_eq!(last(3, u64::MAX), region(&[3], &[0]));
    assert_eq!(last(u64::MAX, (1 << 63) + 1), region(&[u64::MAX], &[0]));
}

#[test]
fn first_replica_has_coordinate_0_in_replicated_dimensions() {
    let placements = [Placement::Replicate, Placement::Shard { dim: 0 }];
    assert!(Placement::is_first_replica(&[0, 3], &placements));
    assert!(!Placement::is_first_replica(&[1, 0], &placements));
}

#[test]
fn slice_must_lie_within_its_global_shape() {
    let kind = |offsets: &[u64], local: &[u64], global: &[u64]| {
        TensorSlice::new(offsets, local, global).unwrap_err().kind()
    };
    assert_eq!(kind(&[2], &[3], &[4]), ErrorKind::OutsideGlobal);
    assert_eq!(kind(&[2], &[3, 1], &[4]), ErrorKind::SliceMismatch);
    assert_eq!(kind(&[2], &[1], &[4, 4]), ErrorKind::SliceMismatch);
    assert_eq!(kind(&[2], &[u64::MAX], &[4]), ErrorKind::ShapeOverflow);
    let slice = TensorSlice::new(&[4], &[0], &[4]).unwrap();
    assert_eq!(slice.clone().with_mesh(&[2], None).unwrap().coordinates(), None);
    assert_eq!(slice.with_mesh(&[2], Some(&[2])).unwrap_err().kind(), ErrorKind::MeshMismatch);
}

#[test]
fn part_of_shard_lies_within_it_and_keeps_its_mesh() {
    let slice = TensorSlice::new(&[4, 1], &[4, 3], &[8, 5]).unwrap();
    let slice = slice.with_mesh(&[2, 2], Some(&[1, 0])).unwrap();
    let mesh = DeviceMesh::from_shape(&[2, 2]).unwrap();
    let placements = [Placement::Shard { dim: 0 }, Placement::Replicate];
    let whole =
        ShardSpec::new(slice).with_mesh(mesh.clone()).unwrap().with_placements(placements).unwrap();
    let part = whole.subregion(&region(&[1, 2], &[3, 1])).unwrap();
    assert_eq!(*part.slice().region(), region(&[5, 3], &[3, 1]));
    assert_eq!(part.slice().global_shape(), [8, 5]);
    assert_eq!(part.slice().coordinates(), Some(&[1, 0][..]));
    assert_eq!((part.mesh(), part.placements()), (Some(&mesh), whole.placements()));
    assert_eq!(whole.subregion(&region(&[0, 0], &[4, 3])).unwrap(), whole);
    let kind = |offsets: &[u64], shape: &[u64]| {
        whole.subregion(&region(offsets, shape)).unwrap_err().kind()
    };
    assert_eq!(kind(&[2, 0], &[3, 3]), ErrorKind::OutsideGlobal);
    assert_eq!(kind(&[0, u64::MAX - 1], &[1, 1]), ErrorKind::OutsideGlobal);
    assert_eq!(kind(&[0], &[4]), ErrorKind::SliceMismatch);
    assert_eq!(whole.subregion(&region(&[0, 0], &[0, 0])).unwrap().slice().offsets(), [4, 1]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn region_operations_match_index_sets(
        (a, b) in (0..4_usize).prop_flat_map(|rank| (regions(rank), regions(rank))),
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
            let relative = |cell: Cell| {
                cell.iter().zip(a.offsets()).map(|(index, offset)| index - offset).collect()
            };
            let inner: BTreeSet<Cell> = in_b.into_iter().map(relative).collect();
            prop_assert_eq!(cells(&b.relative_to(&a)), inner);
        }
    }

    #[test]
    fn tiling_check_matches_oracle_on_random_regions(
        (whole, parts) in
            (0..4_usize).prop_flat_map(|rank| (regions(rank), vec(regions(rank), 0..6))),
    ) {
        let parts: Vec<_> = parts.iter().filter_map(|part| part.intersect(&whole)).collect();
        check_against_oracle(&whole, &parts)?;
    }

    #[test]
    fn tiling_check_accepts_tilings_and_matches_oracle_on_changed_ones(
        (whole, parts, extra) in tilings(),
        removed in any::<prop::sample::Index>(),
    ) {
        prop_assert!(whole.verify_tiling(&parts).is_ok());
        prop_assert!(whole.verify_tiling(parts.iter().chain(&parts)).is_ok());
        let mut changed_parts = parts.clone();
        changed_parts.remove(removed.index(parts.len()));
        check_against_oracle(&whole, &changed_parts)?;
        changed_parts.extend(extra.intersect(&whole));
        check_against_oracle(&whole, &changed_parts)?;
    }

    #[test]
    fn local_regions_match_torch((global, mesh, placements) in layouts()) {
        let mut copies: BTreeMap<Cell, usize> = BTreeMap::new();
        let mut replicas: usize = 1;
        for (&size, placement) in mesh.shape().iter().zip(&placements) {
            replicas *= if *placement == Placement::Replicate { to_usize(size) } else { 1 };
        }
        let mut first_replicas = Vec::new();
        for &rank in mesh.ranks() {
            let coordinates = mesh.coordinates_of(rank).unwrap();
            prop_assert_eq!(mesh.rank_at(&coordinates), Some(rank));
            let regions =
                Placement::local_regions(&global, mesh.shape(), &coordinates, &placements).unwrap();
            let expected = split_like_torch(&global, mesh.shape(), &coordinates, &placements);
            prop_assert_eq!(stored_order(&regions), product(&expected));
            let sizes: Vec<u64> = expected.iter().map(|dim| dim.len() as u64).collect();
            if let [only] = &regions[..] {
                prop_assert_eq!(only.shape(), &sizes[..]);
            }
            for (dim, (&size, &global_size)) in sizes.iter().zip(&global).enumerate() {
                if size == 0 {
                    prop_assert_eq!(regions[0].offsets()[dim], global_size);
                }
            }
            for cell in regions.iter().flat_map(cells) {
                *copies.entry(cell).or_default() += 1;
            }
            if Placement::is_first_replica(&coordinates, &placements) {
                first_replicas.extend(regions);
            }
        }
        prop_assert!(copies.values().all(|&count| count == replicas));
        prop_assert!(Region::whole(&global).verify_tiling(&first_replicas).is_ok());
    }

    #[test]
    fn arbitrary_geometry_does_not_panic(
        numbers in vec(prop_oneof![0..4_u64, any::<u64>(), u64::MAX - 2..=u64::MAX], 12),
        rank in 0..4_usize,
        dim in 0..4_u32,
    ) {
        let slice = |index: usize| &numbers[index * 3..][..rank.min(3)];
        let region = |index: usize| Region::new(slice(index), slice(index + 1)).ok();
        let regions: Vec<_> = (0..3).filter_map(region).collect();
        for (whole, other) in regions.iter().zip(regions.iter().rev()) {
            let parts = whole.subtract(other);
            drop(whole.verify_tiling(parts.iter().chain(whole.intersect(other).as_ref())));
            drop(Region::whole(slice(0)).verify_tiling(&regions));
            let _ = (whole.numel(), whole.contains(other), whole.to_string());
        }
        let placements = [strided(dim, numbers[0]), Placement::Shard { dim }, strided(dim, 2)];
        let placements = &placements[..rank.min(3)];
        drop(Placement::local_regions(slice(0), slice(1), slice(2), placements));
        drop(DeviceMesh::new(slice(0), &[0]));
        let slice = TensorSlice::new(slice(0), slice(1), slice(2));
        drop(slice.map(|part| part.with_mesh(&numbers, Some(&numbers[1..]))));
    }
}

/// Compares the result of the tiling check with the number of distinct regions that contain each cell.
fn check_against_oracle(whole: &Region, parts: &[Region]) -> Result<(), TestCaseError> {
    let distinct: BTreeSet<_> = parts.iter().collect();
    let mut counts: BTreeMap<Cell, usize> =
        cells(whole).into_iter().map(|cell| (cell, 0)).collect();
    for cell in distinct.into_iter().flat_map(cells) {
        *counts.get_mut(&cell).unwrap() += 1;
    }
    let Err(error) = whole.verify_tiling(parts) else {
        prop_assert!(counts.values().all(|&count| count == 1));
        return Ok(());
    };
    let witness = &error_region(&error).unwrap();
    let uncovered = error.kind() == ErrorKind::Uncovered;
    prop_assert!(uncovered || error.kind() == ErrorKind::Overlap);
    prop_assert!(!witness.is_empty());
    let is_witness = |count: usize| if uncovered { count == 0 } else { count > 1 };
    prop_assert!(cells(witness).iter().all(|cell| is_witness(counts[cell])));
    Ok(())
}

/// Returns the local indices per dimension, computed as torch does: with `torch.chunk`, and chunks of chunks
/// for `_StridedShard`.
fn split_like_torch(
    global: &[u64],
    mesh_shape: &[u64],
    coordinates: &[u64],
    placements: &[Placement],
) -> Vec<Vec<u64>> {
    let mut local: Vec<Vec<u64>> = global.iter().map(|&size| (0..size).collect()).collect();
    for ((placement, &parts), &part) in placements.iter().zip(mesh_shape).zip(coordinates) {
        let (dim, factor) = match placement {
            Placement::Shard { dim } => (to_usize((*dim).into()), 1),
            Placement::StridedShard { dim, split_factor } => {
                (to_usize((*dim).into()), *split_factor)
            }
            _ => continue,
        };
        let pieces = torch_chunk(&local[dim], factor);
        local[dim] = pieces
            .iter()
            .flat_map(|piece| torch_chunk(piece, parts).swap_remove(to_usize(part)))
            .collect();
    }
    local
}

fn torch_chunk(values: &[u64], count: u64) -> Vec<Vec<u64>> {
    let size = values.len().div_ceil(to_usize(count)).max(1);
    let mut chunks: Vec<_> = values.chunks(size).map(<[u64]>::to_vec).collect();
    chunks.resize(to_usize(count), Vec::new());
    chunks
}

/// Returns the cells in the order in which a local tensor that consists of `regions` stores them.
fn stored_order(regions: &[Region]) -> Vec<Cell> {
    let rank = regions[0].rank();
    let dims: Vec<Vec<u64>> = (0..rank)
        .map(|dim| {
            let mut runs: Vec<_> = regions.iter().map(|part| range(part, dim)).collect();
            // The regions are a Cartesian product in row-major order, so the runs of a dimension repeat.
            let mut seen = BTreeSet::new();
            runs.retain(|run| seen.insert((run.start, run.end)));
            assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
            runs.into_iter().flatten().collect()
        })
        .collect();
    let offsets: Vec<_> = regions.iter().map(|part| part.offsets().to_vec()).collect();
    assert!(offsets.is_sorted());
    product(&dims)
}

/// Returns all combinations of one value per dimension. The last dimension varies fastest.
fn product(dims: &[Vec<u64>]) -> Vec<Cell> {
    dims.iter().fold(vec![vec![]], |cells, dim| {
        let extend = |cell: Cell| dim.iter().map(move |&index| [&cell[..], &[index]].concat());
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

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

fn tiling_error(whole: &Region, parts: &[Region]) -> ErrorKind {
    whole.verify_tiling(parts).unwrap_err().kind()
}

/// Tiles `shape` with regions of shape `step`, which must divide it.
fn grid(shape: &[u64], step: &[u64]) -> (Region, Vec<Region>) {
    let starts = |(&size, &step): (&u64, &u64)| (0..size).step_by(to_usize(step)).collect();
    let starts: Vec<Vec<u64>> = shape.iter().zip(step).map(starts).collect();
    let regions = product(&starts).iter().map(|offsets| region(offsets, step)).collect();
    (Region::whole(shape), regions)
}

/// Returns four regions around a fifth, which is the last one. No straight cut separates them.
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

fn regions(rank: usize) -> impl Strategy<Value = Region> {
    (vec(0..5_u64, rank), vec(0..6_u64, rank)).prop_map(|(offsets, shape)| region(&offsets, &shape))
}

/// A region, a tiling of it by random cuts of the whole or of a pinwheel, and one extra region.
fn tilings() -> impl Strategy<Value = (Region, Vec<Region>, Region)> {
    let cuts = vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1..6_u64), 0..12);
    let shapes = (1..4_usize).prop_flat_map(|rank| (vec(3..8_u64, rank), regions(rank)));
    (shapes, cuts, any::<bool>()).prop_map(|((shape, extra), cuts, is_pinwheel)| {
        let whole = Region::whole(&shape);
        let mut parts = vec![whole.clone()];
        if is_pinwheel && shape.len() > 1 {
            parts = pinwheel(&shape, [1, 1], [shape[0] - 1, shape[1] - 1]);
        }
        for (part, dim, size) in cuts {
            let (part, dim) = (parts.swap_remove(part.index(parts.len())), dim.index(shape.len()));
            let mut shape = part.shape().to_vec();
            shape[dim] = size.min(shape[dim]);
            let first = region(part.offsets(), &shape);
            parts.extend(part.subtract(&first));
            parts.push(first);
        }
        (whole, parts, extra)
    })
}

/// A global shape, a mesh of up to three dimensions, and a placement for each mesh dimension.
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
        (vec(sizes, to_usize(rank.into())), mesh).prop_map(|(global, dims)| {
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
    let placements =
        [Placement::Replicate, Placement::Shard { dim: 0 }, strided(0, 1), strided(0, 2)];
    let placements = [&placements[..], &[strided(0, 3), strided(0, 5)]].concat();
    for size in 0..12 {
        for first in &placements {
            for devices in 1..5 {
                let mesh = DeviceMesh::from_shape(&[devices]).unwrap();
                cases.extend(torch_cases(&[size], &mesh, std::slice::from_ref(first)));
            }
            for second in &placements {
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

/// Returns one case per rank of the mesh, with the regions that this crate computes.
fn torch_cases(global: &[u64], mesh: &DeviceMesh, placements: &[Placement]) -> Vec<Value> {
    let encoded: Vec<Value> = placements
        .iter()
        .map(|placement| match placement {
            Placement::Shard { dim } => json!(["S", dim]),
            Placement::StridedShard { dim, split_factor } => json!(["SS", dim, split_factor]),
            _ => json!(["R"]),
        })
        .collect();
    let case = |rank: &u32| {
        let coordinates = mesh.coordinates_of(*rank).unwrap();
        let regions =
            Placement::local_regions(global, mesh.shape(), &coordinates, placements).unwrap();
        let regions: Vec<_> = regions.iter().map(|part| (part.offsets(), part.shape())).collect();
        json!({
            "global_shape": global,
            "mesh_shape": mesh.shape(),
            "coordinates": coordinates,
            "placements": encoded,
            "regions": regions,
        })
    };
    mesh.ranks().iter().map(case).collect()
}
