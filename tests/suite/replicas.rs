//! What a host has read of others stays there: each byte comes once, and others may have it from there.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tssd_format::{Dtype, Region, StateDict, Storage, Tensor, TensorMeta};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, PutOptions};
use tssd_tests::etcd::Etcd;
use tssd_tests::served::Served;
use tssd_tests::steps::{eventually, key, publish, read};

const MIB: u64 = 1 << 20;

/// The tensor that is read in boxes.
const ROWS: u64 = 500;
const COLUMNS: u64 = 5_003;

/// So much of an archive comes unasked, once no more is missing.
const REST: u64 = 256 << 10;

fn host(etcd: &Etcd, memory_limit: u64) -> Served {
    Served::bound(memory_limit, |options| options.meta = Some(etcd.url()))
}

fn pulled(host: &Served, source: &str) -> f64 {
    host.metric(&format!("tssd_pulled_bytes_total{{source=\"{source}\"}}"))
}

/// The elements of a step, row by row.
fn elements(step: u64) -> Vec<u8> {
    (0..ROWS * COLUMNS)
        .map(|at| ((step << 32 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect()
}

fn matrix(elements: &[u8]) -> StateDict {
    let meta = TensorMeta::new(Dtype::Uint8, &[ROWS, COLUMNS]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, Storage::from(elements.to_vec()), 0).unwrap());
    dict
}

/// Rows and columns.
type Box = (std::ops::Range<u64>, std::ops::Range<u64>);

/// Where each row of a box is among the elements.
fn runs((rows, columns): &Box) -> impl Iterator<Item = std::ops::Range<usize>> {
    let len = (columns.end - columns.start) as usize;
    rows.clone()
        .map(move |row| (row * COLUMNS + columns.start) as usize)
        .map(move |at| at..at + len)
}

/// Reads a box and compares it.
fn read_box(store: &Store, elements: &[u8], own: &Box) {
    let (rows, columns) = own;
    let sizes = [rows.end - rows.start, columns.end - columns.start];
    let region = Region::new(&[rows.start, columns.start], &sizes).unwrap();
    let got = store.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap();
    let got = got.view().to_contiguous(u64::MAX).unwrap();
    let wanted: Vec<&[u8]> = runs(own).map(|run| &elements[run]).collect();
    assert!(got == wanted.concat(), "{own:?}");
}

#[test]
fn each_byte_comes_once_for_all_readers_of_a_host() {
    let boxes = prop::collection::vec(
        ((0..ROWS, 1..ROWS), (0..COLUMNS - 256, 256..COLUMNS)).prop_map(
            |((row, rows), (at, columns))| {
                (row..(row + rows).min(ROWS), at..(at + columns).min(COLUMNS))
            },
        ),
        1..8,
    );
    let controller = Served::new(1 << 30);
    let generator = Served::under(&controller);
    let trainer = controller.connect();
    let readers: Vec<Store> = (0..4).map(|_| generator.connect()).collect();
    let steps = std::cell::Cell::new(0);
    TestRunner::new(ProptestConfig::with_cases(24))
        .run(&boxes, |boxes| {
            steps.set(steps.get() + 1);
            let step = steps.get();
            let elements = elements(step);
            trainer.put_state_dict(&key(), &matrix(&elements), &PutOptions::default()).unwrap();
            let before = pulled(&generator, "origin");
            for _ in 0..2 {
                std::thread::scope(|scope| {
                    for (turn, reader) in readers.iter().enumerate() {
                        // Each in another order.
                        let mut own = boxes.clone();
                        let len = own.len();
                        own.rotate_left(turn % len);
                        let elements = &elements;
                        scope.spawn(move || {
                            for each in &own {
                                read_box(reader, elements, each);
                            }
                        });
                    }
                });
            }
            let mut wanted = vec![false; elements.len()];
            boxes.iter().flat_map(runs).for_each(|run| wanted[run].fill(true));
            let wanted = wanted.into_iter().filter(|it| *it).count() as u64;
            let came = pulled(&generator, "origin") - before;
            prop_assert!(came <= (wanted + REST) as f64, "{came} bytes for {wanted}");
            Ok(())
        })
        .unwrap();
    let memory = generator.connect().status().unwrap().memory;
    assert!(memory.used < 32 * MIB, "what is replaced is written over: {memory:?}");
}

#[test]
fn what_was_read_outlasts_the_host_that_it_was_put_to() {
    let etcd = Etcd::start(1);
    let [first, second, reading, late] = [(); 4].map(|()| host(&etcd, 1 << 30));
    let trainers = [first.connect(), second.connect()];
    let readers: Vec<Store> = (0..4).map(|_| reading.connect()).collect();
    let other = late.connect();
    publish(&trainers, 1);
    std::thread::scope(|scope| {
        for reader in &readers {
            scope.spawn(|| assert_eq!(read(reader, None, 2).unwrap(), 1));
        }
    });
    let (origin, all) = (pulled(&reading, "origin"), (4 * MIB) as f64);
    assert!((all..1.05 * all).contains(&origin), "{origin} bytes");
    // All of it is in this host's memory now.
    eventually("it is whole", || {
        let here = reading.metric(r#"tssd_leased_bytes_total{source="here"}"#);
        assert_eq!(read(&readers[0], None, 2).unwrap(), 1);
        reading.metric(r#"tssd_leased_bytes_total{source="here"}"#) - here >= all
    });
    assert!(pulled(&reading, "origin") < origin + 1.0);
    // Others have it from there, rather than from who trains.
    let mut step = 1;
    eventually("it is known who has it", || {
        step += 1;
        publish(&trainers, step);
        assert_eq!(read(&readers[0], None, 2).unwrap(), step);
        std::thread::sleep(Duration::from_secs(1));
        let before = pulled(&late, "replica");
        assert_eq!(read(&other, None, 2).unwrap(), step);
        pulled(&late, "replica") - before >= all
    });
    // Whoever put it there ends, with the manifest that it made perhaps.
    publish(&trainers, step + 1);
    assert_eq!(read(&readers[0], None, 2).unwrap(), step + 1);
    std::thread::sleep(Duration::from_secs(2));
    drop((first, second));
    assert_eq!(read(&other, None, 2).unwrap(), step + 1);
    assert_eq!(read(&readers[1], None, 2).unwrap(), step + 1);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(other.versions(&key()).unwrap().len(), 1, "it is not lost");
    drop(late);
    assert_eq!(read(&readers[1], None, 2).unwrap(), step + 1);
}

#[test]
fn what_was_only_read_makes_room_unless_nobody_else_has_it() {
    let etcd = Etcd::start(1);
    let (training, reading) = (host(&etcd, 1 << 30), host(&etcd, 48 * MIB));
    let (trainer, reader) = (training.connect(), reading.connect());
    let of = |name: &str| tssd_store::Key::new(name).unwrap();
    let large = |fill: u8| {
        let mut dict = StateDict::new();
        let bytes = vec![fill; 16 << 20];
        dict.insert("weight", Tensor::from_slice(&bytes, &[16 << 20]).unwrap());
        dict
    };
    let get =
        |name: &str| reader.get_state_dict(&of(name), &GetOptions::default()).map(|got| got.0);
    for (fill, name) in [(1, "a"), (2, "b"), (3, "c"), (4, "d")] {
        trainer.put_state_dict(&of(name), &large(fill), &PutOptions::default()).unwrap();
        // There is room for two.
        assert_eq!(get(name).unwrap(), large(fill));
        std::thread::sleep(Duration::from_secs(1));
    }
    // What is put goes before what was read, and all is served as before.
    let within = PutOptions { timeout: Duration::from_secs(5), ..PutOptions::default() };
    reader.put_state_dict(&of("own"), &large(5), &within).unwrap();
    for (fill, name) in [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "own")] {
        assert_eq!(get(name).unwrap(), large(fill));
    }
    assert_eq!(get("d").unwrap(), large(4));
    std::thread::sleep(Duration::from_secs(2));
    drop(training);
    // Now it has the last of it: what else is put has to wait.
    eventually("the host is missed", || {
        ["a", "b", "c"]
            .iter()
            .all(|name| get(name).is_err_and(|it| it.kind() == tssd_store::ErrorKind::NotFound))
    });
    assert_eq!(get("d").unwrap(), large(4));
    let again = PutOptions { timeout: Duration::from_secs(1), ..PutOptions::default() };
    let error = reader.put_state_dict(&of("more"), &large(6), &again).unwrap_err();
    assert_eq!(error.kind(), tssd_store::ErrorKind::Busy, "{error}");
    assert_eq!(get("d").unwrap(), large(4));
}
