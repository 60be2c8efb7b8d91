//! The plan of one reader among many.

use tssd_format::{
    DeviceMesh, Dtype, Placement, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta,
    TensorSlice,
};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, JobId, PutOptions};
use tssd_tests::bench::{
    Bench, CopyBuffers, Curve, Fsdp, LastResult, Race, Role, Runner, Target, stacked_shapes,
};
use tssd_tests::served::TestDaemon;
use tssd_tests::sharding::local_meta;

use crate::copies::LIMIT;
use crate::key;
use crate::reshard::layers;

const TENSORS: u32 = 1000;
const WRITERS: u32 = 256;
const READERS: u64 = 128;

/// The matrices that are in a store.
const SMALL: [u64; 2] = [256, 128];

/// What a plan holds, at least: a place here and a place there for each copy.
const LIMIT_OF_PLANS: &str = "memcpy, 16 B a copy";
const COPY_BYTES: u64 = 16;

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
    let last = LastResult::new();
    let mut memory = CopyBuffers::new(COPY_BYTES * u64::from(TENSORS * WRITERS));
    bench.race(
        Race::new("plan", "one of 128 readers of columns, 256 writers of rows", 7)
            .with_tensors("matrices", fsdp.tensors())
            .with_runner(
                Runner::ours("tssd", || last.replace_with(|| fsdp.plan(0)))
                    .with_target(Target::Milliseconds(500.0)),
            )
            .with_runner(Runner::limit(LIMIT_OF_PLANS, || memory.copy(1))),
    );
    let copies = last.take();
    assert_eq!(copies.len(), usize::try_from(TENSORS * WRITERS).unwrap());
    fsdp.assert_complete(0, &copies);
}

/// FSDP of ever more ranks to TP of 128, of a model of a trillion parameters.
fn kimi(bench: &mut Bench) {
    let what = "one of 128 readers (TP) of Kimi K2, experts stacked, of so many writers (FSDP)";
    let mut curve = Curve::series("plan", what, "writers");
    let shapes = stacked_shapes("kimi-k2");
    for writers in [32, 64, 128, 256] {
        let fsdp = Fsdp::new(&shapes, writers, READERS);
        let copies = u64::try_from(fsdp.plan(0).len()).unwrap();
        let mut memory = CopyBuffers::new(COPY_BYTES * copies);
        let last = LastResult::new();
        curve.measure(
            bench,
            u64::from(writers),
            7,
            vec![
                Runner::ours("tssd", || last.replace_with(|| fsdp.plan(0))),
                Runner::limit(LIMIT_OF_PLANS, || memory.copy(1)),
            ],
        );
        fsdp.assert_complete(0, &last.take());
    }
    curve.record(bench);
}

/// With a store: what reports say of the first plan of a reader, and of the next one of a reader that has had the same
/// layout before.
fn in_a_store(bench: &mut Bench) {
    const ROUNDS: usize = 5;
    let served = TestDaemon::new(LIMIT);
    let (writer, reader) = (served.connect(), served.connect());
    let mut memory = CopyBuffers::new(COPY_BYTES * u64::from(TENSORS * WRITERS));
    put_rows(&writer, 1);
    seconds_of_plan(&reader);
    let (mut again, mut first) = (Vec::new(), Vec::new());
    for version in (2..).take(ROUNDS) {
        put_rows(&writer, version);
        again.push(seconds_of_plan(&reader));
        first.push(seconds_of_plan(&served.connect()));
    }
    // `--iterations` may want more rounds than there are versions.
    let (mut again, mut first) = (again.into_iter().cycle(), first.into_iter().cycle());
    bench.race(
        Race::new("plan again", "a later version of a layout, as its get says", ROUNDS)
            .with_tensors("matrices", usize::try_from(TENSORS).unwrap())
            .without_warmup()
            .with_runner(
                Runner::self_timed(Role::Ours, "tssd", || again.next().unwrap())
                    .with_target(Target::Milliseconds(1.0)),
            )
            .with_runner(Runner::self_timed(Role::Variant, "tssd, the first time", || {
                first.next().unwrap()
            }))
            .with_runner(Runner::limit(LIMIT_OF_PLANS, || memory.copy(1))),
    );
}

/// What one of so many ranks has of a small matrix.
fn place_of(ranks: u64, rank: u32, dim: u32) -> ShardSpec {
    let mesh = DeviceMesh::from_shape(&[ranks]).unwrap();
    let slice = TensorSlice::from_placements(&SMALL, &mesh, rank, &[Placement::Shard { dim }]);
    ShardSpec::new(slice.unwrap().remove(0)).with_mesh(mesh).unwrap()
}

/// What a row has in a version: all its bytes are the same.
fn byte_of(version: u64, row: u32) -> u8 {
    u8::try_from((version * 31 + u64::from(row)) % 251).unwrap()
}

/// A version of matrices of as many rows as there are writers.
fn put_rows(writer: &Store, version: u64) {
    for rank in 0..WRITERS {
        let place = place_of(u64::from(WRITERS), rank, 0);
        let meta = local_meta(Dtype::Bfloat16, &place);
        let bytes = vec![byte_of(version, rank); usize::try_from(meta.nbytes()).unwrap()];
        let tensor = Tensor::new(meta, Storage::from(bytes), 0).unwrap();
        let mut dict = StateDict::new();
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
}

/// Gets the columns of one reader, compares them with what was put, and says how long their plan took.
fn seconds_of_plan(reader: &Store) -> f64 {
    let place = place_of(READERS, 0, 1);
    let len = usize::try_from(local_meta(Dtype::Bfloat16, &place).nbytes()).unwrap();
    let mut memory = vec![0_u8; len * usize::try_from(TENSORS).unwrap()];
    let mut targets = layers(&place, &mut memory);
    let options = GetOptions { unverified: true, ..GetOptions::default() };
    let report = reader.get_state_dict_into(&key(), &mut targets, &options).unwrap();
    assert_eq!(report.bytes_transferred, report.bytes_needed);
    let rows = len / usize::try_from(WRITERS).unwrap();
    for columns in memory.chunks(len) {
        for (row, bytes) in (0..).zip(columns.chunks(rows)) {
            let wanted = byte_of(report.version, row);
            assert!(bytes.iter().all(|&byte| byte == wanted), "row {row} is what was put");
        }
    }
    report.plan_seconds
}
