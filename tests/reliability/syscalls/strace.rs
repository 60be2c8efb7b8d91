//! A process under `strace`, which lets one of its system calls fail, or kills it there.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use super::process::{Process, ProcessOutcome, wait_for_exit};
use super::scenario::Scenario;

/// What happens at a call instead of its execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Kill,
    Error(&'static str),
    /// It returns that no byte was read or written.
    NoBytes,
    /// It reads or writes half of the bytes.
    HalfBytes,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => f.write_str("SIGKILL"),
            Self::Error(error) => f.write_str(error),
            Self::NoBytes => f.write_str("no byte"),
            Self::HalfBytes => f.write_str("half of the bytes"),
        }
    }
}

use Fault::{Error, HalfBytes, Kill, NoBytes};

const EIO: Fault = Error("EIO");
const EINTR: Fault = Error("EINTR");
const ENOSPC: Fault = Error("ENOSPC");
const EMFILE: Fault = Error("EMFILE");
const ENOMEM: Fault = Error("ENOMEM");

/// Faults by call. A call that only reads metadata is not interrupted, and needs no disk space.
const FAULTS_BY_CALL: &[(&str, &[Fault])] = &[
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
    ("pread64", &[Kill, EIO, EINTR, NoBytes]),
    ("pwrite64", &[Kill, EIO, ENOSPC, EINTR, NoBytes]),
    ("read", &[Kill, EIO, EINTR, NoBytes]),
    ("readlink", &[Kill, EIO]),
    ("readlinkat", &[Kill, EIO]),
    ("rename", &[Kill, EIO, ENOSPC, EINTR]),
    ("renameat", &[Kill, EIO, ENOSPC, EINTR]),
    ("renameat2", &[Kill, EIO, ENOSPC, EINTR]),
    ("rmdir", &[Kill, EIO, ENOSPC, EINTR]),
    ("statx", &[Kill, EIO]),
    ("sync_file_range", &[Kill, EIO, ENOSPC, EINTR]),
    ("unlink", &[Kill, EIO, ENOSPC, EINTR]),
    ("unlinkat", &[Kill, EIO, ENOSPC, EINTR]),
    ("write", &[Kill, EIO, ENOSPC, EINTR, NoBytes]),
];

/// Calls that change the disk.
///
/// A process that is killed before one of them leaves another state than one that is killed before
/// the next.
const MODIFYING_CALLS: &[&str] = &[
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

/// A thread of the process. Only these two make calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Thread {
    Main,
    Worker,
}

/// A system call of a process on a file of its store, or on shared memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    /// Sequence number among the calls of this name in its thread, from 1 on.
    index: u64,
    thread: Thread,
    /// Sequence number among the calls of this name on such files, from 1 on.
    pub(crate) store_index: u64,
}

impl Call {
    pub(crate) fn faults(&self) -> &'static [Fault] {
        FAULTS_BY_CALL.iter().find(|(name, _)| *name == self.name).unwrap().1
    }

    pub(crate) fn modifies_disk(&self) -> bool {
        MODIFYING_CALLS.contains(&self.name)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, index, thread, store_index } = self;
        write!(f, "{name} {index} of {thread:?}, {store_index} on its files")
    }
}

/// Records the calls of a process without faults.
pub(crate) fn record_calls(scenario: Scenario, place: &Path) -> Vec<Call> {
    let log = place.with_extension("strace");
    let process = Process::start(scenario, place, &[]);
    let [main, worker] = process.threads.clone();
    let tracer =
        Tracer::start(&["-f", "-y", "-s", "0", "-e", &trace_expression(), "-p", &main], &log);
    let ended = process.finish();
    drop(tracer);
    assert!(ended.status.success(), "{}: {ended:?}", scenario.name);
    let place = place.to_str().unwrap();
    let mut counts: BTreeMap<(Thread, &str), u64> = BTreeMap::new();
    let mut relevant_counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut calls = Vec::new();
    let log = std::fs::read_to_string(log).unwrap();
    for line in log.lines() {
        // `THREAD NAME(ARGUMENTS…`. The continuation of an interrupted line is not counted again.
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let Some((name, arguments)) = call.trim_start().split_once('(') else { continue };
        let Some((name, _)) = FAULTS_BY_CALL.iter().find(|(each, _)| *each == name) else {
            continue;
        };
        let is_relevant = arguments.contains(place) || arguments.contains("memfd:");
        let thread = match thread {
            thread if thread == worker => Thread::Worker,
            thread if thread == main => Thread::Main,
            _ => {
                assert!(!is_relevant, "{}: on a third thread: {line}", scenario.name);
                continue;
            }
        };
        let index = counts.entry((thread, name)).or_default();
        *index += 1;
        if is_relevant {
            let number = relevant_counts.entry(name).or_default();
            *number += 1;
            calls.push(Call { name, index: *index, thread, store_index: *number });
        }
    }
    calls
}

/// Runs a process, and injects a fault that a tracer supports.
pub(crate) fn inject(
    scenario: Scenario,
    place: &Path,
    call: &Call,
    fault: Fault,
) -> ProcessOutcome {
    let log = place.with_extension("strace");
    let process = Process::start(scenario, place, &[]);
    let [main, worker] = &process.threads;
    let thread = if call.thread == Thread::Main { main } else { worker };
    let injection = match fault {
        Kill => "signal=SIGKILL".to_owned(),
        Error(error) => format!("error={error}"),
        NoBytes => "retval=0".to_owned(),
        HalfBytes => unreachable!("a tracer does not do a part of a call"),
    };
    let trace = format!("trace={}", call.name);
    let inject = format!("inject={}:{injection}:when={}", call.name, call.index);
    let tracer = Tracer::start(&["-s", "0", "-e", &trace, "-e", &inject, "-p", thread], &log);
    let mut ended = process.finish();
    drop(tracer);
    let log = std::fs::read_to_string(log).unwrap();
    ended.fault_injected = (ended.is_killed() || log.contains("(INJECTED)")).then_some(true);
    ended
}

fn trace_expression() -> String {
    // Some architectures lack some of these calls.
    let names: Vec<_> = FAULTS_BY_CALL.iter().map(|(name, _)| format!("?{name}")).collect();
    format!("trace={}", names.join(","))
}

/// A `strace` process. It ends with the process that it traces.
struct Tracer {
    strace: Child,
    /// Kept open: if `strace` cannot print a message, it ends, and its log is incomplete.
    _messages: BufReader<ChildStderr>,
}

impl Tracer {
    fn start(arguments: &[&str], log: &Path) -> Self {
        let mut command = Command::new("strace");
        command.args(arguments).arg("-o").arg(log);
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut strace = spawned.spawn().unwrap_or_else(|error| {
            panic!("strace cannot be started ({error}): install it, such as by `apt-get install strace`")
        });
        let mut messages = BufReader::new(strace.stderr.take().unwrap());
        let mut line = String::new();
        messages.read_line(&mut line).unwrap();
        assert!(
            line.contains("attached"),
            "{line}strace must be allowed to trace other processes: be root, or set \
             kernel.yama.ptrace_scope=0"
        );
        Self { strace, _messages: messages }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        wait_for_exit(&mut self.strace);
    }
}
