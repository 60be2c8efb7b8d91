//! Fixtures: a root with versions of several keys, and checks of what a store returns for each.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use tssd_store::blocking::Store;
use tssd_store::{Durability, Error, ErrorKind, GetOptions, JobId, Key, PutOptions};

use crate::contents::Contents;

/// A key, the number of writers of its versions, and the number of elements of each tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyFixture {
    pub(super) key: &'static str,
    pub(super) writers: u32,
    pub(super) elements: u64,
}

impl KeyFixture {
    pub(super) fn key(&self) -> Key {
        Key::new(self.key).unwrap()
    }

    fn contents(&self, version: u64) -> Contents<'_> {
        let Self { key, writers, elements } = *self;
        Contents { key, version, writers, elements }
    }

    /// Puts a version by all of its writers.
    pub(super) fn put(&self, store: &Store, version: u64) -> Result<(), Error> {
        for writer in 0..self.writers {
            let options = PutOptions {
                version: Some(version),
                writer: Some(writer),
                writers: Some((0..self.writers).collect()),
                job: Some(JobId(format!("{version}"))),
                durability: Durability::Disk,
                ..PutOptions::default()
            };
            let report = store.put_state_dict(
                &self.key(),
                &self.contents(version).part(writer),
                &options,
            )?;
            assert_eq!(report.visible, writer + 1 == self.writers, "{self:?}");
        }
        Ok(())
    }

    /// Gets a version, or the newest one, and checks its contents. Returns its number.
    pub(super) fn get(&self, store: &Store, version: Option<u64>) -> Result<u64, Error> {
        let options = GetOptions { version: version.into(), ..GetOptions::default() };
        let (dict, report) = store.get_state_dict(&self.key(), &options)?;
        assert!(version.is_none_or(|version| version == report.version), "{self:?}");
        self.contents(report.version).assert_matches(&dict);
        Ok(report.version)
    }

    /// Returns the directory of the key, relative to the root.
    pub(super) fn folder(&self) -> String {
        self.key.replace('/', "%2F").replace(' ', "%20")
    }

    /// Returns whether a path, relative to the root, is in the directory of the key.
    pub(super) fn contains_path(&self, path: &Path) -> bool {
        path.starts_with(self.folder())
    }
}

/// Creates a root with this number of versions of each key. Retention keeps all of them.
pub(super) fn create_root(root: &Path, holdings: &[KeyFixture], versions: u64) {
    fs::create_dir_all(root).unwrap();
    let store = Store::directory(root).unwrap();
    let keep = u32::try_from(versions + 2).unwrap();
    for holding in holdings {
        store.retain(&holding.key(), NonZeroU32::new(keep).unwrap()).unwrap();
        for version in 1..=versions {
            holding.put(&store, version).unwrap();
        }
    }
}

/// Returns the files below a directory, sorted, as relative paths.
pub(super) fn list_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(below) = folders.pop() {
        for entry in fs::read_dir(folder.join(&below)).unwrap() {
            let entry = entry.unwrap();
            let path = below.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

/// Returns the records of the ledger of a key, oldest first.
pub(super) fn list_records(root: &Path, holding: &KeyFixture) -> Vec<PathBuf> {
    let is_record = |path: &PathBuf| {
        holding.contains_path(path) && path.extension().is_some_and(|extension| extension == "json")
    };
    list_files(root).into_iter().filter(is_record).collect()
}

/// Runs `tssd verify` on a root. Returns the damaged files as relative paths, and their reports.
pub(super) fn verify_root(root: &Path) -> (BTreeSet<PathBuf>, Vec<serde_json::Value>) {
    let output = std::process::Command::new(tssd_tests::command::binary())
        .args(["verify", "--json"])
        .arg(root)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let all: Vec<serde_json::Value> =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    let damaged: Vec<_> = all.into_iter().filter(|file| file["ok"] == false).collect();
    assert_eq!(output.status.code(), Some(i32::from(!damaged.is_empty())), "{stderr}");
    let path = |file: &serde_json::Value| {
        let path = Path::new(file["path"].as_str().unwrap());
        path.strip_prefix(root).unwrap().to_owned()
    };
    (damaged.iter().map(path).collect(), damaged)
}

/// Checks that an error has one of these kinds, and a message.
pub(super) fn assert_error_kind(error: &Error, kinds: &[ErrorKind]) {
    assert!(kinds.contains(&error.kind()), "{:?}: {error}", error.kind());
    assert!(error.to_string().len() > 10, "{error}");
}
