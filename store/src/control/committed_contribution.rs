//! The committed contributions of a version.

use super::ArchivePlacement;
use crate::key::Key;
use crate::ledger::{ArchiveDigest, Contribution, Version, WriterSet};

/// The committed contribution of one writer.
pub(crate) struct CommittedContribution {
    pub(crate) placement: ArchivePlacement,
    /// All writers of the version.
    pub(crate) writers: WriterSet,
    pub(crate) digest: ArchiveDigest,
    /// The lengths of the archives, in bytes.
    pub(crate) lens: Vec<u64>,
}

impl CommittedContribution {
    /// Returns all committed contributions of a version.
    pub(crate) fn of(key: &Key, version: &Version) -> Vec<Self> {
        let committed = version.contributions.iter().filter_map(|(writer, contribution)| {
            let Contribution::Committed { digest, archives, .. } = contribution else {
                return None;
            };
            let stored = version.stored_position();
            let place = ArchivePlacement {
                key: key.clone(),
                id: version.id,
                epoch: stored.epoch,
                number: stored.number,
                writer: *writer,
                job: version.job.clone(),
                process: version.process.clone(),
                durability: version.durability,
                stem: archives.first()?.name.strip_suffix(".tssd")?.to_owned(),
                is_copy: version.is_copy,
            };
            let lens = archives.iter().map(|archive| archive.file_len).collect();
            Some(Self { placement: place, writers: version.writers.clone(), digest: *digest, lens })
        });
        committed.collect()
    }

    /// Returns the paths of the archives in the volume.
    pub(crate) fn paths(&self) -> Vec<String> {
        (0..self.lens.len()).map(|number| self.placement.path(number)).collect()
    }
}
