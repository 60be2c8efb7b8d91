//! The format against memcpy and against safetensors, on the same tensors in one run.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::collections::BTreeMap;
use std::hint::black_box;

use bytes::Bytes;
use safetensors::tensor::TensorView;
use tssd_format::{
    Archive, Dict, Dtype, Key, Layout, ObjectPath, Options, StateDict, Step, Tensor,
    TorchStoreStateDict, Value,
};
use tssd_tests::race::{Runner, race};

fn main() {
    fill();
    for count in [1_000, 30_000] {
        open(count);
    }
    open_a_million();
    save_and_load_small();
    look_up();
    round_trip();
}

/// The name of a tensor of a mixture of experts.
fn name(number: usize) -> String {
    let projection = ["down", "gate", "up"][number % 3];
    let (layer, expert) = (number / 768, number / 3 % 256);
    format!("model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight")
}

/// A model of this many `uint8` tensors of that many bytes.
fn model(tensors: usize, bytes: usize) -> StateDict {
    let mut dict = StateDict::new();
    for number in 0..tensors {
        let seed = number.to_string().len();
        let elements: Vec<u8> =
            (0..bytes).map(|at| u8::try_from((at * 31 + seed) % 251).unwrap()).collect();
        let len = u64::try_from(bytes).unwrap();
        dict.insert(name(number), Tensor::from_slice(&elements, &[len]).unwrap());
    }
    dict
}

fn tensors(dict: &StateDict) -> Vec<(String, &Tensor)> {
    let leaves = dict.leaves().into_iter();
    leaves
        .map(|(path, leaf)| match leaf {
            Value::Tensor(tensor) => (path.fqn(), tensor),
            _ => unreachable!("all leaves are tensors"),
        })
        .collect()
}

/// Copying with checksums into warm memory, on one thread, against copying alone.
fn fill() {
    let dict = model(32, 8 << 20);
    let sources: Vec<Bytes> =
        tensors(&dict).into_iter().map(|(_, tensor)| tensor.storage().bytes().clone()).collect();
    let bytes: usize = sources.iter().map(Bytes::len).sum();
    let layout = Layout::plan(&dict, &Options::new()).unwrap();
    let mut file = vec![1_u8; usize::try_from(layout.file_len()).unwrap()];
    let mut other = file.clone();
    let mut copy = vec![1_u8; bytes];
    let mut two_passes = vec![1_u8; bytes];
    race(
        "write 256 MiB in 32 tensors into warm memory, one thread",
        Some(u64::try_from(bytes).unwrap()),
        15,
        vec![
            Runner::new("memcpy", || {
                for (target, source) in copy.chunks_mut(8 << 20).zip(&sources) {
                    black_box(target).copy_from_slice(source);
                }
            }),
            Runner::new("CRC-32, then memcpy", || {
                for (target, source) in two_passes.chunks_mut(8 << 20).zip(&sources) {
                    black_box(crc32fast::hash(source));
                    black_box(target).copy_from_slice(source);
                }
            }),
            Runner::new("tssd: Layout::write_into, planned", || {
                layout.write_into(black_box(&mut file)).unwrap();
            }),
            Runner::new("tssd: plan and write", || {
                let layout = Layout::plan(&dict, &Options::new()).unwrap();
                layout.write_into(black_box(&mut other)).unwrap();
            }),
        ],
    );
}

fn encoded(dict: &StateDict) -> Bytes {
    TorchStoreStateDict::from_state_dict(dict).unwrap().as_bytes().clone()
}

fn views(dict: &StateDict) -> BTreeMap<String, TensorView<'_>> {
    tensors(dict)
        .into_iter()
        .map(|(name, tensor)| {
            let dtype = match tensor.meta().dtype() {
                Dtype::Float32 => safetensors::Dtype::F32,
                _ => safetensors::Dtype::U8,
            };
            let shape = tensor.meta().shape().iter();
            let shape = shape.map(|size| usize::try_from(*size).unwrap()).collect();
            (name, TensorView::new(dtype, shape, tensor.storage().bytes()).unwrap())
        })
        .collect()
}

fn safetensors_file(dict: &StateDict) -> Vec<u8> {
    safetensors::serialize(views(dict), None).unwrap()
}

/// Opening a file that is in memory: all names and shapes proven.
fn open(count: usize) {
    let dict = model(count, 16);
    let ours = encoded(&dict);
    let theirs = safetensors_file(&dict);
    race(
        &format!("open a file of {count} tensors"),
        None,
        15,
        vec![
            Runner::new("safetensors 0.8 (no checksums)", || {
                black_box(safetensors::SafeTensors::deserialize(black_box(&theirs)).unwrap());
            }),
            Runner::new("tssd: Archive::from_bytes (index CRC included)", || {
                black_box(Archive::from_bytes(black_box(ours.clone())).unwrap());
            })
            .target("target: 30,000 in x 0.05"),
        ],
    );
}

/// Opening what no model has yet, from memory and from a file that the system has in memory.
fn open_a_million() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("million.tssd");
    let ours = encoded(&model(1_000_000, 4));
    std::fs::write(&path, &ours).unwrap();
    race(
        "open a file of 1,000,000 tensors",
        None,
        7,
        vec![
            Runner::new("tssd: Archive::from_bytes", || {
                black_box(Archive::from_bytes(black_box(ours.clone())).unwrap());
            })
            .target("target: 120 ms"),
            Runner::new("tssd: Archive::open", || {
                black_box(Archive::open(&path).unwrap());
            })
            .target("target: 300 ms"),
        ],
    );
}

/// Tensors of one element: all names, hardly a byte.
fn save_and_load_small() {
    let folder = tempfile::tempdir().unwrap();
    let [their_path, our_path] = ["theirs", "ours"].map(|name| folder.path().join(name));
    let mut dict = StateDict::new();
    for number in 0..10_000 {
        dict.insert(name(number), Tensor::from_slice(&[1.5_f32], &[1]).unwrap());
    }
    let views = views(&dict);
    let save_theirs = || safetensors::serialize(&views, None).unwrap();
    let load_theirs = |file: &[u8]| {
        let file = safetensors::SafeTensors::deserialize(file).unwrap();
        black_box(file.tensors());
    };
    let save_ours = || {
        let layout = Layout::plan(&dict, &Options::new()).unwrap();
        let mut file = vec![0; usize::try_from(layout.file_len()).unwrap()];
        layout.write_into(&mut file).unwrap();
        file
    };
    let load_ours = |file: Vec<u8>| {
        black_box(Archive::from_bytes(file).unwrap().to_state_dict().unwrap());
    };
    race(
        "save and load 10,000 tensors of one element",
        None,
        31,
        vec![
            Runner::new("safetensors 0.8 (no checksums), memory", || load_theirs(&save_theirs())),
            Runner::new("tssd, memory", || load_ours(save_ours())).target("target: x 0.2"),
            Runner::new("safetensors 0.8 (no checksums), a file", || {
                std::fs::write(&their_path, save_theirs()).unwrap();
                load_theirs(&std::fs::read(&their_path).unwrap());
            }),
            Runner::new("tssd, a file", || {
                std::fs::write(&our_path, save_ours()).unwrap();
                load_ours(std::fs::read(&our_path).unwrap());
            })
            .target("target: a fifth of the line above"),
        ],
    );
}

/// One tensor among many, in an order that is not theirs.
fn look_up() {
    const COUNT: usize = 30_000;
    const LOOKUPS: usize = 10_000;
    let names: Vec<String> = (0..LOOKUPS).map(|number| name(number * 7919 % COUNT)).collect();
    let flat = model(COUNT, 4);
    let theirs = safetensors_file(&flat);
    let theirs = safetensors::SafeTensors::deserialize(&theirs).unwrap();
    let nested = Archive::from_bytes(encoded(&nested(&flat))).unwrap();
    let flat = Archive::from_bytes(encoded(&flat)).unwrap();
    let flat_paths: Vec<ObjectPath> =
        names.iter().map(|name| ObjectPath::root().key(name.as_str())).collect();
    let step = |part| Step::Key(Key::from(part));
    let nested_paths: Vec<ObjectPath> =
        names.iter().map(|name| name.split('.').map(step).collect()).collect();
    let by_path = |archive: &Archive, paths: &[ObjectPath]| {
        for path in paths {
            black_box(archive.value(path).unwrap());
        }
    };
    let by_fqn = |archive: &Archive| {
        for name in &names {
            black_box(archive.tensor(name).unwrap());
        }
    };
    race(
        "look up 10,000 of 30,000 tensors: 1 ms is 100 ns for each",
        None,
        15,
        vec![
            Runner::new("safetensors 0.8: tensor (a hash map)", || {
                for name in &names {
                    black_box(theirs.tensor(name).unwrap());
                }
            }),
            Runner::new("tssd, flat: value, by path", || by_path(&flat, &flat_paths))
                .target("target: 10 ms"),
            Runner::new("tssd, nested: value, by path", || by_path(&nested, &nested_paths))
                .target("target: 10 ms"),
            Runner::new("tssd, flat: tensor, by fqn", || by_fqn(&flat)).target("target: 10 ms"),
            Runner::new("tssd, nested: tensor, by fqn", || by_fqn(&nested)).target("target: 10 ms"),
        ],
    );
}

/// The same tensors in a tree of dicts, cut at the dots.
fn nested(flat: &StateDict) -> StateDict {
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
    for (name, tensor) in tensors(flat) {
        insert(nested.entries_mut(), &name, tensor);
    }
    nested
}

/// A model to bytes in new memory, and back to tensors that are views.
fn round_trip() {
    let dict = model(64, 1 << 20);
    let ours = encoded(&dict);
    race(
        "encode 64 MiB in 64 tensors into new memory",
        Some(64 << 20),
        15,
        vec![
            Runner::new("safetensors 0.8 (no checksums)", || {
                black_box(safetensors_file(&dict));
            }),
            Runner::new("tssd (CRC-32 of every chunk)", || {
                black_box(TorchStoreStateDict::from_state_dict(&dict).unwrap());
            }),
        ],
    );
    race(
        "prove 64 MiB and view it as a state dict",
        Some(64 << 20),
        15,
        vec![
            Runner::new("CRC-32 of the bytes alone", || {
                black_box(crc32fast::hash(black_box(&ours)));
            }),
            Runner::new("tssd: open, verify, to_state_dict", || {
                let archive = Archive::from_bytes(black_box(ours.clone())).unwrap();
                archive.verify().unwrap();
                black_box(archive.to_state_dict().unwrap());
            }),
        ],
    );
}
