//! A process that runs a scenario. It waits for a line on stdin before it begins.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::scenario::Scenario;
use crate::syscalls::test_process::{SCENARIO, WORK_DIR};

/// Time limit of a process.
const TIMEOUT: Duration = Duration::from_mins(1);

/// A process that has not begun.
pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Ids of the main thread, and of the thread for blocking file operations.
    pub(crate) threads: [String; 2],
}

/// Outcome of a process that has ended.
#[derive(Debug)]
pub(crate) struct ProcessOutcome {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// Whether the fault was injected. `None` if the process did not reach the call.
    pub(crate) fault_injected: Option<bool>,
}

impl ProcessOutcome {
    pub(crate) fn is_killed(&self) -> bool {
        self.status.signal() == Some(9)
    }
}

impl Process {
    pub(crate) fn start(scenario: Scenario, place: &Path, environment: &[(&str, &OsStr)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["syscalls::test_process::process", "--exact", "--ignored", "--nocapture"])
            .arg("--test-threads=1")
            .env(SCENARIO, scenario.name)
            .env(WORK_DIR, place)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let threads = read_threads(&mut output);
        Self { child, output, threads }
    }

    /// Lets the process begin, and waits for its end.
    pub(crate) fn finish(mut self) -> ProcessOutcome {
        self.child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let status = wait_for_exit(&mut self.child);
        let (mut said, mut complaints) = (String::new(), String::new());
        self.output.read_to_string(&mut said).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut complaints).unwrap();
        ProcessOutcome { status, stdout: said, stderr: complaints, fault_injected: None }
    }
}

fn read_threads(output: &mut BufReader<ChildStdout>) -> [String; 2] {
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        // The test harness prints lines before.
        if let Some((_, threads)) = line.split_once("threads ") {
            let (main, worker) = threads.trim().split_once(' ').unwrap();
            return [main.to_owned(), worker.to_owned()];
        }
        line.clear();
    }
    panic!("the process has not begun");
}

/// Waits for the end of a process. Kills it after the time limit.
pub(crate) fn wait_for_exit(process: &mut Child) -> ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > TIMEOUT {
            let _ = process.kill();
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}
