//! The calls of a file system, as far as a store needs them.

use std::any::Any;
use std::fmt::Debug;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use tssd_format::{Blob, Map};

use super::lock::Lock;
use crate::parting::{self, Parting, with_room};
use crate::private::PrivateMaps;
use crate::volume::Near;

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
        let _removed = kept(path);
        fs::remove_file(path)
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
        Some(Folder { device: metadata.dev(), inode: metadata.ino(), created })
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        // What is no folder is not opened: a socket cannot be, and a pipe would wait for somebody.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // That of std panics if closing the folder fails.
        let entries = rustix::fs::Dir::new(rustix::fs::open(path, flags, Mode::empty())?)?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_type() == FileType::Symlink {
                continue;
            }
            names.extend(entry.file_name().to_str().ok().map(str::to_owned));
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        File::from(rustix::fs::open(path, flags, Mode::empty())?).sync_all()
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        regular(path, OFlags::RDONLY)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[expect(unsafe_code, reason = "files of a store are created once and never changed")]
    fn open(&self, path: &Path) -> io::Result<Near> {
        let file = regular(path, OFlags::RDONLY)?;
        // SAFETY: a file of a store gets its name when it is complete (`NewFile::link`) and is never
        // opened for writing again; deleting it removes the name and leaves the map as it is. Whoever
        // else may write in the folder is trusted as the owner of the store.
        let map = unsafe { tssd_format::map_file(&file)? };
        let bytes = map.bytes().cloned().unwrap_or_default();
        let maps = PrivateMaps::new(file, bytes.len());
        if map.size()? < parting::LARGE {
            return Ok(Near::new(map).mapped(maps, 0));
        }
        let bytes = Bytes::from_owner(Parting::new(Open { bytes, _maps: maps.clone() }));
        Ok(Near::new(Map::from(bytes)).mapped(maps, 0))
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        let lock = if is_shared { Lock::share(path)? } else { Lock::take(path)? };
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

/// A large file that is about to lose its last name, for its room to be taken back when this is dropped, not before.
///
/// Only where that is nobody else's concern: a network's file system gives a file that is open another name in place of
/// none.
#[cfg(target_os = "linux")]
fn kept(path: &Path) -> Option<Parting<File>> {
    /// ext4, XFS and tmpfs, as `statfs(2)` has them.
    const LOCAL: [u64; 3] = [0xef53, 0x5846_5342, 0x0102_1994];
    let is_large = |metadata: &Metadata| {
        metadata.is_file() && metadata.len() >= parting::LARGE && metadata.nlink() == 1
    };
    path.symlink_metadata().ok().filter(is_large)?;
    // Nothing of it can be read or written by this, so nobody is asked whether that is allowed.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let kind = rustix::fs::fstatfs(&file).ok()?.f_type;
    LOCAL.contains(&u64::try_from(kind).ok()?).then(|| Parting::new(file))
}

/// Elsewhere its room is taken back at once.
#[cfg(not(target_os = "linux"))]
fn kept(_path: &Path) -> Option<Parting<File>> {
    None
}

/// Opens a file of a store, which is made if the flags say so: a regular one. A link may lead out of the store,
/// and a pipe would be waited for.
pub(super) fn regular(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o666);
    let file = match rustix::fs::open(path, flags, mode) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP) => return Err(link_at(path)),
        // A pipe that nobody reads, a socket, a device without a driver; a folder, to write.
        Err(Errno::NXIO | Errno::NODEV | Errno::ISDIR) => return Err(irregular(path)),
        Err(error) => return Err(error.into()),
    };
    if file.metadata()?.is_file() { Ok(file) } else { Err(irregular(path)) }
}

fn irregular(path: &Path) -> io::Error {
    let text = format!("`{}` is no regular file", path.display());
    io::Error::new(ErrorKind::InvalidInput, text)
}

pub(super) fn link_at(path: &Path) -> io::Error {
    let text = format!("`{}` is a link, and nothing of a store is reached by one", path.display());
    io::Error::new(ErrorKind::InvalidInput, text)
}

impl Output for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        with_room(|| FileExt::write_at(self, bytes, offset))
    }

    /// A system that knows finds room at once, a third faster than bit by bit.
    #[cfg(target_os = "linux")]
    fn expect(&self, len: u64) {
        let flags = rustix::fs::FallocateFlags::empty();
        // Where there is no room, or no such call, writing says so or does without.
        let _found = with_room(|| Ok(rustix::fs::fallocate(self, flags, 0, len)?));
    }

    /// Elsewhere nobody asks.
    #[cfg(not(target_os = "linux"))]
    fn expect(&self, _len: u64) {}

    #[cfg(target_os = "linux")]
    #[expect(unsafe_code, reason = "no other crate has this call")]
    fn send(&self, range: Range<u64>) {
        let offset = |at| libc::off64_t::try_from(at).unwrap_or(libc::off64_t::MAX);
        let (start, len) = (offset(range.start), offset(range.end - range.start));
        // What fails, fails again when it is synced, which says so.
        // SAFETY: the call reads no memory of this process, and the descriptor is open as long as `self` is.
        let _sent = unsafe {
            libc::sync_file_range(self.as_raw_fd(), start, len, libc::SYNC_FILE_RANGE_WRITE)
        };
    }

    /// Elsewhere it sets out when it is synced.
    #[cfg(not(target_os = "linux"))]
    fn send(&self, _range: Range<u64>) {}

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;

    use super::{Files, SystemFiles};

    #[test]
    fn a_socket_is_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let error = SystemFiles.list(&socket).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory);
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let error = SystemFiles.read(&pipe).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}
