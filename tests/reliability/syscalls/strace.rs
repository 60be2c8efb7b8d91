//! A process under `strace`, which lets a system call of it fail, or kills it there.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::child::{PLACE, SCENARIO};
use super::scenario::Scenario;

/// What is done to a call in place of doing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Kill,
    Error(&'static str),
    /// It says that it has read or written no byte.
    Nothing,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => f.write_str("SIGKILL"),
            Self::Error(error) => f.write_str(error),
            Self::Nothing => f.write_str("no byte"),
        }
    }
}

use Fault::{Error, Kill, Nothing};

const EIO: Fault = Error("EIO");
const EINTR: Fault = Error("EINTR");
const ENOSPC: Fault = Error("ENOSPC");
const EMFILE: Fault = Error("EMFILE");
const ENOMEM: Fault = Error("ENOMEM");

/// What may happen to each call. One that only looks is not interrupted, and needs no room.
const FAULTS: &[(&str, &[Fault])] = &[
    ("close", &[Kill, EIO, ENOSPC, EINTR]),
    ("fallocate", &[Kill, EIO, ENOSPC, EINTR]),
    ("fdatasync", &[Kill, EIO, ENOSPC, EINTR]),
    ("flock", &[Kill, EIO, EINTR]),
    ("fstat", &[Kill, EIO]),
    ("fsync", &[Kill, EIO, ENOSPC, EINTR]),
    ("ftruncate", &[Kill, EIO, ENOSPC, EINTR]),
    ("getdents64", &[Kill, EIO, EINTR]),
    ("link", &[Kill, EIO, ENOSPC, EINTR]),
    ("linkat", &[Kill, EIO, ENOSPC, EINTR]),
    ("lseek", &[Kill, EIO]),
    ("memfd_create", &[Kill, EMFILE, ENOMEM]),
    ("mkdir", &[Kill, EIO, ENOSPC, EINTR]),
    ("mkdirat", &[Kill, EIO, ENOSPC, EINTR]),
    ("mmap", &[Kill, ENOMEM]),
    ("newfstatat", &[Kill, EIO]),
    ("open", &[Kill, EIO, ENOSPC, EINTR, EMFILE]),
    ("openat", &[Kill, EIO, ENOSPC, EINTR, EMFILE]),
    ("pread64", &[Kill, EIO, EINTR, Nothing]),
    ("pwrite64", &[Kill, EIO, ENOSPC, EINTR, Nothing]),
    ("read", &[Kill, EIO, EINTR, Nothing]),
    ("readlink", &[Kill, EIO]),
    ("readlinkat", &[Kill, EIO]),
    ("rename", &[Kill, EIO, ENOSPC, EINTR]),
    ("renameat", &[Kill, EIO, ENOSPC, EINTR]),
    ("renameat2", &[Kill, EIO, ENOSPC, EINTR]),
    ("rmdir", &[Kill, EIO, ENOSPC, EINTR]),
    ("statx", &[Kill, EIO]),
    ("unlink", &[Kill, EIO, ENOSPC, EINTR]),
    ("unlinkat", &[Kill, EIO, ENOSPC, EINTR]),
    ("write", &[Kill, EIO, ENOSPC, EINTR, Nothing]),
];

/// Those that change what is on the disk: a process that is killed before one leaves something else behind
/// than one that is killed before the next.
const CHANGES: &[&str] = &[
    "fallocate",
    "ftruncate",
    "link",
    "linkat",
    "mkdir",
    "mkdirat",
    "openat",
    "pwrite64",
    "rename",
    "renameat",
    "renameat2",
    "rmdir",
    "unlink",
    "unlinkat",
];

/// How long a process takes at most.
const PATIENCE: Duration = Duration::from_mins(1);

/// A thread of the process: there are two that do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Thread {
    Main,
    Worker,
}

/// A system call of a process, on a file of its store or memory that it shares.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    /// The how-manieth of this name it is, of its thread.
    index: u64,
    thread: Thread,
}

impl Call {
    pub(crate) fn faults(&self) -> &'static [Fault] {
        FAULTS.iter().find(|(name, _)| *name == self.name).unwrap().1
    }

    pub(crate) fn changes(&self) -> bool {
        CHANGES.contains(&self.name)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {:?}", self.name, self.index, self.thread)
    }
}

/// A process that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) said: String,
    pub(crate) complaints: String,
    /// Whether the fault has happened.
    pub(crate) is_hit: bool,
}

impl Ended {
    pub(crate) fn is_killed(&self) -> bool {
        self.status.signal() == Some(9)
    }
}

/// The calls of a process that nothing happens to.
pub(crate) fn calls(scenario: Scenario, place: &Path) -> Vec<Call> {
    let log = place.with_extension("strace");
    let (ended, main, worker) = run(scenario, place, |command, main, _| {
        command.args(["-f", "-y", "-s", "0", "-e", &traced(), "-p", &main, "-o"]).arg(&log);
    });
    assert!(ended.status.success(), "{}: {ended:?}", scenario.name);
    let place = place.to_str().unwrap();
    let mut counts: BTreeMap<(Thread, &str), u64> = BTreeMap::new();
    let mut calls = Vec::new();
    let log = std::fs::read_to_string(log).unwrap();
    for line in log.lines() {
        // `THREAD NAME(ARGUMENTS…`; what goes on after another's line does not count again.
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let Some((name, arguments)) = call.trim_start().split_once('(') else { continue };
        let Some((name, _)) = FAULTS.iter().find(|(each, _)| *each == name) else { continue };
        let is_ours = arguments.contains(place) || arguments.contains("memfd:");
        let thread = match thread {
            thread if thread == worker => Thread::Worker,
            thread if thread == main => Thread::Main,
            _ => {
                assert!(!is_ours, "{}: on a third thread: {line}", scenario.name);
                continue;
            }
        };
        let index = counts.entry((thread, name)).or_default();
        *index += 1;
        if is_ours {
            calls.push(Call { name, index: *index, thread });
        }
    }
    calls
}

/// Runs a process to which something happens.
pub(crate) fn inject(scenario: Scenario, place: &Path, call: &Call, fault: Fault) -> Ended {
    let log = place.with_extension("strace");
    let (mut ended, ..) = run(scenario, place, |command, main, worker| {
        let thread = if call.thread == Thread::Main { main } else { worker };
        let what = match fault {
            Kill => "signal=SIGKILL".to_owned(),
            Error(error) => format!("error={error}"),
            Nothing => "retval=0".to_owned(),
        };
        let trace = format!("trace={}", call.name);
        let inject = format!("inject={}:{what}:when={}", call.name, call.index);
        command.args(["-s", "0", "-e", &trace, "-e", &inject, "-p", &thread, "-o"]).arg(&log);
    });
    let log = std::fs::read_to_string(log).unwrap();
    ended.is_hit = ended.is_killed() || log.contains("(INJECTED)");
    ended
}

fn traced() -> String {
    // Some machines do not have all of them.
    let names: Vec<_> = FAULTS.iter().map(|(name, _)| format!("?{name}")).collect();
    format!("trace={}", names.join(","))
}

/// Runs a process, traced from where its scenario begins; and its threads.
fn run(
    scenario: Scenario,
    place: &Path,
    say: impl FnOnce(&mut Command, String, String),
) -> (Ended, String, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["syscalls::child::process", "--exact", "--ignored", "--nocapture"])
        .arg("--test-threads=1")
        .env(SCENARIO, scenario.name)
        .env(PLACE, place)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let (main, worker) = threads(&mut output);
    let mut command = Command::new("strace");
    say(&mut command, main.clone(), worker.clone());
    let strace = Tracer::start(command);
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let status = end(&mut child);
    let (mut said, mut complaints) = (String::new(), String::new());
    output.read_to_string(&mut said).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut complaints).unwrap();
    drop(strace);
    (Ended { status, said, complaints, is_hit: false }, main, worker)
}

fn threads(output: &mut BufReader<ChildStdout>) -> (String, String) {
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        // What runs tests says something before.
        if let Some((_, threads)) = line.split_once("threads ") {
            let (main, worker) = threads.trim().split_once(' ').unwrap();
            return (main.to_owned(), worker.to_owned());
        }
        line.clear();
    }
    panic!("the process has not begun");
}

/// `strace`, which ends with what it traces.
struct Tracer(Child);

impl Tracer {
    fn start(mut command: Command) -> Self {
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut strace = spawned.spawn().unwrap_or_else(|error| {
            panic!("strace cannot be started ({error}): install it, such as by `apt-get install strace`")
        });
        let mut line = String::new();
        BufReader::new(strace.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(
            line.contains("attached"),
            "{line}strace must be allowed to trace other processes: be root, or set \
             kernel.yama.ptrace_scope=0"
        );
        Self(strace)
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        end(&mut self.0);
    }
}

fn end(process: &mut Child) -> ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > PATIENCE {
            let _ = process.kill();
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}
