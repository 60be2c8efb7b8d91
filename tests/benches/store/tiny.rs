//! Many tiny tensors.

use tssd_format::StateDict;
use tssd_store::GetOptions;
use tssd_tests::bench::{Bench, Last, Model, Race, Runner, Target};
use tssd_tests::served::Served;

use crate::copies::{LIMIT, put_one};
use crate::key;

/// The limit is what another thread of the same process would be handed: a dict of names and tensors of its own. What a
/// turn has made, the next one drops.
pub(crate) fn put_and_get(bench: &mut Bench) {
    for (tensors, target) in [(10_000, None), (20_000, Some(60.0))] {
        let model = Model::tiny(tensors);
        let served = Served::new(LIMIT);
        let (writer, reader) = (served.connect(), served.connect());
        let get = || reader.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
        let views: Vec<_> = model.tensors().into_iter().collect();
        let (last, clone) = (Last::new(), Last::new());
        let ours = Runner::ours("tssd", || {
            last.renew(|| {
                put_one(&writer, &model);
                get()
            });
        });
        let ours = match target {
            Some(milliseconds) => ours.target(Target::Milliseconds(milliseconds)),
            None => ours,
        };
        bench.race(
            Race::new("put and get", "tensors of one element", 7)
                .of_tensors(&model.name, tensors)
                .with(ours)
                .with(Runner::limit("clone each into a dict", || {
                    clone.renew(|| {
                        let mut dict = StateDict::new();
                        for (name, each) in &views {
                            dict.insert(name.clone(), Clone::clone(*each));
                        }
                        dict
                    });
                })),
        );
        model.expect_same(&last.take());
        model.expect_same(&clone.take());
    }
}
