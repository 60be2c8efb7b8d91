//! File locks that exclude other processes.

use std::fs::{File, TryLockError};
use std::io::{self, Seek, Write};
use std::path::Path;

use super::system::{self, Access};

/// A lock of a file, which excludes other holders in this process and others. Dropping it unlocks.
#[derive(Debug)]
pub(crate) struct FileLock(File);

impl FileLock {
    /// Locks a file exclusively, and creates it if needed. Returns none if it is locked.
    pub(crate) fn try_exclusive(path: &Path) -> io::Result<Option<Self>> {
        Self::lock_with(path, File::try_lock)
    }

    /// Locks a file shared, and creates it if needed. Returns none if it is locked exclusively.
    pub(crate) fn try_shared(path: &Path) -> io::Result<Option<Self>> {
        Self::lock_with(path, File::try_lock_shared)
    }

    fn lock_with(
        path: &Path,
        lock: impl Fn(&File) -> Result<(), TryLockError>,
    ) -> io::Result<Option<Self>> {
        loop {
            let file = system::open(path, Access::Lock)?;
            match lock(&file) {
                // Another process removed the file between the open and the lock. The lock has no effect: try again.
                Ok(()) if system::link_count(&file)? == 0 => {}
                Ok(()) => return Ok(Some(Self(file))),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// Writes text into the locked file, for processes that find it locked.
    pub(crate) fn write(&self, text: &str) -> io::Result<()> {
        self.0.set_len(0)?;
        (&self.0).rewind()?;
        (&self.0).write_all(text.as_bytes())
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // To close the file is not enough: a forked child has it open too.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn lock_of_removed_file_is_retried() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        let is_removed = Cell::new(false);
        let lock = FileLock::lock_with(&path, |file| {
            if !is_removed.replace(true) {
                std::fs::remove_file(&path).unwrap();
            }
            file.try_lock()
        });
        let _lock = lock.unwrap().unwrap();
        assert!(FileLock::try_exclusive(&path).unwrap().is_none(), "nobody else has it");
    }

    #[test]
    fn drop_unlocks_file_that_a_forked_child_has_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        let lock = FileLock::try_exclusive(&path).unwrap().unwrap();
        let _inherited = lock.0.try_clone().unwrap();
        assert!(FileLock::try_shared(&path).unwrap().is_none());
        drop(lock);
        assert!(FileLock::try_exclusive(&path).unwrap().is_some());
    }
}
