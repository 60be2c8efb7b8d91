//! Growth of the costs of one daemon with the number of writers, readers and versions.

use std::cell::RefCell;
use std::num::NonZeroU32;

use tssd_format::Placement;
use tssd_store::GetOptions;
use tssd_tests::bench::{Bench, CopyBuffers, Curve, LastResult, Model, Runner, run_on_cores};
use tssd_tests::test_daemon::TestDaemon;

use crate::copies::{LIMIT, put_one};
use crate::key;
use crate::reshard::{Layout, Readers, Writers};

const SHAPE: [u64; 2] = [4096, 2048];

pub(crate) fn all(bench: &mut Bench) {
    run_on_cores(2, || {
        writers(bench);
        readers(bench);
        versions(bench);
    });
}

fn rows(ranks: u64) -> Layout {
    Layout::new(&[ranks], vec![Placement::Shard { dim: 0 }])
}

/// Puts the same number of bytes by a growing number of writers.
fn writers(bench: &mut Bench) {
    let what = "put of 268 MB by so many at once, 2 cores";
    let mut curve = Curve::series("writers", what, "writers");
    for ranks in [1, 2, 4] {
        let served = TestDaemon::new(LIMIT);
        let writers = Writers::new(&served, &SHAPE, &rows(ranks));
        let mut memory = CopyBuffers::new(2 * 16 * SHAPE[0] * SHAPE[1]);
        (0..3).for_each(|_| writers.put());
        curve.measure(
            bench,
            ranks,
            7,
            vec![
                Runner::ours("tssd", || writers.put()),
                Runner::limit("memcpy", || memory.copy(2)),
            ],
        );
        assert_complete(&served);
    }
    curve.record(bench);
}

/// Gets all bytes by each of a growing number of readers.
fn readers(bench: &mut Bench) {
    let what = "get of 268 MB in place by each of so many at once, verified, 2 cores";
    let mut curve = Curve::series("readers", what, "readers");
    for ranks in [1, 2, 4, 8] {
        let served = TestDaemon::new(LIMIT);
        let writers = Writers::new(&served, &SHAPE, &rows(1));
        let all = Layout::new(&[ranks], vec![Placement::Replicate]);
        let readers = RefCell::new(Readers::new(&served, &SHAPE, &all));
        let mut memory = CopyBuffers::new(2 * 16 * SHAPE[0] * SHAPE[1]);
        (0..2).for_each(|_| {
            writers.put();
            readers.borrow_mut().get();
        });
        curve.measure(
            bench,
            ranks,
            5,
            vec![
                Runner::ours("tssd", || readers.borrow_mut().get()).with_setup(|| writers.put()),
                Runner::limit("memcpy", || {
                    (0..ranks).for_each(|_| memory.copy(2));
                }),
            ],
        );
        readers.borrow().check(&SHAPE, &all);
    }
    curve.record(bench);
}

/// Gets the newest version, and compares it with its source.
fn assert_complete(served: &TestDaemon) {
    let all = Layout::new(&[1], vec![Placement::Replicate]);
    let mut reader = Readers::new(served, &SHAPE, &all);
    reader.get();
    reader.check(&SHAPE, &all);
}

/// Puts and gets small versions while the daemon retains a growing number of them.
fn versions(bench: &mut Bench) {
    let what = "put and get of 20 tensors, 1.3 MB, where so many versions are kept";
    let mut curve = Curve::series("versions", what, "versions kept");
    let model = Model::uniform(20, 20 << 16);
    for kept in [1, 10, 100, 1000] {
        let keep = NonZeroU32::new(kept).unwrap();
        let served = TestDaemon::with_options(LIMIT, |options| options.keep = keep);
        let (writer, reader) = (served.connect(), served.connect());
        (0..kept + 3).for_each(|_| put_one(&writer, &model));
        let mut memory = CopyBuffers::new(model.bytes);
        let last = LastResult::new();
        curve.measure(
            bench,
            u64::from(kept),
            51,
            vec![
                Runner::ours("tssd", || {
                    last.replace_with(|| {
                        put_one(&writer, &model);
                        reader.get_state_dict(&key(), &GetOptions::default()).unwrap().0
                    });
                }),
                Runner::limit("memcpy", || memory.copy(1)),
            ],
        );
        model.assert_equals(&last.take());
    }
    curve.record(bench);
}
