//! Slices of global tensors: meshes, placements, boxes.

use tssd_format::{
    DeviceMesh, Dtype, Placement, Shard, ShardSpec, StateDict, Tensor, TensorSlice, Value,
};

use super::{
    Vector, bit_tensor, dict_of, encode_plain, f32_tensor, file_vector, single_value,
    tensor_from_bytes,
};

pub(super) fn vectors() -> Vec<Vector> {
    vec![
        file_vector(
            "015-shard",
            "shards of a 2 x 2 mesh with ranks, names and placements; an empty one",
            encode_plain(&shards()),
        ),
        file_vector(
            "016-boxes",
            "two boxes of one global tensor, without a mesh",
            encode_plain(&single_value(boxes())),
        ),
        file_vector(
            "017-strided-shard",
            "a _StridedShard on a mesh without names",
            encode_plain(&single_value(strided())),
        ),
        file_vector(
            "050-replicate",
            "a mesh dimension that replicates, one that shards",
            encode_plain(&single_value(mesh_shard(
                &mesh(&[2, 3], &["dp", "tp"]),
                4,
                &[Placement::Replicate, Placement::Shard { dim: 1 }],
                &[2, 7],
            ))),
        ),
        file_vector(
            "051-mesh-3d",
            "three mesh dimensions that shard two of three tensor dimensions",
            encode_plain(&single_value(mesh_shard(
                &mesh(&[2, 2, 2], &["pp", "dp", "tp"]),
                5,
                &[
                    Placement::Shard { dim: 0 },
                    Placement::Shard { dim: 2 },
                    Placement::Shard { dim: 2 },
                ],
                &[3, 2, 6],
            ))),
        ),
        file_vector(
            "052-uneven",
            "the last rank of a dimension that does not divide gets less, and nothing",
            encode_plain(&uneven()),
        ),
        file_vector(
            "053-mesh-without-ranks",
            "slices that know the shape of their mesh, with and without coordinates",
            encode_plain(&bare_meshes()),
        ),
        file_vector(
            "054-mesh-ranks",
            "a mesh whose ranks are neither first nor in order",
            encode_plain(&single_value(mesh_shard(
                &DeviceMesh::new(&[3], &[4_000_000_000, 7, 0]).expect("distinct"),
                7,
                &[Placement::Shard { dim: 0 }],
                &[5],
            ))),
        ),
        file_vector(
            "055-shared-mesh",
            "many leaves on one mesh, whose tables hold it once",
            encode_plain(&shared_mesh()),
        ),
        file_vector(
            "056-scalar-shard",
            "a replicated 0-dim tensor",
            encode_plain(&single_value(mesh_shard(
                &mesh(&[2], &["dp"]),
                1,
                &[Placement::Replicate],
                &[],
            ))),
        ),
        file_vector(
            "057-nested-strided",
            "_StridedShard over two dimensions: one rank, several boxes",
            encode_plain(&single_value(several_boxes())),
        ),
        file_vector(
            "108-slice-facts",
            "replicas, gaps, offsets that contradict placements, and one leaf on two meshes",
            encode_plain(&slice_facts()),
        ),
        file_vector(
            "058-adjacent-meshes",
            "meshes that end where another begins, and some that are a global shape at once",
            encode_plain(&adjacent_meshes()),
        ),
    ]
}

/// Returns sharded leaves whose regions follow from offsets and shapes alone.
fn slice_facts() -> StateDict {
    let plain = |offset, global| {
        let slice = slice(&[offset], &[4], &[global]);
        Shard::new(counted(&[4]), ShardSpec::new(slice)).expect("it has the local shape")
    };
    let on_mesh = |offset, ranks: [u32; 2], coordinate| {
        let slice = slice(&[offset], &[4], &[8]).with_mesh(&[2], Some(&[coordinate]));
        let mesh = DeviceMesh::new(&[2], &ranks).expect("distinct");
        placed(&mesh, slice.expect("in the mesh"), &[Placement::Shard { dim: 0 }])
    };
    let leaf = |shards: Vec<Shard>| Value::Shards(shards);
    dict_of(vec![
        ("replicas".into(), leaf(vec![plain(0, 4), plain(0, 4)])),
        ("gap".into(), leaf(vec![plain(0, 12), plain(8, 12)])),
        ("contradiction".into(), leaf(vec![on_mesh(0, [0, 1], 1)])),
        ("meshes".into(), leaf(vec![on_mesh(0, [0, 1], 0), on_mesh(4, [2, 3], 1)])),
    ])
}

fn mesh(shape: &[u64], names: &[&str]) -> DeviceMesh {
    let names = names.iter().map(ToString::to_string).collect();
    DeviceMesh::from_shape(shape).and_then(|mesh| mesh.with_dim_names(names)).expect("a legal mesh")
}

/// Returns the shard of a rank. The elements of its tensor count from 0.
fn mesh_shard(mesh: &DeviceMesh, rank: u32, placements: &[Placement], global: &[u64]) -> Shard {
    let slices = TensorSlice::from_placements(global, mesh, rank, placements);
    let slice = slices.expect("legal placements").remove(0);
    placed(mesh, slice, placements)
}

fn placed(mesh: &DeviceMesh, slice: TensorSlice, placements: &[Placement]) -> Shard {
    let tensor = counted(slice.local_shape());
    let place = ShardSpec::new(slice).with_mesh(mesh.clone());
    let place = place.and_then(|place| place.with_placements(placements.to_vec()));
    Shard::new(tensor, place.expect("it fits the mesh")).expect("it has the local shape")
}

fn counted(shape: &[u64]) -> Tensor {
    let values: Vec<f32> =
        (0..shape.iter().product()).zip(0_u16..).map(|(_, at): (u64, _)| at.into()).collect();
    f32_tensor(&values, shape)
}

fn shard_of_rank(rank: u32) -> Shard {
    let mesh = DeviceMesh::new(&[2, 2], &[4, 5, 6, 7]);
    let mesh = mesh.and_then(|mesh| mesh.with_dim_names(vec!["dp".into(), "tp".into()]));
    let placements = [Placement::Shard { dim: 0 }, Placement::Shard { dim: 1 }];
    mesh_shard(&mesh.expect("a legal mesh"), rank, &placements, &[3, 5])
}

fn slice(offsets: &[u64], local: &[u64], global: &[u64]) -> TensorSlice {
    TensorSlice::new(offsets, local, global).expect("a legal slice")
}

fn shards() -> StateDict {
    let empty =
        Shard::new(f32_tensor(&[], &[0, 5]), ShardSpec::new(slice(&[3, 0], &[0, 5], &[3, 5])));
    dict_of(vec![
        ("shard".into(), shard_of_rank(4).into()),
        ("same place".into(), shard_of_rank(4).into()),
        ("empty shard".into(), empty.expect("it has the local shape").into()),
    ])
}

fn boxes() -> Value {
    let shard = |row| {
        let place = ShardSpec::new(slice(&[row, 0], &[1, 2], &[4, 2]));
        Shard::new(f32_tensor(&[1.0, 2.0], &[1, 2]), place).expect("it has the local shape")
    };
    Value::Shards(vec![shard(0), shard(3)])
}

fn strided() -> Shard {
    let mesh = DeviceMesh::from_shape(&[2, 2]).expect("a legal mesh");
    let placements =
        vec![Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard { dim: 0 }];
    let slices = TensorSlice::from_placements(&[8], &mesh, 1, &placements);
    let slice = slices.expect("legal placements").remove(0);
    let place =
        ShardSpec::new(slice).with_mesh(mesh).and_then(|place| place.with_placements(placements));
    Shard::new(f32_tensor(&[4.0, 5.0], &[2]), place.expect("it fits the mesh"))
        .expect("two elements")
}

fn uneven() -> StateDict {
    let mesh = mesh(&[4], &["dp"]);
    let mesh_shard = |rank| mesh_shard(&mesh, rank, &[Placement::Shard { dim: 0 }], &[5, 2]).into();
    dict_of(vec![("of rank 2".into(), mesh_shard(2)), ("of rank 3".into(), mesh_shard(3))])
}

fn bare_meshes() -> StateDict {
    let shard = |coordinates: Option<&[u64]>| {
        let slice = slice(&[2], &[2], &[4]).with_mesh(&[2], coordinates).expect("inside the mesh");
        Shard::new(f32_tensor(&[3.0, 4.0], &[2]), ShardSpec::new(slice))
            .expect("two elements")
            .into()
    };
    dict_of(vec![("known".into(), shard(Some(&[1]))), ("unknown".into(), shard(None))])
}

fn shared_mesh() -> StateDict {
    let mesh = mesh(&[2, 2], &["dp", "tp"]);
    let leaf = |layer: u64| {
        let placements =
            [Placement::Replicate, Placement::Shard { dim: u32::from(layer % 2 == 1) }];
        mesh_shard(&mesh, 3, &placements, &[4, 2 + layer])
    };
    dict_of((0..8).map(|layer| (format!("layers.{layer}").into(), leaf(layer).into())).collect())
}

/// Meshes that share words with a global shape.
///
/// Equal sequences of words are stored once in `dims`. The mesh of ranks 0 and 1 is the global
/// shape (2, 0, 1), that of ranks 0 and 3 is (2, 0, 3). One of these is stored before the mesh that
/// follows it, one after.
fn adjacent_meshes() -> StateDict {
    let leaf = |last: u64, ranks: [u32; 2]| {
        let mesh = DeviceMesh::new(&[2], &ranks).expect("distinct");
        mesh_shard(&mesh, ranks[1], &[Placement::Shard { dim: 0 }], &[2, 0, last]).into()
    };
    dict_of(vec![
        ("coordinate".into(), bit_tensor(Dtype::Uint8, &[1]).into()),
        ("shape".into(), leaf(1, [0, 1])),
        ("after it".into(), leaf(1, [4, 5])),
        ("after another shape".into(), leaf(3, [6, 7])),
        ("that shape".into(), leaf(3, [0, 3])),
    ])
}

/// Rank 0 of two strided shards of one dimension holds boxes that do not touch.
fn several_boxes() -> Value {
    let mesh = DeviceMesh::from_shape(&[2, 2]).expect("a legal mesh");
    let placements =
        vec![Placement::StridedShard { dim: 0, split_factor: 4 }, Placement::Shard { dim: 0 }];
    let slices = TensorSlice::from_placements(&[16, 2], &mesh, 0, &placements);
    let shards = slices.expect("legal placements").into_iter().map(|slice| {
        let tensor =
            tensor_from_bytes(Dtype::Int16, slice.local_shape(), |place| place.to_le_bytes()[0]);
        let place = ShardSpec::new(slice).with_mesh(mesh.clone());
        let place = place.and_then(|place| place.with_placements(placements.clone()));
        Shard::new(tensor, place.expect("it fits the mesh")).expect("it has the local shape")
    });
    Value::Shards(shards.collect())
}
