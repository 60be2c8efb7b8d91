//! Windows.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::windows::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Access, irregular, link_at};
use crate::io::deferred_drop::Parting;
use crate::io::disk::TEMPORARY;

/// Folders can be opened with this: `FILE_FLAG_BACKUP_SEMANTICS`.
const FOLDERS: u32 = 0x0200_0000;
/// A link itself is opened with this, not what it leads to: `FILE_FLAG_OPEN_REPARSE_POINT`.
const LINKS: u32 = 0x0020_0000;
/// What has this is a link, or has its bytes somewhere else, such as a file without duplicates:
/// `FILE_ATTRIBUTE_REPARSE_POINT`.
const REPARSED: u32 = 0x400;

/// A folder that is there: its device, and its number there.
pub(crate) fn identity(folder: &Path, _metadata: &Metadata) -> io::Result<(u64, u64)> {
    let folder = File::options().access_mode(0).custom_flags(FOLDERS).open(folder)?;
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
    let metadata = file.metadata()?;
    match metadata.file_type() {
        kind if kind.is_symlink() => Err(link_at(path)),
        kind if !kind.is_file() => Err(irregular(path)),
        // No link: without the flag its bytes are got from where they are.
        _ if metadata.file_attributes() & REPARSED != 0 => options.custom_flags(FOLDERS).open(path),
        _ => Ok(file),
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

/// Makes the names in a folder durable: it is flushed as a file is, which takes a right to write.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    if !path.metadata()?.is_dir() {
        return Err(ErrorKind::NotADirectory.into());
    }
    match File::options().write(true).custom_flags(FOLDERS).open(path).and_then(|it| it.sync_all())
    {
        // A file system that has no such call or denies it: its journal has the names, in their order.
        Err(error) if error.raw_os_error().is_some_and(|code| NO_SYNC.contains(&code)) => Ok(()),
        done => done,
    }
}

/// `ERROR_INVALID_FUNCTION`, `ERROR_ACCESS_DENIED` and `ERROR_NOT_SUPPORTED`.
const NO_SYNC: [i32; 3] = [1, 5, 50];

/// Removes a file. Who has it open or mapped keeps it: where a file system does not remove what is mapped, it gets a
/// temporary name and is removed with one of the next, or when its folder is swept.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    static MAPPED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    static NEXT: AtomicU64 = AtomicU64::new(0);

    let mut mapped = MAPPED.lock().expect("nobody panics while holding it");
    mapped.retain(|path| {
        fs::remove_file(path).is_err_and(|error| error.kind() != ErrorKind::NotFound)
    });
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound && path.is_file() => {
            let is_temporary = |name: &str| name.starts_with(TEMPORARY);
            if path.file_name().and_then(|name| name.to_str()).is_some_and(is_temporary) {
                // It has its name already, of this process or one before it.
                if !mapped.iter().any(|known| known == path) {
                    mapped.push(path.to_owned());
                }
                return Ok(());
            }
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{TEMPORARY}{}-removed-{number}", std::process::id());
            let renamed = path.with_file_name(name);
            fs::rename(path, &renamed).map_err(|_| error)?;
            mapped.push(renamed);
            Ok(())
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
