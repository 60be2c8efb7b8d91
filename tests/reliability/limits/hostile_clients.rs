//! A thousand hostile connections, and eight clients that a daemon must serve meanwhile.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tssd_store::blocking::Store;
use tssd_store::{Durability, GetOptions, Key, PutOptions};
use tssd_tests::campaign::Campaign;
use tssd_tests::command::{DaemonProcess, memory_tempdir};
use tssd_tests::hostile_connection::{BEHAVIOURS, HostileConnection};

use crate::contents::Contents;
use crate::limits::client_process::{LimitedProcess, proc_entries};

/// Number of simultaneous hostile connections. Half of them use TCP.
const HOSTILE_CONNECTIONS: usize = 1000;

const CLIENTS: usize = 8;

/// Number of puts and gets of each client.
const CALLS_PER_CLIENT: u64 = 40;

fn contents(key: &str, version: u64) -> Contents<'_> {
    Contents { key, version, writers: 1, elements: 9000 }
}

/// Runs one client. Returns the latency of each of its calls.
fn run_client(url: &str, number: usize, versions: std::ops::Range<u64>) -> Vec<Duration> {
    let store = Store::connect(url).unwrap();
    let name = format!("honest {number}");
    let key = Key::new(&name).unwrap();
    let mut latencies = Vec::new();
    let mut time = |started: Instant| latencies.push(started.elapsed());
    for version in versions {
        let dict = contents(&name, version).part(0);
        let started = Instant::now();
        let options = PutOptions { version: Some(version), ..PutOptions::default() };
        store.put_state_dict(&key, &dict, &options).unwrap();
        time(started);
        let started = Instant::now();
        let (dict, _) = store.get_state_dict(&key, &GetOptions::default()).unwrap();
        time(started);
        contents(&name, version).assert_matches(&dict);
    }
    latencies
}

/// Runs all clients. Returns the number of their calls and the 99th percentile of the latency.
fn run_all_clients(
    serve: &DaemonProcess,
    versions: &std::ops::Range<u64>,
    address: &str,
) -> (u64, Duration) {
    let mut latencies: Vec<Duration> = thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let url = if number % 4 == 3 { address } else { &serve.url };
                scope.spawn(move || run_client(url, number, versions.clone()))
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    latencies.sort_unstable();
    (latencies.len() as u64, latencies[latencies.len() * 99 / 100])
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn daemon_serves_clients_despite_a_thousand_hostile_connections() {
    let campaign = Campaign::start("limits: a hostile crowd");
    let folder = memory_tempdir();
    let root = folder.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let args =
        ["--memory-limit", "256MB", "--listen", "127.0.0.1:0", "--root", root.to_str().unwrap()];
    let serve = DaemonProcess::start_by(&[], folder.path(), &args);
    let address = serve.startup_line.split("for other hosts ").nth(1).unwrap().trim().to_owned();
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    let pid = serve.process.id();
    let store = serve.connect();
    let bait = Key::new("bait").unwrap();
    let options = PutOptions { durability: Durability::Disk, ..PutOptions::default() };
    let put = store.put_state_dict(&bait, &contents("bait", 1).part(0), &options).unwrap();
    let manifest = format!("bait/0-{}-{}/manifest.tssd", put.version, &put.id.to_string()[..16]);
    run_all_clients(&serve, &(1..CALLS_PER_CLIENT), &address);
    let (calls, baseline_p99) =
        run_all_clients(&serve, &(CALLS_PER_CLIENT..2 * CALLS_PER_CLIENT), &address);
    let (descriptors, threads, resident) =
        (serve.idle_descriptors(&store), proc_entries(pid, "task"), serve.resident_bytes());
    let arguments = format!("{} {address} {manifest}", socket.display());
    let (mut rounds, mut peak_resident, mut attacked_p99, mut served) = (0, 0, Duration::ZERO, 0);
    while campaign.should_continue(rounds, 1) {
        // The attacker is a process of its own, whose end closes all its connections.
        let attacker = LimitedProcess::start(&[], "hostile", &arguments);
        let is_attacking = (0..1000).any(|_| {
            thread::sleep(Duration::from_millis(10));
            proc_entries(pid, "fd") >= descriptors + HOSTILE_CONNECTIONS as u64 / 3
        });
        assert!(is_attacking, "{} descriptors", proc_entries(pid, "fd"));
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let (mut peak_resident, mut fewest_descriptors) = (0, u64::MAX);
                while !is_done.load(Ordering::Relaxed) {
                    peak_resident = peak_resident.max(serve.resident_bytes());
                    fewest_descriptors = fewest_descriptors.min(proc_entries(pid, "fd"));
                    thread::sleep(Duration::from_millis(20));
                }
                (peak_resident, fewest_descriptors)
            });
            let from = (rounds + 2) * CALLS_PER_CLIENT;
            let (calls, p99) = run_all_clients(&serve, &(from..from + CALLS_PER_CLIENT), &address);
            (attacked_p99, served) = (attacked_p99.max(p99), served + calls);
            is_done.store(true, Ordering::Relaxed);
            let (resident, fewest_descriptors) = watch.join().unwrap();
            peak_resident = peak_resident.max(resident);
            assert!(
                fewest_descriptors > descriptors + HOSTILE_CONNECTIONS as u64 / 4,
                "the attack was interrupted: {fewest_descriptors} descriptors"
            );
        });
        drop(attacker);
        serve.assert_idle_descriptors(descriptors, &store);
        rounds += 1;
    }
    assert_eq!(served, calls * rounds);
    let growth = peak_resident.saturating_sub(resident);
    assert!(growth <= 64 << 20, "{peak_resident} bytes, {resident} before");
    let is_idle = (0..1500).any(|_| {
        thread::sleep(Duration::from_millis(10));
        proc_entries(pid, "task") <= threads
    });
    assert!(is_idle, "{} threads, {threads} before", proc_entries(pid, "task"));

    campaign.finish(json!({
        "at once": HOSTILE_CONNECTIONS, "ways to be hostile": BEHAVIOURS,
        "honest calls": served, "failed": 0, "rounds": rounds,
        "p99 in ms before": baseline_p99.as_millis(), "p99 in ms meanwhile": attacked_p99.as_millis(),
        "MiB more at most": growth >> 20, "left behind": 0,
    }));
}

/// Keeps hostile connections to a socket and to an address open, until the process is killed.
pub(super) fn run_attacker(arguments: &str) {
    let [socket, address, manifest] = *arguments.split(' ').collect::<Vec<_>>() else { panic!() };
    let connect = |index: usize| {
        let way = index / 2;
        let hostile = if index.is_multiple_of(2) {
            HostileConnection::connect_unix(Path::new(socket), way, "bait", manifest)
        } else {
            HostileConnection::connect_tcp(address, way, "bait", manifest)
        };
        hostile.ok()
    };
    let mut hostile: Vec<Option<HostileConnection>> =
        (0..HOSTILE_CONNECTIONS).map(connect).collect();
    loop {
        for (index, each) in hostile.iter_mut().enumerate() {
            if !each.as_mut().is_some_and(HostileConnection::step) {
                *each = connect(index);
            }
        }
        thread::sleep(Duration::from_millis(50));
    }
}
