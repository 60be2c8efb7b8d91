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
pub(crate) fn defer_removal(_path: &Path) -> Option<DeferredDrop<File>> {
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

/// Returns the ID of the boot of this machine, which no other machine and no other boot has.
#[cfg(target_os = "linux")]
pub(crate) fn boot_id() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()
}

/// Returns `None`: other systems have no such ID.
#[cfg(not(target_os = "linux"))]
pub(crate) fn boot_id() -> Option<String> {
    None
}

/// Creates a file without a name in a folder. Returns `None` if the file system cannot, or if the file could not be
/// named later.
#[cfg(target_os = "linux")]
pub(crate) fn create_unnamed(folder: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666)) {
        // A process without `/proc` cannot name the file.
        Ok(file) => Ok(Some(File::from(file)).filter(|file| descriptor_path(file).exists())),
        // These are the errors of file systems and of kernels that do not know the flag.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns `None`: other systems have no files without names.
#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "Linux reports errors")]
pub(crate) fn create_unnamed(_folder: &Path) -> io::Result<Option<File>> {
    Ok(None)
}

/// Gives a file of [`create_unnamed`] a name. Fails if the name is taken.
#[cfg(target_os = "linux")]
pub(crate) fn link_unnamed(file: &File, name: &Path) -> io::Result<()> {
    use rustix::fs::{AtFlags, CWD};
    Ok(rustix::fs::linkat(CWD, descriptor_path(file), CWD, name, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn link_unnamed(_file: &File, _name: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(target_os = "linux")]
fn descriptor_path(file: &File) -> std::path::PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Opens a folder, to lock it.
pub(crate) fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

/// Opens a regular file or a folder of this user, to lock it.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    if is_own && (metadata.is_file() || metadata.is_dir()) {
        Ok(file)
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

/// Gives a new file the mode, the owner and the group of an old one, as far as the system permits.
///
/// If the group cannot be the old one, it gets no permission that others do not have.
pub(crate) fn copy_attributes(old: &Metadata, new: &File) -> io::Result<()> {
    use std::os::unix::fs::{PermissionsExt, fchown};
    let created = new.metadata()?;
    if created.uid() != old.uid() {
        let _forbidden = fchown(new, Some(old.uid()), None);
    }
    if created.gid() != old.gid() {
        let _forbidden = fchown(new, None, Some(old.gid()));
    }
    let mut mode = old.mode() & 0o7777;
    if new.metadata()?.gid() != old.gid() {
        let others = mode & 0o007;
        mode = (mode & 0o707) | (mode & others << 3);
    }
    new.set_permissions(std::fs::Permissions::from_mode(mode))
}

/// Exchanges two files or folders in one step.
#[cfg(target_os = "linux")]
pub(crate) fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn exchange(_one: &Path, _other: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns the error of the system for a folder in place of a file.
pub(crate) fn is_a_directory() -> io::Error {
    Errno::ISDIR.into()
}

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
