//! Requests of a client while 1,000 connections send invalid, incomplete or oversized frames.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tssd_format::{StateDict, Tensor};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, PutOptions};
use tssd_tests::bench::{Bench, LastResult, Race, Runner, Target};
use tssd_tests::test_daemon::TestDaemon;

use crate::key;

const CONNECTIONS: usize = 1000;

const ROUNDS: usize = 31;

/// Puts and gets per round.
const PAIRS: usize = 20;

/// Races puts and gets of a small state dict with and without the attack.
pub(crate) fn requests_under_attack(bench: &mut Bench) {
    const PEACE: &str = "in peace";
    let (idle, attacked) = (TestDaemon::new(1 << 30), TestDaemon::new(1 << 30));
    let (idle_store, attacked_store) = (idle.connect(), attacked.connect());
    let dict = &small();
    let is_on = &AtomicBool::new(false);
    let is_over = &AtomicBool::new(false);
    let socket = &attacked.socket();
    let lasts = [const { LastResult::new() }; 2];
    let [last, in_peace] = &lasts;
    thread::scope(|scope| {
        let attack = scope.spawn(move || attack(socket, is_on, is_over));
        let what = format!("{PAIRS} puts and gets, and {CONNECTIONS} hostile connections");
        bench.race(
            Race::new("attacked", &what, ROUNDS)
                .with_runner(
                    Runner::ours("tssd", || {
                        last.replace_with(|| put_and_get(&attacked_store, dict));
                    })
                    .with_setup(|| is_on.store(true, Ordering::Relaxed))
                    .with_teardown(|| is_on.store(false, Ordering::Relaxed))
                    .with_target(Target::Speed(0.5, PEACE)),
                )
                .with_runner(Runner::limit(PEACE, || {
                    in_peace.replace_with(|| put_and_get(&idle_store, dict));
                })),
        );
        assert!(lasts.iter().all(|last| last.take() == *dict), "what is got is what was put");
        is_over.store(true, Ordering::Relaxed);
        #[expect(clippy::cast_precision_loss, reason = "there are not that many")]
        let reconnects = attack.join().unwrap() as f64;
        bench.record_counts(
            "the attack",
            &[("connections that were ended and made anew", reconnects)],
        );
    });
}

fn small() -> StateDict {
    let mut dict = StateDict::new();
    for number in 0..20_u32 {
        let name = format!("layers.{number}");
        dict.insert(name, Tensor::from_slice(&vec![number; 64 << 10], &[64 << 10]).unwrap());
    }
    dict
}

/// Puts and gets [`PAIRS`] times.
///
/// Returns the last result. The other results are dropped before the next put.
fn put_and_get(store: &Store, dict: &StateDict) -> StateDict {
    let pair = || {
        store.put_state_dict(&key(), dict, &PutOptions::default()).unwrap();
        store.get_state_dict(&key(), &GetOptions::default()).unwrap().0
    };
    (1..PAIRS).for_each(|_| drop(pair()));
    pair()
}

/// Sends the next bytes on every connection every 100 ms, and replaces closed connections.
///
/// Returns the number of replaced connections.
fn attack(socket: &Path, is_on: &AtomicBool, is_over: &AtomicBool) -> usize {
    let connect = || {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_nonblocking(true).unwrap();
        (stream, 0)
    };
    let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect();
    let mut reconnects = 0;
    while !is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(100));
        for (number, connection) in connections.iter_mut().enumerate() {
            if !is_on.load(Ordering::Relaxed) {
                break;
            }
            let (stream, total_sent) = connection;
            let next = &message(number)[*total_sent..];
            let next = &next[..next.len().min(1 + number % 7)];
            let is_open = match stream.write(next) {
                Ok(sent) => {
                    *total_sent += sent;
                    !matches!(stream.read(&mut [0; 64]), Ok(0))
                }
                Err(error) => error.kind() == ErrorKind::WouldBlock,
            };
            if !is_open {
                *connection = connect();
                reconnects += 1;
            }
        }
    }
    reconnects
}

/// Returns the bytes that a connection sends.
fn message(number: usize) -> &'static [u8] {
    match number % 4 {
        0 => b"GET / HTTP/1.1\r\nHost: daemon\r\n\r\n",
        // A head of 4 GiB.
        1 => b"TSSD\x01\0\0\0\xFF\xFF\xFF\xFF\0\0\0\0\x01\0\0\0\0\0\0\0",
        // An incomplete header.
        2 => b"TSSD\x01\0\0\0\x10\0\0\0",
        // A request before the hello.
        _ => b"TSSD\x01\0\0\0\x0F\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0{\"op\":\"status\"}",
    }
}
