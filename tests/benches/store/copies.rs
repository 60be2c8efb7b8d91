//! Puts and gets of a model against memcpy, on one core and on two.

use std::cell::RefCell;
use std::hint::black_box;
use std::thread;

use tssd_format::{StateDict, Value};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, PutOptions, Target};
use tssd_tests::race::{self, Runner, race};
use tssd_tests::served::Served;

use crate::house::{bytes, faults, key, model, on_cores};

const ROUNDS: usize = 15;

/// The second and later versions.
pub(crate) fn put() {
    let dict = &model();
    for cores in [1, 2] {
        on_cores(cores, || {
            let served = Served::new(16 << 30);
            let store = served.connect();
            // Two versions are there at once: from the third on, every segment is warm.
            (0..3).for_each(|_| put_one(&store, dict));
            let before = faults();
            put_one(&store, dict);
            let after = faults();
            let mut memory = Memory::new(bytes(dict));
            race(
                &format!("put 400 tensors on {cores} cores, checksums included"),
                Some(bytes(dict)),
                ROUNDS,
                vec![
                    Runner::new("memcpy, warm memory", || memory.copy(cores)),
                    Runner::new("put", || put_one(&store, dict)).target(race::Target::Speed(0.85)),
                ],
            );
            print(&format!("page faults of one more put: {}", after - before));
        });
    }
}

/// Into the caller's tensors: a version that was not read before, and without a look at checksums.
pub(crate) fn get() {
    let dict = &model();
    for cores in [1, 2] {
        on_cores(cores, || {
            let served = Served::new(16 << 30);
            let (writer, reader) = (served.connect(), served.connect());
            let memory = &RefCell::new(Memory::new(bytes(dict)));
            let mut tensors = vec![1_u8; usize::try_from(bytes(dict)).unwrap()];
            let tensors = &RefCell::new(&mut tensors);
            let read = |unverified| {
                let options = GetOptions { unverified, ..GetOptions::default() };
                get_into(&reader, dict, &mut tensors.borrow_mut(), &options);
            };
            let proven = &read;
            (0..4).for_each(|_| {
                put_one(&writer, dict);
                read(false);
            });
            race(
                &format!("get 400 tensors in place on {cores} cores, a new version each time"),
                Some(bytes(dict)),
                ROUNDS,
                vec![
                    Runner::new("memcpy, warm memory", || memory.borrow_mut().copy(cores)),
                    Runner::new("verified", || proven(false))
                        .after(|| put_one(&writer, dict))
                        .target(race::Target::Speed(0.85)),
                    Runner::new("unverified", || read(true)).target(race::Target::Speed(0.95)),
                ],
            );
        });
    }
}

pub(crate) fn put_one(store: &Store, dict: &StateDict) {
    store.put_state_dict(&key(), dict, &PutOptions::default()).unwrap();
}

pub(crate) fn get_into(
    store: &Store,
    dict: &StateDict,
    mut memory: &mut [u8],
    options: &GetOptions,
) {
    let mut targets = Vec::new();
    for (path, leaf) in dict.leaves() {
        let Value::Tensor(tensor) = leaf else { continue };
        let meta = tensor.meta().clone();
        let (bytes, rest) = memory.split_at_mut(usize::try_from(meta.nbytes()).unwrap());
        memory = rest;
        targets.push(Target { fqn: path.fqn(), place: None, meta, bytes });
    }
    store.get_state_dict_into(&key(), &mut targets, options).unwrap();
}

/// Two buffers that are warm.
struct Memory {
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Memory {
    fn new(bytes: u64) -> Self {
        let source = vec![1; usize::try_from(bytes).unwrap()];
        Self { target: source.clone(), source }
    }

    /// One call for each thread.
    fn copy(&mut self, threads: usize) {
        let part = self.source.len().div_ceil(threads);
        thread::scope(|scope| {
            let parts = self.source.chunks(part).zip(self.target.chunks_mut(part));
            for (source, target) in parts {
                scope.spawn(move || black_box(target).copy_from_slice(source));
            }
        });
    }
}

#[expect(clippy::print_stdout, reason = "a bench prints its result")]
pub(crate) fn print(line: &str) {
    println!("  {line}\n");
}
