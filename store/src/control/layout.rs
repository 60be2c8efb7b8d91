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

/// The parts of the name of an archive.
pub(crate) struct ArchiveName<'a> {
    key: &'a str,
    /// Epoch and number of the version.
    pub(crate) position: (u32, u64),
    writer: &'a str,
    /// Number of the archive among those of its writer.
    number: &'a str,
}

impl<'a> ArchiveName<'a> {
    /// Parses a name in a volume. Returns `None` if it is not that of an archive.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let (folder, file) = name.rsplit_once('/')?;
        let (key, version) = folder.rsplit_once('/')?;
        if !is_version(version) || !is_archive(file) {
            return None;
        }
        let mut parts = version.split('-');
        let position = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let mut parts = file.strip_suffix(".tssd")?.split('-');
        let writer = parts.next()?;
        Some(Self { key, position, writer, number: parts.nth(1).unwrap_or_default() })
    }

    /// Returns the beginning of the names of all archives of the key.
    pub(crate) fn prefix(&self) -> String {
        format!("{}/", self.key)
    }

    /// Returns what distinguishes the archive from the others of its version.
    pub(crate) fn role(&self) -> (&'a str, &'a str) {
        (self.writer, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_names_have_parts() {
        let name = "a/b/1-20-0123456789abcdef/3-00112233445566778899aabbccddeeff-2.tssd";
        let parsed = ArchiveName::parse(name).unwrap();
        assert_eq!((parsed.prefix().as_str(), parsed.position), ("a/b/", (1, 20)));
        assert_eq!(parsed.role(), ("3", "2"));
        let first = "a/b/1-9-0123456789abcdef/3-00112233445566778899aabbccddeeff.tssd";
        assert_eq!(ArchiveName::parse(first).unwrap().role(), ("3", ""));
        for other in [
            "a/b/1-9-0123456789abcdef/manifest.tssd",
            "fetch/17",
            "1-9-0123456789abcdef/3-00112233445566778899aabbccddeeff.tssd",
            "a/b/3-00112233445566778899aabbccddeeff.tssd",
        ] {
            assert!(ArchiveName::parse(other).is_none(), "{other}");
        }
    }
}
