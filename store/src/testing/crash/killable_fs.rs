//! Processes that are killed: after a given number of file system calls, all further calls fail.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::io::disk::{FileSystem, FolderId, OutputFile};
use crate::io::local_archive::LocalArchive;

/// Number of file system calls until a process is killed.
#[derive(Clone, Debug)]
pub(super) struct CallBudget(Arc<AtomicI64>);

impl CallBudget {
    pub(super) fn new(calls: i64) -> Self {
        Self(Arc::new(AtomicI64::new(calls)))
    }

    /// Counts one call. If the process has been killed, returns an error, and the call must not be made.
    pub(super) fn count_call(&self) -> io::Result<()> {
        if self.0.fetch_sub(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        Err(io::Error::other("this process is dead"))
    }
}

/// Files of a process that is killed after a number of calls.
#[derive(Debug)]
pub(super) struct KillableFs {
    pub(super) inner: Arc<dyn FileSystem>,
    pub(super) budget: CallBudget,
}

impl FileSystem for KillableFs {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        self.budget.count_call()?;
        let output = self.inner.create(path)?;
        Ok(Box::new(KillableOutput { output, life: self.budget.clone() }))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        self.budget.count_call()?;
        self.inner.link(path, name)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.budget.count_call()?;
        self.inner.remove(path)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.budget.count_call()?;
        self.inner.make_folder(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.budget.count_call()?;
        self.inner.remove_folder(path)
    }

    fn is_link(&self, path: &Path) -> bool {
        self.inner.is_link(path)
    }

    fn folder_id(&self, path: &Path) -> Option<FolderId> {
        self.inner.folder_id(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.budget.count_call()?;
        self.inner.list(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.budget.count_call()?;
        self.inner.sync_folder(path)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.budget.count_call()?;
        self.inner.read(path)
    }

    fn open(&self, path: &Path) -> io::Result<LocalArchive> {
        self.budget.count_call()?;
        self.inner.open(path)
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        self.budget.count_call()?;
        self.inner.lock(path, is_shared)
    }
}

#[derive(Debug)]
struct KillableOutput {
    output: Box<dyn OutputFile>,
    life: CallBudget,
}

impl OutputFile for KillableOutput {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.life.count_call()?;
        self.output.write_at(bytes, offset)
    }

    fn preallocate(&self, len: u64) {
        if self.life.count_call().is_ok() {
            self.output.preallocate(len);
        }
    }

    fn start_writeback(&self, range: Range<u64>) {
        if self.life.count_call().is_ok() {
            self.output.start_writeback(range);
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.life.count_call()?;
        self.output.sync()
    }
}
