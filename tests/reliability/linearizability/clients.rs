//! The client processes of a store, in numbered slots.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use tssd_tests::rng::SeededRng;

use super::client::ClientConfig;
use super::history::{Operation, parse_log};
use super::processes::{Process, spawn_client};
use crate::linearizability::ledger_storage::LedgerStorage;

/// Number of slots.
pub(crate) const CLIENTS: usize = 6;

/// Client processes that make calls and log them.
pub(crate) struct Clients {
    home: LedgerStorage,
    environment: Vec<(String, String)>,
    log: PathBuf,
    processes: Vec<Process>,
    /// Number of processes started so far.
    started: u32,
}

impl Clients {
    /// Starts the clients. `url` returns the address of the store for each slot.
    pub(crate) fn start(
        home: LedgerStorage,
        environment: Vec<(String, String)>,
        folder: &Path,
        url: impl Fn(usize) -> String,
    ) -> Self {
        let log = folder.join("log");
        std::fs::create_dir(&log).unwrap();
        let mut clients = Self { home, environment, log, processes: Vec::new(), started: 0 };
        for slot in 0..CLIENTS {
            let client = clients.client(slot, url(slot));
            clients.processes.push(client);
        }
        clients
    }

    fn client(&mut self, slot: usize, url: String) -> Process {
        self.started += 1;
        let (number, writer) = (self.started, u32::try_from(slot).unwrap());
        let (home, folder) = (self.home, self.log.clone());
        let (environment, threads) = (self.environment.clone(), home.threads());
        spawn_client(&ClientConfig { url, home, environment, folder, number, threads, writer })
    }

    /// Kills the client in a slot and starts another one in it.
    pub(crate) fn kill(&mut self, slot: usize, url: String) {
        self.processes.remove(slot);
        let successor = self.client(slot, url);
        self.processes.insert(slot, successor);
    }

    /// Stops the client in a slot for a while.
    pub(crate) fn stop(&self, slot: usize, rng: &mut SeededRng) {
        self.processes[slot].signal(Signal::STOP);
        rng.sleep_below(200);
        self.processes[slot].signal(Signal::CONT);
    }

    /// Kills all clients.
    pub(crate) fn kill_all(&mut self) {
        assert!(self.processes.iter_mut().all(Process::is_running), "a client has failed");
        self.processes.clear();
    }

    /// Returns what all threads of all clients have logged.
    pub(crate) fn operations(&self) -> Vec<Operation> {
        let files = std::fs::read_dir(&self.log).unwrap();
        let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        texts.flat_map(|text| parse_log(&text)).collect()
    }
}
