//! Output directories, which are written atomically as far as the system allows.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use tssd_store::ReplacementFolder;

use super::replaced::replace;
use super::{BUFFER_BYTES, Force, parent_directory, resolve, sync_directory};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::interrupt::CleanupGuard;

/// A directory that appears under its name once its files are complete and on the disk.
///
/// Until then, the files are in a temporary directory: inside an existing empty one, else next to the target.
#[derive(Debug)]
pub(crate) struct OutputDirectory {
    target: PathBuf,
    old: Old,
    /// Files and folders at the top level, in the order of their creation.
    names: Vec<String>,
    /// Files at any depth.
    files: BTreeSet<String>,
    /// Folders at any depth.
    folders: BTreeSet<String>,
    temporary: ReplacementFolder,
    // Dropped after the directory, so that the path is registered for as long as the directory exists.
    cleanup: CleanupGuard,
    bar: ProgressBar,
}

/// What has the name of an output directory before the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Old {
    Nothing,
    EmptyDirectory,
    /// A directory with files, which `--force` replaces.
    Files,
}

impl OutputDirectory {
    /// Checks that a directory can be created, and returns its path without links, and what is there.
    ///
    /// Commands that work for long before they create the output check it first.
    ///
    /// # Errors
    ///
    /// Fails if `target` is a file, or a directory that is not empty and that `force` does not permit to replace.
    pub(crate) fn check(target: &Path, force: Force) -> Result<(PathBuf, Old)> {
        let io_failure = |error| Failure::io("write", target, error);
        let target = resolve(target).map_err(io_failure)?;
        let old = match target.metadata() {
            Ok(old) if !old.is_dir() => {
                let message = format_args!("{} is no directory", target.display());
                return Err(Failure::new(Exit::Refused, message)
                    .help("name a new or empty directory: several files are to be written"));
            }
            Ok(_) => {
                if target.read_dir().map_err(io_failure)?.next().is_none() {
                    Old::EmptyDirectory
                } else if force.force {
                    Old::Files
                } else {
                    let message = format_args!("{} is not empty", target.display());
                    return Err(Failure::new(Exit::Refused, message)
                        .help("name a new or empty directory, or replace this one with --force"));
                }
            }
            Err(_) => Old::Nothing,
        };
        Ok((target, old))
    }

    /// Creates a directory that [`commit`](Self::commit) moves to `target`.
    ///
    /// `bar` advances with each write to a file.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub(crate) fn create(target: &Path, force: Force, bar: ProgressBar) -> Result<Self> {
        let (target, old) = Self::check(target, force)?;
        let io_failure = |error| Failure::io("write", &target, error);
        let is_inside = old == Old::EmptyDirectory;
        let parent = if is_inside { &target } else { parent_directory(&target) };
        let create = || ReplacementFolder::create_in(parent);
        let (cleanup, temporary) = CleanupGuard::create(create).map_err(io_failure)?;
        let (names, files, folders) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        Ok(Self { target, old, names, files, folders, temporary, cleanup, bar })
    }

    /// Creates a file, and the folders in its name. The caller validates the name.
    pub(crate) fn file(&mut self, name: &str) -> io::Result<OutputFile> {
        for (end, _) in name.match_indices('/') {
            if !self.folders.contains(&name[..end]) {
                std::fs::create_dir(self.temporary.path().join(&name[..end]))?;
                self.record_name(&name[..end]);
                self.folders.insert(name[..end].to_owned());
            }
        }
        // If the file exists, this file system treats two different names as the same.
        let file = File::create_new(self.temporary.path().join(name))?;
        self.record_name(name);
        self.files.insert(name.to_owned());
        let bar = self.bar.clone();
        Ok(OutputFile { stream: BufWriter::with_capacity(BUFFER_BYTES, file), bar, written: 0 })
    }

    /// Records a name at the top level, which `commit` moves. The files of a folder move with it.
    fn record_name(&mut self, name: &str) {
        if !name.contains('/') {
            self.names.push(name.to_owned());
        }
    }

    /// Makes the directory appear under its name.
    ///
    /// In an existing empty directory, the files appear one by one, in the order of their creation. A directory with
    /// files is replaced in one step, if it has only files that the new one has, or other shards of the same model.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { target, old, names, files, folders, temporary, cleanup, bar } = self;
        let io_failure = |error| Failure::io("write", &target, error);
        let from = temporary.path();
        for folder in &folders {
            sync_directory(&from.join(folder)).map_err(io_failure)?;
        }
        sync_directory(from).map_err(io_failure)?;
        // An interrupt waits for the renames, so that it does not remove what has its final name.
        match old {
            Old::Files => cleanup.finish(|| replace(temporary, &target, &files))?,
            Old::Nothing => cleanup.finish(|| temporary.rename_to(&target)).map_err(io_failure)?,
            Old::EmptyDirectory => {
                let rename = || {
                    let from = temporary.path();
                    let mut names = names.iter();
                    names.try_for_each(|name| std::fs::rename(from.join(name), target.join(name)))
                };
                cleanup.finish(rename).map_err(io_failure)?;
            }
        }
        let is_inside = old == Old::EmptyDirectory;
        let folder = if is_inside { &target } else { parent_directory(&target) };
        sync_directory(folder).map_err(io_failure)?;
        bar.finish_and_clear();
        Ok(())
    }
}

/// A file of an [`OutputDirectory`].
#[derive(Debug)]
pub(crate) struct OutputFile {
    stream: BufWriter<File>,
    bar: ProgressBar,
    written: u64,
}

impl OutputFile {
    /// Syncs the file to disk, and returns its length in bytes.
    pub(crate) fn finish(self) -> io::Result<u64> {
        self.stream.into_inner()?.sync_all()?;
        Ok(self.written)
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stream.write(bytes)?;
        let count = u64::try_from(written).unwrap_or_default();
        self.written += count;
        self.bar.inc(count);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
