//! The calls of a file system, as far as a store needs them.

use std::any::Any;
use std::fmt::Debug;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use tssd_format::{Blob, Mmap};

use super::lock::FileLock;
use super::system::{self, Access};
use crate::io::cow_map::PrivateMaps;
use crate::io::deferred_drop::{self, Parting, with_room};
use crate::io::local_archive::Near;

/// Calls of a file system, by which crashes can be simulated: what a store does is a sequence of them.
///
/// What they do is durable once the file or folder that they change is synced, not before.
pub(crate) trait Files: Debug + Send + Sync {
    /// Creates an empty file; an error if the name is taken.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>>;

    /// Gives a file one more name; an error if that is taken.
    fn link(&self, path: &Path, name: &Path) -> io::Result<()>;

    /// Gives a file another name, and takes that from whatever has it.
    fn rename(&self, path: &Path, name: &Path) -> io::Result<()>;

    /// Removes a name of a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder; an error if the name is taken.
    fn make_folder(&self, path: &Path) -> io::Result<()>;

    /// Removes a folder that has nothing in it.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;

    /// Whether a name is that of a link.
    fn is_link(&self, path: &Path) -> bool;

    /// What tells a folder from others that have had the name; none if there is none.
    fn folder(&self, path: &Path) -> Option<Folder>;

    /// The names in a folder that are UTF-8, without those of links: they are not ours.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Makes the names in a folder durable.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// The bytes of a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// A file that is complete and never changes, as a blob.
    fn open(&self, path: &Path) -> io::Result<Near>;

    /// Locks a file, which is made if it is not there, alone or with others who share it; none if
    /// somebody has locked it otherwise. Dropping the lock lets go.
    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>>;
}

/// A file that is being written.
pub(crate) trait Output: Debug + Send + Sync {
    /// Writes some bytes at a place, from the first on, and says how many.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// Says how long the file will be.
    fn expect(&self, len: u64);

    /// Lets what was written set out for the disk, without waiting for it: syncing takes the less time then.
    fn send(&self, range: Range<u64>);

    /// Makes the bytes durable.
    fn sync(&self) -> io::Result<()>;
}

/// What tells a folder from others that have had its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Folder {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) created: SystemTime,
}

/// The file system of this machine.
#[derive(Debug)]
pub(crate) struct SystemFiles;

impl Files for SystemFiles {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        Ok(Box::new(File::options().write(true).create_new(true).open(path)?))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        fs::hard_link(path, name)
    }

    fn rename(&self, path: &Path, name: &Path) -> io::Result<()> {
        fs::rename(path, name)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let _removed = system::kept(path);
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

    fn folder(&self, path: &Path) -> Option<Folder> {
        let metadata = path.metadata().ok().filter(Metadata::is_dir)?;
        // Where nobody knows when it was made, it is another one each time.
        let created = metadata.created().unwrap_or_else(|_| SystemTime::now());
        let (device, inode) = system::identity(path, &metadata).ok()?;
        Some(Folder { device, inode, created })
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
    fn open(&self, path: &Path) -> io::Result<Near> {
        let file = system::open(path, Access::Read)?;
        // SAFETY: a file of a store gets its name when it is complete (`NewFile::link`) and is never
        // opened for writing again; deleting it removes the name and leaves the map as it is. Whoever
        // else may write in the folder is trusted as the owner of the store.
        let map = unsafe { tssd_format::map_file(&file)? };
        let bytes = map.bytes().cloned().unwrap_or_default();
        let maps = PrivateMaps::new(file, bytes.len());
        if map.size()? < deferred_drop::LARGE {
            return Ok(Near::new(map).mapped(maps, 0));
        }
        let bytes = Bytes::from_owner(Parting::new(Open { bytes, _maps: maps.clone() }));
        Ok(Near::new(Mmap::from(bytes)).mapped(maps, 0))
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        let lock = if is_shared { FileLock::share(path)? } else { FileLock::take(path)? };
        Ok(lock.map(|lock| -> Box<dyn Any + Send> { Box::new(lock) }))
    }
}

/// A file that is mapped, and what else has it open: so whoever drops the last of both is the one who drops this.
struct Open {
    bytes: Bytes,
    _maps: Arc<PrivateMaps>,
}

impl AsRef<[u8]> for Open {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Output for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        with_room(|| system::write_at(self, bytes, offset))
    }

    /// A system that knows finds room at once, a third faster than bit by bit. Where there is no room, or no such call,
    /// writing says so or does without.
    fn expect(&self, len: u64) {
        let _found = with_room(|| system::expect(self, len));
    }

    /// What fails, fails again when it is synced, which says so.
    fn send(&self, range: Range<u64>) {
        system::send(self, range);
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}
