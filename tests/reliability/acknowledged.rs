//! What actors write down: which versions were acknowledged to them, and how much they have compared.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The file of lines `KEY VERSION DURABILITY`, each of a version that is visible, and as durable as that.
pub(crate) const ACKNOWLEDGED: &str = "acknowledged";

/// The file of lines with how many tensors were compared.
pub(crate) const CHECKED: &str = "checked";

/// All of a folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Acknowledged {
    /// The numbers, and whether the version is durable.
    versions: BTreeMap<String, Vec<(u64, bool)>>,
    /// How many tensors readers have compared.
    pub(crate) checked: u64,
}

impl Acknowledged {
    /// Makes the files.
    pub(crate) fn begin(folder: &Path) {
        for name in [ACKNOWLEDGED, CHECKED] {
            fs::write(folder.join(name), "").unwrap();
        }
    }

    /// A line that its actor was killed in is none.
    pub(crate) fn read(folder: &Path) -> Self {
        let text = |name| fs::read_to_string(folder.join(name)).unwrap();
        let (acknowledged, checked) = (text(ACKNOWLEDGED), text(CHECKED));
        let mut versions: BTreeMap<String, Vec<(u64, bool)>> = BTreeMap::new();
        for line in lines(&acknowledged) {
            let mut words = line.split(' ');
            let mut word = || words.next().unwrap();
            let (key, number, durability) = (word(), word(), word());
            let version = (number.parse().unwrap(), durability != "Memory");
            versions.entry(key.to_owned()).or_default().push(version);
        }
        let checked = lines(&checked).map(|line| line.parse::<u64>().unwrap()).sum();
        Self { versions, checked }
    }

    fn of(&self, key: &str) -> &[(u64, bool)] {
        self.versions.get(key).map_or(&[], Vec::as_slice)
    }

    /// How many versions of a key.
    pub(crate) fn count(&self, key: &str) -> usize {
        self.of(key).len()
    }

    /// How many versions.
    pub(crate) fn len(&self) -> u64 {
        self.versions.values().flatten().count() as u64
    }

    /// How many durable ones.
    pub(crate) fn durable(&self) -> u64 {
        self.versions.values().flatten().filter(|(_, is_durable)| *is_durable).count() as u64
    }

    /// Durable versions that are not among those that are there, and were not displaced by as many as are kept.
    pub(crate) fn lost(&self, key: &str, there: &[u64], keep: u64) -> Vec<u64> {
        let is_lost = |number: &u64| {
            let newer = there.iter().filter(|other| *other > number).count() as u64;
            !there.contains(number) && newer < keep
        };
        let durable = self.of(key).iter().filter(|(_, is_durable)| *is_durable);
        durable.map(|(number, _)| *number).filter(is_lost).collect()
    }
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
}
