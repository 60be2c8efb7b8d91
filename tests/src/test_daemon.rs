//! A daemon for tests and benches, on threads of this process.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use tempfile::TempDir;
use tokio::sync::oneshot;
use tssd_store::blocking::{Daemon, Store};
use tssd_store::{Credentials, DaemonOptions};

/// A daemon. It ends on drop.
pub struct TestDaemon {
    folder: TempDir,
    metrics: SocketAddr,
    address: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TestDaemon {
    /// Starts a daemon that keeps one version, with a memory limit in bytes.
    pub fn new(memory_limit: u64) -> Self {
        Self::with_limit_and_root(memory_limit, None)
    }

    /// Starts a daemon with a directory for durable versions.
    pub fn with_root(root: &Path) -> Self {
        Self::with_limit_and_root(1 << 30, Some(root.to_owned()))
    }

    /// Starts a daemon with TLS credentials.
    pub fn with_credentials(credentials: Credentials) -> Self {
        Self::with_options(1 << 30, |options| options.credentials = Some(credentials))
    }

    /// Starts a daemon with another daemon as its controller.
    pub fn with_controller(controller: &Self) -> Self {
        Self::with_options(1 << 30, |options| options.controller = Some(controller.address.clone()))
    }

    fn with_limit_and_root(memory_limit: u64, root: Option<PathBuf>) -> Self {
        Self::with_options(memory_limit, |options| options.root = root)
    }

    /// Starts a daemon with more options.
    pub fn with_options(memory_limit: u64, configure: impl FnOnce(&mut DaemonOptions)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (stop, stopped) = oneshot::channel();
        let mut options = DaemonOptions::for_socket(folder.path().join("socket"), memory_limit);
        options.metrics = Some((Ipv4Addr::LOCALHOST, 0).into());
        options.listen = Some((Ipv4Addr::LOCALHOST, 0).into());
        configure(&mut options);
        let daemon = Daemon::bind(options).unwrap();
        let (metrics, address) = (daemon.metrics().unwrap(), daemon.address().unwrap());
        let thread = thread::spawn(move || daemon.serve(stopped).unwrap());
        Self { folder, metrics, address, stop: Some(stop), thread: Some(thread) }
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Returns the address of its metrics (HTTP).
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics
    }

    /// Returns the value of a metric, by its name and labels.
    pub fn metric(&self, name: &str) -> f64 {
        let mut stream = TcpStream::connect(self.metrics).unwrap();
        let request = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
    }

    /// Returns the URL of its socket.
    pub fn url(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// Returns its TCP address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects over TCP, without shared memory.
    pub fn connect_tcp(&self) -> Store {
        Store::connect(&self.address).unwrap()
    }

    /// Connects to the socket, on a new connection.
    pub fn connect(&self) -> Store {
        Store::connect(&self.url()).unwrap()
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the daemon thread panicked");
        }
    }
}
