//! The plan of one reader among many.

use tssd_format::{
    DeviceMesh, Dtype, Placement, Shard, ShardPlace, StateDict, Storage, Tensor, TensorMeta,
    TensorSlice,
};
use tssd_store::{GetOptions, JobId, PutOptions, Target as Wanted, TargetMemory};
use tssd_tests::bench::{Bench, Curve, Fsdp, Memory, Race, Role, Runner, Target, stacked_shapes};
use tssd_tests::served::Served;
use tssd_tests::sharding::meta_of;

use crate::copies::LIMIT;
use crate::key;

const TENSORS: u32 = 1000;
const WRITERS: u32 = 256;
const READERS: u64 = 128;

pub(crate) fn many_ranks(bench: &mut Bench) {
    rows_to_columns(bench);
    kimi(bench);
    in_a_store(bench);
}

/// What a reader computes when a layout is new to it.
fn rows_to_columns(bench: &mut Bench) {
    let meta = TensorMeta::new(Dtype::Bfloat16, &[4096, 4096]).unwrap();
    let tensors =
        (0..TENSORS).map(|number| (format!("layers.{number}.o_proj.weight"), meta.clone()));
    let fsdp = Fsdp::new(&tensors.collect::<Vec<_>>(), WRITERS, READERS);
    assert_eq!(fsdp.plan(0).len(), usize::try_from(TENSORS * WRITERS).unwrap());
    bench.race(
        Race::new("plan", "one of 128 readers of columns, 256 writers of rows", 7)
            .of_tensors("matrices", fsdp.tensors())
            .with(Runner::ours("tssd", || drop(fsdp.plan(0))).target(Target::Milliseconds(500.0))),
    );
}

/// FSDP of ever more ranks to TP of 128, of a model of a trillion parameters.
fn kimi(bench: &mut Bench) {
    let what = "one of 128 readers (TP) of Kimi K2, experts stacked, of so many writers (FSDP)";
    let mut curve = Curve::series("plan", what, "writers");
    let shapes = stacked_shapes("kimi-k2");
    for writers in [32, 64, 128, 256] {
        let fsdp = Fsdp::new(&shapes, writers, READERS);
        let copies = u64::try_from(fsdp.plan(0).len()).unwrap();
        // What a plan holds, at least: a place here and a place there for each copy.
        let mut memory = Memory::new(16 * copies);
        curve.at(
            bench,
            u64::from(writers),
            7,
            vec![
                Runner::ours("tssd", || drop(fsdp.plan(0))),
                Runner::limit("memcpy, 16 B a copy", || memory.copy(1)),
            ],
        );
    }
    curve.record(bench);
}

/// With a store: what reports say of the first plan, and of the next ones of the same layout.
fn in_a_store(bench: &mut Bench) {
    const SMALL: [u64; 2] = [256, 128];
    let served = Served::new(LIMIT);
    let (writer, reader) = (served.connect(), served.connect());
    let mesh = DeviceMesh::from_shape(&[u64::from(WRITERS)]).unwrap();
    let place_of = |mesh: &DeviceMesh, rank, dim| {
        let slice = TensorSlice::from_placements(&SMALL, mesh, rank, &[Placement::Shard { dim }]);
        ShardPlace::new(slice.unwrap().remove(0)).on_mesh(mesh.clone()).unwrap()
    };
    let readers = DeviceMesh::from_shape(&[READERS]).unwrap();
    let place = place_of(&readers, 0, 1);
    let meta = meta_of(Dtype::Bfloat16, &place);
    let len = usize::try_from(meta.nbytes()).unwrap();
    let mut seconds = Vec::new();
    for version in 1..=3 {
        for rank in 0..WRITERS {
            let mut dict = StateDict::new();
            let place = place_of(&mesh, rank, 0);
            let meta = meta_of(Dtype::Bfloat16, &place);
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
            memory: TargetMemory::Here(bytes),
        };
        let mut targets: Vec<Wanted<'_>> =
            (0..TENSORS).zip(memory.chunks_mut(len)).map(target).collect();
        let options = GetOptions { unverified: true, ..GetOptions::default() };
        let report = reader.get_state_dict_into(&key(), &mut targets, &options).unwrap();
        assert_eq!(report.bytes_transferred, report.bytes_needed);
        seconds.push(report.plan_seconds);
    }
    let mut next = seconds.split_off(1).into_iter().cycle();
    let first = seconds[0];
    bench.race(
        Race::new("plan again", "a later version of a layout, as its get says", 2)
            .of_tensors("matrices", usize::try_from(TENSORS).unwrap())
            .cold()
            .with(
                Runner::timed(Role::Ours, "tssd", || next.next().unwrap())
                    .target(Target::Milliseconds(1.0)),
            )
            .with(Runner::timed(Role::Also, "tssd, the first time", || first)),
    );
}
