//! Transfers of a version from the device to host memory, and back.

use tssd_store::{GetOptions, PutOptions};
use tssd_tests::bench::{Bench, Race, Runner, Target, shapes_of};
use tssd_tests::device_context::DeviceContext;
use tssd_tests::test_daemon::TestDaemon;

use crate::weights::Weights;
use crate::{ORDINAL, key};

const COPY: &str = "a plain copy, pinned";

/// Races puts of device tensors into host memory, and gets into device tensors.
pub(crate) fn put_and_get(bench: &mut Bench) {
    let (name, shapes) = shapes_of(&bench.options);
    let caller = DeviceContext::new(ORDINAL);
    let weights = Weights::new(&caller, &shapes);
    weights.write(&caller);
    let (sums, len) = (weights.checksums(&caller), usize::try_from(weights.bytes()).unwrap());
    // Memory for the current version, the next one, and the padding between tensors.
    let served = TestDaemon::new(weights.bytes() * 3 + (256 << 20));
    let (store, key) = (served.connect(), key("host"));
    let put = || {
        store.put_state_dict(&key, &weights.dict(&caller), &PutOptions::default()).unwrap();
    };
    let memories = weights.device_memories(&caller);
    let get = || {
        let mut targets = weights.targets(&memories);
        store.get_state_dict_into(&key, &mut targets, &GetOptions::default()).unwrap();
    };
    let (whole, mut pinned) = (caller.allocate(len), caller.allocate_pinned(len));
    let race = |case, what| {
        Race::new(case, what, 9).with_tensors(&name, shapes.len()).with_bytes(weights.bytes())
    };
    bench.race(
        race("to the host", "a new version, in the host's memory when it returns")
            .with_runner(Runner::ours("tssd", put).with_target(Target::Speed(0.9, COPY)))
            .with_runner(Runner::limit(COPY, || {
                caller.read_into(&whole, &mut pinned.bytes()[..len]);
            })),
    );
    bench.race(
        race("from the host", "all of it, verified, into tensors of the device")
            .with_runner(Runner::ours("tssd", get).with_target(Target::Speed(0.9, COPY)))
            .with_runner(Runner::limit(COPY, || caller.write(&whole, &pinned.bytes()[..len]))),
    );
    put();
    weights.clear(&caller);
    get();
    assert!(weights.checksums(&caller) == sums, "what was got is not what was put");
}
