//! This program again, as a client with limits of its own; and what the system says of processes.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tssd_tests::command::end;

/// Names for what a process does, and with which store.
pub(super) const ROLE: &str = "TSSD_LIMITS_ROLE";
pub(super) const URL: &str = "TSSD_LIMITS_URL";

/// A process; it is killed with this.
pub(super) struct Actor(Child);

impl Actor {
    /// Starts it by another program, which becomes it.
    pub(super) fn start(by: &[&str], role: &str, url: &str) -> Self {
        let own = std::env::current_exe().unwrap();
        let words = [by, &[own.to_str().unwrap()]].concat();
        let child = Command::new(words[0])
            .args(&words[1..])
            .args(["limits::processes::process", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .env(URL, url)
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    /// The words that it says at its end.
    pub(super) fn words(mut self) -> Vec<u64> {
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.0.wait().unwrap().success(), "{said}");
        let line = said.lines().find_map(|line| line.split_once("COUNTED "));
        let words = line.unwrap_or_else(|| panic!("{said}")).1.split_whitespace();
        words.map(|word| word.parse().unwrap()).collect()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        end(&mut self.0);
    }
}

#[test]
#[ignore = "a process of `limits`"]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let url = std::env::var(URL).unwrap();
    let words = match role.as_str() {
        "hostile" => return super::crowd::attack(&url),
        "few descriptors" => super::descriptors::read_until_there_are_none(&url),
        "little memory" => super::group::put_until_there_is_none(&url),
        other => panic!("{other}"),
    };
    let words: Vec<String> = words.iter().map(u64::to_string).collect();
    println!("COUNTED {}", words.join(" "));
}

/// How many entries a process has in a folder of /proc: descriptors, threads.
pub(super) fn count(pid: u32, folder: &str) -> u64 {
    fs::read_dir(Path::new("/proc").join(pid.to_string()).join(folder)).unwrap().count() as u64
}
