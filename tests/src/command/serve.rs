//! Daemons as processes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tssd_store::blocking::Store;

use super::binary;

/// A `tssd serve` process. Killed on drop.
pub struct DaemonProcess {
    /// The process.
    pub process: Child,
    /// URL of its socket.
    pub url: String,
    /// The line that it has printed after its start.
    pub startup_line: String,
}

impl DaemonProcess {
    /// Starts a daemon whose socket is in a directory, and waits until it serves.
    ///
    /// # Panics
    ///
    /// If it does not serve.
    pub fn start(folder: &Path, args: &[&str]) -> Self {
        Self::start_by(&[], folder, &[&["--memory-limit", "256MB"], args].concat())
    }

    /// Starts a daemon through another program, which executes it, and waits until it serves.
    ///
    /// # Panics
    ///
    /// If it does not serve.
    pub fn start_by(prefix: &[&str], folder: &Path, args: &[&str]) -> Self {
        let socket = folder.join("socket");
        let binary = binary();
        let command_line = [prefix, &[binary.to_str().unwrap()]].concat();
        let mut process = Command::new(command_line[0])
            .args(&command_line[1..])
            .arg("serve")
            .arg("--socket")
            .arg(&socket)
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut startup_line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut startup_line).unwrap();
        assert!(startup_line.contains("serving"), "{startup_line}");
        Self { process, url: format!("unix:{}", socket.display()), startup_line }
    }

    /// Connects to the socket, on a new connection.
    pub fn connect(&self) -> Store {
        Store::connect(&self.url).unwrap()
    }

    /// Returns the number of open descriptors.
    fn descriptors(&self) -> u64 {
        let folder = format!("/proc/{}/fd", self.process.id());
        std::fs::read_dir(folder).unwrap().count() as u64
    }

    /// Returns the resident memory in bytes, shared memory included.
    pub fn resident_bytes(&self) -> u64 {
        let status = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
    }

    /// Waits until only this process is connected. Returns the number of descriptors beyond segments.
    pub fn idle_descriptors(&self, store: &Store) -> u64 {
        self.wait_until_idle(store, |_| true)
    }

    /// Waits until the number of descriptors beyond segments is this again.
    ///
    /// The daemon may still work for clients that have disconnected, for example read a file.
    pub fn assert_idle_descriptors(&self, descriptors: u64, store: &Store) {
        self.wait_until_idle(store, |now| now == descriptors);
    }

    fn wait_until_idle(&self, store: &Store, is_settled: impl Fn(u64) -> bool) -> u64 {
        let mut last = String::new();
        for _ in 0..2000 {
            let status = store.status().unwrap();
            let memory = &status.memory;
            let descriptors = self.descriptors().saturating_sub(memory.segments);
            if status.peers.len() == 1
                && status.leases.iter().all(|lease| lease.pid == status.pid)
                && memory.retired_bytes == 0
                && is_settled(descriptors)
            {
                return descriptors;
            }
            last = format!("{descriptors} descriptors, {status:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("it never comes to rest: {last}");
    }

    /// Sends a signal to the daemon.
    pub fn signal(&self, signal: Signal) {
        send_signal(&self.process, signal);
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        kill_and_wait(&mut self.process);
    }
}

/// Sends a signal to a process.
pub fn send_signal(process: &Child, signal: Signal) {
    let pid = Pid::from_raw(process.id().cast_signed()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Kills a process, which may have ended already, and waits for its end.
pub fn kill_and_wait(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}
