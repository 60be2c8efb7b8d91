//! Where the archives of a writer are.

use crate::control::layout::folder_of;
use crate::key::Key;
use crate::ledger::{Durability, JobId, VersionId};

/// The place of a writer's archives: of which version, and under which names.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) key: Key,
    pub(crate) id: VersionId,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    pub(crate) writer: u32,
    pub(crate) job: Option<JobId>,
    pub(crate) durability: Durability,
    /// Each try has files of its own: one that died may have left others behind.
    pub(crate) stem: String,
    /// Whether it is that of a copy.
    pub(crate) is_copy: bool,
}

impl Place {
    pub(crate) fn folder(&self) -> String {
        folder_of(&self.key, self.epoch, self.number, self.id)
    }

    /// The name of an archive, by its number.
    pub(crate) fn file(&self, number: usize) -> String {
        match number {
            0 => format!("{}.tssd", self.stem),
            _ => format!("{}-{number}.tssd", self.stem),
        }
    }

    /// The name of an archive in the volume, by its number.
    pub(crate) fn path(&self, number: usize) -> String {
        format!("{}/{}", self.folder(), self.file(number))
    }
}
