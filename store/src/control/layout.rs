//! Names in a volume: the folder of each version, and the archives in it. Spec: `spec/reshard.md`, section 3.

use crate::key::Key;
use crate::ledger::{Contribution, Version, VersionId, VersionPosition};

/// Hexadecimal digits of the identity in the folder name of a version.
const ID_DIGITS: usize = 16;

/// Returns the folder of a version.
pub(crate) fn folder(key: &Key, version: &Version) -> String {
    folder_of(key, version.stored_position(), version.id)
}

/// As [`folder`], for a version that has just begun.
///
/// No two versions share a folder, not even two versions of one number. So a late deletion affects no other version.
pub(crate) fn folder_of(key: &Key, position: VersionPosition, id: VersionId) -> String {
    let VersionPosition { epoch, number } = position;
    let id = &id.to_string()[..ID_DIGITS];
    format!("{}/{epoch}-{number}-{id}", key.to_path())
}

/// Returns whether `name` is the last part of a folder that [`folder`] returns.
pub(crate) fn is_version(name: &str) -> bool {
    let mut parts = name.split('-');
    let has_numbers = parts.next().is_some_and(|epoch| epoch.parse::<u32>().is_ok())
        && parts.next().is_some_and(|number| number.parse::<u64>().is_ok());
    let is_id =
        |id: &str| id.len() == ID_DIGITS && id.bytes().all(|digit| digit.is_ascii_hexdigit());
    has_numbers && parts.next().is_some_and(is_id) && parts.next().is_none()
}

/// Returns the number of the version whose folder this is.
pub(crate) fn version_number(folder: &str) -> Option<u64> {
    let (_, name) = folder.rsplit_once('/')?;
    name.split('-').nth(1)?.parse().ok()
}

/// Returns the names of the archives of a version.
pub(crate) fn archives(version: &Version) -> Vec<String> {
    let archives = version.contributions.values().flat_map(Contribution::archives);
    archives.map(|archive| archive.name.clone()).collect()
}

/// Returns whether `name` is that of an archive: writer, attempt, and a number unless it is the first.
pub(crate) fn is_archive(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let is_attempt = |text: &str| text.len() == 32 && text.bytes().all(|it| it.is_ascii_hexdigit());
    let mut parts = name.strip_suffix(".tssd").unwrap_or_default().split('-');
    parts.next().is_some_and(is_number)
        && parts.next().is_some_and(is_attempt)
        && parts.all(is_number)
}
