//! Parts of devices, compared with an enumeration of all devices.

use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn parts_match_enumeration_of_all_devices(
        (global, mesh, placements, wanted) in cases(vec(1..=5_u64, 1..=3), 20),
    ) {
        assert_matches_enumeration(&global, &mesh, &placements, &wanted);
    }

    #[test]
    fn parts_of_large_dimensions_match_enumeration(
        (global, mesh, placements, wanted) in cases(vec(1..=40_u64, 1..=2), 300),
    ) {
        assert_matches_enumeration(&global, &mesh, &placements, &wanted);
    }

    #[test]
    fn hostile_numbers_give_parts_or_errors(
        global in vec(hostile_number(), 0..=3),
        mesh in vec(hostile_number(), 4),
        kinds in vec((0..5_u32, 0..4_u32, hostile_number()), 4),
        wanted in vec((hostile_number(), hostile_number()), 0..=3),
        mesh_rank in 0..=4_usize,
    ) {
        let placements: Vec<_> = kinds.into_iter().map(|(kind, dim, split_factor)| match kind {
            0 => Placement::Replicate,
            1 | 2 => Placement::Shard { dim },
            _ => Placement::StridedShard { dim, split_factor },
        }).collect();
        let (offsets, shape): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let wanted = Region::new(&offsets, &shape).unwrap_or_else(|_| Region::whole(&global));
        let (mesh, placements) = (&mesh[..mesh_rank], &placements[..mesh_rank]);
        let start = Instant::now();
        if let Ok(parts) = held_parts(&global, mesh, placements, &wanted) {
            let firsts = parts.iter().map(|part| part.each().next().map(|(_, region)| region));
            prop_assert!(firsts.flatten().all(|region| wanted.contains(&region)));
        }
        let coordinates: Vec<_> = mesh.iter().map(|size| size.saturating_sub(1)).collect();
        drop(local_shape_of(&global, mesh, &coordinates, placements));
        prop_assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
}

#[test]
fn large_meshes_have_few_parts() {
    let strided = Placement::StridedShard { dim: 0, split_factor: 8 };
    let [rows, columns] = [0, 1].map(|dim| Placement::Shard { dim });
    let layouts = [
        ([rows.clone(), columns], 6),
        ([rows.clone(), rows.clone()], 6),
        ([strided, rows.clone()], 6),
        ([rows, Placement::Replicate], 4),
    ];
    for (placements, max_parts) in layouts {
        for global in [[8192, 4096], [11_008, 4096], [151_936, 8192], [151_937, 4099], [100, 7]] {
            for wanted in eighths(global) {
                let parts = held_parts(&global, &[2048, 8], &placements, &wanted).unwrap();
                let context = format!("{placements:?} of {global:?}: {wanted}, {parts:?}");
                assert!(parts.len() <= max_parts, "{} parts: {context}", parts.len());
                let elements = |part: &HeldPart| {
                    let devices: u64 = part.repeats.iter().map(|repeat| repeat.count).product();
                    devices * part.region.numel()
                };
                assert_eq!(parts.iter().map(elements).sum::<u64>(), wanted.numel(), "{context}");
            }
        }
    }
}

#[test]
fn large_strided_mesh_matches_enumeration() {
    let placements =
        [Placement::StridedShard { dim: 0, split_factor: 8 }, Placement::Shard { dim: 0 }];
    for rows in [11_008, 15_190, 16_383] {
        let wanted = Region::new(&[rows / 3], &[rows / 8]).unwrap();
        assert_matches_enumeration(&[rows], &[256, 8], &placements, &wanted);
    }
}

#[test]
fn device_with_many_runs_has_one_part_per_run() {
    let strided = Placement::StridedShard { dim: 0, split_factor: 8 };
    let parts = held_parts(&[1 << 40], &[1 << 20], &[strided], &Region::whole(&[1 << 40])).unwrap();
    assert_eq!(parts.len(), 8);
    let offset_step = 1 << 17;
    let repeat = PartRepeat { count: 1 << 20, device_step: 1, dim: 0, offset_step };
    assert!(parts.iter().all(|part| part.repeats == [repeat]));
}

#[test]
fn scalar_is_held_by_first_device() {
    let scalar = Region::whole(&[]);
    let parts = held_parts(&[], &[4, 2], &[Placement::Replicate, Placement::Replicate], &scalar);
    let parts = parts.unwrap();
    assert_eq!(parts.iter().flat_map(HeldPart::each).collect::<Vec<_>>(), [(0, scalar)]);
}

#[test]
fn invalid_layouts_are_refused() {
    let kind = |global: &[u64], mesh: &[u64], placements: &[Placement], wanted: &[u64]| {
        held_parts(global, mesh, placements, &Region::whole(wanted)).unwrap_err().kind()
    };
    let shards = [0, 0].map(|dim| Placement::Shard { dim });
    let shard = &shards[..1];
    assert_eq!(kind(&[4], &[2, 2], shard, &[4]), ErrorKind::MeshMismatch);
    assert_eq!(kind(&[4], &[0], shard, &[4]), ErrorKind::MeshMismatch);
    assert_eq!(kind(&[4], &[1 << 40; 2], &shards, &[4]), ErrorKind::MeshMismatch);
    assert_eq!(kind(&[4], &[2], shard, &[4, 4]), ErrorKind::OutsideGlobal);
    assert_eq!(kind(&[], &[2], shard, &[]), ErrorKind::UnknownPlacement);
    assert_eq!(kind(&[4; 65], &[2], shard, &[4; 65]), ErrorKind::RankTooLarge);
    let partial = Placement::Partial { reduce_op: "sum".to_owned() };
    assert_eq!(kind(&[4], &[2], &[partial], &[4]), ErrorKind::PartialPlacement);
    let grid = [0, 1].map(|dim| Placement::StridedShard { dim, split_factor: 1 << 10 });
    assert_eq!(kind(&[1 << 20; 2], &[2, 2], &grid, &[1, 1]), ErrorKind::NotABox);
    let strided = Placement::StridedShard { dim: 0, split_factor: 1 << 17 };
    assert_eq!(kind(&[1 << 40], &[2], &[strided], &[1]), ErrorKind::NotABox);
}

/// Half of the groups of a mesh dimension have an odd size, which the next mesh dimension divides unevenly.
#[test]
fn number_of_parts_is_limited() {
    let (mesh, placements) = ([2; 40], vec![Placement::Shard { dim: 0 }; 40]);
    let size = 0x55_5555_5555;
    let start = Instant::now();
    let error = held_parts(&[size], &mesh, &placements, &Region::whole(&[size])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotABox);
    assert!(start.elapsed() < Duration::from_secs(5));
}

fn assert_matches_enumeration(
    global: &[u64],
    mesh: &[u64],
    placements: &[Placement],
    wanted: &Region,
) {
    let parts = held_parts(global, mesh, placements, wanted).unwrap();
    let mut found: Vec<_> = parts.iter().flat_map(expand).collect();
    let mut expected = enumerate(global, mesh, placements, wanted);
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

/// A part of one device: its index, its local shape, the start in its local tensor, the region.
type DevicePart = (u64, Vec<u64>, Vec<u64>, Region);

fn expand(part: &HeldPart) -> Vec<DevicePart> {
    for repeat in &part.repeats {
        assert!(repeat.count > 1 && repeat.device_step > 0 && repeat.offset_step > 0);
    }
    let (shape, offsets) = (part.local_shape.to_vec(), part.local_offsets.to_vec());
    part.each().map(|(device, region)| (device, shape.clone(), offsets.clone(), region)).collect()
}

fn enumerate(
    global: &[u64],
    mesh: &[u64],
    placements: &[Placement],
    wanted: &Region,
) -> Vec<DevicePart> {
    let mut parts = Vec::new();
    for device in 0..mesh.iter().product() {
        let strides = row_major_strides(mesh).into_iter().zip(mesh);
        let coordinates: Vec<u64> = strides.map(|(stride, size)| device / stride % size).collect();
        let regions = Placement::local_regions(global, mesh, &coordinates, placements).unwrap();
        let held = held_by_rule(global, mesh, &coordinates, placements);
        let local_shape: Vec<u64> = held.iter().map(|indices| to_u64(indices.len())).collect();
        assert_eq!(local_shape_of(global, mesh, &coordinates, placements).unwrap(), local_shape);
        if !local_shape.contains(&0) {
            assert_eq!(held_of_each_dim(&regions, global.len()), held);
        }
        if !Placement::is_first_replica(&coordinates, placements) {
            continue;
        }
        for part in regions.iter().filter_map(|region| region.intersect(wanted)) {
            let start = part.offsets().iter().zip(&held);
            let start = start.map(|(offset, held)| to_u64(held.partition_point(|i| i < offset)));
            parts.push((device, local_shape.clone(), start.collect(), part));
        }
    }
    parts
}

/// Returns the indices that a device holds in each dimension, by the rules of `spec/reshard.md`.
fn held_by_rule(
    global: &[u64],
    mesh: &[u64],
    coordinates: &[u64],
    placements: &[Placement],
) -> Vec<Vec<u64>> {
    let mut held: Vec<Vec<u64>> = global.iter().map(|&size| (0..size).collect()).collect();
    for ((placement, &parts), &part) in placements.iter().zip(mesh).zip(coordinates) {
        if let Some((dim, split_factor)) = placement.division(global.len()).unwrap() {
            let chunks_of = |indices: &[u64], count| -> Vec<Vec<u64>> {
                let len = to_u64(indices.len()).div_ceil(count).max(1);
                indices.chunks(usize::try_from(len).unwrap()).map(<[u64]>::to_vec).collect()
            };
            let part = usize::try_from(part).unwrap();
            let pieces = chunks_of(&held[dim], split_factor).into_iter();
            held[dim] = pieces
                .flat_map(|piece| chunks_of(&piece, parts).get(part).cloned().unwrap_or_default())
                .collect();
        }
    }
    held
}

/// Returns the indices that the regions of a device contain in each dimension, increasing.
fn held_of_each_dim(regions: &[Region], rank: usize) -> Vec<Vec<u64>> {
    let of_dim = |dim| {
        let mut indices: Vec<u64> = regions.iter().flat_map(|region| region.range(dim)).collect();
        indices.sort_unstable();
        indices.dedup();
        indices
    };
    (0..rank).map(of_dim).collect()
}

fn to_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap()
}

/// Returns the whole tensor, and each eighth of its rows and of its columns.
fn eighths([rows, columns]: [u64; 2]) -> Vec<Region> {
    let mut regions = vec![Region::whole(&[rows, columns])];
    for eighth in 0..8 {
        let [row, column] = [rows, columns].map(|size| size * eighth / 8);
        let [end_row, end_column] = [rows, columns].map(|size| size * (eighth + 1) / 8);
        regions.push(Region::new(&[row, 0], &[end_row - row, columns]).unwrap());
        regions.push(Region::new(&[0, column], &[rows, end_column - column]).unwrap());
    }
    regions
}

type Case = (Vec<u64>, Vec<u64>, Vec<Placement>, Region);

fn cases(mesh: impl Strategy<Value = Vec<u64>>, max_size: u64) -> impl Strategy<Value = Case> {
    (vec(0..=max_size, 0..=3), mesh).prop_flat_map(move |(global, mesh)| {
        let placements = vec(placement(global.len()), mesh.len());
        let bounds = vec((0..=max_size, 0..=max_size), global.len());
        (Just(global), Just(mesh), placements, bounds).prop_map(
            |(global, mesh, placements, bounds)| {
                let wanted = region_between(&global, &bounds);
                (global, mesh, placements, wanted)
            },
        )
    })
}

fn placement(rank: usize) -> BoxedStrategy<Placement> {
    let Some(last) = u32::try_from(rank).unwrap().checked_sub(1) else {
        return Just(Placement::Replicate).boxed();
    };
    prop_oneof![
        1 => Just(Placement::Replicate),
        2 => (0..=last).prop_map(|dim| Placement::Shard { dim }),
        3 => (0..=last, 1..=9_u64)
            .prop_map(|(dim, split_factor)| Placement::StridedShard { dim, split_factor }),
    ]
    .boxed()
}

/// Returns the region between two indices of each dimension. A quarter of the regions are whole in a dimension.
fn region_between(global: &[u64], bounds: &[(u64, u64)]) -> Region {
    let ranges = global.iter().zip(bounds).map(|(&size, &(a, b))| {
        if a % 4 == 0 { (0, size) } else { (a.min(b).min(size), a.max(b).min(size)) }
    });
    let (offsets, shape): (Vec<_>, Vec<_>) = ranges.map(|(from, to)| (from, to - from)).unzip();
    Region::new(&offsets, &shape).unwrap()
}

fn hostile_number() -> impl Strategy<Value = u64> {
    let shift = (0..64_u32, 0..3_u64)
        .prop_map(|(bits, add)| (1_u64 << bits).wrapping_add(add).wrapping_sub(1));
    prop_oneof![0..6_u64, shift, Just(u64::MAX), Just(1 << 16), any::<u64>()]
}
