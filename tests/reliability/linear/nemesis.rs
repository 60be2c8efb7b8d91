//! What happens to a daemon and its clients: they are killed, stopped, delayed and cut off.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_tests::dice::Dice;
use tssd_tests::growth::Growth;

use super::client::Told;
use super::history::{Operation, now, read};
use super::object::retain;
use super::processes::{Process, Serve, client};
use super::proxy::Proxy;

/// How many clients are connected, to the socket and through the proxy by turns.
const CLIENTS: usize = 6;

/// How many threads each has.
const THREADS: u32 = 4;

/// What was done to them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) clients_killed: u64,
    pub(crate) daemons_killed: u64,
    pub(crate) clients_stopped: u64,
    pub(crate) daemons_stopped: u64,
    pub(crate) connections_cut: u64,
    pub(crate) delays: u64,
}

/// A daemon over a directory, and its clients.
pub(crate) struct Stage {
    folder: TempDir,
    serve: Option<Serve>,
    proxy: Proxy,
    clients: Vec<Process>,
    /// When daemons were dead.
    ends: Vec<u64>,
    /// How many clients there have been.
    started: u32,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("root")).unwrap();
        std::fs::create_dir(folder.path().join("log")).unwrap();
        let serve = Serve::start(&folder.path().join("root"));
        retain(&serve.connect()).unwrap();
        let proxy = Proxy::before(serve.address);
        let (clients, ends) = (Vec::new(), Vec::new());
        let mut stage = Self { folder, serve: Some(serve), proxy, clients, ends, started: 0 };
        stage.clients = (0..CLIENTS).map(|place| stage.client(place)).collect();
        stage
    }

    fn serve(&self) -> &Serve {
        self.serve.as_ref().unwrap()
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// A new client in a place.
    fn client(&mut self, place: usize) -> Process {
        let is_far = place % 2 == 1;
        let url = if is_far { self.proxy.url() } else { self.serve().url() };
        self.started += 1;
        let (number, writer) = (self.started, u32::try_from(place).unwrap());
        client(&Told { url, folder: self.log(), number, threads: THREADS, writer })
    }

    /// Does something to them for so long, every now and then; maybe nobody is killed: whoever is
    /// leaves labels that hold versions for good, and the daemon grows by them.
    pub(crate) fn torment(
        &mut self,
        dice: &mut Dice,
        span: Duration,
        kills: bool,
        growth: &mut Growth,
    ) -> Faults {
        let mut faults = Faults::default();
        let until = Instant::now() + span;
        growth.begin();
        while Instant::now() < until {
            dice.pause(150);
            growth.sample(self.serve().process.id());
            let place = usize::try_from(dice.below(CLIENTS as u64)).unwrap();
            match dice.below(16) {
                0..4 if kills => {
                    // It dies before its successor is there.
                    self.clients.remove(place);
                    let successor = self.client(place);
                    self.clients.insert(place, successor);
                    faults.clients_killed += 1;
                }
                4..7 => {
                    self.clients[place].signal(Signal::STOP);
                    dice.pause(200);
                    self.clients[place].signal(Signal::CONT);
                    faults.clients_stopped += 1;
                }
                7..9 => {
                    self.serve().process.signal(Signal::STOP);
                    dice.pause(150);
                    self.serve().process.signal(Signal::CONT);
                    faults.daemons_stopped += 1;
                }
                9 if kills => {
                    self.serve_anew();
                    growth.begin();
                    faults.daemons_killed += 1;
                }
                10..13 => {
                    self.proxy.delay(Duration::from_millis(1 + dice.below(20)));
                    dice.pause(150);
                    self.proxy.delay(Duration::ZERO);
                    faults.delays += 1;
                }
                _ => faults.connections_cut += self.proxy.cut(),
            }
        }
        faults
    }

    fn serve_anew(&mut self) {
        self.end_life();
        let serve = Serve::start(&self.folder.path().join("root"));
        self.proxy.turn_to(serve.address);
        // Who was let through in between has come to nobody.
        self.proxy.cut();
        self.serve = Some(serve);
    }

    fn end_life(&mut self) {
        drop(self.serve.take());
        self.ends.push(now());
    }

    /// Ends everything; gives what was asked, and the moments at which daemons were dead.
    pub(crate) fn end(mut self) -> (Vec<Operation>, Vec<u64>) {
        assert!(self.clients.iter_mut().all(Process::is_running), "a client has failed");
        self.clients.clear();
        self.end_life();
        (operations(&self.log()), self.ends)
    }
}

/// What all threads of all clients have written down.
fn operations(folder: &Path) -> Vec<Operation> {
    let files = std::fs::read_dir(folder).unwrap();
    let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    texts.flat_map(|text| read(&text)).collect()
}
