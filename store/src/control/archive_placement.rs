//! The placement of a writer's archives in a volume.

use crate::control::layout::folder_of;
use crate::key::Key;
use crate::ledger::{Durability, JobId, RunProcess, VersionId, VersionPosition};

/// The placement of a writer's archives: their version and their names.
#[derive(Clone, Debug)]
pub(crate) struct ArchivePlacement {
    pub(crate) key: Key,
    pub(crate) id: VersionId,
    /// The position under which the version is stored.
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    pub(crate) writer: u32,
    pub(crate) job: Option<JobId>,
    /// The process that puts, and its run.
    pub(crate) process: Option<RunProcess>,
    pub(crate) durability: Durability,
    /// File name of the archives, without number and extension.
    ///
    /// It is unique to the attempt, because an attempt that died may have left files.
    pub(crate) stem: String,
    /// Whether the version is a copy of a version of another store.
    pub(crate) is_copy: bool,
}

impl ArchivePlacement {
    /// Returns the folder of the version in the volume.
    pub(crate) fn folder(&self) -> String {
        let position = VersionPosition { epoch: self.epoch, number: self.number };
        folder_of(&self.key, position, self.id)
    }

    /// Returns the file name of an archive, by its number.
    pub(crate) fn file_name(&self, number: usize) -> String {
        match number {
            0 => format!("{}.tssd", self.stem),
            _ => format!("{}-{number}.tssd", self.stem),
        }
    }

    /// Returns the path of an archive in the volume, by its number.
    pub(crate) fn path(&self, number: usize) -> String {
        format!("{}/{}", self.folder(), self.file_name(number))
    }
}
