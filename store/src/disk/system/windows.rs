//! Windows.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::windows::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Access, irregular, link_at};
use crate::disk::TEMPORARY;
use crate::parting::Parting;

/// Folders can be opened with this: `FILE_FLAG_BACKUP_SEMANTICS`.
const FOLDERS: u32 = 0x0200_0000;
/// A link itself is opened with this, not what it leads to: `FILE_FLAG_OPEN_REPARSE_POINT`.
const LINKS: u32 = 0x0020_0000;

/// The device of a folder, and its number there.
pub(crate) fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let folder = File::options().access_mode(0).custom_flags(FOLDERS).open(path)?;
    let known = winapi_util::file::information(&folder)?;
    Ok((known.volume_serial_number(), known.file_index()))
}

/// Opens a file of a store: a regular one. A link may lead out of the store.
pub(crate) fn open(path: &Path, access: Access) -> io::Result<File> {
    let is_lock = access == Access::Lock;
    let mut options = File::options();
    options.read(true).write(is_lock).create(is_lock).custom_flags(FOLDERS | LINKS);
    let file = match options.open(path) {
        Ok(file) => file,
        // A folder, to write.
        Err(_) if path.is_dir() => return Err(irregular(path)),
        Err(error) => return Err(error),
    };
    let kind = file.metadata()?.file_type();
    match (kind.is_file(), kind.is_symlink()) {
        (true, _) => Ok(file),
        (_, true) => Err(link_at(path)),
        _ => Err(irregular(path)),
    }
}

/// The names in a folder that are UTF-8, without those of links.
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

/// Names are in the file system's journal: no call makes them more durable.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    if path.metadata()?.is_dir() { Ok(()) } else { Err(ErrorKind::NotADirectory.into()) }
}

/// Removes a file. Who has it open or mapped keeps it: a file system that does not remove what is mapped gives it a
/// temporary name, which is swept with the folder.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let is_temporary = |name: &str| name.starts_with(TEMPORARY);
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound && path.is_file() => {
            // Swept before, and still mapped.
            if path.file_name().and_then(|name| name.to_str()).is_some_and(is_temporary) {
                return Ok(());
            }
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{TEMPORARY}{}-removed-{number}", std::process::id());
            fs::rename(path, path.with_file_name(name)).map_err(|_| error)
        }
        done => done,
    }
}

/// How many names a file has.
pub(crate) fn names(file: &File) -> io::Result<u64> {
    Ok(winapi_util::file::information(file)?.number_of_links())
}

/// Writes some bytes at a place, from the first on, and says how many.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    file.seek_write(bytes, offset)
}

/// Its room is taken back at once.
pub(crate) fn kept(_path: &Path) -> Option<Parting<File>> {
    None
}

/// Nobody asks.
pub(crate) fn expect(_file: &File, _len: u64) -> io::Result<()> {
    Ok(())
}

/// It sets out when it is synced.
pub(crate) fn send(_file: &File, _range: Range<u64>) {}
