//! Costs of operations per tensor and per byte.

use std::cell::RefCell;

use tssd_store::GetOptions;
use tssd_tests::bench::peer::Peer;
use tssd_tests::bench::{Bench, CopyBuffers, Curve, Echo, LastResult, Model, Runner, run_on_cores};
use tssd_tests::test_daemon::TestDaemon;

use crate::copies::{LIMIT, get_into, put_one};
use crate::key;
use crate::pull::SocketCopy;

/// Measures puts, gets in place, views and pulls of several sizes.
pub(crate) fn all(bench: &mut Bench) {
    let mut put = Curve::fit("put", "a new version, warm memory");
    let mut into = Curve::fit("get in place", "a new version, verified");
    let mut views = Curve::fit("views", "of a new version, not verified");
    let mut pull = Curve::fit("pull", "a new version in place over loopback, verified");
    for tensors in [100, 10_000] {
        for bytes in [16_000_000, 400_000_000] {
            let model = &Model::uniform(tensors, bytes);
            run_on_cores(2, || {
                let served = TestDaemon::new(LIMIT);
                let (writer, reader) = (served.connect(), served.connect());
                let remote = served.connect_tcp();
                let (copier, mut echo) = (Peer::start("copy"), Echo::new());
                let mut socket = SocketCopy::new(&copier.startup_words[0], 2, bytes);
                let memory = RefCell::new(CopyBuffers::new(bytes));
                let target_bytes = RefCell::new(vec![1_u8; usize::try_from(bytes).unwrap()]);
                let put_next = || put_one(&writer, model);
                let read = |store| {
                    let options = GetOptions::default();
                    get_into(store, model, &mut target_bytes.borrow_mut(), &options);
                };
                (0..3).for_each(|_| {
                    put_next();
                    read(&reader);
                    read(&remote);
                });
                let copy = || {
                    Runner::limit("memcpy of each, 2 threads", || {
                        memory.borrow_mut().copy_in_parts(tensors, 2);
                    })
                };
                let size = (tensors, bytes);
                put.measure_size(bench, size, 5, vec![Runner::ours("tssd", put_next), copy()]);
                let ours = Runner::ours("tssd", || read(&reader)).with_setup(put_next);
                into.measure_size(bench, size, 5, vec![ours, copy()]);
                let options = GetOptions { unverified: true, ..GetOptions::default() };
                let last = LastResult::new();
                let view =
                    || last.replace_with(|| reader.get_state_dict(&key(), &options).unwrap().0);
                // As in the race of views, the last result is dropped first.
                let ours = Runner::ours("tssd", view).with_setup(|| {
                    last.clear();
                    put_next();
                });
                let round_trip =
                    Runner::limit("64 B there and back by a socket", || echo.round_trip());
                views.measure_size(bench, size, 5, vec![ours, round_trip]);
                model.assert_equals(&last.take());
                model.assert_bytes_equal(&target_bytes.borrow());
                let ours = Runner::ours("tssd", || read(&remote)).with_setup(put_next);
                let plain = Runner::limit("socket copy", || socket.run());
                pull.measure_size(bench, size, 3, vec![ours, plain]);
                model.assert_bytes_equal(&target_bytes.borrow());
            });
        }
    }
    for curve in [put, into, views, pull] {
        curve.record(bench);
    }
}
