//! 64 descriptors, for a daemon or for a client, and a crowd that wants more.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::json;
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::command::{Serve, quick_folder};
use tssd_tests::proof::Proof;

use super::holdings::assert_typed;
use super::processes::{Actor, count};
use crate::contents::Contents;

/// How many come at once.
const CROWD: usize = 220;

/// Archives that have a segment each.
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
    contents(name).check(&dict);
    Ok(dict)
}

/// Whatever the want of descriptors leads to.
const KINDS: [ErrorKind; 3] = [ErrorKind::Io, ErrorKind::Busy, ErrorKind::Unreachable];

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn who_has_no_descriptors_left_says_so_and_goes_on() {
    let proof = Proof::begin("limits: descriptors");
    let (mut rounds, mut counts) = (0, BTreeMap::<&str, u64>::new());
    while proof.goes_on(rounds, 2) {
        daemon(&mut counts);
        client(&mut counts);
        rounds += 1;
    }
    let mut figures = json!({ "rounds": rounds, "descriptors": 64, "left open": 0 });
    for (what, count) in counts {
        figures[what] = count.into();
    }
    proof.end(figures);
}

/// A daemon with few, and many clients.
fn daemon(counts: &mut BTreeMap<&str, u64>) {
    let folder = quick_folder();
    let serve = Serve::under(&PRLIMIT, folder.path(), &["--memory-limit", "256MB"]);
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    let pid = serve.process.id();
    let (writer, reader) = (serve.connect(), serve.connect());
    put(&writer, "policy").unwrap();
    get(&reader, "policy").unwrap();
    let (before, threads) = (count(pid, "fd"), count(pid, "task"));
    // Some say nothing, some are clients like any other.
    let silent: Vec<UnixStream> =
        (0..CROWD / 2).map(|_| UnixStream::connect(socket).unwrap()).collect();
    let crowd: Vec<_> = (0..CROWD / 2)
        .map(|_| {
            let url = serve.url.clone();
            thread::spawn(move || {
                let store = Store::connect(&url)?;
                get(&store, "policy")?;
                Ok::<_, tssd_store::Error>(store)
            })
        })
        .collect();
    // Whoever was there before goes on, as far as that needs no descriptors.
    for _ in 0..20 {
        get(&reader, "policy").unwrap();
        match put(&writer, "policy") {
            Ok(()) => *counts.entry("puts meanwhile").or_default() += 1,
            Err(error) => {
                assert_typed(&error, &KINDS);
                *counts.entry("puts refused").or_default() += 1;
            }
        }
    }
    *counts.entry("gets meanwhile").or_default() += 20;
    let mut inside = Vec::new();
    for client in crowd {
        match client.join().unwrap() {
            Ok(store) => {
                *counts.entry("clients served").or_default() += 1;
                inside.push(store);
            }
            Err(error) => {
                assert_typed(&error, &KINDS);
                *counts.entry("clients refused").or_default() += 1;
            }
        }
    }
    drop((silent, inside));
    // The crowd has gone: all is as it was.
    let calm = || count(pid, "fd") <= before && count(pid, "task") <= threads + 1;
    let is_calm = (0..1000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        calm()
    });
    assert!(
        is_calm,
        "{} descriptors, {before} before; {} threads, {threads} before",
        count(pid, "fd"),
        count(pid, "task")
    );
    for _ in 0..4 {
        let store = serve.connect();
        put(&store, "policy").unwrap();
        get(&store, "policy").unwrap();
    }
}

/// A client with few, and many versions.
fn client(counts: &mut BTreeMap<&str, u64>) {
    let folder = quick_folder();
    let serve = Serve::start(folder.path(), &[]);
    let store = serve.connect();
    let settled = serve.settled(&store);
    for number in 0..VERSIONS {
        put(&store, &format!("k{number}")).unwrap();
    }
    let words = Actor::start(&PRLIMIT, "few descriptors", &serve.url).words();
    let [held, refused] = words.as_slice() else { panic!("{words:?}") };
    *counts.entry("versions held with 64").or_default() += held;
    *counts.entry("gets refused with 64").or_default() += refused;
    store
        .keys(None)
        .unwrap()
        .iter()
        .for_each(|key| assert_eq!(store.delete(key, None).unwrap(), 1));
    serve.settles_at(settled, &store);
}

/// How many versions a client reads and keeps.
const VERSIONS: u64 = 100;

/// A process with few descriptors: each version that it holds takes one. Says how many it held, and how many it could
/// not get.
pub(super) fn read_until_there_are_none(url: &str) -> Vec<u64> {
    let own = std::process::id();
    let store = Store::connect(url).unwrap();
    let (mut held, mut refused) = (Vec::new(), 0);
    for number in 0..VERSIONS {
        match get(&store, &format!("k{number}")) {
            Ok(dict) => held.push(dict),
            Err(error) => {
                assert_typed(&error, &KINDS);
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "{} of them fit", held.len());
    let kept = held.len() as u64;
    for (number, dict) in held.iter().enumerate() {
        contents(&format!("k{number}")).check(dict);
    }
    drop((held, store));
    // All is let go of, and there is room for others.
    let store = Store::connect(url).unwrap();
    let before = count(own, "fd");
    for number in (0..VERSIONS).rev().take(10) {
        drop(get(&store, &format!("k{number}")).unwrap());
    }
    // Each version that was read stays mapped for the next time, and so do the manifests.
    let after = count(own, "fd");
    assert!(after <= before + 15, "{after} descriptors, {before} before");
    vec![kept, refused]
}
