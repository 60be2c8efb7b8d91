//! Keys of the histories, and the properties of each.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use tssd_store::blocking::Store;
use tssd_store::{Key, Result};

use super::history::Operation;

/// Number of keys.
pub(crate) const KEYS: u8 = 14;

/// Keys whose versions have several writers.
pub(crate) const MULTI_WRITER_KEYS: [u8; 2] = [8, 11];

/// What clients do with a key besides puts and reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum KeyUsage {
    /// They delete versions, if one version is kept.
    Plain,
    /// Each version has this number of writers.
    MultiWriter(u32),
    /// They set and remove labels.
    Pinned,
    /// They rewind to lower numbers.
    Rewound,
}

pub(crate) fn key_usage(key: u8) -> KeyUsage {
    match key {
        8 => KeyUsage::MultiWriter(2),
        11 => KeyUsage::MultiWriter(3),
        9 | 10 => KeyUsage::Pinned,
        12 | 13 => KeyUsage::Rewound,
        _ => KeyUsage::Plain,
    }
}

/// Returns the number of writers of a version.
pub(crate) fn writers(key: u8) -> u32 {
    if let KeyUsage::MultiWriter(of) = key_usage(key) { of } else { 1 }
}

/// Returns the number of versions that are kept.
pub(crate) fn kept_versions(key: u8) -> usize {
    if key & 2 == 0 { 1 } else { 3 }
}

/// Returns whether versions outlive the daemon, if it has a disk.
pub(crate) fn is_on_disk(key: u8) -> bool {
    key & 1 == 1
}

pub(crate) fn store_key(key: u8) -> Key {
    Key::new(format!("key.{key}")).unwrap()
}

/// Sets the number of versions that are kept. The setting survives the end of the daemon.
pub(crate) fn set_retention(store: &Store) -> Result<()> {
    (0..KEYS).try_for_each(|key| {
        let keep = NonZeroU32::new(u32::try_from(kept_versions(key)).unwrap()).unwrap();
        store.retain(&store_key(key), keep)
    })
}

/// Splits operations into histories, each with the number of versions that are kept.
///
/// A durable key has one history, through all lives of the daemon. A key in memory has one for each
/// life. `ends` are the times at which the lives ended. An operation of unknown outcome has taken
/// effect by the end of the life in which it was invoked, or never.
pub(crate) fn split_histories(
    operations: Vec<Operation>,
    ends: &[u64],
) -> Vec<(usize, Vec<Operation>)> {
    let mut objects: BTreeMap<(usize, u8), Vec<Operation>> = BTreeMap::new();
    for mut operation in operations {
        // The client that is killed last may make a call after the last end.
        let life = ends.partition_point(|end| *end < operation.invoked_at).min(ends.len() - 1);
        if operation.response.is_none() {
            operation.returned_at = ends[life].max(operation.invoked_at);
        }
        let part = if is_on_disk(operation.key) { 0 } else { life };
        objects.entry((part, operation.key)).or_default().push(operation);
    }
    objects.into_iter().map(|((_, key), operations)| (kept_versions(key), operations)).collect()
}
