//! Bits that flip at rest: `tssd verify` names the files, and the tensors, and no others; what is damaged is not handed
//! over; all else is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tssd_format::{Archive, CHUNK_BYTES, Node};
use tssd_store::ErrorKind;
use tssd_store::blocking::Store;
use tssd_tests::command::quick_folder;
use tssd_tests::dice::Dice;
use tssd_tests::layout;
use tssd_tests::proof::Proof;
use tssd_tests::served::Served;

use super::holdings::{Holding, assert_typed, files, fill, records, scrub};
use crate::folder;

/// How many bits CI wants to be flipped.
const FLIPS: u64 = 3000;

const VERSIONS: u64 = 4;

const HOLDINGS: [Holding; 4] = [
    Holding { key: "small", writers: 1, elements: 16 },
    Holding { key: "team/policy", writers: 2, elements: 500 },
    Holding { key: "of four", writers: 4, elements: 100 },
    // Tensors of several chunks.
    Holding { key: "large", writers: 1, elements: 150_000 },
];

/// A bit that is not as it was written.
struct Flip {
    path: PathBuf,
    byte: u64,
    bit: u64,
}

impl Flip {
    /// Flips it, or flips it back.
    fn apply(&self, root: &Path) {
        let file = File::options().read(true).write(true).open(root.join(&self.path)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, self.byte).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << self.bit], self.byte).unwrap();
    }
}

/// The tensors of an archive: where their stored bytes are, and who they belong to.
struct Tensors(Vec<(std::ops::Range<u64>, BTreeSet<String>)>);

impl Tensors {
    fn of(path: &Path) -> Self {
        let archive = Archive::open(path).unwrap();
        let mut owners: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
        for (path, node) in archive.leaves() {
            let Node::Tensors(run) = node else { continue };
            for storage in run.iter().filter_map(|reference| reference.storage) {
                owners.entry(storage).or_default().insert(path.fqn());
            }
        }
        let range = |number| {
            let storage = archive.storage(number);
            storage.offset..storage.offset + storage.len
        };
        Self(owners.into_iter().map(|(number, names)| (range(number), names)).collect())
    }

    /// The chunk that a byte is of, if it is of any: where it begins, and whose it is.
    fn chunk(&self, byte: u64) -> Option<(u64, &BTreeSet<String>)> {
        let (range, names) = self.0.iter().find(|(range, _)| range.contains(&byte))?;
        Some((byte - (byte - range.start) % CHUNK_BYTES, names))
    }
}

/// What was counted.
#[derive(Default)]
struct Counts {
    flips: u64,
    tensors: u64,
    records: u64,
    served: u64,
    refused: u64,
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn rot_is_found_where_it_is_and_nowhere_else() {
    let proof = Proof::begin("limits: rot");
    let home = quick_folder();
    let root = home.path().join("root");
    fill(&root, &HOLDINGS, VERSIONS);
    assert!(scrub(&root).0.is_empty());
    let mut stored = files(&root);
    // Locks have no bits, and what a daemon says in its own is for nobody later.
    stored
        .retain(|path| root.join(path).metadata().unwrap().len() > 0 && !path.ends_with(".daemon"));
    let is_archive = |path: &&PathBuf| {
        let manifest = path.file_name().is_some_and(|name| name == "manifest.tssd");
        path.extension().is_some_and(|extension| extension == "tssd") && !manifest
    };
    let tensors: BTreeMap<&PathBuf, Tensors> = stored
        .iter()
        .filter(is_archive)
        .map(|path| (path, Tensors::of(&root.join(path))))
        .collect();
    let (mut dice, mut counts, mut round) = (Dice::new(0x0707), Counts::default(), 0);
    while proof.goes_on(counts.flips, FLIPS) {
        // From one file alone to nearly all of them.
        let sparse = 1 + dice.below(8);
        let mut flips: Vec<Flip> = Vec::new();
        for path in &stored {
            if dice.hits(sparse) {
                let len = root.join(path).metadata().unwrap().len();
                flips.push(Flip { path: path.clone(), byte: dice.below(len), bit: dice.below(8) });
            }
        }
        for flip in &flips {
            flip.apply(&root);
        }
        find(&root, &flips, &tensors, &mut counts);
        let store = Store::directory(&root).unwrap();
        read(&store, &root, &flips, &mut counts);
        drop(store);
        if round % 4 == 0 {
            // A daemon writes records as soon as somebody reads.
            let copy = home.path().join("copy");
            folder::copy(&root, &copy);
            let served = Served::over(&copy);
            read(&served.connect(), &root, &flips, &mut counts);
            read(&served.connect_far(), &root, &flips, &mut counts);
            drop(served);
            std::fs::remove_dir_all(copy).unwrap();
        }
        for flip in &flips {
            flip.apply(&root);
        }
        counts.flips += flips.len() as u64;
        round += 1;
    }
    assert!(scrub(&root).0.is_empty(), "all is as it was");
    assert!(counts.served > 1000 && counts.refused > 1000 && counts.tensors > 500);
    proof.end(json!({
        "bits flipped": counts.flips, "of them in tensors": counts.tensors, "in records": counts.records,
        "rounds": round, "files": stored.len(), "found": counts.flips, "named without cause": 0,
        "gets served": counts.served, "gets refused": counts.refused, "wrong bytes": 0,
    }));
}

/// `tssd verify` names the files with a flipped bit, each tensor by its name and the chunk by its place, and no others.
fn find(root: &Path, flips: &[Flip], tensors: &BTreeMap<&PathBuf, Tensors>, counts: &mut Counts) {
    let (found, said) = scrub(root);
    let flipped: BTreeSet<PathBuf> = flips.iter().map(|flip| flip.path.clone()).collect();
    assert_eq!(found, flipped);
    let by_path = |path: &Path| {
        let is_it = |file: &&serde_json::Value| file["path"] == root.join(path).to_str().unwrap();
        said.iter().find(is_it).unwrap()["damage"].as_array().unwrap()
    };
    for Flip { path, byte, .. } in flips {
        counts.records += u64::from(path.extension().is_some_and(|extension| extension == "json"));
        let Some((start, names)) = tensors.get(path).and_then(|tensors| tensors.chunk(*byte))
        else {
            continue;
        };
        let [damage] = by_path(path).as_slice() else { panic!("{said:?}") };
        assert_eq!(
            (&damage["rule"], &damage["byte"]),
            (&"F-090".into(), &start.into()),
            "{damage}"
        );
        assert!(names.contains(damage["leaf"].as_str().unwrap()), "{damage}: {names:?}");
        counts.tensors += 1;
    }
}

/// What is not damaged is served, and what is damaged is not: not one wrong byte.
fn read(store: &Store, root: &Path, flips: &[Flip], counts: &mut Counts) {
    let is_flipped = |path: &Path| flips.iter().any(|flip| flip.path == path);
    for holding in &HOLDINGS {
        // Who advances the ledger goes by the newest record alone.
        let is_lost = records(root, holding).last().is_some_and(|newest| is_flipped(newest));
        for version in 1..=VERSIONS {
            let folder = layout::version(&root.join(holding.folder()), &format!("0-{version}"));
            let is_damaged = flips.iter().any(|flip| root.join(&flip.path).starts_with(&folder));
            match holding.get(store, Some(version)) {
                // Bytes that nobody needs may be damaged.
                Ok(_) if !is_lost => counts.served += 1,
                Ok(_) => panic!("{holding:?}: whose ledger is damaged is not served"),
                Err(error) => {
                    assert!(is_lost || is_damaged, "{holding:?} {version}: {error}");
                    assert_typed(&error, &[ErrorKind::Corrupt]);
                    counts.refused += 1;
                }
            }
        }
    }
}
