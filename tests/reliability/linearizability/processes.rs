//! A daemon and its clients as processes.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tssd_store::blocking::Store;
use tssd_tests::command::binary;

use super::client::{CONFIG_VAR, ClientConfig};

/// A process. Killed on drop.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Returns whether the process has not ended on its own.
    pub(crate) fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `tssd serve` process with a socket and a TCP address.
pub(crate) struct LinearDaemon {
    pub(crate) process: Process,
    pub(crate) socket: PathBuf,
    pub(crate) address: SocketAddr,
}

impl LinearDaemon {
    /// Starts a daemon with a directory.
    pub(crate) fn with_root(folder: &Path) -> Self {
        Self::start(folder, "--root", folder.to_str().unwrap())
    }

    /// Starts a daemon whose socket is in `folder`, with one more option.
    pub(crate) fn start(folder: &Path, option: &str, value: &str) -> Self {
        let socket = folder.join("socket");
        let mut process = Command::new(binary())
            .args(["serve", "--memory-limit", "512MB", "--listen", "127.0.0.1:0", option, value])
            .arg("--socket")
            .arg(&socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("tcp://").nth(1).and_then(|rest| rest.trim().parse().ok());
        let address = address.unwrap_or_else(|| panic!("no address in `{line}`"));
        Self { process: Process(process), socket, address }
    }

    pub(crate) fn url(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    pub(crate) fn connect(&self) -> Store {
        Store::connect(&self.url()).unwrap()
    }
}

/// Starts this program as a client.
pub(crate) fn spawn_client(config: &ClientConfig) -> Process {
    let module = module_path!().split_once("::").unwrap().1;
    let test = module.replace("processes", "client::child");
    let child = Command::new(std::env::current_exe().unwrap())
        .args([&test, "--exact", "--ignored", "--nocapture"])
        .env(CONFIG_VAR, serde_json::to_string(config).unwrap())
        .envs(config.environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn();
    Process(child.unwrap())
}
