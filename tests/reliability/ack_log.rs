//! Logs that client processes write: acknowledged versions, and numbers of compared tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Name of the log of acknowledged versions, with lines `KEY VERSION DURABILITY`.
///
/// Each version is visible and has at least this durability.
pub(crate) const ACKNOWLEDGED: &str = "acknowledged";

/// Name of the log of numbers of compared tensors.
pub(crate) const COMPARED_TENSORS: &str = "checked";

/// Contents of the logs in a directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct AckLog {
    /// Numbers by key, and whether the version is durable.
    versions: BTreeMap<String, Vec<(u64, bool)>>,
    /// Number of tensors that readers have compared.
    pub(crate) compared_tensors: u64,
}

impl AckLog {
    /// Creates empty logs.
    pub(crate) fn create(folder: &Path) {
        for name in [ACKNOWLEDGED, COMPARED_TENSORS] {
            fs::write(folder.join(name), "").unwrap();
        }
    }

    /// Reads the logs. Ignores a last line that its process was killed in.
    pub(crate) fn read(folder: &Path) -> Self {
        let text = |name| fs::read_to_string(folder.join(name)).unwrap();
        let (acknowledged, checked) = (text(ACKNOWLEDGED), text(COMPARED_TENSORS));
        let mut versions: BTreeMap<String, Vec<(u64, bool)>> = BTreeMap::new();
        for line in complete_lines(&acknowledged) {
            let mut words = line.split(' ');
            let mut word = || words.next().unwrap();
            let (key, number, durability) = (word(), word(), word());
            let version = (number.parse().unwrap(), durability != "Memory");
            versions.entry(key.to_owned()).or_default().push(version);
        }
        let checked = complete_lines(&checked).map(|line| line.parse::<u64>().unwrap()).sum();
        Self { versions, compared_tensors: checked }
    }

    fn versions_of(&self, key: &str) -> &[(u64, bool)] {
        self.versions.get(key).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of versions of a key.
    pub(crate) fn count(&self, key: &str) -> usize {
        self.versions_of(key).len()
    }

    /// Returns the number of versions of all keys.
    pub(crate) fn len(&self) -> u64 {
        self.versions.values().flatten().count() as u64
    }

    /// Returns the number of durable versions of all keys.
    pub(crate) fn durable_count(&self) -> u64 {
        self.versions.values().flatten().filter(|(_, is_durable)| *is_durable).count() as u64
    }

    /// Returns the durable versions that are missing although retention keeps them.
    pub(crate) fn missing_durable(&self, key: &str, present: &[u64], keep: u64) -> Vec<u64> {
        let is_lost = |number: &u64| {
            let newer = present.iter().filter(|other| *other > number).count() as u64;
            !present.contains(number) && newer < keep
        };
        let durable = self.versions_of(key).iter().filter(|(_, is_durable)| *is_durable);
        durable.map(|(number, _)| *number).filter(is_lost).collect()
    }
}

fn complete_lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
}
