//! The file system calls of a store.

use std::any::Any;
use std::fmt::Debug;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use tssd_format::{Blob, Mmap};

use super::lock::FileLock;
use super::system::{self, Access};
use crate::io::cow_map::CowMapPool;
use crate::io::deferred_drop::{self, DeferredDrop, retry_when_full};
use crate::io::local_archive::LocalArchive;

/// File system calls that a store makes. Tests implement them to simulate crashes.
///
/// A change is durable once the changed file or folder is synced, not before.
pub(crate) trait FileSystem: Debug + Send + Sync {
    /// Creates an empty file. Fails if the name is taken.
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>>;

    /// Adds a name to a file. Fails if the name is taken.
    fn link(&self, path: &Path, name: &Path) -> io::Result<()>;

    /// Removes a name of a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Creates a folder. Fails if the name is taken.
    fn make_folder(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;

    /// Whether a name is a symbolic link.
    fn is_link(&self, path: &Path) -> bool;

    /// Returns the identity of a folder. Returns none if there is no such folder.
    fn folder_id(&self, path: &Path) -> Option<FolderId>;

    /// Lists the names in a folder that are UTF-8, except those of symbolic links.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Syncs the names in a folder.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Reads a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Opens a complete file, which never changes, as an archive.
    fn open(&self, path: &Path) -> io::Result<LocalArchive>;

    /// Locks a file, exclusively or shared, and creates it if needed. Dropping the guard unlocks it.
    ///
    /// Returns none if another holder has a conflicting lock.
    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>>;
}

/// A file being written.
pub(crate) trait OutputFile: Debug + Send + Sync {
    /// Writes a prefix of `bytes` at an offset, and returns its length.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// Preallocates `len` bytes.
    fn preallocate(&self, len: u64);

    /// Starts the writeback of a range without waiting for it, so that a later sync is faster.
    fn start_writeback(&self, range: Range<u64>);

    /// Syncs the bytes of the file.
    fn sync(&self) -> io::Result<()>;
}

/// Bytes after which the writeback of a durable file starts, while the next bytes are written.
///
/// Without it, the system would keep the bytes in memory until the sync, and the disk would be idle until then.
const WRITEBACK_BYTES: u64 = 4 << 20;

/// State of a sequential write.
#[derive(Debug)]
pub(super) struct Progress {
    offset: u64,
    /// Offset at which the next writeback starts. None if the file need not be durable.
    writeback_start: Option<u64>,
}

impl Progress {
    pub(super) fn new(offset: u64, is_durable: bool) -> Self {
        Self { offset, writeback_start: is_durable.then_some(offset) }
    }

    pub(super) fn write(&mut self, output: &dyn OutputFile, bytes: &[u8]) -> io::Result<usize> {
        let written = output.write_at(bytes, self.offset)?;
        self.offset += u64::try_from(written).map_err(io::Error::other)?;
        if let Some(start) = &mut self.writeback_start
            && self.offset - *start >= WRITEBACK_BYTES
        {
            output.start_writeback(*start..self.offset);
            *start = self.offset;
        }
        Ok(written)
    }
}

/// Writer of a part of a file, from an offset on.
pub(super) struct PositionedWriter<'a> {
    pub(super) output: &'a dyn OutputFile,
    pub(super) progress: Progress,
}

impl Write for PositionedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.progress.write(self.output, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Identity of a folder, which a later folder of the same name does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FolderId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) created: SystemTime,
}

/// The file system of this machine.
#[derive(Debug)]
pub(crate) struct LocalFileSystem;

impl FileSystem for LocalFileSystem {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        Ok(Box::new(File::options().write(true).create_new(true).open(path)?))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        fs::hard_link(path, name)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let _deferred = system::defer_removal(path);
        system::remove(path)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn is_link(&self, path: &Path) -> bool {
        path.is_symlink()
    }

    fn folder_id(&self, path: &Path) -> Option<FolderId> {
        let metadata = path.metadata().ok().filter(Metadata::is_dir)?;
        // Without a creation time, each call returns a new identity.
        let created = metadata.created().unwrap_or_else(|_| SystemTime::now());
        let (device, inode) = system::identity(path, &metadata).ok()?;
        Some(FolderId { device, inode, created })
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        system::list(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        system::sync_folder(path)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        system::open(path, Access::Read)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[expect(unsafe_code, reason = "files of a store are created once and never changed")]
    fn open(&self, path: &Path) -> io::Result<LocalArchive> {
        let file = system::open(path, Access::Read)?;
        // SAFETY: a file of a store gets its name when it is complete (`NewFile::link`) and is never opened for writing
        // again. Deleting it removes the name and leaves the map as it is. Other writers of the folder are trusted like
        // the owner of the store.
        let map = unsafe { tssd_format::map_file(&file)? };
        let bytes = map.bytes().cloned().unwrap_or_default();
        let maps = CowMapPool::new(file, bytes.len());
        if map.size()? < deferred_drop::MIN_DEFERRED_BYTES {
            return Ok(LocalArchive::new(map).with_maps(maps, 0));
        }
        let bytes = Bytes::from_owner(DeferredDrop::new(MappedFile { bytes, _maps: maps.clone() }));
        Ok(LocalArchive::new(Mmap::from(bytes)).with_maps(maps, 0))
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        let lock =
            if is_shared { FileLock::try_shared(path)? } else { FileLock::try_exclusive(path)? };
        Ok(lock.map(|lock| -> Box<dyn Any + Send> { Box::new(lock) }))
    }
}

/// A mapped file and the pool of maps that has it open too, so that one deferred drop releases both.
struct MappedFile {
    bytes: Bytes,
    _maps: Arc<CowMapPool>,
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl OutputFile for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        retry_when_full(|| system::write_at(self, bytes, offset))
    }

    /// Preallocates the file, which makes the writes a third faster.
    ///
    /// Errors are ignored: if space is missing, the writes fail, and on a system without the call they work without it.
    fn preallocate(&self, len: u64) {
        let _ignored = retry_when_full(|| system::preallocate(self, len));
    }

    /// Ignores errors: the sync reports them again.
    fn start_writeback(&self, range: Range<u64>) {
        system::start_writeback(self, range);
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}
