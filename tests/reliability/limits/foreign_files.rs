//! Foreign files in the directory of a store: lost, copied, renamed, replaced, or not regular files.
//!
//! A store reports them or works on, and touches no foreign file.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, Mode};
use serde_json::json;
use tssd_store::DaemonOptions;
use tssd_store::ErrorKind;
use tssd_store::blocking::{Daemon, Store};
use tssd_tests::campaign::Campaign;
use tssd_tests::command::memory_tempdir;
use tssd_tests::rng::SeededRng;
use tssd_tests::test_daemon::TestDaemon;

use crate::limits::fixtures::{
    KeyFixture, assert_error_kind, create_root, list_files, verify_root,
};
use crate::store_dir;

/// Number of cases in CI with two changes.
const PAIRS: u64 = 200;

const VERSIONS: u64 = 2;

/// A name that the directory of a version could have.
const FOREIGN_VERSION: &str = "0-7-0123456789abcdef";

/// Number of the version that is put after the changes.
const NEXT_VERSION: u64 = 9;

/// Time limit of a case. A store must not block on a file.
const CASE_TIMEOUT: Duration = Duration::from_secs(50);

const FIXTURES: [KeyFixture; 2] = [
    KeyFixture { key: "one", writers: 1, elements: 8 },
    KeyFixture { key: "of/two", writers: 2, elements: 8 },
];

/// Kinds of errors that a damaged store may report.
const EXPECTED_KINDS: [ErrorKind; 4] =
    [ErrorKind::Corrupt, ErrorKind::Io, ErrorKind::NotFound, ErrorKind::Busy];

/// A change of one file or directory below the root.
#[derive(Clone, Copy, Debug)]
enum Mutation {
    Lose,
    Empty,
    Halve,
    Lengthen,
    Rename,
    /// Replaces it by the contents of another file of the same kind.
    Swap,
    Folder,
    LinkOut,
    LinkLoop,
    Pipe,
    Socket,
    Device,
    /// Adds foreign files next to it.
    Foreign,
    /// Adds a copy next to it.
    Copy,
}

const MUTATIONS: [Mutation; 14] = [
    Mutation::Lose,
    Mutation::Empty,
    Mutation::Halve,
    Mutation::Lengthen,
    Mutation::Rename,
    Mutation::Swap,
    Mutation::Folder,
    Mutation::LinkOut,
    Mutation::LinkLoop,
    Mutation::Pipe,
    Mutation::Socket,
    Mutation::Device,
    Mutation::Foreign,
    Mutation::Copy,
];

/// A mutation of one file or directory.
#[derive(Clone, Debug)]
struct Change {
    path: PathBuf,
    mutation: Mutation,
}

/// A root that is changed, and a directory outside of it.
struct Sandbox {
    folder: PathBuf,
}

impl Sandbox {
    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    fn outside(&self) -> PathBuf {
        self.folder.join("outside")
    }

    /// Makes the change. Returns the files that no store may delete, relative to the root.
    #[expect(clippy::too_many_lines, reason = "one arm for each mutation")]
    fn apply(&self, Change { path, mutation }: &Change) -> Vec<PathBuf> {
        let at = self.root().join(path);
        let Ok(metadata) = at.symlink_metadata() else { return Vec::new() };
        // A path behind a link is outside of the root already.
        let root = self.root().canonicalize().unwrap();
        let above = at.parent().and_then(|above| above.canonicalize().ok());
        if above != path.parent().map(|above| root.join(above)) {
            return Vec::new();
        }
        let is_folder = metadata.is_dir();
        let outside = self.outside();
        let remove = || if is_folder { fs::remove_dir_all(&at) } else { fs::remove_file(&at) };
        let beside = |name: &str| at.with_file_name(name);
        let relative = |path: &Path| path.strip_prefix(self.root()).unwrap().to_owned();
        let resize = |len: fn(u64) -> u64| {
            if metadata.is_file() {
                File::options()
                    .write(true)
                    .open(&at)
                    .unwrap()
                    .set_len(len(metadata.len()))
                    .unwrap();
            }
        };
        match mutation {
            Mutation::Lose => remove().unwrap(),
            Mutation::Empty => resize(|_| 0),
            Mutation::Halve => resize(|len| len / 2),
            Mutation::Lengthen => resize(|len| len + 1),
            // If the name exists already, the rename fails, and both stay.
            Mutation::Rename => drop(fs::rename(&at, beside(FOREIGN_VERSION))),
            Mutation::Swap => {
                let is_file = |other: &PathBuf| {
                    let metadata = self.root().join(other).symlink_metadata();
                    metadata.is_ok_and(|metadata| metadata.is_file())
                };
                let is_same_kind = |other: &PathBuf| {
                    other != path && other.extension() == path.extension() && is_file(other)
                };
                let other = list_files(&self.root()).into_iter().find(is_same_kind);
                if let (Some(other), false) = (other, is_folder) {
                    let bytes = fs::read(self.root().join(other)).unwrap();
                    remove().unwrap();
                    fs::write(&at, bytes).unwrap();
                }
            }
            Mutation::Folder => {
                remove().unwrap();
                fs::create_dir(&at).unwrap();
                fs::write(at.join("own"), "own").unwrap();
                return vec![relative(&at.join("own"))];
            }
            Mutation::LinkOut => {
                // The target of the link looks like a part of the store.
                let target = outside.join(path);
                fs::create_dir_all(target.parent().unwrap()).unwrap();
                fs::rename(&at, &target).unwrap();
                symlink(&target, &at).unwrap();
            }
            Mutation::LinkLoop => {
                remove().unwrap();
                symlink(&at, &at).unwrap();
            }
            Mutation::Pipe => {
                remove().unwrap();
                rustix::fs::mknodat(
                    CWD,
                    &at,
                    rustix::fs::FileType::Fifo,
                    Mode::RUSR | Mode::WUSR,
                    0,
                )
                .unwrap();
            }
            Mutation::Socket => {
                remove().unwrap();
                drop(UnixListener::bind(&at).unwrap());
            }
            Mutation::Device => {
                remove().unwrap();
                // /dev/zero.
                let device = rustix::fs::makedev(1, 5);
                let kind = rustix::fs::FileType::CharacterDevice;
                let created = rustix::fs::mknodat(CWD, &at, kind, Mode::RUSR | Mode::WUSR, device);
                // Only root can create a device. For other users the file is lost.
                assert!(created.is_ok() || !rustix::process::geteuid().is_root());
            }
            Mutation::Foreign => {
                let names = ["README", "notes.tssd", ".hidden", "3.json", "0-1.bak"];
                for name in names {
                    fs::write(beside(name), name).unwrap();
                }
                // The first of two changes may have created it.
                let _ = symlink(outside.join("precious.tssd"), beside("5-5-0123456789abcdef"));
                return names.iter().map(|name| relative(&beside(name))).collect();
            }
            Mutation::Copy => {
                let copy = beside("copy.tssd");
                if is_folder {
                    store_dir::copy(&at, &copy);
                    return list_files(&copy)
                        .iter()
                        .map(|path| relative(&copy.join(path)))
                        .collect();
                }
                fs::copy(&at, &copy).unwrap();
                return vec![relative(&copy)];
            }
        }
        Vec::new()
    }
}

/// Counts of a campaign.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    succeeded: u64,
    refused: u64,
    reported: u64,
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn foreign_files_are_rejected_or_left_alone() {
    let campaign = Campaign::start("limits: strangers");
    let base = memory_tempdir();
    let root = base.path().join("root");
    create_root(&root, &FIXTURES, VERSIONS);
    let outside = base.path().join("outside");
    fs::create_dir_all(outside.join(FOREIGN_VERSION)).unwrap();
    fs::write(outside.join("precious.tssd"), "precious").unwrap();
    for name in ["manifest.tssd", "0-1.tssd"] {
        fs::write(outside.join(FOREIGN_VERSION).join(name), name).unwrap();
    }
    fs::write(root.join(".daemon"), "").unwrap();
    let mut names = list_files(&root);
    let folders: Vec<PathBuf> =
        names.iter().filter_map(|path| path.parent().map(Path::to_owned)).collect();
    names.extend(folders.into_iter().filter(|path| *path != Path::new("")));
    for holding in &FIXTURES {
        names.push(holding.folder().into());
    }
    names.sort();
    names.dedup();
    let all = || {
        names
            .iter()
            .flat_map(|path| MUTATIONS.map(|mutation| Change { path: path.clone(), mutation }))
    };
    let mut counts = Counts::default();
    let mut singles = 0;
    for change in all() {
        run_case(base.path(), &[change], &mut counts);
        singles += 1;
    }
    let (mut rng, mut pairs) = (SeededRng::new(0xF11E), 0);
    let all: Vec<Change> = all().collect();
    while campaign.should_continue(pairs, PAIRS) {
        let mut pick = || all[usize::try_from(rng.below(all.len() as u64)).unwrap()].clone();
        run_case(base.path(), &[pick(), pick()], &mut counts);
        pairs += 1;
    }
    campaign.finish(json!({
        "cases of one": singles, "cases of two": pairs, "names": names.len(), "kinds": MUTATIONS.len(),
        "calls that were right": counts.succeeded, "calls that were refused": counts.refused,
        "lost files named": counts.reported, "foreign files deleted": 0, "files touched outside": 0,
    }));
}

/// Runs one case in two copies of the directory: with a store without a daemon, and with a daemon.
fn run_case(base: &Path, changes: &[Change], counts: &mut Counts) {
    for by_daemon in [false, true] {
        let (base, owned_changes, initial_counts) = (base.to_owned(), changes.to_vec(), *counts);
        let (sender, receiver) = mpsc::channel();
        let worker = thread::spawn(move || {
            let mut counts = initial_counts;
            run_in_copy(&base, &owned_changes, by_daemon, &mut counts);
            let _ = sender.send(());
            counts
        });
        let received = receiver.recv_timeout(CASE_TIMEOUT);
        let timed_out = received == Err(mpsc::RecvTimeoutError::Timeout);
        assert!(!timed_out, "{changes:?}, by a daemon {by_daemon}: timeout");
        let new_counts = worker.join().ok();
        *counts = new_counts.unwrap_or_else(|| panic!("{changes:?}, by a daemon {by_daemon}"));
    }
}

fn run_in_copy(base: &Path, changes: &[Change], by_daemon: bool, counts: &mut Counts) {
    let folder = memory_tempdir();
    let sandbox = Sandbox { folder: folder.path().to_owned() };
    store_dir::copy(base, &sandbox.folder);
    let foreign: Vec<PathBuf> = changes.iter().flat_map(|change| sandbox.apply(change)).collect();
    // The second change may remove what the first one has added.
    let foreign: Vec<PathBuf> = foreign
        .into_iter()
        .filter(|path| sandbox.root().join(path).symlink_metadata().is_ok())
        .collect();
    let outside = snapshot(&sandbox.outside());
    if !by_daemon {
        check_verify_report(&sandbox, changes, counts);
    }
    let is_untouched =
        |holding: &KeyFixture| !changes.iter().any(|change| holding.contains_path(&change.path));
    let touches_root = changes.iter().any(|change| change.path.components().count() < 2);
    if by_daemon {
        let options = DaemonOptions {
            root: Some(sandbox.root()),
            ..DaemonOptions::for_socket(sandbox.folder.join("try"), 64 << 20)
        };
        match Daemon::bind(options) {
            Ok(daemon) => drop(daemon),
            Err(error) => {
                assert!(touches_root, "{error}");
                assert_error_kind(&error, &EXPECTED_KINDS);
                return;
            }
        }
        let served = TestDaemon::with_root(&sandbox.root());
        exercise_store(&served.connect(), is_untouched, counts);
    } else {
        match Store::directory(sandbox.root()) {
            Ok(store) => {
                exercise_store(&store, |holding| is_untouched(holding) && !touches_root, counts);
            }
            Err(error) => assert_error_kind(&error, &[ErrorKind::Unreachable]),
        }
    }
    assert_eq!(snapshot(&sandbox.outside()), outside, "files outside are unchanged");
    for path in foreign {
        assert!(
            sandbox.root().join(&path).symlink_metadata().is_ok(),
            "{} is deleted",
            path.display()
        );
    }
}

/// Checks that `tssd verify` reports each missing or replaced file that the ledger refers to.
fn check_verify_report(sandbox: &Sandbox, changes: &[Change], counts: &mut Counts) {
    let [Change { path, mutation }] = changes else { return };
    let is_archive = path.extension().is_some_and(|extension| extension == "tssd");
    let is_version =
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"0-"));
    let is_folder = !is_archive && is_version;
    match mutation {
        Mutation::Foreign => assert!(
            verify_root(&sandbox.root())
                .0
                .iter()
                .all(|found| found.file_name().unwrap() == "notes.tssd"),
        ),
        Mutation::Copy => {
            let (found, _) = verify_root(&sandbox.root());
            assert!(
                found
                    .iter()
                    .all(|found| found.components().any(|part| part.as_os_str() == "copy.tssd"))
            );
        }
        // Mutations that only apply to files.
        Mutation::Empty | Mutation::Halve | Mutation::Lengthen | Mutation::Swap if !is_archive => {}
        _ if is_archive || is_folder => {
            let (found, report) = verify_root(&sandbox.root());
            // The manifest reveals an archive in place of another one, by its name.
            let name = path.file_name().unwrap().to_str().unwrap();
            let is_replacement_reported =
                matches!(mutation, Mutation::Swap) && format!("{report:?}").contains(name);
            let is_named =
                is_replacement_reported || found.iter().any(|found| found.starts_with(path));
            assert!(is_named, "{changes:?}: {report:?}");
            counts.reported += 1;
        }
        _ => {}
    }
}

/// Uses everything that a store has. Untouched keys must work, others may fail.
fn exercise_store(store: &Store, is_untouched: impl Fn(&KeyFixture) -> bool, counts: &mut Counts) {
    let mut check_result = |operation: &str,
                            holding: &KeyFixture,
                            result: Result<u64, tssd_store::Error>| {
        match result {
            Ok(number) => {
                counts.succeeded += 1;
                Some(number)
            }
            Err(error) => {
                assert!(!is_untouched(holding), "{operation} {holding:?}: {error}");
                let known = [
                    &EXPECTED_KINDS[..],
                    &[ErrorKind::Refused, ErrorKind::Rejected, ErrorKind::Overtaken],
                ];
                assert_error_kind(&error, &known.concat());
                counts.refused += 1;
                None
            }
        }
    };
    for holding in &FIXTURES {
        let key = holding.key();
        check_result(
            "list",
            holding,
            store.keys(None).map(|keys| {
                assert!(!is_untouched(holding) || keys.contains(&key));
                0
            }),
        );
        check_result(
            "versions of",
            holding,
            store.versions(&key).map(|versions| {
                assert!(!is_untouched(holding) || versions.len() as u64 == VERSIONS);
                0
            }),
        );
        for version in [None, Some(1), Some(2)] {
            check_result("get", holding, holding.get(store, version));
        }
        if check_result("put", holding, holding.put(store, NEXT_VERSION).map(|()| NEXT_VERSION))
            .is_some()
        {
            // An acknowledged version must exist.
            assert_eq!(holding.get(store, None).unwrap(), NEXT_VERSION, "{holding:?}");
            holding.get(store, Some(NEXT_VERSION)).unwrap();
        }
        check_result("delete 1 of", holding, store.delete(&key, Some(1)));
        check_result("delete", holding, store.delete(&key, None));
    }
}

/// Returns paths, contents and modification times of all files below a directory.
fn snapshot(folder: &Path) -> Vec<(PathBuf, Vec<u8>, std::time::SystemTime)> {
    list_files(folder)
        .into_iter()
        .map(|path| {
            let at = folder.join(&path);
            let metadata = at.symlink_metadata().unwrap();
            let bytes = if metadata.is_file() { fs::read(&at).unwrap() } else { Vec::new() };
            (path, bytes, metadata.modified().unwrap())
        })
        .collect()
}
