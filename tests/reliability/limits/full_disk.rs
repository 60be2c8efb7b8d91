//! Full disks: what does not fit fails with an error that names the cause, and readers are unaffected.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, json};
use tssd_format::TorchStoreStateDict;
use tssd_store::blocking::Store;
use tssd_store::{Durability, Error, ErrorKind, PutOptions};
use tssd_tests::campaign::Campaign;
use tssd_tests::command::binary;
use tssd_tests::test_daemon::TestDaemon;

use crate::contents::Contents;
use crate::limits::fixtures::{KeyFixture, assert_error_kind};
use crate::limits::temp_mount::TempMount;
use crate::store_dir;

/// Number of levels of free space, for each kind of store and each file system.
const FREE_LEVELS: u64 = 110;

/// Archives larger than the 256 KiB that fit in the data of a frame.
const FIXTURE: KeyFixture = KeyFixture { key: "policy", writers: 1, elements: 9000 };

/// Approximate size of a put, in bytes.
const PUT_BYTES: u64 = 340 << 10;

#[derive(Default)]
struct Counts {
    levels: u64,
    refused: u64,
    reads: u64,
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn full_disk_fails_puts_until_space_is_freed() {
    let campaign = Campaign::start("limits: full disks");
    let mut figures = Map::new();
    let (mut all, mut round) = (Counts::default(), 0);
    while campaign.should_continue(round, 1) {
        for mounted in [TempMount::tmpfs(6), TempMount::ext4(10)] {
            let mounted = match mounted {
                Ok(mounted) => mounted,
                Err(reason) => {
                    figures.insert(format!("skipped: {reason}"), json!(1));
                    continue;
                }
            };
            for kind in ["directory", "daemon", "command"] {
                let mut counts = Counts::default();
                match kind {
                    "directory" => {
                        let root = mounted.root().join(kind);
                        check_puts(
                            &mounted,
                            &root,
                            &Store::create(root.to_str().unwrap()).unwrap(),
                            &mut counts,
                        );
                    }
                    "daemon" => {
                        let root = mounted.root().join(kind);
                        fs::create_dir(&root).unwrap();
                        let served = TestDaemon::with_root(&root);
                        check_puts(&mounted, &root, &served.connect(), &mut counts);
                    }
                    _ => check_convert(&mounted, &mut counts),
                }
                let name = format!("places where {} ends under a {kind}", mounted.kind);
                figures.insert(name, json!(counts.levels));
                assert!(counts.refused > FREE_LEVELS / 2, "{kind} on {}", mounted.kind);
                all.levels += counts.levels;
                all.refused += counts.refused;
                all.reads += counts.reads;
                // The next kind of store needs the space.
                let _ = fs::remove_dir_all(mounted.root().join(kind));
            }
        }
        round += 1;
    }
    figures.insert("places".into(), json!(all.levels));
    figures.insert("refused".into(), json!(all.refused));
    figures.insert("reads meanwhile".into(), json!(all.reads));
    figures.insert("acknowledged and lost".into(), json!(0));
    figures.insert("left behind".into(), json!(0));
    campaign.finish(figures.into());
}

/// Returns the free space of a level, in bytes.
fn free_at(level: u64) -> u64 {
    PUT_BYTES * level / FREE_LEVELS
}

/// Checks that an error says that the disk is full, and where.
fn assert_full(error: &Error, root: &Path) {
    assert_error_kind(error, &[ErrorKind::Io]);
    let text = error.to_string();
    assert!(text.contains("No space left on device"), "{text}");
    assert!(text.contains(root.to_str().unwrap()) || text.contains("policy"), "{text}");
}

fn check_puts(mounted: &TempMount, root: &Path, store: &Store, counts: &mut Counts) {
    let mut version = 1;
    put(store, version).unwrap();
    for level in 0..FREE_LEVELS {
        {
            let _full = mounted.fill(free_at(level));
            match put(store, version + 1) {
                Ok(()) => {
                    version += 1;
                    assert!(level > FREE_LEVELS / 2, "the put does not fit at level {level}");
                }
                Err(error) => {
                    assert_full(&error, root);
                    counts.refused += 1;
                }
            }
            // Readers are unaffected.
            assert_eq!(FIXTURE.get(store, None).unwrap(), version);
            assert_eq!(
                FIXTURE.get(&Store::connect(root.to_str().unwrap()).unwrap(), None).unwrap(),
                version
            );
            counts.reads += 2;
            assert_no_temporary_files(root);
        }
        // With free space the same store works again, without a restart.
        version += 1;
        put(store, version).unwrap();
        assert_eq!(FIXTURE.get(store, None).unwrap(), version);
        let bytes = store.head(&FIXTURE.key()).unwrap().unwrap().bytes;
        let foreign = store_dir::foreign_files(root, &[("policy", vec![(version, bytes)])]);
        assert!(foreign.is_empty(), "level {level}: {foreign:?}");
        counts.levels += 1;
    }
}

/// Puts a version without waiting long for other writers.
fn put(store: &Store, version: u64) -> Result<(), Error> {
    let contents = Contents { key: FIXTURE.key, version, writers: 1, elements: FIXTURE.elements };
    let options = PutOptions {
        version: Some(version),
        durability: Durability::Disk,
        timeout: Duration::from_secs(5),
        ..PutOptions::default()
    };
    store.put_state_dict(&FIXTURE.key(), &contents.part(0), &options).map(|report| {
        assert!(report.visible);
    })
}

/// Checks that no temporary file is left.
fn assert_no_temporary_files(root: &Path) {
    let names: Vec<_> = crate::limits::fixtures::list_files(root);
    let temporary = names.iter().find(|path| path.to_str().unwrap().contains(".tmp-"));
    assert!(temporary.is_none(), "{temporary:?} still exists");
}

/// Runs `tssd convert` onto a full disk. The existing output file must stay unchanged.
fn check_convert(mounted: &TempMount, counts: &mut Counts) {
    let folder = tssd_tests::command::memory_tempdir();
    let input = folder.path().join("new.tssd");
    let dict = |version| Contents { key: "file", version, writers: 1, elements: 9000 }.part(0);
    let encode =
        |version| TorchStoreStateDict::from_state_dict(&dict(version)).unwrap().as_bytes().to_vec();
    fs::write(&input, encode(2)).unwrap();
    let out = mounted.root().join("out.tssd");
    let convert = || {
        let mut command = Command::new(binary());
        command.args(["convert", "--force"]).arg(&input).arg("-o").arg(&out).output().unwrap()
    };
    for level in 0..FREE_LEVELS {
        fs::write(&out, encode(1)).unwrap();
        let old = fs::read(&out).unwrap();
        {
            let _full = mounted.fill(free_at(level));
            let output = convert();
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() {
                assert!(level > FREE_LEVELS / 2, "the file does not fit at level {level}");
            } else {
                assert_eq!(output.status.code(), Some(5), "{stderr}");
                assert!(
                    stderr.contains("No space left on device") && stderr.contains("out.tssd"),
                    "{stderr}"
                );
                assert_eq!(
                    fs::read(&out).unwrap(),
                    old,
                    "level {level}: the old file is unchanged"
                );
                counts.refused += 1;
            }
            counts.reads += 1;
        }
        assert!(convert().status.success());
        assert_ne!(fs::read(&out).unwrap(), old);
        let names = fs::read_dir(mounted.root()).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<_> = names.filter(|name| name != "lost+found").collect();
        assert_eq!(names, ["out.tssd"], "level {level}");
        counts.levels += 1;
    }
    fs::remove_file(&out).unwrap();
}
