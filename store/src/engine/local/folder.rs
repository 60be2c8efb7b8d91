//! The folder of a version in a volume: a shard set, one archive for each writer and the manifest.

use std::collections::BTreeMap;
use std::sync::Arc;

use tssd_format::MANIFEST_NAME;

use crate::blob::{Archived, Volume};
use crate::control::Located;
use crate::control::layout::is_archive;
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::TEMPORARY;
use crate::ledger::{Durability, VersionId};

/// Opens all files of a version; none if one is gone, because the version is.
pub(super) fn locate(
    volume: &dyn Volume,
    folder: &str,
    names: Vec<String>,
    id: VersionId,
) -> Result<Option<Located>> {
    // The manifest first: without it, the rest is not there any more.
    let paths = [MANIFEST_NAME].into_iter().chain(names.iter().map(String::as_str));
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
    volume.delete(&format!("{folder}/{MANIFEST_NAME}"))?;
    for name in archives {
        volume.delete(&format!("{folder}/{name}"))?;
    }
    clear(volume, folder, &[])?;
    volume.remove_folder(folder)
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
