//! Many tiny tensors.

use std::hint::black_box;

use tssd_store::GetOptions;
use tssd_tests::bench::{Bench, Model, Race, Runner, Target};
use tssd_tests::served::Served;

use crate::copies::{LIMIT, put_one};
use crate::key;

pub(crate) fn put_and_get(bench: &mut Bench) {
    for (tensors, target) in [(10_000, None), (20_000, Some(60.0))] {
        let model = Model::tiny(tensors);
        let served = Served::new(LIMIT);
        let (writer, reader) = (served.connect(), served.connect());
        let get = || reader.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
        let views: Vec<_> = model.tensors().into_iter().collect();
        let ours = Runner::ours("tssd", || {
            put_one(&writer, &model);
            assert_eq!(get().entries().len(), tensors);
        });
        let ours = match target {
            Some(milliseconds) => ours.target(Target::Milliseconds(milliseconds)),
            None => ours,
        };
        bench.race(
            Race::new("put and get", "tensors of one element", 7)
                .of_tensors(&model.name, tensors)
                .with(ours)
                .with(Runner::also("clone each", || {
                    black_box(views.iter().map(|(name, each)| (name.clone(), Clone::clone(*each))))
                        .for_each(drop);
                })),
        );
        model.expect_same(&get());
    }
}
