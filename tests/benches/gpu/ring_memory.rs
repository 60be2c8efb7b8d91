//! Device memory that a ring uses.

use tssd_store::{PutOptions, Residency, Ring};
use tssd_tests::bench::{Bench, shapes_of};
use tssd_tests::device_context::DeviceContext;
use tssd_tests::test_daemon::TestDaemon;

use crate::reader::{Command, Reader};
use crate::weights::Weights;
use crate::{ORDINAL, TIMEOUT, key};

const VERSIONS: usize = 50;

/// Records the memory of the daemon's account and of the device over 50 versions.
pub(crate) fn record_memory(bench: &mut Bench) {
    let (_, shapes) = shapes_of(&bench.options);
    let caller = DeviceContext::new(ORDINAL);
    let weights = Weights::new(&caller, &shapes);
    let served = TestDaemon::new(64 << 20);
    let (store, reader) = (served.connect(), Reader::new(&served.url(), &shapes));
    let (before, dict) = (caller.free_bytes(), weights.dict(&caller));
    let residency = Residency::Ring(Ring::default());
    let options = PutOptions { residency, timeout: TIMEOUT, ..PutOptions::default() };
    let (mut accounted, mut used) = (Vec::new(), Vec::new());
    for _ in 0..VERSIONS {
        reader.send_during(&Command::Receive("ring".to_owned()), || {
            store.put_state_dict(&key("ring"), &dict, &options).unwrap();
        });
        accounted.push(store.status().unwrap().memory.device_bytes);
        used.push(before.saturating_sub(caller.free_bytes()));
    }
    #[expect(clippy::cast_precision_loss, reason = "there is not that much memory")]
    let range = |bytes: &[u64]| {
        [bytes.iter().min(), bytes.iter().max()].map(|bytes| *bytes.unwrap() as f64 / 1e6)
    };
    let ([min_accounted, max_accounted], [min_used, max_used]) = (range(&accounted), range(&used));
    bench.record_counts(
        "memory of the GPU that a ring takes, over 50 versions",
        &[
            ("MB of the daemon's account, least", min_accounted),
            ("MB of the daemon's account, most", max_accounted),
            ("MB less that are free, least", min_used),
            ("MB less that are free, most", max_used),
        ],
    );
}
