//! Views of a version: their creation, and reads of their bytes.

use std::cell::RefCell;

use tssd_format::{StateDict, Value};
use tssd_store::GetOptions;
use tssd_tests::bench::{
    Bench, CopyBuffers, Echo, Model, Race, Runner, Target, run_on_cores, sum_words,
};
use tssd_tests::test_daemon::TestDaemon;

use crate::copies::{LIMIT, put_one};
use crate::key;

/// Races the creation of views, and reads of their bytes.
pub(crate) fn create_and_read(bench: &mut Bench) {
    const OWN: &str = "own memory";
    for (model, rounds) in [(Model::four_hundred(), 15), (Model::from_options(&bench.options), 9)] {
        let model = &model;
        run_on_cores(1, || {
            let served = TestDaemon::new(LIMIT);
            let (writer, reader) = (served.connect(), served.connect());
            let options = GetOptions { unverified: true, ..GetOptions::default() };
            let got = RefCell::new(StateDict::new());
            let get = || *got.borrow_mut() = reader.get_state_dict(&key(), &options).unwrap().0;
            // The last result is dropped first. Otherwise three versions would exist at once.
            let put_next = || {
                drop(got.take());
                put_one(&writer, model);
            };
            (0..4).for_each(|_| {
                put_next();
                get();
            });
            let mut memory = CopyBuffers::new(model.bytes);
            let mut echo = Echo::new();
            bench.race(
                Race::new("views", "all tensors of a new version handed over, 1 core", rounds)
                    // No bytes are copied, so a rate would be meaningless.
                    .with_tensors(&model.name, model.tensors)
                    .with_runner(
                        Runner::ours("tssd", get)
                            .with_setup(put_next)
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
                        Runner::ours("tssd", || read_words(&got.borrow()))
                            .with_setup(|| {
                                put_next();
                                get();
                            })
                            .with_target(Target::Speed(0.9, OWN)),
                    )
                    .with_runner(Runner::limit(OWN, || read_words(&model.dict))),
            );
            model.assert_equals(&got.borrow());
        });
    }
}

/// Reads every word of all tensors.
fn read_words(dict: &StateDict) {
    for (_, leaf) in dict.leaves() {
        let Value::Tensor(tensor) = leaf else { continue };
        sum_words(tensor.view().contiguous_bytes().unwrap());
    }
}
