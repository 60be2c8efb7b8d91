//! Windows.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::windows::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Access, link_error, not_a_regular_file};
use crate::io::deferred_drop::DeferredDrop;
use crate::io::disk::TEMPORARY_PREFIX;

/// `FILE_FLAG_BACKUP_SEMANTICS`: also opens folders.
const OPEN_FOLDERS: u32 = 0x0200_0000;
/// `FILE_FLAG_OPEN_REPARSE_POINT`: opens a link itself instead of its target.
const OPEN_LINKS: u32 = 0x0020_0000;
/// `FILE_ATTRIBUTE_REPARSE_POINT`: a link, or a file whose bytes are stored elsewhere.
///
/// Deduplicated files are an example.
const REPARSE_POINT: u32 = 0x400;

/// Returns the volume and the file index of an existing folder.
pub(crate) fn identity(folder: &Path, _metadata: &Metadata) -> io::Result<(u64, u64)> {
    let folder = File::options().access_mode(0).custom_flags(OPEN_FOLDERS).open(folder)?;
    let information = winapi_util::file::information(&folder)?;
    Ok((information.volume_serial_number(), information.file_index()))
}

/// Opens a regular file of a store. Links are rejected, because they may lead out of the store.
pub(crate) fn open(path: &Path, access: Access) -> io::Result<File> {
    let is_lock = access == Access::Lock;
    let mut options = File::options();
    options.read(true).write(is_lock).create(is_lock).custom_flags(OPEN_FOLDERS | OPEN_LINKS);
    let file = match options.open(path) {
        Ok(file) => file,
        // A folder cannot be opened for writing.
        Err(_) if path.is_dir() => return Err(not_a_regular_file(path)),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    match metadata.file_type() {
        kind if kind.is_symlink() => Err(link_error(path)),
        kind if !kind.is_file() => Err(not_a_regular_file(path)),
        // Not a link: without the flag, the system reads the bytes from where they are stored.
        _ if metadata.file_attributes() & REPARSE_POINT != 0 => {
            options.custom_flags(OPEN_FOLDERS).open(path)
        }
        _ => Ok(file),
    }
}

/// Lists the names in a folder that are UTF-8, except those of symbolic links.
pub(crate) fn list(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if !entry.file_type()?.is_symlink() {
            names.extend(entry.file_name().into_string());
        }
    }
    Ok(names)
}

/// Flushes the names in a folder like a file. The flush needs the right to write.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    if !path.metadata()?.is_dir() {
        return Err(ErrorKind::NotADirectory.into());
    }
    match File::options()
        .write(true)
        .custom_flags(OPEN_FOLDERS)
        .open(path)
        .and_then(|it| it.sync_all())
    {
        // The file system has no such call or denies it. Its journal keeps the order of the names.
        Err(error)
            if error.raw_os_error().is_some_and(|code| UNSUPPORTED_FLUSH.contains(&code)) =>
        {
            Ok(())
        }
        result => result,
    }
}

/// `ERROR_INVALID_FUNCTION`, `ERROR_ACCESS_DENIED` and `ERROR_NOT_SUPPORTED`.
const UNSUPPORTED_FLUSH: [i32; 3] = [1, 5, 50];

/// Removes a file. Processes that have it open or mapped keep it.
///
/// If the file system cannot remove a mapped file, the file gets a temporary name. A later call removes it, or the
/// sweep of its folder.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    static MAPPED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    static NEXT: AtomicU64 = AtomicU64::new(0);

    let mut mapped = MAPPED.lock().expect("nobody panics while holding it");
    mapped.retain(|path| {
        fs::remove_file(path).is_err_and(|error| error.kind() != ErrorKind::NotFound)
    });
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound && path.is_file() => {
            let is_temporary = |name: &str| name.starts_with(TEMPORARY_PREFIX);
            if path.file_name().and_then(|name| name.to_str()).is_some_and(is_temporary) {
                // The file has its temporary name already, from this process or an earlier one.
                if !mapped.iter().any(|other| other == path) {
                    mapped.push(path.to_owned());
                }
                return Ok(());
            }
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{TEMPORARY_PREFIX}{}-removed-{number}", std::process::id());
            let renamed = path.with_file_name(name);
            fs::rename(path, &renamed).map_err(|_| error)?;
            mapped.push(renamed);
            Ok(())
        }
        result => result,
    }
}

/// Returns the number of names of a file.
pub(crate) fn link_count(file: &File) -> io::Result<u64> {
    Ok(winapi_util::file::information(file)?.number_of_links())
}

/// Writes a prefix of `bytes` at an offset, and returns its length.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    file.seek_write(bytes, offset)
}

/// Does nothing: the blocks are freed at once.
pub(crate) fn defer_removal(_path: &Path) -> Option<DeferredDrop<File>> {
    None
}

/// Does nothing: Windows needs no preallocation.
pub(crate) fn preallocate(_file: &File, _len: u64) -> io::Result<()> {
    Ok(())
}

/// Does nothing: the sync starts the writeback.
pub(crate) fn start_writeback(_file: &File, _range: Range<u64>) {}

/// Returns `None`: Windows has no ID of a boot.
pub(crate) fn boot_id() -> Option<String> {
    None
}

/// Returns `None`: Windows has no files without names.
pub(crate) fn create_unnamed(_folder: &Path) -> io::Result<Option<File>> {
    Ok(None)
}

pub(crate) fn link_unnamed(_file: &File, _name: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Opens a folder, to lock it.
pub(crate) fn open_folder(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(OPEN_FOLDERS).open(path)
}

/// Fails: without an ID of the boot, no file is known to be abandoned.
pub(crate) fn open_own(_path: &Path) -> io::Result<File> {
    Err(ErrorKind::Unsupported.into())
}

/// Makes a new file read-only if the old one is.
pub(crate) fn copy_attributes(old: &Metadata, new: &File) -> io::Result<()> {
    new.set_permissions(old.permissions())
}

/// Fails: the system does not exchange folders.
pub(crate) fn exchange(_one: &Path, _other: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Returns the error for a folder in place of a file.
pub(crate) fn is_a_directory() -> io::Error {
    ErrorKind::IsADirectory.into()
}
