//! Blobs as files of a directory that several processes share.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use tssd_format::{JobChecksums, WriteJob};

use crate::blob::{Part, Reservation, Volume};
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::{BUFFER_BYTES, Disk, NewFile};
use crate::io::local_archive::Near;
use crate::ledger::Durability;
use crate::route::{Route, Transport};

#[derive(Clone, Debug)]
pub(crate) struct DirectoryVolume {
    disk: Disk,
}

impl DirectoryVolume {
    pub(crate) fn new(disk: Disk) -> Self {
        Self { disk }
    }

    /// Where a blob is, or would be.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.disk.root().join(name)
    }

    /// The file of a blob, to give away, and its length; none if there is none.
    #[cfg(target_os = "linux")]
    pub(crate) fn lend(&self, name: &str) -> Result<Option<(std::fs::File, u64)>> {
        self.at(name, |path| self.disk.lend(path))
    }

    fn at<T>(&self, name: &str, work: impl FnOnce(&Path) -> std::io::Result<T>) -> Result<T> {
        let is_normal = |part| matches!(part, std::path::Component::Normal(_));
        if !Path::new(name).components().all(is_normal) {
            let text = format_args!("`{name}` is no name of an archive");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let path = self.path(name);
        work(&path).map_err(|error| Error::io(path.display(), error))
    }
}

impl Volume for DirectoryVolume {
    fn admit(&self, wanted: Durability) -> Result<Durability> {
        if wanted == Durability::Object {
            let text = "this store is a directory: a bucket is one of its own, or that of a daemon, serve --bucket";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(wanted)
    }

    /// The file is written by positioned writes, not through a map: a full disk is an error then,
    /// not a signal.
    fn reserve(
        &self,
        name: &str,
        len: u64,
        _durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        let file = self.at(name, |path| self.disk.begin(path))?;
        file.expect(len);
        let shown = self.path(name).display().to_string();
        Ok(Box::new(Reserved { file, name: shown }))
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
        self.at(name, |path| self.disk.open(path))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.at(name, |path| self.disk.remove(path))
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.at(name, |path| self.disk.list(path))
    }

    fn route(&self) -> Route {
        Route::new(Transport::File, "the store is a directory")
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.at(name, |path| self.disk.remove_folder(path))
    }
}

struct Reserved {
    file: NewFile,
    name: String,
}

impl Reservation for Reserved {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        let mut offset = 0;
        let mut parts: Vec<Box<dyn Part + '_>> = Vec::with_capacity(lens.len());
        for len in lens {
            parts.push(Box::new(FilePart { reserved: self, offset }));
            offset += len;
        }
        parts
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let Self { file, name } = *self;
        file.link().map_err(|error| Error::io(name, error))
    }
}

struct FilePart<'a> {
    reserved: &'a Reserved,
    offset: u64,
}

impl Part for FilePart<'_> {
    fn fill(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        let range = job.range();
        let len = usize::try_from(range.end - range.start).unwrap_or(BUFFER_BYTES);
        let mut writer =
            BufWriter::with_capacity(len.min(BUFFER_BYTES), self.reserved.file.at(self.offset));
        let mut fill = || {
            let filled = job.write_to(&mut writer)?;
            writer.flush()?;
            Ok(filled)
        };
        fill().map_err(|error| Error::format(&self.reserved.name, error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.reserved.file.at(self.offset).write_all(bytes);
        written.map_err(|error| Error::io(&self.reserved.name, error))
    }
}
