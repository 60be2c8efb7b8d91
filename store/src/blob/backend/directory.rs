//! Blobs as files of a directory that several processes share.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use tssd_format::{JobChecksums, WriteJob};

use crate::blob::{OpenArchive, Part, Reservation, Volume, open_resolved};
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::{BUFFER_BYTES, Disk, NewFile};
use crate::io::local_archive::LocalArchive;
use crate::ledger::Durability;
use crate::route::{Route, Transport};

/// A volume in a directory. Each blob is a file.
#[derive(Clone, Debug)]
pub(crate) struct DirectoryVolume {
    disk: Disk,
}

impl DirectoryVolume {
    pub(crate) fn new(disk: Disk) -> Self {
        Self { disk }
    }

    /// Returns the path that the name of a blob stands for.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.disk.root().join(name)
    }

    /// Opens the file of a blob for a caller that passes it on. Returns the file and its length in bytes.
    ///
    /// Returns none if the file does not exist.
    #[cfg(target_os = "linux")]
    pub(crate) fn open_file(&self, name: &str) -> Result<Option<(std::fs::File, u64)>> {
        self.with_path(name, |path| self.disk.open_file(path))
    }

    fn with_path<T>(
        &self,
        name: &str,
        work: impl FnOnce(&Path) -> std::io::Result<T>,
    ) -> Result<T> {
        let is_normal = |part| matches!(part, std::path::Component::Normal(_));
        if !Path::new(name).components().all(is_normal) {
            let text = format_args!("`{name}` is no name of an archive");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let path = self.path(name);
        work(&path).map_err(|error| Error::io_at(path, error))
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

    /// Writes the file by positioned writes instead of through a memory map.
    ///
    /// On a full disk a write returns an error. A store to mapped memory would raise a signal.
    fn reserve(
        &self,
        name: &str,
        len: u64,
        _durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        let file = self.with_path(name, |path| self.disk.create_temporary(path))?;
        file.preallocate(len);
        Ok(Box::new(FileReservation { file, path: self.path(name) }))
    }

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        let opened = self.open_all(&[name.to_owned()])?.and_then(|mut all| all.pop());
        Ok(opened.map(OpenArchive::into_local))
    }

    fn open_all(&self, names: &[String]) -> Result<Option<Vec<OpenArchive>>> {
        let open = |names: &[String]| {
            let open = |name: &String| self.with_path(name, |path| self.disk.open(path));
            let opened = names.iter().map(|name| Ok(open(name)?.map(OpenArchive::Local)));
            opened.collect::<Result<Vec<Option<OpenArchive>>>>()
        };
        open_resolved(names, open)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.with_path(name, |path| self.disk.remove(path))
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.with_path(name, |path| self.disk.list(path))
    }

    fn route(&self) -> Route {
        Route::new(Transport::File, "the store is a directory")
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.with_path(name, |path| self.disk.remove_folder(path))
    }
}

struct FileReservation {
    file: NewFile,
    path: PathBuf,
}

impl Reservation for FileReservation {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        let mut offset = 0;
        let mut parts: Vec<Box<dyn Part + '_>> = Vec::with_capacity(lens.len());
        for len in lens {
            parts.push(Box::new(FilePart { reservation: self, offset }));
            offset += len;
        }
        parts
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let Self { file, path } = *self;
        file.link().map_err(|error| Error::io_at(path, error))
    }
}

struct FilePart<'a> {
    reservation: &'a FileReservation,
    offset: u64,
}

impl Part for FilePart<'_> {
    fn write_job(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        let range = job.range();
        let len = usize::try_from(range.end - range.start).unwrap_or(BUFFER_BYTES);
        let mut writer =
            BufWriter::with_capacity(len.min(BUFFER_BYTES), self.reservation.file.at(self.offset));
        let mut run = || {
            let checksums = job.write_to(&mut writer)?;
            writer.flush()?;
            Ok(checksums)
        };
        run().map_err(|error| Error::from_file(&self.reservation.path, error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.reservation.file.at(self.offset).write_all(bytes);
        written.map_err(|error| Error::io_at(&self.reservation.path, error))
    }
}
