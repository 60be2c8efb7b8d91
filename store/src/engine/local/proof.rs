//! The proof of a version: what its writers have committed, opened and merged.

use tssd_format::{Archive, AttrValue, ErrorKind as FormatKind};

use crate::blob::Volume;
use crate::error::{Error, Result};
use crate::io::local_archive::Near;
use crate::ledger::{Digest, Version};
use crate::merge::{Contribution, DIVERGENT_ATTR, Divergent, Label, merge};

/// Merges what the writers of a version have committed. The outer error is the system's, and leaves
/// the proof owed; the inner one is the writers'.
pub(super) fn prove(
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
        let Some(Near { blob, is_summed, .. }) = volume.open(&path)? else {
            return Ok(Err(format!("the archive of writer {writer} is gone")));
        };
        match Archive::from_blob(blob) {
            Ok(opened) => contributions.push(Contribution {
                writer: *writer,
                file: archive.name.clone(),
                archive: opened,
                is_seen: is_summed,
            }),
            Err(error) if error.kind() == FormatKind::Io => {
                return Err(Error::format(format_args!("the archive of writer {writer}"), error));
            }
            Err(error) => return Ok(Err(format!("the archive of writer {writer}: {error}"))),
        }
    }
    let divergent = match divergent_of(&contributions) {
        Ok(divergent) => divergent,
        Err(reason) => return Ok(Err(reason)),
    };
    let label = Label {
        id: version.id.0,
        epoch: version.epoch,
        number: version.number,
        writers: version.writers.clone(),
        digest: digest_of(version),
    };
    Ok(merge(&contributions, divergent, &label))
}

/// What a version contains: of one writer, what that has put; of several, what they have, in their order.
fn digest_of(version: &Version) -> Digest {
    let writers = version.contributions.keys();
    let digests = writers.filter_map(|writer| Some((*writer, version.digest_of(*writer)?)));
    let digests: Vec<(u32, Digest)> = digests.collect();
    match digests.as_slice() {
        [(_, only)] => *only,
        all => {
            let each = all
                .iter()
                .flat_map(|(writer, digest)| writer.to_le_bytes().into_iter().chain(digest.0));
            Digest::of(&each.collect::<Vec<u8>>())
        }
    }
}

fn divergent_of(contributions: &[Contribution]) -> Result<Divergent, String> {
    let mut agreed = None;
    for contribution in contributions {
        let own = match contribution.archive.attrs().get(DIVERGENT_ATTR) {
            None => Divergent::Error,
            Some(AttrValue::Text(text)) if text.as_str() == Some("lowest") => Divergent::Lowest,
            Some(AttrValue::Text(text)) if text.as_str() == Some("keep") => Divergent::Keep,
            Some(other) => return Err(format!("divergent={other:?} is unknown")),
        };
        if *agreed.get_or_insert(own) != own {
            let writer = contribution.writer;
            return Err(format!("writers disagree on divergent=: see writer {writer}"));
        }
    }
    Ok(agreed.unwrap_or_default())
}
