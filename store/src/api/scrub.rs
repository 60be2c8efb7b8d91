//! What of a directory is not as its ledgers say: records that are damaged, files that are lost or others.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::runtime::Builder;
use tssd_format::MANIFEST_NAME;

use crate::control::layout::folder;
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::Disk;
use crate::key::Key;
use crate::ledger::{Contribution, Digest, Version};
use crate::metadata::Records;
use crate::metadata::backend::DirectoryMeta;

/// A file of a store in a directory that is not as its ledger says.
#[derive(Debug)]
pub struct Defect {
    /// Where it is, or would be.
    pub path: PathBuf,
    /// What is wrong with it.
    pub error: Error,
}

/// Compares a directory with what its ledgers say is in it, but for the bytes of archives, which prove themselves
/// ([`tssd_format::Archive::verify`]). Nothing is locked or changed, and whoever uses the directory goes on. A
/// directory that is no store's has no ledgers, and no defects.
///
/// # Errors
///
/// `Io` if the directory cannot be listed.
pub fn scrub(root: impl AsRef<Path>) -> Result<Vec<Defect>> {
    let runtime = Builder::new_current_thread().build();
    let runtime = runtime.map_err(|error| Error::io("no runtime", error))?;
    runtime.block_on(Scrub::new(root.as_ref()).run())
}

struct Scrub<'a> {
    root: &'a Path,
    disk: Disk,
    records: Records,
    defects: Vec<Defect>,
}

impl<'a> Scrub<'a> {
    fn new(root: &'a Path) -> Self {
        let disk = Disk::at(root.to_owned());
        let records = Records::new(Arc::new(DirectoryMeta::new(disk.clone())));
        Self { root, disk, records, defects: Vec::new() }
    }

    async fn run(mut self) -> Result<Vec<Defect>> {
        for key in self.records.keys().await? {
            let before = self.defects.len();
            match self.records.damaged(&key).await {
                Ok(damaged) => {
                    for (name, error) in damaged {
                        self.add(&name, error);
                    }
                }
                Err(error) => self.add(&format!("{}/.ledger", key.to_path()), error),
            }
            match self.records.load(&key).await {
                Ok(record) => {
                    for version in record.state.visible() {
                        self.compare(&key, version).await;
                    }
                }
                // It is one of those above, or they are gone.
                Err(_) if self.defects.len() > before => {}
                Err(error) => self.add(&format!("{}/.ledger", key.to_path()), error),
            }
        }
        Ok(self.defects)
    }

    fn add(&mut self, name: &str, error: Error) {
        self.defects.push(Defect { path: self.root.join(name), error });
    }

    /// Looks for the files of a visible version.
    async fn compare(&mut self, key: &Key, version: &Version) {
        let folder = folder(key, version);
        let archives = version.contributions.values().flat_map(Contribution::archives);
        let mut wrong: Vec<(String, String)> = archives
            .filter_map(|archive| {
                let name = format!("{folder}/{}", archive.name);
                let why = self.archive(&name, archive.file_len).err()?;
                Some((name, why))
            })
            .collect();
        if let Some(manifest) = version.manifest() {
            let name = format!("{folder}/{MANIFEST_NAME}");
            wrong.extend(self.manifest(&name, manifest.digest).err().map(|why| (name, why)));
        }
        // Whoever has deleted the version meanwhile has lost nothing.
        let is_there =
            !wrong.is_empty()
                && self.records.load(key).await.is_ok_and(|record| {
                    record.state.visible().any(|visible| visible.id == version.id)
                });
        for (name, why) in wrong.into_iter().filter(|_| is_there) {
            let number = version.number;
            let text = format_args!("{why}; version {number} of key `{key}` needs it");
            self.add(&name, Error::new(ErrorKind::Corrupt, text));
        }
    }

    /// A file, if a store would read it.
    fn file(&self, name: &str) -> Result<(File, u64), String> {
        match self.disk.lend(&self.root.join(name)) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err("it is gone".to_owned()),
            Err(error) => Err(format!("it cannot be read: {error}")),
        }
    }

    fn archive(&self, name: &str, expected: u64) -> Result<(), String> {
        match self.file(name)?.1 {
            len if len == expected => Ok(()),
            len => Err(format!("it has {len} bytes, not {expected}")),
        }
    }

    fn manifest(&self, name: &str, expected: Digest) -> Result<(), String> {
        let (mut file, _) = self.file(name)?;
        let mut bytes = Vec::new();
        match file.read_to_end(&mut bytes) {
            Ok(_) if Digest::of(&bytes) == expected => Ok(()),
            Ok(_) => Err("it is not the one that was written".to_owned()),
            Err(error) => Err(format!("it cannot be read: {error}")),
        }
    }
}
