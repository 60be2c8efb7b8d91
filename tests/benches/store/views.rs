//! Views of a version: handed over, and read.

use std::cell::RefCell;
use std::hint::black_box;

use tssd_format::{StateDict, Value};
use tssd_store::GetOptions;
use tssd_tests::race::{Runner, Target, race};
use tssd_tests::served::Served;

use crate::copies::{print, put_one};
use crate::house::{bytes, faults, key, model, on_cores};

pub(crate) fn of_one_version() {
    let dict = &model();
    on_cores(1, || {
        let served = Served::new(16 << 30);
        let (writer, reader) = (served.connect(), served.connect());
        let options = GetOptions { unverified: true, ..GetOptions::default() };
        let got = RefCell::new(StateDict::new());
        let get = || *got.borrow_mut() = reader.get_state_dict(&key(), &options).unwrap().0;
        // What was got is dropped first: else three versions are there at once.
        let renew = || {
            drop(got.take());
            put_one(&writer, dict);
        };
        (0..4).for_each(|_| {
            renew();
            get();
        });
        race(
            "views of 400 tensors, a new version each time: handed over",
            None,
            15,
            vec![Runner::new("get", get).before(renew).target(Target::Milliseconds(1.0))],
        );
        renew();
        let before = faults();
        get();
        add(&got.borrow());
        let count = faults() - before;
        race(
            "the same: every byte read once",
            Some(bytes(dict)),
            15,
            vec![
                Runner::new("memory of this process's own", || add(dict)),
                Runner::new("views", || add(&got.borrow()))
                    .before(|| {
                        renew();
                        get();
                    })
                    .target(Target::Speed(0.9)),
            ],
        );
        print(&format!("page faults of one get and reading it: {count}"));
    });
}

/// Looks at every word.
fn add(dict: &StateDict) {
    let mut sum = 0_u64;
    for (_, leaf) in dict.leaves() {
        let Value::Tensor(tensor) = leaf else { continue };
        let bytes = tensor.storage().bytes();
        let (words, _) = bytes.as_chunks::<8>();
        sum = words.iter().fold(sum, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
    }
    black_box(sum);
}
