//! Output directories: whole or not at all, as far as the system allows.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use tempfile::TempDir;

use super::{BUFFER_BYTES, directory_of, resolve, sync_directory};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::interrupt::Unfinished;

/// A directory that appears under its name once its files are complete and on the disk. Until then
/// they have a temporary one: beside it if it is new, inside if it is there and empty.
#[derive(Debug)]
pub(crate) struct OutputDirectory {
    target: PathBuf,
    is_new: bool,
    /// What is in it, in the order in which it was begun.
    names: Vec<String>,
    /// Its folders, at any depth.
    folders: BTreeSet<String>,
    temporary: TempDir,
    // Dropped after the directory, so that its path is known for as long as it exists.
    unfinished: Unfinished,
    bar: ProgressBar,
}

impl OutputDirectory {
    /// Begins the directory that will be at `target`, whose files `bar` shows growing.
    pub(crate) fn create(target: &Path, bar: ProgressBar) -> Result<Self> {
        let failed = |error| Failure::io("write", target, error);
        let target = resolve(target).map_err(failed)?;
        let is_new = match target.metadata() {
            Ok(old) if !old.is_dir() => {
                let message = format_args!("{} is no directory", target.display());
                return Err(Failure::new(Exit::Refused, message)
                    .help("name a new or empty directory: several files are to be written"));
            }
            Ok(_) => {
                if target.read_dir().map_err(failed)?.next().is_some() {
                    let message = format_args!("{} is not empty", target.display());
                    return Err(Failure::new(Exit::Refused, message)
                        .help("name a new or empty directory: what is there is left alone"));
                }
                false
            }
            Err(_) => true,
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(".tssd-").suffix(".tmp");
        // With the mode that any new directory gets, not the private one of temporary ones.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        let place = if is_new { directory_of(&target) } else { &target };
        let (unfinished, temporary) =
            Unfinished::make(|| builder.tempdir_in(place)).map_err(failed)?;
        let (names, folders) = (Vec::new(), BTreeSet::new());
        Ok(Self { target, is_new, names, folders, temporary, unfinished, bar })
    }

    /// Writes one more file, in folders if its name says so. What is wrong with a name is for the caller
    /// to know.
    pub(crate) fn file(&mut self, name: &str) -> io::Result<OutputFile> {
        for (end, _) in name.match_indices('/') {
            if !self.folders.contains(&name[..end]) {
                std::fs::create_dir(self.temporary.path().join(&name[..end]))?;
                self.begin(&name[..end]);
                self.folders.insert(name[..end].to_owned());
            }
        }
        // A name that is there already is one that this file system takes for the same.
        let file = File::create_new(self.temporary.path().join(name))?;
        self.begin(name);
        let bar = self.bar.clone();
        Ok(OutputFile { stream: BufWriter::with_capacity(BUFFER_BYTES, file), bar, written: 0 })
    }

    /// Remembers what is to be moved; what is in a folder moves with it.
    fn begin(&mut self, name: &str) {
        if !name.contains('/') {
            self.names.push(name.to_owned());
        }
    }

    /// Lets the directory appear. In one that was there already, its files come one by one, in the
    /// order in which they were begun.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { target, is_new, names, folders, temporary, unfinished, bar } = self;
        let failed = |error| Failure::io("write", &target, error);
        let from = temporary.path();
        for folder in &folders {
            sync_directory(&from.join(folder)).map_err(failed)?;
        }
        if is_new {
            sync_directory(from).map_err(failed)?;
            std::fs::rename(from, &target).map_err(failed)?;
            // It is gone from where it would be removed.
            let _gone = temporary.keep();
            sync_directory(directory_of(&target)).map_err(failed)?;
        } else {
            for name in names {
                std::fs::rename(from.join(&name), target.join(&name)).map_err(failed)?;
            }
            temporary.close().map_err(failed)?;
            sync_directory(&target).map_err(failed)?;
        }
        drop(unfinished);
        bar.finish_and_clear();
        Ok(())
    }
}

/// One of its files.
#[derive(Debug)]
pub(crate) struct OutputFile {
    stream: BufWriter<File>,
    bar: ProgressBar,
    written: u64,
}

impl OutputFile {
    /// Puts the file on the disk, and returns its length in bytes.
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
