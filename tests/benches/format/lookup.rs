//! Lookups of single tensors among many.

use std::hint::black_box;

use safetensors::SafeTensors;
use tssd_format::{
    Archive, Dict, MapKey, ObjectPath, StateDict, Step, Tensor, TorchStoreStateDict, Value,
};
use tssd_tests::bench::{Bench, LastResult, Model, Race, Runner, Target, expert_name};

use crate::safetensors_peer;

/// Looks up 10,000 tensors in an order different from that of the file.
pub(crate) fn look_up_tensors(bench: &mut Bench) {
    const COUNT: usize = 30_000;
    const LOOKUPS: usize = 10_000;
    let names: Vec<String> =
        (0..LOOKUPS).map(|number| expert_name(number * 7919 % COUNT)).collect();
    let model = Model::experts(COUNT, 4);
    let theirs = safetensors_peer::encoded(&model);
    let theirs = SafeTensors::deserialize(&theirs).unwrap();
    let open = |dict: &StateDict| {
        let encoded = TorchStoreStateDict::from_state_dict(dict).unwrap();
        Archive::from_bytes(encoded.as_bytes().clone()).unwrap()
    };
    let (flat, nested) = (open(&model.dict), open(&nested(&model)));
    let flat_paths: Vec<ObjectPath> =
        names.iter().map(|name| ObjectPath::root().key(name.as_str())).collect();
    let step = |part| Step::Key(MapKey::from(part));
    let nested_paths: Vec<ObjectPath> =
        names.iter().map(|name| name.split('.').map(step).collect()).collect();
    // Each tensor is dropped before the next lookup. The last one of each turn is kept for the comparison.
    let lasts = [const { LastResult::new() }; 4];
    let by_path = |archive: &Archive, paths: &[ObjectPath], last: &LastResult<Value>| {
        let (end, others) = paths.split_last().unwrap();
        for path in others {
            black_box(archive.value(path).unwrap());
        }
        last.replace_with(|| archive.value(end).unwrap());
    };
    let by_fqn = |archive: &Archive, last: &LastResult<Value>| {
        let (end, others) = names.split_last().unwrap();
        for name in others {
            black_box(archive.tensor(name).unwrap());
        }
        last.replace_with(|| Value::Tensor(archive.tensor(end).unwrap()));
    };
    // 1 µs per lookup.
    let target = Target::Milliseconds(10.0);
    bench.race(
        Race::new("look up", "10,000 of 30,000 tensors by name: 1 ms is 100 ns for each", 21)
            .with_tensors(&model.name, COUNT)
            .with_runner(Runner::ours("tssd", || by_fqn(&flat, &lasts[0])).with_target(target))
            .with_runner(
                Runner::variant("tssd, nested", || by_fqn(&nested, &lasts[1])).with_target(target),
            )
            .with_runner(
                Runner::variant("tssd, by path", || by_path(&flat, &flat_paths, &lasts[2]))
                    .with_target(target),
            )
            .with_runner(
                Runner::variant("tssd, nested, by path", || {
                    by_path(&nested, &nested_paths, &lasts[3]);
                })
                .with_target(target),
            )
            .with_runner(Runner::peer("safetensors", || {
                for name in &names {
                    black_box(theirs.tensor(name).unwrap());
                }
            })),
    );
    let end = model.dict.entries().get(names.last().unwrap().as_str()).unwrap();
    assert!(lasts.iter().all(|last| last.take() == *end), "what is found is what was written");
}

/// Returns the same tensors in nested dicts: each dot of a name separates two levels.
fn nested(flat: &Model) -> StateDict {
    fn insert(dict: &mut Dict, name: &str, tensor: &Tensor) {
        let Some((first, rest)) = name.split_once('.') else {
            dict.insert(name, tensor.clone());
            return;
        };
        if dict.get(first).is_none() {
            dict.insert(first, Dict::new());
        }
        match dict.get_mut(first) {
            Some(Value::Dict(inner)) => insert(inner, rest, tensor),
            _ => unreachable!("no name is the beginning of another one"),
        }
    }
    let mut nested = StateDict::new();
    for (name, tensor) in flat.tensors() {
        insert(nested.entries_mut(), &name, tensor);
    }
    nested
}
