//! Views of a version: handed over, and read.

use std::cell::RefCell;

use tssd_format::{StateDict, Value};
use tssd_store::GetOptions;
use tssd_tests::bench::{
    Bench, CopyBuffers, Echo, Model, Race, Runner, Target, run_on_cores, sum_words,
};
use tssd_tests::served::TestDaemon;

use crate::copies::{LIMIT, put_one};
use crate::key;

pub(crate) fn of_one_version(bench: &mut Bench) {
    const OWN: &str = "own memory";
    for (model, rounds) in [(Model::four_hundred(), 15), (Model::from_options(&bench.options), 9)] {
        let model = &model;
        run_on_cores(1, || {
            let served = TestDaemon::new(LIMIT);
            let (writer, reader) = (served.connect(), served.connect());
            let options = GetOptions { unverified: true, ..GetOptions::default() };
            let got = RefCell::new(StateDict::new());
            let get = || *got.borrow_mut() = reader.get_state_dict(&key(), &options).unwrap().0;
            // What was got is dropped first: else three versions are there at once.
            let renew = || {
                drop(got.take());
                put_one(&writer, model);
            };
            (0..4).for_each(|_| {
                renew();
                get();
            });
            let mut memory = CopyBuffers::new(model.bytes);
            let mut echo = Echo::new();
            bench.race(
                Race::new("views", "all tensors of a new version handed over, 1 core", rounds)
                    // No byte moves: a rate would say nothing.
                    .with_tensors(&model.name, model.tensors)
                    .with_runner(
                        Runner::ours("tssd", get)
                            .with_setup(renew)
                            .with_target(Target::Milliseconds(1.0)),
                    )
                    .with_runner(Runner::limit("64 B there and back by a socket", || {
                        echo.round_trip();
                    }))
                    .with_runner(Runner::variant("memcpy", || memory.copy(1))),
            );
            model.assert_equals(&got.borrow());
            drop((memory, echo));
            bench.race(
                Race::new("views read", "every byte of them once, 1 core", rounds)
                    .with_model(model)
                    .with_runner(
                        Runner::ours("tssd", || add(&got.borrow()))
                            .with_setup(|| {
                                renew();
                                get();
                            })
                            .with_target(Target::Speed(0.9, OWN)),
                    )
                    .with_runner(Runner::limit(OWN, || add(&model.dict))),
            );
            model.assert_equals(&got.borrow());
        });
    }
}

/// Looks at every word.
fn add(dict: &StateDict) {
    for (_, leaf) in dict.leaves() {
        let Value::Tensor(tensor) = leaf else { continue };
        sum_words(tensor.view().contiguous_bytes().unwrap());
    }
}
