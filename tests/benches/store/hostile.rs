//! Honest requests while a thousand connections say nonsense, half of something, or too much.

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
use tssd_tests::served::TestDaemon;

use crate::key;

const CONNECTIONS: usize = 1000;

/// Rounds of so many puts and gets each.
const ROUNDS: usize = 31;
const PAIRS: usize = 20;

/// A put and a get of a small state dict, with the attack and without.
pub(crate) fn attacked(bench: &mut Bench) {
    const PEACE: &str = "in peace";
    let (quiet, attacked) = (TestDaemon::new(1 << 30), TestDaemon::new(1 << 30));
    let (one, other) = (quiet.connect(), attacked.connect());
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
                    Runner::ours("tssd", || last.replace_with(|| honest(&other, dict)))
                        .with_setup(|| is_on.store(true, Ordering::Relaxed))
                        .with_teardown(|| is_on.store(false, Ordering::Relaxed))
                        .with_target(Target::Speed(0.5, PEACE)),
                )
                .with_runner(Runner::limit(PEACE, || in_peace.replace_with(|| honest(&one, dict)))),
        );
        assert!(lasts.iter().all(|last| last.take() == *dict), "what is got is what was put");
        is_over.store(true, Ordering::Relaxed);
        #[expect(clippy::cast_precision_loss, reason = "there are not that many")]
        let made = attack.join().unwrap() as f64;
        bench.record_counts("the attack", &[("connections that were ended and made anew", made)]);
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

/// What the last get has found: that of each other one is dropped before the next put.
fn honest(store: &Store, dict: &StateDict) -> StateDict {
    let pair = || {
        store.put_state_dict(&key(), dict, &PutOptions::default()).unwrap();
        store.get_state_dict(&key(), &GetOptions::default()).unwrap().0
    };
    (1..PAIRS).for_each(|_| drop(pair()));
    pair()
}

/// Says the next thing on every connection, again and again; those that were ended are made anew. Returns
/// how many.
fn attack(socket: &Path, is_on: &AtomicBool, is_over: &AtomicBool) -> usize {
    let connect = || {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_nonblocking(true).unwrap();
        (stream, 0)
    };
    let mut all: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect();
    let mut made = 0;
    while !is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(100));
        for (place, each) in all.iter_mut().enumerate() {
            if !is_on.load(Ordering::Relaxed) {
                break;
            }
            let (stream, said) = each;
            let next = &words(place)[*said..];
            let next = &next[..next.len().min(1 + place % 7)];
            let is_open = match stream.write(next) {
                Ok(sent) => {
                    *said += sent;
                    !matches!(stream.read(&mut [0; 64]), Ok(0))
                }
                Err(error) => error.kind() == ErrorKind::WouldBlock,
            };
            if !is_open {
                *each = connect();
                made += 1;
            }
        }
    }
    made
}

/// What a connection says.
fn words(place: usize) -> &'static [u8] {
    match place % 4 {
        0 => b"GET / HTTP/1.1\r\nHost: daemon\r\n\r\n",
        // A head of 4 GiB.
        1 => b"TSSD\x01\0\0\0\xFF\xFF\xFF\xFF\0\0\0\0\x01\0\0\0\0\0\0\0",
        // Half of a header.
        2 => b"TSSD\x01\0\0\0\x10\0\0\0",
        // A head that is no hello.
        _ => b"TSSD\x01\0\0\0\x0F\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0{\"op\":\"status\"}",
    }
}
