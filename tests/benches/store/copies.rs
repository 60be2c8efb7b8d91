//! Puts and gets of a model, compared with memcpy, on one core and on two.

use std::cell::RefCell;

use tssd_store::blocking::Store;
use tssd_store::{GetOptions, PutOptions};
use tssd_tests::bench::{
    Bench, CopyBuffers, Model, Race, Runner, Target, core_label, run_on_cores, targets,
};
use tssd_tests::test_daemon::TestDaemon;

use crate::key;

const MEMCPY: &str = "memcpy";

/// Memory limit of the daemons in bytes: 20 GiB.
pub(crate) const LIMIT: u64 = 20 << 30;

/// Returns the cases: a model, the number of cores, the number of rounds.
fn cases(bench: &Bench) -> [(Model, usize, usize); 3] {
    [
        (Model::four_hundred(), 1, 9),
        (Model::four_hundred(), 2, 9),
        (Model::from_options(&bench.options), 2, 5),
    ]
}

/// Puts the fourth and later versions.
///
/// Two versions exist at once, so from the third one on every segment is recycled.
pub(crate) fn put(bench: &mut Bench) {
    for (model, threads, rounds) in &cases(bench) {
        run_on_cores(*threads, || {
            let served = TestDaemon::new(LIMIT);
            let (store, reader) = (served.connect(), served.connect());
            (0..3).for_each(|_| put_one(&store, model));
            let mut memory = CopyBuffers::new(model.bytes);
            let case = format!("put, {}", core_label(*threads));
            bench.race(
                Race::new(&case, "a new version, checksums included", *rounds)
                    .with_model(model)
                    .with_runner(
                        Runner::ours("tssd", || put_one(&store, model))
                            .with_target(Target::Speed(0.85, MEMCPY)),
                    )
                    .with_runner(Runner::limit(MEMCPY, || memory.copy(*threads))),
            );
            model.assert_equals(&reader.get_state_dict(&key(), &GetOptions::default()).unwrap().0);
        });
    }
}

/// Gets a new version into the tensors of the caller, with and without verification.
pub(crate) fn get(bench: &mut Bench) {
    for (model, threads, rounds) in &cases(bench) {
        run_on_cores(*threads, || {
            let served = TestDaemon::new(LIMIT);
            let (writer, reader) = (served.connect(), served.connect());
            let mut memory = CopyBuffers::new(model.bytes);
            let tensors = RefCell::new(vec![1_u8; usize::try_from(model.bytes).unwrap()]);
            let read = |unverified| {
                let options = GetOptions { unverified, ..GetOptions::default() };
                get_into(&reader, model, &mut tensors.borrow_mut(), &options);
            };
            let put_next = || put_one(&writer, model);
            (0..3).for_each(|_| {
                put_next();
                read(false);
            });
            let case = format!("get in place, {}", core_label(*threads));
            bench.race(
                Race::new(&case, "a new version each time, verified", *rounds)
                    .with_model(model)
                    .with_runner(
                        Runner::ours("tssd", || read(false))
                            .with_setup(put_next)
                            .with_target(Target::Speed(0.85, MEMCPY)),
                    )
                    .with_runner(
                        Runner::variant("tssd, not verified", || read(true))
                            .with_setup(put_next)
                            .with_target(Target::Speed(0.95, MEMCPY)),
                    )
                    .with_runner(Runner::limit(MEMCPY, || memory.copy(*threads))),
            );
            model.assert_bytes_equal(&tensors.borrow());
        });
    }
}

/// Puts the first version of a new daemon without memory, and gets a version with a new reader.
pub(crate) fn cold(bench: &mut Bench) {
    for (model, rounds) in [(Model::four_hundred(), 5), (Model::from_options(&bench.options), 3)] {
        run_on_cores(2, || {
            put_cold(bench, &model, rounds);
            get_cold(bench, &model, rounds);
        });
    }
}

fn put_cold(bench: &mut Bench, model: &Model, rounds: usize) {
    let mut memory = CopyBuffers::new(model.bytes);
    let current: RefCell<Option<(TestDaemon, Store)>> = RefCell::new(None);
    bench.race(
        Race::new("put cold", "the first version of a daemon, all memory is new, 2 cores", rounds)
            .with_model(model)
            .without_warmup()
            .with_runner(
                Runner::ours("tssd", || {
                    put_one(&current.borrow().as_ref().unwrap().1, model);
                })
                .with_setup(|| {
                    current.take();
                    let served = TestDaemon::new(LIMIT);
                    let store = served.connect();
                    current.replace(Some((served, store)));
                }),
            )
            .with_runner(Runner::limit("memcpy into new memory", || memory.copy_to_new_memory(2))),
    );
    let (_served, store) = current.take().unwrap();
    model.assert_equals(&store.get_state_dict(&key(), &GetOptions::default()).unwrap().0);
}

fn get_cold(bench: &mut Bench, model: &Model, rounds: usize) {
    let mut memory = CopyBuffers::new(model.bytes);
    let served = TestDaemon::new(LIMIT);
    let writer = served.connect();
    put_one(&writer, model);
    let reader: RefCell<Option<Store>> = RefCell::new(None);
    let mut tensors = vec![1_u8; usize::try_from(model.bytes).unwrap()];
    bench.race(
        Race::new("get cold", "in place, the first get of a reader, 2 cores", rounds)
            .with_model(model)
            .without_warmup()
            .with_runner(
                Runner::ours("tssd", || {
                    let reader = reader.borrow();
                    let options = GetOptions::default();
                    get_into(reader.as_ref().unwrap(), model, &mut tensors, &options);
                })
                .with_setup(|| {
                    reader.take();
                    reader.replace(Some(served.connect()));
                }),
            )
            .with_runner(Runner::limit(MEMCPY, || memory.copy(2))),
    );
    model.assert_bytes_equal(&tensors);
}

pub(crate) fn put_one(store: &Store, model: &Model) {
    store.put_state_dict(&key(), &model.dict, &PutOptions::default()).unwrap();
}

pub(crate) fn get_into(store: &Store, model: &Model, memory: &mut [u8], options: &GetOptions) {
    store.get_state_dict_into(&key(), &mut targets(model, memory), options).unwrap();
}
