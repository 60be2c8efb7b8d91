//! A daemon and a client that may open 64 descriptors, and that need more.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::json;
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::campaign::Campaign;
use tssd_tests::command::{DaemonProcess, memory_tempdir};

use crate::contents::Contents;
use crate::limits::client_process::{LimitedProcess, proc_entries};
use crate::limits::fixtures::assert_error_kind;

/// Number of simultaneous connections.
const CONNECTIONS: usize = 220;

/// Elements of a tensor. An archive of this size has a segment of its own.
const ELEMENTS: u64 = 9000;

const PRLIMIT: [&str; 2] = ["prlimit", "--nofile=64"];

fn contents(key: &str) -> Contents<'_> {
    Contents { key, version: 1, writers: 1, elements: ELEMENTS }
}

fn put(store: &Store, name: &str) -> tssd_store::Result<()> {
    let options = PutOptions { timeout: Duration::from_secs(5), ..PutOptions::default() };
    store.put_state_dict(&Key::new(name).unwrap(), &contents(name).part(0), &options).map(drop)
}

fn get(store: &Store, name: &str) -> tssd_store::Result<tssd_format::StateDict> {
    let (dict, _) = store.get_state_dict(&Key::new(name).unwrap(), &GetOptions::default())?;
    contents(name).assert_matches(&dict);
    Ok(dict)
}

/// Kinds of errors that exhausted descriptors may lead to.
const EXPECTED_KINDS: [ErrorKind; 3] = [ErrorKind::Io, ErrorKind::Busy, ErrorKind::Unreachable];

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn descriptor_exhaustion_is_reported_and_recoverable() {
    let campaign = Campaign::start("limits: descriptors");
    let (mut rounds, mut counts) = (0, BTreeMap::<&str, u64>::new());
    while campaign.should_continue(rounds, 2) {
        daemon(&mut counts);
        client(&mut counts);
        rounds += 1;
    }
    let mut figures = json!({ "rounds": rounds, "descriptors": 64, "left open": 0 });
    for (name, count) in counts {
        figures[name] = count.into();
    }
    campaign.finish(figures);
}

/// Connects many clients to a daemon with few descriptors.
fn daemon(counts: &mut BTreeMap<&str, u64>) {
    let folder = memory_tempdir();
    let serve = DaemonProcess::start_by(&PRLIMIT, folder.path(), &["--memory-limit", "256MB"]);
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    let pid = serve.process.id();
    let (writer, reader) = (serve.connect(), serve.connect());
    put(&writer, "policy").unwrap();
    get(&reader, "policy").unwrap();
    let (before, threads) = (proc_entries(pid, "fd"), proc_entries(pid, "task"));
    // Half of them are silent, the others are ordinary clients.
    let silent: Vec<UnixStream> =
        (0..CONNECTIONS / 2).map(|_| UnixStream::connect(socket).unwrap()).collect();
    let clients: Vec<_> = (0..CONNECTIONS / 2)
        .map(|_| {
            let url = serve.url.clone();
            thread::spawn(move || {
                let store = Store::connect(&url)?;
                get(&store, "policy")?;
                Ok::<_, tssd_store::Error>(store)
            })
        })
        .collect();
    // Earlier clients are still served, as far as that needs no descriptors.
    for _ in 0..20 {
        get(&reader, "policy").unwrap();
        match put(&writer, "policy") {
            Ok(()) => *counts.entry("puts meanwhile").or_default() += 1,
            Err(error) => {
                assert_error_kind(&error, &EXPECTED_KINDS);
                *counts.entry("puts refused").or_default() += 1;
            }
        }
    }
    *counts.entry("gets meanwhile").or_default() += 20;
    let mut connected = Vec::new();
    for client in clients {
        match client.join().unwrap() {
            Ok(store) => {
                *counts.entry("clients served").or_default() += 1;
                connected.push(store);
            }
            Err(error) => {
                assert_error_kind(&error, &EXPECTED_KINDS);
                *counts.entry("clients refused").or_default() += 1;
            }
        }
    }
    drop((silent, connected));
    // After all connections are closed, the daemon has as many descriptors and threads as before.
    let is_settled =
        || proc_entries(pid, "fd") <= before && proc_entries(pid, "task") <= threads + 1;
    let has_settled = (0..1000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        is_settled()
    });
    assert!(
        has_settled,
        "{} descriptors, {before} before; {} threads, {threads} before",
        proc_entries(pid, "fd"),
        proc_entries(pid, "task")
    );
    for _ in 0..4 {
        let store = serve.connect();
        put(&store, "policy").unwrap();
        get(&store, "policy").unwrap();
    }
}

/// Reads many versions in a client with few descriptors.
fn client(counts: &mut BTreeMap<&str, u64>) {
    let folder = memory_tempdir();
    let serve = DaemonProcess::start(folder.path(), &[]);
    let store = serve.connect();
    let settled = serve.idle_descriptors(&store);
    for number in 0..VERSIONS {
        put(&store, &format!("k{number}")).unwrap();
    }
    let output = LimitedProcess::start(&PRLIMIT, "few descriptors", &serve.url).counts();
    let [held, refused] = output.as_slice() else { panic!("{output:?}") };
    *counts.entry("versions held with 64").or_default() += held;
    *counts.entry("gets refused with 64").or_default() += refused;
    store
        .keys(None)
        .unwrap()
        .iter()
        .for_each(|key| assert_eq!(store.delete(key, None).unwrap(), 1));
    serve.assert_idle_descriptors(settled, &store);
}

/// Number of versions that the client reads and retains.
const VERSIONS: u64 = 100;

/// Reads versions until no descriptor is left. Each version that is retained needs one.
///
/// Returns the number of versions retained and the number of failed reads.
pub(super) fn read_until_descriptors_run_out(url: &str) -> Vec<u64> {
    let pid = std::process::id();
    let store = Store::connect(url).unwrap();
    let (mut dicts, mut refused) = (Vec::new(), 0);
    for number in 0..VERSIONS {
        match get(&store, &format!("k{number}")) {
            Ok(dict) => dicts.push(dict),
            Err(error) => {
                assert_error_kind(&error, &EXPECTED_KINDS);
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "{} versions needed no more descriptors", dicts.len());
    let retained = dicts.len() as u64;
    for (number, dict) in dicts.iter().enumerate() {
        contents(&format!("k{number}")).assert_matches(dict);
    }
    drop((dicts, store));
    // Everything is released, so other versions can be read.
    let store = Store::connect(url).unwrap();
    let before = proc_entries(pid, "fd");
    for number in (0..VERSIONS).rev().take(10) {
        drop(get(&store, &format!("k{number}")).unwrap());
    }
    // Each version and its manifest stay mapped after a read, for the next one.
    let after = proc_entries(pid, "fd");
    assert!(after <= before + 15, "{after} descriptors, {before} before");
    vec![retained, refused]
}
