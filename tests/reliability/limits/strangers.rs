//! Files that are lost, copied, renamed, of others, or no files: a store says so or goes on, and touches nothing else.

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
use tssd_tests::command::quick_folder;
use tssd_tests::dice::Dice;
use tssd_tests::proof::Proof;
use tssd_tests::served::Served;

use super::holdings::{Holding, assert_typed, files, fill, scrub};
use crate::folder;

/// How many cases of two at once CI wants.
const PAIRS: u64 = 200;

const VERSIONS: u64 = 2;

/// The name that the folder of a version might have.
const STRANGER: &str = "0-7-0123456789abcdef";

/// The number of what is put afterwards.
const NEXT: u64 = 9;

/// How long a case may take: nothing is waited for that does not come.
const PATIENCE: Duration = Duration::from_secs(50);

const HOLDINGS: [Holding; 2] = [
    Holding { key: "one", writers: 1, elements: 8 },
    Holding { key: "of/two", writers: 2, elements: 8 },
];

/// Whatever may be said of a damaged store.
const KINDS: [ErrorKind; 4] =
    [ErrorKind::Corrupt, ErrorKind::Io, ErrorKind::NotFound, ErrorKind::Busy];

/// What is done to one name below the root.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Lose,
    Empty,
    Halve,
    Lengthen,
    Rename,
    /// Another file, of the same kind, in its place.
    Swap,
    Folder,
    LinkOut,
    LinkLoop,
    Pipe,
    Socket,
    Device,
    /// A file that is nobody's beside it.
    Foreign,
    /// A second copy beside it.
    Copy,
}

const DEEDS: [Deed; 14] = [
    Deed::Lose,
    Deed::Empty,
    Deed::Halve,
    Deed::Lengthen,
    Deed::Rename,
    Deed::Swap,
    Deed::Folder,
    Deed::LinkOut,
    Deed::LinkLoop,
    Deed::Pipe,
    Deed::Socket,
    Deed::Device,
    Deed::Foreign,
    Deed::Copy,
];

/// What is done, to which file or folder.
#[derive(Clone, Debug)]
struct Act {
    path: PathBuf,
    deed: Deed,
}

/// A root to which something is done, and what is outside of it.
struct Scene {
    folder: PathBuf,
}

impl Scene {
    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    fn outside(&self) -> PathBuf {
        self.folder.join("outside")
    }

    /// Does it; returns what nobody may delete, by its path below the root.
    fn perform(&self, Act { path, deed }: &Act) -> Vec<PathBuf> {
        let at = self.root().join(path);
        let Ok(metadata) = at.symlink_metadata() else { return Vec::new() };
        // What is behind a link is outside already.
        let root = self.root().canonicalize().unwrap();
        let above = at.parent().and_then(|above| above.canonicalize().ok());
        if above != path.parent().map(|above| root.join(above)) {
            return Vec::new();
        }
        let is_folder = metadata.is_dir();
        let outside = self.outside();
        let remove = || if is_folder { fs::remove_dir_all(&at) } else { fs::remove_file(&at) };
        let beside = |name: &str| at.with_file_name(name);
        let below = |path: &Path| path.strip_prefix(self.root()).unwrap().to_owned();
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
        match deed {
            Deed::Lose => remove().unwrap(),
            Deed::Empty => resize(|_| 0),
            Deed::Halve => resize(|len| len / 2),
            Deed::Lengthen => resize(|len| len + 1),
            // Where there is one of the name, it stays as it is.
            Deed::Rename => drop(fs::rename(&at, beside(STRANGER))),
            Deed::Swap => {
                let is_file = |other: &PathBuf| {
                    let metadata = self.root().join(other).symlink_metadata();
                    metadata.is_ok_and(|metadata| metadata.is_file())
                };
                let is_like = |other: &PathBuf| {
                    other != path && other.extension() == path.extension() && is_file(other)
                };
                let other = files(&self.root()).into_iter().find(is_like);
                if let (Some(other), false) = (other, is_folder) {
                    let bytes = fs::read(self.root().join(other)).unwrap();
                    remove().unwrap();
                    fs::write(&at, bytes).unwrap();
                }
            }
            Deed::Folder => {
                remove().unwrap();
                fs::create_dir(&at).unwrap();
                fs::write(at.join("own"), "own").unwrap();
                return vec![below(&at.join("own"))];
            }
            Deed::LinkOut => {
                // What is there looks as if it were in the store.
                let target = outside.join(path);
                fs::create_dir_all(target.parent().unwrap()).unwrap();
                fs::rename(&at, &target).unwrap();
                symlink(&target, &at).unwrap();
            }
            Deed::LinkLoop => {
                remove().unwrap();
                symlink(&at, &at).unwrap();
            }
            Deed::Pipe => {
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
            Deed::Socket => {
                remove().unwrap();
                drop(UnixListener::bind(&at).unwrap());
            }
            Deed::Device => {
                remove().unwrap();
                // /dev/zero.
                let device = rustix::fs::makedev(1, 5);
                let kind = rustix::fs::FileType::CharacterDevice;
                let made = rustix::fs::mknodat(CWD, &at, kind, Mode::RUSR | Mode::WUSR, device);
                // Who is not root cannot: then it is lost.
                assert!(made.is_ok() || !rustix::process::geteuid().is_root());
            }
            Deed::Foreign => {
                let names = ["README", "notes.tssd", ".hidden", "3.json", "0-1.bak"];
                for name in names {
                    fs::write(beside(name), name).unwrap();
                }
                // It may be there from the act before.
                let _ = symlink(outside.join("precious.tssd"), beside("5-5-0123456789abcdef"));
                return names.iter().map(|name| below(&beside(name))).collect();
            }
            Deed::Copy => {
                let copy = beside("copy.tssd");
                if is_folder {
                    folder::copy(&at, &copy);
                    return files(&copy).iter().map(|path| below(&copy.join(path))).collect();
                }
                fs::copy(&at, &copy).unwrap();
                return vec![below(&copy)];
            }
        }
        Vec::new()
    }
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    right: u64,
    refused: u64,
    named: u64,
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn whatever_is_in_the_folder_is_refused_or_left_alone() {
    let proof = Proof::begin("limits: strangers");
    let base = quick_folder();
    let root = base.path().join("root");
    fill(&root, &HOLDINGS, VERSIONS);
    let outside = base.path().join("outside");
    fs::create_dir_all(outside.join(STRANGER)).unwrap();
    fs::write(outside.join("precious.tssd"), "precious").unwrap();
    for name in ["manifest.tssd", "0-1.tssd"] {
        fs::write(outside.join(STRANGER).join(name), name).unwrap();
    }
    fs::write(root.join(".daemon"), "").unwrap();
    let mut names = files(&root);
    let folders: Vec<PathBuf> =
        names.iter().filter_map(|path| path.parent().map(Path::to_owned)).collect();
    names.extend(folders.into_iter().filter(|path| *path != Path::new("")));
    for holding in &HOLDINGS {
        names.push(holding.folder().into());
    }
    names.sort();
    names.dedup();
    let all = || names.iter().flat_map(|path| DEEDS.map(|deed| Act { path: path.clone(), deed }));
    let mut counts = Counts::default();
    let mut singles = 0;
    for act in all() {
        play(base.path(), &[act], &mut counts);
        singles += 1;
    }
    let (mut dice, mut pairs) = (Dice::new(0xF11E), 0);
    let all: Vec<Act> = all().collect();
    while proof.goes_on(pairs, PAIRS) {
        let mut pick = || all[usize::try_from(dice.below(all.len() as u64)).unwrap()].clone();
        play(base.path(), &[pick(), pick()], &mut counts);
        pairs += 1;
    }
    proof.end(json!({
        "cases of one": singles, "cases of two": pairs, "names": names.len(), "kinds": DEEDS.len(),
        "calls that were right": counts.right, "calls that were refused": counts.refused,
        "lost files named": counts.named, "foreign files deleted": 0, "files touched outside": 0,
    }));
}

/// One case, in copies of the folder: with a store in a directory, and with a daemon.
fn play(base: &Path, acts: &[Act], counts: &mut Counts) {
    for by_daemon in [false, true] {
        let (base, own, so_far) = (base.to_owned(), acts.to_vec(), *counts);
        let (done, is_done) = mpsc::channel();
        let case = thread::spawn(move || {
            let mut counts = so_far;
            case(&base, &own, by_daemon, &mut counts);
            let _ = done.send(());
            counts
        });
        let waited = is_done.recv_timeout(PATIENCE);
        let hangs = waited == Err(mpsc::RecvTimeoutError::Timeout);
        assert!(!hangs, "{acts:?}, by a daemon {by_daemon}: it hangs");
        let counted = case.join().ok();
        *counts = counted.unwrap_or_else(|| panic!("{acts:?}, by a daemon {by_daemon}"));
    }
}

fn case(base: &Path, acts: &[Act], by_daemon: bool, counts: &mut Counts) {
    let folder = quick_folder();
    let scene = Scene { folder: folder.path().to_owned() };
    folder::copy(base, &scene.folder);
    let foreign: Vec<PathBuf> = acts.iter().flat_map(|act| scene.perform(act)).collect();
    // Of two, one may take away what the other has done.
    let foreign: Vec<PathBuf> = foreign
        .into_iter()
        .filter(|path| scene.root().join(path).symlink_metadata().is_ok())
        .collect();
    let outside = photograph(&scene.outside());
    if !by_daemon {
        missing_is_named(&scene, acts, counts);
    }
    let is_alone = |holding: &Holding| !acts.iter().any(|act| holding.owns(&act.path));
    let touches_root = acts.iter().any(|act| act.path.components().count() < 2);
    if by_daemon {
        let options = DaemonOptions {
            root: Some(scene.root()),
            ..DaemonOptions::at(scene.folder.join("try"), 64 << 20)
        };
        match Daemon::bind(options) {
            Ok(daemon) => drop(daemon),
            Err(error) => {
                assert!(touches_root, "{error}");
                assert_typed(&error, &KINDS);
                return;
            }
        }
        let served = Served::over(&scene.root());
        use_all(&served.connect(), is_alone, counts);
    } else {
        match Store::directory(scene.root()) {
            Ok(store) => use_all(&store, |holding| is_alone(holding) && !touches_root, counts),
            Err(error) => assert_typed(&error, &[ErrorKind::Unreachable]),
        }
    }
    assert_eq!(photograph(&scene.outside()), outside, "what is outside is as it was");
    for path in foreign {
        assert!(
            scene.root().join(&path).symlink_metadata().is_ok(),
            "{} is deleted",
            path.display()
        );
    }
}

/// `tssd verify` names each file that was taken away, as long as the ledger knows of it.
fn missing_is_named(scene: &Scene, acts: &[Act], counts: &mut Counts) {
    let [Act { path, deed }] = acts else { return };
    let is_archive = path.extension().is_some_and(|extension| extension == "tssd");
    let is_version =
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"0-"));
    let is_folder = !is_archive && is_version;
    match deed {
        Deed::Foreign => assert!(
            scrub(&scene.root()).0.iter().all(|found| found.file_name().unwrap() == "notes.tssd"),
        ),
        Deed::Copy => {
            let (found, _) = scrub(&scene.root());
            assert!(
                found
                    .iter()
                    .all(|found| found.components().any(|part| part.as_os_str() == "copy.tssd"))
            );
        }
        // Empty, halved: of files alone.
        Deed::Empty | Deed::Halve | Deed::Lengthen | Deed::Swap if !is_archive => {}
        _ if is_archive || is_folder => {
            let (found, said) = scrub(&scene.root());
            // A whole archive in place of another is found by the manifest, which says its name.
            let name = path.file_name().unwrap().to_str().unwrap();
            let is_said = matches!(deed, Deed::Swap) && format!("{said:?}").contains(name);
            let is_named = is_said || found.iter().any(|found| found.starts_with(path));
            assert!(is_named, "{acts:?}: {said:?}");
            counts.named += 1;
        }
        _ => {}
    }
}

/// Uses all that a store has: what nobody has touched works, all else does or is refused.
fn use_all(store: &Store, is_alone: impl Fn(&Holding) -> bool, counts: &mut Counts) {
    let mut judge =
        |what: &str, holding: &Holding, result: Result<u64, tssd_store::Error>| match result {
            Ok(number) => {
                counts.right += 1;
                Some(number)
            }
            Err(error) => {
                assert!(!is_alone(holding), "{what} {holding:?}: {error}");
                let known =
                    [&KINDS[..], &[ErrorKind::Refused, ErrorKind::Rejected, ErrorKind::Overtaken]];
                assert_typed(&error, &known.concat());
                counts.refused += 1;
                None
            }
        };
    for holding in &HOLDINGS {
        let key = holding.key();
        judge(
            "list",
            holding,
            store.keys(None).map(|keys| {
                assert!(!is_alone(holding) || keys.contains(&key));
                0
            }),
        );
        judge(
            "versions of",
            holding,
            store.versions(&key).map(|versions| {
                assert!(!is_alone(holding) || versions.len() as u64 == VERSIONS);
                0
            }),
        );
        for version in [None, Some(1), Some(2)] {
            judge("get", holding, holding.get(store, version));
        }
        if judge("put", holding, holding.put(store, NEXT).map(|()| NEXT)).is_some() {
            // What was acknowledged is there.
            assert_eq!(holding.get(store, None).unwrap(), NEXT, "{holding:?}");
            holding.get(store, Some(NEXT)).unwrap();
        }
        judge("delete 1 of", holding, store.delete(&key, Some(1)));
        judge("delete", holding, store.delete(&key, None));
    }
}

/// Everything below a folder: names, lengths, bytes, when they were changed.
fn photograph(folder: &Path) -> Vec<(PathBuf, Vec<u8>, std::time::SystemTime)> {
    files(folder)
        .into_iter()
        .map(|path| {
            let at = folder.join(&path);
            let metadata = at.symlink_metadata().unwrap();
            let bytes = if metadata.is_file() { fs::read(&at).unwrap() } else { Vec::new() };
            (path, bytes, metadata.modified().unwrap())
        })
        .collect()
}
