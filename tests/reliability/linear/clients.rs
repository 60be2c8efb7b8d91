//! All clients of a store, each in a place.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use tssd_tests::dice::Dice;

use super::client::Told;
use super::history::{Operation, read};
use super::home::Home;
use super::processes::{Process, client};

/// How many there are.
pub(crate) const CLIENTS: usize = 6;

/// Processes that ask, and write down what.
pub(crate) struct Clients {
    home: Home,
    environment: Vec<(String, String)>,
    log: PathBuf,
    processes: Vec<Process>,
    /// How many there have been.
    started: u32,
}

impl Clients {
    /// Of a store that each reaches at an address of its own.
    pub(crate) fn start(
        home: Home,
        environment: Vec<(String, String)>,
        folder: &Path,
        url: impl Fn(usize) -> String,
    ) -> Self {
        let log = folder.join("log");
        std::fs::create_dir(&log).unwrap();
        let mut clients = Self { home, environment, log, processes: Vec::new(), started: 0 };
        for place in 0..CLIENTS {
            let client = clients.client(place, url(place));
            clients.processes.push(client);
        }
        clients
    }

    fn client(&mut self, place: usize, url: String) -> Process {
        self.started += 1;
        let (number, writer) = (self.started, u32::try_from(place).unwrap());
        let (home, folder) = (self.home, self.log.clone());
        let (environment, threads) = (self.environment.clone(), home.threads());
        client(&Told { url, home, environment, folder, number, threads, writer })
    }

    /// Kills one. It dies before its successor is there.
    pub(crate) fn kill(&mut self, place: usize, url: String) {
        self.processes.remove(place);
        let successor = self.client(place, url);
        self.processes.insert(place, successor);
    }

    /// Stops one for a while.
    pub(crate) fn stop(&self, place: usize, dice: &mut Dice) {
        self.processes[place].signal(Signal::STOP);
        dice.pause(200);
        self.processes[place].signal(Signal::CONT);
    }

    /// Kills all.
    pub(crate) fn end(&mut self) {
        assert!(self.processes.iter_mut().all(Process::is_running), "a client has failed");
        self.processes.clear();
    }

    /// What all threads of all clients have written down.
    pub(crate) fn operations(&self) -> Vec<Operation> {
        let files = std::fs::read_dir(&self.log).unwrap();
        let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        texts.flat_map(|text| read(&text)).collect()
    }
}
