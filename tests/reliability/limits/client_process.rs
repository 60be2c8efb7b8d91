//! This program as a client process with its own limits, and entries of `/proc`.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tssd_tests::command::kill_and_wait;

/// Environment variables: the role of a process, and the URL of its store.
pub(super) const ROLE: &str = "TSSD_LIMITS_ROLE";
pub(super) const URL: &str = "TSSD_LIMITS_URL";

/// A client process. Killed on drop.
pub(super) struct LimitedProcess(Child);

impl LimitedProcess {
    /// Starts the process through another program, which executes it.
    pub(super) fn start(prefix: &[&str], role: &str, url: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let command_line = [prefix, &[program.to_str().unwrap()]].concat();
        let child = Command::new(command_line[0])
            .args(&command_line[1..])
            .args(["limits::client_process::process", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .env(URL, url)
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    /// Waits for the end of the process. Returns the numbers that it has printed.
    pub(super) fn counts(mut self) -> Vec<u64> {
        let mut output = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(self.0.wait().unwrap().success(), "{output}");
        let line = output.lines().find_map(|line| line.split_once("COUNTED "));
        let numbers = line.unwrap_or_else(|| panic!("{output}")).1.split_whitespace();
        numbers.map(|word| word.parse().unwrap()).collect()
    }
}

impl Drop for LimitedProcess {
    fn drop(&mut self) {
        kill_and_wait(&mut self.0);
    }
}

#[test]
#[ignore = "a process of `limits`"]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let url = std::env::var(URL).unwrap();
    let counts = match role.as_str() {
        "hostile" => return crate::limits::hostile_clients::run_attacker(&url),
        "few descriptors" => super::descriptors::read_until_descriptors_run_out(&url),
        "little memory" => crate::limits::cgroup::put_until_memory_runs_out(&url),
        other => panic!("{other}"),
    };
    let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
    println!("COUNTED {}", counts.join(" "));
}

/// Returns the number of entries in a directory of `/proc/PID`, such as `fd` or `task`.
pub(super) fn proc_entries(pid: u32, folder: &str) -> u64 {
    fs::read_dir(Path::new("/proc").join(pid.to_string()).join(folder)).unwrap().count() as u64
}
