//! A daemon for tests and benches, on threads of its own.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use tempfile::TempDir;
use tokio::sync::oneshot;
use tssd_store::DaemonOptions;
use tssd_store::blocking::{Daemon, Store};

/// A daemon, which ends with this.
pub struct Served {
    folder: TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// A daemon that keeps one version and takes at most so many bytes of memory.
    pub fn new(memory_limit: u64) -> Self {
        Self::with(memory_limit, None)
    }

    /// The same, which keeps in a directory what must last.
    pub fn over(root: &Path) -> Self {
        Self::with(1 << 30, Some(root.to_owned()))
    }

    fn with(memory_limit: u64, root: Option<PathBuf>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (stop, stopped) = oneshot::channel();
        let daemon = Daemon::bind(DaemonOptions {
            socket: folder.path().join("socket"),
            root,
            keep: NonZeroU32::MIN,
            memory_limit,
            allow_uids: Vec::new(),
        });
        let daemon = daemon.unwrap();
        let thread = thread::spawn(move || daemon.serve(stopped).unwrap());
        Self { folder, stop: Some(stop), thread: Some(thread) }
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// A store over a connection of its own.
    pub fn connect(&self) -> Store {
        Store::connect(&self.url()).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the daemon ends well");
        }
    }
}
