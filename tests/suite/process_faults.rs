//! A daemon, writers and readers as processes that are killed, stopped and attacked.
//!
//! `TSSD_ROUNDS` sets the number of rounds. The default, 4, takes a few seconds.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_format::{Dtype, Shard, ShardSpec, StateDict, Tensor, TensorMeta, TensorSlice, Value};
use tssd_store::blocking::Store;
use tssd_store::ledger::Reason;
use tssd_store::{
    Durability, Error, ErrorKind, GetOptions, JobId, Key, PutOptions, Refusal, Target,
};
use tssd_tests::command::{DaemonProcess, kill_and_wait, send_signal};
use tssd_tests::hostile_connection::HostileConnection;
use tssd_tests::rng::SeededRng;

/// Elements of a tensor (64 KiB).
const ELEMENTS: usize = 8192;

/// Number of tensors that belong to one writer.
const TENSORS: u64 = 4;

fn key() -> Key {
    Key::new("policy").unwrap()
}

fn rounds() -> u64 {
    std::env::var("TSSD_ROUNDS").map_or(4, |rounds| rounds.parse().unwrap())
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is set by the parent process"))
}

/// Returns the value of all elements of a tensor in the version with this stamp.
fn element(stamp: i64, rank: u64, tensor: u64) -> i64 {
    stamp.wrapping_mul(0x1E37_79B9_7F4A_7C15) ^ (rank << 8 | tensor).cast_signed()
}

/// Returns the contribution of a writer: its own tensors, and its row of the shared tensor.
fn contribution(stamp: i64, rank: u64) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("stamp", stamp);
    for tensor in 0..TENSORS {
        let elements = vec![element(stamp, rank, tensor); ELEMENTS];
        let values = Tensor::from_slice(&elements, &[ELEMENTS as u64]).unwrap();
        dict.insert(format!("rank{rank}_{tensor}"), values);
    }
    let row = vec![element(stamp, rank, TENSORS); ELEMENTS];
    let slice = TensorSlice::new(&[rank, 0], &[1, ELEMENTS as u64], &[2, ELEMENTS as u64]);
    let row = Tensor::from_slice(&row, &[1, ELEMENTS as u64]).unwrap();
    dict.insert("shared", Shard::new(row, ShardSpec::new(slice.unwrap())).unwrap());
    dict
}

/// Returns the tensors of a version by name, each with the rank and tensor number of its rows.
fn rows() -> Vec<(String, Vec<(u64, u64)>)> {
    let own = (0..2).flat_map(|rank| {
        (0..TENSORS).map(move |tensor| (format!("rank{rank}_{tensor}"), vec![(rank, tensor)]))
    });
    own.chain([("shared".to_owned(), vec![(0, TENSORS), (1, TENSORS)])]).collect()
}

/// Checks that all tensors are complete and of one version. Returns their number.
fn check<'a>(stamp: Option<i64>, bytes_of: impl Fn(&str) -> &'a [u8]) -> u64 {
    let mut expected = stamp.map(|stamp| element(stamp, 0, 0));
    let mut count = 0;
    for (name, rows) in rows() {
        let bytes = bytes_of(&name);
        for (row, (rank, tensor)) in bytes.chunks_exact(bytes.len() / rows.len()).zip(rows) {
            assert_eq!(row[8..], row[..row.len() - 8], "{name} is torn");
            let word = i64::from_le_bytes(row[..8].try_into().unwrap());
            let base = word ^ (rank << 8 | tensor).cast_signed();
            assert_eq!(*expected.get_or_insert(base), base, "{name} is of another version");
        }
        count += 1;
    }
    count
}

fn check_dict(dict: &StateDict) -> u64 {
    let Value::Int(stamp) = dict.leaf("stamp").unwrap() else { panic!("an int") };
    check(stamp.as_i64(), |name| match dict.leaf(name).unwrap() {
        Value::Tensor(tensor) => tensor.view().span(),
        other => panic!("{other:?}"),
    })
}

/// Reads into memory that is reused, and checks it. Reads half of each row of the shared tensor.
fn check_in_place(store: &Store, memory: &mut [Vec<u8>]) -> Result<u64, Error> {
    let names = rows();
    let mut targets: Vec<Target> = names
        .iter()
        .zip(&mut *memory)
        .map(|((name, rows), bytes)| {
            let half = ELEMENTS as u64 / 2;
            let (place, shape) = if rows.len() == 1 {
                (None, vec![ELEMENTS as u64])
            } else {
                let slice = TensorSlice::new(&[0, half], &[2, half], &[2, ELEMENTS as u64]);
                (Some(ShardSpec::new(slice.unwrap())), vec![2, half])
            };
            let meta = TensorMeta::new(Dtype::Int64, &shape).unwrap();
            Target { fqn: name.clone(), shard_spec: place, meta, memory: bytes.into() }
        })
        .collect();
    store.get_state_dict_into(&key(), &mut targets, &GetOptions::default())?;
    let index_of = |name: &str| names.iter().position(|(other, _)| other == name).unwrap();
    Ok(check(None, |name| &memory[index_of(name)]))
}

/// A process of this test binary that runs one ignored test. Dropping it kills the process.
struct TestProcess(Child);

impl TestProcess {
    fn spawn(test: &str, url: &str, variables: &[(&str, String)]) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("process_faults::{test}"), "--exact", "--ignored", "--nocapture"])
            .env("TSSD_TEST_URL", url)
            .envs(variables.iter().map(|(name, value)| (*name, value)))
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    fn writer(url: &str, job_number: u64, rank: u64, folder: &Path) -> Self {
        let variables = [
            ("TSSD_TEST_TEAM", job_number.to_string()),
            ("TSSD_TEST_RANK", rank.to_string()),
            ("TSSD_TEST_FOLDER", folder.display().to_string()),
        ];
        Self::spawn("child_writer", url, &variables)
    }

    fn reader(url: &str, index: u64, reads: u64) -> Self {
        let variables =
            [("TSSD_TEST_READER", index.to_string()), ("TSSD_TEST_READS", reads.to_string())];
        Self::spawn("child_reader", url, &variables)
    }

    fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Waits for the end of the process. Returns the count that it printed.
    fn wait_for_count(mut self) -> u64 {
        let mut output = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(self.0.wait().unwrap().success(), "{output}");
        let line = output.lines().find_map(|line| line.split_once("CHECKED "));
        line.unwrap_or_else(|| panic!("{output}")).1.parse().unwrap()
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        kill_and_wait(&mut self.0);
    }
}

fn is_fenced(error: &Error) -> bool {
    matches!(
        error.refusal(),
        Some(Refusal::Fenced { .. } | Refusal::Dropped { reason: Reason::Fenced { .. }, .. })
    )
}

#[test]
#[ignore = "a process of the tests below"]
fn child_writer() {
    let job_number: i64 = variable("TSSD_TEST_TEAM").parse().unwrap();
    let rank: u32 = variable("TSSD_TEST_RANK").parse().unwrap();
    let acknowledged = PathBuf::from(variable("TSSD_TEST_FOLDER")).join("acknowledged");
    let durability = if acknowledged.exists() { Durability::Disk } else { Durability::Memory };
    let Ok(store) = Store::connect(&variable("TSSD_TEST_URL")) else { return };
    for generation in 0_i64.. {
        let job = JobId(format!("{job_number}.{generation}"));
        for call in 1_i64.. {
            let stamp = job_number << 48 | generation << 32 | call;
            let options = PutOptions {
                writer: Some(rank),
                writers: Some((0..2).collect()),
                job: Some(job.clone()),
                durability,
                ..PutOptions::default()
            };
            match store.put_state_dict(&key(), &contribution(stamp, rank.into()), &options) {
                Ok(report) if durability == Durability::Disk && report.visible => {
                    let file = std::fs::File::options().append(true).open(&acknowledged);
                    writeln!(file.unwrap(), "{}", report.version).unwrap();
                }
                Ok(_) => {}
                Err(error) if is_fenced(&error) => break,
                // The ledger dropped the version in favour of another one.
                Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::Busy) => {}
                Err(error) if error.kind() == ErrorKind::Unreachable => return,
                Err(error) => panic!("{error}"),
            }
        }
        // Lets the other job take over the key.
        std::thread::sleep(Duration::from_millis(40));
    }
}

#[test]
#[ignore = "a process of the tests below"]
fn child_reader() {
    let reads: u64 = variable("TSSD_TEST_READS").parse().unwrap();
    let is_in_place = variable("TSSD_TEST_READER") == "3";
    let connect = || loop {
        match Store::connect(&variable("TSSD_TEST_URL")) {
            Ok(store) => break store,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut store = connect();
    let mut memory: Vec<_> = rows().iter().map(|_| vec![0; ELEMENTS * 8]).collect();
    let mut held: VecDeque<StateDict> = VecDeque::new();
    let (mut done, mut tensors) = (0, 0);
    while done < reads {
        let checked = if is_in_place {
            check_in_place(&store, &mut memory)
        } else {
            let got = store.get_state_dict(&key(), &GetOptions::default());
            got.map(|(dict, _)| {
                let count = check_dict(&dict);
                held.push_back(dict);
                count
            })
        };
        match checked {
            Ok(count) => (done, tensors) = (done + 1, tensors + count),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                tensors += held.iter().map(check_dict).sum::<u64>();
                store = connect();
            }
        }
        // A dict that was read earlier must not change.
        if held.len() > 3 {
            tensors += check_dict(&held.pop_front().unwrap());
        }
    }
    println!("CHECKED {tensors}");
}

/// Two jobs of two writers each keep taking over a key while four processes read it.
#[test]
fn readers_see_no_torn_version_under_constant_puts() {
    let folder = tempfile::tempdir().unwrap();
    let serve = DaemonProcess::start(folder.path(), &[]);
    let store = serve.connect();
    let before = serve.idle_descriptors(&store);
    let mut writers: Vec<TestProcess> = (0..4)
        .map(|index| TestProcess::writer(&serve.url, 1 + index / 2, index % 2, folder.path()))
        .collect();
    let readers: Vec<TestProcess> =
        (0..4).map(|index| TestProcess::reader(&serve.url, index, 50 * rounds())).collect();
    let tensors: u64 = readers.into_iter().map(TestProcess::wait_for_count).sum();
    assert!(writers.iter_mut().all(TestProcess::is_running), "no writer has failed");
    let head = store.head(&key()).unwrap().unwrap();
    println!("{tensors} tensors checked, {} versions", head.number);
    assert!(head.number > 10, "{head:?}");
    drop(writers);
    serve.assert_idle_descriptors(before, &store);
}

/// A daemon over a directory, a job of two writers, two readers.
struct ProcessCluster {
    folder: TempDir,
    serve: DaemonProcess,
    store: Store,
    idle_descriptors: u64,
    job_number: u64,
    writers: Vec<TestProcess>,
    readers: Vec<TestProcess>,
}

impl ProcessCluster {
    fn new(is_durable: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("run")).unwrap();
        if is_durable {
            std::fs::write(folder.path().join("acknowledged"), "").unwrap();
        }
        let (serve, store) = Self::serve(folder.path());
        let idle_descriptors = serve.idle_descriptors(&store);
        let url = serve.url.clone();
        let readers = [0, 3].map(|index| TestProcess::reader(&url, index, u64::MAX)).into();
        let mut cluster = Self {
            folder,
            serve,
            store,
            idle_descriptors,
            job_number: 0,
            writers: vec![],
            readers,
        };
        cluster.restart_writers();
        cluster
    }

    fn serve(folder: &Path) -> (DaemonProcess, Store) {
        let root = folder.join("root").display().to_string();
        let serve = DaemonProcess::start(&folder.join("run"), &["--root", &root]);
        let store = serve.connect();
        (serve, store)
    }

    /// Starts a new run of the job.
    fn restart_writers(&mut self) {
        self.writers.clear();
        self.job_number += 1;
        let writer =
            |rank| TestProcess::writer(&self.serve.url, self.job_number, rank, self.folder.path());
        self.writers = (0..2).map(writer).collect();
    }

    /// Returns the newest version that the daemon has acknowledged as durable.
    fn newest_durable(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.folder.path().join("acknowledged"));
        let text = text.unwrap_or_default();
        // A killed writer may leave an incomplete last line.
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        lines.map(|line| line.parse::<u64>().unwrap()).max()
    }

    /// Kills or stops a random process.
    fn inject_fault(&mut self, dice: &mut SeededRng) {
        dice.sleep_below(60);
        let (victim, is_killed) = (dice.below(5), dice.below(2) == 0);
        match (victim, is_killed) {
            (0, true) => {
                kill_and_wait(&mut self.serve.process);
                // The next daemon must have what this one acknowledged as durable.
                let newest = self.newest_durable();
                (self.serve, self.store) = Self::serve(self.folder.path());
                let head = self.store.head(&key()).unwrap();
                assert!(
                    head.as_ref().map(|head| head.number) >= newest,
                    "{newest:?} was durable: {head:?}"
                );
                self.check_head();
                self.restart_writers();
            }
            (0, false) => {
                self.serve.signal(Signal::STOP);
                dice.sleep_below(200);
                self.serve.signal(Signal::CONT);
            }
            (1 | 2, true) => {
                let url = self.serve.url.clone();
                self.readers[(victim - 1) as usize] = TestProcess::reader(&url, victim, u64::MAX);
            }
            (1 | 2, false) => self.stop_for_a_while(&self.readers[(victim - 1) as usize], dice),
            (_, true) => {
                kill_and_wait(&mut self.writers[(victim - 3) as usize].0);
                dice.sleep_below(20);
                self.restart_writers();
            }
            (_, false) => self.stop_for_a_while(&self.writers[(victim - 3) as usize], dice),
        }
    }

    fn stop_for_a_while(&self, process: &TestProcess, dice: &mut SeededRng) {
        send_signal(&process.0, Signal::STOP);
        dice.sleep_below(200);
        self.check_head();
        send_signal(&process.0, Signal::CONT);
    }

    fn check_head(&self) {
        match self.store.get_state_dict(&key(), &GetOptions::default()) {
            Ok((dict, _)) => assert_eq!(check_dict(&dict), 9),
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
        }
    }

    /// Checks that new versions appear and that no process has failed.
    fn check_progress(&mut self) {
        let last = self.store.head(&key()).unwrap().map(|head| head.id);
        let deadline = Instant::now() + Duration::from_mins(1);
        while self.store.head(&key()).unwrap().map(|head| head.id) == last {
            assert!(Instant::now() < deadline, "no new version: {:?}", self.store.status());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.check_head();
        assert!(self.readers.iter_mut().all(TestProcess::is_running), "a reader has failed");
        assert!(self.writers.iter_mut().all(TestProcess::is_running), "a writer has failed");
    }
}

#[test]
fn killed_or_stopped_process_does_not_affect_others() {
    run_fault_rounds(false, 0x5EED);
}

#[test]
fn durable_version_survives_any_killed_process() {
    run_fault_rounds(true, 0xD1CE);
}

fn run_fault_rounds(is_durable: bool, seed: u64) {
    let mut cluster = ProcessCluster::new(is_durable);
    let mut dice = SeededRng::new(seed);
    for _ in 0..2 * rounds() {
        cluster.inject_fault(&mut dice);
        cluster.check_progress();
    }
    cluster.writers.clear();
    cluster.readers.clear();
    cluster.serve.assert_idle_descriptors(cluster.idle_descriptors, &cluster.store);
    let segments = cluster.store.status().unwrap().memory.segments;
    assert!(segments <= 8, "more segments than one version needs: {segments}");
    let run = cluster.folder.path().join("run");
    let names = || {
        let names = std::fs::read_dir(&run).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["socket", "socket.lock"]);
    cluster.serve.signal(Signal::TERM);
    assert!(cluster.serve.process.wait().unwrap().success());
    assert_eq!(names(), ["socket.lock"]);
}

#[test]
fn hostile_connections_use_little_memory_and_stop_no_client() {
    let folder = tempfile::tempdir().unwrap();
    let serve = DaemonProcess::start(folder.path(), &[]);
    let store = serve.connect();
    let put = |stamp: i64| {
        for rank in 0..2 {
            let options = PutOptions {
                writer: Some(rank),
                writers: Some((0..2).collect()),
                job: Some(JobId("job".into())),
                ..PutOptions::default()
            };
            store.put_state_dict(&key(), &contribution(stamp, rank.into()), &options).unwrap();
        }
        let (dict, _) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
        assert_eq!(dict.leaf("stamp").unwrap(), &Value::from(stamp));
        assert_eq!(check_dict(&dict), 9);
    };
    (1..5).for_each(put);
    let (descriptors, resident) = (serve.idle_descriptors(&store), serve.resident_bytes());
    let count = 1000.min(50 * rounds() as usize);
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    // Ways 9 and 10 hold leases until this process ends. `tests/reliability` covers them.
    let connect =
        |way: usize| HostileConnection::connect_unix(socket, way % 9, key().as_str(), "").unwrap();
    let mut hostile: Vec<HostileConnection> = (0..count).map(connect).collect();
    let is_done = AtomicBool::new(false);
    let connections = std::thread::scope(|scope| {
        let attack = scope.spawn(|| {
            let mut connections = hostile.len();
            while !is_done.load(Ordering::Relaxed) {
                for (index, connection) in hostile.iter_mut().enumerate() {
                    if !connection.step() {
                        *connection = connect(index);
                        connections += 1;
                    }
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            connections
        });
        let mut peak = 0;
        for stamp in 5..5 + 25 * rounds().cast_signed() {
            put(stamp);
            peak = peak.max(serve.resident_bytes());
            std::thread::sleep(Duration::from_millis(10));
        }
        is_done.store(true, Ordering::Relaxed);
        println!("{} bytes more than {resident}", peak.saturating_sub(resident));
        assert!(peak < resident + (64 << 20), "{peak} bytes, {resident} before");
        attack.join().unwrap()
    });
    println!("{connections} connections");
    drop(hostile);
    serve.assert_idle_descriptors(descriptors, &store);
}
