//! Tensors of one element: all names, hardly a byte.

use std::hint::black_box;

use safetensors::SafeTensors;
use tssd_format::{Archive, Layout, Node, Options, StateDict, Tensor, Value};
use tssd_tests::race::{Runner, Target, race};

use crate::dcp::Peer;
use crate::model::{name, views};

const TENSORS: usize = 10_000;

/// Row 5. safetensors makes a view of each tensor. We make all of the state dict again, or, in the second
/// of our lines, the reference of each tensor with its bytes. What is loaded is dropped in the same turn.
#[expect(clippy::print_stdout, reason = "a bench says what it leaves out")]
pub(crate) fn save_and_load() {
    let folder = tempfile::tempdir().unwrap();
    let [their_path, our_path] = ["theirs", "ours"].map(|name| folder.path().join(name));
    let mut dict = StateDict::new();
    for number in 0..TENSORS {
        dict.insert(name(number), Tensor::from_slice(&[1.5_f32], &[1]).unwrap());
    }
    let views = views(&dict);
    let save_theirs = || safetensors::serialize(&views, None).unwrap();
    race(
        "5. save and load 10,000 tensors of one element, memory",
        None,
        51,
        vec![
            Runner::new("safetensors: serialize; deserialize, tensors", || {
                load_theirs(&save_theirs());
            }),
            Runner::new("tssd: plan, write; from_bytes, to_state_dict", || load(save(&dict)))
                .target(Target::Speed(5.0)),
            Runner::new("tssd: plan, write; from_bytes, each reference", || visit(save(&dict))),
        ],
    );
    race(
        "5. save and load 10,000 tensors of one element, a file",
        None,
        51,
        vec![
            Runner::new("safetensors: write; read, tensors", || {
                std::fs::write(&their_path, save_theirs()).unwrap();
                load_theirs(&std::fs::read(&their_path).unwrap());
            }),
            Runner::new("tssd: write; read, to_state_dict", || {
                std::fs::write(&our_path, save(&dict)).unwrap();
                load(std::fs::read(&our_path).unwrap());
            })
            .target(Target::Speed(5.0)),
        ],
    );
    let names: Vec<String> = (0..TENSORS).map(name).collect();
    let Some(mut peer) = Peer::start(&folder.path().join("dcp"), &names) else {
        println!("5. DCP is left out: `cargo xtask test --all` makes the environment with torch\n");
        return;
    };
    race(
        "5. save and load 10,000 tensors of one element, a file, beside DCP",
        None,
        3,
        vec![
            Runner::timed("DCP: save; load", || peer.save_and_load()),
            Runner::new("tssd: write; read, to_state_dict", || {
                std::fs::write(&our_path, save(&dict)).unwrap();
                load(std::fs::read(&our_path).unwrap());
            })
            .target(Target::Speed(50.0)),
        ],
    );
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

fn load(file: Vec<u8>) {
    let dict = Archive::from_bytes(file).unwrap().to_state_dict().unwrap();
    assert!(matches!(black_box(&dict).as_value(), Value::Dict(_)));
}

fn visit(file: Vec<u8>) {
    let archive = Archive::from_bytes(file).unwrap();
    let Node::Container(_, children) = archive.structure() else { unreachable!("a dict") };
    for (_, child) in &children {
        let Node::Tensors(run) = child else { unreachable!("a tensor") };
        for reference in run {
            black_box(archive.tensor_of(reference).unwrap());
        }
    }
}
