//! Daemons as processes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tssd_store::blocking::Store;

use super::binary;

/// `tssd serve` as a process.
pub struct Serve {
    /// The process.
    pub process: Child,
    /// Where it is reached.
    pub url: String,
    /// The line that it said.
    pub said: String,
}

impl Serve {
    /// Starts one whose socket is in a folder, and waits until it serves.
    ///
    /// # Panics
    ///
    /// If it does not.
    pub fn start(folder: &Path, args: &[&str]) -> Self {
        Self::under(&[], folder, &[&["--memory-limit", "256MB"], args].concat())
    }

    /// The same, started by another program, which becomes it.
    ///
    /// # Panics
    ///
    /// If it does not serve.
    pub fn under(by: &[&str], folder: &Path, args: &[&str]) -> Self {
        let socket = folder.join("socket");
        let binary = binary();
        let words = [by, &[binary.to_str().unwrap()]].concat();
        let mut process = Command::new(words[0])
            .args(&words[1..])
            .arg("serve")
            .arg("--socket")
            .arg(&socket)
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("serving"), "{line}");
        Self { process, url: format!("unix:{}", socket.display()), said: line }
    }

    /// A store over a connection of its own.
    pub fn connect(&self) -> Store {
        Store::connect(&self.url).unwrap()
    }

    /// How many descriptors it has open.
    fn descriptors(&self) -> u64 {
        let folder = format!("/proc/{}/fd", self.process.id());
        std::fs::read_dir(folder).unwrap().count() as u64
    }

    /// What it has in memory, shared memory included, in bytes.
    pub fn resident(&self) -> u64 {
        let status = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
    }

    /// Descriptors beyond those of segments when nobody but this process is connected.
    pub fn settled(&self, store: &Store) -> u64 {
        self.at_rest(store, |_| true)
    }

    /// Nothing has leaked: there are as many as there were. What the daemon still does for those
    /// who are gone, such as a file that it reads, may take a moment.
    pub fn settles_at(&self, descriptors: u64, store: &Store) {
        self.at_rest(store, |now| now == descriptors);
    }

    fn at_rest(&self, store: &Store, is_settled: impl Fn(u64) -> bool) -> u64 {
        let mut last = String::new();
        for _ in 0..2000 {
            let status = store.status().unwrap();
            let memory = &status.memory;
            let others = self.descriptors().saturating_sub(memory.segments);
            if status.peers.len() == 1
                && status.leases.iter().all(|lease| lease.pid == status.pid)
                && memory.retired == 0
                && is_settled(others)
            {
                return others;
            }
            last = format!("{others} descriptors, {status:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("it never comes to rest: {last}");
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        send(&self.process, signal);
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}

/// Sends a process a signal.
pub fn send(process: &Child, signal: Signal) {
    let pid = Pid::from_raw(process.id().cast_signed()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Kills a process that may have ended.
pub fn end(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}
