//! A session that is cut after each of its bytes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tssd_store::ErrorKind;
use tssd_store::blocking::Store;
use tssd_tests::proof::Proof;

use super::checker::check;
use super::client::{get, put_once};
use super::history::{Answer, Call, Recorder, read};
use super::home::Home;
use super::object::{keep, name, retain};
use super::processes::Serve;
use super::proxy::{Direction, Proxy};

/// The key: on disk, with several versions.
const KEY: u8 = 3;

/// Nobody waits longer for somebody who is cut off.
const LONGEST: Duration = Duration::from_secs(5);

/// After so many sessions comes another daemon. To this one, all that were cut off at the socket are one process
/// that lives, and may still see the memory that it had mapped: so it keeps that memory.
const SESSIONS: u64 = 32;

/// A daemon, and a way to it.
struct Way {
    proxy: Proxy,
    /// Straight to it.
    store: Store,
    recorder: Recorder<Vec<u8>>,
    puts: u32,
    _serve: Serve,
    _folder: TempDir,
}

impl Way {
    fn new(is_far: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let serve = Serve::over(folder.path());
        let proxy = if is_far {
            Proxy::before(serve.address)
        } else {
            Proxy::at(folder.path().join("proxy"), serve.socket.clone())
        };
        let store = serve.connect();
        retain(&store).unwrap();
        let recorder = Recorder(Vec::new());
        Self { proxy, store, recorder, puts: 0, _serve: serve, _folder: folder }
    }

    fn put(&mut self, store: &Store) -> Option<Answer> {
        self.puts += 1;
        let put = self.puts;
        self.recorder
            .record(KEY, Call::Put(put), || put_once(store, Home::Daemon, KEY, put, (None, false)))
    }

    fn get(&mut self, store: &Store, version: Option<u64>) -> Option<Answer> {
        let call = version.map_or(Call::Newest, Call::Numbered);
        self.recorder.record(KEY, call, || get(store, KEY, version))
    }

    /// A put and a get through the proxy, as far as they come; says whether all was answered.
    fn session(&mut self) -> bool {
        let started = Instant::now();
        let is_answered = match Store::connect(&self.proxy.url()) {
            Ok(store) => {
                let is_put = self.put(&store).is_some();
                self.get(&store, None).is_some() && is_put
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                false
            }
        };
        let span = started.elapsed();
        assert!(span < LONGEST, "somebody who was cut off has waited for {span:?}");
        is_answered
    }

    /// The next client is served: it sees what is there, each version by its number, and puts another one.
    fn serves(&mut self) {
        let started = Instant::now();
        let store = self.store.clone();
        for version in store.versions(&name(KEY)).unwrap() {
            assert!(self.get(&store, Some(version.number)).is_some(), "a get is answered");
        }
        assert!(matches!(self.put(&store), Some(Answer::Put(_))), "a put is done");
        assert!(self.get(&store, None).is_some(), "a get is answered");
        let span = started.elapsed();
        assert!(span < LONGEST, "the next client has waited for {span:?}");
    }

    /// Checks what all have seen; says how many operations that were.
    fn check(&self) -> u64 {
        let operations = read(std::str::from_utf8(&self.recorder.0).unwrap());
        let checked = check(keep(KEY), &operations);
        assert!(checked.is_ok(), "{checked:#?}");
        operations.len() as u64
    }
}

/// The bytes of a session in one direction.
struct Course {
    is_far: bool,
    direction: Direction,
    /// How many they are.
    bytes: u64,
    /// How many of them have had their turn, and how many of these a session has come to: the numbers in it may
    /// have a digit less.
    done: u64,
    cut: u64,
}

impl Course {
    /// A session that is not cut says how many there are.
    fn measured(is_far: bool, direction: Direction) -> Self {
        let mut way = Way::new(is_far);
        assert!(way.session(), "nobody has cut it");
        way.serves();
        way.check();
        Self { is_far, direction, bytes: way.proxy.passed(direction), done: 0, cut: 0 }
    }

    /// Another one of the places, far from the one before.
    fn next(&mut self) -> u64 {
        let mut strides = self.bytes * 5 / 8..=self.bytes + 1;
        let stride = strides.find(|stride| is_coprime(*stride, self.bytes));
        let place = self.done * stride.unwrap() % self.bytes;
        self.done += 1;
        place
    }

    fn figures(&self) -> Value {
        let place = if self.is_far { "address" } else { "socket" };
        let way = if self.direction == Direction::Up { "to" } else { "from" };
        json!({ "way": format!("{way} the {place}"), "of": self.bytes, "cut": self.cut })
    }

    fn is_done(&self) -> bool {
        self.done == self.bytes
    }
}

fn is_coprime(left: u64, right: u64) -> bool {
    if right == 0 { left == 1 } else { is_coprime(right, left % right) }
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn a_session_can_be_cut_after_each_of_its_bytes() {
    let proof = Proof::begin("histories: cuts");
    let directions = [Direction::Up, Direction::Down];
    let ways = [false, true].into_iter();
    let mut courses: Vec<Course> = ways
        .flat_map(|is_far| directions.map(|direction| Course::measured(is_far, direction)))
        .collect();
    let (mut unanswered, mut operations) = (0, 0);
    let cut = |courses: &[Course]| courses.iter().map(|course| course.cut).sum::<u64>();
    while proof.goes_on(cut(&courses), 1000) && !courses.iter().all(Course::is_done) {
        for course in &mut courses {
            let mut way = Way::new(course.is_far);
            for _ in 0..SESSIONS.min(course.bytes - course.done) {
                way.proxy.cut_after(course.direction, course.next());
                let is_answered = way.session();
                course.cut += u64::from(way.proxy.has_cut());
                unanswered += u64::from(!is_answered);
                way.serves();
            }
            operations += way.check();
        }
    }
    let offsets: Vec<Value> = courses.iter().map(Course::figures).collect();
    proof.end(json!({
        "cuts": cut(&courses),
        "sessions not answered": unanswered,
        "operations": operations,
        "violations": 0,
        "offsets": offsets,
    }));
}
