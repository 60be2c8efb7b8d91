//! Opening: all names, shapes and places proven, and the checksum of the index.

use std::hint::black_box;

use safetensors::SafeTensors;
use tssd_format::Archive;
use tssd_tests::race::{Runner, Target, race};

use crate::model::{encoded, model, safetensors_file};

/// Row 1: a file in memory, against the library that reads names and shapes without checksums.
pub(crate) fn as_safetensors() {
    let dict = model(30_000, 16);
    let ours = encoded(&dict);
    let theirs = safetensors_file(&dict);
    race(
        "1. open a file of 30,000 tensors in memory",
        None,
        31,
        vec![
            Runner::new("safetensors: SafeTensors::deserialize", || {
                black_box(SafeTensors::deserialize(black_box(&theirs)).unwrap());
            }),
            Runner::new("tssd: Archive::from_bytes", || {
                black_box(Archive::from_bytes(black_box(ours.clone())).unwrap());
            })
            .target(Target::Speed(20.0)),
        ],
    );
}

/// Row 2: what safetensors refuses, from memory and from a file that the system has in memory.
pub(crate) fn a_million() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("million.tssd");
    let ours = encoded(&model(1_000_000, 4));
    std::fs::write(&path, &ours).unwrap();
    race(
        "2. open a file of 1,000,000 tensors",
        None,
        9,
        vec![
            Runner::new("tssd: Archive::from_bytes, memory", || {
                black_box(Archive::from_bytes(black_box(ours.clone())).unwrap());
            })
            .target(Target::Milliseconds(120.0)),
            Runner::new("tssd: Archive::open, page cache", || {
                black_box(Archive::open(&path).unwrap());
            })
            .target(Target::Milliseconds(300.0)),
        ],
    );
}
