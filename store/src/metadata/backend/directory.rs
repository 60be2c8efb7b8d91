//! Records as files of a directory that several processes share.

use std::any::Any;
use std::path::Path;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::time::sleep;

use super::{MetaStore, Turns};
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::{CLAIM, Disk, claimed_by};
use crate::io::sync::{Lock, MutexGuard};

#[derive(Debug)]
pub(crate) struct DirectoryMeta {
    disk: Disk,
    turns: Turns,
    /// That no daemon serves the directory, from the first time that something is written.
    share: Lock<Option<Box<dyn Any + Send>>>,
}

/// How long a lock that another process holds is waited for.
const PATIENCE: Duration = Duration::from_mins(1);

impl DirectoryMeta {
    pub(crate) fn new(disk: Disk) -> Self {
        Self { disk, turns: Turns::default(), share: Lock::default() }
    }

    /// Keeps daemons from serving the directory, as long as this lives.
    async fn share(&self) -> Result<()> {
        if self.held().is_some() {
            return Ok(());
        }
        let lock = self.wait(CLAIM, |disk, path| disk.lock(path, true)).await?;
        let Some(lock) = lock else {
            let socket = claimed_by(self.disk.root()).ok().flatten().unwrap_or_default();
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("a daemon serves this directory: connect to unix:{socket}"),
            ));
        };
        *self.held() = Some(lock);
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.share.lock()
    }

    /// Runs something that waits for the disk on a thread that may wait.
    async fn wait<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(&Disk, &Path) -> std::io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let path = self.disk.root().join(name);
        let shown = path.display().to_string();
        let disk = self.disk.clone();
        let done = tokio::task::spawn_blocking(move || work(&disk, &path)).await;
        done.map_err(std::io::Error::other)
            .and_then(|result| result)
            .map_err(|error| Error::io(shown, error))
    }
}

#[async_trait]
impl MetaStore for DirectoryMeta {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        self.wait(name, move |disk, path| disk.create(path, &record)).await
    }

    async fn settle(&self, name: &str) -> Result<()> {
        self.wait(name, Disk::settle).await
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.wait(name, Disk::read).await
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        self.wait(name, Disk::list).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.wait(name, Disk::remove).await
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        self.share().await?;
        // One of this process at a time asks the others, so that no more than one thread waits.
        let turn = self.turns.take(name).await;
        let started = Instant::now();
        loop {
            if let Some(lock) = self.wait(name, |disk, path| disk.lock(path, false)).await? {
                return Ok(Box::new((lock, turn)));
            }
            if started.elapsed() > PATIENCE {
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
        self.wait(name, Disk::is_free).await
    }
}
