//! Shard sets whose manifests have distributed leaves.

use tssd_format::{ChunkPolicy, Compression, DeviceMesh, Dict, MANIFEST_NAME, Options, Placement};

use super::{Content, Vector, f32_tensor, file_vector};
use crate::distributed::{GlobalTensor, WrittenSet, dict_with};

const ROWS: Placement = Placement::Shard { dim: 0 };

const COLUMNS: Placement = Placement::Shard { dim: 1 };

pub(super) fn vectors() -> Vec<Vector> {
    let plain = Options::new();
    let rows = || tensor(&[10, 8], &[4], &[ROWS]);
    let zstd = Options::new().compress(Compression::Zstd);
    vec![
        set(
            "180-distributed",
            "a distributed leaf: the rows of a matrix on four devices, which do not divide them",
            &weights(&rows(), 4),
            &plain,
        ),
        set(
            "181-distributed-empty",
            "more devices than rows: two store nothing",
            &weights(&tensor(&[4, 3], &[6], &[ROWS]), 6),
            &plain,
        ),
        set(
            "182-distributed-2d",
            "a mesh of 2 x 3 whose dimensions divide rows and columns",
            &weights(&tensor(&[5, 7], &[2, 3], &[ROWS, COLUMNS]), 6),
            &plain,
        ),
        set(
            "183-distributed-strided",
            "a _StridedShard: some devices hold several regions",
            &weights(
                &tensor(
                    &[2, 11],
                    &[2, 2],
                    &[Placement::StridedShard { dim: 1, split_factor: 2 }, COLUMNS],
                ),
                4,
            ),
            &plain,
        ),
        set(
            "184-distributed-replicas",
            "a mesh dimension that replicates: its devices but the first store nothing",
            &weights(&tensor(&[6, 4], &[2, 2], &[Placement::Replicate, ROWS]), 4),
            &plain,
        ),
        set(
            "185-distributed-others",
            "other storages between those of groups, and leaves of one group",
            &with_others(),
            &plain,
        ),
        set(
            "186-distributed-zstd",
            "archives in frames: their places are in their own indexes",
            &weights(&tensor(&[4000, 2], &[2], &[ROWS]), 2),
            &zstd,
        ),
        set(
            "187-distributed-fine",
            "fine chunks",
            &weights(&tensor(&[3000, 3], &[2], &[ROWS]), 2),
            &Options::new().chunks(ChunkPolicy::Fine),
        ),
        set(
            "188-distributed-digests",
            "archives named by their content digests",
            &weights(&rows(), 4),
            &Options::new().digests(),
        ),
        set(
            "189-distributed-ranks",
            "a mesh of some writers, in another order than the shards",
            &weights(&on_ranks(&[7, 2], &[3, 1, 2]), 4),
            &plain,
        ),
        file_vector(
            "190-distributed-manifest",
            "a manifest with distributed leaves, alone",
            WrittenSet::new(&with_others(), &plain).distributed_manifest(),
        ),
    ]
}

fn tensor(shape: &[u64], mesh: &[u64], placements: &[Placement]) -> GlobalTensor {
    GlobalTensor {
        shape: shape.to_vec(),
        mesh: DeviceMesh::from_shape(mesh).expect("a small mesh"),
        placements: placements.to_vec(),
    }
}

fn on_ranks(shape: &[u64], ranks: &[u32]) -> GlobalTensor {
    let count = u64::try_from(ranks.len()).expect("a few");
    GlobalTensor {
        shape: shape.to_vec(),
        mesh: DeviceMesh::new(&[count], ranks).expect("distinct ranks"),
        placements: vec![ROWS],
    }
}

/// Returns the state dicts of writers that hold one tensor.
fn weights(tensor: &GlobalTensor, writers: u32) -> Vec<Dict> {
    let dict = |rank| dict_with([("weight", tensor.shards_of(rank))]);
    (0..writers).map(dict).collect()
}

/// Returns the state dicts of three writers with two divided tensors, one of them tied. Writer 0 has more leaves.
fn with_others() -> Vec<Dict> {
    let names = vec!["dp".to_owned()];
    let mesh = DeviceMesh::from_shape(&[3]).and_then(|mesh| mesh.with_dim_names(names));
    let mesh = mesh.expect("a small mesh");
    let on_mesh = |shape: &[u64], placement| GlobalTensor {
        shape: shape.to_vec(),
        mesh: mesh.clone(),
        placements: vec![placement],
    };
    let (embedding, head) = (on_mesh(&[5, 4], ROWS), on_mesh(&[3, 6], COLUMNS));
    let dict = |rank| {
        let first = |value| (rank == 0).then_some(value);
        let embedding = embedding.shards_of(rank);
        dict_with([
            ("scale", first(f32_tensor(&[0.5, 2.0], &[2]).into())),
            ("embedding", embedding.clone()),
            ("text", first("long ".repeat(1000).into())),
            ("head", head.shards_of(rank)),
            ("tied", embedding),
            ("step", first(7.into())),
        ])
    };
    (0..3).map(dict).collect()
}

fn set(name: &'static str, description: &'static str, dicts: &[Dict], options: &Options) -> Vector {
    let written = WrittenSet::new(dicts, options);
    let manifest = written.distributed_manifest();
    let mut files = written.files;
    files.push((MANIFEST_NAME.to_owned(), manifest));
    Vector { name, description, content: Content::Set(files) }
}
