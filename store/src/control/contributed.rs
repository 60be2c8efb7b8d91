//! What writers have committed to a version, and where it is.

use super::Place;
use crate::key::Key;
use crate::ledger::{Contribution, Digest, Version, WriterSet};

/// What one writer has committed.
pub(crate) struct Contributed {
    pub(crate) place: Place,
    /// Everyone who contributes to the version.
    pub(crate) writers: WriterSet,
    pub(crate) digest: Digest,
    /// The lengths of its archives, in bytes.
    pub(crate) lens: Vec<u64>,
}

impl Contributed {
    /// All that is committed to a version.
    pub(crate) fn of(key: &Key, version: &Version) -> Vec<Self> {
        let committed = version.contributions.iter().filter_map(|(writer, contribution)| {
            let Contribution::Committed { digest, archives, .. } = contribution else {
                return None;
            };
            let place = Place {
                key: key.clone(),
                id: version.id,
                epoch: version.epoch,
                number: version.number,
                writer: *writer,
                job: version.job.clone(),
                durability: version.durability,
                stem: archives.first()?.name.strip_suffix(".tssd")?.to_owned(),
                is_copy: version.copy,
            };
            let lens = archives.iter().map(|archive| archive.file_len).collect();
            Some(Self { place, writers: version.writers.clone(), digest: *digest, lens })
        });
        committed.collect()
    }

    /// The names of its archives in the volume.
    pub(crate) fn names(&self) -> Vec<String> {
        (0..self.lens.len()).map(|number| self.place.path(number)).collect()
    }
}
