//! Bytes received from a bucket for a slice of a sharded state dict.

use std::sync::Arc;

use object_store::memory::InMemory;
use tssd_format::{DeviceMesh, Placement};
use tssd_store::GetOptions;
use tssd_store::blocking::Store;
use tssd_tests::bench::Bench;

use crate::sharded::ShardedMatrix;

/// Number of writers, which shard by rows.
const WRITERS: u64 = 4;
/// Number of readers. Each needs 5 % of the matrix.
const READERS: u64 = 20;

/// The reader that is measured.
const RANK: u32 = 7;

/// Matrix sizes of models of half a billion to 30 billion parameters.
const SHAPES: [(&str, [u64; 2]); 3] =
    [("4 MiB", [1024, 1024]), ("64 MiB", [4096, 4096]), ("512 MiB", [32_768, 4096])];

/// Gets 5 % of a matrix by rows, with and without verification, and by columns without verification.
#[expect(clippy::cast_precision_loss, reason = "a ratio is rounded anyway")]
pub(crate) fn five_percent(bench: &mut Bench) {
    let [writers, readers] =
        [WRITERS, READERS].map(|ranks| DeviceMesh::from_shape(&[ranks]).unwrap());
    for (size, shape) in SHAPES {
        let store = Store::in_bucket(Arc::new(InMemory::new()), "").unwrap();
        let model = ShardedMatrix::new("model", shape);
        model.put(&store, &writers, &[Placement::Shard { dim: 0 }]);
        let ratio = |dim, unverified| {
            let options = GetOptions { unverified, ..GetOptions::default() };
            let placements = [Placement::Shard { dim }];
            let report = model.get(&store, &readers, RANK, &placements, &options);
            report.bytes_received as f64 / report.bytes_needed as f64
        };
        bench.record_counts(
            &format!("5 % of a matrix of {size} that 4 ranks put, out of a bucket"),
            &[
                ("bytes received / needed, rows, proven", ratio(0, false)),
                ("bytes received / needed, rows, not proven", ratio(0, true)),
                ("bytes received / needed, columns, not proven", ratio(1, true)),
            ],
        );
    }
}
