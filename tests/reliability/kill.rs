//! A daemon, writers and readers as processes: killed at any moment, and started again.

mod troupe;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use serde_json::json;
use tssd_format::StateDict;
use tssd_store::blocking::Store;
use tssd_store::{Durability, GetOptions, Key, PutOptions};
use tssd_tests::command::{Serve, quick_folder};
use tssd_tests::dice::Dice;
use tssd_tests::growth::Growth;
use tssd_tests::proof::Proof;
use tssd_tests::served::Served;

use self::troupe::{Counts, Home, Troupe};

/// How many rounds CI wants.
const ROUNDS: u64 = 100;

/// Rounds of one root: then all are sent home, and nothing may be left.
const SESSION: u64 = 10;

/// How many versions are opened again.
const VERSIONS: u64 = 10_000;

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn whoever_is_killed_takes_nothing_along_that_was_durable() {
    let proof = Proof::begin("kills");
    let (mut dice, mut counts, mut rounds) = (Dice::new(0x5EED), Counts::default(), 0);
    let mut growth = Growth::default();
    for session in 0_usize.. {
        if !proof.goes_on(rounds, ROUNDS) {
            break;
        }
        let home = [Home::Root, Home::Bucket, Home::Root, Home::Directory][session % 4];
        let mut troupe = Troupe::new(home);
        growth.begin();
        for _ in 0..SESSION {
            troupe.round(&mut dice);
            troupe.sample(&mut growth);
            rounds += 1;
        }
        counts = counts.and(&troupe.end());
    }
    assert!(counts.resident < 128 << 20, "{} bytes", counts.resident);
    proof.end(json!({
        "rounds": rounds, "killed": counts.killed, "daemons": counts.restarts,
        "durable versions acknowledged": counts.durable, "versions acknowledged": counts.acknowledged,
        "tensors read": counts.tensors, "lost": 0, "left behind": 0,
        "most MiB of a daemon at rest": counts.resident >> 20,
        "slowest restart in ms": counts.slowest.as_millis(), "daemon": growth.end(10),
    }));
}

/// A root of so many durable versions, of so many keys; and how long it takes to open it again, by a daemon
/// and by none.
fn reopen(keys: u64, versions: u64) -> [Duration; 2] {
    let folder = quick_folder();
    let root = folder.path().join("root");
    let keep = u32::try_from(versions / keys).unwrap();
    let names: Vec<Key> = (0..keys).map(|at| Key::new(format!("model-{at}")).unwrap()).collect();
    let options = PutOptions { durability: Durability::Disk, ..PutOptions::default() };
    std::fs::create_dir(&root).unwrap();
    {
        let served = Served::bound(1 << 30, |options| {
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
    let check = |store: &Store| {
        let (key, last) = (names.last().unwrap(), i64::from(keep));
        let (dict, report) = store.get_state_dict(key, &GetOptions::default()).unwrap();
        assert_eq!(report.version, u64::from(keep));
        assert_eq!(dict.leaf("number").unwrap(), &tssd_format::Value::from(last));
    };
    let all = |store: &Store| {
        let found = names.iter().map(|key| store.versions(key).unwrap().len() as u64);
        assert_eq!(found.sum::<u64>(), versions);
    };
    let started = Instant::now();
    let serve = Serve::start(folder.path(), &["--root", root.to_str().unwrap()]);
    let store = serve.connect();
    check(&store);
    let by_daemon = started.elapsed();
    all(&store);
    drop((store, serve));
    let started = Instant::now();
    let store = Store::directory(&root).unwrap();
    check(&store);
    let by_none = started.elapsed();
    all(&store);
    [by_daemon, by_none]
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn ten_thousand_versions_are_opened_again_soon() {
    let proof = Proof::begin("kills: reopening");
    let mut figures = BTreeMap::new();
    // Each put writes the record of its key anew: those of one key take as long as the square of their number.
    for (keys, versions) in [(100, VERSIONS), (VERSIONS, VERSIONS), (1, VERSIONS / 5)] {
        let [by_daemon, by_none] = reopen(keys, versions);
        for took in [by_daemon, by_none] {
            // The figure is below two seconds; on a machine that does something else too, above.
            assert!(took < Duration::from_secs(10), "{keys} keys: {took:?}");
        }
        for (by, took) in [("a daemon", by_daemon), ("a directory", by_none)] {
            let what = format!("ms for {versions} versions of {keys} keys by {by}");
            figures.insert(what, took.as_millis());
        }
    }
    proof.end(json!(figures));
}
