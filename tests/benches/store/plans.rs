//! The plan of one reader among many: 256 writers that shard rows, 128 readers that want columns.

use tssd_format::{
    DeviceMesh, Dtype, Placement, Region, Shard, ShardPlace, StateDict, Storage, Tensor,
    TensorMeta, TensorReference, TensorSlice,
};
use tssd_store::{GetOptions, JobId, PutOptions, Target as Wanted, plan};
use tssd_tests::race::{Runner, Target, race};
use tssd_tests::served::Served;

use crate::copies::print;
use crate::house::key;

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
    in_a_store();
}

/// The same with a store: what reports say of the first plan, and of the next one of the same layout.
fn in_a_store() {
    const SMALL: [u64; 2] = [256, 128];
    let served = Served::new(8 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let mesh = DeviceMesh::from_shape(&[u64::from(WRITERS)]).unwrap();
    let place_of = |mesh: &DeviceMesh, rank, dim| {
        let slice = TensorSlice::from_placements(&SMALL, mesh, rank, &[Placement::Shard { dim }]);
        ShardPlace::new(slice.unwrap().remove(0)).on_mesh(mesh.clone()).unwrap()
    };
    let readers = DeviceMesh::from_shape(&[READERS]).unwrap();
    let place = place_of(&readers, 0, 1);
    let meta = TensorMeta::new(Dtype::Bfloat16, place.slice().local_shape()).unwrap();
    let len = usize::try_from(meta.nbytes()).unwrap();
    let mut seconds = Vec::new();
    for version in 1..=3 {
        for rank in 0..WRITERS {
            let mut dict = StateDict::new();
            let place = place_of(&mesh, rank, 0);
            let meta = TensorMeta::new(Dtype::Bfloat16, place.slice().local_shape()).unwrap();
            let bytes = Storage::from(vec![1_u8; usize::try_from(meta.nbytes()).unwrap()]);
            let tensor = Tensor::new(meta, bytes, 0).unwrap();
            for name in 0..TENSORS {
                let shard = Shard::new(tensor.clone(), place.clone()).unwrap();
                dict.insert(format!("layers.{name}"), shard);
            }
            let options = PutOptions {
                version: Some(version),
                writer: Some(rank),
                job: Some(JobId("bench".into())),
                ..PutOptions::default()
            };
            writer.put_state_dict(&key(), &dict, &options).unwrap();
        }
        let mut memory = vec![0_u8; len * usize::try_from(TENSORS).unwrap()];
        let target = |(name, bytes)| Wanted {
            fqn: format!("layers.{name}"),
            place: Some(place.clone()),
            meta: meta.clone(),
            bytes,
        };
        let mut targets: Vec<Wanted<'_>> =
            (0..TENSORS).zip(memory.chunks_mut(len)).map(target).collect();
        let options = GetOptions { unverified: true, ..GetOptions::default() };
        let report = reader.get_state_dict_into(&key(), &mut targets, &options).unwrap();
        assert_eq!(report.bytes_transferred, report.bytes_needed);
        seconds.push(report.plan_seconds * 1e3);
    }
    print(&format!(
        "in a store: first {:.1} ms (target 500), then of new versions {:.2} and {:.2} ms (target 1)",
        seconds[0], seconds[1], seconds[2]
    ));
}
