//! Many tensors of one element, so that names dominate the cost.
//!
//! `python/bench/tiny.py` has the targets: it compares with safetensors and with DCP, which exists only in Python.

use std::hint::black_box;

use safetensors::SafeTensors;
use tssd_format::{Archive, Layout, Node, Options, StateDict};
use tssd_tests::bench::{Bench, LastResult, Model, Race, Runner};

use crate::safetensors_peer;

/// Saves and loads, in memory and through a file.
///
/// safetensors creates a view of each tensor. TSSD creates the complete state dict or, in the variant "references",
/// reads each tensor. Each turn drops the result of the turn before. The last result is compared.
pub(crate) fn save_and_load(bench: &mut Bench) {
    let folder = tempfile::tempdir().unwrap();
    let [their_path, our_path] = ["theirs", "ours"].map(|name| folder.path().join(name));
    for (tensors, rounds) in [(10_000, 51), (20_000, 25)] {
        let model = Model::tiny(tensors);
        let views = safetensors_peer::views(&model);
        let save_theirs = || safetensors::serialize(&views, None).unwrap();
        let plain = save(&model.dict);
        let peer = "safetensors";
        let last = LastResult::new();
        bench.race(
            Race::new("save and load, memory", "tensors of one element", rounds)
                .with_tensors(&model.name, tensors)
                .with_runner(Runner::ours("tssd", || {
                    last.replace_with(|| load(save(&model.dict)));
                }))
                .with_runner(Runner::variant("tssd, references", || {
                    visit(save(&model.dict));
                }))
                .with_runner(Runner::peer(peer, || load_theirs(&save_theirs()))),
        );
        model.assert_equals(&last.take());
        bench.race(
            Race::new("save and load, a file", "tensors of one element", rounds)
                .with_tensors(&model.name, tensors)
                .with_runner(Runner::ours("tssd", || {
                    last.replace_with(|| {
                        std::fs::write(&our_path, save(&model.dict)).unwrap();
                        load(std::fs::read(&our_path).unwrap())
                    });
                }))
                .with_runner(Runner::peer(peer, || {
                    std::fs::write(&their_path, save_theirs()).unwrap();
                    load_theirs(&std::fs::read(&their_path).unwrap());
                }))
                .with_runner(Runner::limit("write and read", || {
                    std::fs::write(&our_path, &plain).unwrap();
                    black_box(std::fs::read(&our_path).unwrap());
                })),
        );
        model.assert_equals(&last.take());
    }
}

fn load_theirs(file: &[u8]) {
    black_box(SafeTensors::deserialize(file).unwrap().tensors());
}

fn save(dict: &StateDict) -> Vec<u8> {
    let layout = Layout::plan(dict, &Options::new()).unwrap();
    let mut file = Vec::with_capacity(usize::try_from(layout.file_len()).unwrap());
    layout.write_to(&mut file).unwrap();
    file
}

fn load(file: Vec<u8>) -> StateDict {
    Archive::from_bytes(file).unwrap().to_state_dict().unwrap()
}

fn visit(file: Vec<u8>) {
    let archive = Archive::from_bytes(file).unwrap();
    let Node::Container(_, children) = archive.structure() else { unreachable!("a dict") };
    for (_, child) in &children {
        let Node::Tensors(run) = child else { unreachable!("a tensor") };
        for reference in run {
            black_box(archive.read_tensor(reference).unwrap());
        }
    }
}
