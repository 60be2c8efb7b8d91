//! What happens to a daemon and its clients: they are killed, stopped, delayed and cut off.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_tests::dice::Dice;
use tssd_tests::growth::Growth;

use super::clients::{CLIENTS, Clients};
use super::history::{Operation, now};
use super::home::Home;
use super::object::retain;
use super::processes::Serve;
use super::proxy::Proxy;

/// What was done to them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) clients_killed: u64,
    pub(crate) daemons_killed: u64,
    pub(crate) servers_killed: u64,
    pub(crate) clients_stopped: u64,
    pub(crate) daemons_stopped: u64,
    pub(crate) connections_cut: u64,
    pub(crate) delays: u64,
}

/// A daemon over a directory, and its clients, at its socket and through the proxy by turns.
pub(crate) struct Stage {
    folder: TempDir,
    serve: Option<Serve>,
    proxy: Proxy,
    clients: Clients,
    /// When daemons were dead.
    ends: Vec<u64>,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("root")).unwrap();
        let serve = Serve::over(&folder.path().join("root"));
        retain(&serve.connect()).unwrap();
        let proxy = Proxy::before(serve.address);
        let url = |place| url(&serve, &proxy, place);
        let clients = Clients::start(Home::Daemon, Vec::new(), folder.path(), url);
        Self { folder, serve: Some(serve), proxy, clients, ends: Vec::new() }
    }

    fn serve(&self) -> &Serve {
        self.serve.as_ref().unwrap()
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
                    let url = url(self.serve(), &self.proxy, place);
                    self.clients.kill(place, url);
                    faults.clients_killed += 1;
                }
                4..7 => {
                    self.clients.stop(place, dice);
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
        let serve = Serve::over(&self.folder.path().join("root"));
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
        self.clients.end();
        self.end_life();
        (self.clients.operations(), self.ends)
    }
}

/// Where a client in a place finds a daemon.
pub(crate) fn url(serve: &Serve, proxy: &Proxy, place: usize) -> String {
    if place % 2 == 1 { proxy.url() } else { serve.url() }
}
