//! Where a store is: in memory, in a directory, at a daemon of this process, or at one of its own that is killed.

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
use tssd_tests::served::Served;

/// The kinds of store that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Memory,
    Directory,
    /// A daemon without a directory, and one with one: reached over its socket and over TCP.
    Daemon,
    LastingDaemon,
    /// A process with a directory, reached so too.
    Process,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Directory => "directory",
            Self::Daemon => "daemon",
            Self::LastingDaemon => "lasting daemon",
            Self::Process => "process",
        }
    }

    pub(crate) fn is_daemon(self) -> bool {
        matches!(self, Self::Daemon | Self::LastingDaemon | Self::Process)
    }

    /// Whether many sequences have one home, each with keys of its own: to start it takes long.
    pub(crate) fn is_shared(self) -> bool {
        self.is_daemon()
    }
}

/// A store that clients can reach.
pub(crate) enum Home {
    Memory(Store),
    Directory(TempDir),
    Daemon { served: Served, _root: TempDir },
    Process(Process),
}

impl Home {
    pub(crate) fn of(kind: Kind) -> Self {
        match kind {
            Kind::Memory => Self::Memory(Store::memory()),
            Kind::Directory => Self::Directory(quick_folder()),
            Kind::Daemon => Self::Daemon { served: Served::new(1 << 30), _root: quick_folder() },
            Kind::LastingDaemon => {
                let root = quick_folder();
                Self::Daemon { served: Served::over(root.path()), _root: root }
            }
            Kind::Process => Self::Process(Process::start(quick_folder())),
        }
    }

    /// A new client: of a daemon, the first one shares its memory and the others do not.
    pub(crate) fn connect(&self, client: usize, runtime: &Runtime) -> Store {
        match self {
            Self::Memory(store) => store.clone(),
            Self::Directory(folder) => Store::directory(folder.path()).unwrap(),
            Self::Daemon { served, .. } => reach(runtime, client, &served.url(), served.address()),
            Self::Process(process) => reach(runtime, client, &process.near, &process.far),
        }
    }
}

fn reach(runtime: &Runtime, client: usize, near: &str, far: &str) -> Store {
    runtime.block_on(Store::connect(if client == 0 { near } else { far })).unwrap()
}

/// A folder in memory, where the system has such: files are synced all the time.
fn quick_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.unwrap()
}

/// `tssd serve` over a directory.
pub(crate) struct Process {
    child: Child,
    folder: TempDir,
    near: String,
    far: String,
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
        let far = line.split_whitespace().find_map(|word| {
            let at = word.find("tcp://")?;
            Some(word[at..].trim_end_matches(|end: char| !end.is_ascii_digit()).to_owned())
        });
        let far = far.unwrap_or_else(|| panic!("it does not say where it listens: {line}"));
        Self { child, folder, near: format!("unix:{}", socket.display()), far }
    }

    /// It dies, so long from now.
    pub(crate) fn kill_after(&self, after: Duration) -> JoinHandle<()> {
        let process = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        thread::spawn(move || {
            thread::sleep(after);
            kill_process(process, Signal::KILL).unwrap();
        })
    }

    /// It dies, and another one comes in its place.
    pub(crate) fn kill(self) -> Self {
        let folder = self.end();
        Self::start(folder)
    }

    fn end(mut self) -> TempDir {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let folder = TempDir::new_in(self.folder.path().parent().unwrap()).unwrap();
        std::mem::replace(&mut self.folder, folder)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something is so that somebody else does.
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
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
