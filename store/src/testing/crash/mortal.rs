//! Processes that are killed: after so many calls of the file system they make no more.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::io::disk::{Files, Folder, Output};
use crate::io::local_archive::Near;

/// How many more calls a process makes.
#[derive(Clone, Debug)]
pub(super) struct Life(Arc<AtomicI64>);

impl Life {
    pub(super) fn of(calls: i64) -> Self {
        Self(Arc::new(AtomicI64::new(calls)))
    }

    /// Before every call: dead processes make none.
    pub(super) fn call(&self) -> io::Result<()> {
        if self.0.fetch_sub(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        Err(io::Error::other("this process is dead"))
    }
}

/// Files as a process sees them.
#[derive(Debug)]
pub(super) struct Mortal {
    pub(super) inner: Arc<dyn Files>,
    pub(super) life: Life,
}

impl Files for Mortal {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        self.life.call()?;
        let output = self.inner.create(path)?;
        Ok(Box::new(MortalOutput { output, life: self.life.clone() }))
    }

    fn link(&self, path: &Path, name: &Path) -> io::Result<()> {
        self.life.call()?;
        self.inner.link(path, name)
    }

    fn rename(&self, path: &Path, name: &Path) -> io::Result<()> {
        self.life.call()?;
        self.inner.rename(path, name)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.life.call()?;
        self.inner.remove(path)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.life.call()?;
        self.inner.make_folder(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.life.call()?;
        self.inner.remove_folder(path)
    }

    fn is_link(&self, path: &Path) -> bool {
        self.inner.is_link(path)
    }

    fn folder(&self, path: &Path) -> Option<Folder> {
        self.inner.folder(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.life.call()?;
        self.inner.list(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.life.call()?;
        self.inner.sync_folder(path)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.life.call()?;
        self.inner.read(path)
    }

    fn open(&self, path: &Path) -> io::Result<Near> {
        self.life.call()?;
        self.inner.open(path)
    }

    fn lock(&self, path: &Path, is_shared: bool) -> io::Result<Option<Box<dyn Any + Send>>> {
        self.life.call()?;
        self.inner.lock(path, is_shared)
    }
}

#[derive(Debug)]
struct MortalOutput {
    output: Box<dyn Output>,
    life: Life,
}

impl Output for MortalOutput {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.life.call()?;
        self.output.write_at(bytes, offset)
    }

    fn expect(&self, len: u64) {
        if self.life.call().is_ok() {
            self.output.expect(len);
        }
    }

    fn send(&self, range: Range<u64>) {
        if self.life.call().is_ok() {
            self.output.send(range);
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.life.call()?;
        self.output.sync()
    }
}
