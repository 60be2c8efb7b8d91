//! A get from a daemon that shares no memory, against a plain copy through sockets: two processes.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;

use tssd_store::GetOptions;
use tssd_store::blocking::Store;
use tssd_tests::bench::{Bench, Model, Race, Runner, Target, on_cores};
use tssd_tests::served::Served;

use crate::copies::{LIMIT, get_into, put_one};

/// What a child process is: see [`is_child`].
const CHILD: &str = "TSSD_BENCH_CHILD";

/// A new version each time, into the caller's tensors, with as many connections as cores.
pub(crate) fn over_loopback(bench: &mut Bench) {
    const PLAIN: &str = "socket copy";
    let cores = 2;
    for (model, rounds) in [(Model::four_hundred(), 11), (Model::of(&bench.options), 7)] {
        let model = &model;
        on_cores(cores, || {
            let (copier, daemon) = (Peer::start("copy"), Peer::start("serve"));
            let mut copy = Copy::new(&copier.said[0], cores, model.bytes);
            let writer = Store::connect(&daemon.said[0]).unwrap();
            let reader = Store::connect(&daemon.said[1]).unwrap();
            let memory = RefCell::new(vec![1_u8; usize::try_from(model.bytes).unwrap()]);
            let get = |unverified| {
                let options = GetOptions { unverified, ..GetOptions::default() };
                get_into(&reader, model, &mut memory.borrow_mut(), &options);
            };
            let renew = || put_one(&writer, model);
            (0..3).for_each(|_| {
                renew();
                get(false);
            });
            let what = "get in place from another process over loopback, a new version each time, verified";
            bench.race(
                Race::new("pull", what, rounds)
                    .of(model)
                    .with(
                        Runner::ours("tssd", || get(false))
                            .before(renew)
                            .target(Target::Speed(0.8, PLAIN)),
                    )
                    .with(Runner::also("tssd, not verified", || get(true)).before(renew))
                    .with(Runner::limit(PLAIN, || copy.run())),
            );
            model.expect_bytes(&memory.borrow());
        });
    }
}

/// Whether this process is a child: then it has done its part, and ends.
pub(crate) fn is_child() -> bool {
    match std::env::var(CHILD).as_deref() {
        Ok("copy") => send_forever(),
        Ok("serve") => {
            let served = Served::new(LIMIT);
            say(&[&served.url(), served.address()]);
            until_the_end();
        }
        _ => return false,
    }
    true
}

/// Sends as many bytes as it is asked for, on every connection.
fn send_forever() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    say(&[&listener.local_addr().unwrap().to_string()]);
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || send(stream.unwrap()));
        }
    });
    until_the_end();
}

fn send(mut stream: TcpStream) {
    let mut asked = [0; 8];
    let mut bytes = Vec::new();
    while stream.read_exact(&mut asked).is_ok() {
        bytes.resize(usize::try_from(u64::from_le_bytes(asked)).unwrap(), 1);
        stream.write_all(&bytes).unwrap();
    }
}

#[expect(clippy::print_stdout, reason = "the parent reads it")]
fn say(words: &[&str]) {
    println!("{}", words.join(" "));
}

/// Until the parent is gone, or wants no more.
fn until_the_end() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// A child of this process, and what it has said. It ends with this.
struct Peer {
    child: Child,
    said: Vec<String>,
}

impl Peer {
    fn start(what: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(CHILD, what).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { child, said: line.split_whitespace().map(str::to_owned).collect() }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

/// Memory, and a connection for each part of it.
struct Copy {
    memory: Vec<u8>,
    streams: Vec<TcpStream>,
}

impl Copy {
    fn new(address: &str, connections: usize, bytes: u64) -> Self {
        let streams = (0..connections).map(|_| TcpStream::connect(address).unwrap()).collect();
        Self { memory: vec![1; usize::try_from(bytes).unwrap()], streams }
    }

    fn run(&mut self) {
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
