//! The plan of one reader among many: 256 writers that shard rows, 128 readers that want columns.

use tssd_format::{
    DeviceMesh, Dtype, Placement, Region, ShardPlace, TensorMeta, TensorReference, TensorSlice,
};
use tssd_store::plan;
use tssd_tests::race::{Runner, Target, race};

const TENSORS: u32 = 1000;
const WRITERS: u32 = 256;
const READERS: u64 = 128;
const SHAPE: [u64; 2] = [4096, 4096];

/// Without a store: what a reader computes when a layout is new to it.
pub(crate) fn many_ranks() {
    let mesh = DeviceMesh::from_shape(&[u64::from(WRITERS)]).unwrap();
    let leaves: Vec<Vec<TensorReference>> = (0..TENSORS)
        .map(|tensor| {
            let of_rank = |rank: u32| {
                let rows = [Placement::Shard { dim: 0 }];
                let slice = TensorSlice::from_placements(&SHAPE, &mesh, rank, &rows);
                let place = ShardPlace::new(slice.unwrap().remove(0));
                let meta = TensorMeta::new(Dtype::Bfloat16, place.slice().local_shape()).unwrap();
                TensorReference {
                    meta,
                    storage: Some(rank * TENSORS + tensor),
                    byte_offset: 0,
                    place: Some(place),
                }
            };
            (0..WRITERS).map(of_rank).collect()
        })
        .collect();
    let columns = SHAPE[1] / READERS;
    let region = Region::new(&[0, 0], &[SHAPE[0], columns]).unwrap();
    let wanted = plan::Wanted {
        meta: TensorMeta::new(Dtype::Bfloat16, region.shape()).unwrap(),
        region,
        global_shape: SHAPE.into(),
    };
    let run = || {
        let copies: usize =
            leaves.iter().map(|leaf| plan::plan(leaf, &wanted).unwrap().len()).sum();
        assert_eq!(copies, usize::try_from(TENSORS * WRITERS).unwrap());
    };
    race(
        "plan of one of 128 readers of columns, 256 writers of rows, 1,000 tensors",
        None,
        7,
        vec![Runner::new("plan", run).target(Target::Milliseconds(500.0))],
    );
}
