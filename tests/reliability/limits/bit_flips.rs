//! Bit flips at rest.
//!
//! `tssd verify` names exactly the damaged files and tensors. A store returns no damaged bytes, and
//! returns everything else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tssd_format::{Archive, MAX_CHUNK_BYTES, Node};
use tssd_store::ErrorKind;
use tssd_store::blocking::Store;
use tssd_tests::campaign::Campaign;
use tssd_tests::command::memory_tempdir;
use tssd_tests::layout;
use tssd_tests::rng::SeededRng;
use tssd_tests::test_daemon::TestDaemon;

use crate::limits::fixtures::{
    KeyFixture, assert_error_kind, create_root, list_files, list_records, verify_root,
};
use crate::store_dir;

/// Number of bit flips in CI.
const FLIPS: u64 = 3000;

const VERSIONS: u64 = 4;

const FIXTURES: [KeyFixture; 4] = [
    KeyFixture { key: "small", writers: 1, elements: 16 },
    KeyFixture { key: "team/policy", writers: 2, elements: 500 },
    KeyFixture { key: "of four", writers: 4, elements: 100 },
    // Tensors of several chunks.
    KeyFixture { key: "large", writers: 1, elements: 150_000 },
];

/// A flipped bit.
struct Flip {
    path: PathBuf,
    byte: u64,
    bit: u64,
}

impl Flip {
    /// Flips the bit. A second call restores it.
    fn apply(&self, root: &Path) {
        let file = File::options().read(true).write(true).open(root.join(&self.path)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, self.byte).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << self.bit], self.byte).unwrap();
    }
}

/// Byte ranges of the stored tensors of an archive, with the names of the tensors in each.
struct TensorRanges(Vec<(std::ops::Range<u64>, BTreeSet<String>)>);

impl TensorRanges {
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

    /// Returns the start of the chunk that contains a byte, and the tensors in it.
    fn chunk(&self, byte: u64) -> Option<(u64, &BTreeSet<String>)> {
        let (range, names) = self.0.iter().find(|(range, _)| range.contains(&byte))?;
        Some((byte - (byte - range.start) % MAX_CHUNK_BYTES, names))
    }
}

/// Counts of a campaign.
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
fn verify_reports_exactly_the_files_with_flipped_bits() {
    let campaign = Campaign::start("limits: rot");
    let tempdir = memory_tempdir();
    let root = tempdir.path().join("root");
    create_root(&root, &FIXTURES, VERSIONS);
    assert!(verify_root(&root).0.is_empty());
    let mut stored = list_files(&root);
    // Lock files are empty. No one reads the file of the daemon after its end.
    stored
        .retain(|path| root.join(path).metadata().unwrap().len() > 0 && !path.ends_with(".daemon"));
    let is_archive = |path: &&PathBuf| {
        let manifest = path.file_name().is_some_and(|name| name == "manifest.tssd");
        path.extension().is_some_and(|extension| extension == "tssd") && !manifest
    };
    let tensors: BTreeMap<&PathBuf, TensorRanges> = stored
        .iter()
        .filter(is_archive)
        .map(|path| (path, TensorRanges::of(&root.join(path))))
        .collect();
    let (mut rng, mut counts, mut round) = (SeededRng::new(0x0707), Counts::default(), 0);
    while campaign.should_continue(counts.flips, FLIPS) {
        // From a single file to nearly all files.
        let sparsity = 1 + rng.below(8);
        let mut flips: Vec<Flip> = Vec::new();
        for path in &stored {
            if rng.one_in(sparsity) {
                let len = root.join(path).metadata().unwrap().len();
                flips.push(Flip { path: path.clone(), byte: rng.below(len), bit: rng.below(8) });
            }
        }
        for flip in &flips {
            flip.apply(&root);
        }
        check_verify_report(&root, &flips, &tensors, &mut counts);
        let store = Store::directory(&root).unwrap();
        check_reads(&store, &root, &flips, &mut counts);
        drop(store);
        if round % 4 == 0 {
            // A daemon writes records at the first read, so it gets a copy.
            let copy = tempdir.path().join("copy");
            store_dir::copy(&root, &copy);
            let served = TestDaemon::with_root(&copy);
            check_reads(&served.connect(), &root, &flips, &mut counts);
            check_reads(&served.connect_tcp(), &root, &flips, &mut counts);
            drop(served);
            std::fs::remove_dir_all(copy).unwrap();
        }
        for flip in &flips {
            flip.apply(&root);
        }
        counts.flips += flips.len() as u64;
        round += 1;
    }
    assert!(verify_root(&root).0.is_empty(), "all bits are restored");
    assert!(counts.served > 1000 && counts.refused > 1000 && counts.tensors > 500);
    campaign.finish(json!({
        "bits flipped": counts.flips, "of them in tensors": counts.tensors, "in records": counts.records,
        "rounds": round, "files": stored.len(), "found": counts.flips, "named without cause": 0,
        "gets served": counts.served, "gets refused": counts.refused, "wrong bytes": 0,
    }));
}

/// Checks that `tssd verify` reports exactly the files with flipped bits, with tensors and chunks.
fn check_verify_report(
    root: &Path,
    flips: &[Flip],
    tensors: &BTreeMap<&PathBuf, TensorRanges>,
    counts: &mut Counts,
) {
    let (reported, report) = verify_root(root);
    let flipped: BTreeSet<PathBuf> = flips.iter().map(|flip| flip.path.clone()).collect();
    assert_eq!(reported, flipped);
    let by_path = |path: &Path| {
        let is_match =
            |file: &&serde_json::Value| file["path"] == root.join(path).to_str().unwrap();
        report.iter().find(is_match).unwrap()["damage"].as_array().unwrap()
    };
    for Flip { path, byte, .. } in flips {
        counts.records += u64::from(path.extension().is_some_and(|extension| extension == "json"));
        let Some((start, names)) = tensors.get(path).and_then(|tensors| tensors.chunk(*byte))
        else {
            continue;
        };
        let [damage] = by_path(path).as_slice() else { panic!("{report:?}") };
        assert_eq!(
            (&damage["rule"], &damage["byte"]),
            (&"F-090".into(), &start.into()),
            "{damage}"
        );
        assert!(names.contains(damage["leaf"].as_str().unwrap()), "{damage}: {names:?}");
        counts.tensors += 1;
    }
}

/// Checks that undamaged versions are returned with the right bytes, and damaged ones are not.
fn check_reads(store: &Store, root: &Path, flips: &[Flip], counts: &mut Counts) {
    let is_flipped = |path: &Path| flips.iter().any(|flip| flip.path == path);
    for holding in &FIXTURES {
        // A store that advances the ledger reads its newest record only.
        let is_ledger_damaged =
            list_records(root, holding).last().is_some_and(|newest| is_flipped(newest));
        for version in 1..=VERSIONS {
            let folder =
                layout::version_folder(&root.join(holding.folder()), &format!("0-{version}"));
            let is_damaged = flips.iter().any(|flip| root.join(&flip.path).starts_with(&folder));
            match holding.get(store, Some(version)) {
                // The damaged bytes may be ones that the read does not need.
                Ok(_) if !is_ledger_damaged => counts.served += 1,
                Ok(_) => panic!("{holding:?}: whose ledger is damaged is not served"),
                Err(error) => {
                    assert!(is_ledger_damaged || is_damaged, "{holding:?} {version}: {error}");
                    assert_error_kind(&error, &[ErrorKind::Corrupt]);
                    counts.refused += 1;
                }
            }
        }
    }
}
