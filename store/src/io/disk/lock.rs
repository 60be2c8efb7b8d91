//! Locked files, by which processes hold each other off.

use std::fs::{File, TryLockError};
use std::io::{self, Seek, Write};
use std::path::Path;

use super::system::{self, Access};

/// Holds off everyone else who locks the same file, in this process and others, until it is dropped.
#[derive(Debug)]
pub(crate) struct FileLock(File);

impl FileLock {
    /// Takes the lock of a file, which is made if it is not there; none if somebody else holds it.
    pub(crate) fn take(path: &Path) -> io::Result<Option<Self>> {
        Self::locked(path, File::try_lock)
    }

    /// Shares the lock with others who share it; none if somebody holds it alone.
    pub(crate) fn share(path: &Path) -> io::Result<Option<Self>> {
        Self::locked(path, File::try_lock_shared)
    }

    fn locked(
        path: &Path,
        lock: impl Fn(&File) -> Result<(), TryLockError>,
    ) -> io::Result<Option<Self>> {
        loop {
            let file = system::open(path, Access::Lock)?;
            match lock(&file) {
                // Somebody has removed it between the opening and the lock: it is nobody's.
                Ok(()) if system::names(&file)? == 0 => {}
                Ok(()) => return Ok(Some(Self(file))),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// Says something in the locked file, for those who find it locked.
    pub(crate) fn write(&self, text: &str) -> io::Result<()> {
        self.0.set_len(0)?;
        (&self.0).rewind()?;
        (&self.0).write_all(text.as_bytes())
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Closing the file is not enough: a child that was forked meanwhile has it open too.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_lock_of_a_file_that_was_removed_meanwhile_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        let is_removed = Cell::new(false);
        let lock = FileLock::locked(&path, |file| {
            if !is_removed.replace(true) {
                std::fs::remove_file(&path).unwrap();
            }
            file.try_lock()
        });
        let _lock = lock.unwrap().unwrap();
        assert!(FileLock::take(&path).unwrap().is_none(), "nobody else has it");
    }

    #[test]
    fn a_lock_ends_though_a_child_that_was_forked_has_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        let lock = FileLock::take(&path).unwrap().unwrap();
        let _of_child = lock.0.try_clone().unwrap();
        assert!(FileLock::share(&path).unwrap().is_none());
        drop(lock);
        assert!(FileLock::take(&path).unwrap().is_some());
    }
}
