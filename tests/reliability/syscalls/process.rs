//! A process of a scenario: this program again, which waits to begin.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::child::{PLACE, SCENARIO};
use super::scenario::Scenario;

/// How long a process takes at most.
const PATIENCE: Duration = Duration::from_mins(1);

/// One that has not begun.
pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    /// The main one, and the one that waits for files.
    pub(crate) threads: [String; 2],
}

/// A process that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) said: String,
    pub(crate) complaints: String,
    /// Whether the fault has happened, if it has come to the call.
    pub(crate) is_hit: Option<bool>,
}

impl Ended {
    pub(crate) fn is_killed(&self) -> bool {
        self.status.signal() == Some(9)
    }
}

impl Process {
    pub(crate) fn start(scenario: Scenario, place: &Path, environment: &[(&str, &OsStr)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["syscalls::child::process", "--exact", "--ignored", "--nocapture"])
            .arg("--test-threads=1")
            .env(SCENARIO, scenario.name)
            .env(PLACE, place)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let threads = threads(&mut output);
        Self { child, output, threads }
    }

    /// Lets it begin, and waits until it has ended.
    pub(crate) fn finish(mut self) -> Ended {
        self.child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let status = end(&mut self.child);
        let (mut said, mut complaints) = (String::new(), String::new());
        self.output.read_to_string(&mut said).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut complaints).unwrap();
        Ended { status, said, complaints, is_hit: None }
    }
}

fn threads(output: &mut BufReader<ChildStdout>) -> [String; 2] {
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        // What runs tests says something before.
        if let Some((_, threads)) = line.split_once("threads ") {
            let (main, worker) = threads.trim().split_once(' ').unwrap();
            return [main.to_owned(), worker.to_owned()];
        }
        line.clear();
    }
    panic!("the process has not begun");
}

/// Waits for a process, as long as one takes at most.
pub(crate) fn end(process: &mut Child) -> ExitStatus {
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
