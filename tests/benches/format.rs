//! The format against memcpy and against safetensors, on the same tensors in one run.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::collections::BTreeMap;
use std::hint::black_box;

use bytes::Bytes;
use tssd_format::{Archive, Layout, Options, StateDict, Tensor, TorchStoreStateDict, Value};
use tssd_tests::race::{Runner, race};

fn main() {
    fill();
    for count in [1_000, 30_000] {
        open(count);
    }
    round_trip();
}

/// A model of this many `uint8` tensors of that many bytes.
fn model(tensors: usize, bytes: usize) -> StateDict {
    let mut dict = StateDict::new();
    for number in 0..tensors {
        let seed = number.to_string().len();
        let elements: Vec<u8> =
            (0..bytes).map(|at| u8::try_from((at * 31 + seed) % 251).unwrap()).collect();
        let len = u64::try_from(bytes).unwrap();
        let name = format!("model.layers.{number}.mlp.down_proj.weight");
        dict.insert(name, Tensor::from_slice(&elements, &[len]).unwrap());
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

fn safetensors_file(dict: &StateDict) -> Vec<u8> {
    let views: BTreeMap<String, safetensors::tensor::TensorView<'_>> = tensors(dict)
        .into_iter()
        .map(|(name, tensor)| {
            let shape = vec![tensor.storage().bytes().len()];
            let bytes = tensor.storage().bytes();
            (
                name,
                safetensors::tensor::TensorView::new(safetensors::Dtype::U8, shape, bytes).unwrap(),
            )
        })
        .collect();
    safetensors::serialize(views, None).unwrap()
}

/// Opening a file that is in memory: all names and shapes proven.
fn open(count: usize) {
    let dict = model(count, 16);
    let ours = TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().clone();
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
            }),
        ],
    );
}

/// A model to bytes in new memory, and back to tensors that are views.
fn round_trip() {
    let dict = model(64, 1 << 20);
    let ours = TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().clone();
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
