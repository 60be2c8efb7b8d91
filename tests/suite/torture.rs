//! A daemon, writers and readers as processes: overwritten all the time, killed, stopped, attacked.
//!
//! `TSSD_ROUNDS` says for how long; a few seconds if it is not set.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tssd_format::{Dtype, Shard, ShardPlace, StateDict, Tensor, TensorMeta, TensorSlice, Value};
use tssd_store::blocking::Store;
use tssd_store::ledger::Reason;
use tssd_store::{
    Durability, Error, ErrorKind, GetOptions, JobId, Key, PutOptions, Refusal, Target,
};
use tssd_tests::command::{Serve, end, send};
use tssd_tests::dice::Dice;
use tssd_tests::hostile::Hostile;

/// Elements of a tensor: 64 KiB of them.
const ELEMENTS: usize = 8192;

/// Tensors that each writer has alone.
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

/// What all elements of a tensor are, given the version's stamp.
fn element(stamp: i64, rank: u64, tensor: u64) -> i64 {
    stamp.wrapping_mul(0x1E37_79B9_7F4A_7C15) ^ (rank << 8 | tensor).cast_signed()
}

/// One writer's part: tensors of its own, and its row of one that both have.
fn part(stamp: i64, rank: u64) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("stamp", stamp);
    for tensor in 0..TENSORS {
        let elements = vec![element(stamp, rank, tensor); ELEMENTS];
        let tensor_of = Tensor::from_slice(&elements, &[ELEMENTS as u64]).unwrap();
        dict.insert(format!("rank{rank}_{tensor}"), tensor_of);
    }
    let row = vec![element(stamp, rank, TENSORS); ELEMENTS];
    let slice = TensorSlice::new(&[rank, 0], &[1, ELEMENTS as u64], &[2, ELEMENTS as u64]);
    let row = Tensor::from_slice(&row, &[1, ELEMENTS as u64]).unwrap();
    dict.insert("shared", Shard::new(row, ShardPlace::new(slice.unwrap())).unwrap());
    dict
}

/// The tensors of a version by name, and the tags of their rows.
fn rows() -> Vec<(String, Vec<(u64, u64)>)> {
    let own = (0..2).flat_map(|rank| {
        (0..TENSORS).map(move |tensor| (format!("rank{rank}_{tensor}"), vec![(rank, tensor)]))
    });
    own.chain([("shared".to_owned(), vec![(0, TENSORS), (1, TENSORS)])]).collect()
}

/// Proves that tensors are whole and of one version; says how many there are.
fn check<'a>(stamp: Option<i64>, bytes_of: impl Fn(&str) -> &'a [u8]) -> u64 {
    let mut seen = stamp.map(|stamp| element(stamp, 0, 0));
    let mut count = 0;
    for (name, rows) in rows() {
        let bytes = bytes_of(&name);
        for (row, (rank, tensor)) in bytes.chunks_exact(bytes.len() / rows.len()).zip(rows) {
            assert_eq!(row[8..], row[..row.len() - 8], "{name} is torn");
            let word = i64::from_le_bytes(row[..8].try_into().unwrap());
            let plain = word ^ (rank << 8 | tensor).cast_signed();
            assert_eq!(*seen.get_or_insert(plain), plain, "{name} is of another version");
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

/// Reads into memory that is read again and again; half of the rows that both writers have.
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
                (Some(ShardPlace::new(slice.unwrap())), vec![2, half])
            };
            let meta = TensorMeta::new(Dtype::Int64, &shape).unwrap();
            Target { fqn: name.clone(), place, meta, memory: bytes.into() }
        })
        .collect();
    store.get_state_dict_into(&key(), &mut targets, &GetOptions::default())?;
    let at = |name: &str| names.iter().position(|(each, _)| each == name).unwrap();
    Ok(check(None, |name| &memory[at(name)]))
}

/// This test binary as another process, which runs one ignored test; it ends with this.
struct Actor(Child);

impl Actor {
    fn spawn(test: &str, url: &str, variables: &[(&str, String)]) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("torture::{test}"), "--exact", "--ignored", "--nocapture"])
            .env("TSSD_TEST_URL", url)
            .envs(variables.iter().map(|(name, value)| (*name, value)))
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    fn writer(url: &str, team: u64, rank: u64, folder: &Path) -> Self {
        let variables = [
            ("TSSD_TEST_TEAM", team.to_string()),
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

    /// What it says at its end.
    fn result(mut self) -> u64 {
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.0.wait().unwrap().success(), "{said}");
        let line = said.lines().find_map(|line| line.split_once("CHECKED "));
        line.unwrap_or_else(|| panic!("{said}")).1.parse().unwrap()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        end(&mut self.0);
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
    let team: i64 = variable("TSSD_TEST_TEAM").parse().unwrap();
    let rank: u32 = variable("TSSD_TEST_RANK").parse().unwrap();
    let acknowledged = PathBuf::from(variable("TSSD_TEST_FOLDER")).join("acknowledged");
    let durability = if acknowledged.exists() { Durability::Disk } else { Durability::Memory };
    let Ok(store) = Store::connect(&variable("TSSD_TEST_URL")) else { return };
    for generation in 0_i64.. {
        let job = JobId(format!("{team}.{generation}"));
        for call in 1_i64.. {
            let stamp = team << 48 | generation << 32 | call;
            let options = PutOptions {
                writer: Some(rank),
                writers: Some((0..2).collect()),
                job: Some(job.clone()),
                durability,
                ..PutOptions::default()
            };
            match store.put_state_dict(&key(), &part(stamp, rank.into()), &options) {
                Ok(report) if durability == Durability::Disk && report.visible => {
                    let file = std::fs::File::options().append(true).open(&acknowledged);
                    writeln!(file.unwrap(), "{}", report.version).unwrap();
                }
                Ok(_) => {}
                Err(error) if is_fenced(&error) => break,
                // The version was dropped for another's sake.
                Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::Busy) => {}
                Err(error) if error.kind() == ErrorKind::Unreachable => return,
                Err(error) => panic!("{error}"),
            }
        }
        // The other job has its turn.
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
        // What was read before is still what it was.
        if held.len() > 3 {
            tensors += check_dict(&held.pop_front().unwrap());
        }
    }
    println!("CHECKED {tensors}");
}

/// Two jobs of two writers each take a key from one another, while four processes read it.
#[test]
fn a_key_that_is_overwritten_all_the_time_is_never_torn() {
    let folder = tempfile::tempdir().unwrap();
    let serve = Serve::start(folder.path(), &[]);
    let store = serve.connect();
    let before = serve.settled(&store);
    let mut writers: Vec<Actor> = (0..4)
        .map(|index| Actor::writer(&serve.url, 1 + index / 2, index % 2, folder.path()))
        .collect();
    let readers: Vec<Actor> =
        (0..4).map(|index| Actor::reader(&serve.url, index, 50 * rounds())).collect();
    let tensors: u64 = readers.into_iter().map(Actor::result).sum();
    assert!(writers.iter_mut().all(Actor::is_running), "no writer has failed");
    let head = store.head(&key()).unwrap().unwrap();
    println!("{tensors} tensors checked, {} versions", head.number);
    assert!(head.number > 10, "{head:?}");
    drop(writers);
    serve.settles_at(before, &store);
}

/// A daemon over a directory, a job of two writers, two readers.
struct Troupe {
    folder: TempDir,
    serve: Serve,
    store: Store,
    before: u64,
    team: u64,
    writers: Vec<Actor>,
    readers: Vec<Actor>,
}

impl Troupe {
    fn new(is_durable: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("run")).unwrap();
        if is_durable {
            std::fs::write(folder.path().join("acknowledged"), "").unwrap();
        }
        let (serve, store) = Self::serve(folder.path());
        let before = serve.settled(&store);
        let url = serve.url.clone();
        let readers = [0, 3].map(|index| Actor::reader(&url, index, u64::MAX)).into();
        let mut troupe = Self { folder, serve, store, before, team: 0, writers: vec![], readers };
        troupe.write_anew();
        troupe
    }

    fn serve(folder: &Path) -> (Serve, Store) {
        let root = folder.join("root").display().to_string();
        let serve = Serve::start(&folder.join("run"), &["--root", &root]);
        let store = serve.connect();
        (serve, store)
    }

    /// A new run of the job.
    fn write_anew(&mut self) {
        self.writers.clear();
        self.team += 1;
        let writer = |rank| Actor::writer(&self.serve.url, self.team, rank, self.folder.path());
        self.writers = (0..2).map(writer).collect();
    }

    fn newest_durable(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.folder.path().join("acknowledged"));
        let text = text.unwrap_or_default();
        // A line that its writer was killed in is none.
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        lines.map(|line| line.parse::<u64>().unwrap()).max()
    }

    /// Something is killed, or sleeps for a while.
    fn act(&mut self, dice: &mut Dice) {
        dice.pause(60);
        let (victim, is_killed) = (dice.below(5), dice.below(2) == 0);
        match (victim, is_killed) {
            (0, true) => {
                end(&mut self.serve.process);
                // What the daemon has acknowledged as durable is there when the next one is.
                let newest = self.newest_durable();
                (self.serve, self.store) = Self::serve(self.folder.path());
                let head = self.store.head(&key()).unwrap();
                assert!(
                    head.as_ref().map(|head| head.number) >= newest,
                    "{newest:?} was durable: {head:?}"
                );
                self.check_head();
                self.write_anew();
            }
            (0, false) => {
                self.serve.signal(Signal::STOP);
                dice.pause(200);
                self.serve.signal(Signal::CONT);
            }
            (1 | 2, true) => {
                let url = self.serve.url.clone();
                self.readers[(victim - 1) as usize] = Actor::reader(&url, victim, u64::MAX);
            }
            (1 | 2, false) => self.sleep(&self.readers[(victim - 1) as usize], dice),
            (_, true) => {
                end(&mut self.writers[(victim - 3) as usize].0);
                dice.pause(20);
                self.write_anew();
            }
            (_, false) => self.sleep(&self.writers[(victim - 3) as usize], dice),
        }
    }

    fn sleep(&self, actor: &Actor, dice: &mut Dice) {
        send(&actor.0, Signal::STOP);
        dice.pause(200);
        self.check_head();
        send(&actor.0, Signal::CONT);
    }

    fn check_head(&self) {
        match self.store.get_state_dict(&key(), &GetOptions::default()) {
            Ok((dict, _)) => assert_eq!(check_dict(&dict), 9),
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
        }
    }

    /// New versions come, and nobody has failed.
    fn goes_on(&mut self) {
        let seen = self.store.head(&key()).unwrap().map(|head| head.id);
        let until = Instant::now() + Duration::from_mins(1);
        while self.store.head(&key()).unwrap().map(|head| head.id) == seen {
            assert!(Instant::now() < until, "no version comes: {:?}", self.store.status());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.check_head();
        assert!(self.readers.iter_mut().all(Actor::is_running), "a reader has failed");
        assert!(self.writers.iter_mut().all(Actor::is_running), "a writer has failed");
    }
}

#[test]
fn whoever_is_killed_or_stopped_harms_nobody_else() {
    torment(false, 0x5EED);
}

#[test]
fn what_is_durable_survives_whoever_is_killed() {
    torment(true, 0xD1CE);
}

fn torment(is_durable: bool, seed: u64) {
    let mut troupe = Troupe::new(is_durable);
    let mut dice = Dice::new(seed);
    for _ in 0..2 * rounds() {
        troupe.act(&mut dice);
        troupe.goes_on();
    }
    troupe.writers.clear();
    troupe.readers.clear();
    troupe.serve.settles_at(troupe.before, &troupe.store);
    let segments = troupe.store.status().unwrap().memory.segments;
    assert!(segments <= 8, "one version, and what the daemon writes: {segments}");
    let run = troupe.folder.path().join("run");
    let names = || {
        let names = std::fs::read_dir(&run).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["socket", "socket.lock"]);
    troupe.serve.signal(Signal::TERM);
    assert!(troupe.serve.process.wait().unwrap().success());
    assert_eq!(names(), ["socket.lock"]);
}

#[test]
fn hostile_connections_cost_little_and_stop_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let serve = Serve::start(folder.path(), &[]);
    let store = serve.connect();
    let put = |stamp: i64| {
        for rank in 0..2 {
            let options = PutOptions {
                writer: Some(rank),
                writers: Some((0..2).collect()),
                job: Some(JobId("job".into())),
                ..PutOptions::default()
            };
            store.put_state_dict(&key(), &part(stamp, rank.into()), &options).unwrap();
        }
        let (dict, _) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
        assert_eq!(dict.leaf("stamp").unwrap(), &Value::from(stamp));
        assert_eq!(check_dict(&dict), 9);
    };
    (1..5).for_each(put);
    let (descriptors, resident) = (serve.settled(&store), serve.resident());
    let count = 1000.min(50 * rounds() as usize);
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    // Those that are given memory keep it as long as this process lives: see `reliability`.
    let connect = |way: usize| Hostile::near(socket, way % 9, key().as_str(), "").unwrap();
    let mut hostile: Vec<Hostile> = (0..count).map(connect).collect();
    let is_over = AtomicBool::new(false);
    let connections = std::thread::scope(|scope| {
        let attack = scope.spawn(|| {
            let mut connections = hostile.len();
            while !is_over.load(Ordering::Relaxed) {
                for (index, each) in hostile.iter_mut().enumerate() {
                    if !each.go_on() {
                        *each = connect(index);
                        connections += 1;
                    }
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            connections
        });
        let mut most = 0;
        for stamp in 5..5 + 25 * rounds().cast_signed() {
            put(stamp);
            most = most.max(serve.resident());
            std::thread::sleep(Duration::from_millis(10));
        }
        is_over.store(true, Ordering::Relaxed);
        println!("{} bytes more than {resident}", most.saturating_sub(resident));
        assert!(most < resident + (64 << 20), "{most} bytes, {resident} before");
        attack.join().unwrap()
    });
    println!("{connections} connections");
    drop(hostile);
    serve.settles_at(descriptors, &store);
}
