//! Inspection of the directory of a store: copies, fingerprints, and files that belong to no version.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use tssd_tests::layout;

/// Copies a directory recursively.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (kind, target) = (entry.file_type().unwrap(), to.join(entry.file_name()));
        if kind.is_dir() {
            copy(&entry.path(), &target);
        } else if kind.is_file() {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Returns all names below a directory, sorted. Names of directories end with a slash.
fn names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(below) = folders.pop() {
        for entry in fs::read_dir(folder.join(&below)).unwrap() {
            let entry = entry.unwrap();
            let path = below.join(entry.file_name());
            let slash = if entry.file_type().unwrap().is_dir() { "/" } else { "" };
            names.push(format!("{}{slash}", path.display()));
            folders.extend((!slash.is_empty()).then_some(path));
        }
    }
    names.sort();
    names
}

/// Returns a text that is equal for directories that differ only in ids, times and processes.
pub(crate) fn fingerprint(folder: &Path) -> String {
    let mut print = String::new();
    for name in names(folder) {
        print += &normalize_ids(&name);
        if !name.ends_with('/') {
            let bytes = fs::read(folder.join(&name)).unwrap();
            print.extend([" ", &bytes.len().to_string()]);
            if has_extension(&name, "json") {
                print += &normalize_ids(&String::from_utf8_lossy(&bytes));
            }
        }
        print.push('\n');
    }
    print
}

/// Returns whether a file name has this extension.
fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| found == extension)
}

/// Replaces long numbers by `#`, and cuts the suffixes of temporary names.
fn normalize_ids(text: &str) -> String {
    let text = text.split(".tmp-").next().unwrap();
    let mut out = String::new();
    for word in text.split_inclusive(|letter: char| !letter.is_ascii_hexdigit()) {
        let digits = word.trim_end_matches(|letter: char| !letter.is_ascii_hexdigit());
        out += if digits.len() > 8 { "#" } else { digits };
        out += &word[digits.len()..];
    }
    out
}

/// Returns what is wrong in the directory of a store that has these versions, by number and bytes.
///
/// That is: each file that belongs to no version, each missing file, and surplus records and
/// sessions.
pub(crate) fn foreign_files(root: &Path, keys: &[(&str, Vec<(u64, u64)>)]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut found = names(root);
    // An ended session leaves its lock file until another session begins.
    let sessions = found.extract_if(.., |name| name.starts_with(".sessions/")).count();
    if sessions > 2 {
        problems.push(format!("{} sessions", sessions - 1));
    }
    found.retain(|name| name != ".daemon");
    for (key, versions) in keys {
        let mut records = 0;
        let mut expected =
            BTreeSet::from([format!("{key}/"), format!("{key}/.lock"), format!("{key}/.ledger/")]);
        for (number, bytes) in versions {
            let found = layout::version_folder(&root.join(key), &format!("0-{number}"));
            let folder = format!("{key}/{}", found.file_name().unwrap().to_str().unwrap());
            let is_archive = |name: &String| !name.contains(".tmp") && name != "manifest.tssd";
            let archives = names(&root.join(&folder)).into_iter().filter(is_archive);
            let archives: Vec<_> = archives.map(|name| format!("{folder}/{name}")).collect();
            let len = |name: &String| fs::metadata(root.join(name)).unwrap().len();
            let len: u64 = archives.iter().map(len).sum();
            if len != *bytes {
                problems.push(format!("{len} bytes of archives in {folder}, not {bytes}"));
            }
            expected.extend([format!("{folder}/"), format!("{folder}/manifest.tssd")]);
            expected.extend(archives);
        }
        let ledger = format!("{key}/.ledger/");
        found.retain(|name| {
            let is_record = name.starts_with(&ledger) && has_extension(name, "json");
            records += usize::from(is_record);
            !is_record && !expected.remove(name)
        });
        if records > 2 {
            problems.push(format!("{records} records of {key}"));
        }
        // A daemon needs no lock files.
        expected.retain(|name| !name.ends_with("/.lock"));
        problems.extend(expected.into_iter().map(|name| format!("no {name}")));
    }
    problems.extend(found);
    problems
}
