//! Backends of the stores that the harness runs.
//!
//! A store is in memory, in a directory, behind a daemon of this process, or behind a daemon
//! process that can be killed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tssd_store::Store;
use tssd_tests::command::binary;
use tssd_tests::test_daemon::TestDaemon;

/// Kinds of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BackendKind {
    Memory,
    Directory,
    /// A daemon without a directory, reached over its socket and over TCP.
    Daemon,
    DurableDaemon,
    /// A daemon process with a directory, reached over its socket and over TCP.
    Process,
}

impl BackendKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Directory => "directory",
            Self::Daemon => "daemon",
            Self::DurableDaemon => "lasting daemon",
            Self::Process => "process",
        }
    }

    pub(crate) fn is_daemon(self) -> bool {
        matches!(self, Self::Daemon | Self::DurableDaemon | Self::Process)
    }

    /// Returns whether many sequences share one backend, each with its own keys.
    ///
    /// Starting a daemon takes long.
    pub(crate) fn is_shared(self) -> bool {
        self.is_daemon()
    }
}

/// A store that clients can connect to.
pub(crate) enum Backend {
    Memory(Store),
    Directory(TempDir),
    Daemon { served: TestDaemon, _root: TempDir },
    Process(Process),
}

impl Backend {
    pub(crate) fn start(kind: BackendKind) -> Self {
        match kind {
            BackendKind::Memory => Self::Memory(Store::memory()),
            BackendKind::Directory => Self::Directory(quick_folder()),
            BackendKind::Daemon => {
                Self::Daemon { served: TestDaemon::new(1 << 30), _root: quick_folder() }
            }
            BackendKind::DurableDaemon => {
                let root = quick_folder();
                Self::Daemon { served: TestDaemon::with_root(root.path()), _root: root }
            }
            BackendKind::Process => Self::Process(Process::start(quick_folder())),
        }
    }

    /// Connects a new client. Client 0 of a daemon shares its memory; the others use TCP.
    pub(crate) fn connect(&self, client: usize, runtime: &Runtime) -> Store {
        match self {
            Self::Memory(store) => store.clone(),
            Self::Directory(folder) => Store::directory(folder.path()).unwrap(),
            Self::Daemon { served, .. } => {
                connect_to(runtime, client, &served.url(), served.address())
            }
            Self::Process(process) => {
                connect_to(runtime, client, &process.socket_url, &process.tcp_url)
            }
        }
    }
}

fn connect_to(runtime: &Runtime, client: usize, socket_url: &str, tcp_url: &str) -> Store {
    runtime.block_on(Store::connect(if client == 0 { socket_url } else { tcp_url })).unwrap()
}

/// Creates a directory in memory, if the system has one. The store syncs files often.
fn quick_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.unwrap()
}

/// A `tssd serve` process with a directory.
pub(crate) struct Process {
    child: Child,
    folder: TempDir,
    socket_url: String,
    tcp_url: String,
}

impl Process {
    fn start(folder: TempDir) -> Self {
        let root = folder.path().join("root");
        std::fs::create_dir_all(&root).unwrap();
        let socket = folder.path().join("socket");
        let mut child = Command::new(binary())
            .arg("serve")
            .arg("--socket")
            .arg(&socket)
            .arg("--root")
            .arg(&root)
            .args(["--memory-limit", "256MB", "--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let tcp_url = line.split_whitespace().find_map(|word| {
            let at = word.find("tcp://")?;
            Some(word[at..].trim_end_matches(|end: char| !end.is_ascii_digit()).to_owned())
        });
        let tcp_url = tcp_url.unwrap_or_else(|| panic!("it does not say where it listens: {line}"));
        Self { child, folder, socket_url: format!("unix:{}", socket.display()), tcp_url }
    }

    /// Kills the process after a delay.
    pub(crate) fn kill_after(&self, after: Duration) -> JoinHandle<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        thread::spawn(move || {
            thread::sleep(after);
            kill_process(pid, Signal::KILL).unwrap();
        })
    }

    /// Kills the process and starts another one over the same directory.
    pub(crate) fn restart(self) -> Self {
        let folder = self.stop();
        Self::start(folder)
    }

    fn stop(mut self) -> TempDir {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let folder = TempDir::new_in(self.folder.path().parent().unwrap()).unwrap();
        std::mem::replace(&mut self.folder, folder)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a condition holds that another thread or process establishes.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "{what}: not after {:?}",
            started.elapsed()
        );
        thread::sleep(Duration::from_micros(200));
    }
}
