//! Views of a version: handed over, and read.

use std::cell::RefCell;

use tssd_format::{StateDict, Value};
use tssd_store::GetOptions;
use tssd_tests::bench::{Bench, Echo, Memory, Model, Race, Runner, Target, adding_up, on_cores};
use tssd_tests::served::Served;

use crate::copies::{LIMIT, put_one};
use crate::key;

pub(crate) fn of_one_version(bench: &mut Bench) {
    const OWN: &str = "own memory";
    for (model, rounds) in [(Model::four_hundred(), 15), (Model::of(&bench.options), 9)] {
        let model = &model;
        on_cores(1, || {
            let served = Served::new(LIMIT);
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
            let mut memory = Memory::new(model.bytes);
            let mut echo = Echo::new();
            bench.race(
                Race::new("views", "all tensors of a new version handed over, 1 core", rounds)
                    // No byte moves: a rate would say nothing.
                    .of_tensors(&model.name, model.tensors)
                    .with(Runner::ours("tssd", get).before(renew).target(Target::Milliseconds(1.0)))
                    .with(Runner::limit("64 B there and back by a socket", || {
                        echo.there_and_back();
                    }))
                    .with(Runner::also("memcpy", || memory.copy(1))),
            );
            model.expect_same(&got.borrow());
            drop((memory, echo));
            bench.race(
                Race::new("views read", "every byte of them once, 1 core", rounds)
                    .of(model)
                    .with(
                        Runner::ours("tssd", || add(&got.borrow()))
                            .before(|| {
                                renew();
                                get();
                            })
                            .target(Target::Speed(0.9, OWN)),
                    )
                    .with(Runner::limit(OWN, || add(&model.dict))),
            );
            model.expect_same(&got.borrow());
        });
    }
}

/// Looks at every word.
fn add(dict: &StateDict) {
    for (_, leaf) in dict.leaves() {
        let Value::Tensor(tensor) = leaf else { continue };
        adding_up(tensor.view().contiguous_bytes().unwrap());
    }
}
