//! A daemon for tests and benches, on threads of its own.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use tempfile::TempDir;
use tokio::sync::oneshot;
use tssd_store::blocking::{Daemon, Store};
use tssd_store::{Credentials, DaemonOptions};

/// A daemon, which ends with this.
pub struct Served {
    folder: TempDir,
    metrics: SocketAddr,
    address: String,
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

    /// A daemon that proves who it is.
    pub fn proven(credentials: Credentials) -> Self {
        Self::bound(1 << 30, |options| options.credentials = Some(credentials))
    }

    /// A daemon for which another one decides.
    pub fn under(controller: &Self) -> Self {
        Self::bound(1 << 30, |options| options.controller = Some(controller.address.clone()))
    }

    fn with(memory_limit: u64, root: Option<PathBuf>) -> Self {
        Self::bound(memory_limit, |options| options.root = root)
    }

    /// A daemon of which more is said.
    pub fn bound(memory_limit: u64, say: impl FnOnce(&mut DaemonOptions)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (stop, stopped) = oneshot::channel();
        let mut options = DaemonOptions::at(folder.path().join("socket"), memory_limit);
        options.metrics = Some((Ipv4Addr::LOCALHOST, 0).into());
        options.listen = Some((Ipv4Addr::LOCALHOST, 0).into());
        say(&mut options);
        let daemon = Daemon::bind(options).unwrap();
        let (metrics, address) = (daemon.metrics().unwrap(), daemon.address().unwrap());
        let thread = thread::spawn(move || daemon.serve(stopped).unwrap());
        Self { folder, metrics, address, stop: Some(stop), thread: Some(thread) }
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Where it answers over HTTP.
    pub fn metrics(&self) -> SocketAddr {
        self.metrics
    }

    /// What it has counted, by the name of the metric and its labels.
    pub fn metric(&self, name: &str) -> f64 {
        let mut stream = TcpStream::connect(self.metrics).unwrap();
        let request = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// Its address by TCP.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A store over a connection of its own that shares no memory.
    pub fn connect_far(&self) -> Store {
        Store::connect(&self.address).unwrap()
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
