//! Peers that lie about memory: what comes is no memory, is another's, or changes; none of that ends anybody.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, SealFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use rustix::time::{TimerfdClockId, TimerfdFlags};
use serde_json::json;
use tempfile::TempDir;
use tssd_store::blocking::Store;
use tssd_store::{Error, ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::command::{Serve, quick_folder};
use tssd_tests::proof::Proof;
use tssd_tests::raw::{Raw, frame};

use super::holdings::assert_typed;
use super::processes::count;
use crate::contents::Contents;

/// What is promised of the memory.
const CAPACITY: u64 = 512 << 10;

const ID: &str = "00000000000000000000000000000001";

const ALL: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Whatever a lie may lead to.
const KINDS: [ErrorKind; 4] =
    [ErrorKind::Io, ErrorKind::Corrupt, ErrorKind::Unreachable, ErrorKind::Invalid];

fn contents() -> Contents<'static> {
    // An archive with a segment of its own.
    Contents { key: "policy", version: 1, writers: 1, elements: 9000 }
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

fn memory(len: u64, seals: SealFlags, extra: MemfdFlags) -> Option<OwnedFd> {
    let memory = rustix::fs::memfd_create("liar", MemfdFlags::ALLOW_SEALING | extra).ok()?;
    rustix::fs::ftruncate(&memory, len).ok()?;
    rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
    Some(memory)
}

fn read_only(memory: Option<OwnedFd>) -> Option<OwnedFd> {
    let memory = memory?;
    File::open(format!("/proc/self/fd/{}", memory.as_raw_fd())).ok().map(Into::into)
}

/// A descriptor that this process has anyway, by what the system calls it.
fn own(kind: &str) -> Option<OwnedFd> {
    let process =
        rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).ok()?;
    let is_it = |entry: &fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|name| name.to_string_lossy().contains(kind))
    };
    let entry = fs::read_dir("/proc/self/fd").unwrap().flatten().find(is_it)?;
    let number = entry.file_name().into_string().ok()?.parse().ok()?;
    rustix::process::pidfd_getfd(process, number, PidfdGetfdFlags::empty()).ok()
}

/// All kinds of what is not what it is said to be; those that this system does not have are left out.
fn lies(folder: &Path) -> Vec<(&'static str, OwnedFd)> {
    let none = MemfdFlags::empty();
    let file = |name: &str, flags: OFlags| {
        let path = folder.join(name);
        fs::write(&path, vec![7; usize::try_from(CAPACITY).unwrap()]).unwrap();
        let mut options = File::options();
        options
            .read(!flags.contains(OFlags::WRONLY))
            .write(flags.intersects(OFlags::WRONLY | OFlags::RDWR));
        let extra = flags & !(OFlags::WRONLY | OFlags::RDWR);
        options.custom_flags(i32::try_from(extra.bits()).unwrap());
        options.open(path).ok().map(OwnedFd::from)
    };
    let device = |path: &str| File::open(path).ok().map(OwnedFd::from);
    let deleted = || {
        let open = file("deleted", OFlags::empty());
        fs::remove_file(folder.join("deleted")).unwrap();
        open
    };
    let pipe = std::io::pipe().unwrap();
    let sockets = UnixStream::pair().unwrap();
    let mut huge = read_only(memory(2 << 20, SealFlags::empty(), MemfdFlags::HUGETLB));
    let kinds = [
        ("memory without a seal", read_only(memory(CAPACITY, SealFlags::empty(), none))),
        (
            "memory that can shrink",
            read_only(memory(CAPACITY, SealFlags::FUTURE_WRITE | SealFlags::GROW, none)),
        ),
        (
            "memory that can be written",
            read_only(memory(CAPACITY, SealFlags::SHRINK | SealFlags::GROW, none)),
        ),
        ("memory that is shorter", read_only(memory(CAPACITY - 1, ALL, none))),
        ("memory that is longer", read_only(memory(CAPACITY + 1, ALL, none))),
        ("memory of no bytes", read_only(memory(0, ALL, none))),
        ("sealed memory to write", memory(CAPACITY, ALL, none)),
        ("sealed memory of zeros", read_only(memory(CAPACITY, ALL, none))),
        ("huge pages", huge.take()),
        ("a file", file("file", OFlags::empty())),
        ("a file to write and read", file("rw", OFlags::RDWR)),
        ("a file to write", file("w", OFlags::WRONLY)),
        ("a file to append to", file("a", OFlags::APPEND | OFlags::RDWR)),
        ("a file by its path alone", file("path", OFlags::PATH)),
        ("a deleted file", deleted()),
        ("an empty file", File::create(folder.join("empty")).ok().map(OwnedFd::from)),
        ("a folder", device(folder.to_str().unwrap())),
        ("the end of a pipe", Some(pipe.0.into())),
        ("the other end", Some(pipe.1.into())),
        ("a socket", Some(sockets.0.into())),
        (
            "a timer",
            rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::empty()).ok(),
        ),
        ("a counter of events", own("[eventfd]")),
        ("a set of events", own("[eventpoll]")),
        ("a process", rustix::process::pidfd_open(Pid::INIT, PidfdFlags::empty()).ok()),
        ("zeros without end", device("/dev/zero")),
        ("nothing", device("/dev/null")),
        ("a terminal", device("/dev/ptmx")),
        ("a file of the system", device("/proc/self/maps")),
        ("memory of a process", device("/proc/self/mem")),
        ("a setting of the system", device("/sys/kernel/mm/transparent_hugepage/enabled")),
    ];
    kinds.into_iter().filter_map(|(kind, fd)| Some((kind, fd?))).collect()
}

/// A daemon that answers hello, then every request with the same, and what comes along.
struct Liar {
    _folder: TempDir,
    url: String,
    thread: Option<JoinHandle<()>>,
}

impl Liar {
    fn new(head: String, fds: Vec<OwnedFd>) -> Self {
        let folder = quick_folder();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let url = format!("unix:{}", socket.display());
        let thread = thread::spawn(move || {
            let mut raw = Raw(listener.accept().unwrap().0);
            let welcome = r#"{"welcome":{"protocol":{"major":1,"minor":0},"pid":1,"inline":0}}"#;
            let (number, _) = raw.receive().unwrap();
            raw.send(&frame(3, number, welcome, b""));
            let mut fds = Some(fds);
            while let Some((number, asked)) = raw.receive() {
                let is_put = asked["op"] == "commit";
                let progress = r#"{"progress":{"visible":true,"missing":""}}"#;
                let said = if is_put { progress } else { head.as_str() };
                let mut bytes = frame(3, number, said, b"");
                match fds.take() {
                    Some(fds) if !fds.is_empty() => {
                        bytes[5] = u8::try_from(fds.len()).unwrap();
                        raw.send_with(&bytes, &fds);
                    }
                    _ if asked["op"].is_string() => raw.send(&bytes),
                    _ => {}
                }
            }
        });
        Self { _folder: folder, url, thread: Some(thread) }
    }

    fn get(&self) -> Result<(), Error> {
        Store::connect(&self.url)?.get_state_dict(&key(), &GetOptions::default()).map(drop)
    }

    fn put(&self) -> Result<(), Error> {
        let options = PutOptions { timeout: Duration::from_secs(1), ..PutOptions::default() };
        Store::connect(&self.url)?.put_state_dict(&key(), &contents().part(0), &options).map(drop)
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        // Nobody may have come.
        let _ = UnixStream::connect(self.url.strip_prefix("unix:").unwrap());
        let ended = self.thread.take().unwrap().join();
        drop(ended);
    }
}

fn leased(offset: u64, len: u64, segments: &str) -> String {
    format!(
        r#"{{"leased":{{"lease":"{ID}","id":"{ID}","archives":{{}},"segments":{segments},
            "manifest":{{"segment":3,"offset":{offset},"len":{len}}}}}}}"#
    )
}

fn shared(capacity: u64) -> String {
    format!(r#"[{{"segment":3,"capacity":{capacity}}}]"#)
}

fn begun(capacity: u64) -> String {
    format!(
        r#"{{"begun":{{"contribution":1,"id":"{ID}","epoch":0,"number":1,
            "room":{{"segment":{{"segment":3,"capacity":{capacity}}}}}}}}}"#
    )
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn who_lies_about_memory_harms_nobody() {
    let proof = Proof::begin("limits: lies about memory");
    let own = std::process::id();
    let (mut rounds, mut kinds, mut told, mut timed, mut sent) = (0, 0, 0, 0, 0);
    while proof.goes_on(rounds, 1) {
        let before = count(own, "fd");
        (kinds, told) = to_clients(told);
        timed += in_time();
        let is_flat = (0..200).any(|_| {
            thread::sleep(Duration::from_millis(10));
            count(own, "fd") <= before
        });
        assert!(is_flat, "{} descriptors, {before} before", count(own, "fd"));
        sent += to_daemon();
        rounds += 1;
    }
    assert!(kinds >= 24, "{kinds} kinds");
    proof.end(json!({
        "kinds of descriptors": kinds, "lies to clients": told, "lies in time": timed,
        "descriptors sent to a daemon": sent, "killed": 0, "left open": 0, "rounds": rounds,
    }));
}

/// Each kind in place of memory to read, and of memory to write; and lies about lengths and places.
fn to_clients(mut told: u64) -> (u64, u64) {
    let folder = quick_folder();
    let kinds = lies(folder.path()).len() as u64;
    for number in 0..usize::try_from(kinds).unwrap() {
        // Each is given away.
        let lie = || lies(folder.path()).swap_remove(number);
        let (name, fd) = lie();
        let error = Liar::new(leased(0, 4096, &shared(CAPACITY)), vec![fd]).get().expect_err(name);
        assert_typed(&error, &KINDS);
        let (name, fd) = lie();
        let error = Liar::new(begun(CAPACITY), vec![fd]).put().expect_err(name);
        assert_typed(&error, &KINDS);
        told += 2;
    }
    let sealed = || read_only(memory(CAPACITY, ALL, MemfdFlags::empty())).unwrap();
    let most = u64::MAX;
    for (offset, len, capacity) in [
        (0, CAPACITY + 1, CAPACITY),
        (CAPACITY, 1, CAPACITY),
        (most, 1, CAPACITY),
        (1, most, CAPACITY),
        (most, most, CAPACITY),
        (0, 0, CAPACITY),
        (0, 1, 0),
        (0, 1, most),
        (0, most, most),
        (CAPACITY - 1, 1, CAPACITY),
    ] {
        let error =
            Liar::new(leased(offset, len, &shared(capacity)), vec![sealed()]).get().unwrap_err();
        assert_typed(&error, &KINDS);
        told += 1;
    }
    for capacity in [0, 1, CAPACITY / 2, most] {
        let lent = memory(capacity.min(CAPACITY), SealFlags::empty(), MemfdFlags::empty()).unwrap();
        let error = Liar::new(begun(capacity), vec![lent]).put().unwrap_err();
        assert_typed(&error, &KINDS);
        told += 1;
    }
    // More or fewer than are said, and far too many.
    for many in [0, 2, 64] {
        let fds = (0..many).map(|_| sealed()).collect();
        let error = Liar::new(leased(0, 4096, &shared(CAPACITY)), fds).get().unwrap_err();
        assert_typed(&error, &KINDS);
        told += 1;
    }
    (kinds, told)
}

/// Memory that is cut and grown all the time, while somebody writes to it.
fn in_time() -> u64 {
    let tries = 60;
    let mut made = 0;
    for _ in 0..tries {
        let lent = memory(CAPACITY, SealFlags::empty(), MemfdFlags::empty()).unwrap();
        let cut = lent.try_clone().unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = rustix::fs::ftruncate(&cut, 0);
                    let _ = rustix::fs::ftruncate(&cut, CAPACITY);
                }
            });
            match Liar::new(begun(CAPACITY), vec![lent]).put() {
                Ok(()) => made += 1,
                Err(error) => assert_typed(&error, &KINDS),
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
    assert!(made > 0, "not one of {tries} came so far");
    tries
}

/// A client may send no descriptor, and can do nothing to the memory that it is lent; a daemon closes what comes.
fn to_daemon() -> u64 {
    let folder = quick_folder();
    let serve = Serve::start(folder.path(), &[]);
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    let honest = serve.connect();
    let put =
        || honest.put_state_dict(&key(), &contents().part(0), &PutOptions::default()).unwrap();
    put();
    let settled = serve.settled(&honest);
    let mut sent = 0;
    let status = frame(1, 2, r#"{"op":"status"}"#, b"");
    for many in [1, 3, 64, 65, 253] {
        for (_, fd) in lies(folder.path()) {
            let fds: Vec<_> = (0..many).map(|_| fd.as_fd()).collect();
            for is_greeted in [false, true] {
                let mut raw = if is_greeted { Raw::greet(socket) } else { Raw::connect(socket) };
                for _ in 0..4 {
                    // Half a frame each time: the daemon waits for more, and more descriptors come.
                    if !raw.send_with(&status[..7], &fds) {
                        break;
                    }
                    sent += many;
                }
                assert!(count(serve.process.id(), "fd") < settled + 600);
                assert!(raw.is_ended());
            }
        }
    }
    let mut raw = Raw::greet(socket);
    let begin = format!(
        r#"{{"op":"begin","key":"cut","proposal":{{"writer":0,"writers":"0","file_len":{CAPACITY},
            "timeout":{{"secs":1,"nanos":0}}}}}}"#
    );
    let (answer, fds) = raw.ask_for_descriptors(&begin);
    let mut lent = File::from(fds.into_iter().next().unwrap());
    assert!(lent.set_len(0).is_err() && lent.set_len(CAPACITY * 8).is_err());
    lent.write_all(b"no archive").unwrap();
    // What it holes reads as zeros.
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let _ = rustix::fs::fallocate(&lent, punch, 0, CAPACITY);
    let contribution = &answer["begun"]["contribution"];
    let commit = format!(r#"{{"op":"commit","contribution":{contribution},"digest":"{ID}"}}"#);
    assert_eq!(raw.ask(6, &commit)["failed"]["kind"], "rejected");
    // What it was lent is the daemon's again once it says that it has nothing of it any more.
    raw.send(&frame(4, 0, r#"{"op":"goodbye"}"#, b""));
    drop((raw, lent));
    put();
    let (dict, _) = honest.get_state_dict(&key(), &GetOptions::default()).unwrap();
    contents().check(&dict);
    drop(dict);
    serve.settles_at(settled, &honest);
    sent
}
