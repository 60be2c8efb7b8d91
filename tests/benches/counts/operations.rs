//! Costs of operations in steady state: a daemon in its own process, one writer, two readers.

use std::cell::RefCell;
use std::net::SocketAddr;

use stats_alloc::Region;
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, Key, PutOptions};
use tssd_tests::bench::peer::Peer;
use tssd_tests::bench::{Bench, Model, minor_faults, targets};

use crate::{ALLOCATOR, metrics};

const REQUESTS: &str = "tssd_requests_total{";

/// Turns before the measurement.
///
/// Two versions exist at once, so from the third one on every segment is recycled.
const WARMUP: usize = 5;

/// Number of measured turns. The result is their median.
const TURNS: usize = 9;

/// Counts puts, gets and pulls of models of several sizes.
pub(crate) fn steady_state(bench: &mut Bench) {
    for model in [Model::four_hundred(), Model::tiny(10_000), Model::tiny(1)] {
        let daemon = Peer::start("serve");
        let (local_url, tcp_url) =
            (daemon.startup_words[0].as_str(), daemon.startup_words[1].as_str());
        let metrics = daemon.startup_words[2].parse().unwrap();
        let (writer, reader) =
            (Store::connect(local_url).unwrap(), Store::connect(local_url).unwrap());
        let tcp_reader = Store::connect(tcp_url).unwrap();
        let key = Key::new("model").unwrap();
        let memory = RefCell::new(vec![1_u8; usize::try_from(model.bytes).unwrap()]);
        let put =
            || drop(writer.put_state_dict(&key, &model.dict, &PutOptions::default()).unwrap());
        let into = |store: &Store| {
            let mut memory = memory.borrow_mut();
            let mut targets = targets(&model, &mut memory);
            store.get_state_dict_into(&key, &mut targets, &GetOptions::default()).unwrap();
        };
        let views = || drop(reader.get_state_dict(&key, &GetOptions::default()).unwrap());
        let size = match model.bytes {
            bytes @ 0..1000 => format!("{bytes} B"),
            bytes @ 1000..1_000_000 => format!("{} kB", bytes / 1000),
            bytes => format!("{} MB", bytes / 1_000_000),
        };
        let what = format!("{} tensors, {size}", model.tensors);
        let operations: [(&str, &dyn Fn()); 4] = [
            ("put", &put),
            ("get in place", &|| into(&reader)),
            ("get views", &views),
            ("pull in place, TCP", &|| into(&tcp_reader)),
        ];
        let mut turns = vec![Vec::new(); operations.len()];
        for turn in 0..WARMUP + TURNS {
            for ((name, run), turns) in operations.iter().zip(&mut turns) {
                let counted = count(metrics, run);
                // Each get reads a version that is new to its reader.
                if *name != "put" && turn % 4 == 3 {
                    put();
                }
                if turn >= WARMUP {
                    turns.push(counted);
                }
            }
        }
        for ((name, _), turns) in operations.iter().zip(turns) {
            bench.record_counts(&format!("{name}, {what}"), &median(&turns));
        }
        model.assert_bytes_equal(&memory.borrow());
    }
}

type Counts = [(&'static str, f64); 4];

#[expect(clippy::cast_precision_loss, reason = "counts are small")]
fn count(metrics: SocketAddr, run: &dyn Fn()) -> Counts {
    let requests = metrics::sum(metrics, REQUESTS);
    let faults = minor_faults();
    let region = Region::new(ALLOCATOR);
    run();
    let allocated = region.change();
    let faults = minor_faults() - faults;
    // A reader releases its lease after the call. That request is counted in the next turn.
    let requests = metrics::sum(metrics, REQUESTS) - requests;
    [
        ("requests", requests as f64),
        ("allocations", allocated.allocations as f64),
        ("bytes allocated", allocated.bytes_allocated as f64),
        ("minor faults", faults as f64),
    ]
}

fn median(turns: &[Counts]) -> Counts {
    let mut median = turns[0];
    for (at, (_, value)) in median.iter_mut().enumerate() {
        let mut values: Vec<f64> = turns.iter().map(|turn| turn[at].1).collect();
        values.sort_by(f64::total_cmp);
        *value = values[values.len() / 2];
    }
    median
}
