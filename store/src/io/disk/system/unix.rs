//! Linux, macOS and their relatives.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{Access, irregular, link_at};
#[cfg(target_os = "linux")]
use crate::io::deferred_drop;
use crate::io::deferred_drop::Parting;

/// A folder that is there: its device, and its number there.
#[expect(clippy::unnecessary_wraps, reason = "another system has to be asked")]
pub(crate) fn identity(_folder: &Path, metadata: &Metadata) -> io::Result<(u64, u64)> {
    Ok((metadata.dev(), metadata.ino()))
}

/// Opens a file of a store: a regular one. A link may lead out of the store, and a pipe would be waited for.
pub(crate) fn open(path: &Path, access: Access) -> io::Result<File> {
    let flags = match access {
        Access::Read => OFlags::RDONLY,
        Access::Lock => OFlags::WRONLY | OFlags::CREATE,
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o666);
    let file = match rustix::fs::open(path, flags, mode) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP) => return Err(link_at(path)),
        // A pipe that nobody reads, a socket (on Linux, on macOS), a device without a driver; a folder, to write.
        Err(Errno::NXIO | Errno::OPNOTSUPP | Errno::NODEV | Errno::ISDIR) => {
            return Err(irregular(path));
        }
        Err(error) => return Err(error.into()),
    };
    if file.metadata()?.is_file() { Ok(file) } else { Err(irregular(path)) }
}

/// The names in a folder that are UTF-8, without those of links.
pub(crate) fn list(path: &Path) -> io::Result<Vec<String>> {
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

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    File::from(rustix::fs::open(path, flags, Mode::empty())?).sync_all()
}

/// Removes a file. Who has it open or mapped keeps it.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    std::fs::remove_file(path)
}

/// How many names a file has.
pub(crate) fn names(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.nlink())
}

/// Writes some bytes at a place, from the first on, and says how many.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    FileExt::write_at(file, bytes, offset)
}

/// A large file that is about to lose its last name, for its room to be taken back when this is dropped, not before.
///
/// Only where that is nobody else's concern: a network's file system gives a file that is open another name in place of
/// none.
#[cfg(target_os = "linux")]
pub(crate) fn kept(path: &Path) -> Option<Parting<File>> {
    /// ext4, XFS and tmpfs, as `statfs(2)` has them.
    const LOCAL: [u64; 3] = [0xef53, 0x5846_5342, 0x0102_1994];
    let is_large = |metadata: &Metadata| {
        metadata.is_file() && metadata.len() >= deferred_drop::LARGE && metadata.nlink() == 1
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
pub(crate) fn kept(_path: &Path) -> Option<Parting<File>> {
    None
}

/// Finds room for a file that will have so many bytes.
#[cfg(target_os = "linux")]
pub(crate) fn expect(file: &File, len: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len)?)
}

/// Elsewhere nobody asks.
#[cfg(not(target_os = "linux"))]
pub(crate) fn expect(_file: &File, _len: u64) -> io::Result<()> {
    Ok(())
}

/// Lets what was written set out for the disk.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "no other crate has this call")]
pub(crate) fn send(file: &File, range: Range<u64>) {
    let offset = |at| libc::off64_t::try_from(at).unwrap_or(libc::off64_t::MAX);
    let (start, len) = (offset(range.start), offset(range.end - range.start));
    // SAFETY: the call reads no memory of this process, and the descriptor is open as long as `file` is.
    let _sent =
        unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Elsewhere it sets out when it is synced.
#[cfg(not(target_os = "linux"))]
pub(crate) fn send(_file: &File, _range: Range<u64>) {}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;

    use super::{Access, list, open};

    #[test]
    fn a_socket_is_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let error = list(&socket).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory);
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let error = open(&pipe, Access::Read).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}
