//! The verification of a version: its archives are opened and merged.

use tssd_format::{Archive, AttrValue, ErrorKind as FormatKind};

use crate::blob::Volume;
use crate::error::{Error, ErrorKind, Result};
use crate::io::local_archive::LocalArchive;
use crate::ledger::{ArchiveDigest, Version};
use crate::merge::{
    DIVERGENT_ATTR, DivergencePolicy, MergeOptions, VersionAttrs, WriterArchive, merge,
};

/// Merges the archives that the writers of a version have committed, and returns the manifest.
///
/// The outer error is an I/O error: the verification stays pending. The inner error is the reason to reject the
/// version.
pub(super) fn merge_archives(
    volume: &dyn Volume,
    folder: &str,
    version: &Version,
) -> Result<Result<Vec<u8>, String>> {
    let mut contributions = Vec::with_capacity(version.contributions.len());
    let committed = version.contributions.iter().flat_map(|(writer, contribution)| {
        contribution.archives().iter().map(move |archive| (writer, archive))
    });
    for (writer, archive) in committed {
        let path = format!("{folder}/{}", archive.name);
        let opened = match volume.open(&path) {
            // It is stored as a delta, which is damaged or has no base any more.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Overtaken) => {
                return Ok(Err(format!("the archive of writer {writer}: {error}")));
            }
            opened => opened?,
        };
        let Some(LocalArchive { blob, has_checksums, .. }) = opened else {
            return Ok(Err(format!("the archive of writer {writer} is gone")));
        };
        match Archive::from_blob(blob) {
            Ok(opened) => contributions.push(WriterArchive {
                writer: *writer,
                file: archive.name.clone(),
                archive: opened,
                is_readable: has_checksums,
            }),
            Err(error) if error.kind() == FormatKind::Io => {
                return Err(Error::from_format(
                    format_args!("the archive of writer {writer}"),
                    error,
                ));
            }
            Err(error) => return Ok(Err(format!("the archive of writer {writer}: {error}"))),
        }
    }
    let divergent = match requested_divergence_policy(&contributions) {
        Ok(divergent) => divergent,
        Err(reason) => return Ok(Err(reason)),
    };
    // A manifest that is merged again after a rollback has the digest of the first one.
    let stored = version.stored_position();
    let label = VersionAttrs {
        id: version.id.0,
        epoch: stored.epoch,
        number: stored.number,
        writers: version.writers.clone(),
        digest: version_digest(version),
    };
    let options = MergeOptions { divergent, ..MergeOptions::default() };
    Ok(merge(&contributions, options, &label))
}

/// Returns the digest of the contents of a version.
///
/// With one writer it is the digest of its contribution. With several it is the digest of all writers and their
/// digests, in the order of the writers.
fn version_digest(version: &Version) -> ArchiveDigest {
    let writers = version.contributions.keys();
    let digests = writers.filter_map(|writer| Some((*writer, version.digest_of(*writer)?)));
    let digests: Vec<(u32, ArchiveDigest)> = digests.collect();
    match digests.as_slice() {
        [(_, only)] => *only,
        all => {
            let each = all
                .iter()
                .flat_map(|(writer, digest)| writer.to_le_bytes().into_iter().chain(digest.0));
            ArchiveDigest::compute(&each.collect::<Vec<u8>>())
        }
    }
}

/// Returns the handling of divergent leaves that all writers have requested.
fn requested_divergence_policy(
    contributions: &[WriterArchive],
) -> Result<DivergencePolicy, String> {
    let mut agreed = None;
    for contribution in contributions {
        let own = match contribution.archive.attrs().get(DIVERGENT_ATTR) {
            None => DivergencePolicy::Error,
            Some(AttrValue::Text(text)) if text.as_str() == Some("lowest") => {
                DivergencePolicy::Lowest
            }
            Some(AttrValue::Text(text)) if text.as_str() == Some("keep") => DivergencePolicy::Keep,
            Some(other) => {
                return Err(format!(
                    "attribute `{DIVERGENT_ATTR}` is {other:?}, not \"keep\" or \"lowest\""
                ));
            }
        };
        if *agreed.get_or_insert(own) != own {
            let writer = contribution.writer;
            return Err(format!("writers disagree on `on_divergence`: see writer {writer}"));
        }
    }
    Ok(agreed.unwrap_or_default())
}
