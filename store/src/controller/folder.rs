//! The folder of a version in a volume: a shard set, one archive for each writer and the manifest.

use std::collections::BTreeMap;
use std::sync::Arc;

use tssd_format::MANIFEST;

use super::Located;
use crate::disk::TEMPORARY;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Contribution, Durability, Version, VersionId};
use crate::volume::{Archived, Volume};

/// So much of its identity is in the name of a version's folder, in hexadecimal digits.
const ID_DIGITS: usize = 16;

/// Where the folder of a version is.
pub(crate) fn folder(key: &Key, version: &Version) -> String {
    folder_of(key, version.epoch, version.number, version.id)
}

/// As [`folder`], for a version that has just begun.
///
/// No other version ever has the same one, not even the next of its number: whoever deletes what is in it, however
/// late, harms nobody else.
pub(crate) fn folder_of(key: &Key, epoch: u32, number: u64, id: VersionId) -> String {
    let id = &id.to_string()[..ID_DIGITS];
    format!("{}/{epoch}-{number}-{id}", key.to_path())
}

/// Whether a folder of a key is that of a version.
pub(super) fn is_version(name: &str) -> bool {
    let mut parts = name.split('-');
    let has_numbers = parts.next().is_some_and(|epoch| epoch.parse::<u32>().is_ok())
        && parts.next().is_some_and(|number| number.parse::<u64>().is_ok());
    let is_id =
        |id: &str| id.len() == ID_DIGITS && id.bytes().all(|digit| digit.is_ascii_hexdigit());
    has_numbers && parts.next().is_some_and(is_id) && parts.next().is_none()
}

/// The names of the archives that a version has.
pub(crate) fn archives(version: &Version) -> Vec<String> {
    let archives = version.contributions.values().flat_map(Contribution::archives);
    archives.map(|archive| archive.name.clone()).collect()
}

/// Opens all files of a version; none if one is gone, because the version is.
pub(super) fn locate(
    volume: &dyn Volume,
    folder: &str,
    names: Vec<String>,
    id: VersionId,
) -> Result<Option<Located>> {
    // The manifest first: without it, the rest is not there any more.
    let paths = [MANIFEST].into_iter().chain(names.iter().map(String::as_str));
    let paths: Vec<String> = paths.map(|name| format!("{folder}/{name}")).collect();
    let Some(mut files) = volume.open_all(&paths)? else { return Ok(None) };
    let manifest = files.remove(0).to_blob();
    let archives: BTreeMap<String, Archived> = names.into_iter().zip(files).collect();
    // What is open stays readable whatever the ledger does.
    let route = volume.route();
    Ok(Some(Located { id, route, manifest, archives, lease: Arc::new(()) }))
}

/// Deletes a version with these archives, and what else of ours is in its folder.
pub(super) fn remove(volume: &dyn Volume, folder: &str, archives: &[String]) -> Result<()> {
    // The manifest first: without it, no reader finds the rest.
    volume.delete(&format!("{folder}/{MANIFEST}"))?;
    for name in archives {
        volume.delete(&format!("{folder}/{name}"))?;
    }
    clear(volume, folder, &[])?;
    volume.remove_folder(folder)
}

/// Whether a file has the name of an archive: a writer, a try, and a number if it is not the first.
fn is_archive(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let is_try = |text: &str| text.len() == 32 && text.bytes().all(|it| it.is_ascii_hexdigit());
    let mut parts = name.strip_suffix(".tssd").unwrap_or_default().split('-');
    parts.next().is_some_and(is_number) && parts.next().is_some_and(is_try) && parts.all(is_number)
}

/// Deletes the archives in a folder but those that are named, half ones too. What else is there is not ours.
pub(super) fn clear(volume: &dyn Volume, folder: &str, keep: &[String]) -> Result<()> {
    let is_ours = |name: &&String| is_archive(name) || name.starts_with(TEMPORARY);
    let names = volume.list(folder)?;
    let mut surplus = names.iter().filter(is_ours).filter(|name| !keep.contains(name));
    surplus.try_for_each(|name| volume.delete(&format!("{folder}/{name}")))
}

/// Writes a blob that may be there already: from an earlier try, with the same bytes.
pub(super) fn write(
    volume: &dyn Volume,
    path: &str,
    bytes: &[u8],
    durability: Durability,
) -> Result<()> {
    let len = u64::try_from(bytes.len()).expect("usize is at most 64 bits");
    let mut reservation = volume.reserve(path, len, durability)?;
    for part in &mut reservation.parts(&[len]) {
        part.write(bytes)?;
    }
    if reservation.seal()? {
        return Ok(());
    }
    let there = volume.open(path)?.ok_or_else(|| {
        Error::new(ErrorKind::Busy, format_args!("`{path}` was there and is gone"))
    })?;
    let has_same = || -> std::io::Result<bool> {
        if there.blob.size()? != len {
            return Ok(false);
        }
        let mut found = vec![0; bytes.len()];
        there.blob.read_exact_at(&mut found, 0)?;
        Ok(found == bytes)
    };
    if has_same().map_err(|error| Error::io(path, error))? {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, format_args!("`{path}` is there with other contents")))
}
