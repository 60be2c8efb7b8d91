//! Steps of a training run: what trainers put, and what readers must get.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::time::{Duration, Instant};

use tssd_format::{Shard, ShardSpec, StateDict, Tensor, TensorSlice, Value};
use tssd_store::blocking::Store;
use tssd_store::{Durability, Error, GetOptions, JobId, Key, PutOptions, PutReport};

/// Rows of the tensor of one writer, and elements of a row.
const ROWS: u64 = 64;
const COLUMNS: u64 = 4096;

/// Returns the key of the steps.
pub fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Returns what one of several writers puts in a step: its rows.
pub fn step_part(step: u64, writer: u32, writers: u32) -> StateDict {
    let elements: Vec<u64> = (0..ROWS * COLUMNS).map(|at| element(step, writer, at)).collect();
    let rows = Tensor::from_slice(&elements, &[ROWS, COLUMNS]).unwrap();
    let global = [u64::from(writers) * ROWS, COLUMNS];
    let place = TensorSlice::new(&[u64::from(writer) * ROWS, 0], &[ROWS, COLUMNS], &global);
    let mut dict = StateDict::new();
    dict.insert("step", step.cast_signed());
    let shard = Shard::new(rows, ShardSpec::new(place.unwrap())).unwrap();
    dict.insert("weight", shard);
    dict
}

fn element(step: u64, writer: u32, at: u64) -> u64 {
    (step << 40 | u64::from(writer) << 32 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Returns the put options of one of several writers in a step.
pub fn options(step: u64, writer: u32, writers: u32) -> PutOptions {
    PutOptions {
        writer: Some(writer),
        writers: Some(
            if writers == 1 { "0".to_owned() } else { format!("0-{}", writers - 1) }
                .parse()
                .unwrap(),
        ),
        job: Some(JobId("run".to_owned())),
        version: Some(step),
        ..PutOptions::default()
    }
}

/// Puts a step in memory. Each store is one writer.
pub fn publish(stores: &[Store], step: u64) {
    publish_with_durability(stores, step, Durability::Memory);
}

/// Puts a step with this durability. Returns the report of each writer.
pub fn publish_with_durability(
    stores: &[Store],
    step: u64,
    durability: Durability,
) -> Vec<PutReport> {
    let writers = u32::try_from(stores.len()).unwrap();
    std::thread::scope(|scope| {
        let put = |(writer, store): (u32, &'_ Store)| {
            let store = store.clone();
            scope.spawn(move || {
                let options = PutOptions { durability, ..options(step, writer, writers) };
                let part = step_part(step, writer, writers);
                let put = || store.put_state_dict(&key(), &part, &options);
                // If etcd is lost during a request, its outcome is unknown. A second put returns
                // it.
                let put = put().or_else(|error| {
                    if error.to_string().contains("nobody knows") { put() } else { Err(error) }
                });
                put.unwrap()
            })
        };
        let puts: Vec<_> = (0..).zip(stores).map(put).collect();
        puts.into_iter().map(|put| put.join().unwrap()).collect()
    })
}

/// Reads a version, or the newest one, and checks its contents. Returns the step.
///
/// # Errors
///
/// Those of the store.
pub fn read_step(store: &Store, version: Option<u64>, writers: u32) -> Result<u64, Error> {
    let options = GetOptions { version: version.into(), ..GetOptions::default() };
    let (dict, _) = store.get_state_dict(&key(), &options)?;
    let Value::Int(step) = dict.leaf("step").unwrap() else { panic!("a step: {dict:?}") };
    let step: u64 = step.to_string().parse().unwrap();
    let Value::Tensor(weight) = dict.leaf("weight").unwrap() else { panic!("a tensor") };
    let bytes = weight.view().to_contiguous(u64::MAX).unwrap();
    let wanted = (0..writers)
        .flat_map(|writer| (0..ROWS * COLUMNS).map(move |at| element(step, writer, at)));
    assert!(
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).eq(wanted),
        "version {step} is what was put"
    );
    Ok(step)
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_mins(1), "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
