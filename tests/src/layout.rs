//! Layout of the directory of a store, as in `spec/reshard.md`.

use std::path::{Path, PathBuf};

/// Returns the directory of the only version at `place`, such as `0-1`.
///
/// `key` is the directory of its key.
///
/// # Panics
///
/// If there is none, or more than one.
pub fn version_folder(key: &Path, place: &str) -> PathBuf {
    let is_match = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.rsplit_once('-').is_some_and(|(found, _)| found == place)
    };
    let entries = std::fs::read_dir(key).expect("the key has a folder");
    let mut found = entries.map(|entry| entry.expect("it can be listed").path()).filter(is_match);
    let first = found.next().unwrap_or_else(|| panic!("no version {place} in {}", key.display()));
    assert_eq!(found.next(), None, "two versions have one number");
    first
}
