//! Gets from a daemon without shared memory, compared with plain copies through sockets.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use tssd_store::GetOptions;
use tssd_store::blocking::Store;
use tssd_tests::bench::peer::{self, Peer};
use tssd_tests::bench::{Bench, Model, Race, Runner, Target, run_on_cores};
use tssd_tests::test_daemon::TestDaemon;

use crate::copies::{LIMIT, get_into, put_one};

/// Gets a new version each time into the tensors of the caller.
///
/// The limit has as many connections as cores.
pub(crate) fn pull_over_loopback(bench: &mut Bench) {
    const PLAIN: &str = "socket copy";
    let cores = 2;
    for (model, rounds) in [(Model::four_hundred(), 5), (Model::from_options(&bench.options), 3)] {
        let model = &model;
        run_on_cores(cores, || {
            let (copier, daemon) = (Peer::start("copy"), Peer::start("serve"));
            let mut copy = SocketCopy::new(&copier.startup_words[0], cores, model.bytes);
            let writer = Store::connect(&daemon.startup_words[0]).unwrap();
            let reader = Store::connect(&daemon.startup_words[1]).unwrap();
            let memory = RefCell::new(vec![1_u8; usize::try_from(model.bytes).unwrap()]);
            let get = |unverified| {
                let options = GetOptions { unverified, ..GetOptions::default() };
                get_into(&reader, model, &mut memory.borrow_mut(), &options);
            };
            let put_next = || put_one(&writer, model);
            (0..3).for_each(|_| {
                put_next();
                get(false);
            });
            let what = "get in place from another process over loopback, a new version each time, verified";
            bench.race(
                Race::new("pull", what, rounds)
                    .with_model(model)
                    .with_runner(
                        Runner::ours("tssd", || get(false))
                            .with_setup(put_next)
                            .with_target(Target::Speed(0.8, PLAIN)),
                    )
                    .with_runner(
                        Runner::variant("tssd, not verified", || get(true)).with_setup(put_next),
                    )
                    .with_runner(Runner::limit(PLAIN, || copy.run())),
            );
            model.assert_bytes_equal(&memory.borrow());
        });
    }
}

/// Runs the role of this process if it is a child. Returns whether it is.
pub(crate) fn run_if_child() -> bool {
    match peer::role().as_deref() {
        Some("copy") => send_forever(),
        Some("serve") => peer::serve_for_parent(TestDaemon::new(LIMIT)),
        _ => return false,
    }
    true
}

/// Sends the requested number of bytes on every connection.
fn send_forever() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    peer::send_to_parent(&[&listener.local_addr().unwrap().to_string()]);
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || send(stream.unwrap()));
        }
    });
    peer::wait_for_parent();
}

fn send(mut stream: TcpStream) {
    let mut requested = [0; 8];
    let mut bytes = Vec::new();
    while stream.read_exact(&mut requested).is_ok() {
        bytes.resize(usize::try_from(u64::from_le_bytes(requested)).unwrap(), 1);
        stream.write_all(&bytes).unwrap();
    }
}

/// A plain copy through sockets into memory, with one connection for each part of the memory.
pub(crate) struct SocketCopy {
    memory: Vec<u8>,
    streams: Vec<TcpStream>,
}

impl SocketCopy {
    pub(crate) fn new(address: &str, connections: usize, bytes: u64) -> Self {
        let streams = (0..connections).map(|_| TcpStream::connect(address).unwrap()).collect();
        Self { memory: vec![1; usize::try_from(bytes).unwrap()], streams }
    }

    pub(crate) fn run(&mut self) {
        let part = self.memory.len().div_ceil(self.streams.len());
        thread::scope(|scope| {
            for (stream, memory) in self.streams.iter_mut().zip(self.memory.chunks_mut(part)) {
                scope.spawn(move || {
                    stream.write_all(&(memory.len() as u64).to_le_bytes()).unwrap();
                    for block in memory.chunks_mut(1 << 20) {
                        stream.read_exact(block).unwrap();
                    }
                });
            }
        });
    }
}
