//! A meta store of files in a directory that several processes share.

use std::any::Any;
use std::path::Path;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::time::sleep;

use super::{MetaStore, NameLocks};
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::{DAEMON_LOCK, Disk, daemon_socket};
use crate::io::sync::{Lock, MutexGuard};

#[derive(Debug)]
pub(crate) struct DirectoryMeta {
    disk: Disk,
    locks: NameLocks,
    /// A shared lock that prevents daemons from serving the directory. It is taken by the first lock or session.
    shared_lock: Lock<Option<Box<dyn Any + Send>>>,
}

/// Maximum time to wait for a lock that another process holds.
const LOCK_TIMEOUT: Duration = Duration::from_mins(1);

impl DirectoryMeta {
    pub(crate) fn new(disk: Disk) -> Self {
        Self { disk, locks: NameLocks::default(), shared_lock: Lock::default() }
    }

    /// Prevents daemons from serving the directory, as long as this meta store exists.
    async fn exclude_daemons(&self) -> Result<()> {
        if self.shared_lock().is_some() {
            return Ok(());
        }
        let lock = self.run_blocking(DAEMON_LOCK, |disk, path| disk.lock(path, true)).await?;
        let Some(lock) = lock else {
            let socket = daemon_socket(self.disk.root()).ok().flatten().unwrap_or_default();
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("a daemon serves this directory: connect to unix:{socket}"),
            ));
        };
        *self.shared_lock() = Some(lock);
        Ok(())
    }

    fn shared_lock(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.shared_lock.lock()
    }

    /// Runs a disk operation on a thread for blocking calls.
    async fn run_blocking<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(&Disk, &Path) -> std::io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let path = self.disk.root().join(name);
        let shown = path.clone();
        let disk = self.disk.clone();
        let done = tokio::task::spawn_blocking(move || work(&disk, &path)).await;
        done.map_err(std::io::Error::other)
            .and_then(|result| result)
            .map_err(|error| Error::io_at(shown, error))
    }
}

#[async_trait]
impl MetaStore for DirectoryMeta {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        self.run_blocking(name, move |disk, path| disk.create(path, &record)).await
    }

    async fn sync(&self, name: &str) -> Result<()> {
        self.run_blocking(name, Disk::sync_folder).await
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.run_blocking(name, Disk::read).await
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        self.run_blocking(name, Disk::list).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.run_blocking(name, Disk::remove).await
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        self.exclude_daemons().await?;
        // Only one task of this process at a time competes with other processes, so at most one thread blocks.
        let local = self.locks.lock(name).await;
        let started = Instant::now();
        loop {
            if let Some(lock) = self.run_blocking(name, |disk, path| disk.lock(path, false)).await?
            {
                return Ok(Box::new((lock, local)));
            }
            if started.elapsed() > LOCK_TIMEOUT {
                let path = self.disk.root().join(name);
                return Err(Error::new(
                    ErrorKind::Busy,
                    format_args!("another process has held `{}` for a minute", path.display()),
                ));
            }
            sleep(Duration::from_millis(2)).await;
        }
    }

    async fn has_ended(&self, name: &str) -> Result<bool> {
        self.run_blocking(name, Disk::remove_if_unlocked).await
    }
}
