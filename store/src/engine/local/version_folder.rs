//! The folder of a version in a volume: a shard set, one archive for each writer and the manifest.

use std::collections::BTreeMap;
use std::sync::Arc;

use tssd_format::MANIFEST_NAME;

use crate::blob::{OpenArchive, Volume};
use crate::control::LocatedVersion;
use crate::control::layout::is_archive;
use crate::convert::to_u64;
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::TEMPORARY_PREFIX;
use crate::ledger::{Durability, VersionId, VersionPosition};

/// Opens all files of a version. Returns `None` if one is missing, because the version is deleted then.
pub(super) fn locate(
    volume: &dyn Volume,
    folder: &str,
    names: Vec<String>,
    id: VersionId,
    position: VersionPosition,
) -> Result<Option<LocatedVersion>> {
    // The manifest comes first: it is deleted before the archives.
    let paths = [MANIFEST_NAME].into_iter().chain(names.iter().map(String::as_str));
    let paths: Vec<String> = paths.map(|name| format!("{folder}/{name}")).collect();
    let Some(mut files) = volume.open_all(&paths)? else { return Ok(None) };
    let manifest = files.remove(0).to_blob();
    let archives: BTreeMap<String, OpenArchive> = names.into_iter().zip(files).collect();
    // Open files stay readable after a deletion, so no lease is needed.
    let route = volume.route();
    Ok(Some(LocatedVersion { id, position, route, manifest, archives, lease: Arc::new(()) }))
}

/// Deletes the manifest and the archives of a version, and all other files of ours in its folder.
pub(super) fn remove(volume: &dyn Volume, folder: &str, archives: &[String]) -> Result<()> {
    // The manifest first: without it, no reader finds the archives.
    volume.delete(&format!("{folder}/{MANIFEST_NAME}"))?;
    for name in archives {
        volume.delete(&format!("{folder}/{name}"))?;
    }
    delete_surplus_archives(volume, folder, &[])?;
    volume.remove_folder(folder)
}

/// Deletes the archives and temporary files in a folder, except those in `keep`.
///
/// All other files stay, because they are not ours.
pub(super) fn delete_surplus_archives(
    volume: &dyn Volume,
    folder: &str,
    keep: &[String],
) -> Result<()> {
    let is_ours = |name: &&String| is_archive(name) || name.starts_with(TEMPORARY_PREFIX);
    let names = volume.list(folder)?;
    let mut surplus = names.iter().filter(is_ours).filter(|name| !keep.contains(name));
    surplus.try_for_each(|name| volume.delete(&format!("{folder}/{name}")))
}

/// Writes a blob. If an earlier attempt has written it, its bytes must be the same.
///
/// # Errors
///
/// `Corrupt` if the blob exists with other contents.
pub(super) fn write(
    volume: &dyn Volume,
    path: &str,
    bytes: &[u8],
    durability: Durability,
) -> Result<()> {
    let len = to_u64(bytes.len());
    let mut reservation = volume.reserve(path, len, durability)?;
    for part in &mut reservation.parts(&[len]) {
        part.write(bytes)?;
    }
    if reservation.seal()? {
        return Ok(());
    }
    let existing = volume.open(path)?.ok_or_else(|| {
        Error::new(ErrorKind::Busy, format_args!("`{path}` was there and is gone"))
    })?;
    let is_same = || -> std::io::Result<bool> {
        if existing.blob.size()? != len {
            return Ok(false);
        }
        let mut found = vec![0; bytes.len()];
        existing.blob.read_exact_at(&mut found, 0)?;
        Ok(found == bytes)
    };
    if is_same().map_err(|error| Error::io(path, error))? {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, format_args!("`{path}` is there with other contents")))
}
