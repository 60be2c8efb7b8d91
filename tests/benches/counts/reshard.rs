//! Bytes that resharding transfers, compared with the bytes that it needs, and the memory of its plans.

use stats_alloc::Region;
use tssd_format::{DeviceMesh, Placement};
use tssd_store::GetOptions;
use tssd_tests::bench::{Bench, Curve, Fsdp, stacked_shapes};
use tssd_tests::test_daemon::TestDaemon;

use crate::sharded::{ShardedMatrix, ranks};
use crate::{ALLOCATOR, metrics};

const SENT: &str = "tssd_sent_bytes_total ";

/// Shape of the matrix: odd, and so large that the size of the index is negligible.
const SHAPE: [u64; 2] = [1231, 617];

/// Returns the layouts of writers and readers.
fn layouts() -> Vec<(DeviceMesh, Vec<Placement>)> {
    let rows = || Placement::Shard { dim: 0 };
    let columns = || Placement::Shard { dim: 1 };
    let layouts: [(&[u64], Vec<Placement>); 8] = [
        (&[1], vec![Placement::Replicate]),
        (&[4], vec![rows()]),
        (&[4], vec![columns()]),
        (&[8], vec![rows()]),
        (&[3], vec![columns()]),
        (&[2, 2], vec![Placement::Replicate, rows()]),
        (&[2, 2], vec![rows(), columns()]),
        (&[2, 3], vec![rows(), rows()]),
    ];
    let layout =
        |(mesh, placements): (&[u64], _)| (DeviceMesh::from_shape(mesh).unwrap(), placements);
    layouts.into_iter().map(layout).collect()
}

/// Reshards from each layout to each layout, through shared memory and over TCP.
#[expect(clippy::cast_precision_loss, reason = "a ratio is rounded anyway")]
pub(crate) fn all_layouts(bench: &mut Bench) {
    let served = TestDaemon::new(1 << 30);
    let local = served.connect();
    let remote = served.connect_tcp();
    let (mut pairs, mut worst) = (0_u32, [0_f64; 2]);
    for (number, (mesh, placements)) in layouts().into_iter().enumerate() {
        let model = ShardedMatrix::new(&format!("model.{number}"), SHAPE);
        model.put(&local, &mesh, &placements);
        for (mesh, placements) in layouts() {
            pairs += 1;
            for (store, worst) in [&local, &remote].into_iter().zip(&mut worst) {
                let (mut needed, mut transferred) = (0, 0);
                let sent = metrics::sum(served.metrics_address(), SENT);
                for rank in ranks(&mesh) {
                    let options = GetOptions::default();
                    let report = model.get(store, &mesh, rank, &placements, &options);
                    needed += report.bytes_needed;
                    transferred += report.bytes_transferred;
                }
                // For TCP, use the number of bytes that the daemon has sent.
                let sent = metrics::sum(served.metrics_address(), SENT) - sent;
                if std::ptr::eq(store, &raw const remote) {
                    transferred = sent;
                }
                *worst = worst.max(transferred as f64 / needed as f64);
            }
        }
    }
    let [local, remote] = worst;
    bench.record_counts(
        "reshard, each of 8 layouts to each",
        &[
            ("pairs", f64::from(pairs)),
            ("bytes copied / needed, shared memory, worst", local),
            ("bytes received / needed, TCP, worst", remote),
        ],
    );
}

/// Measures the memory of a plan and of its inputs, for a growing number of writers.
#[expect(clippy::cast_precision_loss, reason = "it is rounded anyway")]
pub(crate) fn plan_memory(bench: &mut Bench) {
    let what =
        "memory of the plan of one of 128 readers (TP) of Kimi K2, of so many writers (FSDP)";
    let mut curve = Curve::memory("plan memory", what, "writers");
    let shapes = stacked_shapes("kimi-k2");
    for writers in [32, 64, 128, 256] {
        let fsdp = Fsdp::new(&shapes, writers, 128);
        let region = Region::new(ALLOCATOR);
        let plan = fsdp.plan(0);
        let held = region.change();
        let bytes = held.bytes_allocated.saturating_sub(held.bytes_deallocated);
        curve.add_value(u64::from(writers), "tssd", bytes as f64);
        drop(plan);
    }
    curve.record(bench);
}
