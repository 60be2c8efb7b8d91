//! The folder of a store, from outside: copied, compared, and whether all in it is something.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use tssd_tests::layout;

/// Copies a folder and all that is below it.
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

/// All names below a folder, sorted; those of folders end with a slash.
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

/// What tells folders apart but for what is another each time: identities, moments, processes.
pub(crate) fn print(folder: &Path) -> String {
    let mut print = String::new();
    for name in names(folder) {
        print += &without_identities(&name);
        if !name.ends_with('/') {
            let bytes = fs::read(folder.join(&name)).unwrap();
            print.extend([" ", &bytes.len().to_string()]);
            if is(&name, "json") {
                print += &without_identities(&String::from_utf8_lossy(&bytes));
            }
        }
        print.push('\n');
    }
    print
}

/// Whether a file is of this kind.
fn is(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| found == extension)
}

/// Long numbers become one sign, as do those of temporary names.
fn without_identities(text: &str) -> String {
    let text = text.split(".tmp-").next().unwrap();
    let mut out = String::new();
    for word in text.split_inclusive(|sign: char| !sign.is_ascii_hexdigit()) {
        let digits = word.trim_end_matches(|sign: char| !sign.is_ascii_hexdigit());
        out += if digits.len() > 8 { "#" } else { digits };
        out += &word[digits.len()..];
    }
    out
}

/// What is in the folder of a store that has these versions of these keys, by number and bytes, and is no part
/// of them; and what of them is missing.
pub(crate) fn strangers(root: &Path, keys: &[(&str, Vec<(u64, u64)>)]) -> Vec<String> {
    let mut strange = Vec::new();
    let mut found = names(root);
    // Who has ended leaves his lock behind until another one begins.
    let sessions = found.extract_if(.., |name| name.starts_with(".sessions/")).count();
    if sessions > 2 {
        strange.push(format!("{} sessions", sessions - 1));
    }
    found.retain(|name| name != ".daemon");
    for (key, versions) in keys {
        let mut records = 0;
        let mut expected =
            BTreeSet::from([format!("{key}/"), format!("{key}/.lock"), format!("{key}/.ledger/")]);
        for (number, bytes) in versions {
            let found = layout::version(&root.join(key), &format!("0-{number}"));
            let folder = format!("{key}/{}", found.file_name().unwrap().to_str().unwrap());
            let is_archive = |name: &String| !name.contains(".tmp") && name != "manifest.tssd";
            let archives = names(&root.join(&folder)).into_iter().filter(is_archive);
            let archives: Vec<_> = archives.map(|name| format!("{folder}/{name}")).collect();
            let len = |name: &String| fs::metadata(root.join(name)).unwrap().len();
            let len: u64 = archives.iter().map(len).sum();
            if len != *bytes {
                strange.push(format!("{len} bytes of archives in {folder}, not {bytes}"));
            }
            expected.extend([format!("{folder}/"), format!("{folder}/manifest.tssd")]);
            expected.extend(archives);
        }
        let ledger = format!("{key}/.ledger/");
        found.retain(|name| {
            let is_record = name.starts_with(&ledger) && is(name, "json");
            records += usize::from(is_record);
            !is_record && !expected.remove(name)
        });
        if records > 2 {
            strange.push(format!("{records} records of {key}"));
        }
        // A daemon needs no locks.
        expected.retain(|name| !name.ends_with("/.lock"));
        strange.extend(expected.into_iter().map(|name| format!("no {name}")));
    }
    strange.extend(found);
    strange
}
