//! Puts and gets of a sharded state dict against memcpy, in one run: 4 ranks put rows, 2 ranks get rows
//! or columns into memory of their own.

use std::cell::Cell;
use std::hint::black_box;

use tssd_format::{
    DeviceMesh, Dtype, Placement, Shard, ShardPlace, StateDict, Storage, Tensor, TensorMeta,
    TensorSlice,
};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, JobId, Key, PutOptions, Target};
use tssd_tests::race::{Runner, race};

/// 16 matrices of 16 MiB.
const TENSORS: u32 = 16;
const SHAPE: [u64; 2] = [4096, 2048];
const BYTES: u64 = 16 << 24;

pub(crate) fn four_to_two() {
    let folder = tempfile::tempdir().unwrap();
    let directory = Store::directory(folder.path()).unwrap();
    let memory = Store::memory().unwrap();
    let dicts: Vec<StateDict> = (0..4).map(|rank| shards(rank, 4)).collect();
    let source = vec![1_u8; usize::try_from(BYTES).unwrap()];
    let mut target = source.clone();
    let step = Cell::new(0);
    race(
        "4 ranks put 256 MiB, one after the other: new memory, new files, fsync",
        Some(BYTES),
        5,
        vec![
            Runner::new("memcpy, warm memory", || black_box(&mut target).copy_from_slice(&source)),
            Runner::new("memory store", || put(&memory, &dicts, &step)),
            Runner::new("directory store", || put(&directory, &dicts, &step)),
        ],
    );
    for (name, dim) in [("rows", 0), ("columns", 1)] {
        let mut ours = vec![0_u8; usize::try_from(BYTES / 2).unwrap()];
        let mut theirs = ours.clone();
        let mut fresh = ours.clone();
        race(
            &format!("rank 0 of 2 gets its {name} in place: 128 MiB"),
            Some(BYTES / 2),
            9,
            vec![
                Runner::new("memcpy, warm memory", || {
                    black_box(&mut target[..source.len() / 2])
                        .copy_from_slice(&source[..source.len() / 2]);
                }),
                Runner::new("memory store", || get(&memory, dim, &mut ours)),
                Runner::new("directory store, version read before", || {
                    get(&directory, dim, &mut theirs);
                }),
                Runner::new("directory store, first read: proves the bytes", || {
                    get(&Store::directory(folder.path()).unwrap(), dim, &mut fresh);
                }),
            ],
        );
    }
}

fn key() -> Key {
    Key::new("model").unwrap()
}

fn place(rank: u32, of: u64, dim: u32) -> ShardPlace {
    let mesh = DeviceMesh::from_shape(&[of]).unwrap();
    let placements = [Placement::Shard { dim }];
    let slice = TensorSlice::from_placements(&SHAPE, &mesh, rank, &placements).unwrap().remove(0);
    ShardPlace::new(slice).on_mesh(mesh).unwrap().placed(placements).unwrap()
}

fn shards(rank: u32, of: u64) -> StateDict {
    let mut dict = StateDict::new();
    for number in 0..TENSORS {
        let place = place(rank, of, 0);
        let meta = TensorMeta::new(Dtype::Bfloat16, place.slice().local_shape()).unwrap();
        let bytes = vec![rank.to_le_bytes()[0]; usize::try_from(meta.nbytes()).unwrap()];
        let tensor = Tensor::new(meta, Storage::from(bytes), 0).unwrap();
        dict.insert(format!("layers.{number}"), Shard::new(tensor, place).unwrap());
    }
    dict
}

fn put(store: &Store, dicts: &[StateDict], step: &Cell<u64>) {
    step.set(step.get() + 1);
    for dict in dicts {
        let options = PutOptions {
            version: Some(step.get()),
            job: Some(JobId("bench".into())),
            ..PutOptions::default()
        };
        store.put_state_dict(&key(), dict, &options).unwrap();
    }
}

fn get(store: &Store, dim: u32, memory: &mut [u8]) {
    let place = place(0, 2, dim);
    let meta = TensorMeta::new(Dtype::Bfloat16, place.slice().local_shape()).unwrap();
    let len = usize::try_from(meta.nbytes()).unwrap();
    let target = |(number, bytes)| Target {
        fqn: format!("layers.{number}"),
        place: Some(place.clone()),
        meta: meta.clone(),
        bytes,
    };
    let mut targets: Vec<Target<'_>> =
        (0..TENSORS).zip(memory.chunks_mut(len)).map(target).collect();
    let report = store.get_state_dict_into(&key(), &mut targets, &GetOptions::default()).unwrap();
    assert_eq!(report.bytes_transferred, report.bytes_needed);
}
