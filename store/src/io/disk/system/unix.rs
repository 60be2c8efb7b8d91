//! Linux, macOS and other Unix systems.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{Access, link_error, not_a_regular_file};
#[cfg(target_os = "linux")]
use crate::io::deferred_drop;
use crate::io::deferred_drop::DeferredDrop;

/// Returns the device and the inode of an existing folder.
#[expect(clippy::unnecessary_wraps, reason = "another system has to be asked")]
pub(crate) fn identity(_folder: &Path, metadata: &Metadata) -> io::Result<(u64, u64)> {
    Ok((metadata.dev(), metadata.ino()))
}

/// Opens a regular file of a store.
///
/// Symbolic links are rejected, because they may lead out of the store. The open never blocks on a pipe.
pub(crate) fn open(path: &Path, access: Access) -> io::Result<File> {
    let flags = match access {
        Access::Read => OFlags::RDONLY,
        Access::Lock => OFlags::WRONLY | OFlags::CREATE,
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o666);
    let file = match rustix::fs::open(path, flags, mode) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP) => return Err(link_error(path)),
        // A pipe without a reader, a socket (on Linux, on macOS), a device without a driver; a folder to lock.
        Err(Errno::NXIO | Errno::OPNOTSUPP | Errno::NODEV | Errno::ISDIR) => {
            return Err(not_a_regular_file(path));
        }
        Err(error) => return Err(error.into()),
    };
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_a_regular_file(path)) }
}

/// Lists the names in a folder that are UTF-8, except those of symbolic links.
pub(crate) fn list(path: &Path) -> io::Result<Vec<String>> {
    // With `DIRECTORY`, the open fails on a socket and does not block on a pipe.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // The directory iterator of std panics if it fails to close the folder.
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

/// Syncs the names in a folder.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    File::from(rustix::fs::open(path, flags, Mode::empty())?).sync_all()
}

/// Removes a file. Processes that have it open or mapped keep it.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    std::fs::remove_file(path)
}

/// Returns the number of names of a file.
pub(crate) fn link_count(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.nlink())
}

/// Writes a prefix of `bytes` at an offset, and returns its length.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    FileExt::write_at(file, bytes, offset)
}

/// Opens a large file before its last name is removed: dropping the result frees its blocks.
///
/// Returns none except on local file systems: a network file system renames an open file instead of removing it.
#[cfg(target_os = "linux")]
pub(crate) fn defer_removal(path: &Path) -> Option<DeferredDrop<File>> {
    /// Magic numbers of ext4, XFS and tmpfs. See `statfs(2)`.
    const LOCAL: [u64; 3] = [0xef53, 0x5846_5342, 0x0102_1994];
    let is_large = |metadata: &Metadata| {
        metadata.is_file()
            && metadata.len() >= deferred_drop::MIN_DEFERRED_BYTES
            && metadata.nlink() == 1
    };
    path.symlink_metadata().ok().filter(is_large)?;
    // With `PATH` the descriptor grants no access to the bytes, so no permission is needed.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let kind = rustix::fs::fstatfs(&file).ok()?.f_type;
    LOCAL.contains(&u64::try_from(kind).ok()?).then(|| DeferredDrop::new(file))
}

/// Does nothing: on other systems the blocks are freed at once.
#[cfg(not(target_os = "linux"))]
pub(crate) fn defer_removal(_path: &Path) -> Option<Parting<File>> {
    None
}

/// Preallocates `len` bytes.
#[cfg(target_os = "linux")]
pub(crate) fn preallocate(file: &File, len: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len)?)
}

/// Does nothing: other systems have no such call.
#[cfg(not(target_os = "linux"))]
pub(crate) fn preallocate(_file: &File, _len: u64) -> io::Result<()> {
    Ok(())
}

/// Starts the writeback of a range.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "no other crate has this call")]
pub(crate) fn start_writeback(file: &File, range: Range<u64>) {
    let offset = |at| libc::off64_t::try_from(at).unwrap_or(libc::off64_t::MAX);
    let (start, len) = (offset(range.start), offset(range.end - range.start));
    // SAFETY: the call reads no memory of this process, and the descriptor is open as long as `file` exists.
    let _ignored =
        unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Does nothing: on other systems the sync starts the writeback.
#[cfg(not(target_os = "linux"))]
pub(crate) fn start_writeback(_file: &File, _range: Range<u64>) {}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;

    use super::{Access, list, open};

    #[test]
    fn list_rejects_socket() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let error = list(&socket).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory);
    }

    #[test]
    fn open_rejects_pipe_without_blocking() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let status = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(status.success());
        let error = open(&pipe, Access::Read).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}
