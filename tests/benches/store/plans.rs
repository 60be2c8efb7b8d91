//! Plans of one reader among many.

use tssd_format::{
    DeviceMesh, Dtype, Placement, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta,
    TensorSlice,
};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, JobId, PutOptions};
use tssd_tests::bench::{
    Bench, CopyBuffers, Curve, Fsdp, LastResult, Race, Role, Runner, Target, stacked_shapes,
};
use tssd_tests::sharding::local_meta;
use tssd_tests::test_daemon::TestDaemon;

use crate::copies::LIMIT;
use crate::key;
use crate::reshard::layer_targets;

const TENSORS: u32 = 1000;
const WRITERS: u32 = 256;
const READERS: u64 = 128;

/// Shape of the matrices in the store.
const SMALL_SHAPE: [u64; 2] = [256, 128];

/// Name of the limit: a memcpy of the minimum size of a plan.
const PLAN_LIMIT: &str = "memcpy, 16 B a copy";
/// Minimum size of a copy in a plan, in bytes: a source offset and a target offset.
const COPY_BYTES: u64 = 16;

/// Races plans for many ranks.
pub(crate) fn many_ranks(bench: &mut Bench) {
    rows_to_columns(bench);
    kimi(bench);
    in_a_store(bench);
}

/// Plans a reader of columns, where the writers have rows, without a cached plan.
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
            .with_runner(Runner::limit(PLAN_LIMIT, || memory.copy(1))),
    );
    let copies = last.take();
    assert_eq!(copies.len(), usize::try_from(TENSORS * WRITERS).unwrap());
    fsdp.assert_complete(0, &copies);
}

/// Plans from FSDP of a growing number of ranks to TP of 128, for a model of a trillion parameters.
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
                Runner::limit(PLAN_LIMIT, || memory.copy(1)),
            ],
        );
        fsdp.assert_complete(0, &last.take());
    }
    curve.record(bench);
}

/// Compares the first plan of a reader with later plans for the same layout, as reported by a store.
fn in_a_store(bench: &mut Bench) {
    const ROUNDS: usize = 5;
    let served = TestDaemon::new(LIMIT);
    let (writer, reader) = (served.connect(), served.connect());
    let mut memory = CopyBuffers::new(COPY_BYTES * u64::from(TENSORS * WRITERS));
    put_rows(&writer, 1);
    plan_seconds(&reader);
    let (mut again, mut first) = (Vec::new(), Vec::new());
    for version in (2..).take(ROUNDS) {
        put_rows(&writer, version);
        again.push(plan_seconds(&reader));
        first.push(plan_seconds(&served.connect()));
    }
    // `--iterations` may set more rounds than there are versions.
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
            .with_runner(Runner::limit(PLAN_LIMIT, || memory.copy(1))),
    );
}

/// Returns the shard of one of `ranks` ranks of a small matrix.
fn shard_spec(ranks: u64, rank: u32, dim: u32) -> ShardSpec {
    let mesh = DeviceMesh::from_shape(&[ranks]).unwrap();
    let slice =
        TensorSlice::from_placements(&SMALL_SHAPE, &mesh, rank, &[Placement::Shard { dim }]);
    let spec = ShardSpec::new(slice.unwrap().remove(0)).with_mesh(mesh).unwrap();
    spec.with_placements([Placement::Shard { dim }]).unwrap()
}

/// Returns the value of all bytes of a row in a version.
fn row_byte(version: u64, row: u32) -> u8 {
    u8::try_from((version * 31 + u64::from(row)) % 251).unwrap()
}

/// Puts a version of matrices. Each writer has one row.
fn put_rows(writer: &Store, version: u64) {
    for rank in 0..WRITERS {
        let place = shard_spec(u64::from(WRITERS), rank, 0);
        let meta = local_meta(Dtype::Bfloat16, &place);
        let bytes = vec![row_byte(version, rank); usize::try_from(meta.nbytes()).unwrap()];
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

/// Gets the columns of one reader, compares them, and returns the time of the plan in seconds.
fn plan_seconds(reader: &Store) -> f64 {
    let place = shard_spec(READERS, 0, 1);
    let len = usize::try_from(local_meta(Dtype::Bfloat16, &place).nbytes()).unwrap();
    let mut memory = vec![0_u8; len * usize::try_from(TENSORS).unwrap()];
    let mut targets = layer_targets(&place, &mut memory);
    let options = GetOptions { unverified: true, ..GetOptions::default() };
    let report = reader.get_state_dict_into(&key(), &mut targets, &options).unwrap();
    assert_eq!(report.bytes_transferred, report.bytes_needed);
    let rows = len / usize::try_from(WRITERS).unwrap();
    for columns in memory.chunks(len) {
        for (row, bytes) in (0..).zip(columns.chunks(rows)) {
            let expected = row_byte(report.version, row);
            assert!(bytes.iter().all(|&byte| byte == expected), "row {row} is what was put");
        }
    }
    report.plan_seconds
}
