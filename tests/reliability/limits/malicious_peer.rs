//! Malicious peers that send descriptors which are no shared memory, or memory that changes.
//!
//! No peer may end because of them.

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
use tssd_tests::campaign::Campaign;
use tssd_tests::command::{DaemonProcess, memory_tempdir};
use tssd_tests::raw_connection::{RawConnection, frame};

use crate::contents::Contents;
use crate::limits::client_process::proc_entries;
use crate::limits::fixtures::assert_error_kind;

/// Size of the memory that the peer announces.
const CAPACITY: u64 = 512 << 10;

const ID: &str = "00000000000000000000000000000001";

const ALL_SEALS: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Kinds of errors that an invalid descriptor may lead to.
const EXPECTED_KINDS: [ErrorKind; 4] =
    [ErrorKind::Io, ErrorKind::Corrupt, ErrorKind::Unreachable, ErrorKind::Invalid];

fn contents() -> Contents<'static> {
    // An archive of this size has a segment of its own.
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

/// Duplicates an open descriptor of this process whose link in `/proc` contains `kind`.
fn own_descriptor(kind: &str) -> Option<OwnedFd> {
    let process =
        rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).ok()?;
    let is_it = |entry: &fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|name| name.to_string_lossy().contains(kind))
    };
    let entry = fs::read_dir("/proc/self/fd").unwrap().flatten().find(is_it)?;
    let number = entry.file_name().into_string().ok()?.parse().ok()?;
    rustix::process::pidfd_getfd(process, number, PidfdGetfdFlags::empty()).ok()
}

/// Returns descriptors of every invalid kind that this system supports.
fn invalid_descriptors(folder: &Path) -> Vec<(&'static str, OwnedFd)> {
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
        ("memory that is shorter", read_only(memory(CAPACITY - 1, ALL_SEALS, none))),
        ("memory that is longer", read_only(memory(CAPACITY + 1, ALL_SEALS, none))),
        ("memory of no bytes", read_only(memory(0, ALL_SEALS, none))),
        ("sealed memory to write", memory(CAPACITY, ALL_SEALS, none)),
        ("sealed memory of zeros", read_only(memory(CAPACITY, ALL_SEALS, none))),
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
        ("a counter of events", own_descriptor("[eventfd]")),
        ("a set of events", own_descriptor("[eventpoll]")),
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

/// A daemon that answers `hello`, and every later request with the same reply and descriptors.
struct MaliciousDaemon {
    _folder: TempDir,
    url: String,
    thread: Option<JoinHandle<()>>,
}

impl MaliciousDaemon {
    fn new(head: String, fds: Vec<OwnedFd>) -> Self {
        let folder = memory_tempdir();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let url = format!("unix:{}", socket.display());
        let thread = thread::spawn(move || {
            let mut raw = RawConnection(listener.accept().unwrap().0);
            let welcome =
                r#"{"welcome":{"protocol":{"major":2,"minor":0},"pid":1,"inline_max_bytes":0}}"#;
            let (number, _) = raw.receive().unwrap();
            raw.send(&frame(3, number, welcome, b""));
            let mut fds = Some(fds);
            while let Some((number, request)) = raw.receive() {
                let is_put = request["op"] == "commit";
                let progress = r#"{"progress":{"visible":true,"missing":""}}"#;
                let reply = if is_put { progress } else { head.as_str() };
                let mut bytes = frame(3, number, reply, b"");
                match fds.take() {
                    Some(fds) if !fds.is_empty() => {
                        bytes[5] = u8::try_from(fds.len()).unwrap();
                        raw.send_with_descriptors(&bytes, &fds);
                    }
                    _ if request["op"].is_string() => raw.send(&bytes),
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

impl Drop for MaliciousDaemon {
    fn drop(&mut self) {
        // If no client has connected, the thread still accepts.
        let _ = UnixStream::connect(self.url.strip_prefix("unix:").unwrap());
        let ended = self.thread.take().unwrap().join();
        drop(ended);
    }
}

fn leased_reply(offset: u64, len: u64, segments: &str) -> String {
    format!(
        r#"{{"leased":{{"lease":"{ID}","id":"{ID}","archives":{{}},"segments":{segments},
            "manifest":{{"segment":3,"offset":{offset},"len":{len}}}}}}}"#
    )
}

fn segments_json(capacity: u64) -> String {
    format!(r#"[{{"segment":3,"capacity":{capacity}}}]"#)
}

fn begun_reply(capacity: u64) -> String {
    format!(
        r#"{{"begun":{{"contribution":1,"id":"{ID}","epoch":0,"number":1,
            "write_target":{{"segment":{{"segment":3,"capacity":{capacity}}}}}}}}}"#
    )
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn invalid_shared_memory_harms_no_process() {
    let campaign = Campaign::start("limits: lies about memory");
    let pid = std::process::id();
    let (mut rounds, mut kinds, mut cases, mut resized, mut sent) = (0, 0, 0, 0, 0);
    while campaign.should_continue(rounds, 1) {
        let before = proc_entries(pid, "fd");
        (kinds, cases) = attack_clients(cases);
        resized += resize_during_puts();
        let is_settled = (0..200).any(|_| {
            thread::sleep(Duration::from_millis(10));
            proc_entries(pid, "fd") <= before
        });
        assert!(is_settled, "{} descriptors, {before} before", proc_entries(pid, "fd"));
        sent += attack_daemon();
        rounds += 1;
    }
    assert!(kinds >= 24, "{kinds} kinds");
    campaign.finish(json!({
        "kinds of descriptors": kinds, "lies to clients": cases, "lies in time": resized,
        "descriptors sent to a daemon": sent, "killed": 0, "left open": 0, "rounds": rounds,
    }));
}

/// Sends clients each invalid descriptor in place of memory, and invalid lengths and offsets.
fn attack_clients(mut cases: u64) -> (u64, u64) {
    let folder = memory_tempdir();
    let kinds = invalid_descriptors(folder.path()).len() as u64;
    for number in 0..usize::try_from(kinds).unwrap() {
        // Each descriptor is moved to the daemon.
        let invalid = || invalid_descriptors(folder.path()).swap_remove(number);
        let (name, fd) = invalid();
        let error = MaliciousDaemon::new(leased_reply(0, 4096, &segments_json(CAPACITY)), vec![fd])
            .get()
            .expect_err(name);
        assert_error_kind(&error, &EXPECTED_KINDS);
        let (name, fd) = invalid();
        let error = MaliciousDaemon::new(begun_reply(CAPACITY), vec![fd]).put().expect_err(name);
        assert_error_kind(&error, &EXPECTED_KINDS);
        cases += 2;
    }
    let sealed = || read_only(memory(CAPACITY, ALL_SEALS, MemfdFlags::empty())).unwrap();
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
        let error = MaliciousDaemon::new(
            leased_reply(offset, len, &segments_json(capacity)),
            vec![sealed()],
        )
        .get()
        .unwrap_err();
        assert_error_kind(&error, &EXPECTED_KINDS);
        cases += 1;
    }
    for capacity in [0, 1, CAPACITY / 2, most] {
        let segment =
            memory(capacity.min(CAPACITY), SealFlags::empty(), MemfdFlags::empty()).unwrap();
        let error = MaliciousDaemon::new(begun_reply(capacity), vec![segment]).put().unwrap_err();
        assert_error_kind(&error, &EXPECTED_KINDS);
        cases += 1;
    }
    // Fewer or more descriptors than announced, and the most that a message may have.
    for fd_count in [0, 2, 64] {
        let fds = (0..fd_count).map(|_| sealed()).collect();
        let error = MaliciousDaemon::new(leased_reply(0, 4096, &segments_json(CAPACITY)), fds)
            .get()
            .unwrap_err();
        assert_error_kind(&error, &EXPECTED_KINDS);
        cases += 1;
    }
    (kinds, cases)
}

/// Truncates and extends memory all the time while a client writes to it.
fn resize_during_puts() -> u64 {
    let attempts = 60;
    let mut accepted = 0;
    for _ in 0..attempts {
        let segment = memory(CAPACITY, SealFlags::empty(), MemfdFlags::empty()).unwrap();
        let cut = segment.try_clone().unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = rustix::fs::ftruncate(&cut, 0);
                    let _ = rustix::fs::ftruncate(&cut, CAPACITY);
                }
            });
            match MaliciousDaemon::new(begun_reply(CAPACITY), vec![segment]).put() {
                Ok(()) => accepted += 1,
                Err(error) => assert_error_kind(&error, &EXPECTED_KINDS),
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
    assert!(accepted > 0, "none of {attempts} puts succeeded");
    attempts
}

/// Sends descriptors to a daemon, which must close them, and tries to change memory that it shares.
fn attack_daemon() -> u64 {
    let folder = memory_tempdir();
    let serve = DaemonProcess::start(folder.path(), &[]);
    let socket = Path::new(serve.url.strip_prefix("unix:").unwrap());
    let client = serve.connect();
    let put =
        || client.put_state_dict(&key(), &contents().part(0), &PutOptions::default()).unwrap();
    put();
    let idle_descriptors = serve.idle_descriptors(&client);
    let mut sent = 0;
    let status = frame(1, 2, r#"{"op":"status"}"#, b"");
    for fd_count in [1, 3, 64, 65, 253] {
        for (_, fd) in invalid_descriptors(folder.path()) {
            let fds: Vec<_> = (0..fd_count).map(|_| fd.as_fd()).collect();
            for is_greeted in [false, true] {
                let mut raw = if is_greeted {
                    RawConnection::connect_with_hello(socket)
                } else {
                    RawConnection::connect(socket)
                };
                for _ in 0..4 {
                    // Half a frame each time: the daemon waits for the rest while more descriptors
                    // arrive.
                    if !raw.send_with_descriptors(&status[..7], &fds) {
                        break;
                    }
                    sent += fd_count;
                }
                assert!(proc_entries(serve.process.id(), "fd") < idle_descriptors + 600);
                assert!(raw.is_closed());
            }
        }
    }
    let mut raw = RawConnection::connect_with_hello(socket);
    let begin = format!(
        r#"{{"op":"begin","key":"cut","proposal":{{"writer":0,"writers":"0","file_len":{CAPACITY},
            "timeout":{{"secs":1,"nanos":0}}}}}}"#
    );
    let (answer, fds) = raw.request_with_descriptors(&begin);
    let mut segment = File::from(fds.into_iter().next().unwrap());
    assert!(segment.set_len(0).is_err() && segment.set_len(CAPACITY * 8).is_err());
    segment.write_all(b"no archive").unwrap();
    // Punched holes read as zeros.
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let _ = rustix::fs::fallocate(&segment, punch, 0, CAPACITY);
    let contribution = &answer["begun"]["contribution"];
    let commit = format!(r#"{{"op":"commit","contribution":{contribution},"digest":"{ID}"}}"#);
    assert_eq!(raw.request(6, &commit)["failed"]["kind"], "rejected");
    // The daemon reuses the memory after the client says that it no longer has it mapped.
    raw.send(&frame(4, 0, r#"{"op":"goodbye"}"#, b""));
    drop((raw, segment));
    put();
    let (dict, _) = client.get_state_dict(&key(), &GetOptions::default()).unwrap();
    contents().assert_matches(&dict);
    drop(dict);
    serve.assert_idle_descriptors(idle_descriptors, &client);
    sent
}
