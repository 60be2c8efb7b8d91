//! Faults of hosts that fetch a version from each other: no other host fails, and each gets all bytes.

use std::net::TcpListener;
use std::process::Command;
use std::sync::Barrier;

use rustix::process::Signal;
use tssd_format::{Dtype, StateDict, Storage, Tensor, TensorMeta};
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, PutOptions};
use tssd_tests::command::{DaemonProcess, binary, kill_and_wait};
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::{key, wait_until};

const MIB: u64 = 1 << 20;

/// Bytes of the tensor that hosts fetch.
const BYTES: u64 = 32 * MIB;

/// Bytes per second that the host of the trainer sends. A fetch then takes long enough for a fault in the middle.
const SEND_RATE: u64 = 24 * MIB;

/// A fault of one of the hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// It sends with a hundredth of the rate of the others.
    Slow,
    /// No other host reaches it: it takes connections, and does not answer. It reaches all others.
    Partitioned,
    /// Its process is killed while it has a part.
    Killed,
    /// Its process is stopped while it has a part. Its connections stay.
    Stopped,
}

fn state_dict(step: u64) -> StateDict {
    let words = (0..BYTES / 8).map(|at| (at + step).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let meta = TensorMeta::new(Dtype::Uint8, &[BYTES]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, Storage::from(bytes), 0).unwrap());
    dict
}

fn start_trainer() -> TestDaemon {
    TestDaemon::with_options(1 << 30, |options| options.send_rate = Some(SEND_RATE))
}

fn put(trainer: &TestDaemon, dict: &StateDict) {
    trainer.connect().put_state_dict(&key(), dict, &PutOptions::default()).unwrap();
}

fn prefetch(store: &Store) -> Result<(), tssd_store::Error> {
    store.prefetch(&key(), &[], &GetOptions::default()).map(drop)
}

/// Returns how many bytes of the version a host has.
fn present_bytes(store: &Store) -> u64 {
    store.status().unwrap().replicas.iter().map(|replica| replica.present_bytes).sum()
}

#[test]
fn hosts_get_a_version_despite_a_faulty_host() {
    let dict = state_dict(1);
    for fault in [Fault::Slow, Fault::Partitioned, Fault::Killed, Fault::Stopped] {
        let trainer = start_trainer();
        put(&trainer, &dict);
        let hosts = [(); 3].map(|()| TestDaemon::with_controller(&trainer));
        let (folder, listener) =
            (tempfile::tempdir().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let silent = listener.local_addr().unwrap().to_string();
        let more: &[&str] = match fault {
            Fault::Slow => &["--send-rate", "250KB"],
            Fault::Partitioned => &["--advertise", &silent],
            Fault::Killed | Fault::Stopped => &[],
        };
        let args = ["--listen", "127.0.0.1:0", "--controller", trainer.address()];
        let faulty = DaemonProcess::start(folder.path(), &[&args, more].concat());
        let start = Barrier::new(hosts.len() + 1);
        std::thread::scope(|scope| {
            let others: Vec<_> = hosts
                .iter()
                .map(|host| {
                    let (store, start) = (host.connect(), &start);
                    scope.spawn(move || {
                        start.wait();
                        prefetch(&store)
                    })
                })
                .collect();
            let (store, watcher) = (faulty.connect(), faulty.connect());
            let prefetch_start = &start;
            let own = scope.spawn(move || {
                prefetch_start.wait();
                prefetch(&store)
            });
            if matches!(fault, Fault::Killed | Fault::Stopped) {
                wait_until("the faulty host has a part", || present_bytes(&watcher) >= 4 * MIB);
                assert!(present_bytes(&watcher) < BYTES, "the fault comes too late");
                let signal = if fault == Fault::Killed { Signal::KILL } else { Signal::STOP };
                faulty.signal(signal);
            }
            for other in others {
                let outcome = other.join().unwrap();
                assert!(outcome.is_ok(), "{fault:?}: {outcome:?}");
            }
            faulty.signal(Signal::CONT);
            let outcome = own.join().unwrap();
            assert_eq!(outcome.is_err(), fault == Fault::Killed, "{fault:?}: {outcome:?}");
        });
        for host in &hosts {
            let got = host.connect().get_state_dict(&key(), &GetOptions::default()).unwrap().0;
            assert!(got == dict, "{fault:?}");
        }
        // Without the exchange, the host of the trainer would send the version four times.
        let sent = trainer.metric("tssd_sent_bytes_total");
        assert!(sent < 2.5 * BYTES as f64, "{fault:?}: {sent}");
        drop(listener);
    }
}

/// A deletion during the exchange ends it. The next version is fetched as always.
#[test]
fn deletion_ends_the_exchange() {
    let trainer = start_trainer();
    put(&trainer, &state_dict(1));
    let hosts = [(); 3].map(|()| TestDaemon::with_controller(&trainer));
    std::thread::scope(|scope| {
        let fetches: Vec<_> = hosts
            .iter()
            .map(|host| {
                let store = host.connect();
                scope.spawn(move || prefetch(&store))
            })
            .collect();
        let watchers: Vec<Store> = hosts.iter().map(TestDaemon::connect).collect();
        wait_until("a host has a part", || watchers.iter().any(|it| present_bytes(it) >= 4 * MIB));
        assert_eq!(trainer.connect().delete(&key(), None).unwrap(), 1);
        for fetch in fetches {
            // A version that is leased stays readable until the lease is released.
            if let Err(error) = fetch.join().unwrap() {
                assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy), "{error}");
            }
        }
    });
    let dict = state_dict(2);
    put(&trainer, &dict);
    for host in &hosts {
        let store = host.connect();
        prefetch(&store).unwrap();
        assert!(store.get_state_dict(&key(), &GetOptions::default()).unwrap().0 == dict);
        wait_until("the replica of the deleted version is removed", || {
            store.status().unwrap().replicas.len() == 1
        });
    }
}

/// A reader that leaves does not disturb the others, and later readers of its host get everything.
#[test]
fn reader_that_leaves_does_not_disturb_others() {
    let trainer = start_trainer();
    let dict = state_dict(1);
    put(&trainer, &dict);
    let hosts = [(); 3].map(|()| TestDaemon::with_controller(&trainer));
    let (folder, watcher) = (tempfile::tempdir().unwrap(), hosts[0].connect());
    let output = folder.path().join("output.tssd");
    let mut leaver = Command::new(binary())
        .args(["get", "--store", &hosts[0].url(), key().as_str(), "-o"])
        .arg(output)
        .spawn()
        .unwrap();
    std::thread::scope(|scope| {
        let fetches = hosts[1..].iter().map(|host| {
            let store = host.connect();
            scope.spawn(move || store.get_state_dict(&key(), &GetOptions::default()).unwrap().0)
        });
        let fetches: Vec<_> = fetches.collect();
        wait_until("the host of the leaver has a part", || present_bytes(&watcher) >= 4 * MIB);
        kill_and_wait(&mut leaver);
        assert!(present_bytes(&watcher) < BYTES, "the reader leaves too late");
        for fetch in fetches {
            assert!(fetch.join().unwrap() == dict);
        }
    });
    assert!(watcher.get_state_dict(&key(), &GetOptions::default()).unwrap().0 == dict);
}
