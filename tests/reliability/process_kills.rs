//! A daemon, writers and readers as processes, which are killed at random and started again.

mod process_cluster;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use serde_json::json;
use tssd_format::StateDict;
use tssd_store::blocking::Store;
use tssd_store::{Durability, GetOptions, Key, PutOptions};
use tssd_tests::campaign::Campaign;
use tssd_tests::command::{DaemonProcess, memory_tempdir};
use tssd_tests::resource_growth::ResourceGrowth;
use tssd_tests::rng::SeededRng;
use tssd_tests::test_daemon::TestDaemon;

use crate::process_kills::process_cluster::{Counts, DurableStorage, ProcessCluster};

/// Number of rounds in CI.
const ROUNDS: u64 = 100;

/// Rounds with one root. After them all processes end, and no foreign file may be left.
const ROUNDS_PER_ROOT: u64 = 10;

/// Number of versions of a store that is reopened.
const VERSIONS: u64 = 10_000;

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn durable_versions_survive_process_kills() {
    let campaign = Campaign::start("kills");
    let (mut rng, mut counts, mut rounds) = (SeededRng::new(0x5EED), Counts::default(), 0);
    let mut growth = ResourceGrowth::default();
    for session in 0_usize.. {
        if !campaign.should_continue(rounds, ROUNDS) {
            break;
        }
        let storage = [
            DurableStorage::Root,
            DurableStorage::Bucket,
            DurableStorage::Root,
            DurableStorage::Directory,
        ][session % 4];
        let mut cluster = ProcessCluster::new(storage);
        growth.start_process();
        for _ in 0..ROUNDS_PER_ROOT {
            cluster.run_round(&mut rng);
            cluster.sample_daemon(&mut growth);
            rounds += 1;
        }
        counts = counts.merge(&cluster.finish());
    }
    assert!(counts.resident < 128 << 20, "{} bytes", counts.resident);
    campaign.finish(json!({
        "rounds": rounds, "killed": counts.killed, "daemons": counts.restarts,
        "durable versions acknowledged": counts.durable, "versions acknowledged": counts.acknowledged,
        "tensors read": counts.tensors, "lost": 0, "left behind": 0,
        "most MiB of a daemon at rest": counts.resident >> 20,
        "slowest restart in ms": counts.slowest_restart.as_millis(), "daemon": growth.finish(10),
    }));
}

/// Durations of puts, and of the first get after a restart.
struct ReopenTimes {
    put: Duration,
    daemon: Duration,
    directory: Duration,
}

/// Measures how long it takes to reopen a root with `versions` durable versions of `keys` keys.
fn measure_reopen(keys: u64, versions: u64) -> ReopenTimes {
    let folder = memory_tempdir();
    let root = folder.path().join("root");
    let keep = u32::try_from(versions / keys).unwrap();
    let names: Vec<Key> = (0..keys).map(|at| Key::new(format!("model-{at}")).unwrap()).collect();
    let options = PutOptions { durability: Durability::Disk, ..PutOptions::default() };
    std::fs::create_dir(&root).unwrap();
    let started = Instant::now();
    {
        let served = TestDaemon::with_options(1 << 30, |options| {
            options.root = Some(root.clone());
            options.keep = NonZeroU32::new(keep).unwrap();
        });
        let store = served.connect();
        for number in 1..=i64::from(keep) {
            for key in &names {
                let mut dict = StateDict::new();
                dict.insert("number", number);
                store.put_state_dict(key, &dict, &options).unwrap();
            }
        }
    }
    let check_newest = |store: &Store| {
        let (key, last) = (names.last().unwrap(), i64::from(keep));
        let (dict, report) = store.get_state_dict(key, &GetOptions::default()).unwrap();
        assert_eq!(report.version, u64::from(keep));
        assert_eq!(dict.leaf("number").unwrap(), &tssd_format::Value::from(last));
    };
    let check_count = |store: &Store| {
        let found = names.iter().map(|key| store.versions(key).unwrap().len() as u64);
        assert_eq!(found.sum::<u64>(), versions);
    };
    let put = started.elapsed();
    let started = Instant::now();
    let serve = DaemonProcess::start(folder.path(), &["--root", root.to_str().unwrap()]);
    let store = serve.connect();
    check_newest(&store);
    let daemon = started.elapsed();
    check_count(&store);
    drop((store, serve));
    let started = Instant::now();
    let store = Store::directory(&root).unwrap();
    check_newest(&store);
    let directory = started.elapsed();
    check_count(&store);
    ReopenTimes { put, daemon, directory }
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn ten_thousand_versions_reopen_faster_than_they_were_put() {
    let campaign = Campaign::start("kills: reopening");
    let mut figures = BTreeMap::new();
    // Each put rewrites the record of its key, so the versions of one key take quadratic time.
    for (keys, versions) in [(100, VERSIONS), (VERSIONS, VERSIONS), (1, VERSIONS / 5)] {
        let times = measure_reopen(keys, versions);
        for (by, elapsed) in [("a daemon", times.daemon), ("a directory", times.directory)] {
            // On an idle machine it takes a fifth at most.
            assert!(elapsed < times.put, "{keys} keys: {elapsed:?}, and {:?} to put", times.put);
            let name = format!("ms for {versions} versions of {keys} keys by {by}");
            figures.insert(name, elapsed.as_millis());
        }
        let name = format!("ms to put {versions} versions of {keys} keys");
        figures.insert(name, times.put.as_millis());
    }
    campaign.finish(json!(figures));
}
