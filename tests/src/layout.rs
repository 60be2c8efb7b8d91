//! Where things lie in the directory of a store, as `spec/reshard.md` has it.

use std::path::{Path, PathBuf};

/// The folder of the only version of a number, such as `0-1`, of the key whose folder this is.
///
/// # Panics
///
/// If there is none, or another one.
pub fn version(key: &Path, place: &str) -> PathBuf {
    let is_it = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.rsplit_once('-').is_some_and(|(found, _)| found == place)
    };
    let entries = std::fs::read_dir(key).expect("the key has a folder");
    let mut found = entries.map(|entry| entry.expect("it can be listed").path()).filter(is_it);
    let first = found.next().unwrap_or_else(|| panic!("no version {place} in {}", key.display()));
    assert_eq!(found.next(), None, "two of one number");
    first
}
