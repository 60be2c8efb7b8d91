//! A thousand connections that mean no good, and eight clients that do.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tssd_store::blocking::Store;
use tssd_store::{Durability, GetOptions, Key, PutOptions};
use tssd_tests::command::{Serve, quick_folder};
use tssd_tests::hostile::{Hostile, WAYS};
use tssd_tests::proof::Proof;

use super::processes::{Actor, count};
use crate::contents::Contents;

/// How many are hostile at once: half of them by TCP.
const HOSTILE: usize = 1000;

const HONEST: usize = 8;

/// How often each of the honest ones puts and gets.
const TURNS: u64 = 40;

fn contents(key: &str, version: u64) -> Contents<'_> {
    Contents { key, version, writers: 1, elements: 9000 }
}

/// One honest client: how long each of its calls takes.
fn work(url: &str, number: usize, turns: std::ops::Range<u64>) -> Vec<Duration> {
    let store = Store::connect(url).unwrap();
    let name = format!("honest {number}");
    let key = Key::new(&name).unwrap();
    let mut took = Vec::new();
    let mut time = |started: Instant| took.push(started.elapsed());
    for version in turns {
        let dict = contents(&name, version).part(0);
        let started = Instant::now();
        let options = PutOptions { version: Some(version), ..PutOptions::default() };
        store.put_state_dict(&key, &dict, &options).unwrap();
        time(started);
        let started = Instant::now();
        let (dict, _) = store.get_state_dict(&key, &GetOptions::default()).unwrap();
        time(started);
        contents(&name, version).check(&dict);
    }
    took
}

/// All of them; the time that one in a hundred calls takes longer than.
fn all_work(serve: &Serve, turns: &std::ops::Range<u64>, address: &str) -> (u64, Duration) {
    let mut took: Vec<Duration> = thread::scope(|scope| {
        let threads: Vec<_> = (0..HONEST)
            .map(|number| {
                let url = if number % 4 == 3 { address } else { &serve.url };
                scope.spawn(move || work(url, number, turns.clone()))
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    took.sort_unstable();
    (took.len() as u64, took[took.len() * 99 / 100])
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn a_thousand_hostile_connections_stop_nobody() {
    let proof = Proof::begin("limits: a hostile crowd");
    let folder = quick_folder();
    let root = folder.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let args =
        ["--memory-limit", "256MB", "--listen", "127.0.0.1:0", "--root", root.to_str().unwrap()];
    let serve = Serve::under(&[], folder.path(), &args);
    let address = serve.said.split("for other hosts ").nth(1).unwrap().trim().to_owned();
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    let pid = serve.process.id();
    let store = serve.connect();
    let bait = Key::new("bait").unwrap();
    let options = PutOptions { durability: Durability::Disk, ..PutOptions::default() };
    let put = store.put_state_dict(&bait, &contents("bait", 1).part(0), &options).unwrap();
    let manifest = format!("bait/0-{}-{}/manifest.tssd", put.version, &put.id.to_string()[..16]);
    all_work(&serve, &(1..TURNS), &address);
    let (calls, calm) = all_work(&serve, &(TURNS..2 * TURNS), &address);
    let (descriptors, threads, resident) =
        (serve.settled(&store), count(pid, "task"), serve.resident());
    let place = format!("{} {address} {manifest}", socket.display());
    let (mut rounds, mut most, mut attacked, mut worked) = (0, 0, Duration::ZERO, 0);
    while proof.goes_on(rounds, 1) {
        // A process of their own: what it was given is watched until it has ended.
        let crowd = Actor::start(&[], "hostile", &place);
        let is_there = (0..1000).any(|_| {
            thread::sleep(Duration::from_millis(10));
            count(pid, "fd") >= descriptors + HOSTILE as u64 / 3
        });
        assert!(is_there, "{} descriptors", count(pid, "fd"));
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let (mut most, mut there) = (0, u64::MAX);
                while !is_over.load(Ordering::Relaxed) {
                    most = most.max(serve.resident());
                    there = there.min(count(pid, "fd"));
                    thread::sleep(Duration::from_millis(20));
                }
                (most, there)
            });
            let from = (rounds + 2) * TURNS;
            let (calls, p99) = all_work(&serve, &(from..from + TURNS), &address);
            (attacked, worked) = (attacked.max(p99), worked + calls);
            is_over.store(true, Ordering::Relaxed);
            let (resident, there) = watch.join().unwrap();
            most = most.max(resident);
            assert!(
                there > descriptors + HOSTILE as u64 / 4,
                "they were there all the time: {there}"
            );
        });
        drop(crowd);
        serve.settles_at(descriptors, &store);
        rounds += 1;
    }
    assert_eq!(worked, calls * rounds);
    let grown = most.saturating_sub(resident);
    assert!(grown <= 64 << 20, "{most} bytes, {resident} before");
    let is_calm = (0..1500).any(|_| {
        thread::sleep(Duration::from_millis(10));
        count(pid, "task") <= threads
    });
    assert!(is_calm, "{} threads, {threads} before", count(pid, "task"));

    proof.end(json!({
        "at once": HOSTILE, "ways to be hostile": WAYS,
        "honest calls": worked, "failed": 0, "rounds": rounds,
        "p99 in ms before": calm.as_millis(), "p99 in ms meanwhile": attacked.as_millis(),
        "MiB more at most": grown >> 20, "left behind": 0,
    }));
}

/// A process that keeps up so many hostile connections to a socket and to an address, until it is killed.
pub(super) fn attack(place: &str) {
    let [socket, address, manifest] = *place.split(' ').collect::<Vec<_>>() else { panic!() };
    let connect = |index: usize| {
        let way = index / 2;
        let hostile = if index.is_multiple_of(2) {
            Hostile::near(Path::new(socket), way, "bait", manifest)
        } else {
            Hostile::far(address, way, "bait", manifest)
        };
        hostile.ok()
    };
    let mut hostile: Vec<Option<Hostile>> = (0..HOSTILE).map(connect).collect();
    loop {
        for (index, each) in hostile.iter_mut().enumerate() {
            if !each.as_mut().is_some_and(Hostile::go_on) {
                *each = connect(index);
            }
        }
        thread::sleep(Duration::from_millis(50));
    }
}
