//! Compares a directory with its ledgers: finds damaged records, and files that are missing or
//! differ.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::runtime::Builder;
use tssd_format::{Archive, MANIFEST_NAME};

use crate::blob::Volume;
use crate::blob::backend::DirectoryVolume;
use crate::control::layout::folder;
use crate::delta::stored::StoredDelta;
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::Disk;
use crate::key::Key;
use crate::ledger::{ArchiveDigest, Contribution, Version};
use crate::metadata::Records;
use crate::metadata::backend::DirectoryMeta;

/// A file of a store in a directory that is not as its ledger says.
#[derive(Debug)]
pub struct Defect {
    /// Path of the file, even if the file is missing.
    pub path: PathBuf,
    /// Why the file is a defect.
    pub error: Error,
}

/// Compares the files of a directory with its ledgers, except for the contents of whole archives.
///
/// Archives contain checksums of their own ([`tssd_format::Archive::verify`]). Archives that are stored as deltas cannot be
/// verified by themselves, so this function verifies their contents too. Nothing is locked or
/// changed, and other processes may use the directory meanwhile. A directory without a store has no
/// ledgers, and so no defects.
///
/// # Errors
///
/// `Io` if the directory cannot be listed.
pub fn scrub(root: impl AsRef<Path>) -> Result<Vec<Defect>> {
    let runtime = Builder::new_current_thread().build();
    let runtime = runtime.map_err(|error| Error::io("no runtime", error))?;
    runtime.block_on(Scrubber::new(root.as_ref()).run())
}

/// Returns whether a file of a store is the delta of an archive, and not an archive by itself.
///
/// Such an archive can be read through the store only. Returns false if the file cannot be read.
pub fn is_stored_delta(path: impl AsRef<Path>) -> bool {
    let Some(folder) = path.as_ref().parent() else { return false };
    let opened = Disk::at(folder.to_owned()).open(path.as_ref());
    let blob = opened.ok().flatten().map(|archive| archive.blob);
    blob.is_some_and(|blob| StoredDelta::has_magic(&*blob))
}

struct Scrubber<'a> {
    root: &'a Path,
    disk: Disk,
    records: Records,
    defects: Vec<Defect>,
}

impl<'a> Scrubber<'a> {
    fn new(root: &'a Path) -> Self {
        let disk = Disk::at(root.to_owned());
        let records = Records::new(Arc::new(DirectoryMeta::new(disk.clone())));
        Self { root, disk, records, defects: Vec::new() }
    }

    async fn run(mut self) -> Result<Vec<Defect>> {
        for key in self.records.keys().await? {
            let defects_before = self.defects.len();
            match self.records.corrupt_records(&key).await {
                Ok(damaged) => {
                    for (name, error) in damaged {
                        // Another release wrote it, so nothing here can be verified.
                        if error.kind() == ErrorKind::Unsupported {
                            return Err(error);
                        }
                        self.add_defect(&name, error);
                    }
                }
                Err(error) => self.add_defect(&format!("{}/.ledger", key.to_path()), error),
            }
            match self.records.load(&key).await {
                Ok(record) => {
                    for version in record.state.visible() {
                        self.check_version(&key, version).await;
                    }
                }
                // A defect above is the cause, or the damaged records were deleted meanwhile.
                Err(_) if self.defects.len() > defects_before => {}
                Err(error) => self.add_defect(&format!("{}/.ledger", key.to_path()), error),
            }
        }
        Ok(self.defects)
    }

    fn add_defect(&mut self, name: &str, error: Error) {
        self.defects.push(Defect { path: self.root.join(name), error });
    }

    /// Checks the files of a visible version.
    async fn check_version(&mut self, key: &Key, version: &Version) {
        let folder = folder(key, version);
        let archives = version.contributions.values().flat_map(Contribution::archives);
        let mut failures: Vec<(String, String)> = archives
            .filter_map(|archive| {
                let name = format!("{folder}/{}", archive.name);
                let why = self.check_archive(&name, archive.file_len).err()?;
                Some((name, why))
            })
            .collect();
        if let Some(manifest) = version.manifest() {
            let name = format!("{folder}/{MANIFEST_NAME}");
            failures
                .extend(self.check_manifest(&name, manifest.digest).err().map(|why| (name, why)));
        }
        // If the version was deleted meanwhile, its files are not missing.
        let is_visible =
            !failures.is_empty()
                && self.records.load(key).await.is_ok_and(|record| {
                    record.state.visible().any(|visible| visible.id == version.id)
                });
        for (name, why) in failures.into_iter().filter(|_| is_visible) {
            let number = version.number;
            let text = format_args!("{why}; version {number} of key `{key}` needs it");
            self.add_defect(&name, Error::new(ErrorKind::Corrupt, text));
        }
    }

    /// Opens a file as a store opens it for reading. Returns the file and its length in bytes.
    fn open_file(&self, name: &str) -> Result<(File, u64), String> {
        match self.disk.open_file(&self.root.join(name)) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err("it is gone".to_owned()),
            Err(error) => Err(format!("it cannot be read: {error}")),
        }
    }

    fn check_archive(&self, name: &str, expected: u64) -> Result<(), String> {
        let volume = DirectoryVolume::new(self.disk.clone());
        let opened = volume.open(name).map_err(|error| format!("it cannot be read: {error}"))?;
        let archive = opened.ok_or_else(|| "it is gone".to_owned())?;
        match archive.blob.size() {
            Ok(len) if len == expected => {}
            Ok(len) => return Err(format!("it has {len} bytes, not {expected}")),
            Err(error) => return Err(format!("it cannot be read: {error}")),
        }
        if !is_stored_delta(self.root.join(name)) {
            return Ok(());
        }
        let archive = Archive::from_blob(archive.blob).map_err(|error| error.to_string())?;
        archive.verify().map_err(|error| error.to_string())
    }

    fn check_manifest(&self, name: &str, expected: ArchiveDigest) -> Result<(), String> {
        let (mut file, _) = self.open_file(name)?;
        let mut bytes = Vec::new();
        match file.read_to_end(&mut bytes) {
            Ok(_) if ArchiveDigest::compute(&bytes) == expected => Ok(()),
            Ok(_) => Err("it is not the one that was written".to_owned()),
            Err(error) => Err(format!("it cannot be read: {error}")),
        }
    }
}
