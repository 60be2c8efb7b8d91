//! What a ring takes of the device's memory.

use tssd_store::{PutOptions, Residency, Ring};
use tssd_tests::bench::{Bench, shapes_of};
use tssd_tests::caller::DeviceContext;
use tssd_tests::served::TestDaemon;

use crate::reader::{Ask, Reader};
use crate::weights::Weights;
use crate::{ORDINAL, SOON, key};

const VERSIONS: usize = 50;

pub(crate) fn of_a_ring(bench: &mut Bench) {
    let (_, shapes) = shapes_of(&bench.options);
    let caller = DeviceContext::new(ORDINAL);
    let weights = Weights::new(&caller, &shapes);
    let served = TestDaemon::new(64 << 20);
    let (store, reader) = (served.connect(), Reader::new(&served.url(), &shapes));
    let (before, dict) = (caller.free_bytes(), weights.dict(&caller));
    let residency = Residency::Ring(Ring::default());
    let options = PutOptions { residency, timeout: SOON, ..PutOptions::default() };
    let (mut kept, mut taken) = (Vec::new(), Vec::new());
    for _ in 0..VERSIONS {
        reader.meanwhile(&Ask::Receive("ring".to_owned()), || {
            store.put_state_dict(&key("ring"), &dict, &options).unwrap();
        });
        kept.push(store.status().unwrap().memory.devices);
        taken.push(before.saturating_sub(caller.free_bytes()));
    }
    #[expect(clippy::cast_precision_loss, reason = "there is not that much memory")]
    let range = |bytes: &[u64]| {
        [bytes.iter().min(), bytes.iter().max()].map(|bytes| *bytes.unwrap() as f64 / 1e6)
    };
    let ([kept_least, kept_most], [least, most]) = (range(&kept), range(&taken));
    bench.record_counts(
        "memory of the GPU that a ring takes, over 50 versions",
        &[
            ("MB of the daemon's account, least", kept_least),
            ("MB of the daemon's account, most", kept_most),
            ("MB less that are free, least", least),
            ("MB less that are free, most", most),
        ],
    );
}
