//! Temporary files and folders next to a file or a folder of the user.
//!
//! A temporary name has the boot of this machine and the process in it, and its file is locked while the process lives.
//! So a later process can tell that a file is abandoned, and removes it. Files of other machines on a shared file system,
//! and of earlier boots, are never removed.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::system;
use crate::io::sync::Lock;

/// Time for which a process does not look again for abandoned files in the folder that it searched last.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// Prefix of the temporary names of this machine since its last boot; `None` on a system that does not name its boot.
static PREFIX: LazyLock<Option<String>> = LazyLock::new(|| {
    let boot: String =
        system::boot_id()?.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    Some(format!(".tssd-{boot}-"))
});

/// Returns a temporary name in a folder that this process has not used before.
pub(super) fn next_name(folder: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let prefix = PREFIX.as_deref().unwrap_or(".tssd-");
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{prefix}{}-{number}", std::process::id()))
}

/// Creates a file or a folder under a temporary name with `create`, and locks it.
///
/// `create` fails if the name is taken.
pub(super) fn create_locked(
    folder: &Path,
    create: impl Fn(&Path) -> io::Result<File>,
) -> io::Result<(File, PathBuf)> {
    loop {
        let path = next_name(folder);
        let file = match create(&path) {
            // Another process may have the same ID, in another namespace.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            created => created?,
        };
        // A file system without locks has none to check.
        let is_locked = !matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        // Another process may have removed the file before it was locked.
        if is_locked && path.symlink_metadata().is_ok() {
            return Ok((file, path));
        }
    }
}

/// Removes the temporary files and folders of processes that were killed.
///
/// Does nothing on an error: the next search finds them again.
pub(super) fn remove_abandoned(folder: &Path) {
    static LAST: LazyLock<Lock<Option<(PathBuf, Instant)>>> = LazyLock::new(Lock::default);
    let Some(prefix) = &*PREFIX else { return };
    {
        let mut last = LAST.lock();
        if last.as_ref().is_some_and(|(path, at)| path == folder && at.elapsed() < SEARCH_INTERVAL)
        {
            return;
        }
        *last = Some((folder.to_owned(), Instant::now()));
    }
    search(folder, prefix);
}

fn search(folder: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix)) {
            // Removed or locked meanwhile: nothing to do.
            let _ignored = remove_if_abandoned(&entry.path());
        }
    }
}

/// Removes a file or a folder of this user that no process has locked.
fn remove_if_abandoned(path: &Path) -> io::Result<()> {
    let file = system::open_own(path)?;
    if file.try_lock().is_ok() {
        // Removed under the lock: afterwards another process may hold it.
        if file.metadata()?.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unlocked_files_and_folders_of_this_boot_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = PREFIX.as_deref().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (abandoned, abandoned_folder) =
            (path(&format!("{prefix}1-0")), path(&format!("{prefix}1-1")));
        fs::write(&abandoned, b"half").unwrap();
        fs::create_dir(&abandoned_folder).unwrap();
        fs::write(abandoned_folder.join("part"), b"half").unwrap();
        let others = [".tssd-0123456789abcdef-1-0", ".tssd-1-0", "model.tssd", ".tssd-"];
        for name in others {
            fs::write(path(name), b"other").unwrap();
        }
        let link = path(&format!("{prefix}1-2"));
        std::os::unix::fs::symlink(path("model.tssd"), &link).unwrap();
        let create = |path: &Path| File::create_new(path);
        let (_locked, locked_path) = create_locked(folder.path(), create).unwrap();
        search(folder.path(), prefix);
        let names = || {
            let entries = fs::read_dir(folder.path()).unwrap();
            let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            paths
        };
        let mut expected: Vec<PathBuf> =
            others.map(path).into_iter().chain([link, locked_path]).collect();
        expected.sort();
        assert_eq!(names(), expected);
    }

    #[test]
    fn file_that_was_removed_before_it_was_locked_is_created_again() {
        let folder = tempfile::tempdir().unwrap();
        let is_first = std::cell::Cell::new(true);
        let (_file, path) = create_locked(folder.path(), |path| {
            let file = File::create_new(path)?;
            if is_first.replace(false) {
                fs::remove_file(path)?;
            }
            Ok(file)
        })
        .unwrap();
        assert!(path.exists());
    }
}
