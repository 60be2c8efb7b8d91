//! Replicas of versions on the hosts that read them.
//!
//! A host keeps what it reads from other hosts, transfers each byte once, and serves it to other hosts.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tssd_format::{Dtype, Region, StateDict, Storage, Tensor, TensorMeta};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, PutOptions};
use tssd_tests::etcd::Etcd;
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::{key, publish, read_step, wait_until};

const MIB: u64 = 1 << 20;

/// Shape of the tensor that readers get in boxes.
const ROWS: u64 = 500;
const COLUMNS: u64 = 5_003;

/// Bytes of an archive that a host fetches without a request, once no more are missing.
const UNREQUESTED_BYTES: u64 = 256 << 10;

fn host(etcd: &Etcd, memory_limit: u64) -> TestDaemon {
    TestDaemon::with_options(memory_limit, |options| options.meta = Some(etcd.url()))
}

fn pulled_bytes(host: &TestDaemon, source: &str) -> f64 {
    host.metric(&format!("tssd_fetched_bytes_total{{source=\"{source}\"}}"))
}

/// Returns the elements of a step in row-major order.
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

/// Rows and columns of a box of the tensor.
type Bounds = (std::ops::Range<u64>, std::ops::Range<u64>);

/// Returns the range of elements of each row of a box.
fn runs((rows, columns): &Bounds) -> impl Iterator<Item = std::ops::Range<usize>> {
    let len = (columns.end - columns.start) as usize;
    rows.clone()
        .map(move |row| (row * COLUMNS + columns.start) as usize)
        .map(move |at| at..at + len)
}

/// Reads a box and compares it with the expected elements.
fn check_box(store: &Store, elements: &[u8], bounds: &Bounds) {
    let (rows, columns) = bounds;
    let sizes = [rows.end - rows.start, columns.end - columns.start];
    let region = Region::new(&[rows.start, columns.start], &sizes).unwrap();
    let found = store.get_slice(&key(), "weight", &region, &GetOptions::default()).unwrap();
    let found = found.view().to_contiguous(u64::MAX).unwrap();
    let expected: Vec<&[u8]> = runs(bounds).map(|run| &elements[run]).collect();
    assert!(found == expected.concat(), "{bounds:?}");
}

#[test]
fn host_transfers_each_byte_once_for_all_readers() {
    let boxes = prop::collection::vec(
        ((0..ROWS, 1..ROWS), (0..COLUMNS - 256, 256..COLUMNS)).prop_map(
            |((row, rows), (at, columns))| {
                (row..(row + rows).min(ROWS), at..(at + columns).min(COLUMNS))
            },
        ),
        1..8,
    );
    let controller = TestDaemon::new(1 << 30);
    let generator = TestDaemon::with_controller(&controller);
    let trainer = controller.connect();
    let readers: Vec<Store> = (0..4).map(|_| generator.connect()).collect();
    let steps = std::cell::Cell::new(0);
    TestRunner::new(ProptestConfig::with_cases(24))
        .run(&boxes, |boxes| {
            steps.set(steps.get() + 1);
            let step = steps.get();
            let elements = elements(step);
            trainer.put_state_dict(&key(), &matrix(&elements), &PutOptions::default()).unwrap();
            let before = pulled_bytes(&generator, "origin");
            for _ in 0..2 {
                std::thread::scope(|scope| {
                    for (number, reader) in readers.iter().enumerate() {
                        // Each reader starts at another box.
                        let mut boxes = boxes.clone();
                        let len = boxes.len();
                        boxes.rotate_left(number % len);
                        let elements = &elements;
                        scope.spawn(move || {
                            for bounds in &boxes {
                                check_box(reader, elements, bounds);
                            }
                        });
                    }
                });
            }
            let mut wanted = vec![false; elements.len()];
            boxes.iter().flat_map(runs).for_each(|run| wanted[run].fill(true));
            let wanted = wanted.into_iter().filter(|is_wanted| *is_wanted).count() as u64;
            let transferred = pulled_bytes(&generator, "origin") - before;
            prop_assert!(
                transferred <= (wanted + UNREQUESTED_BYTES) as f64,
                "{transferred} bytes for {wanted}"
            );
            Ok(())
        })
        .unwrap();
    let memory = generator.connect().status().unwrap().memory;
    assert!(memory.used_bytes < 32 * MIB, "the memory of replaced versions is reused: {memory:?}");
}

#[test]
fn replica_survives_loss_of_original_host() {
    let etcd = Etcd::start(1);
    let [first, second, reading, late] = [(); 4].map(|()| host(&etcd, 1 << 30));
    let trainers = [first.connect(), second.connect()];
    let readers: Vec<Store> = (0..4).map(|_| reading.connect()).collect();
    let other = late.connect();
    publish(&trainers, 1);
    std::thread::scope(|scope| {
        for reader in &readers {
            scope.spawn(|| assert_eq!(read_step(reader, None, 2).unwrap(), 1));
        }
    });
    let (origin, all) = (pulled_bytes(&reading, "origin"), (4 * MIB) as f64);
    assert!((all..1.05 * all).contains(&origin), "{origin} bytes");
    // This host now has the complete version in memory.
    wait_until("the replica is complete", || {
        let before = reading.metric(r#"tssd_leased_bytes_total{source="here"}"#);
        assert_eq!(read_step(&readers[0], None, 2).unwrap(), 1);
        reading.metric(r#"tssd_leased_bytes_total{source="here"}"#) - before >= all
    });
    assert!(pulled_bytes(&reading, "origin") < origin + 1.0);
    // Another host reads the replica, not the hosts that train.
    let mut step = 1;
    wait_until("the replica serves another host", || {
        step += 1;
        publish(&trainers, step);
        assert_eq!(read_step(&readers[0], None, 2).unwrap(), step);
        std::thread::sleep(Duration::from_secs(1));
        let before = pulled_bytes(&late, "replica");
        assert_eq!(read_step(&other, None, 2).unwrap(), step);
        pulled_bytes(&late, "replica") - before >= all
    });
    // The hosts of the writers end. One of them may be the only one that has the manifest.
    publish(&trainers, step + 1);
    assert_eq!(read_step(&readers[0], None, 2).unwrap(), step + 1);
    std::thread::sleep(Duration::from_secs(2));
    drop((first, second));
    assert_eq!(read_step(&other, None, 2).unwrap(), step + 1);
    assert_eq!(read_step(&readers[1], None, 2).unwrap(), step + 1);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(other.versions(&key()).unwrap().len(), 1, "the version is not lost");
    drop(late);
    assert_eq!(read_step(&readers[1], None, 2).unwrap(), step + 1);
}

#[test]
fn replica_is_evicted_unless_it_is_last_copy() {
    let etcd = Etcd::start(1);
    let (training, reading) = (host(&etcd, 1 << 30), host(&etcd, 48 * MIB));
    let (trainer, reader) = (training.connect(), reading.connect());
    let key_of = |name: &str| tssd_store::Key::new(name).unwrap();
    let large = |fill: u8| {
        let mut dict = StateDict::new();
        let bytes = vec![fill; 16 << 20];
        dict.insert("weight", Tensor::from_slice(&bytes, &[16 << 20]).unwrap());
        dict
    };
    let get =
        |name: &str| reader.get_state_dict(&key_of(name), &GetOptions::default()).map(|got| got.0);
    for (fill, name) in [(1, "a"), (2, "b"), (3, "c"), (4, "d")] {
        trainer.put_state_dict(&key_of(name), &large(fill), &PutOptions::default()).unwrap();
        // The memory limit allows two of them.
        assert_eq!(get(name).unwrap(), large(fill));
        std::thread::sleep(Duration::from_secs(1));
    }
    // A put evicts replicas. All keys stay readable.
    let patient = PutOptions { timeout: Duration::from_secs(5), ..PutOptions::default() };
    reader.put_state_dict(&key_of("own"), &large(5), &patient).unwrap();
    for (fill, name) in [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "own")] {
        assert_eq!(get(name).unwrap(), large(fill));
    }
    // The memory now has `own` and the replica of `d`, and no place for another one. A replica that is
    // still being completed is not evicted, so a single get may not be enough.
    wait_until("the replica of `d` is complete", || {
        let before = reading.metric(r#"tssd_leased_bytes_total{source="here"}"#);
        assert_eq!(get("d").unwrap(), large(4));
        reading.metric(r#"tssd_leased_bytes_total{source="here"}"#) - before >= (16 * MIB) as f64
    });
    std::thread::sleep(Duration::from_secs(2));
    drop(training);
    // This host now has the last copy of `d`, so another put waits for memory.
    wait_until("the loss of the host is detected", || {
        ["a", "b", "c"].iter().all(|name| {
            get(name).is_err_and(|error| error.kind() == tssd_store::ErrorKind::NotFound)
        })
    });
    assert_eq!(get("d").unwrap(), large(4));
    let impatient = PutOptions { timeout: Duration::from_secs(1), ..PutOptions::default() };
    let error = reader.put_state_dict(&key_of("more"), &large(6), &impatient).unwrap_err();
    assert_eq!(error.kind(), tssd_store::ErrorKind::Busy, "{error}");
    assert_eq!(get("d").unwrap(), large(4));
}
