//! Puts and gets of many tensors of one element.

use tssd_format::StateDict;
use tssd_store::GetOptions;
use tssd_tests::bench::{Bench, LastResult, Model, Race, Runner, Target};
use tssd_tests::test_daemon::TestDaemon;

use crate::copies::{LIMIT, put_one};
use crate::key;

/// Puts and gets 10,000 and 20,000 tensors.
///
/// The limit is a handover to another thread of the same process: a new dict of cloned names and tensors.
/// Each turn drops the result of the turn before.
pub(crate) fn put_and_get(bench: &mut Bench) {
    for (tensors, target) in [(10_000, None), (20_000, Some(60.0))] {
        let model = Model::tiny(tensors);
        let served = TestDaemon::new(LIMIT);
        let (writer, reader) = (served.connect(), served.connect());
        let get = || reader.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
        let views: Vec<_> = model.tensors().into_iter().collect();
        let (last, clone) = (LastResult::new(), LastResult::new());
        let ours = Runner::ours("tssd", || {
            last.replace_with(|| {
                put_one(&writer, &model);
                get()
            });
        });
        let ours = match target {
            Some(milliseconds) => ours.with_target(Target::Milliseconds(milliseconds)),
            None => ours,
        };
        bench.race(
            Race::new("put and get", "tensors of one element", 7)
                .with_tensors(&model.name, tensors)
                .with_runner(ours)
                .with_runner(Runner::limit("clone each into a dict", || {
                    clone.replace_with(|| {
                        let mut dict = StateDict::new();
                        for (name, each) in &views {
                            dict.insert(name.clone(), Clone::clone(*each));
                        }
                        dict
                    });
                })),
        );
        model.assert_equals(&last.take());
        model.assert_equals(&clone.take());
    }
}
