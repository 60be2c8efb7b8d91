//! Disks that are full, and freed: whatever does not fit is an error that says so, and nothing else suffers.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, json};
use tssd_format::TorchStoreStateDict;
use tssd_store::blocking::Store;
use tssd_store::{Durability, Error, ErrorKind, PutOptions};
use tssd_tests::command::binary;
use tssd_tests::proof::Proof;
use tssd_tests::served::Served;

use super::holdings::{Holding, assert_typed};
use super::mounted::Mounted;
use crate::contents::Contents;
use crate::folder;

/// At how many places the room ends, for each kind of store on each file system.
const PLACES: u64 = 110;

/// Archives of more than the 256 KiB that go as data of a frame.
const HOLDING: Holding = Holding { key: "policy", writers: 1, elements: 9000 };

/// What a put takes, more or less.
const TAKES: u64 = 340 << 10;

#[derive(Default)]
struct Counts {
    places: u64,
    refused: u64,
    reads: u64,
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn a_full_disk_is_an_error_until_there_is_room() {
    let proof = Proof::begin("limits: full disks");
    let mut figures = Map::new();
    let (mut all, mut round) = (Counts::default(), 0);
    while proof.goes_on(round, 1) {
        for mounted in [Mounted::tmpfs(6), Mounted::ext4(10)] {
            let mounted = match mounted {
                Ok(mounted) => mounted,
                Err(why) => {
                    figures.insert(format!("skipped: {why}"), json!(1));
                    continue;
                }
            };
            for kind in ["directory", "daemon", "command"] {
                let mut counts = Counts::default();
                match kind {
                    "directory" => {
                        let root = mounted.root().join(kind);
                        puts(
                            &mounted,
                            &root,
                            &Store::create(root.to_str().unwrap()).unwrap(),
                            &mut counts,
                        );
                    }
                    "daemon" => {
                        let root = mounted.root().join(kind);
                        fs::create_dir(&root).unwrap();
                        let served = Served::over(&root);
                        puts(&mounted, &root, &served.connect(), &mut counts);
                    }
                    _ => commands(&mounted, &mut counts),
                }
                let name = format!("places where {} ends under a {kind}", mounted.kind);
                figures.insert(name, json!(counts.places));
                assert!(counts.refused > PLACES / 2, "{kind} on {}", mounted.kind);
                all.places += counts.places;
                all.refused += counts.refused;
                all.reads += counts.reads;
                // The next one has all the room.
                let _ = fs::remove_dir_all(mounted.root().join(kind));
            }
        }
        round += 1;
    }
    figures.insert("places".into(), json!(all.places));
    figures.insert("refused".into(), json!(all.refused));
    figures.insert("reads meanwhile".into(), json!(all.reads));
    figures.insert("acknowledged and lost".into(), json!(0));
    figures.insert("left behind".into(), json!(0));
    proof.end(figures.into());
}

/// How much is free at the n-th place.
fn free_at(place: u64) -> u64 {
    TAKES * place / PLACES
}

/// It says that the disk is full, and where.
fn assert_full(error: &Error, root: &Path) {
    assert_typed(error, &[ErrorKind::Io]);
    let text = error.to_string();
    assert!(text.contains("No space left on device"), "{text}");
    assert!(text.contains(root.to_str().unwrap()) || text.contains("policy"), "{text}");
}

fn puts(mounted: &Mounted, root: &Path, store: &Store, counts: &mut Counts) {
    let mut version = 1;
    put(store, version).unwrap();
    for place in 0..PLACES {
        {
            let _full = mounted.fill(free_at(place));
            match put(store, version + 1) {
                Ok(()) => {
                    version += 1;
                    assert!(place > PLACES / 2, "it does not fit at {place}");
                }
                Err(error) => {
                    assert_full(&error, root);
                    counts.refused += 1;
                }
            }
            // Whoever reads does not notice.
            assert_eq!(HOLDING.get(store, None).unwrap(), version);
            assert_eq!(
                HOLDING.get(&Store::connect(root.to_str().unwrap()).unwrap(), None).unwrap(),
                version
            );
            counts.reads += 2;
            nothing_half(root);
        }
        // There is room again: nobody starts anything anew.
        version += 1;
        put(store, version).unwrap();
        assert_eq!(HOLDING.get(store, None).unwrap(), version);
        let bytes = store.head(&HOLDING.key()).unwrap().unwrap().bytes;
        let strangers = folder::strangers(root, &[("policy", vec![(version, bytes)])]);
        assert!(strangers.is_empty(), "place {place}: {strangers:?}");
        counts.places += 1;
    }
}

/// A try that does not wait for others.
fn put(store: &Store, version: u64) -> Result<(), Error> {
    let contents = Contents { key: HOLDING.key, version, writers: 1, elements: HOLDING.elements };
    let options = PutOptions {
        version: Some(version),
        durability: Durability::Disk,
        timeout: Duration::from_secs(5),
        ..PutOptions::default()
    };
    store.put_state_dict(&HOLDING.key(), &contents.part(0), &options).map(|report| {
        assert!(report.visible);
    })
}

/// No temporary file stays, and no archive of a version that is none.
fn nothing_half(root: &Path) {
    let names: Vec<_> = super::holdings::files(root);
    let half = names.iter().find(|path| path.to_str().unwrap().contains(".tmp-"));
    assert!(half.is_none(), "{half:?} is left behind");
}

/// `tssd convert` onto a full disk: the file that was there stays as it was.
fn commands(mounted: &Mounted, counts: &mut Counts) {
    let folder = tssd_tests::command::quick_folder();
    let input = folder.path().join("new.tssd");
    let dict = |version| Contents { key: "file", version, writers: 1, elements: 9000 }.part(0);
    let encode =
        |version| TorchStoreStateDict::from_state_dict(&dict(version)).unwrap().as_bytes().to_vec();
    fs::write(&input, encode(2)).unwrap();
    let out = mounted.root().join("out.tssd");
    let convert =
        || Command::new(binary()).arg("convert").arg(&input).arg("-o").arg(&out).output().unwrap();
    for place in 0..PLACES {
        fs::write(&out, encode(1)).unwrap();
        let old = fs::read(&out).unwrap();
        {
            let _full = mounted.fill(free_at(place));
            let output = convert();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() {
                assert!(place > PLACES / 2, "it does not fit at {place}");
            } else {
                assert_eq!(output.status.code(), Some(5), "{said}");
                assert!(
                    said.contains("No space left on device") && said.contains("out.tssd"),
                    "{said}"
                );
                assert_eq!(
                    fs::read(&out).unwrap(),
                    old,
                    "place {place}: the old file is as it was"
                );
                counts.refused += 1;
            }
            counts.reads += 1;
        }
        assert!(convert().status.success());
        assert_ne!(fs::read(&out).unwrap(), old);
        let names = fs::read_dir(mounted.root()).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<_> = names.filter(|name| name != "lost+found").collect();
        assert_eq!(names, ["out.tssd"], "place {place}");
        counts.places += 1;
    }
    fs::remove_file(&out).unwrap();
}
