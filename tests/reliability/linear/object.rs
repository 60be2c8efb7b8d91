//! The keys of a history, and what is promised of each.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use tssd_store::blocking::Store;
use tssd_store::{Key, Result};

use super::history::Operation;

/// How many keys there are.
pub(crate) const KEYS: u8 = 14;

/// Those whose versions several writers put together.
pub(crate) const TOGETHER: [u8; 2] = [8, 11];

/// What clients do with a key besides putting and reading.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Custom {
    /// Where one version is kept, they delete it.
    Alone,
    /// So many writers put each version together.
    Together(u32),
    /// They hold versions by labels.
    Pinned,
    /// They go back to lower numbers.
    Rewound,
}

pub(crate) fn custom(key: u8) -> Custom {
    match key {
        8 => Custom::Together(2),
        11 => Custom::Together(3),
        9 | 10 => Custom::Pinned,
        12 | 13 => Custom::Rewound,
        _ => Custom::Alone,
    }
}

/// How many writers put a version.
pub(crate) fn writers(key: u8) -> u32 {
    if let Custom::Together(of) = custom(key) { of } else { 1 }
}

/// How many versions of a key are kept.
pub(crate) fn keep(key: u8) -> usize {
    if key & 2 == 0 { 1 } else { 3 }
}

/// Whether versions of a key outlive the daemon, where there is a disk.
pub(crate) fn is_on_disk(key: u8) -> bool {
    key & 1 == 1
}

pub(crate) fn name(key: u8) -> Key {
    Key::new(format!("key.{key}")).unwrap()
}

/// Says once how many versions are kept: that stays so, whatever becomes of the daemon.
pub(crate) fn retain(store: &Store) -> Result<()> {
    (0..KEYS).try_for_each(|key| {
        let keep = NonZeroU32::new(u32::try_from(keep(key)).unwrap()).unwrap();
        store.retain(&name(key), keep)
    })
}

/// What has one history each: a key on disk, through all lives of the daemon; a key in memory, in each of them.
/// Lives are told by the moments at which they ended.
///
/// What nobody knows the outcome of has had its effect by the end of the life in which it was asked, or never.
pub(crate) fn objects(operations: Vec<Operation>, ends: &[u64]) -> Vec<(usize, Vec<Operation>)> {
    let mut objects: BTreeMap<(usize, u8), Vec<Operation>> = BTreeMap::new();
    for mut operation in operations {
        // Whoever is killed last may ask a moment longer.
        let life = ends.partition_point(|end| *end < operation.asked).min(ends.len() - 1);
        if operation.answer.is_none() {
            operation.answered = ends[life].max(operation.asked);
        }
        let part = if is_on_disk(operation.key) { 0 } else { life };
        objects.entry((part, operation.key)).or_default().push(operation);
    }
    objects.into_iter().map(|((_, key), operations)| (keep(key), operations)).collect()
}
